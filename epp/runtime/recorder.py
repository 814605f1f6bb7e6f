"""What is told of requests: to metrics, to signals, to the log, and to the ring of last decisions."""

import logging
from collections import defaultdict, deque

from epp import names
from epp.director import Need, Prepared
from epp.errors import NeedFailed, RequestError
from epp.payload.records import RawRequest, find_header
from epp.pool.records import PoolView
from epp.runtime.logs import REQUESTS
from epp.runtime.metrics import Metrics
from epp.runtime.plugin_timing import real
from epp.runtime.signal_window import SignalWindow
from epp.scheduling.explain import RecordedDecision, record_decision
from epp.scheduling.ports import Ctx
from epp.scheduling.records import AnswerFact, Ended, FirstToken, Ticket

log = logging.getLogger(__name__)
lines = logging.getLogger(REQUESTS)

RING = 256
LOGGED = 256


class RuntimeRecorder:
    """See `epp.director.Recorder`; what happens before and without a director's choice is told here too.

    Attributes:
        decisions: the last ones, oldest first.
        signals: of the last requests.
    """

    def __init__(self, metrics: Metrics, view: PoolView) -> None:
        self.decisions: deque[RecordedDecision] = deque(maxlen=RING)
        self.signals = SignalWindow()
        self._metrics = metrics
        self._view = view
        self._line = lines.isEnabledFor(logging.INFO)
        self._logged: defaultdict[str, set[str]] = defaultdict(set)

    # -- without the director ---------------------------------------------------------------------

    def decided(self, prepared: Prepared, began: float, done: float) -> None:
        """The director was asked from `began` to `done`, whatever came of it."""
        self._metrics.decided(began - prepared.received_at, done - began)
        if prepared.rewrite is not None:
            self._metrics.rewritten(prepared, prepared.rewrite)

    def refused(self, raw: RawRequest, prepared: Prepared | None, error: RequestError, now: float) -> None:
        """`prepared`: None where the request could not be read."""
        self._metrics.refused(prepared, error)
        self.signals.refused(prepared, now)
        if self._line:
            asked = _asked(prepared) if prepared else {"request_id": raw.request_id}
            lines.info(
                "request refused",
                extra={**asked, "status": error.status, "reason": error.reason, "error": error.message},
            )

    # -- of the director --------------------------------------------------------------------------

    def placed(self, prepared: Prepared, ticket: Ticket, ctx: Ctx) -> None:
        self.decisions.append(record_decision(prepared.request_id, ticket.placement.legs, ctx))
        self._metrics.placed(prepared, ticket)
        self.signals.placed(prepared, ctx.now)

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        """Counted each time, logged once per kind of fault: there may be thousands a second."""
        kind, fault = type(real(plugin)).__name__, type(error).__name__
        self._metrics.counter("plugin_failures_total", kind).inc()
        if self._first(kind, fault):
            log.error(
                "a plugin failed; the work goes on without it; the same again is counted, not logged",
                exc_info=error,
                extra={"plugin": kind},
            )

    def need_failed(self, need: Need, error: Exception) -> None:
        """Counted each time, logged once per reason."""
        kind = type(need).__name__
        reason = error.reason if isinstance(error, NeedFailed) else "fault"
        self._metrics.counter("request_needs_failed_total", kind, reason).inc()
        if self._first(kind, reason):
            log.warning(
                "a request is placed without what it needed to know; the same again is counted, not logged",
                exc_info=None if isinstance(error, NeedFailed) else error,
                extra={"need": kind, "reason": reason, "error": str(error)},
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
                self.signals.first_token(prepared, ticket, now)
            case Ended():
                self._metrics.ended(prepared, ticket, fact, now)
                self.signals.ended(ticket, fact, now)
                if self._line:
                    self._log_request(prepared, ticket, fact, now)

    def _log_request(self, prepared: Prepared, ticket: Ticket, fact: Ended, now: float) -> None:
        usage, first_token_at = fact.usage, ticket.first_token_at
        lines.info(
            "request",
            extra={
                **_asked(prepared),
                "endpoint": self._view.host_ports[ticket.slot],
                "status": ticket.status,
                "cause": str(fact.cause),
                "streaming": ticket.streaming,
                "duration_s": round(now - prepared.received_at, 6),
                "ttft_s": None if first_token_at is None else round(first_token_at - prepared.received_at, 6),
                "prompt_tokens": usage.prompt_tokens if usage else None,
                "cached_tokens": usage.cached_tokens if usage else None,
                "output_tokens": usage.output_tokens if usage else None,
            },
        )


def _asked(prepared: Prepared) -> dict[str, object]:
    """The request's part of its line."""
    return {
        "request_id": prepared.request_id,
        "model": prepared.request.model,
        "target_model": prepared.request.target_model,
        "fairness_id": prepared.flow,
        "objective": find_header(prepared.headers, *names.OBJECTIVE),
        "priority": prepared.priority,
    }
