"""How long a peer may take: for the handshake, for reading what we write, for a sign of life."""

import heapq
from collections.abc import Mapping
from typing import Final

from epp.http2.codes import ErrorCode, FrameType, Status
from epp.http2.errors import ConnectionFault
from epp.http2.frames import frame
from epp.http2.limits import Http2Limits
from epp.http2.outgoing import Outgoing
from epp.http2.ports import Ending
from epp.http2.streams import Stream

SWEEP_S: Final = 5.0
PRESSED_STALL_S: Final = 10.0
"""How long a stream may stall while unread replies have brought the process beyond what it may hold."""

DEADLINES_KEPT: Final = 1024
ALIVE_PING: Final = b"alive?  "


class Patience:
    """The clock of one connection.

    Attributes:
        settings_came, settings_acked: the peer's own SETTINGS, and its answer to ours.
    """

    __slots__ = (
        "_asked_at",
        "_began_at",
        "_deadlines",
        "_limits",
        "_out",
        "_streams",
        "_swept_at",
        "settings_acked",
        "settings_came",
    )

    def __init__(self, limits: Http2Limits, out: Outgoing, streams: Mapping[int, Stream], now: float) -> None:
        self._limits = limits
        self._streams = streams
        self._deadlines: list[tuple[float, int]] = []
        self._out = out
        self._began_at = self._swept_at = now
        self._asked_at: float | None = None
        self.settings_came = False
        self.settings_acked = False

    def expect(self, stream: Stream, deadline: float) -> None:
        """The peer wants the call to end then (`grpc-timeout`)."""
        if len(self._deadlines) > DEADLINES_KEPT + 2 * len(self._streams):  # most are of streams long gone
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._streams]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, stream.id))

    def check(self, now: float, heard_at: float) -> None:
        """Ends streams that are late or stall; `heard_at`: when the last bytes came.

        Raises ConnectionFault where the connection must end.
        """
        self._check_handshake(now)
        self._expire(now)
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._sweep(now)
        self._keep_alive(now, heard_at)

    def _check_handshake(self, now: float) -> None:
        patience_s = self._limits.handshake_s
        if not self.settings_acked and now - self._began_at > patience_s:
            code = ErrorCode.SETTINGS_TIMEOUT if self.settings_came else ErrorCode.PROTOCOL_ERROR
            raise ConnectionFault(code, f"no HTTP/2 handshake within {patience_s:g} s")

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, stream_id = heapq.heappop(self._deadlines)
            if stream_id in self._streams:
                stream = self._streams[stream_id]
                stream.give_up(Status.DEADLINE_EXCEEDED, "grpc-timeout has passed", Ending.DEADLINE)

    def _sweep(self, now: float) -> None:
        stall_s = self._limits.stall_s
        if not self._out.account.take(0):
            stall_s = min(stall_s, PRESSED_STALL_S)
        if self._out.paused_at is not None and now - self._out.paused_at > stall_s:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"nothing was read for {stall_s:g} s")
        for stream in tuple(self._streams.values()):
            if not (stream.waits or stream.partial):
                stream.stalled_since = None
            elif stream.stalled_since is None:
                stream.stalled_since = now
            elif now - stream.stalled_since > stall_s:
                stream.give_up(Status.DEADLINE_EXCEEDED, f"no progress for {stall_s:g} s", Ending.STALLED)

    def _keep_alive(self, now: float, heard_at: float) -> None:
        """Whoever was silent for long is asked; silence after that ends the connection."""
        limits = self._limits
        silent = limits.keepalive_s > 0 and now - heard_at >= limits.keepalive_s
        if not silent or self._out.paused_at is not None:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = now
            self._out.parts.append(frame(FrameType.PING, 0, 0, ALIVE_PING))
        elif now - self._asked_at > limits.keepalive_timeout_s:
            raise ConnectionFault(ErrorCode.NO_ERROR, "no answer to a PING")
