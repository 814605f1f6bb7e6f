"""Many engines' metrics pages on loopback, from one process.

    python -m benchmarks.rows.page_server COUNT PAGE

Prints the ports, as a JSON list, when all are open; ends with its standard input.
"""

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web
from aiohttp.web_request import BaseRequest


async def main(count: int, page: bytes) -> None:
    async def answer(_: BaseRequest) -> web.Response:
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    server = web.Server(answer, access_log=None)
    loop = asyncio.get_running_loop()
    listening = [await loop.create_server(server, "127.0.0.1", 0) for _ in range(count)]
    print(json.dumps([each.sockets[0].getsockname()[1] for each in listening]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes()))
