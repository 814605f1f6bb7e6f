"""Admission and objectives: who is turned away, and with which answer."""

from random import Random
from typing import Any

import pytest

from epp import names
from epp.errors import Saturated
from epp.flow.admission import LegacyAdmission, ProbabilisticAdmitter, ProbabilisticAdmitterParams
from epp.flow.objectives import Objectives
from epp.flow.saturation import UtilizationDetector, UtilizationDetectorParams
from epp.pool.records import Load, Mask, PoolView
from tests.data.flow import crowd

Row = crowd.Row


class Told:
    """A detector that says what it is told to, and how often it was asked."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.asked = 0

    def saturation(self, view: PoolView, load: Load, alive: Mask, now: float) -> float:
        assert now == crowd.NOW
        self.asked += 1
        return self.value


class Drawn(Random):
    """Draws one number for ever."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


def admitted(admission: Any, rows: list[Any], **options: Any) -> bool:
    ctx = crowd.context(rows, **options)
    try:
        admission.admit(ctx, ctx.view.candidates)
    except Saturated:
        return False
    return True


# -- the legacy admission ---------------------------------------------------------------------------

POOL = [Row(), Row()]


@pytest.mark.parametrize(
    ("priority", "saturation", "rows", "expected"),
    [
        (-1, 0.0, POOL, True),
        (-1, 0.999, POOL, True),
        (-1, 1.0, POOL, False),
        (-1, 1.7, POOL, False),
        (-100, 1.0, POOL, False),
        (0, 0.0, POOL, True),
        (0, 1.0, POOL, True),
        (0, 1.7, POOL, True),
        (3, 1.0, POOL, True),
        # An empty pool is not full: who comes here gets 503 later.
        (-1, 0.0, [], True),
        (-1, 1.0, [], True),
        (0, 1.0, [], True),
        (-1, 1.0, [Row(candidate=False)], True),
    ],
)
def test_only_what_may_be_shed_is_turned_away_and_only_from_a_full_pool(
    priority: int, saturation: float, rows: list[Any], expected: bool
) -> None:
    assert admitted(LegacyAdmission(Told(saturation)), rows, priority=priority) is expected


def test_a_request_that_passes_anyway_costs_no_look_at_the_pool() -> None:
    detector = Told(1.0)
    admission = LegacyAdmission(detector)
    assert admitted(admission, POOL, priority=0)
    assert admitted(admission, [], priority=-1)
    assert detector.asked == 0


def test_the_answer_to_a_shed_request() -> None:
    ctx = crowd.context(POOL, priority=-1)
    with pytest.raises(Saturated, match="^system saturated, sheddable request dropped$") as caught:
        LegacyAdmission(Told(1.0)).admit(ctx, ctx.view.candidates)
    assert (caught.value.status, caught.value.reason) == (429, names.REJECTED_SATURATED)
    assert names.REJECTED_SATURATED == "rejected-saturated"
    assert caught.value.retry_after_s == 1


def test_the_default_detector_over_the_candidates_alone() -> None:
    admission = LegacyAdmission(UtilizationDetector(UtilizationDetectorParams()))
    full, idle = Row(waiting=5), Row()
    assert not admitted(admission, [full, full], priority=-1)
    assert admitted(admission, [full, idle], priority=-1)
    assert not admitted(admission, [full, Row(candidate=False)], priority=-1)


# -- the probabilistic admitter ---------------------------------------------------------------------


def probabilistic(**params: Any) -> ProbabilisticAdmitter:
    return ProbabilisticAdmitter(ProbabilisticAdmitterParams(**params))


@pytest.mark.parametrize(
    ("params", "rows", "probability"),
    [
        ({}, [Row()], 0.0),
        # s = 1/5 = 0.2: 0.2^5 x 300 = 0.096
        ({}, [Row(waiting=1)], 0.096),
        # s = 0.16 / 0.8 = 0.2
        ({}, [Row(kv=0.16)], 0.096),
        # The mean of 0.2 and 0.
        ({}, [Row(waiting=1), Row()], 0.003),
        ({}, [Row(waiting=1), Row(), Row(waiting=99, candidate=False)], 0.003),
        ({}, [Row(waiting=2)], 1.0),
        ({}, [Row(present=False)], 1.0),
        ({}, [Row(present=False), Row(), Row(), Row(), Row()], 0.096),
        # Without a limit of age.
        ({}, [Row(waiting=1, age_s=99.0, stale=True)], 0.096),
        ({"power": 1, "k": 0.5}, [Row(waiting=4)], 0.4),
        ({"queue_depth_threshold": 10, "power": 2, "k": 10}, [Row(waiting=2)], 0.4),
        ({"kv_cache_util_threshold": 2.0, "power": 1, "k": 1}, [Row(kv=0.6)], 0.3),
        # More than a float holds is 1 at most all the same.
        ({"power": 400.0}, [Row(waiting=1e6)], 1.0),
    ],
)
def test_probability(params: dict[str, Any], rows: list[Any], probability: float) -> None:
    admitter = probabilistic(**params)
    just_below, just_above = probability - 1e-9, probability + 1e-9
    if probability > 0.0:
        assert not admitted(admitter, rows, priority=-1, draw=Drawn(just_below))
    if probability < 1.0:
        assert admitted(admitter, rows, priority=-1, draw=Drawn(just_above))
    assert admitted(admitter, rows, priority=0, draw=Drawn(0.0))


def test_an_empty_pool_is_not_the_admitters_business() -> None:
    assert admitted(probabilistic(), [], priority=-1, draw=Drawn(0.0))


def test_the_answer_of_the_probabilistic_admitter() -> None:
    ctx = crowd.context([Row(waiting=1)], priority=-1, draw=Drawn(0.0))
    with pytest.raises(Saturated) as caught:
        probabilistic().admit(ctx, ctx.view.candidates)
    assert caught.value.message == (
        "request cannot be admitted: probabilistic-admitter: rejected, saturation=0.200 prob=0.10"
    )
    assert (caught.value.status, caught.value.reason) == (429, "rejected-saturated")


# -- objectives -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "priority"),
    [("sql-lora", 2), ("sheddable", -5), ("plain", 0), ("unknown", 0), ("", 0), (None, 0), ("SQL-LORA", 0)],
)
def test_priority(name: str | None, priority: int) -> None:
    objectives = Objectives({"sql-lora": 2, "sheddable": -5, "plain": 0})
    assert objectives.priority(name) == priority
