"""The lab's servers over real sockets: streams, caching, clients that leave, engines that die."""

import asyncio
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epp.errors import ConfigError
from epp.lab.engine import FITS, EngineSpec
from epp.lab.engine_server import Serving
from epp.lab.servers import Fleet, serve_engines
from epp.lab.stack import free_ports

SPEC = EngineSpec(FITS["llama-8b-h100"], num_blocks=400, max_num_seqs=32, max_model_len=4096)
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def served(count: int = 2, spec: EngineSpec = SPEC, speedup: float = 50.0) -> AsyncIterator["Lab"]:
    fleet = await serve_engines(free_ports(count), Serving(spec, "lab", speedup))
    try:
        async with aiohttp.ClientSession() as session:
            yield Lab(fleet, session)
    finally:
        await fleet.stop()


class Lab:
    """A running fleet and a client."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self.session = session

    def url(self, path: str, engine: int = 0) -> str:
        return f"http://127.0.0.1:{self.fleet.ports[engine]}{path}"

    async def post(self, path: str, body: dict[str, Any], engine: int = 0) -> dict[str, Any]:
        async with self.session.post(self.url(path, engine), json=body) as response:
            return {"status": response.status, **await response.json()}

    async def admin(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        url = f"http://127.0.0.1:{self.fleet.admin_port}{path}"
        async with self.session.request(method, url) as response:
            return response.status, await response.json()

    async def engine(self, index: int = 0) -> dict[str, Any]:
        status, stats = await self.admin("GET", "/lab/stats")
        assert status == 200
        return stats["engines"][index]


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    """A chat of alternating user and assistant messages."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"model": "lab", "messages": messages, **fields}


async def streamed(lab: Lab, path: str, body: dict[str, Any], engine: int = 0) -> list[dict[str, Any]]:
    async with lab.session.post(lab.url(path, engine), json={**body, "stream": True}) as response:
        text = await response.text()
    events = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.005)


async def test_any_engine_gives_the_same_answer_streamed_or_not() -> None:
    body = chat("hello " * 50, max_tokens=40)
    async with served() as lab:
        whole = await lab.post(CHAT, body)
        text = whole["choices"][0]["message"]["content"]
        assert len(text) == 4 * 40
        assert (await lab.post(CHAT, body, engine=1))["choices"] == whole["choices"]
        events = await streamed(lab, CHAT, {**body, "stream_options": {"include_usage": True}}, engine=1)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta["content"] for delta in deltas) == text
        usage = events[-1]["usage"]
        assert {key: usage[key] for key in ("prompt_tokens", "completion_tokens")} == {
            key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens")
        }


async def test_the_next_turn_finds_prompt_and_answer_in_the_cache() -> None:
    async with served() as lab:
        first = await lab.post(CHAT, chat("question " * 40, max_tokens=64))
        assert cached(first) == 0
        answer = first["choices"][0]["message"]["content"]
        second = await lab.post(CHAT, chat("question " * 40, answer, "and more", max_tokens=4))
        computed = first["usage"]["prompt_tokens"] + 63
        assert cached(second) == computed // 16 * 16
        other = await lab.post(CHAT, chat("question " * 40, answer, "and more", max_tokens=4), engine=1)
        assert cached(other) == 0
        stats = await lab.engine()
        assert stats["hit_tokens"] == cached(second)
        assert stats["query_tokens"] == first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]
        assert (stats["requests"], stats["finished"], stats["generation_tokens"]) == (2, 2, 68)


async def test_another_salt_shares_nothing() -> None:
    async with served(1) as lab:
        await lab.post(CHAT, chat("question " * 40))
        assert cached(await lab.post(CHAT, chat("question " * 40, cache_salt="x"))) == 0
        assert cached(await lab.post(CHAT, chat("question " * 40))) > 0


async def test_several_prompts_are_choices_of_one_answer() -> None:
    body = {"prompt": ["one", "two", "three"], "max_tokens": 5}
    async with served(1) as lab:
        whole = await lab.post("/v1/completions", body)
        texts = [choice["text"] for choice in whole["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (4, 15)
        events = await streamed(lab, "/v1/completions", body)
        for index, text in enumerate(texts):
            choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in choices) == text
            assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]


