"""Requests that come within one window are held and assigned together, before any cache is warm."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from epp.errors import NeedFailed
from epp.kvcache.burst_plan import BurstRules, Chains, assign
from epp.kvcache.hashing import BYTES_PER_TOKEN, all_keys, root_key
from epp.payload.records import InferenceRequest
from epp.pool.records import Endpoint, PoolView
from epp.scheduling.ports import Ctx
from epp.scheduling.records import PREFIX_MATCH, FactKey, PlannedMatch

UNLIMITED: Final = -1
MAX_BLOCKS: Final = 2048
"""Looked at where `maxPrefixTokensToMatch` does not say otherwise."""

MARGIN_S: Final = 0.3
"""How much longer than its window a request waits at most."""

FULL: Final = "full"

_PLACE: Final = "burst-place"


class BurstParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `burst-prefix-cache-producer`.

    Attributes:
        window_duration_ms: how long a window is open, from its first request on.
        max_per_replica: requests with the same prompts on one endpoint; -1 = no limit.
        block_size_tokens: tokens per block.
        max_prefix_tokens_to_match: longest prefix of a prompt that is looked at; 0 = 2048 blocks.
        min_colocate_blocks: leading blocks that different prompts share to be kept together; 0 = only
            equal prompts are.
        max_batch_size: requests that one window takes; -1 = no limit.
        balance_by: what is spread evenly; empty = requests.
    """

    window_duration_ms: Annotated[int, Meta(ge=1, le=10_000)] = 100
    max_per_replica: Annotated[int, Meta(ge=UNLIMITED)] = UNLIMITED
    block_size_tokens: Annotated[int, Meta(ge=1, le=2**32)] = 64
    max_prefix_tokens_to_match: Annotated[int, Meta(ge=0)] = 0
    min_colocate_blocks: Annotated[int, Meta(ge=0)] = 0
    max_batch_size: Annotated[int, Meta(ge=UNLIMITED)] = 1000
    balance_by: Literal["requests", "tokens", ""] = "requests"

    def __post_init__(self) -> None:
        for name, value in (("maxPerReplica", self.max_per_replica), ("maxBatchSize", self.max_batch_size)):
            if value == 0:
                raise ValueError(f"{name} must be -1 (unlimited) or >= 1 (current value: {value})")
        if 0 < self.max_prefix_tokens_to_match < self.block_size_tokens:
            raise ValueError(
                f"maxPrefixTokensToMatch ({self.max_prefix_tokens_to_match}) must be 0 or >= blockSizeTokens "
                f"({self.block_size_tokens}); a smaller positive value yields zero prefix blocks"
            )

    @property
    def rules(self) -> BurstRules:
        """How batches are assigned."""
        most = None if self.max_per_replica == UNLIMITED else self.max_per_replica
        return BurstRules(most, self.min_colocate_blocks, self.balance_by == "tokens")


class BurstPlace(NamedTuple):
    """What came of a request's window.

    Attributes:
        blocks: of all its prompts, partial ones at the end included.
        endpoint, slot: where it is to go; None where it has nothing in common with the others.
        ahead: as in `PlannedMatch`.
    """

    blocks: int
    block_tokens: int
    endpoint: Endpoint | None = None
    slot: int = 0
    ahead: int = 0


@dataclass(slots=True, eq=False)
class Held:
    """A request that waits for the end of its window.

    Attributes:
        subset: the endpoints it may go to; None = all.
        window: the one it waits in; None before and after.
    """

    chains: Chains
    subset: tuple[str, ...] | None
    place: BurstPlace
    window: "BurstWindow | None" = None

    def leave(self) -> None:
        """It waits no more, and counts for nobody."""
        if self.window is not None:
            self.window.held.pop(self, None)
            self.window = None


@dataclass(slots=True, eq=False)
class BurstWindow:
    """Requests that are assigned together when it is over.

    Attributes:
        seconds: how long it stays open.
        held: in the order in which they came.
    """

    seconds: float
    held: dict[Held, None] = field(default_factory=dict)


class BurstNeed(msgspec.Struct, frozen=True):
    """Wait in the producer's open window until it is over; the request's `BurstPlace` is the result.

    Attributes:
        key: of the fact that the result is.
        timeout_s: how long the request may wait for it.
    """

    producer: "BurstPrefixProducer"
    held: Held
    key: FactKey
    timeout_s: float


