"""From a loaded configuration to plugins, and types from other packages."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.config.load import Assembly, build, default_config, load_config
from epp.config.registry import BUILT_INS, NOT_YET, Registry, built_in_registry
from epp.config.schema import NoParameters
from epp.config.spec import (
    BuildContext,
    FileDiscoverySpec,
    Kind,
    MetricsExtractorSpec,
    MetricsSourceSpec,
    PluginSpec,
    SourceUse,
    Stability,
)
from epp.errors import ConfigError
from epp.kvcache.approximate import ApproximatePrefixProducer
from epp.pool.records import Floats, Mask
from epp.pool.store import PoolStore
from epp.scheduling.ports import Ctx
from epp.scheduling.profiles import SingleProfileHandler
from epp.scheduling.records import PREFIX_MATCH, FactKey

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


class ColourParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    favourite_colour: str = "red"
    fallbacks: tuple[str, ...] = ("blue",)


class ColourScorer:
    """A scorer with every hook."""

    def __init__(self, context: BuildContext, params: ColourParams) -> None:
        self.context, self.params = context, params
        self.heard: list[Any] = []

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        return np.zeros(len(alive))

    def placed(self, ctx: Ctx, ticket: object) -> None:
        self.heard.append(ticket)

    def observe(self, ticket: object, fact: object, now: float) -> None:
        self.heard.append(fact)

    def joined(self, slot: int) -> None:
        self.heard.append(slot)

    def left(self, slot: int) -> None:
        self.heard.append(slot)

    def refresh(self, now: float) -> None:
        self.heard.append(now)


COLOUR = PluginSpec("colour-scorer", Kind.SCORER, ColourParams, ColourScorer, Stability.BETA)


def registry(*specs: PluginSpec, **offers: Any) -> Registry:
    """The built-ins and what packages offer, by type; underscores stand for dashes."""
    loads: dict[str, list[tuple[str, Callable[[], object]]]] = {
        spec.type: [(f"other.package:{spec.type}", lambda spec=spec: spec)] for spec in specs
    }
    loads |= {name.replace("_", "-"): offer for name, offer in offers.items()}
    own = built_in_registry()
    return Registry(own.specs, own.not_yet, lambda name: loads.get(name, []))


def assemble(text: str, among: Registry | None = None) -> Assembly:
    return build(load_config(HEAD + text, "file", among), PoolStore().view, b"secret")


def scorer_of(assembly: Assembly, name: str) -> Any:
    assert isinstance(assembly.plugins.handler, SingleProfileHandler)
    return next(step.scorer for step in assembly.plugins.handler.profile.scorers if step.name == name)


def producers(assembly: Assembly) -> list[str]:
    """Names of the data producers, in the order they run."""
    names = {id(made): name for name, made in assembly.named.items()}
    return [names[id(producer)] for producer in assembly.plugins.producers]


# -- built-ins --------------------------------------------------------------------------------------


def test_the_default_assembly() -> None:
    assembly = build(default_config(), PoolStore().view, b"secret")
    (producer,) = assembly.plugins.producers
    assert producer is assembly.named["approx-prefix-cache-producer"]
    assert isinstance(producer, ApproximatePrefixProducer)
    assert producer in assembly.plugins.placed
    assert producer in assembly.plugins.answered
    assert producer in assembly.members
    assert producer in assembly.refreshed
    assert assembly.discovery is None
    assert assembly.sources == (SourceUse(MetricsSourceSpec(), (MetricsExtractorSpec(),)),)


def test_parameters_reach_the_specs() -> None:
    assembly = assemble("""
plugins:
- {name: pods, type: file-discovery, parameters: {path: /e.yaml, watchFile: true}}
- type: metrics-data-source
  parameters: {scheme: https, path: /m, insecureSkipVerify: false, interval: 1m0.5s}
- {type: core-metrics-extractor, parameters: {engineLabelKey: engine}}
dataLayer: {discovery: {pluginRef: pods}}
""")
    assert assembly.discovery == FileDiscoverySpec("/e.yaml", watch=True)
    (use,) = assembly.sources
    assert use.source == MetricsSourceSpec("https", "/m", False, 60.5)
    assert use.extractors == (MetricsExtractorSpec("engine", "vllm"),)


def test_the_estimating_token_producer_is_no_data_producer() -> None:
    assembly = assemble("plugins: [{type: token-producer}, {type: prefix-cache-scorer}]\n")
    assert producers(assembly) == ["approx-prefix-cache-producer"]


def test_declared_facts_are_those_of_the_plugin() -> None:
    """The table's `needs` and `provides` say what the built objects do."""
    for spec in BUILT_INS:
        if spec.kind is Kind.PRODUCER and spec.provides:
            context = BuildContext("some-name", PoolStore().view, b"secret")
            made: Any = spec.build(context, spec.params())
            assert made.provides == tuple(FactKey(kind, "some-name") for kind in spec.provides)
            assert made.needs == spec.needs(spec.params())


