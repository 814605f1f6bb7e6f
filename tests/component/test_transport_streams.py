"""Streams over each transport into the real router and director: late results, aborts, faults, order.

The proxy's side is grpcio's client. Where the transports differ, they do so on purpose, and the test says it.
"""

import asyncio
import gzip
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from epp import names
from epp.http2.codes import ACK, PREFACE, FrameType
from epp.http2.frames import frame
from epp.pool.records import Mask
from epp.runtime import stream as stream_module
from epp.runtime.app import App
from epp.runtime.options import OWN, TRANSPORTS
from epp.scheduling.ports import Ctx
from epp.scheduling.records import Leg
from tests.data.extproc import over_wire as wire
from tests.data.runtime import picker as runtime

LARGE = 2_500_000
TOO_LARGE = "invalid_request_error"


class Served:
    """A picker, its port and a channel to it."""

    def __init__(self, app: App, channel: Any, transport: Any, counts: Any) -> None:
        self.app = app
        self.channel = channel
        self.transport = transport
        self.counts = counts

    async def send(self, *messages: bytes) -> Any:
        call = wire.process(self.channel)
        for message in messages:
            await call.write(message)
        return call

    async def child(self, number: signal.Signals) -> None:
        """Send a signal to the process that reads large bodies, once those of other tests are gone."""
        await wire.until(lambda: len(multiprocessing.active_children()) == 1, "one child")
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, number)

    async def over(self) -> None:
        """Every stream has ended and nothing is left of it."""
        await wire.until(lambda: self.counts.open == 0, "no stream is open")
        await wire.until(runtime.nothing_left(self.app), "nothing is left")
        assert not any(runtime.left_over(self.app).values()), runtime.left_over(self.app)


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def served(name: str, **options: Any) -> AsyncIterator[Served]:
    """A picker with a transport of this name."""
    app = runtime.picker(transport=name, **options)
    counts = wire.Counts()
    transport = runtime.transport(app, counts.hooks())
    try:
        async with wire.listening(transport) as channel:
            yield Served(app, channel, transport, counts)
    finally:
        app.router.close()


async def finish(call: Any) -> list[bytes]:
    """All replies to the end of the stream."""
    replies = []
    while (message := await wire.read(call)) is not None:
        replies.append(message)
    return replies


async def test_a_small_request_from_headers_to_the_end_of_its_answer(name: str) -> None:
    async with served(name) as picker:
        body = runtime.chat()
        call = await picker.send(runtime.request_headers(), *runtime.request_body(body))
        head, piece = await wire.read(call), await wire.read(call)
        assert (runtime.kind(head), runtime.piece_of(piece)) == ("request_headers", body)
        assert runtime.left_over(picker.app)["requests"] == 1
        await call.write(runtime.response_headers())
        await call.write(runtime.response_body(b"{}"))
        assert [runtime.kind(reply) for reply in await finish(call)] == ["response_headers", "response_body"]
        assert await call.code() is grpc.StatusCode.OK
        await picker.over()
        assert picker.counts.codes == {"OK": 1}


