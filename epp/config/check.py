"""The effective configuration: every value that will be used, and where it comes from."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from epp import names
from epp.config.document import plain_value
from epp.config.loaded import LoadedConfig, LoadedPlugin, LoadedProfile, LoadedSource, Origin
from epp.config.spec import AT_START, Kind
from epp.durations import Duration

_PLAIN: Final = re.compile(r"[A-Za-z_/$][\w./$-]*(=[\w.-]+)?")
_COMMENT_COLUMN: Final = 56


@dataclass(frozen=True, slots=True)
class Value:
    """One value. `line`: of the file, where it comes from there."""

    value: Any
    origin: Origin
    line: int | None = None


Tree = Value | Mapping[str, "Tree"] | list["Tree"]


@dataclass(frozen=True, slots=True)
class Effective:
    """The configuration as it works. `str()` gives YAML that loads to the same again, sources as comments."""

    tree: Tree
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        head = [f"# warning: {warning}" for warning in self.warnings]
        body = [_commented(text, value) for text, value in _lines(self.tree, "", "")]
        return "\n".join([*head, *body]) + "\n"


def effective(loaded: LoadedConfig, started: LoadedConfig | None = None) -> Effective:
    """Everything that `loaded` came to; where `started` is given, with its data layer in place of its own."""
    head = {
        "apiVersion": _given(loaded, "$.apiVersion", names.API_VERSION),
        "kind": _given(loaded, "$.kind", names.CONFIG_KIND),
    }
    tree: Mapping[str, Tree] = {
        **head,
        "featureGates": _gates(loaded),
        "plugins": _plugins(loaded, started),
        "schedulingProfiles": [_profile(loaded, profile) for profile in loaded.profiles],
        "dataLayer": _data_layer(loaded) if started is None else _from_start(_data_layer(started)),
        "flowControl": {"saturationDetector": {"pluginRef": _detector(loaded)}},
        **_parsers(loaded),
        **_objectives(loaded),
        **_model_rewrites(loaded),
    }
    return Effective(tree, loaded.warnings)


def _detector(loaded: LoadedConfig) -> Value:
    """The detector's name, with the line of the place that counts."""
    value = loaded.document.value
    new = (value.get("flowControl") or {}).get("saturationDetector")
    path = "$.saturationDetector" if new is None else "$.flowControl.saturationDetector"
    return _given(loaded, f"{path}.pluginRef", loaded.detector)


def _parsers(loaded: LoadedConfig) -> Mapping[str, Tree]:
    """The section, with the line of each reference in whichever place it stands."""
    if loaded.parsers is None:
        return {}
    listed = (loaded.document.value.get("requestHandler") or {}).get("parsers")
    paths = [f"$.requestHandler.parsers[{index}].pluginRef" for index in range(len(loaded.parsers))]
    references: list[Tree] = [
        {"pluginRef": _given(loaded, path if listed else "$.parser.pluginRef", name)}
        for path, name in zip(paths, loaded.parsers, strict=True)
    ]
    return {"requestHandler": {"parsers": references}}


def _objectives(loaded: LoadedConfig) -> Mapping[str, Tree]:
    shown: list[Tree] = []
    for index, (name, priority) in enumerate(loaded.objectives.items()):
        path = f"$.objectives[{index}]"
        shown.append(
            {
                "name": _given(loaded, f"{path}.name", name),
                "priority": _given(loaded, f"{path}.priority", priority),
            }
        )
    return {"objectives": shown} if shown else {}


def _model_rewrites(loaded: LoadedConfig) -> Mapping[str, Tree]:
    """As the file has them: what is not written there has no value either."""
    below = loaded.document.value.get("modelRewrites")
    return {"modelRewrites": _tree(loaded, below, "$.modelRewrites")} if below else {}


def _given(loaded: LoadedConfig, path: str, value: Any) -> Value:
    """`value` with its line if the file has something at `path`."""
    line = loaded.document.lines.get(path)
    return Value(value, Origin.DEFAULT) if line is None else Value(value, Origin.FILE, line)


def _gates(loaded: LoadedConfig) -> Tree:
    written = loaded.document.value.get("featureGates") or []
    places = {text.partition("=")[0]: f"$.featureGates[{index}]" for index, text in enumerate(written)}
    return [
        _given(loaded, places.get(gate, ""), f"{gate}={str(on).lower()}") for gate, on in loaded.gates.items()
    ]


def _plugins(loaded: LoadedConfig, started: LoadedConfig | None) -> Tree:
    if started is None:
        return [_plugin(loaded, plugin) for plugin in loaded.plugins]
    kept = [plugin for plugin in started.plugins if plugin.spec.kind in AT_START]
    own = [plugin for plugin in loaded.plugins if plugin.spec.kind not in AT_START]
    return [
        *(_plugin(loaded, plugin) for plugin in own),
        *(_from_start(_plugin(started, plugin)) for plugin in kept),
    ]


