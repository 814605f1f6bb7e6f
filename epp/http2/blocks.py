"""Header blocks that a gRPC server writes, as bytes.

Static table entries and literals without indexing, not Huffman coded (RFC 7541): they depend on no earlier
block and on no setting of the peer, so they are constants, or nearly so.
"""

import re
from typing import Final

from epp.http2.codes import Status

DETAILS_BYTES: Final = 4096
"""How much of a status's details is sent, percent-encoded. Peers limit headers, often to 8 KiB in all."""

_RUNS: Final = re.compile(r"((?:[!-$&-~]+|(?!\A) +(?!\Z))+)|(.)", re.DOTALL)
"""What goes as it is, spaces at either end of the whole excepted; and every other character."""

_ESCAPES: Final = tuple(f"%{octet:02X}" for octet in range(256))

# RFC 7541, appendix A.
STATUS_INDEX: Final = 8
STATUS_INDEXES: Final = {200: 8, 204: 9, 206: 10, 304: 11, 400: 12, 404: 13, 500: 14}
ALLOW_INDEX: Final = 22
CONTENT_LENGTH_INDEX: Final = 28
CONTENT_TYPE_INDEX: Final = 31


def _integer(value: int, prefix_bits: int) -> bytes:
    """RFC 7541, 5.1; the bits above the prefix are 0."""
    full = (1 << prefix_bits) - 1
    if value < full:
        return bytes((value,))
    octets = bytearray((full,))
    value -= full
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _text(text: str) -> bytes:
    """RFC 7541, 5.2, without Huffman coding."""
    octets = text.encode("ascii")
    return _integer(len(octets), 7) + octets


def _literal(name: str | int, value: str) -> bytes:
    """RFC 7541, 6.2.2. `name` may be the index of an entry of the static table that has it."""
    named = _integer(name, 4) if isinstance(name, int) else b"\x00" + _text(name)
    return named + _text(value)


def _status(http_status: int) -> bytes:
    index = STATUS_INDEXES.get(http_status)
    return _literal(STATUS_INDEX, str(http_status)) if index is None else bytes((0x80 | index,))


RESPONSE: Final[bytes] = _status(200) + _literal(CONTENT_TYPE_INDEX, "application/grpc")
"""Headers of an answer that has messages, or may have."""

TRAILERS_OK: Final[bytes] = _literal("grpc-status", "0")

_ACCEPT_ENCODING: Final[bytes] = _literal("grpc-accept-encoding", "identity,gzip")


def trailers(status: Status, details: str) -> bytes:
    """The end of an answer after `RESPONSE`. Details beyond `DETAILS_BYTES` are cut."""
    if not details:
        return TRAILERS_OK if status == Status.OK else _literal("grpc-status", str(int(status)))
    return _literal("grpc-status", str(int(status))) + _literal("grpc-message", _percent_encoded(details))


def trailers_only(status: Status, details: str, *, encodings: bool = False) -> bytes:
    """A whole answer without messages. `encodings`: name those understood, as the request's is not."""
    return RESPONSE + (_ACCEPT_ENCODING if encodings else b"") + trailers(status, details)


def plain(http_status: int, length: int) -> bytes:
    """Headers of an answer to a request that is none of gRPC, with a text of `length` bytes."""
    return (
        _status(http_status)
        + _literal(CONTENT_TYPE_INDEX, "text/plain; charset=utf-8")
        + _literal(CONTENT_LENGTH_INDEX, str(length))
        + (_literal(ALLOW_INDEX, "POST") if http_status == 405 else b"")
    )


def _percent_encoded(details: str) -> str:
    """UTF-8 with all but printable ASCII as %XX, and % itself (gRPC over HTTP/2, "Status-Message").

    So are the spaces at either end: a field value must not start or end with one (RFC 9113, 8.2.1). What is
    cut is cut between characters.
    """
    pieces: list[str] = []
    room = DETAILS_BYTES
    for plain, other in _RUNS.findall(details[:DETAILS_BYTES]):
        piece = plain or "".join([_ESCAPES[octet] for octet in other.encode("utf-8", "replace")])
        if len(piece) > room:
            return "".join([*pieces, plain[:room]]).rstrip(" ")
        pieces.append(piece)
        room -= len(piece)
    return "".join(pieces)
