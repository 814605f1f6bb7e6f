"""Header blocks against the `hpack` library, requests against the rules that the `h2` library keeps.

Blocks come from the library's encoder, from a writer that makes use of everything RFC 7541 allows, and from
chance. Planted faults show that each comparison sees something.
"""

import re
from collections.abc import Callable, Sequence
from random import Random

import hpack
import pytest
from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers
from hpack.hpack import decode_integer, encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman as library_huffman
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.http2 import fields as fields_module
from epp.http2 import heads as heads_module
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.fields import SIZE_UPDATES, Field, FieldDecoder
from epp.http2.heads import HeadReader
from epp.http2.huffman import decode_huffman

UNBOUNDED = 1 << 40
TABLE_BYTES = 8192
FIRST_DYNAMIC = 62

huffman = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode


# -- two decoders side by side ------------------------------------------------------------------------


def size_updates(block: bytes) -> int:
    """How many table size updates a block begins with."""
    count = 0
    while block and block[0] & 0xE0 == 0x20:
        block = block[decode_integer(block, 5)[1] :]
        count += 1
    return count


def agree(blocks: Sequence[bytes], decoder: FieldDecoder) -> None:
    """The same fields and the same table after each block, or both refuse it."""
    oracle = hpack.Decoder(max_header_list_size=UNBOUNDED)
    oracle.max_allowed_table_size = TABLE_BYTES
    for block in blocks:
        try:
            expected = tuple(tuple(field) for field in oracle.decode(block, raw=True))
        except hpack.HPACKError:
            with pytest.raises(ConnectionFault):
                decoder.decode(block)
            return
        if size_updates(block) > SIZE_UPDATES:  # on purpose: RFC 7541, 4.2 has no use for a third
            with pytest.raises(ConnectionFault, match="changes the table size"):
                decoder.decode(block)
            return
        for _ in range(1 if changes_table(block) else 2):  # the second time it is remembered
            assert decoder.decode(block) == expected
        assert list(decoder._table.dynamic_entries) == list(oracle.header_table.dynamic_entries)
        assert decoder._table.maxsize == oracle.header_table_size


def changes_table(block: bytes) -> bool:
    """Whether any byte of it could do so: all but blocks of indexed fields alone may."""
    return not all(byte & 0x80 for byte in block)


def new_decoder() -> FieldDecoder:
    return FieldDecoder(UNBOUNDED, TABLE_BYTES)


NAMES = (b":path", b"te", b"x-a", b"traceparent", b"cookie", b"", b"Any\x00")
VALUES = (b"", b"/", b"trailers", b"0af7651916cd43dd8448eb211c80319c", b"v" * 126, b"\x00" * 40, b"w" * 3000)


def name(draw: Random) -> bytes:
    return draw.choice(NAMES) if draw.random() < 0.8 else draw.randbytes(draw.randint(0, 6))


def value(draw: Random) -> bytes:
    return draw.choice(VALUES) if draw.random() < 0.6 else draw.randbytes(draw.randint(0, 140))


# -- blocks of the library's encoder ------------------------------------------------------------------


def encoded(draw: Random) -> list[bytes]:
    """Each list of fields twice: the second time most of it is indexed."""
    encoder = hpack.Encoder()
    blocks = []
    for _ in range(draw.randint(1, 8)):
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            size = draw.choice((0, 40, 100, 1000, 4096, TABLE_BYTES))
            if size != encoder.header_table_size:  # or else the encoder forgets the one before
                encoder.header_table_size = size
        fields = [(name(draw), value(draw), draw.random() < 0.2) for _ in range(draw.randint(0, 8))]
        with_huffman = draw.random() < 0.7
        blocks.append(encoder.encode(fields, huffman=with_huffman))
        blocks.append(encoder.encode(fields, huffman=with_huffman))
    return blocks


@pytest.mark.parametrize("batch", range(4))
def test_blocks_of_an_encoder(batch: int) -> None:
    for seed in range(60):
        agree(encoded(Random(f"{batch} {seed}")), new_decoder())


# -- blocks of everything that is allowed -------------------------------------------------------------


