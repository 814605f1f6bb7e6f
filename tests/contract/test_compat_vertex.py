"""Cases of whole calls of Vertex AI's gRPC API, from the proxy's messages to the picker's replies.

`docs/compatibility.md` names each of them.
"""

import json
from typing import Any

import pytest

from epp.http2.codes import Status
from tests.data.compat import line
from tests.data.vertex.google import METHODS, HttpBody, asked, framed, frames, path_of, told

P, Line = line.P, line.Line
GRPC = "application/grpc"
SCORERS = ("queue-scorer", "prefix-cache-scorer")
THREE = (P(3, 0.2), P(0, 0.1), P(10, 0.2))
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
TURN = {"input": "Hello"}
JSON_OF = {"ChatCompletions": CHAT, "StreamRawPredict": TURN, "RawPredict": TURN}


def picker(*pods: Any, rewrite: str = "") -> Any:
    plugins = [{"type": each} for each in (*SCORERS, "vertexai-parser")]
    sections: dict[str, Any] = {"requestHandler": {"parsers": [{"pluginRef": "vertexai-parser"}]}}
    if rewrite:
        rules = [{"targets": [{"modelRewrite": rewrite}]}]
        sections["modelRewrites"] = [{"name": "all", "rules": rules}]
    return Line(*pods, config=line.config(*plugins, uses=SCORERS, **sections))


def call(pool: Any, *body: bytes, method: str = "ChatCompletions", **request: Any) -> Any:
    headers = {"content-type": GRPC, "te": "trailers", "x-request-id": "given", **request.pop("headers", {})}
    return pool.ask(*body, path=path_of(method), headers=headers, **request)


@pytest.mark.parametrize("method", METHODS)
def test_the_json_in_a_call_is_read_as_that_of_its_api(method: str) -> None:
    pool = picker(*THREE)
    body = asked(method, {**JSON_OF[method], "model": "gemma"})
    made = call(pool, body[:7], body[7:], method=method)
    assert made.pod == 1
    assert made.body("request") == body
    assert made.head["set"] == {}
    assert pool.sample("request_total", **line.model_labels("gemma", "gemma")) == 1
    wrong = call(pool, asked(method, {"prompt": "neither"}), method=method)
    status, message, _ = wrong.refusal
    assert (status, wrong.replies[0]["grpc"]) == (400, Status.INVALID_ARGUMENT)
    assert "must have" in message


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_not_required(method: str) -> None:
    pool = picker(*THREE)
    assert call(pool, asked(method, JSON_OF[method]), method=method).pod == 1
    assert pool.sample("request_total", **line.model_labels("", "")) == 1


def test_other_methods_pass_unread() -> None:
    body = framed(HttpBody(data=b"x"))
    made = call(picker(*THREE), body, method="Predict")
    assert made.pod == 1
    assert made.body("request") == body


@pytest.mark.parametrize("body", [b"\0\0\0\0", framed(b"\xff"), b"no healthy upstream", framed(b"")])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_no_message_is_refused_as_a_status(method: str, body: bytes) -> None:
    made = call(picker(*THREE), body, method=method)
    status, message, _ = made.refusal
    assert (status, made.replies[0]["grpc"]) == (400, Status.INVALID_ARGUMENT)
    assert message.startswith(f"invalid {method} request")


USAGE = {"usage": {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}}
ANSWER = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], **USAGE}
DOCUMENT = told(json.dumps(ANSWER).encode())
EVENTS = told(b"data: " + json.dumps({"choices": [{"delta": {"content": "a"}}], **USAGE}).encode() + b"\n\n")


@pytest.mark.parametrize("pieces", [(DOCUMENT,), (DOCUMENT[:4], DOCUMENT[4:]), (told(b""), EVENTS)])
def test_the_usage_of_an_answer_is_counted(pieces: tuple[bytes, ...]) -> None:
    pool = picker(P())
    made = call(pool, asked("ChatCompletions", CHAT))
    made.answer(*pieces, content_type=GRPC, trailers=True)
    assert made.pieces("response") == [(piece, False) for piece in pieces]
    assert made.replies[-1] == {"trailers": "response"}
    labels = line.model_labels("", "")
    counted = [pool.sample(f"request_{what}_tokens_sum", **labels) for what in ("input", "output")]
    assert counted == [10, 20]
    assert pool.sample("request_ttft_seconds_count", **labels, streaming="true") == 1
    assert made.finished
    assert pool.idle


@pytest.mark.parametrize("pieces", [(), (b"\0\0\0\0",), (framed(b"\xff"),), (b"no healthy upstream",)])
def test_an_answer_that_tells_nothing_passes(pieces: tuple[bytes, ...]) -> None:
    pool = picker(P(), rewrite="target")
    made = call(pool, asked("ChatCompletions", {**CHAT, "model": "mine"}))
    made.answer(*pieces, content_type=GRPC, trailers=True)
    assert b"".join(piece for piece, _ in made.pieces("response")) == b"".join(pieces)
    assert made.replies[-1] == {"trailers": "response"}
    assert pool.sample("request_input_tokens_count", **line.model_labels("mine", "target")) == 0
    assert pool.idle


# -- both ways under another name ----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_rewritten_and_put_back_in_the_messages(method: str) -> None:
    target = "a-target-with-a-longer-name-" * 8
    pool = picker(P(), rewrite=target)
    body = asked(method, {**JSON_OF[method], "model": "mine"}, later="kept")
    made = call(pool, body, method=method, headers={"content-length": str(len(body))})
    sent = made.body("request")
    assert sent == asked(method, {**JSON_OF[method], "model": target}, later="kept")
    assert made.head["remove"] == ["content-length"]
    answer = told(json.dumps({"id": "1", "model": target, **USAGE}).encode(), "application/json")
    made.answer(answer[:50], answer[50:], content_type=GRPC, trailers=True)
    (message,) = frames(b"".join(piece for piece, _ in made.pieces("response")))
    assert json.loads(message.data) == {"id": "1", "model": "mine", **USAGE}
    assert message.content_type == "application/json"
    assert pool.sample("request_total", **line.model_labels("mine", target)) == 1
    assert pool.idle


def test_what_is_held_of_the_last_event_goes_in_front_of_the_trailers() -> None:
    pool = picker(P(), rewrite="target")
    made = call(pool, asked("ChatCompletions", {**CHAT, "model": "mine"}))
    made.answer(told(b'data: {"model":"target"}'), content_type=GRPC, trailers=True)
    messages = frames(b"".join(piece for piece, _ in made.pieces("response")))
    assert [message.data for message in messages] == [b"", b'data: {"model":"mine"}']
    assert made.replies[-1] == {"trailers": "response"}
    assert pool.idle


def test_equal_prompts_meet_over_the_raw_methods() -> None:
    """The prefix index knows a prompt again, whatever method it comes by."""
    turn = {"input": "once upon a time " * 200, "model": "m"}
    pool = picker(P(), P(), P())
    first = call(pool, asked("RawPredict", turn), method="RawPredict")
    first.answer(told(b"{}"), content_type=GRPC, trailers=True)
    for method in ("StreamRawPredict", "RawPredict", "StreamRawPredict"):
        again = call(pool, asked(method, turn), method=method)
        assert again.pod == first.pod
        again.answer(told(b"{}"), content_type=GRPC, trailers=True)
