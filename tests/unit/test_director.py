"""The director: what it charges, refuses and gives back, with real pool, ledger and scheduling."""

import gzip
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest

from epp.director import TIMED_EVERY, Director, Need, Plugins, Prepared, Refusal
from epp.errors import BadRequest, NoEndpoints, PayloadTooLarge, RequestError, Saturated
from epp.payload.records import Api, RawRequest, Usage
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint, LoadReport, Mask
from epp.pool.store import PoolStore
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.ports import AGENT_IDENTITY, Attributes, Ctx
from epp.scheduling.profiles import PickerStep, Profile, ScorerStep, SingleProfileHandler
from epp.scheduling.records import (
    PREFIX_MATCH,
    AnswerFact,
    AnswerHeaders,
    Cause,
    Edits,
    Ended,
    FactKey,
    FirstToken,
    Placement,
    PrefixMatch,
    Progress,
    Ticket,
    TicketId,
)
from epp.scheduling.scorers import QueueScorer

KEY = FactKey(PREFIX_MATCH, "known")


class Recorder:
    def __init__(self) -> None:
        self.load_seen = -1
        self.failed: list[object] = []
        self.needs_failed: list[Exception] = []
        self.elsewhere: list[tuple[str, bool]] = []
        self.facts: list[AnswerFact] = []
        self.placements = 0

    def placed(self, prepared: Prepared, ticket: Ticket, ctx: Ctx) -> None:
        self.load_seen = int(ctx.load.requests.sum())
        self.placements += 1

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        self.failed.append(plugin)

    def need_failed(self, need: Need, error: Exception) -> None:
        self.needs_failed.append(error)

    def served_elsewhere(self, ticket: Ticket, served: str, in_pool: bool) -> None:
        self.elsewhere.append((served, in_pool))

    def observed(self, prepared: Prepared, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        self.facts.append(fact)


class KnownPrefix:
    """A producer that says what it was told."""

    provides = (KEY,)
    needs = ()

    def __init__(self, blocks: dict[int, int]) -> None:
        self.blocks = blocks

    def produce(self, ctx: Ctx) -> None:
        held = np.zeros(ctx.view.capacity, np.int64)
        for slot, blocks in self.blocks.items():
            held[slot] = blocks
        ctx.facts[KEY] = PrefixMatch(held, 10, 64, ctx.request.prompt_tokens)


class Broken:
    provides = ()
    needs = ()

    def produce(self, ctx: Ctx) -> None:
        raise RuntimeError("planted")

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        raise RuntimeError("planted")

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        raise RuntimeError("planted")


class Bench:
    def __init__(
        self,
        endpoints: int = 2,
        plugins: Plugins | None = None,
        *,
        use_subset: bool = True,
        plugin_clock: Callable[[], float] | None = None,
    ) -> None:
        self.ledger = InflightLedger(16, strict=True)
        self.store = PoolStore(busy=self.ledger.busy)
        self.store.sync(
            [Endpoint(f"uid-{i}", f"pod-{i}", "default", f"10.0.0.{i + 1}", 8000) for i in range(endpoints)],
            0.0,
        )
        self.recorder = Recorder()
        profile = Profile(
            "default",
            (),
            (ScorerStep("queue-scorer", "queue-scorer", 1.0, QueueScorer()),),
            PickerStep("max-score-picker", "max-score-picker", MaxScorePicker(MaxScorePickerParams())),
        )
        handler = SingleProfileHandler(profile)
        plugins = plugins or Plugins(handler)
        self.director = Director(
            self.store,
            self.ledger,
            replace(plugins, handler=handler),
            self.recorder,
            Random(1),
            max_body_bytes=1000,
            use_subset=use_subset,
            plugin_clock=plugin_clock,
        )

    def raw(self, body: bytes, path: str = "/v1/completions", **headers: str) -> RawRequest:
        pairs = tuple((key.replace("_", "-"), value) for key, value in headers.items())
        return RawRequest("id-1", "POST", path, pairs, body)

    def place(self, **changes: object) -> Placement:
        raw = self.raw(b'{"model":"m","prompt":"' + b"x" * 400 + b'"}')
        prepared = self.director.prepare(raw, 1.0)
        outcome = self.director.submit(_with(prepared, changes), 1.0)
        assert isinstance(outcome, Placement)
        return outcome


def _with(prepared: Prepared, changes: dict[str, object]) -> Prepared:
    return msgspec.structs.replace(prepared, **changes)


def handler_only() -> Plugins:
    return Plugins(handler=None)  # type: ignore[arg-type]


def test_a_request_is_charged_until_first_token_and_end() -> None:
    bench = Bench()
    placement = bench.place()
    slot = placement.serving.decision.slots[0]
    load = bench.ledger.load
    assert (load.requests[slot], load.prefill_tokens[slot]) == (1, 100)
    assert bench.recorder.load_seen == 0, "the choice is explained by the load it saw"
    bench.director.observe(placement.ticket, AnswerHeaders(200, None, True), 2.0)
    bench.director.observe(placement.ticket, FirstToken(), 2.0)
    assert (load.requests[slot], load.prefill_tokens[slot]) == (1, 0)
    bench.director.observe(placement.ticket, Progress(3, 300), 3.0)
    bench.director.observe(placement.ticket, Ended(Cause.NATURAL, Usage(100, 5), 5, 500), 4.0)
    assert (bench.ledger.total_requests, bench.ledger.total_prefill_tokens, bench.director.in_flight) == (
        0,
        0,
        0,
    )


def test_an_end_before_the_first_token_gives_everything_back() -> None:
    bench = Bench()
    placement = bench.place()
    bench.director.observe(placement.ticket, Ended(Cause.CLIENT_DISCONNECT, None, 0, 0), 2.0)
    assert (bench.ledger.total_requests, bench.ledger.total_prefill_tokens) == (0, 0)


def test_facts_after_the_end_are_dropped() -> None:
    bench = Bench()
    placement = bench.place()
    end = Ended(Cause.NATURAL, None, 0, 0)
    bench.director.observe(placement.ticket, end, 2.0)
    bench.director.observe(placement.ticket, end, 3.0)
    bench.director.observe(TicketId(999), FirstToken(), 3.0)
    assert bench.ledger.total_requests == 0
    assert bench.recorder.facts == [end]


def test_only_uncached_prompt_tokens_are_charged() -> None:
    plugins = Plugins(handler=handler_only().handler, producers=(KnownPrefix({0: 1, 1: 1}),))
    bench = Bench(2, plugins)
    placement = bench.place()
    slot = placement.serving.decision.slots[0]
    assert bench.ledger.load.prefill_tokens[slot] == 100 - 64


def test_the_served_endpoint_takes_over_the_charge() -> None:
    bench = Bench()
    placement = bench.place()
    chosen = placement.serving.decision.slots[0]
    other = 1 - chosen
    served = bench.store.view.host_ports[other]
    bench.director.observe(placement.ticket, AnswerHeaders(200, served, False), 2.0)
    assert list(bench.ledger.load.requests[[chosen, other]]) == [0, 1]
    bench.director.observe(placement.ticket, Ended(Cause.NATURAL, None, 1, 1), 3.0)
    assert bench.ledger.total_requests == 0


def test_an_answer_from_outside_the_pool_is_reported_and_still_released() -> None:
    bench = Bench()
    placement = bench.place()
    bench.director.observe(placement.ticket, AnswerHeaders(200, "192.0.2.1:80", False), 2.0)
    assert bench.recorder.elsewhere == [("192.0.2.1:80", False)]
    bench.director.observe(placement.ticket, Ended(Cause.NATURAL, None, 1, 1), 3.0)
    assert bench.ledger.total_requests == 0


def test_a_failing_plugin_costs_its_facts_never_the_request() -> None:
    broken = Broken()
    plugins = Plugins(handler_only().handler, producers=(broken,), placed=(broken,), answered=(broken,))
    bench = Bench(2, plugins)
    placement = bench.place()
    bench.director.observe(placement.ticket, Ended(Cause.NATURAL, None, 0, 0), 2.0)
    assert bench.ledger.total_requests == 0
    assert bench.recorder.failed == [broken] * 3
    assert bench.recorder.placements == 1


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (("10.0.0.2:8000",), {1}),
        (("10.0.0.1:8000", "10.0.0.2:8000"), {0, 1}),
        (("10.0.0.2:8000", "nonsense"), {1}),
        (None, {0, 1}),
    ],
)
def test_the_subset_hint_restricts_the_choice(subset: tuple[str, ...] | None, expected: set[int]) -> None:
    bench = Bench()
    chosen = {bench.place(subset=subset).serving.decision.slots[0] for _ in range(40)}
    assert chosen == expected


