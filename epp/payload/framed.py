"""Messages as gRPC frames them in a body: the one of a request, and those of an answer as it passes."""

from abc import ABC, abstractmethod
from typing import Final

from epp.errors import BadRequest
from epp.payload.kept import Account, Kept
from epp.payload.records import Usage
from epp.payload.shapes import EXACT_BYTES

FRAME_HEADER_BYTES: Final = 5
"""A byte that says whether the message is compressed, and its length in four, big-endian."""


def framed(message: bytes, compressed: int = 0) -> bytes:
    """The message behind its header."""
    return b"%c%b%b" % (compressed, len(message).to_bytes(4), message)


def request_message(body: bytes, method: str) -> bytes:
    """The first message of the body. What follows it is the engine's to judge.

    Raises:
        BadRequest: the body holds no whole message, or a compressed one. `method` is told.
    """
    if len(body) < FRAME_HEADER_BYTES:
        raise BadRequest(
            f"invalid {method} request: a gRPC message begins with a header of {FRAME_HEADER_BYTES} bytes, "
            f"the body has {len(body)}"
        )
    if body[0]:
        raise BadRequest(
            f"invalid {method} request: its compressed flag is {body[0]}, and compressed gRPC messages are "
            "not supported; send it with grpc-encoding identity",
            "grpc-encoding",
        )
    end = FRAME_HEADER_BYTES + int.from_bytes(body[1:FRAME_HEADER_BYTES])
    if len(body) < end:
        raise BadRequest(
            f"invalid {method} request: its header announces {end - FRAME_HEADER_BYTES} bytes, "
            f"{len(body) - FRAME_HEADER_BYTES} came"
        )
    return body[FRAME_HEADER_BYTES:end]


class FramedAnswer(ABC):
    """Follows the answer of one gRPC request, message by message. Takes any bytes; never raises.

    Messages may come in pieces and several at a time; what is kept of one that is not whole is charged to an
    account, and given back by `finish` or `release`. A message longer than `EXACT_BYTES` is not read.

    Attributes:
        streaming: the client asked for a stream of tokens.
        first_token: the first output token has passed; of an answer whose messages cannot be read (compressed
            ones, long ones, of another API) its first byte. Never true of an error.
        events: messages that have passed, as far as they are read.
    """

    __slots__ = ("_is_error", "_partial", "_reads", "_skip", "events", "first_token", "streaming")

    def __init__(self, streaming: bool, account: Account | None = None) -> None:
        self._partial = Kept(account)
        self._skip = 0
        self._is_error = False
        self._reads = False
        self.streaming = streaming
        self.first_token = False
        self.events = 0

    def begin(self, status: int, content_type: str, content_encoding: str) -> bool:
        """Take note of the answer's headers. True: bytes may change."""
        self._is_error = status >= 400
        self._reads = not self._is_error and content_type.lower().startswith("application/grpc")
        return False

    @property
    @abstractmethod
    def usage(self) -> Usage | None:
        """The last counts that have passed."""

    def feed(self, chunk: bytes, last: bool) -> bytes:
        """Follow a piece of the body. Returns the bytes to forward now."""
        if self._reads:
            self._take(chunk)
        else:
            self.first_token |= bool(chunk) and not self._is_error
        if last:
            self.finish()
        return chunk

    def finish(self) -> bytes:
        """The body has ended; nothing of it is held back."""
        self.release()
        return b""

    def release(self) -> None:
        """Let go of what is kept: the answer is over, however it ended."""
        self._partial.release()

    @abstractmethod
    def _read(self, compressed: int, message: bytes) -> None:
        """A whole message."""

    @abstractmethod
    def _pass(self, unread: bytes) -> None:
        """A piece of a message that is too long to be read, its header included."""

    def _take(self, chunk: bytes) -> None:
        if (
            self._partial
            or self._skip
            or len(chunk) != FRAME_HEADER_BYTES + int.from_bytes(chunk[1:FRAME_HEADER_BYTES])
        ):
            self._follow(chunk)
        else:
            self._read(chunk[0], chunk[FRAME_HEADER_BYTES:])

    def _follow(self, chunk: bytes) -> None:
        """A piece that is not one whole message."""
        skipped = min(self._skip, len(chunk))
        if skipped:
            self._skip -= skipped
            self._pass(chunk[:skipped])
        partial = self._partial
        partial += chunk[skipped:] if skipped else chunk
        at = 0
        while len(partial) - at >= FRAME_HEADER_BYTES:
            begin = at + FRAME_HEADER_BYTES
            size = int.from_bytes(partial[at + 1 : begin])
            if begin + size > len(partial):
                if size > EXACT_BYTES:
                    self._skip = begin + size - len(partial)
                    self.events += 1
                    self.first_token = True
                    self._pass(bytes(partial[at:]))
                    at = len(partial)
                break
            self._read(partial[at], bytes(partial[begin : begin + size]))
            at = begin + size
        del partial[:at]
        self._partial.settle()
