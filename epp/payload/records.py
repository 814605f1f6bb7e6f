"""Records of one request and of its answer, as the other rooms see them."""

from enum import StrEnum
from typing import Literal

import msgspec


class Api(StrEnum):
    """The request API, which decides where the prompt, the usage and the model name stand."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    CONVERSATIONS = "conversations"
    CHAT_RENDER = "chat-render"
    COMPLETIONS_RENDER = "completions-render"
    IMAGES = "images"
    MESSAGES = "messages"
    COUNT_TOKENS = "count-tokens"
    VLLM_GENERATE = "vllm-generate"
    SGLANG_GENERATE = "sglang-generate"
    VLLM_GRPC_GENERATE = "vllm-grpc-generate"
    VLLM_GRPC_EMBED = "vllm-grpc-embed"
    VERTEX_CHAT_COMPLETIONS = "vertex-chat-completions"
    VERTEX_STREAM_RAW_PREDICT = "vertex-stream-raw-predict"
    VERTEX_RAW_PREDICT = "vertex-raw-predict"
    PASSTHROUGH = "passthrough"


Headers = tuple[tuple[str, str], ...]
"""Name (lower case, no pseudo headers) and value, in order, duplicates kept."""


def find_header(headers: Headers, *names: str) -> str | None:
    """The last value of the first of `names` that is present."""
    for name in names:
        found = None
        for key, value in headers:
            if key == name:
                found = value
        if found is not None:
            return found
    return None


class RawRequest(msgspec.Struct, frozen=True):
    """One HTTP request as the proxy delivered it.

    Attributes:
        request_id: the client's `x-request-id`, or one made for it.
        path: `:path`, query included.
        headers: without pseudo headers.
        body: the bytes as sent, still compressed where `content-encoding` says so.
        subset: `address:port` entries the gateway restricts the choice to; None = no restriction,
            empty = nothing is eligible.
        body_shown: False where the proxy does not show the body (headers only): `body` is then empty, and
            the choice is made without knowing what is asked.
    """

    request_id: str
    method: str
    path: str
    headers: Headers
    body: bytes
    subset: tuple[str, ...] | None = None
    body_shown: bool = True

    def header(self, *names: str) -> str | None:
        """The last value of the first of `names` that is present."""
        return find_header(self.headers, *names)


MediaKind = Literal["image", "video", "audio"]


class Medium(msgspec.Struct, frozen=True):
    """A picture, video or sound in a prompt.

    Attributes:
        digest: 64 bits of its content, or of its address.
        tokens: what it counts for in the prompt.
    """

    kind: MediaKind
    digest: int
    tokens: int


class InferenceRequest(msgspec.Struct, frozen=True):
    """What a request asks for, as far as choosing an endpoint needs to know.

    Attributes:
        model: the client's model name; empty where the API has none.
        target_model: the name the engine is asked for (differs from `model` after a rewrite).
        prompts: identity of each prompt, four bytes a token: UTF-8 text as it is, token ids as
            little-endian uint32. Equal prefixes of two prompts mean equal prefixes of these bytes.
        prompt_tokens: tokens over all prompts; for text an estimate (four bytes a token).
        max_output_tokens: the client's limit, None if absent.
        chains: block keys given directly (simulation), in place of `prompts`.
        media: pictures, videos and sounds of all prompts, in order, up to a limit.
    """

    api: Api
    model: str = ""
    target_model: str = ""
    prompts: tuple[bytes, ...] = ()
    prompt_tokens: int = 0
    max_output_tokens: int | None = None
    stream: bool = False
    cache_salt: str = ""
    chains: tuple[tuple[int, ...], ...] | None = None
    media: tuple[Medium, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Token counts an engine reported. `cached_tokens` is None where the engine does not report it."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
