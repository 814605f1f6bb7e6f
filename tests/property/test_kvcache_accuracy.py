"""How near the approximate index comes to engines whose caches are smaller than they say.

An engine here is a pool of blocks with its own eviction order and size, fed with real prompt bytes. The
error is the sum over requests of |expected - really cached| tokens, over all prompt tokens.
"""

import random
from collections import OrderedDict
from enum import Enum
from functools import cache

import numpy as np
import pytest

from epp.kvcache.approximate import ApproximateParams, ApproximatePrefixProducer
from epp.kvcache.capacity import CacheEstimate, Forecast
from epp.kvcache.hashing import chain_keys
from epp.payload.records import Api, InferenceRequest, Usage
from epp.pool.records import Endpoint, Load
from epp.pool.store import empty_view
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
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

ENGINE_BLOCK_TOKENS = 16
STATED_TOKENS = 48_000


class Engine:
    """Keeps full blocks of prompts and outputs, the least recently used end of a chain goes first."""

    def __init__(self, tokens: int) -> None:
        self.size = tokens // ENGINE_BLOCK_TOKENS
        self.pool: OrderedDict[int, None] = OrderedDict()
        self.hits = self.queries = 0.0

    def serve(self, prompt: bytes, output: bytes) -> int:
        """Cached tokens of the prompt: whole blocks, the last token never."""
        keys = chain_keys(0, prompt + output, ENGINE_BLOCK_TOKENS * 4, 1 << 30)
        tokens = len(prompt) // 4
        most = (tokens - 1) // ENGINE_BLOCK_TOKENS
        found = next((n for n, key in enumerate(keys[:most]) if key not in self.pool), most)
        for key in reversed(keys):
            self.pool[key] = None
            self.pool.move_to_end(key)
        while len(self.pool) > self.size:
            self.pool.popitem(last=False)
        self.queries += tokens
        self.hits += found * ENGINE_BLOCK_TOKENS
        return found * ENGINE_BLOCK_TOKENS


class Says(Enum):
    """What the engines tell about hits."""

    NOTHING = "nothing"
    CACHED_TOKENS = "usage"
    COUNTERS = "counters"


