"""Whether the data of one event of a stream carries output of the model; one function for each form of event.

An event that ends the output counts, since an answer may have no other; an error never does.
"""

from typing import Any

import msgspec

from epp.payload.body import leniently

_OPENAI_OUTPUT = (".delta", ".partial_image", "image_generation.completed")
_OPENAI_END = frozenset({"response.completed", "response.incomplete"})
_ANTHROPIC_OUTPUT = ("text", "thinking", "partial_json")


class _Choice(msgspec.Struct):
    delta: Any = None
    finish_reason: Any = None
    token_ids: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


class _Event(msgspec.Struct):
    type: str = ""
    delta: Any = None


class _MetaInfo(msgspec.Struct):
    completion_tokens: Any = None
    finish_reason: Any = None


class _Output(msgspec.Struct):
    text: Any = None
    output_ids: Any = None
    meta_info: _MetaInfo = msgspec.field(default_factory=_MetaInfo)


_chunk = msgspec.json.Decoder(_Chunk)
_event = msgspec.json.Decoder(_Event)
_output = msgspec.json.Decoder(_Output)


def in_chat(data: bytes) -> bool:
    """A chat opens with a delta that says only whose turn it is."""
    chunk = leniently(_chunk, data)
    return chunk is not None and any(map(_has_output, chunk.choices))


def in_completions(data: bytes) -> bool:
    """Every choice is output, be its text empty: a token may still wait for the rest of a character."""
    chunk = leniently(_chunk, data)
    return chunk is not None and bool(chunk.choices)


def in_typed_event(data: bytes) -> bool:
    """Events of OpenAI that name their type: those of responses and of images."""
    event = leniently(_event, data)
    return event is not None and (event.type.endswith(_OPENAI_OUTPUT) or event.type in _OPENAI_END)


def in_messages(data: bytes) -> bool:
    """A delta of text, thinking or the input of a tool, or the reason why the output stops."""
    event = leniently(_event, data)
    if event is None or not isinstance(event.delta, dict):
        return False
    if event.type == "content_block_delta":
        return any(isinstance(event.delta.get(name), str) for name in _ANTHROPIC_OUTPUT)
    return event.type == "message_delta" and event.delta.get("stop_reason") is not None


def in_sglang(data: bytes) -> bool:
    """Text, tokens, or an end that is no abort. The counts tell of a token whose text is not complete yet."""
    output = leniently(_output, data)
    if output is None:
        return False
    reason = output.meta_info.finish_reason
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return False
    return any((output.text, output.output_ids, output.meta_info.completion_tokens, reason))


def _has_output(choice: _Choice) -> bool:
    if choice.finish_reason is not None or choice.token_ids:
        return True
    delta = choice.delta
    if not isinstance(delta, dict):
        return False
    return "role" not in delta or any(value for name, value in delta.items() if name != "role")
