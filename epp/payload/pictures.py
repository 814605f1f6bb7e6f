"""Size of a picture that stands in a body as base64: PNG, GIF and JPEG, from their first bytes."""

import binascii
from collections.abc import Callable

_DATA_URL = b"data:image/"
_BASE64 = b"base64,"
_MOST_TYPE_BYTES = 128
_LOOK_CHARACTERS = 128 << 10
_MOST_SEGMENTS = 64

_PNG = b"\x89PNG\r\n\x1a\n"
_GIF = (b"GIF87a", b"GIF89a")
_JPEG = b"\xff\xd8"
_FRAMES = (0xC0, 0xC1, 0xC2)
_END, _SCAN = 0xD9, 0xDA
_ALONE = (0x01, *range(0xD0, 0xD9))

Size = tuple[int, int]


def size_in_url(url: bytes | memoryview) -> Size | None:
    """Width and height of the picture in a data URL; None where it is no such URL or cannot be told."""
    head = bytes(url[:_MOST_TYPE_BYTES])
    if not head.startswith(_DATA_URL):
        return None
    start = head.find(_BASE64)
    return size_of(url[start + len(_BASE64) :]) if start >= 0 else None


def size_of(encoded: bytes | memoryview) -> Size | None:
    """Width and height of a picture in base64, as it stands in JSON; None where it cannot be told."""
    head = bytes(encoded[:_LOOK_CHARACTERS])
    if b"\\" in head:
        head = head.replace(b"\\/", b"/")

    def at(start: int, count: int) -> bytes:
        """Bytes of the picture, fewer where they end."""
        first = start // 3
        try:
            decoded = binascii.a2b_base64(head[4 * first : 4 * -(-(start + count) // 3)])
        except binascii.Error:
            return b""
        return decoded[start - 3 * first :][:count]

    start = at(0, 24)
    size = None
    if start.startswith(_PNG) and start[12:16] == b"IHDR":
        size = int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big")
    elif start.startswith(_GIF):
        size = int.from_bytes(start[6:8], "little"), int.from_bytes(start[8:10], "little")
    elif start.startswith(_JPEG):
        size = _jpeg_size(at)
    return size if size and all(size) else None


def _jpeg_size(at: Callable[[int, int], bytes]) -> Size | None:
    """From segment to segment to the one that describes the frame."""
    place = len(_JPEG)
    for _ in range(_MOST_SEGMENTS):
        head = at(place, 9)
        if len(head) < 9 or head[0] != 0xFF or head[1] in (_END, _SCAN):
            return None
        marker = head[1]
        if marker in _FRAMES:
            return int.from_bytes(head[7:9], "big"), int.from_bytes(head[5:7], "big")
        if marker == 0xFF:
            place += 1
        elif marker in _ALONE:
            place += 2
        else:
            place += 2 + int.from_bytes(head[2:4], "big")
    return None
