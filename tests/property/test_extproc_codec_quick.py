"""The quick reading of body messages against the full one, and quickly written pieces against the stubs.

Messages are built from fields in any order, known or not, split and repeated, with numbers that are written
longer than they need be; or from recorded bytes of a real proxy, spoiled.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.errors import ProtocolError
from epp.extproc import codec, quick
from epp.extproc.records import (
    BODY_CHUNK_BYTES,
    Direction,
    Event,
    RequestChunk,
    ResponseChunk,
    StreamedBodyReply,
)
from epp.wire import ext_proc_pb2 as pb
from tests.data.http2 import recording

RESPONSE = Direction.RESPONSE
decode_in_full = codec.decode_in_full
shortest = quick.write_varint
Decode = Callable[[bytes, float], Event]

RECORDED = [
    message
    for name in recording.NAMES
    for stream in recording.messages(recording.recorded(name)).values()
    for message in stream
]

# -- messages -------------------------------------------------------------------------------------------


def varint(value: int, longer: int = 0) -> bytes:
    """`longer`: bytes more than needed, as far as ten are not exceeded."""
    written = shortest(value)
    more = min(longer, 10 - len(written))
    return (
        written if not more else written[:-1] + bytes([written[-1] | 0x80]) + b"\x80" * (more - 1) + b"\x00"
    )


def field(number: int, content: bytes, longer: int = 0, longer_tag: int = 0) -> bytes:
    return varint(number << 3 | 2, longer_tag) + varint(len(content), longer) + content


def number(at: int, value: int, longer: int = 0) -> bytes:
    return varint(at << 3) + varint(value, longer)


LONGER = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2, 5])
CONTENT = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"", b"\x10\x01", b"\x42\x00", b"\x0a\x00", b"\x2a\x00", b"x" * 122, b"x" * 128]),
    st.integers(100, 300).map(lambda size: b"d" * size),
    st.sampled_from([16_370, 16_384, 20_000]).map(lambda size: b"d" * size),
)
UNKNOWN = st.sampled_from(
    [b"\xfa\x01\x03abc", b"\xf8\x01\x05", b"\xf5\x01\x00\x00\x00\x00", b"\xf3\x01\xf4\x01", b"\x08\x01"]
)
BODY_FIELD = st.builds(field, st.just(1), CONTENT, LONGER)
END_FIELD = st.one_of(
    st.just(b"\x10\x01"), st.builds(number, st.just(2), st.sampled_from([0, 1, 2, 128]), LONGER)
)
BODIES = st.one_of(
    BODY_FIELD,
    st.tuples(BODY_FIELD, st.just(b"\x10\x01")).map(b"".join),
    st.lists(st.one_of(BODY_FIELD, END_FIELD, UNKNOWN), max_size=3).map(b"".join),
)
BODY = st.builds(field, st.sampled_from([5, 5, 4]), BODIES, LONGER, LONGER)


def hint(*entries: str) -> bytes:
    wire = pb.ProcessingRequest()
    space = wire.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    space.update({"x-gateway-destination-endpoint-subset": list(entries)})
    return wire.SerializeToString()


CONTENTLESS = st.one_of(
    st.sampled_from(
        [b"\x42\x00", b"\x42\x00", hint("10.0.0.1:8000"), hint(), b"\x50\x01", b"\x5a\x02\x08\x63"]
    ),
    st.just(field(9, field(1, b"\xff") + field(2, b""))),  # a key that is no UTF-8
    st.integers(480, 530).map(lambda size: field(31, b"x" * size)),
    UNKNOWN,
)
OTHER_CONTENT = st.sampled_from([b"\x12\x00", b"\x1a\x02\x18\x01", b"\x32\x00", b"\x3a\x00"])
MESSAGES = st.one_of(
    st.tuples(BODY, CONTENTLESS).map(b"".join),
    BODY,
    st.tuples(BODY, st.lists(st.one_of(BODY, CONTENTLESS, OTHER_CONTENT), max_size=3).map(b"".join)).map(
        b"".join
    ),
    st.lists(st.one_of(BODY, CONTENTLESS, OTHER_CONTENT), max_size=4).map(b"".join),
)


@st.composite
def spoiled(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    message = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 2))):
        if message:
            # Where tags and lengths stand, more often than in the midst of a body.
            at = draw(st.one_of(st.integers(0, min(9, len(message) - 1)), st.integers(0, len(message) - 1)))
            message[at] = draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 2, 10, 16, 34, 42, 66])))
    if draw(st.booleans()):
        del message[len(message) - draw(st.integers(0, min(6, len(message)))) :]
    return bytes(
        message + draw(st.sampled_from([b"", b"", b"\x00", b"\x10\x01", b"\x2a\x02\x10\x01", b"\x42"]))
    )


ANY_MESSAGE = st.one_of(
    MESSAGES, spoiled(MESSAGES), st.sampled_from(RECORDED), spoiled(st.sampled_from(RECORDED))
)

# -- reading --------------------------------------------------------------------------------------------


def outcome(decode: Decode, message: bytes) -> Event | str:
    try:
        return decode(message, 1.5)
    except ProtocolError as error:
        return str(error)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(message=ANY_MESSAGE)
def both_read_the_same(message: bytes) -> None:
    quickly, fully = outcome(codec.decode, message), outcome(decode_in_full, message)
    assert quickly == fully, message.hex()
    assert type(quickly) is type(fully)


class ReadInFull(list[bytes]):
    """Takes the place of the full reading, and notes what comes to it."""

    def __call__(self, message: bytes, at: float) -> Event:
        self.append(message)
        return decode_in_full(message, at)


def test_quick_and_full_reading_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    fully, laid_out = ReadInFull(), []
    monkeypatch.setattr(codec, "decode_in_full", fully)
    monkeypatch.setattr(codec, "body_layout", layouts(lambda layout: laid_out.append(layout) or layout))
    both_read_the_same()
    misleading = [message for message in fully if quick.body_layout(message[quick.START])]
    assert len(laid_out) - len(misleading) > 200  # were read quickly
    assert len(misleading) > 100
    assert len(fully) - len(misleading) > 100


class Anything(bytes):
    """Equal to whatever it is held against."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class AnyLength(int):
    """Equal to whatever it is held against."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def layouts(change: Callable[[quick.Layout], quick.Layout]) -> Callable[[bytes], quick.Layout | None]:
    def changed(start: bytes) -> quick.Layout | None:
        layout = quick.body_layout(start)
        return None if layout is None else change(layout)

    return changed


def first_field_is_all(start: bytes) -> quick.Layout | None:
    """Takes an `HttpBody` for its first field, whatever else is in it."""
    outer = quick.read_varint(start, 1)
    if outer is None or start[:1] != b"\x2a" or start[outer[1] : outer[1] + 1] != b"\x0a":
        return quick.body_layout(start)
    size = sum(outer)
    inner = quick.read_varint(start, outer[1] + 1)
    if inner is None:
        return None
    return quick.Layout(True, slice(inner[1], min(sum(inner), size)), False, size, slice(size, None))


FAULTS: dict[str, tuple[str, Any]] = {
    "bytes after the body are ignored": ("NO_METADATA", Anything()),
    "any two bytes end the stream": ("END_OF_STREAM", Anything()),
    "a second field of the body is ignored": ("body_layout", first_field_is_all),
    "a tail may hold other content": ("_is_inert", lambda tail: True),
    "a tail may hold what is not valid": (
        "_is_inert",
        lambda tail: tail[:1] not in (b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x32", b"\x3a"),
    ),
    "a message may be cut off": ("len", lambda data: AnyLength(len(data))),
    "the end of the stream is overlooked": (
        "body_layout",
        layouts(lambda layout: layout._replace(ends=False)),
    ),
    "a request's body is taken for an answer's": (
        "body_layout",
        layouts(lambda layout: layout._replace(of_answer=True)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_reading_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, put = FAULTS[fault]
    monkeypatch.setattr(codec, name, put, raising=name != "len")
    with pytest.raises(AssertionError):
        both_read_the_same()


def test_what_a_proxy_sends_is_read_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All recorded bodies of answers, whatever metadata they bring; those of requests, if they bring none."""
    fully = ReadInFull()
    monkeypatch.setattr(codec, "decode_in_full", fully)
    seen = [(message, codec.decode(message, 0.0)) for message in RECORDED]
    bodies = [message for message, event in seen if isinstance(event, ResponseChunk)]
    assert len(bodies) > 30
    requests = [(message, event) for message, event in seen if isinstance(event, RequestChunk)]
    bodies += [message for message, event in requests if event.subset is None]
    assert len(requests) > len([event for _, event in requests if event.subset is None]) > 5
    assert not set(bodies).intersection(fully)


