"""Trailers of requests and answers, through an Envoy that lets them pass."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from e2e.backends import bare_backend
from e2e.pages import complaints, on, settled, total
from epp.lab.stack import HOST, Gateway, Picker
from epp.runtime.options import TRANSPORTS

pytestmark = pytest.mark.asyncio(loop_scope="session")

LISTENER = "          stat_prefix: gateway\n"
CLUSTER = "explicit_http_config: {http_protocol_options: {}}"
LETS_PASS = {
    LISTENER: LISTENER + "          http_protocol_options: {enable_trailers: true}\n",
    CLUSTER: "explicit_http_config: {http_protocol_options: {enable_trailers: true}}",
}


@dataclass(slots=True)
class Line:
    port: int
    picker: Picker
    arrived: list[bytes]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def line(
    request: pytest.FixtureRequest, envoy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Line]:
    arrived: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        arrived.append(await reader.readuntil(b"x-last: of the request\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"connection: close\r\n\r\n%x\r\n%b\r\n0\r\nx-last: of the answer\r\n\r\n" % (len(EVENTS), EVENTS)
        )
        await writer.drain()

    folder = tmp_path_factory.mktemp("trailers")
    async with (
        bare_backend(answer) as address,
        Gateway([address], folder, envoy, picker_flags=on(request.param), edits=LETS_PASS) as gateway,
    ):
        yield Line(urlsplit(gateway.url).port or 0, gateway.pickers[0], arrived)
        await settled(gateway.pickers[0])
        assert complaints(gateway.pickers[0]) == []


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


async def send(port: int, path: str, body: bytes) -> tuple[bytes, bytes]:
    """Head and chunks of the answer, with its trailers."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-last\r\n\r\n"
            % path.encode()
        )
        if body:
            writer.write(b"%x\r\n%b\r\n" % (len(body), body))
        writer.write(b"0\r\nx-last: of the request\r\n\r\n")
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        return head, await reader.readuntil(b"x-last: of the answer\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()


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
    async with asyncio.timeout(60.0):
        head, answered = await send(line.port, path, sent)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert unchunked(answered) == EVENTS
    assert [unchunked(each) for each in line.arrived] == [sent]
    await settled(line.picker)
    assert await total(line.picker, "request_duration_seconds_count") == answers_before + 1
