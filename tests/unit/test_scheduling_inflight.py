"""In-flight load and the scorers that read it: values worked by hand."""

from typing import Any

import numpy as np
import pytest

from epp.config.load import load_config
from epp.errors import ConfigError
from epp.payload.records import Api, InferenceRequest
from epp.scheduling.inflight import FlowLoad
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    INFLIGHT_LOAD,
    PREFIX_MATCH,
    AnswerHeaders,
    Cause,
    Ended,
    FactKey,
    FirstToken,
    InflightLoad,
    PrefixMatch,
    Role,
)
from tests.data.scheduling import pool, tickets

Row = pool.Row
PRODUCER = "inflight-load-producer"
KEY = FactKey(INFLIGHT_LOAD, PRODUCER)
END = Ended(Cause.NATURAL, None, 3, 30)


def context(tokens: int = 1000, *, most: int | None = None, cached: tuple[int, ...] | None = None) -> Ctx:
    """Three endpoints; `cached` of the prompt's blocks of 64 tokens held by each."""
    ctx = pool.context([Row("1"), Row("2"), Row("3")])
    ctx.request = InferenceRequest(Api.CHAT, "m", "m", prompt_tokens=tokens, max_output_tokens=most)
    ctx.facts = {}
    ctx.flow, ctx.priority = "flow", 2
    if cached is not None:
        blocks = np.zeros(ctx.view.capacity, np.int64)
        blocks[: len(cached)] = cached
        ctx.facts[FactKey(PREFIX_MATCH, "approx-prefix-cache-producer")] = PrefixMatch(
            blocks, tokens // 64, 64, tokens
        )
    return ctx


def load(producer: Any, ctx: Ctx) -> tuple[list[int], list[int]]:
    producer.produce(ctx)
    fact = ctx.facts[producer.provides[0]]
    return fact.requests.tolist()[:3], fact.tokens.tolist()[:3]


@pytest.mark.parametrize(
    ("parameters", "tokens", "most", "cached", "expected"),
    [
        # 1000 tokens are 15 blocks of 64 and 40 tokens beyond.
        ({}, 1000, None, None, 1000),
        ({}, 1000, None, (0, 0, 0), 1000),
        ({}, 1000, None, (0, 10, 0), 5 * 64 + 40),
        ({}, 1000, None, (0, 15, 0), 40),
        ({}, 1000, 7, (0, 15, 0), 40),
        # The estimate is of the whole prompt; it is bounded by the request, then by the operator.
        ({"addEstimatedOutputTokens": True}, 1000, None, (0, 15, 0), 40 + 1500),
        ({"addEstimatedOutputTokens": True}, 1000, 100, (0, 15, 0), 40 + 100),
        ({"addEstimatedOutputTokens": True}, 1000, 0, (0, 15, 0), 40),
        ({"addEstimatedOutputTokens": True, "maxEstimatedOutputTokens": 60}, 1000, 100, None, 1060),
        ({"addEstimatedOutputTokens": True, "maxEstimatedOutputTokens": 0}, 1000, None, None, 1000),
        ({"addEstimatedOutputTokens": True, "outputRatio": 0}, 1000, None, None, 1000),
        ({"addEstimatedOutputTokens": True, "outputRatio": 0.5}, 5, None, None, 5 + 3),
        ({"addEstimatedOutputTokens": True, "outputRatio": 0.5}, 1, None, None, 1 + 1),
        ({"addEstimatedOutputTokens": True}, 0, None, None, 0),
        ({"outputRatio": 3, "maxEstimatedOutputTokens": 5}, 1000, None, None, 1000),
        ({"prefixMatchInfoProducerName": "precise"}, 1000, None, (0, 15, 0), 1000),
        ({"syncCrossReplicaState": False}, 1000, None, None, 1000),
    ],
)
def test_tokens_of_one_request(
    parameters: dict[str, Any], tokens: int, most: int | None, cached: tuple[int, ...] | None, expected: int
) -> None:
    ctx = context(tokens, most=most, cached=cached)
    producer = tickets.made(PRODUCER, ctx.view, **parameters)
    producer.produce(ctx)
    added = ctx.facts[KEY].added(ctx)
    assert (added if isinstance(added, int) else int(added[1])) == expected
    producer.placed(ctx, tickets.single(ctx, 1))
    assert load(producer, ctx) == ([0, 1, 0], [0, expected, 0])


