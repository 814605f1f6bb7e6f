"""Reports a figure of every answer to the proxy: `request-attribute-reporter`."""

import math
from typing import Any, Protocol

import msgspec

from epp import names
from epp.payload.records import Usage
from epp.scheduling.records import Metadata, Ticket

NO_USAGE = Usage(0, 0)


class AttributeKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the figure goes in the dynamic metadata."""

    name: str = ""
    namespace: str = names.LB_NAMESPACE


class Attribute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One figure. `expression` and `condition` are CEL over `usage`; no condition: always."""

    key: AttributeKey = AttributeKey()
    expression: str = ""
    condition: str = ""


class RequestAttributeReporterParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `request-attribute-reporter`."""

    attributes: tuple[Attribute, ...] = ()


class Program(Protocol):
    """A compiled expression."""

    def eval(self, activation: None = None, data: dict[str, Any] | None = None) -> Any: ...


class RequestAttributeReporter:
    """Tells the proxy a whole number made of an answer's usage, on the last message of the answer.

    `usage` has `prompt_tokens`, `completion_tokens`, `total_tokens`, and where the engine tells it
    `prompt_token_details.cached_tokens`. All are doubles, as in a JSON object: `usage.total_tokens * 2` finds
    no overload, `usage.total_tokens * 2.0` does. An answer without usage counts as zeros, so `has()` of the
    first three is always true. The figure is cut to a whole number; 0 and -1 are not reported.
    """

    def __init__(self, params: RequestAttributeReporterParams) -> None:
        """Raises ValueError for what is wrong in the parameters, ImportError where CEL is not installed."""
        if len(params.attributes) != 1:
            raise ValueError("attributes must contain exactly one entry")
        (attribute,) = params.attributes
        if not attribute.key.name:
            raise ValueError("attributes[0].key.name cannot be empty")
        if not attribute.expression:
            raise ValueError("attributes[0].expression cannot be empty")
        self._namespace = attribute.key.namespace or names.LB_NAMESPACE
        self._name = attribute.key.name
        self._expression = _compiled(attribute.expression, "expression")
        self._condition = _compiled(attribute.condition, "condition") if attribute.condition else None

    def report(self, ticket: Ticket, usage: Usage | None) -> Metadata | None:
        """The figure of one answer. Raises ValueError where the configured CEL fails on this usage."""
        data = {"usage": _fields(usage or NO_USAGE)}
        if self._condition is not None and _value(self._condition, data, "condition") is not True:
            return None
        figure = _value(self._expression, data, "expression")
        if isinstance(figure, bool) or not isinstance(figure, int | float):
            raise ValueError(f"expression gives {type(figure).__name__}; it must give a number")
        if not math.isfinite(figure) or int(figure) in (0, -1):
            return None
        return ((self._namespace, self._name, float(int(figure))),)


def _fields(usage: Usage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_tokens": float(usage.prompt_tokens),
        "completion_tokens": float(usage.output_tokens),
        "total_tokens": float(usage.prompt_tokens + usage.output_tokens),
    }
    if usage.cached_tokens is not None:
        fields["prompt_token_details"] = {"cached_tokens": float(usage.cached_tokens)}
    return fields


def _compiled(source: str, what: str) -> Program:
    # Here and not above: only who uses this plugin needs the library.
    try:
        from cel_expr_python import cel
    except ImportError:
        raise ImportError(
            "request-attribute-reporter needs CEL; install it with `pip install 'warmroute[cel]'`"
        ) from None
    environment = cel.NewEnv(variables={"usage": cel.Type.Map(cel.Type.STRING, cel.Type.DYN)})
    try:
        program: Program = environment.compile(source)
    except RuntimeError as error:
        raise ValueError(f"failed to compile {what}: {error}") from None
    return program


def _value(program: Program, data: dict[str, Any], what: str) -> Any:
    result = program.eval(data=data)
    if result.type().name() == "ERROR":
        raise ValueError(f"failed to evaluate {what}: {result.value()}")
    return result.value()
