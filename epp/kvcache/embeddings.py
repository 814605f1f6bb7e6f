"""Which endpoints hold the embeddings of a request's media: concluded from where media were sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from epp.kvcache.runs import SlotMask, lengths
from epp.pool.records import Floats, Ints, Mask, PoolView
from epp.scheduling.membership import SHOWN_ENDPOINTS
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    AnswerFact,
    AnswerHeaders,
    Cause,
    Ended,
    FactKey,
    Role,
    Ticket,
)

DEFAULT_EMBEDDINGS_PRODUCER: Final = "mm-embeddings-cache-producer"
EMBEDDINGS_MATCH: Final = "embeddings-match"
DEFAULT_CACHE_MIB: Final = 4096
MIB_PER_ITEM: Final = 2
# A look-up costs some microseconds a medium, and a body has room for very many of them.
MOST_MEDIA: Final = 256
RATIO_BOUNDS: Final = tuple(step / 10 for step in range(11))
_SENT: Final = "embeddings-sent"


class EmbeddingsCacheParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `mm-embeddings-cache-producer`.

    Attributes:
        cache_size_in_mb_per_server: size of an endpoint's encoder cache in MiB, 2 MiB an item; 0 = 4096.
    """

    cache_size_in_mb_per_server: Annotated[int, Meta(ge=0)] = msgspec.field(
        default=DEFAULT_CACHE_MIB, name="cacheSizeInMBPerServer"
    )


@dataclass(frozen=True, slots=True)
class EmbeddingsMatch:
    """How many of the request's different media each endpoint holds embeddings of.

    Attributes:
        items: by slot.
        total: different media of the request, 1 to `MOST_MEDIA`.
        digests: of these media.
    """

    items: Ints
    total: int
    digests: tuple[int, ...]


