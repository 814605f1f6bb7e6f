"""Body messages as bytes: where the parts of those of the usual forms lie, and pieces written without stubs.

A message of another form has no layout here and is read in full elsewhere. Formats: the Protocol Buffers
encoding (varints, tags) and `envoy.service.ext_proc.v3`.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from epp.extproc.records import BODY_CHUNK_BYTES

LAYOUTS_KEPT: Final = 4096
LENGTHS_KEPT: Final = 4096

START: Final = slice(0, 6)
"""The bytes that `body_layout` wants: tag and length of the message's field, and of the body in it."""

END_OF_STREAM: Final = b"\x10\x01"
"""`end_of_stream: true`, in an `HttpBody` and in a `StreamedBodyResponse`."""

FIELD_BYTES: Final = 32
"""What a field costs beside its bytes, however small it is."""

VARINT_OCTETS: Final = 10

# Tags: of `ProcessingRequest`, of `HttpBody` and `StreamedBodyResponse`, of what stands around the latter.
_REQUEST_BODY = b"\x22"
_RESPONSE_BODY = b"\x2a"
_BODY = b"\x0a"
_REQUEST_BODY_REPLY = b"\x1a"
_RESPONSE_BODY_REPLY = b"\x22"
_RESPONSE = b"\x0a"
_BODY_MUTATION = b"\x1a"
_STREAMED_RESPONSE = b"\x1a"


class Layout(NamedTuple):
    """Where the parts of a `ProcessingRequest` lie that begins with `request_body` or `response_body`.

    Attributes:
        of_answer: it is `response_body`.
        body: the content.
        ends: two bytes of the `HttpBody` are left; it is of the usual form only if they are END_OF_STREAM.
        size: where the `HttpBody` ends, if the message is long enough.
        tail: what stands behind it.
    """

    of_answer: bool
    body: slice
    ends: bool
    size: int
    tail: slice


@lru_cache(maxsize=LAYOUTS_KEPT)
def body_layout(start: bytes) -> Layout | None:
    """The layout of a message that starts so; None: not of a usual form, or too long to tell from `start`."""
    tag = start[:1]
    if tag != _RESPONSE_BODY and tag != _REQUEST_BODY:
        return None
    outer = read_varint(start, 1)
    if outer is None:
        return None
    length, inside = outer
    size = inside + length
    begin = end = inside
    if start[inside : inside + 1] == _BODY:
        inner = read_varint(start, inside + 1)
        if inner is None:
            return None
        length, begin = inner
        end = begin + length
    if end != size and end + len(END_OF_STREAM) != size:
        return None
    return Layout(tag == _RESPONSE_BODY, slice(begin, end), end != size, size, slice(size, None))


def read_varint(data: bytes, at: int) -> tuple[int, int] | None:
    """The number that begins at `at`, and where it ends; None where `data` ends first."""
    value = 0
    for index in range(at, len(data)):
        byte = data[index]
        value |= (byte & 0x7F) << (7 * (index - at))
        if byte < 0x80:
            return value, index + 1
    return None


def beside_bodies(message: bytes, most: int) -> int:
    """Bytes of a message's fields other than bodies, with `FIELD_BYTES` for each field; counted no further
    than it takes to exceed `most`. Where fields cannot be told apart, all that is left counts.
    """
    at = counted = 0
    while at < len(message) and counted <= most:
        end = _field_end(message, at)
        if end is None:
            return counted + len(message) - at
        counted += FIELD_BYTES
        if message[at : at + 1] not in (_REQUEST_BODY, _RESPONSE_BODY):
            counted += end - at
        at = end
    return counted


def _field_end(message: bytes, at: int) -> int | None:
    """Where the field ends that begins at `at`; None where that cannot be told."""
    tag = read_varint(message[at : at + VARINT_OCTETS], 0)
    if tag is None:
        return None
    kind, at = tag[0] & 7, at + tag[1]
    if kind == 1:
        return at + 8
    if kind == 5:
        return at + 4
    number = read_varint(message[at : at + VARINT_OCTETS], 0)
    if number is None or kind not in (0, 2):
        return None
    return at + number[1] + (number[0] if kind == 2 else 0)


def write_varint(value: int) -> bytes:
    """In its shortest form."""
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def answer_pieces(body: bytes) -> list[bytes]:
    """`ProcessingResponse`s that carry `body` on in a full-duplex answer, which it does not end."""
    size = len(body)
    if 0 < size <= BODY_CHUNK_BYTES:
        return [_before_answer_piece(size) + body]
    cut = [body[start : start + BODY_CHUNK_BYTES] for start in range(0, size, BODY_CHUNK_BYTES)]
    return [_before_answer_piece(len(part)) + part for part in cut]


def piece(of_answer: bool, body: bytes, ends: bool) -> bytes:
    """A `ProcessingResponse` with a piece of a full-duplex body; `ends`: the last."""
    before = _before_piece(of_answer, len(body), ends)
    return b"".join((before, body, END_OF_STREAM)) if ends else before + body


@lru_cache(maxsize=LENGTHS_KEPT)
def _before_answer_piece(size: int) -> bytes:
    return _before_piece(True, size, False)


@lru_cache(maxsize=LENGTHS_KEPT)
def _before_piece(of_answer: bool, size: int, ends: bool) -> bytes:
    """The message of a piece up to its body: the nested lengths depend on nothing but the body's."""
    before = _BODY + write_varint(size) if size else b""
    behind = size + (len(END_OF_STREAM) if ends else 0)
    reply = _RESPONSE_BODY_REPLY if of_answer else _REQUEST_BODY_REPLY
    for tag in (_STREAMED_RESPONSE, _BODY_MUTATION, _RESPONSE, reply):
        before = tag + write_varint(len(before) + behind) + before
    return before
