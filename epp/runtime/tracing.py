"""Spans of requests, by OpenTelemetry: how they are exported, and the router that makes them.

Names of spans and attributes are the field's. Only what `--tracing` starts imports this module, so requests
of a picker without tracing pay nothing, and OpenTelemetry need not be installed.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epp.director import Prepared, Refusal
from epp.extproc.records import Refused, Routed
from epp.payload.records import RawRequest
from epp.runtime.router import Router
from epp.runtime.stream import Deliver
from epp.runtime.tracing_setup import OTLP, TracingSetup
from epp.scheduling.records import (
    AnswerFact,
    AnswerHeaders,
    Decision,
    Edits,
    Ended,
    FirstToken,
    Leg,
    Placement,
    PluginTiming,
    TicketId,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

SCOPE: Final = "warmroute"
REQUEST: Final = "gateway.request"
ORCHESTRATION: Final = "gateway.request_orchestration"
PROFILE: Final = "run_scheduler_profile"
FILTERING: Final = "filter_endpoints"
SCORING: Final = "llm_d.epp.scoring"
SCORER: Final = "llm_d.epp.scorer."
PICKING: Final = "pick_endpoints"
FIRST_TOKEN: Final = "first_token"

_PROPAGATOR: Final = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
_CARRIED: Final = frozenset(_PROPAGATOR.fields)
_TOP: Final = 5

Attributes = Mapping[str, Any]


def exported_by(setup: TracingSetup, version: str) -> TracerProvider:
    """What exports spans as `setup` says.

    OpenTelemetry itself reads OTEL_EXPORTER_OTLP_*, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
    """
    attributes = {SERVICE_VERSION: version} | ({} if setup.named else {SERVICE_NAME: SCOPE})
    resource = Resource.create(attributes)
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(setup.ratio), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(setup)))
    return provider


def _exporter(setup: TracingSetup) -> SpanExporter:
    if setup.exporter != OTLP:
        return ConsoleSpanExporter(out=sys.stdout)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class _Trace(NamedTuple):
    """One request. `offset_ns`: from the picker's clock to the time of day."""

    request: Span
    orchestration: Span
    raw: RawRequest
    offset_ns: int

    def ns(self, at: float) -> int:
        return self.offset_ns + int(at * 1e9)


