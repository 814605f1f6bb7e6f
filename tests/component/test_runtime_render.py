"""Exact tokens by a real render service: recorded answers, and services that are slow, broken or gone."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from epp.config.load import load_config
from epp.errors import NeedFailed
from epp.payload.render import RenderNeed
from epp.runtime import render as render_module
from epp.runtime.app import App
from epp.runtime.needs import fulfil
from epp.runtime.render import IDLE_CONNECTIONS, Renders
from epp.runtime.router import Router
from epp.runtime.stream import Stream
from tests.data.runtime import picker as runtime

RECORDED = Path(__file__).parent.parent / "data" / "payload" / "apis"
EXCHANGES = {
    name: json.loads((RECORDED / f"{name}.json").read_text())
    for name in ("render-chat", "render-completions", "render-messages", "render-responses")
}
RENDERED = {exchange["request"]["path"]: exchange["response"]["body"] for exchange in EXCHANGES.values()}
SERVED = {path: path.removesuffix("/render") for path in RENDERED}
CHAT = EXCHANGES["render-chat"]["request"]["body"].encode()
CHAT_PATH = "/v1/chat/completions/render"
TOKENS = len(json.loads(RENDERED[CHAT_PATH])["token_ids"])

BOTH = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def replay(request: web.Request) -> web.StreamResponse:
    """As recorded."""
    return web.Response(text=RENDERED[request.path], content_type="application/json")


async def tokenized(request: web.Request) -> web.StreamResponse:
    """The recorded answer, of a tokenizer to which all texts begin alike and end by their length."""
    body = await request.json()
    answer = json.loads(RENDERED[CHAT_PATH])
    text = body["messages"][0]["content"]
    answer["token_ids"] = [*range(1000, 1128), *[len(text)] * 64]
    return web.json_response(answer)


@asynccontextmanager
async def service(handler: Handler) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def config(url: str, timeout: str = "20s") -> str:
    return f"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {{modelName: acme/tiny-llama, vllm: {{url: {url}, timeout: {timeout}, mmTimeout: 20s}}}}
- type: prefix-cache-scorer
"""


@asynccontextmanager
async def picking(handler: Handler = replay, patience: str = "20s") -> AsyncIterator[App]:
    async with service(handler) as url:
        app = runtime.picker(config=config(url, patience))
        try:
            yield app
        finally:
            app.router.close()
            await app.renders.close()


class Client:
    """One stream."""

    def __init__(self, app: App) -> None:
        self.woken = asyncio.Event()
        self.wakes = 0
        self.stream: Stream = app.stream(self._wake)

    def _wake(self) -> None:
        self.wakes += 1
        self.woken.set()

    def send(self, body: bytes, path: str = "/v1/chat/completions") -> None:
        for message in (runtime.request_headers(path), *runtime.request_body(body)):
            self.stream.received(message)

    async def answered(self) -> str:
        """Kind of the first reply."""
        async with asyncio.timeout(60):
            await self.woken.wait()
        return runtime.kind(self.stream.outbox[0])

    async def routed(self, body: bytes = CHAT, path: str = "/v1/chat/completions") -> "Client":
        self.send(body, path)
        assert self.stream.deciding
        assert await self.answered() == "request_headers"
        return self

    def end(self) -> None:
        self.stream.received(runtime.response_headers())
        self.stream.received(runtime.response_body(b"{}"))
        self.stream.closed()


def failures(app: App, reason: str = "") -> float:
    labels = {"reason": reason} if reason else {}
    return runtime.sample(app, "request_needs_failed_total", need="RenderNeed", **labels)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.005)


