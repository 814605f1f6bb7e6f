"""In-flight load against a plain list of open requests: exact always, zero in the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.payload.records import Api, InferenceRequest
from epp.pool.records import PoolView
from epp.scheduling.inflight import InflightLoadParams, InflightLoadProducer
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    INFLIGHT_LOAD,
    PREFIX_MATCH,
    AnswerFact,
    AnswerHeaders,
    Cause,
    Ended,
    FactKey,
    FirstToken,
    PrefixMatch,
    Progress,
    Role,
    Ticket,
)
from tests.data.scheduling import pool, tickets

SLOTS = 4
SIZE = 16
KEY = FactKey(INFLIGHT_LOAD, "load")
MATCH = FactKey(PREFIX_MATCH, "approx-prefix-cache-producer")
Step = tuple[str, int, int]
kinds = ("send", "send", "split", "token", "end", "move", "headers", "progress", "leave", "grow")
step = st.tuples(st.sampled_from(kinds), st.integers(0, 10_000), st.integers(0, 10_000))
steps = st.lists(step, max_size=10) | st.lists(step, min_size=20, max_size=50)


@dataclass
class Open:
    """A request as the oracle sees it: where, whose slot that was, and what it takes there."""

    ticket: Ticket
    slot: int
    owner: int
    prompt: int
    output: int
    prefill: tuple[int, int, int] | None = None  # slot, owner, tokens


class Story:
    def __init__(self, producer: Callable[..., InflightLoadProducer], output: bool) -> None:
        base = pool.context([pool.Row(str(n)) for n in range(SLOTS)], capacity=SLOTS)
        self.view: PoolView = base.view
        params = InflightLoadParams(add_estimated_output_tokens=output, max_estimated_output_tokens=500)
        self.producer = producer("load", params, self.view)
        self.output = output
        self.owners = [0] * 64
        self.open: list[Open] = []
        self.sent = 0

    def play(self, story: list[Step]) -> None:
        for kind, which, amount in story:
            if kind in {"send", "split"}:
                self.send(which, amount, split=kind == "split")
            elif kind == "leave":
                self.owners[which % SLOTS] += 1
                self.producer.left(which % SLOTS)
                self.producer.joined(which % SLOTS)
            elif kind == "grow":
                self.grow()
            elif self.open:
                self.happen(self.open[which % len(self.open)], kind, amount)
            self.compare()
        while self.open:
            self.happen(self.open[-1], "end", 0)
        self.compare()
        assert self.producer.in_flight == 0
        assert self.producer.loads() == []

    def send(self, which: int, amount: int, *, split: bool) -> None:
        blocks = np.arange(self.view.capacity) * which % 9
        tokens = 8 * SIZE + amount % 100
        request = InferenceRequest(Api.CHAT, "m", "m", prompt_tokens=tokens)
        facts: dict[FactKey, Any] = {MATCH: PrefixMatch(blocks, 8, SIZE, tokens)} if which % 3 else {}
        base = pool.context([])
        ctx = Ctx(request, self.view, base.load, facts, 0.0, base.draw, flow=f"f{amount % 2}")
        self.producer.produce(ctx)
        slot, prefill = which % SLOTS, amount % SLOTS
        legs = [tickets.leg(ctx, (slot,))]
        if split:
            legs.insert(0, tickets.leg(ctx, (prefill,), role=Role.PREFILL))
        self.sent += 1
        ticket = tickets.ticket(ctx, *legs, number=self.sent)
        self.producer.placed(ctx, ticket)

        def cost(at: int) -> int:
            held = int(blocks[at]) * SIZE if which % 3 else 0
            return max(8 * SIZE - held, 0) + tokens - 8 * SIZE

        output = min(int(tokens * 1.5 + 0.5), 500) if self.output else 0
        behind = (prefill, self.owners[prefill], cost(prefill) + output) if split else None
        self.open.append(Open(ticket, slot, self.owners[slot], cost(slot), output, behind))

    def happen(self, one: Open, kind: str, amount: int) -> None:
        fact: AnswerFact = Progress(1, 1)
        match kind:
            case "token":
                fact = FirstToken()
                one.prompt, one.prefill = 0, None
            case "end":
                fact = Ended(Cause.ERROR if amount % 2 else Cause.NATURAL, None, 0, 0)
                self.open.remove(one)
            case "headers":
                fact = AnswerHeaders(200, None, True)
            case "move":
                fact = AnswerHeaders(200, "elsewhere", True)
                one.ticket.slot = amount % SLOTS
                if one.slot != amount % SLOTS:
                    one.slot, one.owner = amount % SLOTS, self.owners[amount % SLOTS]
        self.producer.observe(one.ticket, fact, 0.0)

    def grow(self) -> None:
        if self.view.capacity < 32:
            self.view.capacity *= 2
            self.view.endpoints += (None,) * (self.view.capacity // 2)
            self.view.candidates = np.pad(self.view.candidates, (0, self.view.capacity // 2))

    def charges(self) -> Iterator[tuple[str, int, int]]:
        for one in self.open:
            if one.owner == self.owners[one.slot]:
                yield one.ticket.flow, one.slot, one.prompt + one.output
            if one.prefill is not None and one.prefill[1] == self.owners[one.prefill[0]]:
                yield one.ticket.flow, one.prefill[0], one.prefill[2]

    def compare(self) -> None:
        base = pool.context([])
        ctx = Ctx(base.request, self.view, base.load, {}, 0.0, base.draw)
        self.producer.produce(ctx)
        load = ctx.facts[KEY]
        assert len(load.requests) == len(load.tokens) == self.view.capacity
        charges = list(self.charges())
        for slot in range(self.view.capacity):
            mine = [tokens for _, at, tokens in charges if at == slot]
            assert (load.requests[slot], load.tokens[slot]) == (len(mine), sum(mine))
        told = {(load.flow, load.slot): (load.requests, load.tokens) for load in self.producer.loads()}
        for (flow, slot), sums in told.items():
            mine = [tokens for of, at, tokens in charges if (of, at) == (flow, slot)]
            assert sums == (len(mine), sum(mine))
        assert sum(requests for requests, _ in told.values()) == len(charges)


@settings(max_examples=60)
@given(steps, st.booleans())
def test_load_is_that_of_the_open_requests(story: list[Step], output: bool) -> None:
    Story(InflightLoadProducer, output).play(story)


# -- planted faults -----------------------------------------------------------------------------------


class GivesBackFromTheNextOwner(InflightLoadProducer):
    """What ends late is given back from the slot's next owner."""

    def left(self, slot: int) -> None:
        super().left(slot)
        self._generations[slot] -= 1


