"""The director's accounts under random interleavings: requests, answers, pods that come and go, bad plugins.

Every step is followed by a comparison with a model: what is charged to each slot is what the open tickets
say, nothing is ever negative, no slot passes on while something is in flight to it, and at the end nothing
is left anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from epp import director as director_module
from epp.config.load import build, default_config
from epp.director import Director, Need, Prepared, Refusal
from epp.payload.records import RawRequest, Usage
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint, PoolView
from epp.pool.store import FIRST_CAPACITY, PoolStore
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    AnswerFact,
    AnswerHeaders,
    Cause,
    Ended,
    FirstToken,
    Placement,
    Progress,
    Ticket,
    TicketId,
)

PODS = 24
PROMPTS = ("a" * 600, "a" * 600 + "b" * 3000, "c" * 90, "")


class Recorder:
    def placed(self, prepared: Prepared, ticket: Ticket, ctx: Ctx) -> None: ...

    def plugin_failed(self, plugin: object, error: Exception) -> None: ...

    def need_failed(self, need: Need, error: Exception) -> None: ...

    def served_elsewhere(self, ticket: Ticket, served: str, in_pool: bool) -> None: ...

    def observed(self, prepared: Prepared, ticket: Ticket, fact: AnswerFact, now: float) -> None: ...


class Moody:
    """A plugin at every hook that fails at every third call."""

    provides = ()
    needs = ()

    def __init__(self) -> None:
        self.calls = 0

    def _maybe(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("planted")

    def produce(self, ctx: Ctx) -> None:
        self._maybe()

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        self._maybe()

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        self._maybe()


@dataclass
class Open:
    """The model's idea of one placed request."""

    uid: str
    slot: int
    started: bool = False
    tokens: int = 0
    told: list[AnswerFact] = field(default_factory=list)


class World:
    """A pool, a director, and what should be charged to whom."""

    def __init__(self, make_director: type[Director], make_ledger: type[InflightLedger]) -> None:
        self.now = 10.0
        self.ledger = make_ledger(FIRST_CAPACITY, strict=True)
        self.store = PoolStore(busy=self.ledger.busy)
        assembly = build(default_config(), self.store.view, secret=b"s")
        for member in assembly.members:
            self.store.add_member(member)
        moody = Moody()
        plugins = assembly.plugins
        self.director = make_director(
            self.store,
            self.ledger,
            replace(
                plugins,
                producers=(*plugins.producers, moody),
                placed=(*plugins.placed, moody),
                answered=(*plugins.answered, moody),
            ),
            Recorder(),
            Random(5),
            max_body_bytes=1 << 20,
        )
        self.open: dict[TicketId, Open] = {}
        self.ended: list[TicketId] = []
        self.addresses: dict[str, str] = {}

    @property
    def view(self) -> PoolView:
        return self.store.view

    # -- steps ----------------------------------------------------------------------------------------

    def sync(self, pods: frozenset[int], generation: int) -> None:
        """These pods are there. A generation is another life of the same pod at the same address."""
        self.store.sync(
            [Endpoint(f"{pod}.{generation}", f"pod-{pod}", "d", f"10.0.0.{pod}", 80) for pod in sorted(pods)],
            self.now,
        )
        self.ledger.resize(self.view.capacity)

    def submit(self, prompt: str) -> None:
        body = b'{"model":"m","prompt":"%s"}' % prompt.encode()
        raw = RawRequest("r", "POST", "/v1/completions", (), body)
        outcome = self.director.submit(self.director.prepare(raw, self.now), self.now)
        if isinstance(outcome, Refusal):
            assert not self.store.roster
            return
        assert isinstance(outcome, Placement)
        slot = outcome.serving.decision.slots[0]
        owner = self.view.endpoints[slot]
        assert owner is outcome.serving.endpoints[0]
        charged = sum(request.tokens for request in self.open.values() if request.slot == slot)
        tokens = int(self.ledger.load.prefill_tokens[slot]) - charged
        assert 0 <= tokens <= -(-len(prompt) // 4)
        self.open[outcome.ticket] = Open(owner.uid, slot, tokens=tokens)

    def tell(self, which: int, fact: AnswerFact) -> None:
        """A fact about an open request, or, where there is none, about one that has ended."""
        if not self.open:
            if self.ended:
                self.director.observe(self.ended[which % len(self.ended)], fact, self.now)
            return
        ticket = list(self.open)[which % len(self.open)]
        request = self.open[ticket]
        self.director.observe(ticket, fact, self.now)
        match fact:
            case AnswerHeaders(served=served) if served is not None:
                slot = self.store.slot_of(served)
                if slot is not None:
                    owner = self.view.endpoints[slot]
                    assert owner is not None
                    request.slot, request.uid = slot, owner.uid
            case FirstToken():
                request.tokens = 0
            case Ended():
                del self.open[ticket]
                self.ended.append(ticket)

    def finish(self) -> None:
        while self.open:
            self.tell(0, Ended(Cause.NATURAL, Usage(10, 2), 1, 1))
        self.store.refresh(self.now, 0.2)
        self.check()
        assert self.ledger.total_requests == self.ledger.total_prefill_tokens == 0
        assert self.director.in_flight == 0
        assert self.ledger.overdrafts == 0
        members = {endpoint.uid for _, endpoint in self.store.roster}
        assert {owner.uid for owner in self.view.endpoints if owner is not None} == members

    def check(self) -> None:
        requests = np.zeros(self.view.capacity, np.int64)
        tokens = np.zeros(self.view.capacity, np.int64)
        for request in self.open.values():
            requests[request.slot] += 1
            tokens[request.slot] += request.tokens
            owner = self.view.endpoints[request.slot]
            assert owner is not None, "a slot is kept while something is in flight to it"
            assert owner.uid == request.uid, "a slot was passed on while something was in flight to it"
        load = self.ledger.load
        assert load.requests.tolist() == requests.tolist()
        assert load.prefill_tokens.tolist() == tokens.tolist()
        assert self.director.in_flight == len(self.open)


HOST_PORTS = [None, "192.0.2.1:80", *(f"10.0.0.{pod}:80" for pod in range(1, 5))]
FACTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        AnswerHeaders, st.sampled_from([200, 404, 500, 503]), st.sampled_from(HOST_PORTS), st.booleans()
    ),
    st.just(FirstToken()),
    st.builds(Progress, st.just(3), st.just(300)),
    st.builds(
        Ended,
        st.sampled_from(list(Cause)),
        st.sampled_from([None, Usage(10, 2), Usage(900, 2, 880), Usage(0, 0, 0)]),
        st.just(1),
        st.just(1),
    ),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sync"), st.frozensets(st.integers(1, PODS), max_size=PODS), st.integers(0, 2)),
        st.tuples(st.just("submit"), st.sampled_from(PROMPTS)),
        st.tuples(st.just("submit"), st.sampled_from(PROMPTS)),
        st.tuples(st.just("tell"), st.integers(0, 50), FACTS),
        st.tuples(st.just("tell"), st.integers(0, 50), FACTS),
        st.tuples(st.just("refresh")),
    ),
    min_size=15,
    max_size=60,
)


