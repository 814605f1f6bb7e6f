"""`place` depends on endpoints and their facts, never on where they stand. Faults that are caught follow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.pool.records import Floats, Mask
from epp.scheduling.pickers import tie_keys
from epp.scheduling.ports import Ctx
from epp.scheduling.profiles import Profile, run_profile
from tests.data.scheduling import pool

# Few distinct values, so that ties are common.
WAITING = st.sampled_from([0, 1, 2, 7, 31])
KV = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]) | st.floats(0, 1)


@st.composite
def pools(draw: st.DrawFn) -> list[Any]:
    count = draw(st.integers(1, 12))
    names = draw(st.lists(st.integers(0, 250), min_size=count, max_size=count, unique=True))
    rows = [
        pool.Row(
            str(name),
            waiting=draw(WAITING),
            kv=draw(KV),
            cached=draw(st.sampled_from([0, 0, 50, 88, 92, 100])),
            in_flight=draw(st.integers(0, 9)),
            present=draw(st.integers(0, 5)) > 0,
            untold=draw(st.integers(0, 5)) == 0,
            stale=draw(st.integers(0, 5)) == 0,
            candidate=draw(st.integers(0, 4)) > 0,
        )
        for name in names
    ]
    rows = [replace(row, stale=row.stale and row.present) for row in rows]
    rows = [replace(row, waiting=0, kv=0.0) if row.untold or not row.present else row for row in rows]
    if draw(st.booleans()):
        rows = [replace(rows[0], name=row.name, candidate=row.candidate) for row in rows]
    rows[0] = replace(rows[0], candidate=True)
    return rows


def chosen(profile: Profile, rows: list[Any], **options: Any) -> list[str]:
    """Names of the chosen endpoints."""
    ctx = pool.context(rows, **options)
    decision = run_profile(profile, ctx, ctx.view.candidates)
    owners = [ctx.view.endpoints[slot] for slot in decision.slots]
    return [owner.name if owner is not None else "a slot without endpoint" for owner in owners]


def check_permutation(profile: Profile, data: st.DataObject) -> None:
    rows, seed = data.draw(pools()), data.draw(st.integers(0, 2**32))
    shuffled = data.draw(st.permutations(rows))
    size = data.draw(st.integers(len(rows), len(rows) + 20))
    slots = data.draw(st.permutations(range(size)))[: len(rows)]
    moved = chosen(profile, list(shuffled), slots=slots, capacity=size, seed=seed)
    assert chosen(profile, rows, seed=seed) == moved


def check_absent_endpoint(profile: Profile, data: st.DataObject) -> None:
    """An endpoint that may not be chosen changes nothing, whatever its facts."""
    rows, seed = data.draw(pools()), data.draw(st.integers(0, 2**32))
    ghost = pool.Row(
        "999",
        waiting=data.draw(st.sampled_from([0, 3, 10_000])),
        kv=data.draw(KV),
        cached=data.draw(st.integers(0, 100)),
        in_flight=data.draw(st.integers(0, 99)),
        candidate=False,
    )
    position = data.draw(st.integers(0, len(rows)))
    assert chosen(profile, rows, seed=seed) == chosen(
        profile, [*rows[:position], ghost, *rows[position:]], seed=seed
    )


def check_weight_scaling(profile: Profile, data: st.DataObject) -> None:
    """All weights times a power of two (exact in floating point, so ties stay ties)."""
    rows, seed = data.draw(pools()), data.draw(st.integers(0, 2**32))
    factor = 2.0 ** data.draw(st.integers(-20, 20))
    scaled = replace(
        profile, scorers=tuple(replace(step, weight=step.weight * factor) for step in profile.scorers)
    )
    assert chosen(profile, rows, seed=seed) == chosen(scaled, rows, seed=seed)


def check_best_total(profile: Profile, data: st.DataObject) -> None:
    """The choice is a candidate, and no candidate's total, added up anew, is higher."""
    rows, seed = data.draw(pools()), data.draw(st.integers(0, 2**32))
    named = chosen(profile, rows, seed=seed)
    totals = {row.name: total for row, total in zip(rows, _totals(rows), strict=True) if row.candidate}
    assert set(named) <= set(totals)
    assert [totals[name] for name in named] == pytest.approx(
        sorted(totals.values(), reverse=True)[: len(named)]
    )


