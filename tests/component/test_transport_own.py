"""Streams over the own transport into the real router and director, frame by frame.

What every transport does is in `test_transport_streams`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from epp.http2.ports import Ending
from epp.payload.records import RawRequest
from epp.payload.request import Parsed
from epp.runtime import own as own_module
from epp.runtime import stream as stream_module
from epp.runtime.app import App
from epp.runtime.decoder import Decoder
from epp.runtime.options import OWN
from tests.data.extproc import over_wire as wire
from tests.data.runtime import picker as runtime
from tests.data.runtime import proxy
from tests.data.runtime.proxy import Proxy, Written, framed

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

LARGE = 2_500_000
ANSWER = (runtime.response_headers(), runtime.response_body(b"{}"))


class Served:
    """A picker behind a port."""

    def __init__(self, app: App, transport: Any, counts: wire.Counts, port: int) -> None:
        self.app = app
        self.transport = transport
        self.counts = counts
        self.port = port

    async def over(self, **codes: int) -> None:
        """Every stream has ended, so, and nothing is left of it."""
        await wire.until(lambda: self.counts.open == 0, "no stream is open")
        await wire.until(runtime.nothing_left(self.app), "nothing is left")
        assert self.counts.codes == codes


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Served]:
    app = runtime.picker(transport=OWN, **options)
    counts = wire.Counts()
    transport = runtime.transport(app, counts.hooks())
    port = await transport.start("127.0.0.1:0")
    try:
        yield Served(app, transport, counts, port)
    finally:
        async with asyncio.timeout(wire.DEADLINE_S):
            await transport.stop()
        app.router.close()


async def ask(client: Proxy, body: bytes) -> int:
    return await client.begin(runtime.request_headers(), *runtime.request_body(body))


async def answer(client: Proxy, stream_id: int, replies: int) -> None:
    """What comes of an engine, to the end of the stream that has got so many replies."""
    await client.send(stream_id, framed(*ANSWER))
    heard = await client.ended(stream_id)
    kinds = [runtime.kind(message) for message in heard.messages[replies:]]
    assert (kinds, heard.status) == (["response_headers", "response_body"], "0")


# -- a whole exchange -------------------------------------------------------------------------------


async def test_an_exchange_as_a_proxy_has_it() -> None:
    """It resets the stream when it has the last reply, before or after it reads the trailers."""
    async with served() as picker, proxy.connected(picker.port) as client:
        for _ in range(3):
            stream_id = await ask(client, runtime.chat())
            assert len(await client.messages(stream_id, 2)) == 2
            await answer(client, stream_id, 2)
            assert client.heard[stream_id].reset == 0
            client.reset(stream_id)
        await picker.over(OK=3)
        assert client.goaways == []


async def test_300_requests_at_once_on_a_fresh_connection() -> None:
    async with served() as picker, proxy.connected(picker.port) as client:
        body = runtime.chat()
        data = framed(runtime.request_headers(), *runtime.request_body(body))
        streams = [client.open() for _ in range(300)]
        await asyncio.gather(*(client.send(each, data) for each in streams))
        for each in streams:
            head, piece = await client.messages(each, 2)
            assert (runtime.kind(head), runtime.piece_of(piece)) == ("request_headers", body)
        assert runtime.left_over(picker.app)["tickets"] == 300
        for each in streams:
            await answer(client, each, 2)
        await picker.over(OK=300)


async def test_what_waits_together_is_written_together() -> None:
    """Twenty chunks of ten streams that came in one read are answered in one write."""
    async with served() as picker, proxy.connected(picker.port) as client:
        streams = [await ask(client, runtime.chat()) for _ in range(10)]
        for each in streams:
            await client.messages(each, 2)
            await client.send(each, framed(runtime.response_headers(content_type=runtime.SSE)))
            await client.messages(each, 3)
        (protocol,) = picker.transport._server._open
        written = protocol._transport = Written(protocol._transport)
        chunk = runtime.response_body(b"data: x\n\n", end=False)
        frames = [proxy.DataFrame(each, data=framed(chunk)) for each in streams for _ in range(2)]
        client.write(*frames)
        for each in streams:
            assert len(await client.messages(each, 5)) == 5
        assert len(written.sizes) == 1
        for each in streams:
            client.reset(each)
        await picker.over(CANCELLED=10)


# -- large bodies -----------------------------------------------------------------------------------


async def test_half_closing_while_the_body_is_read_elsewhere_still_gets_the_pick() -> None:
    async with served() as picker, proxy.connected(picker.port) as client:
        body = runtime.chat("x" * LARGE)
        stream_id = client.open()
        data = framed(runtime.request_headers(), *runtime.request_body(body))
        await client.send(stream_id, data, end=True)
        heard = await client.ended(stream_id)
        assert runtime.kind(heard.messages[0]) == "request_headers"
        assert b"".join(map(runtime.piece_of, heard.messages[1:])) == body
        assert (heard.status, heard.reset) == ("0", None)
        await picker.over(CANCELLED=1)


class Reading:
    """What is read of large bodies comes when the test lets it. `begun`: those that came whole."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.let = asyncio.Event()
        parse = Decoder.parse

        async def held(decoder: Decoder, raw: RawRequest) -> Parsed:
            self.begun += 1
            parsed = await parse(decoder, raw)
            await self.let.wait()
            return parsed

        patch.setattr(Decoder, "parse", held)


