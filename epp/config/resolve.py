"""From a decoded file to plugins, profiles and references: defaults filled in, everything checked."""

from collections.abc import Iterable, Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import msgspec

from epp import names
from epp.config.decode import Problems, decode, decode_fields, nearest, quoted
from epp.config.document import Document
from epp.config.flow_section import check_flow_control, objectives, saturation_detector
from epp.config.loaded import LoadedConfig, LoadedPlugin, LoadedProfile, PluginUse
from epp.config.reading import Entry, Reading
from epp.config.registry import PluginImportError, Registry
from epp.config.rewrite_section import model_rewrites
from epp.config.schema import (
    DataLayer,
    EndpointPickerConfig,
    FlowControl,
    PluginEntry,
    ProfileEntry,
    ProfilePlugin,
    RequestHandler,
)
from epp.config.sources_section import data_sources
from epp.config.spec import Kind, KnownType, PluginSpec
from epp.scheduling.records import FactKey

DEFAULT_PROFILE: Final = "default"
DEFAULT_SCORERS: Final = (
    ("queue-scorer", 2.0),
    ("kv-cache-utilization-scorer", 2.0),
    ("prefix-cache-scorer", 3.0),
)
DEFAULT_PICKER: Final = "max-score-picker"
DEFAULT_HANDLER: Final = "single-profile-handler"

_HEAD: Final[Mapping[str, Any]] = {"api_version": names.API_VERSION, "kind": names.CONFIG_KIND}

# Everything in them is optional.
_SECTIONS: Final[tuple[tuple[str, str, type[msgspec.Struct]], ...]] = (
    ("dataLayer", "data_layer", DataLayer),
    ("flowControl", "flow_control", FlowControl),
    ("requestHandler", "request_handler", RequestHandler),
)

GATES: Final[Mapping[str, bool]] = {"flowControl": False, "haPopulateNonLeaderDatastore": True}

_CHOOSING: Final = (Kind.FILTER, Kind.SCORER, Kind.PICKER)
# A saturation detector is a filter too.
_IN_PROFILES: Final = (*_CHOOSING, Kind.SATURATION_DETECTOR)
_FROM_PACKAGES: Final = (
    *_IN_PROFILES,
    Kind.PROFILE_HANDLER,
    Kind.PRODUCER,
    Kind.ADMITTER,
    Kind.SCREENER,
    Kind.REQUEST_HOOK,
    Kind.RESPONSE_HOOK,
)
# Without flow control they have nothing to do.
OF_QUEUES: Final = (Kind.FAIRNESS, Kind.ORDERING, Kind.USAGE_LIMIT, Kind.EVICTION)
# Where a plugin of the kind is referred to, if not in a profile.
_PLACES: Final = {
    Kind.DISCOVERY: "$.dataLayer.discovery",
    Kind.PARSER: "$.requestHandler.parsers",
    Kind.SATURATION_DETECTOR: "$.flowControl.saturationDetector",
}


def resolve(
    document: Document, registry: Registry, problems: Problems, *, allow_experimental: bool
) -> LoadedConfig | None:
    """Check the whole file and complete it. None after problems were added."""
    value = document.value
    fields = decode_fields(value, EndpointPickerConfig, "$", problems)
    config = EndpointPickerConfig(**{**_HEAD, **fields, **dict(_in_part(value, fields))})
    reading = Reading(registry, problems, allow_experimental)
    reading.gates = _gates(reading, config.feature_gates)
    _read_plugins(reading, value.get("plugins"))
    return complete(reading, document, config)


