"""What one connection may ask of us. Defaults fit a proxy with thousands of requests in flight."""

from dataclasses import dataclass, field
from typing import Final

from epp.http2.codes import DEFAULT_WINDOW_BYTES, GREATEST_WINDOW_BYTES, LEAST_MAX_FRAME_BYTES

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Rate:
    """A bucket of `burst` tokens that fills up with `per_s` tokens a second."""

    burst: int
    per_s: float


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Bounds of one connection.

    A peer may send before it has read them, so windows must not be below the 65,535 bytes that every
    connection starts with. `message_bytes` must be 16 KiB or more: a message in one frame is not measured.
    Raises ValueError for others.

    Attributes:
        streams: streams open at one time (SETTINGS_MAX_CONCURRENT_STREAMS); one more is refused.
        header_list_bytes: a request's headers, counted as RFC 9113 6.5.2 does; more is answered 431.
        header_block_bytes: the same, compressed, over all CONTINUATION frames; more ends the connection.
        header_frames: frames that one header block may be cut into; more ends the connection.
        message_bytes: one gRPC message, after inflating; the call hears of a larger one.
        stream_window_bytes: how much of one stream may be on its way to us.
        connection_window_bytes: the same of all streams together.
        output_bytes: how much is handed to the socket at a time; what is more waits in its streams.
        handshake_s: from the connection's start to the peer's first SETTINGS.
        header_block_s: from a HEADERS frame to the last of its CONTINUATION frames.
        stall_s: how long a stream may leave a message half sent, or its replies unread.
        keepalive_s: silence after which the peer is asked whether it still lives; 0 never asks.
        keepalive_timeout_s: how long its answer may take.
        early_resets: streams that the peer resets before it got any reply ("rapid reset").
        faults: streams that we have to reset because of what the peer sent.
        pings, settings, priorities, window_updates, empty_frames: frames of which each alone costs the
            peer little; beyond the rate the connection ends with ENHANCE_YOUR_CALM.
    """

    streams: int = 10_000
    header_list_bytes: int = 32 * KIB
    header_block_bytes: int = 32 * KIB
    header_frames: int = 16
    message_bytes: int = 33 * MIB
    stream_window_bytes: int = 1 * MIB
    connection_window_bytes: int = 16 * MIB
    output_bytes: int = 1 * MIB
    handshake_s: float = 10.0
    header_block_s: float = 10.0
    stall_s: float = 120.0
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    early_resets: Rate = field(default=Rate(burst=10_000, per_s=200))
    faults: Rate = field(default=Rate(burst=1_000, per_s=20))
    pings: Rate = field(default=Rate(burst=1_000, per_s=100))
    settings: Rate = field(default=Rate(burst=100, per_s=10))
    priorities: Rate = field(default=Rate(burst=10_000, per_s=1_000))
    window_updates: Rate = field(default=Rate(burst=100_000, per_s=50_000))
    empty_frames: Rate = field(default=Rate(burst=1_000, per_s=100))

    def __post_init__(self) -> None:
        least, most = DEFAULT_WINDOW_BYTES, GREATEST_WINDOW_BYTES
        for name in ("stream_window_bytes", "connection_window_bytes"):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}: {getattr(self, name)} is no window; right are {least} to {most}")
        size, frame_bytes = self.message_bytes, LEAST_MAX_FRAME_BYTES
        if size < frame_bytes:
            raise ValueError(f"message_bytes: {size} is less than one frame; the least is {frame_bytes}")
