"""Placements without a director, and plugins by their type, for tests of what plugins remember."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from epp.config.decode import Problems, decode
from epp.config.registry import built_in_registry
from epp.config.spec import BuildContext
from epp.pool.records import Mask, PoolView
from epp.scheduling.ports import Ctx
from epp.scheduling.records import Decision, Leg, Placement, Role, Ticket, TicketId


def made(kind: str, view: PoolView, name: str = "", **parameters: Any) -> Any:
    """The plugin of a type with these parameters, as a file would have them.

    Raises ValueError with what is wrong with the parameters.
    """
    spec = built_in_registry().specs[kind]
    problems = Problems()
    decoded = decode(parameters, spec.params, "$", problems)
    if problems.found:
        raise ValueError("; ".join(f"{problem.path}: {problem.message}" for problem in problems.found))
    return spec.build(BuildContext(name or kind, view, b"a secret of tests"), decoded)


def leg(
    ctx: Ctx, slots: Sequence[int], *, role: Role = Role.DECODE, profile: str = "", alive: Mask | None = None
) -> Leg:
    """A leg at `slots`, chosen by `profile` (named like the role) among `alive` (the candidates)."""
    mask = ctx.view.candidates.copy() if alive is None else alive
    total = np.where(mask, 0.0, np.nan)
    decision = Decision(profile or role.value, tuple(slots), mask, (), (), total)
    owners = tuple(owner for slot in slots if (owner := ctx.view.endpoints[slot]) is not None)
    return Leg(role, owners, decision)


def ticket(ctx: Ctx, *legs: Leg, number: int = 1) -> Ticket:
    """A ticket for `legs`, the serving one last."""
    placement = Placement(TicketId(number), legs)
    slot = placement.serving.decision.slots[0]
    return Ticket(
        placement.ticket,
        ctx.request,
        placement,
        slot,
        ctx.request.prompt_tokens,
        ctx.now,
        facts=ctx.facts,
        flow=ctx.flow,
        priority=ctx.priority,
    )


def single(ctx: Ctx, slot: int, *, number: int = 1, alive: Mask | None = None) -> Ticket:
    """A ticket for the usual placement: one leg."""
    return ticket(ctx, leg(ctx, (slot,), alive=alive), number=number)
