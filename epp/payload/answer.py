"""One answer followed as it passes: first token, usage, and the client's model name put back."""

from enum import Enum
from typing import Protocol

from epp.payload import sse
from epp.payload.kept import Account, Kept
from epp.payload.records import Api, Usage
from epp.payload.renaming import RenamedJson, Renaming
from epp.payload.shapes import SHAPES, TAIL_BYTES, UNREAD
from epp.payload.sse import CARRIAGE_RETURN, END_OF_OBJECT, LINE_FEED
from epp.payload.usage import COUNT_MARK


class _Reading(Enum):
    NOTHING = 0
    EVENTS = 1
    DOCUMENT = 2


class Answer(Protocol):
    """What follows the answer of one request. Takes any bytes; never raises.

    What it keeps of the body is charged to an account, and given back by `finish` or `release`.

    Attributes:
        streaming: the answer comes piece by piece, as the model makes it.
        first_token: the first token of output has passed. Of an answer that is not read as a stream: its
            first byte. Never true of an error.
        events: events of a stream that have passed.
    """

    streaming: bool
    first_token: bool
    events: int

    @property
    def usage(self) -> Usage | None:
        """The last usage that has passed; that of a plain answer is known at its end."""
        ...

    def begin(self, status: int, content_type: str, content_encoding: str) -> bool:
        """Take note of the answer's headers. True: bytes may change, so a content-length no longer holds."""
        ...

    def feed(self, chunk: bytes, last: bool) -> bytes:
        """Follow a piece of the body. Returns the bytes to forward now: `chunk` itself if nothing changes."""
        ...

    def finish(self) -> bytes:
        """What is still held when the body has ended, by its last piece or by trailers."""
        ...

    def release(self) -> None:
        """Let go of what is kept: the answer is over, however it ended."""
        ...