class Tracing:
    """Makes and ends the spans of requests. `at` are seconds of the picker's clock."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SCOPE)

    def close(self) -> None:
        """Export what is left. Waits for the exporter, some seconds at most."""
        self._provider.shutdown()

    def begin(self, raw: RawRequest, at: float) -> _Trace:
        """The request is here; its trace goes on from the client's, where its headers tell of one."""
        carrier = {name: value for name, value in raw.headers if name in _CARRIED}
        start_ns = time.time_ns()
        parent = _PROPAGATOR.extract(carrier) if carrier else Context()
        attributes = {"gen_ai.request.id": raw.request_id}
        request = self._tracer.start_span(
            REQUEST, parent, SpanKind.SERVER, attributes=attributes, start_time=start_ns
        )
        within = set_span_in_context(request, parent)
        orchestration = self._tracer.start_span(
            ORCHESTRATION, within, SpanKind.SERVER, attributes=attributes, start_time=start_ns
        )
        return _Trace(request, orchestration, raw, start_ns - int(at * 1e9))

    def headers(self, trace: _Trace) -> Edits:
        """What tells the engine of the trace: headers that the client's request has not, or with another
        value.
        """
        carrier: dict[str, str] = {}
        parent = _PROPAGATOR.extract({name: value for name, value in trace.raw.headers if name in _CARRIED})
        _PROPAGATOR.inject(carrier, set_span_in_context(trace.request, parent))
        given = dict(trace.raw.headers)
        return tuple((name, value.encode()) for name, value in carrier.items() if given.get(name) != value)

    def understood(self, trace: _Trace, prepared: Prepared) -> None:
        """The request was read."""
        trace.request.set_attribute("gen_ai.request.model", prepared.request.model)
        trace.orchestration.set_attribute("gen_ai.request.model", prepared.request.target_model)

    def placed(self, trace: _Trace, legs: tuple[Leg, ...], began: float, done: float) -> None:
        """Endpoints were chosen from `began` to `done`; their plugins' spans follow each other."""
        if trace.orchestration.is_recording():
            within = set_span_in_context(trace.orchestration)
            cursor_ns = trace.ns(began)
            for leg in legs:
                cursor_ns = self._profile(leg, within, cursor_ns)
        trace.orchestration.end(trace.ns(done))

    def refused(self, trace: _Trace, refused: Refused) -> None:
        error, at_ns = refused.error, trace.ns(refused.at)
        for span in (trace.orchestration, trace.request):
            # Without the trace of the stack, which says nothing of a client's mistake.
            span.add_event(
                "exception",
                {"exception.type": type(error).__name__, "exception.message": error.message},
                timestamp=at_ns,
            )
            span.set_status(StatusCode.ERROR, error.message)
        trace.request.set_attribute("http.response.status_code", error.status)
        trace.orchestration.end(at_ns)
        trace.request.end(at_ns)

    def observed(self, trace: _Trace, fact: AnswerFact, at: float) -> None:
        """Something happened to the placed request."""
        span = trace.request
        match fact:
            case AnswerHeaders(status=status):
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(StatusCode.ERROR, f"the engine answered {status}")
            case FirstToken():
                span.add_event(FIRST_TOKEN, timestamp=trace.ns(at))
            case Ended(cause=cause, usage=usage):
                if usage is not None:
                    span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
                    span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
                if cause != "Natural":
                    span.set_status(StatusCode.ERROR, str(cause))
                span.end(trace.ns(at))

    # -- the choice -------------------------------------------------------------------------------

    def _profile(self, leg: Leg, within: Context, start_ns: int) -> int:
        """Spans of one profile; returns when the last one ends."""
        decision = leg.decision
        by_point: dict[str, list[PluginTiming]] = {}
        for timing in decision.timings:
            by_point.setdefault(timing.extension_point, []).append(timing)
        attributes = {"llm_d.epp.scheduling.profile.name": decision.profile}
        span = self._tracer.start_span(PROFILE, within, attributes=attributes, start_time=start_ns)
        within = set_span_in_context(span, within)
        alive = int(np.count_nonzero(~np.isnan(decision.total)))
        spent_ns = _spent_ns(by_point.get("Filter", ()))
        self._span(FILTERING, _filtering(decision, alive), within, start_ns, start_ns + spent_ns)
        after_ns = self._scores(decision, by_point.get("Scorer", []), alive, within, start_ns + spent_ns)
        end_ns = after_ns + _spent_ns(by_point.get("Picker", ()))
        self._span(PICKING, _picking(leg, alive), within, after_ns, end_ns)
        span.end(end_ns)
        return end_ns

    def _scores(
        self, decision: Decision, timings: list[PluginTiming], alive: int, within: Context, start_ns: int
    ) -> int:
        attributes = {
            "llm_d.epp.scorer.count": len(decision.columns),
            "llm_d.epp.scoring.candidate_endpoints": alive,
        }
        span = self._tracer.start_span(SCORING, within, attributes=attributes, start_time=start_ns)
        within = set_span_in_context(span, within)
        columns = {column.name: column for column in decision.columns}
        scored = ~np.isnan(decision.total)
        for timing in timings:
            column = columns[timing.plugin_name]
            scores = column.scores[scored]
            described = {
                "llm_d.epp.scorer.type": timing.plugin_type,
                "llm_d.epp.scorer.name": timing.plugin_name,
                "llm_d.epp.scorer.weight": column.weight,
                "llm_d.epp.scorer.candidate_endpoints": alive,
                "llm_d.epp.scorer.endpoints_scored": alive,
                "llm_d.epp.scorer.score.max": float(scores.max()),
                "llm_d.epp.scorer.score.avg": float(scores.mean()),
            }
            end_ns = start_ns + _spent_ns((timing,))
            self._span(SCORER + timing.plugin_type, described, within, start_ns, end_ns)
            start_ns = end_ns
        span.end(start_ns)
        return start_ns

    def _span(self, name: str, attributes: Attributes, within: Context, start_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, within, attributes=attributes, start_time=start_ns).end(end_ns)


