"""YAML text to plain values, each with the line it stands on.

Stricter than YAML: one document, no duplicate or merge keys, no tags, bounded size and depth. Values are read
from parser events without recursion, so a nested file costs no more than its size. An alias stands for a copy
of what it names, and copies count towards the bounds, so a self-similar file does not grow beyond them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import yaml

from epp.errors import ConfigError, Problem

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 20_000
MAX_KEY: Final = 128

_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT: Final = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE: Final = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document.

    Attributes:
        value: dicts, lists, str, int, float, bool, None.
        lines: line (from 1) of the value at each path such as `$.plugins[2].parameters`.
    """

    source: str
    value: Any
    lines: dict[str, int]

    def line_of(self, path: str) -> int | None:
        """Line of the value at `path`, or of the nearest one that encloses it."""
        while path:
            if (line := self.lines.get(path)) is not None:
                return line
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None


def read_document(text: str | bytes, source: str) -> Document:
    """Parse YAML.

    Raises:
        ConfigError: not UTF-8, not YAML, or more than this reader accepts; with line and column where known.
    """
    text = _decoded(text, source)
    try:
        return _build(yaml.parse(text, Loader=_Loader), source)
    except yaml.MarkedYAMLError as error:
        raise _unparsable(error, text, source) from None
    except yaml.YAMLError as error:
        raise _broken(source, f"not valid YAML: {' '.join(str(error).split())}") from None


# The C parser where PyYAML has it: twenty times as fast.
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _broken(source: str, message: str) -> ConfigError:
    return ConfigError(source, Problem("", message))


