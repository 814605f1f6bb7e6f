"""Routes requests: drives the director, and decodes large bodies in a child process."""

import asyncio
import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial

from epp.director import Director, Edits, Prepared, Refusal
from epp.errors import InternalError, RequestError
from epp.extproc.records import Refused, Routed
from epp.payload.records import RawRequest
from epp.payload.request import Parsed, parse_request
from epp.runtime.metrics import Metrics
from epp.runtime.stream import Deliver
from epp.scheduling.records import AnswerFact, TicketId

log = logging.getLogger(__name__)

# One decode is one C call under the interpreter's lock (4.7 ms for 4 MiB): a thread would not help.
CHILD_BODY_BYTES = 2 << 20


@dataclass(slots=True)
class Decoder:
    """A child process that parses bodies too large for the event loop; started by the first of them."""

    max_body_bytes: int
    _pool: ProcessPoolExecutor | None = field(default=None, init=False)

    async def parse(self, raw: RawRequest) -> Parsed:
        """Raises RequestError as `parse_request` does."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        parse = partial(parse_request, max_bytes=self.max_body_bytes)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, parse, raw)
        except BrokenProcessPool:
            log.warning("the decoding process died; this body is decoded in place, the next starts it anew")
            self.close()
            return parse(raw)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


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
        self._decoder = decoder
        self._clock = clock
        self._traffic = traffic
        self._tasks: set[asyncio.Task[None]] = set()

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        """See `Routes.route`."""
        if len(raw.body) > CHILD_BODY_BYTES:
            task = asyncio.get_running_loop().create_task(self._route_large(raw, deliver))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        now = self._clock()
        try:
            prepared = self._director.prepare(raw, now)
        except RequestError as error:
            return self._refuse(raw, None, error)
        except Exception:
            return self._broken(raw)
        return self._place(raw, prepared)

    async def _route_large(self, raw: RawRequest, deliver: Deliver) -> None:
        received_at = self._clock()
        try:
            parsed = await self._decoder.parse(raw)
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
        log.log(
            logging.DEBUG,
            "request refused",
            extra={"request_id": raw.request_id, "status": error.status, "error": error.message},
        )
        return Refused(self._clock(), error)

    def _broken(self, raw: RawRequest) -> Refused:
        """A fault of ours: the client gets a plain 500, the log the trace."""
        log.exception("request failed", extra={"request_id": raw.request_id, "path": raw.path})
        error = InternalError("the endpoint picker failed on this request; its log has the details")
        self._metrics.refused(None, error)
        return Refused(self._clock(), error)

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        """See `Routes.observe`."""
        return self._director.observe(ticket, fact, self._clock())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._decoder.close()
