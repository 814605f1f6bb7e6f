"""What is kept of answers counts in the account of the process, and none of it when an exchange has ended."""

from collections.abc import Callable
from typing import Any

import pytest

from epp.errors import ProtocolError
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import (
    BodyMode,
    Closed,
    Edited,
    Modes,
    RequestChunk,
    RequestHeaders,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    Routed,
)
from epp.payload.answer import AnswerReader
from epp.payload.kept import Kept
from epp.payload.records import Api
from epp.payload.shapes import EXACT_BYTES
from tests.data.extproc.script import placement

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
JSON, SSE = "application/json", "text/event-stream"
TAIL_BYTES = 64 * 1024
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


class Answer:
    """An exchange whose request was sent on, and whose answer has begun."""

    def __init__(
        self,
        content_type: str = JSON,
        mode: BodyMode = DUPLEX,
        target: str = "m",
        budget: BodyBudget | None = None,
        **headers: str,
    ) -> None:
        self.budget = budget or BodyBudget(1 << 30)
        self.exchange = Exchange(self.budget, Limits(), lambda: "made")
        modes = Modes(DUPLEX, mode)
        request = ((":method", b"POST"), (":path", b"/v1/completions"))
        self.tell(RequestHeaders(0.0, request, False, None, modes))
        self.tell(RequestChunk(0.0, b'{"prompt":"x"}', True))
        self.tell(Routed(0.0, placement("10.0.0.1:8000"), Api.COMPLETIONS, "m", target))
        named = {":status": "200", "content-type": content_type, **headers}
        self.tell(ResponseHeaders(0.0, tuple((k, v.encode()) for k, v in named.items()), False))
        self.tell(Edited(0.0))
        assert self.held == 0

    def tell(self, *events: Any) -> None:
        for event in events:
            self.exchange.receive(event)

    def chunk(self, body: bytes, *, end: bool = False) -> None:
        self.tell(ResponseChunk(0.0, body, end))

    @property
    def held(self) -> int:
        return self.budget.used


def broken(one: Answer) -> None:
    """The proxy breaks the protocol, and the transport ends the stream."""
    with pytest.raises(ProtocolError):
        one.tell(ResponseHeaders(0.0, ((":status", b"200"),), False))
    one.tell(Closed(0.0, True))


ENDINGS: dict[str, Callable[[Answer], None]] = {
    "last chunk": lambda one: one.chunk(b"}", end=True),
    "last chunk without bytes": lambda one: one.chunk(b"", end=True),
    "trailers": lambda one: one.tell(ResponseTrailers(0.0)),
    "client gone": lambda one: one.tell(Closed(0.0)),
    "connection lost": lambda one: one.tell(Closed(0.0, True)),
    "protocol broken": broken,
}


def story(end: Callable[[Answer], None], **answer: Any) -> list[int]:
    """Bytes held after each of three pieces and after the end."""
    one = Answer(**answer)
    held = []
    for piece in (b'{"a":', b'"' + b"x" * 1000 + b'"', b""):
        one.chunk(piece)
        held.append(one.held)
    end(one)
    return [*held, one.held]


STORY = [5, 1007, 1007, 0]


@pytest.mark.parametrize("target", ["m", "other"], ids=["as-it-is", "renamed"])
@pytest.mark.parametrize("content_type", [JSON, SSE])
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_kept_counts_until_the_end(ending: str, content_type: str, target: str) -> None:
    assert story(ENDINGS[ending], content_type=content_type, target=target) == STORY


def test_a_mode_without_replies_in_between_counts_too() -> None:
    assert story(ENDINGS["last chunk"], mode=BodyMode.STREAMED) == STORY


def test_a_part_of_an_answer_whose_rest_goes_by_unseen_counts_until_the_stream_closes() -> None:
    one = Answer(mode=BodyMode.BUFFERED_PARTIAL)
    one.chunk(b'{"a":')
    assert one.held == 5
    one.tell(Closed(0.0))
    assert one.held == 0


def test_an_answer_that_is_too_long_counts_with_what_is_kept_of_it() -> None:
    for content_type in (JSON, SSE):
        one = Answer(content_type)
        one.chunk(b"x" * EXACT_BYTES)
        assert one.held == EXACT_BYTES
        one.chunk(b"x")
        assert one.held == TAIL_BYTES
        one.chunk(b"x" * 10)
        assert one.held == TAIL_BYTES + 10
        one.tell(Closed(0.0))
        assert one.held == 0


@pytest.mark.parametrize(
    ("content_type", "headers"),
    [("text/plain", {}), (JSON, {":status": "500"}), (JSON, {"content-encoding": "gzip"})],
)
def test_what_is_not_read_is_not_kept(content_type: str, headers: dict[str, str]) -> None:
    one = Answer(content_type, **headers)
    one.chunk(b"x" * 1000)
    assert one.held == 0


def test_whole_events_are_never_charged() -> None:
    class Untouched(BodyBudget):
        def charge(self, n: int) -> None:
            raise AssertionError("a streamed chunk of whole events costs nothing")

    one = Answer(SSE, budget=Untouched(1 << 20))
    for _ in range(5):
        one.chunk(EVENT * 3)
    one.chunk(b"data: [DONE]\n\n", end=True)
    assert one.held == 0


def test_an_event_in_two_pieces_counts_while_it_is_not_whole() -> None:
    one = Answer(SSE)
    one.chunk(EVENT + EVENT[:10])
    assert one.held == 10
    one.chunk(EVENT[10:20])
    assert one.held == 20
    one.chunk(EVENT[20:])
    assert one.held == 0


def test_answers_leave_less_for_requests_and_are_not_refused_themselves() -> None:
    budget = BodyBudget(1000)
    one, other = Answer(budget=budget), Answer(budget=budget)
    one.chunk(b"x" * 900)
    other.chunk(b"x" * 900)
    assert budget.used == 1800
    assert not budget.take(1)
    one.tell(Closed(0.0))
    assert budget.take(100)
    budget.give(100)
    other.tell(Closed(0.0))
    assert budget.used == 0


def test_a_reader_without_an_account_reads_the_same() -> None:
    reader = AnswerReader(Api.COMPLETIONS, "m", "m")
    reader.begin(200, JSON, "")
    assert reader.feed(b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}', True)
    assert reader.usage is not None
    assert reader.usage.output_tokens == 2


# -- planted faults ---------------------------------------------------------------------------------


def keeps_all(reader: AnswerReader) -> None:
    """An ending lets nothing go."""


def forgets_to_give(reader: AnswerReader) -> None:
    reader._partial.clear()


def charges_all_again(kept: Kept) -> None:
    """The whole is charged with every piece."""
    assert kept.account is not None
    kept.account.charge(len(kept))


def never_charges(kept: Kept) -> None: ...


@pytest.mark.parametrize(
    ("where", "method", "fault"),
    [
        (AnswerReader, "release", keeps_all),
        (AnswerReader, "release", forgets_to_give),
        (Kept, "settle", charges_all_again),
        (Kept, "settle", never_charges),
    ],
)
def test_a_planted_fault_is_noticed(
    where: type, method: str, fault: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, method, fault)
    assert story(ENDINGS["client gone"]) != STORY
    assert story(ENDINGS["last chunk"]) != STORY


def test_an_exchange_that_does_not_release_the_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.extproc.answer_side.AnswerSide.release", lambda side: None)
    assert story(ENDINGS["client gone"]) != STORY
