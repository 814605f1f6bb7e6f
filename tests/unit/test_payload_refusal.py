import json

import pytest

from epp.errors import BadRequest, InternalError, NoEndpoints, PayloadTooLarge, RequestError, Saturated
from epp.payload.refusal import refusal_body


@pytest.mark.parametrize("kind", [BadRequest, PayloadTooLarge, Saturated, InternalError, NoEndpoints])
def test_shape_is_that_of_an_engine(kind: type[RequestError]) -> None:
    body = refusal_body(kind('what "was" wrong: \ud83d é\n', "messages"))
    assert json.loads(body) == {
        "error": {
            "message": 'what "was" wrong: \ud83d é\n',
            "type": kind.type,
            "param": "messages",
            "code": kind.status,
        }
    }
    assert list(json.loads(body)["error"]) == ["message", "type", "param", "code"]


def test_no_param_is_null() -> None:
    assert json.loads(refusal_body(BadRequest("x")))["error"]["param"] is None