class BurstPrefixProducer:
    """`burst-prefix-cache-producer`: a full match at the endpoint that the request's window assigned it to.

    A window opens with the first request that comes while none is open. When it ends, its requests are
    assigned together (`epp.kvcache.burst_plan`): those with the same prompts, model and cache salt to one
    endpoint. The match is 0 elsewhere, and everywhere for a request that shares nothing with the others. It
    is told under the producer's name, for a `prefix-cache-scorer` whose `prefixMatchInfoProducerName` says
    so. Every request with a prompt waits for the end of its window, be it alone; one that finds the window
    full, or waits for 300 ms more than the window, goes on without a match.

    As in the field, the endpoints of a window are those of its first request: the candidates, of its subset
    where it has one. The same goes for those whose role does not fit: they may be assigned, and a filter then
    takes the match away with them. Equal loads are told apart by the scraped running requests, then by name.
    A partial block at a prompt's end counts as a block, so matched tokens may exceed the prompt's.

    Other than there, the candidates are those at the window's end, a request without a prompt does not wait,
    and one whose client has gone counts no more.
    """

    def __init__(self, name: str, params: BurstParams, view: PoolView, secret: bytes) -> None:
        self.provides: tuple[FactKey, ...] = (FactKey(PREFIX_MATCH, name),)
        self.needs: tuple[FactKey, ...] = ()
        self._params = params
        self._rules = params.rules
        self._max_blocks = params.max_prefix_tokens_to_match // params.block_size_tokens or MAX_BLOCKS
        self._place = FactKey(_PLACE, name)
        self._view = view
        self._secret = secret
        self._window: BurstWindow | None = None

    # -- one request ------------------------------------------------------------------------------

    def hold(self, request: InferenceRequest, subset: tuple[str, ...] | None) -> BurstNeed | None:
        """What the request has to wait for; None where it has no prompt."""
        chains = self._chains(request)
        if not chains:
            return None
        params = self._params
        nowhere = BurstPlace(sum(map(len, chains)), params.block_size_tokens)
        timeout_s = params.window_duration_ms / 1000 + MARGIN_S
        return BurstNeed(self, Held(chains, subset, nowhere), self._place, timeout_s)

    def _chains(self, request: InferenceRequest) -> Chains:
        limit = self._max_blocks
        if request.chains is not None:
            return tuple([chain[:limit] for chain in request.chains if chain])
        if not any(request.prompts):
            return ()
        root = root_key(self._secret, request.target_model or request.model, request.cache_salt)
        block_bytes = self._params.block_size_tokens * BYTES_PER_TOKEN
        return tuple([all_keys(root, prompt, block_bytes, limit) for prompt in request.prompts if prompt])

    def produce(self, ctx: Ctx) -> None:
        """The match, where the request waited for the end of its window."""
        place: BurstPlace | None = ctx.facts.get(self._place)
        if place is None:
            return
        blocks = np.zeros(ctx.view.capacity, np.int64)
        if place.endpoint is not None and _lives(place.endpoint, ctx.view.endpoints[place.slot]):
            blocks[place.slot] = place.blocks
        ctx.facts[self.provides[0]] = PlannedMatch(
            blocks=blocks,
            total_blocks=place.blocks,
            block_tokens=place.block_tokens,
            total_tokens=ctx.request.prompt_tokens,
            ahead=place.ahead,
        )

    # -- windows ----------------------------------------------------------------------------------

    def enter(self, held: Held) -> tuple[BurstWindow, bool]:
        """Let the request wait in the open window; whether that is new, and to be settled when it is over.

        Raises:
            NeedFailed: the window is full.
        """
        window, params = self._window, self._params
        fresh = window is None
        if window is None:
            window = self._window = BurstWindow(params.window_duration_ms / 1000)
        if len(window.held) == params.max_batch_size:
            raise NeedFailed(FULL, f"burst prefix batch full: maxBatchSize {params.max_batch_size} reached")
        window.held[held] = None
        held.window = window
        return window, fresh

    def settle(self, window: BurstWindow) -> Iterator[Held]:
        """The window is over, and the next request to come opens another. Its requests, each when it has its
        place: to be exhausted, in steps as small as one wants.

        The endpoints are those of the first step.
        """
        if self._window is window:
            self._window = None
        batch = list(window.held)
        window.held.clear()
        for held in batch:
            held.window = None
        return self._assigned(batch) if len(batch) > 1 else iter(batch)

    def _assigned(self, batch: Sequence[Held]) -> Iterator[Held]:
        slots = self._slots(batch[0].subset)
        endpoints = self._view.endpoints
        for number, assigned in assign([held.chains for held in batch], len(slots), self._rules):
            held = batch[number]
            if assigned is not None:
                slot = slots[assigned.replica]
                held.place = held.place._replace(endpoint=endpoints[slot], slot=slot, ahead=assigned.ahead)
            yield held

    def _slots(self, subset: Sequence[str] | None) -> list[int]:
        """Those that may be assigned, the preferred one of equals first."""
        view = self._view
        candidates = np.flatnonzero(view.candidates).tolist()
        if subset is not None:
            allowed = set(subset)
            candidates = [slot for slot in candidates if view.host_ports[slot] in allowed]
        running, endpoints = view.running.tolist(), view.endpoints
        return sorted(candidates, key=lambda slot: (running[slot], _name(endpoints[slot]), slot))


def _name(endpoint: Endpoint | None) -> str:
    return "" if endpoint is None else f"{endpoint.namespace}/{endpoint.name}"


def _lives(assigned: Endpoint, owner: Endpoint | None) -> bool:
    """Whether the slot is still that of the endpoint that it was assigned for."""
    return owner is not None and owner.uid == assigned.uid and owner.host_port == assigned.host_port
