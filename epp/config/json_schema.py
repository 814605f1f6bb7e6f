"""The file format as JSON Schema, from the structs that read it.

`msgspec.json.schema` cannot be used: it has no way to write defaults that are durations. A file that the
schema refuses is refused by the loader too; the loader also knows references, and rules that bind several
fields.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, inspect

from epp import names
from epp.config.registry import PluginImportError, Registry
from epp.config.resolve import GATES, OF_QUEUES
from epp.config.schema import EndpointPickerConfig, PluginEntry, Quantity
from epp.config.spec import PluginSpec, Stability
from epp.durations import Duration
from epp.errors import ConfigError, Problem

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

_UNIT: Final = "(ns|us|\u00b5s|\u03bcs|ms|s|m|h)"
_AMOUNT: Final = rf"([0-9]+(\.[0-9]*)?|\.[0-9]+){_UNIT}"
_NOTHING: Final = rf"(0+(\.0*)?|\.0+){_UNIT}"
_CUSTOM: Final[Mapping[type, Schema]] = {
    Duration: {
        "description": Duration.expected,
        "anyOf": [{"type": "string", "pattern": rf"^([-+]?0|\+?({_AMOUNT})+|-({_NOTHING})+)$"}, {"const": 0}],
    },
    Quantity: {
        "description": Quantity.expected,
        "anyOf": [
            {"type": "string", "pattern": r"^[0-9]{1,15}(\.[0-9]{0,15})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"},
            {"type": "integer", "minimum": 0},
        ],
    },
}
_BOUNDS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
}


def json_schema(registry: Registry) -> Schema:
    """The whole file, with the parameters of each type that `registry` offers.

    Raises:
        ConfigError: an installed package offers a type that cannot be used.
    """
    writer = _Writer()
    schema = writer.struct(EndpointPickerConfig)
    try:
        specs = sorted(registry.every(), key=lambda spec: spec.type)
    except PluginImportError as error:
        raise ConfigError("installed packages", Problem("", str(error))) from None
    entry = writer.defs[PluginEntry.__name__]
    ignored = [known.type for known in registry.not_yet.values() if known.kind in OF_QUEUES]
    entry["properties"]["type"] = {"enum": sorted({*(spec.type for spec in specs), *ignored})}
    entry["allOf"] = [writer.plugin(spec) for spec in specs]
    _head(writer.defs[EndpointPickerConfig.__name__]["properties"])
    return {
        "$schema": DIALECT,
        "title": names.CONFIG_KIND,
        **schema,
        "$defs": dict(sorted(writer.defs.items())),
    }


def _head(properties: Schema) -> None:
    """What the structs leave to the loader."""
    properties["apiVersion"] = {"enum": [names.API_VERSION, names.LEGACY_API_VERSION]}
    properties["kind"] = {"const": names.CONFIG_KIND}
    gates = "|".join(GATES)
    gate = {"type": "string", "pattern": f"^({gates})(=(true|false))?$"}
    properties["featureGates"] = _optional({"type": "array", "items": gate, "default": []})


class _Writer:
    """Collects a definition of each struct it comes across."""

    def __init__(self) -> None:
        self.defs: dict[str, Schema] = {}
        self._named: dict[str, type] = {}

    def struct(self, struct: type[msgspec.Struct]) -> Schema:
        """A reference to the definition of `struct`."""
        name = struct.__name__
        if self._named.setdefault(name, struct) is not struct:
            name = f"{struct.__module__}.{name}"
        if name not in self.defs:
            self.defs[name] = {}
            self.defs[name] |= self._definition(struct)
        return {"$ref": f"#/$defs/{name}"}

    def plugin(self, spec: PluginSpec) -> Schema:
        """What holds for blocks of one type."""
        parameters = self.struct(spec.params)
        required = any(field.required for field in msgspec.structs.fields(spec.params))
        then: Schema = {"properties": {"parameters": parameters if required else _optional(parameters)}}
        if required:
            then["required"] = ["parameters"]
        about = [spec.kind, *([spec.stability] if spec.stability is not Stability.STABLE else ())]
        kind: Schema = {"const": spec.type, "description": ", ".join(about)}
        if spec.replaced_by:
            kind |= {"deprecated": True, "description": f"{spec.kind}; use {spec.replaced_by}"}
        return {"if": {"properties": {"type": kind}}, "then": then}

    def _definition(self, struct: type[msgspec.Struct]) -> Schema:
        found = inspect.type_info(struct)
        assert isinstance(found, inspect.StructType)
        properties = {field.encode_name: self._property(field) for field in found.fields}
        schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        if required := [field.encode_name for field in found.fields if field.required]:
            schema["required"] = required
        about = (struct.__doc__ or "").partition("\n\n")[0]
        return {"description": " ".join(about.split()), **schema} if about else schema

    def _property(self, field: inspect.Field) -> Schema:
        schema = self._schema(field.type)
        if field.required:
            return schema
        default = field.default_factory() if field.default is NODEFAULT else field.default
        schema = _optional(schema)
        if default is not None:
            schema["default"] = msgspec.to_builtins(default, enc_hook=str)
        return schema

    def _schema(self, kind: inspect.Type) -> Schema:
        match kind:
            case inspect.StructType():
                return self.struct(kind.cls)
            case inspect.CustomType():
                return dict(_CUSTOM[kind.cls])
            case inspect.UnionType():
                (wanted,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
                return self._schema(wanted)
            case inspect.LiteralType():
                return {"enum": list(kind.values)}
            case inspect.VarTupleType():
                return {"type": "array", "items": self._schema(kind.item_type)}
            case inspect.DictType():
                return {"type": "object", "additionalProperties": self._schema(kind.value_type)}
            case inspect.AnyType():
                return {}
        return {"type": _NAMES[type(kind)], **_bounds(kind)}


_NAMES: Final[Mapping[type, str]] = {
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
}


def _bounds(kind: inspect.Type) -> Schema:
    found = {word: getattr(kind, bound, None) for bound, word in _BOUNDS.items()}
    return {word: value for word, value in found.items() if value is not None}


def _optional(schema: Schema) -> Schema:
    """A field that has a default may also be there without a value."""
    return {"anyOf": [schema, {"type": "null"}]}
