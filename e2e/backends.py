"""Engines that record what reached them and answer as a test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.web_request import BaseRequest

from epp.lab.stack import HOST

PAGE = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="4096"} 1.0
"""

Answering = Callable[[BaseRequest, "Seen"], Awaitable[web.StreamResponse]]
Bare = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as an engine got it; names of headers in lower case, in their order, repeated ones too."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


async def plain(_request: BaseRequest, seen: Seen) -> web.StreamResponse:
    """An answer that says how much came."""
    return web.json_response({"path": seen.path, "bytes": len(seen.body)})


@dataclass(slots=True)
class Backend:
    """One engine in this process. `page` is its metrics page, `answering` makes its answers."""

    answering: Answering = plain
    page: bytes = PAGE
    seen: list[Seen] = field(default_factory=list)
    port: int = 0

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    @property
    def name(self) -> str:
        return f"{HOST}:{self.port}"

    async def handle(self, request: BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/metrics":
            return web.Response(body=self.page, content_type="text/plain")
        headers = tuple((key.decode().lower(), value.decode()) for key, value in request.raw_headers)
        seen = Seen(request.method, request.path_qs, headers, await request.read())
        self.seen.append(seen)
        return await self.answering(request, seen)


def _request(message: object, payload: object, protocol: object, writer: object, task: object) -> BaseRequest:
    """As aiohttp makes it, without its limit of 1 MiB a body."""
    loop = asyncio.get_running_loop()
    return BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=0)  # type: ignore[arg-type]


@asynccontextmanager
async def backend(answering: Answering = plain, page: bytes = PAGE) -> AsyncIterator[Backend]:
    made = Backend(answering, page)
    server = web.Server(made.handle, request_factory=_request, access_log=None, auto_decompress=False)
    listener = await asyncio.get_running_loop().create_server(server, HOST, 0)
    made.port = listener.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listener.close()
        await server.shutdown(timeout=1.0)


@asynccontextmanager
async def bare_backend(answer: Bare) -> AsyncIterator[tuple[str, int]]:
    """An engine that writes its bytes itself; one request a connection.

    `answer` gets the connection and the head of the request. The metrics page is served by the way.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith((b"GET /metrics", b"GET /health")):
                length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(PAGE)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n" + length + PAGE)
                await writer.drain()
            else:
                await answer(reader, writer, head)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, HOST, 0, limit=64 << 20)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()
        await server.wait_closed()
