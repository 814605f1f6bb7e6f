"""The effective configuration: every value that will be used, and where it comes from."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from epp import names
from epp.config.document import plain_value
from epp.config.loaded import LoadedConfig, LoadedPlugin, LoadedProfile, Origin
from epp.config.spec import Kind
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


def effective(loaded: LoadedConfig) -> Effective:
    """Everything that `loaded` came to."""
    head = {
        "apiVersion": _given(loaded, "$.apiVersion", names.API_VERSION),
        "kind": _given(loaded, "$.kind", names.CONFIG_KIND),
    }
    tree: Mapping[str, Tree] = {
        **head,
        "featureGates": _gates(loaded),
        "plugins": [_plugin(loaded, plugin) for plugin in loaded.plugins],
        "schedulingProfiles": [_profile(loaded, profile) for profile in loaded.profiles],
        "dataLayer": _data_layer(loaded),
    }
    return Effective(tree, loaded.warnings)


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
    lines = loaded.document.lines
    source, extractor = "", ""
    for index, entry in enumerate((loaded.document.value.get("dataLayer") or {}).get("sources") or []):
        source = f"$.dataLayer.sources[{index}].pluginRef"
        for number, _ in enumerate(entry.get("extractors") or []):
            extractor = f"$.dataLayer.sources[{index}].extractors[{number}].pluginRef"
    shown: dict[str, Tree] = {
        "injectDefaults": _given(loaded, "$.dataLayer.injectDefaults", loaded.inject_defaults),
        "sources": [
            {
                "pluginRef": _given(loaded, source, loaded.metrics_source),
                "extractors": [{"pluginRef": _given(loaded, extractor, loaded.extractor)}],
            }
        ],
    }
    if loaded.discovery is not None:
        path = "$.dataLayer.discovery.pluginRef"
        shown["discovery"] = {"pluginRef": Value(loaded.discovery, Origin.FILE, lines.get(path))}
    return shown


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
