"""How late decisions are: asked one after the other, from a process that does nothing else.

    python -m benchmarks.rows.decisions PORT EVERY_S

Ends with its standard input, but not without any, and prints a JSON list: milliseconds from the first message
to the destination.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from subprocess import PIPE

import grpc.aio

from benchmarks.rows import traffic
from epp import names
from epp.wire.ext_proc_pb2 import ProcessingResponse


@asynccontextmanager
async def asked(port: int, every_s: float) -> AsyncIterator[list[float]]:
    """Decisions of a picker asked for while inside; how late each was is there afterwards."""
    late: list[float] = []
    command = (sys.executable, "-m", "benchmarks.rows.decisions", str(port), str(every_s))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        yield late
    finally:
        told, _ = await process.communicate(b"")
    late += json.loads(told)


async def decide(channel: grpc.aio.Channel, body: bytes, number: int) -> str:
    """`address:port` of one decision; its stream is reset."""
    call = channel.stream_stream(names.EXT_PROC_METHOD, None, None)(None)
    for message in traffic.request_messages(body, number):
        await call.write(message)
    reply = await call.read()
    assert isinstance(reply, bytes), "no reply"
    call.cancel()
    fields = ProcessingResponse.FromString(reply).dynamic_metadata.fields
    served = fields[names.LB_NAMESPACE].struct_value.fields[names.DESTINATION_ENDPOINT].string_value
    assert served, "no destination"
    return served


async def _ask(port: int, every_s: float, enough: asyncio.Event) -> list[float]:
    """One at least, and others until there are enough."""
    late: list[float] = []
    chats = traffic.Chats(1000, seed=3)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        while not late or not enough.is_set():
            began = time.monotonic()
            await decide(channel, next(chats), len(late))
            late.append((time.monotonic() - began) * 1000)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await enough.wait()
    return late


async def _main(port: int, every_s: float) -> None:
    loop, enough = asyncio.get_running_loop(), asyncio.Event()
    ends = loop.run_in_executor(None, sys.stdin.read)
    ends.add_done_callback(lambda _: enough.set())
    print(json.dumps([round(each, 3) for each in await _ask(port, every_s, enough)]))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
