"""The ports a scheduling plugin implements. Structural: no base class.

Every array is indexed by slot and has the view's capacity. `alive` is the mask of endpoints still in
question; values outside it are ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from epp.payload.records import InferenceRequest
from epp.pool.records import Floats, Load, Mask, PoolView
from epp.scheduling.records import AnswerFact, FactKey, Facts, Leg, Ticket


@dataclass(slots=True)
class Ctx:
    """Everything a plugin may look at for one request.

    Attributes:
        now: seconds, monotonic.
        draw: seeded source of chance.
        clock: set on sampled requests only; plugins are then timed with it.
    """

    request: InferenceRequest
    view: PoolView
    load: Load
    facts: Facts
    now: float
    draw: Random
    clock: Callable[[], float] | None = None


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
    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        """The request was placed (before the next one is looked at)."""
        ...


class Answered(Protocol):
    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        """Something happened to a placed request. `Ended` comes last, exactly once."""
        ...


class Member(Protocol):
    """A plugin that keeps state by slot."""

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot."""
        ...

    def left(self, slot: int) -> None:
        """The slot's owner is gone for good; forget everything about it."""
        ...
