"""One log line a request, whatever becomes of it; none where nobody asked for them."""

import logging
from typing import Any

import pytest

from epp.payload.records import RawRequest, Usage
from epp.runtime import logs
from epp.runtime.app import App
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken
from tests.data.runtime import picker as runtime

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
objectives: [{name: batch, priority: -10}]
modelRewrites: [{name: any, rules: [{targets: [{modelRewrite: served}]}]}]
"""
HEADERS = (
    ("x-llm-d-inference-fairness-id", "team"),
    ("x-gateway-inference-objective", "batch"),
)
ASKED = {
    "request_id": "r-1",
    "model": "m",
    "target_model": "served",
    "fairness_id": "team",
    "objective": "batch",
    "priority": -10,
}


def route(app: App, body: bytes) -> Any:
    raw = RawRequest("r-1", "POST", "/v1/chat/completions", HEADERS, body)
    return app.router.route(raw, lambda outcome: None)


def whole_request(app: App) -> None:
    ticket = route(app, runtime.chat("a secret")).placement.ticket
    for fact in (
        AnswerHeaders(200, None, True),
        FirstToken(),
        Ended(Cause.NATURAL, Usage(10, 5, 3), 1, 1),
    ):
        app.router.observe(ticket, fact)


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        {"msg": record.getMessage(), **logs._extra(record)}
        for record in caplog.records
        if record.name == logs.REQUESTS
    ]


async def test_a_request_has_one_line_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logs.REQUESTS)
    app = runtime.picker(1, config=CONFIG)
    whole_request(app)
    (line,) = told(caplog)
    assert line.pop("duration_s") >= line.pop("ttft_s") > 0
    assert line == {
        "msg": "request",
        **ASKED,
        "endpoint": "10.0.0.1:8000",
        "status": 200,
        "cause": "Natural",
        "streaming": True,
        "prompt_tokens": 10,
        "cached_tokens": 3,
        "output_tokens": 5,
    }
    assert "secret" not in caplog.text


async def test_a_refused_request_has_one_line_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logs.REQUESTS)
    app = runtime.picker(0, config=CONFIG)
    app.router.route(
        RawRequest("r-1", "POST", "/v1/chat/completions", HEADERS[:1], runtime.chat()), lambda outcome: None
    )
    (line,) = told(caplog)
    error = line.pop("error")
    assert "endpoint" in error
    assert line == {
        "msg": "request refused",
        **ASKED,
        "objective": None,
        "priority": 0,
        "status": 503,
        "reason": "rejected-no-endpoints",
    }


async def test_a_request_that_cannot_be_read_is_named_by_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logs.REQUESTS)
    route(runtime.picker(1, config=CONFIG), b"{")
    (line,) = told(caplog)
    assert (line["request_id"], line["status"]) == ("r-1", 400)
    assert "model" not in line


async def test_a_fault_of_the_picker_has_its_trace_and_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logs.REQUESTS)
    app = runtime.picker(1, config=CONFIG)
    monkeypatch.setattr(app.director, "submit", lambda *_: 1 / 0)
    assert route(app, runtime.chat()).error.status == 500
    (line,) = told(caplog)
    assert (line["request_id"], line["status"]) == ("r-1", 500)
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR] == [
        True
    ]


async def test_without_asking_there_are_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logs.REQUESTS)
    app = runtime.picker(1, config=CONFIG)
    whole_request(app)
    route(app, b"{")
    assert told(caplog) == []
