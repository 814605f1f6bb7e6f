"""Routes requests: drives the director, and waits for what has to be awaited before a choice."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

import msgspec
import numpy as np

from epp.director import Director, Found, Need, NeedResult, Prepared, Refusal
from epp.errors import InternalError, RequestError
from epp.extproc.records import Refused, Routed, Scores
from epp.kvcache.burst import BurstNeed
from epp.payload.records import RawRequest
from epp.pool.records import PoolView
from epp.runtime.decoder import Decoder, is_laborious, is_large
from epp.runtime.needs import Perform, fulfil, nobody
from epp.runtime.recorder import RuntimeRecorder
from epp.runtime.stream import Deliver
from epp.runtime.turns import Turns
from epp.scheduling.records import AnswerFact, Completed, Edits, Metadata, Placement, TicketId

log = logging.getLogger(__name__)

LONG_BODY_BYTES: Final = 256 << 10
"""Longer bodies take so long that they are looked at, read and placed in one turn of the loop each."""

Work = Callable[[], Routed | Refused | None]
"""A step of routing. None: the outcome is told later."""


class Router:
    """The runtime's side of the director: clock, recorder, and what has to be awaited before a choice."""

    def __init__(
        self,
        director: Director,
        recorder: RuntimeRecorder,
        decoder: Decoder,
        clock: Callable[[], float],
        traffic: Callable[[float], None],
        scored: PoolView | None = None,
        perform: Perform = nobody,
    ) -> None:
        """`scored`: the pool whose endpoints' scores the proxy is told; None = it is not told.

        `perform` fulfils what requests need to know before they are placed.
        """
        self._director = director
        self._recorder = recorder
        self.decoder = decoder
        self._clock = clock
        self._traffic = traffic
        self._scored = scored
        self._perform = perform
        self._tasks: set[asyncio.Task[None]] = set()
        # By the identity of the request, which the task that waits for them keeps.
        self._needs: dict[int, tuple[Need, ...]] = {}
        # By their identity, too: nobody waits for the outcome of these, which is still to come.
        self._gone: set[int] = set()
        self._turns = Turns(clock)

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        """See `Routes.route`. Late where the body is large, something has to be found out about the request,
        or this turn of the loop has placed enough.
        """
        received_at = self._clock()
        if len(raw.body) > LONG_BODY_BYTES or not self._turns.free:
            self._later(raw, deliver, partial(self._route, raw, received_at, deliver))
            return None
        outcome = self._route(raw, received_at, deliver)
        self._turns.spent((self._clock() if outcome is None else outcome.at) - received_at)
        return outcome

    def _later(self, raw: RawRequest, deliver: Deliver, work: Work) -> None:
        self._turns.wait(partial(self._tell, raw, deliver, work))

    def _tell(self, raw: RawRequest, deliver: Deliver, work: Work) -> None:
        """Tell what comes of the work, now. No fault of it leaves a client without an answer."""
        try:
            outcome = work()
        except Exception:
            outcome = self._broken(raw)
        if outcome is not None:
            self._gone.discard(id(raw))
            deliver(outcome)

    def _route(self, raw: RawRequest, received_at: float, deliver: Deliver) -> Routed | Refused | None:
        if is_large(raw, self._director.plugins.parsers):
            self._begin(self._route_large(raw, received_at, deliver))
            return None
        prepare = partial(self._director.prepare, raw, received_at)
        if len(raw.body) > LONG_BODY_BYTES:
            self._later(raw, deliver, partial(self._routed, raw, prepare, deliver))
            return None
        return self._routed(raw, prepare, deliver)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _routed(
        self, raw: RawRequest, prepare: Callable[[], Prepared], deliver: Deliver
    ) -> Routed | Refused | None:
        try:
            prepared = prepare()
        except RequestError as error:
            return self._refuse(raw, None, error)
        except Exception:
            return self._broken(raw)
        if prepared.needs:
            self._begin(self._route_needing(raw, prepared, deliver))
            return None
        if len(raw.body) > LONG_BODY_BYTES:
            self._later(raw, deliver, partial(self._place, raw, prepared))
            return None
        return self._place(raw, prepared)

    async def _route_needing(self, raw: RawRequest, prepared: Prepared, deliver: Deliver) -> None:
        self._needs[id(raw)] = prepared.needs
        try:
            results = await fulfil(prepared.needs, partial(self._fulfil, raw))
        finally:
            del self._needs[id(raw)]
        prepared, results = await self._read_elsewhere(prepared, results)
        satisfied = partial(self._director.satisfied, prepared, results)
        self._turns.do(partial(self._tell, raw, deliver, partial(self._routed, raw, satisfied, deliver)))

    async def _fulfil(self, raw: RawRequest, need: Need) -> Found:
        if isinstance(need, BurstNeed) and id(raw) in self._gone:
            return need.held.place
        return await self._perform(need)

    async def _read_elsewhere(
        self, prepared: Prepared, results: tuple[NeedResult, ...]
    ) -> tuple[Prepared, tuple[NeedResult, ...]]:
        """Have the child read a long answer of a render service; what is left then."""
        needs: list[Need] = []
        left: list[NeedResult] = []
        request = prepared.request
        for need, result in zip(prepared.needs, results, strict=True):
            if isinstance(result, bytes) and is_laborious(result):
                try:
                    request = await self.decoder.with_tokens(request, result)
                except Exception as error:  # is told as any other answer's
                    needs.append(need)
                    left.append(error)
            else:
                needs.append(need)
                left.append(result)
        return msgspec.structs.replace(prepared, request=request, needs=tuple(needs)), tuple(left)

    async def _route_large(self, raw: RawRequest, received_at: float, deliver: Deliver) -> None:
        try:
            parsed = await self.decoder.parse(raw)
        except RequestError as error:
            self._tell(raw, deliver, partial(self._refuse, raw, None, error))
        except Exception:
            self._tell(raw, deliver, partial(self._broken, raw))
        else:
            prepare = partial(self._director.prepare_parsed, raw, parsed, received_at)
            self._turns.do(partial(self._tell, raw, deliver, partial(self._routed, raw, prepare, deliver)))

    def gone(self, raw: RawRequest) -> None:
        """See `Routes.gone`. It leaves the window that it is held in, and is held in none from now on."""
        self._gone.add(id(raw))
        for need in self._needs.get(id(raw), ()):
            if isinstance(need, BurstNeed):
                need.held.leave()

    def _place(self, raw: RawRequest, prepared: Prepared) -> Routed | Refused:
        now = self._clock()
        self._traffic(now)
        try:
            outcome = self._submit(raw, prepared, now)
        except Exception:
            return self._broken(raw)
        done = self._clock()
        self._recorder.decided(prepared, now, done)
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
            stream=request.stream,
            scores=None if self._scored is None else _scores(self._scored, outcome),
        )

    def _submit(self, raw: RawRequest, prepared: Prepared, now: float) -> Placement | Refusal:
        return self._director.submit(prepared, now)

    def _refuse(self, raw: RawRequest, prepared: Prepared | None, error: RequestError) -> Refused:
        now = self._clock()
        self._recorder.refused(raw, prepared, error, now)
        return Refused(now, error)

    def _broken(self, raw: RawRequest) -> Refused:
        """A fault of ours: the client gets a plain 500, the log the trace."""
        path = raw.path.partition("?")[0]
        log.exception("request failed", extra={"request_id": raw.request_id, "path": path})
        error = InternalError("the endpoint picker failed on this request; its log has the details")
        return self._refuse(raw, None, error)

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        """See `Routes.observe`."""
        return self._director.observe(ticket, fact, self._clock())

    def report(self, ticket: TicketId, completed: Completed) -> Metadata:
        """See `Routes.report`."""
        return self._director.report(ticket, completed)

    def close(self) -> None:
        """Give up what is still being read or found out, or waits for its turn."""
        self._turns.close()
        for task in self._tasks:
            task.cancel()
        self.decoder.close()


def _scores(view: PoolView, placement: Placement) -> Scores:
    """Total scores of the profile that chose where the request goes; of all its filters had left."""
    total = placement.serving.decision.total
    return tuple([(view.host_ports[slot], float(total[slot])) for slot in np.flatnonzero(~np.isnan(total))])
