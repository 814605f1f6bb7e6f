"""What the library logs of streams that a proxy reset in the moment in which the picker ended them.

It says nothing where it already knows of the reset; where its news arrive in the other order, it logs an
error with a trace.
"""

import logging
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from epp.runtime.grpcio import GrpcioTransport
from epp.runtime.stream import Stream
from epp.runtime.transport import StreamCounts

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
