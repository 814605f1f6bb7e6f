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
from epp.runtime.metrics_table import collectors
from epp.scheduling.records import Cause, Ended, PrefixMatch, Ticket

LABEL_VALUES = 1000
LABEL_SETS = 4096
OTHER = "other"

_PRIORITY = "0"
_LEDGER = "inflight-ledger"
_APPROXIMATE = "approx-prefix-cache-producer"


@dataclass(slots=True)
class Bounded:
    """Client-made label values: the first `limit` different ones pass, the rest become `other`."""

    limit: int = 1000
    _seen: set[str] = field(default_factory=set)

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self.limit:
            return "other"
        self._seen.add(value)
        return value


class _Children:
    """The collectors of one (model, target, flow) bound once."""

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

    def __init__(self, made: dict[str, Counter | Gauge | Histogram], values: tuple[str, ...]) -> None:
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
        self.registry = CollectorRegistry()
        self._made = collectors(self.registry)
        self._pool = pool
        self._models = Bounded()
        self._flows = Bounded()
        self._children: dict[tuple[str, str, str], _Children] = {}
        self._attempts: dict[tuple[str, str], Counter] = {}
        self._prefix: dict[str, tuple[Histogram, Histogram]] = {}
        self._scrapes_failed = 0
        self._shown: set[tuple[str, str]] = set()
        self._scheduler = cast(Histogram, self._made["scheduler_e2e_duration_seconds"])
        self._processing = cast(Histogram, self._made["request_processing_duration_seconds"])
        self.gauge("extproc_streams_inflight").set(0)
        self._made["info"].labels(*build).set(1)  # type: ignore[union-attr]

    def gauge(self, name: str, *labels: str) -> Gauge:
        found = self._made[name]
        return cast(Gauge, found.labels(*labels) if labels else found)

    def counter(self, name: str, *labels: str) -> Counter:
        found = self._made[name]
        return cast(Counter, found.labels(*labels) if labels else found)

    # -- one request ------------------------------------------------------------------------------

    def _of(self, prepared: Prepared) -> _Children:
        request = prepared.request
        key = (request.model, request.target_model, prepared.flow)
        found = self._children.get(key)
        if found is None:
            values = (self._models(key[0]), self._models(key[1]), self._flows(key[2]), "0")
            found = _Children(self._made, values)
            if len(self._children) < 4096:
                self._children[key] = found
        return found

    def decided(self, reading_s: float, choosing_s: float) -> None:
        """Time to read a body and to choose an endpoint."""
        self._scheduler.observe(choosing_s)
        self._processing.observe(reading_s + choosing_s)

    def refused(self, prepared: Prepared | None, error: RequestError) -> None:
        values = self._of(prepared).values if prepared else ("", "", "", "0")
        self.counter("request_error_total", *values, str(error.status)).inc()
        if prepared is not None:
            self.counter("scheduler_attempts_total", "failure", values[1], "", "", "").inc()

    def placed(self, prepared: Prepared, ticket: Ticket) -> None:
        of = self._of(prepared)
        of.total.inc()
        of.running.inc()
        of.request_bytes.observe(prepared.body_bytes)
        endpoint = ticket.placement.serving.endpoints[0]
        key = (endpoint.uid, of.values[1])
        attempts = self._attempts.get(key)
        if attempts is None:
            attempts = self.counter(
                "scheduler_attempts_total",
                *("success", of.values[1], endpoint.name, endpoint.namespace, str(endpoint.port)),
            )
            if len(self._attempts) < 65536:
                self._attempts[key] = attempts
        attempts.inc()
        for fact_key, fact in ticket.facts.items():
            self._prefix_hit(fact_key.producer, fact, ticket.slot)

    def _prefix_hit(self, producer: str, match: PrefixMatch, slot: int) -> None:
        bound = self._prefix.get(producer)
        if bound is None:
            labels = (producer, "approx-prefix-cache-producer")
            bound = (
                cast(Histogram, self._made["prefix_indexer_hit_ratio"].labels(*labels)),
                cast(Histogram, self._made["prefix_indexer_hit_bytes"].labels(*labels)),
            )
            self._prefix[producer] = bound
        blocks = int(match.blocks[slot])
        bound[0].observe(blocks / match.total_blocks if match.total_blocks else 0.0)
        bound[1].observe(blocks * match.block_tokens * 4)

    def first_token(self, prepared: Prepared, ticket: Ticket, now: float) -> None:
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

    def pool(self, view: PoolView, load: Load, held_bytes: int) -> None:
        """Renew the gauges that describe the pool."""
        fresh = view.present & ~view.stale
        for name, column in (
            ("kv_cache_utilization", view.kv_usage),
            ("queue_size", view.waiting),
            ("running_requests", view.running),
        ):
            values = column[fresh]
            self.gauge(f"average_{name}", self._pool).set(values.mean() if len(values) else 0.0)
            self.gauge(f"std_dev_{name}", self._pool).set(values.std() if len(values) else 0.0)
        self.gauge("ready_endpoints", self._pool).set(int(np.count_nonzero(view.candidates)))
        self.gauge("extproc_held_bytes").set(held_bytes)
        shown = set()
        for slot, endpoint in enumerate(view.endpoints):
            if endpoint is None:
                continue
            shown.add((endpoint.name, endpoint.namespace))
            self.gauge("per_endpoint_queue_size", self._pool, endpoint.name).set(view.waiting[slot])
            labels = (endpoint.name, endpoint.namespace, "inflight-ledger", "", "")
            self.gauge("inflight_requests", *labels).set(load.requests[slot])
            self.gauge("inflight_tokens", *labels).set(load.prefill_tokens[slot])
        self._forget(self._shown - shown)
        self._shown = shown

    def _forget(self, gone: Iterable[tuple[str, str]]) -> None:
        for name, namespace in gone:
            self._made["per_endpoint_queue_size"].remove(self._pool, name)
            for gauge in ("inflight_requests", "inflight_tokens"):
                self._made[gauge].remove(name, namespace, "inflight-ledger", "", "")

    def scrapes_failed(self, total: int) -> None:
        """`total` since the start."""
        self.counter("datalayer_poll_errors_total", "metrics-data-source").inc(total - self._scrapes_failed)
        self._scrapes_failed = total

    def indexer_size(self, producer: str, size: int) -> None:
        self.gauge("prefix_indexer_size", producer, "approx-prefix-cache-producer").set(size)
