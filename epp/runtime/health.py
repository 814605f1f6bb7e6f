"""`grpc.health.v1`: Check and List.

They run on a thread of their own, so that a busy event loop is not taken for a dead process.
"""

from collections.abc import Callable
from concurrent import futures
from threading import Event
from typing import Any

import grpc

from epp import names
from epp.wire.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)


class Health:
    """Whether requests can be served. Changed on the event loop's thread, read on any.

    `liveness` says that the process runs, whatever the pool looks like. Every other known name, and the
    empty one, says that the pool is known and the picker is not draining. A pool known to be empty is
    known: its requests are refused with the reason, which a proxy that takes the picker for absent cannot
    tell.
    """

    _READY = ("", names.READINESS, names.EXT_PROC_SERVICE, names.INFERENCE_EXTENSION)

    def __init__(self) -> None:
        self._synced = Event()
        self._draining = Event()

    def synced(self) -> None:
        """The pool's first state is known."""
        self._synced.set()

    def draining(self) -> None:
        """No new requests, please."""
        self._draining.set()

    @property
    def ready(self) -> bool:
        return self._synced.is_set() and not self._draining.is_set()

    def status(self, service: str) -> "HealthCheckResponse.ServingStatus | None":
        """The `ServingStatus` of a service name; None where the name is unknown."""
        if service == names.LIVENESS:
            return HealthCheckResponse.SERVING
        if service in self._READY:
            return HealthCheckResponse.SERVING if self.ready else HealthCheckResponse.NOT_SERVING
        return None

    def statuses(self) -> "dict[str, HealthCheckResponse.ServingStatus]":
        """Of every known name."""
        known = (names.LIVENESS, *self._READY)
        return {service: status for service in known if (status := self.status(service)) is not None}


def health_handler(health: Health) -> "grpc.GenericRpcHandler[Any, Any]":
    """Check and List as a generic handler, for a synchronous or an asyncio server."""

    def check(request: HealthCheckRequest, context: grpc.ServicerContext) -> HealthCheckResponse:
        status = health.status(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(
                f"unknown service {request.service!r}; known: {', '.join(map(repr, health.statuses()))}"
            )
            return HealthCheckResponse()
        return HealthCheckResponse(status=status)

    def list_all(request: HealthListRequest, context: grpc.ServicerContext) -> HealthListResponse:
        statuses = {name: HealthCheckResponse(status=status) for name, status in health.statuses().items()}
        return HealthListResponse(statuses=statuses)

    return grpc.method_handlers_generic_handler(
        names.HEALTH_SERVICE,
        {
            "Check": _unary(check, HealthCheckRequest, HealthCheckResponse),
            "List": _unary(list_all, HealthListRequest, HealthListResponse),
        },
    )


def _unary(call: Callable[..., object], request: type, response: type) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(
        call,
        request_deserializer=request.FromString,  # type: ignore[attr-defined]
        response_serializer=response.SerializeToString,  # type: ignore[attr-defined]
    )


class HealthServer:
    """The health port."""

    def __init__(self, health: Health) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="health"),
            options=(("grpc.so_reuseport", 0),),
        )
        self._server.add_generic_rpc_handlers((health_handler(health),))

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
