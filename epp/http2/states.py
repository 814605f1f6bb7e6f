"""Where a stream can be, and what its peer may send there (RFC 9113, 5.1)."""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from epp.http2.codes import ErrorCode, FrameType
from epp.http2.errors import ConnectionFault, StreamFault


class State(Enum):
    """A stream as this side sees it. Streams that live are OPEN or HALF_CLOSED, all others only remembered.

    We never end a stream and let the peer go on: what it still has to say is cut off with RST_STREAM
    (NO_ERROR). So there is no half-closed (local).

    IDLE: never used. OPEN: both may send. HALF_CLOSED: the peer has ended its side. ENDED: both have.
    RESET: the peer reset it. CUT: we reset it, and what the peer sent before it knew may still arrive.
    FORGOTTEN: over for so long that nobody remembers how, or skipped by the peer.
    """

    IDLE = "idle"
    OPEN = "open"
    HALF_CLOSED = "half-closed"
    ENDED = "ended"
    RESET = "reset"
    CUT = "cut"
    FORGOTTEN = "forgotten"


class Verdict(Enum):
    """What becomes of a frame.

    TAKE: it is handled. IGNORE: nothing. RESET: a stream error STREAM_CLOSED. CLOSE: a connection error
    STREAM_CLOSED. ILLEGAL: a connection error PROTOCOL_ERROR.
    """

    TAKE = "take"
    IGNORE = "ignore"
    RESET = "reset"
    CLOSE = "close"
    ILLEGAL = "illegal"


_TAKE, _IGNORE, _RESET = Verdict.TAKE, Verdict.IGNORE, Verdict.RESET
_CLOSE, _ILLEGAL = Verdict.CLOSE, Verdict.ILLEGAL

_KINDS: Final = (FrameType.DATA, FrameType.HEADERS, FrameType.RST_STREAM, FrameType.WINDOW_UPDATE)
_ROWS: Final = {
    #                  DATA      HEADERS   RST_STREAM WINDOW_UPDATE
    State.IDLE:        (_ILLEGAL, _TAKE,    _ILLEGAL,  _ILLEGAL),
    State.OPEN:        (_TAKE,    _TAKE,    _TAKE,     _TAKE),
    State.HALF_CLOSED: (_RESET,   _RESET,   _TAKE,     _TAKE),
    State.ENDED:       (_CLOSE,   _CLOSE,   _IGNORE,   _IGNORE),
    State.RESET:       (_RESET,   _RESET,   _IGNORE,   _IGNORE),
    State.CUT:         (_IGNORE,  _IGNORE,  _IGNORE,   _IGNORE),
    State.FORGOTTEN:   (_RESET,   _ILLEGAL, _IGNORE,   _IGNORE),
}  # fmt: skip

LEGAL: Final[Mapping[State, Mapping[FrameType, Verdict]]] = {
    state: dict(zip(_KINDS, row, strict=True)) for state, row in _ROWS.items()
}
"""PRIORITY is legal everywhere; CONTINUATION only right after HEADERS, which the connection sees to."""


def judge(state: State, kind: FrameType, stream_id: int) -> None:
    """Raises StreamFault or ConnectionFault for a frame that has no place here. What is ignored passes."""
    where = f"{kind.name} on stream {stream_id}, which is {state.value}"
    match LEGAL[state][kind]:
        case Verdict.RESET:
            raise StreamFault(ErrorCode.STREAM_CLOSED, where)
        case Verdict.CLOSE:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, where)
        case Verdict.ILLEGAL:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, where)
