"""Which endpoint the computing one may fetch the prompt's KV blocks from."""

from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from epp import names
from epp.scheduling.ports import Ctx
from epp.scheduling.records import PREFIX_MATCH, Edits, FactKey, PrefixMatch, Ticket
from epp.scheduling.scorers import DEFAULT_PREFIX_PRODUCER

_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193
_UINT32: Final = 0xFFFFFFFF


class KvSourceParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `p2p-source-producer`.

    Attributes:
        prefix_match_info_producer_name: whose prefix match says what endpoints hold.
        min_cached_token_delta: tokens that the source must hold beyond the endpoint that computes.
        prefill_profile_name: profile whose endpoint computes the prompt, where it ran; else the serving one.
    """

    prefix_match_info_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_PREFIX_PRODUCER
    min_cached_token_delta: Annotated[int, Meta(ge=1)] = 1
    prefill_profile_name: Annotated[str, Meta(min_length=1)] = "prefill"

    def needs(self) -> tuple[FactKey, ...]:
        """The prefix match."""
        return (FactKey(PREFIX_MATCH, self.prefix_match_info_producer_name),)


class KvSource:
    """`p2p-source-producer`: the header `x-kv-cache-source-host-port` for the engine's sidecar.

    Sources are the candidates within one block of the most cached. One is drawn with weight 1 / (1 + waiting
    requests), by the FNV-1a hash of the request id, so that the same request draws the same source; ids that
    merely count are spread unevenly by it. The
    header is set if the source holds at least `minCachedTokenDelta` tokens more than the endpoint that
    computes. The default of 1 is lower than a transfer is worth: calibrate it. What is counted are the tokens
    of the prefix match, wherever they lie.
    """

    def __init__(self, params: KvSourceParams) -> None:
        (self._match,) = params.needs()
        self._min_delta = params.min_cached_token_delta
        self._prefill = params.prefill_profile_name

    def placed(self, ctx: Ctx, ticket: Ticket) -> Edits | None:
        match = ctx.facts.get(self._match)
        if match is None:
            return None
        computing = ticket.slot
        for leg in ticket.placement.legs:
            if leg.decision.profile == self._prefill:
                computing = leg.decision.slots[0]
        source = _source(ctx, match)
        if source is None or source == computing:
            return None
        lead = int(match.blocks[source] - match.blocks[computing]) * match.block_tokens
        if lead < self._min_delta:
            return None
        return ((names.KV_CACHE_SOURCE_HOST_PORT, ctx.view.host_ports[source].encode()),)


def _source(ctx: Ctx, match: PrefixMatch) -> int | None:
    """The slot to fetch from; None where no candidate holds anything."""
    view = ctx.view
    blocks = np.where(view.candidates, match.blocks, 0)
    most = int(blocks.max())
    if not most:
        return None
    slots = (blocks >= max(most - 1, 1)).nonzero()[0]
    # By endpoint, not by slot: where endpoints stand must not decide.
    slots = slots[view.identity[slots].argsort()]
    upto = np.cumsum(1.0 / (1.0 + view.waiting[slots]))
    target = fnv1a_32(ctx.request_id.encode("utf-8", "surrogatepass")) / 2**32 * upto[-1]
    found = min(int(np.searchsorted(upto, target, side="right")), len(slots) - 1)
    return int(slots[found])


def fnv1a_32(data: bytes) -> int:
    """The 32-bit FNV-1a hash."""
    value = _FNV_OFFSET
    for octet in data:
        value = (value ^ octet) * _FNV_PRIME & _UINT32
    return value