@pytest.mark.parametrize("leave", ["reset", "break off"])
async def test_leaving_while_the_body_is_read_elsewhere(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    async with served() as picker, proxy.connected(picker.port) as client:
        streams = [await ask(client, runtime.chat(letter * LARGE)) for letter in "xy"]
        await wire.until(lambda: reading.begun == 2, "the bodies are held")
        assert picker.app.budget.used >= 2 * LARGE
        if leave == "reset":
            for stream_id in streams:
                client.reset(stream_id)
            await picker.over(CANCELLED=2)
        else:
            client.break_off()
            await picker.over(UNAVAILABLE=2)
        reading.let.set()
        await wire.until(lambda: runtime.sample(picker.app, "request_total") == 2, "late placements")
        await wire.until(runtime.nothing_left(picker.app), "they are given back")


async def test_late_results_of_many_streams() -> None:
    async with served() as picker, proxy.connected(picker.port, window=8 << 20) as client:
        bodies = [runtime.chat(f"{number} " + "x" * LARGE) for number in range(4)]
        streams = await asyncio.gather(*(ask(client, body) for body in bodies))
        small = await ask(client, runtime.chat())
        await client.messages(small, 2)
        await answer(client, small, 2)
        for stream_id, body in zip(streams, bodies, strict=True):
            replies = 1 + len(runtime.request_body(body))
            messages = await client.messages(stream_id, replies)
            assert b"".join(map(runtime.piece_of, messages[1:])) == body
            await answer(client, stream_id, replies)
        await picker.over(OK=5)


# -- what is refused --------------------------------------------------------------------------------


async def refused(client: Proxy, *messages: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of a request that is refused while its proxy is still sending."""
    stream_id = client.open()
    sending = asyncio.create_task(client.send(stream_id, framed(*messages)))
    heard = await client.ended(stream_id)
    sending.cancel()
    assert (len(heard.messages), heard.status, heard.reset) == (1, "0", 0)
    reply = runtime.pb.ProcessingResponse.FromString(heard.messages[0]).immediate_response
    assert json.loads(reply.body)["error"]["code"] == reply.status.code
    return reply.status.code, {each.header.key: each.header.raw_value for each in reply.headers.set_headers}


async def test_a_message_above_the_limit_gets_413_before_it_is_there() -> None:
    """Its length says it: nothing of it is held, and what goes on coming is dropped."""
    async with served(max_request_body_bytes=1 << 20) as picker, proxy.connected(picker.port) as client:
        (body,) = runtime.request_body(b"x" * (20 << 20), piece=20 << 20)
        stream_id = await client.begin(runtime.request_headers())
        data = framed(body)
        await client.send(stream_id, data[: proxy.FRAME_BYTES])
        heard = await client.ended(stream_id)
        reply = runtime.pb.ProcessingResponse.FromString(heard.messages[0]).immediate_response
        error = json.loads(reply.body)["error"]
        assert (len(heard.messages), heard.status, heard.reset) == (1, "0", 0)
        assert (reply.status.code, error["code"], error["type"]) == (413, 413, "invalid_request_error")
        content_type = [each.header.raw_value for each in reply.headers.set_headers][:1]
        assert content_type == [b"application/json"]
        await client.send(stream_id, data[proxy.FRAME_BYTES : 10 * proxy.FRAME_BYTES])
        other = await ask(client, runtime.chat())
        await client.messages(other, 2)
        await answer(client, other, 2)
        await picker.over(OK=2)


async def test_a_message_without_room_gets_429() -> None:
    """Whether what is held is of another body or of the same message."""
    async with (
        served(max_request_body_bytes=8 << 20, max_held_bytes=3 << 20) as picker,
        proxy.connected(picker.port) as client,
    ):
        body = runtime.request_body(b"x" * (4 << 20), piece=4 << 20)
        status, headers = await refused(client, runtime.request_headers(), *body)
        assert (status, headers[b"retry-after"]) == (429, b"1")
        first_half = runtime.request_body(b"x" * (2 << 20), piece=1 << 19)[:-1]
        held = await client.begin(runtime.request_headers(), *first_half)
        await wire.until(lambda: picker.app.budget.used > 1 << 20, "another body is held")
        body = runtime.request_body(b"x" * (2 << 20), piece=2 << 20)
        assert (await refused(client, runtime.request_headers(), *body))[0] == 429
        client.reset(held)
        await wire.until(lambda: picker.app.budget.used == 0, "there is room again")
        fits = await ask(client, runtime.chat("x" * 1_000_000))
        assert runtime.kind((await client.messages(fits, 1))[0]) == "request_headers"
        client.reset(fits)
        await picker.over(OK=2, CANCELLED=2)


# -- connections that end ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rst", "fin", "garbage"])
async def test_a_connection_that_ends_releases_what_its_streams_hold(how: str) -> None:
    """At every stage of an exchange, in the middle of frames and messages."""
    async with served() as picker, proxy.connected(picker.port) as client:
        body = runtime.request_body(runtime.chat("b" * 200_000))
        client.open()
        await client.begin(runtime.request_headers())
        await client.begin(runtime.request_headers(), *body[:2])
        half = await client.begin(runtime.request_headers())
        await client.send(half, framed(*body)[:100_000])
        for _ in range(3):
            stream_id = await ask(client, runtime.chat())
            await client.messages(stream_id, 2)
        await client.send(stream_id, framed(runtime.response_headers(content_type=runtime.SSE)))
        await client.messages(stream_id, 3)
        assert runtime.left_over(picker.app)["tickets"] == 3
        assert picker.app.budget.used > 200_000
        async with proxy.connected(picker.port) as other:
            stays = await ask(other, runtime.chat())
            await other.messages(stays, 2)
            if how == "rst":
                client.break_off()
            elif how == "fin":
                client.writer.write(b"\0\x10\0\0\0\0\0\0\x01 the rest never comes")
                client.writer.write_eof()
            else:
                client.writer.write(b"\xff" * 9)
            await wire.until(lambda: picker.counts.open == 1, "its streams hear of it")
            assert runtime.left_over(picker.app) == {
                "requests": 1,
                "prefill_tokens": runtime.left_over(picker.app)["prefill_tokens"],
                "tickets": 1,
                "held_bytes": 0,
                "overdrafts": 0,
            }
            await answer(other, stays, 2)
        lost = {"INTERNAL" if how == "garbage" else "UNAVAILABLE": 7}
        await picker.over(OK=1, **lost)


async def test_stopping_in_the_midst_of_everything(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(monkeypatch)
    async with served() as picker, proxy.connected(picker.port) as client:
        await client.begin(runtime.request_headers())
        placed = await ask(client, runtime.chat())
        await client.messages(placed, 2)
        await ask(client, runtime.chat("x" * LARGE))
        await wire.until(lambda: reading.begun == 1, "the body is held")
        async with asyncio.timeout(wire.DEADLINE_S):
            await picker.transport.stop()
        await picker.over(UNAVAILABLE=3)
    assert wire.faults(caplog.records) == []


# -- those who do not read --------------------------------------------------------------------------


async def test_replies_that_are_not_read_are_charged_and_bounded() -> None:
    """Bodies go back to the proxy. Who does not take them fills the account, and then gets 429."""
    options = {"max_request_body_bytes": 1 << 20, "max_held_bytes": 4 << 20}
    async with served(**options) as picker, proxy.connected(picker.port, grants=False) as client:
        body = runtime.chat("r" * 900_000)
        streams = [await ask(client, body) for _ in range(8)]
        answered = [each for each in streams if not client.heard[each].messages]
        await wire.until(lambda: picker.app.budget.used > 3 << 20, "the account is nearly full")
        assert picker.app.budget.used < 5 << 20
        assert answered
        assert runtime.left_over(picker.app)["tickets"] < 8
        async with proxy.connected(picker.port) as other:
            small = await ask(other, runtime.chat())
            await other.messages(small, 2)
            await answer(other, small, 2)
            large = await ask(other, body)
            assert runtime.refusal((await other.ended(large)).messages[0])[0] == 429
        client.break_off()
        await wire.until(lambda: picker.counts.open == 0, "no stream is open")
        assert not any(runtime.left_over(picker.app).values())


# -- faults of ours ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["received", "refuse", "late", "closed"])
async def test_a_fault_of_ours_ends_its_stream_alone(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted = RuntimeError("planted")

    def faulty(*_: Any, **__: Any) -> Any:
        raise planted

    async with (
        served(max_request_body_bytes=4 << 20) as picker,
        proxy.connected(picker.port) as client,
    ):
        other = await ask(client, runtime.chat())
        await client.messages(other, 2)
        if place == "closed":
            closed = stream_module.Stream.closed

            def closed_badly(self: Any, *, error: bool = False) -> None:
                closed(self, error=error)
                raise planted

            stream_id = await ask(client, runtime.chat())
            await client.messages(stream_id, 2)
            monkeypatch.setattr(stream_module.Stream, "closed", closed_badly)
            client.reset(stream_id)
            await wire.until(lambda: picker.counts.open == 1, "it is over")
            monkeypatch.undo()
        elif place == "late":
            monkeypatch.setattr(stream_module, "encode", faulty)
            heard = await client.ended(await ask(client, runtime.chat("x" * LARGE)))
            monkeypatch.undo()
            assert heard.status == "13"
        elif place == "received":
            with monkeypatch.context() as patch:
                patch.setattr(stream_module, "encode", faulty)
                heard = await client.ended(await ask(client, runtime.chat()))
            assert heard.status == "13"
            assert "planted" not in heard.headers["grpc-message"]
        else:
            monkeypatch.setattr(stream_module.Stream, "refuse", faulty)
            stream_id = client.open()
            sending = asyncio.create_task(
                client.send(stream_id, framed(*runtime.request_body(b"x" * (9 << 20), 9 << 20)))
            )
            heard = await client.ended(stream_id)
            sending.cancel()
            assert heard.status == "13"
        assert "RuntimeError: planted" in caplog.text
        await answer(client, other, 2)
        assert client.goaways == []
        await picker.over(OK=1, **{"CANCELLED" if place == "closed" else "INTERNAL": 1})


async def test_a_fault_at_the_loss_of_a_connection_keeps_neither_it_nor_a_drain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = stream_module.Stream.closed

    def closed_badly(self: Any, *, error: bool = False) -> None:
        closed(self, error=error)
        raise RuntimeError("planted")

    async with served() as picker, proxy.connected(picker.port) as client:
        for _ in range(3):
            await client.messages(await ask(client, runtime.chat()), 2)
        monkeypatch.setattr(stream_module.Stream, "closed", closed_badly)
        draining = asyncio.create_task(picker.transport.drain())
        client.break_off()
        async with asyncio.timeout(wire.DEADLINE_S):
            await draining
        await picker.over(UNAVAILABLE=3)
        assert caplog.text.count("RuntimeError: planted") == 3


async def test_every_ending_has_a_status() -> None:
    assert set(own_module._STATUS_OF_ENDING) == set(Ending)