@pytest.mark.parametrize("subset", [(), ("10.0.0.9:8000",), ("10.0.0.1:9999",), ("10.0.0.1",)])
def test_a_subset_nobody_matches_is_refused_with_503(subset: tuple[str, ...]) -> None:
    bench = Bench()
    prepared = bench.director.prepare(bench.raw(b'{"model":"m","prompt":"x"}'), 1.0)
    outcome = bench.director.submit(_with(prepared, {"subset": subset}), 1.0)
    assert isinstance(outcome, Refusal)
    assert isinstance(outcome.error, NoEndpoints)
    assert bench.ledger.total_requests == bench.director.in_flight == 0


def test_the_subset_filter_can_be_turned_off() -> None:
    bench = Bench(use_subset=False)
    raw = RawRequest("id", "GET", "/v1/models", (), b"", subset=())
    assert isinstance(bench.director.submit(bench.director.prepare(raw, 1.0), 1.0), Placement)


def test_an_empty_pool_is_refused_with_503_also_without_a_body() -> None:
    bench = Bench(0)
    raw = RawRequest("id", "GET", "/v1/models", (), b"")
    outcome = bench.director.submit(bench.director.prepare(raw, 1.0), 1.0)
    assert isinstance(outcome, Refusal)
    assert (outcome.error.status, outcome.error.reason) == (503, "rejected-no-endpoints")


