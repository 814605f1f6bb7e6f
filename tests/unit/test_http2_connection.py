"""What a peer can do wrong with frames, section by section of RFC 9113: how far it reaches, and its code."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.http2.ports import Ending
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Wire

(NO_ERROR, PROTOCOL, INTERNAL, FLOW_CONTROL, SETTINGS_TIMEOUT, STREAM_CLOSED) = range(6)
(FRAME_SIZE, REFUSED, CANCEL, COMPRESSION, CONNECT, CALM) = range(6, 12)
MOST = (1 << 31) - 1

Said = Callable[[Wire, int], bytes]


def raw(kind: int, flags: int, payload: bytes, *, stream: int | None = 0) -> Said:
    """A frame on this stream, or on one that is open (None)."""
    return lambda peer, open_id: wire.frame(kind, flags, open_id if stream is None else stream, payload)


def setting(key: int, value: int) -> Said:
    return raw(wire.SETTINGS, 0, struct.pack(">HI", key, value))


def increment(value: int, *, stream: int | None = 0) -> Said:
    return raw(wire.WINDOW_UPDATE, 0, struct.pack(">I", value), stream=stream)


def new(*parts: tuple[int, int, bytes]) -> Said:
    """Frames (kind, flags, payload) on a stream that is to be opened by them."""

    def said(peer: Wire, open_id: int) -> bytes:
        stream_id = peer.next_id()
        return b"".join(wire.frame(kind, flags, stream_id, payload) for kind, flags, payload in parts)

    return said


def fields(*names_and_values: tuple[str, str], end: bool = True) -> Said:
    """A request of these fields."""

    def said(peer: Wire, open_id: int) -> bytes:
        return peer.headers(peer.next_id(), list(names_and_values), end=end)

    return said


def then(*saids: Said) -> Said:
    return lambda peer, open_id: b"".join(said(peer, open_id) for said in saids)


def trailers(*names_and_values: tuple[str, str], end: bool = True) -> Said:
    return lambda peer, open_id: peer.headers(open_id, list(names_and_values), end=end)


def with_length(length: int, *payloads: bytes) -> Said:
    """A request that announces `length` bytes and ends after these."""

    def said(peer: Wire, open_id: int) -> bytes:
        stream_id = peer.next_id()
        head = peer.headers(
            stream_id, wire.request(wire.MUTE, ("content-length", str(length))), end=not payloads
        )
        last = len(payloads) - 1
        pieces = [wire.data(stream_id, body, end=at == last) for at, body in enumerate(payloads)]
        return head + b"".join(pieces)

    return said


def depends_on_itself(peer: Wire, open_id: int) -> bytes:
    stream_id = peer.next_id()
    flags = wire.END_HEADERS | wire.WITH_PRIORITY
    payload = struct.pack(">IB", stream_id, 7) + peer.block(wire.request())
    return wire.frame(wire.HEADERS, flags, stream_id, payload)


def trailers_that_depend_on_it(peer: Wire, open_id: int) -> bytes:
    payload = struct.pack(">IB", open_id, 7) + peer.block([("x-sum", "1")])
    flags = wire.END_HEADERS | wire.END_STREAM | wire.WITH_PRIORITY
    return wire.frame(wire.HEADERS, flags, open_id, payload)


def priority_of_itself(peer: Wire, open_id: int) -> bytes:
    return wire.frame(wire.PRIORITY, 0, open_id, struct.pack(">IB", open_id, 7))


def half_block_then(kind: int) -> Said:
    return new((wire.HEADERS, 0, b"\x83"), (kind, 0, bytes(8)))


def half_block_then_another_stream(peer: Wire, open_id: int) -> bytes:
    first = wire.frame(wire.HEADERS, 0, peer.next_id(), b"\x83")
    return first + wire.frame(wire.CONTINUATION, wire.END_HEADERS, peer.next_id(), b"\x86")


def smaller_id(peer: Wire, open_id: int) -> bytes:
    skipped = peer.next_id()
    later = peer.headers(peer.next_id(), wire.request())
    return later + peer.headers(skipped, wire.request())


def even_id(peer: Wire, open_id: int) -> bytes:
    return peer.headers(peer.next_id() + 1, wire.request())


def beyond_window(peer: Wire, open_id: int) -> bytes:
    """The stream's window is not opened again while it leaves replies unread."""
    piece = wire.message(bytes(16_379))
    return wire.data(open_id, piece) * 65


WHOLE = wire.END_HEADERS | wire.END_STREAM
GOOD = tuple(wire.request())

