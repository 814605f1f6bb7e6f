"""A connection with megabytes to read or to write lets the others have their turn in between."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import hpack
import pytest

from epp import names
from epp.http2.codes import PREFACE
from epp.http2.limits import MIB, Http2Limits
from epp.http2.rates import Quota
from epp.runtime import http2 as http2_module
from epp.runtime.http2 import READ_AT_ONCE_BYTES, Http2Server
from tests.data.http2 import peer as wire

LOOPS = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

GREETING = PREFACE + wire.settings(window=16 * MIB) + wire.window_update(0, 16 * MIB)
REPLY_BYTES = 3 * MIB
UNKNOWN = wire.frame(0xBB, 0, 0, bytes(1 << 14))
LONG = UNKNOWN * (READ_AT_ONCE_BYTES // len(UNKNOWN) // 4 + 1)
DEADLINE_S = 20

Make = type[http2_module._Protocol]


class Socket(asyncio.Transport):
    """Takes all there is, and notes what it is asked for, beside the turns of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.written = 0
        self.closing = False

    def write(self, data: Any) -> None:
        self.asked.append("write")
        self.written += len(data)

    def pause_reading(self) -> None:
        self.asked.append("pause")

    def resume_reading(self) -> None:
        self.asked.append("resume")

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Large(wire.Lived):
    """Answers each message with a large one."""

    def received(self, message: bytes) -> None:
        self.peer.send(bytes(REPLY_BYTES))


@asynccontextmanager
async def connected(make: Make = http2_module._Protocol) -> AsyncIterator[tuple[Any, Socket]]:
    """A protocol whose peer has said what it has to say first."""
    server = Http2Server({names.EXT_PROC_METHOD: Large}, Http2Limits(), Quota(1 << 30))
    socket, protocol = Socket(), make(server)
    protocol.connection_made(socket)
    protocol.data_received(GREETING)
    socket.asked.clear()

    async def tick() -> None:
        while True:
            socket.asked.append("turn")
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    try:
        yield protocol, socket
    finally:
        ticking.cancel()
        protocol.connection_lost(None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for knows of no event
            await asyncio.sleep(0)


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def check_reads(make: Make = http2_module._Protocol) -> None:
    """After a megabyte of long reads nothing more, before a turn has passed; short ones are not counted."""
    async with connected(make) as (protocol, socket):
        for _ in range(READ_AT_ONCE_BYTES // len(UNKNOWN) + 1):
            protocol.data_received(UNKNOWN)
        for _ in range(3):
            protocol.data_received(LONG)
        await some_turns()
        assert set(socket.asked) == {"turn"}
        socket.asked.clear()
        protocol.data_received(LONG)
        assert socket.asked == ["pause"]
        await some_turns()
        assert [asked for asked in socket.asked if asked != "turn"] == ["pause", "resume"]
        assert socket.asked[1] == "turn"


async def check_the_peer_reads_first(make: Make = http2_module._Protocol) -> None:
    """While it leaves unread what was written, nothing is read from it, be its turn over or not."""
    async with connected(make) as (protocol, socket):
        protocol.data_received(LONG * 4)
        protocol.pause_writing()
        await some_turns()
        assert "resume" not in socket.asked
        protocol.resume_writing()
        assert socket.asked.count("resume") == 1


async def check_the_end(make: Make = http2_module._Protocol) -> None:
    async with connected(make) as (protocol, socket):
        protocol.data_received(LONG * 4)
        socket.close()
        await some_turns()
        assert "resume" not in socket.asked


async def check_writes(make: Make = http2_module._Protocol) -> None:
    async with connected(make) as (protocol, socket):
        block = hpack.Encoder().encode(wire.request(names.EXT_PROC_METHOD))
        protocol.data_received(wire.frame(1, 4, 1, block) + wire.data(1, wire.message(b"x")))
        await until(lambda: socket.written > REPLY_BYTES)
        await some_turns()
        told = "".join({"write": "w", "turn": "t"}[asked] for asked in socket.asked)
        assert told.count("w") >= 3
        assert "ww" not in told, told


CHECKS: list[Callable[..., Awaitable[None]]] = [
    check_reads,
    check_the_peer_reads_first,
    check_the_end,
    check_writes,
]


@LOOPS
@pytest.mark.parametrize("check", CHECKS)
async def test_turns(check: Callable[..., Awaitable[None]]) -> None:
    await check()


# -- planted faults -----------------------------------------------------------------------------------


class ReadsOn(http2_module._Protocol):
    """Without a pause."""

    def _read_long(self, size: int) -> None: ...


class AfterEach(http2_module._Protocol):
    """A pause after each long read."""

    def _read_long(self, size: int) -> None:
        super()._read_long(READ_AT_ONCE_BYTES)


class AtOnce(http2_module._Protocol):
    """Reads on in the same turn."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._read_on()


class Never(http2_module._Protocol):
    def _read_on(self) -> None: ...


class Whatever(http2_module._Protocol):
    """Reads on, whatever else is to be waited for."""

    def _read_on(self) -> None:
        self._transport.resume_reading()


class AllAtOnce(http2_module._Protocol):
    def _flush(self) -> None:
        self._flush_due = False
        while data := self.connection.take():
            self._transport.write(data)


class OnceOnly(http2_module._Protocol):
    def _flush(self) -> None:
        if data := self.connection.take():
            self._transport.write(data)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (ReadsOn, check_reads),
        (AfterEach, check_reads),
        (AtOnce, check_reads),
        (Never, check_reads),
        (Whatever, check_the_peer_reads_first),
        (Whatever, check_the_end),
        (AllAtOnce, check_writes),
        (OnceOnly, check_writes),
    ],
)
async def test_planted_faults_are_caught(
    fault: Make, check: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "DEADLINE_S", 0.3)
    with pytest.raises((AssertionError, TimeoutError)):
        await check(fault)
