"""A stream whose answer's messages are timed: one in `TIMED_EVERY`, so that the others pay nothing."""

from collections.abc import Callable
from typing import Final

from epp.extproc.exchange import Exchange
from epp.runtime.stream import Routes, Stream
from epp.runtime.tallies import Tally

# First byte of a message about the answer: the tag of its headers, body or trailers. Proxies write the fields
# of a message in the order of their numbers, and these have the lowest.
_OF_AN_ANSWER: Final = (b"\x1a", b"\x2a", b"\x3a")


class TimedStream(Stream):
    """Observes the time spent on an answer's messages, when the stream is over; nothing where none came."""

    __slots__ = ("_spent_s", "_tally", "_timer")

    def __init__(
        self,
        exchange: Exchange,
        routes: Routes,
        clock: Callable[[], float],
        wake: Callable[[], None],
        durations: Tally,
        tally: Tally,
        timer: Callable[[], float],
    ) -> None:
        """`timer`: a clock for short times."""
        super().__init__(exchange, routes, clock, wake, durations)
        self._tally = tally
        self._timer = timer
        self._spent_s = 0.0

    def received(self, message: bytes) -> None:
        if not message.startswith(_OF_AN_ANSWER):
            super().received(message)
            return
        began = self._timer()
        try:
            super().received(message)
        finally:
            self._spent_s += self._timer() - began

    def closed(self, *, error: bool = False) -> None:
        super().closed(error=error)
        if self._spent_s:
            self._tally.observe(self._spent_s)