CONNECTION_FAULTS: dict[str, tuple[Said, int]] = {
    "4.2 SETTINGS above the frame size": (raw(wire.SETTINGS, 0, bytes(16_386)), FRAME_SIZE),
    "4.2 HEADERS above the frame size": (new((wire.HEADERS, WHOLE, bytes(16_385))), FRAME_SIZE),
    "4.2 DATA above the frame size": (raw(wire.DATA, 0, bytes(16_385), stream=None), FRAME_SIZE),
    "4.2 unknown frame above the frame size": (raw(0xFA, 0, bytes(16_385)), FRAME_SIZE),
    "4.3 block with an index that is not there": (new((wire.HEADERS, WHOLE, b"\xff\xff\x01")), COMPRESSION),
    "4.3 block that is cut off": (new((wire.HEADERS, WHOLE, b"\x40\x7fabc")), COMPRESSION),
    "4.3 block with a table size above ours": (new((wire.HEADERS, WHOLE, b"\x3f\xe1\xff\x03")), COMPRESSION),
    "4.3 block with a bad Huffman code": (new((wire.HEADERS, WHOLE, b"\x00\x81\xff\x00")), COMPRESSION),
    "4.3 trailers with an index that is not there": (
        raw(wire.HEADERS, WHOLE, b"\xff\xff\x01", stream=None),
        COMPRESSION,
    ),
    "4.3 DATA within a block": (half_block_then(wire.DATA), PROTOCOL),
    "4.3 HEADERS within a block": (half_block_then(wire.HEADERS), PROTOCOL),
    "4.3 PING within a block": (half_block_then(wire.PING), PROTOCOL),
    "4.3 SETTINGS within a block": (half_block_then(wire.SETTINGS), PROTOCOL),
    "4.3 PRIORITY within a block": (half_block_then(wire.PRIORITY), PROTOCOL),
    "4.3 WINDOW_UPDATE within a block": (half_block_then(wire.WINDOW_UPDATE), PROTOCOL),
    "5.5 unknown frame within a block": (half_block_then(0xFA), PROTOCOL),
    "4.3 CONTINUATION of another stream": (half_block_then_another_stream, PROTOCOL),
    "5.1.1 even stream": (even_id, PROTOCOL),
    "5.1.1 stream below the last": (smaller_id, PROTOCOL),
    "6.1 DATA on stream 0": (raw(wire.DATA, 0, b"x"), PROTOCOL),
    "6.1 DATA that is all padding": (raw(wire.DATA, wire.PADDED, b"\x05x\0\0\0", stream=None), PROTOCOL),
    "6.1 DATA without its padding length": (raw(wire.DATA, wire.PADDED, b"", stream=None), PROTOCOL),
    "6.2 HEADERS on stream 0": (raw(wire.HEADERS, WHOLE, b"\x83"), PROTOCOL),
    "6.2 HEADERS that is all padding": (new((wire.HEADERS, WHOLE | wire.PADDED, b"\x03\x83\0")), PROTOCOL),
    "6.2 HEADERS without room for its priority": (
        new((wire.HEADERS, WHOLE | wire.WITH_PRIORITY, b"\x83\x83\x83\x83")),
        FRAME_SIZE,
    ),
    "6.3 PRIORITY on stream 0": (raw(wire.PRIORITY, 0, bytes(5)), PROTOCOL),
    "6.3 PRIORITY of four bytes on an idle stream": (raw(wire.PRIORITY, 0, bytes(4), stream=77), FRAME_SIZE),
    "5.3.1 idle stream that depends on itself": (
        raw(wire.PRIORITY, 0, struct.pack(">IB", 77, 1), stream=77),
        PROTOCOL,
    ),
    "6.4 RST_STREAM on stream 0": (raw(wire.RST_STREAM, 0, bytes(4)), PROTOCOL),
    "6.4 RST_STREAM of three bytes": (raw(wire.RST_STREAM, 0, bytes(3), stream=None), FRAME_SIZE),
    "6.4 RST_STREAM of five bytes": (raw(wire.RST_STREAM, 0, bytes(5), stream=None), FRAME_SIZE),
    "6.5 SETTINGS on a stream": (raw(wire.SETTINGS, 0, b"", stream=None), PROTOCOL),
    "6.5 SETTINGS acknowledged with a payload": (raw(wire.SETTINGS, wire.ACK, bytes(6)), FRAME_SIZE),
    "6.5 SETTINGS of five bytes": (raw(wire.SETTINGS, 0, bytes(5)), FRAME_SIZE),
    "6.5.2 ENABLE_PUSH of 2": (setting(2, 2), PROTOCOL),
    "6.5.2 INITIAL_WINDOW_SIZE of 2^31": (setting(4, 1 << 31), FLOW_CONTROL),
    "6.5.2 MAX_FRAME_SIZE of 2^14-1": (setting(5, (1 << 14) - 1), PROTOCOL),
    "6.5.2 MAX_FRAME_SIZE of 2^24": (setting(5, 1 << 24), PROTOCOL),
    "6.6 PUSH_PROMISE": (raw(wire.PUSH_PROMISE, wire.END_HEADERS, bytes(5), stream=None), PROTOCOL),
    "6.7 PING on a stream": (raw(wire.PING, 0, bytes(8), stream=None), PROTOCOL),
    "6.7 PING of seven bytes": (raw(wire.PING, 0, bytes(7)), FRAME_SIZE),
    "6.7 acknowledgement of nine bytes": (raw(wire.PING, wire.ACK, bytes(9)), FRAME_SIZE),
    "6.8 GOAWAY on a stream": (raw(wire.GOAWAY, 0, bytes(8), stream=None), PROTOCOL),
    "6.8 GOAWAY of seven bytes": (raw(wire.GOAWAY, 0, bytes(7)), FRAME_SIZE),
    "6.9 WINDOW_UPDATE of three bytes": (raw(wire.WINDOW_UPDATE, 0, bytes(3)), FRAME_SIZE),
    "6.9 WINDOW_UPDATE of five bytes on a stream": (
        raw(wire.WINDOW_UPDATE, 0, bytes(5), stream=None),
        FRAME_SIZE,
    ),
    "6.9 WINDOW_UPDATE by nothing": (increment(0), PROTOCOL),
    "6.9.1 the connection's window above 2^31-1": (increment(MOST), FLOW_CONTROL),
    "6.9.2 SETTINGS make a stream's window larger than 2^31-1": (
        then(increment(1000, stream=None), setting(4, MOST)),
        FLOW_CONTROL,
    ),
    "6.10 CONTINUATION on its own": (
        raw(wire.CONTINUATION, wire.END_HEADERS, b"\x83", stream=None),
        PROTOCOL,
    ),
    "6.10 CONTINUATION after a whole block": (
        new((wire.HEADERS, WHOLE, b"\x83\x86\x84"), (wire.CONTINUATION, wire.END_HEADERS, b"")),
        PROTOCOL,
    ),
    "6.10 CONTINUATION on stream 0": (raw(wire.CONTINUATION, wire.END_HEADERS, b""), PROTOCOL),
}