class KeepsPrefillToTheEnd(InflightLoadProducer):
    def _computed(self, flight: Any) -> None:
        if flight.others and flight.serving.prompt_tokens:
            flight.others, others = [], flight.others
            super()._computed(flight)
            flight.others = others
        else:
            super()._computed(flight)


class StaysWhereItWasPlaced(InflightLoadProducer):
    def _move(self, flight: Any, slot: int) -> None: ...


class ForgetsRequestsThatFail(InflightLoadProducer):
    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        if not (isinstance(fact, Ended) and fact.cause is Cause.ERROR):
            super().observe(ticket, fact, now)


class GivesTheOutputBackAtTheFirstToken(InflightLoadProducer):
    def _computed(self, flight: Any) -> None:
        super()._computed(flight)
        self._load.tokens[flight.serving.slot] -= flight.serving.output_tokens
        flight.serving.output_tokens = 0


class LosesColumnsWhenGrowing(InflightLoadProducer):
    def _grow(self) -> None:
        if len(self._generations) < self._view.capacity:
            self._generations, load = [], self._load
            self._load = type(load)(load.requests[:0], load.tokens[:0], self._cost)
        super()._grow()


FAULTS = (
    GivesBackFromTheNextOwner,
    KeepsPrefillToTheEnd,
    StaysWhereItWasPlaced,
    ForgetsRequestsThatFail,
    GivesTheOutputBackAtTheFirstToken,
    LosesColumnsWhenGrowing,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: type[InflightLoadProducer]) -> None:
    @settings(max_examples=300, phases=(Phase.generate,), derandomize=True, database=None)
    @given(steps, st.booleans())
    def tell(story: list[Step], output: bool) -> None:
        Story(fault, output).play(story)

    with pytest.raises((AssertionError, IndexError)):
        tell()
