"""What a proxy does with its connection to the picker beside requests: pings, traces, bursts."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from e2e.backends import Backend, backend
from e2e.load import Load
from e2e.pages import FLAGS, complaints, settled, total, until
from e2e.questions import Question, ask, openai_client
from epp.lab.stack import Gateway, LabEngines

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
BURST = 300
PINGED_S = 6.0
# A second until the ping and this together are less than PINGED_S: a ping without an answer is noticed.
ANSWERED_S = 4

WINDOWS = "initial_stream_window_size: 65536, initial_connection_window_size: 1048576"
PICKER_HTTP2 = f"explicit_http_config: {{http2_protocol_options: {{{WINDOWS}}}}}"
PINGS = {
    PICKER_HTTP2: PICKER_HTTP2[:-2]
    + f", connection_keepalive: {{interval: 1s, timeout: {ANSWERED_S}s, connection_idle_interval: 1s}}}}}}"
}
ITS_OWN_WINDOWS = {PICKER_HTTP2: "explicit_http_config: {http2_protocol_options: {}}"}
TRACES = {
    "          stat_prefix: gateway\n": """\
          stat_prefix: gateway
          tracing:
            random_sampling: {value: 100}
            provider:
              name: envoy.tracers.opentelemetry
              typed_config:
                "@type": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
                grpc_service: {envoy_grpc: {cluster_name: collector}, timeout: 0.25s}
                service_name: gateway
""",
    "  clusters:\n": """\
  clusters:
  - name: collector
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: collector
      endpoints:
      - lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9}}}}]
""",
}


@asynccontextmanager
async def gateway_before(
    engine: Backend, folder: Path, envoy: Path, edits: Mapping[str, str] | None = None
) -> AsyncIterator[Gateway]:
    """A gateway that never answers by itself."""
    async with Gateway(
        [engine.address], folder, envoy, fail_open=False, picker_flags=FLAGS, edits=edits or {}
    ) as gateway:
        yield gateway
        seen = await settled(gateway.pickers[0])
        assert sum(seen.get("extproc_http2_errors_total", ())) == 0
        assert complaints(gateway.pickers[0]) == []


async def stats(gateway: Gateway) -> dict[str, int]:
    """What Envoy counts of its connections to the picker."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.proxy.admin_url}/stats?filter=^cluster.picker.") as answer,
    ):
        lines = [line.partition(": ") for line in (await answer.text()).splitlines()]
    return {name.removeprefix("cluster.picker."): int(value) for name, _, value in lines if value.isdigit()}


async def test_keepalive_pings(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    """Once a second, idle and busy: each is answered in time, and none taken for an attack."""
    async with Gateway(
        engines.addresses, tmp_path, envoy, fail_open=False, picker_flags=FLAGS, edits=PINGS
    ) as gateway:
        async with openai_client(gateway.url) as client:
            assert (await ask(client, Question("first", "first"))).right
            before = await stats(gateway)
            await asyncio.sleep(PINGED_S)
            assert (await ask(client, Question("after", "after the silence"))).right
        ends_s = time.monotonic() + PINGED_S
        async with Load(gateway.url, lanes=4, output_tokens=100) as load:
            while time.monotonic() < ends_s:
                await load.answered(1)
        after = await stats(gateway)
        assert [outcome for outcome in load.outcomes if not outcome.right] == []
        assert after["http2.keepalive_timeout"] == 0
        assert after["upstream_cx_total"] == before["upstream_cx_total"]
        assert after["upstream_cx_destroy"] == 0
        await settled(gateway.pickers[0])
        assert complaints(gateway.pickers[0]) == []


async def burst(gateway: Gateway) -> list[int]:
    """The statuses of BURST requests that come at once."""
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(100.0)
    ) as session:

        async def one() -> int:
            async with session.post(gateway.url + CHAT, data=BODY) as answer:
                await answer.read()
                return answer.status

        return await asyncio.gather(*(one() for _ in range(BURST)))


@pytest.mark.parametrize("edits", [{}, ITS_OWN_WINDOWS], ids=["the charts' windows", "Envoy's windows"])
async def test_a_burst_on_a_fresh_connection(envoy: Path, tmp_path: Path, edits: dict[str, str]) -> None:
    """The first requests that Envoy has for this picker, all at once."""
    async with backend() as engine, gateway_before(engine, tmp_path, envoy, edits) as gateway:
        assert (await stats(gateway))["upstream_rq_total"] == 0
        assert await burst(gateway) == [200] * BURST
        assert len(engine.seen) == BURST

        async def each_has_ended() -> bool:
            return await total(gateway.pickers[0], "extproc_streams_total") >= BURST

        await until(each_has_ended, "each request had a stream of its own, and it has ended")
        assert await burst(gateway) == [200] * BURST


async def test_traced_requests(envoy: Path, tmp_path: Path) -> None:
    """With a tracer, headers of the streams to the picker are new each time and move through its table."""
    async with backend() as engine, gateway_before(engine, tmp_path, envoy, TRACES) as gateway:
        for _ in range(2):
            assert await burst(gateway) == [200] * BURST
        traces = {value for seen in engine.seen for value in seen.header("traceparent")}
        assert len(traces) == 2 * BURST
