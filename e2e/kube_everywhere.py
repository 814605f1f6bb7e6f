"""Engines that compute nothing, at every loopback address: one process for more pods than can be started.

    python -m e2e.kube_everywhere PAGE PORT...

Says `ready` when the ports are open, and ends with its standard input. `GET` is answered with the metrics
page in file PAGE, all else with a chat answer, streamed where that is asked for. Headers name the address and
the port that were asked.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

import uvloop

from e2e.kube_pods import SERVED_BY, SERVED_PORT

_HEAD_END: Final = b"\r\n\r\n"
_USAGE: Final = b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
_CHAT: Final = (
    b'{"id":"answer","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],' + _USAGE
)
_CHUNK: Final = (
    b'data: {"id":"answer","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"x"},"finish_reason":"stop"}],' + _USAGE + b"\n\ndata: [DONE]\n\n"
)


@asynccontextmanager
async def everywhere(page: Path, ports: Sequence[int]) -> AsyncIterator[int]:
    """The process, ready inside; its pid."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "e2e.kube_everywhere", str(page), *map(str, ports)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n", "the engines do not come up"
        yield process.pid
    finally:
        process.stdin.close()
        await process.wait()


class _Connection(asyncio.Protocol):
    """Reads requests one after the other, and no more of them than where they end."""

    def __init__(self, page: bytes) -> None:
        self._page = _answer(page, b"text/plain; version=0.0.4; charset=utf-8")
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address, port = transport.get_extra_info("sockname")[:2]
        served = f"{SERVED_BY}: {address}\r\n{SERVED_PORT}: {port}".encode()
        self._chat = _answer(_CHAT, b"application/json", served)
        self._stream = _answer(_CHUNK, b"text/event-stream", served)

    def data_received(self, data: bytes) -> None:
        self._read += data
        while size := _request_size(self._read):
            request, self._read = self._read[:size], self._read[size:]
            if request.startswith(b"GET "):
                self._transport.write(self._page)
            else:
                self._transport.write(self._stream if b'"stream": true' in request else self._chat)


def _answer(body: bytes, content_type: bytes, *headers: bytes) -> bytes:
    told = (b"content-type: " + content_type, b"content-length: %d" % len(body), *headers)
    return b"\r\n".join((b"HTTP/1.1 200 OK", *told)) + _HEAD_END + body


def _request_size(read: bytes) -> int:
    """Of the first request in `read`; 0 = it is not whole."""
    end = read.find(_HEAD_END)
    if end < 0:
        return 0
    head, size = read[:end].lower(), end + len(_HEAD_END)
    if b"\r\ntransfer-encoding: chunked" in head:
        last = b"\r\n0" + _HEAD_END
        found = read.find(last, end)
        return found + len(last) if found >= 0 else 0
    _, _, length = head.partition(b"\r\ncontent-length:")
    size += int(length.split(b"\r\n", 1)[0]) if length else 0
    return size if len(read) >= size else 0


async def _serve(page: bytes, ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        # A listener at the wildcard answers at every address of 127.0.0.0/8.
        await loop.create_server(lambda: _Connection(page), "0.0.0.0", port, backlog=4096)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1]).read_bytes(), [int(port) for port in sys.argv[2:]]))
