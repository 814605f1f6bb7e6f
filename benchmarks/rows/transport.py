"""Streamed chats and plain requests through the running `warmroute serve`: CPU of its process alone."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs do not have it

from benchmarks.rows import traffic
from benchmarks.rows.answers import JSON, SSE
from benchmarks.rows.children import Serve, page_server, serve
from benchmarks.rows.machine import process_cpu_s
from benchmarks.rows.timing import Effort, Result
from epp import names
from epp.wire.ext_proc_pb2 import ProcessingResponse

ENDPOINTS = 8
STREAMS = 32
NO_SCRAPING = "--refresh-metrics-interval=300s"


def through_own(effort: Effort) -> list[Result]:
    """Over the picker's own HTTP/2: what the budgets with transport are meant for."""
    return _through("own", effort, request_us=350.0, chat_ms=1.6)


def through_grpcio(effort: Effort) -> list[Result]:
    """The same over grpcio."""
    return _through("grpcio", effort, request_us=None, chat_ms=None)


def _through(
    transport: str, effort: Effort, *, request_us: float | None, chat_ms: float | None
) -> list[Result]:
    """Closed loop, 32 streams at a time from one client process, as fast as it can; pages are not scraped."""
    count = max(2, effort.inner * 2)
    with (
        tempfile.TemporaryDirectory() as folder,
        page_server(ENDPOINTS) as ports,
        serve(Path(folder), ports, NO_SCRAPING, f"--transport={transport}") as picker,
    ):
        plain = asyncio.run(_sampled(picker, effort, count * 2, [traffic.plain_answer()], JSON, False))
        ahead = asyncio.run(_sampled(picker, effort, count, traffic.sse_chunks(), SSE, False))
        step = asyncio.run(_sampled(picker, effort, count, traffic.sse_chunks(), SSE, True))
    return [
        Result(f"1 kB request, plain answer, everything, {transport}", "us", request_us, plain),
        Result(
            f"one streamed chat of 100 chunks, everything, {transport}",
            "ms",
            chat_ms,
            tuple(sample / 1000 for sample in ahead),
            detail={"us_a_chunk": (min(ahead) - min(plain)) / traffic.CHUNKS},
        ),
        Result(
            f"the same, each chunk sent after the reply to the one before, {transport}",
            "ms",
            None,
            tuple(sample / 1000 for sample in step),
        ),
    ]


async def _sampled(
    picker: Serve, effort: Effort, count: int, chunks: list[bytes], content_type: str, lockstep: bool
) -> tuple[float, ...]:
    """CPU microseconds of the picker a request; one sample a repeat."""
    chats = traffic.Chats(1000, seed=31)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel:
        process = channel.stream_stream(names.EXT_PROC_METHOD, None, None)

        async def one(number: int) -> None:
            request = traffic.request_messages(next(chats), number)
            await _exchange(process(None), request, chunks, content_type, lockstep)

        await _at_a_time(one, min(count, STREAMS))
        samples = []
        for _ in range(effort.repeats):
            before_s = process_cpu_s(picker.pid)
            await _at_a_time(one, count)
            samples.append((process_cpu_s(picker.pid) - before_s) / count * 1e6)
    return tuple(samples)


async def _at_a_time(one: Callable[[int], Awaitable[None]], count: int) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as workers:
        for _ in range(STREAMS):
            workers.create_task(worker())


async def _exchange(
    call: "grpc.aio.StreamStreamCall[bytes, bytes]",
    request: list[bytes],
    chunks: list[bytes],
    content_type: str,
    lockstep: bool,
) -> None:
    """One request as a proxy makes it: all that comes back is read, then the stream is reset."""
    for message in request:
        await call.write(message)
    first = await call.read()
    assert isinstance(first, bytes)
    reply = ProcessingResponse.FromString(first)
    fields = reply.dynamic_metadata.fields[names.LB_NAMESPACE].struct_value.fields
    served = fields[names.DESTINATION_ENDPOINT].string_value
    await call.read()
    for message in traffic.answer_messages(chunks, served, content_type):
        await call.write(message)
        if lockstep:
            await call.read()
    if not lockstep:
        for _ in range(len(chunks) + 2):
            if await call.read() is EOF:
                raise RuntimeError("the picker ended the stream before the answer was through")
    call.cancel()
