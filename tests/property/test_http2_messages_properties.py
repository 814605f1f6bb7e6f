"""However messages are compressed and cut, the same come out; whatever the bytes, no other exception does."""

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.http2.errors import CallFault
from epp.http2.frames import MESSAGE_HEAD
from epp.http2.messages import MessageReader, MessageTooLarge

LIMIT_BYTES = 9000
JUNK_LIMIT_BYTES = 400
EXAMPLES = settings(max_examples=150, deadline=None)
UNTIL_ONE_FAILS = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
)

MESSAGES = st.lists(
    st.tuples(
        st.binary(max_size=20) | st.integers(0, LIMIT_BYTES).map(lambda size: b"0123456789" * (size // 10)),
        st.booleans(),
    ),
    max_size=6,
)
CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=20) | st.lists(
    st.sampled_from((1, 4, 5, 6, 1023, 1024, 1500, 4000)), min_size=1, max_size=20
)
JUNK = st.lists(
    st.binary(max_size=30)
    | st.builds(
        MESSAGE_HEAD.pack,
        st.integers(0, 3),
        st.integers(0, 40) | st.integers(JUNK_LIMIT_BYTES - 1, JUNK_LIMIT_BYTES + 1),
    )
    | st.sampled_from((JUNK_LIMIT_BYTES, JUNK_LIMIT_BYTES + 1)).map(
        lambda size: _wire(bytes(size), compressed=False)
    )
    | st.sampled_from((0, 1, 40, 60_000)).map(lambda size: _flagged(gzip.compress(bytes(size), mtime=0)))
    | st.binary(max_size=12).map(lambda tail: _flagged(gzip.compress(b"x", mtime=0) + tail))
    | st.binary(max_size=12).map(lambda body: _flagged(b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + body)),
    max_size=8,
).map(b"".join)

Make = Callable[[int, bool], MessageReader]


def _flagged(body: bytes) -> bytes:
    return MESSAGE_HEAD.pack(1, len(body)) + body


def _wire(message: bytes, compressed: bool) -> bytes:
    return (
        _flagged(gzip.compress(message, 1, mtime=0))
        if compressed
        else MESSAGE_HEAD.pack(0, len(message)) + message
    )


def cut(wire: bytes, sizes: list[int]) -> list[bytes]:
    """In pieces of these sizes, over and over."""
    pieces, at, turn = [], 0, 0
    while at < len(wire):
        pieces.append(wire[at : at + sizes[turn % len(sizes)]])
        at += sizes[turn % len(sizes)]
        turn += 1
    return pieces


def same_messages(make: Make, messages: list[tuple[bytes, bool]], sizes: list[int]) -> None:
    """What comes out is what went in, each as soon as its last byte is there; it tells what it holds."""
    wires = [_wire(*message) for message in messages]
    ends = [sum(map(len, wires[: count + 1])) for count in range(len(wires))]
    reader = make(LIMIT_BYTES, True)
    got: list[bytes] = []
    arrived = 0
    for piece in cut(b"".join(wires), sizes):
        got += reader.feed(piece)
        arrived += len(piece)
        done = sum(end <= arrived for end in ends)
        assert len(got) == done
        left = arrived - (ends[done - 1] if done else 0)
        assert reader.complete is (left == 0)
        assert reader.held == max(0, left - MESSAGE_HEAD.size)
    assert got == [message for message, _ in messages]


def nothing_else(make: Make, wire: bytes, sizes: list[int], gzip_announced: bool) -> None:
    """Messages within the limit, or one of the two exceptions; and it never holds more than one message."""
    reader = make(JUNK_LIMIT_BYTES, gzip_announced)
    try:
        for piece in cut(wire, sizes):
            for message in reader.feed(piece):
                assert len(message) <= JUNK_LIMIT_BYTES
            assert reader.held <= JUNK_LIMIT_BYTES
    except (CallFault, MessageTooLarge):
        pass


@EXAMPLES
@given(MESSAGES, CUTS)
def test_same_messages(messages: list[tuple[bytes, bool]], sizes: list[int]) -> None:
    same_messages(MessageReader, messages, sizes)


@EXAMPLES
@given(JUNK, CUTS, st.booleans())
def test_nothing_else(wire: bytes, sizes: list[int], gzip_announced: bool) -> None:
    nothing_else(MessageReader, wire, sizes, gzip_announced)


class LosesPieces(MessageReader):
    def _keep(self, piece: bytes) -> None:
        super()._keep(piece)
        del self._pieces[:-1]


class ForgetsToCount(MessageReader):
    def _keep(self, piece: bytes) -> None:
        super()._keep(piece)
        self.held = len(piece)


class ForgetsPartOfAHead(MessageReader):
    def _extend(self, payload: bytes) -> int:
        if len(self._head) < MESSAGE_HEAD.size:
            self._head = bytes(len(self._head))
        return super()._extend(payload)


class WaitsForOneByteMore(MessageReader):
    def _size(self, data: bytes, at: int) -> int:
        return super()._size(data, at) + 1


class HandsOutCompressed(MessageReader):
    def _inflate(self, body: bytes) -> bytes:
        return body


class InflatesWithoutLimit(MessageReader):
    def _inflate(self, body: bytes) -> bytes:
        try:
            return zlib.decompress(body, wbits=31)
        except zlib.error:
            return b""


class LetsErrorsOfZlibOut(MessageReader):
    def _inflate(self, body: bytes) -> bytes:
        inflating = zlib.decompressobj(wbits=31)
        return inflating.decompress(body, self._limit_bytes)


class TakesAnySize(MessageReader):
    def _size(self, data: bytes, at: int) -> int:
        return int.from_bytes(data[at + 1 : at + MESSAGE_HEAD.size], "big")


@pytest.mark.parametrize(
    "fault", [LosesPieces, ForgetsToCount, ForgetsPartOfAHead, WaitsForOneByteMore, HandsOutCompressed]
)
def test_same_messages_sees(fault: Make) -> None:
    @UNTIL_ONE_FAILS
    @given(MESSAGES, CUTS)
    def attempt(messages: list[tuple[bytes, bool]], sizes: list[int]) -> None:
        same_messages(fault, messages, sizes)

    with pytest.raises((AssertionError, CallFault, MessageTooLarge)):
        attempt()


@pytest.mark.parametrize("fault", [InflatesWithoutLimit, LetsErrorsOfZlibOut, TakesAnySize])
def test_nothing_else_sees(fault: Make) -> None:
    @UNTIL_ONE_FAILS
    @given(JUNK, CUTS, st.booleans())
    def attempt(wire: bytes, sizes: list[int], gzip_announced: bool) -> None:
        nothing_else(fault, wire, sizes, gzip_announced)

    with pytest.raises((AssertionError, zlib.error)):
        attempt()
