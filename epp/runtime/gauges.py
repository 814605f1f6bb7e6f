"""Metrics that describe the pool and the plugins: renewed from time to time, not by requests."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, cast, runtime_checkable

import numpy as np

from epp.config.load import Assembly
from epp.kvcache.approximate import ApproximatePrefixProducer
from epp.kvcache.embeddings import EmbeddingsCacheProducer, EmbeddingsCounters
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint, Load, Mask, PoolView
from epp.pool.store import PoolStore
from epp.runtime.metrics import APPROXIMATE, Metrics
from epp.runtime.scrape import Counts
from epp.scheduling.inflight import InflightLoadProducer
from epp.scheduling.labels import DECODE_ROLES, PREFILL_ROLES, ByLabelParams
from epp.scheduling.membership import ByMembership, mask_where
from epp.scheduling.ports import SaturationDetector

LEDGER: Final = "inflight-ledger"
EFFECTIVE: Final = "effective"


@runtime_checkable
class _TellsStale(Protocol):
    """A saturation detector that judges the age of figures."""

    def stale(self, view: PoolView, alive: Mask, now: float) -> Mask: ...


class Gauges:
    """Renews what describes the pool, and ends the series of what is gone."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._pool = metrics.pool_name
        self._stages = _Stages()
        self._ratios: dict[str, tuple[EmbeddingsCounters, list[int], float]] = {}

    def pool(self, store: PoolStore, ledger: InflightLedger, held_bytes: int) -> None:
        """`held_bytes`: of requests and answers."""
        metrics = self._metrics
        self._means(store)
        self._endpoints(store, ledger)
        metrics.gauge("ready_endpoints", self._pool).set(int(np.count_nonzero(store.view.candidates)))
        metrics.gauge("extproc_held_bytes").set(held_bytes)
        metrics.total("ledger_overdrafts_total", ledger.overdrafts)

    def sources(self, counts: Counts) -> None:
        """What went wrong asking engines for their state."""
        for source_type, errors in counts.poll_errors.items():
            self._metrics.total("datalayer_poll_errors_total", errors, source_type)
        for types, errors in counts.extract_errors.items():
            self._metrics.total("datalayer_extract_errors_total", errors, *types)

    def plugins(self, assembly: Assembly, view: PoolView, load: Load, now: float) -> None:
        """`assembly`: the one in use."""
        self._saturation(assembly, view, load, now)
        self._loads(assembly, view)
        self._media(assembly, view)
        sizes: dict[tuple[str, ...], float] = {
            (name, APPROXIMATE): producer.size
            for name, producer in assembly.named.items()
            if isinstance(producer, ApproximatePrefixProducer)
        }
        self._metrics.show("prefix_indexer_size", sizes)

    def _means(self, store: PoolStore) -> None:
        """Means and deviations are over the fresh endpoints whose engine tells the figure. Where none does
        they are 0: the series are there in every pool.
        """
        view = store.view
        members = np.fromiter((slot for slot, _ in store.roster), np.intp, len(store.roster))
        fresh = members[view.present[members] & ~view.stale[members]]
        for name, column, told in (
            ("kv_cache_utilization", view.kv_usage, view.kv_known),
            ("queue_size", view.waiting, view.waiting_known),
            ("running_requests", view.running, view.running_known),
        ):
            values = column[fresh[told[fresh]]]
            mean, deviation = (values.mean(), values.std()) if len(values) else (0.0, 0.0)
            self._metrics.gauge(f"average_{name}", self._pool).set(mean)
            self._metrics.gauge(f"std_dev_{name}", self._pool).set(deviation)

    def _endpoints(self, store: PoolStore, ledger: InflightLedger) -> None:
        """The gauges of each endpoint. A removed one is in flight until its last request has ended; where
        its successor has its name, their loads are one series.
        """
        view, load = store.view, ledger.load
        waiting: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for slot, member in store.roster:
            if view.waiting_known[slot]:
                waiting[self._pool, member.name] += view.waiting[slot]
        requests: defaultdict[tuple[str, ...], float] = defaultdict(float)
        tokens: defaultdict[tuple[str, ...], float] = defaultdict(float)
        owners = set()
        for slot, owner in enumerate(view.endpoints):
            if owner is not None:
                owners.add((owner.name, owner.namespace, owner.port))
                labels = (owner.name, owner.namespace, LEDGER, "", "")
                requests[labels] += load.requests[slot]
                tokens[labels] += load.prefill_tokens[slot]
        self._metrics.show("per_endpoint_queue_size", waiting)
        self._metrics.show("inflight_requests", requests, LEDGER)
        self._metrics.show("inflight_tokens", tokens, LEDGER)
        self._metrics.forget_endpoints(owners)

    def _loads(self, assembly: Assembly, view: PoolView) -> None:
        """What producers count in flight, by endpoint and flow."""
        requests: defaultdict[tuple[str, ...], float] = defaultdict(float)
        tokens: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for name, producer in assembly.named.items():
            if not isinstance(producer, InflightLoadProducer):
                continue
            for load in producer.loads():
                owner = view.endpoints[load.slot]
                if owner is not None:
                    flow = self._metrics.flow(load.flow)
                    labels = (owner.name, owner.namespace, name, flow, str(load.priority))
                    requests[labels] += load.requests
                    tokens[labels] += load.tokens
        self._metrics.show("inflight_requests", requests)
        self._metrics.show("inflight_tokens", tokens)

    def saturation(self, assembly: Assembly, view: PoolView, load: Load, now: float) -> float:
        """Of the pool, as the detector in use tells."""
        return self._levels(assembly, view, load, now)[EFFECTIVE]

    def _saturation(self, assembly: Assembly, view: PoolView, load: Load, now: float) -> None:
        detector = assembly.named[assembly.detector]
        levels = self._levels(assembly, view, load, now)
        shown: dict[tuple[str, ...], float] = {(self._pool, stage): level for stage, level in levels.items()}
        self._metrics.show("flow_control_pool_saturation", shown)
        stale: dict[tuple[str, ...], float] = {}
        if isinstance(detector, _TellsStale):
            count = np.count_nonzero(detector.stale(view, view.candidates, now))
            stale[(assembly.detector,)] = float(count)
        self._metrics.show("flow_control_stale_endpoints", stale)

    def _levels(self, assembly: Assembly, view: PoolView, load: Load, now: float) -> dict[str, float]:
        detector = cast(SaturationDetector, assembly.named[assembly.detector])
        return self._stages.levels(detector, view, load, now)

    def _media(self, assembly: Assembly, view: PoolView) -> None:
        queries: dict[tuple[str, ...], float] = {}
        hits: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for name, producer in assembly.named.items():
            if not isinstance(producer, EmbeddingsCacheProducer):
                continue
            plugin, counters = (assembly.types[name], name), producer.counters
            for kind, count in counters.queries.items():
                queries[(*plugin, kind)] = count
            for kind, by_slot in counters.hits.items():
                for slot in np.flatnonzero(by_slot):
                    owner = view.endpoints[slot]
                    if owner is not None:
                        hits[(*plugin, f"{owner.namespace}/{owner.name}", kind)] += int(by_slot[slot])
            self._hit_ratios(plugin, counters)
        self._metrics.totals("encoder_cache_queries_total", queries)
        self._metrics.totals("encoder_cache_hits_total", hits)

    def _hit_ratios(self, plugin: tuple[str, str], counters: EmbeddingsCounters) -> None:
        """What was added since the last time; from the start where other counters took their place."""
        counts, total = counters.ratios.tolist(), counters.ratio_sum
        seen, before, total_before = self._ratios.get(plugin[1], (counters, [0] * len(counts), 0.0))
        if seen is not counters:
            before, total_before = [0] * len(counts), 0.0
        added = [count - earlier for count, earlier in zip(counts, before, strict=True)]
        self._metrics.histogram("encoder_cache_hit_ratio", *plugin).add(added, total - total_before)
        self._ratios[plugin[1]] = counters, counts, total


class _Stages:
    """How full the candidates of each stage are, and `effective`: the fuller stage.

    As the role filters route: an endpoint with both roles counts in both stages, one without a role decodes.
    A stage without candidates is left out.
    """

    def __init__(self) -> None:
        self._masks = [
            (stage, ByMembership(partial(mask_where, matches=_having_role(roles))))
            for stage, roles in (("prefill", PREFILL_ROLES), ("decode", DECODE_ROLES))
        ]

    def levels(
        self, detector: SaturationDetector, view: PoolView, load: Load, now: float
    ) -> dict[str, float]:
        levels: dict[str, float] = {}
        for stage, mask in self._masks:
            alive = view.candidates & mask.of(view)
            if np.count_nonzero(alive):
                levels[stage] = detector.saturation(view, load, alive, now)
        if not levels:
            return {EFFECTIVE: detector.saturation(view, load, view.candidates, now)}
        return {**levels, EFFECTIVE: max(levels.values())}


def _having_role(roles: ByLabelParams) -> Callable[[Endpoint], bool]:
    return lambda endpoint: roles.matches(endpoint.labels)
