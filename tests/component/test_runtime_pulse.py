"""An event loop that stands still is told to those who ask for the picker's health; so is its going on."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import Event, Thread

import pytest

from epp.runtime import pulse
from epp.runtime.health import Health
from epp.runtime.pulse import STALLED_BEATS, STUCK_BEATS, Pulse
from epp.wire.health_pb2 import HealthCheckResponse

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
BEAT_S = 0.01
DEADLINE_S = 40

pytestmark = pytest.mark.timeout(400)


class Told:
    """What watchers of both names heard, on whatever thread.

    Attributes:
        beside: liveness when readiness was told.
        last: is called when liveness has come back, on the thread that tells so.
    """

    def __init__(self, health: Health) -> None:
        self.readiness: list[object] = []
        self.liveness: list[object] = []
        self.beside: list[object] = []
        self.health = health
        self.last: Callable[[], None] = lambda: None
        health.watch("readiness", self._ready)
        health.watch("liveness", self._lives)

    def _ready(self, status: object) -> None:
        self.beside.append(self.health.status("liveness"))
        self.readiness.append(status)

    def _lives(self, status: object) -> None:
        self.liveness.append(status)
        if len(self.liveness) == 3:
            self.last()

    def stand_still_until(
        self, reached: Callable[[], bool], begin: Callable[[], object] = lambda: None
    ) -> None:
        """Nothing else runs on the loop meanwhile. `begin` is called when it stands still."""
        begin()
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < deadline, (self.readiness, self.liveness)
            time.sleep(BEAT_S / 4)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not reached():  # noqa: ASYNC110 the change is made on another thread
                await asyncio.sleep(BEAT_S)


def ready() -> tuple[Health, Told]:
    health = Health()
    health.pool_known(True)
    return health, Told(health)


async def test_a_loop_that_stands_still_is_told_and_so_is_its_going_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health, told = ready()
    beating = Pulse(health, BEAT_S)
    # At its next stop it would go on telling.
    told.last = beating._end.set
    with ExitStack() as ending:
        told.stand_still_until(
            lambda: told.liveness[-1] == NOT_SERVING, lambda: ending.enter_context(beating)
        )
        await told.until(lambda: len(told.liveness) == 3)
    assert told.readiness == told.liveness == [SERVING, NOT_SERVING, SERVING]
    assert told.beside == [SERVING] * 3, "a restart at once helps nobody"
    still = [record for record in caplog.records if record.message == "the event loop stands still"]
    assert [vars(record)["seconds"] for record in still] == [
        pytest.approx(beats * BEAT_S) for beats in (STALLED_BEATS, STUCK_BEATS)
    ]
    assert all("stand_still_until" in vars(record)["stack"] for record in still)
    assert [record.levelno for record in caplog.records if "turns again" in record.message] == [
        logging.WARNING
    ]


class Beats:
    """In place of the thread's pauses: what happens between its beats; the thread ends after the last."""

    def __init__(self, pulse: Pulse, between: list[Callable[[], None]]) -> None:
        self.pulse = pulse
        self.left = iter(between)
        self.waits: list[float] = []

    def wait(self, beat_s: float) -> bool:
        self.waits.append(beat_s)
        happens = next(self.left, None)
        if happens is None:
            return True
        happens()
        return False


async def test_how_many_beats_it_takes() -> None:
    """As the documentation has it: about 5 s, then about 30 s."""
    health, told = ready()
    heard: list[tuple[int, int]] = []
    beating = Pulse(health)

    def beat() -> None:
        heard.append((len(told.readiness), len(told.liveness)))

    def answered() -> None:
        beating._answer()
        beat()

    between = [beat, *[answered] * 3, *[beat] * 40, answered, *[beat] * 4, *[answered] * 2]
    beats = Beats(beating, between)
    beating._end = beats  # type: ignore[assignment]
    beating._run()
    assert set(beats.waits) == {1.0}
    # The question is asked in the first beat, and again in each that finds an answer.
    quiet, still = 4, 40
    assert heard == [
        *[(1, 1)] * (quiet + 5),
        *[(2, 1)] * 25,
        *[(2, 2)] * (still - 30 + 1),
        *[(3, 3)] * 6,
    ]
    assert (told.readiness, told.liveness) == ([SERVING, NOT_SERVING, SERVING],) * 2


class Unread(logging.Handler):
    """A log that blocks who writes to it, until it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Event()

    def emit(self, record: logging.LogRecord) -> None:
        assert self.read.wait(DEADLINE_S)


async def test_a_loop_that_waits_for_the_log_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    health, told = ready()
    unread, log = Unread(), logging.getLogger("epp")

    def read_when_told() -> None:
        with suppress(AssertionError):
            told.stand_still_until(lambda: told.liveness[-1] == NOT_SERVING)
        unread.read.set()

    reader = Thread(target=read_when_told)
    log.addHandler(unread)
    try:
        with Pulse(health, BEAT_S) as beating:
            told.last = beating._end.set
            reader.start()
            log.error("nobody reads this")
            await told.until(lambda: len(told.liveness) == 3)
    finally:
        log.removeHandler(unread)
        reader.join()
    assert told.readiness == told.liveness == [SERVING, NOT_SERVING, SERVING]
    assert [record.message for record in caplog.records if record.name == "epp.runtime.pulse"] == [
        "the event loop stands still",
        "the event loop stands still",
        "the event loop turns again",
    ]


async def test_stops_shorter_than_that_are_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "STALLED_BEATS", 10_000)
    monkeypatch.setattr(pulse, "STUCK_BEATS", 20_000)
    health, told = ready()
    with Pulse(health, BEAT_S):
        for _ in range(5):
            time.sleep(3 * BEAT_S)  # noqa: ASYNC251 the loop is to stand still
            await asyncio.sleep(2 * BEAT_S)
    assert (told.readiness, told.liveness) == ([SERVING], [SERVING])


async def test_it_ends_with_its_owner_also_while_the_loop_stands_still() -> None:
    health, told = ready()
    with Pulse(health, BEAT_S) as beating:
        told.stand_still_until(lambda: told.readiness[-1] == NOT_SERVING)
    assert not beating._thread.is_alive()
    assert not beating._writer.is_alive()


async def test_draining_and_an_unknown_pool_are_not_forgotten_when_it_goes_on() -> None:
    health, told = ready()
    with Pulse(health, BEAT_S):
        told.stand_still_until(lambda: told.readiness[-1] == NOT_SERVING)
        health.draining()
        await told.until(lambda: not health._stalled)
    assert told.readiness == [SERVING, NOT_SERVING]
