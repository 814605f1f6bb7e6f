"""Cases that every picker of this protocol is known by, from the proxy's messages to the picker's replies.

`docs/compatibility.md` names each of them. The pool is written as P(waiting, KV usage), endpoint by endpoint.
"""

import json
from typing import Any

import pytest

from epp import names
from epp.errors import InternalError, NoEndpoints, Saturated
from epp.extproc.records import RequestChunk, RequestHeaders, ResponseTrailers
from epp.pool.records import Mask
from epp.runtime.gauges import Gauges
from epp.scheduling.ports import Ctx
from tests.data.compat import line

P, Line = line.P, line.Line
model_labels, prompt = line.model_labels, line.prompt

THREE = (P(0, 0.2), P(0, 0.1), P(10, 0.2))
REWRITE = "x-llm-d-model-name-rewrite"


def picker(*pods: Any, **options: Any) -> Any:
    """Queue, KV usage and prefix, each with weight 1."""
    return Line(*pods, config=line.WEIGHTS_ONE, **options)


# -- a request's way ----------------------------------------------------------------------------------


def test_low_queue_and_kv_cache_win() -> None:
    pool = picker(P(3, 0.2), P(0, 0.1), P(10, 0.2))
    headers = {REWRITE: "target-model", "x-request-id": "given", "x-own": "kept"}
    asked = pool.ask(prompt(), headers=headers)
    assert asked.destination == "192.168.1.2:8000"
    assert json.loads(asked.body("request")) == json.loads(prompt("target-model"))
    assert asked.head["set"] == {}
    assert asked.head["remove"] == [REWRITE]
    assert pool.sample("request_total", **model_labels("my-model", "target-model")) == 1
    Gauges(pool.metrics).pool(pool.store, pool.ledger, pool.budget.used)
    assert pool.sample("ready_endpoints", name="pool") == 3


def test_without_adapters_the_lowest_kv_usage_wins() -> None:
    assert picker(P(10, 0.2), P(10, 0.4), P(10, 0.3)).ask(prompt()).pod == 0


def test_nothing_is_shed_by_default() -> None:
    assert picker(P(6, 0.2), P(0, 0.85), P(10, 0.9)).ask(prompt()).pod == 0


def test_a_saturated_pool_still_serves() -> None:
    full = P(1000, 1.0)
    assert picker(full, P(1001, 1.0), full, full).ask(prompt()).pod in {0, 2, 3}


def test_unknown_api_passes_and_is_routed_by_load() -> None:
    pool = picker(P(3, 0.2), P(0, 0.1), P(10, 0.2))
    asked = pool.ask(b"passthrough-parser", path="/any/path")
    assert asked.pod == 1
    assert asked.body("request") == b"passthrough-parser"
    assert pool.sample("request_total", **model_labels("", "")) == 1


def test_bad_json_is_refused_as_json() -> None:
    status, message, headers = picker(*THREE).ask(b"no healthy upstream").refusal
    assert status == 400
    assert message.startswith("error unmarshaling request bodyMap: ")
    assert headers["content-type"] == "application/json"


def test_a_missing_model_is_refused() -> None:
    pool = picker(*THREE)
    assert pool.ask(prompt(model=None)).refusal[:2] == (400, "model not found in request body")
    assert pool.ask(prompt(model=None), headers={REWRITE: "given"}).pod == 1


@pytest.mark.parametrize("cut", [1, 20, len(prompt()) - 1])
def test_a_body_in_two_messages_is_one(cut: int) -> None:
    body = prompt()
    asked = picker(P(4, 0.2), P(4, 0.85)).ask(body[:cut], body[cut:])
    assert asked.pod == 0
    assert asked.body("request") == body


def test_a_request_without_body_and_pods_gets_503() -> None:
    status, message, headers = picker().ask(method="GET", path="/v1/models").refusal
    assert status == 503
    assert message == "failed to find endpoint candidates for serving the request"
    assert headers[names.DROPPED_REASON] == "rejected-no-endpoints"
    assert headers["retry-after"] == "1"


