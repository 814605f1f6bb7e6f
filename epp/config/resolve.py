"""From a decoded file to plugins, profiles and references: defaults filled in, everything checked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from epp import names
from epp.config.decode import Problems, decode, decode_fields, nearest, quoted
from epp.config.document import Document
from epp.config.loaded import LoadedConfig, LoadedPlugin, LoadedProfile, PluginUse
from epp.config.registry import PluginImportError, Registry
from epp.config.schema import DataLayer, EndpointPickerConfig, FlowControl, PluginEntry, ProfilePlugin
from epp.config.spec import Kind, KnownType, PluginSpec, Stability
from epp.scheduling.records import FactKey

DEFAULT_PROFILE: Final = "default"
DEFAULT_SCORERS: Final = (
    ("queue-scorer", 2.0),
    ("kv-cache-utilization-scorer", 2.0),
    ("prefix-cache-scorer", 3.0),
)
DEFAULT_PICKER: Final = "max-score-picker"
DEFAULT_HANDLER: Final = "single-profile-handler"
DEFAULT_SOURCE: Final = "metrics-data-source"
DEFAULT_EXTRACTOR: Final = "core-metrics-extractor"

_HEAD: Final[Mapping[str, Any]] = {"api_version": names.API_VERSION, "kind": names.CONFIG_KIND}

GATES: Final[Mapping[str, bool]] = {"flowControl": False, "haPopulateNonLeaderDatastore": True}

_IN_PROFILES: Final = (Kind.FILTER, Kind.SCORER, Kind.PICKER)
_FROM_PACKAGES: Final = (*_IN_PROFILES, Kind.PROFILE_HANDLER, Kind.PRODUCER)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A defined name. `kind` None: the type is unknown. `plugin` None: its block has problems."""

    name: str
    path: str
    kind: Kind | None
    plugin: LoadedPlugin | None


@dataclass(slots=True)
class _Reading:
    """One file while it is resolved."""

    registry: Registry
    problems: Problems
    warnings: list[str] = field(default_factory=list)
    entries: dict[str, _Entry] = field(default_factory=dict)

    def of_kind(self, *kinds: Kind) -> list[_Entry]:
        return [entry for entry in self.entries.values() if entry.kind in kinds]

    def refer(self, name: str, path: str, *kinds: Kind) -> _Entry | None:
        """The entry a reference means, or None after a problem was added."""
        entry = self.entries.get(name)
        if entry is None:
            hint = nearest(name, self.entries) or f"; defined: {', '.join(self.entries) or 'none'}"
            self.problems.add(path, f"no plugin is named {quoted(name)}{hint[:400]}")
            return None
        if entry.kind is not None and entry.kind not in kinds:
            wanted = " or ".join(kinds)
            self.problems.add(path, f"{name} has kind {entry.kind}, expected {wanted}")
            return None
        return entry

    def provide(self, type_name: str) -> str:
        """The plugin of that name, made with default parameters unless the file defines it."""
        spec = self.registry.specs[type_name]
        entry = self.entries.get(type_name)
        if entry is None:
            plugin = LoadedPlugin(type_name, spec, spec.params(), "", {})
            self.entries[type_name] = _Entry(type_name, "", spec.kind, plugin)
        elif entry.kind not in (spec.kind, None):
            self.problems.add(
                f"{entry.path}.name", f"{type_name} is the name of the default {spec.kind}; choose another"
            )
        return type_name


def resolve(document: Document, registry: Registry, problems: Problems) -> LoadedConfig | None:
    """Check the whole file and complete it. None after problems were added."""
    value = document.value
    fields = decode_fields(value, EndpointPickerConfig, "$", problems)
    reading = _Reading(registry, problems)
    _read_plugins(reading, value.get("plugins"))
    if "scheduling_profiles" not in fields and value.get("schedulingProfiles") is not None:
        return None
    config = EndpointPickerConfig(**{**_HEAD, **fields})
    return complete(reading, document, config)


def defaults(document: Document, registry: Registry, problems: Problems) -> LoadedConfig | None:
    """The configuration of an absent file."""
    return complete(_Reading(registry, problems), document, EndpointPickerConfig(**_HEAD))


