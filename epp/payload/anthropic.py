"""Requests of the Anthropic APIs: messages, and counting their tokens."""

import msgspec
from msgspec import Raw

from epp.errors import BadRequest
from epp.payload.body import ABSENT, Body, BodyReader, Messages, Span, count_of, is_true, text_bytes, text_of
from epp.payload.identity import TOOLS, add_json, add_messages, add_system, raw_values, tokens_of
from epp.payload.media import Media
from epp.payload.records import Api, InferenceRequest

UNPARSABLE = "error unmarshaling request body"
_NO_MESSAGES = "invalid messages request: must have at least one message"
_BILLING = b"x-anthropic-billing-header"


class _Turn(Messages):
    system: Raw = ABSENT
    tools: Raw = ABSENT
    max_tokens: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT


class _Block(msgspec.Struct):
    text: Raw = ABSENT


_turns = BodyReader(_Turn, UNPARSABLE, _NO_MESSAGES)
_counted = BodyReader(Body, UNPARSABLE)
_block = msgspec.json.Decoder(_Block)


def read_messages(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """A turn of a conversation."""
    read = _turns.read(plain)
    turn = read.body
    model, span = _turns.model(read)
    if not turn.messages:
        raise BadRequest(f"{_NO_MESSAGES}: `messages` is a list of objects with role and content", "messages")
    identity = bytearray()
    add_json(identity, TOOLS, turn.tools)
    add_system(identity, _without_billing(turn.system), media)
    add_messages(identity, turn.messages, media)
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompts=(bytes(identity),),
        prompt_tokens=tokens_of(identity),
        max_output_tokens=count_of(turn.max_tokens),
        stream=is_true(turn.stream),
        cache_salt=text_of(turn.cache_salt),
        media=media.found,
    ), span


def read_count_tokens(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """Counting costs an engine next to nothing, so only the model matters."""
    read = _counted.read(plain)
    model, span = _counted.model(read)
    return InferenceRequest(api=api, model=model, target_model=model), span


def _without_billing(system: Raw) -> Raw:
    """A block for Anthropic's accounting differs in every request; engines leave it out of the prompt."""
    raw = bytes(system)
    if raw[:1] != b"[" or _BILLING not in raw:
        return system
    kept = [bytes(block) for block in raw_values.decode(raw) if not _is_billing(block)]
    return Raw(b"[" + b",".join(kept) + b"]")


def _is_billing(block: Raw) -> bool:
    try:
        return text_bytes(bytes(_block.decode(block).text)).startswith(_BILLING)
    except msgspec.DecodeError:
        return False
