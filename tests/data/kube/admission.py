"""What an API server does to an object of a CRD before it stores it: defaults, schema, CEL rules."""

import re
from collections.abc import Iterator
from typing import Any

from cel_expr_python import cel

Schema = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}
_DATE_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
# What the walk knows; a keyword beyond these in a schema is an error of the test's.
_KEYWORDS = {
    *("type", "description", "properties", "additionalProperties", "required", "items", "default", "enum"),
    *("format", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    "x-kubernetes-validations",
}


def version(crd: Schema, name: str) -> Schema:
    (found,) = [each for each in crd["spec"]["versions"] if each["name"] == name]
    schema: Schema = found["schema"]["openAPIV3Schema"]
    return schema


def errors(crd: Schema, thing: dict[str, Any]) -> list[str]:
    """Why the object would be refused (with `--validate=strict`), each with its path; none: it is accepted.

    Defaults are set in it.
    """
    group, _, served = thing["apiVersion"].partition("/")
    names = crd["spec"]["names"]
    if (group, thing["kind"]) != (crd["spec"]["group"], names["kind"]):
        return [f"kind: {group} {thing['kind']}"]
    schema = version(crd, served)
    status = thing.get("status")
    spec = {name: value for name, value in thing.items() if name not in ("metadata", "status")}
    found = list(_walk(schema, spec, ""))
    if status is not None:
        found += _walk(schema["properties"]["status"], status, "status")
    return found


def _walk(schema: Schema, value: Any, path: str) -> Iterator[str]:
    assert not schema.keys() - _KEYWORDS, schema.keys() - _KEYWORDS
    kind = _TYPES[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
        yield f"{path}: not of type {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: Unsupported value: {value!r}"
    match value:
        case dict():
            yield from _object(schema, value, path)
        case list():
            yield from _array(schema, value, path)
        case str():
            yield from _text(schema, value, path)
        case int():
            yield from _number(schema, value, path)
    if "x-kubernetes-validations" in schema:
        yield from _rules(schema, value, path)


def _object(schema: Schema, value: dict[str, Any], path: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, part in known.items():
        if "default" in part:
            value.setdefault(name, part["default"])
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}".strip(".") + ": Required value"
    size = len(value)
    if not schema.get("minProperties", 0) <= size <= schema.get("maxProperties", size):
        yield f"{path}: {size} properties"
    for name, part in value.items():
        below = known.get(name, others)
        if below is None:
            yield f"{path}.{name}".strip(".") + ": unknown field"
        else:
            yield from _walk(below, part, f"{path}.{name}".strip("."))


def _array(schema: Schema, value: list[Any], path: str) -> Iterator[str]:
    size = len(value)
    if not schema.get("minItems", 0) <= size <= schema.get("maxItems", size):
        yield f"{path}: {size} items"
    for number, item in enumerate(value):
        yield from _walk(schema["items"], item, f"{path}[{number}]")
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys:
        told = [tuple(item.get(key) for key in keys) for item in value]
        if len(set(told)) < size:
            yield f"{path}: Duplicate value"


def _text(schema: Schema, value: str, path: str) -> Iterator[str]:
    size = len(value)
    if not schema.get("minLength", 0) <= size <= schema.get("maxLength", size):
        yield f"{path}: {size} characters"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: should match {schema['pattern']}"
    if schema.get("format") == "date-time" and not _DATE_TIME.fullmatch(value):
        yield f"{path}: no date-time"


def _number(schema: Schema, value: int, path: str) -> Iterator[str]:
    bits = {"int32": 31, "int64": 63}[schema["format"]]
    least, most = schema.get("minimum", -(1 << bits)), schema.get("maximum", (1 << bits) - 1)
    if not least <= value <= most:
        yield f"{path}: {value} is not in {least} to {most}"


def _rules(schema: Schema, value: Any, path: str) -> Iterator[str]:
    environment = cel.NewEnv(variables={"self": cel.Type.DYN})
    for rule in schema["x-kubernetes-validations"]:
        result = environment.compile(rule["rule"]).eval(data={"self": value})
        if result.plain_value() is not True:
            yield f"{path}: {rule['message']}"
