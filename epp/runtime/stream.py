"""One ext-proc stream between a transport and the exchange. The seam that every transport drives.

A transport calls `received` for each message and `closed` when the stream is over, and finds what there is to
write in `outbox`. Everything runs on the event loop's thread, so the single queue of events here is the one
inbox of the stream.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from epp.errors import RequestError
from epp.extproc.codec import decode, encode
from epp.extproc.exchange import Exchange
from epp.extproc.quick import answer_pieces
from epp.extproc.records import (
    Closed,
    Edited,
    Effect,
    Event,
    Finish,
    Observe,
    Overflow,
    Refused,
    ResponseChunk,
    Route,
    Routed,
    Send,
)
from epp.payload.records import RawRequest
from epp.runtime.tallies import Tally
from epp.scheduling.records import AnswerFact, AnswerHeaders, Completed, Edits, Metadata, TicketId

Deliver = Callable[[Routed | Refused], None]


class Routes(Protocol):
    """What a stream asks of the router."""

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        """The outcome at once, or None when `deliver` will be called with it later."""
        ...

    def gone(self, raw: RawRequest) -> None:
        """Nobody waits for the outcome any more; `deliver` is called with it all the same."""
        ...

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits: ...

    def report(self, ticket: TicketId, completed: Completed) -> Metadata:
        """What goes to the proxy with the end of an answer."""
        ...


class Stream:
    """Performs the exchange's effects.

    Attributes:
        outbox: messages for the proxy, in order; the transport empties it.
        finished: the exchange is over; when the outbox is empty, the transport ends the stream.
        failure: what a late routing result came to grief on; the transport takes it as raised by `received`.
    """

    __slots__ = (
        "_awaited",
        "_clock",
        "_durations",
        "_exchange",
        "_inbox",
        "_opened_at",
        "_routes",
        "_running",
        "_wake",
        "failure",
        "finished",
        "outbox",
    )

    def __init__(
        self,
        exchange: Exchange,
        routes: Routes,
        clock: Callable[[], float],
        wake: Callable[[], None],
        durations: Tally | None = None,
    ) -> None:
        """`wake` is called after a late routing result, outside of `received`: see what there is to do.

        `durations` is told the stream's, in seconds, when it is closed.
        """
        self._exchange = exchange
        self._durations = durations
        self._opened_at = clock()
        self._routes = routes
        self._clock = clock
        self._wake = wake
        self.outbox: deque[bytes] = deque()
        self._inbox: deque[Event] = deque()
        self._awaited: RawRequest | None = None
        self._running = False
        self.finished = False
        self.failure: Exception | None = None

    @property
    def dropped(self) -> int:
        """Body messages that came after their body had ended."""
        return self._exchange.dropped

    def received(self, message: bytes) -> None:
        """One message from the proxy.

        Raises:
            ProtocolError: it is not legal now. The caller ends the stream and calls `closed`.
        """
        event = decode(message, self._clock())
        if type(event) is ResponseChunk and not self._running:
            body = self._exchange.pass_on(event)
            if body is not None:
                self.outbox += answer_pieces(body)
                return
        self._take(event)

    def refuse(self, error: RequestError) -> None:
        """A message from the proxy that the transport could not take whole."""
        self._take(Overflow(self._clock(), error))

    @property
    def deciding(self) -> bool:
        """A routing result is awaited: `wake` will be called."""
        return self._exchange.deciding

    def closed(self, *, error: bool = False) -> None:
        """The stream is over, however it ended: `error` when it broke. Called once, last, for each stream."""
        now = self._clock()
        if self._durations is not None:
            self._durations.observe(now - self._opened_at)
        if self._awaited is not None:
            self._routes.gone(self._awaited)
            self._awaited = None
        if not self.finished:
            self._take(Closed(now, error))

    def _deliver(self, outcome: Routed | Refused) -> None:
        self._awaited = None
        try:
            self._take(outcome)
        except Exception as error:
            self.failure = error
        self._wake()

    def _take(self, event: Event) -> None:
        self._inbox.append(event)
        if self._running:  # an effect of ours led back here; the loop below goes on with it
            return
        self._running = True
        try:
            while self._inbox:
                self._perform(self._inbox.popleft())
        except Exception:
            self._inbox.clear()
            raise
        finally:
            self._running = False

    def _perform(self, event: Event) -> None:
        """Every effect, whatever becomes of the one before: what was charged is released by one of them."""
        failure: Exception | None = None
        for effect in self._exchange.receive(event):
            try:
                self._perform_one(effect, event.at)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _perform_one(self, effect: Effect, at: float) -> None:
        match effect:
            case Send(reply):
                self.outbox.append(encode(reply))
            case Observe(ticket, fact):
                self._observe(ticket, fact, at)
            case Route(raw):
                outcome = self._routes.route(raw, self._deliver)
                if outcome is None:
                    self._awaited = raw
                else:
                    self._inbox.append(outcome)
            case Finish():
                self.finished = True

    def _observe(self, ticket: TicketId, fact: AnswerFact | Completed, at: float) -> None:
        if isinstance(fact, Completed):
            self._inbox.append(Edited(at, metadata=self._routes.report(ticket, fact)))
            return
        edits = self._routes.observe(ticket, fact)
        if isinstance(fact, AnswerHeaders):
            self._inbox.append(Edited(at, edits))
