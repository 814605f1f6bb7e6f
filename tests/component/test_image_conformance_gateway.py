"""The image's picker for conformance tests behind a real proxy that reports which endpoint served."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc.aio
import pytest
import pytest_asyncio
from aiohttp import web

from epp import names
from epp.lab.envoy import EnvoyProcess, find_envoy
from epp.lab.stack import free_ports
from epp.wire.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tests.data.grpc.channels import ALONE
from tests.data.kube import kustomize

ROOT = Path(__file__).resolve().parents[2]
# No host name, since none has a `|`. A proxy that calls the cluster of a Service so says this in its place.
CLUSTER = "outbound|9002||primary-endpoint-picker-svc.inference-conformance-app-backend.svc.cluster.local"
SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
ECHO = "X-Echo-Set-Header"
BODY = {"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"}
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
DEADLINE_S = 60.0
ADDRESS = web.AppKey("address", str)


async def echo(request: web.Request) -> web.Response:
    """Says what came and where; `X-Echo-Set-Header: name:value` asks for a header in the answer."""
    told = {"path": request.path, "served_by": request.app[ADDRESS], "headers": dict(request.headers)}
    wanted = request.headers.get(ECHO, "")
    name, _, value = wanted.partition(":")
    return web.json_response(
        told | {"body": (await request.read()).decode()}, headers={name: value} if name else {}
    )


@asynccontextmanager
async def engines(port: int) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for address in ADDRESSES:
            app = web.Application()
            app[ADDRESS] = f"{address}:{port}"
            app.router.add_route("*", "/{path:.*}", echo)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, address, port).start()
        yield


def suite_arguments() -> list[str]:
    """Those of the suite's picker."""
    first = kustomize.read(ROOT / "tests/data/kube/conformance-pickers.yaml")[0]
    given: list[str] = first["spec"]["template"]["spec"]["containers"][0]["args"]
    return given


async def health(port: int) -> int | None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", ALONE) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            HealthCheckRequest.SerializeToString,
            HealthCheckResponse.FromString,
        )
        try:
            return int((await check(HealthCheckRequest(service=names.INFERENCE_EXTENSION))).status)
        except grpc.aio.AioRpcError:
            return None


def text(log: Path) -> str:
    return log.read_text()


@asynccontextmanager
async def picker(log: Path, port: int, health_port: int, *more: str) -> AsyncIterator[None]:
    arguments = [{"9002": str(port), "9003": str(health_port)}.get(each, each) for each in suite_arguments()]
    command = (sys.executable, "-m", "epp.cli", "serve", "--config-file=manifests/conformance/config.yaml")
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *command, *arguments, *more, "--metrics-port=0", "--admin-port=0", cwd=ROOT, stderr=output
        )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while await health(health_port) != HealthCheckResponse.SERVING:
                assert child.returncode is None, text(log)
                await asyncio.sleep(0.05)
        yield
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def gateway_config(listen_port: int, admin_port: int, picker_port: int, engine_port: int) -> str:
    values: dict[str, Any] = {
        "LISTEN_PORT": listen_port,
        "ADMIN_PORT": admin_port,
        "PICKER_CLUSTER": CLUSTER,
        "PICKER_PORT": picker_port,
        "ENGINES": [
            {"endpoint": {"address": {"socket_address": {"address": address, "port_value": engine_port}}}}
            for address in ADDRESSES
        ],
    }
    template = (ROOT / "tests/data/kube/gateway.yaml.in").read_text()
    return re.sub(r"@([A-Z_]+)@", lambda found: json.dumps(values[found[1]]), template)


class Answer(NamedTuple):
    status: int
    served: list[str]
    body: dict[str, Any]


class Gateway(NamedTuple):
    url: str
    engine_port: int
    log: Path

    async def ask(self, headers: dict[str, str] | None = None, body: object = BODY) -> Answer:
        method = "GET" if body is None else "POST"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.url}/primary-gateway-test", json=body, headers=headers) as answer,
        ):
            text = await answer.text()
            found = json.loads(text) if answer.status == 200 else {"error": text}
            return Answer(answer.status, answer.headers.getall(SERVED, []), found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    picker_port, health_port, listen_port, admin_port, engine_port = free_ports(5)
    log = tmp_path_factory.mktemp("conformance") / "picker.log"
    config = gateway_config(listen_port, admin_port, picker_port, engine_port)
    members = [f"--endpoint={address}:{engine_port}" for address in ADDRESSES]
    async with (
        engines(engine_port),
        picker(log, picker_port, health_port, *members),
        EnvoyProcess(find_envoy(), config, admin_port=admin_port),
    ):
        yield Gateway(f"http://127.0.0.1:{listen_port}", engine_port, log)
    errors = [line for line in text(log).splitlines() if json.loads(line)["level"] == "error"]
    assert errors == []


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("with_port", [False, True])
async def test_the_selected_engine_serves_and_is_reported(
    gateway: Gateway, address: str, with_port: bool
) -> None:
    endpoint = f"{address}:{gateway.engine_port}"
    answer = await gateway.ask({SELECTION: endpoint if with_port else address})
    assert answer.body["served_by"] == endpoint
    assert answer.served == [endpoint]
    assert json.loads(answer.body["body"]) == BODY


async def test_an_engine_cannot_report_for_the_gateway(gateway: Gateway) -> None:
    answer = await gateway.ask({SELECTION: ADDRESSES[1], ECHO: f"{SERVED}:192.0.2.1:3000"})
    assert answer.served == [f"{ADDRESSES[1]}:{gateway.engine_port}"]


async def test_other_headers_asked_of_an_engine_reach_the_client(gateway: Gateway) -> None:
    headers = {SELECTION: ADDRESSES[0], ECHO: "x-echoed:yes"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/echo", json=BODY, headers=headers) as answer,
    ):
        assert answer.headers["x-echoed"] == "yes"
        assert answer.headers[SERVED] == f"{ADDRESSES[0]}:{gateway.engine_port}"


async def test_a_hundred_requests_stay_on_two_engines(gateway: Gateway) -> None:
    wanted = ADDRESSES[:2]
    answers = await asyncio.gather(*(gateway.ask({SELECTION: ",".join(wanted)}) for _ in range(100)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.body["served_by"] for answer in answers} == {
        f"{each}:{gateway.engine_port}" for each in wanted
    }
    assert all(answer.served == [answer.body["served_by"]] for answer in answers)


async def test_without_the_header_any_engine_serves(gateway: Gateway) -> None:
    """A route that ends at the pool is all that is tested then, with or without a body."""
    for body in (BODY, None):
        answer = await gateway.ask(body=body)
        assert answer.status == 200
        assert answer.served == [answer.body["served_by"]]


async def test_an_endpoint_outside_the_pool_is_refused(gateway: Gateway) -> None:
    answer = await gateway.ask({SELECTION: "192.0.2.1"})
    assert answer.status == 429
    assert answer.served == []
