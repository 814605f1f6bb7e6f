"""Length-prefixed messages out of DATA bytes: where they end, what is refused, and what is held meanwhile."""

import gzip
import tracemalloc
import zlib

import pytest

import epp.http2.messages as messages_module
from epp.http2.codes import Status
from epp.http2.errors import CallFault
from epp.http2.frames import MESSAGE_HEAD
from epp.http2.messages import MessageReader, MessageTooLarge

MIB = 1 << 20


def plain(message: bytes) -> bytes:
    return MESSAGE_HEAD.pack(0, len(message)) + message


def flagged(body: bytes, flag: int = 1) -> bytes:
    return MESSAGE_HEAD.pack(flag, len(body)) + body


def read(reader: MessageReader, *payloads: bytes) -> list[bytes]:
    return [message for payload in payloads for message in reader.feed(payload)]


def test_messages_of_one_payload_in_order() -> None:
    reader = MessageReader(MIB, gzip=False)
    assert read(reader, plain(b"one") + plain(b"") + plain(b"three")) == [b"one", b"", b"three"]
    assert (reader.held, reader.complete) == (0, True)


def test_a_message_byte_by_byte() -> None:
    reader = MessageReader(MIB, gzip=False)
    steps = []
    for octet in plain(b"abc"):
        messages = read(reader, bytes((octet,)))
        steps.append((messages, reader.held, reader.complete))
    assert steps == [
        *[([], 0, False)] * 5,
        ([], 1, False),
        ([], 2, False),
        ([b"abc"], 0, True),
    ]


def test_an_empty_payload_changes_nothing() -> None:
    reader = MessageReader(MIB, gzip=False)
    wire = plain(b"abc")
    assert read(reader, b"", wire[:3], b"", wire[3:5], b"", wire[5:7], b"", wire[7:], b"") == [b"abc"]


def test_an_empty_message_whose_head_comes_in_parts() -> None:
    assert read(MessageReader(MIB, gzip=False), b"\0\0", b"\0\0\0" + plain(b"x")) == [b"", b"x"]


def test_a_large_message_of_many_frames() -> None:
    message = bytes(range(256)) * (33 * 4096)
    wire = plain(message) + plain(b"next")
    frames = [wire[at : at + 16_384] for at in range(0, len(wire), 16_384)]
    assert read(MessageReader(len(message), gzip=False), *frames) == [message, b"next"]


def test_gzip_and_plain_messages_mixed() -> None:
    wire = flagged(gzip.compress(b"one", mtime=0)) + plain(b"two") + flagged(gzip.compress(b"", mtime=0))
    assert read(MessageReader(MIB, gzip=True), wire[:20], wire[20:]) == [b"one", b"two", b""]


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (flagged(b"x", 2), "compressed flag 2, it must be 0 or 1"),
        (flagged(b"x", 255), "compressed flag 255"),
        (flagged(b""), "ends too early"),
        (flagged(b"not gzip"), "not valid gzip"),
        (flagged(zlib.compress(b"zlib's own format")), "not valid gzip"),
        (flagged(gzip.compress(b"cut", mtime=0)[:-1]), "ends too early"),
        (flagged(gzip.compress(b"wrong sum", mtime=0)[:-8] + bytes(8)), "not valid gzip"),
        (flagged(gzip.compress(b"more", mtime=0) + b"\0"), "bytes follow its end"),
        (
            flagged(gzip.compress(b"two ", mtime=0) + gzip.compress(b"members", mtime=0)),
            "bytes follow its end",
        ),
    ],
)
def test_what_is_no_message_ends_the_call(wire: bytes, says: str) -> None:
    before: list[bytes] = []
    reader = MessageReader(MIB, gzip=True)
    with pytest.raises(CallFault, match=says) as caught:  # noqa: PT012 - what comes before it is the point
        for message in reader.feed(plain(b"before") + wire + plain(b"after")):
            before.append(message)  # noqa: PERF402
    assert caught.value.status is Status.INTERNAL
    assert before == [b"before"]


@pytest.mark.parametrize("cut", range(6))
def test_compression_that_was_not_announced(cut: int) -> None:
    wire = flagged(gzip.compress(b"x", mtime=0))
    with pytest.raises(CallFault, match="compressed flag set with identity or empty encoding") as caught:
        read(MessageReader(MIB, gzip=False), wire[:cut], wire[cut:])
    assert caught.value.status is Status.INTERNAL


@pytest.mark.parametrize("cut", range(5))
def test_a_head_that_declares_too_much_is_enough(cut: int) -> None:
    head = MESSAGE_HEAD.pack(0, 101)
    reader = MessageReader(100, gzip=False)
    assert read(reader, head[:cut]) == []
    with pytest.raises(MessageTooLarge, match="101 bytes or more, the limit is 100") as caught:
        read(reader, head[cut:])
    assert (caught.value.size, caught.value.limit_bytes) == (101, 100)


@pytest.mark.parametrize("limit", [0, 1, 100, 70_000])
def test_the_limit_itself_is_allowed(limit: int) -> None:
    assert read(MessageReader(limit, gzip=False), plain(bytes(limit))) == [bytes(limit)]
    body = gzip.compress(bytes(limit), mtime=0)
    if len(body) <= limit:
        assert read(MessageReader(limit, gzip=True), flagged(body)) == [bytes(limit)]
        with pytest.raises(MessageTooLarge):
            read(MessageReader(limit, gzip=True), flagged(gzip.compress(bytes(limit + 1), mtime=0)))


def test_a_bomb_is_not_inflated_beyond_the_limit() -> None:
    bomb = flagged(gzip.compress(bytes(64 * MIB), 6, mtime=0))
    reader = MessageReader(MIB, gzip=True)
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge) as caught:
            read(reader, bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert caught.value.size == MIB + 1


def allocated_for_reading() -> int:
    """By the reader and its caller alone: other threads allocate meanwhile."""
    files = [tracemalloc.Filter(True, name) for name in (messages_module.__file__, __file__)]
    traces = tracemalloc.take_snapshot().filter_traces(files)
    return sum(each.size for each in traces.statistics("filename"))


@pytest.mark.parametrize("piece_bytes", [1, 2, 1023, 1024])
def test_pieces_take_little_more_memory_than_their_bytes(piece_bytes: int) -> None:
    size = 64 * 1024
    reader = MessageReader(MIB, gzip=False)
    read(reader, MESSAGE_HEAD.pack(0, MIB))
    tracemalloc.start()
    try:
        for number in range(size // piece_bytes):
            read(reader, number.to_bytes(4, "big")[-piece_bytes:].ljust(piece_bytes, b"."))
        assert allocated_for_reading() < 1.3 * size
    finally:
        tracemalloc.stop()
    assert reader.held == size // piece_bytes * piece_bytes
