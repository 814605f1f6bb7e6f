"""Parameters in a configuration file: what is accepted, and what the error says of the rest."""

import json
from typing import Any

import pytest

from epp.config.load import build, load_config
from epp.errors import ConfigError
from epp.pool.store import empty_view
from epp.scheduling.profiles import Profile

HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}


def document(*plugins: dict[str, Any], profiles: tuple[str, ...] = ()) -> str:
    listed = {
        "schedulingProfiles": [
            {"name": name, "plugins": [{"pluginRef": "max-score-picker"}]} for name in profiles
        ]
    }
    picker = [{"type": "max-score-picker"}] if profiles else []
    return json.dumps({**HEAD, "plugins": [*plugins, *picker], **(listed if profiles else {})})


def problems(text: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        build(load_config(text, "test"), empty_view(4), b"secret")
    return [(problem.path, problem.message) for problem in caught.value.problems]


THRESHOLD = {"type": "threshold", "threshold": {"operator": "LessThan", "value": 1}}
LINEAR = {"type": "linear_lower_is_better"}


def requirement(**fields: Any) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "a", **fields}]}


def normalized(**fields: Any) -> dict[str, Any]:
    return {"attributeKey": "a", "algorithm": {**LINEAR, "normalization": fields}}


@pytest.mark.parametrize(
    ("type_name", "parameters", "path", "message"),
    [
        ("label-selector-filter", requirement(operator="Like"), ".matchExpressions[0].operator", "In or"),
        ("label-selector-filter", requirement(operator="in"), ".matchExpressions[0].operator", "In or"),
        ("label-selector-filter", requirement(), ".matchExpressions[0].operator", "missing"),
        (
            "label-selector-filter",
            requirement(operator="In"),
            ".matchExpressions[0]",
            "needs at least one entry",
        ),
        (
            "label-selector-filter",
            requirement(operator="Exists", values=["x"]),
            ".matchExpressions[0]",
            "takes no values",
        ),
        (
            "label-selector-filter",
            requirement(operator="In", values=["no spaces"]),
            ".matchExpressions[0]",
            "'no spaces' is no label value",
        ),
        ("label-selector-filter", {"matchLabels": {"a/b/c": "x"}}, "", "'a/b/c' is no label key"),
        ("label-selector-filter", {"matchLabels": {"": "x"}}, "", "'' is no label key"),
        ("label-selector-filter", {"matchLabels": {"a" * 64: "x"}}, "", "is no label key"),
        ("label-selector-filter", {"matchLabels": {"a": "-"}}, "", "'-' is no label value"),
        ("label-selector-filter", {"matchLabel": {"a": "x"}}, ".matchLabel", "did you mean matchLabels"),
        ("by-label", {"validValues": ["x"]}, ".label", "missing"),
        ("by-label", {"label": ""}, ".label", "length"),
        ("by-label", {"label": "a"}, "", "either validValues must be non-empty or allowsNoLabel"),
        ("decode-filter", {"label": "a"}, ".label", "unknown field"),
        ("endpoint-attribute-filter", {"algorithm": THRESHOLD}, ".attribute", "missing"),
        ("endpoint-attribute-filter", {"attribute": "a"}, ".algorithm", "missing"),
        (
            "endpoint-attribute-filter",
            {"attribute": "a", "algorithm": {**THRESHOLD, "type": "percentile"}},
            ".algorithm.type",
            "expected threshold, not 'percentile'",
        ),
        (
            "endpoint-attribute-filter",
            {"attribute": "a", "algorithm": {**THRESHOLD, "topK": {"k": 1}}},
            ".algorithm.topK",
            "not supported yet",
        ),
        (
            "endpoint-attribute-filter",
            {
                "attribute": "a",
                "algorithm": {"type": "threshold", "threshold": {"operator": "<", "value": 1}},
            },
            ".algorithm.threshold.operator",
            "expected LessThan or",
        ),
        (
            "endpoint-attribute-filter",
            {"attribute": "a", "algorithm": THRESHOLD, "onMissing": "pass"},
            ".onMissing",
            "expected Pass or Fail",
        ),
        (
            "endpoint-attribute-filter",
            {"attribute": "util/dcgm-extractor", "algorithm": THRESHOLD},
            "",
            "write attribute: 'util' and producer: 'dcgm-extractor'",
        ),
        ("utilization-filter", {}, ".conditions", "missing"),
        ("utilization-filter", {"conditions": []}, "", "at least one entry"),
        (
            "utilization-filter",
            {"conditions": [{"metric": "queue", "maxValue": 1}]},
            ".conditions[0].metric",
            "waiting-queue",
        ),
        (
            "utilization-filter",
            {"conditions": [{"metric": "waiting-queue"}]},
            ".conditions[0].maxValue",
            "missing",
        ),
        (
            "utilization-filter",
            {"conditions": [{"metric": "waiting-queue", "maxValue": -1}]},
            ".conditions[0].maxValue",
            ">= 0",
        ),
        (
            "utilization-filter",
            {"conditions": [{"metric": "kv-cache-utilization", "maxValue": 80}]},
            ".conditions[0]",
            "a fraction and must be at most 1, got 80",
        ),
        ("load-aware-scorer", {"threshold": 0}, ".threshold", ">= 1"),
        ("context-length-aware", {"label": ""}, ".label", "length"),
        (
            "context-length-aware",
            {"reusableTokensProducerName": "p2p"},
            ".reusableTokensProducerName",
            "not supported yet",
        ),
        ("header-label-affinity-scorer", {"headerName": "h"}, ".labelKey", "missing"),
        ("header-label-affinity-scorer", {"headerName": "", "labelKey": "a"}, ".headerName", "length"),
        ("endpoint-attribute-scorer", {"attributeKey": "a"}, ".algorithm", "missing"),
        (
            "endpoint-attribute-scorer",
            {"attributeKey": "a", "algorithm": {"type": "linear"}},
            ".algorithm.type",
            "expected linear_lower_is_better or linear_higher_is_better",
        ),
        (
            "endpoint-attribute-scorer",
            normalized(fixedRange={"min": 1, "max": 1}),
            ".algorithm.normalization.fixedRange",
            "requires min < max, got min 1, max 1",
        ),
        (
            "endpoint-attribute-scorer",
            normalized(fixedRange={"min": 0, "max": 1}, adaptiveRange={}),
            ".algorithm.normalization",
            "got both fixedRange and adaptiveRange",
        ),
        ("endpoint-attribute-scorer", {**normalized(), "source": "metadata"}, ".source", "not supported yet"),
        (
            "endpoint-attribute-scorer",
            {"attributeKey": "a/b", "algorithm": LINEAR},
            "",
            "write attributeKey: 'a' and producer: 'b'",
        ),
        ("random-picker", {"maxNumOfEndpoints": 0}, ".maxNumOfEndpoints", ">= 1"),
        ("weighted-random-picker", {"maxNumOfEndpoints": -1}, ".maxNumOfEndpoints", ">= 1"),
        ("data-parallel-profile-handler", {"primaryPort": 0}, ".primaryPort", ">= 1"),
        ("data-parallel-profile-handler", {"primaryPort": 65536}, ".primaryPort", "<= 65535"),
    ],
)
def test_a_wrong_parameter_is_named(
    type_name: str, parameters: dict[str, Any], path: str, message: str
) -> None:
    (found,) = problems(document({"type": type_name, "parameters": parameters}))
    assert found[0] == f"$.plugins[0].parameters{path}"
    assert message in found[1]


