"""What is written: frames in order, and messages that wait for the peer's window or for the socket."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from epp.http2.codes import (
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    GREATEST_WINDOW_BYTES,
    LEAST_MAX_FRAME_BYTES,
    FrameType,
)
from epp.http2.frames import FRAME_HEAD
from epp.http2.ports import Account

if TYPE_CHECKING:
    from epp.http2.streams import Stream

HEADERS: Final = int(FrameType.HEADERS)

NO_TABLE: Final = b"\x20"
"""Dynamic table size update to 0 (RFC 7541, 6.3)."""


class Outgoing:
    """One per connection.

    Attributes:
        parts: what `take` will return, in pieces.
        credit: DATA bytes that the peer still takes on this connection.
        room: DATA bytes that may still be written before the next `take`.
        max_frame_bytes: longest DATA frame that the peer takes.
        window_bytes: what the peer grants a new stream.
        data_written: DATA went to the transport since this was last made False.
        paused_at: since when the socket takes nothing, and messages wait; None while it does.
        waiting: streams with something to send and window of their own, in the order of their turns.
        account: where the bytes of waiting messages are charged.
        flush: has the transport take and write.
    """

    __slots__ = (
        "_output_bytes",
        "_table_given_up",
        "account",
        "credit",
        "data_written",
        "flush",
        "max_frame_bytes",
        "parts",
        "paused_at",
        "room",
        "waiting",
        "window_bytes",
    )

    def __init__(self, account: Account, output_bytes: int, flush: Callable[[], None]) -> None:
        self.parts: list[bytes | memoryview] = []
        self.credit = DEFAULT_WINDOW_BYTES
        self.room = output_bytes
        self.max_frame_bytes = LEAST_MAX_FRAME_BYTES
        self.window_bytes = DEFAULT_WINDOW_BYTES
        self.data_written = False
        self.paused_at: float | None = None
        self.account = account
        self.flush = flush
        self._output_bytes = output_bytes
        self.waiting: dict[Stream, None] = {}
        self._table_given_up = False

    def headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        """One HEADERS frame. Our blocks are shorter than the least frame size a peer can ask for."""
        flags = END_HEADERS | END_STREAM if end else END_HEADERS
        if not self._table_given_up:
            # Our blocks use no table. Said once, it holds for every table size that the peer may come to set,
            # of which a smaller one would have to be acknowledged in the block after it (RFC 9113, 4.3.1).
            self._table_given_up = True
            block = NO_TABLE + block
        self.parts.append(FRAME_HEAD.pack(len(block) << 8 | HEADERS, flags, stream_id))
        self.parts.append(block)

    def ready(self, stream: "Stream") -> None:
        """It has something to send and window of its own."""
        self.waiting[stream] = None

    def drop(self, stream: "Stream") -> None:
        """It is over."""
        self.waiting.pop(stream, None)

    def grant(self, increment: int) -> bool:
        """The connection's window grew. False where it is now larger than a window may be."""
        self.credit += increment
        return self.credit <= GREATEST_WINDOW_BYTES

    def take(self) -> bytes:
        """All there is to write now. When it is empty, nothing can be written until something happens."""
        if self.waiting and self.paused_at is None:
            self._take_turns()
        if not self.parts:
            return b""
        data = b"".join(self.parts)
        self.parts.clear()
        if self.room < self._output_bytes:
            self.data_written = True
        self.room = 0 if self.paused_at is not None else self._output_bytes
        return data

    def pause(self, now: float) -> None:
        """The socket takes nothing more."""
        self.paused_at = now
        self.room = 0

    def resume(self) -> None:
        """The socket takes more again."""
        self.paused_at = None
        self.room = self._output_bytes

    def _take_turns(self) -> None:
        """One frame of each stream that waits, round after round."""
        waiting = self.waiting
        while waiting and self.credit > 0 and self.room > 0:
            stream = next(iter(waiting))
            del waiting[stream]
            if stream.send_waiting(min(self.credit, self.room, self.max_frame_bytes)):
                waiting[stream] = None