def integer(number: int, bits: int, mark: int, draw: Random) -> bytes:
    """At times with octets of value zero, behind a number that fills its prefix."""
    octets = bytearray(encode_integer(number, bits))
    octets[0] |= mark
    idle_octets = draw.choice((0, 0, 0, 0, 1, 2, 3, 4))
    if len(octets) > 1 and idle_octets and len(octets) + idle_octets <= 6 + (draw.random() < 0.1):
        octets[-1] |= 0x80
        octets += b"\x80" * (idle_octets - 1) + b"\x00"
    return bytes(octets)


def string(text: bytes, draw: Random) -> bytes:
    if draw.random() < 0.5:
        return integer(len(text), 7, 0, draw) + text
    coded = huffman(text)
    return integer(len(coded), 7, 0x80, draw) + coded


def index(entries: int, draw: Random) -> int:
    """One that is in a table, mostly."""
    if draw.random() < 0.02:
        return draw.choice((0, FIRST_DYNAMIC + entries, 200, 5000))
    if entries and draw.random() < 0.7:
        return FIRST_DYNAMIC + draw.randrange(min(entries, draw.choice((2, 200))))
    return draw.randrange(1, FIRST_DYNAMIC)


def representation(entries: int, draw: Random) -> bytes:
    if draw.random() < 0.5:
        return integer(index(entries, draw), 7, 0x80, draw)
    mark, bits = draw.choice(((0x40, 6), (0x40, 6), (0x00, 4), (0x10, 4)))
    if draw.random() < 0.5:
        return bytes([mark]) + string(name(draw), draw) + string(value(draw), draw)
    return integer(index(entries, draw), bits, mark, draw) + string(value(draw), draw)


def size_update(draw: Random) -> bytes:
    size = TABLE_BYTES + 1 if draw.random() < 0.02 else draw.choice((0, 31, 100, 4096, TABLE_BYTES))
    return integer(size, 5, 0x20, draw)


def written(draw: Random) -> list[bytes]:
    """Blocks that are right, but for a few."""
    state = hpack.Decoder(max_header_list_size=UNBOUNDED)
    state.max_allowed_table_size = TABLE_BYTES
    blocks = []
    for _ in range(draw.randint(1, 10)):
        block = b"".join(size_update(draw) for _ in range(draw.choice((0,) * 12 + (1, 1, 2, 3))))
        first = state.header_table
        for _ in range(draw.randint(0, 4)):
            block += representation(len(first.dynamic_entries), draw)
        blocks += [block, bytes([0x80 | FIRST_DYNAMIC])] if first.dynamic_entries else [block]
        try:
            state.decode(block, raw=True)
        except hpack.HPACKError:
            break
    return blocks


@pytest.mark.parametrize("batch", range(4))
def test_blocks_of_all_representations(batch: int) -> None:
    for seed in range(150):
        agree(written(Random(f"{batch} {seed}")), new_decoder())


@pytest.mark.parametrize("batch", range(4))
def test_blocks_broken_somewhere(batch: int) -> None:
    for seed in range(150):
        draw = Random(f"{batch} {seed}")
        blocks = written(draw)
        at = draw.randrange(len(blocks))
        agree([*blocks[:at], broken(blocks[at], draw), *blocks[at:]], new_decoder())


def broken(block: bytes, draw: Random) -> bytes:
    at = draw.randint(0, len(block))
    match draw.randint(0, 3):
        case 0:
            return block[:at]
        case 1:
            return block[:at] + block[at + 1 :]
        case 2:
            return block[:at] + draw.randbytes(1) + block[at + 1 :]
        case _:
            return block[:at] + draw.randbytes(draw.randint(1, 3)) + block[at:]


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=300)
def test_blocks_of_chance(blocks: list[bytes]) -> None:
    agree(blocks, new_decoder())


def sees(check: Callable[[Random], None]) -> None:
    """The check fails for some example."""
    for seed in range(1000):
        try:
            check(Random(seed))
        except (AssertionError, pytest.fail.Exception, ConnectionFault, StreamFault):
            return
    raise AssertionError("a planted fault was not seen")


class Kept(dict[bytes, tuple[Field, ...]]):
    def clear(self) -> None:
        """Keeps what it has."""


class Stubborn(FieldDecoder):
    """Remembers blocks beyond a change of the table."""

    def __init__(self, list_bytes: int, table_bytes: int) -> None:
        super().__init__(list_bytes, table_bytes)
        self._known = Kept()


