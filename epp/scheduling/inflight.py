"""What is in flight to each endpoint: the producer that counts it, and the scorers that read it."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from epp.payload.records import InferenceRequest
from epp.pool.records import Floats, Ints, Mask, PoolView
from epp.scheduling.filters import DEFAULT_INFLIGHT_PRODUCER
from epp.scheduling.membership import SHOWN_ENDPOINTS
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    INFLIGHT_LOAD,
    PREFIX_MATCH,
    AnswerFact,
    Ended,
    FactKey,
    Facts,
    FirstToken,
    InflightLoad,
    PrefixMatch,
    Ticket,
    TicketId,
)
from epp.scheduling.scorers import DEFAULT_PREFIX_PRODUCER

DEFAULT_QUEUE_THRESHOLD_TOKENS: Final = 4_194_304


class InflightLoadParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `inflight-load-producer`.

    Attributes:
        add_estimated_output_tokens: count tokens that are still to be generated, too.
        output_ratio: estimated output tokens per prompt token.
        max_estimated_output_tokens: most that is estimated for one request; None = no limit.
        prefix_match_info_producer_name: whose prefix match is taken off the prompt. Empty: that of
            `approx-prefix-cache-producer` where it is configured.
        sync_cross_replica_state: accepted for files of the field; replicas do not exchange their loads.
    """

    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.5
    max_estimated_output_tokens: Annotated[int, Meta(ge=0)] | None = None
    prefix_match_info_producer_name: str = ""
    sync_cross_replica_state: bool = True

    def needs(self) -> tuple[FactKey, ...]:
        """The prefix match, where a producer of it is named.

        Unnamed, it is used where it is there, and not made for this alone: hashing every prompt costs more.
        """
        name = self.prefix_match_info_producer_name
        return (FactKey(PREFIX_MATCH, name),) if name else ()


class TokenCost:
    """What one request adds to an endpoint's tokens.

    Prompt: (blocks - matched blocks) x block size + the tokens beyond the blocks; without a prefix match
    all its tokens. Output: min(round(prompt tokens x `outputRatio`), the request's limit,
    `maxEstimatedOutputTokens`), from the whole prompt, cached or not; 0 unless asked for.
    """

    def __init__(self, params: InflightLoadParams) -> None:
        producer = params.prefix_match_info_producer_name or DEFAULT_PREFIX_PRODUCER
        self._match = FactKey(PREFIX_MATCH, producer)
        self._ratio = params.output_ratio if params.add_estimated_output_tokens else 0.0
        self._most = params.max_estimated_output_tokens

    def prompt(self, request: InferenceRequest, facts: Facts) -> Ints | int:
        """Tokens to compute by slot; one number where it is the same for all."""
        match: PrefixMatch | None = facts.get(self._match)
        if match is None:
            return request.prompt_tokens
        missing: Ints = np.maximum(match.total_blocks - match.blocks, 0)
        missing *= match.block_tokens
        missing += max(request.prompt_tokens - match.total_blocks * match.block_tokens, 0)
        return missing

    def prompt_at(self, request: InferenceRequest, facts: Facts, slot: int) -> int:
        """`prompt` at one slot."""
        match: PrefixMatch | None = facts.get(self._match)
        if match is None:
            return request.prompt_tokens
        missing = max(match.total_blocks - int(match.blocks[slot]), 0)
        beyond = max(request.prompt_tokens - match.total_blocks * match.block_tokens, 0)
        return missing * match.block_tokens + beyond

    def output(self, request: InferenceRequest) -> int:
        """Output tokens expected."""
        if not self._ratio:
            return 0
        expected = request.prompt_tokens * self._ratio
        tokens = int(expected)
        tokens += expected - tokens >= 0.5  # away from zero, as Go rounds; `round` goes to even
        if request.max_output_tokens is not None:
            tokens = min(tokens, max(request.max_output_tokens, 0))
        return tokens if self._most is None else min(tokens, self._most)


@dataclass(frozen=True, slots=True)
class ExpectedLoad(InflightLoad):
    """The load, and what the request at hand would add to it."""

    cost: TokenCost

    def added(self, ctx: Ctx) -> Ints | int:
        """Tokens that the request adds, by slot or the same for all. Computed when asked for."""
        return self.cost.prompt(ctx.request, ctx.facts) + self.cost.output(ctx.request)


class FlowLoad(NamedTuple):
    """What one flow has in flight to one endpoint."""

    slot: int
    flow: str
    priority: int
    requests: int
    tokens: int


@dataclass(slots=True)
class _Charge:
    """What a request takes of one slot. `generation`: whose slot that was."""

    slot: int
    generation: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class _Flight:
    """A placed request until it ends. `others`: the legs before the serving one, until the first token."""

    flow: str
    priority: int
    serving: _Charge
    others: list[_Charge] = field(default_factory=list)


