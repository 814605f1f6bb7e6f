"""Content encodings of request bodies: which ones apply, and undoing the two that HTTP clients use."""

import zlib
from collections.abc import Iterable

from epp.errors import BadRequest, PayloadTooLarge

_STEP_BYTES = 64 * 1024
_MAX_GZIP_MEMBERS = 4096

_GZIP_WINDOW = 31
_ZLIB_WINDOW = 15
_RAW_WINDOW = -15


def encodings(headers: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Encodings in the order they were applied: lower case, `x-gzip` as `gzip`, without `identity`."""
    found = []
    for name, value in headers:
        if name == "content-encoding":
            for listed in value.lower().split(","):
                encoding = listed.strip()
                if encoding and encoding != "identity":
                    found.append("gzip" if encoding == "x-gzip" else encoding)
    return tuple(found)


def inflate(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The content of a `gzip` (any number of members) or `deflate` (zlib or raw) body.

    Never holds more than `max_bytes` and one step of output while it does not know that the whole fits.

    Raises:
        BadRequest: the bytes are not a whole stream of that encoding.
        PayloadTooLarge: the content is longer than `max_bytes`.
    """
    gzip = encoding == "gzip"
    window = _GZIP_WINDOW if gzip else _deflate_window(body)
    pieces = []
    room = max_bytes
    position = 0
    members = 0
    inflater = zlib.decompressobj(window)
    while not inflater.eof:
        step = body[position : position + _STEP_BYTES]
        if not step:
            raise _broken(encoding, "it ends in the middle")
        try:
            piece = inflater.decompress(step, room + 1)
        except zlib.error as error:
            raise _broken(encoding, str(error)) from None
        room -= len(piece)
        if room < 0:
            raise PayloadTooLarge(f"the {encoding} body inflates to more than the limit of {max_bytes} bytes")
        pieces.append(piece)
        position += len(step)
        if inflater.eof:
            position -= len(inflater.unused_data)
            members += 1
            if gzip and position < len(body) and body[position] != 0:
                if members == _MAX_GZIP_MEMBERS:
                    raise _broken(encoding, f"it has more than {_MAX_GZIP_MEMBERS} members")
                inflater = zlib.decompressobj(window)
    # Tools that write gzip in blocks may pad the last one with zeros.
    if body[position:].strip(b"\0"):
        raise _broken(encoding, "other bytes follow it")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _deflate_window(body: bytes) -> int:
    """`deflate` means a zlib stream (RFC 9110, 8.4.1.2); some clients send it without the wrapper."""
    wrapped = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return _ZLIB_WINDOW if wrapped else _RAW_WINDOW


def _broken(encoding: str, what: str) -> BadRequest:
    return BadRequest(
        f"the body is not a {encoding} stream although content-encoding says so: {what}", "content-encoding"
    )
