"""What a client is told that cannot be served, and a pool that changes or falters while it serves."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.web_request import BaseRequest

from e2e.backends import Backend, Seen, backend
from e2e.pages import FLAGS, complaints, has_ready, settled, total, until
from e2e.questions import MODEL, Question, ask, openai_client
from epp import names
from epp.lab.stack import HOST, Gateway, LabEngines, free_ports

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
USER = '[{"role": "user", "content": "hello"}]'


async def post(
    gateway: Gateway, body: bytes, path: str = CHAT, **headers: str
) -> tuple[int, dict[str, str], dict[str, object]]:
    """Status, headers, and what the body says is wrong."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(headers={"content-type": "application/json"}) as session,
        session.post(gateway.url + path, data=body, headers=sent) as answer,
    ):
        said = await answer.json()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, said


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        (CHAT, b'{"model": "m", "messages": ', None, "JSON"),
        (CHAT, b"", None, "JSON"),
        (CHAT, b"[]", None, "object"),
        (CHAT, b'"text"', None, "object"),
        (CHAT, b'{"model": "m"}', "messages", "messages"),
        (CHAT, b'{"model": "m", "messages": []}', "messages", "messages"),
        (CHAT, b'{"model": "m", "messages": "hello"}', "messages", "messages"),
        (CHAT, b'{"messages": %s}' % USER.encode(), "model", "model"),
        (CHAT, b'{"model": 7, "messages": %s}' % USER.encode(), "model", "model"),
        (CHAT, b'{"model": "a", "messages": %s, "model": "b"}' % USER.encode(), "model", "model"),
        ("/v1/completions", b'{"model": "m"}', "prompt", "prompt"),
        ("/v1/completions", b'{"prompt": "hello"}', "model", "model"),
    ],
)
async def test_bodies_that_cannot_be_read(
    gateway: Gateway, engines: LabEngines, path: str, body: bytes, param: str | None, named: str
) -> None:
    before = sum(each.requests for each in (await engines.stats()).engines)
    errors_before = await total(gateway.pickers[0], "request_error_total")
    status, headers, said = await post(gateway, body, path)
    error = said["error"]
    assert isinstance(error, dict)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", 400)
    assert headers["content-type"].startswith("application/json")
    assert error["param"] in ((param,) if param else (None, "messages", "model"))
    assert named.lower() in error["message"].lower()
    assert "hello" not in error["message"]
    assert await total(gateway.pickers[0], "request_error_total") == errors_before + 1
    assert sum(each.requests for each in (await engines.stats()).engines) == before


async def test_compressed_bodies_that_cannot_be_read(each_gateway: Gateway) -> None:
    whole = gzip.compress(b'{"model": "m", "messages": %s}' % USER.encode())
    for body in (b"no gzip", whole[:-9], b""):
        status, _, said = await post(each_gateway, body, content_encoding="gzip")
        assert status == 400, (body, said)
        assert isinstance(said["error"], dict)
    bomb = gzip.compress(bytes(64 << 20))
    status, _, said = await post(each_gateway, bomb, content_encoding="gzip")
    assert status == 413, said


async def test_refusal_as_users_see_it(each_gateway: Gateway) -> None:
    async with openai_client(each_gateway.url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=[])
        assert (caught.value.param, caught.value.type) == ("messages", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="", prompt="x")
        assert caught.value.param == "model"


# -- the pool ---------------------------------------------------------------------------------------


@asynccontextmanager
async def before(folder: Path, envoy: Path, *engines: Backend) -> AsyncIterator[Gateway]:
    """A gateway that never answers by itself."""
    async with Gateway(
        [each.address for each in engines], folder, envoy, fail_open=False, picker_flags=FLAGS
    ) as gateway:
        yield gateway


async def send(gateway: Gateway, count: int = 1, path: str = CHAT) -> list[int]:
    body = b'{"model": "m", "messages": %s}' % USER.encode()
    return [(await post(gateway, body, path))[0] for _ in range(count)]


async def test_empty_pool(envoy: Path, tmp_path: Path) -> None:
    async with backend() as engine, before(tmp_path, envoy, engine) as gateway:
        picker = gateway.pickers[0]
        assert await send(gateway) == [200]
        picker.write_endpoints([])
        await until(lambda: has_ready(gateway.pickers[0], 0), "the pool is empty")
        for path in (CHAT, "/v1/embeddings"):
            status, headers, said = await post(
                gateway, b'{"model": "m", "messages": %s}' % USER.encode(), path
            )
            assert status == 503
            assert headers["retry-after"] == "1"
            assert headers[names.DROPPED_REASON] == names.REJECTED_NO_ENDPOINTS
            error = said["error"]
            assert isinstance(error, dict)
            assert (error["type"], error["code"]) == ("service_unavailable_error", 503)
        async with openai_client(gateway.url) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.models.list()
            assert caught.value.status_code == 503
        assert len(engine.seen) == 1
        picker.write_endpoints([engine.address])
        await until(lambda: has_ready(gateway.pickers[0], 1), "the endpoint is back")
        assert await send(gateway) == [200]
        await settled(picker)
        assert complaints(picker) == []


