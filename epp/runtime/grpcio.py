"""The ext-proc service over grpcio.

Messages stay bytes up to the codec, so that this transport and any other drive the same `Stream`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs do not have it

from epp import names
from epp.errors import ProtocolError
from epp.runtime.health import Health, health_handler
from epp.runtime.stream import Stream

# Body chunks are at most a few MiB; Envoy's own limit on a message is far below this.
_MESSAGE_BYTES = 16 << 20

_OPTIONS = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # Proxies ping idle connections; answering them with GOAWAY would cut every stream.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)

_FOREVER_S = float(2**31 - 1)

MakeStream = Callable[[Callable[[], None]], Stream]


@dataclass(slots=True)
class StreamCounts:
    """How streams end, for metrics."""

    opened: Callable[[], None]
    closed: Callable[[str], None]


@dataclass(slots=True)
class GrpcioTransport:
    """One listening ext-proc port.

    Attributes:
        make_stream: makes the stream behind one call, given its `wake`.
        credentials: None serves plain HTTP/2.
        health: also served on this port when given.
    """

    make_stream: MakeStream
    counts: StreamCounts
    credentials: grpc.ServerCredentials | None = None
    health: Health | None = None
    _server: grpc.aio.Server = field(init=False)

    async def start(self, address: str) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        self._server = grpc.aio.server(options=_OPTIONS)
        methods = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(names.EXT_PROC_SERVICE, methods)]
        )
        if self.health is not None:
            self._server.add_generic_rpc_handlers([health_handler(self.health)])
        try:
            if self.credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self.credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        await self._server.start()
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Take no new streams; wait for those in flight, at most `grace_s` (None: as long as they last)."""
        await self._server.stop(grace_s if grace_s is not None else _FOREVER_S)

    async def _process(self, _: Any, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        """One ext-proc stream. `context.read` and `context.write` move bytes: no (de)serialisers are set."""
        late = _Late(context)
        stream = late.stream = self.make_stream(late.wake)
        self.counts.opened()
        code = "OK"
        try:
            while not stream.finished:
                message = await context.read()
                if message is EOF:
                    break
                stream.received(message)
                await late.flush()
        except ProtocolError as error:
            code = "INVALID_ARGUMENT"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (
            asyncio.CancelledError
        ):  # the ordinary end: proxies reset the stream when the answer is through
            code = "CANCELLED"
            raise
        finally:
            self.counts.closed(code)
            late.over = True
            if not stream.finished:
                stream.closed(error=code == "INVALID_ARGUMENT")


class _Late:
    """Writes a stream's outbox: at once for the reading loop, by a task for what comes while it waits."""

    __slots__ = ("_context", "_flushing", "_task", "over", "stream")

    stream: Stream

    def __init__(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        self._context = context
        self._flushing = False
        self._task: asyncio.Task[None] | None = None
        self.over = False

    def wake(self) -> None:
        if not self.over and not self._flushing:
            self._task = asyncio.get_running_loop().create_task(self.flush())

    async def flush(self) -> None:
        if self._flushing:  # the one that is at it will come to these messages
            return
        self._flushing = True
        try:
            while self.stream.outbox and not self.over:
                await self._context.write(self.stream.outbox.popleft())
        finally:
            self._flushing = False
