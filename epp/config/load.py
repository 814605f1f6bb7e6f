"""Read an `EndpointPickerConfig`, and build what it describes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from epp import names
from epp.config.decode import Problems, TooManyProblems
from epp.config.document import MAX_BYTES, Document, read_document
from epp.config.loaded import LoadedConfig, LoadedPlugin, LoadedProfile
from epp.config.registry import Registry, built_in_registry
from epp.config.resolve import defaults, resolve
from epp.config.spec import BuildContext, FileDiscoverySpec, Kind, MetricsExtractorSpec, MetricsSourceSpec
from epp.director import Plugins
from epp.errors import ConfigError, Problem
from epp.pool.records import PoolView
from epp.scheduling.ports import Member
from epp.scheduling.profiles import FilterStep, PickerStep, Profile, ScorerStep

__all__ = ["Assembly", "LoadedConfig", "Refreshed", "build", "default_config", "load_config"]

# The one method that makes a plugin of a kind what it is.
_METHODS: Final = {
    Kind.FILTER: "keep",
    Kind.SCORER: "score",
    Kind.PICKER: "pick",
    Kind.PROFILE_HANDLER: "place",
}


class Refreshed(Protocol):
    """A plugin that wants to look at the pool from time to time, between requests."""

    def refresh(self, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a configuration comes to.

    Attributes:
        plugins: for the director.
        named: every plugin by its name.
        members, refreshed: the plugins that have these hooks.
        discovery: None where no plugin lists the endpoints.
        warnings: for the operator: deprecated names, parts without effect.
    """

    plugins: Plugins
    named: Mapping[str, object]
    members: tuple[Member, ...]
    refreshed: tuple[Refreshed, ...]
    discovery: FileDiscoverySpec | None
    metrics_source: MetricsSourceSpec
    metrics_extractor: MetricsExtractorSpec
    warnings: tuple[str, ...]


def load_config(text: str | bytes, source: str, registry: Registry | None = None) -> LoadedConfig:
    """Read and check a file completely; `source` names it in messages.

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
        loaded = resolve(document, registry or built_in_registry(), problems)
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


def build(loaded: LoadedConfig, view: PoolView, secret: bytes) -> Assembly:
    """Make the plugins. `secret`: random bytes, the root of cache keys.

    Raises:
        ConfigError: a plugin cannot be built.
    """
    problems: list[Problem] = []
    built: dict[str, Any] = {}
    for plugin in loaded.plugins:
        if plugin.spec.kind is not Kind.PROFILE_HANDLER:
            built[plugin.name] = _built(plugin, BuildContext(plugin.name, view, secret), problems)
    _raise(problems, loaded)
    types = {plugin.name: plugin for plugin in loaded.plugins}
    profiles = {profile.name: _profile(profile, types, built) for profile in loaded.profiles}
    context = BuildContext(loaded.handler, view, secret, profiles)
    built[loaded.handler] = _built(types[loaded.handler], context, problems)
    _raise(problems, loaded)
    return Assembly(
        plugins=_plugins(loaded, built),
        named=built,
        members=tuple(_having("joined", built.values())),
        refreshed=tuple(_having("refresh", built.values())),
        discovery=None if loaded.discovery is None else cast(FileDiscoverySpec, built[loaded.discovery]),
        metrics_source=built[loaded.metrics_source],
        metrics_extractor=built[loaded.extractor],
        warnings=loaded.warnings,
    )


def _raise(problems: list[Problem], loaded: LoadedConfig) -> None:
    if problems:
        raise ConfigError(loaded.source, *(_with_line(problem, loaded.document) for problem in problems))


def _plugins(loaded: LoadedConfig, built: Mapping[str, Any]) -> Plugins:
    every = built.values()
    return Plugins(
        handler=built[loaded.handler],
        request_hooks=tuple(_having("read", every)),
        screeners=tuple(_having("screen", every)),
        producers=tuple(_having("produce", (built[name] for name in loaded.producers))),
        admitters=tuple(_having("admit", every)),
        placed=tuple(_having("placed", every)),
        answered=tuple(_having("observe", every)),
    )


def _built(plugin: LoadedPlugin, context: BuildContext, problems: list[Problem]) -> Any:
    """The plugin, or None after a problem was added: a builder may be another package's code."""
    try:
        made = plugin.spec.build(context, plugin.params)
    except Exception as error:
        problems.append(
            Problem(plugin.path, f"{plugin.name} failed to start: {type(error).__name__}: {error}")
        )
        return None
    method = _METHODS.get(plugin.spec.kind)
    if method is not None and not _has(made, method):
        problems.append(
            Problem(plugin.path, f"{plugin.name} has no method {method}, as a {plugin.spec.kind} has")
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
