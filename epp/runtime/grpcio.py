"""The ext-proc service over grpcio.

Messages stay bytes up to the codec, so that this transport and any other drive the same `Stream`.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs do not have it

from epp import names
from epp.runtime.health import Health
from epp.runtime.health_grpcio import health_handler
from epp.runtime.stream import Stream
from epp.runtime.transport import MakeStream, StreamCounts, failure

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # Proxies ping idle connections; answering them with GOAWAY would cut every stream.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A proxy that buffers sends a body as one message. One above the body limit still gets its 413.
_MESSAGE_PER_BODY = 2
_MESSAGE_LEAST_BYTES = 4 << 20
_MESSAGE_MOST_BYTES = (1 << 31) - 1  # of what gRPC's library can be told

_FOREVER_S = float(2**31 - 1)


@dataclass(slots=True)
class GrpcioTransport:
    """One listening ext-proc port. A `Transport`.

    Attributes:
        body_bytes: largest request body that is served.
        credentials: None serves plain HTTP/2.
        health: also served on this port when given.
    """

    make_stream: MakeStream
    counts: StreamCounts
    body_bytes: int
    credentials: grpc.ServerCredentials | None = None
    health: Health | None = None
    _server: grpc.aio.Server | None = field(default=None, init=False)

    async def start(self, address: str) -> int:
        message_bytes = max(_MESSAGE_PER_BODY * self.body_bytes, _MESSAGE_LEAST_BYTES)
        message_bytes = min(message_bytes, _MESSAGE_MOST_BYTES)
        sizes = (
            ("grpc.max_receive_message_length", message_bytes),
            ("grpc.max_send_message_length", message_bytes),
        )
        logging.getLogger("grpc._cython.cygrpc").addFilter(_worth_telling)
        server = grpc.aio.server(options=(*_OPTIONS, *sizes))
        methods = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(names.EXT_PROC_SERVICE, methods)]
        )
        if self.health is not None:
            server.add_generic_rpc_handlers([health_handler(self.health)])
        try:
            if self.credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self.credentials)
        except RuntimeError:  # its text does not say why either
            raise OSError(f"{address} is taken or not an address of this machine") from None
        await server.start()
        self._server = server
        return port

    async def drain(self) -> None:
        if self._server is not None:
            await self._server.stop(_FOREVER_S)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def _process(self, _: Any, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        """One ext-proc stream. `context.read` and `context.write` move bytes: no (de)serialisers are set."""
        loop = asyncio.current_task()
        assert loop is not None
        call = _Call(context, loop)
        try:
            stream = call.stream = self.make_stream(call.wake)
        except Exception as error:
            name, details = failure(error)
            await context.abort(grpc.StatusCode[name], details)
        self.counts.opened()
        code = grpc.StatusCode.OK
        try:
            await call.run()
            if not stream.finished:
                code = grpc.StatusCode.CANCELLED
        except asyncio.CancelledError:
            # The ordinary end: proxies reset the stream when the answer is through.
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.BaseError:  # nobody is there to write to
            code = grpc.StatusCode.CANCELLED
        except Exception as error:
            name, details = failure(error)
            code = grpc.StatusCode[name]
            await context.abort(code, details)
        finally:
            self.counts.closed(code.name)
            if stream.dropped:
                self.counts.dropped(stream.dropped)
            call.close()
            stream.closed(error=code not in _ORDINARY)


_ORDINARY = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)


def _worth_telling(record: logging.LogRecord) -> bool:
    """Not that a status could not be sent: the proxy reset the stream in the moment in which it ended.

    What else fails on a stream is heard by `_process` itself.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


class _Call:
    """Moves messages between one call and its stream.

    The reading loop writes what its own messages brought forth; a task of its own writes what a late
    routing result brings while the loop waits for a message. Only one of the two writes at a time.
    """

    __slots__ = ("_context", "_late", "_loop", "_reading", "_writing", "stream")

    stream: Stream

    def __init__(self, context: "grpc.aio.ServicerContext[bytes, bytes]", loop: "asyncio.Task[Any]") -> None:
        """`loop`: the task that calls `run`."""
        self._context = context
        self._loop = loop
        self._late: asyncio.Task[None] | None = None
        self._reading = False
        self._writing = False

    async def run(self) -> None:
        """Until the stream is finished or the proxy has half-closed. Raises what `Stream.received` raises."""
        stream = self.stream
        while not self._over:
            message = await self._read()
            if message is EOF:
                break
            stream.received(message)
            if self._late is not None:
                await self._late
            if stream.outbox:
                await self._write()
        if stream.failure is not None:
            raise stream.failure

    def wake(self) -> None:
        """A late routing result was handled. Who is writing comes to its messages too."""
        if self._late is None and not self._writing:
            self._late = asyncio.get_running_loop().create_task(self._write_late())

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()

    @property
    def _over(self) -> bool:
        return self.stream.finished or self.stream.failure is not None

    async def _read(self) -> Any:
        self._reading = True
        try:
            return await self._context.read()
        except asyncio.CancelledError:
            if not self._over:
                raise
            self._loop.uncancel()  # it was `_write_late`: nothing more is to be read
            return EOF
        finally:
            self._reading = False

    async def _write(self) -> None:
        """Empty the outbox, in order."""
        self._writing = True
        try:
            outbox = self.stream.outbox
            while outbox:
                await self._context.write(outbox.popleft())
        finally:
            self._writing = False

    async def _write_late(self) -> None:
        try:
            with suppress(grpc.aio.BaseError):  # the reading loop hears by itself that the call is over
                await self._write()
        finally:
            self._late = None
        if self._over and self._reading:
            self._loop.cancel()
