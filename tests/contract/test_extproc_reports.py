"""Faults that users of other pickers met on the ext-proc stream: what happens to the same input here.

`docs/field-reports.md` names each of them. All go from the proxy's messages to the picker's replies.
"""

import json
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from epp import names
from epp.extproc.records import (
    BODY_CHUNK_BYTES,
    BodyMode,
    Modes,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    ResponseChunk,
    ResponseHeaders,
)
from tests.data.compat import line

P, Line = line.P, line.Line
CHAT = "/v1/chat/completions"
REWRITE = "x-llm-d-model-name-rewrite"
STREAMED = Modes(BodyMode.STREAMED, BodyMode.STREAMED)
EVERY_MODE = [Modes(mode, mode) for mode in BodyMode if mode is not BodyMode.GRPC]


def pool(*pods: Any, **options: Any) -> Any:
    return Line(*(pods or (P(), P())), **options)


def chat(content: str = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


def cut(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


def edits(asked: Any) -> list[dict[str, Any]]:
    return [reply for reply in asked.replies if "set" in reply]


# -- bodies -------------------------------------------------------------------------------------------


def test_a_second_end_of_a_large_body_is_dropped() -> None:
    picker, body = pool(), chat("x" * 1_200_000)
    asked = picker.stream()
    pieces = cut(body, 62_000)
    asked.request(*pieces, path=CHAT)
    before = list(asked.replies)
    asked.say(RequestChunk(picker.now, b"}]}", True))
    asked.say(RequestChunk(picker.now, pieces[-1], True))
    assert asked.replies == before
    assert asked.body("request") == body
    assert picker.director.in_flight == 1


@pytest.mark.parametrize("modes", EVERY_MODE, ids=lambda modes: modes.request.name)
@pytest.mark.parametrize("target", ["", "a-much-longer-name"])
def test_no_length_is_told_twice_or_wrongly(modes: Any, target: str) -> None:
    body = b'{ "model" : "m",   "prompt":"x" }'
    headers = {"content-length": str(len(body))} | ({REWRITE: target} if target else {})
    picker = pool()
    asked = picker.stream()
    asked.request(body, headers=headers, modes=modes)
    told = [reply["set"].get("content-length") for reply in edits(asked)]
    forwarded = body.replace(b'"m"', b'"a-much-longer-name"') if target else body
    if modes.request is BodyMode.BUFFERED:
        assert asked.head["replace"] == (forwarded if target else None)
        assert told == [None, str(len(forwarded)) if target else None]
    else:
        assert not any(told)
    if modes.request is BodyMode.FULL_DUPLEX_STREAMED:
        assert asked.body("request") == forwarded
        assert ("content-length" in asked.head["remove"]) == bool(target)


def test_a_body_of_three_megabytes_leaves_in_pieces_with_one_end() -> None:
    body = chat("x" * 3_000_000)
    for sent in ([body], cut(body, 65_536), [*cut(body, 65_536), b""]):
        asked = pool().ask(*sent, path=CHAT)
        pieces = asked.pieces("request")
        assert max(len(piece) for piece, _ in pieces) == BODY_CHUNK_BYTES == 62_000
        assert asked.body("request") == body
        asked.answer(*sent)
        assert max(len(piece) for piece, _ in asked.pieces("response")) <= BODY_CHUNK_BYTES
        assert asked.body("response") == body


def test_turns_cut_anywhere_arrive_whole() -> None:
    """Three turns of a conversation, cut at two places and ended by an empty message."""
    turns = [{"role": role, "content": letter * 600} for role, letter in zip("uau", "abc", strict=True)]
    body = json.dumps({"model": "m", "messages": turns}).encode()
    for first in range(0, len(body) + 1, 97):
        for second in range(first, len(body) + 1, 193):
            asked = pool(P()).ask(body[:first], body[first:second], body[second:], b"", path=CHAT)
            assert asked.body("request") == body


def test_trailers_end_a_large_body() -> None:
    picker, body = pool(), chat("x" * 200_000)
    asked = picker.stream()
    fields = ((":method", b"POST"), (":path", CHAT.encode()))
    asked.say(RequestHeaders(picker.now, fields, False, None, line.FULL_DUPLEX))
    for piece in cut(body, 65_536):
        asked.say(RequestChunk(picker.now, piece, False))
    assert asked.replies == []
    asked.say(RequestTrailers(picker.now))
    assert asked.raw.body == body
    pieces = asked.pieces("request")
    assert b"".join(piece for piece, _ in pieces) == body
    assert not any(ends for _, ends in pieces)
    assert asked.replies[-1] == {"trailers": "request"}


# -- requests without a body --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/"])
def test_a_request_without_body_is_answered_at_once(path: str) -> None:
    asked = pool().ask(method="GET", path=path)
    assert [reply.get("headers") for reply in asked.replies] == ["request"]
    assert asked.destination


def test_an_empty_post_is_refused_and_the_stream_closed() -> None:
    asked = pool().ask(method="POST", headers={"content-length": "0"})
    status, message, headers = asked.refusal
    assert (status, headers["content-type"]) == (400, "application/json")
    assert message.startswith("error unmarshaling request bodyMap: ")
    assert asked.finished


# -- answers ------------------------------------------------------------------------------------------

HOP_BY_HOP = {
    "transfer-encoding": "chunked",
    "connection": "keep-alive",
    "keep-alive": "timeout=5",
    "te": "trailers",
    "trailer": "x-checksum",
    "upgrade": "h2c",
    "proxy-authenticate": "Basic",
    "content-length": "30",
}


def test_headers_of_an_answer_are_not_echoed() -> None:
    asked = pool().ask(chat(), path=CHAT)
    events = [b'data: {"type":"response.created"}\n\n', b"data: {}\n\n", b"data: [DONE]\n\n"]
    asked.answer(*events, content_type=line.SSE, headers=HOP_BY_HOP)
    assert asked.answer_head["set"] == {names.WENT_INTO_RESPONSE_HEADERS: "true"}
    assert asked.answer_head["remove"] == []
    assert asked.pieces("response") == [(events[0], False), (events[1], False), (events[2], True)]


@pytest.mark.parametrize("modes", EVERY_MODE, ids=lambda modes: modes.request.name)
def test_each_message_of_an_endless_stream_is_answered(modes: Any) -> None:
    """Each at once, so that nobody waits for an end that never comes."""
    picker = pool()
    asked = picker.stream()
    fields = ((":method", b"GET"), (":path", b"/sse"))
    asked.say(RequestHeaders(picker.now, fields, True, None, modes))
    assert asked.destination
    asked.say(ResponseHeaders(picker.now, ((":status", b"200"), ("content-type", line.SSE.encode())), False))
    assert len(asked.replies) == 2
    if modes.response in (BodyMode.NONE, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
        return
    for number in range(50):
        asked.say(ResponseChunk(picker.now, b"data: %d\n\n" % number, False))
        assert len(asked.replies) == 3 + number


# -- what clients say ---------------------------------------------------------------------------------

LONE = rb"\ud83d"
ODD_TEXTS = {
    "message": rb'{"model":"m","messages":[{"role":"user","content":"cut \ud83d"}]}',
    "model": rb'{"model":"\ud83d","messages":[{"role":"user","content":"x"}]}',
    "salt": rb'{"model":"m","cache_salt":"\ud83d","messages":[{"role":"user","content":"x"}]}',
    "tool": rb'{"model":"m","tools":[{"\ud83d":1}],"messages":[{"role":"\udc00","content":"x"}]}',
}


@pytest.mark.parametrize("where", ODD_TEXTS)
def test_half_a_surrogate_pair_stops_nobody(where: str) -> None:
    body = ODD_TEXTS[where]
    picker = pool()
    asked = picker.ask(body, path=CHAT, headers={names.FAIRNESS_ID[0]: "x", REWRITE: "other"})
    assert asked.destination
    assert json.loads(asked.body("request")) == {**json.loads(body), "model": "other"}
    plain = picker.ask(body, path=CHAT)
    assert plain.body("request") == body
    plain.answer(b"{}")
    assert b"llm_d_epp_request_total" in generate_latest(picker.metrics.registry)


def configured(**sections: Any) -> str:
    kind = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    return yaml.safe_dump({**kind, "plugins": [{"type": "queue-scorer"}], **sections})


def test_a_rule_for_every_model_gives_a_request_without_one_its_model() -> None:
    rules = [{"name": "all", "rules": [{"targets": [{"modelRewrite": "llama"}]}]}]
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    asked = pool(config=configured(modelRewrites=rules)).ask(body, path=CHAT)
    assert json.loads(asked.body("request")) == {"model": "llama", **json.loads(body)}
    assert pool().ask(body, path=CHAT).refusal[:2] == (400, "model not found in request body")


@pytest.mark.parametrize("spelled", [names.DESTINATION_ENDPOINT, "X-Gateway-Destination-Endpoint"])
def test_a_destination_that_the_client_names_is_none(spelled: str) -> None:
    picker = Line()
    asked = picker.stream()
    fields = ((":method", b"GET"), (":path", b"/"), (spelled, b"10.6.6.6:1"), (spelled, b"10.6.6.7:1"))
    asked.say(RequestHeaders(picker.now, fields, True, None, line.FULL_DUPLEX))
    assert asked.refusal[0] == 503
    picker = pool()
    asked = picker.stream()
    asked.say(RequestHeaders(picker.now, fields, True, None, line.FULL_DUPLEX))
    message = line.script.pb.ProcessingResponse.FromString(asked.wire[0])
    options = message.request_headers.response.header_mutation.set_headers
    told = [option for option in options if option.header.key == names.DESTINATION_ENDPOINT.encode()]
    assert [option.header.raw_value.decode() for option in told] == [asked.destination]
    overwrite = line.script.pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert [option.append_action for option in told] == [overwrite]


@pytest.mark.parametrize("named", ["10.0.0.1:9090", "10.0.0.9:8000", "10.0.0.1", ":8000", "10.0.0.1:8000:1"])
def test_only_addresses_with_their_ports_are_in_the_pool(named: str) -> None:
    """A subset with another port of a member, or with anyone else, is empty."""
    picker = pool(P(host_port="10.0.0.1:8000"))
    assert picker.ask(chat(), path=CHAT, subset=[named]).refusal[0] == 503
    assert picker.ask(chat(), path=CHAT, subset=[named, "10.0.0.1:8000"]).destination == "10.0.0.1:8000"


def test_the_pick_never_leaves_pool_and_subset() -> None:
    ours, theirs = [f"10.0.0.{n}:8000" for n in range(1, 5)], [f"10.1.0.{n}:8000" for n in range(1, 5)]
    picker = pool(*(P(waiting=n, host_port=host_port) for n, host_port in enumerate(ours)))
    status, _, headers = picker.ask(chat(), path=CHAT, subset=theirs).refusal
    assert (status, headers[names.DROPPED_REASON]) == (503, "rejected-no-endpoints")
    for allowed in (ours[3:], ours[1:3]):
        assert picker.ask(chat(), path=CHAT, subset=theirs + allowed).destination == allowed[0]


# -- an empty pool is no overload ---------------------------------------------------------------------


def test_five_requests_to_an_empty_pool_get_503() -> None:
    config = configured(objectives=[{"name": "batch", "priority": -1}])
    picker = Line(config=config)
    for number in range(5):
        objective = {names.OBJECTIVE[0]: "batch"} if number % 2 else {}
        status, _, headers = picker.ask(chat(), path=CHAT, headers=objective).refusal
        assert (status, headers[names.DROPPED_REASON]) == (503, "rejected-no-endpoints")
        assert headers["retry-after"]
    full = Line(P(waiting=500), config=config)
    status, _, headers = full.ask(chat(), path=CHAT, headers={names.OBJECTIVE[0]: "batch"}).refusal
    assert (status, headers[names.DROPPED_REASON]) == (429, "rejected-saturated")
    assert full.ask(chat(), path=CHAT).destination


def test_filters_that_leave_nobody_say_so() -> None:
    config = configured(plugins=[{"type": "decode-filter"}, {"type": "queue-scorer"}])
    only_prefill = pool(P(labels={names.ROLE_LABEL: "prefill"}), config=config)
    status, message, headers = only_prefill.ask(chat(), path=CHAT).refusal
    assert (status, headers[names.DROPPED_REASON]) == (429, "rejected-saturated")
    assert message == "no endpoints available for the given request: decode-filter excluded 1"
    assert Line(config=config).ask(chat(), path=CHAT).refusal[0] == 503