class EmbeddingsIndex:
    """Digests by slot, each slot with its order of use and a capacity. The one owner of this.

    Invariant: a digest is in `held[slot]` exactly if the slot's bit is set in `slots[digest]`; no mask is 0.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: dict[int, SlotMask] = {}
        self.held: dict[int, dict[int, None]] = {}

    def insert(self, digests: Sequence[int], slot: int) -> tuple[int, ...]:
        """The slot used these media now. Returns those that it did not hold before."""
        own = self.held.setdefault(slot, {})
        fresh: list[int] = []
        for digest in digests:
            if digest in own:
                del own[digest]
            else:
                fresh.append(digest)
                self.slots[digest] = self.slots.get(digest, 0) | 1 << slot
            own[digest] = None
        excess = len(own) - self.capacity
        if excess > 0:
            self.remove(list(islice(own, excess)), slot)
        return tuple(fresh)

    def remove(self, digests: Sequence[int], slot: int) -> None:
        """The slot holds none of these."""
        own = self.held.get(slot, {})
        for digest in digests:
            if digest in own:
                del own[digest]
                left = self.slots[digest] & ~(1 << slot)
                if left:
                    self.slots[digest] = left
                else:
                    del self.slots[digest]

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        self.remove(list(self.held.get(slot, ())), slot)
        self.held.pop(slot, None)


@dataclass(slots=True)
class EmbeddingsCounters:
    """What look-ups found, since the start.

    Attributes:
        queries: media looked up, by kind.
        hits: media that an endpoint held, by kind and slot; a slot starts at 0 with each owner.
        ratios: look-ups of one endpoint for one request by the share of its media held; the share is at
            most the bound in `RATIO_BOUNDS` at the same place. ratio_sum: of the shares.
    """

    queries: dict[str, int] = field(default_factory=dict)
    hits: dict[str, Ints] = field(default_factory=dict)
    ratios: Ints = field(default_factory=lambda: np.zeros(len(RATIO_BOUNDS), np.int64))
    ratio_sum: float = 0.0


class EmbeddingsCacheProducer:
    """`mm-embeddings-cache-producer`: the fact `EmbeddingsMatch`, for requests with media.

    A placed request's media are entered for the endpoints that encode them: those of its encode leg, else
    the serving one. Each endpoint keeps the latest `cacheSizeInMBPerServer` / 2 MiB of them, whatever their
    real size. A request that the endpoint refused is taken back; one that the proxy sent elsewhere moves.
    """

    def __init__(self, name: str, params: EmbeddingsCacheParams, view: PoolView) -> None:
        self.provides: tuple[FactKey, ...] = (FactKey(EMBEDDINGS_MATCH, name),)
        self.needs: tuple[FactKey, ...] = ()
        size_mib = params.cache_size_in_mb_per_server or DEFAULT_CACHE_MIB
        self.index = EmbeddingsIndex(max(size_mib // MIB_PER_ITEM, 1))
        self.counters = EmbeddingsCounters()
        self._sent = FactKey(_SENT, name)
        self._view = view

    def produce(self, ctx: Ctx) -> None:
        """Look the request's media up, each once; the first `MOST_MEDIA` of them."""
        media = ctx.request.media
        if not media:
            return
        kinds = dict(islice({medium.digest: medium.kind for medium in media}.items(), MOST_MEDIA))
        items = np.zeros(ctx.view.capacity, np.int64)
        for digest, kind in kinds.items():
            self.counters.queries[kind] = self.counters.queries.get(kind, 0) + 1
            if holders := self.index.slots.get(digest):
                held = lengths([(holders, 1)], ctx.view.capacity)
                self._count_hits(kind, held)
                items += held
        self._count_ratios(items[ctx.view.candidates], len(kinds))
        ctx.facts[self.provides[0]] = EmbeddingsMatch(items, len(kinds), tuple(kinds))

    def _count_hits(self, kind: str, held: Ints) -> None:
        counters = self.counters
        hits = counters.hits.get(kind)
        if hits is None or len(hits) < len(held):
            wider = held.copy()
            if hits is not None:
                wider[: len(hits)] += hits
            counters.hits[kind] = wider
        else:
            hits += held

    def _count_ratios(self, items: Ints, total: int) -> None:
        steps = len(RATIO_BOUNDS) - 1
        places = -(-items * steps // total)  # rounded up, exactly
        self.counters.ratios += np.bincount(places, minlength=len(RATIO_BOUNDS))
        self.counters.ratio_sum += int(items.sum()) / total

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        """Enter the media where they will be encoded."""
        match = ctx.facts.get(self.provides[0])
        if match is None:
            return
        for leg in ticket.placement.legs:
            if leg.role is Role.ENCODE and leg is not ticket.placement.serving:
                for slot in leg.decision.slots:
                    self.index.insert(match.digests, slot)
                return
        ctx.facts[self._sent] = ticket.slot, self.index.insert(match.digests, ticket.slot)

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        """Follow the request to the endpoint that serves it; take back what it refused."""
        match fact:
            case AnswerHeaders() | Ended() if (sent := ticket.facts.get(self._sent)) is not None:
                slot, fresh = sent
                if isinstance(fact, Ended):
                    if _refused(ticket, fact):
                        self.index.remove(fresh, slot)
                elif slot != ticket.slot:
                    self.index.remove(fresh, slot)
                    digests = ticket.facts[self.provides[0]].digests
                    ticket.facts[self._sent] = ticket.slot, self.index.insert(digests, ticket.slot)

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot; its cache is taken for empty."""

    def left(self, slot: int) -> None:
        """Forget what the slot's owner held."""
        self.index.clear(slot)
        for hits in self.counters.hits.values():
            if slot < len(hits):
                hits[slot] = 0

    def state(self) -> dict[str, object]:
        """Items by endpoint, most first; at most `SHOWN_ENDPOINTS` of them, and no digests."""
        owners = self._view.endpoints
        known = sorted(f"{owner.namespace}/{owner.name}" for owner in owners if owner is not None)
        pods = sorted(
            (-len(own), f"{owner.namespace}/{owner.name}")
            for slot, own in self.index.held.items()
            if (owner := owners[slot]) is not None
        )
        return {
            "podList": known[:SHOWN_ENDPOINTS],
            "totalKnownPods": len(known),
            "pods": [{"pod": name, "items": -items} for items, name in pods[:SHOWN_ENDPOINTS]],
            "totalPods": len(pods),
            "maxPods": SHOWN_ENDPOINTS,
        }


def _refused(ticket: Ticket, ended: Ended) -> bool:
    return ticket.status >= 400 or (ticket.status == 0 and ended.cause is Cause.ERROR)


class EmbeddingsCacheScorer:
    """`mm-embeddings-cache-scorer`: the share of the request's different media that the endpoint holds.

    Every medium counts the same, a thumbnail and a film. No media, or no match fact (its producer failed):
    0 for all.
    """

    def __init__(self) -> None:
        self._key = FactKey(EMBEDDINGS_MATCH, DEFAULT_EMBEDDINGS_PRODUCER)

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        match = ctx.facts.get(self._key)
        if match is None:
            return np.zeros(len(alive))
        scores: Floats = match.items / match.total
        return scores
