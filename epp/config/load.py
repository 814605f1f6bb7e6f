"""Read an `EndpointPickerConfig`, and build what it describes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, cast

from epp import names
from epp.config.decode import Problems, TooManyProblems
from epp.config.document import MAX_BYTES, Document, read_document
from epp.config.loaded import LoadedConfig, LoadedPlugin, LoadedProfile
from epp.config.registry import Registry, built_in_registry
from epp.config.resolve import defaults, resolve
from epp.config.spec import (
    BuildContext,
    FileDiscoverySpec,
    Kind,
    SourceUse,
    TokenEstimateSpec,
)
from epp.director import Plugins
from epp.errors import ConfigError, Problem
from epp.flow.admission import LegacyAdmission
from epp.flow.objectives import Objectives
from epp.payload.apis import DEFAULT_PARSER_TYPES, ParserSet
from epp.payload.estimate import Estimate
from epp.payload.render import ExactTokens
from epp.payload.rewrite import RewriteRules
from epp.pool.records import PoolView
from epp.scheduling.attributes import AttributeFilter, AttributeScorer
from epp.scheduling.ports import Member
from epp.scheduling.profiles import FilterStep, PickerStep, Profile, ScorerStep

__all__ = ["Assembly", "LoadedConfig", "Refreshed", "build", "default_config", "load_config"]

# What makes a plugin of a kind what it is: one of these methods.
_METHODS: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.FILTER: ("keep",),
    Kind.SCORER: ("score",),
    Kind.PICKER: ("pick",),
    Kind.PROFILE_HANDLER: ("place",),
    Kind.PRODUCER: ("produce", "placed"),
    Kind.SATURATION_DETECTOR: ("saturation",),
    Kind.ADMITTER: ("admit",),
    Kind.SCREENER: ("screen",),
    Kind.REQUEST_HOOK: ("read",),
    Kind.RESPONSE_HOOK: ("observe", "report"),
}


class Refreshed(Protocol):
    """A plugin that wants to look at the pool from time to time, between requests."""

    def refresh(self, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a configuration comes to.

    Attributes:
        plugins: for the director.
        named: every plugin by its name. types: theirs.
        detector: name of the saturation detector.
        members, refreshed: the plugins that have these hooks.
        attributes: keys of the columns of attributes that plugins read.
        discovery: None where no plugin lists the endpoints.
        warnings: for the operator: deprecated names, parts without effect.
        loaded: what all this was made from.
        changes: to be called when the assembly comes into use: plugins that go on get their new parameters.
    """

    plugins: Plugins
    named: Mapping[str, object]
    types: Mapping[str, str]
    detector: str
    members: tuple[Member, ...]
    refreshed: tuple[Refreshed, ...]
    attributes: tuple[str, ...]
    discovery: FileDiscoverySpec | None
    sources: tuple[SourceUse, ...]
    warnings: tuple[str, ...]
    loaded: LoadedConfig
    changes: tuple[Callable[[], None], ...] = ()


def load_config(
    text: str | bytes, source: str, registry: Registry | None = None, *, allow_experimental: bool = True
) -> LoadedConfig:
    """Read and check a file completely; `source` names it in messages.

    Whether alpha plugins may be used is for the command line to say; where they may, they are warned about.

    Raises:
        ConfigError: with every problem found, each with its field and line.
    """
    document = read_document(text, source)
    if document.value is None:
        raise ConfigError(source, Problem("", f"empty: expected {_HEAD}, and what differs from the defaults"))
    if not isinstance(document.value, dict):
        raise ConfigError(source, Problem("", f"expected a mapping with {_HEAD}"))
    problems = Problems()
    try:
        loaded = resolve(
            document, registry or built_in_registry(), problems, allow_experimental=allow_experimental
        )
    except TooManyProblems:
        loaded = None
    if loaded is None:
        found = sorted(problems.found, key=lambda problem: document.line_of(problem.path) or MAX_BYTES)
        raise ConfigError(source, *(_with_line(problem, document) for problem in found))
    return loaded


_HEAD: Final = f"apiVersion: {names.API_VERSION}, kind: {names.CONFIG_KIND}"


def default_config(registry: Registry | None = None) -> LoadedConfig:
    """The configuration where no file is given: queue 2, KV utilisation 2, prefix 3; the best total wins."""
    problems = Problems()
    loaded = defaults(Document("default", {}, {}), registry or built_in_registry(), problems)
    if loaded is None:
        raise ConfigError("default", *problems.found)
    return loaded


def _with_line(problem: Problem, document: Document) -> Problem:
    line = document.line_of(problem.path)
    return problem if line is None else Problem(problem.path, f"{problem.message} (line {line})")