async def test_file_that_cannot_be_used(envoy: Path, tmp_path: Path) -> None:
    async with backend() as one, backend() as other, before(tmp_path, envoy, one) as gateway:
        picker = gateway.pickers[0]
        for broken in ("endpoints: [", "endpoints: [{name: a, address: b, port: c}]", ""):
            reported = await total(picker, "config_discovery_errors_total")
            fresh = picker.endpoints_file.with_suffix(".broken")
            fresh.write_text(broken)
            fresh.replace(picker.endpoints_file)

            async def is_reported(before: float = reported) -> bool:
                return await total(picker, "config_discovery_errors_total") > before

            await until(is_reported, f"file {broken!r} is reported")
            assert await send(gateway, 3) == [200] * 3
        log = picker.child.log_path.read_text()
        assert str(picker.endpoints_file) in log
        assert "$.endpoints[0].address" in log
        assert "Traceback" not in log
        picker.write_endpoints([other.address])
        await until(lambda: sends_to(gateway, other), "the repaired file is used")
        one.seen.clear()
        assert await send(gateway, 5) == [200] * 5
        assert one.seen == []


async def sends_to(gateway: Gateway, engine: Backend) -> bool:
    before = len(engine.seen)
    assert await send(gateway, 2) == [200] * 2
    return len(engine.seen) > before


async def test_endpoint_that_leaves_ends_its_answers(envoy: Path, tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slowly(request: BaseRequest, seen: Seen) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: begun\n\n")
        await go_on.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async with backend(slowly) as old, backend() as new, before(tmp_path, envoy, old) as gateway:
        picker = gateway.pickers[0]
        async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as session:
            body = b'{"model": "m", "messages": %s, "stream": true}' % USER.encode()
            async with session.post(gateway.url + CHAT, data=body) as answer:
                assert await answer.content.readline() == b"data: begun\n"
                picker.write_endpoints([new.address])
                await until(lambda: sends_to_new(gateway, new), "the new endpoint is used")
                assert await send(gateway, 5) == [200] * 5
                assert len(old.seen) == 1
                go_on.set()
                assert await answer.read() == b"\ndata: [DONE]\n\n"
        await settled(picker)


async def sends_to_new(gateway: Gateway, engine: Backend) -> bool:
    return await has_ready(gateway.pickers[0], 1) and engine.name in await asyncio.to_thread(
        gateway.pickers[0].child.log_path.read_text
    )


GARBAGE = (b"\x00\xff garbage " * 1000, b"", b"<html>", b"vllm:num_requests_running x\n")


async def test_metrics_pages_of_garbage(envoy: Path, tmp_path: Path) -> None:
    """One engine of two, then both: whatever they say, requests are served."""
    async with backend() as well, backend() as ill, before(tmp_path, envoy, well, ill) as gateway:
        picker = gateway.pickers[0]

        async def is_noticed() -> bool:
            assert set(await send(gateway, 5)) == {200}
            return ill.name in picker.child.log_path.read_text()

        for page in GARBAGE:
            ill.page = page
            await until(is_noticed, "the log names the engine")
            await asyncio.sleep(0.7)
        for page in GARBAGE:
            well.page = page
            await asyncio.sleep(0.7)
            assert await send(gateway, 10) == [200] * 10
        seen = await settled(picker)
        assert sum(seen["datalayer_poll_errors_total"]) >= len(GARBAGE)
        assert complaints(picker) == []


async def test_endpoint_where_nobody_listens(envoy: Path, tmp_path: Path) -> None:
    async with backend() as engine, before(tmp_path, envoy, engine) as gateway:
        picker = gateway.pickers[0]
        (nobody,) = free_ports(1)
        picker.write_endpoints([engine.address, (HOST, nobody)])

        async def is_known() -> bool:
            return f":{nobody}/metrics: connection refused" in picker.child.log_path.read_text()

        await until(is_known, "the picker has tried to read its page")
        assert await send(gateway, 20) == [200] * 20
        await until(lambda: has_ready(picker, 1), "it is out")


async def test_engine_that_comes_back_is_used_again(gateway: Gateway, engines: LabEngines) -> None:
    port = engines.ports[2]
    await engines.kill(port)
    await until(lambda: has_ready(gateway.pickers[0], len(engines.ports) - 1), "the dead engine is out")
    async with openai_client(gateway.url) as client:
        for index in range(10):
            assert (await ask(client, Question(f"without-{index}", f"without {index}"))).right
    await engines.revive(port)
    await until(lambda: has_ready(gateway.pickers[0], len(engines.ports)), "it is back")