def test_the_rewrite_header_changes_the_model_and_nothing_else() -> None:
    bench = Bench()
    raw = bench.raw(b'{ "model" : "alias",  "prompt":"x" }', x_llm_d_model_name_rewrite="target")
    prepared = bench.director.prepare(raw, 1.0)
    assert prepared.body == b'{ "model" : "target",  "prompt":"x" }'
    assert (prepared.request.model, prepared.request.target_model) == ("alias", "target")


def test_the_new_rewrite_header_beats_its_old_alias() -> None:
    bench = Bench()
    body = b'{"model":"alias","prompt":"x"}'
    headers = {"x_gateway_model_name_rewrite": "old", "x_llm_d_model_name_rewrite": "new"}
    assert bench.director.prepare(bench.raw(body, **headers), 1.0).request.target_model == "new"
    old = {"x_gateway_model_name_rewrite": "old"}
    assert bench.director.prepare(bench.raw(body, **old), 1.0).request.target_model == "old"


def test_without_a_rewrite_the_body_is_untouched() -> None:
    bench = Bench()
    prepared = bench.director.prepare(bench.raw(b'{"model":"m","prompt":"x"}'), 1.0)
    assert prepared.body is None
    assert prepared.request.target_model == "m"


def test_a_missing_model_is_named_unless_the_header_gives_one() -> None:
    bench = Bench()
    with pytest.raises(BadRequest, match="model not found in request body"):
        bench.director.prepare(bench.raw(b'{"prompt":"x"}'), 1.0)
    prepared = bench.director.prepare(bench.raw(b'{"prompt":"x"}', x_llm_d_model_name_rewrite="t"), 1.0)
    assert prepared.body is not None
    assert b'"model":"t"' in prepared.body


