"""Every part of every plugin's parameters refuses what it does not know, and cannot change once read."""

import msgspec
import pytest
from msgspec import inspect

from epp.config.registry import BUILT_INS
from epp.config.spec import PluginSpec


def parts(kind: object) -> set[type[msgspec.Struct]]:
    """The structs that a value of this type is made of."""
    found: set[type[msgspec.Struct]] = set()
    left = [kind]
    while left:
        kind = left.pop()
        if isinstance(kind, inspect.StructType):
            if kind.cls not in found:
                found.add(kind.cls)
                left += [field.type for field in kind.fields]
        elif isinstance(kind, inspect.Type):
            for name in ("type", "types", "item_type", "item_types", "key_type", "value_type"):
                inner = getattr(kind, name, ())
                left += inner if isinstance(inner, tuple) else (inner,)
    return found


def faults(params: type[msgspec.Struct]) -> list[str]:
    told: list[str] = []
    for part in parts(inspect.type_info(params)):
        config = part.__struct_config__
        if not config.forbid_unknown_fields:
            told.append(f"{part.__name__} takes unknown fields")
        if not config.frozen:
            told.append(f"{part.__name__} can be changed")
        told += [
            f"{part.__name__}.{name} is no camelCase"
            for name in part.__struct_encode_fields__
            if "_" in name or name[:1].isupper()
        ]
    return told


@pytest.mark.parametrize("spec", BUILT_INS, ids=lambda spec: spec.type)
def test_parameters_are_strict_to_their_last_part(spec: PluginSpec) -> None:
    assert faults(spec.params) == []


class Lenient(msgspec.Struct, frozen=True):
    value: int = 0


class Loose(msgspec.Struct, forbid_unknown_fields=True):
    value: int = 0


class Snake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    some_value: int = 0


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    listed: tuple[Lenient, ...] = ()
    named: dict[str, Loose] = {}
    either: Snake | None = None


def test_a_part_that_is_not_strict_is_seen_wherever_it_is() -> None:
    assert sorted(faults(Strict)) == [
        "Lenient takes unknown fields",
        "Loose can be changed",
        "Snake.some_value is no camelCase",
    ]
