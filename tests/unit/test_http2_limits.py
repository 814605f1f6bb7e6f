"""How much a peer may ask for: streams, messages, bytes held, headers. What is beyond hurts nobody else."""

import hpack
import pytest

from epp.http2.connection import Connection
from epp.http2.limits import KIB, Http2Limits
from epp.http2.ports import Ending
from epp.http2.rates import Quota
from epp.http2.streams import Stream
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Wire

REFUSED, CALM = 7, 11


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"stream_window_bytes": 65_534},
            "stream_window_bytes: 65534 is no window; right are 65535 to 2147483647",
        ),
        ({"connection_window_bytes": 1 << 31}, "connection_window_bytes: 2147483648 is no window; right are"),
        ({"message_bytes": 16_383}, "message_bytes: 16383 is less than one frame; the least is 16384"),
    ],
)
def test_limits_that_cannot_be_kept(given: dict[str, int], text: str) -> None:
    """A peer may send 65,535 bytes before it has read any; a message in one frame is not measured."""
    with pytest.raises(ValueError, match=text):
        Http2Limits(**given)  # type: ignore[arg-type]


def test_the_least_limits() -> None:
    peer = Wire(Http2Limits(stream_window_bytes=65_535, connection_window_bytes=65_535, message_bytes=16_384))
    assert [one.kind for one in peer.log] == [wire.SETTINGS, wire.SETTINGS]  # the second acknowledges
    stream_id = peer.open()
    body = bytes(16_384)
    whole = wire.message(body)
    peer.say(wire.data(stream_id, whole[:16_384]), wire.data(stream_id, whole[16_384:], end=True))
    assert peer.replies[stream_id].messages == [body]
    peer.nothing_left()


def check_streams_of_a_connection(**first: str) -> None:
    """`first`: of the requests that fill it."""
    peer = Wire(Http2Limits(streams=3, header_block_bytes=100 * KIB))
    held = [peer.open(wire.MUTE, **first) for _ in range(3)]
    assert peer.connection.streams == 3
    refused = peer.open()
    assert peer.replies[refused].reset == REFUSED
    assert [fault.code for fault in peer.told] == [REFUSED]
    peer.say(wire.data(refused, wire.message(), end=True))
    assert peer.replies[refused].headers is None
    peer.say(wire.reset(held[0]))
    peer.works()
    for stream_id in held[1:]:
        peer.say(wire.reset(stream_id))
    peer.nothing_left()


def test_streams_of_a_connection() -> None:
    check_streams_of_a_connection()


@pytest.mark.parametrize(
    "odd",
    [{"method": "GET"}, {"content_type": "text/html"}, {"x_filler": "a" * 33_000}],
    ids=("405", "415", "431"),
)
def test_streams_that_are_no_calls_count(odd: dict[str, str]) -> None:
    check_streams_of_a_connection(**odd)


def test_streams_of_the_process() -> None:
    slots = Quota(3)
    one, other = Wire(slots=slots), Wire(slots=slots)
    first, second = one.open(wire.MUTE), one.open(wire.MUTE)
    third = other.open(wire.MUTE)
    assert one.replies == other.replies == {}
    for peer in (one, other):
        for odd in ({}, {"method": "GET"}, {"x_filler": "a" * 17_000, "content_type": "text/html"}):
            assert peer.replies[peer.open(**odd)].reset == REFUSED
    assert slots.used == 3
    one.connection.lose()
    assert slots.used == 1
    other.works()
    other.say(wire.data(third, wire.message()))
    assert other.calls[0].got == [b"hello"]
    assert first + second == 4
    other.say(wire.reset(third))
    other.nothing_left()


@pytest.mark.parametrize("size", [1000, 16_379, 20_000, 64 * KIB])
def test_largest_message(size: int) -> None:
    peer = Wire(Http2Limits(message_bytes=64 * KIB))
    stream_id = peer.open(wire.MUTE)
    whole = wire.message(bytes(size))
    peer.say(*(wire.data(stream_id, whole[at : at + 16_384]) for at in range(0, len(whole), 16_384)))
    assert [len(body) for body in peer.calls[0].got] == [size]
    assert peer.account.used == 0


def test_message_too_large() -> None:
    """Told from its head, before any of it is held; the rest of it passes unread."""
    peer = Wire(Http2Limits(message_bytes=64 * KIB))
    with peer.bystander():
        stream_id = peer.open(wire.MUTE)
        call = peer.calls[-1]
        whole = wire.message(b"one") + wire.message(bytes(64 * KIB + 1))
        peer.say(wire.data(stream_id, whole[:20]))
        assert (call.got, call.events, call.endings) == ([b"one"], ["too large"], [Ending.FINISHED])
        assert (peer.replies[stream_id].status, peer.replies[stream_id].reset) == (8, 0)
        assert (
            peer.say(*(wire.data(stream_id, whole[at : at + 9000]) for at in range(20, 60_000, 9000))) == []
        )
    peer.nothing_left()


def test_no_room_in_the_account() -> None:
    account = Quota(100 * KIB)
    peer = Wire(account=account)
    with peer.bystander():
        held = [peer.open(wire.MUTE) for _ in range(3)]
        calls = peer.calls[-3:]
        for _ in range(2):
            peer.say(*(wire.data(stream_id, wire.message(bytes(KIB << 10))[:16_384]) for stream_id in held))
        peer.say(wire.data(held[0], bytes(5000)), wire.data(held[1], bytes(16_000)))
        assert account.used <= 100 * KIB
        peer.say(wire.data(held[2], bytes(16_000)))
        assert [call.events for call in calls].count(["no room"]) >= 1
        ended = [
            stream_id for stream_id in held if stream_id in peer.replies and peer.replies[stream_id].ended
        ]
        assert {peer.replies[stream_id].status for stream_id in ended} == {14}
        for stream_id in held:
            if stream_id not in ended:
                peer.say(wire.reset(stream_id))
    peer.nothing_left()


