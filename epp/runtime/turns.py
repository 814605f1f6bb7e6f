"""Lets work on the event loop take turns with everything else on it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

SLICE_S: Final = 0.001


class Turns:
    """Work in place while there is time left in this turn of the loop, then in a queue, in order.

    The queue is worked off in slices, and what has come over sockets is heard before each of them. A slice
    does at least one piece of work, and no further one when `SLICE_S` are used up: nothing else waits for
    longer than this and one piece of work.

    The caller asks `free`; then it either works and tells `spent`, or hands the work to `wait`, as it does
    with work that is long by itself. Outside of a running loop there is nobody to take turns with: it is
    always free, and nothing can wait.
    """

    __slots__ = ("_clock", "_loop", "_scheduled", "_used_s", "_waiting")

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic; read around each piece of work in the queue."""
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._used_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled: asyncio.Handle | None = None

    @property
    def free(self) -> bool:
        """Whether work may be done now."""
        return self._used_s < SLICE_S and not self._waiting

    @property
    def waiting(self) -> int:
        """Pieces of work in the queue."""
        return len(self._waiting)

    def spent(self, seconds: float) -> None:
        """So much time went into work that was done in place."""
        if self._scheduled is None:
            try:
                self._begin(asyncio.get_running_loop())
            except RuntimeError:
                return
        self._used_s += seconds

    def wait(self, work: Callable[[], None]) -> None:
        """Do it in a later turn, be it free now or not. What it raises is logged."""
        if self._scheduled is None:
            self._begin(asyncio.get_running_loop())
        self._waiting.append(work)

    def do(self, work: Callable[[], None]) -> None:
        """Now or in a later turn."""
        if not self.free:
            self.wait(work)
            return
        begun = self._clock()
        work()
        self.spent(self._clock() - begun)

    def close(self) -> None:
        """What waits is given up."""
        self._waiting.clear()
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        self._used_s = 0.0

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._scheduled = loop.call_soon(self._turn)

    def _turn(self) -> None:
        """The turn in which work was done is over.

        uvloop calls this before it looks at its sockets again, so the first slice is one more call away.
        """
        self._used_s = 0.0
        self._go_on()

    def _slice(self) -> None:
        begun = self._clock()
        waiting = self._waiting
        while waiting:
            work = waiting.popleft()
            try:
                work()
            except Exception:
                log.exception("a request that waited for its turn failed")
            if self._clock() - begun >= SLICE_S:
                break
        self._go_on()

    def _go_on(self) -> None:
        """By a timer of no time: asyncio's loop hears its sockets before timers, but after `call_soon`."""
        assert self._loop is not None
        self._scheduled = self._loop.call_later(0, self._slice) if self._waiting else None
