"""The exchange between a proxy, a router and a director that speak in any legal order.

A run is drawn from a seeded generator: body modes, bodies, where they are cut, who speaks next, when the
stream is cut. An oracle that knows only the rules of the protocol looks at every effect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp import names
from epp.errors import NoEndpoints, ProtocolError
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import (
    BODY_CHUNK_BYTES,
    BodyMode,
    BodyReply,
    Closed,
    Direction,
    Edited,
    Effect,
    Event,
    Finish,
    HeadersReply,
    ImmediateReply,
    Modes,
    Observe,
    Refused,
    Reply,
    Reported,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    Route,
    Routed,
    Send,
    StreamedBodyReply,
    TrailersReply,
)
from epp.payload.records import Api
from epp.pool.records import Endpoint
from epp.scheduling.records import (
    AnswerHeaders,
    Cause,
    Completed,
    Decision,
    Ended,
    FirstToken,
    Leg,
    Metadata,
    Placement,
    Progress,
    Role,
    TicketId,
)

REQUEST, RESPONSE = Direction.REQUEST, Direction.RESPONSE
FULL_DUPLEX, BUFFERED, PARTIAL = (
    BodyMode.FULL_DUPLEX_STREAMED,
    BodyMode.BUFFERED,
    BodyMode.BUFFERED_PARTIAL,
)
MODES = (FULL_DUPLEX, FULL_DUPLEX, FULL_DUPLEX, BUFFERED, PARTIAL, BodyMode.STREAMED, BodyMode.NONE)
LENGTHS = (0, 1, 17, 900, BODY_CHUNK_BYTES - 1, BODY_CHUNK_BYTES, BODY_CHUNK_BYTES + 1, 3 * BODY_CHUNK_BYTES)
LIMITS = Limits(body_bytes=200_000, held_bytes=300_000)
DECISION = Decision("default", (0,), None, (), (), None)  # type: ignore[arg-type]
TICKET = TicketId(5)
METADATA: Metadata = (("billing", "cost", 3.0),)
SENT_MODEL, CLIENT_MODEL = b'"model":"engine-name"', b'"model":"mine"'

Message = RequestHeaders | RequestChunk | RequestTrailers | ResponseHeaders | ResponseChunk | ResponseTrailers


# -- the proxy's side: what it will send --------------------------------------------------------------


@dataclass
class Way:
    """One direction: the body on the wire, and how it is told of."""

    mode: BodyMode
    body: bytes
    messages: list[Message]
    ends: str  # "headers", "body", "trailers" or "unseen"
    told: list[Message] = field(default_factory=list)

    @property
    def bodies(self) -> list[Message]:
        return [message for message in self.told if isinstance(message, RequestChunk | ResponseChunk)]


def cut(draw: Random, body: bytes) -> list[bytes]:
    points = sorted(draw.choices(range(len(body) + 1), k=draw.choice((0, 1, 2, 5))))
    return [body[a:b] for a, b in zip([0, *points], [*points, len(body)], strict=True)]


def way(draw: Random, direction: Direction, mode: BodyMode, body: bytes, told: Modes | None) -> Way:
    ends = draw.choice(("body", "body", "trailers", "headers"))
    body = b"" if ends == "headers" else body
    parts = cut(draw, body)
    if mode is BUFFERED or mode is PARTIAL:
        parts = [body]
    elif mode is BodyMode.NONE:
        parts = []
    if draw.random() < 0.2 and len(parts) > 1:
        parts.append(b"")
    marks = [False] * len(parts)
    if ends == "body" and parts and not (mode is PARTIAL and draw.random() < 0.5):
        marks[-1] = True
    elif ends == "trailers" and mode is BUFFERED:
        marks[-1] = draw.random() < 0.5
    elif ends == "body":
        ends = "unseen"
    messages = [headers(draw, direction, ends == "headers", told)]
    if ends != "headers":
        kind = RequestChunk if direction is REQUEST else ResponseChunk
        messages += [kind(0.0, part, mark) for part, mark in zip(parts, marks, strict=True)]
    if ends == "trailers":
        messages.append(RequestTrailers(0.0) if direction is REQUEST else ResponseTrailers(0.0))
    elif ends == "body" and draw.random() < 0.2:
        messages.append(messages[-1])
    return Way(mode, body, messages, ends)


def headers(draw: Random, direction: Direction, eos: bool, modes: Modes | None) -> Message:
    if direction is REQUEST:
        fields = ((":method", b"POST"), (":path", b"/v1/completions"), ("x-prefiller-host-port", b"evil:1"))
        if draw.random() < 0.5:
            fields += (("content-length", b"1"), (names.DESTINATION_ENDPOINT, b"evil:2"))
        return RequestHeaders(0.0, fields, eos, None, modes)
    kind = draw.choice((b"application/json", b"text/event-stream", b"image/png"))
    status = draw.choice((b"200", b"200", b"200", b"429", b"503"))
    return ResponseHeaders(0.0, ((":status", status), ("content-type", kind)), eos, None)


def answer_body(draw: Random) -> bytes:
    """Junk, a document, or events; the last two name the engine's model."""
    kind = draw.randrange(3)
    if kind == 0:
        return draw.randbytes(draw.choice(LENGTHS))
    text = b'{"id":"1",' + SENT_MODEL + b',"choices":[{"text":"' + b"x" * draw.choice(LENGTHS) + b'"}]}'
    return text if kind == 1 else b"".join([b"data: " + text + b"\n\n"] * draw.choice((1, 3)))


