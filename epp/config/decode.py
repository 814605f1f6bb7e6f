"""Plain values to structs, collecting every problem instead of stopping at the first."""

import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from epp.config.schema import Quantity
from epp.durations import Duration
from epp.errors import Problem

MAX_PROBLEMS: Final = 100

T = TypeVar("T", bound=msgspec.Struct)


class TooManyProblems(Exception):
    """Ends the reading of a file in which nearly everything is wrong. Never leaves this package."""


class Problems:
    """The problems found so far."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, path: str, message: str) -> None:
        """Raises TooManyProblems when the list is full."""
        if len(self.found) == MAX_PROBLEMS:
            self.found.append(Problem("", "and more; only the first are listed"))
            raise TooManyProblems
        self.found.append(Problem(path, message))


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no known name is near."""
    close = get_close_matches(name, list(known), 1) if len(name) <= 80 else []
    return f"; did you mean {close[0]}?" if close else ""


def quoted(value: object) -> str:
    """A value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def decode(value: Any, wanted: type[T], path: str, problems: Problems) -> T | None:
    """`value` as struct `wanted`, or None after at least one problem was added."""
    before = len(problems.found)
    decoded = decode_fields(value, wanted, path, problems)
    if len(problems.found) > before:
        return None
    try:
        return wanted(**decoded)
    except (TypeError, ValueError) as error:
        problems.add(path, str(error))
        return None


def decode_fields(value: Any, wanted: type[msgspec.Struct], path: str, problems: Problems) -> dict[str, Any]:
    """Those fields of `wanted` that `value` has and that are right, by attribute.

    A struct may name, in a class variable `later`, fields of the format that are not supported yet.
    """
    if not isinstance(value, Mapping):
        problems.add(path, f"expected a mapping, {_seen(value)}")
        return {}
    fields = {field.encode_name: field for field in msgspec.structs.fields(wanted)}
    later: tuple[str, ...] = getattr(wanted, "later", ())
    for key in value:
        if key in later:
            problems.add(f"{path}.{key}", "not supported yet")
        elif key not in fields:
            valid = ", ".join(fields) or "none"
            hint = nearest(key, fields) or f"; valid here: {valid}"
            problems.add(f"{path}.{key}", f"unknown field{hint}")
    decoded: dict[str, Any] = {}
    for name, field in fields.items():
        before = len(problems.found)
        if name in value and not (value[name] is None and not field.required):
            read = _value(value[name], field.type, f"{path}.{name}", problems)
            if len(problems.found) == before:
                decoded[field.name] = read
        elif field.required:
            problems.add(f"{path}.{name}", "missing, and required")
    return decoded


def _value(value: Any, wanted: Any, path: str, problems: Problems) -> Any:
    """One field. A problem leaves None behind; the caller discards the struct."""
    if get_origin(wanted) in (Union, types.UnionType):
        choices = [each for each in get_args(wanted) if each is not type(None)]
        wanted = choices[0] if len(choices) == 1 else wanted
    if wanted in (Duration, Quantity):
        return _parsed(value, wanted, path, problems)
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return decode(value, wanted, path, problems)
    if get_origin(wanted) is tuple and get_args(wanted)[1:] == (...,):
        return _items(value, get_args(wanted)[0], path, problems)
    if get_origin(wanted) is Literal and value not in get_args(wanted):
        problems.add(path, f"expected {' or '.join(map(str, get_args(wanted)))}, {_seen(value)}")
        return None
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        expected, _, below = str(error).partition(" - at `$")
        worded = _worded(expected)
        quote = "; put it in quotes" if "text" in worded and isinstance(value, bool | int | float) else ""
        problems.add(path + below.rstrip("`"), f"{worded}, {_seen(value)}{quote}")
        return None


def _items(value: Any, wanted: Any, path: str, problems: Problems) -> Any:
    if not isinstance(value, list):
        problems.add(path, f"expected a list, {_seen(value)}")
        return None
    return tuple(_value(item, wanted, f"{path}[{index}]", problems) for index, item in enumerate(value))


def _parsed(value: Any, wanted: Any, path: str, problems: Problems) -> Any:
    try:
        return wanted.parse(value)
    except ValueError:
        problems.add(path, f"expected {wanted.expected}, {_seen(value)}")
        return None


def _worded(expected: str) -> str:
    """A message of msgspec in the words of the file format."""
    text = expected.partition(", got ")[0]
    for python, plain in _WORDS:
        text = text.replace(python, plain)
    return text[0].lower() + text[1:].replace("`", "")


_WORDS: Final = (
    ("`int`", "a whole number"),
    ("`float`", "a number"),
    ("`str`", "text"),
    ("`bool`", "true or false"),
    ("`object`", "a mapping"),
    ("`array`", "a list"),
)


def _seen(value: Any) -> str:
    match value:
        case None:
            return "got nothing"
        case list():
            return "got a list"
        case Mapping():
            return "got a mapping"
        case bool():
            return f"not {str(value).lower()}"
        case _:
            return f"not {quoted(value)}"