class Rigid(FieldDecoder):
    """Reads size updates and does not follow them."""

    def _resize(self, block: bytes) -> int:
        size = self._table.maxsize
        at = super()._resize(block)
        self._table.maxsize = size
        return at


@pytest.mark.parametrize("decoder", [Stubborn, Rigid])
def test_comparison_sees_a_decoder_that_is_wrong(decoder: type[FieldDecoder]) -> None:
    sees(lambda draw: agree(written(draw), decoder(UNBOUNDED, TABLE_BYTES)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_FIRST_DYNAMIC", FIRST_DYNAMIC - 1),
        ("_NOT_ADDED_BITS", 0x1F),
        ("_ADDED", 0x50),
        ("INTEGER_OCTETS", 4),
        ("SIZE_UPDATES", SIZE_UPDATES + 1),
    ],
)
def test_comparison_sees_a_number_that_is_wrong(
    name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields_module, name, value)
    sees(lambda draw: agree(written(draw), new_decoder()))


# -- Huffman ------------------------------------------------------------------------------------------


def coded_string(draw: Random) -> bytes:
    """Right, or pieces that may or may not be so together."""
    pieces = [huffman(draw.randbytes(draw.randint(0, 6))) for _ in range(draw.randint(0, 3))]
    pieces += draw.choices((b"\xff", b"\xff" * 4, b"\x00", b"\x07"), k=draw.choice((0, 0, 1, 2)))
    if draw.random() < 0.3:
        draw.shuffle(pieces)
    return b"".join(pieces)


def same_string(coded: bytes, decode: Callable[[bytes], bytes] = decode_huffman) -> None:
    try:
        expected = library_huffman(coded)
    except hpack.HPACKError:
        with pytest.raises(hpack.HPACKError):
            decode(coded)
    else:
        assert decode(coded) == expected


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_huffman_takes_back_what_was_coded(text: bytes) -> None:
    assert decode_huffman(huffman(text)) == text


def test_huffman_refuses_what_the_library_refuses() -> None:
    for seed in range(2000):
        same_string(coded_string(Random(seed)))


def any_padding(coded: bytes) -> bytes:
    for length in range(len(coded), 0, -1):
        try:
            return decode_huffman(coded[:length])
        except hpack.HPACKError:
            continue
    return b""


def long_padding(coded: bytes) -> bytes:
    return decode_huffman(coded[:-1] if coded.endswith(b"\xff") else coded)


def without_last(coded: bytes) -> bytes:
    return decode_huffman(coded)[:-1]


@pytest.mark.parametrize("decode", [any_padding, long_padding, without_last])
def test_comparison_sees_strings_that_are_wrong(decode: Callable[[bytes], bytes]) -> None:
    sees(lambda draw: same_string(coded_string(draw), decode))


# -- requests -----------------------------------------------------------------------------------------

RIGHT: tuple[Field, ...] = (
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B"), (b":authority", b"picker:9002")),
    *((b"content-type", b"application/grpc"), (b"te", b"trailers"), (b"x-request-id", b"7")),
)
ODD_NAMES = (
    *(b":method", b":scheme", b":path", b":authority", b":status", b":protocol", b":x", b"", b"X", b"x-\xe9"),
    *(b"host", b"te", b"connection", b"keep-alive", b"upgrade", b"content-length", b"content-type", b"x-a"),
    *(b"transfer-encoding", b"proxy-connection", b"x y", b"x:y", b"x(", b"x\x00", b"grpc-encoding"),
)
ODD_VALUES = (
    *(b"POST", b"CONNECT", b"OPTIONS", b"http", b"/a/B", b"*", b"", b"picker:9002", b"other", b"u@picker"),
    *(b"trailers", b"gzip", b"1", b"2", b"a b", b" a", b"a\t", b"a\x00", b"a\r", b"a\n", b"a\x01", b"\xff"),
)


def odd(draw: Random) -> Field:
    return draw.choice(ODD_NAMES), draw.choice(ODD_VALUES)


def request(draw: Random) -> list[Field]:
    """A right request with up to three changes: one field more, one less, one moved, one value replaced."""
    fields = list(RIGHT)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(fields))
        match draw.randint(0, 4):
            case 0:
                del fields[at]
            case 1:
                fields.insert(at, fields.pop(draw.randrange(len(fields))))
            case 2:
                fields[at] = (fields[at][0], draw.choice(ODD_VALUES))
            case _:
                fields.insert(draw.choice((0, len(fields), len(fields))), odd(draw))
    return fields


