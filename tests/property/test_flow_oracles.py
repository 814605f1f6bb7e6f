"""Saturation, shedding and model rewrite against retellings of their rules. Faults that are caught follow."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.durations import Duration
from epp.errors import Saturated
from epp.flow import saturation as saturation_module
from epp.flow.admission import LegacyAdmission, ProbabilisticAdmitter, ProbabilisticAdmitterParams
from epp.flow.saturation import (
    ConcurrencyDetector,
    ConcurrencyDetectorParams,
    UtilizationDetector,
    UtilizationDetectorParams,
)
from epp.payload import rewrite as rewrite_module
from epp.payload.rewrite import ModelRewrite, RewriteRule, RewriteRules, RewriteTarget
from epp.pool.records import Load, Mask, PoolView
from epp.scheduling.ports import Ctx
from tests.data.flow import crowd

ROWS = st.lists(
    st.builds(
        crowd.Row,
        waiting=st.sampled_from([0, 1, 3, 5, 6, 40]),
        kv=st.sampled_from([0.0, 0.1, 0.4, 0.8, 0.9, 1.0]),
        requests=st.sampled_from([0, 1, 5, 10, 12, 30]),
        tokens=st.sampled_from([0, 10, 100, 120, 900]),
        age_s=st.sampled_from([0.05, 0.3, 1.5, 9.0]),
        stale=st.booleans(),
        present=st.sampled_from([True, True, True, False]),
        candidate=st.sampled_from([True, True, False]),
    ),
    max_size=6,
)
HEADROOM = st.sampled_from([0.0, 0.2, 0.25, 1.0])


# -- the rules, told row by row ---------------------------------------------------------------------


def is_stale(row: Any, threshold_s: float) -> bool:
    return not row.present or (row.stale and row.age_s > threshold_s)


def mean(values: list[float], empty: float) -> float:
    return sum(values) / len(values) if values else empty


def utilization_of(rows: list[Any], params: UtilizationDetectorParams) -> float:
    fullness: list[float] = []
    alive = [row for row in rows if row.candidate]
    for row in alive:
        if is_stale(row, params.metrics_staleness_threshold):
            if params.staleness_policy == "saturated":
                fullness.append(1.0)
        else:
            by_queue = row.waiting / params.queue_depth_threshold
            fullness.append(max(by_queue, row.kv / params.kv_cache_util_threshold))
    return mean(fullness, 0.0 if alive else 1.0)


def concurrency_of(rows: list[Any], params: ConcurrencyDetectorParams) -> float:
    alive = [row for row in rows if row.candidate]
    if not alive:
        return 1.0
    ratios = {
        "requests": sum(row.requests for row in alive) / (params.max_concurrency * len(alive)),
        "tokens": sum(row.tokens for row in alive) / (params.max_token_concurrency * len(alive)),
    }
    mode = params.concurrency_mode
    return max(ratios.values()) if mode == "hybrid" else ratios[mode]


# -- checks -----------------------------------------------------------------------------------------


def check_utilization(data: st.DataObject) -> None:
    params = UtilizationDetectorParams(
        queue_depth_threshold=data.draw(st.sampled_from([1, 5, 8])),
        kv_cache_util_threshold=data.draw(st.sampled_from([0.4, 0.8, 1.0])),
        metrics_staleness_threshold=Duration(data.draw(st.sampled_from([0.2, 2.0]))),
        staleness_policy=data.draw(st.sampled_from(["saturated", "ignore"])),
        headroom=data.draw(HEADROOM),
    )
    rows = data.draw(ROWS)
    ctx = crowd.context(rows)
    detector, alive = UtilizationDetector(params), ctx.view.candidates.copy()
    value = detector.saturation(ctx.view, ctx.load, alive, ctx.now)
    assert value == pytest.approx(utilization_of(rows, params))
    queue_limit = params.queue_depth_threshold * (1 + params.headroom)
    kv_limit = params.kv_cache_util_threshold * (1 + params.headroom)
    below = [
        row.candidate
        and not is_stale(row, params.metrics_staleness_threshold)
        and row.waiting < queue_limit
        and row.kv < kv_limit
        for row in rows
    ]
    expected = below if any(below) else [row.candidate for row in rows]
    assert detector.keep(ctx, alive).tolist() == [*expected, False, False]
    assert alive.tolist() == ctx.view.candidates.tolist()


def check_concurrency(data: st.DataObject) -> None:
    params = ConcurrencyDetectorParams(
        max_concurrency=data.draw(st.sampled_from([1, 10])),
        headroom=data.draw(HEADROOM),
        concurrency_mode=data.draw(st.sampled_from(["requests", "tokens", "hybrid"])),
        max_token_concurrency=data.draw(st.sampled_from([100, 1000])),
    )
    rows = data.draw(ROWS)
    ctx = crowd.context(rows)
    detector, alive = ConcurrencyDetector(params), ctx.view.candidates.copy()
    value = detector.saturation(ctx.view, ctx.load, alive, ctx.now)
    assert value == pytest.approx(concurrency_of(rows, params))
    expected = []
    for row in rows:
        kept = row.candidate
        if params.concurrency_mode in ("requests", "hybrid"):
            kept = kept and row.requests < int(params.max_concurrency * (1 + params.headroom))
        if params.concurrency_mode in ("tokens", "hybrid"):
            kept = kept and row.tokens < int(params.max_token_concurrency * (1 + params.headroom))
        expected.append(kept)
    assert detector.keep(ctx, alive).tolist() == [*expected, False, False]
    assert alive.tolist() == ctx.view.candidates.tolist()


def refused(admission: Any, ctx: Ctx) -> bool:
    try:
        admission.admit(ctx, ctx.view.candidates)
    except Saturated:
        return True
    return False


def check_legacy(data: st.DataObject) -> None:
    params = UtilizationDetectorParams()
    rows, priority = data.draw(ROWS), data.draw(st.sampled_from([-10, -1, 0, 1]))
    ctx = crowd.context(rows, priority=priority)
    full = any(row.candidate for row in rows) and utilization_of(rows, params) >= 1.0
    assert refused(LegacyAdmission(UtilizationDetector(params)), ctx) == (priority < 0 and full)


def check_shed_share(data: st.DataObject) -> None:
    """Of many seeded draws the share that the formula tells is refused, within five standard deviations."""
    params = ProbabilisticAdmitterParams(
        power=data.draw(st.sampled_from([1.0, 2.0, 5.0])), k=data.draw(st.sampled_from([0.3, 1.0, 300.0]))
    )
    rows, priority = data.draw(ROWS), data.draw(st.sampled_from([-1, 0]))
    ctx = crowd.context(rows, priority=priority, draw=Random(data.draw(st.integers(0, 2**32))))
    fullness = [max(row.waiting / 5, row.kv / 0.8) if row.present else 1.0 for row in rows if row.candidate]
    probability = min(mean(fullness, 0.0) ** params.power * params.k, 1.0) if priority < 0 else 0.0
    times, admitter = 300, ProbabilisticAdmitter(params)
    share = sum(refused(admitter, ctx) for _ in range(times)) / times
    assert abs(share - probability) <= 5 * (probability * (1 - probability) / times) ** 0.5 + 1e-9


MODELS = st.sampled_from(["a", "b", "c"])
TARGETS = st.lists(
    st.builds(RewriteTarget, st.sampled_from(["a", "x", "y"]), st.sampled_from([None, 1, 3])),
    min_size=1,
    max_size=3,
).map(tuple)
RULES = st.builds(RewriteRule, st.lists(MODELS, max_size=2).map(tuple), TARGETS)
REWRITES = st.lists(st.lists(RULES, max_size=3).map(tuple), max_size=3).map(
    lambda groups: [ModelRewrite(f"r{index}", rules) for index, rules in enumerate(groups)]
)


def check_rewrite(data: st.DataObject) -> None:
    """The rule is the first exact one, else the first generic one; targets come in the shares of weights."""
    rewrites, model = data.draw(REWRITES), data.draw(MODELS | st.just(""))
    flat = [(rewrite.name, rule) for rewrite in rewrites for rule in rewrite.rules]
    exact = [each for each in flat if model in each[1].models]
    generic = [each for each in flat if not each[1].models]
    rules, draw = RewriteRules(rewrites), Random(data.draw(st.integers(0, 2**32)))
    assert bool(rules) == bool(flat)
    times = 300
    decisions = [rules.target(model, draw) for _ in range(times)]
    if not exact and not generic:
        assert decisions == [None] * times
        return
    name, rule = (exact or generic)[0]
    weights: Counter[str] = Counter()
    unweighted = all(target.weight is None for target in rule.targets)
    for target in rule.targets:
        weights[target.model_rewrite] += 1 if unweighted else (target.weight or 0)
    assert {rewrite and rewrite.rule_name for rewrite in decisions} == {name}
    counts = Counter(rewrite.target for rewrite in decisions if rewrite is not None)
    for model_rewrite in {*weights, *counts}:
        share = weights[model_rewrite] / weights.total()
        spread = 5 * (share * (1 - share) / times) ** 0.5
        assert abs(counts[model_rewrite] / times - share) <= spread + 1e-9


Check = Callable[[st.DataObject], None]
CHECKS = [
    (check_utilization, 150),
    (check_concurrency, 150),
    (check_legacy, 150),
    (check_shed_share, 40),
    (check_rewrite, 80),
]


@pytest.mark.parametrize(("check", "examples"), CHECKS)
def test_the_rules_are_kept(check: Check, examples: int) -> None:
    run(check, examples, tuple(Phase))


def run(check: Check, examples: int, phases: tuple[Phase, ...] = (Phase.generate,)) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=phases)
    @given(st.data())
    def searched(data: st.DataObject) -> None:
        check(data)

    searched()


# -- faults -----------------------------------------------------------------------------------------


def staleness_forgotten(self: Any, view: PoolView, alive: Mask, now: float) -> Mask:
    return alive & ~view.present


def never_scraped_is_idle(self: Any, view: PoolView, alive: Mask, now: float) -> Mask:
    stale: Mask = alive & view.stale & (now - view.scraped_at > self._staleness_s)
    return stale


def threshold_alone(self: Any, view: PoolView, alive: Mask, now: float) -> Mask:
    stale: Mask = alive & ((now - view.scraped_at > self._staleness_s) | ~view.present)
    return stale


def stale_alone(self: Any, view: PoolView, alive: Mask, now: float) -> Mask:
    return alive & (view.stale | ~view.present)


def over_every_slot(self: Any, view: PoolView, load: Load, alive: Mask, now: float) -> float:
    return float(np.maximum(view.waiting / self._queue, view.kv_usage / self._kv).mean())


def worst_endpoint(self: Any, view: PoolView, load: Load, alive: Mask, now: float) -> float:
    fullness = np.maximum(view.waiting / self._queue, view.kv_usage / self._kv)[alive]
    return float(fullness.max(initial=0.0)) if len(fullness) else 1.0


def fails_closed(self: Any, ctx: Ctx, alive: Mask) -> Mask:
    below = (ctx.view.waiting < self._queue_limit) & (ctx.view.kv_usage < self._kv_limit)
    kept: Mask = (alive & below) > self.stale(ctx.view, alive, ctx.now)
    return kept


def writes_into_the_mask(self: Any, ctx: Ctx, alive: Mask) -> Mask:
    alive &= ctx.load.requests < self._request_limit
    return alive


def every_slot_in_flight(column: Any, alive: Mask) -> int:
    return int(column.sum())


def sheds_everybody(self: Any, ctx: Ctx, alive: Mask) -> None:
    if self._detector.saturation(ctx.view, ctx.load, alive, ctx.now) >= 1.0:
        raise Saturated("")


def sheds_above_one_only(self: Any, ctx: Ctx, alive: Mask) -> None:
    if ctx.priority < 0 and self._detector.saturation(ctx.view, ctx.load, alive, ctx.now) > 1.0:
        raise Saturated("")


def an_empty_pool_is_full(self: Any, ctx: Ctx, alive: Mask) -> None:
    if ctx.priority < 0 and self._detector.saturation(ctx.view, ctx.load, alive, ctx.now) >= 1.0:
        raise Saturated("")


def without_power(self: Any, saturation: float) -> float:
    return min(saturation * self._k, 1.0)


def without_factor(self: Any, saturation: float) -> float:
    return float(min(saturation**self._power, 1.0))


def the_last_rule_counts(self: Any, rewrites: Any) -> None:
    original(self, [ModelRewrite(each.name, each.rules[::-1]) for each in reversed(list(rewrites))])


original = RewriteRules.__init__


def generic_first(self: Any, model: str, draw: Random) -> Any:
    choice = self._any or self._exact.get(model)
    return None if choice is None else draw.choice(choice.rewrites)


def weights_forgotten(self: Any, model: str, draw: Random) -> Any:
    choice = self._exact.get(model, self._any)
    return None if choice is None else draw.choice(choice.rewrites)


def unweighted_count_one(name: str, targets: tuple[RewriteTarget, ...]) -> Any:
    weighted = tuple(RewriteTarget(target.model_rewrite, target.weight or 1) for target in targets)
    return made(name, weighted)


made = rewrite_module._choice


@pytest.mark.parametrize(
    ("owner", "name", "fault", "check"),
    [
        (UtilizationDetector, "stale", staleness_forgotten, check_utilization),
        (UtilizationDetector, "stale", never_scraped_is_idle, check_utilization),
        (UtilizationDetector, "stale", threshold_alone, check_utilization),
        (UtilizationDetector, "stale", stale_alone, check_utilization),
        (UtilizationDetector, "saturation", over_every_slot, check_utilization),
        (UtilizationDetector, "saturation", worst_endpoint, check_utilization),
        (UtilizationDetector, "keep", fails_closed, check_utilization),
        (ConcurrencyDetector, "keep", writes_into_the_mask, check_concurrency),
        (ConcurrencyDetector, "keep", lambda self, ctx, alive: alive, check_concurrency),
        (saturation_module, "_total", every_slot_in_flight, check_concurrency),
        (LegacyAdmission, "admit", sheds_everybody, check_legacy),
        (LegacyAdmission, "admit", sheds_above_one_only, check_legacy),
        (LegacyAdmission, "admit", an_empty_pool_is_full, check_legacy),
        (ProbabilisticAdmitter, "_probability", without_power, check_shed_share),
        (ProbabilisticAdmitter, "_probability", without_factor, check_shed_share),
        (ProbabilisticAdmitter, "_saturation", lambda self, view, alive: 0.0, check_shed_share),
        (RewriteRules, "__init__", the_last_rule_counts, check_rewrite),
        (RewriteRules, "target", generic_first, check_rewrite),
        (RewriteRules, "target", weights_forgotten, check_rewrite),
        (rewrite_module, "_choice", unweighted_count_one, check_rewrite),
    ],
)
def test_faults_are_seen(
    owner: Any, name: str, fault: object, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        run(check, 200)