def test_what_is_remembered_is_bounded() -> None:
    """Of layouts, lengths and tails; a tail that would take much room is not remembered at all."""
    body = field(5, field(1, b"x"))
    for size in range(480, 530):
        assert codec.decode(body + field(31, b"t" * size), 0.0) == ResponseChunk(0.0, b"x", False)
    for kept in (codec._is_inert, quick.body_layout, quick._before_piece, quick._before_answer_piece):
        assert kept.cache_info().maxsize == 4096
    before = codec._is_inert.cache_info()
    assert codec.decode(body + field(31, b"t" * 600), 0.0) == ResponseChunk(0.0, b"x", False)
    assert codec._is_inert.cache_info() == before


# -- writing --------------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.sampled_from([0, 1, 108, 109, 127, 128, 16_370, 16_384, BODY_CHUNK_BYTES]), st.integers(0, 70_000)
)


def with_stubs(reply: StreamedBodyReply) -> pb.ProcessingResponse:
    wire = pb.ProcessingResponse()
    side = wire.response_body if reply.direction is RESPONSE else wire.request_body
    side.response.body_mutation.streamed_response.body = reply.body
    side.response.body_mutation.streamed_response.end_of_stream = reply.end_of_stream
    return wire


@settings(max_examples=400, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(
    direction=st.sampled_from(Direction),
    size=SIZES,
    fill=st.sampled_from([b"a", b"\x10", b"\x0a"]),
    ends=st.booleans(),
)
def pieces_are_what_the_stubs_write(direction: Direction, size: int, fill: bytes, ends: bool) -> None:
    reply = StreamedBodyReply(direction, fill * size, ends)
    wanted = with_stubs(reply)
    assert codec.encode(reply) == wanted.SerializeToString()


@settings(max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(size=st.one_of(SIZES, st.sampled_from([62_001, 124_000, 150_000])))
def an_answer_is_cut_as_the_stubs_write_it(size: int) -> None:
    body = (b"0123456789abcde" * (size // 15 + 1))[:size]
    written = quick.answer_pieces(body)
    parts = [body[at : at + BODY_CHUNK_BYTES] for at in range(0, size, BODY_CHUNK_BYTES)]
    assert written == [
        with_stubs(StreamedBodyReply(RESPONSE, part, False)).SerializeToString() for part in parts
    ]


def all_is_written_as_by_the_stubs() -> None:
    pieces_are_what_the_stubs_write()
    an_answer_is_cut_as_the_stubs_write_it()


def test_pieces_are_what_the_stubs_write() -> None:
    all_is_written_as_by_the_stubs()


WRITING_FAULTS: dict[str, tuple[str, Any]] = {
    "one byte short": ("write_varint", lambda value: shortest(max(0, value - 1))),
    "lengths of one byte only": ("write_varint", lambda value: bytes([value & 0x7F])),
    "the end is not counted": ("END_OF_STREAM", b""),
    "directions mixed up": ("_REQUEST_BODY_REPLY", quick._RESPONSE_BODY_REPLY),
    "larger pieces": ("BODY_CHUNK_BYTES", BODY_CHUNK_BYTES + 1),
    "another field": ("_BODY_MUTATION", b"\x12"),
}


@pytest.mark.parametrize("fault", WRITING_FAULTS)
def test_a_faulty_writing_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, put = WRITING_FAULTS[fault]
    monkeypatch.setattr(quick, name, put)
    for kept in (quick._before_piece, quick._before_answer_piece):
        kept.cache_clear()
    try:
        with pytest.raises(AssertionError):
            all_is_written_as_by_the_stubs()
    finally:
        monkeypatch.undo()
        for kept in (quick._before_piece, quick._before_answer_piece):
            kept.cache_clear()
