"""Identity of a prompt: bytes, four to a token, whose common prefix stands for a common prefix of tokens.

Text enters as UTF-8. The bytes f5 to ff never occur in it; they mark where one thing ends and the next
begins. So different chats give different bytes, and no length stands in front of anything: a chat that goes
on has the bytes of its earlier turns as a prefix, and two messages share what their texts share.
"""

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Raw

from epp.errors import BadRequest
from epp.payload.body import ABSENT, ChatBody, Message, text_bytes

_MEDIA = b"\xf5"
_OTHER_PART = b"\xf6"
_TOOLS = b"\xf8"
_DOCUMENTS = b"\xf9"
_TEMPLATE = b"\xfa"
_TEMPLATE_ARGUMENTS = b"\xfb"
_MESSAGE = b"\xfc"
_CONTENT = b"\xfd"
_TEXT_PART = b"\xfe"
_TOOL_CALLS = b"\xff"

IMAGE_TOKENS = 640 * 360 // 1024
"""Tokens of a picture of unknown size: 640 x 360 at 1024 pixels a token."""

VIDEO_TOKENS = 10 * 2 * IMAGE_TOKENS
"""Tokens of a video of unknown length: ten seconds of two pictures each."""

AUDIO_BYTES_PER_TOKEN = 4

PROMPTS_TOLD_APART = 1024

_NOTHING = (b"", b"null", b"[]", b"{}", b'""')
_LARGEST_TOKEN_ID = 2**32 - 1


class _Source(msgspec.Struct):
    """Where a medium comes from: an address (data URLs included), or the data itself."""

    url: Raw = Raw()
    data: Raw = Raw()


class _Part(msgspec.Struct):
    text: Raw = Raw()
    image_url: _Source | str | None = None
    video_url: _Source | str | None = None
    audio_url: _Source | str | None = None
    input_audio: _Source | str | None = None


_parts = msgspec.json.Decoder(list[_Part])
_part = msgspec.json.Decoder(_Part)
_raw_values = msgspec.json.Decoder(list[Raw])
_numbers = msgspec.json.Decoder(list[float])


