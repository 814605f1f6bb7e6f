"""The cache of media embeddings: what is remembered, found, and counted, worked by hand."""

from typing import Any

import numpy as np
import pytest

from epp.config.load import load_config
from epp.kvcache.embeddings import EMBEDDINGS_MATCH
from epp.payload.records import Api, InferenceRequest, Medium
from epp.scheduling.ports import Ctx
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FactKey, FirstToken, Role
from tests.data.scheduling import pool, tickets

Row = pool.Row
KIND = "mm-embeddings-cache-producer"
SCORER = "mm-embeddings-cache-scorer"
KEY = FactKey(EMBEDDINGS_MATCH, KIND)
END = Ended(Cause.NATURAL, None, 1, 1)


def context(*digests: int, kind: Any = "image") -> Ctx:
    ctx = pool.context([Row("1"), Row("2"), Row("3")])
    media = tuple(Medium(kind, digest, 100) for digest in digests)
    ctx.request = InferenceRequest(Api.CHAT, "m", "m", prompt_tokens=500, media=media)
    return ctx


def scores(producer: Any, *digests: int) -> list[float]:
    ctx = context(*digests)
    producer.produce(ctx)
    found = tickets.made(SCORER, ctx.view).score(ctx, ctx.view.candidates)
    return [float(score) for score in found[:3]]


def send(producer: Any, slot: int, *digests: int) -> Any:
    ctx = context(*digests)
    producer.produce(ctx)
    ticket = tickets.single(ctx, slot)
    producer.placed(ctx, ticket)
    return ticket


def test_share_of_the_media_held() -> None:
    producer = tickets.made(KIND, context().view)
    send(producer, 0, 1, 2)
    send(producer, 1, 2, 3, 4)
    assert scores(producer, 1, 2, 3, 4) == [0.5, 0.75, 0.0]
    assert scores(producer, 9) == [0.0, 0.0, 0.0]
    # A medium counts once, however often it stands in the prompt.
    assert scores(producer, 1, 1, 1, 9) == [0.5, 0.0, 0.0]


def test_request_without_media_has_no_match() -> None:
    ctx = context()
    producer = tickets.made(KIND, ctx.view)
    producer.produce(ctx)
    assert KEY not in ctx.facts
    producer.placed(ctx, tickets.single(ctx, 0))
    assert scores(producer) == [0.0, 0.0, 0.0]
    assert producer.counters.queries == {}


def test_least_recently_used_go_first() -> None:
    producer = tickets.made(KIND, context().view, cacheSizeInMBPerServer=6)
    send(producer, 0, 1, 2, 3)
    send(producer, 0, 1)
    send(producer, 0, 4)
    assert [scores(producer, digest)[0] for digest in (1, 2, 3, 4)] == [1.0, 0.0, 1.0, 1.0]
    send(producer, 0, *range(10, 20))
    assert producer.state()["pods"] == [{"pod": "default/1", "items": 3}]


@pytest.mark.parametrize(("size", "items"), [(0, 2048), (4096, 2048), (1, 1), (3, 1), (4, 2)])
def test_two_mebibytes_an_item(size: int, items: int) -> None:
    producer = tickets.made(KIND, context().view, cacheSizeInMBPerServer=size)
    for first in range(0, 5000, 100):
        send(producer, 0, *range(first, first + 100))
    assert producer.state()["pods"] == [{"pod": "default/1", "items": items}]


def test_encode_leg_holds_them_where_there_is_one() -> None:
    ctx = context(1, 2)
    producer = tickets.made(KIND, ctx.view)
    producer.produce(ctx)
    encode = tickets.leg(ctx, (1, 2), role=Role.ENCODE)
    ticket = tickets.ticket(ctx, encode, tickets.leg(ctx, (0,)))
    producer.placed(ctx, ticket)
    producer.observe(ticket, END, 0.0)
    assert scores(producer, 1, 2) == [0.0, 1.0, 1.0]