async def test_many_at_once_and_the_engine_is_empty_afterwards() -> None:
    bodies = [chat("shared " * 100, "answer", f"question {n}", max_tokens=1 + n) for n in range(40)]
    async with served(1) as lab:
        alone = [await lab.post(CHAT, body) for body in bodies[:3]]
        answers = await asyncio.gather(*(lab.post(CHAT, body) for body in bodies))
        for answer, body in zip(answers, bodies, strict=True):
            assert len(answer["choices"][0]["message"]["content"]) == 4 * body["max_tokens"]
        assert [answer["choices"] for answer in answers[:3]] == [answer["choices"] for answer in alone]
        stats = await lab.engine()
        assert (stats["running"], stats["waiting"], stats["finished"]) == (0, 0, 43)
        assert stats["lag"]["steps"] == stats["steps"] > 0
        assert stats["lag"]["p99_ms"] >= stats["lag"]["p50_ms"] >= 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_forgotten(stream: bool) -> None:
    async with served(1, speedup=1.0) as lab:
        port = lab.fleet.ports[0]
        engine = lab.fleet._servers[0].driver.engine
        body = json.dumps(chat("hello", max_tokens=4000, stream=stream)).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: engine.totals.generation_tokens > 2)
        assert engine.running == 1
        writer.close()
        await writer.wait_closed()
        await until(lambda: engine.running == 0)
        assert engine.kv_usage == 0.0
        assert engine.totals.finished == 0


async def test_a_killed_engine_resets_its_clients_and_comes_back_empty() -> None:
    async with served(2, speedup=1.0) as lab:
        await lab.post(CHAT, chat("question " * 40, max_tokens=1), engine=1)
        port = lab.fleet.ports[1]
        async with lab.session.post(
            lab.url(CHAT, 1), json=chat("a", max_tokens=4000, stream=True)
        ) as response:
            await response.content.readany()
            waiting = asyncio.create_task(lab.post(CHAT, chat("b", max_tokens=4000), engine=1))
            await until(lambda: lab.fleet._servers[1].driver.engine.running == 2)
            assert await lab.admin("POST", f"/lab/stop?port={port}") == (200, {})
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        with pytest.raises((aiohttp.ClientError, ConnectionResetError)):
            await waiting
        with pytest.raises(aiohttp.ClientConnectorError):
            await lab.session.get(lab.url("/health", 1))
        assert (await lab.engine(1))["up"] is False
        assert (await lab.post(CHAT, chat("still here", max_tokens=1)))["status"] == 200
        assert await lab.admin("POST", f"/lab/start?port={port}") == (200, {})
        stats = await lab.engine(1)
        assert (stats["port"], stats["up"], stats["requests"], stats["running"]) == (port, True, 0, 0)
        assert cached(await lab.post(CHAT, chat("question " * 40, max_tokens=1), engine=1)) == 0


async def test_idle_connections_of_a_killed_engine_are_reset_too() -> None:
    async with served(1) as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", lab.fleet.ports[0])
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await lab.fleet.stop_engine(lab.fleet.ports[0])
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_a_connection_that_outlived_its_engine_gets_no_answer() -> None:
    """One that was accepted as the port was closed."""
    async with served(1) as lab:
        server = lab.fleet._servers[0]
        server.up = False
        for path in ("/health", "/metrics", "/lab/stats"):
            with pytest.raises(aiohttp.ClientError):
                await lab.session.get(lab.url(path))
        server.up = True
        assert (await lab.post(CHAT, chat("a")))["status"] == 200


async def test_stopping_twice_and_starting_twice_change_nothing() -> None:
    async with served(1) as lab:
        port = lab.fleet.ports[0]
        await lab.fleet.start_engine(port)
        await lab.fleet.stop_engine(port)
        await lab.fleet.stop_engine(port)
        await lab.fleet.start_engine(port)
        assert (await lab.post(CHAT, chat("a")))["status"] == 200