STREAM_FAULTS: dict[str, tuple[Said, int]] = {
    "5.3.1 PRIORITY on itself": (priority_of_itself, PROTOCOL),
    "5.3.1 HEADERS that depend on themselves": (depends_on_itself, PROTOCOL),
    "6.3 PRIORITY of four bytes": (raw(wire.PRIORITY, 0, bytes(4), stream=None), FRAME_SIZE),
    "6.3 PRIORITY of six bytes": (raw(wire.PRIORITY, 0, bytes(6), stream=None), FRAME_SIZE),
    "6.9 WINDOW_UPDATE by nothing on a stream": (increment(0, stream=None), PROTOCOL),
    "6.9.1 a stream's window above 2^31-1": (increment(MOST, stream=None), FLOW_CONTROL),
    "6.9.1 DATA beyond the stream's window": (beyond_window, FLOW_CONTROL),
    "5.3.1 trailers that depend on their own stream": (trailers_that_depend_on_it, PROTOCOL),
    "8.1 trailers that do not end the stream": (trailers(("x-sum", "1"), end=False), PROTOCOL),
    "8.1 trailers with a pseudo-header": (trailers((":path", "/")), PROTOCOL),
    "8.1.1 more DATA than content-length": (with_length(4, wire.message()), PROTOCOL),
    "8.1.1 less DATA than content-length": (with_length(11, wire.message()), PROTOCOL),
    "8.1.1 no DATA with a content-length": (with_length(10), PROTOCOL),
    "8.2.1 upper case": (
        # The block by hand: encoders know better.
        lambda peer, open_id: wire.frame(
            wire.HEADERS, WHOLE, peer.next_id(), peer.block(wire.request()) + b"\x00\x01X\x01y"
        ),
        PROTOCOL,
    ),
    "8.2.1 line break in a value": (fields(*GOOD, ("x-a", "b\nc")), PROTOCOL),
    "8.2.2 connection": (fields(*GOOD, ("connection", "close")), PROTOCOL),
    "8.2.2 te: gzip": (fields(*wire.request(te="gzip")), PROTOCOL),
    "8.3 pseudo-header after the others": (fields(*GOOD, (":authority", "b")), PROTOCOL),
    "8.3 unknown pseudo-header": (fields((":protocol", "x"), *GOOD), PROTOCOL),
    "8.3 pseudo-header of a response": (fields((":status", "200"), *GOOD), PROTOCOL),
    "8.3.1 no :method": (fields(*wire.request(method=None)), PROTOCOL),
    "8.3.1 no :scheme": (fields(*wire.request(scheme=None)), PROTOCOL),
    "8.3.1 two :path": (fields((":path", "/"), *GOOD), PROTOCOL),
    "8.3.1 empty :path": (fields(*wire.request(path="")), PROTOCOL),
}


