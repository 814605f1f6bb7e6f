"""The short way of answer chunks through a stream against the long way through the exchange.

Two streams are told the same, one of them with an exchange that knows no short way. What they send and what
they tell the director must be the same, whatever is streamed in whichever mode and however it is cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.director import Edits
from epp.errors import ProtocolError
from epp.extproc.answer_side import AnswerSide
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import BodyMode, Event, ResponseChunk, Routed
from epp.payload.records import Api, RawRequest
from epp.runtime import stream as stream_module
from epp.runtime.stream import Deliver, Stream
from epp.scheduling.records import AnswerFact, TicketId
from tests.data.extproc import script


class LongWay(Exchange):
    def pass_on(self, chunk: ResponseChunk) -> bytes | None:
        return None


@dataclass
class Director:
    """Places everything; notes what it is told."""

    routed: Routed
    facts: list[AnswerFact] = field(default_factory=list)

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed:
        return self.routed

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        self.facts.append(fact)
        return ()


@dataclass(frozen=True)
class Talk:
    """One exchange. `chunks`: seconds since the one before, content (of CHUNKS), end of stream."""

    api: Api
    renamed: bool
    status: str
    content_type: str
    mode: BodyMode
    chunks: list[tuple[float, str, bool]]
    ending: str

    def messages(self) -> list[tuple[float, Event | None]]:
        """Time and event; None closes the stream."""
        modes = {"modes": ("FULL_DUPLEX_STREAMED", self.mode.name)}
        headers = {":status": self.status, "content-type": self.content_type}
        told: list[tuple[float, Event | None]] = [
            (0.0, script.build("in", {"request_headers": modes}, 0.0)),
            (0.0, script.build("in", {"request_body": {"body": "{}", "eos": True}}, 0.0)),
            (0.0, script.build("in", {"response_headers": {"headers": headers}}, 0.0)),
        ]
        at = 0.0
        for index, (wait_s, name, ends) in enumerate(self.chunks):
            at += wait_s
            if self.ending == "closed midway" and index == len(self.chunks) // 2:
                told.append((at, None))
            told.append((at, ResponseChunk(at, CHUNKS[name], ends)))
        if self.ending == "trailers":
            told.append((at, script.build("in", {"response_trailers": {}}, at)))
        return [*told, (at, None)]


def event(delta: str, more: str = "") -> bytes:
    return f'data: {{"model":"engine","choices":[{{"index":0,"delta":{delta}}}]{more}}}\n\n'.encode()


TEXT = event('{"content":" word"}')
CHUNKS = {
    "text": TEXT,
    "role": event('{"role":"assistant","content":""}'),
    "usage": event("{}", ',"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}'),
    "done": b"data: [DONE]\n\n",
    "nothing": b"",
    "document": b'{"model":"engine","usage":{"prompt_tokens":4,"completion_tokens":1}}',
    "many": TEXT * 1500,
    "first part": TEXT[:20],
    "second part": TEXT[20:],
    "text and a part": TEXT + TEXT[:30],
    "a part and text": TEXT[30:] + TEXT,
}
TALKS = st.builds(
    Talk,
    st.sampled_from([Api.CHAT, Api.CHAT, Api.COMPLETIONS, Api.PASSTHROUGH]),
    st.booleans(),
    st.sampled_from(["200"] * 6 + ["500"]),
    st.sampled_from(["text/event-stream"] * 4 + ["application/json"]),
    st.sampled_from(
        [BodyMode.FULL_DUPLEX_STREAMED] * 4 + [BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.NONE]
    ),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.01, 0.4, 1.5]),
            st.sampled_from(["text"] * 8 + list(CHUNKS)),
            st.sampled_from([False] * 9 + [True]),
        ),
        min_size=2,
        max_size=12,
    ),
    st.sampled_from(["closed", "trailers", "closed midway"]),
)


def heard(talk: Talk, kind: type[Exchange]) -> tuple[Any, ...]:
    """All that comes of it: messages and facts as they stand after each step, refusals, the end."""
    now = [0.0]
    placement = script.placement("10.0.0.1:8000")
    routed = Routed(0.0, placement, talk.api, "client", "engine" if talk.renamed else "client")
    director = Director(routed)
    exchange = kind(BodyBudget(1 << 20), Limits(), lambda: "made")
    stream = Stream(exchange, director, lambda: now[0], lambda: None)
    steps: list[Any] = []
    for at, told in talk.messages():
        now[0] = at
        try:
            if told is None:
                stream.closed()
            else:
                stream.received(script.to_wire(told))
        except ProtocolError as error:
            steps.append(str(error))
            break
        steps.append((list(stream.outbox), list(director.facts), stream.finished, stream.dropped))
        stream.outbox.clear()
    return (*steps, stream.finished)


@settings(max_examples=400, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(talk=TALKS)
def both_ways_are_one(talk: Talk) -> None:
    assert heard(talk, Exchange) == heard(talk, LongWay)


def test_both_ways_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    short: list[bytes | None] = []
    pass_on = Exchange.pass_on

    def noted(exchange: Exchange, chunk: ResponseChunk) -> bytes | None:
        short.append(pass_on(exchange, chunk))
        return short[-1]

    monkeypatch.setattr(Exchange, "pass_on", noted)
    both_ways_are_one()
    assert short.count(None) > 200
    taken = [body for body in short if body is not None]
    assert len(taken) > 200
    assert min(map(len, taken)) == 0
    assert max(map(len, taken)) > 62_000


# -- faults ---------------------------------------------------------------------------------------------

PassOn = Callable[[AnswerSide, ResponseChunk], bytes | None]
right: PassOn = AnswerSide.pass_on


def uncounted(answer: AnswerSide, chunk: ResponseChunk) -> bytes | None:
    before = answer._chunks
    passed = right(answer, chunk)
    answer._chunks = before
    return passed


def timeless(answer: AnswerSide, chunk: ResponseChunk) -> bytes | None:
    return right(answer, ResponseChunk(0.0, chunk.body, chunk.end_of_stream))


def endless(answer: AnswerSide, chunk: ResponseChunk) -> bytes | None:
    return right(answer, ResponseChunk(chunk.at, chunk.body, False))


def unread(answer: AnswerSide, chunk: ResponseChunk) -> bytes | None:
    return None if right(answer, chunk) is None else chunk.body


def twice(answer: AnswerSide, chunk: ResponseChunk) -> bytes | None:
    passed = right(answer, chunk)
    answer.chunk(chunk)
    return passed


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "chunks are not counted": (AnswerSide, "pass_on", uncounted),
    "progress is not told": (AnswerSide, "pass_on", timeless),
    "the end is passed over": (AnswerSide, "pass_on", endless),
    "the reader's bytes are not sent": (AnswerSide, "pass_on", unread),
    "both ways are taken": (AnswerSide, "pass_on", twice),
    "it goes on after the end": (
        Exchange,
        "pass_on",
        lambda exchange, chunk: exchange._answer.pass_on(chunk),
    ),
    "large pieces are not cut": (
        stream_module,
        "answer_pieces",
        lambda body: [script.pb.ProcessingResponse().SerializeToString() + body],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_short_way_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        both_ways_are_one()
