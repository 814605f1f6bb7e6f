"""The approximate producer, driven through its ports as the director drives it."""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from epp.kvcache.approximate import ApproximateParams, ApproximatePrefixProducer
from epp.payload.records import Api, InferenceRequest, Usage
from epp.pool.records import Endpoint, Load, PoolView
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
    PrefixMatch,
    Role,
    Ticket,
    TicketId,
)


def pool_view(count: int, capacity: int | None = None) -> PoolView:
    capacity = capacity or count
    endpoints = [Endpoint(f"uid-{n}", f"pod-{n}", "default", f"10.0.0.{n}", 8000) for n in range(count)]
    view = empty_view(capacity)
    view.endpoints = (*endpoints, *[None] * (capacity - count))
    view.candidates[:count] = view.present[:count] = True
    return view


def text(seed: int, tokens: int) -> bytes:
    return random.Random(seed).randbytes(tokens * 4)


def chat(*prompts: bytes, model: str = "llama", salt: str = "") -> InferenceRequest:
    tokens = sum(map(len, prompts)) // 4
    return InferenceRequest(Api.CHAT, model=model, prompts=prompts, prompt_tokens=tokens, cache_salt=salt)


@dataclass
class Rig:
    """A producer with the part of the director that it sees."""

    view: PoolView
    params: ApproximateParams = field(default_factory=ApproximateParams)
    tickets: int = 0

    def __post_init__(self) -> None:
        self.producer = ApproximatePrefixProducer("approx", self.params, self.view, b"secret")

    def look(self, request: InferenceRequest) -> Ctx:
        zeros = np.zeros(self.view.capacity, np.int64)
        ctx = Ctx(request, self.view, Load(zeros, zeros), {}, 0.0, random.Random(0))
        self.producer.produce(ctx)
        return ctx

    def match(self, request: InferenceRequest) -> PrefixMatch:
        return self.look(request).facts[self.producer.provides[0]]

    def blocks(self, request: InferenceRequest) -> list[int]:
        return self.match(request).blocks.tolist()

    def send(self, request: InferenceRequest, *slots: int) -> Ticket:
        ctx = self.look(request)
        mask = np.ones(self.view.capacity, np.bool_)
        roles = [Role.PREFILL] * (len(slots) - 1) + [Role.DECODE]
        legs = []
        for role, slot in zip(roles, slots, strict=True):
            decision = Decision("default", (slot,), mask, (), (), np.zeros(self.view.capacity))
            endpoint = self.view.endpoints[slot]
            assert endpoint is not None
            legs.append(Leg(role, (endpoint,), decision))
        self.tickets += 1
        ticket_id = TicketId(self.tickets)
        ticket = Ticket(
            ticket_id, request, Placement(ticket_id, tuple(legs)), slots[-1], 0, 0.0, facts=ctx.facts
        )
        self.producer.placed(ctx, ticket)
        return ticket

    def end(
        self, ticket: Ticket, usage: Usage | None = None, status: int = 200, cause: Cause = Cause.NATURAL
    ) -> None:
        ticket.status = status
        if status == 200:
            self.producer.observe(ticket, FirstToken(), 0.0)
        self.producer.observe(ticket, Ended(cause, usage, 1, 1), 0.0)

    def serve(self, request: InferenceRequest, slot: int, usage: Usage | None = None) -> None:
        self.end(self.send(request, slot), usage)

    def held(self, slot: int) -> int:
        return self.producer._index.blocks[slot]

    def capacity(self, slot: int) -> int:
        return self.producer._index.capacity[slot]


# -- matching -----------------------------------------------------------------------------------------


def test_a_burst_of_equal_prompts_sticks() -> None:
    rig, request = Rig(pool_view(3)), chat(text(1, 640))
    assert rig.blocks(request) == [0, 0, 0]
    rig.send(request, 1)
    assert rig.blocks(request) == [0, 10, 0]
    match = rig.match(request)
    assert (match.total_blocks, match.block_tokens, match.total_tokens) == (10, 64, 640)


def test_a_partial_block_at_the_end_does_not_count() -> None:
    rig = Rig(pool_view(2))
    rig.send(chat(text(1, 100)), 0)
    match = rig.match(chat(text(1, 100)))
    assert (match.blocks.tolist(), match.total_blocks, match.total_tokens) == ([1, 0], 1, 100)
    short = rig.match(chat(text(1, 63)))
    assert (short.blocks.tolist(), short.total_blocks) == ([0, 0], 0)