def test_a_request_without_body_is_scheduled_and_obeys_the_subset() -> None:
    pool = picker(P(3, 0.2), P(0, 0.1), P(10, 0.2))
    assert pool.ask(method="GET", path="/v1/models").pod == 1
    assert pool.ask(method="GET", path="/v1/models", subset=["192.168.1.3:8000"]).pod == 2
    assert picker(P(host_port="[fd00::1]:8000")).ask(method="GET").destination == "[fd00::1]:8000"


SUBSETS = {
    "all": (["192.168.1.1:8000", "192.168.1.2:8000", "192.168.1.3:8000"], 1),
    "the busy one": (["192.168.1.3:8000"], 2),
    "two": (["192.168.1.1:8000", "192.168.1.3:8000"], 0),
    "with one unknown": (["192.168.1.3:8000", "192.168.1.99:8000"], 2),
}


@pytest.mark.parametrize("name", SUBSETS)
def test_the_subset_hint_restricts_the_pick(name: str) -> None:
    subset, pod = SUBSETS[name]
    assert picker(*THREE).ask(prompt(), subset=subset).pod == pod


@pytest.mark.parametrize("subset", [["192.168.1.99:8000"], ["192.168.1.1:9999"], []])
def test_a_subset_nobody_matches_gets_503(subset: list[str]) -> None:
    status, _, headers = picker(*THREE).ask(prompt(), subset=subset).refusal
    assert status == 503
    assert headers[names.DROPPED_REASON] == "rejected-no-endpoints"


def test_an_unknown_model_is_routed_under_its_name() -> None:
    asked = picker(*THREE).ask(prompt("direct-model"))
    assert asked.pod == 1
    assert asked.body("request") == prompt("direct-model")


# -- an answer's way ----------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
ANSWER = json.dumps({"model": "target", "choices": [{"index": 0, "text": "x"}], "usage": USAGE}).encode()


def answered(*pieces: bytes, **answer: Any) -> Any:
    """A routed request with its answer."""
    pool = picker(*THREE)
    asked = pool.ask(prompt())
    asked.answer(*pieces, **answer)
    assert asked.finished
    assert pool.idle
    return asked


def input_tokens(asked: Any) -> tuple[float, float]:
    labels = model_labels("my-model", "my-model")
    told = [asked.line.sample(f"request_input_tokens_{what}", **labels) for what in ("sum", "count")]
    return told[0], told[1]


def test_a_json_answer_in_pieces_passes_piece_by_piece() -> None:
    pieces = [ANSWER[:30], ANSWER[30:100], ANSWER[100:]]
    asked = answered(*pieces)
    assert asked.pieces("response") == [(pieces[0], False), (pieces[1], False), (pieces[2], True)]
    assert input_tokens(asked) == (7, 1)
    assert asked.answer_head["set"] == {"x-went-into-resp-headers": "true"}


def test_an_answer_that_is_no_json_passes_unchanged() -> None:
    asked = answered(b'{"model": "target", ', b"oh no")
    assert asked.body("response") == b'{"model": "target", oh no'


def test_an_empty_last_piece_ends_the_answer() -> None:
    asked = answered(ANSWER, b"")
    assert asked.pieces("response") == [(ANSWER, False), (b"", True)]
    assert input_tokens(asked) == (7, 1)


TOLD = b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}"
TEXT = b'data: {"choices":[{"index":0,"text":"x"}]}'
STREAMS = {
    "whole events": [TEXT + b"\n\n", TEXT + b"\n\n", TOLD + b"\n\n", b"data: [DONE]\n\n", b""],
    "no blank lines": [b"data: {}", TOLD + b"\ndata: [DONE]", b""],
}


@pytest.mark.parametrize("name", STREAMS)
def test_events_pass_one_by_one_and_usage_is_counted(name: str) -> None:
    pieces = STREAMS[name]
    asked = answered(*pieces, content_type=line.SSE)
    last = len(pieces)
    assert asked.pieces("response") == [(piece, number == last) for number, piece in enumerate(pieces, 1)]
    assert input_tokens(asked) == (7, 1)


@pytest.mark.parametrize("cut", range(1, 100, 7))
def test_usage_of_an_event_in_two_messages_is_counted(cut: int) -> None:
    usage = b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n"
    asked = answered(usage[:cut], usage[cut:], b"data: [DONE]\n\n", content_type=line.SSE)
    assert input_tokens(asked) == (7, 1)


