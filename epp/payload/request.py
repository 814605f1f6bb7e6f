"""One HTTP request into what routing needs to know of it, and its body with another model name."""

import json

import msgspec
from msgspec import Raw

from epp.errors import BadRequest, PayloadTooLarge
from epp.payload.body import (
    NO_MESSAGES,
    BodyT,
    Read,
    model_span,
    read_chat,
    read_completions,
    text_bytes,
)
from epp.payload.encoding import encodings, inflate
from epp.payload.identity import chat_identity, prompt_identities, tokens_of
from epp.payload.records import Api, InferenceRequest, RawRequest

_NO_PROMPT = "invalid completions request: must have prompt field"
_TRUE = (b"true", b'"true"', b"1")
_MOST_DIGITS = 15


class Parsed(msgspec.Struct, frozen=True):
    """A request as read.

    Attributes:
        request: `target_model` equals `model`.
        body: as received.
        plain: the body inflated; the same object where it is not compressed.
        model_span: first byte and end in `plain` of the model's JSON value (a string with its quotes, or
            null); None where the body has no model or is not read.
    """

    request: InferenceRequest
    body: bytes
    plain: bytes
    model_span: tuple[int, int] | None


class Rewritten(msgspec.Struct, frozen=True):
    """Bytes to forward, and headers that no longer describe them."""

    body: bytes
    remove_headers: tuple[str, ...]


def api_of(path: str) -> Api:
    """The API whose suffix the path has, at a segment's start; query and trailing slash do not count."""
    segments = "/" + path.partition("?")[0].rstrip("/")
    if segments.endswith("/chat/completions"):
        return Api.CHAT
    if segments.endswith("/completions"):
        return Api.COMPLETIONS
    return Api.PASSTHROUGH


def parse_request(raw: RawRequest, *, max_bytes: int) -> Parsed:
    """Read a request. Methods other than POST and encodings that are not known here pass through unread.

    Of a body that was not shown only the API is known, by its path.

    Raises:
        BadRequest: the body is broken, is not one JSON object, or lacks or doubles what its API requires.
        PayloadTooLarge: the body, as sent or inflated, has more than `max_bytes`.
    """
    if len(raw.body) > max_bytes:
        raise PayloadTooLarge(
            f"the body has {len(raw.body)} bytes, which is more than the limit of {max_bytes}"
        )
    api = api_of(raw.path) if raw.method == "POST" else Api.PASSTHROUGH
    if not raw.body_shown:
        return Parsed(InferenceRequest(api), raw.body, raw.body, None)
    plain = raw.body
    if api is not Api.PASSTHROUGH and (applied := encodings(raw.headers)):
        if applied not in (("gzip",), ("deflate",)):
            api = Api.PASSTHROUGH
        elif plain:
            plain = inflate(plain, applied[0], max_bytes)
    match api:
        case Api.CHAT:
            request, model_span = _chat(plain)
        case Api.COMPLETIONS:
            request, model_span = _completions(plain)
        case Api.PASSTHROUGH:
            request, model_span = InferenceRequest(api=api), None
    return Parsed(request, raw.body, plain, model_span)


def rewrite_model(parsed: Parsed, target: str) -> Rewritten:
    """The body with `target` as its model, every other byte as it was. What was not read stays as it is."""
    if parsed.request.api is Api.PASSTHROUGH:
        return Rewritten(parsed.body, ())
    name = json.dumps(target).encode()
    plain = parsed.plain
    if parsed.model_span is None:
        start = end = plain.index(b"{") + 1
        name = b'"model":' + name + (b"" if plain[end:].lstrip().startswith(b"}") else b",")
    else:
        start, end = parsed.model_span
    inflated = plain is not parsed.body
    return Rewritten(plain[:start] + name + plain[end:], ("content-encoding",) if inflated else ())


def _chat(plain: bytes) -> tuple[InferenceRequest, tuple[int, int] | None]:
    read = read_chat(plain)
    chat = read.body
    model, span = _model(read)
    if not chat.messages:
        raise BadRequest(
            f"{NO_MESSAGES}: it must be a list of at least one object with role and content", "messages"
        )
    identity = chat_identity(chat)
    limit = _count(chat.max_completion_tokens)
    return InferenceRequest(
        api=Api.CHAT,
        model=model,
        target_model=model,
        prompts=(identity,),
        prompt_tokens=tokens_of(identity),
        max_output_tokens=_count(chat.max_tokens) if limit is None else limit,
        stream=bytes(chat.stream) in _TRUE,
        cache_salt=_salt(chat.cache_salt),
    ), span


def _completions(plain: bytes) -> tuple[InferenceRequest, tuple[int, int] | None]:
    read = read_completions(plain)
    completions = read.body
    model, span = _model(read)
    if bytes(completions.prompt) not in (b"", b"null"):
        prompts = prompt_identities(completions.prompt)
    elif bytes(completions.prompt_embeds) not in (b"", b"null"):
        prompts = ()
    else:
        raise BadRequest(f"{_NO_PROMPT}: a text, a list of texts, or token ids", "prompt")
    return InferenceRequest(
        api=Api.COMPLETIONS,
        model=model,
        target_model=model,
        prompts=prompts,
        prompt_tokens=sum(map(tokens_of, prompts)),
        max_output_tokens=_count(completions.max_tokens),
        stream=bytes(completions.stream) in _TRUE,
        cache_salt=_salt(completions.cache_salt),
    ), span


def _model(read: Read[BodyT]) -> tuple[str, tuple[int, int] | None]:
    """The model's name, and where it stands. Absent and null are both no name; two of them are refused."""
    value = bytes(read.body.model)
    if not value:
        return "", None
    span = model_span(read)
    if value == b"null":
        return "", span
    if value[:1] != b'"':
        raise BadRequest("model not found in request body: `model` must be a string", "model")
    return text_bytes(value).decode("utf-8", "replace"), span


def _salt(value: Raw) -> str:
    raw = bytes(value)
    return text_bytes(raw).decode("utf-8", "replace") if raw[:1] == b'"' else ""


def _count(value: Raw) -> int | None:
    """A plain number of tokens; anything else is the engine's to judge."""
    raw = bytes(value)
    return int(raw) if raw.isdigit() and len(raw) <= _MOST_DIGITS else None