class Fleet:
    """The producer with engines behind it; requests one after the other."""

    def __init__(self, real_tokens: int, endpoints: int, says: Says) -> None:
        self.says = says
        self.engines = [Engine(real_tokens) for _ in range(endpoints)]
        self.view = empty_view(endpoints)
        self.view.endpoints = tuple(
            [Endpoint(f"uid-{n}", f"pod-{n}", "ns", f"10.0.0.{n}", 80) for n in range(endpoints)]
        )
        self.view.block_size[:] = ENGINE_BLOCK_TOKENS
        self.view.cache_tokens[:] = STATED_TOKENS
        self.producer = ApproximatePrefixProducer("approx", ApproximateParams(), self.view, b"secret")
        self.served = 0

    def serve(self, slot: int, prompt: bytes, output: bytes) -> tuple[int, int]:
        """Tokens expected to be cached, tokens really cached."""
        tokens, zeros = len(prompt) // 4, np.zeros(len(self.engines), np.int64)
        request = InferenceRequest(Api.CHAT, model="llama", prompts=(prompt,), prompt_tokens=tokens)
        ctx = Ctx(request, self.view, Load(zeros, zeros), {}, 0.0, random.Random(0))
        self.producer.produce(ctx)
        match = ctx.facts[self.producer.provides[0]]
        alive = np.ones(len(self.engines), np.bool_)
        endpoint = self.view.endpoints[slot]
        assert endpoint is not None
        leg = Leg(Role.DECODE, (endpoint,), Decision("default", (slot,), alive, (), (), zeros.astype(float)))
        self.served += 1
        number = TicketId(self.served)
        ticket = Ticket(number, request, Placement(number, (leg,)), slot, 0, 0.0, status=200, facts=ctx.facts)
        self.producer.placed(ctx, ticket)
        cached = self.engines[slot].serve(prompt, output)
        self.producer.observe(ticket, FirstToken(), 0.0)
        told = cached if self.says is Says.CACHED_TOKENS else None
        usage = Usage(tokens, len(output) // 4, told)
        self.producer.observe(ticket, Ended(Cause.NATURAL, usage, 1, 1), 0.0)
        if self.served % 20 == 0:
            self.refresh()
        return int(match.blocks[slot]) * match.block_tokens, cached

    def refresh(self) -> None:
        if self.says is Says.COUNTERS:
            self.view.hit_tokens[:] = [engine.hits for engine in self.engines]
            self.view.query_tokens[:] = [engine.queries for engine in self.engines]
        self.producer.refresh(float(self.served))


def match_error(says: Says, real_share: float, seed: int, turns: int = 1500, endpoints: int = 3) -> float:
    """Multi-turn chats with shared system prompts; most turns go where the chat was, some elsewhere."""
    draw = random.Random(seed)
    fleet = Fleet(int(STATED_TOKENS * real_share), endpoints, says)
    systems = [draw.randbytes(4 * 1024) for _ in range(3)]
    talks: list[tuple[bytes, int]] = []
    wrong = total = 0
    for turn in range(turns):
        if len(talks) < 20 or draw.random() < 0.15:
            talks = [*talks, (draw.choice(systems), draw.randrange(endpoints))][-120:]
        number = len(talks) - 1 - min(int(draw.expovariate(0.03)), len(talks) - 1)
        history, home = talks[number]
        prompt = history + draw.randbytes(4 * draw.randint(50, 500))
        output = draw.randbytes(4 * draw.randint(10, 100))
        talks[number] = (prompt + output)[: 4 * 6000], home
        slot = home if draw.random() < 0.9 else draw.randrange(endpoints)
        expected, cached = fleet.serve(slot, prompt, output)
        if turn >= turns // 3:
            wrong += abs(expected - cached)
            total += len(prompt) // 4
    return wrong / total


@cache
def uncorrected_error(real_share: float, seed: int) -> float:
    return match_error(Says.NOTHING, real_share, seed)


def improves_by_half(says: Says, real_share: float, seed: int) -> bool:
    return match_error(says, real_share, seed) < 0.5 * uncorrected_error(real_share, seed)


@pytest.mark.parametrize("real_share", [0.6, 0.4, 0.25])
@pytest.mark.parametrize("seed", [1, 2])
def test_cached_tokens_halve_the_error(real_share: float, seed: int) -> None:
    assert improves_by_half(Says.CACHED_TOKENS, real_share, seed)


@pytest.mark.parametrize("real_share", [0.4, 0.25])
def test_counters_nearly_halve_the_error(real_share: float) -> None:
    error = match_error(Says.COUNTERS, real_share, 1)
    assert error < 0.6 * uncorrected_error(real_share, 1)


def test_correction_does_no_harm_where_engines_state_the_truth() -> None:
    for says in (Says.CACHED_TOKENS, Says.COUNTERS):
        assert match_error(says, 1.0, 1) <= uncorrected_error(1.0, 1) + 0.005


def test_an_engine_that_holds_more_than_it_states_is_believed() -> None:
    assert match_error(Says.CACHED_TOKENS, 1.4, 1) < 0.8 * uncorrected_error(1.4, 1)


def never_adapts(self: CacheEstimate, relative: float) -> None:
    """Fault: reports are read and forgotten."""


def adapts_the_wrong_way(self: CacheEstimate, relative: float) -> None:
    self.gain = min(max(self.gain * (1 - relative), 0.1), 1.5)


def sees_only_gains(self: Forecast, cached_share: float, band: float) -> float:
    return max(0.0, cached_share - self.cached / max(1, self.prompt))


def capacity_without_gain(self: CacheEstimate, block_tokens: int) -> int:
    return int(self.stated_tokens / self.token_ratio / block_tokens)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (CacheEstimate, "_adapt", never_adapts),
        (CacheEstimate, "_adapt", adapts_the_wrong_way),
        (Forecast, "error", sees_only_gains),
        (CacheEstimate, "blocks", capacity_without_gain),
    ],
)
def test_faults_are_seen(owner: type, name: str, fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert not improves_by_half(Says.CACHED_TOKENS, 0.4, 1)
