"""The loader: what a file may say, what it gets by default, and what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.decode import MAX_PROBLEMS
from epp.config.load import default_config, load_config
from epp.config.loaded import LoadedConfig, Origin
from epp.config.schema import Quantity
from epp.errors import ConfigError

DATA = Path(__file__).parents[1] / "data" / "config" / "tables"
HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}


def load(**sections: Any) -> LoadedConfig:
    return load_config(yaml.safe_dump({**HEAD, **sections}, sort_keys=False), "file")


def problems(**sections: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load(**sections)
    return [(problem.path, problem.message) for problem in caught.value.problems]


def plugins(*blocks: Any) -> list[dict[str, Any]]:
    return [block if isinstance(block, dict) else {"type": block} for block in blocks]


def profile(name: str, *refs: Any) -> dict[str, Any]:
    uses = [ref if isinstance(ref, tuple) else (ref, None) for ref in refs]
    return {
        "name": name,
        "plugins": [
            {"pluginRef": ref} | ({} if weight is None else {"weight": weight}) for ref, weight in uses
        ],
    }


def choice(loaded: LoadedConfig) -> dict[str, list[tuple[str, float]]]:
    return {each.name: [(use.name, use.weight) for use in each.plugins] for each in loaded.profiles}


def fetched(loaded: LoadedConfig) -> dict[str, tuple[str, ...]]:
    return {source.name: source.extractors for source in loaded.sources}


# -- defaults ---------------------------------------------------------------------------------------

DEFAULT = {
    "default": [
        ("queue-scorer", 2.0),
        ("kv-cache-utilization-scorer", 2.0),
        ("prefix-cache-scorer", 3.0),
        ("max-score-picker", 1.0),
    ]
}


def test_no_file() -> None:
    loaded = default_config()
    assert choice(loaded) == DEFAULT
    assert (loaded.handler, loaded.discovery) == ("single-profile-handler", None)
    assert loaded.producers == ("approx-prefix-cache-producer",)
    assert fetched(loaded) == {"metrics-data-source": ("core-metrics-extractor",)}
    assert {plugin.origin for plugin in loaded.plugins} == {Origin.DEFAULT}
    assert loaded.warnings == ()


def test_a_file_that_says_nothing_gets_the_same() -> None:
    assert choice(load()) == DEFAULT


def test_a_file_that_leaves_the_choice_alone_gets_the_same() -> None:
    discovery = {"type": "file-discovery", "parameters": {"path": "/x.yaml"}}
    loaded = load(plugins=[discovery], dataLayer={"discovery": {"pluginRef": "file-discovery"}})
    assert choice(loaded) == DEFAULT
    assert loaded.discovery == "file-discovery"


def test_no_profile_means_one_with_everything() -> None:
    loaded = load(plugins=plugins("kv-cache-utilization-scorer", {"name": "q", "type": "queue-scorer"}))
    assert choice(loaded) == {
        "default": [("kv-cache-utilization-scorer", 1.0), ("q", 1.0), ("max-score-picker", 1.0)]
    }


def test_weights_default_to_one_and_may_be_zero() -> None:
    loaded = load(
        plugins=plugins("queue-scorer", "kv-cache-utilization-scorer"),
        schedulingProfiles=[profile("p", "queue-scorer", ("kv-cache-utilization-scorer", 0))],
    )
    assert choice(loaded)["p"][:2] == [("queue-scorer", 1.0), ("kv-cache-utilization-scorer", 0.0)]


def test_a_defined_picker_handler_source_and_extractor_are_used() -> None:
    loaded = load(
        plugins=plugins(
            "queue-scorer",
            {"name": "three", "type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 3}},
            {"name": "h", "type": "single-profile-handler"},
            {
                "name": "m",
                "type": "metrics-data-source",
                "parameters": {"scheme": "https", "interval": "200ms"},
            },
            {"name": "e", "type": "core-metrics-extractor"},
        ),
        schedulingProfiles=[profile("p", "three", "queue-scorer")],
    )
    assert (loaded.handler, fetched(loaded)) == ("h", {"m": ("e",)})
    assert choice(loaded) == {"p": [("three", 1.0), ("queue-scorer", 1.0)]}
    by_file = {plugin.name for plugin in loaded.plugins if plugin.origin is Origin.FILE}
    assert by_file == {"queue-scorer", "three", "h", "m", "e"}
    assert {plugin.name for plugin in loaded.plugins} - by_file == {"utilization-detector"}


def test_a_missing_default_producer_is_made() -> None:
    loaded = load(plugins=plugins("prefix-cache-scorer"))
    assert loaded.producers == ("approx-prefix-cache-producer",)


def test_a_producer_of_the_default_name_is_used() -> None:
    block = {"type": "approx-prefix-cache-producer", "parameters": {"lruCapacityPerServer": 7}}
    loaded = load(plugins=plugins("prefix-cache-scorer", block))
    (producer,) = [plugin for plugin in loaded.plugins if plugin.name == loaded.producers[0]]
    assert producer.params.lru_capacity_per_server == 7  # type: ignore[attr-defined]


def test_token_producer_estimates() -> None:
    for block in ("token-producer", {"type": "token-producer", "parameters": {"estimate": {}}}):
        loaded = load(plugins=plugins(block))
        assert "token-producer" in [plugin.name for plugin in loaded.plugins]


# -- data sources -----------------------------------------------------------------------------------

PAGE, LIST = "metrics-data-source", "models-data-source"
ENGINE, MODELS = "core-metrics-extractor", "models-data-extractor"


def named(name: str, type_name: str) -> dict[str, str]:
    return {"name": name, "type": type_name}


def source(name: str, *extractors: str) -> dict[str, Any]:
    return {"pluginRef": name, "extractors": [{"pluginRef": each} for each in extractors]}


@pytest.mark.parametrize(
    ("blocks", "layer", "expected"),
    [
        ([], {}, {PAGE: (ENGINE,)}),
        ([LIST], {"sources": [source(LIST)]}, {LIST: (MODELS,), PAGE: (ENGINE,)}),
        ([LIST], {"sources": [source(LIST)], "injectDefaults": False}, {LIST: (MODELS,)}),
        ([named("m", PAGE)], {}, {"m": (ENGINE,)}),
        ([named("m", PAGE), named("e", ENGINE)], {"sources": [source("m")]}, {"m": ("e",)}),
        (
            [named("m", PAGE), named("a", ENGINE), named("b", ENGINE), MODELS],
            {"sources": [source("m")]},
            {"m": ("a", "b")},
        ),
        (
            [named("m", PAGE), named("n", PAGE), named("a", ENGINE), named("b", ENGINE)],
            {"sources": [source("m", "a"), source("n")]},
            {"m": ("a",), "n": ("b",)},
        ),
        (
            [named("m", PAGE), named("n", PAGE), named("a", ENGINE)],
            {"sources": [source("m", "a"), source("n")]},
            {"m": ("a",), "n": (ENGINE,)},
        ),
        ([], {"injectDefaults": False}, {}),
        ([named("m", PAGE)], {"injectDefaults": False}, {}),
    ],
)
def test_sources_and_what_reads_them(
    blocks: list[Any], layer: dict[str, Any], expected: dict[str, tuple[str, ...]]
) -> None:
    assert fetched(load(plugins=plugins(*blocks), dataLayer=layer)) == expected


@pytest.mark.parametrize(
    ("blocks", "layer", "expected"),
    [
        ([], {"injectDefaults": False}, ["$.dataLayer: no sources, and injectDefaults is false"]),
        (
            [named("m", PAGE), named("n", PAGE)],
            {},
            ["$.plugins[1]: n is not used; refer to it in $.dataLayer"],
        ),
        ([LIST], {}, ["$.plugins[0]: models-data-source is not used"]),
        ([MODELS], {}, ["$.plugins[0]: models-data-extractor is not used"]),
    ],
)
def test_sources_without_effect_are_warned_about(
    blocks: list[Any], layer: dict[str, Any], expected: list[str]
) -> None:
    warnings = load(plugins=plugins(*blocks), dataLayer=layer).warnings
    assert [warning[: len(start)] for warning, start in zip(warnings, expected, strict=True)] == expected


# -- warnings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"apiVersion": "inference.networking.x-k8s.io/v1alpha1"}, "use llm-d.ai/v1alpha1"),
        ({"flowControl": {"maxBytes": "10Gi"}}, "$.flowControl is ignored"),
        ({"flowControl": {}}, "$.flowControl is ignored"),
        ({"saturationDetector": {"pluginRef": "utilization-detector"}}, "$.flowControl.saturationDetector"),
        ({"featureGates": ["haPopulateNonLeaderDatastore=false"]}, "has no effect"),
        ({"plugins": [{"type": "file-discovery", "parameters": {"path": "x"}}]}, "discovery is not used"),
        ({"plugins": plugins("max-score-picker")}, "profile default has no scorer"),
        (
            {
                "plugins": plugins("queue-scorer", "max-score-picker"),
                "schedulingProfiles": [profile("p", "queue-scorer", ("max-score-picker", 2))],
            },
            "$.schedulingProfiles[0].plugins[1].weight has no effect: max-score-picker is a picker",
        ),
        (
            {
                "plugins": plugins("queue-scorer", "kv-cache-utilization-scorer"),
                "schedulingProfiles": [profile("p", "queue-scorer")],
            },
            "$.plugins[1]: kv-cache-utilization-scorer is not used",
        ),
    ],
)  # fmt: skip
def test_warnings(sections: dict[str, Any], expected: str) -> None:
    (warning,) = load(**sections).warnings
    assert expected in warning


@pytest.mark.parametrize("gates", [["flowControl=false"], ["haPopulateNonLeaderDatastore"], []])
def test_gates_that_change_nothing(gates: list[str]) -> None:
    assert load(featureGates=gates).warnings == ()


def test_alpha_plugins_are_warned_about_where_they_are_allowed() -> None:
    (warning,) = load(plugins=plugins("queue-scorer", "agent-identity")).warnings
    assert warning == "$.plugins[1].type: agent-identity is experimental and may change"


def test_alpha_plugins_are_a_problem_each_where_they_are_not() -> None:
    blocks = plugins("agent-identity", "queue-scorer", {"name": "mine", "type": "p2p-source-producer"})
    text = yaml.safe_dump({**HEAD, "plugins": blocks})
    with pytest.raises(ConfigError) as caught:
        load_config(text, "file", allow_experimental=False)
    assert [problem.path for problem in caught.value.problems] == ["$.plugins[0].type", "$.plugins[2].type"]
    for problem, type_name in zip(
        caught.value.problems, ("agent-identity", "p2p-source-producer"), strict=True
    ):
        assert problem.message.startswith(
            f"{type_name} is experimental (alpha); to use it, start with --allow-experimental-plugins"
        )


@pytest.mark.parametrize("name", ["optimized-baseline", "probabilistic-admitter", "tiered-prefix-cache-cpu"])
def test_configurations_without_alpha_plugins_need_no_flag(name: str) -> None:
    text = (DATA.parent / f"{name}.yaml").read_bytes()
    assert load_config(text, name, allow_experimental=False) == load_config(text, name)


# -- problems ---------------------------------------------------------------------------------------

PROBLEMS = yaml.safe_load((DATA / "problems.yaml").read_text())


@pytest.mark.parametrize("row", PROBLEMS, ids=lambda row: row["path"])
def test_problem(row: dict[str, Any]) -> None:
    ((path, message),) = problems(**row["file"])
    assert path == row["path"]
    assert row["says"] in message
    assert "(line " in message


def test_default_policies_may_be_referred_to_by_type() -> None:
    loaded = load(
        flowControl={
            "saturationDetector": {"pluginRef": "utilization-detector"},
            "defaultPriorityBand": {"fairnessPolicyRef": "round-robin-fairness-policy"},
        }
    )
    assert any("flowControl" in warning for warning in loaded.warnings)


def test_several_profiles_need_another_handler() -> None:
    both = {
        "plugins": plugins("queue-scorer"),
        "schedulingProfiles": [profile("a", "queue-scorer"), profile("b")],
    }
    ((path, message),) = problems(**both)
    assert path == "$.schedulingProfiles"
    assert "2 profiles, but single-profile-handler runs exactly one" in message


def test_every_bad_block_is_listed_at_once_in_the_order_of_the_file() -> None:
    found = problems(
        featureGates=["x"],
        plugins=plugins(
            "queue-scorrer",
            {"type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": 5, "other": 1}},
            {"name": "x"},
            "latency-scorer",
            {"type": "metrics-data-source", "parameters": {"scheme": "x", "port": -1}},
        ),
        schedulingProfiles=[profile("p", "nowhere")],
        dataLayer={"discovery": {"pluginRef": "nobody"}},
    )
    assert [path for path, _ in found] == [
        "$.featureGates[0]",
        "$.plugins[0].type",
        "$.plugins[1].parameters.matchLengthWeight",
        "$.plugins[1].parameters.other",
        "$.plugins[2].type",
        "$.plugins[3].type",
        "$.plugins[4].parameters.scheme",
        "$.plugins[4].parameters.port",
        "$.schedulingProfiles[0].plugins[0].pluginRef",
        "$.dataLayer.discovery.pluginRef",
    ]


def test_a_fault_in_a_section_hides_no_other() -> None:
    found = problems(
        plugins=plugins("queue-scorer", "max-score-picker", "random-picker", {"type": "openai-parser"}),
        schedulingProfiles=[
            {
                "name": True,
                "plugins": [{"pluginRef": "queue-scorer", "weight": "2"}, {"pluginRef": "nobody"}],
            },
            5,
            {"plugins": 5},
            {"name": "b", "plugins": [{"pluginRef": 1}, {"pluginRef": "max-score-picker"}]},
            {"name": "b", "plugins": [{"pluginRef": "random-picker"}, {"pluginRef": "max-score-picker"}]},
        ],
        dataLayer={"injectDefaults": 1, "discovery": {"pluginRef": "nothing"}},
        flowControl={"maxRequests": -1, "saturationDetector": {"pluginRef": "no-one"}},
        requestHandler={"parser": [], "parsers": [{"pluginRef": "queue-scorer"}]},
    )
    assert [path for path, _ in found if path != "$.schedulingProfiles"] == [
        "$.schedulingProfiles[0].name",
        "$.schedulingProfiles[0].plugins[0].weight",
        "$.schedulingProfiles[0].plugins[1].pluginRef",
        "$.schedulingProfiles[1]",
        "$.schedulingProfiles[2].name",
        "$.schedulingProfiles[2].plugins",
        "$.schedulingProfiles[3].plugins[0].pluginRef",
        "$.schedulingProfiles[4].name",
        "$.schedulingProfiles[4].plugins[1]",
        "$.dataLayer.injectDefaults",
        "$.dataLayer.discovery.pluginRef",
        "$.flowControl.maxRequests",
        "$.flowControl.saturationDetector.pluginRef",
        "$.requestHandler.parser",
        "$.requestHandler.parsers[0].pluginRef",
    ]


@pytest.mark.parametrize("profiles", [5, [5], [{"plugins": [5]}]])
def test_profiles_that_cannot_be_read_are_the_only_fault(profiles: Any) -> None:
    """Not those of the profile that is there without any."""
    found = problems(plugins=plugins("max-score-picker", "random-picker"), schedulingProfiles=profiles)
    assert {message.partition(",")[0] for _, message in found} <= {
        "expected a list",
        "expected a mapping",
        "missing",
    }


def test_a_file_full_of_faults_ends() -> None:
    found = problems(plugins=plugins(*[f"type-{number}" for number in range(500)]))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == ("", "and more; only the first are listed")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty: expected apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig"),
        ("# only a comment", "empty: expected apiVersion"),
        ("null", "empty: expected apiVersion"),
        ("- a", "expected a mapping with apiVersion"),
        ("hello", "expected a mapping with apiVersion"),
        ("3", "expected a mapping with apiVersion"),
        ("{}", r"\$.apiVersion: missing, and required"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_not_a_configuration(text: str | bytes, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^file.yaml: .*{expected}"):
        load_config(text, "file.yaml")


# -- units ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (0, 0),
        (5000, 5000),
        ("5000", 5000),
        ("1k", 1000),
        ("10Gi", 10 * 2**30),
        ("1.5Ki", 1536),
        ("1G", 10**9),
    ],
)
def test_quantity(text: object, number: int) -> None:
    assert Quantity.parse(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", -1, "1.5", 1.5, "1K", "1 k", None, True, {}, "1" * 40])
def test_no_quantity(text: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Quantity.parse(text)
