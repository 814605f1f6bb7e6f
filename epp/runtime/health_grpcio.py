"""`grpc.health.v1` over grpcio: beside ext-proc on its asyncio server, and on the health port.

The health port has a synchronous server. A second asyncio server would share grpcio's one queue of events
with the first: every event of ext-proc would wake the health thread too (0.55 ms a call became 0.74).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import BoundedSemaphore
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from epp import names
from epp.runtime.health import Health
from epp.runtime.health_calls import WATCH_ENDED, Refused, check, list_all, service_of, status_message
from epp.wire.health_pb2 import HealthCheckResponse

_ANSWER_THREADS: Final = 2
# Each has a thread, made when the first watch needs it.
_MOST_WATCHES: Final = 128

Answer = Callable[[Health, bytes], bytes | Refused]
AioCall: TypeAlias = "Callable[[bytes, grpc.aio.ServicerContext[bytes, bytes]], Awaitable[bytes]]"


def health_handler(health: Health) -> "grpc.GenericRpcHandler[Any, Any]":
    """Check, List and Watch for an asyncio server."""

    def answering(answer: Answer) -> "AioCall":
        async def call(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
            outcome = answer(health, message)
            if isinstance(outcome, Refused):
                await context.abort(_code(outcome), outcome.details)
            return outcome

        return call

    async def watch(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        service = service_of(message)
        if isinstance(service, Refused):
            await context.abort(_code(service), service.details)
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[HealthCheckResponse.ServingStatus | None] = asyncio.Queue()
        leave = health.watch(service, lambda status: loop.call_soon_threadsafe(told.put_nowait, status))
        try:
            while (status := await told.get()) is not None:
                await context.write(status_message(status))
        finally:
            leave()
        await context.abort(_code(WATCH_ENDED), WATCH_ENDED.details)

    return _handler(answering(check), answering(list_all), watch)


class GrpcioHealthServer:
    """The health port, on threads of its own, so that a busy event loop is not taken for a dead process."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._watches = BoundedSemaphore(_MOST_WATCHES)
        self._threads = ThreadPoolExecutor(_ANSWER_THREADS + _MOST_WATCHES, thread_name_prefix="health")
        self._server = grpc.server(self._threads, options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers(
            (_handler(self._answering(check), self._answering(list_all), self._watch),)
        )

    def start(self, address: str) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:  # its text does not say why either
            raise OSError(f"{address} is taken or not an address of this machine") from None
        self._server.start()
        return port

    def stop(self) -> None:
        """Returns when nothing runs any more."""
        self._server.stop(grace=0).wait()
        self._threads.shutdown()

    def _answering(self, answer: Answer) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def call(message: bytes, context: grpc.ServicerContext) -> bytes:
            outcome = answer(self._health, message)
            if isinstance(outcome, Refused):
                context.abort(_code(outcome), outcome.details)
            return outcome

        return call

    def _watch(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        service = service_of(message)
        if isinstance(service, Refused):
            context.abort(_code(service), service.details)
        if not self._watches.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_WATCHES} watches are open, the most on this port"
            )
        try:
            yield from self._statuses(service, context)
        finally:
            self._watches.release()

    def _statuses(self, service: str, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Until the call or the watch is over."""
        told: SimpleQueue[HealthCheckResponse.ServingStatus | None] = SimpleQueue()
        leave = self._health.watch(service, told.put)
        try:
            if not context.add_callback(lambda: told.put(None)):
                return
            while (status := told.get()) is not None:
                yield status_message(status)
        finally:
            leave()
        if context.is_active():
            context.abort(_code(WATCH_ENDED), WATCH_ENDED.details)


def _handler(check: Any, list_all: Any, watch: Any) -> "grpc.GenericRpcHandler[Any, Any]":
    """Without (de)serialisers: what goes in and comes out is bytes."""
    return grpc.method_handlers_generic_handler(
        names.HEALTH_SERVICE,
        {
            "Check": grpc.unary_unary_rpc_method_handler(check),
            "List": grpc.unary_unary_rpc_method_handler(list_all),
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
        },
    )


def _code(refused: Refused) -> grpc.StatusCode:
    """Both tables have the names of the gRPC specification."""
    return grpc.StatusCode[refused.status.name]
