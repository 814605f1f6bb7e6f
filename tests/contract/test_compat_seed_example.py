"""The example this product is measured by: a warm endpoint with a short queue beats a cold idle one.

A holds 92 % of the prompt and has 2 requests waiting, B is idle and holds nothing, C holds 88 % and has 31
waiting. What they hold comes from prompts that were placed there before, through the director itself.
"""

import json

import pytest

from epp.payload.records import RawRequest
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken, Placement
from tests.data.compat import line

P, Line = line.P, line.Line

BLOCK_BYTES = 64 * 4
TEXT = "".join(f"{number:07d} " for number in range(4000))
A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
WARM, IDLE, BUSY = P(2, 0.5, A), P(0, 0.0, B), P(31, 0.5, C)
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def request(api: str, blocks: int, subset: tuple[str, ...] | None = None) -> RawRequest:
    """A prompt that begins as all others do and has this many full blocks, and a part of one more."""
    text = TEXT[: blocks * BLOCK_BYTES + 40]
    asked = {"prompt": text} if api == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = json.dumps({"model": "m", **asked}).encode()
    return RawRequest("id", "POST", PATHS[api], (), body, subset)


def place(pool: Line, raw: RawRequest) -> Placement:
    outcome = pool.director.submit(pool.director.prepare(raw, pool.now), pool.now)
    assert isinstance(outcome, Placement)
    return outcome


def warm(pool: Line, raw: RawRequest) -> None:
    """Place a request and see it answered."""
    ticket = place(pool, raw).ticket
    for fact in (AnswerHeaders(200, None, False), FirstToken(), Ended(Cause.NATURAL, None, 1, 10)):
        pool.director.observe(ticket, fact, pool.now)


def example(
    api: str, *, a_blocks: int = 92, c_blocks: int = 88, pods: tuple[P, ...] = (WARM, IDLE, BUSY)
) -> Line:
    pool = Line(P(0, 0.0, A), P(0, 0.0, B), P(0, 0.0, C))
    for blocks, host_port in ((a_blocks, A), (c_blocks, C)):
        if blocks:
            warm(pool, request(api, blocks, (host_port,)))
    assert pool.idle
    pool.scrape(*pods)
    return pool


def chosen(placement: Placement) -> str:
    return placement.serving.endpoints[0].host_port


@pytest.mark.parametrize("api", PATHS)
def test_warm_with_a_short_queue_wins(api: str) -> None:
    pool = example(api)
    placement = place(pool, request(api, 100))
    assert chosen(placement) == A
    columns = {column.name: column for column in placement.serving.decision.columns}
    prefix, queue = columns["prefix-cache-scorer"], columns["queue-scorer"]
    slots = [pool.store.slot_of(host_port) for host_port in (A, B, C)]
    assert [prefix.scores[slot] for slot in slots] == [0.92, 0.0, 0.88]
    assert [queue.scores[slot] for slot in slots] == pytest.approx([29 / 31, 1.0, 0.0])
    assert (prefix.weight, queue.weight, columns["kv-cache-utilization-scorer"].weight) == (3, 2, 2)


@pytest.mark.parametrize("api", PATHS)
def test_it_stays_so_for_whichever_endpoint_it_is(api: str) -> None:
    pool = example(api, a_blocks=88, c_blocks=92, pods=(P(31, 0.5, A), IDLE, P(2, 0.5, C)))
    assert chosen(place(pool, request(api, 100))) == C


WRONG = {
    "nothing is cached": ({"a_blocks": 0, "c_blocks": 0}, 100, B),
    "the warm one is the busy one": ({"pods": (P(31, 0.5, A), IDLE, P(2, 0.5, C))}, 100, C),
    "both are busy": ({"a_blocks": 30, "c_blocks": 30, "pods": (P(31, 0.5, A), IDLE, BUSY)}, 100, B),
    "another prompt": ({}, 0, B),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_part_of_it_matters(name: str) -> None:
    changed, blocks, expected = WRONG[name]
    pool = example("completions", **changed)
    assert chosen(place(pool, request("completions", blocks))) == expected


def test_the_burst_that_follows_sticks_until_the_queue_tells() -> None:
    pool = example("completions")
    burst = [chosen(place(pool, request("completions", 100))) for _ in range(8)]
    assert set(burst) == {A}
    pool.scrape(P(40, 0.6, A), IDLE, P(40, 0.6, C))
    assert chosen(place(pool, request("completions", 100))) == B
