"""The exchange's conformance scripts, played as records and through the codec as bytes."""

from collections import Counter
from itertools import count
from typing import Any

import msgspec
import pytest

from epp.errors import ProtocolError
from epp.extproc import codec
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import BodyMode, Effect, Event, Modes, RequestChunk, RequestHeaders, Route, Send
from tests.data.extproc import script

SCRIPTS = script.load()


def exchange_for(played: Any, budget: BodyBudget) -> Exchange:
    made = count(1)
    return Exchange(budget, played.limits, lambda: f"made-{next(made)}", reports=played.reports)


def through_codec(event: Event) -> Event:
    """A script says nothing of sizes."""
    read = codec.decode(script.to_wire(event), event.at)
    return msgspec.structs.replace(read, size=0) if isinstance(read, RequestHeaders) else read


def show_through_codec(effect: Effect) -> dict[str, Any]:
    return script.show_wire(codec.encode(effect.reply)) if isinstance(effect, Send) else script.show(effect)


@pytest.mark.parametrize("over_bytes", [False, True], ids=["records", "bytes"])
@pytest.mark.parametrize("played", SCRIPTS, ids=lambda played: played.name)
def test_script(played: Any, over_bytes: bool) -> None:
    budget = BodyBudget(played.limits.held_bytes)
    exchange = exchange_for(played, budget)
    finished = False
    for number, step in enumerate(played.steps, 1):
        event = through_codec(step.event) if over_bytes and step.kind in {"in", "illegal"} else step.event
        if step.kind == "illegal":
            with pytest.raises(ProtocolError, match=step.out):
                exchange.receive(event)
            continue
        effects = exchange.receive(event)
        shown = [show_through_codec(effect) if over_bytes else script.show(effect) for effect in effects]
        assert script.matches(step.out, shown), (
            f"step {number} ({step.kind})\nwanted {step.out}\ngot    {shown}"
        )
        finished = finished or any("finish" in effect for effect in shown)
        assert not finished or budget.used == 0


@pytest.mark.parametrize("played", SCRIPTS, ids=lambda played: played.name)
def test_bytes_read_back_as_the_records(played: Any) -> None:
    for step in played.steps:
        if step.kind in {"in", "illegal"}:
            assert through_codec(step.event) == step.event


def test_the_matrix_is_whole() -> None:
    kinds = Counter(played.name.partition(":")[0] for played in SCRIPTS)
    assert kinds["matrix"] == 8
    assert len({played.name for played in SCRIPTS}) == len(SCRIPTS) >= 20


def test_a_wrong_expectation_is_seen() -> None:
    right = [{"streamed": "response", "content": b"ab", "eos": True}, {"finish": "Natural"}]
    expected = [{"streamed": "response", "content": "ab", "eos": True}, {"finish": "Natural"}]
    assert script.matches(expected, right)
    for wrong in (
        right[:1],
        right[::-1],
        [{**right[0], "content": b"a"}, right[1]],
        [{**right[0], "eos": False}, right[1]],
        [right[0], {"finish": "Error"}],
    ):
        assert not script.matches(expected, wrong)


def test_a_repeated_last_message_is_counted() -> None:
    (played,) = [one for one in SCRIPTS if one.name.endswith("the last body message is repeated")]
    exchange = exchange_for(played, BodyBudget(played.limits.held_bytes))
    for step in played.steps:
        exchange.receive(step.event)
    assert exchange.dropped == 2


@pytest.mark.parametrize("mode", [mode for mode in BodyMode if mode is not BodyMode.GRPC])
@pytest.mark.parametrize("bodyless", [False, True])
def test_the_router_hears_whether_it_sees_the_whole_body(mode: BodyMode, bodyless: bool) -> None:
    exchange = Exchange(BodyBudget(1000), Limits(), lambda: "made")
    effects = [*exchange.receive(RequestHeaders(0.0, (), bodyless, None, Modes(mode, mode)))]
    if not bodyless:
        effects += exchange.receive(RequestChunk(0.0, b"{}", True))
    (route,) = (effect for effect in effects if isinstance(effect, Route))
    shown = bodyless or mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
    assert (route.raw.body_shown, route.raw.body) == (shown, b"{}" if shown and not bodyless else b"")
