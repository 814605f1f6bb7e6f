"""What the library logs of what is gone: streams that a proxy reset in the moment in which the picker ended
them, and event loops.

It says nothing where it already knows of the reset; where its news arrive in the other order, it logs an
error with a trace.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import grpc.aio
import pytest

from epp import names
from epp.runtime.grpcio import GrpcioTransport
from epp.runtime.stream import Stream
from epp.runtime.transport import StreamCounts
from tests.data.extproc import over_wire as wire
from tests.data.grpc.loops import Loop

LIBRARY = logging.getLogger("grpc._cython.cygrpc")


def no_stream(wake: object) -> Stream:
    raise AssertionError("nobody asks")


@pytest.fixture
async def transport() -> AsyncIterator[GrpcioTransport]:
    counts = StreamCounts(opened=lambda: None, closed=lambda code: None)
    transport = GrpcioTransport(no_stream, counts, 1 << 20)
    await transport.start("127.0.0.1:0")
    yield transport
    await transport.stop()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (grpc.aio.InternalError("Failed execute_batch: SendStatusFromServerOperation"), False),
        (grpc.aio.UsageError("misused"), True),
        (ValueError("anything else"), True),
        (None, True),
    ],
)
async def test_only_a_status_for_nobody_is_kept_quiet(
    transport: GrpcioTransport, caplog: pytest.LogCaptureFixture, error: Exception | None, told: bool
) -> None:
    LIBRARY.error("raised by servicer method", exc_info=error)
    said = [record.message for record in caplog.records if record.name == LIBRARY.name]
    assert said == ["raised by servicer method"] * told


async def test_tests_run_on_the_loop_that_is_deaf_when_closed() -> None:
    assert type(asyncio.get_running_loop()) is Loop


def told_of_a_closed_loop(kind: type[asyncio.SelectorEventLoop], caplog: pytest.LogCaptureFixture) -> bool:
    """Whether an error is logged when the poller takes the end of a call to a loop of this kind, closed."""
    taken: list[Any] = []

    class Closed(kind):  # type: ignore[misc, valid-type]
        def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
            if self.is_closed():
                taken.append(callback)
            return super().call_soon_threadsafe(callback, *args, context=context)

    mute = socket.create_server(("127.0.0.1", 0))
    target = f"127.0.0.1:{mute.getsockname()[1]}"

    async def left() -> tuple[Any, Any]:
        channel = grpc.aio.insecure_channel(target)
        call = channel.stream_stream(names.EXT_PROC_METHOD)()
        for _ in range(10):
            await asyncio.sleep(0)
        return channel, call

    async def next_one() -> None:
        async with grpc.aio.insecure_channel(target):
            mute.close()
            await wire.until(lambda: bool(taken), "the end of the call")

    with closing(Closed()) as loop:
        kept = loop.run_until_complete(left())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # here it is meant
    with closing(Loop()) as loop:
        loop.run_until_complete(next_one())
    del kept
    return any("PollerCompletionQueue" in record.getMessage() for record in wire.faults(caplog.records))


def test_a_loop_of_tests_that_is_closed_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert not told_of_a_closed_loop(Loop, caplog)


def test_asyncios_own_loop_would_be(caplog: pytest.LogCaptureFixture) -> None:
    assert told_of_a_closed_loop(asyncio.SelectorEventLoop, caplog)
