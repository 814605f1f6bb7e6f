"""docs/plugins.md: every plugin type for people, from the structs and tables that the loader uses."""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import NODEFAULT, inspect

from epp.config.registry import Registry
from epp.config.schema import Quantity
from epp.config.spec import Kind, PluginSpec
from epp.durations import Duration

_INTRODUCTION: Final = """\
# Plugin types

What may stand in `plugins[].type` of the configuration file, and the `parameters` of each type. What they do is told in
[configuration.md](configuration.md). Alpha types need the flag `--allow-experimental-plugins`. `[]` stands for each entry
of a list, a dot for a field of a mapping. `warmroute config schema` prints the same as JSON Schema, with the types of
installed packages too.
"""  # noqa: E501


class Parameter(NamedTuple):
    """One parameter: its path below `parameters`, what it takes, its default as JSON (`required`: none)."""

    path: str
    takes: str
    default: str


def plugin_reference(registry: Registry) -> str:
    """The page, for the types of `registry` that are built in."""
    parts = [_INTRODUCTION]
    for kind in Kind:
        specs = [spec for spec in registry.specs.values() if spec.kind is kind]
        if specs:
            parts += [f"## {_plural(kind)}\n", *_kind(specs, registry)]
    return "\n".join([*parts, _later(registry)])


def _plural(kind: Kind) -> str:
    return "Discovery" if kind is Kind.DISCOVERY else f"{kind[0].upper()}{kind[1:]}s"


def _kind(specs: Iterable[PluginSpec], registry: Registry) -> Iterator[str]:
    """Types with parameters one by one, then those without, then other names of types."""
    bare, renamed = [], []
    for spec in specs:
        newer = registry.specs.get(spec.replaced_by or "")
        if newer is not None and newer.params is spec.params:
            renamed.append(f"`{spec.type}` (deprecated: use `{newer.type}`)")
        elif rows := parameters(spec.params):
            yield _section(spec, rows)
        else:
            needs = _needs(spec)
            bare.append(f"`{spec.type}` ({spec.stability}{f'; needs {needs}' if needs else ''})")
    if bare:
        yield f"Without parameters: {', '.join(bare)}.\n"
    if renamed:
        yield f"Other names: {', '.join(renamed)}.\n"


def _section(spec: PluginSpec, rows: Iterable[Parameter]) -> str:
    about = [str(spec.stability).capitalize()]
    if spec.replaced_by:
        about.append(f"deprecated: use `{spec.replaced_by}`")
    if needs := _needs(spec):
        about.append(f"needs {needs}")
    lines = [f"| `{each.path}` | {each.takes} | {each.default} |" for each in rows]
    head = [
        f"### `{spec.type}`",
        "",
        f"{'; '.join(about)}.",
        "",
        "| Parameter | Takes | Default |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *lines]) + "\n"


def _needs(spec: PluginSpec) -> str:
    """Facts it reads with its default parameters; nothing where it has none."""
    if any(field.required for field in msgspec.structs.fields(spec.params)):
        return ""
    return " and ".join(f"{fact.kind} of `{fact.producer}`" for fact in spec.needs(spec.params()))


def _later(registry: Registry) -> str:
    kinds: dict[Kind, list[str]] = {}
    for known in registry.not_yet.values():
        kinds.setdefault(known.kind, []).append(f"`{known.type}`")
    rows = [f"| {kind} | {', '.join(types)} |" for kind, types in kinds.items()]
    head = ["## Known, not supported yet", "", "Refused by name.", "", "| Kind | Types |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def parameters(struct: type[msgspec.Struct]) -> list[Parameter]:
    """All of them, those of inner mappings and of list entries too, in the order of the struct."""
    return list(_walk(struct, "", None))


def _walk(struct: type[msgspec.Struct], lead: str, defaults: msgspec.Struct | None) -> Iterator[Parameter]:
    """`defaults`: the mapping as it is where nobody writes it; else the defaults of `struct` count."""
    found = inspect.type_info(struct)
    assert isinstance(found, inspect.StructType)
    for field in found.fields:
        path = f"{lead}{field.encode_name}"
        wanted = _without_none(field.type)
        inner = wanted.item_type if isinstance(wanted, inspect.VarTupleType) else wanted
        value = _value(field) if defaults is None else getattr(defaults, field.name)
        if not isinstance(inner, inspect.StructType) or not inner.fields:
            yield Parameter(path, _takes(wanted), _shown(value))
        elif inner is not wanted:
            yield Parameter(path, "list", _shown(value))
            yield from _walk(inner.cls, f"{path}[].", None)
        else:
            below = value if isinstance(value, msgspec.Struct) else None
            if below is None:
                yield Parameter(path, "mapping", _shown(value))
            yield from _walk(inner.cls, f"{path}.", below)


def _without_none(kind: inspect.Type) -> inspect.Type:
    if not isinstance(kind, inspect.UnionType):
        return kind
    (wanted,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
    return wanted


def _value(field: inspect.Field) -> Any:
    """The default; NODEFAULT where the field is required."""
    return field.default_factory() if field.default_factory is not NODEFAULT else field.default


def _shown(value: Any) -> str:
    if value is NODEFAULT:
        return "required"
    if value is None or value == "":
        return ""
    plain = msgspec.to_builtins(value, enc_hook=str)
    if isinstance(plain, float) and plain.is_integer():
        plain = int(plain)
    return f"`{plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()}`"


def _takes(kind: inspect.Type) -> str:
    match kind:
        case inspect.CustomType():
            return "duration" if kind.cls is Duration else "quantity" if kind.cls is Quantity else "text"
        case inspect.LiteralType():
            return " or ".join(f"`{value}`" for value in kind.values)
        case inspect.VarTupleType():
            return "list of " + _takes(kind.item_type)
        case inspect.DictType() | inspect.StructType():
            return "mapping"
        case inspect.BoolType():
            return "boolean"
        case inspect.StrType():
            return "text, not empty" if kind.min_length else "text"
        case inspect.IntType() | inspect.FloatType():
            noun = "whole number" if isinstance(kind, inspect.IntType) else "number"
            return " ".join([noun, *_range(kind)])
    return "any"


def _range(kind: inspect.IntType | inspect.FloatType) -> Iterable[str]:
    low = kind.ge if kind.ge is not None else kind.gt
    if kind.gt is not None:
        yield f"above {_number(kind.gt)}"
    elif low is not None:
        yield f"from {_number(low)}"
    # A bound that only keeps arithmetic exact tells a reader nothing.
    if kind.le is not None and kind.le < 1_000_000_000:
        yield f"to {_number(kind.le)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
