"""What those who ask and those who watch hear of the picker's health, in every order of events."""

import threading
from collections.abc import Callable
from itertools import groupby
from typing import Final

import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from epp.runtime.health import Health
from epp.wire.health_pb2 import HealthCheckResponse

SERVING, NOT_SERVING, UNKNOWN = (
    HealthCheckResponse.SERVING,
    HealthCheckResponse.NOT_SERVING,
    HealthCheckResponse.SERVICE_UNKNOWN,
)
READY_NAMES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")
NAMES = (*READY_NAMES, "liveness", "nope", "LIVENESS")

STEPS = st.lists(
    st.one_of(
        st.sampled_from(("draining", "end_watches", "leave")),
        st.tuples(st.just("watch"), st.sampled_from(NAMES)),
        st.tuples(st.sampled_from(("pool_known", "leads")), st.booleans()),
        st.sampled_from((("loop", "turns"), ("loop", "stalled"), ("loop", "stuck"))),
    ),
    max_size=12,
)
Steps = list[str | tuple[str, str | bool]]


def heard(health: Health, steps: Steps) -> list[tuple[list[int | None], int]]:
    """What each watcher was told, and how many were open after each step. `leave` is the oldest's."""
    told: list[list[int | None]] = []
    leaves: list[Callable[[], None]] = []
    left = 0
    counts = []
    for step in steps:
        match step:
            case ("watch", str(service)):
                told.append([])
                leaves.append(health.watch(service, told[-1].append))
            case "leave" if left < len(leaves):
                leaves[left]()
                leaves[left]()
                left += 1
            case "leave":
                pass
            case ("loop", how):
                health.loop_turns(stalled=how != "turns", stuck=how == "stuck")
            case (change, bool(value)):
                getattr(health, change)(value)
            case str(change):
                getattr(health, change)()
        counts.append(health.watches)
    return [(each, count) for each, count in zip([*told, *[[]] * len(counts)], counts, strict=False)]


def expected(steps: Steps, *, leader_only: bool) -> list[tuple[list[int | None], int]]:
    """The same from the rules: a watcher hears the status at each step of its life, without repeats."""
    lives: list[tuple[str, list[int | None]]] = []
    known = draining = ended = False
    loop: str | bool = "turns"
    leads = not leader_only
    open_: list[int] = []
    oldest = 0
    counts = []
    for step in steps:
        match step:
            case ("watch", str(service)):
                open_.append(len(lives))
                lives.append((service, []))
            case ("pool_known", bool(value)):
                known = value
            case ("leads", bool(value)):
                leads = value or not leader_only
            case ("loop", how):
                loop = how
            case "draining":
                draining = True
            case "end_watches":
                draining = ended = True
            case "leave" if oldest < len(lives):
                open_ = [each for each in open_ if each != oldest]
                oldest += 1
        for each in open_:
            service, statuses = lives[each]
            ready = SERVING if known and leads and loop == "turns" and not draining else NOT_SERVING
            live = NOT_SERVING if loop == "stuck" else SERVING
            statuses.append({"liveness": live}.get(service, ready if service in READY_NAMES else UNKNOWN))
            if ended:
                statuses.append(None)
        if ended:
            open_ = []
        counts.append(len(open_))
    told = [[status for status, _ in groupby(statuses)] for _, statuses in lives]
    return [(each, count) for each, count in zip([*told, *[[]] * len(counts)], counts, strict=False)]


READY: Final[Steps] = [("pool_known", True), ("watch", "readiness"), ("watch", "liveness")]


@settings(max_examples=300)
@example([*READY, "draining"], False)
@example([*READY, "end_watches"], False)
@example([*READY, ("pool_known", False)], False)
@example([*READY, ("leads", True)], True)
@example([*READY, ("loop", "stalled")], False)
@example([*READY, ("loop", "stuck"), ("loop", "turns")], False)
@given(STEPS, st.booleans())
def test_every_watcher_hears_each_change_once_and_in_order(steps: Steps, leader_only: bool) -> None:
    assert heard(Health(leader_only=leader_only), steps) == expected(steps, leader_only=leader_only)