# -- putting the model's name back --------------------------------------------------------------------

CHUNK = b'data: {"id":"1","model":"target","choices":[{"delta":{"content":"target"}}]}\n\n'

PUT_BACK = {
    "JSON": ((b'{"id":"1","model":"target"}',), line.JSON, b'{"id":"1","model":"my-model"}'),
    "spaced colon": ((b'{"model" : "target"}',), line.JSON, b'{"model" : "my-model"}'),
    "no model": ((b'{"id":"1"}',), line.JSON, b'{"id":"1"}'),
    "event": ((CHUNK,), line.SSE, CHUNK.replace(b'"model":"target"', b'"model":"my-model"')),
    "end mark": ((b"data: [DONE]\n\n",), line.SSE, b"data: [DONE]\n\n"),
    "cut name": ((b'{"model":"tar', b'get"}'), line.JSON, b'{"model":"my-model"}'),
}


@pytest.mark.parametrize("name", PUT_BACK)
def test_the_clients_model_name_is_put_back(name: str) -> None:
    pieces, content_type, expected = PUT_BACK[name]
    asked = picker(*THREE).ask(prompt(), headers={REWRITE: "target"})
    asked.answer(*pieces, content_type=content_type, headers={"content-length": "1"})
    assert asked.body("response") == expected
    assert asked.answer_head["remove"] == ["content-length"]


def test_equal_model_names_change_nothing() -> None:
    asked = picker(*THREE).ask(prompt("target"), headers={REWRITE: "target"})
    asked.answer(ANSWER, headers={"content-length": str(len(ANSWER))})
    assert asked.body("response") == ANSWER
    assert asked.answer_head["remove"] == []


def test_a_name_given_to_a_request_without_one_is_not_taken_back() -> None:
    asked = picker(*THREE).ask(prompt(model=None), headers={REWRITE: "target"})
    asked.answer(ANSWER)
    assert asked.body("response") == ANSWER


# -- headers and bodies -------------------------------------------------------------------------------

CONTROL = {
    "x-llm-d-inference-fairness-id": "tenant",
    "x-gateway-inference-objective": "gold",
    "x-prefiller-host-port": "10.6.6.6:1",
    "x-gateway-destination-endpoint-subset": "10.6.6.6:1",
}


def test_control_headers_of_a_client_go_no_further() -> None:
    sent = {**CONTROL, names.DESTINATION_ENDPOINT: "10.6.6.6:1"}
    asked = picker(*THREE).ask(prompt(), headers=sent)
    assert asked.destination == "192.168.1.2:8000"
    assert sorted(asked.head["remove"]) == sorted(CONTROL)


@pytest.mark.parametrize("modes", [line.FULL_DUPLEX, line.BUFFERED])
def test_the_announced_length_is_that_of_the_new_body(modes: Any) -> None:
    body = prompt()
    headers = {REWRITE: "a-longer-name", "content-length": str(len(body))}
    asked = picker(*THREE).ask(body, headers=headers, modes=modes)
    if modes is line.BUFFERED:
        new = asked.head["replace"]
        assert asked.head["set"]["content-length"] == str(len(new))
    else:
        new = asked.body("request")
        assert "content-length" not in asked.head["set"]
        assert "content-length" in asked.head["remove"]
    assert json.loads(new)["model"] == "a-longer-name"


def test_scheduling_sees_the_headers() -> None:
    sent = {"x-own": "kept", "authorization": "Bearer x", "x-llm-d-inference-fairness-id": "tenant"}
    asked = picker(*THREE).ask(prompt(), headers=sent)
    assert dict(asked.raw.headers) == {"content-type": line.JSON, **sent}


def test_the_subset_hint_of_the_body_message_counts() -> None:
    pool = picker(*THREE)
    asked = pool.stream()
    fields = ((":method", b"POST"), (":path", b"/v1/completions"))
    asked.say(RequestHeaders(0.0, fields, False, ("192.168.1.1:8000",), line.FULL_DUPLEX))
    asked.say(RequestChunk(0.0, prompt(), True, ("192.168.1.3:8000",)))
    assert asked.pod == 2


