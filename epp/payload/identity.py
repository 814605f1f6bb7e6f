"""Identity of a prompt: bytes, four to a token, whose common prefix stands for a common prefix of tokens.

Text enters as UTF-8. The bytes c0, c1 and f5 to ff never occur in it; they mark where one thing ends and the
next begins. So different conversations give different bytes, and no length stands in front of anything: a
conversation that goes on has the bytes of its earlier turns as a prefix, and two messages share what their
texts share. A conversation of texts has the same identity in every API, as engines render it the same.
"""

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from epp.errors import BadRequest
from epp.payload.body import ABSENT, Message, text_bytes
from epp.payload.media import Media

CONTINUES = b"\xc0"
_END = b"\xc1"
_OTHER_PART = b"\xf6"
_OTHER_ITEM = b"\xf7"
TOOLS = b"\xf8"
DOCUMENTS = b"\xf9"
TEMPLATE = b"\xfa"
TEMPLATE_ARGUMENTS = b"\xfb"
_MESSAGE = b"\xfc"
_CONTENT = b"\xfd"
_TEXT_PART = b"\xfe"
_TOOL_CALLS = b"\xff"

PROMPTS_TOLD_APART = 1024

_NOTHING = (b"", b"null", b"[]", b"{}", b'""')
_TOOL_RESULT = b'"tool_result"'
_IMAGE = b'"image"'
_LARGEST_TOKEN_ID = 2**32 - 1


class _Source(msgspec.Struct):
    """Where a medium comes from: an address (data URLs included), or the data itself."""

    url: Raw = Raw()
    data: Raw = Raw()


class _Part(msgspec.Struct):
    """A part of a message's content, in the words of any API."""

    type: Raw = Raw()
    text: Raw = Raw()
    image_url: _Source | str | None = None
    video_url: _Source | str | None = None
    audio_url: _Source | str | None = None
    input_audio: _Source | str | None = None
    source: _Source | str | None = None
    tool_use_id: Raw = Raw()
    content: Raw = Raw()


_parts = msgspec.json.Decoder(list[_Part])
_part = msgspec.json.Decoder(_Part)
_message = msgspec.json.Decoder(Message)
_members = msgspec.json.Decoder(dict[str, Raw])
raw_values = msgspec.json.Decoder(list[Raw])
_numbers = msgspec.json.Decoder(list[float])


