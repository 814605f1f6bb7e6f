"""Drawing pickers: how often each order comes, against exact probabilities. Faults that are caught follow."""

from collections.abc import Callable
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.pool.records import Floats, Mask
from epp.scheduling.pickers import (
    MaxScorePicker,
    MaxScorePickerParams,
    RandomPicker,
    RandomPickerParams,
    WeightedRandomPicker,
    WeightedRandomPickerParams,
    tie_keys,
)
from epp.scheduling.ports import Ctx
from tests.data.scheduling import pool

Row = pool.Row
ROUNDS = 3000
# Upper 0.0001 points of chi squared, by degrees of freedom.
LIMITS = {1: 15.14, 2: 18.42, 3: 21.11, 5: 25.74, 11: 37.37, 23: 54.22}

Orders = dict[tuple[int, ...], float]


def successive(totals: list[float], count: int) -> Orders:
    """Probability of each order: one drawn in proportion to its total, the next from what is left, and so on.

    Totals of 0 are left to the end, where each order of them is as likely as another.
    """
    orders: Orders = {}
    for order in permutations(range(len(totals)), count):
        probability = 1.0
        left = list(range(len(totals)))
        for slot in order:
            weights = {each: totals[each] for each in left}
            if not any(weights.values()):
                weights = dict.fromkeys(left, 1.0)
            probability *= weights[slot] / sum(weights.values())
            left.remove(slot)
        if probability:
            orders[order] = probability
    return orders


def misfit(picker: Any, totals: list[float], expected: Orders, seed: int) -> float:
    """Chi squared of what the picker did over its limit; infinite for what must never happen."""
    rows = [Row(str(number)) for number in range(1, len(totals) + 1)]
    ctx = pool.context([*rows, Row("99", candidate=False)], seed=seed)
    column = np.full(ctx.view.capacity, np.nan)
    column[: len(totals)] = totals
    seen = dict.fromkeys(expected, 0)
    for _ in range(ROUNDS):
        slots = picker.pick(ctx, column, ctx.view.candidates)
        if slots not in seen:
            return float("inf")
        seen[slots] += 1
    parts = [(seen[order] - ROUNDS * share) ** 2 / (ROUNDS * share) for order, share in expected.items()]
    return sum(parts) / LIMITS[len(expected) - 1] if len(expected) > 1 else 0.0


CASES: list[tuple[list[float], int]] = [
    ([1.0, 1.0], 1),
    ([1.0, 3.0], 1),
    ([0.2, 0.3, 0.5], 1),
    ([1.4, 4.2, 2.8], 3),
    ([5.0, 1.0, 1.0, 3.0], 2),
    ([0.0, 2.0, 1.0], 1),
    ([0.0, 2.0, 1.0, 0.0], 4),
    ([0.0, 0.0, 0.0], 1),
    ([0.0, 0.0, 0.0], 3),
    ([1e-9, 3e-9], 1),
]


def weighted(count: int) -> Any:
    return WeightedRandomPicker(WeightedRandomPickerParams(max_num_of_endpoints=count))


def uniform(count: int) -> Any:
    return RandomPicker(RandomPickerParams(max_num_of_endpoints=count))


@pytest.mark.parametrize(("totals", "count"), CASES)
def test_weighted_random_picker_draws_in_proportion(totals: list[float], count: int) -> None:
    assert misfit(weighted(count), totals, successive(totals, count), seed=2) < 1


@pytest.mark.parametrize(("totals", "count"), CASES)
def test_random_picker_draws_evenly(totals: list[float], count: int) -> None:
    even = successive([1.0] * len(totals), count)
    assert misfit(uniform(count), totals, even, seed=2) < 1


# -- the choice is the endpoint's, not the slot's ---------------------------------------------------


def check_places(make: Callable[[int], Any], phases: tuple[Phase, ...], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=phases)
    @given(st.integers(1, 8), st.integers(1, 9), st.integers(0, 2**32))
    def searched(endpoints: int, count: int, seed: int) -> None:
        draw = Random(seed)
        rows = [Row(str(number), candidate=draw.randrange(4) > 0) for number in range(2, endpoints + 2)]
        rows.append(Row("1"))
        totals = {row.name: draw.choice([0.0, 0.5, 1.0, 3.0]) for row in rows}
        chosen = [named(make(count), rows, totals, range(len(rows)), seed)]
        draw.shuffle(rows)
        places = draw.sample(range(len(rows) + 5), len(rows))
        chosen.append(named(make(count), rows, totals, places, seed))
        assert chosen[0] == chosen[1]
        free = {row.name for row in rows if row.candidate}
        assert set(chosen[0]) <= free
        assert len(chosen[0]) == len(set(chosen[0])) == min(count, len(free))

    searched()


