"""The filter that keeps to endpoints with a warm cache, unless they are too busy."""

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from epp.pool.records import Mask
from epp.scheduling.filters import DEFAULT_INFLIGHT_PRODUCER
from epp.scheduling.ports import Ctx
from epp.scheduling.records import INFLIGHT_LOAD, PREFIX_MATCH, FactKey
from epp.scheduling.scorers import DEFAULT_PREFIX_PRODUCER


class PrefixAffinityParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `prefix-cache-affinity-filter`.

    Attributes:
        affinity_threshold: share of the prompt's blocks from which an endpoint is sticky; 0 = never filter.
        exploration_probability: how often everything is kept, to try other endpoints.
        max_ttft_penalty_ms: how much longer the best sticky endpoint may take to the first token than the
            best other one; 0 = any time.
        ttft_source: `latencyPredictor` is not supported yet.
        peak_prefill_throughput: tokens a second; the default is that of one deployment of the field (Qwen
            32B on two H100), so it wants to be measured.
        latency_prediction_info_producer_name: read with `latencyPredictor` only.
    """

    affinity_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.80
    exploration_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_ttft_penalty_ms: Annotated[float, Meta(ge=0)] = msgspec.field(
        default=18000.0, name="maxTTFTPenaltyMs"
    )
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    peak_prefill_throughput: Annotated[float, Meta(ge=0)] = 15928.0
    prefix_match_info_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_PREFIX_PRODUCER
    in_flight_load_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_INFLIGHT_PRODUCER
    latency_prediction_info_producer_name: str = ""

    def __post_init__(self) -> None:
        if self.ttft_source == "latencyPredictor":
            raise ValueError(
                "ttftSource latencyPredictor is not supported yet: it needs predicted-latency-producer; "
                "prefillThroughput is supported"
            )
        if self.max_ttft_penalty_ms > 0 and self.peak_prefill_throughput == 0:
            raise ValueError("peakPrefillThroughput must be > 0 when ttftSource is prefillThroughput")

    def needs(self) -> tuple[FactKey, ...]:
        """The prefix match; the load unless any penalty is accepted."""
        match = FactKey(PREFIX_MATCH, self.prefix_match_info_producer_name)
        load = FactKey(INFLIGHT_LOAD, self.in_flight_load_producer_name)
        return (match, load) if self.max_ttft_penalty_ms else (match,)


class PrefixAffinityFilter:
    """`prefix-cache-affinity-filter`: keep the sticky endpoints: matched / all blocks >= `affinityThreshold`.

    Everything is kept if there is at most one endpoint, if none is sticky, with `explorationProbability`, and
    if (lowest TTFT of the sticky - lowest TTFT of the others) > `maxTTFTPenaltyMs`. TTFT in ms = tokens in
    flight / `peakPrefillThroughput` x 1000: it knows nothing of the tokens that are being generated, nor of
    how long the request at hand takes.

    No match fact, or a prompt shorter than a block: none is sticky. No load fact (its producer failed):
    everything is kept.
    """

    def __init__(self, params: PrefixAffinityParams) -> None:
        self._match = FactKey(PREFIX_MATCH, params.prefix_match_info_producer_name)
        self._load = FactKey(INFLIGHT_LOAD, params.in_flight_load_producer_name)
        self._threshold = params.affinity_threshold
        self._exploration = params.exploration_probability
        self._max_penalty_ms = params.max_ttft_penalty_ms
        self._throughput = params.peak_prefill_throughput

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        if self._threshold <= 0 or np.count_nonzero(alive) <= 1:
            return alive
        if self._exploration and ctx.draw.random() < self._exploration:
            return alive
        match = ctx.facts.get(self._match)
        if match is None or not match.total_blocks:
            return alive
        sticky: Mask = (match.blocks / match.total_blocks >= self._threshold) & alive
        if not np.count_nonzero(sticky):
            return alive
        return alive if self._too_busy(ctx, sticky, alive > sticky) else sticky

    def _too_busy(self, ctx: Ctx, sticky: Mask, others: Mask) -> bool:
        if not self._max_penalty_ms or not np.count_nonzero(others):
            return False
        load = ctx.facts.get(self._load)
        if load is None:
            return True
        best_sticky, best_other = int(load.tokens[sticky].min()), int(load.tokens[others].min())
        penalty_ms = best_sticky / self._throughput * 1000 - best_other / self._throughput * 1000
        return penalty_ms > self._max_penalty_ms
