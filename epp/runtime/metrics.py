"""Prometheus metrics: what each row of the table is fed with.

Children are bound once per label set; label values that come from clients are bounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epp.director import Prepared
from epp.errors import RequestError
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime.metrics_table import LABEL_SETS, LABEL_VALUES, OTHER, collectors
from epp.scheduling.records import Cause, Ended, PrefixMatch, Ticket

_PRIORITY = "0"
_BYTES_PER_TOKEN = 4  # as prompts are cut into blocks
_LEDGER = "inflight-ledger"
_APPROXIMATE = "approx-prefix-cache-producer"


@dataclass(slots=True)
class Bounded:
    """Client-made label values: the first `limit` different ones pass, the rest become `other`."""

    limit: int = LABEL_VALUES
    _seen: set[str] = field(default_factory=set)

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self.limit:
            return OTHER
        self._seen.add(value)
        return value


_Address = tuple[str, str, int]  # name, namespace, port
_Collectors = dict[str, Counter | Gauge | Histogram]


class _Children:
    """The collectors of one model, target and flow, bound once."""

    __slots__ = (
        "cached",
        "duration",
        "input",
        "ntpot",
        "output",
        "request_bytes",
        "response_bytes",
        "running",
        "total",
        "tpot",
        "ttft",
        "values",
    )

    def __init__(self, made: _Collectors, values: tuple[str, ...]) -> None:
        def histogram(name: str, *more: str) -> Histogram:
            return cast(Histogram, made[name].labels(*values, *more))

        self.values = values
        self.total = cast(Counter, made["request_total"].labels(*values))
        self.running = cast(Gauge, made["request_running"].labels(*values))
        self.duration = histogram("request_duration_seconds")
        self.request_bytes = histogram("request_size_bytes")
        self.response_bytes = histogram("response_size_bytes")
        self.input = histogram("request_input_tokens")
        self.output = histogram("request_output_tokens")
        self.cached = histogram("request_cached_tokens")
        self.ntpot = histogram("request_ntpot_seconds")
        self.ttft = {flag: histogram("request_ttft_seconds", str(flag).lower()) for flag in (False, True)}
        self.tpot = histogram("request_streaming_tpot_seconds")


class Metrics:
    """What the picker counts. Called from the event loop's thread only; rendered by another."""

    def __init__(self, pool: str, build: tuple[str, str]) -> None:
        """`build`: commit and build reference."""
        self.registry = CollectorRegistry()
        self._made = collectors(self.registry)
        self._pool = pool
        self._models = Bounded()
        self._flows = Bounded()
        self._children: dict[tuple[str, ...], _Children] = {}
        self._attempts: dict[_Address, dict[str, Counter]] = {}
        self._prefix: dict[str, tuple[Histogram, Histogram]] = {}
        self._totals: dict[str, int] = {}
        self._shown: dict[str, set[tuple[str, ...]]] = {}
        self._scheduler = self.histogram("scheduler_e2e_duration_seconds")
        self._processing = self.histogram("request_processing_duration_seconds")
        self.gauge("info", *build).set(1)

    def gauge(self, name: str, *labels: str) -> Gauge:
        return cast(Gauge, self._made[name].labels(*labels) if labels else self._made[name])

    def counter(self, name: str, *labels: str) -> Counter:
        return cast(Counter, self._made[name].labels(*labels) if labels else self._made[name])

    def histogram(self, name: str, *labels: str) -> Histogram:
        return cast(Histogram, self._made[name].labels(*labels) if labels else self._made[name])

    # -- one request ------------------------------------------------------------------------------

    def _of(self, prepared: Prepared) -> _Children:
        request = prepared.request
        values = (
            self._models(request.model),
            self._models(request.target_model),
            self._flows(prepared.flow),
            _PRIORITY,
        )
        if values not in self._children and len(self._children) >= LABEL_SETS:
            values = (OTHER, OTHER, OTHER, _PRIORITY)
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = _Children(self._made, values)
        return found

    def decided(self, reading_s: float, choosing_s: float) -> None:
        """Time to read a body and to choose an endpoint."""
        self._scheduler.observe(choosing_s)
        self._processing.observe(reading_s + choosing_s)

    def refused(self, prepared: Prepared | None, error: RequestError) -> None:
        """`prepared`: None where the request could not be read."""
        values = self._of(prepared).values if prepared else ("", "", "", _PRIORITY)
        self.counter("request_error_total", *values, str(error.status)).inc()
        if prepared is not None:
            self.counter("scheduler_attempts_total", "failure", values[1], "", "", "").inc()

    def placed(self, prepared: Prepared, ticket: Ticket) -> None:
        of = self._of(prepared)
        of.total.inc()
        of.running.inc()
        of.request_bytes.observe(prepared.body_bytes)
        self._attempt(ticket.placement.serving.endpoints[0], of.values[1])
        for key, match in ticket.facts.items():
            self._prefix_hit(key.producer, match, ticket.slot)
        for leg in ticket.placement.legs:
            for timing in leg.decision.timings:
                labels = (timing.extension_point, timing.plugin_type, timing.plugin_name)
                self.histogram("plugin_duration_seconds", *labels).observe(timing.seconds)

    def _attempt(self, endpoint: Endpoint, target: str) -> None:
        by_target = self._attempts.setdefault((endpoint.name, endpoint.namespace, endpoint.port), {})
        attempts = by_target.get(target)
        if attempts is None:
            labels = ("success", target, endpoint.name, endpoint.namespace, str(endpoint.port))
            attempts = by_target[target] = self.counter("scheduler_attempts_total", *labels)
        attempts.inc()

    def _prefix_hit(self, producer: str, match: PrefixMatch, slot: int) -> None:
        bound = self._prefix.get(producer)
        if bound is None:
            bound = self._prefix[producer] = (
                self.histogram("prefix_indexer_hit_ratio", producer, _APPROXIMATE),
                self.histogram("prefix_indexer_hit_bytes", producer, _APPROXIMATE),
            )
        blocks = int(match.blocks[slot])
        bound[0].observe(blocks / match.total_blocks if match.total_blocks else 0.0)
        bound[1].observe(blocks * match.block_tokens * _BYTES_PER_TOKEN)

    def first_token(self, prepared: Prepared, ticket: Ticket, now: float) -> None:
        if ticket.status < 400:
            self._of(prepared).ttft[ticket.streaming].observe(now - prepared.received_at)

    def ended(self, prepared: Prepared, ticket: Ticket, fact: Ended, now: float) -> None:
        of = self._of(prepared)
        of.running.dec()
        took_s = now - prepared.received_at
        if ticket.status >= 400 or fact.cause is not Cause.NATURAL:
            code = str(ticket.status) if ticket.status >= 400 else str(fact.cause)
            self.counter("request_error_total", *of.values, code).inc()
        if fact.cause is not Cause.NATURAL:
            return
        of.duration.observe(took_s)
        of.response_bytes.observe(fact.bytes)
        usage = fact.usage
        if usage is None:
            return
        of.input.observe(usage.prompt_tokens)
        of.output.observe(usage.output_tokens)
        if usage.cached_tokens is not None:
            of.cached.observe(usage.cached_tokens)
        if usage.output_tokens > 0:
            of.ntpot.observe(took_s / usage.output_tokens)
        if ticket.streaming and ticket.first_token_at is not None and usage.output_tokens > 1:
            of.tpot.observe((now - ticket.first_token_at) / (usage.output_tokens - 1))

    # -- the pool ---------------------------------------------------------------------------------

    def pool(self, store: PoolStore, ledger: InflightLedger, held_bytes: int) -> None:
        """Renew what describes the pool, and forget endpoints that are gone.

        Means and deviations are over the fresh endpoints whose engine tells the figure. Where none does they
        are 0: the series are there in every pool.
        """
        view = store.view
        members = np.fromiter((slot for slot, _ in store.roster), np.intp, len(store.roster))
        fresh = members[view.present[members] & ~view.stale[members]]
        for name, column, told in (
            ("kv_cache_utilization", view.kv_usage, view.kv_known),
            ("queue_size", view.waiting, view.waiting_known),
            ("running_requests", view.running, view.present),
        ):
            values = column[fresh[told[fresh]]]
            self.gauge(f"average_{name}", self._pool).set(values.mean() if len(values) else 0.0)
            self.gauge(f"std_dev_{name}", self._pool).set(values.std() if len(values) else 0.0)
        self.gauge("ready_endpoints", self._pool).set(int(np.count_nonzero(view.candidates)))
        self.gauge("extproc_held_bytes").set(held_bytes)
        self.total("ledger_overdrafts_total", ledger.overdrafts)
        self._endpoints(store, ledger)

    def _endpoints(self, store: PoolStore, ledger: InflightLedger) -> None:
        """The gauges of each endpoint. A removed one is in flight until its last request has ended; where
        its successor has its name, their loads are one series.
        """
        view, load = store.view, ledger.load
        waiting: dict[tuple[str, ...], float] = {}
        requests: dict[tuple[str, ...], float] = {}
        tokens: dict[tuple[str, ...], float] = {}
        for slot, member in store.roster:
            if view.waiting_known[slot]:
                labels: tuple[str, ...] = (self._pool, member.name)
                waiting[labels] = waiting.get(labels, 0.0) + view.waiting[slot]
        owners = set()
        for slot, owner in enumerate(view.endpoints):
            if owner is not None:
                owners.add((owner.name, owner.namespace, owner.port))
                labels = (owner.name, owner.namespace, _LEDGER, "", "")
                requests[labels] = requests.get(labels, 0) + load.requests[slot]
                tokens[labels] = tokens.get(labels, 0) + load.prefill_tokens[slot]
        self._show("per_endpoint_queue_size", waiting)
        self._show("inflight_requests", requests)
        self._show("inflight_tokens", tokens)
        for name, namespace, port in self._attempts.keys() - owners:
            for target in self._attempts.pop((name, namespace, port)):
                labels = ("success", target, name, namespace, str(port))
                self._made["scheduler_attempts_total"].remove(*labels)

    def _show(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Make these the series of a gauge."""
        for labels, value in values.items():
            self.gauge(name, *labels).set(value)
        for labels in self._shown.get(name, set()) - values.keys():
            self._made[name].remove(*labels)
        self._shown[name] = set(values)

    def total(self, name: str, total: int, *labels: str) -> None:
        """Bring a counter to a count that is kept elsewhere; one series of each name."""
        self.counter(name, *labels).inc(total - self._totals.get(name, 0))
        self._totals[name] = total

    def indexer_size(self, producer: str, size: int) -> None:
        """Of an approximate prefix producer."""
        self.gauge("prefix_indexer_size", producer, _APPROXIMATE).set(size)