BODIES = {
    "empty": ((b"",), [(b"", True)]),
    "one": ((b"abc",), [(b"abc", True)]),
    "many": ((b"a" * 62_000 + b"b" * 10,), [(b"a" * 62_000, False), (b"b" * 10, True)]),
    "empty last": ((b"a" * 100, b""), [(b"a" * 100, True)]),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_sent_on_in_pieces_without_metadata(name: str) -> None:
    body, pieces = BODIES[name]
    asked = picker(*THREE).ask(*body, path="/any/path")
    assert asked.pieces("request") == pieces
    for message in asked.wire[1:]:
        assert not line.script.pb.ProcessingResponse.FromString(message).HasField("dynamic_metadata")


# -- how a stream ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "cause"), [(False, "ClientDisconnect"), (True, "Error")])
@pytest.mark.parametrize("begun", [False, True])
def test_an_abort_is_told_by_its_cause_and_gives_everything_back(
    begun: bool, error: bool, cause: str
) -> None:
    pool = picker(*THREE)
    asked = pool.ask(prompt())
    if begun:
        asked.say(line.ResponseHeaders(0.0, ((":status", b"200"),), False))
    asked.close(error=error)
    assert asked.finished
    assert pool.idle
    labels = model_labels("my-model", "my-model")
    assert pool.sample("request_error_total", **labels, error_code=cause) == 1


def test_a_stream_closed_after_its_answer_has_ended_naturally() -> None:
    asked = answered(ANSWER)
    asked.close(error=True)
    labels = model_labels("my-model", "my-model")
    assert asked.line.sample("request_duration_seconds_count", **labels) == 1
    assert asked.line.sample("request_error_total", **labels, error_code="Error") is None


def test_an_answer_may_end_by_trailers() -> None:
    pool = picker(*THREE)
    asked = pool.ask(prompt())
    asked.say(line.ResponseHeaders(0.0, ((":status", b"200"), ("content-type", b"application/json")), False))
    asked.say(line.ResponseChunk(0.0, ANSWER, False))
    asked.say(ResponseTrailers(0.0))
    assert asked.pieces("response") == [(ANSWER, False)]
    assert asked.replies[-1] == {"trailers": "response"}
    assert pool.idle


# -- the director -------------------------------------------------------------------------------------


def test_several_picks_are_one_list() -> None:
    pods = [P(i, 0.1 * i, f"192.168.{i}.100:8000") for i in (1, 2, 3, 4)]
    config = line.profile("queue-scorer", "kv-cache-utilization-scorer", picks=3)
    asked = Line(pods[0], pods[1], pods[3], pods[2], config=config).ask(prompt())
    assert asked.destination == "192.168.1.100:8000,192.168.2.100:8000,192.168.3.100:8000"


@pytest.mark.parametrize(
    ("headers", "flow"),
    [
        ({}, "default-flow"),
        ({"x-llm-d-inference-fairness-id": "new"}, "new"),
        ({"x-gateway-inference-fairness-id": "old"}, "old"),
        ({"x-gateway-inference-fairness-id": "old", "x-llm-d-inference-fairness-id": "new"}, "new"),
    ],
)
def test_the_flow_is_the_fairness_header_or_the_default(headers: dict[str, str], flow: str) -> None:
    pool = picker(*THREE)
    pool.ask(prompt(), headers=headers)
    labels = {**model_labels("my-model", "my-model"), "fairness_id": flow}
    assert pool.sample("request_total", **labels) == 1


REFUSED = {
    "no prompt": ("/v1/completions", {"model": "m"}, "must have prompt field"),
    "no messages": ("/v1/chat/completions", {"model": "m"}, "must have valid messages field"),
    "empty messages": (
        "/v1/chat/completions",
        {"model": "m", "messages": []},
        "must have valid messages field",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_field_is_named(name: str) -> None:
    path, body, expected = REFUSED[name]
    status, message, _ = picker(*THREE).ask(json.dumps(body).encode(), path=path).refusal
    assert status == 400
    assert expected in message


def test_no_candidates_get_503() -> None:
    status, message, headers = picker().ask(prompt()).refusal
    assert (status, message) == (503, "failed to find endpoint candidates for serving the request")
    assert headers[names.DROPPED_REASON] == "rejected-no-endpoints"


class Chooses:
    """A picker of a profile that does as told."""

    def __init__(self, outcome: Exception | tuple[int, ...]) -> None:
        self.outcome = outcome

    def pick(self, ctx: Ctx, total: Any, alive: Mask) -> tuple[int, ...]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


PLUGIN_OUTCOMES = {
    "typed error": (NoEndpoints("none of mine"), 503, "none of mine"),
    "typed 429": (Saturated("not now"), 429, "not now"),
    "typed 500": (InternalError("my fault"), 500, "my fault"),
    "untyped error": (KeyError("x"), 500, "plugin max-score-picker failed"),
    "nothing chosen": ((), 500, "picker max-score-picker chose nothing"),
}


@pytest.mark.parametrize("name", PLUGIN_OUTCOMES)
def test_a_plugins_error_keeps_its_status_and_a_fault_is_500(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, status, message = PLUGIN_OUTCOMES[name]
    monkeypatch.setattr("epp.scheduling.pickers.MaxScorePicker.pick", Chooses(outcome).pick)
    pool = picker(*THREE)
    refusal = pool.ask(prompt()).refusal
    assert refusal[0] == status
    assert message in refusal[1]
    assert pool.idle


# -- which endpoints are candidates --------------------------------------------------------------------

ALL = {0, 1, 2}
HINTS: dict[str, tuple[Any, set[int]]] = {
    "no metadata": (None, ALL),
    "no namespace": ({}, ALL),
    "another namespace": ({"envoy.lb": {}}, ALL),
    "namespace without the key": ({names.SUBSET_NAMESPACE: {}}, ALL),
    "one": ({names.SUBSET_NAMESPACE: ["10.0.0.1:8080"]}, {0}),
    "two": ({names.SUBSET_NAMESPACE: ["10.0.0.1:8080", "10.0.0.3:8080"]}, {0, 2}),
    "another port": ({names.SUBSET_NAMESPACE: ["10.0.0.1:8080", "10.0.0.3:9090"]}, {0}),
    "no match": ({names.SUBSET_NAMESPACE: ["10.0.0.99:8080"]}, set()),
    "empty": ({names.SUBSET_NAMESPACE: []}, set()),
    "not a text": ({names.SUBSET_NAMESPACE: ["10.0.0.1:8080", 12345]}, {0}),
    "a text with commas": ({names.SUBSET_NAMESPACE: "10.0.0.1:8080, 10.0.0.2:8080"}, {0, 1}),
}


def candidates(hint: Any, *, use_subset: bool = True) -> set[int]:
    """Which of 10.0.0.1:8080, 10.0.0.2:8080 and 10.0.0.3:8080 may serve a request with this metadata."""
    pods = [P(host_port=f"10.0.0.{number}:8080") for number in (1, 2, 3)]
    pool = Line(*pods, config=line.profile("queue-scorer", picks=3), use_subset=use_subset)
    asked = pool.stream()
    asked.say(RequestHeaders(0.0, ((":method", b"POST"), (":path", b"/x")), False, None, line.FULL_DUPLEX))
    message = line.script.pb.ProcessingRequest()
    message.request_body.end_of_stream = True
    for namespace, value in ({} if hint is None else hint).items():
        fields = message.metadata_context.filter_metadata[namespace]
        if value != {}:
            fields.update({names.DESTINATION_ENDPOINT_SUBSET: value})
    if hint is not None:
        message.metadata_context.SetInParent()
    asked.say_bytes(message.SerializeToString())
    if asked.destination is None:
        assert asked.refusal[0] == 503
        return set()
    return {int(one.split(".")[3].split(":")[0]) - 1 for one in asked.destination.split(",")}


@pytest.mark.parametrize("name", HINTS)
def test_candidates_of_a_subset_hint(name: str) -> None:
    hint, expected = HINTS[name]
    assert candidates(hint) == expected


@pytest.mark.parametrize("name", ["one", "empty", "no match"])
def test_candidates_with_the_subset_filter_turned_off(name: str) -> None:
    assert candidates(HINTS[name][0], use_subset=False) == ALL