class InflightLoadProducer:
    """`inflight-load-producer`: requests and tokens in flight, by slot.

    A placed request is charged to the first endpoint of each leg: one request and its `TokenCost` there. At
    the first output token its prompt tokens are given back, and the legs before the serving one altogether:
    they have done their part. At the end everything is, exactly once. Where the proxy used another endpoint,
    the serving leg's charge moves along. What was charged to an endpoint that left is void, so the slot's
    next owner starts at zero whatever ends later.

    (The field holds an encode leg's request to the end; and with `addEstimatedOutputTokens` it did hold
    prompt tokens to the end.)
    """

    def __init__(self, name: str, params: InflightLoadParams, view: PoolView) -> None:
        self.provides: tuple[FactKey, ...] = (FactKey(INFLIGHT_LOAD, name),)
        self.needs: tuple[FactKey, ...] = params.needs()
        self._cost = TokenCost(params)
        self._view = view
        self._generations: list[int] = []
        self._flights: dict[TicketId, _Flight] = {}
        self._load = ExpectedLoad(np.zeros(0, np.int64), np.zeros(0, np.int64), self._cost)
        self._grow()

    def reconfigure(self, params: InflightLoadParams) -> None:
        """Count what is placed from now on by other parameters; what is in flight keeps its charge."""
        self.needs = params.needs()
        self._cost = TokenCost(params)
        self._load = ExpectedLoad(self._load.requests, self._load.tokens, self._cost)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    def produce(self, ctx: Ctx) -> None:
        """Hand out the columns as they are: they show later charges, too."""
        self._grow()
        ctx.facts[self.provides[0]] = self._load

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        """Charge the first endpoint of each leg."""
        self._grow()
        output = self._cost.output(ticket.request)
        flight = _Flight(ticket.flow, ticket.priority, self._charge(ctx, ticket.slot, output))
        if len(ticket.placement.legs) > 1:
            *others, _ = ticket.placement.legs
            flight.others = [self._charge(ctx, leg.decision.slots[0], output) for leg in others]
        self._flights[ticket.id] = flight

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        """Follow the request to the endpoint that serves it, and give back what it takes no more."""
        flight = self._flights.get(ticket.id)
        if flight is None:
            return
        if flight.serving.slot != ticket.slot:
            self._move(flight, ticket.slot)
        match fact:
            case FirstToken():
                self._computed(flight)
            case Ended():
                del self._flights[ticket.id]
                self._computed(flight)
                self._give_back(flight.serving)

    def _charge(self, ctx: Ctx, slot: int, output_tokens: int) -> _Charge:
        prompt_tokens = self._cost.prompt_at(ctx.request, ctx.facts, slot)
        return self._take(slot, prompt_tokens, output_tokens)

    def _take(self, slot: int, prompt_tokens: int, output_tokens: int) -> _Charge:
        self._load.requests[slot] += 1
        self._load.tokens[slot] += prompt_tokens + output_tokens
        return _Charge(slot, self._generations[slot], prompt_tokens, output_tokens)

    def _give_back(self, charge: _Charge) -> None:
        if charge.generation == self._generations[charge.slot]:
            self._load.requests[charge.slot] -= 1
            self._load.tokens[charge.slot] -= charge.prompt_tokens + charge.output_tokens

    def _computed(self, flight: _Flight) -> None:
        """The prompt is computed, or never will be."""
        for charge in flight.others:
            self._give_back(charge)
        flight.others.clear()
        charge = flight.serving
        if charge.generation == self._generations[charge.slot]:
            self._load.tokens[charge.slot] -= charge.prompt_tokens
        charge.prompt_tokens = 0

    def _move(self, flight: _Flight, slot: int) -> None:
        self._grow()
        charge = flight.serving
        self._give_back(charge)
        flight.serving = self._take(slot, charge.prompt_tokens, charge.output_tokens)

    # -- endpoints --------------------------------------------------------------------------------

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot; nothing is in flight to it."""
        self._grow()

    def left(self, slot: int) -> None:
        """What is charged to the slot's owner is void."""
        self._grow()
        self._generations[slot] += 1
        self._load.requests[slot] = 0
        self._load.tokens[slot] = 0

    def _grow(self) -> None:
        missing = self._view.capacity - len(self._generations)
        if missing > 0:
            self._generations += [0] * missing
            requests = np.pad(self._load.requests, (0, missing))
            self._load = ExpectedLoad(requests, np.pad(self._load.tokens, (0, missing)), self._cost)

    # -- seeing -----------------------------------------------------------------------------------

    def loads(self) -> list[FlowLoad]:
        """What each flow has in flight to each endpoint, counted up now; idle pairs do not occur."""
        sums: defaultdict[tuple[int, str, int], list[int]] = defaultdict(lambda: [0, 0])
        for flight in self._flights.values():
            for charge in (flight.serving, *flight.others):
                if charge.generation == self._generations[charge.slot]:
                    total = sums[charge.slot, flight.flow, flight.priority]
                    total[0] += 1
                    total[1] += charge.prompt_tokens + charge.output_tokens
        return [FlowLoad(*of, requests, tokens) for of, (requests, tokens) in sums.items()]

    def state(self) -> dict[str, object]:
        """The endpoints with most in flight, at most `SHOWN_ENDPOINTS` of them."""
        requests, tokens = self._load.requests.tolist(), self._load.tokens.tolist()
        owned = [
            (-requests[slot] - tokens[slot], f"{owner.namespace}/{owner.name}", slot)
            for slot, owner in enumerate(self._view.endpoints[: len(requests)])
            if owner is not None
        ]
        shown = [
            {"endpoint": name, "requests": requests[slot], "tokens": tokens[slot]}
            for _, name, slot in sorted(owned)[:SHOWN_ENDPOINTS]
        ]
        return {
            "endpoints": shown,
            "totalEndpoints": len(owned),
            "maxEndpoints": SHOWN_ENDPOINTS,
            "truncated": len(owned) > SHOWN_ENDPOINTS,
        }


class ActiveRequestScorerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `active-request-scorer`.

    Attributes:
        idle_threshold: up to so many requests in flight count as none.
        max_busy_score: score of the best endpoint that is not idle.
        in_flight_load_producer_name: whose count is read.
        request_timeout: deprecated; accepted for old files, without effect.
    """

    idle_threshold: Annotated[int, Meta(ge=0)] = 0
    max_busy_score: Annotated[float, Meta(ge=0, le=1)] = 1.0
    in_flight_load_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_INFLIGHT_PRODUCER
    request_timeout: str = ""

    def needs(self) -> tuple[FactKey, ...]:
        """The load in flight."""
        return (FactKey(INFLIGHT_LOAD, self.in_flight_load_producer_name),)


class ActiveRequestScorer:
    """`active-request-scorer`: 1 where c <= `idleThreshold`, else (max c - c) / max c x `maxBusyScore`.

    c is what `inflight-load-producer` has in flight to the endpoint, its maximum over `alive`. So the
    busiest endpoint scores 0, be it ever so little ahead; where all are equally busy, all score 0. No load
    fact (its producer failed): 1 for all.
    """

    def __init__(self, params: ActiveRequestScorerParams) -> None:
        (self._key,) = params.needs()
        self._idle = params.idle_threshold
        self._max_busy = params.max_busy_score

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        load = ctx.facts.get(self._key)
        if load is None:
            return np.ones(len(alive))
        requests = load.requests
        of_alive = requests[alive]
        most = of_alive.item(of_alive.argmax())
        if most <= self._idle:
            return np.ones(len(alive))
        scores: Floats = (most - requests) / most
        if self._max_busy != 1.0:
            scores *= self._max_busy
        scores[requests <= self._idle] = 1.0
        return scores


class TokenLoadScorerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `token-load-scorer`.

    Attributes:
        queue_threshold_tokens: tokens in flight at which the score reaches 0; 0 = 4194304.
        in_flight_load_producer_name: whose count is read.
    """

    queue_threshold_tokens: Annotated[int, Meta(ge=0, le=2**53)] = DEFAULT_QUEUE_THRESHOLD_TOKENS
    in_flight_load_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_INFLIGHT_PRODUCER

    def needs(self) -> tuple[FactKey, ...]:
        """The load in flight."""
        return (FactKey(INFLIGHT_LOAD, self.in_flight_load_producer_name),)


class TokenLoadScorer:
    """`token-load-scorer`: 1 - min(t, T) / T, T = `queueThresholdTokens`.

    t: tokens in flight to the endpoint and those this request would add there. With the default T (128
    prompts of 32k tokens) ordinary loads differ by little, so its weight has to be large. No load fact (its
    producer failed): 1 for all.
    """

    def __init__(self, params: TokenLoadScorerParams) -> None:
        (self._key,) = params.needs()
        self._threshold = float(params.queue_threshold_tokens or DEFAULT_QUEUE_THRESHOLD_TOKENS)

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        load = ctx.facts.get(self._key)
        if load is None:
            return np.ones(len(alive))
        added = load.added(ctx) if isinstance(load, ExpectedLoad) else 0
        scores: Floats = 1.0 - np.minimum(load.tokens + added, self._threshold) / self._threshold
        return scores