def complete(reading: _Reading, document: Document, config: EndpointPickerConfig) -> LoadedConfig | None:
    """Every section checked, defaults added. None where there are problems."""
    layer = config.data_layer or DataLayer()
    _check_head(reading, config)
    gates = _gates(reading, config.feature_gates)
    _check_flow_control(reading, config, gates["flowControl"])
    _check_parsers(reading, config)
    discovery = _discovery(reading, layer)
    metrics_source, extractor = _metrics(reading, layer)
    profiles = _profiles(reading, config)
    handler = _handler(reading, profiles)
    producers = _producers(reading)
    _warn_unused(reading, profiles, discovery)
    if reading.problems.found:
        return None
    return LoadedConfig(
        document=document,
        gates=gates,
        plugins=tuple(entry.plugin for entry in reading.entries.values() if entry.plugin is not None),
        profiles=profiles,
        handler=handler,
        producers=producers,
        metrics_source=metrics_source,
        extractor=extractor,
        inject_defaults=layer.inject_defaults,
        discovery=discovery,
        warnings=tuple(reading.warnings),
    )


# -- plugin blocks ----------------------------------------------------------------------------------


def _read_plugins(reading: _Reading, blocks: Any) -> None:
    """Each block on its own, so that one bad block hides no other."""
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        path = f"$.plugins[{index}]"
        # The form of the block was reported with the rest of the file.
        entry = decode(block, PluginEntry, path, Problems())
        if entry is None:
            name = isinstance(block, Mapping) and (block.get("name") or block.get("type"))
            if isinstance(name, str) and name not in reading.entries:
                reading.entries[name] = _Entry(name, path, None, None)
            continue
        name = entry.name or entry.type
        read = _read_plugin(reading, name, entry, path)
        if (other := reading.entries.get(name)) is not None:
            reading.problems.add(f"{path}.name", f"{quoted(name)} is already the name of {other.path}")
        else:
            reading.entries[name] = read


def _read_plugin(reading: _Reading, name: str, entry: PluginEntry, path: str) -> _Entry:
    problems = reading.problems
    try:
        found = reading.registry.find(entry.type)
    except PluginImportError as error:
        problems.add(f"{path}.type", f"{entry.type}: {error}")
        return _Entry(name, path, None, None)
    match found:
        case None:
            hint = nearest(entry.type, reading.registry.types())
            problems.add(f"{path}.type", f"unknown plugin type {quoted(entry.type)}{hint}")
            return _Entry(name, path, None, None)
        case KnownType(type_name, kind, replaced_by):
            instead = f"; it is deprecated in favour of {replaced_by}" if replaced_by else ""
            problems.add(f"{path}.type", f"{type_name} ({kind}) is not supported yet{instead}")
            return _Entry(name, path, kind, None)
        case PluginSpec():
            return _read_known(reading, name, found, entry, path)


def _read_known(reading: _Reading, name: str, spec: PluginSpec, entry: PluginEntry, path: str) -> _Entry:
    own = reading.registry.specs.get(spec.type) is spec
    if not own and spec.kind not in _FROM_PACKAGES:
        reading.problems.add(
            f"{path}.type", f"{spec.type}: a {spec.kind} from a package is not supported yet"
        )
    if spec.replaced_by:
        reading.warnings.append(f"{path}.type: {spec.type} is deprecated; use {spec.replaced_by}")
    if spec.stability is Stability.ALPHA:
        reading.warnings.append(f"{path}.type: {spec.type} is experimental and may change")
    given = entry.parameters or {}
    params = decode(given, spec.params, f"{path}.parameters", reading.problems)
    plugin = None if params is None else LoadedPlugin(name, spec, params, path, given)
    return _Entry(name, path, spec.kind, plugin)


# -- the sections -----------------------------------------------------------------------------------


def _check_head(reading: _Reading, config: EndpointPickerConfig) -> None:
    if config.api_version == names.LEGACY_API_VERSION:
        reading.warnings.append(f"$.apiVersion: {config.api_version} is deprecated; use {names.API_VERSION}")
    elif config.api_version != names.API_VERSION:
        reading.problems.add(
            "$.apiVersion", f"expected {names.API_VERSION}, not {quoted(config.api_version)}"
        )
    if config.kind != names.CONFIG_KIND:
        reading.problems.add("$.kind", f"expected {names.CONFIG_KIND}, not {quoted(config.kind)}")


def _gates(reading: _Reading, written: Iterable[str]) -> dict[str, bool]:
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


