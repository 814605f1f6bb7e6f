"""Answers and calls of Vertex AI's gRPC API, cut and broken at random, against the same JSON over HTTP."""

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from epp.errors import BadRequest
from epp.extproc.limits import BodyBudget
from epp.payload import vertex_answer
from epp.payload.answer import AnswerReader
from epp.payload.apis import PARSERS, ParserSet
from epp.payload.framed import FramedAnswer
from epp.payload.kept import Kept
from epp.payload.records import Api, RawRequest
from epp.payload.request import parse_request, rewrite_model
from epp.payload.vertex import CARRIED, Envelope
from epp.payload.vertex_answer import VertexAnswerReader
from tests.data.grpc.frames import broken
from tests.data.vertex.google import METHODS, REQUESTS, HttpBody, asked, framed, frames, path_of, told

ENGINE, CLIENT = "acme/tiny-llama", "cl\u00efent-" * 30
CHAT, STREAM_RAW, RAW = CARRIED
ALL = ParserSet(PARSERS)
TEXTS = ("", "a", ENGINE, '"model":"acme/tiny-llama"', "\n\ndata: {", "}{", "é", '"usage":{', "\\")


def document(draw: random.Random, api: Api) -> Any:
    """An event of the API, or a plain answer."""
    text = draw.choice(TEXTS) * draw.randint(1, 60)
    usage = {"prompt_tokens": draw.randint(1, 9), "completion_tokens": draw.randint(1, 9)}
    told_usage = {"usage": usage} if draw.random() < 0.3 else {}
    head = {"id": text, "model": ENGINE} if draw.random() < 0.7 else {"model": ENGINE, "user": text}
    if api is CHAT:
        return {**head, "choices": [{"delta": {"content": text}}], **told_usage}
    if draw.random() < 0.5:
        return {"type": "response.output_text.delta", "delta": text}
    return {"type": "response.completed", "response": {**head, **told_usage}}


def cuts(draw: random.Random, body: bytes, most: int) -> list[bytes]:
    """The body in pieces, some of them empty."""
    places = sorted(draw.choices(range(len(body) + 1), k=draw.randint(0, most)))
    return [body[start:end] for start, end in pairwise([0, *places, len(body)])]


def over_http(api: Api, client: str, data: bytes, content_type: str) -> tuple[bytes, AnswerReader]:
    http = AnswerReader(CARRIED[api], client, ENGINE)
    http.begin(200, content_type, "")
    return http.feed(data, True), http


def passed(made: VertexAnswerReader, draw: random.Random, wire: bytes, budget: BodyBudget) -> bytes:
    """What comes out for `wire`, cut anywhere."""
    pieces = cuts(draw, wire, 12)
    ends_with_piece = draw.random() < 0.5
    out = [made.feed(piece, ends_with_piece and at == len(pieces)) for at, piece in enumerate(pieces, 1)]
    out.append(made.finish())
    assert budget.used == 0
    return b"".join(out)


def _streams_of_events(rounds: int = 300) -> Counter[str]:
    """Events in messages that are cut anywhere are as a client over HTTP gets them."""
    draw = random.Random(3)
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        api = draw.choice((CHAT, STREAM_RAW))
        end = draw.choice((b"\n\n", b"\r\n\r\n"))
        data = b"".join(
            b"data: %b%b" % (json.dumps(document(draw, api)).encode(), end) for _ in range(draw.randint(1, 5))
        )
        data += b"data: [DONE]\n\n"
        client = draw.choice((CLIENT, CLIENT, ""))
        expected, http = over_http(api, client, data, "text/event-stream")
        budget = BodyBudget(1 << 20)
        made = VertexAnswerReader(api, client, ENGINE, True, budget)
        made.begin(200, "application/grpc", "")
        inner = cuts(draw, data, 6)
        wire = b"".join(told(piece, "text/event-stream") for piece in inner)
        out = passed(made, draw, wire, budget)
        messages = frames(out)
        assert b"".join(message.data for message in messages) == expected
        assert len(inner) == len(messages)
        assert {message.content_type for message in messages} == {"text/event-stream"}
        assert client or out == wire
        assert (made.usage, made.first_token) == (http.usage, http.first_token)
        assert made.events == http.events
        seen["renamed"] += expected != data
        seen["usage"] += made.usage is not None
        seen["same"] += expected == data
    return seen


