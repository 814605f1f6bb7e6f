"""The scorer that spreads prompts which nobody holds."""

from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from epp.pool.records import Floats, Ints, Mask, PoolView
from epp.scheduling.membership import SHOWN_ENDPOINTS
from epp.scheduling.pickers import tie_keys
from epp.scheduling.ports import Ctx
from epp.scheduling.records import PREFIX_MATCH, FactKey, Role, Ticket
from epp.scheduling.scorers import DEFAULT_PREFIX_PRODUCER

DEFAULT_LRU_SIZE: Final = 1024
_COLD: Final = "no-hit-lru-cold"


class NoHitLruParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `no-hit-lru-scorer`.

    Attributes:
        lru_size: how many endpoints are remembered; 0 = 1024.
        prefix_match_info_producer_name: whose prefix match says that a prompt is cold.
        prefix_plugin_type, prefix_plugin_name: deprecated; accepted for old files, without effect.
    """

    lru_size: Annotated[int, Meta(ge=0)] = DEFAULT_LRU_SIZE
    prefix_match_info_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_PREFIX_PRODUCER
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""

    def needs(self) -> tuple[FactKey, ...]:
        """The prefix match."""
        return (FactKey(PREFIX_MATCH, self.prefix_match_info_producer_name),)


class NoHitLruScorer:
    """`no-hit-lru-scorer`: where no endpoint holds anything of the prompt, the longest without such a prompt.

    Any match at one of `alive`: 0.5 for all. Else, n = endpoints in `alive`: the i-th that never had a cold
    prompt 1 - i / (n - 1); another max(0, 1 - (never used + p) / (n - 1)), p = its place among *all*
    endpoints remembered, oldest first; n = 1: 1. Because p counts endpoints that are not in question, too,
    several may score 0 though one of them was used long before the other. The field leaves the order of the
    never used to chance; here it is drawn anew for each request, by endpoint.

    The endpoints that a cold prompt was sent to (serving and prefill) become the latest.
    """

    def __init__(self, name: str, params: NoHitLruParams, view: PoolView) -> None:
        (self._match,) = params.needs()
        self._cold = FactKey(_COLD, name)
        self._size = params.lru_size or DEFAULT_LRU_SIZE
        self._view = view
        self._used: dict[int, None] = {}

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        match = ctx.facts.get(self._match)
        cold = match is None or not np.count_nonzero(match.blocks[alive])
        ctx.facts[self._cold] = cold
        if not cold:
            return np.full(len(alive), 0.5)
        return self._by_age(ctx, alive)

    def _by_age(self, ctx: Ctx, alive: Mask) -> Floats:
        slots = alive.nonzero()[0]
        if len(slots) == 1:
            return np.ones(len(alive))
        places: Ints = np.full(len(alive), -1)
        used = np.fromiter(self._used, np.int64, len(self._used))
        places[used] = np.arange(len(used))
        never = slots[places[slots] < 0]
        nonce = ctx.draw.getrandbits(64)
        if len(never) > 1:
            never = never[tie_keys(ctx.view.identity[never], nonce).argsort()]
        ranks = places + len(never)
        ranks[never] = np.arange(len(never))
        scores: Floats = np.maximum(1.0 - ranks / (len(slots) - 1), 0.0)
        return scores

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        """Remember where a cold prompt went."""
        if ctx.facts.get(self._cold):
            self._touch(ticket.slot)
            for leg in ticket.placement.legs:
                if leg.role is Role.PREFILL:
                    self._touch(leg.decision.slots[0])

    def _touch(self, slot: int) -> None:
        self._used.pop(slot, None)
        self._used[slot] = None
        if len(self._used) > self._size:
            del self._used[next(iter(self._used))]

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot; it never had a cold prompt."""

    def left(self, slot: int) -> None:
        """Forget when the slot's owner was used."""
        self._used.pop(slot, None)

    def state(self) -> dict[str, object]:
        """The endpoints remembered, the least recently used first; at most `SHOWN_ENDPOINTS` of them."""
        owners = self._view.endpoints
        names = [f"{owner.namespace}/{owner.name}" for slot in self._used if (owner := owners[slot])]
        return {
            "totalEndpoints": len(names),
            "maxEndpoints": SHOWN_ENDPOINTS,
            "truncated": len(names) > SHOWN_ENDPOINTS,
            "endpoints": names[:SHOWN_ENDPOINTS],
        }