def _check_flow_control(reading: _Reading, config: EndpointPickerConfig, enabled: bool) -> None:
    detector = config.saturation_detector
    if detector is not None:
        reading.warnings.append(
            "$.saturationDetector is deprecated; its place is $.flowControl.saturationDetector"
        )
        _refer_default(
            reading, detector.plugin_ref, "$.saturationDetector.pluginRef", Kind.SATURATION_DETECTOR
        )
    flow = config.flow_control
    if flow is None:
        return
    if not enabled:
        reading.warnings.append("$.flowControl is ignored: the feature gate flowControl is off")
    for path, name, kind in _policies(flow):
        _refer_default(reading, name, f"$.flowControl.{path}", kind)
    seen: set[int] = set()
    for index, band in enumerate(flow.priority_bands):
        if band.priority in seen:
            path = f"$.flowControl.priorityBands[{index}].priority"
            reading.problems.add(path, f"a second band of priority {band.priority}")
        seen.add(band.priority)


def _policies(flow: FlowControl) -> Iterable[tuple[str, str | None, Kind]]:
    """Every reference in the section: path, name, kind."""
    yield "usageLimitPolicyPluginRef", flow.usage_limit_policy_plugin_ref, Kind.USAGE_LIMIT
    if flow.saturation_detector is not None:
        yield "saturationDetector.pluginRef", flow.saturation_detector.plugin_ref, Kind.SATURATION_DETECTOR
    bands = [
        ("defaultPriorityBand", flow.default_priority_band),
        ("defaultNegativePriorityBand", flow.default_negative_priority_band),
        *((f"priorityBands[{index}]", band) for index, band in enumerate(flow.priority_bands)),
    ]
    for path, band in bands:
        if band is not None:
            yield f"{path}.fairnessPolicyRef", band.fairness_policy_ref, Kind.FAIRNESS
            yield f"{path}.orderingPolicyRef", band.ordering_policy_ref, Kind.ORDERING


def _refer_default(reading: _Reading, name: str | None, path: str, kind: Kind) -> None:
    """A reference that may also name a type, which then stands for itself with default parameters."""
    if name is None:
        return
    known = reading.registry.not_yet.get(name)
    if name not in reading.entries and known is not None and known.kind is kind:
        return
    reading.refer(name, path, kind)


def _check_parsers(reading: _Reading, config: EndpointPickerConfig) -> None:
    if config.parser is not None:
        reading.warnings.append("$.parser is deprecated; its place is $.requestHandler.parsers")
        reading.refer(config.parser.plugin_ref, "$.parser.pluginRef", Kind.PARSER)
    if config.request_handler is not None:
        for index, ref in enumerate(config.request_handler.parsers):
            reading.refer(ref.plugin_ref, f"$.requestHandler.parsers[{index}].pluginRef", Kind.PARSER)


def _discovery(reading: _Reading, layer: DataLayer) -> str | None:
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


def _metrics(reading: _Reading, layer: DataLayer) -> tuple[str, str]:
    """Names of the metrics source and its extractor: those referred to, else those defined, else default."""
    sources: list[str] = []
    extractors: list[str] = []
    for index, source in enumerate(layer.sources):
        path = f"$.dataLayer.sources[{index}]"
        if reading.refer(source.plugin_ref, f"{path}.pluginRef", Kind.DATA_SOURCE):
            sources.append(source.plugin_ref)
        for number, ref in enumerate(source.extractors):
            if reading.refer(ref.plugin_ref, f"{path}.extractors[{number}].pluginRef", Kind.EXTRACTOR):
                extractors.append(ref.plugin_ref)
    if not layer.inject_defaults and not sources:
        reading.problems.add("$.dataLayer.sources", f"no {DEFAULT_SOURCE} here, and injectDefaults is false")
    return (
        _one_of(reading, sources, Kind.DATA_SOURCE, DEFAULT_SOURCE),
        _one_of(reading, extractors, Kind.EXTRACTOR, DEFAULT_EXTRACTOR),
    )


def _one_of(reading: _Reading, referred: list[str], kind: Kind, type_name: str) -> str:
    found = referred or [entry.name for entry in reading.of_kind(kind) if entry.plugin is not None]
    if len(found) > 1:
        reading.problems.add("$.dataLayer.sources", f"one {kind} is supported, not {', '.join(found)}"[:400])
    return found[0] if found else reading.provide(type_name)


# -- profiles, handler, producers -------------------------------------------------------------------