def _unparsable(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    what = f"not valid YAML: {error.problem or error.context or 'it cannot be parsed'}"
    if mark is None:
        return _broken(source, what)
    line = text.split("\n")[mark.line : mark.line + 1]
    advice = "; indent with spaces, not tabs" if line and line[0].lstrip(" ").startswith("\t") else ""
    return _broken(source, f"line {mark.line + 1}, column {mark.column + 1}: {what}{advice}")


def _decoded(text: str | bytes, source: str) -> str:
    if len(text) > MAX_BYTES:
        raise _broken(source, f"longer than {MAX_BYTES} bytes")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise _broken(source, f"line {line}: not UTF-8 at byte {error.start}") from None
    if found := _FORBIDDEN.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise _broken(source, f"line {line}: character U+{ord(found[0]):04X} is not allowed in YAML")
    return text


@dataclass(slots=True)
class _Open:
    """A mapping or a list being filled. `key` waits for its value."""

    value: dict[str, Any] | list[Any]
    path: str
    key: str | None = None


def _build(events: Iterator[Any], source: str) -> Document:
    """Fold parser events into values."""
    builder = _Builder(source)
    for event in events:
        match event:
            case yaml.DocumentStartEvent():
                builder.document(event)
            case yaml.AliasEvent():
                builder.alias(event)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                builder.end()
            case yaml.ScalarEvent() | yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                builder.value(event)
    return Document(source, builder.root[0] if builder.root else None, builder.lines)


class _Builder:
    """Values with a stack of open collections.

    Attributes:
        root: the document's value, once it is there.
        lines: see `Document`.
    """

    def __init__(self, source: str) -> None:
        self.root: list[Any] = []
        self.lines: dict[str, int] = {}
        self._source = source
        self._stack: list[_Open] = []
        self._documents = 0
        self._anchored: dict[str, tuple[Any, str]] = {}
        self._copied_characters = 0

    def document(self, event: Any) -> None:
        self._documents += 1
        if self._documents > 1:
            raise _at(event, self._source, "a second YAML document; one is read")

    def end(self) -> None:
        self._stack.pop()

    def value(self, event: Any) -> None:
        """Put one value (or one key) where it belongs."""
        if event.tag not in (None, "!"):
            raise _at(event, self._source, f"tag {event.tag}: tags are not supported")
        scalar = isinstance(event, yaml.ScalarEvent)
        if self._wants_key:
            if not scalar:
                raise _at(event, self._source, "a key must be a plain text")
            self._key(event)
            return
        value: Any
        if scalar:
            value = _scalar(event, self._source)
        else:
            value = {} if isinstance(event, yaml.MappingStartEvent) else []
        path = self._attach(value)
        self._located(path, event.start_mark.line + 1, event)
        if event.anchor:
            self._anchored[event.anchor] = value, path
        if not scalar:
            self._open(_Open(value, path), event)

    def alias(self, event: Any) -> None:
        """Put a copy of an anchored value where the alias stands."""
        if self._wants_key:
            raise _at(event, self._source, "a key must be a plain text")
        found = self._anchored.get(event.anchor)
        if found is None:
            raise _at(event, self._source, f"alias *{event.anchor}: there is no &{event.anchor} before it")
        value, path = found
        if any(one.value is value for one in self._stack):
            raise _at(event, self._source, f"alias *{event.anchor} stands in what it names")
        self._attach_copy(value, path, event.start_mark.line + 1, event)

    def _attach_copy(self, value: Any, path: str, line: int, event: Any) -> None:
        """Copy what stands at `path`; its parts keep the lines of the original, where their text is."""
        self._copied_characters += len(value) if isinstance(value, str) else 0
        if self._copied_characters > MAX_BYTES:
            raise _at(event, self._source, f"aliases repeat more than {MAX_BYTES} characters")
        copy: Any = {} if isinstance(value, dict) else [] if isinstance(value, list) else value
        opened = _Open(copy, self._attach(copy))
        self._located(opened.path, line, event)
        if copy is value:
            return
        self._open(opened, event)
        if isinstance(value, dict):
            for key, item in value.items():
                opened.key = key
                item_path = f"{path}.{key}"
                self._attach_copy(item, item_path, self.lines[item_path], event)
        else:
            for index, item in enumerate(value):
                item_path = f"{path}[{index}]"
                self._attach_copy(item, item_path, self.lines[item_path], event)
        self.end()

    @property
    def _wants_key(self) -> bool:
        return bool(self._stack) and isinstance(self._stack[-1].value, dict) and self._stack[-1].key is None

    def _key(self, event: Any) -> None:
        parent = self._stack[-1]
        if event.value == "<<" and not event.style:
            raise _at(event, self._source, "merge keys are not supported; write the fields out, or an alias")
        if event.value in parent.value:
            raise _at(event, self._source, f"key {event.value[:60]!r} appears twice")
        if len(event.value) > MAX_KEY:
            raise _at(event, self._source, f"a key longer than {MAX_KEY} characters")
        parent.key = event.value

    def _attach(self, value: Any) -> str:
        """Add `value` to the innermost open collection and return its path."""
        if not self._stack:
            self.root.append(value)
            return "$"
        parent = self._stack[-1]
        if isinstance(parent.value, list):
            parent.value.append(value)
            return f"{parent.path}[{len(parent.value) - 1}]"
        key, parent.key = parent.key or "", None
        parent.value[key] = value
        return f"{parent.path}.{key}"

    def _located(self, path: str, line: int, event: Any) -> None:
        self.lines[path] = line
        if len(self.lines) > MAX_VALUES:
            raise _at(event, self._source, f"more than {MAX_VALUES} values")

    def _open(self, opened: _Open, event: Any) -> None:
        if len(self._stack) == MAX_DEPTH:
            raise _at(event, self._source, f"nested deeper than {MAX_DEPTH} levels")
        self._stack.append(opened)


def plain_value(text: str) -> Any:
    """What an unquoted scalar means: null, a boolean, a number (decimal, 0x, 0o) or text.

    Raises:
        ValueError: a number out of range.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        if len(text) > 24 or not -(2**63) <= (number := int(text, 0)) < 2**63:
            raise ValueError(f"number {text[:30]} does not fit 64 bits")
        return number
    if _FLOAT.fullmatch(text):
        if not isfinite(real := float(text)):
            raise ValueError(f"number {text[:30]} is too large")
        return real
    return text


def _scalar(event: Any, source: str) -> Any:
    if event.style:  # one of the parsers says None, the other nothing, for an unquoted scalar
        return event.value
    try:
        return plain_value(event.value)
    except ValueError as error:
        raise _at(event, source, str(error)) from None


def _at(event: Any, source: str, message: str) -> ConfigError:
    mark = event.start_mark
    return _broken(source, f"line {mark.line + 1}, column {mark.column + 1}: {message}")