def test_other_paths_pass_through_and_are_routed_by_load() -> None:
    bench = Bench()
    prepared = bench.director.prepare(bench.raw(b"\x00\xff", path="/upload"), 1.0)
    assert (prepared.request.api, prepared.request.prompts, prepared.body) == (Api.PASSTHROUGH, (), None)
    assert isinstance(bench.director.submit(prepared, 1.0), Placement)


def test_a_body_that_is_not_shown_is_routed_by_load() -> None:
    bench = Bench()
    raw = RawRequest("id", "POST", "/v1/chat/completions", (), b"", body_shown=False)
    prepared = bench.director.prepare(raw, 1.0)
    assert (prepared.request.api, prepared.request.prompts, prepared.body) == (Api.CHAT, (), None)
    assert isinstance(bench.director.submit(prepared, 1.0), Placement)


def test_the_inflated_size_is_bounded() -> None:
    bench = Bench()
    body = gzip.compress(b'{"model":"m","prompt":"' + b"x" * 5000 + b'"}', mtime=0)
    assert len(body) < 1000
    with pytest.raises(PayloadTooLarge):
        bench.director.prepare(bench.raw(body, content_encoding="gzip"), 1.0)


def test_the_flow_comes_from_the_fairness_header() -> None:
    bench = Bench()
    body = b'{"model":"m","prompt":"x"}'
    assert bench.director.prepare(bench.raw(body), 1.0).flow == "default-flow"
    assert bench.director.prepare(bench.raw(body, x_llm_d_inference_fairness_id="t1"), 1.0).flow == "t1"


def test_a_fault_in_the_recorder_comes_before_the_charge() -> None:
    bench = Bench()

    def placed(*_: object) -> None:
        raise RuntimeError("planted")

    bench.recorder.placed = placed  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted"):
        bench.place()
    assert (bench.ledger.total_requests, bench.director.in_flight) == (0, 0)


@pytest.mark.parametrize(("status", "candidate"), [(200, True), (499, True), (500, False), (504, False)])
def test_only_an_answer_of_the_engine_is_a_sign_of_its_life(status: int, candidate: bool) -> None:
    """5xx may be the proxy's own words about an endpoint that it cannot reach."""
    bench = Bench()
    placement = bench.place()
    slot = placement.serving.decision.slots[0]
    bench.director.observe(placement.ticket, AnswerHeaders(status, None, False), 100.0)
    for _ in range(3):
        bench.store.failed(slot, refused=False, now=100.0)
    assert bool(bench.store.view.candidates[slot]) is candidate


def test_plugins_are_timed_on_one_request_in_so_many() -> None:
    ticks = iter(range(10_000))
    bench = Bench(plugin_clock=lambda: float(next(ticks)))
    timed = []
    for number in range(2 * TIMED_EVERY + 1):
        placement = bench.place()
        if placement.serving.decision.timings:
            timed.append(number)
    assert timed == [0, TIMED_EVERY, 2 * TIMED_EVERY]
    assert {timing.plugin_name for timing in placement.serving.decision.timings} == {
        "queue-scorer",
        "max-score-picker",
    }
    assert all(timing.seconds == 1.0 for timing in placement.serving.decision.timings)


# -- hooks around the choice ------------------------------------------------------------------------

BODY = b'{"model":"m","prompt":"hello"}'


class Agent:
    def read(self, raw: RawRequest) -> Attributes:
        return {AGENT_IDENTITY: "agent-7"}


class BrokenHook:
    def read(self, raw: RawRequest) -> Attributes:
        raise RuntimeError("planted")


