"""Exact tokens of a prompt: what a render service is asked, and what its answer says.

A render service (an engine, or an engine's front end without one) applies the chat template and tokenizes. It
takes the client's body and answers with what `/inference/v1/generate` takes; a completions body is answered
with a list of these, one for each prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import Raw

from epp.errors import BadRequest, NeedFailed
from epp.payload.estimate import Estimate
from epp.payload.generate import rendered_prompt
from epp.payload.identity import PROMPTS_TOLD_APART
from epp.payload.media import Media
from epp.payload.records import Api, InferenceRequest
from epp.payload.request import Parsed, renamed

# Requests that are to be rendered only, or are in tokens already, are not rendered for the choice.
PATHS: Final[Mapping[Api, str]] = MappingProxyType(
    {
        Api.CHAT: "/v1/chat/completions/render",
        Api.COMPLETIONS: "/v1/completions/render",
        Api.RESPONSES: "/v1/responses/render",
        Api.MESSAGES: "/v1/messages/render",
        Api.VERTEX_CHAT_COMPLETIONS: "/v1/chat/completions/render",
        Api.VERTEX_STREAM_RAW_PREDICT: "/v1/responses/render",
        Api.VERTEX_RAW_PREDICT: "/v1/responses/render",
    }
)

UNREADABLE: Final = "unreadable"

_objects = msgspec.json.Decoder(list[Raw])
_NO_ESTIMATE: Final = Estimate()


class RenderNeed(msgspec.Struct, frozen=True):
    """POST `body`, which is JSON, to `url`; the answer's body is the result.

    Attributes:
        timeout_s: how long the request may wait for it.
    """

    url: str
    body: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ExactTokens:
    """Prompts are tokenized by the render service at `url` (no slash at its end), as those of `model`.

    Attributes:
        timeout_s: of a request of text alone.
        media_timeout_s: of one with media, which the service has to fetch and process.
    """

    url: str
    model: str
    timeout_s: float
    media_timeout_s: float

    def need(self, parsed: Parsed) -> RenderNeed | None:
        """None where the API is not rendered, or there are too many prompts to tell apart."""
        request = parsed.request
        path = PATHS.get(request.api)
        if path is None or not 0 < len(request.prompts) <= PROMPTS_TOLD_APART:
            return None
        timeout_s = self.media_timeout_s if request.media else self.timeout_s
        return RenderNeed(self.url + path, renamed(parsed, self.model), timeout_s)


def with_tokens(request: InferenceRequest, answer: bytes) -> InferenceRequest:
    """The request with the prompts, and their media, that a render service answered.

    Raises:
        NeedFailed: the answer is none, or not one for each of the prompts.
    """
    media = Media((), _NO_ESTIMATE)
    try:
        found = _objects.decode(answer) if request.api is Api.COMPLETIONS else [answer]
        rendered = [rendered_prompt(bytes(each), media) for each in found]
    except (BadRequest, msgspec.DecodeError, RecursionError) as error:
        raise NeedFailed(UNREADABLE, str(error)) from None
    if len(rendered) != len(request.prompts):
        raise NeedFailed(UNREADABLE, f"{len(rendered)} prompts for {len(request.prompts)}")
    return msgspec.structs.replace(
        request,
        prompts=tuple([identity for identity, _ in rendered]),
        prompt_tokens=sum([tokens for _, tokens in rendered]),
        media=media.found or request.media,
    )
