"""The request's way through an exchange: held until it is routed, then sent on.

What the proxy sends decides when the choice is made:

- FULL_DUPLEX_STREAMED (also where the proxy names no mode): the body is held until it has ended.
- BUFFERED: the proxy waits for a reply to the headers before it sends the body, so they are answered
  empty at once and the reply to the body carries the destination.
- NONE, STREAMED, BUFFERED_PARTIAL: the choice is made from the headers alone, with an empty body. Body
  messages that come nevertheless are answered unchanged.

What is held until then is charged to the budget: headers, subset hint and body.
"""

from collections.abc import Callable
from typing import Final

from epp import names
from epp.errors import BadRequest, PayloadTooLarge, Saturated
from epp.extproc.heads import CONTENT_LENGTH, RequestHead, read_request_head
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.order import (
    BUFFERED,
    ENDED,
    FULL_DUPLEX,
    INITIAL,
    NO_BODY,
    OPEN,
    TRAILED,
    WHOLE,
    Message,
    is_buffered,
    refuse_unsupported,
    takes,
)
from epp.extproc.pieces import pieces
from epp.extproc.records import (
    BodyReply,
    Direction,
    Effect,
    Headers,
    HeadersReply,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    Route,
    Routed,
    Send,
    TrailersReply,
)
from epp.payload.records import RawRequest

REQUEST = Direction.REQUEST
ENTRY_BYTES: Final = 64
"""What an entry of a subset hint takes beside its text."""

FULL: Final = "too many request bytes are in flight; retry later"