class OnlySlot:
    """A screener and a filter of one slot; -1 = none."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def screen(self, ctx: Ctx, alive: Mask) -> Mask:
        kept = np.zeros(len(alive), np.bool_)
        if self.slot >= 0:
            kept[self.slot] = True
        return kept


class Denies:
    def __init__(self, error: RequestError) -> None:
        self.error = error
        self.asked = 0

    def admit(self, ctx: Ctx, alive: Mask) -> None:
        self.asked += 1
        raise self.error


class Stamps:
    """Sets one header for the engine and one on the answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def placed(self, ctx: Ctx, ticket: Ticket) -> Edits | None:
        return ((self.name, b"to the engine"),)

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> Edits | None:
        return ((self.name, b"to the client"),) if isinstance(fact, AnswerHeaders) else None


def test_the_fairness_header_beats_the_agent_and_the_agent_beats_the_default() -> None:
    bench = Bench(1, replace(handler_only(), request_hooks=(BrokenHook(), Agent())))
    named = bench.raw(BODY, **{"x-llm-d-inference-fairness-id": "flow-1"})
    assert bench.director.prepare(named, 0.0).flow == "flow-1"
    assert bench.director.prepare(bench.raw(BODY), 0.0).flow == "agent-7"
    assert len(bench.recorder.failed) == 2
    plain = Bench(1)
    assert plain.director.prepare(plain.raw(BODY), 0.0).flow == "default-flow"


def test_screeners_are_intersected_and_may_leave_nobody() -> None:
    one = Bench(3, replace(handler_only(), screeners=(OnlySlot(1),)))
    assert one.place().serving.decision.slots == (1,)
    none = Bench(3, replace(handler_only(), screeners=(OnlySlot(1), OnlySlot(2))))
    outcome = none.director.submit(none.director.prepare(none.raw(BODY), 0.0), 0.0)
    assert isinstance(outcome, Refusal)
    assert isinstance(outcome.error, NoEndpoints)
    assert outcome.error.message == "screeners eliminated all endpoint candidates"


@pytest.mark.parametrize("kind", ["admission", "admitters"])
def test_who_is_turned_away_is_not_charged_and_gets_the_plugins_own_status(kind: str) -> None:
    denies = Denies(Saturated("planted"))
    chosen = {"admission": denies} if kind == "admission" else {"admitters": (denies,)}
    bench = Bench(1, replace(handler_only(), **chosen))  # type: ignore[arg-type]
    outcome = bench.director.submit(bench.director.prepare(bench.raw(BODY), 0.0), 0.0)
    assert isinstance(outcome, Refusal)
    assert outcome.error is denies.error
    assert (bench.ledger.total_requests, bench.director.in_flight, denies.asked) == (0, 0, 1)


def test_headers_of_plugins_reach_engine_and_client() -> None:
    bench = Bench(
        1,
        replace(
            handler_only(),
            placed=(Stamps("x-one"), Broken(), Stamps("x-two")),
            answered=(Stamps("x-one"), Broken(), Stamps("x-two")),
        ),
    )
    placement = bench.place()
    assert placement.set_headers == (("x-one", b"to the engine"), ("x-two", b"to the engine"))
    edits = bench.director.observe(placement.ticket, AnswerHeaders(200, None, False), 1.0)
    assert edits == (("x-one", b"to the client"), ("x-two", b"to the client"))
    assert bench.director.observe(placement.ticket, FirstToken(), 1.0) == ()


def test_what_an_engine_says_beside_its_answer_reaches_the_pool() -> None:
    bench = Bench(2)
    placement = bench.place()
    report = LoadReport(waiting=7.0, running=None, kv_usage=0.5, attributes={})
    bench.director.observe(placement.ticket, AnswerHeaders(200, None, True, report), 2.0)
    slot = placement.serving.decision.slots[0]
    view = bench.store.view
    assert (view.waiting[slot], view.kv_usage[slot], bool(view.running_known[slot])) == (7.0, 0.5, False)
    assert not view.waiting_known[1 - slot]


