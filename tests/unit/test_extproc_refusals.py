"""Refusals in the form that the client reads."""

import json
from typing import Any

import pytest

from epp import errors
from epp.extproc import refusals
from epp.extproc.heads import STATUS_OF_GRPC, is_grpc, read_answer_head, read_request_head
from epp.extproc.refusals import GRPC_STATUS, refusal
from epp.http2.codes import Status


def head(path: str, content_type: str = "application/json") -> Any:
    fields = (
        (":method", b"POST"),
        (":path", path.encode()),
        ("content-type", content_type.encode()),
        ("x-request-id", b"r-1"),
    )
    return read_request_head(fields, False, lambda: "made")


def every_error() -> list[type[errors.RequestError]]:
    found = [errors.RequestError]
    for one in found:
        found += one.__subclasses__()
    return [one for one in found if hasattr(one, "status") and one.__module__.startswith("epp.")]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.__name__)
def test_every_error_has_a_grpc_status_that_comes_back_as_its_kind(error: Any) -> None:
    reply = refusal(error("said"), head("/vllm.grpc.engine.VllmEngine/Generate", "application/grpc"))
    assert reply.grpc_status == GRPC_STATUS[error.status] != Status.UNKNOWN
    assert reply.body == b"said"
    assert "content-type" not in dict(reply.headers)
    assert STATUS_OF_GRPC[str(int(reply.grpc_status)).encode()] // 100 == error.status // 100


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/chat/completions", {"error"}),
        ("/v1/messages?beta=true", {"type", "error", "request_id"}),
        ("/v1/messages/count_tokens", {"type", "error", "request_id"}),
        ("/generate", {"error"}),
        ("/anything/else", {"error"}),
        ("/vllm.grpc.engine.VllmEngine/Generate", {"error"}),
    ],
)
def test_json_has_the_shape_of_the_api_that_the_path_names(path: str, members: set[str]) -> None:
    reply = refusal(errors.Saturated("full"), head(path))
    told = json.loads(reply.body)
    assert set(told) == members
    assert told["error"]["message"] == "full"
    assert reply.grpc_status is None
    assert dict(reply.headers)["content-type"] == b"application/json"
    assert dict(reply.headers)["retry-after"] == b"1"


def test_before_the_headers_came_it_is_as_openai_has_it() -> None:
    reply = refusal(errors.PayloadTooLarge("too large"), None)
    assert json.loads(reply.body)["error"]["code"] == 413


@pytest.mark.parametrize(
    ("content_type", "speaks"),
    [
        ("application/grpc", True),
        ("application/grpc+proto", True),
        ("application/grpc+json", True),
        ("application/grpc-web", False),
        ("application/grpc-web+proto", False),
        ("application/grpcx", False),
        ("", False),
    ],
)
def test_what_a_proxy_takes_for_grpc(content_type: str, speaks: bool) -> None:
    assert is_grpc(content_type) is speaks
    assert head("/x", content_type).speaks_grpc is speaks


def test_a_status_that_is_no_number_changes_nothing() -> None:
    fields = ((":status", b"200"), ("content-type", b"application/grpc"))
    for value in (b"0", b"", b"x", b"99"):
        assert read_answer_head((*fields, ("grpc-status", value))).status == 200


def _all_errors() -> None:
    for error in every_error():
        test_every_error_has_a_grpc_status_that_comes_back_as_its_kind(error)


@pytest.mark.parametrize("wrong", [{}, {429: Status.UNAVAILABLE}, {400: Status.INTERNAL}])
def test_a_wrong_table_is_seen(wrong: dict[int, Status], monkeypatch: pytest.MonkeyPatch) -> None:
    table = {} if not wrong else {**GRPC_STATUS, **wrong}
    monkeypatch.setattr(refusals, "GRPC_STATUS", table)
    with pytest.raises(AssertionError):
        _all_errors()
