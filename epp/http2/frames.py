"""Frames as bytes: their heads, those that we write, and how a payload is taken apart (RFC 9113, 4 and 6)."""

import struct
from collections.abc import Iterator
from typing import Final

from epp.http2.codes import (
    ACK,
    GREATEST_MAX_FRAME_BYTES,
    GREATEST_WINDOW_BYTES,
    LEAST_MAX_FRAME_BYTES,
    PADDED,
    PRIORITY_GIVEN,
    ErrorCode,
    FrameType,
    Setting,
)
from epp.http2.errors import ConnectionFault

FRAME_HEAD_BYTES: Final = 9

# Length and type share the first four bytes: `length << 8 | type`.
FRAME_HEAD: Final = struct.Struct(">IBI")
# Before each gRPC message: 1 where it is compressed, else 0; and its length in bytes as it is sent.
MESSAGE_HEAD: Final = struct.Struct(">BI")
MESSAGE_HEAD_BYTES: Final = MESSAGE_HEAD.size
DATA_WITH_MESSAGE_HEAD: Final = struct.Struct(">IBIBI")
NUMBER: Final = struct.Struct(">I")
SETTING: Final = struct.Struct(">HI")

SETTINGS_ACK: Final = FRAME_HEAD.pack(FrameType.SETTINGS, ACK, 0)
_KNOWN_SETTINGS: Final = frozenset(map(int, Setting))
_PRIORITY_BYTES: Final = 5
_DEBUG_BYTES: Final = 256


def frame(kind: FrameType, flags: int, stream_id: int, payload: bytes | memoryview = b"") -> bytes:
    return FRAME_HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    return frame(
        FrameType.SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items())
    )


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, NUMBER.pack(increment))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream_id, NUMBER.pack(code))


def goaway(last_id: int, code: ErrorCode, text: str = "") -> bytes:
    debug = text.encode("ascii", "replace")[:_DEBUG_BYTES]
    return frame(FrameType.GOAWAY, 0, 0, NUMBER.pack(last_id) + NUMBER.pack(code) + debug)


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload of a DATA or HEADERS frame less its padding. Raises ConnectionFault."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding is longer than the frame")
    return payload[1 : len(payload) - payload[0]]


def without_priority(flags: int, payload: bytes) -> tuple[bytes, int | None]:
    """Header block fragment of a HEADERS frame, and the stream it depends on. Raises ConnectionFault."""
    if not flags & PRIORITY_GIVEN:
        return payload, None
    if len(payload) < _PRIORITY_BYTES:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its priority")
    return payload[_PRIORITY_BYTES:], number(payload)


def number(payload: bytes) -> int:
    """The first four bytes without the reserved bit."""
    value: int = NUMBER.unpack_from(payload)[0]
    return value & 0x7FFFFFFF


def read_settings(payload: bytes) -> Iterator[tuple[Setting, int]]:
    """The known ones, in order. Raises ConnectionFault for a value that is not allowed."""
    if len(payload) % SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is not a list of six-byte entries")
    for key, value in SETTING.iter_unpack(payload):
        if key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}, not 0 or 1")
        if key == Setting.INITIAL_WINDOW_SIZE and value > GREATEST_WINDOW_BYTES:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}, above 2^31-1"
            )
        if key == Setting.MAX_FRAME_SIZE and not LEAST_MAX_FRAME_BYTES <= value <= GREATEST_MAX_FRAME_BYTES:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}, not from 2^14 to 2^24-1"
            )
        if key in _KNOWN_SETTINGS:
            yield Setting(key), value