def test_a_block_counts_only_after_all_before_it() -> None:
    rig, shared = Rig(pool_view(2)), text(9, 64)
    rig.send(chat(text(1, 64) + shared), 0)
    assert rig.blocks(chat(text(2, 64) + shared)) == [0, 0]
    assert rig.blocks(chat(text(1, 64) + text(2, 64))) == [1, 0]


def test_a_longer_prompt_matches_what_it_continues() -> None:
    rig, history = Rig(pool_view(2)), text(1, 640)
    rig.send(chat(history), 0)
    rig.send(chat(history + text(2, 128)), 1)
    assert rig.blocks(chat(history + text(2, 128) + text(3, 64))) == [10, 12]


def test_models_adapters_and_salts_do_not_share() -> None:
    rig, prompt = Rig(pool_view(1)), text(1, 640)
    rig.send(chat(prompt), 0)
    assert rig.blocks(chat(prompt)) == [10]
    assert rig.blocks(chat(prompt, model="llama-lora")) == [0]
    assert rig.blocks(chat(prompt, salt="tenant")) == [0]
    rewritten = msgspec.structs.replace(chat(prompt, model="alias"), target_model="llama")
    assert rig.blocks(rewritten) == [10]


def test_several_prompts_are_matched_on_their_own_and_summed() -> None:
    rig, one, other = Rig(pool_view(2)), text(1, 320), text(2, 640)
    rig.send(chat(one, other), 0)
    rig.send(chat(other), 1)
    match = rig.match(chat(one, other))
    assert (match.blocks.tolist(), match.total_blocks) == ([15, 10], 15)
    assert rig.blocks(chat(one + other)) == [5, 0]


def test_equal_prompts_in_one_request_are_stored_once() -> None:
    rig, prompt = Rig(pool_view(1)), text(1, 640)
    rig.end(rig.send(chat(prompt, prompt), 0))
    assert rig.producer.size == rig.held(0) == 10
    assert rig.blocks(chat(prompt, prompt)) == [20]


def test_no_prompt_is_no_match() -> None:
    rig = Rig(pool_view(2))
    match = rig.match(InferenceRequest(Api.PASSTHROUGH))
    assert (match.blocks.tolist(), match.total_blocks) == ([0, 0], 0)
    rig.serve(InferenceRequest(Api.PASSTHROUGH), 0)
    assert rig.producer.size == 0


@pytest.mark.parametrize(
    ("tokens", "blocks", "want"), [(640, 2048, 10), (0, 3, 3), (0, 0, 20), (63, 2048, 0), (131_072, 0, 20)]
)
def test_the_longest_prefix_looked_at_is_limited(tokens: int, blocks: int, want: int) -> None:
    params = ApproximateParams(max_prefix_tokens_to_match=tokens, max_prefix_blocks_to_match=blocks)
    rig, request = Rig(pool_view(1), params), chat(text(1, 1280))
    rig.send(request, 0)
    match = rig.match(request)
    assert (match.blocks.tolist(), match.total_blocks) == ([want], want)


def test_given_chains_are_used_as_they_are() -> None:
    rig = Rig(pool_view(2))
    request = InferenceRequest(Api.COMPLETIONS, prompt_tokens=300, chains=((5, 6, 7), (5, 9)))
    rig.serve(request, 1)
    assert rig.producer.size == 4
    match = rig.match(InferenceRequest(Api.COMPLETIONS, prompt_tokens=200, chains=((5, 6, 8),)))
    assert (match.blocks.tolist(), match.total_blocks) == ([0, 2], 3)


def test_all_legs_are_entered() -> None:
    rig, request = Rig(pool_view(3)), chat(text(1, 640))
    ticket = rig.send(request, 2, 0)
    assert rig.blocks(request) == [10, 0, 10]
    rig.end(ticket, Usage(640, 10, cached_tokens=0))
    assert rig.blocks(request) == [10, 0, 10]


# -- capacity -----------------------------------------------------------------------------------------


