"""Scorers, picker, profile: expected values computed by hand."""

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.errors import BadRequest, InternalError, NoEndpoints, Saturated
from epp.pool.records import Floats, Mask
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.ports import Ctx
from epp.scheduling.profiles import (
    FilterStep,
    PickerStep,
    Profile,
    ScorerStep,
    SingleProfileHandler,
    run_profile,
)
from epp.scheduling.records import Role
from epp.scheduling.scorers import (
    KvCacheUtilizationScorer,
    PrefixCacheScorer,
    PrefixCacheScorerParams,
    QueueScorer,
)
from tests.data.scheduling import pool

Row = pool.Row


def scores(scorer: Any, rows: list[Any], **options: Any) -> list[float]:
    ctx = pool.context(rows, **options)
    return [float(score) for score in scorer.score(ctx, ctx.view.candidates)[: len(rows)]]


# -- scorers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Row("1", waiting=3), Row("2", waiting=0), Row("3", waiting=10)], [0.7, 1.0, 0.0]),
        ([Row("1", waiting=5), Row("2", waiting=5)], [1.0, 1.0]),
        ([Row("1", waiting=7)], [1.0]),
        # Trusted facts count alone, whatever is in flight.
        ([Row("1", waiting=2, in_flight=50), Row("2", waiting=4)], [1.0, 0.0]),
        # Stale: the larger of the last value and what is in flight.
        ([Row("1", waiting=2, in_flight=6, stale=True), Row("2", waiting=4), Row("3")], [0, 1 / 3, 1]),
        ([Row("1", waiting=8, in_flight=6, stale=True), Row("2", waiting=4), Row("3")], [0, 0.5, 1]),
        # Never scraped: what is in flight.
        ([Row("1", in_flight=3, present=False), Row("2", waiting=4), Row("3")], [0.25, 0, 1]),
        ([Row("1", present=False), Row("2", waiting=4), Row("3", waiting=2)], [1, 0, 0.5]),
        # A page without the series is no page of an idle engine: what is in flight.
        ([Row("1", in_flight=3, untold=True), Row("2", waiting=4), Row("3")], [0.25, 0, 1]),
    ],
)
def test_queue_scorer(rows: list[Any], expected: list[float]) -> None:
    assert scores(QueueScorer(), rows) == pytest.approx(expected)


def test_queue_scorer_normalises_over_the_endpoints_in_question() -> None:
    rows = [Row("1", waiting=1000, candidate=False), Row("2", waiting=4), Row("3", waiting=6)]
    rows.append(Row("4", candidate=False))
    assert scores(QueueScorer(), rows)[1:3] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("1", kv=0.2), 0.8),
        (Row("1", kv=1.0), 0.0),
        (Row("1", kv=0.9, stale=True), 0.1),
        (Row("1", present=False), 1.0),
    ],
)
def test_kv_cache_utilization_scorer(row: Any, expected: float) -> None:
    assert scores(KvCacheUtilizationScorer(), [row]) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("usages", "expected"),
    [((0.2, 0.9, 0.3), 0.7), ((0.9, 0.2), 0.8), ((0.5,), 0.5), ((0.0, 0.0), 1.0), ((), 1.0)],
)
def test_unknown_kv_usage_counts_as_the_median_of_the_others(
    usages: tuple[float, ...], expected: float
) -> None:
    others = [Row(str(number), kv=usage) for number, usage in enumerate(usages, 2)]
    others += [Row("8", kv=0.99, candidate=False), Row("9", present=False)]
    found = scores(KvCacheUtilizationScorer(), [Row("1", untold=True), *others])
    assert found[0] == pytest.approx(expected)
    assert found[1 : 1 + len(usages)] == pytest.approx([1 - usage for usage in usages])
    assert found[-1] == 1.0


