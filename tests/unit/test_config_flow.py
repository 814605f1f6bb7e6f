"""What a file says about admission: detector, admitters, policies, objectives, model rewrites, parsers."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from epp.config.load import build, default_config, load_config
from epp.config.loaded import LoadedConfig, Origin
from epp.config.registry import NOT_YET, Registry, built_in_registry
from epp.config.schema import NoParameters
from epp.config.spec import Kind, PluginSpec, Stability
from epp.durations import Duration
from epp.errors import ConfigError
from epp.flow.admission import ProbabilisticAdmitter
from epp.flow.saturation import ConcurrencyDetector, UtilizationDetector
from epp.payload.rewrite import ModelRewrite, Rewrite, RewriteRule, RewriteRules, RewriteTarget
from epp.pool.store import PoolStore

DATA = Path(__file__).parents[1] / "data" / "config"
HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
UTILIZATION, CONCURRENCY = "utilization-detector", "concurrency-detector"


def load(**sections: Any) -> LoadedConfig:
    return load_config(yaml.safe_dump({**HEAD, **sections}, sort_keys=False), "file")


def problem(**sections: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(**sections)
    (found,) = caught.value.problems
    return found.path, found.message


def uses(loaded: LoadedConfig) -> list[str]:
    (profile,) = loaded.profiles
    return [use.name for use in profile.plugins]


def refer(name: str) -> dict[str, Any]:
    return {"saturationDetector": {"pluginRef": name}}


# -- the detector -----------------------------------------------------------------------------------


def test_without_a_file_there_is_the_default_detector() -> None:
    loaded = default_config()
    (plugin,) = [plugin for plugin in loaded.plugins if plugin.name == loaded.detector]
    assert (plugin.spec.type, plugin.origin) == (UTILIZATION, Origin.DEFAULT)
    built = build(loaded, PoolStore().view, b"secret").named[loaded.detector]
    assert isinstance(built, UtilizationDetector)
    # It does not filter where nobody asked for that.
    assert UTILIZATION not in uses(loaded)


SMALL = {"name": "small", "type": CONCURRENCY, "parameters": {"maxConcurrency": 3}}
SCORER = {"type": "queue-scorer"}
QUEUE = [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, UTILIZATION),
        ({"flowControl": {}}, UTILIZATION),
        ({"flowControl": {"saturationDetector": {}}}, UTILIZATION),
        ({"flowControl": refer("")}, UTILIZATION),
        ({"flowControl": refer(UTILIZATION)}, UTILIZATION),
        ({"flowControl": refer("small")}, "small"),
        (refer("small"), "small"),
        # The new place counts; where it is there but empty, that is the default.
        ({"flowControl": refer(UTILIZATION), **refer("small")}, UTILIZATION),
        ({"flowControl": {"saturationDetector": {}}, **refer("small")}, UTILIZATION),
        ({"flowControl": {"maxBytes": 1}, **refer("small")}, "small"),
        # With the gate off, as always.
        ({"featureGates": ["flowControl=false"], "flowControl": refer("small")}, "small"),
    ],
)
def test_the_detector_is_the_one_referred_to(sections: dict[str, Any], expected: str) -> None:
    profile = [{"name": "p", "plugins": [{"pluginRef": "queue-scorer"}, {"pluginRef": "small"}]}]
    loaded = load(plugins=[SCORER, SMALL], schedulingProfiles=profile, **sections)
    assert loaded.detector == expected
    assert expected in [plugin.name for plugin in loaded.plugins]


@pytest.mark.parametrize(
    ("flow_control", "warned"),
    [
        ({}, "$.flowControl is ignored: "),
        ({"maxRequests": 5}, "$.flowControl is ignored: "),
        (refer(UTILIZATION), None),
        ({"maxRequests": 5, **refer(UTILIZATION)}, "$.flowControl is ignored but for saturationDetector: "),
    ],
)
def test_only_what_is_ignored_is_warned_about(flow_control: dict[str, Any], warned: str | None) -> None:
    warnings = load(flowControl=flow_control).warnings
    expected = () if warned is None else (f"{warned}the feature gate flowControl is off",)
    assert warnings == expected


def test_a_defined_detector_filters_in_the_default_profile() -> None:
    assert uses(load(plugins=[SCORER, SMALL])) == ["queue-scorer", "small", "max-score-picker"]
    # A detector alone leaves the scorers to the defaults.
    assert uses(load(plugins=[SMALL])) == [
        "small", "queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer", "max-score-picker",
    ]  # fmt: skip


def test_a_detector_in_a_profile_is_a_filter() -> None:
    profile = [{"name": "p", "plugins": [{"pluginRef": "small"}, {"pluginRef": "queue-scorer"}]}]
    loaded = load(plugins=[SCORER, SMALL], schedulingProfiles=profile)
    assert loaded.warnings == ()
    assembly = build(loaded, PoolStore().view, b"secret")
    (step,) = assembly.plugins.handler.profile.filters  # type: ignore[attr-defined]
    assert (step.name, step.type) == ("small", CONCURRENCY)
    assert isinstance(step.filter, ConcurrencyDetector)


def test_a_detector_nobody_refers_to_is_warned_about() -> None:
    (warning,) = load(plugins=[SCORER, SMALL], schedulingProfiles=QUEUE).warnings
    assert warning == "$.plugins[1]: small is not used; refer to it in $.flowControl.saturationDetector"


@pytest.mark.parametrize("kind", ["utilization", "concurrency", "probabilistic"])
def test_parameters_default(kind: str) -> None:
    name = {"probabilistic": "probabilistic-admitter"}.get(kind, f"{kind}-detector")
    loaded = load(plugins=[{"type": name}])
    (params,) = [plugin.params for plugin in loaded.plugins if plugin.name == name]
    values = {field: getattr(params, field) for field in params.__struct_fields__}
    assert (
        values
        == {
            "utilization": {
                "queue_depth_threshold": 5,
                "kv_cache_util_threshold": 0.8,
                "metrics_staleness_threshold": Duration(0.2),
                "staleness_policy": "saturated",
                "headroom": 0.0,
            },
            "concurrency": {
                "max_concurrency": 100,
                "headroom": 0.0,
                "concurrency_mode": "requests",
                "max_token_concurrency": 1_000_000,
            },
            "probabilistic": {
                "queue_depth_threshold": 5,
                "kv_cache_util_threshold": 0.8,
                "power": 5.0,
                "k": 300.0,
            },
        }[kind]
    )


# -- admitters, policies ----------------------------------------------------------------------------


def test_an_admitter_is_active_when_it_is_defined() -> None:
    text = (DATA / "probabilistic-admitter.yaml").read_bytes()
    loaded = load_config(text, "file")
    assert loaded.warnings == ()
    assert loaded.detector == UTILIZATION
    assert uses(loaded) == ["queue-scorer", UTILIZATION, "max-score-picker"]
    (admitter,) = build(loaded, PoolStore().view, b"secret").plugins.admitters
    assert isinstance(admitter, ProbabilisticAdmitter)


QUEUE_KINDS = {Kind.FAIRNESS, Kind.ORDERING, Kind.USAGE_LIMIT, Kind.EVICTION}


@pytest.mark.parametrize(
    "known", [known for known in NOT_YET if known.kind in QUEUE_KINDS], ids=lambda known: known.type
)
def test_a_queue_policy_has_no_effect_without_the_gate_and_is_refused_with_it(known: Any) -> None:
    block = {"name": "mine", "type": known.type, "parameters": {"anything": 1}}
    loaded = load(plugins=[SCORER, block])
    assert loaded.warnings == (
        f"$.plugins[1]: {known.type} ({known.kind}) has no effect: the feature gate flowControl is off",
    )
    assert "mine" not in [plugin.name for plugin in loaded.plugins]
    with pytest.raises(ConfigError) as caught:
        load(plugins=[SCORER, block], featureGates=["flowControl"])
    assert {each.path for each in caught.value.problems} == {"$.featureGates[0]", "$.plugins[1].type"}


def test_a_policy_without_effect_can_be_referred_to() -> None:
    loaded = load(
        plugins=[SCORER, {"name": "fair", "type": "round-robin-fairness-policy"}],
        flowControl={"defaultPriorityBand": {"fairnessPolicyRef": "fair"}},
    )
    assert len(loaded.warnings) == 2
    path, message = problem(
        plugins=[SCORER, {"name": "fair", "type": "round-robin-fairness-policy"}],
        flowControl={"defaultPriorityBand": {"orderingPolicyRef": "fair"}},
    )
    assert path == "$.flowControl.defaultPriorityBand.orderingPolicyRef"
    assert "fair has kind fairness policy, expected ordering policy" in message


# -- objectives and model rewrites ------------------------------------------------------------------

RULE, SECOND = "$.modelRewrites[0].rules[0]", "$.modelRewrites[0].rules[1]"


def target(model: str, weight: int | None = None) -> dict[str, Any]:
    return {"modelRewrite": model} | ({} if weight is None else {"weight": weight})


def rule(models: str, *targets: dict[str, Any]) -> dict[str, Any]:
    matches = [{"model": {"type": "Exact", "value": model}} for model in models.split()]
    return {"targets": list(targets)} | ({"matches": matches} if matches else {})


def rewrites(*rules: dict[str, Any], name: str = "r") -> list[dict[str, Any]]:
    return [{"name": name, "rules": list(rules)}]


def test_objectives() -> None:
    loaded = load(
        objectives=[{"name": "chat", "priority": 2}, {"name": "batch", "priority": -1}, {"name": "x"}]
    )
    assert loaded.objectives == {"chat": 2, "batch": -1, "x": 0}
    assert loaded.warnings == ()
    assert load().objectives == {}


def test_model_rewrites() -> None:
    loaded = load(
        modelRewrites=[
            *rewrites(rule("a b", target("x", 9), target("y", 1)), rule("", target("z")), name="one"),
            *rewrites(rule("c", target("w")), name="two"),
        ]
    )
    assert loaded.model_rewrites == (
        ModelRewrite(
            "one",
            (
                RewriteRule(("a", "b"), (RewriteTarget("x", 9), RewriteTarget("y", 1))),
                RewriteRule((), (RewriteTarget("z"),)),
            ),
        ),
        ModelRewrite("two", (RewriteRule(("c",), (RewriteTarget("w"),)),)),
    )
    assert loaded.warnings == ()
    assert load().model_rewrites == ()


def test_the_only_way_to_match_need_not_be_named() -> None:
    loaded = load(modelRewrites=rewrites({"matches": [{"model": {"value": "a"}}], "targets": [target("b")]}))
    assert loaded.model_rewrites[0].rules[0].models == ("a",)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"modelRewrites": rewrites(rule("", target("x"), target("y", 3), target("z")))},
            (
                f"{RULE}.targets[0] is never chosen: it has no weight, and other targets have one",
                f"{RULE}.targets[2] is never chosen: it has no weight, and other targets have one",
            ),
        ),
        (
            {"modelRewrites": rewrites(rule("a", target("x")), rule("b a", target("y")))},
            (f"{SECOND}.matches[1] has no effect: {RULE} is for model 'a' and comes first",),
        ),
        (
            {
                "modelRewrites": [
                    *rewrites(rule("", target("x"))),
                    *rewrites(rule("", target("y")), name="later"),
                ]
            },
            (f"$.modelRewrites[1].rules[0] has no effect: {RULE} is for every model and comes first",),
        ),
        # A rule for a model and one for all others go together, and so does a value said twice in one rule.
        ({"modelRewrites": rewrites(rule("", target("x")), rule("a a", target("y")))}, ()),
    ],
)
def test_what_cannot_count_is_warned_about(sections: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert load(**sections).warnings == expected


def test_a_file_with_all_of_it() -> None:
    loaded = load_config((DATA / "objectives-and-rewrites.yaml").read_bytes(), "file")
    assert loaded.warnings == ()
    assert (loaded.detector, loaded.objectives) == ("pool-limit", {"interactive": 10, "batch": -10})
    rules = RewriteRules(loaded.model_rewrites)
    assert rules.names == {"chat", "llama-3", "llama-4"}
    assert rules.target("", Random(0)) == Rewrite("llama-3", "canary")
    assert loaded.document.line_of("$.modelRewrites[0].rules[0].targets[1].weight") == 29


# -- parsers ----------------------------------------------------------------------------------------


def test_no_parsers_are_the_default_ones() -> None:
    assert load().parsers is None
    assert load(requestHandler={}).parsers is None
    assert load(requestHandler={"parsers": []}).parsers is None


PARSER = PluginSpec("odd-parser", Kind.PARSER, NoParameters, lambda context, params: None, Stability.STABLE)
BLOCKS = [SCORER, {"name": "one", "type": "odd-parser"}, {"name": "two", "type": "odd-parser"}]


@pytest.mark.parametrize(
    ("sections", "expected", "warned"),
    [
        ({"requestHandler": {"parsers": [{"pluginRef": "two"}, {"pluginRef": "one"}]}}, ("two", "one"), []),
        ({}, None, ["one is not used", "two is not used"]),
        ({"parser": {"pluginRef": "one"}}, ("one",), ["$.parser is deprecated", "two is not used"]),
        # Of both places the new one counts.
        (
            {"parser": {"pluginRef": "one"}, "requestHandler": {"parsers": [{"pluginRef": "two"}]}},
            ("two",),
            ["$.parser is deprecated", "one is not used"],
        ),
    ],
)
def test_parsers(sections: dict[str, Any], expected: tuple[str, ...] | None, warned: list[str]) -> None:
    built_in = built_in_registry()
    registry = Registry({**built_in.specs, "odd-parser": PARSER}, built_in.not_yet)
    text = yaml.safe_dump({**HEAD, "plugins": BLOCKS, **sections})
    loaded = load_config(text, "file", registry)
    assert loaded.parsers == expected
    assert len(loaded.warnings) == len(warned)
    for warning, part in zip(loaded.warnings, warned, strict=True):
        assert part in warning


# -- problems ---------------------------------------------------------------------------------------


def detector(**parameters: Any) -> dict[str, Any]:
    return {"plugins": [{"type": UTILIZATION, "parameters": parameters}]}


def limits(**parameters: Any) -> dict[str, Any]:
    return {"plugins": [{"type": CONCURRENCY, "parameters": parameters}]}


def admitter(**parameters: Any) -> dict[str, Any]:
    return {"plugins": [{"type": "probabilistic-admitter", "parameters": parameters}]}


PARAMETERS = "$.plugins[0].parameters"


@pytest.mark.parametrize(
    ("sections", "path", "says"),
    [
        (detector(queueDepthThreshold=0), f"{PARAMETERS}.queueDepthThreshold", ">= 1, not 0"),
        (detector(queueDepthThreshold=1.5), f"{PARAMETERS}.queueDepthThreshold", "a whole number"),
        (detector(kvCacheUtilThreshold=0), f"{PARAMETERS}.kvCacheUtilThreshold", "> 0.0, not 0"),
        (detector(kvCacheUtilThreshold=80), f"{PARAMETERS}.kvCacheUtilThreshold", "<= 1.0, not 80"),
        (detector(headroom=-0.1), f"{PARAMETERS}.headroom", ">= 0.0, not -0.1"),
        (detector(metricsStalenessThreshold="0s"), PARAMETERS, "metricsStalenessThreshold must be above 0"),
        (detector(metricsStalenessThreshold=200), f"{PARAMETERS}.metricsStalenessThreshold", "200ms"),
        (
            detector(stalenessPolicy="open"),
            f"{PARAMETERS}.stalenessPolicy",
            "saturated or ignore, not 'open'",
        ),
        (detector(queueDepth=3), f"{PARAMETERS}.queueDepth", "did you mean queueDepthThreshold?"),
        (limits(maxConcurrency=0), f"{PARAMETERS}.maxConcurrency", ">= 1, not 0"),
        (limits(maxTokenConcurrency=0), f"{PARAMETERS}.maxTokenConcurrency", ">= 1, not 0"),
        (limits(concurrencyMode="both"), f"{PARAMETERS}.concurrencyMode", "requests or tokens or hybrid"),
        (limits(headroom=-1), f"{PARAMETERS}.headroom", ">= 0.0"),
        (admitter(power=0), f"{PARAMETERS}.power", "> 0.0, not 0"),
        (admitter(k=-3), f"{PARAMETERS}.k", "> 0.0, not -3"),
        (admitter(queueDepthThreshold=0), f"{PARAMETERS}.queueDepthThreshold", ">= 1"),
        (
            {"flowControl": refer(CONCURRENCY)},
            "$.flowControl.saturationDetector.pluginRef",
            "no plugin is named 'concurrency-detector'",
        ),
        (refer("x"), "$.saturationDetector.pluginRef", "no plugin is named 'x'"),
        (
            {"plugins": [{"name": UTILIZATION, "type": "queue-scorer"}]},
            "$.plugins[0].name",
            "utilization-detector is the name of the default saturation detector; choose another",
        ),
        (
            {"plugins": [{"type": "latency-slo-admitter"}]},
            "$.plugins[0].type",
            "latency-slo-admitter (admitter) is not supported yet",
        ),
        (
            {"plugins": [{"type": "disaggregatedset-rollout-screener"}]},
            "$.plugins[0].type",
            "disaggregatedset-rollout-screener (screener) is not supported yet",
        ),
        ({"objectives": [{"priority": 1}]}, "$.objectives[0].name", "missing, and required"),
        ({"objectives": [{"name": ""}]}, "$.objectives[0].name", "length >= 1"),
        ({"objectives": [{"name": "a", "priority": "high"}]}, "$.objectives[0].priority", "a whole number"),
        ({"objectives": [{"name": "a", "priority": 2**31}]}, "$.objectives[0].priority", "<= 2147483647"),
        ({"objectives": [{"name": "a", "poolRef": {}}]}, "$.objectives[0].poolRef", "unknown field"),
        (
            {"objectives": [{"name": "a"}, {"name": "a"}]},
            "$.objectives[1].name",
            "a second objective named 'a'",
        ),
        ({"modelRewrites": [{"rules": []}]}, "$.modelRewrites[0].name", "missing, and required"),
        ({"modelRewrites": [{"name": "r"}]}, "$.modelRewrites[0].rules", "missing, and required"),
        (
            {"modelRewrites": [*rewrites(), *rewrites()]},
            "$.modelRewrites[1].name",
            "a second model rewrite named 'r'",
        ),
        ({"modelRewrites": rewrites({})}, f"{RULE}.targets", "missing, and required"),
        ({"modelRewrites": rewrites(rule("a"))}, f"{RULE}.targets", "expected at least one target"),
        (
            {"modelRewrites": rewrites(rule("", target("x", 0)))},
            f"{RULE}.targets[0].weight",
            ">= 1, not 0",
        ),
        (
            {"modelRewrites": rewrites(rule("", target("x", 1_000_001)))},
            f"{RULE}.targets[0].weight",
            "<= 1000000",
        ),
        ({"modelRewrites": rewrites(rule("", target("")))}, f"{RULE}.targets[0].modelRewrite", "length >= 1"),
        (
            {"modelRewrites": rewrites({"matches": [{}], "targets": [target("x")]})},
            f"{RULE}.matches[0].model",
            "missing, and required",
        ),
        (
            {
                "modelRewrites": rewrites(
                    {"matches": [{"model": {"type": "Prefix", "value": "a"}}], "targets": [target("x")]}
                )
            },
            f"{RULE}.matches[0].model.type",
            "expected Exact, not 'Prefix'",
        ),
    ],
)
def test_problem(sections: dict[str, Any], path: str, says: str) -> None:
    found, message = problem(**sections)
    assert found == path
    assert says in message
    assert "(line " in message