def build(loaded: LoadedConfig, view: PoolView, secret: bytes, previous: Assembly | None = None) -> Assembly:
    """Make the plugins. `secret`: random bytes, the root of cache keys.

    Plugins of `previous`, the assembly in use, go on in the new one where they are the same, with what they
    remember. They are not touched before the assembly's `changes` are called.

    Raises:
        ConfigError: a plugin cannot be built.
    """
    problems: list[Problem] = []
    built: dict[str, Any] = {}
    changes: list[Callable[[], None]] = []
    for plugin in loaded.plugins:
        if plugin.spec.kind is Kind.PROFILE_HANDLER:
            continue
        living = None if previous is None else _living(plugin, previous, changes)
        context = BuildContext(plugin.name, view, secret)
        built[plugin.name] = _built(plugin, context, problems) if living is None else living
    _raise(problems, loaded)
    types = {plugin.name: plugin for plugin in loaded.plugins}
    profiles = {profile.name: _profile(profile, types, built) for profile in loaded.profiles}
    context = BuildContext(loaded.handler, view, secret, profiles)
    built[loaded.handler] = _built(types[loaded.handler], context, problems)
    _raise(problems, loaded)
    return Assembly(
        plugins=_plugins(loaded, built),
        named=built,
        types={plugin.name: plugin.spec.type for plugin in loaded.plugins},
        detector=loaded.detector,
        members=tuple(_having("joined", built.values())),
        refreshed=tuple(_having("refresh", built.values())),
        attributes=tuple(
            made.attribute for made in built.values() if isinstance(made, AttributeFilter | AttributeScorer)
        ),
        discovery=None if loaded.discovery is None else cast(FileDiscoverySpec, built[loaded.discovery]),
        sources=tuple(
            SourceUse(built[source.name], tuple(built[name] for name in source.extractors))
            for source in loaded.sources
        ),
        warnings=loaded.warnings,
        loaded=loaded,
        changes=tuple(changes),
    )


def _living(plugin: LoadedPlugin, previous: Assembly, changes: list[Callable[[], None]]) -> Any:
    """The plugin in use that goes on as `plugin`; None where there is none."""
    before = next((each for each in previous.loaded.plugins if each.name == plugin.name), None)
    if before is None or before.spec.type != plugin.spec.type:
        return None
    living: Any = previous.named[plugin.name]
    if before.params == plugin.params:
        return living
    shaping = plugin.spec.state_parameters
    if shaping is None or not _has(living, "reconfigure"):
        return None
    if any(getattr(before.params, name) != getattr(plugin.params, name) for name in shaping):
        return None
    changes.append(partial(living.reconfigure, plugin.params))
    return living


def _raise(problems: list[Problem], loaded: LoadedConfig) -> None:
    if problems:
        raise ConfigError(loaded.source, *(_with_line(problem, loaded.document) for problem in problems))


def _plugins(loaded: LoadedConfig, built: Mapping[str, Any]) -> Plugins:
    every = built.values()
    return Plugins(
        handler=built[loaded.handler],
        parsers=_parsers(loaded, built),
        objectives=Objectives(loaded.objectives),
        rewrites=RewriteRules(loaded.model_rewrites),
        admission=LegacyAdmission(built[loaded.detector]),
        request_hooks=tuple(_having("read", every)),
        needing=tuple(_exact_tokens(every)),
        holding=tuple(_having("hold", every)),
        screeners=tuple(_having("screen", every)),
        producers=tuple(_having("produce", (built[name] for name in loaded.producers))),
        admitters=tuple(_having("admit", every)),
        placed=tuple(_having("placed", every)),
        answered=tuple(_having("observe", every)),
        reporters=tuple(_having("report", every)),
    )


def _exact_tokens(plugins: Iterable[Any]) -> list[ExactTokens]:
    """The first one: tokens are counted once."""
    estimates = (made for made in plugins if isinstance(made, TokenEstimateSpec))
    return [made.exact for made in estimates if made.exact is not None][:1]


def _parsers(loaded: LoadedConfig, built: Mapping[str, Any]) -> ParserSet:
    """The parsers that the file names, or the default ones; tokens estimated as the token producer says."""
    estimates = [made.estimate for made in built.values() if isinstance(made, TokenEstimateSpec)]
    estimate = estimates[0] if estimates else Estimate()
    if loaded.parsers is None:
        return ParserSet(DEFAULT_PARSER_TYPES, estimate)
    return ParserSet([built[name].type for name in loaded.parsers], estimate)


def _built(plugin: LoadedPlugin, context: BuildContext, problems: list[Problem]) -> Any:
    """The plugin, or None after a problem was added: a builder may be another package's code."""
    try:
        made = plugin.spec.build(context, plugin.params)
    except Exception as error:
        problems.append(
            Problem(plugin.path, f"{plugin.name} failed to start: {type(error).__name__}: {error}")
        )
        return None
    methods = _METHODS.get(plugin.spec.kind, ())
    if methods and not isinstance(made, TokenEstimateSpec) and not any(_has(made, each) for each in methods):
        wanted = " or ".join(methods)
        problems.append(
            Problem(plugin.path, f"{plugin.name} has no method {wanted}, as a {plugin.spec.kind} has")
        )
    return made


def _profile(profile: LoadedProfile, plugins: dict[str, LoadedPlugin], built: dict[str, Any]) -> Profile:
    filters: list[FilterStep] = []
    scorers: list[ScorerStep] = []
    pickers: list[PickerStep] = []
    for use in profile.plugins:
        spec, made = plugins[use.name].spec, built[use.name]
        # By what a plugin can do, not by its kind: some filter and score.
        if _has(made, "keep"):
            filters.append(FilterStep(use.name, spec.type, made))
        if _has(made, "score"):
            scorers.append(ScorerStep(use.name, spec.type, use.weight, made))
        if _has(made, "pick"):
            pickers.append(PickerStep(use.name, spec.type, made))
    return Profile(profile.name, tuple(filters), tuple(scorers), pickers[0])


def _has(plugin: object, method: str) -> bool:
    return callable(getattr(plugin, method, None))


def _having(method: str, plugins: Iterable[Any]) -> Iterable[Any]:
    return (plugin for plugin in plugins if _has(plugin, method))