@pytest.mark.parametrize(
    ("params", "cached", "total", "expected"),
    [
        ({}, 50, 100, 0.5),
        ({}, 100, 100, 1.0),
        ({}, 0, 100, 0.0),
        ({}, 0, 0, 0.0),
        # 64 blocks of 64 tokens are half of 8192: 0.5^2.
        ({"matchLengthWeight": 1}, 64, 100, 0.25),
        ({"matchLengthWeight": 1}, 300, 400, 1.0),
        ({"matchLengthWeight": 0.4}, 64, 128, 0.4 * 0.25 + 0.6 * 0.5),
        ({"matchLengthWeight": 1, "matchLengthScaleTokens": 1024}, 8, 100, 0.25),
    ],
)
def test_prefix_cache_scorer(params: dict[str, Any], cached: int, total: int, expected: float) -> None:
    scorer = PrefixCacheScorer(msgspec.convert(params, PrefixCacheScorerParams))
    assert scores(scorer, [Row("1", cached=cached)], total_blocks=total) == pytest.approx([expected])


def test_prefix_cache_scorer_without_the_fact_prefers_nobody() -> None:
    scorer = PrefixCacheScorer(PrefixCacheScorerParams(prefix_match_info_producer_name="other"))
    assert scores(scorer, [Row("1", cached=50), Row("2")]) == [0.0, 0.0]


def test_age_of_scraped_facts_does_not_touch_the_prefix_score() -> None:
    rows = [Row("1", cached=25, stale=True), Row("2", cached=25, present=False), Row("3", cached=25)]
    assert scores(PrefixCacheScorer(PrefixCacheScorerParams()), rows) == [0.25] * 3


# -- the default profile ----------------------------------------------------------------------------

A = Row("1", waiting=2, cached=92)
B = Row("2")
C = Row("3", waiting=31, cached=88)


@pytest.mark.parametrize("rows", [(A, B), (A, C), (A, B, C), (C, B, A)])
def test_a_warm_endpoint_with_a_short_queue_wins(rows: tuple[Any, ...]) -> None:
    """92 % cached and 2 waiting beats idle and cold, and 88 % cached with 31 waiting."""
    for seed in range(10):
        ctx = pool.context(rows, seed=seed)
        decision = run_profile(pool.default_profile(), ctx, ctx.view.candidates)
        assert [rows[slot] for slot in decision.slots] == [A]


def test_totals_are_weighted_sums() -> None:
    ctx = pool.context([A, B, C])
    decision = run_profile(pool.default_profile(), ctx, ctx.view.candidates)
    queue = [29 / 31, 1.0, 0.0]
    prefix = [0.92, 0.0, 0.88]
    expected = [2 * q + 2 * 1.0 + 3 * p for q, p in zip(queue, prefix, strict=True)]
    assert decision.total[:3] == pytest.approx(expected)
    assert np.isnan(decision.total[3:]).all()
    assert [(column.name, column.weight) for column in decision.columns] == [
        ("queue-scorer", 2),
        ("kv-cache-utilization-scorer", 2),
        ("prefix-cache-scorer", 3),
    ]
    assert decision.columns[0].scores[:3] == pytest.approx(queue)


