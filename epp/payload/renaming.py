"""The client's model name put back into an answer, in place of the name the engine was asked for."""

import json
import re
from enum import Enum

import msgspec

from epp.payload.sse import data_lines

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+")
_SEPARATORS = re.compile(rb"[ \t\r\n,]*+")
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_KEY = re.compile(rb"(" + _STRING + rb")\s*+:\s*+(?=\S)", re.DOTALL)
_STRING_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NESTED_REST = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+", re.DOTALL)
_MEMBER_REST = re.compile(rb"[^,}]*+")

# An object whose model comes after nothing but plain members, as every engine writes it.
_USUAL_OBJECT = re.compile(
    rb"\{\s*+(?>" + _STRING + rb'(?<!"model")\s*+:\s*+(?:' + _STRING + rb"|[-+.\w]++)\s*+,\s*+)*+"
    rb'"model"\s*+:\s*+(' + _STRING + rb")",
    re.DOTALL,
)

_USUAL_DATA = b"data: {"
_MOST_HELD_BYTES = 64 * 1024
_QUOTE, _COMMA, _OPEN_OBJECT = b'",{'

# A letter of "model" spelled as an escape begins so.
_ESCAPED_LETTER = b"\\u006"

_string = msgspec.json.Decoder(str)


class Renaming:
    """A pair of names: what the engine calls the model, and what the client does."""

    __slots__ = ("_client_json", "_engine", "_engine_json", "_usual_after", "_usual_before")

    def __init__(self, engine: str, client: str) -> None:
        self._engine = engine
        self._engine_json = json.dumps(engine, ensure_ascii=False).encode("utf-8", "replace")
        self._client_json = json.dumps(client).encode()
        self._usual_before = self._usual_after = b""

    def applied(self, value: bytes) -> bytes | None:
        """The client's name as JSON if `value` is the engine's name in any spelling, else None."""
        if value == self._engine_json or _decoded(value) == self._engine:
            return self._client_json
        return None

    def at_usual_place(self, text: bytes, start: int) -> tuple[int, int, bytes] | None:
        """What to replace in the object at `start`, if its model stands complete where engines write it."""
        found = _USUAL_OBJECT.match(text, start)
        name = None if found is None else self.applied(found[1])
        return None if found is None or name is None else (*found.span(1), name)

    def in_event(self, event: bytes) -> bytes:
        """One whole event of a stream."""
        before = self._usual_before
        if before and event.startswith(before):
            return self._usual_after + event[len(before) :]
        if event.startswith(_USUAL_DATA) and (found := self.at_usual_place(event, len(_USUAL_DATA) - 1)):
            start, end, name = found
            # Events of one answer are alike up to here.
            self._usual_before, self._usual_after = event[:end], event[:start] + name
            return self._usual_after + event[end:]
        lines = data_lines(event)
        if not lines or not (b'"model"' in event or _ESCAPED_LETTER in event):
            return event
        document = RenamedJson(self)
        renamed = document.feed(b"\n".join(event[start:end] for start, end in lines)) + document.finish()
        pieces: list[bytes] = []
        position = 0
        # Neither name holds a line break, so the lines after are the lines before.
        for (start, end), line in zip(lines, renamed.split(b"\n"), strict=True):
            pieces += (event[position:start], line)
            position = end
        return b"".join(pieces) + event[position:]


def _decoded(value: bytes) -> str | None:
    try:
        return _string.decode(value)
    except msgspec.DecodeError:
        return None


class _At(Enum):
    """What the next byte belongs to."""

    START = "what stands before the object"
    KEY = "a key of the object, or what stands before it"
    VALUE = "a value of the object"
    STRING = "a string that nobody asks about"
    NESTED = "the inside of a list or object"
    MEMBER_END = "what follows a value"
    DONE = "what need not be looked at"


