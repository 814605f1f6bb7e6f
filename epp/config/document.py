"""YAML text to plain values, each with the line it stands on.

Stricter than YAML: one document, no duplicate keys, no aliases, no tags, bounded size and depth. Values are
read from parser events without recursion: neither a nested nor a self-similar file costs more than its size.
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
    text = text.removeprefix("\ufeff")
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
    """Fold parser events into values with a stack of open collections."""
    lines: dict[str, int] = {}
    stack: list[_Open] = []
    root: list[Any] = []
    documents = 0
    for event in events:
        match event:
            case yaml.DocumentStartEvent():
                documents += 1
                if documents > 1:
                    raise _at(event, source, "a second YAML document; one is read")
            case yaml.AliasEvent():
                raise _at(
                    event, source, f"alias *{event.anchor}: aliases are not supported, write the value out"
                )
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                stack.pop()
            case yaml.ScalarEvent() | yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                _take(event, source, stack, root, lines)
    return Document(source, root[0] if root else None, lines)


def _take(event: Any, source: str, stack: list[_Open], root: list[Any], lines: dict[str, int]) -> None:
    """Put one value (or one key) where it belongs."""
    if event.tag not in (None, "!"):
        raise _at(event, source, f"tag {event.tag}: tags are not supported")
    scalar = isinstance(event, yaml.ScalarEvent)
    parent = stack[-1] if stack else None
    if parent is not None and isinstance(parent.value, dict) and parent.key is None:
        if not scalar:
            raise _at(event, source, "a key must be a plain text")
        if event.value in parent.value:
            raise _at(event, source, f"key {event.value[:60]!r} appears twice")
        if len(event.value) > MAX_KEY:
            raise _at(event, source, f"a key longer than {MAX_KEY} characters")
        parent.key = event.value
        return
    value: Any = _scalar(event, source) if scalar else {} if isinstance(event, yaml.MappingStartEvent) else []
    path = _attach(parent, root, value)
    lines[path] = event.start_mark.line + 1
    if len(lines) > MAX_VALUES:
        raise _at(event, source, f"more than {MAX_VALUES} values")
    if not scalar:
        if len(stack) == MAX_DEPTH:
            raise _at(event, source, f"nested deeper than {MAX_DEPTH} levels")
        stack.append(_Open(value, path))


def _attach(parent: _Open | None, root: list[Any], value: Any) -> str:
    """Add `value` to its collection and return its path."""
    if parent is None:
        root.append(value)
        return "$"
    if isinstance(parent.value, list):
        parent.value.append(value)
        return f"{parent.path}[{len(parent.value) - 1}]"
    key, parent.key = parent.key or "", None
    parent.value[key] = value
    return f"{parent.path}.{key}"


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
