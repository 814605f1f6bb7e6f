"""How late decisions are: asked one after the other, from a process that does nothing else.

    python -m benchmarks.rows.decisions PORT EVERY_S

Ends with its standard input, and prints a JSON list: milliseconds from the first message to the destination.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    yield late
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


async def _ask(port: int, every_s: float, late: list[float]) -> None:
    chats = traffic.Chats(1000, seed=3)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for number in itertools.count():
            began = time.monotonic()
            await decide(channel, next(chats), number)
            late.append((time.monotonic() - began) * 1000)
            await asyncio.sleep(every_s)


async def _main(port: int, every_s: float) -> None:
    late: list[float] = []
    asking = asyncio.create_task(_ask(port, every_s, late))
    ends = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait((asking, ends), return_when=asyncio.FIRST_COMPLETED)
    if asking.done():
        asking.result()
    asking.cancel()
    print(json.dumps([round(each, 3) for each in late]))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