async def test_a_large_body_is_read_elsewhere_and_its_late_result_written(name: str) -> None:
    async with served(name) as picker:
        body = runtime.chat("x" * LARGE)
        call = await picker.send(runtime.request_headers(), *runtime.request_body(body))
        head = await wire.read(call)
        # The proxy does not read on while it sends what the engine answered.
        await call.write(runtime.response_headers(content_type=runtime.SSE))
        await call.write(runtime.response_body(b"data: x\n\n", end=False))
        await call.write(runtime.response_body(b"data: [DONE]\n\n"))
        replies = await finish(call)
        kinds = [runtime.kind(reply) for reply in replies]
        pieces = kinds.count("request_body")
        assert runtime.kind(head) == "request_headers"
        assert pieces > 40
        assert kinds == ["request_body"] * pieces + ["response_headers", "response_body", "response_body"]
        assert b"".join(map(runtime.piece_of, replies[:pieces])) == body
        await picker.over()


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_what_is_wrong_with_a_large_body_comes_back_and_ends_the_stream(
    name: str, encoding: str
) -> None:
    broken = runtime.chat("x" * LARGE)[:-1]
    headers = {"content_encoding": encoding} if encoding else {}
    if encoding:
        broken = gzip.compress(broken[:LARGE] + random.Random(1).randbytes(100_000).hex().encode())
    async with served(name) as picker:
        call = await picker.send(runtime.request_headers(**headers), *runtime.request_body(broken))
        replies = await finish(call)
        status, error = runtime.refusal(replies[0])
        assert (len(replies), status, error["code"]) == (1, 400, 400)
        assert "JSON" in error["message"] or "json" in error["message"]
        assert await call.code() is grpc.StatusCode.OK
        await picker.over()


async def test_a_large_body_that_inflates_over_the_limit_gets_413(name: str) -> None:
    body = gzip.compress(runtime.chat("x" * (8 << 20)) + random.Random(1).randbytes(100_000))
    async with served(name, max_request_body_bytes=4 << 20) as picker:
        call = await picker.send(
            runtime.request_headers(content_encoding="gzip"), *runtime.request_body(body)
        )
        status, error = runtime.refusal((await finish(call))[0])
        assert status == 413
        assert "4194304" in error["message"]
        await picker.over()


async def test_a_client_that_leaves_while_its_large_body_is_read(name: str) -> None:
    async with served(name) as picker:
        body = runtime.chat("x" * LARGE)
        warm = await picker.send(runtime.request_headers(), *runtime.request_body(body))
        await wire.read(warm)
        await picker.child(signal.SIGSTOP)
        try:
            asked = runtime.request_headers(), *runtime.request_body(body)
            calls = [await picker.send(*asked) for _ in range(3)]
            await wire.until(lambda: picker.app.budget.used >= 3 * len(body), "all bodies are held")
            for call in (warm, *calls):
                call.cancel()
            await picker.over()
        finally:  # else it stays for ever, and this process waits for it
            await picker.child(signal.SIGCONT)
        # The placements come after their streams have ended, and are given back at once.
        await wire.until(lambda: runtime.sample(picker.app, "request_total") == 4, "late placements")
        await picker.over()


async def test_the_child_that_dies_is_replaced_and_nobody_notices(name: str) -> None:
    async with served(name) as picker:
        body = runtime.chat("x" * LARGE)
        for _ in range(2):
            call = await picker.send(runtime.request_headers(), *runtime.request_body(body))
            assert runtime.kind(await wire.read(call)) == "request_headers"
            call.cancel()
            await picker.child(signal.SIGKILL)
        await picker.over()


async def test_a_message_that_is_not_legal_ends_its_stream_alone(name: str) -> None:
    async with served(name) as picker:
        other = await picker.send(runtime.request_headers(end=True, path="/v1/models"))
        await wire.read(other)
        call = await picker.send(runtime.request_headers(), *runtime.request_body(runtime.chat()))
        await wire.read(call)
        await wire.read(call)
        await call.write(runtime.request_headers())
        assert await finish(call) == []
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request headers message in state ended" in await call.details()
        await wire.until(lambda: picker.counts.open == 1, "the broken stream is over")
        assert runtime.left_over(picker.app)["tickets"] == 1
        await other.write(runtime.response_headers(404))
        assert runtime.kind(await wire.read(other)) == "response_headers"
        other.cancel()
        await picker.over()


