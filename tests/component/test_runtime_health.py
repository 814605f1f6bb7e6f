"""gRPC health on its own port and on the ext-proc port."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import grpc.aio
import pytest

from epp.runtime.grpcio import GrpcioTransport, StreamCounts
from epp.runtime.health import Health, HealthServer
from epp.wire.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
Serving = Callable[[Health], AbstractAsyncContextManager[int]]
READY_NAMES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")


@asynccontextmanager
async def own_port(health: Health) -> AsyncIterator[int]:
    server = HealthServer(health)
    port = server.start("127.0.0.1:0")
    try:
        yield port
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def ext_proc_port(health: Health) -> AsyncIterator[int]:
    counts = StreamCounts(lambda: None, lambda code: None)
    transport = GrpcioTransport(lambda wake: pytest.fail("no stream"), counts, 1 << 20, health=health)
    port = await transport.start("127.0.0.1:0")
    try:
        yield port
    finally:
        await transport.stop()


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            HealthCheckRequest.SerializeToString,
            HealthCheckResponse.FromString,
        )
        self._list = channel.unary_unary(
            "/grpc.health.v1.Health/List",
            HealthListRequest.SerializeToString,
            HealthListResponse.FromString,
        )

    async def check(self, service: str) -> int:
        return (await self._check(HealthCheckRequest(service=service))).status

    async def list(self) -> dict[str, int]:
        answer = await self._list(HealthListRequest())
        return {name: status.status for name, status in answer.statuses.items()}


@pytest.fixture(params=[own_port, ext_proc_port], ids=["own-port", "ext-proc-port"])
def serving(request: pytest.FixtureRequest) -> Serving:
    return request.param


async def test_only_liveness_serves_before_the_pool_is_known_and_while_draining(serving: Serving) -> None:
    health = Health()
    async with serving(health) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = Client(channel)

        async def statuses() -> dict[str, int]:
            return {name: await client.check(name) for name in READY_NAMES}

        assert await statuses() == dict.fromkeys(READY_NAMES, NOT_SERVING)
        assert await client.check("liveness") == SERVING
        health.synced()
        assert await statuses() == dict.fromkeys(READY_NAMES, SERVING)
        health.draining()
        assert await statuses() == dict.fromkeys(READY_NAMES, NOT_SERVING)
        assert await client.check("liveness") == SERVING


async def test_an_unknown_name_is_not_found_and_the_known_ones_are_named(serving: Serving) -> None:
    async with serving(Health()) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Client(channel).check("nope")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'nope'" in (caught.value.details() or "")
        assert "'liveness'" in (caught.value.details() or "")


async def test_list_names_all(serving: Serving) -> None:
    health = Health()
    health.synced()
    async with serving(health) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await Client(channel).list() == dict.fromkeys(("liveness", *READY_NAMES), SERVING)


async def test_the_health_port_answers_while_the_event_loop_is_busy() -> None:
    health = Health()
    server = HealthServer(health)
    port = server.start("127.0.0.1:0")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                HealthCheckRequest.SerializeToString,
                HealthCheckResponse.FromString,
            )
            # A blocking call: nothing of this test's loop runs until the answer is there.
            assert check(HealthCheckRequest(service="liveness"), timeout=20).status == SERVING
    finally:
        server.stop()


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    first = HealthServer(Health())
    port = first.start("127.0.0.1:0")
    try:
        with pytest.raises(OSError, match=f"127.0.0.1:{port} is taken"):
            HealthServer(Health()).start(f"127.0.0.1:{port}")
    finally:
        first.stop()
