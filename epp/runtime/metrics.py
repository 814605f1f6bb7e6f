"""Prometheus metrics of requests: what each row of the table is fed with.

Children are bound once per label set; label values that come from clients are bounded. What describes the
pool and the plugins is in `epp.runtime.gauges`.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge

from epp.director import Prepared
from epp.errors import RequestError
from epp.payload.rewrite import Rewrite
from epp.pool.records import Endpoint
from epp.runtime.metrics_table import LABEL_SETS, LABEL_VALUES, OTHER, Collector, collectors
from epp.runtime.tallies import Tallies, Tally
from epp.scheduling.records import (
    PREFIX_MATCH,
    Cause,
    Ended,
    PlannedMatch,
    PrefixMatch,
    Ticket,
    TicketId,
)

APPROXIMATE = "approx-prefix-cache-producer"
_ENGINES_ERROR = "ModelServerError"
_NO_PRIORITY = "0"
_BYTES_PER_TOKEN = 4  # as prompts are cut into blocks


@dataclass(slots=True)
class Bounded:
    """Client-made label values: the first `limit` different ones pass, the rest become `other`.

    Attributes:
        pinned: values that always pass and are not counted.
    """

    limit: int = LABEL_VALUES
    pinned: Set[str] = frozenset()
    _seen: set[str] = field(default_factory=set)

    def __call__(self, value: str) -> str:
        if value in self._seen or value in self.pinned:
            return value
        if len(self._seen) >= self.limit:
            return OTHER
        self._seen.add(value)
        return value


Address = tuple[str, str, int]  # name, namespace, port


class _Children:
    """The collectors of one model, target, flow and priority, bound once."""

    __slots__ = (
        "cached",
        "duration",
        "gaps",
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

    def __init__(self, made: Mapping[str, Collector], values: tuple[str, ...]) -> None:
        def histogram(name: str, *more: str) -> Tally:
            return cast(Tallies, made[name]).labels(*values, *more)

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
        self.gaps = histogram("request_streaming_itl_seconds")


_Raw = tuple[str, str, str, int]  # model, target, flow, priority, as they came


class Metrics:
    """What the picker counts. Called from the event loop's thread only; rendered by another."""

    def __init__(self, pool: str, build: tuple[str, str]) -> None:
        """`pool`: its name, a label. `build`: commit and build reference."""
        self.pool_name = pool
        self.registry = CollectorRegistry()
        self._made = collectors(self.registry)
        self._models = Bounded()
        self._flows = Bounded()
        self._children: dict[tuple[str, ...], _Children] = {}
        self._known: dict[_Raw, _Children] = {}
        # A request ends in the series it began in, though `pin` names its model in between.
        self._placed: dict[TicketId, _Children] = {}
        self._attempts: dict[Address, dict[str, Counter]] = {}
        self._prefix: dict[str, tuple[Tally, Tally]] = {}
        self._totals: dict[tuple[str, ...], float] = {}
        self._shown: dict[tuple[str, str], set[tuple[str, ...]]] = {}
        self._scheduler = self.histogram("scheduler_e2e_duration_seconds")
        self._processing = self.histogram("request_processing_duration_seconds")
        self.gauge("info", *build).set(1)
        self.gauge("config_last_reload_successful").set(1)

    def gauge(self, name: str, *labels: str) -> Gauge:
        return cast(Gauge, self._made[name].labels(*labels) if labels else self._made[name])

    def counter(self, name: str, *labels: str) -> Counter:
        return cast(Counter, self._made[name].labels(*labels) if labels else self._made[name])

    def histogram(self, name: str, *labels: str) -> Tally:
        return cast(Tallies, self._made[name]).labels(*labels)

    def collector(self, name: str) -> Collector:
        """All series of a metric."""
        return self._made[name]

    def pin(self, models: Iterable[str]) -> None:
        """These names keep their label value, however many models there are. In place of those before."""
        self._models.pinned = frozenset(models)
        self._known.clear()

    def flow(self, name: str) -> str:
        """The label value of a fairness id."""
        return self._flows(name)

    # -- one request ------------------------------------------------------------------------------

    def _of(self, prepared: Prepared) -> _Children:
        request = prepared.request
        raw = (request.model, request.target_model, prepared.flow, prepared.priority)
        found = self._known.get(raw)
        if found is None:
            found = self._bound(raw)
            if len(self._known) < LABEL_SETS:
                self._known[raw] = found
        return found

    def _bound(self, raw: _Raw) -> _Children:
        model, target, flow, priority = raw
        values = (self._models(model), self._models(target), self._flows(flow), str(priority))
        if values not in self._children and len(self._children) >= LABEL_SETS:
            pinned = self._models.pinned
            values = (
                model if model in pinned else OTHER,
                target if target in pinned else OTHER,
                OTHER,
                str(priority),
            )
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = _Children(self._made, values)
        return found

    def decided(self, reading_s: float, choosing_s: float) -> None:
        """Time to read a body and to choose an endpoint."""
        self._scheduler.observe(choosing_s)
        self._processing.observe(reading_s + choosing_s)

    def rewritten(self, prepared: Prepared, rewrite: Rewrite) -> None:
        """A rule chose the model."""
        labels = (rewrite.rule_name, self._models(prepared.request.model), rewrite.target)
        self.counter("model_rewrite_decisions_total", *labels).inc()

    def refused(self, prepared: Prepared | None, error: RequestError) -> None:
        """`prepared`: None where the request could not be read."""
        values = self._of(prepared).values if prepared else ("", "", "", _NO_PRIORITY)
        self.counter("request_error_total", *values, error.code).inc()
        if prepared is not None:
            self.counter("scheduler_attempts_total", "failure", values[1], "", "", "").inc()

    def placed(self, prepared: Prepared, ticket: Ticket) -> None:
        of = self._placed[ticket.id] = self._of(prepared)
        of.total.inc()
        of.running.inc()
        of.request_bytes.observe(prepared.body_bytes)
        self._attempt(ticket.placement.serving.endpoints[0], of.values[1])
        for key, fact in ticket.facts.items():
            if key.kind == PREFIX_MATCH and not isinstance(fact, PlannedMatch):
                self._prefix_hit(key.producer, fact, ticket.slot)
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
                self.histogram("prefix_indexer_hit_ratio", producer, APPROXIMATE),
                self.histogram("prefix_indexer_hit_bytes", producer, APPROXIMATE),
            )
        blocks = int(match.blocks[slot])
        bound[0].observe(blocks / match.total_blocks if match.total_blocks else 0.0)
        bound[1].observe(blocks * match.block_tokens * _BYTES_PER_TOKEN)

    def first_token(self, prepared: Prepared, ticket: Ticket, now: float) -> None:
        if ticket.status < 400:
            self._placed[ticket.id].ttft[ticket.streaming].observe(now - prepared.received_at)

    def ended(self, prepared: Prepared, ticket: Ticket, fact: Ended, now: float) -> None:
        of = self._placed.pop(ticket.id)
        of.running.dec()
        took_s = now - prepared.received_at
        if ticket.status >= 400 or fact.cause is not Cause.NATURAL:
            code = _ENGINES_ERROR if ticket.status >= 400 else str(fact.cause)
            self.counter("request_error_total", *of.values, code).inc()
        if ticket.streaming and fact.gaps is not None and ticket.status < 400:
            of.gaps.add(fact.gaps.counts, fact.gaps.seconds)
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

    # -- what is counted elsewhere ----------------------------------------------------------------

    def show(self, name: str, values: Mapping[tuple[str, ...], float], teller: str = "") -> None:
        """Make these the series of a gauge that `teller` tells."""
        for labels, value in values.items():
            self.gauge(name, *labels).set(value)
        for labels in self._shown.get((name, teller), set()) - values.keys():
            self._made[name].remove(*labels)
        self._shown[name, teller] = set(values)

    def total(self, name: str, total: float, *labels: str) -> None:
        """Bring a counter to a count that is kept elsewhere. One that has fallen began anew in between."""
        key = (name, *labels)
        before = self._totals.get(key, 0)
        self.counter(name, *labels).inc(total - before if total >= before else total)
        self._totals[key] = total

    def totals(self, name: str, totals: Mapping[tuple[str, ...], float]) -> None:
        """`total` for all series of a counter; those that are not among them end."""
        for labels, total in totals.items():
            self.total(name, total, *labels)
        for key in [key for key in self._totals if key[0] == name and key[1:] not in totals]:
            del self._totals[key]
            self._made[name].remove(*key[1:])

    def forget_endpoints(self, owners: Set[Address]) -> None:
        """Drop the attempts of all endpoints but these."""
        for name, namespace, port in self._attempts.keys() - owners:
            for target in self._attempts.pop((name, namespace, port)):
                labels = ("success", target, name, namespace, str(port))
                self._made["scheduler_attempts_total"].remove(*labels)
