"""The answer's way through an exchange: read while it passes, folded into facts for the director."""

from bisect import bisect_left
from typing import Final

from epp import names
from epp.errors import ProtocolError
from epp.extproc.heads import CONTENT_LENGTH, read_answer_head
from epp.extproc.order import (
    BUFFERED,
    BUFFERED_PARTIAL,
    ENDED,
    FULL_DUPLEX,
    INITIAL,
    NO_BODY,
    OPEN,
    STREAMED,
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
    Edited,
    Effect,
    Headers,
    HeadersReply,
    Modes,
    Observe,
    Reported,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    Send,
    StreamedBodyReply,
    TrailersReply,
)
from epp.payload.answer import Answer
from epp.scheduling.records import (
    GAP_BOUNDS_S,
    AnswerHeaders,
    Cause,
    Completed,
    Ended,
    FirstToken,
    Gaps,
    Progress,
    TicketId,
)

RESPONSE = Direction.RESPONSE
PROGRESS_INTERVAL_S: Final = 1.0
WENT_INTO: Final[Headers] = ((names.WENT_INTO_RESPONSE_HEADERS, b"true"),)


class AnswerSide:
    """An answer without a ticket (one the proxy made itself) passes unread.

    Body messages are forwarded at once, whatever they hold; only the reader may keep back the part of
    an event in which it puts a model name back. In STREAMED mode nothing can be sent after the last
    body message, so such a part is lost where trailers cut an event in two.

    Attributes:
        stage: how far the answer has come.
        dropped: body messages that came after the body had ended.
        awaiting_edit: the director was asked for headers to set, or for metadata on the last reply, and has
            not said yet.
        complete: the whole answer has passed.
        passes_unseen: the headers were replied to, and the rest goes by without us until the stream closes.
    """

    __slots__ = (
        "_bodyless",
        "_bytes",
        "_chunks",
        "_end_told",
        "_first_token_at",
        "_first_token_told",
        "_gaps",
        "_has_length",
        "_last",
        "_last_at",
        "_mode",
        "_progress_due",
        "_reader",
        "_remove_headers",
        "_reports",
        "_ticket",
        "_waiting",
        "awaiting_edit",
        "complete",
        "dropped",
        "passes_unseen",
        "stage",
    )

    def __init__(self, reports: bool = False) -> None:
        """`reports`: the director has metadata for the last reply."""
        self._reports = reports
        self._last: BodyReply | StreamedBodyReply | TrailersReply | None = None
        self._mode = FULL_DUPLEX
        self._ticket: TicketId | None = None
        self._reader: Answer | None = None
        self._waiting: list[ResponseChunk | ResponseTrailers] = []
        self._bodyless = False
        self._has_length = False
        self._remove_headers: tuple[str, ...] = ()
        self._chunks = 0
        self._bytes = 0
        self._progress_due = 0.0
        self._first_token_told = False
        self._first_token_at = 0.0
        self._last_at = 0.0
        self._gaps: list[int] = []
        self._end_told = False
        self.stage = INITIAL
        self.dropped = 0
        self.awaiting_edit = False
        self.complete = False
        self.passes_unseen = False

    def expect(self, modes: Modes | None) -> None:
        """How the proxy sends the body; raises ProtocolError for a mode that is not spoken here."""
        if modes is not None:
            refuse_unsupported(RESPONSE, modes.response)
            self._mode = modes.response

    def placed(self, ticket: TicketId, reader: Answer) -> None:
        """The request was sent on; what comes now belongs to `ticket`."""
        self._ticket = ticket
        self._reader = reader

    @property
    def done(self) -> bool:
        """Nothing more can come, and all of it was replied to. After a buffered body trailers still can."""
        return (self.stage is ENDED or self.stage is TRAILED) and not self.awaiting_edit

    def headers(self, event: ResponseHeaders) -> list[Effect]:
        takes(RESPONSE, Message.HEADERS, self.stage, self._mode)
        head = read_answer_head(event.headers)
        if head.informational and not event.end_of_stream:
            return [Send(HeadersReply(RESPONSE))]
        self.expect(event.modes)
        self._has_length = head.has_length
        self._bodyless = event.end_of_stream
        self.stage = ENDED if event.end_of_stream else OPEN
        if self._ticket is None or self._reader is None:
            return self._answer_headers(())
        remove_length = self._reader.begin(head.status, head.content_type, head.content_encoding)
        streamed = self._mode is STREAMED or self._mode is FULL_DUPLEX
        if remove_length and streamed and not self._bodyless:
            self._remove_headers = (CONTENT_LENGTH,)
        self._progress_due = event.at + PROGRESS_INTERVAL_S
        self.awaiting_edit = True
        fact = AnswerHeaders(head.status, event.served, self._reader.streaming, head.load)
        return [Observe(self._ticket, fact)]

    def edited(self, event: Edited) -> list[Effect]:
        """Reply to the headers or to the end, and then to what came while the director was asked."""
        if not self.awaiting_edit:
            raise ProtocolError("edits of an answer that nobody asked for")
        self.awaiting_edit = False
        last, self._last = self._last, None
        waiting, self._waiting = self._waiting, []
        if last is None:
            effects = self._answer_headers(event.set_headers)
        else:
            effects = [Send(Reported(last, event.metadata) if event.metadata else last), *self._completed()]
        for position, message in enumerate(waiting):
            if isinstance(message, ResponseChunk):
                effects += self._pass_body(message, event.at)
            else:
                effects += self._pass_trailers(event.at)
            if self.awaiting_edit:  # for the end, this time
                self._waiting = waiting[position + 1 :]
                break
        return effects

    def chunk(self, event: ResponseChunk) -> list[Effect]:
        if self.stage is not OPEN and not takes(RESPONSE, Message.BODY, self.stage, self._mode):
            self.dropped += 1
            return []
        if self._mode is not FULL_DUPLEX and is_buffered(self._mode):
            self.stage = WHOLE
        elif event.end_of_stream:
            self.stage = ENDED
        if self.awaiting_edit:
            self._waiting.append(event)
            return []
        return self._pass_body(event, event.at)

    def pass_on(self, event: ResponseChunk) -> bytes | None:
        """The short way for a chunk in the midst of a full-duplex answer, when nothing is to be told.

        Returns the bytes to forward, which are all there is to do. None: nothing was done, `chunk` takes it.
        """
        body, at, reader = event.body, event.at, self._reader
        if (
            not self._first_token_told
            or reader is None
            or self.stage is not OPEN
            or self._mode is not FULL_DUPLEX
            or event.end_of_stream
            or at >= self._progress_due
            or not body
        ):
            return None
        self._chunks += 1
        self._bytes += len(body)
        self._gaps[bisect_left(GAP_BOUNDS_S, at - self._last_at)] += 1
        self._last_at = at
        return reader.feed(body, False)

    def trailers(self, event: ResponseTrailers) -> list[Effect]:
        takes(RESPONSE, Message.TRAILERS, self.stage, self._mode)
        self.stage = TRAILED
        if self.awaiting_edit:
            self._waiting.append(event)
            return []
        return self._pass_trailers(event.at)

    def end(self, cause: Cause) -> list[Effect]:
        """Tell the director, once, that the ticket has ended."""
        self._waiting = []
        if self._ticket is None or self._reader is None or self._end_told:
            return []
        self._end_told = True
        gaps = Gaps(tuple(self._gaps), self._last_at - self._first_token_at) if self._gaps else None
        return [Observe(self._ticket, Ended(cause, self._reader.usage, self._chunks, self._bytes, gaps))]

    def release(self) -> None:
        """Let go of what the reader keeps."""
        if self._reader is not None:
            self._reader.release()

    def _answer_headers(self, set_headers: Headers) -> list[Effect]:
        effects: list[Effect] = [Send(HeadersReply(RESPONSE, WENT_INTO + set_headers, self._remove_headers))]
        if self._bodyless:
            effects += self._completed()
        elif self._mode is NO_BODY:
            self.passes_unseen = True
        return effects

    def _pass_body(self, event: ResponseChunk, at: float) -> list[Effect]:
        body = event.body
        ends = event.end_of_stream or self._mode is BUFFERED
        reader = self._reader
        seen = body if reader is None else reader.feed(body, ends)
        if self._mode is FULL_DUPLEX:
            effects = pieces(RESPONSE, seen, event.end_of_stream)
        else:
            effects = [Send(self._body_reply(body, seen, ends))]
        if body:
            self._chunks += 1
            self._bytes += len(body)
            if self._first_token_told:
                self._gaps[bisect_left(GAP_BOUNDS_S, at - self._last_at)] += 1
                self._last_at = at
        if ends and self._reports:
            self._keep_last(effects)
        if reader is not None and not (self._first_token_told and at < self._progress_due):
            self._tell_progress(reader, at, ends, effects)
        if ends:
            effects += self._closing()
        elif self._mode is BUFFERED_PARTIAL:
            self.passes_unseen = True
        return effects

    def _pass_trailers(self, at: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._reader is not None:
            rest = self._reader.finish()
            if self._mode is FULL_DUPLEX:
                effects += pieces(RESPONSE, rest, end_of_stream=False)
            self._tell_progress(self._reader, at, True, effects)
        effects.append(Send(TrailersReply(RESPONSE)))
        if self._reports:
            self._keep_last(effects)
        effects += self._closing()
        return effects

    def _keep_last(self, effects: list[Effect]) -> None:
        """Hold the last reply back until the director has said what goes with it; once an answer."""
        if self._ticket is None or self._end_told:
            return
        closing = effects.pop()
        assert isinstance(closing, Send)
        assert isinstance(closing.reply, BodyReply | StreamedBodyReply | TrailersReply)
        self._last = closing.reply

    def _closing(self) -> list[Effect]:
        if self._last is None:
            return self._completed()
        assert self._ticket is not None
        assert self._reader is not None
        self.awaiting_edit = True
        return [Observe(self._ticket, Completed(self._reader.usage, self._chunks, self._bytes))]

    def _completed(self) -> list[Effect]:
        self.complete = True
        return self.end(Cause.NATURAL)

    def _tell_progress(self, reader: Answer, at: float, ends: bool, effects: list[Effect]) -> None:
        assert self._ticket is not None
        if not self._first_token_told and reader.first_token:
            self._first_token_told = True
            self._first_token_at = self._last_at = at
            self._gaps = [0] * (len(GAP_BOUNDS_S) + 1)
            effects.append(Observe(self._ticket, FirstToken()))
        if not ends and at >= self._progress_due:
            self._progress_due = at + PROGRESS_INTERVAL_S
            effects.append(Observe(self._ticket, Progress(self._chunks, self._bytes)))

    def _body_reply(self, body: bytes, seen: bytes, ends: bool) -> BodyReply:
        """Reply to a body message that wants exactly one; the body is in it only where it changes.

        A part of a body whose rest goes by unseen, and a body whose length was announced already, stay as
        they are.
        """
        if seen == body or self._mode is NO_BODY or (is_buffered(self._mode) and not ends):
            return BodyReply(RESPONSE)
        if is_buffered(self._mode) and self._has_length:
            return BodyReply(RESPONSE, seen, ((CONTENT_LENGTH, str(len(seen)).encode()),))
        return BodyReply(RESPONSE, seen)