@pytest.mark.parametrize(
    ("type_name", "profiles", "message"),
    [
        ("header-profile-handler", ("encode", "prefill"), "defaultProfile 'decode' is not a configured"),
        ("data-parallel-profile-handler", ("a", "b"), "runs exactly one scheduling profile, not a, b"),
    ],
)
def test_profiles_a_handler_cannot_run_are_refused_at_the_start(
    type_name: str, profiles: tuple[str, ...], message: str
) -> None:
    (found,) = problems(document({"type": type_name}, profiles=profiles))
    assert found[0] == "$.plugins[0]"
    assert message in found[1]


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("label-selector-filter", {}),
    ("label-selector-filter", {"matchLabels": {"llm-d.ai/role": "decode", "a": ""}}),
    ("label-selector-filter", requirement(operator="DoesNotExist", values=[])),
    ("by-label-selector", requirement(operator="NotIn", values=["x", "y_z.1"])),
    ("by-label", {"label": "llm-d.ai/role", "validValues": ["decode", "both"], "allowsNoLabel": False}),
    ("decode-filter", {}),
    ("prefill-filter", {}),
    ("encode-filter", {}),
    ("endpoint-attribute-filter", {"attribute": "a", "algorithm": THRESHOLD}),
    ("endpoint-attribute-filter", {"attribute": "a/b", "producer": "dcgm-extractor", "algorithm": THRESHOLD}),
    ("endpoint-attribute-filter", {"attribute": "a/b", "producer": "", "algorithm": THRESHOLD}),
    ("utilization-filter", {"conditions": [{"metric": "kv-cache-utilization", "maxValue": 1}]}),
    ("header-based-testing-filter", {}),
    ("running-requests-size-scorer", {}),
    ("load-aware-scorer", {"threshold": 64}),
    ("lora-affinity-scorer", {}),
    ("context-length-aware", {"label": "llm-d.ai/context-length-range"}),
    ("endpoint-attribute-scorer", normalized()),
    ("endpoint-attribute-scorer", normalized(adaptiveRange={})),
    ("endpoint-attribute-scorer", normalized(fixedRange={"min": -1, "max": 0.5})),
    ("header-label-affinity-scorer", {"headerName": "X-Tier", "labelKey": "tier"}),
    ("random-picker", {"maxNumOfEndpoints": 3}),
    ("weighted-random-picker", {}),
    ("header-profile-handler", {"headerName": "X-Stage"}),
    ("data-parallel-profile-handler", {"primaryPort": 9000}),
]


