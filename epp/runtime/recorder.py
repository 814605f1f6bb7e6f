"""What the director tells: to metrics, to the log, and to the ring of last decisions."""

import logging
from collections import defaultdict, deque

from epp.director import Prepared
from epp.pool.records import PoolView
from epp.runtime.metrics import Metrics
from epp.scheduling.explain import RecordedDecision, record_decision
from epp.scheduling.ports import Ctx
from epp.scheduling.records import AnswerFact, Ended, FirstToken, Ticket

log = logging.getLogger(__name__)

RING = 256
LOGGED = 256


class RuntimeRecorder:
    """See `epp.director.Recorder`. `decisions` holds the last ones, oldest first."""

    def __init__(self, metrics: Metrics, view: PoolView) -> None:
        self.decisions: deque[RecordedDecision] = deque(maxlen=RING)
        self._metrics = metrics
        self._view = view
        self._line = log.isEnabledFor(logging.DEBUG)
        self._logged: defaultdict[str, set[str]] = defaultdict(set)

    def placed(self, prepared: Prepared, ticket: Ticket, ctx: Ctx) -> None:
        self.decisions.append(record_decision(prepared.request_id, ticket.placement.legs, ctx))
        self._metrics.placed(prepared, ticket)

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        """Counted each time, logged once per kind of fault: there may be thousands a second."""
        kind, fault = type(plugin).__name__, type(error).__name__
        self._metrics.counter("plugin_failures_total", kind).inc()
        if self._first(kind, fault):
            log.error(
                "a plugin failed; the work goes on without it; the same again is counted, not logged",
                exc_info=error,
                extra={"plugin": kind},
            )

    def served_elsewhere(self, ticket: Ticket, served: str, in_pool: bool) -> None:
        self._metrics.counter("served_elsewhere_total", "pool" if in_pool else "outside").inc()
        if not in_pool and self._first("outside", served):
            log.warning("an answer came from outside the pool", extra={"served": served})

    def _first(self, kind: str, detail: str) -> bool:
        """Whether this is to be logged: not seen before, as far as is remembered."""
        seen = self._logged[kind]
        if detail in seen or len(seen) >= LOGGED:
            return False
        seen.add(detail)
        return True

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
                "endpoint": self._view.host_ports[ticket.slot],
                "status": ticket.status,
                "cause": str(fact.cause),
                "duration_s": round(now - prepared.received_at, 6),
                "prompt_tokens": fact.usage.prompt_tokens if fact.usage else None,
                "output_tokens": fact.usage.output_tokens if fact.usage else None,
            },
        )
