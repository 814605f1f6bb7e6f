"""Configurations the field ships: each loads, or says which plugin types it waits for."""

import re
from pathlib import Path

import pytest

from epp.config.load import build, default_config, load_config
from epp.config.registry import NOT_YET
from epp.config.spec import FileDiscoverySpec, Kind, MetricsSourceSpec
from epp.errors import ConfigError
from epp.pool.store import PoolStore
from epp.scheduling.profiles import SingleProfileHandler
from epp.scheduling.records import PREFIX_MATCH, FactKey

DATA = Path(__file__).parents[1] / "data" / "config"

WAITS_FOR = {
    "encode-prefill-decode": {
        "always-disagg-multimodal-decider",
        "prefix-based-pd-decider",
        "disagg-profile-handler",
    },
    "flow-control": {"flowControl"},
    "no-hit-lru": {"precise-prefix-cache-producer"},
    "pd-disaggregation": {"always-disagg-pd-decider", "disagg-profile-handler"},
    "precise": {"precise-prefix-cache-producer", "endpoint-notification-source"},
    "predicted-latency-slo": {
        "predicted-latency-producer",
        "slo-headroom-tier-filter",
        "latency-scorer",
        "latency-slo-admitter",
    },
    "program-aware": {"program-aware-fairness", "flowControl"},
    "soft-reflective": {"soft-reflective-ceiling-policy", "flowControl"},
    "wide-ep-lws-experimental-dp-aware": {
        "prefill-header-handler",
        "prefix-based-pd-decider",
        "pd-profile-handler",
    },
}
LOADS = {
    "burst",
    "data-parallel",
    "decode-only",
    "default-with-file-discovery",
    "gpu-utilization",
    "multimodal",
    "objectives-and-rewrites",
    "optimized-baseline",
    "payload-agnostic",
    "probabilistic-admitter",
    "tiered-prefix-cache-cpu",
}


def test_every_file_is_expected() -> None:
    assert {path.stem for path in DATA.glob("*.yaml")} == set(WAITS_FOR) | LOADS


@pytest.mark.parametrize("name", sorted(WAITS_FOR))
def test_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config((DATA / f"{name}.yaml").read_bytes(), f"{name}.yaml")
    named = set()
    for problem in caught.value.problems:
        found = re.match(r"(\S+)( \([a-z ]+\))? is not supported yet", problem.message)
        if found is None and "precise" in name:
            # A producer is no extractor here; the block itself says that it is not supported.
            assert problem.path == "$.dataLayer.sources[0].extractors[0].pluginRef"
            continue
        assert found is not None, str(problem)
        named.add(found[1])
    assert named == WAITS_FOR[name]


def test_the_default_profile_with_file_discovery() -> None:
    loaded = load_config((DATA / "default-with-file-discovery.yaml").read_bytes(), "file")
    assert loaded.warnings == ()
    assembly = build(loaded, PoolStore().view, b"secret")
    assert assembly.discovery == FileDiscoverySpec("/etc/warmroute/endpoints.yaml", watch=False)
    (use,) = assembly.sources
    assert use.source == MetricsSourceSpec("http", "/metrics", True, None)
    assert isinstance(assembly.plugins.handler, SingleProfileHandler)
    profile = assembly.plugins.handler.profile
    assert [(step.name, step.weight) for step in profile.scorers] == [
        ("queue-scorer", 2),
        ("kv-cache-utilization-scorer", 2),
        ("prefix-cache-scorer", 3),
    ]
    assert (profile.filters, profile.picker.name) == ((), "max-score-picker")
    assert assembly.plugins.producers == (assembly.named["approx-prefix-cache-producer"],)


def test_it_is_the_default_configuration() -> None:
    loaded = load_config((DATA / "default-with-file-discovery.yaml").read_bytes(), "file")
    default = default_config()

    def choice(config: object) -> object:
        (profile,) = config.profiles  # type: ignore[attr-defined]
        return [(use.name, use.weight) for use in profile.plugins]

    assert choice(default) == choice(loaded)
    assert {plugin.name for plugin in loaded.plugins} - {plugin.name for plugin in default.plugins} == {
        "pods"
    }


def test_two_prefix_caches() -> None:
    loaded = load_config((DATA / "tiered-prefix-cache-cpu.yaml").read_bytes(), "file")
    assembly = build(loaded, PoolStore().view, b"secret")
    assert {producer.provides for producer in assembly.plugins.producers} == {
        (FactKey(PREFIX_MATCH, "approx-prefix-cache-producer"),),
        (FactKey(PREFIX_MATCH, "cpu-prefix-cache-producer"),),
    }


OF_QUEUES = {Kind.FAIRNESS, Kind.ORDERING, Kind.USAGE_LIMIT, Kind.EVICTION}


@pytest.mark.parametrize(
    "known", [known for known in NOT_YET if known.kind not in OF_QUEUES], ids=lambda known: known.type
)
def test_every_other_known_type_is_refused_by_name(known: object) -> None:
    text = f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: {known.type}\n"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as caught:
        load_config(text, "file")
    (problem,) = caught.value.problems
    assert problem.path == "$.plugins[0].type"
    assert problem.message.startswith(f"{known.type} ({known.kind}) is not supported yet")  # type: ignore[attr-defined]
    if known.replaced_by:  # type: ignore[attr-defined]
        assert known.replaced_by in problem.message  # type: ignore[attr-defined]
