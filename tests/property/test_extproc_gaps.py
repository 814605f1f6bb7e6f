"""Times between the chunks of an answer, against a plain computation from the times they came at."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.extproc import answer_side
from epp.extproc.answer_side import AnswerSide
from epp.extproc.records import BodyMode, Edited, Modes, Observe, ResponseChunk, ResponseHeaders
from epp.payload.readers import answer_reader
from epp.payload.records import Api
from epp.scheduling.records import GAP_BOUNDS_S, Cause, Ended, Gaps, TicketId

TOKEN = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
HEADERS = ((":status", b"200"), ("content-type", b"text/event-stream"))

Chunks = list[tuple[float, bytes]]


def told(chunks: Chunks, mode: int, short_way: bool) -> Gaps | None:
    """What the director hears at the end of an answer whose chunks came so long after each other."""
    side = AnswerSide()
    side.placed(TicketId(1), answer_reader(Api.CHAT, "m", "m"))
    at = 100.0
    side.headers(ResponseHeaders(at, HEADERS, False, Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode(mode))))
    side.edited(Edited(at))
    for wait_s, body in chunks:
        at += wait_s
        chunk = ResponseChunk(at, body, False)
        if not short_way or side.pass_on(chunk) is None:
            side.chunk(chunk)
    (effect,) = side.end(Cause.NATURAL)
    assert isinstance(effect, Observe)
    assert isinstance(effect.fact, Ended)
    return effect.fact.gaps


def computed(chunks: Chunks) -> Gaps | None:
    times: list[float] = []
    at, begun = 100.0, False
    for wait_s, body in chunks:
        at += wait_s
        begun = begun or body == TOKEN
        if begun and body:
            times.append(at)
    if not times:
        return None
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    places = [bisect_left(GAP_BOUNDS_S, gap) for gap in gaps]
    counts = tuple(places.count(place) for place in range(len(GAP_BOUNDS_S) + 1))
    return Gaps(counts, times[-1] - times[0])


WAITS = st.one_of(st.just(0.0), st.floats(0, 3), st.sampled_from((0.02, 0.2, 2.0)))
CHUNKS = st.lists(st.tuples(WAITS, st.sampled_from((TOKEN, TOKEN, ROLE, b""))), max_size=20)
MODES = st.sampled_from((BodyMode.FULL_DUPLEX_STREAMED, BodyMode.STREAMED))


@given(CHUNKS, MODES, st.booleans())
def test_gaps_are_those_between_chunks_from_the_first_token_on(
    chunks: Chunks, mode: int, short_way: bool
) -> None:
    found, expected = told(chunks, mode, short_way), computed(chunks)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.counts == expected.counts
    assert found.seconds == pytest.approx(expected.seconds)


SHOWN: Chunks = [(0.5, ROLE), (0.5, TOKEN), (0.02, TOKEN), (0.3, TOKEN), (1.5, TOKEN), (5.0, TOKEN)]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("bisect_left", lambda bounds, gap: 0),
        ("bisect_left", lambda bounds, gap: bisect_left(bounds, gap * 1000)),
        ("Gaps", lambda counts, seconds: Gaps(counts, seconds + 0.5)),
    ],
)
@pytest.mark.parametrize("short_way", [False, True])
def test_planted_faults_are_noticed(
    name: str, fault: Callable[..., Any], short_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(SHOWN, BodyMode.FULL_DUPLEX_STREAMED, short_way) == computed(SHOWN)
    monkeypatch.setattr(answer_side, name, fault)
    assert told(SHOWN, BodyMode.FULL_DUPLEX_STREAMED, short_way) != computed(SHOWN)


def test_chunks_that_waited_for_the_director_follow_at_once() -> None:
    side = AnswerSide()
    side.placed(TicketId(1), answer_reader(Api.CHAT, "m", "m"))
    side.headers(ResponseHeaders(1.0, HEADERS, False, None))
    for at in (1.1, 1.2, 1.3):
        side.chunk(ResponseChunk(at, TOKEN, False))
    side.edited(Edited(2.0))
    side.chunk(ResponseChunk(2.5, TOKEN, False))
    (effect,) = side.end(Cause.NATURAL)
    assert isinstance(effect, Observe)
    assert isinstance(effect.fact, Ended)
    gaps = effect.fact.gaps
    assert gaps is not None
    assert (gaps.counts[0], sum(gaps.counts), gaps.seconds) == (2, 3, 0.5)
