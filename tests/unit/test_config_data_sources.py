"""Parameters of data sources and extractors, and what they come to."""

from typing import Any

import pytest

from epp.config.decode import Problems, decode
from epp.config.registry import BUILT_INS, NOT_YET
from epp.config.spec import (
    BuildContext,
    DcgmExtractorSpec,
    DcgmSourceSpec,
    MetricsExtractorSpec,
    MetricsSourceSpec,
    ModelsExtractorSpec,
    ModelsSourceSpec,
)
from epp.pool.engines import ENGINES, VLLM, CacheInfo, CustomMetric, EngineSpec, MetricSpec
from epp.pool.store import empty_view

SPECS = {spec.type: spec for spec in BUILT_INS}


def built(type_name: str, parameters: dict[str, Any]) -> object:
    spec, problems = SPECS[type_name], Problems()
    params = decode(parameters, spec.params, "$", problems)
    assert not problems.found, problems.found
    return spec.build(BuildContext(type_name, empty_view(1), b""), params)


def problem(type_name: str, parameters: dict[str, Any]) -> str:
    problems = Problems()
    assert decode(parameters, SPECS[type_name].params, "$", problems) is None
    return str(problems.found[0])


def test_sources_have_the_fields_defaults() -> None:
    assert built("metrics-data-source", {}) == MetricsSourceSpec("http", "/metrics", True, None)
    assert built("models-data-source", {}) == ModelsSourceSpec("http", "/v1/models", True, None)
    assert built("models-data-extractor", {}) == ModelsExtractorSpec()
    assert built("dcgm-data-source", {}) == DcgmSourceSpec("http", "/metrics", True, None, 9400)
    assert built("dcgm-extractor", {}) == DcgmExtractorSpec()
    assert built("core-metrics-extractor", {}) == MetricsExtractorSpec(
        "llm-d.ai/engine-type", "vllm", ENGINES
    )


def test_every_parameter_of_a_source_counts() -> None:
    given: dict[str, Any] = {
        "scheme": "https",
        "path": "/m",
        "insecureSkipVerify": False,
        "interval": "1m",
        "caCertPath": "/ca",
        "clientCertPath": "/cert",
        "clientKeyPath": "/key",
    }
    files = {"ca_cert_path": "/ca", "client_cert_path": "/cert", "client_key_path": "/key"}
    expected = MetricsSourceSpec("https", "/m", False, 60.0, 9400, **files)
    assert built("metrics-data-source", given | {"port": 9400}) == expected
    assert built("models-data-source", given) == ModelsSourceSpec("https", "/m", False, 60.0, **files)
    assert built("metrics-data-source", {"port": 0, "caCertPath": ""}) == MetricsSourceSpec()
    gpus = DcgmSourceSpec("https", "/m", False, 60.0, 9500, **files, use_node_address=True)
    assert built("dcgm-data-source", given | {"port": 9500, "useNodeAddress": True}) == gpus
    assert built("dcgm-data-source", {"port": 0}) == DcgmSourceSpec(port=None)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"clientCertPath": "/cert"}, "clientCertPath and clientKeyPath go together"),
        ({"clientKeyPath": "/key"}, "clientCertPath and clientKeyPath go together"),
        ({"port": 65536}, "$.port: expected a whole number <= 65535, not 65536"),
        ({"port": -1}, "$.port: expected a whole number >= 0, not -1"),
        ({"path": "metrics"}, "$.path: "),
        ({"interval": "0s"}, "interval must be above 0"),
        ({"useNodeAddress": True}, "$.useNodeAddress: unknown field"),
    ],
)
def test_what_a_source_refuses(parameters: dict[str, Any], says: str) -> None:
    assert says in problem("metrics-data-source", parameters)


def test_a_source_of_models_has_no_port() -> None:
    assert "$.port: unknown field" in problem("models-data-source", {"port": 1})


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"scheme": "grpc"}, "$.scheme: "),
        ({"port": 65536}, "$.port: expected a whole number <= 65535, not 65536"),
        ({"bogus": 1}, "$.bogus: unknown field"),
        ({"useNodeAddress": True, "port": 0}, "useNodeAddress needs a port above 0; the exporter's is 9400"),
        ({"interval": "0s"}, "interval must be above 0"),
        ({"clientCertPath": "/cert"}, "clientCertPath and clientKeyPath go together"),
    ],
)
def test_what_a_source_of_gpus_refuses(parameters: dict[str, Any], says: str) -> None:
    assert says in problem("dcgm-data-source", parameters)


def test_the_extractor_of_gpus_has_no_parameters() -> None:
    assert "$.port: unknown field" in problem("dcgm-extractor", {"port": 1})