def test_streams_of_events() -> None:
    assert min(_streams_of_events().values()) > 50


def _events_without_words(rounds: int = 300) -> None:
    """An event in each message is renamed and counted as one of a stream."""
    draw = random.Random(4)
    for _ in range(rounds):
        api = draw.choice((CHAT, STREAM_RAW))
        events = [json.dumps(document(draw, api)).encode() for _ in range(draw.randint(1, 5))]
        data = b"".join(b"data: %b\n\n" % event for event in events)
        expected, http = over_http(api, CLIENT, data, "text/event-stream")
        budget = BodyBudget(1 << 20)
        made = VertexAnswerReader(api, CLIENT, ENGINE, True, budget)
        made.begin(200, "application/grpc", "")
        out = passed(made, draw, b"".join(map(told, events)), budget)
        assert b"".join(b"data: %b\n\n" % message.data for message in frames(out)) == expected
        assert (made.usage, made.first_token, made.events) == (http.usage, http.first_token, http.events)


def test_events_without_words() -> None:
    _events_without_words()


def _documents(rounds: int = 200) -> None:
    """A plain answer in one message or several; of `RawPredict` in one, which stays one."""
    draw = random.Random(5)
    for _ in range(rounds):
        api = draw.choice((CHAT, STREAM_RAW, RAW))
        text = draw.choice(TEXTS) * 9
        data = json.dumps({"id": text, "model": ENGINE, "usage": {"prompt_tokens": 3}}).encode()
        expected, http = over_http(api, CLIENT, data, "application/json")
        budget = BodyBudget(1 << 20)
        made = VertexAnswerReader(api, CLIENT, ENGINE, api is RAW, budget)
        made.begin(200, "application/grpc", "")
        inner = [data] if api is RAW else cuts(draw, data, 4)
        messages = frames(passed(made, draw, b"".join(map(told, inner)), budget))
        assert b"".join(message.data for message in messages) == expected
        assert len(messages) == len(inner)
        assert (made.usage, made.first_token) == (http.usage, True)
        assert made.usage is not None


def test_documents() -> None:
    _documents()


# -- broken bytes --------------------------------------------------------------------------------------


def _calls() -> Counter[str]:
    """A call is refused, or read and renamed without loss; what Google's reader takes is read."""
    draw = random.Random(6)
    seen: Counter[str] = Counter()
    for _ in range(3000):
        method = draw.choice(METHODS)
        document = {"messages": [{"role": "user", "content": "a"}], "input": "a", "model": ENGINE}
        body = broken(draw, asked(method, document, later="x"), 4)
        raw = RawRequest("id", "POST", path_of(method), (), body)
        try:
            parsed = parse_request(raw, max_bytes=1 << 20, parsers=ALL)
        except BadRequest as error:
            seen["refused"] += 1
            if "not a google.cloud" in str(error):
                with pytest.raises(DecodeError):
                    REQUESTS[method].FromString(body[5 : 5 + int.from_bytes(body[1:5])])
                seen["no message"] += 1
            continue
        seen["read"] += 1
        made = rewrite_model(parsed, CLIENT).body
        again = parse_request(
            RawRequest("id", "POST", path_of(method), (), made), max_bytes=1 << 20, parsers=ALL
        )
        assert (again.request.model, again.request.prompts) == (CLIENT, parsed.request.prompts)
        old, new = (int.from_bytes(one[1:5]) + 5 for one in (body, made))
        assert made[new:] == body[old:]
        try:
            before = REQUESTS[method].FromString(body[5:old])
        except DecodeError:
            seen["text that is no UTF-8"] += 1
            continue
        after = REQUESTS[method].FromString(made[5:new])
        after.http_body.data = before.http_body.data
        assert after == before
    return seen


def test_calls() -> None:
    seen = _calls()
    assert min(seen["refused"], seen["read"]) > 300
    assert min(seen["text that is no UTF-8"], seen["no message"]) > 10


