"""Answers in the exact shape of vLLM 0.32: whole bodies, and streamed events framed as HTTP chunks."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from epp.payload.records import Api

FINGERPRINT: Final = "warmroute-lab"
FINISH_REASON: Final = "length"

_MARK = "\x00"
_ENCODED_MARK = msgspec.json.encode(_MARK)


def http_chunk(data: bytes) -> bytes:
    """One chunk of a `transfer-encoding: chunked` body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


DONE: Final = http_chunk(b"data: [DONE]\n\n")


@dataclass(frozen=True, slots=True)
class Head:
    """What all events of one answer have in common."""

    api: Api
    answer_id: str
    created: int
    model: str

    def fields(self, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * streamed if self.api is Api.CHAT else "text_completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Counts:
    """Usage of one answer. `cached_tokens` is None where the engine is not asked to report it."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
        }


def body(head: Head, texts: list[str], counts: Counts) -> bytes:
    """The whole answer that is not streamed."""
    chat = head.api is Api.CHAT
    choice = _chat_choice if chat else _completion_choice
    details: dict[str, Any] | None = None
    if counts.cached_tokens is not None:
        details = {
            "cached_tokens": counts.cached_tokens,
            "created_cache_tokens": 0 if chat else None,
            "multimodal_tokens": None,
        }
    usage = {**counts.fields(), "prompt_tokens_details": details, "completion_tokens_details": None}
    fields = {
        **head.fields(streamed=False),
        "choices": [choice(index, text) for index, text in enumerate(texts)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
    }
    if chat:
        fields |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    return msgspec.json.encode(
        {**fields, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    )


def usage_chunk(head: Head, counts: Counts) -> bytes:
    """The streamed event that carries the usage and no choice."""
    usage = counts.fields()
    if counts.cached_tokens is not None:
        details = {"cached_tokens": counts.cached_tokens}
        usage["prompt_tokens_details"] = (
            {**details, "created_cache_tokens": 0} if head.api is Api.CHAT else details
        )
    fields = {**head.fields(streamed=True), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}
    return http_chunk(_event(fields))


class TokenChunks:
    """Chunks of the streamed tokens of one choice.

    All tokens of the lab are equally long and need no escaping, so the event is rendered once a
    choice, and each token is put into the middle of it; only with usage in every event is each
    event rendered by itself.
    """

    __slots__ = ("_after", "_before", "_head", "_index", "_prompt_tokens", "_with_usage")

    def __init__(self, head: Head, index: int, prompt_tokens: int, continuous_usage: bool) -> None:
        self._head = head
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._with_usage = continuous_usage
        self._before = self._after = b""
        if not continuous_usage:
            event = _event(self._fields(_MARK, last=False, with_fingerprint=False))
            before, _, after = event.rpartition(_ENCODED_MARK[1:-1])
            self._before = b"%x\r\n%b" % (len(before) + 4 + len(after), before)
            self._after = after + b"\r\n"

    def opening(self) -> bytes:
        """A chat stream opens with the role alone; a completions stream with nothing."""
        if self._head.api is not Api.CHAT:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        fields = {**self._head.fields(streamed=True), "choices": [choice]}
        if self._with_usage:
            fields["usage"] = self._usage(0)
        return http_chunk(_event({**fields, "prompt_token_ids": None, "prompt_text": None}))

    def token(self, word: bytes, position: int) -> bytes:
        """The event of a token that is not the last; `word` has four bytes, `position` counts from 1."""
        if not self._with_usage:
            return self._before + word + self._after
        fields = self._fields(word.decode(), last=False, with_fingerprint=False)
        return http_chunk(_event({**fields, "usage": self._usage(position)}))

    def last(self, word: bytes, position: int, usage_follows: bool) -> bytes:
        """The event of the last token, with the finish reason."""
        fields = self._fields(word.decode(), last=True, with_fingerprint=not usage_follows)
        if self._with_usage:
            fields["usage"] = self._usage(position)
        return http_chunk(_event(fields))

    def _fields(self, text: str, last: bool, with_fingerprint: bool) -> dict[str, Any]:
        reason = FINISH_REASON if last else None
        choice: dict[str, Any]
        if self._head.api is Api.CHAT:
            choice = {"index": self._index, "delta": {"content": text}, "logprobs": None}
            choice["finish_reason"] = reason
            if last:
                choice["stop_reason"] = None
            choice["token_ids"] = None
        else:
            choice = {"index": self._index, "text": text, "logprobs": None, "finish_reason": reason}
            choice |= {"stop_reason": None, "prompt_token_ids": None, "token_ids": None}
        fields = {**self._head.fields(streamed=True), "choices": [choice]}
        return {**fields, "system_fingerprint": FINGERPRINT} if with_fingerprint else fields

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        usage = Counts(self._prompt_tokens, output_tokens).fields()
        if self._head.api is Api.CHAT:
            usage["completion_tokens_details"] = None
        return usage


def models(model: str, created: int, max_model_len: int) -> bytes:
    """The answer of `/v1/models`."""
    permission = {
        "id": f"modelperm-{model}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return msgspec.json.encode({"object": "list", "data": [card]})


def _chat_choice(index: int, text: str) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": FINISH_REASON,
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }


def _completion_choice(index: int, text: str) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": FINISH_REASON,
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