def test_the_tables_hold_each_type_once() -> None:
    types = [each.type for each in (*BUILT_INS, *NOT_YET)]
    assert len(types) == len(set(types))
    replacements = {each.replaced_by for each in NOT_YET if each.replaced_by}
    assert replacements <= set(types)


# -- other packages ---------------------------------------------------------------------------------


def test_a_plugin_of_another_package() -> None:
    text = """
plugins:
- {name: mine, type: colour-scorer, parameters: {favouriteColour: green}}
- type: queue-scorer
schedulingProfiles:
- name: p
  plugins: [{pluginRef: mine, weight: 4}, {pluginRef: queue-scorer}]
"""
    assembly = assemble(text, registry(COLOUR))
    made = scorer_of(assembly, "mine")
    assert isinstance(made, ColourScorer)
    assert (made.context.name, made.context.secret) == ("mine", b"secret")
    assert made.params == ColourParams("green")
    for hooks in (assembly.plugins.placed, assembly.plugins.answered, assembly.members, assembly.refreshed):
        assert made in hooks


def test_nothing_is_loaded_unless_named() -> None:
    def explode() -> object:
        raise AssertionError

    own = built_in_registry()
    asked: list[str] = []

    def installed(name: str) -> list[tuple[str, Callable[[], object]]]:
        asked.append(name)
        return [("x:y", explode)] if name == "other" else []

    load_config(HEAD + "plugins: [{type: queue-scorer}]\n", "f", Registry(own.specs, own.not_yet, installed))
    assert asked == []


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        ([("a:B", lambda: 1 / 0)], "a:B cannot be loaded: ZeroDivisionError"),
        ([("a:B", lambda: object())], "a:B is not the PluginSpec of my-scorer"),
        ([("a:B", lambda: COLOUR)], "a:B is not the PluginSpec of my-scorer"),
        ([("a:B", lambda: COLOUR), ("c:D", lambda: COLOUR)], "offered twice, by a:B and c:D"),
    ],
)
def test_an_offer_that_cannot_be_used(offer: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(HEAD + "plugins: [{type: my-scorer}]\n", "f", registry(my_scorer=offer))
    (problem,) = caught.value.problems
    assert problem.path == "$.plugins[0].type"
    assert said in problem.message


def spec(kind: Kind, build_it: Callable[[BuildContext, Any], object], **options: Any) -> PluginSpec:
    chosen = {"stability": Stability.STABLE, "type": "theirs"} | options
    return PluginSpec(kind=kind, params=NoParameters, build=build_it, **chosen)


def test_a_type_not_supported_yet_may_come_from_a_package() -> None:
    theirs = spec(
        Kind.SCORER, lambda context, params: ColourScorer(context, ColourParams()), type="latency-scorer"
    )
    assembly = assemble("plugins: [{type: latency-scorer}]\n", registry(theirs))
    assert isinstance(scorer_of(assembly, "latency-scorer"), ColourScorer)


def test_deprecated_and_experimental_types_are_warned_about() -> None:
    theirs = spec(Kind.SCORER, ColourScorer, stability=Stability.ALPHA, replaced_by="queue-scorer")
    warnings = load_config(HEAD + "plugins: [{type: theirs}]\n", "f", registry(theirs)).warnings
    assert warnings == (
        "$.plugins[0].type: theirs is deprecated; use queue-scorer",
        "$.plugins[0].type: theirs is experimental and may change",
    )


def test_a_parser_of_a_package_is_refused() -> None:
    with pytest.raises(ConfigError, match="a parser from a package is not supported yet"):
        assemble("plugins: [{type: theirs}]\n", registry(spec(Kind.PARSER, ColourScorer)))


def test_a_builder_that_fails_is_named_with_its_block() -> None:
    def fails(context: BuildContext, params: object) -> object:
        raise OSError("no such file")

    with pytest.raises(ConfigError, match=r"\$\.plugins\[0\]: theirs failed to start: OSError: no such file"):
        assemble("plugins: [{type: theirs}]\n", registry(spec(Kind.SCORER, fails)))


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Kind.FILTER, "keep"),
        (Kind.SCORER, "score"),
        (Kind.PICKER, "pick"),
        (Kind.PROFILE_HANDLER, "place"),
        (Kind.PRODUCER, "produce or placed"),
        (Kind.SATURATION_DETECTOR, "saturation"),
        (Kind.ADMITTER, "admit"),
        (Kind.SCREENER, "screen"),
        (Kind.REQUEST_HOOK, "read"),
        (Kind.RESPONSE_HOOK, "observe or report"),
    ],
)
def test_what_is_built_must_be_what_it_says(kind: Kind, method: str) -> None:
    with pytest.raises(ConfigError, match=f"theirs has no method {method}, as a {kind} has"):
        assemble("plugins: [{type: theirs}]\n", registry(spec(kind, lambda context, params: object())))