def test_one_request_from_its_start_to_its_end() -> None:
    ctx = context(most=50)
    producer = tickets.made(PRODUCER, ctx.view, addEstimatedOutputTokens=True)
    ticket = tickets.single(ctx, 1)
    producer.placed(ctx, ticket)
    assert load(producer, ctx) == ([0, 1, 0], [0, 1050, 0])
    assert producer.loads() == [FlowLoad(1, "flow", 2, 1, 1050)]
    producer.observe(ticket, AnswerHeaders(200, None, True), 0.0)
    producer.observe(ticket, FirstToken(), 0.0)
    assert load(producer, ctx) == ([0, 1, 0], [0, 50, 0])
    producer.observe(ticket, END, 0.0)
    assert load(producer, ctx) == ([0, 0, 0], [0, 0, 0])
    producer.observe(ticket, END, 0.0)
    assert load(producer, ctx) == ([0, 0, 0], [0, 0, 0])
    assert producer.in_flight == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.ENCODE])
def test_earlier_legs_are_done_at_the_first_token(role: Role) -> None:
    """The decoding of a minute must not keep the prefill endpoint from the next prompt."""
    ctx = context(cached=(15, 0, 0))
    producer = tickets.made(PRODUCER, ctx.view)
    ticket = tickets.ticket(ctx, tickets.leg(ctx, (0,), role=role), tickets.leg(ctx, (2,)))
    producer.placed(ctx, ticket)
    assert load(producer, ctx) == ([1, 0, 1], [40, 0, 1000])
    producer.observe(ticket, FirstToken(), 0.0)
    assert load(producer, ctx) == ([0, 0, 1], [0, 0, 0])
    producer.observe(ticket, END, 0.0)
    assert load(producer, ctx) == ([0, 0, 0], [0, 0, 0])


def test_charge_moves_to_the_endpoint_that_serves() -> None:
    ctx = context()
    producer = tickets.made(PRODUCER, ctx.view)
    ticket = tickets.single(ctx, 1)
    producer.placed(ctx, ticket)
    ticket.slot = 2
    producer.observe(ticket, AnswerHeaders(200, "10.0.0.3:8000", True), 0.0)
    assert load(producer, ctx) == ([0, 0, 1], [0, 0, 1000])
    producer.observe(ticket, END, 0.0)
    assert load(producer, ctx) == ([0, 0, 0], [0, 0, 0])


def test_endpoint_that_comes_back_does_not_pay_for_its_former_life() -> None:
    """Five in flight, the endpoint goes and another takes its slot, one more is sent, the five end."""
    ctx = context()
    producer = tickets.made(PRODUCER, ctx.view)
    before = [tickets.single(ctx, 1, number=n) for n in range(5)]
    for ticket in before:
        producer.placed(ctx, ticket)
    producer.left(1)
    producer.joined(1)
    assert load(producer, ctx) == ([0, 0, 0], [0, 0, 0])
    producer.placed(ctx, tickets.single(ctx, 1, number=9))
    for ticket in before:
        producer.observe(ticket, END, 0.0)
    assert load(producer, ctx) == ([0, 1, 0], [0, 1000, 0])
    assert producer.in_flight == 1


def test_nothing_is_left_of_a_hundred_thousand_requests() -> None:
    ctx = context(cached=(3, 0, 1))
    producer = tickets.made(PRODUCER, ctx.view, addEstimatedOutputTokens=True)
    waiting: list[Any] = []
    for number in range(100_000):
        ticket = tickets.single(ctx, number % 3, number=number) if number < 300 else waiting[number % 300]
        if number >= 300:
            producer.observe(ticket, FirstToken() if number % 2 else AnswerHeaders(200, None, True), 0.0)
            producer.observe(ticket, END, 0.0)
            ticket.id = number  # as good as a new one
        else:
            waiting.append(ticket)
        producer.placed(ctx, ticket)
    assert producer.in_flight == 300
    for ticket in waiting:
        producer.observe(ticket, END, 0.0)
    assert producer.in_flight == 0
    assert load(producer, ctx) == ([0, 0, 0], [0, 0, 0])
    assert {row["requests"] for row in producer.state()["endpoints"]} == {0}


def test_state_shows_the_busiest_first() -> None:
    ctx = context()
    producer = tickets.made(PRODUCER, ctx.view)
    for number, slot in enumerate((2, 2, 0)):
        producer.placed(ctx, tickets.single(ctx, slot, number=number))
    assert producer.state() == {
        "endpoints": [
            {"endpoint": "default/3", "requests": 2, "tokens": 2000},
            {"endpoint": "default/1", "requests": 1, "tokens": 1000},
            {"endpoint": "default/2", "requests": 0, "tokens": 0},
        ],
        "totalEndpoints": 3,
        "maxEndpoints": 100,
        "truncated": False,
    }


# -- scorers ------------------------------------------------------------------------------------------


def scores(kind: str, ctx: Ctx, **parameters: Any) -> list[float]:
    scorer = tickets.made(kind, ctx.view, **parameters)
    found = scorer.score(ctx, ctx.view.candidates)
    return [float(found[slot]) for slot in np.flatnonzero(ctx.view.candidates)]