class AnswerReader:
    """The answer of an HTTP API: a JSON document or a stream of events, read as the API's `Shape` tells.

    Attributes:
        streaming: the answer is a stream of events (`text/event-stream`).
        first_token: as in `Answer`.
        events: data lines of a stream, its `[DONE]` aside; one that is cut off counts too. 0 for a plain
            answer, for an error, and where the answer is not read.
    """

    __slots__ = (
        "_counts",
        "_document",
        "_is_cut",
        "_is_error",
        "_names",
        "_partial",
        "_quiet",
        "_reading",
        "_renaming",
        "_shape",
        "_usage",
        "events",
        "first_token",
        "streaming",
    )

    def __init__(self, api: Api, model: str, target_model: str, account: Account | None = None) -> None:
        """`target_model` is the name in the engine's answer, `model` the client's to put in its place."""
        shape = SHAPES.get(api, UNREAD)
        self._shape = shape
        self._counts = shape.counts() if shape.counts is not None else None
        self._names = (target_model, model)
        self._reading = _Reading.NOTHING
        self._renaming: Renaming | None = None
        self._document: RenamedJson | None = None
        self._partial = Kept(account)
        self._usage: Usage | None = None
        self._is_error = False
        self._is_cut = False
        self._quiet = False
        self.streaming = False
        self.first_token = False
        self.events = 0

    def begin(self, status: int, content_type: str, content_encoding: str) -> bool:
        media_type = content_type.partition(";")[0].strip().lower()
        shape = self._shape
        self.streaming = media_type == "text/event-stream"
        self._is_error = status >= 400
        self._reading = _Reading.NOTHING
        self._renaming = None
        if self._is_error or not shape.read:
            return False
        if content_encoding.strip().lower() not in ("", "identity"):
            return False
        if self.streaming:
            self._reading, place = _Reading.EVENTS, shape.model_in_events
        elif not media_type or media_type.endswith("json"):
            self._reading, place = _Reading.DOCUMENT, shape.model
        else:
            return False
        engine, client = self._names
        if place is None or not engine or not client or engine == client:
            return False
        self._renaming = Renaming(engine, client, place)
        self._document = RenamedJson(self._renaming)
        return True

    @property
    def usage(self) -> Usage | None:
        return self._usage

    def feed(self, chunk: bytes, last: bool) -> bytes:
        """As `Answer.feed`.

        Where the model is renamed, one event that is not whole yet is held back; `last` lets everything go.
        """
        if self._quiet and chunk.find(COUNT_MARK) < 0:
            # One event that is one line of data is what engines send.
            if (
                chunk.find(b"\n") == len(chunk) - 2
                and chunk[:5] == b"data:"
                and chunk[-3] == END_OF_OBJECT
                and chunk[-1] == LINE_FEED
                and CARRIAGE_RETURN not in chunk
            ):
                self.events += 1
                return chunk
            if chunk.endswith(sse.USUAL_ENDS):
                self.events += sse.data_line_count(chunk)
                return chunk
        match self._reading:
            case _Reading.EVENTS:
                passed = self._feed_events(chunk, last)
            case _Reading.DOCUMENT:
                passed = self._feed_document(chunk)
            case _:
                passed = chunk
                self.first_token |= bool(chunk) and not self._is_error
        return passed + self.finish() if last else passed

    def finish(self) -> bytes:
        reading, self._reading = self._reading, _Reading.NOTHING
        self._quiet = False
        held = bytes(self._partial)
        self.release()
        match reading:
            case _Reading.EVENTS:
                passed = self._read_events(held)
                return b"" if self._renaming is None else passed
            case _Reading.DOCUMENT:
                if self._counts is not None:
                    held = held.removeprefix(sse.BYTE_ORDER_MARK)
                    usage = self._counts.in_part(held) if self._is_cut else self._counts.in_document(held)
                    self._usage = usage or self._usage
                return b"" if self._renaming is None or self._document is None else self._document.finish()
            case _:
                return b""

    def release(self) -> None:
        self._partial.release()

    # -- a stream of events ------------------------------------------------------------------------

    def _feed_events(self, chunk: bytes, last: bool) -> bytes:
        renamed = self._renaming is not None
        partial = self._partial
        if not partial and chunk.endswith(sse.USUAL_ENDS):
            passed = self._read_events(chunk)
        else:
            searched = len(partial)
            partial += chunk
            whole = sse.last_end(partial, max(0, searched - sse.LONGEST_BLANK_LINE))
            text = bytes(partial[:whole])
            del partial[:whole]
            passed = self._read_events(text)
            if len(partial) > self._shape.kept_bytes:
                passed += self._give_up_on_event()
            self._partial.settle()
        self._quiet = self.first_token and self._renaming is None and not partial and not last
        return passed if renamed else chunk

    def _read_events(self, text: bytes) -> bytes:
        if text.startswith(sse.BYTE_ORDER_MARK):
            return sse.BYTE_ORDER_MARK + self._read_events(text[len(sse.BYTE_ORDER_MARK) :])
        self.events += sse.data_line_count(text)
        if self._renaming is None and self.first_token and text.find(COUNT_MARK) < 0:
            return text
        return b"".join([self._read_event(event) for event in sse.events(text)])

    def _read_event(self, event: bytes) -> bytes:
        """The event as the client gets it."""
        if self._counts is not None and event.find(COUNT_MARK) >= 0:
            data = sse.data(event)
            # The rest of an event that was too long to keep has no data line; its end may be readable.
            usage = self._counts.in_event(data) if data else self._counts.in_part(event)
            self._usage = usage or self._usage
        if not self.first_token:
            self.first_token = self._shape.has_token(sse.data(event))
        return event if self._renaming is None else self._renaming.in_event(event)

    def _give_up_on_event(self) -> bytes:
        """Memory is bounded: an event without end flows on as it is, and so does all that follows it."""
        held = bytes(self._partial)
        self.events += sse.data_line_count(held[:-TAIL_BYTES])
        del self._partial[:-TAIL_BYTES]
        self._renaming = None
        self.first_token = True
        return held

    # -- a plain answer ----------------------------------------------------------------------------

    def _feed_document(self, chunk: bytes) -> bytes:
        self.first_token |= bool(chunk)
        if self._counts is not None:
            self._partial += chunk
            if len(self._partial) > self._shape.kept_bytes:
                self._usage = self._counts.in_part(bytes(self._partial)) or self._usage
                del self._partial[:-TAIL_BYTES]
                self._is_cut = True
            self._partial.settle()
        return chunk if self._document is None else self._document.feed(chunk)
