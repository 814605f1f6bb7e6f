"""Header blocks into lists of fields (HPACK, RFC 7541).

Static and dynamic table are those of the `hpack` library. The loop over a block is our own, because requests
of one proxy look alike: a block of indexed fields that came before costs one look-up (17 us in the library),
and one with a new `traceparent` and `x-request-id` a quarter of the library's 43 us
(`benchmarks/rows/header_blocks.py`).
"""

from itertools import chain
from typing import Final

from hpack.exceptions import HPACKDecodingError, HPACKError, InvalidTableSizeError
from hpack.table import HeaderTable, table_entry_size

from epp.http2.codes import ErrorCode
from epp.http2.errors import ConnectionFault
from epp.http2.huffman import decode_huffman

Field = tuple[bytes, bytes]

FIELD_OVERHEAD_BYTES: Final = 32
SIZE_UPDATES: Final = 2
INTEGER_OCTETS: Final = 5
GREATEST_INTEGER: Final = (1 << 31) - 1

BLOCKS_KEPT: Final = 64
BLOCK_KEPT_BYTES: Final = 128

# Representations by their first byte (RFC 7541, 6): a mark, then an integer in the bits below it.
_INDEXED: Final = 0x80
_INDEXED_BITS: Final = 0x7F
_ADDED: Final = 0x40
_ADDED_BITS: Final = 0x3F
_SIZE_UPDATE: Final = 0x20
_SIZE_UPDATE_BITS: Final = 0x1F
_NOT_ADDED_BITS: Final = 0x0F
_HUFFMAN: Final = 0x80
_LENGTH_BITS: Final = 0x7F

_FIRST_DYNAMIC: Final = HeaderTable.STATIC_TABLE_LENGTH + 1
_LARGEST_STATIC_BYTES: Final = max(table_entry_size(*field) for field in HeaderTable.STATIC_TABLE)


class FieldsTooLarge(Exception):
    """The list of a request's fields is beyond the limit. The connection goes on: answer HTTP 431."""

    def __init__(self, list_bytes: int, most: int) -> None:
        super().__init__(f"the header fields take {list_bytes} bytes; at most {most} are accepted")


