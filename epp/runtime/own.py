"""The ext-proc service over the picker's own HTTP/2."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from epp import names
from epp.errors import PayloadTooLarge, RequestError, Saturated
from epp.extproc.request_side import FULL
from epp.http2.codes import Status
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.limits import Http2Limits
from epp.http2.ports import Account, Call, Ending, Methods, Peer
from epp.runtime.http2 import Http2Server
from epp.runtime.stream import Stream
from epp.runtime.transport import MakeStream, StreamCounts, failure

_STATUS_OF_ENDING = {
    Ending.FINISHED: Status.CANCELLED,
    Ending.RESET: Status.CANCELLED,
    Ending.LOST: Status.UNAVAILABLE,
    Ending.BROKEN: Status.INTERNAL,
    Ending.DEADLINE: Status.DEADLINE_EXCEEDED,
    Ending.STALLED: Status.DEADLINE_EXCEEDED,
}
_ORDINARY = (Status.OK, Status.CANCELLED)


@dataclass(slots=True)
class OwnTransport:
    """One listening ext-proc port. A `Transport`.

    Attributes:
        account: where bytes held for the proxy are charged.
        tls: None serves plain HTTP/2.
        also: other methods served on this port.
        told: hears of what peers do wrong.
    """

    make_stream: MakeStream
    counts: StreamCounts
    account: Account
    limits: Http2Limits = field(default_factory=Http2Limits)
    tls: ssl.SSLContext | None = None
    also: Methods = field(default_factory=dict)
    told: Callable[[ConnectionFault | StreamFault], None] = lambda fault: None
    _server: Http2Server | None = field(default=None, init=False)

    async def start(self, address: str) -> int:
        methods = {**self.also, names.EXT_PROC_METHOD: self._process}
        self._server = Http2Server(methods, self.limits, self.account, tls=self.tls, told=self.told)
        return await self._server.start(address)

    async def drain(self) -> None:
        if self._server is not None:
            await self._server.drain()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def _process(self, peer: Peer) -> Call:
        try:
            return Process(peer, self.make_stream, self.counts)
        except Exception as error:  # is told; the other streams of the connection do not hear of it
            name, details = failure(error)
            peer.finish(Status[name], details)
            return _Unmade()


class _Unmade:
    """Behind a stream that could not be made. It is finished already, so nobody listens."""

    def received(self, message: bytes) -> None: ...

    def too_large(self) -> None: ...

    def no_room(self) -> None: ...

    def half_closed(self) -> None: ...

    def ended(self, ending: Ending) -> None: ...


class Process:
    """One ext-proc stream as an HTTP/2 call."""

    __slots__ = ("_code", "_counts", "_half_closed", "_peer", "_send", "_stream")

    def __init__(self, peer: Peer, make_stream: MakeStream, counts: StreamCounts) -> None:
        self._peer = peer
        self._send = peer.send
        self._counts = counts
        self._code: Status | None = None
        self._half_closed = False
        self._stream: Stream = make_stream(self._wake)
        counts.opened()

    def received(self, message: bytes) -> None:
        stream = self._stream
        try:
            stream.received(message)
        except Exception as error:
            self._fail(error)
            return
        outbox = stream.outbox
        while outbox:
            self._send(outbox.popleft())
        if stream.finished:
            self._finish(Status.OK)

    def too_large(self) -> None:
        self._refuse(PayloadTooLarge("message of the proxy is larger than the limit of request bodies"))

    def no_room(self) -> None:
        self._refuse(Saturated(FULL))

    def half_closed(self) -> None:
        """The proxy says no more. What is being decided for it is still sent."""
        self._half_closed = True
        self._go_on()

    def ended(self, ending: Ending) -> None:
        code = _STATUS_OF_ENDING[ending] if self._code is None else self._code
        self._code = code
        stream = self._stream
        self._counts.closed(code.name)
        if stream.dropped:
            self._counts.dropped(stream.dropped)
        try:
            stream.closed(error=code not in _ORDINARY)
        except Exception as error:  # is told; the other streams of the connection do not hear of it
            failure(error)

    def _wake(self) -> None:
        """A late routing result was handled."""
        if self._stream.failure is not None:
            self._fail(self._stream.failure)
        else:
            self._go_on()
        self._peer.flush()

    def _go_on(self) -> None:
        stream = self._stream
        while stream.outbox:
            self._send(stream.outbox.popleft())
        if stream.finished:
            self._finish(Status.OK)
        elif self._half_closed and not stream.deciding:
            self._peer.finish(Status.OK)  # in good order, and yet the proxy has given up its request

    def _refuse(self, error: RequestError) -> None:
        try:
            self._stream.refuse(error)
        except Exception as fault:
            self._fail(fault)
        else:
            self._go_on()

    def _fail(self, error: Exception) -> None:
        name, details = failure(error)
        self._finish(Status[name], details)

    def _finish(self, status: Status, details: str = "") -> None:
        if self._code is None:
            self._code = status
            self._peer.finish(status, details)
