"""gRPC health on its own port and beside ext-proc, over both transports, with grpcio's clients."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from epp.http2.rates import Quota
from epp.runtime.grpcio import GrpcioTransport, StreamCounts
from epp.runtime.health import Health
from epp.runtime.health_calls import health_methods
from epp.runtime.health_grpcio import GrpcioHealthServer
from epp.runtime.health_server import HealthServer
from epp.runtime.own import OwnTransport
from epp.wire.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)
from tests.data.grpc.channels import ALONE

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN
READY_NAMES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")
CHECK, LIST, WATCH = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))
DEADLINE_S = 60

pytestmark = pytest.mark.timeout(400)

# -- servers --------------------------------------------------------------------------------------

AnyHealthServer = HealthServer | GrpcioHealthServer
AnyTransport = OwnTransport | GrpcioTransport
MakeServer = Callable[[Health], AnyHealthServer]
MakeTransport = Callable[[Health], AnyTransport]


def own_transport(health: Health) -> OwnTransport:
    methods = health_methods(health, asyncio.get_running_loop().call_soon_threadsafe)
    return OwnTransport(lambda wake: pytest.fail("no stream"), COUNTS, Quota(1 << 20), also=methods)


def grpcio_transport(health: Health) -> GrpcioTransport:
    return GrpcioTransport(lambda wake: pytest.fail("no stream"), COUNTS, 1 << 20, health=health)


COUNTS = StreamCounts(lambda: None, lambda code: None)
HEALTH_PORTS = {"own": HealthServer, "grpcio": GrpcioHealthServer}
EXT_PROC_PORTS = {"own": own_transport, "grpcio": grpcio_transport}


@asynccontextmanager
async def on_health_port(make: MakeServer, health: Health) -> AsyncIterator[int]:
    with running(make(health)) as port:
        yield port


@contextmanager
def running(server: AnyHealthServer) -> Iterator[int]:
    try:
        yield server.start("127.0.0.1:0")
    finally:
        server.stop()


@asynccontextmanager
async def on_ext_proc_port(make: MakeTransport, health: Health) -> AsyncIterator[int]:
    transport = make(health)
    try:
        yield await transport.start("127.0.0.1:0")
    finally:
        await transport.stop()


Serving = Callable[[Health], AbstractAsyncContextManager[int]]
SERVINGS: dict[str, Serving] = {
    **{f"{name}-health-port": lambda h, m=make: on_health_port(m, h) for name, make in HEALTH_PORTS.items()},
    **{
        f"{name}-ext-proc-port": lambda h, m=make: on_ext_proc_port(m, h)
        for name, make in EXT_PROC_PORTS.items()
    },
}


@dataclass
class Served:
    """A `Health` that is served, and a client of it."""

    health: Health
    port: int
    client: "Client"


async def until_watched_by(health: Health, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while health.watches != count:  # noqa: ASYNC110 -- it changes on other threads
            await asyncio.sleep(0.01)


@pytest.fixture(params=SERVINGS.values(), ids=SERVINGS)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    health = Health()
    async with request.param(health) as port, client_of(port) as client:
        yield Served(health, port, client)


@pytest.fixture(params=HEALTH_PORTS.values(), ids=HEALTH_PORTS)
def make_server(request: pytest.FixtureRequest) -> MakeServer:
    return request.param


@pytest.fixture(params=EXT_PROC_PORTS.values(), ids=EXT_PROC_PORTS)
def make_transport(request: pytest.FixtureRequest) -> MakeTransport:
    return request.param


# -- clients --------------------------------------------------------------------------------------


class Client:
    """Typed calls, and raw ones by `channel`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._check = channel.unary_unary(
            CHECK, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        self._list = channel.unary_unary(
            LIST, HealthListRequest.SerializeToString, HealthListResponse.FromString
        )
        self._watch = channel.unary_stream(
            WATCH, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )

    async def check(self, service: str) -> int:
        return (await self._check(HealthCheckRequest(service=service), timeout=DEADLINE_S)).status

    async def list(self) -> dict[str, int]:
        answer = await self._list(HealthListRequest(), timeout=DEADLINE_S)
        return {name: status.status for name, status in answer.statuses.items()}

    def watch(self, service: str, timeout_s: float = DEADLINE_S) -> "Watch":
        return Watch(self._watch(HealthCheckRequest(service=service), timeout=timeout_s))


class Watch:
    def __init__(self, call: "grpc.aio.UnaryStreamCall[HealthCheckRequest, HealthCheckResponse]") -> None:
        self.call = call

    async def next(self) -> int:
        message = await self.call.read()
        assert isinstance(message, HealthCheckResponse), "the watch has ended"
        return message.status

    async def refused(self) -> bool:
        """Whether there are too many; else it is told the status."""
        try:
            return await self.next() != NOT_SERVING
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return True

    async def end(self) -> tuple[list[int], grpc.StatusCode]:
        """What is still told, and the status."""
        told: list[int] = []
        with suppress(grpc.aio.AioRpcError):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                told.append(message.status if isinstance(message, HealthCheckResponse) else -1)
        return told, await self.call.code()


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[Client]:
    """With a connection of its own."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", ALONE) as channel:
        yield Client(channel)


# -- Check and List -------------------------------------------------------------------------------


async def test_only_liveness_serves_before_the_pool_is_known_and_while_draining(served: Served) -> None:
    client, health = served.client, served.health

    async def statuses() -> dict[str, int]:
        return {name: await client.check(name) for name in READY_NAMES}

    assert await statuses() == dict.fromkeys(READY_NAMES, NOT_SERVING)
    assert await client.check("liveness") == SERVING
    health.pool_known(True)
    assert await statuses() == dict.fromkeys(READY_NAMES, SERVING)
    health.draining()
    assert await statuses() == dict.fromkeys(READY_NAMES, NOT_SERVING)
    assert await client.check("liveness") == SERVING


@pytest.mark.parametrize(("name", "told"), [("nope", "'nope'"), ("ñ" * 3000, "3000 characters")])
async def test_an_unknown_name_is_not_found_and_the_known_ones_are_named(
    served: Served, name: str, told: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.check(name)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert told in (caught.value.details() or "")
    assert "'liveness'" in (caught.value.details() or "")


async def test_list_names_all(served: Served) -> None:
    assert await served.client.list() == {**dict.fromkeys(READY_NAMES, NOT_SERVING), "liveness": SERVING}
    served.health.pool_known(True)
    assert await served.client.list() == dict.fromkeys(("liveness", *READY_NAMES), SERVING)


async def test_what_is_no_request_is_an_internal_error_for_this_call_only(served: Served) -> None:
    for path in (CHECK, LIST):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.channel.unary_unary(path)(b"\xff", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    told, code = await Watch(served.client.channel.unary_stream(WATCH)(b"\xff", timeout=DEADLINE_S)).end()
    assert (told, code) == ([], grpc.StatusCode.INTERNAL)
    assert await served.client.check("liveness") == SERVING
    assert served.health.watches == 0


@pytest.mark.parametrize("path", [CHECK, LIST, WATCH])
@pytest.mark.parametrize("count", [0, 2])
async def test_the_own_transport_takes_one_request_neither_more_nor_less(path: str, count: int) -> None:
    health = Health()
    with running(HealthServer(health)) as port:
        async with client_of(port) as client:
            call = client.channel.stream_stream(path)(iter([b""] * count), timeout=DEADLINE_S)
            _, code = await Watch(call).end()
            assert code is grpc.StatusCode.UNIMPLEMENTED
            assert await client.check("liveness") == SERVING
            await until_watched_by(health, 0)


async def test_the_blocking_client_is_served_too(served: Served) -> None:
    def ask() -> tuple[int, int, list[int]]:
        with grpc.insecure_channel(f"127.0.0.1:{served.port}", ALONE) as channel:
            check = channel.unary_unary(
                CHECK, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
            )
            listed = channel.unary_unary(
                LIST, HealthListRequest.SerializeToString, HealthListResponse.FromString
            )
            watch = channel.unary_stream(
                WATCH, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
            )
            call = watch(HealthCheckRequest(service="readiness"), timeout=DEADLINE_S)
            statuses = [next(call).status]
            loop.call_soon_threadsafe(served.health.pool_known, True)
            statuses.append(next(call).status)
            call.cancel()
            return (
                check(HealthCheckRequest(), timeout=DEADLINE_S).status,
                len(listed(HealthListRequest(), timeout=DEADLINE_S).statuses),
                statuses,
            )

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(ask) == (SERVING, 5, [NOT_SERVING, SERVING])


# -- Watch ----------------------------------------------------------------------------------------


async def test_a_watcher_hears_the_status_and_each_change_in_order_without_repeats(served: Served) -> None:
    client, health = served.client, served.health
    watches = {name: client.watch(name) for name in (*READY_NAMES, "liveness", "nope")}
    first = {name: await watch.next() for name, watch in watches.items()}
    assert first == {
        **dict.fromkeys(READY_NAMES, NOT_SERVING),
        "liveness": SERVING,
        "nope": SERVICE_UNKNOWN,
    }
    health.pool_known(True)
    health.pool_known(True)
    for name in READY_NAMES:
        assert await watches[name].next() == SERVING
    health.draining()
    health.end_watches()
    for name, watch in watches.items():
        told = [NOT_SERVING] if name in READY_NAMES else []
        assert await watch.end() == (told, grpc.StatusCode.UNAVAILABLE)
    await until_watched_by(served.health, 0)


async def test_changes_without_a_pause_are_all_told(served: Served) -> None:
    watch = served.client.watch("readiness")
    assert await watch.next() == NOT_SERVING
    served.health.pool_known(True)
    served.health.draining()
    assert [await watch.next(), await watch.next()] == [SERVING, NOT_SERVING]


async def test_fifty_watchers_hear_all_while_check_answers(served: Served) -> None:
    async with client_of(served.port) as second:
        watches = [(served.client, second)[i % 2].watch("readiness") for i in range(50)]
        assert [await watch.next() for watch in watches] == [NOT_SERVING] * 50
        assert served.health.watches == 50
        assert await served.client.check("readiness") == NOT_SERVING
        served.health.pool_known(True)
        assert [await watch.next() for watch in watches] == [SERVING] * 50
        assert await second.check("readiness") == SERVING
        assert len(await second.list()) == 5


async def told_before_its_deadline(client: Client) -> bool:
    """Whether a watch heard something and then met its deadline: one that this machine can do it in."""
    for timeout_s in (1, 4, 15):
        told, code = await client.watch("readiness", timeout_s).end()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        if told:
            return told == [NOT_SERVING]
    return False


@pytest.mark.parametrize("how", ["cancel", "deadline", "connection"])
async def test_a_watcher_that_goes_away_is_not_told_any_more(served: Served, how: str) -> None:
    async with client_of(served.port) as second:
        stays = served.client.watch("readiness")
        assert await stays.next() == NOT_SERVING
        if how == "deadline":
            assert await told_before_its_deadline(second)
        else:
            leaves = second.watch("readiness")
            assert await leaves.next() == NOT_SERVING
            assert served.health.watches == 2
        if how == "cancel":
            leaves.call.cancel()
        elif how == "connection":
            await second.channel.close()
        await until_watched_by(served.health, 1)
    served.health.pool_known(True)
    assert await stays.next() == SERVING


# -- ends -----------------------------------------------------------------------------------------


async def test_draining_does_not_wait_for_watchers(make_transport: MakeTransport) -> None:
    health = Health()
    health.pool_known(True)
    transport = make_transport(health)
    async with (
        on_ext_proc_port(lambda _: transport, health) as port,
        client_of(port) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        watches = [client.watch("readiness") for _ in range(3)]
        assert [await watch.next() for watch in watches] == [SERVING] * 3
        health.draining()
        assert [await watch.next() for watch in watches] == [NOT_SERVING] * 3
        drained = asyncio.create_task(transport.drain())
        await asyncio.sleep(0.1)
        assert not drained.done()
        health.end_watches()
        await drained
        assert [await watch.end() for watch in watches] == [([], grpc.StatusCode.UNAVAILABLE)] * 3


async def test_the_health_port_stops_under_its_watchers(make_server: MakeServer) -> None:
    health = Health()
    server = make_server(health)
    async with client_of(server.start("127.0.0.1:0")) as client:
        watch = client.watch("readiness")
        assert await watch.next() == NOT_SERVING
        server.stop()
        assert health.watches == 0
        assert not [each.name for each in threading.enumerate() if each.name.startswith("health")]
        told, code = await watch.end()
        assert told == []
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    server.stop()


async def test_the_health_port_answers_while_the_event_loop_is_busy(make_server: MakeServer) -> None:
    health = Health()
    told: list[int] = []
    answered = threading.Event()

    def ask(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}", ALONE) as channel:
            check = channel.unary_unary(
                CHECK, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
            )
            watch = channel.unary_stream(
                WATCH, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
            )
            told.append(check(HealthCheckRequest(service="liveness"), timeout=DEADLINE_S).status)
            call = watch(HealthCheckRequest(service="readiness"), timeout=DEADLINE_S)
            told.append(next(call).status)
            call.cancel()
        answered.set()

    with running(make_server(health)) as port:
        client = threading.Thread(target=ask, args=(port,))
        client.start()
        # Nothing of this test's event loop runs until the answers are there.
        spins = 0
        while client.is_alive():
            spins += 1
        client.join()
    assert answered.is_set()
    assert spins > 0
    assert told == [SERVING, NOT_SERVING]


async def test_a_taken_port_is_an_error_that_names_it(make_server: MakeServer) -> None:
    with running(make_server(Health())) as port:
        second = make_server(Health())
        with pytest.raises(OSError):  # noqa: PT011 -- text differs by transport; the caller names the port
            second.start(f"127.0.0.1:{port}")
        second.stop()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("health")]


async def test_grpcio_bounds_its_watchers_and_goes_on_answering() -> None:
    health = Health()
    with running(GrpcioHealthServer(health)) as port:
        async with client_of(port) as client:
            watches = [client.watch("readiness") for _ in range(128)]
            assert [await watch.next() for watch in watches] == [NOT_SERVING] * 128
            assert await client.watch("readiness").end() == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert await client.check("liveness") == SERVING
            watches.pop().call.cancel()
            await until_watched_by(health, 127)
            # The thread that told it leaves a moment after the watch does.
            async with asyncio.timeout(DEADLINE_S):
                while await client.watch("readiness", timeout_s=DEADLINE_S).refused():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