class FieldDecoder:
    """The header blocks of one connection, in the order in which they came."""

    __slots__ = ("_known", "_largest_bytes", "_list_bytes", "_table", "_table_bytes")

    def __init__(self, list_bytes: int, table_bytes: int = HeaderTable.DEFAULT_SIZE) -> None:
        """
        Args:
            list_bytes: the largest list, each field counted as name, value and 32 bytes (RFC 9113, 6.5.2).
            table_bytes: SETTINGS_HEADER_TABLE_SIZE as announced. At least the initial 4,096: a smaller one
                would bind the peer only from its acknowledgement on.
        """
        if table_bytes < HeaderTable.DEFAULT_SIZE:
            raise ValueError(f"table_bytes: {table_bytes} is less than {HeaderTable.DEFAULT_SIZE}")
        self._list_bytes = list_bytes
        self._table_bytes = table_bytes
        self._table = HeaderTable()
        self._largest_bytes = _LARGEST_STATIC_BYTES  # of all fields that this connection has had
        self._known: dict[bytes, tuple[Field, ...]] = {}

    def decode(self, block: bytes) -> tuple[Field, ...]:
        """The fields, in order. The same object for a block of indexed fields that comes again.

        The work and the memory are bounded by the length of the block, whatever it unfolds to.

        Raises:
            ConnectionFault: COMPRESSION_ERROR. Both tables are out of step: nothing can be decoded any more.
            FieldsTooLarge: after the whole block, so that the tables are still in step.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            fields, only_indexed = self._read(block)
        except HPACKError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        except IndexError:
            text = "a header block ends within a field"
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, text) from None
        if len(fields) * self._largest_bytes > self._list_bytes:  # or else there is no need to add them up
            list_bytes = FIELD_OVERHEAD_BYTES * len(fields) + sum(map(len, chain.from_iterable(fields)))
            if list_bytes > self._list_bytes:
                raise FieldsTooLarge(list_bytes, self._list_bytes)
        if only_indexed and len(block) <= BLOCK_KEPT_BYTES:
            if len(self._known) == BLOCKS_KEPT:
                self._known.clear()
            self._known[block] = fields
        return fields

    def _read(self, block: bytes) -> tuple[tuple[Field, ...], bool]:
        """The fields, and whether the block consists of indexed ones alone."""
        table = self._table
        dynamic = table.dynamic_entries
        fields: list[Field] = []
        at, end = self._resize(block), len(block)
        only_indexed = at == 0
        while at < end:
            first = block[at]
            at += 1
            if first & _INDEXED:
                index = first & _INDEXED_BITS
                if index == _INDEXED_BITS:
                    index, at = _long_integer(block, at, index)
                if _FIRST_DYNAMIC <= index < _FIRST_DYNAMIC + len(dynamic):
                    fields.append(dynamic[index - _FIRST_DYNAMIC])
                else:
                    fields.append(table.get_by_index(index))
                continue
            only_indexed = False
            if first & _ADDED:
                name, at = self._name(block, at, first & _ADDED_BITS, _ADDED_BITS)
                value, at = _string(block, at)
                table.add(name, value)
                self._known.clear()
            elif first & _SIZE_UPDATE:
                raise HPACKDecodingError(
                    f"a header block changes the table size after a field, or more than {SIZE_UPDATES} times"
                )
            else:
                name, at = self._name(block, at, first & _NOT_ADDED_BITS, _NOT_ADDED_BITS)
                value, at = _string(block, at)
            fields.append((name, value))
            field_bytes = len(name) + len(value) + FIELD_OVERHEAD_BYTES
            if field_bytes > self._largest_bytes:
                self._largest_bytes = field_bytes
        return tuple(fields), only_indexed

    def _resize(self, block: bytes) -> int:
        """Follow the size updates that `block` begins with (RFC 7541, 4.2, 6.3); where its fields begin."""
        at = updates = 0
        while updates < SIZE_UPDATES and at < len(block) and block[at] & 0xE0 == _SIZE_UPDATE:
            size = block[at] & _SIZE_UPDATE_BITS
            at += 1
            updates += 1
            if size == _SIZE_UPDATE_BITS:
                size, at = _long_integer(block, at, size)
            if size > self._table_bytes:
                raise InvalidTableSizeError(f"table size {size} is above the announced {self._table_bytes}")
            self._table.maxsize = size
            self._known.clear()
        return at

    def _name(self, block: bytes, at: int, index: int, bits: int) -> tuple[bytes, int]:
        """The name of a literal field, and where its value begins."""
        if index == 0:
            return _string(block, at)
        if index == bits:
            index, at = _long_integer(block, at, index)
        return self._table.get_by_index(index)[0], at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """RFC 7541, 5.2; and where it ends."""
    first = block[at]
    at += 1
    length = first & _LENGTH_BITS
    if length == _LENGTH_BITS:
        length, at = _long_integer(block, at, length)
    end = at + length
    if end > len(block):
        raise IndexError
    text = block[at:end]
    return decode_huffman(text) if first & _HUFFMAN else text, end


def _long_integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """An integer that filled its prefix (RFC 7541, 5.1), and where it ends."""
    number = prefix
    for octet in range(INTEGER_OCTETS):
        byte = block[at + octet]
        number += (byte & 0x7F) << 7 * octet
        if byte < 0x80:
            break
    else:
        raise HPACKDecodingError(f"a header block has an integer of more than {INTEGER_OCTETS} octets")
    if number > GREATEST_INTEGER:
        raise HPACKDecodingError(f"a header block has an integer above {GREATEST_INTEGER}")
    return number, at + octet + 1
