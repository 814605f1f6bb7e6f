"""Huffman-coded strings of HPACK (RFC 7541, 5.2), decoded a byte at a time.

The `hpack` library decodes them in steps of four bits, with flags to look at in each. Values that are new on
every stream (`traceparent`, `x-request-id`) make that a large part of what a request's headers cost, so this
is our own: one step a byte, a quarter of the time (`benchmarks/rows/header_blocks.py`). The code itself is
the library's.
"""

from functools import cache
from typing import Any, Final

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

# Where a string stands between two bytes: the bits of a code begun, after a one that keeps leading zeros.
_BETWEEN_CODES: Final = 0b1
_SYMBOLS: Final = {
    1 << length | code: symbol
    for symbol, (length, code) in enumerate(zip(REQUEST_CODES_LENGTH, REQUEST_CODES, strict=True))
}
_END_OF_STRING: Final = 256
_PADDING: Final = frozenset((1 << length + 1) - 1 for length in range(8))  # the first bits of EOS, all ones

_Row = list[Any]
"""For each next byte what it completes and the row after it (None until it is met), then the two below."""
_BEGUN: Final = 256
_MAY_END: Final = 257


@cache
def _row(begun: int) -> _Row:
    """The one row of this beginning. The code has 256 of them; none holds anything of a peer."""
    return [*[None] * 256, begun, begun in _PADDING]


_START: Final = _row(_BETWEEN_CODES)


def decode_huffman(coded: bytes) -> bytes:
    """The string.

    Raises:
        HPACKDecodingError: EOS within it; padding of more than seven bits, or not all ones.
    """
    row = _START
    pieces: list[bytes] = []
    for byte in coded:
        try:
            piece, row = row[byte]
        except TypeError:  # None, so far
            step = row[byte] = _step(row[_BEGUN], byte)
            piece, row = step
        pieces.append(piece)
    if not row[_MAY_END]:
        raise HPACKDecodingError("a Huffman-coded string ends in padding that is too long, or not all ones")
    return b"".join(pieces)


def _step(begun: int, byte: int) -> tuple[bytes, _Row]:
    completed = bytearray()
    for shift in range(7, -1, -1):
        begun = begun << 1 | byte >> shift & 1
        symbol = _SYMBOLS.get(begun)
        if symbol == _END_OF_STRING:
            raise HPACKDecodingError("a Huffman-coded string contains the end-of-string symbol")
        if symbol is not None:
            completed.append(symbol)
            begun = _BETWEEN_CODES
    return bytes(completed), _row(begun)
