"""What the values of the chart are made of: groups with help texts, and shapes that several of them have."""

from copy import deepcopy
from typing import Any

import msgspec
from msgspec import Meta, field

from epp.durations import Duration
from epp.runtime.options import FlagSpec, flags

Mapping = dict[str, Any]
Items = list[Any]


def copied(value: Any) -> Any:
    """A default that is a mapping or list with something in it."""
    return field(default_factory=lambda: deepcopy(value))


class ValuesGroup(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A mapping of the values file whose keys are known; others are refused."""


def Help(text: str, *, example: object = None, schema: Mapping | None = None) -> Meta:
    """Help text of one value, an example shown beside an empty default, and what else its schema says."""
    return Meta(
        description=text,
        examples=None if example is None else [example],
        extra_json_schema=schema,
    )


def of(**properties: Mapping) -> Mapping:
    """Schema of a mapping with these keys and no others."""
    return {"properties": properties, "additionalProperties": False}


def required(text: str, example: object, schema: Mapping) -> Meta:
    """Help text of a value that has no default."""
    return Meta(description=text, examples=[example], extra_json_schema=schema, extra={"required": True})


TEXT: Mapping = {"type": "string"}
TEXTS: Mapping = {"type": "object", "additionalProperties": TEXT}
MAPS: Mapping = {"items": {"type": "object"}}
PORT: Mapping = {"minimum": 1, "maximum": 65535}
COUNT: Mapping = {"type": "integer", "minimum": 0}
NAMED: Mapping = {"items": {"type": "object", "required": ["name"]}}
LABEL_VALUE: Mapping = {
    "type": "string",
    "maxLength": 63,
    "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
}
OBJECT_NAME: Mapping = {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
DURATION: Mapping = {"pattern": "^([0-9]+(h|m|s|ms))+$"}
BUDGET: Mapping = of(
    maxUnavailable={"type": ["integer", "string"]},
    minAvailable={"type": ["integer", "string"]},
    unhealthyPodEvictionPolicy={"enum": ["IfHealthyBudget", "AlwaysAllow"]},
)

_DURATION_FLAG = r"^(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|ms|s|m|h))+)$"
_BOOLEANS = ["true", "True", "TRUE", "t", "T", "1", "false", "False", "FALSE", "f", "F", "0"]


def flag_schema(flag: FlagSpec) -> Mapping:
    """What the value of one flag may look like in a values file."""
    match flag.kind:
        case kind if kind is bool:
            shape: Mapping = {"anyOf": [{"type": "boolean"}, {"enum": _BOOLEANS}]}
        case kind if kind is int:
            shape = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^-?[0-9]+$"}]}
        case kind if kind is Duration:
            shape = {"anyOf": [{"const": 0}, {"type": "string", "pattern": _DURATION_FLAG}]}
        case _:
            shape = {"type": ["string", "number", "boolean"]}
    return {"description": flag.help, **shape}


def flags_schema() -> Mapping:
    """One property for each flag of `warmroute serve`, by its long name without the dashes."""
    return of(**{flag.names[-1].lstrip("-"): flag_schema(flag) for flag in flags()})


RESTRICTED_POD: Mapping = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED: Mapping = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
READ_ONLY: Mapping = {**RESTRICTED, "readOnlyRootFilesystem": True}
