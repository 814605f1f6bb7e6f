"""The ports a scheduling plugin implements. Structural: no base class.

Every array is indexed by slot and has the view's capacity. `alive` is the mask of endpoints still in
question; values outside it are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Protocol

from epp.payload.records import Headers, InferenceRequest, RawRequest, Usage
from epp.pool.records import Floats, Load, Mask, PoolView
from epp.scheduling.records import AnswerFact, Edits, FactKey, Facts, Leg, Metadata, Ticket

Attributes = Mapping[str, str]
"""What request hooks found out, by name."""

NO_ATTRIBUTES: Attributes = MappingProxyType({})

AGENT_IDENTITY = "agent-identity"
"""Attribute: the flow of a request without a fairness id of its own."""


@dataclass(slots=True)
class Ctx:
    """Everything a plugin may look at for one request.

    Attributes:
        now: seconds, monotonic.
        draw: seeded source of chance.
        clock: set on sampled requests only; plugins are then timed with it.
        headers: the client's, as in `RawRequest`; `payload.records.find_header` looks one up.
        flow: fairness id. priority: from the request's objective; below 0 means that it may be shed.
        attributes: what request hooks found out.
    """

    request: InferenceRequest
    view: PoolView
    load: Load
    facts: Facts
    now: float
    draw: Random
    clock: Callable[[], float] | None = None
    request_id: str = ""
    headers: Headers = ()
    flow: str = ""
    priority: int = 0
    attributes: Attributes = field(default_factory=lambda: NO_ATTRIBUTES)


class RequestHook(Protocol):
    def read(self, raw: RawRequest) -> Attributes:
        """What the hook finds out about a request before it is placed; `AGENT_IDENTITY` names its flow."""
        ...


class Screener(Protocol):
    def screen(self, ctx: Ctx, alive: Mask) -> Mask:
        """Those of `alive` that the request may go to at all. The results of several are intersected."""
        ...


class Admitter(Protocol):
    def admit(self, ctx: Ctx, alive: Mask) -> None:
        """Raise a `RequestError` to turn the request away; the facts are produced already."""
        ...


class SaturationDetector(Protocol):
    def saturation(self, view: PoolView, load: Load, alive: Mask, now: float) -> float:
        """How full those of `alive` are: 1 and above is saturated."""
        ...


class Filter(Protocol):
    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        """Those of `alive` that may serve the request."""
        ...


class Scorer(Protocol):
    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        """Preference in 0..1, higher is better. Min-max formulas normalise over `alive`."""
        ...


class Picker(Protocol):
    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        """Slots in order of preference; at least one, all of them alive."""
        ...


class DataProducer(Protocol):
    provides: tuple[FactKey, ...]
    needs: tuple[FactKey, ...]

    def produce(self, ctx: Ctx) -> None:
        """Put the provided facts into `ctx.facts`."""
        ...


class ProfileHandler(Protocol):
    def place(self, ctx: Ctx, alive: Mask) -> tuple[Leg, ...]:
        """Run the profiles this request needs.

        Raises:
            NoEndpoints: `alive` is empty.
            Saturated: a filter left nothing.
        """
        ...


class Placed(Protocol):
    def placed(self, ctx: Ctx, ticket: Ticket) -> Edits | None:
        """The request was placed (before the next one is looked at). Returns headers for the engine."""
        ...


class Answered(Protocol):
    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> Edits | None:
        """Something happened to a placed request. `Ended` comes last, exactly once.

        Returns headers to set on the answer; they count at `AnswerHeaders` only.
        """
        ...


class Reporter(Protocol):
    def report(self, ticket: Ticket, usage: Usage | None) -> Metadata | None:
        """Metadata for the proxy on the last message of an answer, whose usage is known by then."""
        ...


class Member(Protocol):
    """A plugin that keeps state by slot."""

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot."""
        ...

    def left(self, slot: int) -> None:
        """The slot's owner is gone for good; forget everything about it."""
        ...