@pytest.mark.parametrize("name", CONNECTION_FAULTS)
def test_ends_the_connection(name: str) -> None:
    said, code = CONNECTION_FAULTS[name]
    peer = Wire()
    open_id = peer.open()
    peer.say(wire.data(open_id, wire.message()[:7]))
    peer.say(said(peer, open_id))
    peer.failed_with(code)
    assert peer.calls[0].endings == [Ending.BROKEN]
    assert peer.replies[open_id].reset is None if open_id in peer.replies else True


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_ends_the_stream_alone(name: str) -> None:
    said, code = STREAM_FAULTS[name]
    peer = Wire()
    with peer.bystander():
        open_id = peer.open()
        call = peer.calls[-1]
        resets = [one for one in peer.say(said(peer, open_id)) if one.kind == wire.RST_STREAM]
        assert [one.code for one in resets] == [code]
        assert [fault.code for fault in peer.told] == [code]
        if resets[0].stream_id == open_id:
            assert call.endings == [Ending.BROKEN]
        else:
            assert call.endings == []
            peer.say(wire.data(open_id, wire.message(), end=True))
            assert peer.replies[open_id].status == 0
        # What was under way on the stream that was reset is nothing to speak of.
        assert peer.say(wire.data(resets[0].stream_id, b"xyz"), wire.reset(resets[0].stream_id)) == []
    peer.nothing_left()


# -- the beginning (3.4) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n",
        b"POST /v1/chat HTTP/1.1\r\nhost: picker\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 24,
    ],
)
def test_no_preface(beginning: bytes) -> None:
    for size in (1, 3, len(beginning)):
        peer = Wire(greet=False)
        for at in range(0, len(beginning), size):
            peer.say(beginning[at : at + size])
        peer.failed_with(PROTOCOL)
        assert b"HTTP/2 only" in peer.goaways[0].payload


@pytest.mark.parametrize(
    "first",
    [
        wire.frame(wire.PING, 0, 0, bytes(8)),
        wire.frame(wire.SETTINGS, wire.ACK, 0),
        wire.frame(wire.HEADERS, WHOLE, 1, b"\x83\x86\x84"),
        wire.window_update(0, 5),
        wire.frame(0xFA, 0, 0),
        wire.data(1, b"x"),
    ],
)
def test_settings_must_come_first(first: bytes) -> None:
    peer = Wire(greet=False)
    peer.say(wire.PREFACE, first)
    peer.failed_with(PROTOCOL)


def test_our_settings_are_the_first_that_is_written() -> None:
    peer = Wire(greet=False)
    greeting = peer.read()
    assert [one.kind for one in greeting] == [wire.SETTINGS, wire.WINDOW_UPDATE]
    values = dict(struct.iter_unpack(">HI", greeting[0].payload))
    assert values == {3: 10_000, 4: 1 << 20, 6: 32 << 10}
    assert (greeting[1].stream_id, int.from_bytes(greeting[1].payload)) == (0, (16 << 20) - 65_535)
    assert [one.flags for one in peer.say(wire.PREFACE, wire.settings())] == [wire.ACK]


# -- what is to be tolerated ---------------------------------------------------------------------------