async def test_body_messages_after_the_bodys_end_are_counted_when_the_stream_ends(name: str) -> None:
    async with served(name) as picker:
        body = runtime.request_body(runtime.chat())
        late = await picker.send(runtime.request_headers(), *body, *body, *body)
        assert runtime.kind(await wire.read(late)) == "request_headers"
        assert runtime.kind(await wire.read(late)) == "request_body"
        assert picker.counts.dropped == 0
        await late.write(runtime.response_headers())
        assert runtime.kind(await wire.read(late)) == "response_headers"
        await late.write(runtime.response_body(b"{}"))
        assert runtime.kind(await wire.read(late)) == "response_body"
        tidy = await picker.send(runtime.request_headers(), *body)
        await wire.read(tidy)
        tidy.cancel()
        await picker.over()
        assert picker.counts.dropped == 2


async def test_bytes_that_are_no_message(name: str) -> None:
    async with served(name) as picker:
        call = await picker.send(b"\xff\xff\xff")
        await finish(call)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ProcessingRequest" in await call.details()
        await picker.over()
        assert picker.counts.codes == {"INVALID_ARGUMENT": 1}


async def test_a_message_above_the_limit_of_messages(name: str) -> None:
    """The own transport refuses it as any body that is too large; grpcio ends the call by itself."""
    async with served(name, max_request_body_bytes=3 << 20) as picker:
        below = runtime.request_body(b"x" * (7 << 19), piece=7 << 19)
        call = await picker.send(runtime.request_headers(), *below)
        assert runtime.refusal((await finish(call))[0])[0] == 413
        above = runtime.request_body(b"x" * (7 << 20), piece=7 << 20)
        call = await picker.send(runtime.request_headers(), *above)
        replies = await finish(call)
        if name == OWN:
            status, error = runtime.refusal(replies[0])
            assert (len(replies), status, error["code"], error["type"]) == (1, 413, 413, TOO_LARGE)
            assert await call.code() is grpc.StatusCode.OK
        else:
            assert replies == []
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await picker.over()
        assert picker.counts.codes == ({"OK": 2} if name == OWN else {"OK": 1, "CANCELLED": 1})


async def test_half_closing_before_the_end_is_an_abort(name: str) -> None:
    async with served(name) as picker:
        call = await picker.send(runtime.request_headers(), *runtime.request_body(runtime.chat()))
        await wire.read(call)
        await call.done_writing()
        await finish(call)
        assert await call.code() is grpc.StatusCode.OK
        await picker.over()
        assert picker.counts.codes == {"CANCELLED": 1}


async def test_half_closing_while_the_body_is_read_elsewhere(name: str) -> None:
    """The own transport still sends the pick; grpcio ends the call. Nothing stays either way."""
    async with served(name) as picker:
        body = runtime.chat("x" * LARGE)
        call = await picker.send(runtime.request_headers(), *runtime.request_body(body))
        await call.done_writing()
        replies = await finish(call)
        if name == OWN:
            assert [runtime.kind(reply) for reply in replies[:2]] == ["request_headers", "request_body"]
            assert b"".join(map(runtime.piece_of, replies[1:])) == body
        assert await call.code() is grpc.StatusCode.OK
        await picker.over()
        assert picker.counts.codes == {"CANCELLED": 1}


async def test_messages_compressed_by_the_client(name: str) -> None:
    async with served(name) as picker:
        call = picker.channel.stream_stream(names.EXT_PROC_METHOD)(compression=grpc.Compression.Gzip)
        body = runtime.chat("compressible " * 20_000)
        for message in (runtime.request_headers(), *runtime.request_body(body)):
            await call.write(message)
        assert runtime.kind(await wire.read(call)) == "request_headers"
        pieces = [runtime.piece_of(await wire.read(call)) for _ in runtime.request_body(body)]
        assert b"".join(pieces) == body
        await call.write(runtime.response_headers())
        await call.write(runtime.response_body(b"{}"))
        assert len(await finish(call)) == 2
        await picker.over()
        assert picker.counts.codes == {"OK": 1}


