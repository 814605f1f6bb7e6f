"""Routes requests: drives the director, and waits for what has to be awaited before a choice."""

import asyncio
import logging
from collections.abc import Callable

from epp.director import Director, Edits, Prepared, Refusal
from epp.errors import InternalError, RequestError
from epp.extproc.records import Refused, Routed
from epp.payload.records import RawRequest
from epp.runtime.decoder import Decoder, is_large
from epp.runtime.metrics import Metrics
from epp.runtime.stream import Deliver
from epp.scheduling.records import AnswerFact, TicketId

log = logging.getLogger(__name__)


class Router:
    """The runtime's side of the director: clock, metrics, and what has to be awaited before a choice."""

    def __init__(
        self,
        director: Director,
        metrics: Metrics,
        decoder: Decoder,
        clock: Callable[[], float],
        traffic: Callable[[float], None],
    ) -> None:
        self._director = director
        self._metrics = metrics
        self.decoder = decoder
        self._clock = clock
        self._traffic = traffic
        self._tasks: set[asyncio.Task[None]] = set()

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        """See `Routes.route`."""
        received_at = self._clock()
        if is_large(raw):
            large = self._route_large(raw, received_at, deliver)
            task = asyncio.get_running_loop().create_task(large)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        try:
            prepared = self._director.prepare(raw, received_at)
        except RequestError as error:
            return self._refuse(raw, None, error)
        except Exception:
            return self._broken(raw)
        return self._place(raw, prepared)

    async def _route_large(self, raw: RawRequest, received_at: float, deliver: Deliver) -> None:
        try:
            parsed = await self.decoder.parse(raw)
            prepared = self._director.prepare_parsed(raw, parsed, received_at)
        except RequestError as error:
            deliver(self._refuse(raw, None, error))
        except Exception:
            deliver(self._broken(raw))
        else:
            deliver(self._place(raw, prepared))

    def _place(self, raw: RawRequest, prepared: Prepared) -> Routed | Refused:
        now = self._clock()
        self._traffic(now)
        try:
            outcome = self._director.submit(prepared, now)
        except Exception:
            return self._broken(raw)
        done = self._clock()
        self._metrics.decided(now - prepared.received_at, done - now)
        if isinstance(outcome, Refusal):
            return self._refuse(raw, prepared, outcome.error)
        request = prepared.request
        return Routed(
            at=done,
            placement=outcome,
            api=request.api,
            model=request.model,
            target_model=request.target_model,
            body=prepared.body,
            remove_headers=prepared.remove_headers,
        )

    def _refuse(self, raw: RawRequest, prepared: Prepared | None, error: RequestError) -> Refused:
        self._metrics.refused(prepared, error)
        log.debug(
            "request refused",
            extra={"request_id": raw.request_id, "status": error.status, "error": error.message},
        )
        return Refused(self._clock(), error)

    def _broken(self, raw: RawRequest) -> Refused:
        """A fault of ours: the client gets a plain 500, the log the trace."""
        path = raw.path.partition("?")[0]
        log.exception("request failed", extra={"request_id": raw.request_id, "path": path})
        error = InternalError("the endpoint picker failed on this request; its log has the details")
        self._metrics.refused(None, error)
        return Refused(self._clock(), error)

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        """See `Routes.observe`."""
        return self._director.observe(ticket, fact, self._clock())

    def close(self) -> None:
        """Give up what is still being read."""
        for task in self._tasks:
            task.cancel()
        self.decoder.close()