# -- the oracle ---------------------------------------------------------------------------------------


class Oracle:
    """Looks at effects one by one; an AssertionError names the rule that was broken."""

    def __init__(self, request: Way, response: Way, budget: BodyBudget) -> None:
        self.ways = {REQUEST: request, RESPONSE: response}
        self.budget = budget
        self.replies: dict[Direction, list[Reply]] = {REQUEST: [], RESPONSE: []}
        self.facts: list[object] = []
        self.route: Route | None = None
        self.placed: Routed | None = None
        self.immediate = False
        self.completed = self.reported = False
        self.finished: Cause | None = None
        self.closed = False

    def see(self, event: Event, effects: Sequence[Effect]) -> None:
        for effect in effects:
            assert self.finished is None or isinstance(effect, Observe), "nothing but a late end after Finish"
            match effect:
                case Send(reply):
                    self._reply(reply)
                case Route():
                    assert self.route is None, "one Route"
                    self.route = effect
                case Observe(ticket, fact):
                    assert ticket == TICKET
                    assert self.placed is not None, "no facts without a placement"
                    self._fact(event.at, fact)
                case Finish(cause):
                    self._finish(cause)
        if isinstance(event, Routed) and self.sent_on(REQUEST):
            assert self.budget.used == 0, "the body is not kept once it was forwarded"

    def sent_on(self, direction: Direction) -> bool:
        return any(getattr(reply, "destination", None) for reply in self.replies[direction])

    def _reply(self, reply: Reply) -> None:
        if isinstance(reply, ImmediateReply):
            assert not self.replies[RESPONSE], "no refusal once an answer began"
            self.immediate = True
            return
        assert not self.immediate, "nothing after an immediate reply"
        if isinstance(reply, Reported):
            assert self.completed, "metadata only when it was asked for"
            assert not self.reported, "and once"
            assert reply.metadata == METADATA
            self.reported = True
            reply = reply.reply
        elif self.reported and reply.direction is RESPONSE:
            assert isinstance(reply, TrailersReply), "metadata comes last"
        before = self.replies[reply.direction]
        mode = self.ways[reply.direction].mode
        assert not any(isinstance(one, TrailersReply) for one in before), "nothing after trailers"
        if isinstance(reply, HeadersReply):
            assert not before, "one headers reply, the first"
        else:
            assert before, "headers are answered first"
        if isinstance(reply, StreamedBodyReply):
            assert mode is FULL_DUPLEX
            assert len(reply.body) <= BODY_CHUNK_BYTES
            assert not any(one.end_of_stream for one in before if isinstance(one, StreamedBodyReply)), (
                "one end"
            )
        if isinstance(reply, BodyReply):
            assert mode is not FULL_DUPLEX
        if isinstance(reply, HeadersReply | BodyReply) and reply.destination is not None:
            assert reply.direction is REQUEST
            assert not self.sent_on(REQUEST), "one destination"
            assert "x-prefiller-host-port" in reply.remove_headers
        before.append(reply)

    def _fact(self, at: float, fact: object) -> None:
        assert not any(isinstance(one, Ended) for _, one in self.facts), "Ended is last, and once"
        kinds = [type(one) for _, one in self.facts]
        match fact:
            case AnswerHeaders():
                assert not kinds
            case Completed():
                assert AnswerHeaders in kinds
                assert not self.completed
                self.completed = True
            case FirstToken():
                assert AnswerHeaders in kinds
                assert FirstToken not in kinds
            case Progress():
                assert AnswerHeaders in kinds
                assert all(at - when >= 1.0 for when, one in self.facts if isinstance(one, Progress))
        self.facts.append((at, fact))

    def _finish(self, cause: Cause) -> None:
        self.finished = cause
        assert self.budget.used == 0, "the budget is given back"
        if self.closed or self.immediate:
            return
        assert cause is Cause.NATURAL
        for direction, one in self.ways.items():
            over = one.told and _over(one.told[-1])
            never_began = direction is REQUEST and not one.told
            assert (
                over
                or never_began
                or one.mode is BodyMode.NONE
                or one.mode is PARTIAL
                or (direction is REQUEST and one.mode is BUFFERED and one.bodies)
            ), "never finish while a body is open"

    def at_the_end(self, refused: bool, own_answer: bool, replaced: bytes | None, reports: bool) -> None:
        """After everything was told, cut short or not."""
        assert self.finished is not None
        assert self.budget.used == 0
        ends = [fact for _, fact in self.facts if isinstance(fact, Ended)]
        assert len(ends) == (1 if self.placed else 0), "every ticket ends once"
        whole = not self.closed and not self.immediate
        sent = self.ways[REQUEST].body if replaced is None else replaced
        if self.sent_on(REQUEST):
            self._forwarded(REQUEST, sent, whole)
        if not refused:
            body = self.ways[RESPONSE].body
            self._forwarded(RESPONSE, body, whole and not own_answer)
        assert reports or not self.completed
        shown = self.ways[RESPONSE].ends in ("body", "trailers") and self.ways[RESPONSE].bodies
        if reports and whole and not own_answer and self.placed and shown:
            assert self.reported, "who reports is asked"

    def _forwarded(self, direction: Direction, body: bytes, whole: bool) -> None:
        one = self.ways[direction]
        replies = self.replies[direction]
        pieces = [reply for reply in replies if isinstance(reply, StreamedBodyReply)]
        edits = [reply for reply in replies if isinstance(reply, BodyReply)]
        if one.mode is FULL_DUPLEX:
            seen = b"".join(piece.body for piece in pieces)
        else:
            told = [message.body for message in one.bodies if not isinstance(message, str)]
            seen = b"".join(told[i] if reply.body is None else reply.body for i, reply in enumerate(edits))
            if one.mode is BodyMode.NONE or one.mode is PARTIAL:
                assert all(reply.body is None for reply in edits) or direction is RESPONSE
                return
            if direction is REQUEST and one.mode is BodyMode.STREAMED:
                body = one.body
        plain, renamed = body, body.replace(SENT_MODEL, CLIENT_MODEL)
        assert plain.startswith(seen) or renamed.startswith(seen), "bytes go on unchanged"
        if not whole or not one.told:
            return
        assert seen in (plain, renamed), "all bytes go on"
        if one.mode is FULL_DUPLEX and one.ends == "body":
            assert pieces
            assert pieces[-1].end_of_stream, "the end is told"
        if isinstance(one.told[-1], RequestTrailers | ResponseTrailers):
            assert isinstance(replies[-1], TrailersReply)
            assert not any(piece.end_of_stream for piece in pieces)