@BOTH
@pytest.mark.parametrize("name", EXCHANGES)
async def test_recorded_tokens_are_what_is_charged(name: str) -> None:
    seen: list[tuple[str, str, str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, request.headers["content-type"], await request.text()))
        return await replay(request)

    exchange = EXCHANGES[name]
    path, body = exchange["request"]["path"], exchange["request"]["body"]
    told = json.loads(exchange["response"]["body"])
    tokens = len((told[0] if isinstance(told, list) else told)["token_ids"])
    async with picking(handler) as app:
        client = await Client(app).routed(body.encode(), SERVED[path])
        assert app.ledger.total_prefill_tokens == tokens
        assert seen == [(path, "application/json", body)]
        client.end()
        assert runtime.nothing_left(app)()
        assert failures(app) == 0


async def two_chats(handler: Handler) -> float:
    """The share of the second chat that the index finds; the texts have nothing in common."""
    async with picking(handler) as app:
        clients = []
        for text in ("a" * 700, "Z" * 900):
            client = Client(app)
            client.send(runtime.chat(text))
            await client.answered()
            clients.append(client)
        for client in clients:
            client.end()
        assert runtime.nothing_left(app)()
        return runtime.sample(app, "prefix_indexer_hit_ratio_sum")


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=403, text='{"error":{"message":"Scale-out endpoints are disabled."}}')


async def test_the_index_works_on_tokens() -> None:
    assert await two_chats(tokenized) == pytest.approx(2 / 3), "128 of 192 tokens"
    assert await two_chats(refusing) == 0, "by their text they have nothing in common"


async def slow(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(20)
    return await replay(request)


async def trickling(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    for byte in RENDERED[request.path].encode():
        await answer.write(bytes([byte]))
        await asyncio.sleep(0.5)
    return answer


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>welcome</html>")


async def without_tokens(request: web.Request) -> web.StreamResponse:
    return web.json_response({"token_ids": [], "model": "m"})


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut_within(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-length": "1000"})
    await answer.prepare(request)
    await answer.write(b'{"token_ids":[1,2')
    assert request.transport is not None
    request.transport.close()
    return answer


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/")


async def failing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, body=b"\xff" * 100_000)


@BOTH
@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (slow, "late"),
        (trickling, "late"),
        (refusing, "refused"),
        (failing, "refused"),
        (elsewhere, "refused"),
        (garbage, "unreadable"),
        (without_tokens, "unreadable"),
        (cut, "unreachable"),
        (cut_within, "unreachable"),
    ],
)
async def test_a_service_that_does_not_answer_costs_the_exact_tokens_alone(
    handler: Handler, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    patience = "100ms" if reason == "late" else "20s"
    async with picking(handler, patience) as app:
        for number in (1, 2):
            client = await Client(app).routed()
            assert 0 < app.ledger.total_prefill_tokens != TOKENS, "the estimate"
            assert failures(app, reason) == failures(app) == number
            client.end()
        # What is late is given up, which takes its own time.
        await until(lambda: app.renders.held == 0)
        assert runtime.nothing_left(app)()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1, "told once, counted each time"


async def test_too_long_an_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module, "ANSWER_BYTES", 100)
    async with picking() as app:
        client = await Client(app).routed()
        assert failures(app, "unreadable") == 1
        client.end()


