"""An error as the body of an answer, in the shape that clients of the request's API read."""

import json
from collections.abc import Callable
from typing import Any, Final

from epp.errors import RequestError
from epp.payload.apis import DIALECTS, ErrorShape
from epp.payload.records import Api

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def refusal_body(error: RequestError, api: Api | None = None, request_id: str = "") -> bytes:
    """JSON for a client of `api`; None = the API is not known, which is answered as OpenAI's.

    `request_id` is told where the API has a place for it.
    """
    shape = DIALECTS[api].shape if api is not None else ErrorShape.OPENAI
    return json.dumps(_SHAPES[shape](error, request_id), separators=(",", ":")).encode()


def _openai(error: RequestError, request_id: str) -> dict[str, Any]:
    """vLLM's too. `code` is the HTTP status."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.status}
    return {"error": fields}


def _anthropic(error: RequestError, request_id: str) -> dict[str, Any]:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    told = {"type": _ANTHROPIC_TYPES.get(error.status, other), "message": error.message}
    answer: dict[str, Any] = {"type": "error", "error": told}
    return {**answer, "request_id": request_id} if request_id else answer


def _sglang(error: RequestError, request_id: str) -> dict[str, Any]:
    return {"error": {"message": error.message}}


_SHAPES: Final[dict[ErrorShape, Callable[[RequestError, str], dict[str, Any]]]] = {
    ErrorShape.OPENAI: _openai,
    ErrorShape.ANTHROPIC: _anthropic,
    ErrorShape.SGLANG: _sglang,
    ErrorShape.GRPC: _openai,  # for what reads the body of a refused call; the call's own answer is a status
}
