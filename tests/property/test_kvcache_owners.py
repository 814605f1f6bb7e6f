"""Whose blocks the approximate index holds, against an oracle that keeps the keys of each request apart."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epp.kvcache import approximate
from epp.kvcache.approximate import ApproximateParams, ApproximatePrefixProducer
from epp.kvcache.lru import LruRunIndex
from epp.kvcache.runs import packed
from epp.payload.records import Api, InferenceRequest
from epp.pool.records import Endpoint, Load
from epp.pool.store import empty_view
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    AnswerHeaders,
    Cause,
    Decision,
    Ended,
    FirstToken,
    Leg,
    Placement,
    Role,
    Ticket,
    TicketId,
)

SLOTS = 2
PLENTY = ApproximateParams(lru_capacity_per_server=1 << 30)

Chains = tuple[tuple[int, ...], ...]


@dataclass
class Oracle:
    """A slot holds the prompts in flight to it, and those of requests that it did not refuse."""

    in_flight: dict[TicketId, tuple[int, set[int]]] = field(default_factory=dict)
    computed: list[set[int]] = field(default_factory=lambda: [set() for _ in range(SLOTS)])

    def blocks(self, chain: Sequence[int]) -> list[int]:
        held = [set(keys) for keys in self.computed]
        for slot, keys in self.in_flight.values():
            held[slot] |= keys
        return [next((n for n, key in enumerate(chain) if key not in own), len(chain)) for own in held]

    def computed_by(self, ticket: Ticket) -> None:
        slot, keys = self.in_flight[ticket.id]
        self.computed[slot] |= keys

    def left(self, slot: int) -> None:
        """Those in flight to it say nothing about the next owner, wherever else they may go."""
        self.computed[slot] = set()
        for ticket, (there, _) in list(self.in_flight.items()):
            if there == slot:
                self.in_flight[ticket] = slot, set()


@dataclass
class Fleet:
    """The producer and its oracle, told the same."""

    def __post_init__(self) -> None:
        self.view = empty_view(SLOTS)
        self.view.endpoints = tuple(
            Endpoint(f"uid-{n}", f"pod-{n}", "default", f"10.0.0.{n}", 8000) for n in range(SLOTS)
        )
        self.view.candidates[:] = self.view.present[:] = True
        self.producer = ApproximatePrefixProducer("approx", PLENTY, self.view, b"secret")
        self.oracle = Oracle()
        self.waiting: list[Ticket] = []
        self.answering: list[Ticket] = []
        self.sent = 0

    def look(self, chains: Chains) -> Ctx:
        request = InferenceRequest(Api.CHAT, model="llama", chains=chains, prompt_tokens=64)
        zeros = np.zeros(SLOTS, np.int64)
        ctx = Ctx(request, self.view, Load(zeros, zeros), {}, 0.0, random.Random(0))
        self.producer.produce(ctx)
        return ctx

    def blocks(self, chain: tuple[int, ...]) -> list[int]:
        return self.look((chain,)).facts[self.producer.provides[0]].blocks.tolist()

    def send(self, chains: Chains, slot: int) -> None:
        ctx = self.look(chains)
        decision = Decision("default", (slot,), np.ones(SLOTS, np.bool_), (), (), np.zeros(SLOTS))
        endpoint = self.view.endpoints[slot]
        assert endpoint is not None
        self.sent += 1
        ticket_id = TicketId(self.sent)
        placement = Placement(ticket_id, (Leg(Role.DECODE, (endpoint,), decision),))
        ticket = Ticket(ticket_id, ctx.request, placement, slot, 0, 0.0, facts=ctx.facts)
        self.producer.placed(ctx, ticket)
        self.oracle.in_flight[ticket_id] = slot, {key for chain in chains for key in chain}
        self.waiting.append(ticket)

    def move(self, ticket: Ticket) -> None:
        """The proxy sent it to the other endpoint."""
        ticket.slot = 1 - ticket.slot
        self.producer.observe(ticket, AnswerHeaders(0, None, False), 0.0)
        keys = {key for chain in ticket.request.chains or () for key in chain}
        self.oracle.in_flight[ticket.id] = ticket.slot, keys

    def answer(self, ticket: Ticket) -> None:
        ticket.status = 200
        self.producer.observe(ticket, FirstToken(), 0.0)
        self.oracle.computed_by(ticket)
        self.answering.append(ticket)

    def end(self, ticket: Ticket, cause: Cause = Cause.NATURAL) -> None:
        self.producer.observe(ticket, Ended(cause, None, 1, 1), 0.0)
        self.oracle.computed_by(ticket)
        del self.oracle.in_flight[ticket.id]

    def refuse(self, ticket: Ticket) -> None:
        ticket.status = 503
        self.producer.observe(ticket, Ended(Cause.NATURAL, None, 1, 1), 0.0)
        del self.oracle.in_flight[ticket.id]

    def leave(self, slot: int) -> None:
        self.producer.left(slot)
        self.oracle.left(slot)

    def step(self, what: str, draw: random.Random, prompts: Sequence[tuple[int, ...]]) -> None:
        match what:
            case "send":
                self.send(tuple(draw.choices(prompts, k=draw.choice((1, 1, 1, 2)))), draw.randrange(SLOTS))
            case "leave":
                self.leave(draw.randrange(SLOTS))
            case "end" if self.answering:
                self.end(self.answering.pop(draw.randrange(len(self.answering))))
            case "move" if self.waiting:
                self.move(draw.choice(self.waiting))
            case "answer" | "refuse" | "give up" if self.waiting:
                ticket = self.waiting.pop(draw.randrange(len(self.waiting)))
                match what:
                    case "answer":
                        self.answer(ticket)
                    case "refuse":
                        self.refuse(ticket)
                    case _:
                        self.end(ticket, Cause.CLIENT_DISCONNECT)


STEPS = ("send",) * 6 + ("answer",) * 3 + ("refuse",) * 3 + ("move", "end", "end", "give up")


def family(draw: random.Random) -> list[tuple[int, ...]]:
    """A few prompts, most of which begin like another."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(6):
        shared: tuple[int, ...] = ()
        if prompts and draw.random() < 0.85:
            base = draw.choice(prompts)
            shared = base[: draw.randint(0, len(base))]
        prompts.append(shared + tuple(draw.getrandbits(64) for _ in range(draw.randint(1, 4))))
    return prompts