def _totals(rows: list[Any]) -> list[float]:
    """The default profile's formulas, row by row."""
    queues = []
    for row in rows:
        doubtful = row.stale or row.untold or not row.present
        queues.append(max(row.waiting, row.in_flight) if doubtful else row.waiting)
    alive = [queue for queue, row in zip(queues, rows, strict=True) if row.candidate]
    low, high = min(alive), max(alive)
    told = sorted(row.kv for row in rows if row.candidate and row.present and not row.untold)
    median = told[(len(told) - 1) // 2] if told else 0.0
    return [
        2 * (1.0 if low == high else (high - queue) / (high - low))
        + 2 * (1 - (median if row.present and row.untold else row.kv))
        + 3 * row.cached / pool.TOTAL_BLOCKS
        for queue, row in zip(queues, rows, strict=True)
    ]


CHECKS = [check_permutation, check_absent_endpoint, check_weight_scaling, check_best_total]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("count", [1, 3])
def test_place(check: Callable[[Profile, st.DataObject], None], count: int) -> None:
    run(check, pool.default_profile(count=count), tuple(Phase))


def run(
    check: Callable[[Profile, st.DataObject], None],
    profile: Profile,
    phases: tuple[Phase, ...] = (Phase.generate,),
) -> None:
    @settings(
        max_examples=100 if len(phases) > 1 else 400,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
    )
    @given(st.data())
    def searched(data: st.DataObject) -> None:
        check(profile, data)

    searched()


# -- faults -----------------------------------------------------------------------------------------


class FirstOfTied:
    """Ties go to the lowest slot."""

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        return (int(np.nanargmax(np.where(alive, total, np.nan))),)


class DrawnByPosition:
    """Ties are drawn, but among positions."""

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        tied = np.flatnonzero(alive & (total == np.nanmax(total)))
        return (int(ctx.draw.choice(tied.tolist())),)


class DrawnBySlotNumber:
    """Ties are drawn by a key of the slot instead of the endpoint."""

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        tied = np.flatnonzero(alive & (total == np.nanmax(total)))
        return (int(tied[tie_keys(tied.astype(np.uint64), ctx.draw.getrandbits(64)).argmin()]),)


class Unmasked:
    """Looks at the queue alone and forgets the mask; the first one wins where the mask forbids its choice."""

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        best = int(ctx.view.waiting.argmin())
        return (best if alive[best] else int(alive.argmax()),)


class QueueOverAllSlots:
    """Min and max over every slot, free and unready ones included."""

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        queue = ctx.view.waiting
        spread = queue.max() - queue.min()
        return (queue.max() - queue) / spread if spread else np.ones(len(queue))


class Percent:
    """A score out of 100 instead of 1."""

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        return 100.0 * (1.0 - ctx.view.kv_usage)


def with_picker(plugin: Any) -> Profile:
    return replace(pool.default_profile(), picker=pool.picker(plugin))


def with_scorer(index: int, plugin: Any) -> Profile:
    profile = pool.default_profile()
    steps = list(profile.scorers)
    steps[index] = replace(steps[index], scorer=plugin)
    return replace(profile, scorers=tuple(steps))


@pytest.mark.parametrize(
    ("check", "faulty"),
    [
        (check_permutation, with_picker(FirstOfTied())),
        (check_permutation, with_picker(DrawnByPosition())),
        (check_permutation, with_picker(DrawnBySlotNumber())),
        (check_best_total, with_picker(Unmasked())),
        (check_absent_endpoint, with_picker(DrawnBySlotNumber())),
        (check_absent_endpoint, with_scorer(0, QueueOverAllSlots())),
        (check_best_total, with_scorer(0, QueueOverAllSlots())),
        (check_best_total, with_scorer(1, Percent())),
    ],
)
def test_faults_are_caught(check: Callable[[Profile, st.DataObject], None], faulty: Profile) -> None:
    with pytest.raises(AssertionError):
        run(check, faulty)


def test_a_weight_that_does_not_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the running sum is rounded to a fixed grid."""
    real = run_profile

    def coarse(profile: Profile, ctx: Ctx, alive: Mask) -> Any:
        decision = real(profile, ctx, alive)
        total = np.round(decision.total, 1)
        return replace(decision, slots=profile.picker.picker.pick(ctx, total, alive))

    monkeypatch.setitem(chosen.__globals__, "run_profile", coarse)
    with pytest.raises(AssertionError):
        run(check_weight_scaling, pool.default_profile())
