"""What the director tells: to metrics, to the log, and to the ring of last decisions."""

import logging
from collections import deque

from epp.director import Prepared
from epp.runtime.metrics import Metrics
from epp.scheduling.explain import RecordedDecision, record_decision
from epp.scheduling.ports import Ctx
from epp.scheduling.records import AnswerFact, Ended, FirstToken, Leg, Ticket

log = logging.getLogger(__name__)

RING = 256


class RuntimeRecorder:
    """See `epp.director.Recorder`. `decisions` holds the last ones, oldest first."""

    def __init__(self, metrics: Metrics) -> None:
        self.decisions: deque[RecordedDecision] = deque(maxlen=RING)
        self._metrics = metrics
        self._line = log.isEnabledFor(logging.DEBUG)

    def chosen(self, prepared: Prepared, legs: tuple[Leg, ...], ctx: Ctx) -> None:
        self.decisions.append(record_decision(prepared.request_id, legs, ctx))

    def placed(self, prepared: Prepared, ticket: Ticket) -> None:
        self._metrics.placed(prepared, ticket)

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        kind = type(plugin).__name__
        self._metrics.counter("plugin_failures_total", kind).inc()
        log.error("plugin failed; the request goes on without it", exc_info=error, extra={"plugin": kind})

    def served_elsewhere(self, ticket: Ticket, served: str) -> None:
        self._metrics.counter("served_elsewhere_total").inc()
        log.warning("an answer came from outside the pool", extra={"served": served})

    def observed(self, prepared: Prepared, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        match fact:
            case FirstToken():
                self._metrics.first_token(prepared, ticket, now)
            case Ended():
                self._metrics.ended(prepared, ticket, fact, now)
                if self._line:
                    self._log_request(prepared, ticket, fact, now)

    def _log_request(self, prepared: Prepared, ticket: Ticket, fact: Ended, now: float) -> None:
        log.debug(
            "request",
            extra={
                "request_id": prepared.request_id,
                "model": prepared.request.model,
                "endpoint": ticket.placement.serving.endpoints[0].host_port,
                "status": ticket.status,
                "cause": str(fact.cause),
                "duration_s": round(now - prepared.received_at, 6),
                "prompt_tokens": fact.usage.prompt_tokens if fact.usage else None,
                "output_tokens": fact.usage.output_tokens if fact.usage else None,
            },
        )
