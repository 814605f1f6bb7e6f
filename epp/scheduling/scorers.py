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
        return _fewest_first(_with_in_flight(ctx, alive, view.waiting, view.waiting_known), alive)


class RunningRequestsSizeScorer:
    """`running-requests-size-scorer`: (max r - r) / (max r - min r) over `alive`; 1 where all are equal.

    r is the scraped number of running requests; an old or missing figure is treated as in `QueueScorer`.
    """

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        view = ctx.view
        return _fewest_first(_with_in_flight(ctx, alive, view.running, view.running_known), alive)


class LoadAwareScorerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `load-aware-scorer`.

    Attributes:
        threshold: waiting requests at which the score reaches 0.
    """

    threshold: Annotated[int, Meta(ge=1, le=2**53)] = 128


class LoadAwareScorer:
    """`load-aware-scorer`: 0.5 x (1 - min(q, T) / T), T being `threshold`.

    The formula of the field ends at 0.5, for an empty queue: its weight in a profile counts half. q, and
    what an old or missing figure does to it, is as in `QueueScorer`.
    """

    def __init__(self, params: LoadAwareScorerParams) -> None:
        self._threshold = float(params.threshold)

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        view = ctx.view
        queue = _with_in_flight(ctx, alive, view.waiting, view.waiting_known)
        scores: Floats = 0.5 * (1.0 - np.minimum(queue, self._threshold) / self._threshold)
        return scores


def _with_in_flight(ctx: Ctx, alive: Mask, scraped: Floats, known: Mask) -> Floats:
    """The scraped figure; where it is old or unknown, the requests in flight if they are more."""
    # On booleans `a > b` is `a and not b`, in one call.
    doubtful = alive > (known > ctx.view.stale)
    if not np.count_nonzero(doubtful):
        return scraped
    return np.where(doubtful, np.maximum(scraped, ctx.load.requests), scraped)


def _fewest_first(figure: Floats, alive: Mask) -> Floats:
    """1 for the smallest of `alive`, 0 for the largest, linear between; 1 where all are equal."""
    of_alive = figure[alive]
    # Reading the value at `argmin` costs a third of `min`.
    least = of_alive.item(of_alive.argmin())
    most = of_alive.item(of_alive.argmax())
    if least == most:
        return np.ones(len(figure))
    scores: Floats = (most - figure) / (most - least)
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


class LoraAffinityScorer:
    """`lora-affinity-scorer`: 1 where the adapter runs, else 0.8 where another fits, else 0.6 where it waits.

    Everywhere else, and where the engine tells of no adapters, 0. Another fits where fewer different adapters
    run or wait than may be loaded at once; one that both runs and waits counts once (the field's picker
    counts it twice, and engines that list one set under both names then look full at half). The name looked
    for is the one the engine is asked for. A base model is no adapter, and the formula does not know that:
    its requests too get 0.8 where an adapter would fit.

    Stale: what was told last counts. Never scraped: 0, as for an engine without adapters.
    """

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        adapters = ctx.view.adapters
        if adapters is None:
            return np.zeros(len(alive))
        fits = adapters.count < adapters.most
        scores = np.where(fits, 0.8, 0.0)
        adapter = ctx.request.target_model
        if (waiting := adapters.waiting.get(adapter)) is not None:
            scores[waiting > fits] = 0.6
        if (running := adapters.running.get(adapter)) is not None:
            scores[running] = 1.0
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
