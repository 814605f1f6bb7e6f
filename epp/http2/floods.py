"""Frames that cost a peer next to nothing, counted: a proxy may, a flood ends the connection."""

from enum import Enum

from epp.http2.codes import ErrorCode
from epp.http2.errors import ConnectionFault
from epp.http2.limits import Http2Limits
from epp.http2.rates import Bucket


class Flood(Enum):
    """What is counted, as the peer is told of it."""

    EARLY_RESETS = "streams reset before they got a reply, or opened beyond the limit"
    FAULTS = "faults"
    PINGS = "PING frames"
    SETTINGS = "SETTINGS frames"
    PRIORITIES = "PRIORITY frames"
    WINDOW_UPDATES = "WINDOW_UPDATE frames"
    EMPTY_FRAMES = "frames that say nothing"


class Floods:
    """The counts of one connection."""

    __slots__ = ("_buckets",)

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._buckets = {
            Flood.EARLY_RESETS: Bucket(limits.early_resets, now),
            Flood.FAULTS: Bucket(limits.faults, now),
            Flood.PINGS: Bucket(limits.pings, now),
            Flood.SETTINGS: Bucket(limits.settings, now),
            Flood.PRIORITIES: Bucket(limits.priorities, now),
            Flood.WINDOW_UPDATES: Bucket(limits.window_updates, now),
            Flood.EMPTY_FRAMES: Bucket(limits.empty_frames, now),
        }

    def count(self, what: Flood, now: float, last: str = "") -> None:
        """One more. Raises ConnectionFault (ENHANCE_YOUR_CALM) where they are too many."""
        if not self._buckets[what].spend(now):
            text = f"too many {what.value}" + (f"; the last: {last}" if last else "")
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, text)
