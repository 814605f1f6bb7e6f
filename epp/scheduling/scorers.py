"""Scorers over the pool's columns. Each returns one float per slot; only those of `alive` mean anything."""

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from epp.pool.records import Floats, Mask
from epp.scheduling.ports import Ctx
from epp.scheduling.records import PREFIX_MATCH, FactKey

DEFAULT_PREFIX_PRODUCER = "approx-prefix-cache-producer"


class QueueScorer:
    """`queue-scorer`: (max q - q) / (max q - min q) over `alive`; 1 where all are equal.

    q is the scraped number of waiting requests. Stale: q is the larger of the last value and the requests
    this picker has in flight there. Never scraped, or no page told it: q is the requests in flight (the
    ledger alone).
    """

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        view = ctx.view
        queue = view.waiting
        # On booleans `a > b` is `a and not b`, in one call.
        doubtful = alive > (view.waiting_known > view.stale)
        if np.count_nonzero(doubtful):
            queue = np.where(doubtful, np.maximum(queue, ctx.load.requests), queue)
        of_alive = queue[alive]
        # Reading the value at `argmin` costs a third of `min`.
        shortest = of_alive.item(of_alive.argmin())
        longest = of_alive.item(of_alive.argmax())
        if shortest == longest:
            return np.ones(len(queue))
        scores: Floats = (longest - queue) / (longest - shortest)
        return scores


class KvCacheUtilizationScorer:
    """`kv-cache-utilization-scorer`: 1 - the scraped share of the KV cache in use.

    Stale: the last value counts. Never scraped: usage counts as 0, so a new endpoint is not taken for full.
    Scraped, but no page told it: usage counts as the median (the lower of two) of those in question that
    tell, so that an engine without the series neither draws all requests nor gets none.
    """

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        view = ctx.view
        usage = view.kv_usage
        untold = view.present > view.kv_known
        if np.count_nonzero(untold):
            told = np.sort(usage[alive & view.kv_known])
            usage = np.where(untold, told[(len(told) - 1) // 2] if len(told) else 0.0, usage)
        scores: Floats = 1.0 - usage
        return scores


class PrefixCacheScorerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `prefix-cache-scorer`.

    Attributes:
        prefix_match_info_producer_name: name of the plugin whose prefix match is scored.
        match_length_weight: share of the score given by the matched length, the rest by the matched share.
        match_length_scale_tokens: matched tokens at which the length part reaches 1.
    """

    prefix_match_info_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_PREFIX_PRODUCER
    match_length_weight: Annotated[float, Meta(ge=0, le=1)] = 0.0
    match_length_scale_tokens: Annotated[int, Meta(ge=1, le=2**53)] = 8192


class PrefixCacheScorer:
    """`prefix-cache-scorer`: w x min(1, matched tokens / L)^2 + (1 - w) x matched blocks / all blocks.

    w is `matchLengthWeight`, L `matchLengthScaleTokens`. No match fact (its producer failed) or a prompt
    shorter than a block: 0 for all. Scraped facts do not enter, so their age does not either.
    """

    def __init__(self, params: PrefixCacheScorerParams) -> None:
        self._key = FactKey(PREFIX_MATCH, params.prefix_match_info_producer_name)
        self._length_weight = params.match_length_weight
        self._scale_tokens = params.match_length_scale_tokens

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        match = ctx.facts.get(self._key)
        if match is None or match.total_blocks == 0:
            return np.zeros(len(alive))
        share: Floats = match.blocks / match.total_blocks
        weight = self._length_weight
        if weight == 0.0:
            return share
        length = np.minimum(match.blocks * (match.block_tokens / self._scale_tokens), 1.0)
        scores: Floats = weight * length * length + (1.0 - weight) * share
        return scores
