import json

import pytest

from epp.errors import BadRequest, InternalError, NoEndpoints, PayloadTooLarge, RequestError, Saturated
from epp.payload.apis import DIALECTS, ErrorShape
from epp.payload.records import Api
from epp.payload.refusal import refusal_body

ODD = 'what "was" wrong: \ud83d é\n'
ERRORS = [BadRequest, PayloadTooLarge, Saturated, InternalError, NoEndpoints]


class PreconditionFailed(RequestError):
    status = 412
    type = "precondition_failed"


class BadGateway(RequestError):
    status = 502
    type = "bad_gateway"


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    "api", [None, *(api for api in Api if DIALECTS[api].shape in (ErrorShape.OPENAI, ErrorShape.GRPC))]
)
def test_shape_is_that_of_an_engine(kind: type[RequestError], api: Api | None) -> None:
    body = refusal_body(kind(ODD, "messages"), api, "r-1")
    assert json.loads(body) == {
        "error": {"message": ODD, "type": kind.type, "param": "messages", "code": kind.status}
    }
    assert list(json.loads(body)["error"]) == ["message", "type", "param", "code"]


def test_no_param_is_null() -> None:
    assert json.loads(refusal_body(BadRequest("x")))["error"]["param"] is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (BadRequest, "invalid_request_error"),
        (PayloadTooLarge, "request_too_large"),
        (Saturated, "rate_limit_error"),
        (InternalError, "api_error"),
        (NoEndpoints, "overloaded_error"),
        (PreconditionFailed, "invalid_request_error"),
        (BadGateway, "api_error"),
    ],
)
@pytest.mark.parametrize("api", [Api.MESSAGES, Api.COUNT_TOKENS])
def test_anthropic_clients_are_told_in_their_words(kind: type[RequestError], name: str, api: Api) -> None:
    error = kind(ODD, "messages")
    expected = {"type": "error", "error": {"type": name, "message": ODD}}
    assert json.loads(refusal_body(error, api)) == expected
    assert json.loads(refusal_body(error, api, "r-1")) == {**expected, "request_id": "r-1"}


@pytest.mark.parametrize("kind", ERRORS)
def test_sglangs_shape(kind: type[RequestError]) -> None:
    assert json.loads(refusal_body(kind(ODD, "input_ids"), Api.SGLANG_GENERATE)) == {
        "error": {"message": ODD}
    }
