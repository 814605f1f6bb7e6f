"""Limits on request bodies: what one exchange holds, and what all of them hold together."""

from collections.abc import Sequence

from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import (
    Closed,
    Effect,
    Finish,
    ImmediateReply,
    RequestChunk,
    RequestHeaders,
    Route,
    Routed,
    Send,
)
from epp.payload.records import Api
from tests.data.extproc.script import placement

HEAD = ((":method", b"POST"),)


def begun(budget: BodyBudget, limits: Limits) -> Exchange:
    exchange = Exchange(budget, limits, lambda: "made")
    assert exchange.receive(RequestHeaders(0.0, HEAD, False)) == []
    return exchange


def status_of(effects: Sequence[Effect]) -> int:
    send, finish = effects
    assert isinstance(send, Send)
    assert isinstance(send.reply, ImmediateReply)
    assert isinstance(finish, Finish)
    return send.reply.status


def test_defaults() -> None:
    assert Limits() == Limits(body_bytes=33_554_432, held_bytes=1_073_741_824)


def test_a_budget_takes_all_or_nothing() -> None:
    budget = BodyBudget(10)
    assert budget.take(7)
    assert not budget.take(4)
    assert budget.used == 7
    assert budget.take(3)
    budget.give(10)
    assert budget.used == 0


def test_exchanges_share_one_budget() -> None:
    budget, limits = BodyBudget(100), Limits(body_bytes=80)
    first, second = begun(budget, limits), begun(budget, limits)
    assert first.receive(RequestChunk(0.0, b"a" * 60, False)) == []
    assert budget.used == 60
    assert status_of(second.receive(RequestChunk(0.0, b"b" * 41, True))) == 429
    assert budget.used == 60
    first.receive(Closed(0.0))
    assert budget.used == 0
    third = begun(budget, limits)
    (route,) = third.receive(RequestChunk(0.0, b"c" * 80, True))
    assert isinstance(route, Route)
    assert budget.used == 80


def test_the_limit_of_one_body_counts_before_the_budget() -> None:
    budget, limits = BodyBudget(100), Limits(body_bytes=80)
    exchange = begun(budget, limits)
    assert exchange.receive(RequestChunk(0.0, b"a" * 80, False)) == []
    assert status_of(exchange.receive(RequestChunk(0.0, b"a" * 41, False))) == 413
    assert budget.used == 0
    assert list(exchange.receive(RequestChunk(0.0, b"a" * 41, True))) == []
    assert budget.used == 0


def test_headers_and_subset_are_held_too() -> None:
    """Until the request is routed, with all that a hint of many short entries takes in memory."""
    budget = BodyBudget(1000)
    exchange = Exchange(budget, Limits(), lambda: "made")
    assert exchange.receive(RequestHeaders(0.0, HEAD, False, ("a" * 100,), size=200)) == []
    assert budget.used == 200 + 100 + 64
    assert exchange.receive(RequestChunk(0.0, b"body", False, ("b", "c"))) == []
    assert budget.used == 364 + 2 * (1 + 64) + 4
    (route,) = exchange.receive(RequestChunk(0.0, b"", True))
    assert isinstance(route, Route)
    assert route.raw.subset == ("b", "c")
    assert budget.used == 364 + 134
    exchange.receive(Closed(0.0))
    assert budget.used == 0


def test_headers_beyond_what_may_be_held() -> None:
    budget = BodyBudget(1000)
    waiting = Exchange(budget, Limits(), lambda: "made")
    assert waiting.receive(RequestHeaders(0.0, HEAD, False, size=900)) == []
    late = Exchange(budget, Limits(), lambda: "made")
    assert status_of(late.receive(RequestHeaders(0.0, HEAD, False, size=101))) == 429
    hinted = Exchange(budget, Limits(), lambda: "made")
    assert status_of(hinted.receive(RequestHeaders(0.0, HEAD, True, ("a", "b")))) == 429
    assert budget.used == 900
    waiting.receive(Closed(0.0))
    assert budget.used == 0


def test_a_routed_request_holds_nothing() -> None:
    budget = BodyBudget(1000)
    exchange = begun(budget, Limits())
    (route,) = exchange.receive(RequestChunk(0.0, b"body", True, ("10.0.0.1:80",)))
    assert isinstance(route, Route)
    assert budget.used > 4
    exchange.receive(Routed(0.0, placement("10.0.0.1:80"), Api.CHAT, "m", "m"))
    assert budget.used == 0
