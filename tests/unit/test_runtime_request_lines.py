"""One log line a request, whatever becomes of it; none where nobody asked for them."""

import logging
from collections import Counter
from typing import Any

import pytest

from epp.errors import NeedFailed
from epp.payload.records import RawRequest, Usage
from epp.payload.render import RenderNeed
from epp.runtime import logs, recorder
from epp.runtime.app import App
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken, Placement
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


CHAT = RawRequest("r-1", "POST", "/v1/chat/completions", (), runtime.chat())


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


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without what else the process had to say meanwhile."""
    return [record for record in caplog.records if record.name.startswith("epp.")]


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
    errors = [each for each in ours(caplog) if each.levelno >= logging.ERROR]
    assert [each.exc_info is not None for each in errors] == [True]


async def test_without_asking_there_are_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logs.REQUESTS)
    app = runtime.picker(1, config=CONFIG)
    whole_request(app)
    route(app, b"{")
    assert told(caplog) == []


def test_what_happens_again_and_again_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a peer that names another address each time fills neither the log nor memory."""
    monkeypatch.setattr(recorder, "LOGGED", 5)
    app = runtime.picker(1)
    ticket = app.director.submit(app.director.prepare(CHAT, 0.0), 0.0)
    assert isinstance(ticket, Placement)
    for number in range(20):
        for _ in range(2):
            app.director.observe(ticket.ticket, AnswerHeaders(200, f"192.0.2.{number}:1", False), 0.0)
        app.recorder.plugin_failed(app, KeyError(number))
        app.recorder.need_failed(RenderNeed("http://render", b"{}", 5.0), NeedFailed("late", str(number)))
    app.recorder.plugin_failed(app, ValueError("another kind"))
    said = Counter(record.getMessage().split(";")[0] for record in ours(caplog))
    assert said == {
        "an answer came from outside the pool": 5,
        "a plugin failed": 2,
        "a request is placed without what it needed to know": 1,
    }
    assert runtime.sample(app, "served_elsewhere_total", where="outside") == 40
    assert runtime.sample(app, "plugin_failures_total") == 21
