"""Trailers of requests and answers, through an Envoy that lets them pass."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.backends import bare_backend
from e2e.pages import FLAGS, complaints, settled, total
from epp.lab.envoy import EnvoyProcess, envoy_config
from epp.lab.stack import HOST, Picker, free_ports

pytestmark = pytest.mark.asyncio(loop_scope="session")

LETS_PASS = {
    "          stat_prefix: gateway\n": "          http_protocol_options: {enable_trailers: true}\n",
    "    lb_policy: CLUSTER_PROVIDED\n": """\
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http_protocol_options: {enable_trailers: true}}
""",
}


@dataclass(slots=True)
class Line:
    port: int
    picker: Picker
    arrived: list[bytes]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def line(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Line]:
    arrived: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        arrived.append(await reader.readuntil(b"x-last: of the request\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\nx-last: of the answer\r\n\r\n" % (len(EVENTS), EVENTS)
        )
        await writer.drain()

    async with AsyncExitStack() as exits:
        address = await exits.enter_async_context(bare_backend(answer))
        picker = Picker(tmp_path_factory.mktemp("trailers"), [address], flags=FLAGS)
        exits.push_async_callback(picker.child.stop)
        await picker.start()
        listen, admin = free_ports(2)
        config = envoy_config(
            listen_port=listen, admin_port=admin, pickers=[picker.address], endpoints=[], fail_open=False
        )
        for place, added in LETS_PASS.items():
            assert config.count(place) == 1
            config = config.replace(place, place + added)
        await exits.enter_async_context(EnvoyProcess(envoy, config, admin_port=admin))
        yield Line(listen, picker, arrived)
        await settled(picker)
        assert complaints(picker) == []


EVENTS = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'


def body(size: int) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}]}).encode()


def unchunked(data: bytes) -> bytes:
    """The body of a chunked message, which ends with its trailers."""
    whole = b""
    while size := int(data[: data.index(b"\r\n")], 16):
        start = data.index(b"\r\n") + 2
        whole, data = whole + data[start : start + size], data[start + size + 2 :]
    return whole


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/chat/completions", body(10)),
        ("/v1/chat/completions", body(200_000)),
        ("/v1/chat/completions", body(3_000_000)),
        ("/v1/files", b""),
        ("/v1/files", b"anything"),
    ],
    ids=["small", "several chunks", "read by the decoding process", "no body", "not read"],
)
async def test_trailers_pass_both_ways(line: Line, path: str, sent: bytes) -> None:
    line.arrived.clear()
    answers_before = await total(line.picker, "request_duration_seconds_count")
    reader, writer = await asyncio.open_connection(HOST, line.port)
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-last\r\n\r\n"
        % path.encode()
    )
    if sent:
        writer.write(b"%x\r\n%b\r\n" % (len(sent), sent))
    writer.write(b"0\r\nx-last: of the request\r\n\r\n")
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    answered = await reader.readuntil(b"x-last: of the answer\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert unchunked(answered) == EVENTS
    assert [unchunked(each) for each in line.arrived] == [sent]
    await settled(line.picker)
    assert await total(line.picker, "request_duration_seconds_count") == answers_before + 1