def play(seed: int, steps: int = 40) -> None:
    draw = random.Random(seed)
    fleet, prompts = Fleet(), family(draw)
    for _ in range(steps):
        what = "leave" if draw.random() < 0.02 else draw.choice(STEPS)
        fleet.step(what, draw, prompts)
        for prompt in prompts:
            assert fleet.blocks(prompt) == fleet.oracle.blocks(prompt), what
    for ticket in fleet.waiting:
        fleet.refuse(ticket)
    for ticket in fleet.answering:
        fleet.end(ticket)
    for prompt in prompts:
        assert fleet.blocks(prompt) == fleet.oracle.blocks(prompt)
    assert not fleet.producer._sent
    assert not any(fleet.producer._computing)


def play_all(seeds: range) -> None:
    for seed in seeds:
        play(seed)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
@example(seed=0)
def test_a_slot_holds_what_was_sent_and_not_refused_whoever_sent_it(seed: int) -> None:
    play(seed)


# -- faults that must be seen -------------------------------------------------------------------------


def _stop_at_what_is_forgotten(index: LruRunIndex, chain: Sequence[int], slot: int, keep: int) -> None:
    known = next((n for n, key in enumerate(chain) if not _stored(index, key)), len(chain))
    truncate(index, chain[:known], slot, keep)


def _stored(index: LruRunIndex, key: int) -> bool:
    return any(packed([key]) in keys for keys in index._keys)


def _wait_on(
    producer: ApproximatePrefixProducer, sent: approximate._Sent, key: int, computed: Chains
) -> None:
    producer._computing[sent.slot].setdefault(key, []).append(sent)


truncate = LruRunIndex.truncate


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        pytest.param(ApproximatePrefixProducer, "_advance", _wait_on, id="an answer proves nothing"),
        pytest.param(approximate, "_shared", lambda chain, other, least: least, id="one owner a block"),
        pytest.param(approximate, "_shared", lambda chain, other, least: len(chain), id="all is shared"),
        pytest.param(ApproximatePrefixProducer, "_held_now", lambda *_: 0, id="moved as looked up"),
        pytest.param(LruRunIndex, "truncate", _stop_at_what_is_forgotten, id="a tail left over"),
    ],
)
def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, fault: object) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        play_all(range(40))