async def test_reset_empties_caches_and_counters_and_cuts_what_runs() -> None:
    async with served(2, speedup=1.0) as lab:
        await lab.post(CHAT, chat("question " * 40, max_tokens=1))
        running = asyncio.create_task(lab.post(CHAT, chat("b", max_tokens=4000)))
        await until(lambda: lab.fleet._servers[0].driver.engine.running == 1)
        async with lab.session.post(lab.url("/lab/reset")) as response:
            assert (response.status, await response.json()) == (200, {})
        with pytest.raises((aiohttp.ClientError, ConnectionResetError)):
            await running
        stats = await lab.engine()
        assert (stats["requests"], stats["steps"], stats["lag"]["steps"]) == (0, 0, 0)
        assert cached(await lab.post(CHAT, chat("question " * 40, max_tokens=1))) == 0


async def test_lag_shows_when_the_loop_was_held_up() -> None:
    async with served(1, speedup=1.0) as lab:
        driver = lab.fleet._servers[0].driver
        waiting = asyncio.create_task(lab.post(CHAT, chat("a", max_tokens=100)))
        await until(lambda: driver.engine.totals.generation_tokens >= 5)
        time.sleep(0.1)  # noqa: ASYNC251 - holding up the loop is the point
        await waiting
        # One step ended 0.1 s late, and those due meanwhile each a step's length less.
        assert max(driver.lag.late_s) > 0.085
        assert (await lab.engine())["lag"]["p99_share"] > 5


async def test_a_long_body_is_taken() -> None:
    async with served(1) as lab:
        data = io.BytesIO(json.dumps(chat("x" * 3_000_000)).encode())
        headers = {"Content-Type": "application/json"}
        async with lab.session.post(lab.url(CHAT), data=data, headers=headers) as response:
            assert response.status == 400
            assert "maximum context length" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/lab/stop?port=1", 400),
        ("POST", "/lab/stop?port=x", 400),
        ("POST", "/lab/start", 400),
        ("GET", "/lab/reset", 405),
        ("POST", "/lab/stats", 405),
        ("GET", "/lab/other", 404),
    ],
)
async def test_wrong_lab_requests_are_answered(method: str, path: str, status: int) -> None:
    async with served(1) as lab:
        assert (await lab.admin(method, path))[0] == status


async def test_wrong_methods_and_paths() -> None:
    async with served(1) as lab:
        for path, status in (("/metrics", 405), ("/health", 405), ("/v1/embeddings", 404)):
            async with lab.session.post(lab.url(path)) as response:
                assert response.status == status


async def test_the_metrics_page_is_served() -> None:
    async with served(1) as lab:
        await lab.post(CHAT, chat("a", max_tokens=3))
        async with lab.session.get(lab.url("/metrics")) as response:
            page = await response.text()
        assert 'vllm:generation_tokens_total{engine="0",model_name="lab"} 3.0\n' in page
        assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="lab"} 1.0\n' in page
        assert 'vllm:inter_token_latency_seconds_count{engine="0",model_name="lab"} 2.0\n' in page


def test_a_speedup_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="speedup"):
        Serving(SPEC, "lab", speedup=0.0)


async def lab_process(*arguments: str) -> asyncio.subprocess.Process:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "epp.lab.servers",
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_command_tells_when_it_is_ready_and_ends_on_sigterm(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    ports = free_ports(2)
    named = [word for port in ports for word in ("--port", str(port))]
    process = await lab_process(*named, "--ready-file", str(ready_file))
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert ready == json.loads(ready_file.read_text())
    assert (ready["ready"], ready["host"], ready["pid"], ready["ports"]) == (
        True,
        "127.0.0.1",
        process.pid,
        ports,
    )
    async with aiohttp.ClientSession() as session:
        for port in (*ready["ports"], ready["admin_port"]):
            async with session.get(f"http://127.0.0.1:{port}/lab/stats") as response:
                assert [engine["port"] for engine in (await response.json())["engines"]] == ready["ports"]
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_the_command_says_what_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            ("--num-blocks", "10"): b"num_blocks: must be at least",
            ("--speedup", "0"): b"speedup: must be above 0",
            ("--fit", "abacus"): b"'abacus' is not one of",
            ("--port-base", port, "--count", "1"): b"cannot open the ports",
        }
        for arguments, message in cases.items():
            process = await lab_process(*arguments)
            _, errors = await process.communicate()
            assert process.returncode not in (0, None)
            assert message in errors
            assert b"Traceback" not in errors