def check_bytes_held(account: Quota, end: str) -> None:
    """Half a message, and replies that nobody reads, are charged until the stream is over."""
    peer = Wire(account=account)
    peer.say(wire.settings(window=0))
    stream_id = peer.open()
    peer.say(wire.data(stream_id, wire.message(bytes(3000))))
    peer.say(wire.data(stream_id, wire.message(bytes(9000))[:4005]))
    assert account.used == 3005 + 4000
    peer.say(wire.settings(window=1000))
    assert account.used == 2005 + 4000
    match end:
        case "reset":
            peer.say(wire.reset(stream_id))
        case "lost":
            peer.connection.lose()
        case "connection fault":
            peer.say(wire.window_update(0, 0))
        case "stream fault":
            peer.say(wire.window_update(stream_id, 0))
        case "stalled":
            peer.pass_time(130.0)
            assert peer.calls[0].endings == [Ending.STALLED]
        case "finished":
            peer.say(wire.data(stream_id, bytes(5000), end=True), wire.settings(window=1 << 20))
            assert peer.replies[stream_id].messages == [bytes(3000), bytes(9000)]
    peer.nothing_left()


ENDS = ("reset", "lost", "connection fault", "stream fault", "stalled", "finished")


@pytest.mark.parametrize("end", ENDS)
def test_bytes_held(end: str) -> None:
    check_bytes_held(Quota(wire.PLENTY), end)


@pytest.mark.parametrize("end", ENDS[:-1])
def test_bytes_that_stay_charged_are_found(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Stream._discard

    def wrong(stream: Stream) -> None:
        stream._waiting_bytes = 0
        right(stream)

    monkeypatch.setattr(Stream, "_discard", wrong)
    with pytest.raises(AssertionError):
        check_bytes_held(Quota(wire.PLENTY), end)


def test_streams_opened_above_the_limit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Connection.__init__

    def wrong(connection: Connection, methods: object, limits: Http2Limits, *more: object) -> None:
        right(connection, methods, Http2Limits(streams=limits.streams + 1), *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "__init__", wrong)
    with pytest.raises((AssertionError, KeyError)):
        check_streams_of_a_connection()


# -- headers -------------------------------------------------------------------------------------------


BOMB = ("x-bomb", "b" * 4000)


def bomb(stream_id: int, times: int) -> bytes:
    """A request that has the newest entry of the header table `times` times."""
    literals = b"".join(
        b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in field) for field in wire.request()
    )
    block = literals + b"\xbe" * times
    return wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, stream_id, block)


def test_headers_that_unfold_are_counted_as_such() -> None:
    """An entry of the table of nearly 4 KiB, named 4,000 times in as many bytes."""
    peer = Wire()
    with peer.bystander():
        peer.say(peer.headers(peer.next_id(), wire.request(), end=True))
        stream_id = peer.next_id()
        peer.say(peer.headers(stream_id, wire.request(wire.MUTE, BOMB), end=True), wire.reset(stream_id))
        stream_id = peer.next_id()
        peer.say(bomb(stream_id, 4000))
        assert peer.replies[stream_id].http_status == 431
        assert peer.account.used < 1000
    peer.nothing_left()


def test_blocks_beyond_the_limit_one_after_the_other() -> None:
    peer = Wire()
    peer.open(wire.MUTE, BOMB)
    for count in range(2000):
        peer.say(bomb(peer.next_id(), 20))
        if peer.connection.over:
            assert count >= 1000
            break
    peer.failed_with(CALM)


@pytest.mark.parametrize(
    ("pieces", "most"), [([2100] * 16, 32 * KIB), ([16_384] * 3, 32 * KIB), ([1] * 17, 0), ([0] * 17, 0)]
)
def test_a_block_without_end(pieces: list[int], most: int) -> None:
    peer = Wire()
    stream_id = peer.next_id()
    answers = peer.say(wire.frame(wire.HEADERS, 0, stream_id, b"\0" * pieces[0]))
    sent = pieces[0]
    for piece in pieces[1:]:
        assert answers == []
        assert sent <= max(most, 17)
        answers = peer.say(wire.frame(wire.CONTINUATION, 0, stream_id, b"\0" * piece))
        sent += piece
    peer.failed_with(CALM)


def test_the_longest_block() -> None:
    peer = Wire(Http2Limits(header_list_bytes=100 * KIB))
    stream_id = peer.next_id()
    filler = b"\0\x01a" + hpack.hpack.encode_integer(32 * KIB - 200, 7) + b"b" * (32 * KIB - 200)
    block = bytes(peer.encoder.encode(wire.request())) + filler
    assert 32 * KIB - 200 < len(block) <= 32 * KIB
    pieces = [block[at : at + 2200] for at in range(0, len(block), 2200)]
    assert len(pieces) <= 16
    parts = [wire.frame(wire.HEADERS, 0, stream_id, pieces[0])]
    parts += [wire.frame(wire.CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    parts.append(wire.frame(wire.CONTINUATION, wire.END_HEADERS, stream_id, pieces[-1]))
    peer.say(*parts, wire.data(stream_id, wire.message(), end=True))
    assert peer.replies[stream_id].messages == [b"hello"]