class RequestSide:
    """What the proxy sent of the request, as far as it is not sent on yet.

    Attributes:
        stage: how far the request has come.
        dropped: body messages that came after the body had ended.
        routing: a `Route` was emitted and not answered yet.
    """

    __slots__ = (
        "_abandoned",
        "_answered",
        "_beside_bytes",
        "_body",
        "_bodyless",
        "_budget",
        "_head",
        "_held",
        "_held_bytes",
        "_limits",
        "_mode",
        "_new_request_id",
        "_owed_body_replies",
        "_subset",
        "dropped",
        "routing",
        "stage",
    )

    def __init__(self, budget: BodyBudget, limits: Limits, new_request_id: Callable[[], str]) -> None:
        self._budget = budget
        self._limits = limits
        self._new_request_id = new_request_id
        self._mode = FULL_DUPLEX
        self._head: RequestHead | None = None
        self._subset: tuple[str, ...] | None = None
        self._held = bytearray()
        self._body = b""
        self._held_bytes = 0
        self._beside_bytes = 0
        self._owed_body_replies = 0
        self._bodyless = False
        self._answered = False
        self._abandoned = False
        self.stage = INITIAL
        self.dropped = 0
        self.routing = False

    @property
    def open(self) -> bool:
        """Whether body messages may still come."""
        return self.stage is OPEN and self._mode is not NO_BODY

    @property
    def picked(self) -> bool:
        """Whether the destination was sent to the proxy."""
        return self._answered

    @property
    def head(self) -> RequestHead | None:
        """What the request's headers say; None before they came."""
        return self._head

    def headers(self, event: RequestHeaders) -> list[Effect]:
        """Raises Saturated."""
        takes(REQUEST, Message.HEADERS, self.stage, self._mode)
        if event.modes is not None:
            refuse_unsupported(REQUEST, event.modes.request)
            self._mode = event.modes.request
        self._head = read_request_head(event.headers, event.end_of_stream, self._new_request_id)
        self._keep(event.size, event.subset)
        self._bodyless = event.end_of_stream
        self.stage = ENDED if event.end_of_stream else OPEN
        if self._bodyless:
            return [self._route()]
        if self._mode is FULL_DUPLEX:
            return []
        if self._mode is BUFFERED:
            return [Send(HeadersReply(REQUEST))]
        return [self._route()]

    def chunk(self, event: RequestChunk) -> list[Effect]:
        """Raises PayloadTooLarge, Saturated."""
        if not takes(REQUEST, Message.BODY, self.stage, self._mode):
            self.dropped += 1
            return []
        if is_buffered(self._mode):
            self.stage = WHOLE
        elif event.end_of_stream:
            self.stage = ENDED
        if self._abandoned:
            return []
        if not self._waits_for_body:
            return self._answer_unchanged()
        if event.subset is not None:
            self._keep(0, event.subset)
        self._hold(event.body)
        return [] if self.stage is OPEN else [self._route()]

    def trailers(self, _event: RequestTrailers) -> list[Effect]:
        """Raises BadRequest where a buffering proxy sends trailers without a body."""
        takes(REQUEST, Message.TRAILERS, self.stage, self._mode)
        came_before = self.stage
        self.stage = TRAILED
        if self._abandoned:
            return []
        if self._waits_for_body and came_before is OPEN:
            if self._mode is BUFFERED:
                raise BadRequest("request has trailers but no body; send a body")
            return [self._route()]
        return [Send(TrailersReply(REQUEST))] if self._answered else []

    def routed(self, event: Routed) -> list[Effect]:
        """What the proxy is told once the choice is made: headers first, then what was held or is owed."""
        assert self._head is not None
        self.routing = False
        self._answered = True
        destination = ",".join(endpoint.host_port for endpoint in event.placement.serving.endpoints)
        set_headers, remove_headers = self._edits(self._head, event)
        effects: list[Effect] = []
        if self._mode is BUFFERED and not self._bodyless:
            reply = BodyReply(REQUEST, event.body, set_headers, remove_headers, destination, event.scores)
            effects.append(Send(reply))
        else:
            head = HeadersReply(REQUEST, set_headers, remove_headers, destination, event.scores)
            effects.append(Send(head))
        if self._mode is FULL_DUPLEX and not self._bodyless:
            body = self._body if event.body is None else event.body
            effects += pieces(REQUEST, body, end_of_stream=self.stage is ENDED)
        effects += [Send(BodyReply(REQUEST)) for _ in range(self._owed_body_replies)]
        if self.stage is TRAILED:
            effects.append(Send(TrailersReply(REQUEST)))
        self.release()
        return effects

    def abandon(self) -> None:
        """An answer began before the request was routed: the proxy made it, and the request goes nowhere."""
        self._abandoned = True
        self.release()

    def release(self) -> None:
        """Let go of what is held, and of its share of the budget."""
        self._budget.give(self._held_bytes + self._beside_bytes)
        self._held_bytes = self._beside_bytes = 0
        self._subset = None
        self._held = bytearray()
        self._body = b""

    @property
    def _waits_for_body(self) -> bool:
        return self._mode is FULL_DUPLEX or self._mode is BUFFERED

    def _keep(self, head_bytes: int, subset: tuple[str, ...] | None) -> None:
        size = head_bytes
        if subset:
            size += sum(map(len, subset)) + ENTRY_BYTES * len(subset)
        if not self._budget.take(size):
            raise Saturated(FULL)
        self._beside_bytes += size
        self._subset = subset

    def _hold(self, chunk: bytes) -> None:
        size = len(chunk)
        limit = self._limits.body_bytes
        if self._held_bytes + size > limit:
            raise PayloadTooLarge(f"request body is larger than {limit} bytes; send at most {limit} bytes")
        if not self._budget.take(size):
            raise Saturated(FULL)
        self._held_bytes += size
        self._held += chunk

    def _route(self) -> Route:
        assert self._head is not None
        head = self._head
        self._body = bytes(self._held)
        self._held = bytearray()
        self._head = head._replace(headers=())  # the request has them now
        self.routing = True
        return Route(
            RawRequest(
                request_id=head.request_id,
                method=head.method,
                path=head.path,
                headers=head.headers,
                body=self._body,
                subset=self._subset,
                body_shown=self._bodyless or self._waits_for_body,
            )
        )

    def _answer_unchanged(self) -> list[Effect]:
        """Reply to a body message that was not waited for; not before the reply to the headers."""
        if self._answered:
            return [Send(BodyReply(REQUEST))]
        self._owed_body_replies += 1
        return []

    def _edits(self, head: RequestHead, event: Routed) -> tuple[Headers, tuple[str, ...]]:
        """Headers to set and to remove. `content-length` is set only where the proxy buffers the body."""
        set_headers: Headers = ()
        remove_headers = head.control
        if event.remove_headers:
            remove_headers += tuple(name for name in event.remove_headers if name not in remove_headers)
        if head.made_id:
            set_headers = ((names.REQUEST_ID, head.request_id.encode()),)
        given = event.placement.set_headers
        if given:
            set_headers += given
            ours = {name for name, _ in given}
            remove_headers = tuple([name for name in remove_headers if name not in ours])
        replaced = event.body is not None and self._waits_for_body and not self._bodyless
        if replaced and head.has_length:
            if self._mode is BUFFERED:
                set_headers += ((CONTENT_LENGTH, str(len(event.body or b"")).encode()),)
            elif CONTENT_LENGTH not in remove_headers:
                remove_headers += (CONTENT_LENGTH,)
        return set_headers, remove_headers