def tokens_of(identity: bytes | bytearray) -> int:
    """Tokens of a prompt, exact for token ids, else an estimate."""
    return -(-len(identity) // 4)


# -- conversations --------------------------------------------------------------------------------------


def add_json(identity: bytearray, mark: bytes, value: Raw) -> None:
    """A value as it is spelled, behind its mark; nothing for nothing."""
    if value is ABSENT:
        return
    raw = bytes(value)
    if raw not in _NOTHING:
        identity += mark
        identity += raw


def add_messages(identity: bytearray, messages: Iterable[Message], media: Media) -> None:
    """Each in order."""
    for message in messages:
        add_message(identity, message, media)


def add_message(identity: bytearray, message: Message, media: Media) -> None:
    """Role and content, then the calls of tools."""
    identity += b"%b%b%b" % (_MESSAGE, text_bytes(bytes(message.role)), _CONTENT)
    content = bytes(message.content)
    if content[:1] == b"[":
        _add_parts(identity, content, media)
    elif content != b"null":
        identity += text_bytes(content)
    add_json(identity, _TOOL_CALLS, message.tool_calls)


def add_system(identity: bytearray, content: Raw, media: Media) -> None:
    """Instructions that stand outside the messages: a message of the system like any other."""
    if content is not ABSENT and bytes(content) not in _NOTHING:
        add_message(identity, Message(Raw(b"system"), content), media)


def add_items(identity: bytearray, items: Raw, media: Media) -> None:
    """A text, which is what the user says; or messages, calls of tools, their outputs, and other items."""
    raw = bytes(items)
    if raw[:1] != b"[":
        add_message(identity, Message(Raw(b"user"), items), media)
        return
    for item in raw_values.decode(raw):
        message = _tolerant_message(item)
        if message.role is ABSENT:
            add_json(identity, _OTHER_ITEM, item)
        else:
            add_message(identity, message, media)


def _tolerant_message(raw: Raw) -> Message:
    try:
        return _message.decode(raw)
    except msgspec.DecodeError:
        return Message()


def _add_parts(identity: bytearray, content: bytes, media: Media, *, nested: bool = False) -> None:
    """A single part of text gives the same bytes as the text alone, as templates render them the same."""
    try:
        parts = _parts.decode(content)
        raw_parts = None
    except msgspec.DecodeError:
        raw_parts = raw_values.decode(content)
        parts = [_tolerant_part(raw) for raw in raw_parts]
    for index, part in enumerate(parts):
        text = bytes(part.text)
        if text[:1] == b'"':
            if index:
                identity += _TEXT_PART
            identity += text_bytes(text)
        elif bytes(part.type) == _TOOL_RESULT and not nested:
            _add_tool_result(identity, part, media)
        elif not _add_medium(identity, part, media):
            raw_parts = raw_parts or raw_values.decode(content)
            add_json(identity, _OTHER_PART, _without_cache_control(raw_parts[index]))


def _tolerant_part(raw: Raw) -> _Part:
    try:
        return _part.decode(raw)
    except msgspec.DecodeError:
        return _Part()


def _add_tool_result(identity: bytearray, part: _Part, media: Media) -> None:
    identity += _OTHER_PART + bytes(part.tool_use_id) + _CONTENT
    content = bytes(part.content)
    if content[:1] == b"[":
        _add_parts(identity, content, media, nested=True)
    else:
        identity += text_bytes(content)
    identity += _END


def _without_cache_control(part: Raw) -> Raw:
    """The mark of where a client wants a cache to end moves on with every turn."""
    try:
        members = _members.decode(part)
    except msgspec.DecodeError:
        return part
    members.pop("cache_control", None)
    return Raw(msgspec.json.encode(members))


def _add_medium(identity: bytearray, part: _Part, media: Media) -> bool:
    """Whether the part is a medium."""
    if content := _media_bytes(part.image_url):
        media.add_image(identity, content)
    elif content := _media_bytes(part.video_url):
        media.add_video(identity, content)
    elif content := _media_bytes(part.input_audio) or _media_bytes(part.audio_url):
        media.add_audio(identity, content)
    elif bytes(part.type) == _IMAGE and isinstance(part.source, _Source):
        return _add_source(identity, part.source, media)
    else:
        return False
    return True


def _add_source(identity: bytearray, source: _Source, media: Media) -> bool:
    if url := _unquoted(source.url):
        media.add_image(identity, url)
    elif data := _unquoted(source.data):
        media.add_image_data(identity, data)
    else:
        return False
    return True


def _media_bytes(source: _Source | str | None) -> bytes | memoryview:
    """What tells a medium from others, as it stands in the body; empty if there is none."""
    if isinstance(source, str):
        return source.encode()
    if source is None:
        return b""
    return _unquoted(source.url) or _unquoted(source.data)


def _unquoted(value: Raw) -> memoryview:
    given = memoryview(value)
    return given[1:-1] if given and given[0] == ord('"') else given[:0]


# -- prompts --------------------------------------------------------------------------------------------


class PromptMember(msgspec.Struct, frozen=True):
    """The member that holds the prompts of an API; `request` is what its error texts call a request."""

    request: str
    name: str
    takes_messages: bool = False

    def missing(self, where: str) -> BadRequest:
        """Neither text nor token ids stand there."""
        return BadRequest(
            f"invalid {self.request} request: must have {self.name} field: {where} is not a text, a list of "
            "texts, a list of token ids or a list of such lists",
            self.name,
        )

    def not_token_ids(self, where: str) -> BadRequest:
        """Something else than token ids stands in a list of numbers."""
        return BadRequest(
            f"invalid {self.request} request: {where} must hold token ids only, which are integers from 0 to "
            f"{_LARGEST_TOKEN_ID}",
            self.name,
        )


def prompt_identities(prompt: Raw, member: PromptMember, media: Media) -> tuple[bytes, ...]:
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
        raise member.missing(member.name)
    first = raw[1:].lstrip()[:1]
    if first == b"]":
        return ()
    if first in b'"[' or member.takes_messages and first == b"{":
        entries = raw_values.decode(raw)
        told_apart = tuple(
            _entry(entry, first, f"{member.name}[{index}]", member, media)
            for index, entry in enumerate(entries[:PROMPTS_TOLD_APART])
        )
        rest = b",".join(map(bytes, entries[PROMPTS_TOLD_APART:]))
        return (*told_apart, rest) if rest else told_apart
    ids = token_ids(raw)
    if ids is None:
        raise member.not_token_ids(member.name)
    return (ids.tobytes(),)


def _entry(entry: Raw, first: bytes, where: str, member: PromptMember, media: Media) -> bytes:
    raw = bytes(entry)
    if raw[:1] != first:
        raise member.missing(where)
    if first == b'"':
        return text_bytes(raw)
    if first == b"{":
        identity = bytearray()
        message = _tolerant_message(entry)
        if message.role is ABSENT and message.content is ABSENT:
            add_json(identity, _OTHER_ITEM, entry)
        else:
            add_message(identity, message, media)
        return bytes(identity)
    ids = token_ids(raw)
    if ids is None:
        raise member.not_token_ids(where)
    return ids.tobytes()


def token_ids(raw: bytes) -> npt.NDArray[np.uint32] | None:
    """Token ids as little-endian uint32; None where there is anything else. `raw` is a valid JSON list."""
    digits = raw[1:-1].translate(None, b" \t\r\n")
    if not digits:
        return np.zeros(0, "<u4")
    ids: npt.NDArray[np.int64 | np.float64]
    if not digits.translate(None, b"0123456789,"):
        # Numbers beyond int64 come out as its largest, so they are refused with the others.
        ids = np.fromstring(digits.decode(), dtype=np.int64, sep=",")
    else:
        # Signs, points and exponents; an engine takes 5.0 for 5.
        try:
            ids = np.array(_numbers.decode(raw), dtype=np.float64)
        except (msgspec.DecodeError, RecursionError):
            return None
        if not (ids == np.floor(ids)).all():
            return None
    if ids.min() < 0 or ids.max() > _LARGEST_TOKEN_ID:
        return None
    return ids.astype("<u4")