def named(picker: Any, rows: Any, totals: dict[str, float], places: Any, seed: int) -> list[str]:
    places = list(places)
    ctx = pool.context(rows, slots=places, seed=seed)
    column = np.full(ctx.view.capacity, np.nan)
    for place, row in zip(places, rows, strict=True):
        if row.candidate:
            column[place] = totals[row.name]
    owners = [ctx.view.endpoints[slot] for slot in picker.pick(ctx, column, ctx.view.candidates)]
    return [owner.name for owner in owners if owner is not None]


@pytest.mark.parametrize("make", [weighted, uniform])
def test_where_an_endpoint_stands_does_not_matter(make: Callable[[int], Any]) -> None:
    check_places(make, tuple(Phase), 100)


# -- faults -----------------------------------------------------------------------------------------


class Drawing:
    """A weighted picker with one thing changed."""

    def __init__(self, count: int) -> None:
        self._count = count

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        slots = alive.nonzero()[0]
        late = self.late(self.chance(ctx, slots), total[slots])
        return tuple(slots[np.argsort(late, kind="stable")[: self._count]].tolist())

    def chance(self, ctx: Ctx, slots: Any) -> Floats:
        keys = tie_keys(ctx.view.identity[slots], ctx.draw.getrandbits(64))
        return (keys >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53

    def late(self, chance: Floats, totals: Floats) -> Floats:
        return -np.where(totals > 0, np.power(chance, 1 / np.where(totals > 0, totals, 1)), chance - 1)


class Inverted(Drawing):
    """U^total in place of U^(1/total)."""

    def late(self, chance: Floats, totals: Floats) -> Floats:
        return -np.power(chance, totals)


class ZeroIsSomething(Drawing):
    """A total of 0 can win."""

    def late(self, chance: Floats, totals: Floats) -> Floats:
        return super().late(chance, totals + 0.1)


class Product(Drawing):
    """U x total: the better is favoured too much."""

    def late(self, chance: Floats, totals: Floats) -> Floats:
        return -chance * totals


class OneChance(Drawing):
    """One draw for all: the best always wins."""

    def chance(self, ctx: Ctx, slots: Any) -> Floats:
        return np.full(len(slots), ctx.draw.random())


class ByPlace(Drawing):
    """The draw belongs to the slot."""

    def chance(self, ctx: Ctx, slots: Any) -> Floats:
        nonce = ctx.draw.getrandbits(64)
        keys = tie_keys(slots.astype(np.uint64), nonce)
        return (keys >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53


class InOrder(Drawing):
    """Draws one after the other, in the order of slots."""

    def chance(self, ctx: Ctx, slots: Any) -> Floats:
        return np.array([ctx.draw.random() for _ in slots])


class OutsideToo(Drawing):
    """Chooses among all endpoints."""

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        return super().pick(ctx, np.nan_to_num(total), ctx.view.identity > 0)


def worst(make: Callable[[int], Any]) -> float:
    return max(misfit(make(count), totals, successive(totals, count), seed=2) for totals, count in CASES[2:7])


def test_drawing_without_a_fault_fits() -> None:
    assert worst(Drawing) < 1
    check_places(Drawing, (Phase.generate,), 50)


@pytest.mark.parametrize("fault", [Inverted, ZeroIsSomething, Product, OneChance, OutsideToo])
def test_a_wrong_distribution_is_caught(fault: Callable[[int], Any]) -> None:
    assert worst(fault) > 1


def by_total(count: int) -> Any:
    return MaxScorePicker(MaxScorePickerParams(max_num_of_endpoints=count))


@pytest.mark.parametrize("fault", [by_total, weighted, OneChance])
def test_an_uneven_random_picker_is_caught(fault: Callable[[int], Any]) -> None:
    totals = [1.0, 2.0, 3.0]
    assert misfit(fault(1), totals, successive([1.0] * 3, 1), seed=2) > 1


@pytest.mark.parametrize("fault", [ByPlace, InOrder, OutsideToo])
def test_a_choice_by_place_is_caught(fault: Callable[[int], Any]) -> None:
    with pytest.raises(AssertionError):
        check_places(fault, (Phase.generate,), 100)
