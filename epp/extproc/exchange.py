"""One HTTP request as the proxy tells of it over one ext-proc stream: a state machine without I/O.

Events go in, effects come out; both are plain records. Replies leave in the order headers, body, trailers,
for each direction. The stream is not ended while a body is open: a proxy has been seen to lose answer bytes
when it is.
"""

from collections.abc import Callable, Sequence

from epp.errors import ProtocolError, RequestError
from epp.extproc.answer_side import AnswerSide
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.order import INITIAL, OPEN
from epp.extproc.records import (
    Closed,
    Edited,
    Effect,
    Event,
    Finish,
    Observe,
    Overflow,
    Refused,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    Routed,
    Send,
)
from epp.extproc.refusals import refusal
from epp.extproc.request_side import RequestSide
from epp.payload.readers import answer_reader
from epp.scheduling.records import Cause, Ended


class Exchange:
    """What `receive` promises, whatever comes in which order:

    - exactly one `Finish`, last; nothing of the budget is held afterwards;
    - exactly one `Observe(Ended)` for a ticket that `Routed` brought, its last fact;
    - request bytes leave as they came, or as `Routed.body`, and are kept no longer.

    An answer that begins before the request was routed was made by the proxy itself: the request is let
    go, and a `Routed` that still comes is ended at once. Messages after `Finish` are ignored.
    """

    __slots__ = ("_answer", "_budget", "_left_by_client", "_over", "_request")

    def __init__(
        self, budget: BodyBudget, limits: Limits, new_request_id: Callable[[], str], *, reports: bool = False
    ) -> None:
        """`reports`: ask the director for metadata before the last reply to an answer."""
        self._budget = budget
        self._request = RequestSide(budget, limits, new_request_id)
        self._answer = AnswerSide(reports)
        self._over = False
        self._left_by_client = False

    @property
    def deciding(self) -> bool:
        """A `Route` waits for its answer."""
        return self._request.routing and not self._over

    @property
    def dropped(self) -> int:
        """Body messages that came after their body had ended, of both directions."""
        return self._request.dropped + self._answer.dropped

    def pass_on(self, chunk: ResponseChunk) -> bytes | None:
        """The short way of `receive` for most chunks of an answer, whose one effect is to forward them.

        Returns the bytes to forward, to be sent as pieces of the answer. None: nothing was done, `receive`
        takes the chunk.
        """
        return None if self._over else self._answer.pass_on(chunk)

    def receive(self, event: Event) -> Sequence[Effect]:
        """What is to be done now, in this order. Never waits.

        Raises ProtocolError for a message that is not legal now; only `Closed` may come after that.
        """
        if self._over:
            return self._late(event) if isinstance(event, Routed) else ()
        try:
            match event:
                case ResponseChunk():
                    effects = self._answer.chunk(event)
                case RequestChunk():
                    effects = self._request.chunk(event)
                case RequestHeaders():
                    effects = self._begin(event)
                case Routed():
                    effects = self._routed(event)
                case ResponseHeaders():
                    effects = self._answer_begins(event)
                case Edited():
                    effects = self._answer.edited(event)
                case RequestTrailers():
                    effects = self._request.trailers(event)
                case ResponseTrailers():
                    effects = self._answer.trailers(event)
                case Refused():
                    return self._refused(event)
                case Overflow():
                    return self._refuse(event.error)
                case Closed():
                    return self._closed(event)
        except RequestError as error:
            return self._refuse(error)
        if self._answer.stage is not OPEN and self._answer.done and not self._request.open:
            return self._finish(effects, Cause.NATURAL)
        return effects

    def _begin(self, event: RequestHeaders) -> list[Effect]:
        if self._answer.stage is not INITIAL:
            raise ProtocolError("request headers message after an answer had begun")
        self._answer.expect(event.modes)
        return self._request.headers(event)

    def _routed(self, event: Routed) -> list[Effect]:
        if not self._request.routing:
            raise ProtocolError("a placement that nobody asked for")
        if self._answer.stage is not INITIAL:
            return self._late(event)
        reader = answer_reader(event.api, event.model, event.target_model, self._budget, stream=event.stream)
        self._answer.placed(event.placement.ticket, reader)
        return self._request.routed(event)

    def _refused(self, event: Refused) -> list[Effect]:
        if not self._request.routing:
            raise ProtocolError("a refusal that nobody asked for")
        self._request.routing = False
        return [] if self._answer.stage is not INITIAL else self._refuse(event.error)

    def _answer_begins(self, event: ResponseHeaders) -> list[Effect]:
        effects = self._answer.headers(event)
        if self._answer.stage is not INITIAL and not self._request.picked:
            self._request.abandon()
        return effects

    def _closed(self, event: Closed) -> list[Effect]:
        if self._answer.complete or (self._answer.passes_unseen and not event.error):
            cause = Cause.NATURAL
        else:
            cause = Cause.ERROR if event.error else Cause.CLIENT_DISCONNECT
        return self._finish(self._answer.end(cause), cause)

    def _refuse(self, error: RequestError) -> list[Effect]:
        reply = Send(refusal(error, self._request.head))
        return self._finish([reply, *self._answer.end(Cause.ERROR)], Cause.NATURAL)

    def _late(self, event: Routed) -> list[Effect]:
        """A placement that will not be used, because the exchange went on or ended without it."""
        if not self._request.routing:
            return []
        self._request.routing = False
        cause = Cause.CLIENT_DISCONNECT if self._left_by_client else Cause.ERROR
        return [Observe(event.placement.ticket, Ended(cause, usage=None, chunks=0, bytes=0))]

    def _finish(self, effects: list[Effect], cause: Cause) -> list[Effect]:
        self._over = True
        self._left_by_client = cause is Cause.CLIENT_DISCONNECT
        self._request.release()
        self._answer.release()
        effects.append(Finish(cause))
        return effects
