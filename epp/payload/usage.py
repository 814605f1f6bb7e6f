"""Token counts out of the JSON of an answer, whatever types the engine gave them.

How usage comes differs: whole in one place (OpenAI), in parts that add up (Anthropic), one count an output
(SGLang). One class for each; an instance follows one answer.
"""

import math
import re
from typing import Any, Final, Protocol

import msgspec

from epp.payload.body import leniently
from epp.payload.records import Usage

COUNT_MARK: Final = b'_tokens"'
"""Bytes in every piece of JSON that tells a count. Many engines write `"usage":null` into every event."""

MOST_OUTPUTS: Final = 256
"""Outputs of one stream that are told apart; the counts of further ones are left out."""

_PROMPT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_FRESH = "input_tokens"
_CACHED = "cache_read_input_tokens"
_INPUT_PARTS = (_FRESH, _CACHED, "cache_creation_input_tokens")
_LARGEST = 2**53


class Counts(Protocol):
    """Reads the usage of one answer. Every method returns what is known by now, None where nothing new is."""

    def in_document(self, document: bytes) -> Usage | None:
        """Out of a plain answer."""
        ...

    def in_part(self, text: bytes) -> Usage | None:
        """Out of a piece of a plain answer, or of an event, that is too long to be kept."""
        ...

    def in_event(self, data: bytes) -> Usage | None:
        """Out of the data of one event."""
        ...


class _Answer(msgspec.Struct):
    usage: Any = None


class _Response(msgspec.Struct):
    usage: Any = None
    response: _Answer | None = None


class _Message(msgspec.Struct):
    usage: Any = None
    message: _Answer | None = None


class _Output(msgspec.Struct):
    meta_info: Any = None
    index: Any = 0


_answer = msgspec.json.Decoder(_Answer)
_response = msgspec.json.Decoder(_Response)
_message = msgspec.json.Decoder(_Message)
_outputs = msgspec.json.Decoder(_Output | list[_Output])
_output = msgspec.json.Decoder(_Output)
_anything = msgspec.json.Decoder()
_USAGE_OBJECT = re.compile(rb'"usage"\s*+:\s*+(\{(?:[^{}]++|\{[^{}]*+\})*+\})')


class LastUsage:
    """OpenAI: an object `usage`, of which the last one counts."""

    __slots__ = ()

    def in_document(self, document: bytes) -> Usage | None:
        return usage_of(document)

    def in_part(self, text: bytes) -> Usage | None:
        return last_usage(text)

    def in_event(self, data: bytes) -> Usage | None:
        return usage_of(data)


class ResponseUsage(LastUsage):
    """OpenAI responses: as an answer has it, or, in an event, inside the member `response`."""

    __slots__ = ()

    def in_event(self, data: bytes) -> Usage | None:
        try:
            event = _response.decode(data)
        except msgspec.ValidationError:
            return None
        except (msgspec.DecodeError, RecursionError):
            return last_usage(data)
        return _usage(event.usage if event.response is None else event.response.usage)


class MessageUsage:
    """Anthropic: input in three parts, and a stream that tells it at its start and the output at its end.

    `prompt_tokens` is the sum of `input_tokens`, `cache_read_input_tokens` and `cache_creation_input_tokens`,
    as Anthropic defines the three to be apart from each other; so it means the whole prompt as it does for
    the other APIs. The field's picker takes `input_tokens` alone, and counts a cached prompt as short.

    A later object replaces the input parts of an earlier one if it tells `input_tokens`, since an engine may
    learn at the end only how many of them were cached; one with nothing but zeros tells nothing.
    """

    __slots__ = ("_input", "_output")

    def __init__(self) -> None:
        self._input: dict[str, int] = {}
        self._output: int | None = None

    def in_document(self, document: bytes) -> Usage | None:
        return self.in_event(document)

    def in_part(self, text: bytes) -> Usage | None:
        return self._merged(_last_object(text))

    def in_event(self, data: bytes) -> Usage | None:
        try:
            event = _message.decode(data)
        except msgspec.ValidationError:
            return None
        except (msgspec.DecodeError, RecursionError):
            return self._merged(_last_object(data))
        return self._merged(event.usage if event.message is None else event.message.usage)

    def _merged(self, told: object) -> Usage | None:
        if not isinstance(told, dict):
            return None
        parts = {name: _tokens(told[name]) for name in _INPUT_PARTS if told.get(name) is not None}
        if _FRESH in parts and any(parts.values()):
            self._input = parts
        else:
            self._input = {**parts, **self._input}
        output = told.get("output_tokens")
        if output is not None:
            self._output = _tokens(output)
        if _FRESH not in self._input and self._output is None:
            return None
        return Usage(sum(self._input.values()), self._output or 0, self._input.get(_CACHED))


class OutputUsage:
    """SGLang: `meta_info` of each output, in every event; the last one of each output counts, and all add up.

    Several outputs for one prompt count the prompt once each, as the engine does.
    """

    __slots__ = ("_by_index",)

    def __init__(self) -> None:
        self._by_index: dict[int, Usage] = {}

    def in_document(self, document: bytes) -> Usage | None:
        found = leniently(_outputs, document)
        if found is None:
            return None
        outputs = found if isinstance(found, list) else [found]
        return _sum([usage for output in outputs if (usage := _meta_usage(output.meta_info))])

    def in_part(self, text: bytes) -> Usage | None:
        """Nothing: where outputs were left out, a sum would be wrong."""
        return None

    def in_event(self, data: bytes) -> Usage | None:
        output = leniently(_output, data)
        if output is None:
            return None
        usage = _meta_usage(output.meta_info)
        index = output.index if isinstance(output.index, int) else 0
        if usage is None or (index not in self._by_index and len(self._by_index) >= MOST_OUTPUTS):
            return None
        self._by_index[index] = usage
        return usage if len(self._by_index) == 1 else _sum(list(self._by_index.values()))


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
    return _usage(_last_object(document))


def _last_object(document: bytes) -> object:
    start = document.rfind(b'"usage"')
    found = _USAGE_OBJECT.match(document, start) if start >= 0 else None
    if found is None:
        return None
    try:
        return _anything.decode(found[1])
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


def _meta_usage(value: object) -> Usage | None:
    if not isinstance(value, dict):
        return None
    prompt, output = value.get("prompt_tokens"), value.get("completion_tokens")
    if prompt is None and output is None:
        return None
    cached = value.get("cached_tokens")
    return Usage(_tokens(prompt), _tokens(output), None if cached is None else _tokens(cached))


def _sum(usages: list[Usage]) -> Usage | None:
    if not usages:
        return None
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.output_tokens for usage in usages),
        sum(cached) if cached else None,
    )


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
