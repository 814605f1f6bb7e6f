"""Token counts out of the JSON of an answer, whatever types the engine gave them."""

import math
import re
from typing import Any

import msgspec

from epp.payload.records import Usage

_PROMPT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_LARGEST = 2**53


class _Answer(msgspec.Struct):
    usage: Any = None


_answer = msgspec.json.Decoder(_Answer)
_anything = msgspec.json.Decoder()
_USAGE_OBJECT = re.compile(rb'"usage"\s*+:\s*+(\{(?:[^{}]++|\{[^{}]*+\})*+\})')


def usage_of(document: bytes) -> Usage | None:
    """Usage of a JSON answer or of one event of a stream; None where there is no usage with any token count.

    A document that is not JSON as a whole (cut, or with NaN in it) is searched for its last usage object.
    """
    try:
        return _usage(_answer.decode(document).usage)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError):
        return last_usage(document)


def last_usage(document: bytes) -> Usage | None:
    """The usage object that stands last in a piece of JSON."""
    start = document.rfind(b'"usage"')
    found = _USAGE_OBJECT.match(document, start) if start >= 0 else None
    if found is None:
        return None
    try:
        return _usage(_anything.decode(found[1]))
    except (msgspec.DecodeError, RecursionError):
        return None


def _usage(value: object) -> Usage | None:
    if not isinstance(value, dict):
        return None
    prompt = _first(value, _PROMPT)
    output = _first(value, _OUTPUT)
    if prompt is None and output is None:
        return None
    details = _first(value, _DETAILS)
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_tokens(prompt), _tokens(output), None if cached is None else _tokens(cached))


def _first(value: dict[str, Any], names: tuple[str, str]) -> Any:
    found = value.get(names[0])
    return value.get(names[1]) if found is None else found


def _tokens(value: object) -> int:
    """The number meant: numbers in strings count, what is no number of tokens is 0."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 0
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else 0
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return min(max(value, 0), _LARGEST)