def only_profile(handler: Any) -> Profile:
    for name in ("profile", "_only", "_profile"):
        if (found := getattr(handler, name, None)) is not None:
            return found
    raise AssertionError("the handler has no profile")


@pytest.mark.parametrize(("type_name", "parameters"), ACCEPTED)
def test_right_parameters_build_a_plugin(type_name: str, parameters: dict[str, Any]) -> None:
    loaded = load_config(document({"type": type_name, "parameters": parameters}), "test")
    assembly = build(loaded, empty_view(4), b"secret")
    profile = only_profile(assembly.plugins.handler)
    used = {step.type for step in (*profile.filters, *profile.scorers, profile.picker)}
    assert type_name in used or type_name.endswith("-handler")


@pytest.mark.parametrize("filtering", [False, True])
def test_context_length_aware_filters_where_it_is_told_to(filtering: bool) -> None:
    plugin = {"type": "context-length-aware", "parameters": {"enableFiltering": filtering}}
    assembly = build(load_config(document(plugin), "test"), empty_view(4), b"secret")
    profile = only_profile(assembly.plugins.handler)
    assert [step.type for step in profile.scorers] == ["context-length-aware"]
    assert [step.type for step in profile.filters] == ["context-length-aware"] * filtering


@pytest.mark.parametrize("type_name", ["by-label-selector", "by-label"])
def test_deprecated_filters_say_what_to_use(type_name: str) -> None:
    parameters = {"label": "a", "allowsNoLabel": True} if type_name == "by-label" else {}
    loaded = load_config(document({"type": type_name, "parameters": parameters}), "test")
    assert any("use label-selector-filter" in warning for warning in loaded.warnings)