def tokens_of(identity: bytes) -> int:
    """Tokens of a prompt, exact for token ids, else an estimate."""
    return -(-len(identity) // 4)


# -- chat -----------------------------------------------------------------------------------------------


def chat_identity(chat: ChatBody) -> bytes:
    """Tools, documents and template, which decide how a prompt begins; then each message in order."""
    identity = bytearray()
    _add_json(identity, _TOOLS, chat.tools)
    _add_json(identity, _DOCUMENTS, chat.documents)
    _add_json(identity, _TEMPLATE, chat.chat_template)
    _add_json(identity, _TEMPLATE_ARGUMENTS, chat.chat_template_kwargs)
    for message in chat.messages:
        _add_message(identity, message)
    return bytes(identity)


def _add_json(identity: bytearray, mark: bytes, value: Raw) -> None:
    if value is ABSENT:
        return
    raw = bytes(value)
    if raw not in _NOTHING:
        identity += mark
        identity += raw


def _add_message(identity: bytearray, message: Message) -> None:
    identity += b"%b%b%b" % (_MESSAGE, text_bytes(bytes(message.role)), _CONTENT)
    content = bytes(message.content)
    if content[:1] == b"[":
        _add_parts(identity, content)
    elif content != b"null":
        identity += text_bytes(content)
    _add_json(identity, _TOOL_CALLS, message.tool_calls)


def _add_parts(identity: bytearray, content: bytes) -> None:
    """A single part of text gives the same bytes as the text alone, as templates render them the same."""
    try:
        parts = _parts.decode(content)
        raw_parts = None
    except msgspec.DecodeError:
        raw_parts = _raw_values.decode(content)
        parts = [_tolerant_part(raw) for raw in raw_parts]
    for index, part in enumerate(parts):
        text = bytes(part.text)
        if text[:1] == b'"':
            if index:
                identity += _TEXT_PART
            identity += text_bytes(text)
        elif not _add_media(identity, part):
            raw_parts = raw_parts or _raw_values.decode(content)
            _add_json(identity, _OTHER_PART, raw_parts[index])


def _tolerant_part(raw: Raw) -> _Part:
    try:
        return _part.decode(raw)
    except msgspec.DecodeError:
        return _Part()


def _add_media(identity: bytearray, part: _Part) -> bool:
    """Whether the part is a medium. Its tokens all carry its digest, and stand at a whole token's place."""
    if picture := _media_bytes(part.image_url):
        count = IMAGE_TOKENS
    elif picture := _media_bytes(part.video_url):
        count = VIDEO_TOKENS
    elif picture := _media_bytes(part.input_audio) or _media_bytes(part.audio_url):
        count = max(1, len(picture) // AUDIO_BYTES_PER_TOKEN)
    else:
        return False
    identity += _MEDIA * (4 - len(identity) % 4)
    # Counting into the seed keeps a picture and a video at the same address apart.
    digest = xxhash.xxh3_64_intdigest(picture, seed=count) & 0xFFFFFFFF
    identity += digest.to_bytes(4, "little") * count
    return True


def _media_bytes(source: _Source | str | None) -> bytes | memoryview:
    """What tells a medium from others, as it stands in the body; empty if there is none."""
    if isinstance(source, str):
        return source.encode()
    if source is None:
        return b""
    given = memoryview(source.url) or memoryview(source.data)
    return given[1:-1] if given and given[0] == ord('"') else b""


# -- completions ----------------------------------------------------------------------------------------


def prompt_identities(prompt: Raw) -> tuple[bytes, ...]:
    """One identity for each prompt of a text, a list of texts, a list of token ids, or a list of such lists.

    What follows the first `PROMPTS_TOLD_APART` has one identity together, of the bytes as they stand in the
    body: telling each of ten thousand apart takes longer than any choice among endpoints may.

    Raises:
        BadRequest: it is none of these, or a token id is not an unsigned 32-bit number.
    """
    raw = bytes(prompt)
    if raw[:1] == b'"':
        return (text_bytes(raw),)
    if raw[:1] != b"[":
        raise _not_a_prompt("prompt")
    first = raw[1:].lstrip()[:1]
    if first == b"]":
        return ()
    if first in b'"[':
        entries = _raw_values.decode(raw)
        told_apart = tuple(
            _entry(bytes(entry), first, f"prompt[{index}]")
            for index, entry in enumerate(entries[:PROMPTS_TOLD_APART])
        )
        rest = b",".join(map(bytes, entries[PROMPTS_TOLD_APART:]))
        return (*told_apart, rest) if rest else told_apart
    return (_token_ids(raw, "prompt"),)


def _entry(raw: bytes, first: bytes, where: str) -> bytes:
    if raw[:1] != first:
        raise _not_a_prompt(where)
    return text_bytes(raw) if first == b'"' else _token_ids(raw, where)


def _token_ids(raw: bytes, where: str) -> bytes:
    """Token ids as little-endian uint32. `raw` is a valid JSON list."""
    digits = raw[1:-1].translate(None, b" \t\r\n")
    if not digits:
        return b""
    ids: npt.NDArray[np.int64 | np.float64]
    if not digits.translate(None, b"0123456789,"):
        # Numbers beyond int64 come out as its largest, so they are refused with the others.
        ids = np.fromstring(digits.decode(), dtype=np.int64, sep=",")
    else:
        # Signs, points and exponents; an engine takes 5.0 for 5.
        try:
            ids = np.array(_numbers.decode(raw), dtype=np.float64)
        except (msgspec.DecodeError, RecursionError):
            raise _not_token_ids(where) from None
        if not (ids == np.floor(ids)).all():
            raise _not_token_ids(where)
    if ids.min() < 0 or ids.max() > _LARGEST_TOKEN_ID:
        raise _not_token_ids(where)
    return ids.astype("<u4").tobytes()


def _not_a_prompt(where: str) -> BadRequest:
    return BadRequest(
        f"invalid completions request: must have prompt field: {where} is not a text, a list of texts, "
        "a list of token ids or a list of such lists",
        "prompt",
    )


def _not_token_ids(where: str) -> BadRequest:
    return BadRequest(
        f"invalid completions request: {where} must hold token ids only, which are integers from 0 to "
        f"{_LARGEST_TOKEN_ID}",
        "prompt",
    )