def test_capacity_comes_from_each_endpoints_metrics_in_tokens() -> None:
    view = pool_view(3)
    view.cache_tokens[:] = [64_000, 6_400, 0]
    rig = Rig(view)
    assert [rig.capacity(slot) for slot in range(3)] == [1000, 100, 31_250 * 16 // 64]
    for seed in range(30):
        for slot in range(2):
            rig.serve(chat(text(seed, 640)), slot)
    assert rig.held(0) == 300
    assert rig.held(1) <= 100
    assert rig.blocks(chat(text(29, 640)))[:2] == [10, 10]
    assert rig.blocks(chat(text(0, 640)))[:2] == [10, 0]


def test_capacity_follows_the_stated_size() -> None:
    view = pool_view(1)
    rig = Rig(view)
    for seed in range(30):
        rig.serve(chat(text(seed, 640)), 0)
    view.cache_tokens[0] = 6_400
    rig.producer.refresh(1.0)
    assert rig.capacity(0) == rig.held(0) == 100
    view.cache_tokens[0] = 12_800
    rig.send(chat(text(99, 640)), 0)
    assert (rig.capacity(0), rig.held(0)) == (200, 110)
    view.cache_tokens[0] = 0
    rig.producer.refresh(2.0)
    assert rig.capacity(0) == 200


def test_without_auto_tune_capacity_is_as_configured() -> None:
    view = pool_view(1)
    view.cache_tokens[0], view.block_size[0] = 64_000, 256
    rig = Rig(view, ApproximateParams(auto_tune=False, lru_capacity_per_server=100, block_size_tokens=128))
    for seed in range(3):
        rig.serve(chat(text(seed, 1280)), 0)
        rig.serve(chat(text(seed, 1280)), 0, Usage(1280, 1, cached_tokens=0))
    rig.producer.refresh(1.0)
    assert rig.producer.block_tokens == 128
    assert rig.capacity(0) == 100


def test_capacity_of_a_grown_pool() -> None:
    view = pool_view(1)
    rig, request = Rig(view), chat(text(1, 640))
    rig.serve(request, 0)
    larger = pool_view(3, capacity=64)
    for name in PoolView.__slots__:
        setattr(view, name, getattr(larger, name))
    rig.producer.joined(2)
    rig.serve(request, 2)
    assert rig.blocks(request) == [10, 0, 10] + [0] * 61


# -- block size ---------------------------------------------------------------------------------------


def test_a_mixed_pool_has_one_block_size_the_largest() -> None:
    view = pool_view(3)
    view.block_size[:] = [16, 128, 0]
    rig = Rig(view)
    assert rig.producer.block_tokens == 64
    rig.send(chat(text(1, 640)), 0)
    rig.producer.refresh(1.0)
    assert rig.producer.block_tokens == 128
    assert rig.producer.size == 0
    request = chat(text(1, 640))
    rig.send(request, 0)
    rig.send(request, 1)
    view.block_size[:] = [16, 0, 32]
    rig.producer.refresh(2.0)
    assert rig.producer.block_tokens == 128
    assert rig.blocks(request) == [5, 5, 0]


def test_requests_in_flight_outlive_a_change_of_block_size() -> None:
    view = pool_view(2)
    rig, request = Rig(view), chat(text(1, 640))
    staying, moving = rig.send(request, 0), rig.send(request, 0)
    view.block_size[0] = 128
    rig.producer.refresh(1.0)
    moving.slot = 1
    rig.producer.observe(moving, AnswerHeaders(200, "10.0.0.1:8000", False), 0.0)
    rig.end(moving)
    rig.end(staying, Usage(640, 1, cached_tokens=0))
    assert rig.producer.size == 0
    assert not rig.producer._sent


def test_an_absurd_block_size_is_not_believed() -> None:
    view = pool_view(2)
    view.block_size[:] = [16, 1 << 40]
    rig = Rig(view)
    rig.producer.refresh(1.0)
    assert rig.producer.block_tokens == 64


# -- what happens to a request ------------------------------------------------------------------------


def test_the_entry_moves_to_the_endpoint_that_served() -> None:
    rig, history = Rig(pool_view(3)), text(1, 320)
    rig.serve(chat(history), 0)
    request = chat(history + text(2, 320))
    ticket = rig.send(request, 0)
    ticket.slot = 2
    rig.producer.observe(ticket, AnswerHeaders(200, "10.0.0.2:8000", True), 0.0)
    assert rig.blocks(request) == [5, 0, 10]
    rig.end(ticket)
    assert rig.blocks(request) == [5, 0, 10]


@pytest.mark.parametrize(("status", "cause"), [(404, Cause.NATURAL), (503, Cause.NATURAL), (0, Cause.ERROR)])
def test_a_refused_request_leaves_nothing_behind(status: int, cause: Cause) -> None:
    rig, history = Rig(pool_view(1)), text(1, 320)
    rig.serve(chat(history), 0)
    request = chat(history + text(2, 320))
    rig.end(rig.send(request, 0), status=status, cause=cause)
    assert rig.blocks(request) == [5]


@pytest.mark.parametrize("answers_first", [True, False])
def test_a_request_that_relied_on_a_refused_one_keeps_what_it_computed(answers_first: bool) -> None:
    rig, history = Rig(pool_view(1)), text(1, 320)
    cold, shares = chat(history + text(2, 320)), chat(history + text(3, 640))
    first, second = rig.send(cold, 0), rig.send(shares, 0)
    if answers_first:
        rig.end(second)
    rig.end(first, status=503)
    assert (rig.blocks(shares), rig.blocks(cold)) == ([15], [5]), "it has computed them, or is about to"
    if not answers_first:
        rig.end(second)
    assert (rig.blocks(shares), rig.blocks(cold)) == ([15], [5])


def test_a_request_refused_where_it_moved_to_leaves_what_others_computed_there() -> None:
    rig, request = Rig(pool_view(2)), chat(text(1, 640))
    ticket = rig.send(request, 0)
    rig.serve(request, 1)
    ticket.slot = 1
    rig.producer.observe(ticket, AnswerHeaders(503, "10.0.0.1:8000", False), 0.0)
    rig.end(ticket, status=503)
    assert rig.blocks(request) == [0, 10]


def test_requests_that_relied_on_each_other_and_were_refused_leave_nothing_behind() -> None:
    rig, request = Rig(pool_view(1)), chat(text(1, 640))
    for ticket in [rig.send(request, 0) for _ in range(3)]:
        rig.end(ticket, status=503)
    assert rig.blocks(request) == [0]


def test_what_was_forgotten_since_is_not_entered_anew_by_a_request_that_relied_on_others() -> None:
    rig, request = Rig(pool_view(1)), chat(text(1, 640))
    rig.send(request, 0)
    second = rig.send(request, 0)
    rig.producer.left(0)
    rig.end(second)
    assert rig.blocks(request) == [0]


def test_a_client_that_leaves_does_not_empty_the_cache() -> None:
    rig, request = Rig(pool_view(1)), chat(text(1, 640))
    rig.end(rig.send(request, 0), status=0, cause=Cause.CLIENT_DISCONNECT)
    assert rig.blocks(request) == [10]


def test_state_of_requests_ends_with_them() -> None:
    rig = Rig(pool_view(2))
    tickets = [rig.send(chat(text(seed % 5, 640)), seed % 2) for seed in range(20)]
    endings = [(200, Cause.NATURAL), (500, Cause.NATURAL), (0, Cause.ERROR), (0, Cause.CLIENT_DISCONNECT)]
    for n, ticket in enumerate(tickets):
        status, cause = endings[n % 4]
        rig.end(ticket, status=status, cause=cause)
    assert not rig.producer._sent
    assert not any(rig.producer._computing)


def test_a_request_without_a_full_block_is_followed_in_vain() -> None:
    rig = Rig(pool_view(2))
    for request in (chat(text(1, 63)), chat()):
        ticket = rig.send(request, 0)
        ticket.slot = 1
        rig.producer.observe(ticket, AnswerHeaders(200, "10.0.0.1:8000", True), 0.0)
        rig.end(ticket, Usage(63, 1, cached_tokens=0))
    assert (rig.held(0), rig.held(1)) == (0, 0)


def test_a_reused_slot_starts_clean() -> None:
    view = pool_view(2)
    view.cache_tokens[0] = 64_000
    rig, request = Rig(view), chat(text(1, 640))
    rig.serve(request, 0)
    for _ in range(20):
        rig.serve(request, 0, Usage(640, 1, cached_tokens=0))
    in_flight, elsewhere = rig.send(request, 0), rig.send(request, 0)
    rig.producer.refresh(1.0)
    assert rig.capacity(0) < 500
    rig.producer.left(0)
    assert rig.blocks(request) == [0, 0]
    rig.producer.joined(0)
    assert rig.capacity(0) == 1000
    rig.send(request, 0)
    rig.end(in_flight, Usage(640, 1, cached_tokens=0), status=500)
    elsewhere.slot = 1
    rig.producer.observe(elsewhere, AnswerHeaders(200, "10.0.0.1:8000", False), 0.0)
    rig.end(elsewhere)
    assert rig.blocks(request) == [10, 10]


# -- correction ---------------------------------------------------------------------------------------


def filled(view: PoolView, tokens: int = 64_000) -> Rig:
    """An index filled to its capacity by prompts of 640 tokens, the first of them evicted."""
    view.cache_tokens[:] = tokens
    rig = Rig(view)
    for seed in range(tokens // 640 + 5):
        rig.serve(chat(text(seed, 640)), 0)
    return rig


def test_cached_tokens_below_expectation_lower_that_endpoints_capacity() -> None:
    rig = filled(pool_view(2))
    for seed in range(90, 100):
        rig.serve(chat(text(seed, 640)), 0, Usage(640, 1, cached_tokens=0))
        assert rig.blocks(chat(text(seed, 640)))[0] == 10, "the engine has just computed it"
    rig.producer.refresh(1.0)
    assert 400 < rig.capacity(0) < 700
    assert rig.held(0) <= rig.capacity(0)
    assert rig.capacity(1) == 1000


def test_cached_tokens_as_expected_change_nothing() -> None:
    rig = filled(pool_view(1))
    for seed in range(90, 100):
        rig.serve(chat(text(seed, 640)), 0, Usage(640, 1, cached_tokens=624))
    rig.producer.refresh(1.0)
    assert rig.capacity(0) == 1000


def test_what_was_evicted_and_is_there_still_raises_the_capacity() -> None:
    rig = filled(pool_view(1))
    assert rig.blocks(chat(text(0, 640))) == [0]
    for seed in range(4):
        rig.serve(chat(text(seed, 640)), 0, Usage(640, 1, cached_tokens=624))
    rig.producer.refresh(1.0)
    assert 1100 < rig.capacity(0) <= 1500


def test_what_others_cached_does_not_raise_the_capacity() -> None:
    rig = filled(pool_view(1))
    for seed in range(500, 520):
        rig.serve(chat(text(seed, 640)), 0, Usage(640, 1, cached_tokens=624))
    rig.producer.refresh(1.0)
    assert rig.capacity(0) == 1000


def test_a_prompt_still_being_computed_is_not_counted_on() -> None:
    rig, request = Rig(pool_view(1)), chat(text(1, 640))
    tickets = [rig.send(request, 0) for _ in range(20)]
    for ticket in tickets:
        rig.end(ticket, Usage(640, 1, cached_tokens=0))
    before = rig.capacity(0)
    rig.producer.refresh(1.0)
    assert rig.capacity(0) == before


def test_a_missing_count_is_zero_where_the_endpoint_is_known_to_report() -> None:
    silent, telling = filled(pool_view(1)), filled(pool_view(1))
    telling.serve(chat(text(99, 640)), 0, Usage(640, 1, cached_tokens=624))
    for rig in (silent, telling):
        for seed in range(80, 90):
            rig.serve(chat(text(seed, 640)), 0, Usage(640, 1))
        rig.producer.refresh(1.0)
    assert silent.capacity(0) == 1000
    assert telling.capacity(0) < 700


def test_usage_without_prompt_tokens_teaches_nothing() -> None:
    rig = filled(pool_view(1))
    for cached in (0, 640, None):
        rig.serve(chat(text(99, 640)), 0, Usage(0, 1, cached))
    for seed in range(80, 90):
        rig.serve(chat(text(seed, 640)), 0, Usage(640, 1))
    rig.producer.refresh(1.0)
    assert rig.capacity(0) == 1000


def test_counted_tokens_scale_the_capacity() -> None:
    view = pool_view(1)
    view.cache_tokens[0] = 64_000
    rig = Rig(view)
    for seed in range(300):
        rig.serve(chat(text(seed, 640)), 0, Usage(1280, 1))
    rig.producer.refresh(1.0)
    assert rig.capacity(0) == pytest.approx(500, rel=0.02)


def play(rig: Rig, rounds: int, measured_share: float, prompts: range) -> None:
    """Known prompts, and an engine that counts a share of their tokens as hits; read every ten requests."""
    view = rig.view
    view.hit_tokens[0], view.query_tokens[0] = 1e6, 2e6
    rig.producer.refresh(0.0)
    for turn in range(rounds):
        for number in range(10):
            rig.serve(chat(text(prompts[(turn * 10 + number) % len(prompts)], 640)), 0)
        view.query_tokens[0] += 6400
        view.hit_tokens[0] += 6400 * measured_share
        rig.producer.refresh(turn * 5.0)


def test_counters_below_expectation_lower_the_capacity() -> None:
    rig = filled(pool_view(2))
    play(rig, 10, 0.4, range(60, 100))
    assert 400 < rig.capacity(0) < 700
    assert rig.capacity(1) == 1000


def test_counters_near_expectation_change_nothing() -> None:
    rig = filled(pool_view(1))
    play(rig, 10, 0.93, range(60, 100))
    assert rig.capacity(0) == 1000


def test_counters_that_mostly_count_other_traffic_change_nothing() -> None:
    rig = filled(pool_view(1))
    view = rig.view
    view.hit_tokens[0], view.query_tokens[0] = 0.0, 0.0
    rig.producer.refresh(0.0)
    for turn in range(10):
        rig.serve(chat(text(90 + turn, 640)), 0)
        view.query_tokens[0] += 64_000
        rig.producer.refresh(turn * 5.0)
    assert rig.capacity(0) == 1000


def test_counters_are_not_used_where_usage_tells() -> None:
    rig = filled(pool_view(1))
    rig.serve(chat(text(99, 640)), 0, Usage(640, 1, cached_tokens=624))
    play(rig, 10, 0.0, range(60, 100))
    assert rig.capacity(0) == 1000


def test_a_restarted_engine_holds_nothing() -> None:
    rig = filled(pool_view(2))
    request = chat(text(100, 640))
    rig.serve(request, 1)
    view = rig.view
    view.hit_tokens[:], view.query_tokens[:] = 50_000.0, 90_000.0
    rig.producer.refresh(1.0)
    in_flight = rig.send(request, 0)
    assert rig.blocks(request) == [10, 10]
    view.hit_tokens[0], view.query_tokens[0] = 0.0, 700.0
    rig.producer.refresh(2.0)
    assert rig.blocks(request) == [0, 10]
    for _ in range(5):
        rig.send(request, 0)
    rig.end(in_flight, Usage(640, 1, cached_tokens=0))
    rig.producer.refresh(3.0)
    assert rig.capacity(0) == 1000
    assert rig.blocks(request) == [10, 10]


def test_counters_that_vanish_for_a_while_are_no_restart() -> None:
    rig = filled(pool_view(1))
    view = rig.view
    for number in (90_000.0, np.nan, 95_000.0):
        view.hit_tokens[0] = view.query_tokens[0] = number
        rig.producer.refresh(1.0)
    assert rig.held(0) > 900


# -- parameters ---------------------------------------------------------------------------------------


def test_parameters_have_the_fields_names_and_defaults() -> None:
    assert msgspec.to_builtins(ApproximateParams()) == {
        "autoTune": True,
        "blockSizeTokens": 16,
        "maxPrefixTokensToMatch": 131072,
        "maxPrefixBlocksToMatch": 2048,
        "lruCapacityPerServer": 31250,
        "blockSize": 0,
    }


@pytest.mark.parametrize(
    ("parameters", "field_path"),
    [
        ({"blockSizeTokens": 0}, "blockSizeTokens"),
        ({"lruCapacityPerServer": 0}, "lruCapacityPerServer"),
        ({"maxPrefixTokensToMatch": -1}, "maxPrefixTokensToMatch"),
        ({"autoTune": "yes"}, "autoTune"),
        ({"hashBlockSize": 64}, "hashBlockSize"),
    ],
)
def test_wrong_parameters_are_refused_by_name(parameters: dict[str, object], field_path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field_path):
        msgspec.convert(parameters, ApproximateParams)