TOLERATED: dict[str, Said] = {
    "5.5 unknown frames": then(
        raw(0xFA, 0xFF, b"any"), raw(0x10, 0, b"\0\0\0\1u=1"), raw(0xFA, 0, b"", stream=None)
    ),
    "4.1 unknown flags": then(raw(wire.PING, 0xFE, bytes(8)), raw(wire.SETTINGS, 0xFE, b"")),
    "4.1 the reserved bit of a stream's number": lambda peer, open_id: wire.frame(
        wire.DATA, 0, open_id | 1 << 31, b""
    ),
    "6.9 the reserved bit of an increment": increment(1 << 31 | 5),
    "6.5.2 unknown settings": then(setting(65_027, 1), setting(0, 99), setting(8, 0)),
    "6.5 a setting twice": raw(wire.SETTINGS, 0, struct.pack(">HIHI", 4, 1, 4, 65_535)),
    "6.3 PRIORITY anywhere": then(
        raw(wire.PRIORITY, 0, struct.pack(">IB", 1, 255), stream=None),
        raw(wire.PRIORITY, 0, struct.pack(">IB", 1 << 31 | 5, 0), stream=999),
        raw(wire.PRIORITY, 0, struct.pack(">IB", 0, 0), stream=2),
    ),
    "6.1 padding": raw(wire.DATA, wire.PADDED, b"\x03\0\0\0", stream=None),
    "6.7 an acknowledgement of no PING": raw(wire.PING, wire.ACK, b"alive?  "),
    "6.8 GOAWAY with a text": raw(wire.GOAWAY, 0, bytes(8) + b"bye"),
    "6.9.2 a window of 0 and back": then(setting(4, 0), setting(4, 65_535)),
    "3.4 a second acknowledgement of SETTINGS": raw(wire.SETTINGS, wire.ACK, b""),
    "6.10 a block in pieces, empty ones too": lambda peer, open_id: _in_pieces(peer),
    "6.2 padding and priority": lambda peer, open_id: _padded(peer),
}


def _in_pieces(peer: Wire) -> bytes:
    stream_id, block = peer.next_id(), peer.block(wire.request())
    pieces = [block[:1], b"", block[1:20], block[20:]]
    return wire.frame(wire.HEADERS, wire.END_STREAM, stream_id, b"") + b"".join(
        wire.frame(wire.CONTINUATION, wire.END_HEADERS if at == 3 else 0, stream_id, piece)
        for at, piece in enumerate(pieces)
    )


def _padded(peer: Wire) -> bytes:
    payload = b"\x04" + struct.pack(">IB", 1 << 31, 9) + peer.block(wire.request()) + bytes(4)
    return wire.frame(wire.HEADERS, WHOLE | wire.PADDED | wire.WITH_PRIORITY, peer.next_id(), payload)


@pytest.mark.parametrize("name", TOLERATED)
def test_is_tolerated(name: str) -> None:
    peer = Wire()
    with peer.bystander():
        open_id = peer.open()
        answers = peer.say(TOLERATED[name](peer, open_id))
        assert not [one for one in answers if one.kind in (wire.RST_STREAM, wire.GOAWAY)]
        assert peer.told == []
        peer.say(wire.data(open_id, wire.message(), end=True))
        assert peer.replies[open_id].messages == [b"hello"]
    peer.nothing_left()


# What a window still holds depends on what could be written meanwhile.
UNTIMELY = "6.9.1 DATA beyond the stream's window"


@settings(max_examples=60)
@given(st.data())
def test_where_the_network_cuts_makes_no_difference(draw: st.DataObject) -> None:
    """Faults too: the same calls, the same bytes back."""
    told = [name for name in (*STREAM_FAULTS, *TOLERATED, "an ordinary call") if name != UNTIMELY]
    names = draw.draw(st.lists(st.sampled_from(told), max_size=6))
    last = draw.draw(st.sampled_from([None, *CONNECTION_FAULTS]))
    script = Wire(greet=False)
    said = wire.PREFACE + wire.settings() + wire.frame(wire.SETTINGS, wire.ACK, 0)
    for name in names:
        open_id = script.next_id()
        said += script.headers(open_id, wire.request())
        if name in STREAM_FAULTS:
            said += STREAM_FAULTS[name][0](script, open_id)
        elif name in TOLERATED:
            said += TOLERATED[name](script, open_id)
        said += wire.data(open_id, wire.message(b"a" * 100) + wire.message(b"b"), end=True)
    if last is not None:
        open_id = script.next_id()
        said += script.headers(open_id, wire.request()) + CONNECTION_FAULTS[last][0](script, open_id)
    whole, cut = Wire(greet=False), Wire(greet=False)
    whole.say(said)
    ends = sorted(draw.draw(st.lists(st.integers(0, len(said)), max_size=30)))
    for start, end in zip([0, *ends], [*ends, len(said)], strict=True):
        cut.say(said[start:end])
    assert [(call.got, call.events, call.endings) for call in cut.calls] == [
        (call.got, call.events, call.endings) for call in whole.calls
    ]
    assert [str(fault) for fault in cut.told] == [str(fault) for fault in whole.told]
    assert sorted(map(repr, cut.log)) == sorted(map(repr, whole.log))
    assert cut.connection.over == whole.connection.over == (last is not None)