def test_single_profile_handler_makes_one_leg() -> None:
    ctx = pool.context([B, A])
    (leg,) = SingleProfileHandler(pool.default_profile(count=2)).place(ctx, ctx.view.candidates)
    assert leg.role is Role.DECODE
    assert [endpoint.host_port for endpoint in leg.endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert leg.decision.profile == "default"


def test_several_endpoints_come_in_order_of_their_totals() -> None:
    rows = [Row(str(name), waiting=waiting) for name, waiting in enumerate([5, 1, 9, 3, 7])]
    ctx = pool.context(rows)
    assert run_profile(pool.default_profile(count=3), ctx, ctx.view.candidates).slots == (1, 3, 0)
    assert run_profile(pool.default_profile(count=9), ctx, ctx.view.candidates).slots == (1, 3, 0, 4, 2)


# -- ties -------------------------------------------------------------------------------------------


def chi_squared(counts: Counter[Any], cells: int) -> float:
    expected = counts.total() / cells
    missing = cells - len(counts)
    return sum((count - expected) ** 2 / expected for count in counts.values()) + missing * expected


def test_ties_are_uniform() -> None:
    ctx = pool.context([Row(str(name)) for name in range(8)])
    counts = Counter(run_profile(pool.default_profile(), ctx, ctx.view.candidates).slots for _ in range(8000))
    assert chi_squared(counts, 8) < 24.3  # 7 degrees of freedom, p = 0.001


def test_order_of_tied_fallbacks_is_uniform() -> None:
    ctx = pool.context([Row(str(name)) for name in range(4)])
    counts = Counter(
        run_profile(pool.default_profile(count=3), ctx, ctx.view.candidates).slots for _ in range(7200)
    )
    assert chi_squared(counts, 24) < 49.7  # 23 degrees of freedom, p = 0.001


def test_ties_of_neighbouring_identities_are_uniform() -> None:
    ctx = pool.context([Row(str(name)) for name in range(8)])
    ctx.view.identity[:8] = np.arange(8, dtype=np.uint64)
    counts = Counter(run_profile(pool.default_profile(), ctx, ctx.view.candidates).slots for _ in range(8000))
    assert chi_squared(counts, 8) < 24.3


def test_chance_is_drawn_for_ties_only() -> None:
    ctx = pool.context([A, B])
    before = ctx.draw.getstate()
    run_profile(pool.default_profile(), ctx, ctx.view.candidates)
    assert ctx.draw.getstate() == before


# -- filters and refusals ---------------------------------------------------------------------------


class Keep:
    def __init__(self, *slots: int) -> None:
        self.slots = slots

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        mask = np.zeros(len(alive), np.bool_)
        mask[list(self.slots)] = True
        return mask


class Constant:
    def __init__(self, *values: float) -> None:
        self.values = values

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        column = np.zeros(len(alive))
        column[: len(self.values)] = self.values
        return column


def profile(filters: list[Any], scorers: list[Any], picker: Any = None) -> Profile:
    return Profile(
        "p",
        tuple(FilterStep(f"filter-{number}", "test-filter", each) for number, each in enumerate(filters)),
        tuple(
            ScorerStep(f"scorer-{number}", "test-scorer", 1.0, each) for number, each in enumerate(scorers)
        ),
        PickerStep("picker", "test-picker", picker or MaxScorePicker(MaxScorePickerParams())),
    )


def test_filters_run_in_order_and_tell_what_they_took() -> None:
    ctx = pool.context([Row(str(name)) for name in range(5)])
    chosen = run_profile(profile([Keep(0, 1, 2), Keep(2, 3)], [Constant(5, 4, 3)]), ctx, ctx.view.candidates)
    assert chosen.slots == (2,)
    taken = {name: mask.nonzero()[0].tolist() for name, mask in chosen.excluded}
    assert taken == {"filter-0": [3, 4], "filter-1": [0, 1]}
    assert chosen.candidates.nonzero()[0].tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(chosen.total).tolist() == [True, True, False, True, True, True, True]


def test_a_filter_cannot_bring_anyone_back() -> None:
    ctx = pool.context([Row("1"), Row("2", candidate=False)])
    assert run_profile(profile([Keep(0, 1)], [Constant(0, 1)]), ctx, ctx.view.candidates).slots == (0,)


def test_no_candidates() -> None:
    ctx = pool.context([Row("1", candidate=False)])
    with pytest.raises(NoEndpoints, match="^failed to find endpoint candidates for serving the request"):
        run_profile(pool.default_profile(), ctx, ctx.view.candidates)
    empty = pool.context([], capacity=0)
    with pytest.raises(NoEndpoints):
        run_profile(pool.default_profile(), empty, empty.view.candidates)


def test_filters_left_nothing() -> None:
    ctx = pool.context([Row("1"), Row("2")])
    with pytest.raises(Saturated) as caught:
        run_profile(profile([Keep(0), Keep(1)], []), ctx, ctx.view.candidates)
    assert caught.value.message == (
        "no endpoints available for the given request: filter-0 excluded 1, filter-1 excluded 1"
    )


# -- plugins that misbehave -------------------------------------------------------------------------


def test_scores_are_clamped_and_what_is_no_number_counts_as_nothing() -> None:
    ctx = pool.context([Row(str(name)) for name in range(6)])
    odd = Constant(math.nan, math.inf, -math.inf, 7.0, -3.0, 0.5)
    decision = run_profile(profile([], [odd]), ctx, ctx.view.candidates)
    assert decision.columns[0].scores[:6].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.5]
    assert decision.slots == (3,)


