"""Saturation detectors: how full the pool is, and filters that spare its fullest endpoints."""

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from epp.durations import Duration
from epp.pool.records import Ints, Load, Mask, PoolView
from epp.scheduling.ports import Ctx

Headroom = Annotated[float, Meta(ge=0)]


class UtilizationDetectorParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `utilization-detector`.

    Attributes:
        queue_depth_threshold: waiting requests at which an endpoint is full.
        kv_cache_util_threshold: share of the KV cache in use at which it is.
        metrics_staleness_threshold: age at which scraped figures are not trusted any more.
        staleness_policy: what an endpoint without trusted figures counts in the mean: 1, or not at all.
        headroom: the filter's limits are the thresholds times 1 + headroom.
    """

    queue_depth_threshold: Annotated[int, Meta(ge=1)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    metrics_staleness_threshold: Duration = Duration(0.2)
    staleness_policy: Literal["saturated", "ignore"] = "saturated"
    headroom: Headroom = 0.0

    def __post_init__(self) -> None:
        if self.metrics_staleness_threshold <= 0:
            raise ValueError("metricsStalenessThreshold must be above 0, such as 200ms")


class UtilizationDetector:
    """`utilization-detector`: mean over endpoints of max(waiting / 5, KV usage / 0.8); 1 for an empty pool.

    5 and 0.8 stand for `queueDepthThreshold` and `kvCacheUtilThreshold`. An endpoint never scraped, or whose
    figures are stale, counts 1 (`stalenessPolicy: ignore` leaves it out; 0 where that leaves none), so with
    the default a pool whose pages cannot be read drops what may be shed. A figure that no page tells is 0.

    Stale means stale for the pool (older than `--metrics-staleness-threshold` and than three scrape
    intervals) and older than `metricsStalenessThreshold`. A picker that scrapes every 50 ms may call 200 ms
    stale; one that scrapes every 200 ms would call every endpoint so between two scrapes.

    As a filter it drops stale endpoints and those at or above a threshold times 1 + `headroom`; all are kept
    where none would be left. Never scraped is stale here too, so a new endpoint waits for its first page.
    """

    def __init__(self, params: UtilizationDetectorParams) -> None:
        self._queue = float(params.queue_depth_threshold)
        self._kv = params.kv_cache_util_threshold
        self._staleness_s = float(params.metrics_staleness_threshold)
        self._ignore_stale = params.staleness_policy == "ignore"
        self._queue_limit = self._queue * (1.0 + params.headroom)
        self._kv_limit = self._kv * (1.0 + params.headroom)

    def saturation(self, view: PoolView, load: Load, alive: Mask, now: float) -> float:
        if not np.count_nonzero(alive):
            return 1.0
        stale = self.stale(view, alive, now)
        fullness = np.maximum(view.waiting / self._queue, view.kv_usage / self._kv)
        if self._ignore_stale:
            fresh = alive > stale
            return float(fullness[fresh].mean()) if np.count_nonzero(fresh) else 0.0
        return float(np.where(stale, 1.0, fullness)[alive].mean())

    def stale(self, view: PoolView, alive: Mask, now: float) -> Mask:
        """Those of `alive` without trusted figures."""
        old = view.stale & (now - view.scraped_at > self._staleness_s)
        return alive & (old | ~view.present)

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        view = ctx.view
        below = (view.waiting < self._queue_limit) & (view.kv_usage < self._kv_limit)
        kept = (alive & below) > self.stale(view, alive, ctx.now)
        return kept if np.count_nonzero(kept) else alive


class ConcurrencyDetectorParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `concurrency-detector`.

    Attributes:
        max_concurrency: requests in flight at which an endpoint is full.
        max_token_concurrency: the same in tokens.
        concurrency_mode: which of the two counts; hybrid: the one nearer its limit.
        headroom: the filter's limits are these times 1 + headroom.
    """

    max_concurrency: Annotated[int, Meta(ge=1, le=2**53)] = 100
    headroom: Headroom = 0.0
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_token_concurrency: Annotated[int, Meta(ge=1, le=2**53)] = 1_000_000


class ConcurrencyDetector:
    """`concurrency-detector`: all in flight / (endpoints x `maxConcurrency`); 1 for an empty pool.

    In flight is what this picker sent and has not seen end; requests of other replicas are not seen, and
    scraped figures do not enter. Tokens are prompt tokens expected to be computed, until the first output
    token; output is not estimated. A new endpoint is idle capacity.

    As a filter it drops endpoints at or above the limit times 1 + `headroom`, rounded down to a whole number,
    and may leave none (the request is then answered 429).
    """

    def __init__(self, params: ConcurrencyDetectorParams) -> None:
        self._by_requests = params.concurrency_mode != "tokens"
        self._by_tokens = params.concurrency_mode != "requests"
        self._requests = params.max_concurrency
        self._tokens = params.max_token_concurrency
        self._request_limit = int(params.max_concurrency * (1.0 + params.headroom))
        self._token_limit = int(params.max_token_concurrency * (1.0 + params.headroom))

    def saturation(self, view: PoolView, load: Load, alive: Mask, now: float) -> float:
        endpoints = int(np.count_nonzero(alive))
        if not endpoints:
            return 1.0
        by_requests = (
            _total(load.requests, alive) / (endpoints * self._requests) if self._by_requests else 0.0
        )
        by_tokens = (
            _total(load.prefill_tokens, alive) / (endpoints * self._tokens) if self._by_tokens else 0.0
        )
        return max(by_requests, by_tokens)

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        kept = alive
        if self._by_requests:
            kept = kept & (ctx.load.requests < self._request_limit)
        if self._by_tokens:
            kept = kept & (ctx.load.prefill_tokens < self._token_limit)
        return kept


def _total(column: Ints, alive: Mask) -> int:
    return int(column[alive].sum())
