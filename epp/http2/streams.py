"""One stream that lives: its windows, what waits to be sent, and the call it carries."""

from collections import deque
from collections.abc import Callable
from typing import Final

from epp.http2.blocks import RESPONSE, TRAILERS_OK, trailers, trailers_only
from epp.http2.codes import GREATEST_WINDOW_BYTES, ErrorCode, FrameType, Status
from epp.http2.errors import CallFault, StreamFault
from epp.http2.frames import (
    DATA_WITH_MESSAGE_HEAD,
    FRAME_HEAD,
    MESSAGE_HEAD,
    MESSAGE_HEAD_BYTES,
    rst_stream,
    window_update,
)
from epp.http2.messages import MessageReader, MessageTooLarge
from epp.http2.outgoing import Outgoing
from epp.http2.ports import Call, Ending
from epp.http2.states import State

DATA: Final = int(FrameType.DATA)


class _NoCall:
    """Behind a request that is no gRPC call: nobody cares what it says."""

    def received(self, message: bytes) -> None: ...

    def too_large(self) -> None: ...

    def no_room(self) -> None: ...

    def half_closed(self) -> None: ...

    def ended(self, ending: Ending) -> None: ...


NO_CALL: Final = _NoCall()


class Stream:
    """The `Peer` of a call, and the connection's record of a stream.

    Attributes:
        state: OPEN or HALF_CLOSED while the stream lives, then how it ended.
        call: who serves it; `NO_CALL` for a request that is no gRPC call.
        window: bytes that the peer may still send.
        unreturned: bytes of it that came and are not given back yet; they are beyond `window_half`.
        credit: DATA bytes that the peer still takes.
        started: something was sent.
        reading: messages are for the call; once it has finished, or a message was refused, they are not.
        direct: a DATA payload that is one whole message can go straight to the call.
        partial: a message is not complete.
        content_left: what `content-length` says is still to come; None where it says nothing.
        held: bytes of a message in parts, as charged to the account.
        stalled_since: when it was first seen to wait for the peer without moving; None while it moves.
        refusal: headers and body that answer the request when it has ended: it is no gRPC call.
    """

    __slots__ = (
        "_finish",
        "_out",
        "_over",
        "_waiting",
        "_waiting_bytes",
        "call",
        "content_left",
        "credit",
        "direct",
        "held",
        "id",
        "partial",
        "reader",
        "reading",
        "refusal",
        "stalled_since",
        "started",
        "state",
        "unreturned",
        "window",
        "window_half",
    )

    def __init__(
        self,
        stream_id: int,
        out: Outgoing,
        window: int,
        reader: MessageReader,
        over: Callable[["Stream", Ending], None],
    ) -> None:
        """`over` is called once, when the stream has left OPEN and HALF_CLOSED."""
        self.id = stream_id
        self.state = State.OPEN
        self.call: Call = NO_CALL
        self.window = window
        self.window_half = window // 2
        self.unreturned = 0
        self.credit = out.window_bytes
        self.started = False
        self.reading = False
        self.direct = False
        self.reader = reader
        self.held = 0
        self.partial = False
        self.content_left: int | None = None
        self.stalled_since: float | None = None
        self.refusal: tuple[bytes, bytes] | None = None
        self._out = out
        self._over = over
        self._waiting: deque[bytes | memoryview] = deque()
        self._waiting_bytes = 0
        self._finish: tuple[Status, str, Ending] | None = None

    # -- for the call: see `epp.http2.ports.Peer` ------------------------------------------------------

    def send(self, message: bytes) -> None:
        out = self._out
        size = len(message) + MESSAGE_HEAD_BYTES
        if not self.started:
            self._start()
        if (
            size <= self.credit
            and size <= out.credit
            and size <= out.room
            and size <= out.max_frame_bytes
            and not self._waiting
        ):
            self.credit -= size
            out.credit -= size
            out.room -= size
            head = DATA_WITH_MESSAGE_HEAD.pack(size << 8, 0, self.id, 0, size - MESSAGE_HEAD_BYTES)
            out.parts.append(head)
            out.parts.append(message)
            return
        self._wait(MESSAGE_HEAD.pack(0, len(message)) + message)

    def finish(self, status: Status, details: str = "") -> None:
        self._finish_as(status, details, Ending.FINISHED)

    def flush(self) -> None:
        self._out.flush()

    # -- for the connection ------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Who serves it. It may have finished already."""
        self.call = call
        self.reading = self._finish is None
        self.direct = self.reading and self.content_left is None
        if self._finish is not None and not self._waiting:
            self._end()

    def take_pieces(self, payload: bytes) -> None:
        """DATA that is not just one message, for the call."""
        if not self._waiting:  # to go on sending is no sign of reading
            self.stalled_since = None
        call = self.call
        try:
            for message in self.reader.feed(payload):
                call.received(message)
                if not self.reading:
                    return
        except CallFault as fault:
            self._finish_as(fault.status, fault.details, Ending.BROKEN)
            return
        except MessageTooLarge:
            self.reading = self.direct = False
            call.too_large()
            return
        if not self._hold(self.reader.held):
            self.reading = self.direct = False
            call.no_room()
            return
        self.partial = not self.reader.complete
        self.direct = not self.partial and self.content_left is None

    def give_back(self) -> None:
        """Let the peer send more. Not while it leaves replies unread: that would pile up more of them."""
        if self._waiting or self.state is not State.OPEN:
            return
        self._out.parts.append(window_update(self.id, self.unreturned))
        self.window += self.unreturned
        self.unreturned = 0

    def half_close(self) -> None:
        """The peer has ended its side. Raises StreamFault where that is too early."""
        if not self._alive:
            return
        self.state = State.HALF_CLOSED
        if self.content_left:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "less DATA than content-length says")
        if self.refusal is not None:
            self._answer(*self.refusal)
        elif not self.reading:
            pass
        elif self.partial:
            self._finish_as(Status.INTERNAL, "the last message is cut off", Ending.BROKEN)
        else:
            self.call.half_closed()

    @property
    def waits(self) -> bool:
        """Something is to be sent that the peer, or the socket, does not take yet."""
        return bool(self._waiting)

    def grant(self, increment: int) -> bool:
        """The peer's window for this stream grew (or shrank). False where it is larger than it may be."""
        self.credit += increment
        if self._waiting:
            if self.credit > 0:
                self._out.ready(self)
            else:
                self._out.drop(self)
        return self.credit <= GREATEST_WINDOW_BYTES

    def send_waiting(self, most: int) -> bool:
        """Send one DATA frame of what waits. Whether there is more, and window for it."""
        first = self._waiting[0]
        size = min(len(first), most, self.credit)
        if size < len(first):
            piece: bytes | memoryview = memoryview(first)[:size]
            self._waiting[0] = memoryview(first)[size:]
        else:
            piece = self._waiting.popleft()
        out = self._out
        self.credit -= size
        out.credit -= size
        out.room -= size
        self._waiting_bytes -= size
        out.account.give(size)
        self.stalled_since = None
        last = not self._waiting and self.call is NO_CALL
        out.parts.append(FRAME_HEAD.pack(size << 8 | DATA, 1 if last else 0, self.id))
        out.parts.append(piece)
        if self._waiting:
            return self.credit > 0
        if self._finish is not None:
            self._end()
        elif self.unreturned > self.window_half:
            self.give_back()
        return False

    def give_up(self, status: Status, details: str, ending: Ending) -> None:
        """End it with a status, whatever waits."""
        if not self._alive:
            return
        self._discard()
        self._finish = (status, details, ending)
        if self.call is NO_CALL:
            self.cut(ErrorCode.CANCEL, ending)
        else:
            self._end()

    def cut(self, code: ErrorCode, ending: Ending) -> None:
        """Reset it."""
        if self._alive:
            self._out.parts.append(rst_stream(self.id, code))
            self.leave(State.CUT, ending)

    def leave(self, state: State, ending: Ending) -> None:
        """It is over. Everything charged for it is given back."""
        if not self._alive:
            return
        self.state = state
        self.reading = self.direct = False
        self.started = True
        self.credit = -1  # nothing is sent any more
        self._discard()
        self._over(self, ending)

    @property
    def _alive(self) -> bool:
        return self.state is State.OPEN or self.state is State.HALF_CLOSED

    def _answer(self, block: bytes, body: bytes) -> None:
        """Answer a request that is no gRPC call, with these headers and this body, which may be empty."""
        self.started = True
        self.partial = False
        self._out.headers(self.id, block, end=not body)
        self._finish = (Status.OK, "", Ending.FINISHED)
        if body:
            self._wait(body)
        else:
            self._end()

    def _finish_as(self, status: Status, details: str, ending: Ending) -> None:
        """End the call after all that was sent. The first to say so counts."""
        if self._finish is not None:
            return
        self._finish = (status, details, ending)
        self.reading = self.direct = False
        if not self._waiting and self._alive and self.call is not NO_CALL:
            self._end()

    def _hold(self, held: int) -> bool:
        """Charge what is held of a message in parts. False where it does not fit."""
        more = held - self.held
        if more <= 0:
            self._out.account.give(-more)
        elif not self._out.account.take(more):
            return False
        self.held = held
        return True

    def _start(self) -> None:
        self.started = True
        self._out.headers(self.id, RESPONSE, end=False)

    def _wait(self, data: bytes) -> None:
        if not self._alive:
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        out = self._out
        if not out.account.charge(len(data)) and (self.credit <= 0 or out.credit <= 0):
            details = "replies are not read, and no more of them can be held"
            self.give_up(Status.DEADLINE_EXCEEDED, details, Ending.STALLED)
        elif self.credit > 0:
            out.ready(self)

    def _end(self) -> None:
        """Everything was sent: the trailers, and what the peer still has to say is cut off."""
        assert self._finish is not None
        status, details, ending = self._finish
        if self.call is not NO_CALL:
            if not self.started:
                block = trailers_only(status, details)
            else:
                block = TRAILERS_OK if status is Status.OK and not details else trailers(status, details)
            self._out.headers(self.id, block, end=True)
        if self.state is State.HALF_CLOSED:
            self.leave(State.ENDED, ending)
        else:
            self.cut(ErrorCode.NO_ERROR, ending)

    def _discard(self) -> None:
        self._out.drop(self)
        self._waiting.clear()
        self._out.account.give(self._waiting_bytes + self.held)
        self._waiting_bytes = self.held = 0