async def test_a_deadline_of_the_proxy(name: str) -> None:
    """Where it passed before there was a pick, the machine is slow, and the next proxy has more patience."""
    async with served(name) as picker:
        for patience_s in (1, 5, 25):
            call = picker.channel.stream_stream(names.EXT_PROC_METHOD)(timeout=patience_s)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in (runtime.request_headers(), *runtime.request_body(runtime.chat())):
                    await call.write(message)
            head = await wire.read(call)
            placed = runtime.left_over(picker.app)["tickets"]
            await finish(call)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await picker.over()
            if head is not None and placed:
                break
        assert head is not None
        assert (runtime.kind(head), placed) == ("request_headers", 1)


@pytest.mark.parametrize(
    "method", [f"/{names.EXT_PROC_SERVICE}/Proces", "/envoy.service.ext_proc.v2.ExternalProcessor/Process"]
)
async def test_methods_that_are_not_served(name: str, method: str) -> None:
    async with served(name) as picker:
        call = picker.channel.stream_stream(method)()
        assert await finish(call) == []
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        if name == OWN:  # grpcio: Method not found!
            service, _, last = method[1:].partition("/")
            served_here = service == names.EXT_PROC_SERVICE
            told = (
                f"unknown method {last} for service {service}"
                if served_here
                else f"unknown service {service}"
            )
            assert await call.details() == told
        assert picker.counts.codes == {}


