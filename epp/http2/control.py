"""Frames about the connection as a whole, and its end (RFC 9113, 6.3, 6.5, 6.7, 6.8)."""

from collections.abc import Mapping
from typing import Final

from epp.http2.codes import ACK, DEFAULT_WINDOW_BYTES, LAST_STREAM_ID, ErrorCode, FrameType, Setting
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.floods import Flood, Floods
from epp.http2.frames import SETTINGS_ACK, frame, goaway, number, read_settings, settings, window_update
from epp.http2.limits import Http2Limits
from epp.http2.outgoing import Outgoing
from epp.http2.patience import Patience
from epp.http2.streams import Stream

DRAIN_PING: Final = b"draining"
DRAIN_PING_S: Final = 2.0


def greeting(limits: Http2Limits) -> tuple[bytes, bytes]:
    """What a server says first (RFC 9113, 3.4)."""
    values = {
        Setting.MAX_CONCURRENT_STREAMS: limits.streams,
        Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        Setting.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
    }
    more = limits.connection_window_bytes - DEFAULT_WINDOW_BYTES
    return settings(values), window_update(0, more) if more else b""


class Control:
    """SETTINGS, PING, PRIORITY, PUSH_PROMISE and GOAWAY. All raise ConnectionFault.

    Attributes:
        now: when the frames that are handed in came.
        last_id: the highest stream that the peer has opened.
        refuse_above: streams above it are refused: the peer knows that we are draining.
    """

    __slots__ = (
        "_draining_since",
        "_floods",
        "_out",
        "_patience",
        "_streams",
        "last_id",
        "now",
        "refuse_above",
    )

    def __init__(
        self, out: Outgoing, floods: Floods, patience: Patience, streams: Mapping[int, Stream]
    ) -> None:
        self._out = out
        self._floods = floods
        self._patience = patience
        self._streams = streams
        self._draining_since: float | None = None
        self.now = 0.0
        self.last_id = 0
        self.refuse_above = LAST_STREAM_ID

    def drain(self, now: float) -> None:
        """Tell the peer to open no more streams. What it opens before it has read that is still served."""
        if self._draining_since is not None:
            return
        self._draining_since = now
        self._out.parts.append(goaway(LAST_STREAM_ID, ErrorCode.NO_ERROR, "draining"))
        self._out.parts.append(frame(FrameType.PING, 0, 0, DRAIN_PING))

    def tick(self, now: float) -> None:
        """A peer that does not answer the PING has had the time to read GOAWAY, too."""
        if self._draining_since is not None and now - self._draining_since > DRAIN_PING_S:
            self._close_door()

    def settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledged with a payload")
            self._floods.count(Flood.EMPTY_FRAMES, self.now)
            self._patience.settings_acked = True
            return
        self._patience.settings_came = True
        self._floods.count(Flood.SETTINGS, self.now)
        # The last of each counts: a frame can hold thousands, and each window concerns every stream.
        for key, value in dict(read_settings(payload)).items():
            if key is Setting.MAX_FRAME_SIZE:
                self._out.max_frame_bytes = value
            elif key is Setting.INITIAL_WINDOW_SIZE:
                self._resize_windows(value)
        self._out.parts.append(SETTINGS_ACK)

    def _resize_windows(self, window_bytes: int) -> None:
        change = window_bytes - self._out.window_bytes
        self._out.window_bytes = window_bytes
        for stream in self._streams.values():
            if not stream.grant(change):
                raise ConnectionFault(
                    ErrorCode.FLOW_CONTROL_ERROR,
                    "SETTINGS_INITIAL_WINDOW_SIZE makes a window larger than 2^31-1",
                )

    def ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING is not of eight bytes")
        if not flags & ACK:
            if self._out.data_written:  # gRPC's clients measure the way by a PING whenever they get DATA
                self._out.data_written = False
            else:
                self._floods.count(Flood.PINGS, self.now)
            self._out.parts.append(frame(FrameType.PING, ACK, 0, payload))
            return
        self._floods.count(Flood.EMPTY_FRAMES, self.now)
        if payload == DRAIN_PING and self._draining_since is not None:
            self._close_door()

    def _close_door(self) -> None:
        """The peer has read that we are draining, or had the time to."""
        if self.refuse_above == LAST_STREAM_ID:
            self.refuse_above = self.last_id
            self._out.parts.append(goaway(self.last_id, ErrorCode.NO_ERROR, "draining"))

    def priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Read, and not followed: streams take turns."""
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        self._floods.count(Flood.PRIORITIES, self.now)
        if len(payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not of five bytes")
        if number(payload) == stream_id:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "clients do not push")

    def goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """It opens no more streams; those that are open go on."""
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is shorter than eight bytes")
        self._floods.count(Flood.EMPTY_FRAMES, self.now)