@pytest.mark.parametrize(
    ("active", "parameters", "expected"),
    [
        ((0, 0, 0), {}, [1, 1, 1]),
        ((4, 0, 1), {}, [0, 1, 0.75]),
        ((3, 3, 3), {}, [0, 0, 0]),
        ((4, 0, 1), {"maxBusyScore": 0.5}, [0, 1, 0.375]),
        ((4, 2, 1), {"idleThreshold": 1}, [0, 0.5, 1]),
        ((4, 2, 1), {"idleThreshold": 4}, [1, 1, 1]),
        ((4, 2, 1), {"idleThreshold": 1, "maxBusyScore": 0}, [0, 0, 1]),
        ((4, 0, 1), {"inFlightLoadProducerName": "other"}, [1, 1, 1]),
        ((4, 0, 1), {"requestTimeout": "2m"}, [0, 1, 0.75]),
    ],
)
def test_active_request_scorer(
    active: tuple[int, ...], parameters: dict[str, Any], expected: list[float]
) -> None:
    ctx = pool.context([Row(str(n), active=count) for n, count in enumerate(active)])
    assert scores("active-request-scorer", ctx, **parameters) == pytest.approx(expected)


def test_active_request_scorer_measures_those_in_question() -> None:
    ctx = pool.context([Row("1", active=100, candidate=False), Row("2", active=2), Row("3", active=4)])
    assert scores("active-request-scorer", ctx) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("cached", "parameters", "expected"),
    [
        # In flight 0, 1000 and 3000 tokens; the request adds 1000, or what of it is not cached.
        (None, {"queueThresholdTokens": 4000}, [0.75, 0.5, 0.0]),
        ((0, 10, 15), {"queueThresholdTokens": 4000}, [0.75, 0.66, 0.24]),
        (None, {"queueThresholdTokens": 2000}, [0.5, 0.0, 0.0]),
        (None, {"queueThresholdTokens": 0}, [1 - n / 4_194_304 for n in (1000, 2000, 4000)]),
        (None, {}, [1 - n / 4_194_304 for n in (1000, 2000, 4000)]),
        (None, {"inFlightLoadProducerName": "other"}, [1, 1, 1]),
    ],
)
def test_token_load_scorer(
    cached: tuple[int, ...] | None, parameters: dict[str, Any], expected: list[float]
) -> None:
    ctx = context(cached=cached)
    producer = tickets.made(PRODUCER, ctx.view)
    plain = context()
    for number, slot in enumerate((1, 2, 2, 2)):
        producer.placed(plain, tickets.single(plain, slot, number=number))
    producer.produce(ctx)
    assert scores("token-load-scorer", ctx, **parameters) == pytest.approx(expected)


def test_token_load_scorer_counts_the_estimated_output() -> None:
    ctx = context()
    tickets.made(PRODUCER, ctx.view, addEstimatedOutputTokens=True).produce(ctx)
    assert scores("token-load-scorer", ctx, queueThresholdTokens=5000) == [0.5, 0.5, 0.5]


def test_token_load_scorer_reads_other_producers_of_the_fact() -> None:
    ctx = context()
    tokens = np.array([100, 200, 400, 0, 0])
    ctx.facts[FactKey(INFLIGHT_LOAD, "own")] = InflightLoad(tokens, tokens)
    found = scores("token-load-scorer", ctx, queueThresholdTokens=400, inFlightLoadProducerName="own")
    assert found == [0.75, 0.5, 0.0]


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (PRODUCER, {"outputRatio": -1}),
        (PRODUCER, {"maxEstimatedOutputTokens": -1}),
        (PRODUCER, {"outputRatio": float("inf")}),
        (PRODUCER, {"addEstimatedOutputTokens": "yes"}),
        ("active-request-scorer", {"idleThreshold": -1}),
        ("active-request-scorer", {"maxBusyScore": 1.1}),
        ("token-load-scorer", {"queueThresholdTokens": -1}),
    ],
)
def test_wrong_parameters(kind: str, parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(ValueError, match=name):
        tickets.made(kind, context().view, **parameters)


HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"


@pytest.mark.parametrize("kind", ["active-request-scorer", "token-load-scorer"])
def test_producer_is_made_for_whoever_needs_it_and_hashes_no_prompts(kind: str) -> None:
    assert load_config(f"{HEAD}- type: {kind}\n", "file").producers == (PRODUCER,)


def test_named_prefix_producer_is_needed() -> None:
    text = f"{HEAD}- type: {PRODUCER}\n  parameters: {{prefixMatchInfoProducerName: %s}}\n"
    made = load_config(text % "approx-prefix-cache-producer", "file").producers
    assert made == ("approx-prefix-cache-producer", PRODUCER)
    with pytest.raises(ConfigError, match="needs prefix-match from 'nobody', which is not defined"):
        load_config(text % "nobody", "file")
