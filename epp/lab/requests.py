"""Bodies of OpenAI requests as the lab's engines read them, and vLLM's answers to bad ones."""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from epp.errors import WarmrouteError
from epp.lab import tokens
from epp.payload.records import Api

DEFAULT_MAX_TOKENS: Final = 16
MAX_TOKEN_ID: Final = 2**32 - 1

_AT_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)


class EngineRefusal(WarmrouteError):
    """The engine answers with an error in the shape vLLM 0.32 gives it."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": param, "code": status}}
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What a request asks an engine to do.

    Attributes:
        prompts: identity of each prompt (see `epp.lab.tokens`), one choice each.
        max_tokens: output tokens per prompt, already cut to what the context length leaves.
    """

    api: Api
    prompts: tuple[bytes, ...]
    max_tokens: tuple[int, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    cache_salt: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class _Chat(_Body):
    messages: list[_Message] | msgspec.UnsetType = msgspec.UNSET
    max_completion_tokens: int | None = None


class _Completion(_Body):
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None


_CHAT = msgspec.json.Decoder(_Chat)
_COMPLETION = msgspec.json.Decoder(_Completion)


def read_job(api: Api, content_type: str, body: bytes, model: str, max_model_len: int) -> Job:
    """The job a chat or completions body describes. Raises EngineRefusal with vLLM's status and words."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed")
    parsed = _decode(_CHAT if api is Api.CHAT else _COMPLETION, body)
    _check_options(parsed)
    if parsed.model is not None and parsed.model != model:
        raise EngineRefusal(
            404,
            f"The model `{parsed.model}` does not exist. Valid aliases: {model}.",
            kind="NotFoundError",
            param="model",
        )
    limit = parsed.max_tokens
    if isinstance(parsed, _Chat):
        prompts: tuple[bytes, ...] = (_chat_identity(parsed),)
        limit = parsed.max_completion_tokens or limit
    else:
        prompts = _completion_identities(parsed.prompt)
    options = parsed.stream_options
    return Job(
        api=api,
        prompts=prompts,
        max_tokens=tuple(_output_tokens(prompt, limit, max_model_len) for prompt in prompts),
        stream=bool(parsed.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        cache_salt=parsed.cache_salt or "",
    )


def _decode(decoder: msgspec.json.Decoder[_Chat] | msgspec.json.Decoder[_Completion], body: bytes) -> Any:
    if not body:
        raise _invalid(_described("missing", "body", "Field required", "None"), param="body")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None


def _malformed(body: bytes, message: str) -> EngineRefusal:
    """vLLM's words for a body that is no JSON, position included (which msgspec does not tell)."""
    position = 0
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        position, message = error.pos, error.msg
    except UnicodeDecodeError as error:
        position, message = error.start, "invalid UTF-8"
    context = f"'input': '<dict of 0 items>', 'ctx': {{'error': {message!r}}}"
    described = f"{{'type': 'json_invalid', 'loc': 'body.{position}', 'msg': 'JSON decode error', {context}}}"
    return _invalid(described, param=f"body.{position}")


def _wrong_field(message: str) -> EngineRefusal:
    found = _AT_PATH.match(message)
    what, path = (found["what"], found["path"] or "") if found else (message, "")
    location = "body" + path.replace("[", ".").replace("]", "")
    return _invalid(f"{{'type': 'value_error', 'loc': '{location}', 'msg': {what!r}}}", param=location)


def _check_options(parsed: _Chat | _Completion) -> None:
    limits = {"max_tokens": parsed.max_tokens}
    if isinstance(parsed, _Chat):
        limits["max_completion_tokens"] = parsed.max_completion_tokens
        if parsed.messages is msgspec.UNSET:
            described = _described("missing", "body.messages", "Field required", "<dict of 1 items>")
            raise _invalid(described, param="body.messages")
    elif parsed.echo:
        raise _bad("echo", "echo is not simulated, leave it out.", True)
    for name, value in limits.items():
        if value is not None and value < 1:
            raise _bad(name, f"{name} must be at least 1, got {value}.", value)
    if parsed.n not in (None, 1):
        raise _bad("n", f"n must be 1, got {parsed.n}.", parsed.n)
    if parsed.stream_options is not None and not parsed.stream:
        raise EngineRefusal(
            400,
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )


def _chat_identity(parsed: _Chat) -> bytes:
    messages = parsed.messages if isinstance(parsed.messages, list) else []
    return tokens.from_chat([(message.role, _content_text(message.content)) for message in messages])


def _content_text(content: str | list[dict[str, Any]] | None) -> str:
    """A message's text. Parts that are no text stand for themselves as JSON, an image as its URL."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                texts.append(url)
            case _:
                texts.append(msgspec.json.encode(part).decode())
    return "".join(texts)


def _completion_identities(prompt: str | list[Any] | None) -> tuple[bytes, ...]:
    prompts = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not prompts or not all(prompts):
        raise EngineRefusal(
            400,
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            param="prompt",
        )
    return tuple(_completion_identity(one) for one in prompts)


def _are_ids(prompt: list[Any]) -> bool:
    return all(isinstance(one, int) for one in prompt)


def _completion_identity(prompt: Any) -> bytes:
    if isinstance(prompt, str):
        return tokens.from_text(prompt)
    if not isinstance(prompt, list):
        raise _wrong_field("A prompt list holds texts, token ids, or lists of token ids - at `$.prompt`")
    for token in prompt:
        if not 0 <= token <= MAX_TOKEN_ID:
            raise EngineRefusal(400, f"Token id {token} is out of vocabulary")
    return tokens.from_token_ids(prompt)


def _output_tokens(prompt: bytes, limit: int | None, max_model_len: int) -> int:
    count = tokens.token_count(prompt)
    if count >= max_model_len:
        raise EngineRefusal(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{count} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={count})",
            param="input_tokens",
        )
    return min(limit or DEFAULT_MAX_TOKENS, max_model_len - count)


def _bad(param: str, message: str, value: object) -> EngineRefusal:
    return EngineRefusal(400, f"{message} (parameter={param}, value={value})", param=param)


def _described(kind: str, location: str, message: str, given: str) -> str:
    return f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{message}', 'input': '{given}'}}"


def _invalid(described: str, param: str | None = None) -> EngineRefusal:
    return EngineRefusal(400, f"1 validation error:\n  {described}", kind="Bad Request", param=param)
