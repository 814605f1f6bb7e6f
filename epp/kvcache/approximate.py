"""The approximate mode: what endpoints hold is concluded from what was sent to them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from epp.kvcache.capacity import CacheEstimate, Forecast
from epp.kvcache.hashing import BYTES_PER_TOKEN, chain_keys, root_key
from epp.kvcache.lru import LruRunIndex
from epp.kvcache.runs import lengths
from epp.payload.records import InferenceRequest
from epp.pool.records import Ints, PoolView
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    PREFIX_MATCH,
    AnswerFact,
    AnswerHeaders,
    Cause,
    Ended,
    FactKey,
    FirstToken,
    PrefixMatch,
    Ticket,
    TicketId,
)

BLOCK_TOKENS_MIN = 64
BLOCK_TOKENS_MAX = 4096


class ApproximateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `approx-prefix-cache-producer`.

    Attributes:
        auto_tune: take block size and capacity from the endpoints' metrics, and correct the capacity by
            what engines say about hits. False: as configured.
        block_size_tokens: tokens per block while no endpoint has stated its own; 64 at least are used.
        max_prefix_tokens_to_match: longest prefix of a prompt that is looked at; 0 = see the next one.
        max_prefix_blocks_to_match: deprecated, the same in blocks; counts if the former is 0. 0 = no limit.
        lru_capacity_per_server: capacity of an endpoint whose cache size is unknown, in units of
            `block_size_tokens` tokens.
        block_size: deprecated, in characters; accepted for old files, without effect.
    """

    auto_tune: bool = True
    block_size_tokens: Annotated[int, Meta(ge=1, le=BLOCK_TOKENS_MAX)] = 16
    max_prefix_tokens_to_match: Annotated[int, Meta(ge=0)] = 131_072
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=0)] = 2048
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 31_250
    block_size: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class ChainMatch(PrefixMatch):
    """The match with what it was made of, so that the placed request need not be hashed again.

    Attributes:
        chains: the keys of each prompt, up to the longest prefix that is looked at.
        held: leading blocks held of each chain, by slot; `blocks` is their sum.
    """

    chains: tuple[Sequence[int], ...]
    held: tuple[Ints, ...]

    def held_at(self, slot: int) -> list[int]:
        """Leading blocks of each chain at one slot (0 at a slot that the pool had not yet)."""
        return [int(held[slot]) if slot < len(held) else 0 for held in self.held]


@dataclass(slots=True, eq=False)
class _Sent:
    """A placed request until it ends.

    Attributes:
        slot, generation: where its chains are entered, and whose slot that was.
        forecast: what was expected there; None where several engines share the work.
        there: leading blocks of each chain that were computed, for this request or another.
        computing: the engine has to compute what lies behind.
    """

    match: ChainMatch
    slot: int
    generation: int
    forecast: Forecast | None
    there: list[int]
    computing: bool = True


