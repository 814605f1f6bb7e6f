"""Messages of a proxy through the codec and the exchange behind it, with a router that takes its time."""

from collections.abc import Callable

from epp.director import Edits
from epp.errors import NoEndpoints, PayloadTooLarge, ProtocolError
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import Refused, Routed
from epp.payload.records import Api, RawRequest
from epp.pool.records import Endpoint
from epp.runtime.stream import Deliver, Stream
from epp.scheduling.records import AnswerFact, AnswerHeaders, Decision, Ended, Leg, Placement, Role, TicketId
from epp.wire.ext_proc_pb2 import BodySendMode, HeaderMap, ProcessingRequest, ProcessingResponse
from fuzz.draw import Draw

LIMITS = Limits(body_bytes=300, held_bytes=500)
# Bytes of replies for a byte of the proxy. A message of two bytes is answered by one refusal or none.
REPLY_RATIO = 8
REPLY_BYTES = 4000
DECISION = Decision("default", (0,), None, (), (), None)  # type: ignore[arg-type]
LEG = Leg(Role.DECODE, (Endpoint("u", "pod", "ns", "fd00::1", 8000),), DECISION)

BODIES = (
    b"",
    b"{",
    b'{"model":"mine","messages":[{"role":"user","content":"hi"}],"stream":true}',
    b'data: {"model":"engine","choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"model":"engine","usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    b"data: ",
    b'"model":"eng',
    b'ine"',
    b"\xff" * 200,
)
HEADERS = (
    ((b":method", b"POST"), (b":path", b"/v1/chat/completions"), (b"content-type", b"application/json")),
    ((b":method", b"GET"), (b":path", b"/v1/models")),
    ((b":status", b"200"), (b"content-type", b"text/event-stream")),
    ((b":status", b"200"), (b"content-type", b"application/json"), (b"content-encoding", b"gzip")),
    ((b":status", b"503"),),
    ((b"\xff", b"\x00"), (b"content-length", b"-1")),
    (),
)
KINDS = (
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)
MODES = (
    BodySendMode.FULL_DUPLEX_STREAMED,
    BodySendMode.BUFFERED,
    BodySendMode.BUFFERED_PARTIAL,
    BodySendMode.STREAMED,
    BodySendMode.NONE,
    BodySendMode.GRPC,
)


class Router:
    """Answers at once, later or never, as drawn. Attributes: `ended` by ticket, `waiting`."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.ended: dict[TicketId, int] = {}
        self.waiting: list[Deliver] = []

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        assert len(raw.body) <= LIMITS.body_bytes
        if self._draw.flag():
            self.waiting.append(deliver)
            return None
        return self.outcome()

    def gone(self, raw: RawRequest) -> None:
        assert self.waiting, "nobody waits"

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        assert not self.ended[ticket], f"{fact} after the end"
        self.ended[ticket] += isinstance(fact, Ended)
        return (("x-edited", b"yes"),) if isinstance(fact, AnswerHeaders) else ()

    def deliver(self) -> None:
        if self.waiting:
            self.waiting.pop()(self.outcome())

    def outcome(self) -> Routed | Refused:
        if self._draw.below(4) == 3:
            return Refused(0.0, NoEndpoints("none"))
        ticket = TicketId(len(self.ended))
        self.ended[ticket] = 0
        body = self._draw.pick((None, None, b"", b'{"model":"engine"}', b"x" * 70_000))
        return Routed(
            0.0, Placement(ticket, (LEG,)), Api.CHAT, "mine", self._draw.pick(("engine", "mine")), body
        )


def message(draw: Draw) -> bytes:
    """One message, well-formed; the bytes that follow may belong to it or be anything."""
    kind = draw.pick(KINDS)
    wire = ProcessingRequest()
    part = getattr(wire, kind)
    part.SetInParent()
    if kind.endswith("headers"):
        _add_headers(part.headers, draw)
        part.end_of_stream = draw.flag()
        if draw.flag():
            modes = wire.protocol_config
            modes.request_body_mode, modes.response_body_mode = draw.pick(MODES), draw.pick(MODES)
    elif kind.endswith("body"):
        part.body = draw.pick(BODIES) + draw.block()
        part.end_of_stream = draw.flag()
    extra = draw.block() if draw.below(8) == 0 else b""
    return bytes(wire.SerializeToString()) + extra


def _add_headers(headers: HeaderMap, draw: Draw) -> None:
    for name, value in draw.pick(HEADERS):
        headers.headers.add(key=name, raw_value=value)
    if draw.below(4) == 0:
        headers.headers.add(key=draw.block(), raw_value=draw.block())


def messages(data: bytes, make: Callable[..., Exchange] = Exchange) -> None:
    """Each step is a message, made or of raw bytes, or a result of the router; then the stream is over."""
    draw = Draw(data)
    router = Router(draw)
    budget = BodyBudget(LIMITS.held_bytes)
    exchange = make(budget, LIMITS, lambda: "an-id")
    stream = Stream(exchange, router, lambda: 1.0, lambda: None)
    sent = replied = 0
    error = False
    while draw.left and not error and not stream.finished:
        step = draw.below(8)
        if step == 0:
            router.deliver()
        elif step == 7:
            stream.refuse(PayloadTooLarge("a message too large"))
        else:
            data = draw.block() if step < 3 else message(draw)
            sent += len(data)
            error = not _received(stream, data)
        assert stream.failure is None or isinstance(stream.failure, ProtocolError)
        assert 0 <= budget.used <= LIMITS.held_bytes + sent
        replied += _replies(stream)
        assert replied <= REPLY_RATIO * sent + REPLY_BYTES + 71_000 * len(router.ended)
    stream.closed(error=error)
    while router.waiting:
        router.deliver()
    _replies(stream)
    assert stream.finished
    assert budget.used == 0, f"{budget.used} bytes were never given back"
    assert set(router.ended.values()) <= {1}, "a ticket that was not ended once"


def _received(stream: Stream, data: bytes) -> bool:
    """Whether it was legal."""
    try:
        stream.received(data)
    except ProtocolError:
        return False
    return True


def _replies(stream: Stream) -> int:
    """Takes them; each is a message that says something."""
    size = 0
    while stream.outbox:
        data = stream.outbox.popleft()
        size += len(data)
        assert ProcessingResponse.FromString(data).WhichOneof("response")
    return size