class RenamedJson:
    """A JSON object as it streams by, with the value of its own member `model` renamed.

    Holds back a key or the model's value while it is incomplete, and nothing else. What turns out not to be
    a JSON object passes as it is.
    """

    __slots__ = ("_at", "_depth", "_held", "_renaming", "_replaced")

    def __init__(self, renaming: Renaming) -> None:
        self._renaming = renaming
        self._at = _At.START
        self._depth = 0
        self._held = b""
        self._replaced: tuple[int, int, bytes] | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Bytes to pass on now."""
        if self._at is _At.DONE:
            return chunk
        text, self._held = self._held + chunk, b""
        return self._read(text)

    def _read(self, text: bytes) -> bytes:
        position = 0
        if self._at is _At.START:
            self._replaced = self._renaming.at_usual_place(text, 0)
            if self._replaced is not None:
                self._at = _At.DONE
        while self._at is not _At.DONE:
            before, state = position, self._at
            position = self._step(text, position)
            if position == before and self._at is state:
                if len(text) - position > _MOST_HELD_BYTES:
                    self._at = _At.DONE
                    break
                self._held = text[position:]
                return text[:position]
        if self._replaced is None:
            return text
        start, end, name = self._replaced
        return text[:start] + name + text[end:]

    def finish(self) -> bytes:
        """What is still held when nothing more comes."""
        held, self._held = self._held, b""
        self._at = _At.DONE
        return held

    def _step(self, text: bytes, position: int) -> int:
        """Look at one thing. Returns where the next one stands, or `position` if `text` ends too early."""
        match self._at:
            case _At.START:
                position = _skip(_BLANK, text, position)
                if position == len(text):
                    return position
                self._at = _At.KEY if text[position] == _OPEN_OBJECT else _At.DONE
                return position + 1
            case _At.KEY:
                return self._key(text, _skip(_SEPARATORS, text, position))
            case _At.VALUE:
                return self._value(text, position)
            case _At.STRING:
                position = _skip(_STRING_REST, text, position)
                if text[position : position + 1] != b'"':
                    return position
                self._at = _At.NESTED if self._depth else _At.MEMBER_END
                return position + 1
            case _At.NESTED:
                return self._nested(text, _skip(_NESTED_REST, text, position))
            case _:
                position = _skip(_MEMBER_REST, text, position)
                if position == len(text):
                    return position
                self._at = _At.KEY if text[position] == _COMMA else _At.DONE
                return position + 1

    def _key(self, text: bytes, position: int) -> int:
        found = _KEY.match(text, position)
        if found is None:
            if position < len(text) and text[position] != _QUOTE:
                self._at = _At.DONE
            return position
        if found[1] != b'"model"' and not (_ESCAPED_LETTER in found[1] and _decoded(found[1]) == "model"):
            self._at = _At.VALUE
            return found.end()
        value = _WHOLE_STRING.match(text, found.end())
        if value is None and text[found.end()] == _QUOTE:
            return position
        name = None if value is None else self._renaming.applied(value[0])
        if value is not None and name is not None:
            self._replaced = (value.start(), value.end(), name)
        self._at = _At.DONE
        return found.end()

    def _value(self, text: bytes, position: int) -> int:
        first = text[position : position + 1]
        if first in (b"{", b"["):
            self._at, self._depth = _At.NESTED, 1
        elif first == b'"':
            self._at, self._depth = _At.STRING, 0
        elif first:
            self._at = _At.MEMBER_END
            return position
        return position + len(first)

    def _nested(self, text: bytes, position: int) -> int:
        first = text[position : position + 1]
        if first == b'"':
            self._at = _At.STRING
        elif first in (b"{", b"["):
            self._depth += 1
        elif first:
            self._depth -= 1
            if not self._depth:
                self._at = _At.MEMBER_END
        return position + len(first)


def _skip(run: re.Pattern[bytes], text: bytes, position: int) -> int:
    """The end of a run that may be empty."""
    found = run.match(text, position)
    return position if found is None else found.end()
