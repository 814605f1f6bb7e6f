"""The client's model name put back into an answer, in place of the name the engine was asked for."""

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from epp.payload.sse import data_lines

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BLANK = re.compile(rb"(?:\xef\xbb\xbf|[ \t\r\n])*+")
_NOTHING_YET = (b"", b"\xef", b"\xef\xbb")  # or the beginning of a byte order mark
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
_QUOTE, _COMMA, _OPEN_OBJECT, _END_OBJECT, _OPEN_LIST = b'",{}['

# A letter of "model" spelled as an escape begins so.
_ESCAPED_LETTER = b"\\u006"

_string = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model's name stands in a JSON document: the member `model` of the object itself.

    Attributes:
        inside: of the object in this member instead.
        each: of every object of a list too, where the document is one.
    """

    inside: str = ""
    each: bool = False


OWN: Final = Place()


class Renaming:
    """A pair of names: what the engine calls the model, and what the client does; and where it is named."""

    __slots__ = ("_client_json", "_engine", "_engine_json", "_usual_after", "_usual_before", "place")

    def __init__(self, engine: str, client: str, place: Place = OWN) -> None:
        self.place = place
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
        if self.place.inside:
            return None
        found = _USUAL_OBJECT.match(text, start)
        name = None if found is None else self.applied(found[1])
        return None if found is None or name is None else (*found.span(1), name)

    def in_event(self, event: bytes) -> bytes:
        """One whole event of a stream."""
        before = self._usual_before
        if before and event.startswith(before):
            return self._usual_after + event[len(before) :]
        if event.find(b'"model"') < 0 and event.find(_ESCAPED_LETTER) < 0:
            return event
        if event.startswith(_USUAL_DATA) and (found := self.at_usual_place(event, len(_USUAL_DATA) - 1)):
            start, end, name = found
            # Events of one answer are alike up to here.
            self._usual_before, self._usual_after = event[:end], event[:start] + name
            return self._usual_after + event[end:]
        lines = data_lines(event)
        if not lines:
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
    ELEMENT = "what stands before an object of a list"
    KEY = "a key of the object, or what stands before it"
    VALUE = "a value of the object"
    STRING = "a string that nobody asks about"
    NESTED = "the inside of a list or object"
    MEMBER_END = "what follows a value"
    DONE = "what need not be looked at"


class RenamedJson:
    """A JSON document as it streams by, with the value of the member `model` at one place renamed.

    Holds back a key or the model's value while it is incomplete, and nothing else. What turns out not to be
    such a document passes as it is.
    """

    __slots__ = ("_at", "_depth", "_each", "_held", "_inside", "_renaming", "_replaced")

    def __init__(self, renaming: Renaming) -> None:
        self._renaming = renaming
        self._inside = renaming.place.inside
        self._each = False
        self._at = _At.START
        self._depth = 0
        self._held = b""
        self._replaced: list[tuple[int, int, bytes]] = []

    def feed(self, chunk: bytes) -> bytes:
        """Bytes to pass on now."""
        if self._at is _At.DONE:
            return chunk
        text, self._held = self._held + chunk, b""
        return self._read(text)

    def _read(self, text: bytes) -> bytes:
        position = 0
        self._replaced.clear()
        if self._at is _At.START and (usual := self._renaming.at_usual_place(text, 0)):
            self._replaced.append(usual)
            self._at = _At.DONE
        while self._at is not _At.DONE:
            before, state = position, self._at
            position = self._step(text, position)
            if position == before and self._at is state:
                if len(text) - position > _MOST_HELD_BYTES:
                    self._at = _At.DONE
                else:
                    text, self._held = text[:position], text[position:]
                break
        return self._put_back(text) if self._replaced else text

    def _put_back(self, text: bytes) -> bytes:
        pieces: list[bytes] = []
        position = 0
        for start, end, name in self._replaced:
            pieces += (text[position:start], name)
            position = end
        return b"".join(pieces) + text[position:]

    def finish(self) -> bytes:
        """What is still held when nothing more comes."""
        held, self._held = self._held, b""
        self._at = _At.DONE
        return held

    def _step(self, text: bytes, position: int) -> int:
        """Look at one thing. Returns where the next one stands, or `position` if `text` ends too early."""
        match self._at:
            case _At.START:
                return self._start(text, _skip(_BLANK, text, position))
            case _At.ELEMENT:
                return self._start(text, _skip(_SEPARATORS, text, position))
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
                self._at = _At.KEY if text[position] == _COMMA else self._after_object()
                return position + 1

    def _start(self, text: bytes, position: int) -> int:
        if text[position : position + len(_NOTHING_YET)] in _NOTHING_YET:
            return position
        if text[position] == _OPEN_OBJECT:
            self._at = _At.KEY
        elif text[position] == _OPEN_LIST and self._at is _At.START and self._renaming.place.each:
            self._at, self._each = _At.ELEMENT, True
        else:
            self._at = _At.DONE
        return position + 1

    def _after_object(self) -> _At:
        return _At.ELEMENT if self._each else _At.DONE

    def _key(self, text: bytes, position: int) -> int:
        found = _KEY.match(text, position)
        if found is None:
            if position < len(text) and text[position] != _QUOTE:
                self._at = self._after_object() if text[position] == _END_OBJECT else _At.DONE
                return position + 1
            return position
        key, end = found[1], found.end()
        if self._inside:
            return self._entered(key, text, end)
        if key != b'"model"' and not (_ESCAPED_LETTER in key and _decoded(key) == "model"):
            self._at = _At.VALUE
            return end
        value = _WHOLE_STRING.match(text, end)
        if value is None and text[end] == _QUOTE:
            return position
        name = None if value is None else self._renaming.applied(value[0])
        if value is not None and name is not None:
            self._replaced.append((*value.span(), name))
        self._at = _At.VALUE if self._each else _At.DONE
        return end

    def _entered(self, key: bytes, text: bytes, end: int) -> int:
        """Past a key of an object whose model is of no interest, but that of an object inside may be."""
        if text[end] == _OPEN_OBJECT and _decoded(key) == self._inside:
            self._inside = ""
            return end + 1
        self._at = _At.VALUE
        return end

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
