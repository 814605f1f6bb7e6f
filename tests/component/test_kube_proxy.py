"""A proxy on the way to the API server: what it says is told, and its password is not."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kubernetes.aio.client.configuration import Configuration

from epp.errors import ConfigError
from epp.runtime.kube.access import Access, Loaded
from epp.runtime.kube.api import KubeApi, KubeError

PASSWORD = "not-for-logs"


@asynccontextmanager
async def proxy(answer: bytes) -> AsyncIterator[int]:
    """Its port; answers so to whoever asks, or hangs up."""

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(asked, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def refusal(port: int) -> str:
    """What a call by way of this proxy comes to."""
    configuration = Configuration()
    configuration.host = "https://api.invalid:443"

    async def load() -> Loaded:
        raise ConfigError("nothing is loaded anew")

    environment = {"HTTPS_PROXY": f"http://user:{PASSWORD}@127.0.0.1:{port}"}
    api = KubeApi(Access(Loaded("test", configuration), load, environment))
    try:
        with pytest.raises(KubeError) as refused:
            await api.get("/api/v1/pods")
    finally:
        await api.close()
    return str(refused.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 407 Who are you\r\ncontent-length: 0\r\n\r\n", "the proxy answered 407 Who are you"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", "the proxy answered 502 Bad Gateway"),
        (b"", ""),
        (b"what?\r\n\r\n", ""),
    ],
)
async def test_the_password_of_a_proxy_is_not_told(answer: bytes, words: str) -> None:
    async with proxy(answer) as port:
        told = await refusal(port)
    assert told.startswith("GET /api/v1/pods: ")
    assert words in told
    assert PASSWORD not in told


async def test_nor_is_it_where_the_proxy_is_away() -> None:
    with socket.socket() as unused:
        # Taken, so that nobody else gets it, and not listened to.
        unused.bind(("127.0.0.1", 0))
        told = await refusal(unused.getsockname()[1])
    assert "cannot connect to 127.0.0.1" in told
    assert PASSWORD not in told
