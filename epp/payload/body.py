"""JSON of a request body into the few members that routing reads, as raw values; no other is judged."""

import json
import re
from typing import Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from epp.errors import BadRequest
from epp.payload.sse import BYTE_ORDER_MARK

ABSENT = Raw()
"""Value of a member that the body does not have."""

Span = tuple[int, int]
"""First byte and end."""

_MODEL_KEY = b'"model"'
_COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_LONG_VALUE_BYTES = 1024
_SHORT_BODY_BYTES = 4096
_TRUE = (b"true", b'"true"', b"1")
_MOST_DIGITS = 15


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Raw = ABSENT
    content: Raw = ABSENT
    tool_calls: Raw = ABSENT


class Body(msgspec.Struct):
    """What every API's body has. Other members are raw values, or `messages`, a list of `Message`."""

    model: Raw = ABSENT


class Messages(Body):
    """A body with messages. They are empty where the body has none."""

    messages: list[Message] = []


BodyT = TypeVar("BodyT", bound=Body)
Form = TypeVar("Form")

_string = msgspec.json.Decoder(str)


class Read(Generic[BodyT]):
    """A body, and the bytes its raw values are views of: the client's, or mended ones of equal length."""

    __slots__ = ("body", "source")

    def __init__(self, body: BodyT, source: bytes) -> None:
        self.body = body
        self.source = source

    def span(self, value: Raw) -> Span:
        """Where the value stands in the body."""
        start = _address(value) - _address(self.source)
        return start, start + len(memoryview(value))


class BodyReader(Generic[BodyT]):
    """Reads the bodies of one API.

    Attributes:
        unparsable: how the API says that a body is no JSON object.
        no_messages: how it says that `messages` is not a list of objects.
    """

    __slots__ = ("_decoder", "_members", "no_messages", "unparsable")

    def __init__(self, body: type[BodyT], unparsable: str, no_messages: str = "") -> None:
        self._decoder = msgspec.json.Decoder(body)
        self._members = tuple(name for name in body.__struct_fields__ if name not in ("model", "messages"))
        self.unparsable = unparsable
        self.no_messages = no_messages

    def read(self, plain: bytes) -> Read[BodyT]:
        """Raises BadRequest: not one JSON object, or `messages` is not a list of objects."""
        if not plain:
            raise self._refused("the body is empty")
        try:
            return Read(_decode(self._decoder, plain), plain)
        except msgspec.ValidationError as error:
            raise _mistyped(error, self.unparsable, self.no_messages) from None
        except (msgspec.DecodeError, RecursionError) as error:
            source = _mended(plain)
            if source == plain:
                raise self._refused(str(error)) from None
        try:
            return Read(_decode(self._decoder, source), source)
        except msgspec.ValidationError as error:
            raise _mistyped(error, self.unparsable, self.no_messages) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._refused(str(error)) from None

    def _refused(self, what: str) -> BadRequest:
        return _unparsable(self.unparsable, what)

    def model(self, read: Read[BodyT]) -> tuple[str, Span | None]:
        """The model's name, and where it stands. Absent and null are both no name.

        Raises:
            BadRequest: it is no text, or there are two, of which engine and picker could take different ones.
        """
        value = bytes(read.body.model)
        if not value:
            return "", None
        span = self._model_span(read)
        if value == b"null":
            return "", span
        if value[:1] != b'"':
            raise BadRequest("model not found in request body: `model` must be a string", "model")
        return text_of(value), span

    def _model_span(self, read: Read[BodyT]) -> Span:
        source, value = read.source, read.body.model
        if len(source) <= _SHORT_BODY_BYTES and not _may_name_twice(source):
            colon = _COLON.match(source, source.find(_MODEL_KEY) + len(_MODEL_KEY))
            if colon is not None:
                return colon.end(), colon.end() + len(memoryview(value))
        outline = self._outline(read)
        if _may_name_twice(outline) and self._outermost_keys(outline).count("model") > 1:
            raise BadRequest("duplicate `model` in request body: it must be given exactly once", "model")
        return read.span(value)

    def _outline(self, read: Read[BodyT]) -> bytes:
        """The body with null in place of long values, so that little is left to search."""
        body, source = read.body, read.source
        values = [value for name in self._members if (value := getattr(body, name)) is not ABSENT]
        if isinstance(body, Messages):
            values += [message.content for message in body.messages]
        kept: list[bytes] = []
        position = 0
        for start, end in sorted(
            read.span(value) for value in values if len(memoryview(value)) > _LONG_VALUE_BYTES
        ):
            kept += (source[position:start], b"null")
            position = end
        kept.append(source[position:])
        return b"".join(kept)

    def _outermost_keys(self, plain: bytes) -> list[str]:
        def keys(pairs: list[tuple[str, object]]) -> list[str]:
            return [key for key, _ in pairs]

        text = plain.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace")
        try:
            # The hook runs innermost first, so what comes back are the keys of the outermost object.
            found: list[str] = json.loads(text, object_pairs_hook=keys, parse_int=str, parse_float=str)
        except (ValueError, RecursionError) as error:
            raise self._refused(str(error)) from None
        return found