def test_a_configured_engine_is_added() -> None:
    config = {
        "name": "mine",
        "queuedRequestsSpec": "q{status=waiting}",
        "runningRequestsSpec": "r",
        "kvUsageSpec": "kv",
        "loraSpec": "lora",
        "cacheInfoSpec": "info",
        "cacheBlockSizeLabelName": "size",
        "cacheNumBlocksLabelName": "",
        "cacheBlockSizeSpec": "bs",
        "cacheNumBlocksSpec": "nb",
        "customMetrics": [
            {"attributeKey": "depth", "metricSpec": 'd{tier="gold"}'},
            {"attributeKey": "rare", "metricSpec": "rare", "optional": True},
        ],
    }
    spec = built(
        "core-metrics-extractor",
        {"engineLabelKey": "my/engine", "defaultEngine": "mine", "engineConfigs": [config]},
    )
    assert isinstance(spec, MetricsExtractorSpec)
    assert (spec.engine_label_key, spec.default_engine) == ("my/engine", "mine")
    assert spec.engines[:-1] == ENGINES
    assert spec.engines[-1] == EngineSpec(
        "mine",
        waiting=(MetricSpec("q", (("status", "waiting"),)),),
        running=(MetricSpec("r"),),
        kv_usage=(MetricSpec("kv"),),
        lora=MetricSpec("lora"),
        cache_info=CacheInfo(MetricSpec("info"), "size", "num_gpu_blocks"),
        block_size=(MetricSpec("bs"),),
        num_blocks=(MetricSpec("nb"),),
        custom=(
            CustomMetric("depth", MetricSpec("d", (("tier", "gold"),))),
            CustomMetric("rare", MetricSpec("rare"), optional=True),
        ),
    )


def test_a_configured_engine_replaces_that_of_the_table() -> None:
    config = {"name": "vllm", "queuedRequestsSpec": "q"}
    spec = built("core-metrics-extractor", {"engineConfigs": [config]})
    assert isinstance(spec, MetricsExtractorSpec)
    assert [engine.name for engine in spec.engines] == [engine.name for engine in ENGINES]
    assert spec.engines[0] == EngineSpec("vllm", waiting=(MetricSpec("q"),))
    assert ENGINES[0] is VLLM


@pytest.mark.parametrize("engine", [engine.name for engine in ENGINES])
def test_every_engine_may_be_the_default(engine: str) -> None:
    spec = built("core-metrics-extractor", {"defaultEngine": engine})
    assert isinstance(spec, MetricsExtractorSpec)
    assert spec.default_engine == engine


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "$.engineConfigs[0].name: missing"),
        ({"name": ""}, "$.engineConfigs[0].name: "),
        ({"name": "default"}, "$.engineConfigs[0]: name: default is reserved"),
        ({"name": "e", "kvUsageSpec": "a{b"}, "$.engineConfigs[0]: kvUsageSpec: 'a{b' is not a metric"),
        ({"name": "e", "queuedRequestsSpec": "a{b!=c}"}, "queuedRequestsSpec: 'b!=c' is not label=value"),
        ({"name": "e", "queueSpec": "a"}, "$.engineConfigs[0].queueSpec: unknown field"),
        ({"name": "e", "loraLoadedSpec": "a"}, "$.engineConfigs[0].loraLoadedSpec: not supported yet"),
        (
            {"name": "e", "customMetrics": [{"attributeKey": "", "metricSpec": "a"}]},
            "$.engineConfigs[0].customMetrics[0].attributeKey: ",
        ),
        (
            {"name": "e", "customMetrics": [{"attributeKey": "k", "metricSpec": "a b"}]},
            "$.engineConfigs[0].customMetrics[0]: metricSpec: 'a b' is not a metric",
        ),
        (
            {"name": "e", "customMetrics": [{"attributeKey": "k", "metricSpec": "a"}] * 2},
            "$.engineConfigs[0]: customMetrics: attributeKey k is there twice",
        ),
    ],
)
def test_what_an_engine_refuses(config: dict[str, Any], says: str) -> None:
    assert says in problem("core-metrics-extractor", {"engineConfigs": [config]})


def test_engines_are_known_by_one_name_each() -> None:
    twice = {"engineConfigs": [{"name": "e"}, {"name": "e"}]}
    assert "engineConfigs: engine e is there twice" in problem("core-metrics-extractor", twice)
    unknown = problem("core-metrics-extractor", {"defaultEngine": "e", "engineConfigs": [{"name": "f"}]})
    assert "defaultEngine e is not in engineConfigs; known: f, vllm, sglang, trtllm-serve" in unknown


def test_a_source_and_its_extractor_have_the_same_content() -> None:
    contents = {name: spec.content for name, spec in SPECS.items() if spec.content}
    assert contents == {
        "metrics-data-source": "metrics page",
        "core-metrics-extractor": "metrics page",
        "models-data-source": "list of models",
        "models-data-extractor": "list of models",
        "dcgm-data-source": "page of GPUs",
        "dcgm-extractor": "page of GPUs",
    }
    assert {"k8s-notification-source", "topology-extractor"} <= {known.type for known in NOT_YET}