def library_takes(fields: list[Field], *, trailers: bool = False) -> bool:
    flags = HeaderValidationFlags(
        is_client=False, is_trailer=trailers, is_response_header=False, is_push_promise=False
    )
    try:
        list(validate_headers(fields, flags))
    except ProtocolError:
        return False
    return True


TCHAR = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
ONCE = frozenset((b"content-type", b"grpc-encoding", b"host"))


def stricter(fields: list[Field], *, trailers: bool = False) -> bool:
    """What is refused on purpose, though the library takes it."""
    given = dict(fields)
    names = [name for name, _ in fields]
    return (
        any(set(name.removeprefix(b":")) - TCHAR for name in names)
        or any(set(value) & set(b"\x01\x7f") for _, value in fields)
        or any(name == b"content-length" and not value.isdigit() for name, value in fields)
        or any(set(value) & set(b"@ /\xff") for name, value in fields if name in (b":authority", b"host"))
        or (not trailers and stricter_request(given, fields))
    )


def stricter_request(given: dict[bytes, bytes], fields: list[Field]) -> bool:
    names = [name for name, _ in fields]
    path, method = given.get(b":path"), given[b":method"]
    return (
        b":protocol" in names
        or len({value for name, value in fields if name == b"content-length"}) > 1
        or any(names.count(name) > 1 for name in ONCE)
        or (path is not None and not (path == b"*" and method == b"OPTIONS") and not is_path(path))
        or (method == b"CONNECT" and b":authority" not in names)
        or not method
        or bool(set(method.lower()) - TCHAR)
        or (method != b"CONNECT" and re.fullmatch(rb"[A-Za-z]+", given[b":scheme"]) is None)
    )


def is_path(path: bytes) -> bool:
    return path.startswith(b"/") and not set(path) & set(b" \t#\xff")


def takes(read: Callable[[bytes], object], block: bytes) -> bool:
    try:
        read(block)
    except StreamFault:
        return False
    return True


def judged_right(fields: list[Field], shared: tuple[hpack.Encoder, HeadReader]) -> None:
    """As the library judges, but for what is stricter; and again the same where much is remembered."""
    block = hpack.Encoder().encode(fields)
    verdict = takes(HeadReader(FieldDecoder(UNBOUNDED)).request, block)
    library = library_takes(fields)
    assert verdict == (library and not stricter(fields))
    encoder, reader = shared
    for _ in range(2):
        assert takes(reader.request, encoder.encode(fields)) == verdict
    if verdict:
        head = reader.request(encoder.encode(fields))
        given = dict(fields)
        assert head.method.encode() == given[b":method"]
        assert head.path.encode() == given.get(b":path", b"")
        assert head.authority.encode("latin-1") == given.get(b":authority", given.get(b"host"))
        assert head.content_type.encode("latin-1") == given.get(b"content-type", b"")


def trailers_judged_right(fields: list[Field], shared: tuple[hpack.Encoder, HeadReader]) -> None:
    encoder, reader = shared
    expected = library_takes(fields, trailers=True) and not stricter(fields, trailers=True)
    for _ in range(2):
        assert takes(reader.trailers, encoder.encode(fields)) == expected


def long_lived() -> tuple[hpack.Encoder, HeadReader]:
    return hpack.Encoder(), HeadReader(FieldDecoder(UNBOUNDED))


def test_requests() -> None:
    shared = long_lived()
    for seed in range(4000):
        judged_right(request(Random(seed)), shared)


def test_trailers() -> None:
    shared = long_lived()
    for seed in range(1000):
        draw = Random(seed)
        trailers_judged_right([odd(draw) for _ in range(draw.randint(0, 3))], shared)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_CONNECTION_SPECIFIC", frozenset()),
        ("_VALUE", re.compile(rb"[^\x00\r\n]*")),
        ("_NAME", re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")),
        ("_by_name", dict),
        ("_check_target", lambda method, given: None),
        ("_MATTERING", heads_module._MATTERING - {b"host"}),
    ],
)
def test_comparison_sees_a_reader_that_is_wrong(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_module, name, value)
    shared = long_lived()
    sees(lambda draw: judged_right(request(draw), shared))
