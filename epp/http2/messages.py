"""gRPC messages out of the bytes of DATA frames (gRPC over HTTP/2, "Length-Prefixed-Message")."""

import zlib
from collections.abc import Iterator
from typing import Final

from epp.http2.codes import Status
from epp.http2.errors import CallFault
from epp.http2.frames import MESSAGE_HEAD, MESSAGE_HEAD_BYTES

GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS

SMALL_BYTES: Final = 1024


class MessageTooLarge(Exception):
    """A message beyond the limit.

    `size` is its declared length in bytes, or what inflating had produced when it was stopped, just past the
    limit.
    """

    def __init__(self, size: int, limit_bytes: int) -> None:
        super().__init__(f"message of {size} bytes or more, the limit is {limit_bytes}")
        self.size = size
        self.limit_bytes = limit_bytes


class MessageReader:
    """The messages of one call. After an exception it is of no more use.

    Attributes:
        held: bytes kept of the body of a message that is not complete.
    """

    __slots__ = ("_gzip", "_head", "_limit_bytes", "_missing", "_pieces", "held")

    def __init__(self, limit_bytes: int, gzip: bool) -> None:
        """`gzip`: the request's `grpc-encoding` is gzip. `limit_bytes`: of one message, sent and inflated."""
        self._limit_bytes = limit_bytes
        self._gzip = gzip
        self._head = b""  # of the message that is not complete, as far as it is there
        self._pieces: list[bytes | bytearray] = []  # of its body
        self._missing = 0  # bytes to its end; counts once the head is complete
        self.held = 0

    @property
    def complete(self) -> bool:
        """No message is left half received, not even a part of its head."""
        return not self._head

    def feed(self, payload: bytes) -> Iterator[bytes]:
        """The messages that these bytes complete, in order, inflated; each as it is asked for.

        To be exhausted, unless no more messages are wanted at all. What precedes a fault is handed out first.

        Raises:
            CallFault: INTERNAL, for a head that gRPC does not know, compression that the call did not
                announce, and broken gzip.
            MessageTooLarge: the declared or the inflated size is beyond the limit. No more than a byte
                beyond it is ever inflated.
        """
        at, end = 0, len(payload)
        if self._head:
            at = self._extend(payload)
            if at < 0:
                return
            flag, body = self._head[0], b"".join(self._pieces)
            self._head, self.held = b"", 0
            self._pieces.clear()
            yield self._inflate(body) if flag else body
        while end - at >= MESSAGE_HEAD_BYTES:
            start = at + MESSAGE_HEAD_BYTES
            after = start + self._size(payload, at)
            if after > end:
                self._head, self._missing = payload[at:start], after - start
                self._keep(payload[start:])
                return
            body = payload[start:after]
            yield self._inflate(body) if payload[at] else body
            at = after
        self._head = payload[at:]

    def _extend(self, payload: bytes) -> int:
        """Go on with the message that is not complete: how many bytes complete it, -1 if too few."""
        at = 0
        if len(self._head) < MESSAGE_HEAD_BYTES:
            at = MESSAGE_HEAD_BYTES - len(self._head)
            self._head += payload[:at]
            if len(self._head) < MESSAGE_HEAD_BYTES:
                return -1
            self._missing = self._size(self._head, 0)
        after = at + self._missing
        self._keep(payload[at:after])
        return -1 if self._missing else after

    def _keep(self, piece: bytes) -> None:
        """Large pieces stay as they are. Small ones are joined: objects outweigh their few bytes."""
        size = len(piece)
        self.held += size
        self._missing -= size
        pieces = self._pieces
        if size >= SMALL_BYTES:
            pieces.append(piece)
        elif pieces and isinstance(pieces[-1], bytearray):
            pieces[-1] += piece
        elif piece:
            pieces.append(bytearray(piece))

    def _size(self, data: bytes, at: int) -> int:
        """The length that the head at `at` declares."""
        flag, size = MESSAGE_HEAD.unpack_from(data, at)
        if flag:
            if flag != 1:
                raise CallFault(Status.INTERNAL, f"message with compressed flag {flag}, it must be 0 or 1")
            if not self._gzip:
                raise CallFault(Status.INTERNAL, "compressed flag set with identity or empty encoding")
        if size > self._limit_bytes:
            raise MessageTooLarge(size, self._limit_bytes)
        return int(size)

    def _inflate(self, body: bytes) -> bytes:
        inflating = zlib.decompressobj(wbits=GZIP_WINDOW)
        try:
            message = inflating.decompress(body, self._limit_bytes + 1)
        except zlib.error as error:
            raise CallFault(Status.INTERNAL, f"message is not valid gzip: {error}") from None
        if len(message) > self._limit_bytes:
            raise MessageTooLarge(len(message), self._limit_bytes)
        if not inflating.eof:
            raise CallFault(Status.INTERNAL, "message is not valid gzip: it ends too early")
        if inflating.unused_data:
            raise CallFault(Status.INTERNAL, "message is not valid gzip: bytes follow its end")
        return message
