"""JSON of a request body into the few members that routing reads, as raw values; no other is judged."""

import json
import re
from typing import Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from epp.errors import BadRequest

ABSENT = Raw()
"""Value of a member that the body does not have."""

NO_MESSAGES = "invalid chat completions request: must have valid messages field"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MODEL_KEY = b'"model"'
_COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_LONG_VALUE_BYTES = 1024
_SHORT_BODY_BYTES = 4096


class Message(msgspec.Struct):
    """One chat message."""

    role: Raw = ABSENT
    content: Raw = ABSENT
    tool_calls: Raw = ABSENT


class ChatBody(msgspec.Struct):
    """Chat completions. `messages` is empty where the body has none."""

    model: Raw = ABSENT
    messages: list[Message] = []
    tools: Raw = ABSENT
    documents: Raw = ABSENT
    chat_template: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT


class CompletionsBody(msgspec.Struct):
    """Completions. The prompt may come as embeddings, which routing does not read."""

    model: Raw = ABSENT
    prompt: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    max_tokens: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT


BodyT = TypeVar("BodyT", bound=ChatBody | CompletionsBody)

_chat = msgspec.json.Decoder(ChatBody)
_completions = msgspec.json.Decoder(CompletionsBody)
_string = msgspec.json.Decoder(str)


class Read(Generic[BodyT]):
    """A body, and the bytes its raw values are views of: the client's, or mended ones of equal length."""

    __slots__ = ("body", "source")

    def __init__(self, body: BodyT, source: bytes) -> None:
        self.body = body
        self.source = source

    def span(self, value: Raw) -> tuple[int, int]:
        """Where the value stands in the body."""
        start = _address(value) - _address(self.source)
        return start, start + len(memoryview(value))


def read_chat(plain: bytes) -> Read[ChatBody]:
    """Raises BadRequest: not one JSON object, or `messages` is not a list of objects."""
    return _read(_chat, plain)


def read_completions(plain: bytes) -> Read[CompletionsBody]:
    """Raises BadRequest: not one JSON object."""
    return _read(_completions, plain)


def text_bytes(raw: bytes) -> bytes:
    """UTF-8 of a JSON string, the same for every spelling of it; of any other value its JSON."""
    if raw[:1] != b'"':
        return raw
    if b"\\" not in raw:
        return raw[1:-1]
    try:
        return _string.decode(raw).encode()
    except msgspec.DecodeError:
        # Bytes that are not UTF-8: the engine is the one to say what it thinks of them.
        return _string.decode(raw.decode("utf-8", "replace")).encode()


def model_span(read: Read[BodyT]) -> tuple[int, int]:
    """Where the value of the body's member `model` stands.

    Raises:
        BadRequest: there are two of them, of which engine and picker could take different ones.
    """
    source, value = read.source, read.body.model
    if len(source) <= _SHORT_BODY_BYTES and not _may_name_twice(source):
        colon = _COLON.match(source, source.find(_MODEL_KEY) + len(_MODEL_KEY))
        if colon is not None:
            return colon.end(), colon.end() + len(memoryview(value))
    outline = _outline(read)
    if _may_name_twice(outline) and _outermost_keys(outline).count("model") > 1:
        raise BadRequest("duplicate `model` in request body: it must be given exactly once", "model")
    return read.span(value)


def _may_name_twice(text: bytes) -> bool:
    # A letter of "model" that is spelled as an escape begins with \u006.
    return text.count(_MODEL_KEY) > 1 or b"\\u006" in text


def _outline(read: Read[BodyT]) -> bytes:
    """The body with null in place of long values, so that little is left to search."""
    values: list[Raw]
    match read.body:
        case ChatBody() as chat:
            values = [message.content for message in chat.messages]
            values += [chat.tools, chat.documents, chat.chat_template, chat.chat_template_kwargs]
        case CompletionsBody() as completions:
            values = [completions.prompt, completions.prompt_embeds]
    kept: list[bytes] = []
    position = 0
    for start, end in sorted(
        read.span(value) for value in values if len(memoryview(value)) > _LONG_VALUE_BYTES
    ):
        kept += (read.source[position:start], b"null")
        position = end
    kept.append(read.source[position:])
    return b"".join(kept)


def _outermost_keys(plain: bytes) -> list[str]:
    def keys(pairs: list[tuple[str, object]]) -> list[str]:
        return [key for key, _ in pairs]

    text = plain.removeprefix(_BYTE_ORDER_MARK).decode("utf-8", "replace")
    try:
        # The hook runs innermost first, so what comes back are the keys of the outermost object.
        found: list[str] = json.loads(text, object_pairs_hook=keys, parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise _unparsable(str(error)) from None
    return found


def _address(view: Raw | bytes) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _read(decoder: "msgspec.json.Decoder[BodyT]", plain: bytes) -> Read[BodyT]:
    if not plain:
        raise _unparsable("the body is empty")
    try:
        return Read(_decode(decoder, plain), plain)
    except msgspec.ValidationError as error:
        raise _mistyped(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        mended = _mended(plain)
        if mended == plain:
            raise _unparsable(str(error)) from None
    try:
        return Read(_decode(decoder, mended), mended)
    except msgspec.ValidationError as error:
        raise _mistyped(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unparsable(str(error)) from None


def _decode(decoder: "msgspec.json.Decoder[BodyT]", plain: bytes) -> BodyT:
    if plain.startswith(_BYTE_ORDER_MARK):
        return decoder.decode(memoryview(plain)[len(_BYTE_ORDER_MARK) :])
    return decoder.decode(plain)


def _unparsable(what: str) -> BadRequest:
    return BadRequest(
        f"error unmarshaling request bodyMap: {_lowered(what)}; the body must be one JSON object in UTF-8"
    )


def _mistyped(error: msgspec.ValidationError) -> BadRequest:
    if "$.messages" not in str(error):
        return _unparsable(str(error))
    return BadRequest(
        f"{NO_MESSAGES}: it must be a list of at least one object with role and content "
        f"({_lowered(str(error))})",
        "messages",
    )


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


# -- what engines written in Python accept beyond JSON ------------------------------------------------

_STRING_OR_NUMBER_WORD = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?Infinity|NaN', re.DOTALL)
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def _mended(plain: bytes) -> bytes:
    """The text in as many bytes, halves of surrogate pairs as U+FFFD, NaN and Infinity as zeros."""
    return _STRING_OR_NUMBER_WORD.sub(_mended_token, plain)


def _mended_token(match: re.Match[bytes]) -> bytes:
    token = match[0]
    if token[:1] == b'"':
        return _ESCAPE.sub(_mended_escape, token) if b"\\u" in token else token
    return b"0.".ljust(len(token), b"0")


def _mended_escape(match: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if match[1] else match[0]