class Repeats(Health):
    def _tell(self, watch):  # type: ignore[no-untyped-def]
        watch.told = None
        super()._tell(watch)


class ForgetsToTell(Health):
    def draining(self) -> None:
        self._draining = True


class NeverLosesThePool(Health):
    def pool_known(self, known: bool) -> None:
        super().pool_known(True)


class LeadsForEver(Health):
    def leads(self, leads: bool) -> None:
        super().leads(True)


class KeepsThoseWhoLeft(Health):
    def watch(self, service, tell):  # type: ignore[no-untyped-def]
        super().watch(service, tell)
        return lambda: None


class EndsOnlyOpenWatches(Health):
    def end_watches(self) -> None:
        super().end_watches()
        self._ended = False


class EndsWithoutTheLastStatus(Health):
    def end_watches(self) -> None:
        self._ended = True
        self._tell_all()


class AsksAllToLead(Health):
    def leads(self, leads: bool) -> None:
        self._leader_only = True
        super().leads(leads)


class NeverStuck(Health):
    def loop_turns(self, *, stalled: bool, stuck: bool) -> None:
        super().loop_turns(stalled=stalled, stuck=False)


class StuckAtOnce(Health):
    def loop_turns(self, *, stalled: bool, stuck: bool) -> None:
        super().loop_turns(stalled=stalled, stuck=stalled)


class StallsForEver(Health):
    def loop_turns(self, *, stalled: bool, stuck: bool) -> None:
        super().loop_turns(stalled=stalled or self._stalled, stuck=stuck)


class AlwaysServes(Health):
    def __init__(self, *, leader_only: bool = False) -> None:
        super().__init__()


@pytest.mark.parametrize(
    "fault",
    [
        Repeats,
        ForgetsToTell,
        NeverLosesThePool,
        LeadsForEver,
        AsksAllToLead,
        AlwaysServes,
        NeverStuck,
        StuckAtOnce,
        StallsForEver,
        KeepsThoseWhoLeft,
        EndsOnlyOpenWatches,
        EndsWithoutTheLastStatus,
    ],
)
def test_the_property_sees_a_fault(fault: type[Health]) -> None:
    find(
        st.tuples(STEPS.map(lambda steps: [*READY, *steps]), st.booleans()),
        lambda case: heard(fault(leader_only=case[1]), case[0]) != expected(case[0], leader_only=case[1]),
        settings=settings(max_examples=2000, phases=(Phase.generate,)),
    )


def test_check_and_list_follow_the_same_rules() -> None:
    health = Health()
    assert health.statuses() == {**dict.fromkeys(READY_NAMES, NOT_SERVING), "liveness": SERVING}
    health.pool_known(True)
    assert health.ready
    assert health.statuses() == dict.fromkeys((*READY_NAMES, "liveness"), SERVING)
    health.draining()
    assert not health.ready
    assert health.statuses() == {**dict.fromkeys(READY_NAMES, NOT_SERVING), "liveness": SERVING}
    assert health.status("nope") is None


def test_a_watcher_may_leave_when_it_is_told_and_take_others_with_it() -> None:
    health = Health()
    told: list[tuple[str, int | None]] = []
    leaves: list[Callable[[], None]] = []

    def first(status: int | None) -> None:
        told.append(("first", status))
        for leave in leaves:
            leave()

    leaves.append(health.watch("", first))
    leaves.append(health.watch("", lambda status: told.append(("second", status))))
    told.clear()
    health.pool_known(True)
    assert told == [("first", SERVING)]
    assert health.watches == 0


def test_after_leaving_on_another_thread_nothing_is_told() -> None:
    health = Health()
    telling, left = threading.Event(), threading.Event()
    told: list[int | None] = []

    def slow(status: int | None) -> None:
        if status == SERVING:
            telling.set()
            # Leaving waits for what is being told.
            assert not left.wait(0.2)
        told.append(status)

    leave = health.watch("", slow)

    def leaving() -> None:
        telling.wait(60)
        leave()
        left.set()

    thread = threading.Thread(target=leaving)
    thread.start()
    health.pool_known(True)
    thread.join(60)
    assert left.is_set()
    health.draining()
    assert told == [NOT_SERVING, SERVING]
