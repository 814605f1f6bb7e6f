"""One answer followed as it passes: first token, usage, and the client's model name put back."""

from enum import Enum
from typing import Any, Protocol

import msgspec

from epp.payload import sse
from epp.payload.records import Api, Usage
from epp.payload.renaming import RenamedJson, Renaming
from epp.payload.usage import last_usage, usage_of

EXACT_BYTES = 4 * 1024 * 1024
"""A plain answer, or one event of a stream, is read whole up to this length."""

_TAIL_BYTES = 64 * 1024


class _Reading(Enum):
    NOTHING = 0
    EVENTS = 1
    DOCUMENT = 2


class Account(Protocol):
    """Where bytes that are kept are counted."""

    def charge(self, n: int) -> None: ...

    def give(self, n: int) -> None: ...


class AnswerReader:
    """Follows the answer of one request. Takes any bytes; never raises.

    What it keeps of the body is charged to an account, and given back by `finish` or `release`.

    Attributes:
        streaming: the answer is a stream of events (`text/event-stream`).
        first_token: the first token of output has passed. Of an answer that is not read as a stream: its
            first byte. Never true of an error.
    """

    __slots__ = (
        "_account",
        "_api",
        "_charged",
        "_document",
        "_is_error",
        "_names",
        "_partial",
        "_quiet",
        "_reading",
        "_renaming",
        "_usage",
        "first_token",
        "streaming",
    )

    def __init__(self, api: Api, model: str, target_model: str, account: Account | None = None) -> None:
        """`target_model` is the name in the engine's answer, `model` the client's to put in its place."""
        self._account = account
        self._charged = 0
        self._api = api
        self._names = (target_model, model)
        self._reading = _Reading.NOTHING
        self._renaming: Renaming | None = None
        self._document: RenamedJson | None = None
        self._partial = bytearray()
        self._usage: Usage | None = None
        self._is_error = False
        self._quiet = False
        self.streaming = False
        self.first_token = False

    def begin(self, status: int, content_type: str, content_encoding: str) -> bool:
        """Take note of the answer's headers. True: bytes may change, so a content-length no longer holds."""
        media_type = content_type.partition(";")[0].strip().lower()
        self.streaming = media_type == "text/event-stream"
        self._is_error = status >= 400
        self._reading = _Reading.NOTHING
        self._renaming = None
        if self._is_error or self._api is Api.PASSTHROUGH:
            return False
        if content_encoding.strip().lower() not in ("", "identity"):
            return False
        if self.streaming:
            self._reading = _Reading.EVENTS
        elif not media_type or media_type.endswith("json"):
            self._reading = _Reading.DOCUMENT
        else:
            return False
        engine, client = self._names
        if not engine or not client or engine == client:
            return False
        self._renaming = Renaming(engine, client)
        self._document = RenamedJson(self._renaming)
        return True

    @property
    def usage(self) -> Usage | None:
        """The last usage that has passed; that of a plain answer is known at its end."""
        return self._usage

    def feed(self, chunk: bytes, last: bool) -> bytes:
        """Follow a piece of the body. Returns the bytes to forward now: `chunk` itself where nothing changes.

        Where the model is renamed, one event that is not whole yet is held back; `last` lets everything go.
        """
        if self._quiet and b'"usage"' not in chunk and chunk.endswith(sse.USUAL_ENDS):
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
        """What is still held when the body has ended, by its last piece or by trailers."""
        reading, self._reading = self._reading, _Reading.NOTHING
        self._quiet = False
        held = bytes(self._partial)
        self.release()
        match reading:
            case _Reading.EVENTS:
                passed = self._read_events(held)
                return b"" if self._renaming is None else passed
            case _Reading.DOCUMENT:
                self._usage = usage_of(held) or self._usage
                return b"" if self._renaming is None or self._document is None else self._document.finish()
            case _:
                return b""

    def release(self) -> None:
        """Let go of what is kept: the answer is over, however it ended."""
        self._partial.clear()
        self._settle()

    def _settle(self) -> None:
        """Bring the account to what is kept."""
        kept = len(self._partial)
        if self._account is not None:
            if kept > self._charged:
                self._account.charge(kept - self._charged)
            else:
                self._account.give(self._charged - kept)
        self._charged = kept

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
            if len(partial) > EXACT_BYTES:
                passed += self._give_up_on_event()
            self._settle()
        self._quiet = self.first_token and self._renaming is None and not partial and not last
        return passed if renamed else chunk

    def _read_events(self, text: bytes) -> bytes:
        if self._renaming is None and self.first_token and b'"usage"' not in text:
            return text
        return b"".join([self._read_event(event) for event in sse.events(text)])

    def _read_event(self, event: bytes) -> bytes:
        """The event as the client gets it."""
        if b'"usage"' in event:
            # The rest of an event that was too long to keep has no data line; its end may be readable.
            self._usage = usage_of(sse.data(event) or event) or self._usage
        if not self.first_token:
            self.first_token = _has_token(self._api, sse.data(event))
        return event if self._renaming is None else self._renaming.in_event(event)

    def _give_up_on_event(self) -> bytes:
        """Memory is bounded: an event without end flows on as it is, and so does all that follows it."""
        held = bytes(self._partial)
        del self._partial[:-_TAIL_BYTES]
        self._renaming = None
        self.first_token = True
        return held

    # -- a plain answer ----------------------------------------------------------------------------

    def _feed_document(self, chunk: bytes) -> bytes:
        self.first_token |= bool(chunk)
        self._partial += chunk
        if len(self._partial) > EXACT_BYTES:
            self._usage = last_usage(bytes(self._partial)) or self._usage
            del self._partial[:-_TAIL_BYTES]
        self._settle()
        return chunk if self._document is None else self._document.feed(chunk)


class _Choice(msgspec.Struct):
    delta: Any = None
    finish_reason: Any = None
    token_ids: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_event = msgspec.json.Decoder(_Event)


def _has_token(api: Api, data: bytes) -> bool:
    """Whether an event carries output. A chat opens with a delta that says only whose turn it is."""
    try:
        choices = _event.decode(data).choices
    except (msgspec.DecodeError, RecursionError):
        return False
    return any(api is Api.COMPLETIONS or _has_output(choice) for choice in choices)


def _has_output(choice: _Choice) -> bool:
    if choice.finish_reason is not None or choice.token_ids:
        return True
    delta = choice.delta
    if not isinstance(delta, dict):
        return False
    return "role" not in delta or any(value for name, value in delta.items() if name != "role")