def _over(message: Message) -> bool:
    return isinstance(message, RequestTrailers | ResponseTrailers) or message.end_of_stream


# -- one run ------------------------------------------------------------------------------------------

MakeExchange = Callable[[BodyBudget, bool], Exchange]


class Run:
    """One exchange, and all that speak to it."""

    def __init__(self, draw: Random, make: MakeExchange, budget: BodyBudget) -> None:
        self.draw = draw
        modes = Modes(draw.choice(MODES), draw.choice(MODES)) if draw.random() < 0.9 else None
        spoken = modes or Modes(FULL_DUPLEX, FULL_DUPLEX)
        body = draw.randbytes(draw.choice(LENGTHS))
        self.request = way(draw, REQUEST, spoken.request, body, modes)
        self.response = way(draw, RESPONSE, spoken.response, answer_body(draw), None)
        self.oracle = Oracle(self.request, self.response, budget)
        # Where trailers end a streamed body there is no message left to send the rest of an event in.
        ends_unanswered = self.response.mode is BodyMode.STREAMED and self.response.ends == "trailers"
        self.renames = draw.random() < 0.5 and not ends_unanswered
        self.refuses = draw.random() < 0.1
        self.replaced = draw.randbytes(draw.choice(LENGTHS)) if self.renames and self._body_is_read else None
        self.own_answer = draw.random() < 0.15
        self.patient = draw.random() < 0.5
        self.cut_after = draw.randrange(25) if draw.random() < 0.4 else None
        self.at = 0.0
        self.edit_due = False
        self.answered_early = False
        self.reports = draw.random() < 0.5
        self.exchange = make(budget, self.reports)

    @property
    def _body_is_read(self) -> bool:
        mode = self.request.mode
        return self.request.ends != "headers" and (mode is FULL_DUPLEX or mode is BUFFERED)

    def play(self) -> None:
        steps = 0
        while self.oracle.finished is None:
            speakers = [speak for may, speak in self._speakers() if may]
            if not speakers or steps == self.cut_after:
                self.oracle.closed = True
                self._tell(Closed(self.at, self.draw.random() < 0.3))
            else:
                self.draw.choice(speakers)()
            steps += 1
        self._after_the_end()
        refused = self.oracle.immediate
        self.oracle.at_the_end(refused, self.answered_early, self.replaced, self.reports)

    def _speakers(self) -> list[tuple[bool, Callable[[], None]]]:
        request_left = self.request.messages
        began = bool(self.request.told)
        headers_answered = bool(self.oracle.replies[REQUEST])
        waits = self.request.mode is BUFFERED or (self.request.mode is not FULL_DUPLEX and self.patient)
        sent_on = self.oracle.sent_on(REQUEST)
        return [
            (bool(request_left) and (not began or not waits or headers_answered), self._next_request),
            (bool(self.response.messages) and began and (sent_on or self.own_answer), self._next_response),
            (self.oracle.route is not None and self.oracle.placed is None and not self.refuses, self._place),
            (self.oracle.route is not None and self.refuses and not self.oracle.immediate, self._refuse),
            (self.edit_due, self._edit),
        ]

    def _next_request(self) -> None:
        message = self.request.messages.pop(0)
        if self.oracle.finished is None:
            self.request.told.append(message)
        self._tell(message)

    def _next_response(self) -> None:
        message = self.response.messages.pop(0)
        if self.oracle.finished is None:
            self.response.told.append(message)
        if isinstance(message, ResponseHeaders) and not self.oracle.sent_on(REQUEST):
            self.answered_early = True
        self._tell(message)

    def _place(self) -> None:
        assert self.oracle.route is not None
        expected = self.request.body if self._body_is_read else b""
        assert self.oracle.route.raw.body == expected, "the router sees the whole body"
        leg = Leg(Role.DECODE, (Endpoint("u", "pod", "ns", "10.0.0.1", 8000),), DECISION)
        target = "engine-name" if self.renames else "mine"
        routed = Routed(self.at, Placement(TICKET, (leg,)), Api.COMPLETIONS, "mine", target, self.replaced)
        self.oracle.placed = routed
        self._tell(routed)

    def _refuse(self) -> None:
        self.oracle.route = None
        self._tell(Refused(self.at, NoEndpoints("none")))

    def _edit(self) -> None:
        self.edit_due = False
        self._tell(Edited(self.at, (), METADATA if self.oracle.completed else ()))

    def _tell(self, event: Event) -> None:
        self.at += self.draw.choice((0.0, 0.0625, 0.75))
        event = type(event)(self.at, *[getattr(event, name) for name in event.__struct_fields__[1:]])
        effects = self.exchange.receive(event)
        self.oracle.see(event, effects)
        self.edit_due |= any(
            isinstance(effect, Observe) and isinstance(effect.fact, AnswerHeaders | Completed)
            for effect in effects
        )

    def _after_the_end(self) -> None:
        """What was on its way when the exchange ended."""
        pending = [speak for may, speak in self._speakers() if may]
        self.draw.shuffle(pending)
        for speak in pending:
            speak()
        self._tell(Closed(self.at))


