"""The demo's Envoy configuration in a real Envoy, around a picker that always picks the same engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web

from e2e.pages import until
from epp import names
from epp.lab.envoy import BodyModes, EnvoyError, EnvoyProcess, PickerAddress, envoy_config, find_envoy
from epp.lab.stack import HEALTH_TIMEOUT_S, free_ports
from epp.runtime.tls import self_signed
from epp.wire import ext_proc_pb2 as pb
from epp.wire import health_pb2

INTERVAL_S = 0.2
BODY = b"x" * 100_000


@dataclass
class Backend:
    """An engine that answers with its port, the size of the body and the headers it got."""

    port: int
    requests: int = 0
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 22)
        app.router.add_get("/health", self.health)
        app.router.add_route("*", "/{tail:.*}", self.answer)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        size = len(await request.read())
        return web.json_response({"port": self.port, "size": size, "headers": dict(request.headers)})


@dataclass
class Picker:
    """Always picks `destination`. A port other than 0 for health makes that a server of its own."""

    port: int
    destination: int
    tls: bool = False
    health_port: int = 0
    seen: list[dict[str, str]] = field(default_factory=list)
    servers: list[grpc.aio.Server] = field(default_factory=list)

    async def start(self) -> None:
        asking = grpc.method_handlers_generic_handler(
            names.EXT_PROC_SERVICE,
            {
                "Process": grpc.stream_stream_rpc_method_handler(
                    self.process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
                )
            },
        )
        health = grpc.method_handlers_generic_handler(
            names.HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    self.check,
                    health_pb2.HealthCheckRequest.FromString,
                    health_pb2.HealthCheckResponse.SerializeToString,
                )
            },
        )
        await self.serve(self.port, self.tls, asking, *([] if self.health_port else [health]))
        if self.health_port:
            await self.serve(self.health_port, False, health)

    async def serve(self, port: int, tls: bool, *handlers: grpc.GenericRpcHandler) -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(handlers)
        if tls:
            server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([self_signed()]))
        else:
            server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        self.servers.append(server)

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop(None)
        self.servers.clear()

    async def check(
        self, request: health_pb2.HealthCheckRequest, _: object
    ) -> health_pb2.HealthCheckResponse:
        assert request.service == names.EXT_PROC_SERVICE
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def process(
        self, messages: AsyncIterator[pb.ProcessingRequest], _: object
    ) -> AsyncIterator[pb.ProcessingResponse]:
        modes = None
        async for message in messages:
            if message.HasField("protocol_config"):
                modes = message.protocol_config
            for reply in self.replies(message, modes):
                yield reply

    def replies(
        self, message: pb.ProcessingRequest, modes: pb.ProtocolConfiguration | None
    ) -> Iterator[pb.ProcessingResponse]:
        match message.WhichOneof("request"):
            case "request_headers":
                self.seen.append(
                    {h.key.decode(): h.raw_value.decode() for h in message.request_headers.headers.headers}
                )
                picked = pb.HeaderValue(
                    key=names.DESTINATION_ENDPOINT.encode(),
                    raw_value=f"127.0.0.1:{self.destination}".encode(),
                )
                prefiller = pb.HeaderValue(key=names.PREFILLER_HOST_PORT.encode(), raw_value=b"10.0.0.9:1")
                edits = pb.HeaderMutation(
                    set_headers=[pb.HeaderValueOption(header=value) for value in (picked, prefiller)]
                )
                common = pb.CommonResponse(header_mutation=edits, clear_route_cache=True)
                yield pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
            case "response_headers":
                yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
            case "request_body" | "response_body" as side:
                assert modes is not None
                streamed = getattr(modes, f"{side}_mode") == pb.FULL_DUPLEX_STREAMED
                piece = getattr(message, side)
                mutation = pb.BodyMutation(
                    streamed_response=pb.StreamedBodyResponse(
                        body=piece.body, end_of_stream=piece.end_of_stream
                    )
                )
                common = pb.CommonResponse(body_mutation=mutation) if streamed else pb.CommonResponse()
                yield pb.ProcessingResponse(**{side: pb.BodyResponse(response=common)})
            case "request_trailers" | "response_trailers" as side:
                yield pb.ProcessingResponse(**{side: pb.TrailersResponse()})


@dataclass
class Setup:
    url: str
    round_robin_url: str
    admin_port: int
    engines: list[Backend]
    picker: Picker
    session: aiohttp.ClientSession

    async def ask(self, url: str | None = None, **headers: str) -> tuple[int, dict[str, object]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(
            f"{url or self.url}/v1/chat/completions", data=BODY, headers=named
        ) as answer:
            return answer.status, await answer.json() if answer.status == 200 else {}

    async def left_alone(self) -> None:
        """Wait until Envoy knows that no picker is well."""

        async def is_known() -> bool:
            at = f"http://127.0.0.1:{self.admin_port}/stats?filter=^cluster.picker.membership_healthy$"
            async with self.session.get(at) as answer:
                return (await answer.text()).strip() == "cluster.picker.membership_healthy: 0"

        await until(is_known, "Envoy knows that its picker is gone")

    async def ports(self, count: int, url: str | None = None, **headers: str) -> list[object]:
        """Who answered: a port, or the status that came instead."""
        answers = [await self.ask(url, **headers) for _ in range(count)]
        assert all(content["size"] == len(BODY) for status, content in answers if status == 200)
        return [content["port"] if status == 200 else status for status, content in answers]


@asynccontextmanager
async def around_envoy(
    *,
    fail_open: bool = True,
    mode: BodyModes = BodyModes.FULL_DUPLEX,
    tls: bool = False,
    health_port: bool = False,
) -> AsyncIterator[Setup]:
    listen, admin, round_robin, picking, checking, *engine_ports = free_ports(8)
    engines = [Backend(port) for port in engine_ports]
    picker = Picker(picking, engine_ports[1], tls, checking if health_port else 0)
    config = envoy_config(
        listen_port=listen,
        admin_port=admin,
        pickers=[PickerAddress("127.0.0.1", picking, picker.health_port or None)],
        endpoints=[("127.0.0.1", port) for port in engine_ports],
        fail_open=fail_open,
        mode=mode,
        tls=tls,
        round_robin_port=round_robin,
        health_interval_s=INTERVAL_S,
        health_timeout_s=HEALTH_TIMEOUT_S,
    )
    async with AsyncExitStack() as stack:
        for server in (*engines, picker):
            await server.start()
            stack.push_async_callback(server.stop)
        await stack.enter_async_context(EnvoyProcess(find_envoy(), config, admin_port=admin))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        base = "http://127.0.0.1"
        yield Setup(f"{base}:{listen}", f"{base}:{round_robin}", admin, engines, picker, session)


FORGED = {
    "x_gateway_destination_endpoint_subset": "127.0.0.1:1",
    "x_gateway_destination_endpoint_served": "127.0.0.1:1",
    "x_data_parallel_host_port": "127.0.0.1:1",
    "x_encoder_hosts_ports": "127.0.0.1:1",
    "x_kv_cache_source_host_port": "127.0.0.1:1",
    "x_prefiller_host_port": "127.0.0.1:1",
}
CONTROL = {"x_llm_d_inference_objective": "critical", "x_slo_ttft_ms": "200", "x_request_id": "mine"}


async def test_picker_decides_and_hears_what_clients_may_say() -> None:
    async with around_envoy() as setup:
        forged = {**FORGED, "x_gateway_destination_endpoint": f"127.0.0.1:{setup.admin_port}"}
        assert await setup.ports(4, **forged) == [setup.picker.destination] * 4
        _, content = await setup.ask(**forged, **CONTROL)
        engine_saw = {name.lower(): value for name, value in content["headers"].items()}
        picker_saw = setup.picker.seen[-1]
        assert picker_saw["x-llm-d-inference-objective"] == "critical"
        assert picker_saw["x-slo-ttft-ms"] == "200"
        assert picker_saw["x-request-id"] == "mine"
        assert not {name.replace("_", "-") for name in forged} & set(picker_saw)
        # What the picker itself said arrives; of the client's control headers nothing does.
        expected = {names.DESTINATION_ENDPOINT, names.PREFILLER_HOST_PORT}
        assert names.CONTROL_HEADERS & set(engine_saw) == expected
        assert engine_saw[names.PREFILLER_HOST_PORT] == "10.0.0.9:1"


async def test_without_a_picker_requests_go_to_engines_that_are_well() -> None:
    async with around_envoy() as setup:
        dead, *alive = (engine.port for engine in setup.engines)
        seen = list(setup.picker.seen)
        await setup.picker.stop()
        await setup.left_alone()
        assert set(await setup.ports(9)) == {dead, *alive}
        await setup.engines[0].stop()
        # Refused by the dead engine, a request goes to another until the check has found out; then at once.
        assert set(await setup.ports(9)) == set(alive)
        forged = {**FORGED, "x_gateway_destination_endpoint": f"127.0.0.1:{setup.admin_port}"}
        assert set(await setup.ports(6, **forged)) == set(alive)
        _, content = await setup.ask(**forged, **CONTROL)
        assert not names.CONTROL_HEADERS & {name.lower() for name in content["headers"]}

        await setup.picker.start()
        while setup.picker.seen == seen:
            assert set(await setup.ports(1)) <= set(alive)
            await asyncio.sleep(0.05)
        assert await setup.ports(6) == [setup.picker.destination] * 6


async def test_fail_closed_refuses_without_a_picker() -> None:
    async with around_envoy(fail_open=False) as setup:
        assert await setup.ports(2) == [setup.picker.destination] * 2
        await setup.picker.stop()
        statuses = await setup.ports(3, x_gateway_destination_endpoint=f"127.0.0.1:{setup.admin_port}")
        await setup.left_alone()
        statuses += await setup.ports(3)
        assert all(isinstance(status, int) and 500 <= status < 600 for status in statuses), statuses


async def test_round_robin_listener_asks_no_picker() -> None:
    async with around_envoy() as setup:
        answered = await setup.ports(9, setup.round_robin_url)
        assert {port: answered.count(port) for port in answered} == {
            engine.port: 3 for engine in setup.engines
        }
        assert setup.picker.seen == []


@pytest.mark.parametrize(
    ("mode", "tls"),
    [(BodyModes.BUFFERED, False), (BodyModes.HEADERS_ONLY, False), (BodyModes.FULL_DUPLEX, True)],
)
async def test_every_mode_and_tls(mode: BodyModes, tls: bool) -> None:
    async with around_envoy(mode=mode, tls=tls) as setup:
        assert await setup.ports(3) == [setup.picker.destination] * 3


async def test_tls_with_a_plain_health_port() -> None:
    async with around_envoy(tls=True, health_port=True) as setup:
        assert await setup.ports(3) == [setup.picker.destination] * 3


async def test_envoy_that_refuses_its_configuration_says_why() -> None:
    envoy = EnvoyProcess(find_envoy(), "static_resources: {listenerz: []}", admin_port=free_ports(1)[0])
    with pytest.raises(EnvoyError, match="(?s)ended at once with status 1.*listenerz"):
        await envoy.start()
    assert envoy.returncode == 1
    await envoy.stop()


async def test_envoy_that_is_late_is_stopped() -> None:
    # Ready is asked of a port where this Envoy has no admin page.
    envoy = EnvoyProcess(find_envoy(), "static_resources: {}", admin_port=free_ports(1)[0])
    with pytest.raises(EnvoyError, match="not ready after 0.5 s"):
        await envoy.start(timeout_s=0.5)
    assert envoy.returncode is not None