def _answers() -> Counter[str]:
    """Any bytes pass; nothing is raised, nothing is kept, and what is not renamed is not touched."""
    draw = random.Random(7)
    seen: Counter[str] = Counter()
    for _ in range(2500):
        api = draw.choice(tuple(CARRIED))
        pieces = []
        for _ in range(draw.randint(1, 4)):
            data = json.dumps(document(draw, CHAT if api is CHAT else STREAM_RAW)).encode()
            data = draw.choice((data, b"data: %b\n\n" % data))[: draw.choice((20, 10_000))]
            pieces.append(
                broken(draw, framed(HttpBody(data=data, content_type=draw.choice(("", "a", ENGINE)))), 4)
            )
        wire = b"".join(pieces)
        client = draw.choice((CLIENT, ""))
        budget = BodyBudget(1 << 20)
        made = VertexAnswerReader(api, client, ENGINE, draw.random() < 0.5, budget)
        made.begin(200, "application/grpc", "")
        out = passed(made, draw, wire, budget)
        assert client or out == wire
        seen["changed"] += out != wire
        seen["token"] += made.first_token
        seen["usage"] += made.usage is not None
    return seen


def test_answers() -> None:
    assert min(_answers().values()) > 30


# -- faults that these tests must see ------------------------------------------------------------------


def _keeps_old_length(message: bytes, compressed: int = 0) -> bytes:
    return b"\0" + (len(message) - len(CLIENT)).to_bytes(4, signed=True) + message


def _drops_what_is_held(self: VertexAnswerReader) -> bytes:
    CLOSED(self)
    return b""


def _each_piece_alone(self: VertexAnswerReader, content_type: bytes, data: bytes) -> bytes:
    self._form = ""
    return FOLLOWED(self, content_type, data)


def _lets_events_rest(self: VertexAnswerReader) -> None:
    """The end lets nothing go."""


def _in_events(self: VertexAnswerReader, content_type: bytes, data: bytes) -> bool:
    begins = BEGIN_DATA(self, content_type, data)
    self._each = False
    return begins


def _always_each(self: VertexAnswerReader, content_type: bytes, data: bytes) -> bool:
    begins = BEGIN_DATA(self, content_type, data)
    self._each = True
    return begins


def _forgets_the_rest(self: FramedAnswer, piece: bytes) -> None:
    FOLLOW(self, piece)
    self._partial.clear()


def _loses_what_is_behind(self: Envelope, body: bytes, data: bytes) -> bytes:
    made = REFILLED(self, body, data)
    return made[: 5 + int.from_bytes(made[1:5])]


def _writes_anew(self: Envelope, body: bytes, data: bytes) -> bytes:
    return asked(self.method, data) + body[5 + int.from_bytes(body[1:5]) :]


def _old_length(self: Envelope, body: bytes, data: bytes) -> bytes:
    made = REFILLED(self, body, data)
    return body[:5] + made[5:]


CLOSED = VertexAnswerReader._closed
FOLLOWED = VertexAnswerReader._followed
BEGIN_DATA = VertexAnswerReader._begin_data
FOLLOW = FramedAnswer._follow
REFILLED = Envelope.refilled
READER = VertexAnswerReader


@pytest.mark.parametrize(
    ("check", "where", "name", "fault"),
    [
        (_streams_of_events, vertex_answer, "framed", _keeps_old_length),
        (_streams_of_events, READER, "_followed", _each_piece_alone),
        (_streams_of_events, FramedAnswer, "_follow", _forgets_the_rest),
        (_streams_of_events, READER, "_begin_data", _always_each),
        (_events_without_words, READER, "_begin_data", _in_events),
        (_documents, READER, "_begin_data", _always_each),
        (_documents, READER, "_followed", _each_piece_alone),
        (_answers, READER, "release", _lets_events_rest),
        (_answers, Kept, "settle", lambda kept: kept.account and kept.account.charge(len(kept))),
        (_calls, Envelope, "refilled", _loses_what_is_behind),
        (_calls, Envelope, "refilled", _writes_anew),
        (_calls, Envelope, "refilled", _old_length),
    ],
)
def test_a_fault_is_seen(
    check: Callable[[], Any], where: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises((AssertionError, BadRequest)):
        check()


def test_an_event_without_its_end_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        made = VertexAnswerReader(CHAT, CLIENT, ENGINE, True)
        made.begin(200, "application/grpc", "")
        out = made.feed(told(b"data: x"), True)
        assert b"".join(message.data for message in frames(out)) == b"data: x"

    check()
    monkeypatch.setattr(READER, "_closed", _drops_what_is_held)
    with pytest.raises(AssertionError):
        check()