def _in_part(value: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is right in sections that are not right as a whole, so that one fault hides no other.

    Their faults have been added to the problems. In place of a name that is wrong there is none.
    """
    for name, field, section in _SECTIONS:
        given = value.get(name)
        if field not in fields and isinstance(given, Mapping):
            yield field, section(**decode_fields(given, section, "", Problems()))
    profiles = value.get("schedulingProfiles")
    if "scheduling_profiles" not in fields and profiles is not None:
        listed = profiles if isinstance(profiles, list) else [None]
        yield "scheduling_profiles", tuple(map(_profile_in_part, listed))


def _profile_in_part(value: Any) -> ProfileEntry:
    fields = decode_fields(value, ProfileEntry, "", Problems())
    plugins = value.get("plugins") if isinstance(value, Mapping) else None
    if "plugins" not in fields and isinstance(plugins, list):
        read = [decode_fields(each, ProfilePlugin, "", Problems()) for each in plugins]
        fields["plugins"] = tuple(ProfilePlugin(**{"plugin_ref": "", **each}) for each in read)
    return ProfileEntry(**{"name": "", **fields})


def defaults(document: Document, registry: Registry, problems: Problems) -> LoadedConfig | None:
    """The configuration of an absent file."""
    reading = Reading(registry, problems, gates=dict(GATES))
    return complete(reading, document, EndpointPickerConfig(**_HEAD))


def complete(reading: Reading, document: Document, config: EndpointPickerConfig) -> LoadedConfig | None:
    """Every section checked, defaults added. None where there are problems."""
    layer = config.data_layer or DataLayer()
    _check_head(reading, config)
    check_flow_control(reading, config)
    parsers = _parsers(reading, config)
    discovery = _discovery(reading, layer)
    sources = data_sources(reading, layer)
    profiles = _profiles(reading, config)
    detector = saturation_detector(reading, config)
    handler = _handler(reading, profiles)
    producers = _producers(reading)
    priorities = objectives(reading, config.objectives)
    rewrites = model_rewrites(reading, config.model_rewrites)
    _warn_unused(reading, profiles, {discovery, detector, *(parsers or ())})
    if reading.problems.found:
        return None
    return LoadedConfig(
        document=document,
        gates=reading.gates,
        plugins=tuple(entry.plugin for entry in reading.entries.values() if entry.plugin is not None),
        profiles=profiles,
        handler=handler,
        producers=producers,
        sources=sources,
        inject_defaults=layer.inject_defaults,
        discovery=discovery,
        warnings=tuple(reading.warnings),
        detector=detector,
        parsers=parsers,
        objectives=priorities,
        model_rewrites=rewrites,
    )


# -- plugin blocks ----------------------------------------------------------------------------------


def _read_plugins(reading: Reading, blocks: Any) -> None:
    """Each block on its own, so that one bad block hides no other."""
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        path = f"$.plugins[{index}]"
        # The form of the block was reported with the rest of the file.
        entry = decode(block, PluginEntry, path, Problems())
        if entry is None:
            name = isinstance(block, Mapping) and (block.get("name") or block.get("type"))
            if isinstance(name, str) and name not in reading.entries:
                reading.entries[name] = Entry(name, path, None, None)
            continue
        name = entry.name or entry.type
        read = _read_plugin(reading, name, entry, path)
        if (other := reading.entries.get(name)) is not None:
            reading.problems.add(f"{path}.name", f"{quoted(name)} is already the name of {other.path}")
        else:
            reading.entries[name] = read


def _read_plugin(reading: Reading, name: str, entry: PluginEntry, path: str) -> Entry:
    problems = reading.problems
    try:
        found = reading.registry.find(entry.type)
    except PluginImportError as error:
        problems.add(f"{path}.type", f"{entry.type}: {error}")
        return Entry(name, path, None, None)
    match found:
        case None:
            hint = nearest(entry.type, reading.registry.types())
            problems.add(f"{path}.type", f"unknown plugin type {quoted(entry.type)}{hint}")
            return Entry(name, path, None, None)
        case KnownType(type_name, kind) if kind in OF_QUEUES and not reading.gates["flowControl"]:
            reading.warnings.append(
                f"{path}: {type_name} ({kind}) has no effect: the feature gate flowControl is off"
            )
            return Entry(name, path, kind, None)
        case KnownType(type_name, kind, replaced_by):
            instead = f"; it is deprecated in favour of {replaced_by}" if replaced_by else ""
            problems.add(f"{path}.type", f"{type_name} ({kind}) is not supported yet{instead}")
            return Entry(name, path, kind, None)
        case PluginSpec():
            return _read_known(reading, name, found, entry, path)


def _read_known(reading: Reading, name: str, spec: PluginSpec, entry: PluginEntry, path: str) -> Entry:
    own = reading.registry.specs.get(spec.type) is spec
    if not own and spec.kind not in _FROM_PACKAGES:
        reading.problems.add(
            f"{path}.type", f"{spec.type}: a {spec.kind} from a package is not supported yet"
        )
    if spec.replaced_by:
        reading.warnings.append(f"{path}.type: {spec.type} is deprecated; use {spec.replaced_by}")
    reading.check_stability(spec, f"{path}.type")
    given = entry.parameters or {}
    params = decode(given, spec.params, f"{path}.parameters", reading.problems)
    plugin = None if params is None else LoadedPlugin(name, spec, params, path, given)
    return Entry(name, path, spec.kind, plugin)


# -- the sections -----------------------------------------------------------------------------------


def _check_head(reading: Reading, config: EndpointPickerConfig) -> None:
    if config.api_version == names.LEGACY_API_VERSION:
        reading.warnings.append(f"$.apiVersion: {config.api_version} is deprecated; use {names.API_VERSION}")
    elif config.api_version != names.API_VERSION:
        reading.problems.add(
            "$.apiVersion", f"expected {names.API_VERSION}, not {quoted(config.api_version)}"
        )
    if config.kind != names.CONFIG_KIND:
        reading.problems.add("$.kind", f"expected {names.CONFIG_KIND}, not {quoted(config.kind)}")


def _gates(reading: Reading, written: Iterable[str]) -> dict[str, bool]:
    gates = dict(GATES)
    for index, text in enumerate(written):
        path = f"$.featureGates[{index}]"
        name, given, value = text.partition("=")
        if name not in GATES:
            hint = nearest(name, GATES) or f"; known: {', '.join(GATES)}"
            reading.problems.add(path, f"unknown feature gate {quoted(name)}{hint}")
        elif given and value not in ("true", "false"):
            reading.problems.add(path, f"expected {name}=true or {name}=false, not {quoted(text)}")
        else:
            gates[name] = value != "false"
            if name == "flowControl" and gates[name]:
                reading.problems.add(path, "flowControl is not supported yet")
            elif name != "flowControl" and not gates[name]:
                reading.warnings.append(f"{path}: {name} has no effect: every replica follows the whole pool")
    return gates


def _parsers(reading: Reading, config: EndpointPickerConfig) -> tuple[str, ...] | None:
    """Names of the parsers to try; None = the default ones. The deprecated place counts last."""
    referred = [ref.plugin_ref for ref in config.request_handler.parsers] if config.request_handler else []
    for index, name in enumerate(referred):
        reading.refer(name, f"$.requestHandler.parsers[{index}].pluginRef", Kind.PARSER)
    if config.parser is not None:
        reading.warnings.append("$.parser is deprecated; its place is $.requestHandler.parsers")
        reading.refer(config.parser.plugin_ref, "$.parser.pluginRef", Kind.PARSER)
        referred = referred or [config.parser.plugin_ref]
    return tuple(referred) or None


def _discovery(reading: Reading, layer: DataLayer) -> str | None:
    for path, value in (
        ("peerDiscovery", layer.peer_discovery),
        ("crossReplicaSyncerPluginRef", layer.cross_replica_syncer_plugin_ref),
        ("crossReplicaSyncInterval", layer.cross_replica_sync_interval),
    ):
        if value is not None:
            reading.problems.add(f"$.dataLayer.{path}", "not supported yet")
    if layer.discovery is None:
        return None
    reading.refer(layer.discovery.plugin_ref, "$.dataLayer.discovery.pluginRef", Kind.DISCOVERY)
    return layer.discovery.plugin_ref


# -- profiles, handler, producers -------------------------------------------------------------------


def _profiles(reading: Reading, config: EndpointPickerConfig) -> tuple[LoadedProfile, ...]:
    if not config.scheduling_profiles:
        return (_default_profile(reading),)
    profiles: dict[str, LoadedProfile] = {}
    for index, entry in enumerate(config.scheduling_profiles):
        path = f"$.schedulingProfiles[{index}]"
        if entry.name and entry.name in profiles:
            reading.problems.add(f"{path}.name", f"a second profile named {quoted(entry.name)}")
        uses: dict[str, PluginUse] = {}
        for number, plugin in enumerate(entry.plugins):
            _use(reading, plugin, f"{path}.plugins[{number}]", uses)
        profiles[entry.name] = _with_picker(reading, entry.name, list(uses.values()), path)
    return tuple(profiles.values())


def _use(reading: Reading, plugin: ProfilePlugin, path: str, uses: dict[str, PluginUse]) -> None:
    name = plugin.plugin_ref
    if not name:
        return
    entry = reading.refer(name, f"{path}.pluginRef", *_IN_PROFILES)
    if name in uses:
        reading.problems.add(f"{path}.pluginRef", f"{name} is in this profile already")
    if entry is None:
        return
    if plugin.weight is not None and entry.kind not in (Kind.SCORER, None):
        reading.warnings.append(f"{path}.weight has no effect: {name} is a {entry.kind}")
    uses[name] = PluginUse(name, 1.0 if plugin.weight is None else plugin.weight, path)


def _default_profile(reading: Reading) -> LoadedProfile:
    """Everything the file defines for profiles; where it leaves the choice alone, the default scorers."""
    uses = [PluginUse(entry.name, 1.0, "") for entry in reading.of_kind(*_IN_PROFILES)]
    if not reading.of_kind(*_CHOOSING):
        uses += [PluginUse(reading.provide(name), weight, "") for name, weight in DEFAULT_SCORERS]
    return _with_picker(reading, DEFAULT_PROFILE, uses, "")


def _with_picker(reading: Reading, name: str, uses: list[PluginUse], path: str) -> LoadedProfile:
    kinds = {use.name: reading.entries[use.name].kind for use in uses}
    pickers = [use for use in uses if kinds[use.name] is Kind.PICKER]
    if not pickers:
        uses = [*uses, PluginUse(reading.provide(DEFAULT_PICKER), 1.0, "")]
    elif len(pickers) > 1:
        where = pickers[1].path or reading.entries[pickers[1].name].path
        both = " and ".join(use.name for use in pickers[:2])
        reading.problems.add(where, f"{f'profile {name}'.rstrip()} has more than one picker: {both}")
    if not any(kind in (Kind.SCORER, None) for kind in kinds.values()):
        reading.warnings.append(f"profile {name} has no scorer: every endpoint is as good as another")
    return LoadedProfile(name, tuple(uses), path)


def _handler(reading: Reading, profiles: tuple[LoadedProfile, ...]) -> str:
    handlers = reading.of_kind(Kind.PROFILE_HANDLER)
    for extra in handlers[1:]:
        reading.problems.add(extra.path, f"a second profile handler; {handlers[0].name} is one already")
    name = handlers[0].name if handlers else reading.provide(DEFAULT_HANDLER)
    plugin = reading.entries[name].plugin
    single = plugin is not None and plugin.spec.type == DEFAULT_HANDLER
    if single and len(profiles) > 1:
        reading.problems.add(
            "$.schedulingProfiles", f"{len(profiles)} profiles, but {DEFAULT_HANDLER} runs exactly one"
        )
    return name


def _producers(reading: Reading) -> tuple[str, ...]:
    """Every needed fact has its producer, made by default where its name is that of a type; in order."""
    pending = list(reading.entries.values())
    while pending:
        entry = pending.pop()
        for name in _missing_producers(reading, entry):
            made = reading.entries[reading.provide(name)]
            reading.check_stability(reading.registry.specs[name], entry.path, f", which {entry.name} needs,")
            pending.append(made)
    graph = {
        entry.name: [fact.producer for fact in _needs(reading, entry)]
        for entry in reading.of_kind(Kind.PRODUCER)
        if entry.plugin is not None
    }
    try:
        order = TopologicalSorter(graph).static_order()
        return tuple(name for name in order if name in graph)
    except CycleError as error:
        cycle: list[str] = error.args[1]
        path = reading.entries[cycle[0]].path
        reading.problems.add(path, f"data producers need each other in a circle: {' <- '.join(cycle)}")
        return ()


def _needs(reading: Reading, entry: Entry) -> tuple[FactKey, ...]:
    """Facts the plugin reads; nothing while its block has problems."""
    if entry.plugin is None:
        return ()
    try:
        return entry.plugin.spec.needs(entry.plugin.params)
    except Exception as error:
        reading.problems.add(entry.path, f"its needs cannot be told: {type(error).__name__}: {error}")
        return ()


def _missing_producers(reading: Reading, entry: Entry) -> list[str]:
    """Default producers that `entry` needs and nobody defined. Adds a problem for any other missing one."""
    missing: list[str] = []
    for fact in _needs(reading, entry):
        producer = reading.entries.get(fact.producer)
        default = reading.registry.specs.get(fact.producer)
        if producer is None and default is not None and fact.kind in default.provides:
            missing.append(fact.producer)
            continue
        if producer is not None and (producer.kind is None or _provides(producer, fact.kind)):
            continue
        makers = [other.name for other in reading.of_kind(Kind.PRODUCER) if _provides(other, fact.kind)]
        problem = "is not defined" if producer is None else f"does not make {fact.kind}"
        hint = f"producers that do: {', '.join(makers) or 'none'}"
        reading.problems.add(
            f"{entry.path}.parameters",
            f"needs {fact.kind} from {quoted(fact.producer)}, which {problem}; {hint}",
        )
    return missing


def _provides(entry: Entry, fact_kind: str) -> bool:
    """A block with problems of its own gets the benefit of the doubt."""
    if entry.kind is not Kind.PRODUCER:
        return False
    return entry.plugin is None or fact_kind in entry.plugin.spec.provides


def _warn_unused(reading: Reading, profiles: tuple[LoadedProfile, ...], referred: Set[str | None]) -> None:
    used = {use.name for profile in profiles for use in profile.plugins} | referred
    for kind in (*_IN_PROFILES, Kind.DISCOVERY, Kind.PARSER):
        place = _PLACES.get(kind, "a scheduling profile")
        for entry in reading.of_kind(kind):
            if entry.name not in used:
                reading.warnings.append(f"{entry.path}: {entry.name} is not used; refer to it in {place}")