def exchange(budget: BodyBudget, reports: bool) -> Exchange:
    return Exchange(budget, LIMITS, lambda: "made", reports=reports)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_every_order_keeps_the_rules(seed: int) -> None:
    Run(Random(seed), exchange, BodyBudget(LIMITS.held_bytes)).play()


SEEDS = range(300)


def test_every_kind_of_run_is_drawn() -> None:
    """The runs below reach what they are meant to test."""
    natural = cut_short = refused = early = late = renamed = reported = 0
    for seed in SEEDS:
        run = Run(Random(seed), exchange, BodyBudget(LIMITS.held_bytes))
        run.play()
        oracle = run.oracle
        natural += oracle.finished is Cause.NATURAL and not oracle.closed
        cut_short += oracle.finished is Cause.CLIENT_DISCONNECT
        refused += oracle.immediate
        early += run.answered_early
        reported += oracle.reported
        late += oracle.placed is not None and not oracle.sent_on(REQUEST)
        pieces = [one.body for one in oracle.replies[RESPONSE] if isinstance(one, StreamedBodyReply)]
        renamed += CLIENT_MODEL in b"".join(pieces)
    assert min(natural, cut_short, refused, early, late, renamed, reported) >= 5


# -- faults that the oracle must see ------------------------------------------------------------------


