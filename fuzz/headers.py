"""Header blocks: against the decoder of the `hpack` library, and against a reader that remembers nothing."""

from collections.abc import Callable
from typing import Any

from hpack import Decoder
from hpack.exceptions import HPACKError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from epp.http2.errors import CallFault, ConnectionFault, HttpFault, StreamFault
from epp.http2.fields import Field, FieldDecoder, FieldsTooLarge
from epp.http2.heads import HeadReader, check_grpc
from fuzz.draw import Draw

LIST_BYTES = 2000
TOLD_CHARACTERS = 500
NO_LIMIT = 1 << 30
# What the library takes, and we do not.
STRICTER = ("an integer of more than", "an integer above", "changes the table size")

HUFFMAN = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
INDEXES = (2, 3, 4, 6, 7, 16, 0, 1, 28, 31, 38, 58, 61, *range(62, 68), 127)
FIELDS = (
    (b":method", b"POST"),
    (b":method", b"GET"),
    (b":method", b"CONNECT"),
    (b":scheme", b"http"),
    (b":path", b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    (b":path", b"*"),
    (b":path", b""),
    (b":authority", b"host:80"),
    (b"host", b"host:80"),
    (b"te", b"trailers"),
    (b"te", b"gzip"),
    (b"content-type", b"application/grpc"),
    (b"content-type", b"text/html"),
    (b"content-length", b"17"),
    (b"content-length", b"+17"),
    (b"grpc-encoding", b"gzip"),
    (b"grpc-encoding", b"br"),
    (b"grpc-timeout", b"20S"),
    (b"grpc-timeout", b"123456789S"),
    (b"x-request-id", b"3bc5f0ac-1b9f-4a4f"),
    (b"connection", b"close"),
    (b"Upper", b"case"),
    (b":unknown", b"x"),
    (b"blank", b" x "),
    (b"long", b"y" * 700),
    (b"", b"x"),
)

MakeDecoder = Callable[[int], FieldDecoder]
MakeReader = Callable[[Any], HeadReader]


class Given:
    """In place of a decoder: these fields, whatever the block."""

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self._fields = fields

    def decode(self, block: bytes) -> tuple[Field, ...]:
        return self._fields


def headers(data: bytes, decoder: MakeDecoder = FieldDecoder, reader: MakeReader = HeadReader) -> None:
    """Blocks of one connection, each of fields, or of raw bytes with their number before them."""
    draw = Draw(data)
    ours, library = decoder(LIST_BYTES), Decoder(max_header_list_size=NO_LIMIT)
    remembering = reader(decoder(LIST_BYTES))
    while draw.left:
        as_request = draw.below(4) > 0
        if draw.below(4) == 0:
            block = draw.block()
        else:
            block = b"".join(_representation(draw) for _ in range(draw.below(16)))
        fields: tuple[Field, ...] | None = None
        try:
            fields = ours.decode(block)
        except FieldsTooLarge:
            assert _listed(library, block) > LIST_BYTES
        except ConnectionFault as fault:
            _refused_by_library_too(library, block, fault)
            return
        else:
            assert list(fields) == [tuple(field) for field in library.decode(block, raw=True)]
            assert sum(32 + len(name) + len(value) for name, value in fields) <= LIST_BYTES
        told = _judge(remembering, block, as_request)
        assert len(told) < TOLD_CHARACTERS or told.startswith("RequestHead"), "a text too long to be told"
        if fields is None:
            assert told.startswith("FieldsTooLarge")
        else:
            assert told == _judge(reader(Given(fields)), block, as_request)


def _representation(draw: Draw) -> bytes:
    """One field, or change of the table's size, more often right than not (RFC 7541, 6)."""
    kind = draw.below(8)
    if kind < 2:
        return bytes((0x80 | draw.pick(INDEXES),))
    if kind == 7:
        return draw.pick((b"\x20", b"\x3f\x01", b"\x3f\xe1\x1f", b"\x3f\xe2\x1f", b"", draw.take(3)))
    name, value = draw.pick(FIELDS)
    if draw.below(8) == 0:
        name, value = name + draw.take(1), draw.block()
    return draw.pick((b"\x40", b"\x40", b"\x00", b"\x10")) + _string(name, draw) + _string(value, draw)


def _string(text: bytes, draw: Draw) -> bytes:
    text, mark = (HUFFMAN.encode(text), 0x80) if draw.flag() else (text, 0)
    if len(text) < 0x7F:
        return bytes((mark | len(text),)) + text
    rest = len(text) - 0x7F
    return bytes((mark | 0x7F, rest & 0x7F | 0x80, rest >> 7)) + text


def _listed(library: Decoder, block: bytes) -> int:
    return sum(32 + len(name) + len(value) for name, value in library.decode(block, raw=True))


def _refused_by_library_too(library: Decoder, block: bytes, fault: ConnectionFault) -> None:
    try:
        library.decode(block, raw=True)
    except (HPACKError, IndexError):
        return
    assert any(text in fault.text for text in STRICTER), f"{fault}, but it is in order"


def _judge(reader: HeadReader, block: bytes, as_request: bool) -> str:
    """What is said of it, as text."""
    try:
        if not as_request:
            reader.trailers(block)
            return "trailers"
        head = reader.request(block)
        check_grpc(head)
    except (StreamFault, CallFault, HttpFault, FieldsTooLarge) as fault:
        return f"{type(fault).__name__} {fault}"
    return repr(head)
