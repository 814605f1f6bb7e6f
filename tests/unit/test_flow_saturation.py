"""Saturation detectors and the filters they are: expected values computed by hand."""

from typing import Any

import numpy as np
import pytest

from epp.durations import Duration
from epp.flow.saturation import (
    ConcurrencyDetector,
    ConcurrencyDetectorParams,
    UtilizationDetector,
    UtilizationDetectorParams,
)
from epp.pool.metrics_page import EngineSample
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from tests.data.flow import crowd

Row = crowd.Row
STALE = Row(age_s=9.0, stale=True)
NEW = Row(present=False)


def utilization(**params: Any) -> UtilizationDetector:
    return UtilizationDetector(UtilizationDetectorParams(**params))


def concurrency(**params: Any) -> ConcurrencyDetector:
    return ConcurrencyDetector(ConcurrencyDetectorParams(**params))


def saturation(detector: Any, rows: list[Any]) -> float:
    ctx = crowd.context(rows)
    value = detector.saturation(ctx.view, ctx.load, ctx.view.candidates, ctx.now)
    assert type(value) is float
    return value


def kept(detector: Any, rows: list[Any]) -> list[bool]:
    ctx = crowd.context(rows)
    mask = detector.keep(ctx, ctx.view.candidates.copy())
    assert not mask[len(rows) :].any()
    return [bool(each) for each in mask[: len(rows)]]


# -- utilization ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], 1.0),
        ([Row(candidate=False)], 1.0),
        ([Row()], 0.0),
        # max(4 / 5, 0.4 / 0.8)
        ([Row(waiting=4, kv=0.4)], 0.8),
        ([Row(waiting=1, kv=0.6)], 0.75),
        ([Row(waiting=5)], 1.0),
        ([Row(kv=0.8)], 1.0),
        # One endpoint above its limit makes up for an idle one: the mean is not clamped.
        ([Row(waiting=10), Row()], 1.0),
        ([Row(waiting=10), Row(kv=0.8)], 1.5),
        ([Row(waiting=10), Row(waiting=99, candidate=False)], 2.0),
        # Stale and never scraped count 1, whatever the last figures were.
        ([STALE, Row()], 0.5),
        ([NEW, Row(), Row(), Row()], 0.25),
        ([STALE, NEW], 1.0),
        ([Row(waiting=50, age_s=9.0, stale=True)], 1.0),
    ],
)
def test_utilization(rows: list[Any], expected: float) -> None:
    assert saturation(utilization(), rows) == pytest.approx(expected)


def test_utilization_with_other_thresholds() -> None:
    detector = utilization(queue_depth_threshold=10, kv_cache_util_threshold=0.5, headroom=5.0)
    assert saturation(detector, [Row(waiting=4, kv=0.1), Row(waiting=1, kv=0.4)]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([STALE, Row(waiting=3)], 0.6), ([STALE, NEW], 0.0), ([NEW, Row(), Row(kv=0.4)], 0.25), ([], 1.0)],
)
def test_stale_endpoints_may_be_left_out_of_the_mean(rows: list[Any], expected: float) -> None:
    assert saturation(utilization(staleness_policy="ignore"), rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("threshold_s", "age_s", "stale_for_the_pool", "expected"),
    [
        # Between two scrapes of 200 ms nothing is stale, although the threshold is 200 ms.
        (0.2, 0.35, False, False),
        (0.2, 2.5, True, True),
        # A longer threshold than the pool's counts.
        (10.0, 2.5, True, False),
        (10.0, 10.5, True, True),
    ],
)
def test_an_endpoint_is_stale_by_the_longer_of_two_limits(
    threshold_s: float, age_s: float, stale_for_the_pool: bool, expected: bool
) -> None:
    detector = utilization(metrics_staleness_threshold=Duration(threshold_s))
    ctx = crowd.context([Row(waiting=0, age_s=age_s, stale=stale_for_the_pool)])
    assert bool(detector.stale(ctx.view, ctx.view.candidates, ctx.now)[0]) is expected
    assert saturation(detector, [Row(age_s=age_s, stale=stale_for_the_pool)]) == float(expected)


def test_only_candidates_are_counted_as_stale() -> None:
    ctx = crowd.context([STALE, NEW, Row(), Row(present=False, candidate=False)])
    assert np.count_nonzero(utilization().stale(ctx.view, ctx.view.candidates, ctx.now)) == 2


