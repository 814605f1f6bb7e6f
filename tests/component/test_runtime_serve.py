"""`warmroute serve` as a process: readiness, draining, signals, ports that are taken, what it tells."""

import asyncio
import json
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from epp.lab.stack import free_ports
from epp.runtime.options import TRANSPORTS
from epp.wire.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tests.data.extproc import over_wire as wire
from tests.data.grpc.channels import ALONE
from tests.data.runtime import picker as runtime

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
MARKER = "PlantedPromptText"
DEADLINE_S = 60.0
"""For a process to start, or to end."""
BOTH_TRANSPORTS = pytest.mark.parametrize("transport", TRANSPORTS)


class Process:
    """A picker in a child process. Its stderr is in `log`."""

    def __init__(self, log: Path, *flags: str, **ports: int) -> None:
        free = free_ports(4)
        self.grpc_port = ports.get("grpc", free[0])
        self.health_port = ports.get("health", free[1])
        self.metrics_port = ports.get("metrics", free[2])
        self.admin_port = ports.get("admin", free[3])
        self.log = log
        self.flags = flags
        self.child: asyncio.subprocess.Process

    async def start(self) -> None:
        with self.log.open("wb") as log:
            self.child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "epp.cli", "serve", "--endpoint=127.0.0.1:1"),
                *(f"--grpc-port={self.grpc_port}", f"--grpc-health-port={self.health_port}"),
                *(f"--metrics-port={self.metrics_port}", f"--admin-port={self.admin_port}"),
                *("--grpc-host=127.0.0.1", "--secure-serving=false", "--metrics-endpoint-auth=false"),
                *self.flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def exit_code(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.child.wait()

    async def health(self, service: str = EXT_PROC) -> int | None:
        """None: nobody answers."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.health_port}", ALONE) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                HealthCheckRequest.SerializeToString,
                HealthCheckResponse.FromString,
            )
            try:
                return (await check(HealthCheckRequest(service=service))).status
            except grpc.aio.AioRpcError:
                return None

    async def until_health(self, wanted: int | None) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.health() != wanted:
                assert wanted is None or self.child.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)

    async def page(self, port: int, path: str) -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}{path}") as answer,
        ):
            assert answer.status == 200
            return await answer.text()


@asynccontextmanager
async def serving(log: Path, *flags: str) -> AsyncIterator[tuple[Process, grpc.aio.Channel]]:
    """A picker that is ready, and a channel to it."""
    process = Process(log, *flags)
    await process.start()
    try:
        await process.until_health(SERVING)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{process.grpc_port}", ALONE) as channel:
            yield process, channel
    finally:
        if process.child.returncode is None:
            process.child.kill()
        await process.child.wait()


async def placed(channel: grpc.aio.Channel, body: bytes, **headers: str) -> Any:
    """A stream whose request was answered."""
    call = wire.process(channel)
    await call.write(runtime.request_headers(**headers))
    for message in runtime.request_body(body):
        await call.write(message)
    assert runtime.kind(await wire.read(call)) == "request_headers"
    return call


async def finish(call: Any) -> None:
    await call.write(runtime.response_headers())
    await call.write(runtime.response_body(b"{}"))
    while await wire.read(call) is not None:
        pass
    assert await call.code() is grpc.StatusCode.OK


async def served(channel: grpc.aio.Channel) -> bool:
    """Whether another request is taken; then it is brought to its end."""
    call = wire.process(channel)
    # Writing fails where the stream has been refused by then.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in (runtime.request_headers(), *runtime.request_body(runtime.chat())):
            await call.write(message)
    message = await wire.read(call)
    if message is None:
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        return False
    assert runtime.kind(message) == "request_headers"
    await finish(call)
    return True


@BOTH_TRANSPORTS
async def test_sigterm_drains(transport: str, tmp_path: Path) -> None:
    """Where this process stood still for as long as requests are still taken, it takes a longer time."""
    late = 0
    for seconds in (1, 5, 25):
        if not late:
            late = await served_while_draining(seconds, transport, tmp_path / "log")
    assert late, "proxies that have not noticed yet are still served"


async def served_while_draining(seconds: int, transport: str, log: Path) -> int:
    """How many requests."""
    late = 0
    flags = (f"--drain-timeout={seconds}s", f"--transport={transport}")
    async with serving(log, *flags) as (process, channel):
        # A child that reads large bodies must not keep the process.
        early = await placed(channel, runtime.chat("x" * 2_500_000))
        process.child.send_signal(signal.SIGTERM)
        await process.until_health(NOT_SERVING)
        assert await process.health("liveness") == SERVING
        async with asyncio.timeout(DEADLINE_S):
            while await served(channel):
                late += 1
                await asyncio.sleep(0.1)
        assert process.child.returncode is None
        await finish(early)
        assert await process.exit_code() == 0
        lines = [json.loads(line) for line in process.log.read_text().splitlines()]
        assert [line["msg"] for line in lines if line["msg"] in ("draining", "ended")] == [
            "draining",
            "ended",
        ]
        assert lines[-1] | {"ts": ""} == {
            "level": "info",
            "ts": "",
            "logger": "epp.runtime.app",
            "msg": "ended",
            "in_flight": 0,
        }
    return late


@BOTH_TRANSPORTS
@pytest.mark.parametrize(("drain", "first"), [("60s", signal.SIGTERM), ("0s", signal.SIGINT)])
async def test_a_second_signal_ends_at_once(
    drain: str, first: signal.Signals, transport: str, tmp_path: Path
) -> None:
    flags = (f"--drain-timeout={drain}", f"--transport={transport}")
    async with serving(tmp_path / "log", *flags) as (process, channel):
        call = await placed(channel, runtime.chat())
        process.child.send_signal(first)
        await process.until_health(NOT_SERVING)
        await asyncio.sleep(0.1)
        assert process.child.returncode is None
        process.child.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 0
        await wire.read(call)
        assert "Traceback" not in process.log.read_text()


async def test_nothing_in_flight_ends_with_the_drain_time(tmp_path: Path) -> None:
    async with serving(tmp_path / "log", "--drain-timeout=0s") as (process, _):
        process.child.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 0


@BOTH_TRANSPORTS
@pytest.mark.parametrize("port", ["grpc", "health", "metrics", "admin"])
async def test_a_taken_port_is_one_line_and_exit_code_1(port: str, transport: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        process = Process(tmp_path / "log", f"--transport={transport}", **{port: number})
        await process.start()
        assert await process.exit_code() == 1
    flag = {"grpc": "--grpc-port", "health": "--grpc-health-port"}.get(port, f"--{port}-port")
    said = [line for line in process.log.read_text().splitlines() if not line.startswith("{")]
    assert len(said) == 1, said
    assert said[0].startswith(f"warmroute: {flag} {number}: cannot listen: ")


async def test_a_wrong_configuration_is_exit_code_2_with_every_problem(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        "- type: queue-scorr\n- {type: prefix-cache-scorer, parameters: {nope: 1}}\n"
    )
    process = Process(tmp_path / "log", f"--config-file={config}")
    await process.start()
    assert await process.exit_code() == 2
    said = process.log.read_text()
    assert "queue-scorr" in said
    assert "nope" in said
    assert "Traceback" not in said


async def test_it_serves_tls_by_default_and_health_on_its_port_when_asked(tmp_path: Path) -> None:
    async with serving(tmp_path / "log", "--secure-serving=true", "--health-checking") as (process, _):
        _, writer = await asyncio.open_connection(
            "127.0.0.1", process.grpc_port, ssl=_trusting(), server_hostname="localhost"
        )
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.transport.abort()


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def test_prompt_text_is_nowhere_but_on_its_way(tmp_path: Path) -> None:
    """Not in the log at its most talkative, not on the pages, for good and for bad requests."""
    text = f"{MARKER} and more of it " * 20
    broken = [
        runtime.chat(text)[:-1],
        b'{"model":"m","messages":"' + text.encode() + b'"}',
        b'{"messages":[{"role":"user","content":"' + text.encode() + b'"}]}',
        b'{"model":"m","model":"n","messages":[{"role":"user","content":"' + text.encode() + b'"}]}',
        text.encode(),
        b'["' + text.encode() + b'"]',
    ]
    async with serving(tmp_path / "log", "-v=4", "--refresh-prometheus-metrics-interval=100ms") as (
        process,
        channel,
    ):
        await finish(await placed(channel, runtime.chat(text), x_request_id="good"))
        completions = json.dumps({"model": "m", "prompt": text}).encode()
        await finish(await placed(channel, completions, path="/v1/completions"))
        for body in broken:
            call = wire.process(channel)
            for message in (runtime.request_headers(), *runtime.request_body(body)):
                await call.write(message)
            assert runtime.refusal(await wire.read(call))[0] == 400
        await asyncio.sleep(0.3)
        decisions = await process.page(process.admin_port, "/decisions?last=100")
        metrics = await process.page(process.metrics_port, "/metrics")
        process.child.send_signal(signal.SIGINT)
        process.child.send_signal(signal.SIGTERM)
        await process.exit_code()
        log = process.log.read_text()
    assert '"request_id":"good"' in decisions
    assert 'llm_d_epp_request_total{fairness_id="default-flow",model_name="m"' in metrics
    assert "_created" not in metrics
    requests = [line for line in map(json.loads, log.splitlines()) if line["msg"] == "request"]
    refused = [line for line in map(json.loads, log.splitlines()) if line["msg"] == "request refused"]
    assert len(requests) == 2
    assert len(refused) == len(broken)
    assert requests[0]["request_id"] == "good"
    assert requests[0]["endpoint"] == "127.0.0.1:1"
    for told in (decisions, metrics, log):
        assert MARKER not in told