def _from_start(tree: Tree) -> Tree:
    """The same values, with the start as their origin."""
    match tree:
        case Value():
            return Value(tree.value, Origin.START)
        case list():
            return [_from_start(item) for item in tree]
    return {key: _from_start(item) for key, item in tree.items()}


def _plugin(loaded: LoadedConfig, plugin: LoadedPlugin) -> Tree:
    shown: dict[str, Tree] = {
        "name": _given(loaded, f"{plugin.path}.name", plugin.name),
        "type": _given(loaded, f"{plugin.path}.type", plugin.spec.type),
    }
    parameters = _parameters(loaded, plugin.params, plugin.given, f"{plugin.path}.parameters")
    return {**shown, "parameters": parameters} if parameters else shown


def _parameters(
    loaded: LoadedConfig, params: msgspec.Struct, given: Mapping[str, Any], path: str
) -> dict[str, Tree]:
    """Each parameter as the file has it, else its default."""
    shown: dict[str, Tree] = {}
    for field in msgspec.structs.fields(params):
        name = field.encode_name
        value, below = getattr(params, field.name), given.get(name)
        if isinstance(value, msgspec.Struct):
            inner = below if isinstance(below, Mapping) else {}
            shown[name] = _parameters(loaded, value, inner, f"{path}.{name}") or _given(
                loaded, f"{path}.{name}", {}
            )
        elif below is not None:
            shown[name] = _tree(loaded, below, f"{path}.{name}")
        else:
            shown[name] = Value(value, Origin.DEFAULT)
    return shown


def _tree(loaded: LoadedConfig, value: Any, path: str) -> Tree:
    """A value of the file with the lines of its parts."""
    match value:
        case dict() if value:
            return {key: _tree(loaded, item, f"{path}.{key}") for key, item in value.items()}
        case list() if value:
            return [_tree(loaded, item, f"{path}[{index}]") for index, item in enumerate(value)]
    return _given(loaded, path, value)


def _profile(loaded: LoadedConfig, profile: LoadedProfile) -> Tree:
    kinds = {plugin.name: plugin.spec.kind for plugin in loaded.plugins}
    plugins: list[Tree] = []
    for use in profile.plugins:
        shown: dict[str, Tree] = {"pluginRef": _given(loaded, f"{use.path}.pluginRef", use.name)}
        if kinds[use.name] is Kind.SCORER:
            shown["weight"] = _given(loaded, f"{use.path}.weight", use.weight)
        plugins.append(shown)
    return {"name": _given(loaded, f"{profile.path}.name", profile.name), "plugins": plugins}


def _data_layer(loaded: LoadedConfig) -> Tree:
    shown: dict[str, Tree] = {
        "injectDefaults": _given(loaded, "$.dataLayer.injectDefaults", loaded.inject_defaults),
        "sources": [_source(loaded, source) for source in loaded.sources] or Value([], Origin.DEFAULT),
    }
    if loaded.discovery is not None:
        path = "$.dataLayer.discovery.pluginRef"
        shown["discovery"] = {"pluginRef": _given(loaded, path, loaded.discovery)}
    return shown


def _source(loaded: LoadedConfig, source: LoadedSource) -> Tree:
    extractors: list[Tree] = [
        {"pluginRef": _given(loaded, f"{source.path}.extractors[{index}].pluginRef", name)}
        for index, name in enumerate(source.extractors)
    ]
    shown: dict[str, Tree] = {"pluginRef": _given(loaded, f"{source.path}.pluginRef", source.name)}
    return {**shown, "extractors": extractors} if extractors else shown


# -- YAML -------------------------------------------------------------------------------------------


def _lines(tree: Tree, lead: str, indent: str) -> Iterator[tuple[str, Value | None]]:
    """Block-style lines. `lead` stands before the first one (a list's dash), `indent` before the others."""
    match tree:
        case Value():
            yield f"{lead}{_scalar(tree.value)}", tree
        case list():
            for item in tree:
                yield from _lines(item, f"{lead}- ", f"{indent}  ")
                lead = indent
        case _:
            for key, item in tree.items():
                if isinstance(item, Value):
                    yield f"{lead}{_scalar(key)}: {_scalar(item.value)}", item
                else:
                    yield f"{lead}{_scalar(key)}:", None
                    deeper = indent if isinstance(item, list) else f"{indent}  "
                    yield from _lines(item, deeper, deeper)
                lead = indent


def _commented(text: str, value: Value | None) -> str:
    if value is None:
        return text
    place = f"{value.origin}, line {value.line}" if value.line else str(value.origin)
    return f"{text.ljust(_COMMENT_COLUMN)} # {place}"


def _scalar(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int():
            return str(int(value))
        case Duration():
            return f"{float(value)!r}s"
        case float():
            return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
        case str():
            return value if _PLAIN.fullmatch(value) and plain_value(value) == value else _quoted(value)
    return json.dumps(msgspec.to_builtins(value))


def _quoted(text: str) -> str:
    """Double-quoted YAML: the escapes of JSON, and those of YAML for what does not print."""
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08X}" for char in escaped)