def _profiles(reading: _Reading, config: EndpointPickerConfig) -> tuple[LoadedProfile, ...]:
    if not config.scheduling_profiles:
        return (_default_profile(reading),)
    profiles: dict[str, LoadedProfile] = {}
    for index, entry in enumerate(config.scheduling_profiles):
        path = f"$.schedulingProfiles[{index}]"
        if entry.name in profiles:
            reading.problems.add(f"{path}.name", f"a second profile named {quoted(entry.name)}")
        uses: dict[str, PluginUse] = {}
        for number, plugin in enumerate(entry.plugins):
            _use(reading, plugin, f"{path}.plugins[{number}]", uses)
        profiles[entry.name] = _with_picker(reading, entry.name, list(uses.values()), path)
    return tuple(profiles.values())


def _use(reading: _Reading, plugin: ProfilePlugin, path: str, uses: dict[str, PluginUse]) -> None:
    name = plugin.plugin_ref
    entry = reading.refer(name, f"{path}.pluginRef", *_IN_PROFILES)
    if name in uses:
        reading.problems.add(f"{path}.pluginRef", f"{name} is in this profile already")
    if entry is None:
        return
    if plugin.weight is not None and entry.kind not in (Kind.SCORER, None):
        reading.warnings.append(f"{path}.weight has no effect: {name} is a {entry.kind}")
    uses[name] = PluginUse(name, 1.0 if plugin.weight is None else plugin.weight, path)


def _default_profile(reading: _Reading) -> LoadedProfile:
    """Everything the file defines for profiles; where that is nothing, the default scorers."""
    defined = [PluginUse(entry.name, 1.0, "") for entry in reading.of_kind(*_IN_PROFILES)]
    uses = defined or [PluginUse(reading.provide(name), weight, "") for name, weight in DEFAULT_SCORERS]
    return _with_picker(reading, DEFAULT_PROFILE, uses, "")


def _with_picker(reading: _Reading, name: str, uses: list[PluginUse], path: str) -> LoadedProfile:
    kinds = {use.name: reading.entries[use.name].kind for use in uses}
    pickers = [use for use in uses if kinds[use.name] is Kind.PICKER]
    if not pickers:
        uses = [*uses, PluginUse(reading.provide(DEFAULT_PICKER), 1.0, "")]
    elif len(pickers) > 1:
        where = pickers[1].path or reading.entries[pickers[1].name].path
        both = " and ".join(use.name for use in pickers[:2])
        reading.problems.add(where, f"profile {name} has more than one picker: {both}")
    if not any(kind in (Kind.SCORER, None) for kind in kinds.values()):
        reading.warnings.append(f"profile {name} has no scorer: every endpoint is as good as another")
    return LoadedProfile(name, tuple(uses), path)


def _handler(reading: _Reading, profiles: tuple[LoadedProfile, ...]) -> str:
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


def _producers(reading: _Reading) -> tuple[str, ...]:
    """Every needed fact has its producer, made by default where its name is that of a type; in order."""
    pending = list(reading.entries.values())
    while pending:
        entry = pending.pop()
        missing = _missing_producers(reading, entry)
        pending.extend(reading.entries[reading.provide(name)] for name in missing)
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


def _needs(reading: _Reading, entry: _Entry) -> tuple[FactKey, ...]:
    """Facts the plugin reads; nothing while its block has problems."""
    if entry.plugin is None:
        return ()
    try:
        return entry.plugin.spec.needs(entry.plugin.params)
    except Exception as error:
        reading.problems.add(entry.path, f"its needs cannot be told: {type(error).__name__}: {error}")
        return ()


def _missing_producers(reading: _Reading, entry: _Entry) -> list[str]:
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


def _provides(entry: _Entry, fact_kind: str) -> bool:
    """A block with problems of its own gets the benefit of the doubt."""
    if entry.kind is not Kind.PRODUCER:
        return False
    return entry.plugin is None or fact_kind in entry.plugin.spec.provides


def _warn_unused(reading: _Reading, profiles: tuple[LoadedProfile, ...], discovery: str | None) -> None:
    used = {use.name for profile in profiles for use in profile.plugins} | {discovery}
    for entry in reading.of_kind(*_IN_PROFILES, Kind.DISCOVERY):
        if entry.name not in used:
            place = "$.dataLayer.discovery" if entry.kind is Kind.DISCOVERY else "a scheduling profile"
            reading.warnings.append(f"{entry.path}: {entry.name} is not used; refer to it in {place}")
