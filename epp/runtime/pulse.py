"""Whether the event loop still turns, as a thread beside it sees it."""

import asyncio
import logging
import sys
import traceback
from contextlib import suppress
from threading import Event, Thread, main_thread
from typing import Final, Self

from epp.runtime.health import Health

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
STALLED_BEATS: Final = 5
STUCK_BEATS: Final = 30


class Pulse:
    """Asks the running loop for a sign of life every `BEAT_S`, and tells `health` what came.

    Without one for `STALLED_BEATS` no new requests are wanted, for `STUCK_BEATS` the process is worth a
    restart. Beats of this thread are counted, not seconds: a process that is stopped or starved of processor
    time is late as a whole.
    """

    def __init__(self, health: Health, beat_s: float = BEAT_S) -> None:
        self._health = health
        self._beat_s = beat_s
        self._loop = asyncio.get_running_loop()
        self._answered = True
        self._end = Event()
        self._thread = Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when nothing runs any more."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        missed = 0
        while not self._end.wait(self._beat_s):
            if self._answered:
                if missed >= STALLED_BEATS:
                    self._health.loop_turns(stalled=False, stuck=False)
                    log.warning("the event loop turns again", extra={"stood_still_s": missed * self._beat_s})
                missed = 0
                self._answered = False
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._answer)
                continue
            missed += 1
            if missed in (STALLED_BEATS, STUCK_BEATS):
                self._health.loop_turns(stalled=True, stuck=missed == STUCK_BEATS)
                seconds = missed * self._beat_s
                log.critical("the event loop stands still", extra={"seconds": seconds, "stack": _where()})

    def _answer(self) -> None:
        self._answered = True


def _where() -> str:
    """What the main thread is at, innermost call last."""
    frame = sys._current_frames().get(main_thread().ident or 0)
    calls = traceback.extract_stack(frame) if frame is not None else []
    return " > ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls[-12:])
