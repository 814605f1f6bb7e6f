"""Scheduling profiles: filters, then weighted scorers, then a picker; and the handler that runs one."""

from dataclasses import dataclass
from math import inf, nan

import numpy as np

from epp.errors import InternalError, NoEndpoints, RequestError, Saturated
from epp.pool.records import Endpoint, Floats, Mask
from epp.scheduling.ports import Ctx, Filter, Picker, Scorer
from epp.scheduling.records import Decision, Leg, PluginTiming, Role, ScoreColumn


@dataclass(frozen=True, slots=True)
class FilterStep:
    """A filter as its profile names it; `type` is the plugin type."""

    name: str
    type: str
    filter: Filter


@dataclass(frozen=True, slots=True)
class ScorerStep:
    """A scorer with its weight in the profile."""

    name: str
    type: str
    weight: float
    scorer: Scorer


@dataclass(frozen=True, slots=True)
class PickerStep:
    """The picker of a profile."""

    name: str
    type: str
    picker: Picker


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to choose. Filters run in order; the order of scorers does not matter."""

    name: str
    filters: tuple[FilterStep, ...]
    scorers: tuple[ScorerStep, ...]
    picker: PickerStep


def run_profile(profile: Profile, ctx: Ctx, alive: Mask) -> Decision:
    """Choose among `alive`. Total = sum of weight x score, scores clamped to 0..1, NaN and infinities 0.

    With `ctx.clock` set the decision carries the time each plugin took.

    Raises:
        NoEndpoints: `alive` is empty.
        Saturated: a filter left nothing.
        InternalError: a plugin failed or broke its port's contract.
        RequestError: a plugin refused the request.
    """
    if not np.count_nonzero(alive):
        raise NoEndpoints("failed to find endpoint candidates for serving the request")
    candidates = alive.copy()
    timings: list[PluginTiming] = []
    alive, excluded = _filter(profile, ctx, candidates, timings)
    total, columns = _score(profile, ctx, alive, timings)
    slots = _pick(profile.picker, ctx, total, alive, timings)
    return Decision(profile.name, slots, candidates, excluded, columns, total, tuple(timings))


def _filter(
    profile: Profile, ctx: Ctx, alive: Mask, timings: list[PluginTiming]
) -> tuple[Mask, tuple[tuple[str, Mask], ...]]:
    """What is left after the filters, and what each took out."""
    excluded: list[tuple[str, Mask]] = []
    clock = ctx.clock
    for step in profile.filters:
        began = clock() if clock else 0.0
        try:
            kept = step.filter.keep(ctx, alive)
        except Exception as error:
            raise _failed(step.name, error) from error
        if clock:
            timings.append(PluginTiming("Filter", step.type, step.name, clock() - began))
        if kept.shape != alive.shape:
            raise _misshapen(step.name, kept.shape, alive)
        taken = alive > kept
        alive = alive & kept
        excluded.append((step.name, taken))
        if not np.count_nonzero(alive):
            counts = ", ".join(f"{name} excluded {np.count_nonzero(mask)}" for name, mask in excluded)
            raise Saturated(f"no endpoints available for the given request: {counts}")
    return alive, tuple(excluded)


def _score(
    profile: Profile, ctx: Ctx, alive: Mask, timings: list[PluginTiming]
) -> tuple[Floats, tuple[ScoreColumn, ...]]:
    """The total by slot (NaN where not alive) and the column of each scorer."""
    columns: list[ScoreColumn] = []
    total = np.zeros(len(alive))
    clock = ctx.clock
    for step in profile.scorers:
        began = clock() if clock else 0.0
        try:
            scores = step.scorer.score(ctx, alive)
        except Exception as error:
            raise _failed(step.name, error) from error
        if clock:
            timings.append(PluginTiming("Scorer", step.type, step.name, clock() - began))
        if scores.shape != alive.shape:
            raise _misshapen(step.name, scores.shape, alive)
        clamped = _clamp(scores)
        columns.append(ScoreColumn(step.name, step.weight, clamped))
        # Not one matrix product: BLAS rounds by position, and equal endpoints must stay exactly equal.
        total += clamped * step.weight
    total[~alive] = nan
    return total, tuple(columns)


def _clamp(scores: Floats) -> Floats:
    """A copy within 0..1; NaN and infinities become 0."""
    clamped: Floats = np.fmax(scores, 0.0)
    # The value at `argmax` costs a third of `max`.
    if clamped.item(clamped.argmax()) > 1.0:
        clamped[clamped == inf] = 0.0
        np.minimum(clamped, 1.0, out=clamped)
    return clamped


def _pick(
    step: PickerStep, ctx: Ctx, total: Floats, alive: Mask, timings: list[PluginTiming]
) -> tuple[int, ...]:
    clock = ctx.clock
    began = clock() if clock else 0.0
    try:
        slots = step.picker.pick(ctx, total, alive)
    except Exception as error:
        raise _failed(step.name, error) from error
    if clock:
        timings.append(PluginTiming("Picker", step.type, step.name, clock() - began))
    for slot in slots:
        if not 0 <= slot < len(alive) or not alive[slot]:
            raise InternalError(f"picker {step.name} chose slot {slot}, which it was not offered")
    if not slots:
        raise InternalError(f"picker {step.name} chose nothing")
    return slots


def _failed(name: str, error: Exception) -> RequestError:
    """A plugin may refuse the request; anything else it raises is its own fault and says so."""
    if isinstance(error, RequestError):
        return error
    return InternalError(f"plugin {name} failed: {type(error).__name__}: {error}")


def _misshapen(name: str, shape: tuple[int, ...], alive: Mask) -> InternalError:
    return InternalError(f"plugin {name} returned an array of shape {shape}, expected {alive.shape}")


def serving_leg(profile: Profile, ctx: Ctx, alive: Mask) -> Leg:
    """The one leg of a request that one profile places. Raises what `run_profile` raises."""
    decision = run_profile(profile, ctx, alive)
    return Leg(Role.DECODE, _endpoints(ctx, decision.slots), decision)


class SingleProfileHandler:
    """`single-profile-handler`: one profile, one leg."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def place(self, ctx: Ctx, alive: Mask) -> tuple[Leg, ...]:
        return (serving_leg(self.profile, ctx, alive),)


def _endpoints(ctx: Ctx, slots: tuple[int, ...]) -> tuple[Endpoint, ...]:
    """Owners of the chosen slots. A candidate slot always has one."""
    owners = ctx.view.endpoints
    return tuple(owner for slot in slots if (owner := owners[slot]) is not None)