class Everything:
    """A plugin of any kind."""

    def __init__(self, context: BuildContext, params: object) -> None:
        self.name = context.name
        self.read = self.screen = self.admit = self.saturation = self.keep = self.observe = self.anything

    def anything(self, *arguments: object) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        (Kind.ADMITTER, "admitters"),
        (Kind.SCREENER, "screeners"),
        (Kind.REQUEST_HOOK, "request_hooks"),
        (Kind.RESPONSE_HOOK, "answered"),
    ],
)
def test_packages_offer_hooks(kind: Kind, hook: str) -> None:
    assembly = assemble("plugins: [{name: mine, type: theirs}]\n", registry(spec(kind, Everything)))
    assert assembly.named["mine"] in getattr(assembly.plugins, hook)


def test_a_package_offers_a_detector() -> None:
    text = "plugins: [{type: theirs}]\nflowControl: {saturationDetector: {pluginRef: theirs}}\n"
    loaded = load_config(HEAD + text, "f", registry(spec(Kind.SATURATION_DETECTOR, Everything)))
    assert loaded.detector == "theirs"
    assert isinstance(build(loaded, PoolStore().view, b"secret").named["theirs"], Everything)


def test_an_experimental_default_producer_is_told_by_who_needs_it() -> None:
    own = built_in_registry()
    made = PluginSpec("made-up", Kind.PRODUCER, NoParameters, Maker, Stability.ALPHA, provides=("made",))
    among = Registry(
        {**own.specs, "made-up": made, "needy": maker("needy", "made-up")}, own.not_yet, lambda name: []
    )
    text = HEAD + "plugins: [{type: needy}]\n"
    assert "made-up" in load_config(text, "f", among).producers
    with pytest.raises(ConfigError) as caught:
        load_config(text, "f", among, allow_experimental=False)
    (problem,) = caught.value.problems
    assert problem.path == "$.plugins[0]"
    assert problem.message.startswith("made-up, which needy needs, is experimental (alpha); to use it, start")


# -- facts and their producers ----------------------------------------------------------------------


class Maker:
    def __init__(self, context: BuildContext, params: object) -> None:
        self.name = context.name
        self.provides: tuple[FactKey, ...] = ()
        self.needs: tuple[FactKey, ...] = ()

    def produce(self, ctx: Ctx) -> None:
        return None


def maker(type_name: str, *needs: str) -> PluginSpec:
    return PluginSpec(
        type_name,
        Kind.PRODUCER,
        NoParameters,
        Maker,
        Stability.STABLE,
        needs=lambda params: tuple(FactKey("made", name) for name in needs),
        provides=("made",),
    )


def test_producers_stand_after_those_they_need() -> None:
    """A diamond: d needs b and c, which need a."""
    among = registry(maker("d", "b", "c"), maker("b", "a"), maker("c", "a"), maker("a"))
    text = "plugins: [{type: d}, {type: c}, {type: b}, {type: a}]\n"
    order = [name for name in producers(assemble(text, among)) if name in "abcd"]
    assert order.index("a") < min(order.index("b"), order.index("c"))
    assert order.index("d") == 3


@pytest.mark.parametrize("needs", [("a",), ("b",)])
def test_a_circle_of_needs_is_refused(needs: tuple[str, ...]) -> None:
    among = registry(maker("a", *needs), maker("b", "a"))
    with pytest.raises(ConfigError, match=r"\$\.plugins\[.\]: data producers need each other in a circle: "):
        load_config(HEAD + "plugins: [{type: a}, {type: b}]\n", "f", among)


def test_a_missing_producer_of_another_kind_is_no_default() -> None:
    with pytest.raises(ConfigError, match="needs made from 'token-producer', which is not defined"):
        load_config(HEAD + "plugins: [{type: a}]\n", "f", registry(maker("a", "token-producer")))


def test_needs_that_cannot_be_told() -> None:
    theirs = spec(Kind.SCORER, ColourScorer, needs=lambda params: params.nothing)
    with pytest.raises(ConfigError, match="its needs cannot be told: AttributeError"):
        load_config(HEAD + "plugins: [{type: theirs}]\n", "f", registry(theirs))


def test_a_scorer_may_name_the_producer_of_a_package() -> None:
    theirs = PluginSpec(
        "theirs", Kind.PRODUCER, NoParameters, Maker, Stability.STABLE, provides=(PREFIX_MATCH,)
    )
    text = """
plugins:
- type: theirs
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: theirs}}
"""
    assert producers(assemble(text, registry(theirs))) == ["theirs"]