def test_an_endpoint_served_under_the_address_it_was_named_by() -> None:
    """A rank behind its pod's primary port is named by that port, where another endpoint may be known."""
    bench = Bench(2)
    placement = bench.place()
    leg = placement.serving
    slots = leg.decision.slots[0], 1 - leg.decision.slots[0]
    chosen, other = (bench.store.view.endpoints[slot] for slot in slots)
    assert chosen is not None
    assert other is not None
    ticket = bench.director._tickets[placement.ticket][1]
    named = msgspec.structs.replace(chosen, address=other.address)
    ticket.placement = replace(placement, legs=(replace(leg, endpoints=(named,)),))
    bench.director.observe(placement.ticket, AnswerHeaders(200, other.host_port, False), 2.0)
    assert ticket.slot == slots[0]
    assert bench.recorder.elsewhere == []


def test_two_ranks_named_by_one_port_count_as_the_first_choice() -> None:
    """The sidecar there is told the first choice, even where the second has the port as its own."""
    for first in (0, 1):
        bench = Bench(0)
        ranks = [Endpoint(f"uid-{port}", "pod", "default", "10.0.0.1", port) for port in (8000, 8001)]
        bench.store.sync(ranks, 0.0)
        placement = bench.place()
        slots = first, 1 - first
        leg = placement.serving
        ticket = bench.director._tickets[placement.ticket][1]
        bench.ledger.move(ticket.slot, first, ticket.prefill_tokens)
        ticket.slot = first
        named = tuple(msgspec.structs.replace(ranks[slot], port=8000) for slot in slots)
        decision = replace(leg.decision, slots=slots)
        ticket.placement = replace(placement, legs=(replace(leg, endpoints=named, decision=decision),))
        bench.director.observe(placement.ticket, AnswerHeaders(200, "10.0.0.1:8000", False), 2.0)
        assert ticket.slot == first


def test_an_address_of_an_endpoint_that_left_is_not_its_slots_next_owner() -> None:
    """A fallback is not charged, so its slot may change hands before it answers."""
    bench = Bench(2)
    placement = bench.place()
    leg = placement.serving
    first, second = leg.decision.slots[0], 1 - leg.decision.slots[0]
    chosen, fallback = bench.store.view.endpoints[first], bench.store.view.endpoints[second]
    assert chosen is not None
    assert fallback is not None
    ticket = bench.director._tickets[placement.ticket][1]
    decision = replace(leg.decision, slots=(first, second))
    ticket.placement = replace(
        placement, legs=(replace(leg, endpoints=(chosen, fallback), decision=decision),)
    )
    bench.store.sync([chosen], 1.5)
    bench.store.sync([chosen, Endpoint("uid-new", "new", "default", "10.0.0.9", 8000)], 1.5)
    assert bench.store.view.host_ports[second] == "10.0.0.9:8000"
    bench.director.observe(placement.ticket, AnswerHeaders(200, fallback.host_port, False), 2.0)
    assert ticket.slot == first
    assert bench.recorder.elsewhere == [(fallback.host_port, False)]


def test_nothing_of_a_body_is_kept_while_the_answer_lasts() -> None:
    """Bodies are charged to an account that is given back once they were sent on."""
    bench = Bench(1)
    body, prompt = bytes(bytearray(1000)), bytes(bytearray(1000))
    prepared = bench.director.prepare(bench.raw(b'{"model":"m","prompt":"x"}'), 1.0)
    request = msgspec.structs.replace(prepared.request, prompts=(prompt,))
    prepared = msgspec.structs.replace(prepared, request=request, body=body)
    del request
    assert isinstance(bench.director.submit(prepared, 1.0), Placement)
    del prepared
    assert bench.director.in_flight == 1
    alone = bytes(bytearray(1000))
    assert sys.getrefcount(body) == sys.getrefcount(prompt) == sys.getrefcount(alone)