def test_a_pool_scraped_in_time_is_fresh_and_a_silent_one_is_full() -> None:
    store = PoolStore(staleness_s=2.0)
    store.sync([Endpoint("u", "pod", "default", "10.0.0.1", 8000)], 0.0)
    ctx = crowd.context([])
    seen = []
    for step in range(40):
        now = step * 0.1
        if step % 2 == 0 and now < 1.0:
            store.sampled(0, EngineSample(waiting=1, running=1, kv_usage=0.1), now)
        store.refresh(now, 0.2)
        seen.append(utilization().saturation(store.view, ctx.load, store.view.candidates, now))
    assert seen[:28] == [0.2] * 28
    assert seen[29:] == [1.0] * 11


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # At the limit is over it.
        ([Row(waiting=4), Row(waiting=5), Row(kv=0.79), Row(kv=0.8)], [True, False, True, False]),
        ([Row(waiting=5, kv=0.1), Row(waiting=1, kv=0.9), Row()], [False, False, True]),
        ([STALE, NEW, Row(waiting=1)], [False, False, True]),
        # Fails open: of none left all stay, but nobody comes in from outside.
        ([Row(waiting=5), Row(kv=0.9), Row(candidate=False)], [True, True, False]),
        ([STALE, NEW, Row(candidate=False)], [True, True, False]),
    ],
)
def test_utilization_filters(rows: list[Any], expected: list[bool]) -> None:
    assert kept(utilization(), rows) == expected


def test_headroom_lifts_the_limits_of_the_filter_alone() -> None:
    detector = utilization(headroom=0.2)
    rows = [Row(waiting=5), Row(waiting=6), Row(kv=0.95), Row(kv=0.97)]
    assert kept(detector, rows) == [True, False, True, False]
    assert saturation(detector, [Row(waiting=5)]) == 1.0


# -- concurrency ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "rows", "expected"),
    [
        ("requests", [], 1.0),
        ("requests", [Row(candidate=False, requests=5)], 1.0),
        ("requests", [Row(requests=100)], 1.0),
        ("requests", [Row(requests=150), Row(), Row(requests=900, candidate=False)], 0.75),
        # Nothing scraped enters, and an endpoint nobody scraped yet is idle capacity.
        ("requests", [Row(requests=50, waiting=99, kv=1.0), NEW, STALE], 1 / 6),
        ("requests", [Row(tokens=10**9)], 0.0),
        ("tokens", [Row(requests=10**6, tokens=250_000), Row()], 0.125),
        ("tokens", [], 1.0),
        ("hybrid", [Row(requests=90, tokens=10), Row()], 0.45),
        ("hybrid", [Row(requests=90, tokens=1_800_000), Row()], 0.9),
        # The larger of two sums over the pool, not the sum of the larger ones.
        ("hybrid", [Row(requests=100), Row(tokens=1_000_000)], 0.5),
        ("hybrid", [], 1.0),
    ],
)
def test_concurrency(mode: str, rows: list[Any], expected: float) -> None:
    assert saturation(concurrency(concurrency_mode=mode), rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("params", "rows", "expected"),
    [
        ({"max_concurrency": 10}, [Row(requests=9), Row(requests=10), NEW], [True, False, True]),
        ({"max_concurrency": 10, "headroom": 0.2}, [Row(requests=11), Row(requests=12)], [True, False]),
        # 10 x 1.25 = 12.5 is 12 whole requests.
        ({"max_concurrency": 10, "headroom": 0.25}, [Row(requests=11), Row(requests=12)], [True, False]),
        # It does not fail open.
        ({"max_concurrency": 1}, [Row(requests=1), Row(requests=2)], [False, False]),
        ({"max_concurrency": 1}, [Row(requests=1), Row(candidate=False)], [False, False]),
        (
            {"concurrency_mode": "tokens", "max_token_concurrency": 50},
            [Row(tokens=49, requests=999), Row(tokens=50)],
            [True, False],
        ),
        (
            {"concurrency_mode": "hybrid", "max_concurrency": 2, "max_token_concurrency": 50},
            [Row(tokens=49, requests=1), Row(tokens=49, requests=2), Row(tokens=50, requests=1)],
            [True, False, False],
        ),
    ],
)
def test_concurrency_filters(params: dict[str, Any], rows: list[Any], expected: list[bool]) -> None:
    assert kept(concurrency(**params), rows) == expected
