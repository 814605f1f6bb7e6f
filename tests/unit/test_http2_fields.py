"""Header blocks: the examples of RFC 7541, everything it forbids, and blocks that are remembered."""

import hpack
import pytest
from hpack.hpack import encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from epp.http2.codes import ErrorCode
from epp.http2.errors import ConnectionFault
from epp.http2.fields import BLOCK_KEPT_BYTES, BLOCKS_KEPT, Field, FieldDecoder, FieldsTooLarge
from epp.http2.huffman import decode_huffman

LIST_BYTES = 32 * 1024
GET = (b":method", b"GET")
huffman = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode


def decoder(list_bytes: int = LIST_BYTES, table_bytes: int = 4096) -> FieldDecoder:
    return FieldDecoder(list_bytes, table_bytes)


def table(reader: FieldDecoder) -> list[Field]:
    return list(reader._table.dynamic_entries)


def literal(name: bytes, value: bytes, mark: int = 0x40) -> bytes:
    return bytes([mark]) + bytes(encode_integer(len(name), 7)) + name + string(value)


def string(value: bytes) -> bytes:
    return bytes(encode_integer(len(value), 7)) + value


# RFC 7541, C.3 and C.4: three requests on one connection.
REQUESTS = (
    (
        "828684410f7777772e6578616d706c652e636f6d",
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        [GET, (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")],
    ),
    (
        "828684be58086e6f2d6361636865",
        "828684be5886a8eb10649cbf",
        [
            *(GET, (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")),
            (b"cache-control", b"no-cache"),
        ],
    ),
    (
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        [
            *(GET, (b":scheme", b"https"), (b":path", b"/index.html"), (b":authority", b"www.example.com")),
            (b"custom-key", b"custom-value"),
        ],
    ),
)


@pytest.mark.parametrize("form", [0, 1], ids=["plain", "huffman"])
def test_requests_of_the_rfc(form: int) -> None:
    reader = decoder()
    for request in REQUESTS:
        assert reader.decode(bytes.fromhex(str(request[form]))) == tuple(request[2])
    assert table(reader) == [
        (b"custom-key", b"custom-value"),
        (b"cache-control", b"no-cache"),
        (b":authority", b"www.example.com"),
    ]


@pytest.mark.parametrize(
    ("block", "field", "added"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", (b"custom-key", b"custom-header"), True),
        ("040c2f73616d706c652f70617468", (b":path", b"/sample/path"), False),
        ("100870617373776f726406736563726574", (b"password", b"secret"), False),
        ("0f2200", (b"proxy-authorization", b""), False),  # an index that fills its prefix: 15 + 34
        ("82", GET, False),
    ],
)
def test_representations(block: str, field: Field, added: bool) -> None:
    reader = decoder()
    assert reader.decode(bytes.fromhex(block)) == (field,)
    assert table(reader) == [field] * added


def test_empty_block_has_no_fields() -> None:
    assert decoder().decode(b"") == ()


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (b"\x80", "index 0"),
        (b"\xbe", "index 62"),
        (b"\xff\x80\x01", "index 255"),
        (b"\x7f\x00\x00", "index 63"),
        (b"\x0f\x2f\x00", "index 62"),
        (b"\x40", "ends within"),
        (b"\x40\x01", "ends within"),
        (b"\x40\x01a", "ends within"),
        (b"\x40\x01a\x05val", "ends within"),
        (b"\x40\x05nam", "ends within"),
        (b"\x00\x01a\x83\xff", "ends within"),
        (b"\xff", "ends within"),
        (b"\xff\x80", "ends within"),
        (b"\x3f", "ends within"),
        (b"\x00\x7f\x80\xff\xff\xff\x07", "ends within"),
        (b"\x00\x7f\x81\xff\xff\xff\x07", "above 2147483647"),
        (b"\xff\xff\xff\xff\xff\x7f", "above 2147483647"),
        (b"\xff\x80\x80\x80\x80\x80\x00", "more than 5 octets"),
        (b"\xff" + b"\x80" * 50, "more than 5 octets"),
        (b"\x3f\xe2\x1f", "table size 4097 is above the announced 4096"),
        (b"\x82\x20", "after a field"),
        (b"\x82\x3f\xe1\x1f", "after a field"),
        (b"\x20\x20\x20", "more than 2 times"),
        (b"\x20\x3f\x21\x3f\xe1\x1f\x82", "more than 2 times"),
        (b"\x00\x01a\x81\x3e", "padding"),
    ],
)
def test_what_the_rfc_forbids_ends_the_connection(block: bytes, text: str) -> None:
    with pytest.raises(ConnectionFault, match=text) as caught:
        decoder().decode(block)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR
    assert caught.value.__suppress_context__


def test_integers_may_be_longer_than_they_need_to_be() -> None:
    assert decoder().decode(b"\x0f\x80\x80\x80\x80\x00\x00") == ((b"accept-charset", b""),)


def test_table_size_updates() -> None:
    reader = decoder(table_bytes=8192)
    reader.decode(literal(b"a", b"1") + literal(b"b", b"2"))
    assert reader.decode(b"\x3f\x03\xbe") == ((b"b", b"2"),)  # 34 bytes: room for one
    assert table(reader) == [(b"b", b"2")]
    assert reader.decode(b"\x20\x3f\xe1\x3f\x82") == (GET,)  # 0, then 8192
    assert table(reader) == []
    assert reader._table.maxsize == 8192


def test_table_is_never_smaller_than_what_the_peer_begins_with() -> None:
    with pytest.raises(ValueError, match="table_bytes: 4095"):
        decoder(table_bytes=4095)


def test_entry_larger_than_the_table_empties_it() -> None:
    reader = decoder()
    reader.decode(literal(b"a", b"1"))
    assert reader.decode(literal(b"b", b"v" * 4096)) == ((b"b", b"v" * 4096),)
    assert table(reader) == []


def test_name_of_an_entry_that_its_own_insertion_drops() -> None:
    reader = decoder()
    reader.decode(literal(b"name", b"v" * 4000))
    assert reader.decode(b"\x7e" + string(b"w" * 4000)) == ((b"name", b"w" * 4000),)
    assert table(reader) == [(b"name", b"w" * 4000)]


class TestTooLarge:
    def test_limit_counts_names_values_and_32_each(self) -> None:
        block = literal(b"name", b"v" * 60) + b"\x82"
        size = 32 + 64 + 32 + 10
        assert len(decoder(size).decode(block)) == 2
        with pytest.raises(FieldsTooLarge, match=f"take {size} bytes; at most {size - 1}"):
            decoder(size - 1).decode(block)

    @pytest.mark.parametrize("form", [b"\xbe" * 9, b"\x82" * 100])
    def test_indexed_fields_count_each_time(self, form: bytes) -> None:
        reader = decoder(4000)
        reader.decode(literal(b"name", b"v" * 500))
        with pytest.raises(FieldsTooLarge):
            reader.decode(form)

    def test_tables_stay_in_step(self) -> None:
        encoder, oracle, reader = hpack.Encoder(), hpack.Decoder(), decoder(300)
        large = [(b"name-%d" % n, b"value") for n in range(20)]
        block = encoder.encode(large)
        oracle.decode(block, raw=True)
        with pytest.raises(FieldsTooLarge):
            reader.decode(block)
        assert table(reader) == list(oracle.header_table.dynamic_entries)
        block = encoder.encode(large[15:])
        assert len(block) == 5
        assert reader.decode(block) == tuple(large[15:])

    def test_fault_behind_the_limit_is_still_a_fault(self) -> None:
        with pytest.raises(ConnectionFault):
            decoder(100).decode(b"\x82" * 50 + b"\x80")

    def test_it_is_told_again_each_time(self) -> None:
        reader = decoder(100)
        for _ in range(3):
            with pytest.raises(FieldsTooLarge):
                reader.decode(b"\x82" * 10)


class TestRemembered:
    def test_block_that_comes_again_is_not_read_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = decoder()
        reader.decode(literal(b"a", b"1"))
        first = reader.decode(b"\x82\xbe")
        monkeypatch.setattr(FieldDecoder, "_read", None)
        assert reader.decode(b"\x82\xbe") is first

    def test_same_bytes_mean_something_else_after_an_insertion(self) -> None:
        reader = decoder()
        reader.decode(literal(b"a", b"1"))
        assert reader.decode(b"\xbe") == ((b"a", b"1"),)
        reader.decode(literal(b"b", b"2"))
        assert reader.decode(b"\xbe") == ((b"b", b"2"),)

    def test_and_nothing_at_all_after_a_smaller_table(self) -> None:
        reader = decoder()
        reader.decode(literal(b"a", b"1"))
        assert reader.decode(b"\xbe") == ((b"a", b"1"),)
        assert reader.decode(b"\x20") == ()
        with pytest.raises(ConnectionFault, match="index 62"):
            reader.decode(b"\xbe")

    def test_also_after_a_block_that_was_too_large(self) -> None:
        reader = decoder(200)
        reader.decode(literal(b"a", b"1"))
        assert reader.decode(b"\xbe") == ((b"a", b"1"),)
        with pytest.raises(FieldsTooLarge):
            reader.decode(b"".join(literal(b"b", b"%d" % n) for n in range(6)))
        assert reader.decode(b"\xbe") == ((b"b", b"5"),)

    @pytest.mark.parametrize("block", [b"\x82\x01\x00", b"\x82" * (BLOCK_KEPT_BYTES + 1)])
    def test_other_blocks_are_not_kept(self, block: bytes) -> None:
        reader = decoder()
        assert reader.decode(block) is not reader.decode(block)
        assert reader._known == {}

    def test_number_is_bounded(self) -> None:
        reader = decoder()
        for n in range(BLOCKS_KEPT * 3):
            block = bytes([0x81 + n % 61, 0x81 + n // 61])
            reader.decode(block)
            assert len(reader._known) <= BLOCKS_KEPT
            assert reader.decode(block) is reader._known[block]


class TestHuffman:
    def test_every_byte_alone_and_all_together(self) -> None:
        for byte in range(256):
            assert decode_huffman(huffman(bytes([byte]))) == bytes([byte])
        every = bytes(range(256))
        assert decode_huffman(huffman(every + every[::-1])) == every + every[::-1]

    @pytest.mark.parametrize("length", range(12))
    def test_padding(self, length: int) -> None:
        """0 is five zeros: what follows is padding of three bits, and then of eight more each."""
        for byte in (b"0" * length, b"a" * length, b"&" * length):
            coded = huffman(byte)
            assert decode_huffman(coded) == byte
            with pytest.raises(hpack.HPACKDecodingError, match="padding"):
                decode_huffman(coded + b"\xff")

    @pytest.mark.parametrize(
        "coded",
        [
            *(b"\xff", b"\xff\xff", b"\xff\xff\xff"),  # nothing but padding, and too much of it
            *(b"\x06", b"\x05", b"\x03", b"\x00"),  # 0, then three bits that are not all ones
            huffman(b"\n")[:3],  # cut off within a code
        ],
    )
    def test_bad_padding(self, coded: bytes) -> None:
        with pytest.raises(hpack.HPACKDecodingError, match="padding"):
            decode_huffman(coded)

    @pytest.mark.parametrize("lead", [0, 2, 3, 8])
    def test_end_of_string_within(self, lead: int) -> None:
        """EOS is thirty ones."""
        bits = "00000" * lead + "1" * 30
        bits += "1" * (-len(bits) % 8)
        with pytest.raises(hpack.HPACKDecodingError, match="end-of-string"):
            decode_huffman(int(bits, 2).to_bytes(len(bits) // 8, "big"))

    def test_three_zero_bits_are_no_padding(self) -> None:
        assert decode_huffman(b"\x07") == b"0"