def play(
    steps: list[tuple[Any, ...]],
    make_director: type[Director] = Director,
    make_ledger: type[InflightLedger] = InflightLedger,
) -> None:
    world = World(make_director, make_ledger)
    world.sync(frozenset({1, 2, 3}), 0)
    for step in steps:
        world.now += 0.1
        match step:
            case ("sync", pods, generation):
                world.sync(pods, generation)
            case ("submit", prompt):
                world.submit(prompt)
            case ("tell", which, fact):
                world.tell(which, fact)
            case ("refresh",):
                world.store.refresh(world.now, 0.2)
        world.check()
    world.finish()


@settings(max_examples=150)
@given(STEPS)
def test_what_is_charged_is_what_is_open_and_nothing_is_left(steps: list[tuple[Any, ...]]) -> None:
    play(steps)


# -- faults that must be seen -----------------------------------------------------------------------


def first_tokens_are_released_twice(patch: pytest.MonkeyPatch) -> type[Director]:
    class Faulty(Director):
        def observe(self, ticket_id: TicketId, fact: AnswerFact, now: float) -> Any:
            found = self._tickets.get(ticket_id)
            before = found[1].prefill_tokens if found else 0
            edits = super().observe(ticket_id, fact, now)
            if found and isinstance(fact, FirstToken):
                found[1].prefill_tokens = before
            return edits

    return Faulty


def an_aborted_request_is_not_released(patch: pytest.MonkeyPatch) -> type[Director]:
    class Faulty(Director):
        def observe(self, ticket_id: TicketId, fact: AnswerFact, now: float) -> Any:
            if isinstance(fact, Ended) and fact.cause is Cause.CLIENT_DISCONNECT:
                return ()
            return super().observe(ticket_id, fact, now)

    return Faulty


def the_served_endpoint_is_not_charged(patch: pytest.MonkeyPatch) -> type[Director]:
    class Faulty(Director):
        def _headers(self, ticket: Ticket, fact: AnswerHeaders, now: float) -> None:
            ticket.status = fact.status

    return Faulty


def the_charge_moves_but_the_ticket_does_not(patch: pytest.MonkeyPatch) -> type[Director]:
    class Faulty(Director):
        def _headers(self, ticket: Ticket, fact: AnswerHeaders, now: float) -> None:
            before = ticket.slot
            super()._headers(ticket, fact, now)
            ticket.slot = before

    return Faulty


def a_failing_hook_loses_the_ticket(patch: pytest.MonkeyPatch) -> type[Director]:
    class Faulty(Director):
        def submit(self, prepared: Prepared, now: float) -> Any:
            outcome = super().submit(prepared, now)
            if isinstance(outcome, Placement) and int(outcome.ticket) % 3 == 0:
                del self._tickets[outcome.ticket]
            return outcome

    return Faulty


def slots_are_freed_while_busy(patch: pytest.MonkeyPatch) -> type[Director]:
    patch.setattr(PoolStore, "_free_drained", _free_all)
    return Director


def _free_all(store: PoolStore) -> bool:
    busy, store._busy = store._busy, lambda slot: False
    try:
        return ORIGINAL_FREE(store)
    finally:
        store._busy = busy


ORIGINAL_FREE = PoolStore._free_drained


def cached_tokens_count_twice(patch: pytest.MonkeyPatch) -> type[Director]:
    uncached = director_module._uncached_tokens
    patch.setattr(director_module, "_uncached_tokens", lambda *of: uncached(*of) - of[0].prompt_tokens)
    return Director


Plant = Callable[[pytest.MonkeyPatch], type[Director]]


@pytest.mark.parametrize(
    "plant",
    [
        first_tokens_are_released_twice,
        an_aborted_request_is_not_released,
        the_served_endpoint_is_not_charged,
        the_charge_moves_but_the_ticket_does_not,
        a_failing_hook_loses_the_ticket,
        slots_are_freed_while_busy,
        cached_tokens_count_twice,
    ],
)
def test_a_fault_is_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = plant(monkeypatch)

    def sees(steps: list[tuple[Any, ...]]) -> bool:
        try:
            play(steps, faulty)
        except (AssertionError, KeyError):
            return True
        return False

    find(STEPS, sees, settings=settings(max_examples=300, phases=[Phase.generate]), random=Random(1))