async def test_more_than_may_be_held_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three bodies two may wait; the third is placed at once, by the estimate."""
    gate = Gate()
    monkeypatch.setattr(render_module, "HELD_BYTES", 2 * len(CHAT) + len(CHAT) // 2)
    async with picking(gate) as app:
        waiting = [Client(app), Client(app)]
        for client in waiting:
            client.send(CHAT)
        await until(lambda: gate.asked == 2)
        assert app.renders.held == 2 * len(CHAT)
        third = await Client(app).routed()
        assert failures(app, "busy") == failures(app) == 1
        monkeypatch.setattr(render_module, "HELD_BYTES", 1 << 20)
        gate.open.set()
        for client in (*waiting, third):
            await client.answered()
            client.end()
        assert failures(app) == 1
        assert app.renders.held == 0
        assert runtime.nothing_left(app)()


async def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        app = runtime.picker(config=config(f"http://127.0.0.1:{probe.getsockname()[1]}"))
        client = await Client(app).routed()
        assert failures(app, "unreachable") == 1
        client.end()
        await app.renders.close()


@BOTH
async def test_a_large_body_is_rendered_too() -> None:
    text = "x" * (2 << 20)
    async with picking(tokenized) as app:
        client = await Client(app).routed(runtime.chat(text))
        assert app.ledger.total_prefill_tokens == 192
        client.end()
        assert runtime.nothing_left(app)()
        assert failures(app) == 0


@pytest.mark.parametrize(("ids", "charged"), [(150_000, 150_000), (-1, 2)])
async def test_a_long_answer_is_read_in_the_child(
    ids: int, charged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be used as well: the request is placed without."""

    async def long(request: web.Request) -> web.StreamResponse:
        return web.json_response({"token_ids": [*range(max(ids, 0)), *["no"] * 20_000 * (ids < 0)]})

    def here(request: Any, answer: bytes) -> Any:
        raise AssertionError("read on the loop")

    monkeypatch.setattr("epp.director.with_tokens", here)
    async with picking(long) as app:
        client = await Client(app).routed(runtime.chat("x"))
        assert app.ledger.total_prefill_tokens == charged
        assert failures(app) == failures(app, "unreadable") == (ids < 0)
        client.end()
        assert runtime.nothing_left(app)()
        app.router.close()


class Gate:
    """A service that answers when it is opened."""

    def __init__(self) -> None:
        self.asked = 0
        self.open = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        await self.open.wait()
        return await replay(request)


async def gone_while_waiting() -> dict[str, int]:
    gate = Gate()
    async with picking(gate) as app:
        client = Client(app)
        client.send(CHAT)
        await until(lambda: gate.asked == 1)
        client.stream.closed(error=True)
        assert runtime.nothing_left(app)(), "nothing is held for one that is gone"
        gate.open.set()
        async with asyncio.timeout(60):
            await client.woken.wait()
        await until(lambda: not app.router._tasks)
        assert client.wakes == 1
        assert app.renders.held == 0
        assert runtime.sample(app, "request_total") == 1, "it was placed, and given back"
        return runtime.left_over(app)


@BOTH
async def test_a_client_that_goes_while_its_request_waits_leaves_nothing() -> None:
    assert not any((await gone_while_waiting()).values())


@BOTH
async def test_requests_wait_together_and_each_is_answered_once() -> None:
    gate = Gate()
    async with picking(gate) as app:
        clients = [Client(app) for _ in range(40)]
        for client in clients:
            client.send(CHAT)
        await until(lambda: gate.asked == 40)
        for client in clients[::2]:
            client.stream.closed()
        gate.open.set()
        await until(lambda: all(client.wakes for client in clients))
        assert app.director.in_flight == 20
        for client in clients[1::2]:
            client.end()
        assert [client.wakes for client in clients] == [1] * 40
        assert runtime.nothing_left(app)()


async def test_what_waits_is_given_up_at_the_end() -> None:
    gate = Gate()
    async with picking(gate) as app:
        client = Client(app)
        client.send(CHAT)
        await until(lambda: gate.asked == 1)
        app.router.close()
        await until(lambda: not app.router._tasks)
        client.stream.closed()
        assert client.wakes == 0
        assert runtime.nothing_left(app)()


async def test_a_new_service_counts_from_the_next_request_on() -> None:
    async with service(tokenized) as url, picking(refusing) as app:
        first = await Client(app).routed(runtime.chat("first"))
        first.end()
        app.use(load_config(config(url), "config.yaml"))
        second = await Client(app).routed(runtime.chat("second"))
        assert app.ledger.total_prefill_tokens == 192
        second.end()
        assert failures(app) == 1


# -- connections --------------------------------------------------------------------------------------