class ApproximatePrefixProducer:
    """Producer of `PrefixMatch` from own decisions; also a hook of placements, answers and members.

    A placed request's full blocks are entered for its endpoints at once, so that a burst of equal prompts
    sticks. A request that the endpoint refused is taken back, but for blocks that another one computed or is
    about to; one that the proxy sent elsewhere moves. Each endpoint evicts at its own capacity in tokens (see
    `epp.kvcache.capacity`).

    One block size serves the whole pool, since a chain is hashed once: the largest stated by any endpoint,
    64 tokens at least. It only grows; growing empties the index. So a mixed pool does not change the keys
    from request to request.
    """

    def __init__(self, name: str, params: ApproximateParams, view: PoolView, secret: bytes) -> None:
        self.provides: tuple[FactKey, ...] = (FactKey(PREFIX_MATCH, name),)
        self.needs: tuple[FactKey, ...] = ()
        self._params = params
        self._view = view
        self._secret = secret
        self._block_tokens = max(BLOCK_TOKENS_MIN, params.block_size_tokens)
        self._index = LruRunIndex()
        self._estimates: list[CacheEstimate] = []
        self._generations: list[int] = []
        # By slot: who waits for the block of this key to be computed, the first one that each still lacks.
        self._computing: list[dict[int, list[_Sent]]] = []
        self._sent: dict[TicketId, _Sent] = {}
        self._grow()

    def reconfigure(self, params: ApproximateParams) -> None:
        """Go on with other limits of what is looked at; sizes and tuning have to be as before."""
        self._params = params

    @property
    def size(self) -> int:
        """Entries of the index: blocks, counted once for each endpoint that holds them."""
        return sum(self._index.blocks)

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the keys."""
        return self._block_tokens

    # -- one request ------------------------------------------------------------------------------

    def produce(self, ctx: Ctx) -> None:
        """Look the request's prompts up: each on its own, their blocks summed."""
        request, slots = ctx.request, ctx.view.capacity
        chains = self._chains(request)
        held = tuple([lengths(self._index.match(chain), slots) for chain in chains])
        match len(held):
            case 0:
                blocks = np.zeros(slots, np.int64)
            case 1:
                blocks = held[0]
            case _:
                blocks = np.sum(held, axis=0)
        ctx.facts[self.provides[0]] = ChainMatch(
            blocks=blocks,
            total_blocks=sum(map(len, chains)),
            block_tokens=self._block_tokens,
            total_tokens=request.prompt_tokens,
            chains=chains,
            held=held,
        )

    def _chains(self, request: InferenceRequest) -> tuple[Sequence[int], ...]:
        limit = self._max_blocks()
        if request.chains is not None:
            return tuple([chain[:limit] for chain in request.chains])
        root = root_key(self._secret, request.target_model or request.model, request.cache_salt)
        block_bytes = self._block_tokens * BYTES_PER_TOKEN
        return tuple([chain_keys(root, prompt, block_bytes, limit) for prompt in request.prompts])

    def _max_blocks(self) -> int:
        if self._params.max_prefix_tokens_to_match:
            return self._params.max_prefix_tokens_to_match // self._block_tokens
        return self._params.max_prefix_blocks_to_match or sys.maxsize

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        """Enter the request's chains at the first endpoint of each leg."""
        match = ctx.facts.get(self.provides[0])
        if not isinstance(match, ChainMatch) or not match.total_blocks:
            return
        if match.block_tokens != self._block_tokens:
            return
        self._grow()
        *others, _ = ticket.placement.legs
        for leg in others:
            self._insert(match, leg.decision.slots[0])
        held = match.held_at(ticket.slot)
        self._sent[ticket.id] = self._send(match, ticket.slot, held, judged=not others)

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        """Follow the request to the endpoint that served it, and learn from how it ended."""
        match fact:
            case AnswerHeaders():
                sent = self._sent.get(ticket.id)
                if sent and sent.slot != ticket.slot:
                    self._move(ticket, sent)
            case FirstToken():
                if sent := self._sent.get(ticket.id):
                    self._computed(sent)
            case Ended():
                if sent := self._sent.pop(ticket.id, None):
                    self._end(ticket, sent, fact)

    def _send(self, match: ChainMatch, slot: int, held: list[int], judged: bool) -> _Sent:
        there = self._there(match, held, slot)
        forecast = self._forecast(match, held, there, slot) if judged else None
        if forecast:
            self._estimates[slot].expect(forecast)
        sent = _Sent(match, slot, self._generations[slot], forecast, there)
        computing = self._computing[slot]
        for chain, blocks in zip(match.chains, there, strict=True):
            if blocks < len(chain):
                computing.setdefault(chain[blocks], []).append(sent)
        self._insert(match, slot)
        return sent

    def _insert(self, match: ChainMatch, slot: int) -> None:
        if self._stated_tokens(slot) != self._estimates[slot].stated_tokens:
            self._resize(slot)
        for chain in match.chains:
            self._index.insert(chain, slot)

    def _there(self, match: ChainMatch, held: list[int], slot: int) -> list[int]:
        """How many of the leading blocks held of each chain no request in flight has still to compute."""
        computing = self._computing[slot].keys()
        if not computing:
            return held
        return [
            blocks
            if computing.isdisjoint(chain[:blocks])
            else next(n for n, key in enumerate(chain) if key in computing)
            for chain, blocks in zip(match.chains, held, strict=True)
        ]

    def _forecast(self, match: ChainMatch, held: Sequence[int], there: Sequence[int], slot: int) -> Forecast:
        """What usage should say, if the model of the slot's cache is right.

        Blocks that a request in flight has still to compute are not counted on: that they are missing when
        this one is computed would say nothing about capacity.
        """
        regretted = 0
        for chain, blocks in zip(match.chains, held, strict=True):
            if blocks < len(chain) and self._index.was_evicted(chain[blocks], slot):
                regretted += len(chain) - blocks
        size = match.block_tokens
        return Forecast(
            prompt=max(match.total_tokens, match.total_blocks * size),
            cached=sum(there) * size,
            regretted=regretted * size,
            tolerance=len(match.chains) * size,
        )

    def _move(self, ticket: Ticket, sent: _Sent) -> None:
        self._withdraw(sent)
        match = sent.match
        if match.block_tokens == self._block_tokens:
            self._grow()
            # Others may have been sent there since this one was looked up.
            held = [self._held_now(chain, ticket.slot) for chain in match.chains]
            judged = sent.forecast is not None
            self._sent[ticket.id] = self._send(match, ticket.slot, held, judged)
        else:
            del self._sent[ticket.id]

    def _held_now(self, chain: Sequence[int], slot: int) -> int:
        return int(lengths(self._index.match(chain), self._view.capacity)[slot])

    def _withdraw(self, sent: _Sent) -> None:
        """The endpoint did not compute the request: it holds what it holds for others."""
        if not self._is_current(sent):
            return
        if sent.computing:
            for chain, blocks in zip(sent.match.chains, sent.there, strict=True):
                if blocks < len(chain):
                    self._take_back(sent, chain, blocks)
        if sent.forecast:
            self._estimates[sent.slot].withdraw(sent.forecast)

    def _take_back(self, sent: _Sent, chain: Sequence[int], keep: int) -> None:
        computing, key = self._computing[sent.slot], chain[keep]
        waiting = computing[key]
        waiting.remove(sent)
        if not waiting:
            del computing[key]
        for other in waiting:
            if keep == len(chain):
                return
            if other is not sent:
                keep = max(_shared(chain, theirs, keep) for theirs in other.match.chains)
        self._index.truncate(chain, sent.slot, keep)

    def _computed(self, sent: _Sent) -> None:
        """The prompt is computed: no refusal of a request that waited for the same blocks takes them back."""
        if not sent.computing:
            return
        sent.computing = False
        if not self._is_current(sent):
            return
        computing, chains = self._computing[sent.slot], sent.match.chains
        for chain, blocks in zip(chains, sent.there, strict=True):
            if blocks < len(chain):
                for other in computing.pop(chain[blocks], ()):
                    if other is not sent:
                        self._advance(other, chain[blocks], chains)

    def _advance(self, sent: _Sent, key: int, computed: Sequence[Sequence[int]]) -> None:
        """Of the block that the request waited for, and of those behind it, some are computed by another."""
        computing = self._computing[sent.slot]
        for n, chain in enumerate(sent.match.chains):
            blocks = sent.there[n]
            if blocks < len(chain) and chain[blocks] == key:
                sent.there[n] = blocks = max(_shared(chain, other, blocks) for other in computed)
                if blocks < len(chain):
                    computing.setdefault(chain[blocks], []).append(sent)

    def _end(self, ticket: Ticket, sent: _Sent, ended: Ended) -> None:
        refused = ticket.status >= 400 or (ticket.status == 0 and ended.cause is Cause.ERROR)
        if refused:
            self._withdraw(sent)
            return
        self._computed(sent)
        if ended.usage and sent.forecast and self._is_current(sent):
            complete = ended.cause is Cause.NATURAL
            self._estimates[sent.slot].learn_from_usage(sent.forecast, ended.usage, complete)

    # -- endpoints --------------------------------------------------------------------------------

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot; its cache is taken for empty."""
        self._grow()
        self._start(slot)

    def left(self, slot: int) -> None:
        """Nothing that was sent to the slot's owner counts any more, requests in flight included."""
        self._grow()
        self._start(slot)

    def refresh(self, now: float) -> None:
        """Take in what the endpoints' metrics say; call every few seconds.

        A larger block size empties the index; a prefix-cache counter that fell (the engine was restarted)
        empties its endpoint; capacities follow the stated sizes and what was learned since.
        """
        self._grow()
        if self._params.auto_tune:
            self._follow_block_size()
        view = self._view
        for slot, endpoint in enumerate(view.endpoints):
            if endpoint is None:
                continue
            hits, queries = float(view.hit_tokens[slot]), float(view.query_tokens[slot])
            if self._estimates[slot].learn_from_counters(hits, queries):
                self._forget(slot)
            self._resize(slot)

    def _grow(self) -> None:
        """Have state for every slot of the view."""
        if len(self._estimates) >= self._view.capacity:
            return
        first = len(self._estimates)
        self._index.grow(self._view.capacity)
        for slot in range(first, self._view.capacity):
            self._estimates.append(self._new_estimate())
            self._generations.append(0)
            self._computing.append({})
            self._resize(slot)

    def _start(self, slot: int) -> None:
        self._forget(slot)
        self._estimates[slot] = self._new_estimate()
        self._resize(slot)

    def _forget(self, slot: int) -> None:
        """The slot's cache is empty; requests in flight to it say nothing about it."""
        self._index.clear(slot)
        self._generations[slot] += 1
        self._computing[slot].clear()

    def _is_current(self, sent: _Sent) -> bool:
        return sent.generation == self._generations[sent.slot]

    def _follow_block_size(self) -> None:
        stated = self._view.block_size
        largest = int(stated.max(initial=0, where=stated <= BLOCK_TOKENS_MAX))
        if largest > self._block_tokens:
            self._block_tokens = largest
            for slot in range(len(self._estimates)):
                self._forget(slot)

    def _new_estimate(self) -> CacheEstimate:
        return CacheEstimate(self._params.lru_capacity_per_server * self._params.block_size_tokens)

    def _stated_tokens(self, slot: int) -> int:
        """The cache size last known, in tokens."""
        scraped = int(self._view.cache_tokens[slot]) if self._params.auto_tune else 0
        return scraped or self._estimates[slot].stated_tokens

    def _resize(self, slot: int) -> None:
        estimate = self._estimates[slot]
        estimate.stated_tokens = self._stated_tokens(slot)
        if self._params.auto_tune:
            blocks = estimate.blocks(self._block_tokens)
        else:
            blocks = estimate.stated_tokens // self._block_tokens
        self._index.set_capacity(slot, blocks)


def _shared(chain: Sequence[int], other: Sequence[int], least: int) -> int:
    """How many leading keys two chains have in common; `least`, where it is not more."""
    differs = min(len(chain), len(other))
    if least >= differs or chain[least] != other[least]:
        return least
    if chain[differs - 1] == other[differs - 1]:
        return differs
    while least < differs:
        middle = (least + differs) // 2
        if chain[middle] == other[middle]:
            least = middle + 1
        else:
            differs = middle
    return least