def test_a_profile_without_scorers_chooses_at_random() -> None:
    ctx = pool.context([Row("1"), Row("2")])
    chosen = {run_profile(profile([], []), ctx, ctx.view.candidates).slots for _ in range(50)}
    assert chosen == {(0,), (1,)}


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        raise self.error

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        raise self.error

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        raise self.error


class Picks:
    def __init__(self, *slots: int) -> None:
        self.slots = slots

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        return self.slots


class Short:
    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        return np.zeros(1)

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        return np.ones(1, np.bool_)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (profile([Raises(ValueError("oh"))], []), "filter-0 failed: ValueError: oh"),
        (profile([], [Raises(KeyError("x"))]), "scorer-0 failed: KeyError"),
        (profile([], [], Raises(ValueError("no"))), "picker failed: ValueError: no"),
        (profile([Short()], []), r"filter-0 returned an array of shape \(1,\), expected \(4,\)"),
        (profile([], [Short()]), r"scorer-0 returned an array of shape \(1,\), expected \(4,\)"),
        (profile([], [], Picks()), "picker picker chose nothing"),
        (profile([], [], Picks(0, 4)), "picker picker chose slot 4"),
        (profile([], [], Picks(-1)), "picker picker chose slot -1"),
        (profile([], [], Picks(99)), "picker picker chose slot 99"),
    ],
)
def test_a_faulty_plugin_is_named(broken: Profile, named: str) -> None:
    ctx = pool.context([Row("1"), Row("2")])
    with pytest.raises(InternalError, match=named):
        run_profile(broken, ctx, ctx.view.candidates)


def test_a_plugin_may_refuse_the_request() -> None:
    ctx = pool.context([Row("1")])
    with pytest.raises(BadRequest, match="header"):
        run_profile(profile([Raises(BadRequest("header x is missing"))], []), ctx, ctx.view.candidates)


# -- what a decision carries ------------------------------------------------------------------------


def test_a_decision_holds_nothing_that_lives_on() -> None:
    class Live:
        def score(self, ctx: Ctx, alive: Mask) -> Floats:
            return ctx.view.kv_usage

    ctx = pool.context([Row("1", kv=0.5), Row("2", kv=0.25)])
    decision = run_profile(profile([], [Live()]), ctx, ctx.view.candidates)
    ctx.view.kv_usage[:] = 1.0
    ctx.view.candidates[:] = False
    assert decision.columns[0].scores[:2].tolist() == [0.5, 0.25]
    assert decision.candidates.nonzero()[0].tolist() == [0, 1]


def test_plugins_are_timed_only_when_asked() -> None:
    ctx = pool.context([Row("1"), Row("2")])
    timed = profile([Keep(0, 1)], [Constant(1.0)])
    assert run_profile(timed, ctx, ctx.view.candidates).timings == ()
    ticks = iter(range(100))
    ctx.clock = lambda: float(next(ticks))
    timings = run_profile(timed, ctx, ctx.view.candidates).timings
    assert [(each.extension_point, each.plugin_type, each.plugin_name, each.seconds) for each in timings] == [
        ("Filter", "test-filter", "filter-0", 1.0),
        ("Scorer", "test-scorer", "scorer-0", 1.0),
        ("Picker", "test-picker", "picker", 1.0),
    ]