class Faulty(Exchange):
    """Spoils the effects of a right exchange."""

    def receive(self, event: Event) -> Sequence[Effect]:
        return self.spoil(list(super().receive(event)))

    def spoil(self, effects: list[Effect]) -> list[Effect]:
        raise NotImplementedError


class ForgetsTheEnd(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        return [
            Send(StreamedBodyReply(effect.reply.direction, effect.reply.body, False))
            if isinstance(effect, Send) and isinstance(effect.reply, StreamedBodyReply)
            else effect
            for effect in effects
        ]


class DropsAByte(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        return [
            Send(StreamedBodyReply(effect.reply.direction, effect.reply.body[1:], effect.reply.end_of_stream))
            if isinstance(effect, Send) and isinstance(effect.reply, StreamedBodyReply)
            else effect
            for effect in effects
        ]


class EndsTwice(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        ends = [one for one in effects if isinstance(one, Observe) and isinstance(one.fact, Ended)]
        return ends + effects


class NeverEnds(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        return [one for one in effects if not (isinstance(one, Observe) and isinstance(one.fact, Ended))]


class AnswersBodyFirst(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        return sorted(effects, key=lambda one: isinstance(one, Send) and isinstance(one.reply, HeadersReply))


class FinishesEarly(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        begun = any(
            isinstance(one, Send) and isinstance(one.reply, HeadersReply) and one.reply.direction is RESPONSE
            for one in effects
        )
        ended = any(isinstance(one, Finish) for one in effects)
        return [*effects, Finish(Cause.NATURAL)] if begun and not ended else effects


class LateTicketsAreForgotten(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        return (
            []
            if len(effects) == 1 and isinstance(effects[0], Observe) and isinstance(effects[0].fact, Ended)
            else effects
        )


class LosesMetadata(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        return [
            Send(one.reply.reply) if isinstance(one, Send) and isinstance(one.reply, Reported) else one
            for one in effects
        ]


class ReportsOnEveryPiece(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        return [
            Send(Reported(one.reply, METADATA))
            if isinstance(one, Send)
            and isinstance(one.reply, StreamedBodyReply)
            and one.reply.direction is RESPONSE
            else one
            for one in effects
        ]


class AsksTwice(Faulty):
    def spoil(self, effects: list[Effect]) -> list[Effect]:
        asks = [one for one in effects if isinstance(one, Observe) and isinstance(one.fact, Completed)]
        return asks + effects


class Leaking(BodyBudget):
    def give(self, n: int) -> None:
        super().give(n - (n > 17))


FAULTS: list[tuple[type[Exchange], type[BodyBudget]]] = [
    (ForgetsTheEnd, BodyBudget),
    (DropsAByte, BodyBudget),
    (EndsTwice, BodyBudget),
    (NeverEnds, BodyBudget),
    (AnswersBodyFirst, BodyBudget),
    (FinishesEarly, BodyBudget),
    (LateTicketsAreForgotten, BodyBudget),
    (LosesMetadata, BodyBudget),
    (ReportsOnEveryPiece, BodyBudget),
    (AsksTwice, BodyBudget),
    (Exchange, Leaking),
]


@pytest.mark.parametrize(("broken", "budget"), FAULTS, ids=lambda kind: kind.__name__)
def test_a_fault_is_seen(broken: type[Exchange], budget: type[BodyBudget]) -> None:
    def play(seed: int) -> bool:
        def make(held: BodyBudget, reports: bool) -> Exchange:
            return broken(held, LIMITS, lambda: "made", reports=reports)

        run = Run(Random(seed), make, budget(LIMITS.held_bytes))
        try:
            run.play()
        except AssertionError:
            return True
        return False

    assert any(play(seed) for seed in SEEDS)


# -- no order at all ----------------------------------------------------------------------------------


def any_event(draw: Random, at: float) -> Event:
    body = draw.randbytes(draw.choice((0, 1, 40_000)))
    eos = draw.random() < 0.3
    modes = Modes(draw.choice(list(BodyMode)), draw.choice(list(BodyMode))) if draw.random() < 0.5 else None
    fields = tuple(
        (
            draw.choice((":status", ":path", ":method", "content-length", "x-request-id", "a")),
            draw.randbytes(3),
        )
        for _ in range(draw.randrange(4))
    )
    leg = Leg(Role.DECODE, (Endpoint("u", "pod", "ns", "fd00::1", 1),), DECISION)
    return draw.choice(
        [
            RequestHeaders(at, fields, eos, None, modes),
            RequestChunk(at, body, eos),
            RequestChunk(at, body, eos),
            RequestTrailers(at),
            ResponseHeaders(at, fields, eos, None, modes),
            ResponseChunk(at, body, eos),
            ResponseChunk(at, body, eos),
            ResponseTrailers(at),
            Routed(at, Placement(TICKET, (leg,)), Api.CHAT, "a", "b", draw.choice((None, body))),
            Refused(at, NoEndpoints("none")),
            Edited(at),
            *([Closed(at, eos)] if draw.random() < 0.1 else []),
        ]
    )


def test_any_order_of_events_raises_nothing_but_protocol_errors() -> None:
    legal = illegal = 0
    for seed in range(3000):
        draw = Random(seed)
        budget = BodyBudget(100_000)
        one = Exchange(budget, Limits(body_bytes=90_000), lambda: "made", reports=draw.random() < 0.5)
        effects: list[Effect] = []
        begin = RequestHeaders(0.0, (), draw.random() < 0.3, None, None)
        events = [begin] if draw.random() < 0.8 else []
        events += [any_event(draw, float(at)) for at in range(draw.randrange(12))]
        try:
            for event in events:
                effects += one.receive(event)
                legal += 1
        except ProtocolError:
            illegal += 1
        effects += one.receive(Closed(99.0, True))
        assert budget.used == 0
        assert sum(isinstance(effect, Finish) for effect in effects) == 1
        routed = [e for e in effects if isinstance(e, Observe)]
        assert sum(isinstance(e.fact, Ended) for e in routed) <= 1
        assert not routed or isinstance(routed[-1].fact, Ended)
    assert min(legal, illegal) > 500