def test_entries_follow_the_endpoint_that_served() -> None:
    producer = tickets.made(KIND, context().view)
    send(producer, 0, 1)
    ticket = send(producer, 0, 1, 2)
    ticket.slot = 2
    producer.observe(ticket, AnswerHeaders(200, "10.0.0.3:8000", False), 0.0)
    producer.observe(ticket, FirstToken(), 0.0)
    ticket.status = 200
    producer.observe(ticket, END, 0.0)
    assert scores(producer, 1) == [1.0, 0.0, 1.0], "what was there before stays"
    assert scores(producer, 2) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("status", "cause", "held"),
    [
        (200, Cause.NATURAL, 1.0),
        (200, Cause.CLIENT_DISCONNECT, 1.0),
        (200, Cause.ERROR, 1.0),
        (0, Cause.CLIENT_DISCONNECT, 1.0),
        (0, Cause.ERROR, 0.0),
        (400, Cause.NATURAL, 0.0),
        (503, Cause.NATURAL, 0.0),
    ],
)
def test_refused_requests_are_taken_back(status: int, cause: Cause, held: float) -> None:
    producer = tickets.made(KIND, context().view)
    send(producer, 0, 1)
    ticket = send(producer, 0, 1, 2)
    ticket.status = status
    producer.observe(ticket, Ended(cause, None, 0, 0), 0.0)
    assert scores(producer, 2)[0] == held
    assert scores(producer, 1)[0] == 1.0


def test_endpoint_that_left_holds_nothing() -> None:
    producer = tickets.made(KIND, context().view)
    send(producer, 0, 1, 2)
    send(producer, 1, 1)
    producer.left(0)
    producer.joined(0)
    assert scores(producer, 1, 2) == [0.0, 0.5, 0.0]
    assert producer.state()["totalPods"] == 1
    producer.left(1)
    assert producer.index.slots == {}


def test_counters() -> None:
    producer = tickets.made(KIND, context().view)
    send(producer, 0, 1)
    send(producer, 1, 1, 2)
    ctx = context(1, 2, kind="video")
    producer.produce(ctx)
    counters = producer.counters
    assert counters.queries == {"image": 3, "video": 2}
    assert counters.hits["image"].tolist()[:3] == [1, 0, 0]
    assert counters.hits["video"].tolist()[:3] == [1, 2, 0]
    # Shares seen: 0, 0, 0; 1/2, 0, 0; 1/2, 1, 0.
    assert counters.ratios.tolist() == [6, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1]
    assert counters.ratio_sum == 2.0
    producer.left(0)
    assert counters.hits["image"].tolist()[:3] == [0, 0, 0]


def test_counters_follow_the_capacity() -> None:
    ctx = context(1)
    producer = tickets.made(KIND, ctx.view)
    producer.produce(ctx)
    wide = pool.context([Row(str(n)) for n in range(20)])
    wide.request = ctx.request
    producer.produce(wide)
    producer.placed(wide, tickets.single(wide, 19))
    producer.produce(wide)
    assert wide.facts[KEY].items[19] == 1
    assert producer.counters.hits["image"][19] == 1


def test_nothing_is_left_of_a_hundred_thousand_requests_but_the_latest() -> None:
    ctx = context()
    producer = tickets.made(KIND, ctx.view, cacheSizeInMBPerServer=20)
    for number in range(0, 100_000, 4):
        digests = tuple(range(number, number + 4))
        media = tuple(Medium("image", digest, 100) for digest in digests)
        ctx.request = InferenceRequest(Api.CHAT, "m", "m", prompt_tokens=500, media=media)
        ctx.facts = {}
        producer.produce(ctx)
        producer.placed(ctx, tickets.single(ctx, number // 4 % 3))
    assert len(producer.index.slots) == 30
    assert {pod["items"] for pod in producer.state()["pods"]} == {10}
    assert np.isclose(producer.counters.queries["image"], 100_000)


def test_a_prompt_of_very_many_media_is_looked_at_in_part() -> None:
    producer = tickets.made(KIND, context().view)
    send(producer, 0, *range(10_000))
    assert producer.state()["pods"] == [{"pod": "default/1", "items": 256}]
    assert scores(producer, *range(128, 10_000)) == [0.5, 0.0, 0.0]
    assert producer.counters.queries == {"image": 512}


def test_producer_is_made_for_the_scorer() -> None:
    text = f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: {SCORER}\n"
    assert load_config(text, "file").producers == (KIND,)


def test_parameters() -> None:
    with pytest.raises(ValueError, match="cacheSizeInMBPerServer"):
        tickets.made(KIND, context().view, cacheSizeInMBPerServer=-1)
