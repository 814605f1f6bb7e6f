"""Whether the event loop still turns, as a thread beside it sees it."""

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from typing import Final, Self

from epp.runtime.health import Health

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
STALLED_BEATS: Final = 5
STUCK_BEATS: Final = 30

_SHOWN_CALLS: Final = 12


class Pulse:
    """Asks the running loop for a sign of life every `BEAT_S`, and tells `health` what came.

    Without one for `STALLED_BEATS` no new requests are wanted, for `STUCK_BEATS` the process is worth a
    restart. Beats of a thread are counted, not seconds: a process that is stopped or starved of processor
    time is late as a whole. The thread waits for nothing but its beat: not for the log, because it may be for
    the log, which nobody reads, that the loop stands still.
    """

    def __init__(self, health: Health, beat_s: float = BEAT_S) -> None:
        self._health = health
        self._beat_s = beat_s
        self._loop = asyncio.get_running_loop()
        self._answered = True
        self._end = Event()
        self._loop_thread = get_ident()
        self._lines: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="pulse", daemon=True)
        self._writer = Thread(target=self._write, name="pulse-log", daemon=True)

    def __enter__(self) -> Self:
        self._writer.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when nothing runs any more."""
        self._end.set()
        self._thread.join()
        self._lines.put(None)
        self._writer.join()

    def _run(self) -> None:
        missed = 0
        while not self._end.wait(self._beat_s):
            if self._answered:
                if missed >= STALLED_BEATS:
                    self._health.loop_turns(stalled=False, stuck=False)
                    extra: dict[str, object] = {"stood_still_s": missed * self._beat_s}
                    self._lines.put(partial(log.warning, "the event loop turns again", extra=extra))
                missed = 0
                self._answered = False
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._answer)
                continue
            missed += 1
            if missed in (STALLED_BEATS, STUCK_BEATS):
                self._health.loop_turns(stalled=True, stuck=missed == STUCK_BEATS)
                extra = {"seconds": missed * self._beat_s, "stack": _where(self._loop_thread)}
                self._lines.put(partial(log.critical, "the event loop stands still", extra=extra))

    def _answer(self) -> None:
        self._answered = True

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            line()


def _where(thread: int) -> str:
    """What the thread is at, innermost call last. Reads no source: the loop may be waiting for a disk."""
    frame = sys._current_frames().get(thread)
    calls: list[str] = []
    while frame is not None and len(calls) < _SHOWN_CALLS:
        calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(calls))