def _spent_ns(timings: Any) -> int:
    return sum(int(timing.seconds * 1e9) for timing in timings)


def _filtering(decision: Decision, alive: int) -> Attributes:
    return {
        "llm_d.epp.filter.candidate_endpoints": int(np.count_nonzero(decision.candidates)),
        "llm_d.epp.filter.filtered_endpoints": alive,
    }


def _picking(leg: Leg, alive: int) -> Attributes:
    chosen = leg.endpoints[:_TOP]
    return {
        "llm_d.epp.picker.candidate_endpoints": alive,
        "llm_d.epp.picker.top_endpoints": [endpoint.name for endpoint in chosen],
        "llm_d.epp.picker.top_scores": [
            float(leg.decision.total[slot]) for slot in leg.decision.slots[:_TOP]
        ],
    }


class TracedRouter(Router):
    """A router whose requests have spans. A request that is traced has its plugins timed.

    A fault in tracing costs spans, never the request: what was placed must be followed to its end.
    """

    def __init__(self, tracing: Tracing, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._tracing = tracing
        # By the identity of the request, which the trace keeps: its own id is the client's to choose.
        self._routing: dict[int, _Trace] = {}
        self._placed: dict[TicketId, _Trace] = {}
        self._failed = False

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        trace = self._harmless(self._tracing.begin, raw, self._clock())
        if trace is None:
            return super().route(raw, deliver)
        self._routing[id(raw)] = trace
        outcome = super().route(raw, partial(self._deliver, trace, deliver))
        return None if outcome is None else self._settled(trace, outcome)

    def _deliver(self, trace: _Trace, deliver: Deliver, outcome: Routed | Refused) -> None:
        deliver(self._settled(trace, outcome))

    def _submit(self, raw: RawRequest, prepared: Prepared, now: float) -> Placement | Refusal:
        trace = self._routing.get(id(raw))
        if trace is None:
            return super()._submit(raw, prepared, now)
        self._harmless(self._tracing.understood, trace, prepared)
        outcome = self._director.submit(prepared, now, timed=trace.orchestration.is_recording())
        if isinstance(outcome, Placement):
            self._harmless(self._tracing.placed, trace, outcome.legs, now, self._clock())
        return outcome

    def _settled(self, trace: _Trace, outcome: Routed | Refused) -> Routed | Refused:
        """The end of routing: the spans that are over, and what tells the engine of the trace."""
        del self._routing[id(trace.raw)]
        if isinstance(outcome, Refused):
            self._harmless(self._tracing.refused, trace, outcome)
            return outcome
        placement = outcome.placement
        if trace.request.is_recording():
            self._placed[placement.ticket] = trace
        edits = self._harmless(self._tracing.headers, trace) or ()
        placement = replace(placement, set_headers=placement.set_headers + edits)
        return msgspec.structs.replace(outcome, placement=placement)

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        edits = super().observe(ticket, fact)
        trace = self._placed.pop(ticket, None) if isinstance(fact, Ended) else self._placed.get(ticket)
        if trace is not None:
            self._harmless(self._tracing.observed, trace, fact, self._clock())
        return edits

    def _harmless(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """What `call` returns; None where it failed, which is logged once."""
        try:
            return call(*arguments)
        except Exception:
            if not self._failed:
                log.exception("tracing failed; requests are served on, and it is not logged again")
            self._failed = True
            return None