@BOTH
async def test_few_connections_stay_open() -> None:
    gate = Gate()
    connections: set[Any] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        connections.add(request.transport)
        return await gate(request)

    async with service(handler) as url:
        renders = Renders()
        need = RenderNeed(url + CHAT_PATH, CHAT, 20.0)
        burst = [asyncio.create_task(renders(need)) for _ in range(3 * IDLE_CONNECTIONS)]
        await until(lambda: gate.asked == len(burst))
        gate.open.set()
        await asyncio.gather(*burst)
        assert len(connections) == len(burst), "none waits for another"
        first, connections = connections, set()
        gate.open.clear()
        again = [asyncio.create_task(renders(need)) for _ in range(3 * IDLE_CONNECTIONS)]
        await until(lambda: gate.asked == len(burst) + len(again))
        assert 0 < len(first & connections) <= IDLE_CONNECTIONS
        gate.open.set()
        await asyncio.gather(*again)
        await renders.close()


@BOTH
async def test_a_connection_closed_while_idle_is_no_failure() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls == 2:
            return await cut(request)
        return await replay(request)

    async with service(handler) as url:
        renders = Renders()
        need = RenderNeed(url + CHAT_PATH, CHAT, 20.0)
        assert await renders(need) == await renders(need) == RENDERED[CHAT_PATH].encode()
        assert calls == 3
        await renders.close()


# -- one deadline -------------------------------------------------------------------------------------


def need(name: str, timeout_s: float = 20.0) -> RenderNeed:
    return RenderNeed(name, b"", timeout_s)


async def test_needs_are_awaited_together_and_told_in_order() -> None:
    both = asyncio.Barrier(2)

    async def perform(need: RenderNeed) -> bytes:
        await both.wait()
        return need.url.encode()

    async with asyncio.timeout(60):
        assert await fulfil([need("a"), need("b")], perform) == (b"a", b"b")


async def test_the_deadline_is_that_of_the_most_patient() -> None:
    async def perform(need: RenderNeed) -> bytes:
        await asyncio.sleep(0.05)
        return need.url.encode()

    assert await fulfil([need("a", 0.001), need("b")], perform) == (b"a", b"b")


async def test_what_is_there_at_the_deadline_counts() -> None:
    cancelled = asyncio.Event()

    async def perform(need: RenderNeed) -> bytes:
        if need.url == "never":
            try:
                await asyncio.sleep(1000)
            finally:
                cancelled.set()
        if need.url == "broken":
            raise RuntimeError("planted")
        return need.url.encode()

    late, there, broken = await fulfil(
        [need("never", 0.05), need("there", 0.05), need("broken", 0.05)], perform
    )
    assert isinstance(late, NeedFailed)
    assert (late.reason, there, str(broken)) == ("late", b"there", "planted")
    async with asyncio.timeout(60):
        await cancelled.wait()


# -- planted faults -----------------------------------------------------------------------------------


def test_planted_a_router_that_places_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: Router, raw: Any, prepare: Any, deliver: Any) -> Any:
        return self._place(raw, prepare())

    monkeypatch.setattr(Router, "_routed", at_once)
    with pytest.raises(AssertionError):
        asyncio.run(test_recorded_tokens_are_what_is_charged("render-chat"))


def test_planted_an_outcome_that_reaches_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Router, raw: Any, deliver: Any, work: Any) -> None:
        work()
        deliver(self._broken(raw))

    monkeypatch.setattr(Router, "_tell", lost)
    with pytest.raises(AssertionError):
        assert not any(asyncio.run(gone_while_waiting()).values())


def test_planted_a_late_outcome_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Stream._deliver

    def drops(self: Stream, outcome: Any) -> None:
        if not self.deciding:
            self._wake()
            return
        deliver(self, outcome)

    monkeypatch.setattr(Stream, "_deliver", drops)
    with pytest.raises(AssertionError):
        assert not any(asyncio.run(gone_while_waiting()).values())