# -- single values ------------------------------------------------------------------------------------


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


def text_of(value: bytes | Raw) -> str:
    """A JSON string as text; empty for any other value."""
    if value is ABSENT:
        return ""
    raw = bytes(value)
    return text_bytes(raw).decode("utf-8", "replace") if raw[:1] == b'"' else ""


def is_true(value: Raw) -> bool:
    """Whether a flag is set, as lenient readers see it."""
    return value is not ABSENT and bytes(value) in _TRUE


def is_given(value: Raw) -> bool:
    """Whether there is a value other than null."""
    return bytes(value) not in (b"", b"null")


def count_of(value: Raw) -> int | None:
    """A whole number of tokens; anything else is the engine's to judge."""
    if value is ABSENT:
        return None
    raw = bytes(value)
    if raw.isdigit():
        return int(raw) if len(raw) <= _MOST_DIGITS else None
    if not raw or raw[0] not in b"0123456789":
        return None
    number = float(raw)
    return int(number) if 1 <= number < 10**_MOST_DIGITS and number.is_integer() else None


# -- where the model stands ---------------------------------------------------------------------------


def _may_name_twice(text: bytes) -> bool:
    # A letter of "model" that is spelled as an escape begins with \u006.
    return text.count(_MODEL_KEY) > 1 or b"\\u006" in text


def _address(view: Raw | bytes) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _decode(decoder: "msgspec.json.Decoder[BodyT]", plain: bytes) -> BodyT:
    if plain.startswith(BYTE_ORDER_MARK):
        return decoder.decode(memoryview(plain)[len(BYTE_ORDER_MARK) :])
    return decoder.decode(plain)


def _unparsable(start: str, what: str) -> BadRequest:
    return BadRequest(f"{start}: {_lowered(what)}; the body must be one JSON object in UTF-8")


def _mistyped(error: msgspec.ValidationError, unparsable: str, no_messages: str) -> BadRequest:
    if "$.messages" not in str(error):
        return _unparsable(unparsable, str(error))
    return BadRequest(
        f"{no_messages}: it must be a list of at least one object with role and content "
        f"({_lowered(str(error))})",
        "messages",
    )


def _lowered(sentence: str) -> str:
    """As it reads behind a colon; names in capitals stay."""
    return sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]


# -- what engines written in Python accept beyond JSON ------------------------------------------------

_STRING_OR_NUMBER_WORD = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?Infinity|NaN', re.DOTALL)
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def leniently(decoder: "msgspec.json.Decoder[Form]", data: bytes) -> Form | None:
    """What the decoder makes of the text, or of it with what is no JSON in it mended; None: nothing."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError):
        source = _mended(data)
    try:
        return decoder.decode(source) if source != data else None
    except (msgspec.DecodeError, RecursionError):
        return None


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