@pytest.mark.parametrize("late", [False, True])
async def test_a_fault_of_ours_gives_back_what_was_charged(
    name: str, late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first reply to a placed request cannot be written: its ticket is charged already."""

    def encode(reply: Any) -> bytes:
        raise RuntimeError("planted")

    async with served(name) as picker:
        monkeypatch.setattr(stream_module, "encode", encode)
        body = runtime.chat("x" * (LARGE if late else 10))
        call = await picker.send(runtime.request_headers(), *runtime.request_body(body))
        assert await finish(call) == []
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert "planted" not in await call.details()
        await picker.over()
        assert picker.counts.codes == {"INTERNAL": 1}
        assert "planted" in caplog.text


async def test_a_stream_that_cannot_be_made_is_of_itself_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(name) as picker:
        other = await picker.send(runtime.request_headers(), *runtime.request_body(runtime.chat()))
        await other.read()
        with monkeypatch.context() as patch:
            patch.setattr(stream_module.Stream, "__init__", None)
            call = await picker.send()
            assert await finish(call) == []
            assert await call.code() is grpc.StatusCode.INTERNAL
            assert "its log has the details" in await call.details()
        assert "an ext-proc stream failed" in caplog.text
        assert picker.counts.open == 1
        assert await other.read() is not grpc.aio.EOF
        other.cancel()
        await picker.over()


async def test_a_fault_at_the_end_of_a_stream_is_of_that_stream_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(name) as picker:
        other = await picker.send(runtime.request_headers(), *runtime.request_body(runtime.chat()))
        await wire.read(other)
        call = await picker.send(runtime.request_headers(), *runtime.request_body(runtime.chat()))
        await wire.read(call)
        closed = stream_module.Stream.closed

        def faulty(self: Any, *, error: bool = False) -> None:
            closed(self, error=error)
            raise RuntimeError("planted")

        monkeypatch.setattr(stream_module.Stream, "closed", faulty)
        call.cancel()
        await wire.until(lambda: picker.counts.open == 1, "the faulty stream is over")
        await wire.until(lambda: "RuntimeError: planted" in caplog.text, "the fault is told")
        monkeypatch.undo()
        assert runtime.left_over(picker.app)["tickets"] == 1
        await wire.read(other)
        await other.write(runtime.response_headers())
        await other.write(runtime.response_body(b"{}"))
        assert len(await finish(other)) == 2
        await picker.over()


class Faulty:
    def place(self, ctx: Ctx, alive: Mask) -> tuple[Leg, ...]:
        raise RuntimeError("planted")


async def test_a_fault_in_the_director_is_an_answer_to_the_client(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(name) as picker:
        director = picker.app.director
        director.plugins = replace(director.plugins, handler=Faulty(), sampled=None)
        for size in (10, LARGE):
            body = runtime.chat("x" * size)
            call = await picker.send(runtime.request_headers(), *runtime.request_body(body))
            status, error = runtime.refusal((await finish(call))[0])
            assert status == 500
            assert "planted" not in error["message"]
        await picker.over()
        assert caplog.text.count("RuntimeError: planted") == 2


async def test_streams_reset_at_random_leave_nothing_behind(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """1,000 streams, 50 at a time, each cut after a random number of its messages and of replies read."""
    draw = random.Random(11)
    answer = [runtime.response_body(b"data: {}\n\n", end=False)] * 3 + [runtime.response_body(b"", end=True)]

    async def one(picker: Served) -> None:
        body = runtime.chat("y" * draw.choice((10, 1000, 70_000)))
        messages = [
            runtime.request_headers(),
            *runtime.request_body(body, draw.choice((500, runtime.PIECE))),
            runtime.response_headers(content_type=runtime.SSE),
            *answer,
        ]
        call = wire.process(picker.channel)
        with suppress(
            grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError
        ):  # the picker ended it
            for message in messages[: draw.randrange(len(messages) + 1)]:
                await call.write(message)
                if draw.random() < 0.3:
                    await asyncio.sleep(draw.random() * 0.003)
            if draw.random() < 0.2:
                await call.done_writing()
        call.cancel()

    async with served(name) as picker:
        for _ in range(20):
            await asyncio.gather(*(one(picker) for _ in range(50)))
        await picker.over()
        assert sum(picker.counts.codes.values()) > 500
        assert set(picker.counts.codes) <= {"OK", "CANCELLED", "INVALID_ARGUMENT"}
    assert wire.faults(caplog.records) == []


async def test_draining_waits_for_what_is_in_flight_and_takes_nothing_new(name: str) -> None:
    async with served(name) as picker:
        call = await picker.send(runtime.request_headers(), *runtime.request_body(runtime.chat()))
        await wire.read(call)
        draining = asyncio.create_task(picker.transport.drain())
        ready = grpc.ChannelConnectivity.READY
        await wire.until(lambda: picker.channel.get_state() is not ready, "the proxy has read of it")
        late = wire.process(picker.channel)
        assert await wire.read(late) is None
        assert await late.code() is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        await wire.read(call)
        await call.write(runtime.response_headers())
        await call.write(runtime.response_body(b"{}"))
        assert len(await finish(call)) == 2
        async with asyncio.timeout(wire.DEADLINE_S):
            await draining
        await picker.over()


async def test_stopping_cuts_what_is_in_flight(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(name) as picker:
        call = await picker.send(runtime.request_headers(), *runtime.request_body(runtime.chat()))
        await wire.read(call)
        await picker.transport.stop()
        await finish(call)
        await picker.over()
    assert wire.faults(caplog.records) == []


async def test_pings_on_an_idle_connection_are_answered_and_not_taken_for_an_attack(name: str) -> None:
    """Proxies keep connections alive with them; a GOAWAY would cut every stream of the connection."""
    acknowledged = 0
    transport = runtime.transport(runtime.picker(transport=name), wire.Counts().hooks())
    port = await transport.start("127.0.0.1:0")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(PREFACE + frame(FrameType.SETTINGS, 0, 0, b"") + frame(FrameType.SETTINGS, ACK, 0, b""))
        for number in range(200):
            writer.write(frame(FrameType.PING, 0, 0, number.to_bytes(8)))
        async with asyncio.timeout(wire.DEADLINE_S):
            while acknowledged < 200:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3]))
                assert head[3] != FrameType.GOAWAY
                acknowledged += head[3] == FrameType.PING and head[4] == ACK
    finally:
        writer.close()
        await transport.stop()
