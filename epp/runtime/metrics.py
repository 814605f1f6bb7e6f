"""Prometheus metrics: one table, from which both the collectors and docs/metrics.md are made.

Names, labels and buckets are the field's. Children are bound once per label set; label values that come
from clients are bounded.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epp import names
from epp.director import Prepared
from epp.errors import RequestError
from epp.pool.records import Load, PoolView
from epp.scheduling.records import Cause, Ended, PrefixMatch, Ticket

_DURATION = (
    *(
        0.005,
        0.025,
        0.05,
        0.1,
        0.2,
        0.4,
        0.6,
        0.8,
        1,
        1.25,
        1.5,
        2,
        3,
        4,
        5,
        6,
        8,
        10,
        15,
        20,
        30,
        45,
        60,
        120,
    ),
    *(180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
_TTFT = tuple(bound for bound in _DURATION if bound <= 120)
_TPOT = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8),
    *(1.0, 2.0),
)
_NTPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SCHEDULER = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_PROCESSING = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_POWERS = (1, *(2**power for power in range(3, 21)))
_REQUEST_BYTES = tuple(2**power for power in range(6, 31))
_RESPONSE_BYTES = (1, *(2**power for power in range(3, 17)))
_RATIO = tuple(step / 10 for step in range(11))
_HIT_BYTES = (0, *(2**power for power in range(4, 17)))

_MODEL = ("model_name", "target_model_name", "fairness_id", "priority")
_PLUGIN = ("plugin_name", "plugin_type")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `name` is without the prefix and, for counters, with `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


TABLE: tuple[Metric, ...] = (
    Metric("request_total", "counter", _MODEL, "Requests placed on an endpoint."),
    Metric(
        "request_error_total",
        "counter",
        (*_MODEL, "error_code"),
        "Requests refused by the picker or answered with a status of 400 or above.",
    ),
    Metric(
        "request_duration_seconds", "histogram", _MODEL, "From arrival to the end of the answer.", _DURATION
    ),
    Metric("request_size_bytes", "histogram", _MODEL, "Request bodies as received.", _REQUEST_BYTES),
    Metric("response_size_bytes", "histogram", _MODEL, "Answer bodies.", _RESPONSE_BYTES),
    Metric("request_input_tokens", "histogram", _MODEL, "Prompt tokens the engine reported.", _POWERS),
    Metric("request_output_tokens", "histogram", _MODEL, "Output tokens the engine reported.", _POWERS[:12]),
    Metric("request_cached_tokens", "histogram", _MODEL, "Prompt tokens the engine had cached.", _POWERS),
    Metric("request_running", "gauge", _MODEL, "Requests placed and not ended."),
    Metric(
        "request_ntpot_seconds",
        "histogram",
        _MODEL,
        "Request duration divided by output tokens.",
        _NTPOT,
    ),
    Metric(
        "request_ttft_seconds",
        "histogram",
        (*_MODEL, "streaming"),
        "From arrival to the first output token.",
        _TTFT,
    ),
    Metric(
        "request_streaming_tpot_seconds",
        "histogram",
        _MODEL,
        "Streamed answers: time after the first token divided by the tokens after it.",
        _TPOT,
    ),
    Metric(
        "average_kv_cache_utilization", "gauge", ("name",), "Mean KV cache usage of fresh endpoints, 0 to 1."
    ),
    Metric("average_queue_size", "gauge", ("name",), "Mean waiting requests of fresh endpoints."),
    Metric("average_running_requests", "gauge", ("name",), "Mean running requests of fresh endpoints."),
    Metric("std_dev_kv_cache_utilization", "gauge", ("name",), "Standard deviation of KV cache usage."),
    Metric("std_dev_queue_size", "gauge", ("name",), "Standard deviation of waiting requests."),
    Metric("std_dev_running_requests", "gauge", ("name",), "Standard deviation of running requests."),
    Metric("ready_endpoints", "gauge", ("name",), "Endpoints that may be chosen now."),
    Metric(
        "per_endpoint_queue_size",
        "gauge",
        ("name", "model_server_endpoint"),
        "Waiting requests of each endpoint.",
    ),
    Metric("scheduler_e2e_duration_seconds", "histogram", (), "The choice of an endpoint.", _SCHEDULER),
    Metric(
        "scheduler_attempts_total",
        "counter",
        ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        "Choices made (success) or failed (failure).",
    ),
    Metric(
        "request_processing_duration_seconds",
        "histogram",
        (),
        "From the complete request to its placement: reading the body and choosing.",
        _PROCESSING,
    ),
    Metric("info", "gauge", ("commit", "build_ref"), "Build of this picker; always 1."),
    Metric("datalayer_poll_errors_total", "counter", ("source_type",), "Failed reads of engine metrics."),
    Metric("prefix_indexer_size", "gauge", _PLUGIN, "Pairs of block and endpoint in the prefix index."),
    Metric(
        "prefix_indexer_hit_ratio",
        "histogram",
        _PLUGIN,
        "Share of the prompt held by the chosen endpoint.",
        _RATIO,
    ),
    Metric(
        "prefix_indexer_hit_bytes",
        "histogram",
        _PLUGIN,
        "Prompt bytes held by the chosen endpoint.",
        _HIT_BYTES,
    ),
    Metric(
        "inflight_requests",
        "gauge",
        ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority"),
        "Requests in flight to each endpoint.",
    ),
    Metric(
        "inflight_tokens",
        "gauge",
        ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority"),
        "Uncached prompt tokens in flight to each endpoint, until its first output token.",
    ),
    Metric("extproc_streams_inflight", "gauge", (), "Open ext-proc streams."),
    Metric("extproc_streams_total", "counter", ("code",), "Finished ext-proc streams by how they ended."),
    Metric("extproc_held_bytes", "gauge", (), "Request bytes held in the process."),
    Metric(
        "plugin_failures_total", "counter", ("plugin_type",), "Plugin calls that failed; the request went on."
    ),
    Metric("served_elsewhere_total", "counter", (), "Answers from an endpoint outside the pool."),
    Metric(
        "config_discovery_errors_total",
        "counter",
        (),
        "Discovery files that could not be used; the old one stays.",
    ),
)


def collectors(registry: CollectorRegistry) -> dict[str, Counter | Gauge | Histogram]:
    """The table as live collectors, by name without prefix."""
    made: dict[str, Counter | Gauge | Histogram] = {}
    for row in TABLE:
        name = names.METRIC_PREFIX + row.name
        match row.kind:
            case "counter":
                made[row.name] = Counter(name, row.help, row.labels, registry=registry)
            case "gauge":
                made[row.name] = Gauge(name, row.help, row.labels, registry=registry)
            case "histogram":
                made[row.name] = Histogram(name, row.help, row.labels, registry=registry, buckets=row.buckets)
    return made


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


def reference() -> str:
    """docs/metrics.md: the table for people."""
    lines = [
        "# Metrics",
        "",
        "Served at `:9090/metrics`. Every name has the prefix `llm_d_epp_`; histograms add `_bucket`, `_sum`",
        "and `_count`. Label values that come from clients are bounded: after 1000 different ones, `other`.",
        "",
        "| Name | Type | Labels | Meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.help} |"
        for row in TABLE
    ]
    return "\n".join(lines) + "\n"
