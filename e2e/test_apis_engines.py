"""Engines' own APIs and what was recorded of a real vLLM 0.32.0, byte for byte through picker and Envoy."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from e2e.backends import backend
from e2e.configured import APIS, CLIENT_MODEL, Configured, configured, shed
from e2e.recorded_engine import (
    CONVERSATIONS,
    EMBEDDINGS,
    ENGINE_MODEL,
    IMAGES,
    SGLANG,
    SGLANG_STREAM,
    Exchange,
    RecordedEngine,
)
from epp import names

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Tokens of prompt and output as the engine told them; 0 where it told none.
RECORDED = {
    "chat": (31, 6),
    "chat-logprobs": (31, 2),
    "chat-stream": (0, 0),
    "chat-stream-usage": (31, 6),
    "chat-stream-continuous-usage": (31, 6),
    "completions": (26, 6),
    "completions-two-prompts-n2": (3, 24),
    "completions-stream": (0, 0),
    "completions-stream-usage": (26, 6),
    "apis/generate-minimal": (4, 2),
    "apis/generate-stream": (0, 0),
    "apis/messages": (31, 6),
    "apis/messages-count-tokens": (0, 0),
    "apis/messages-stream": (31, 6),
    "apis/render-chat": (0, 0),
    "apis/render-completions": (0, 0),
    "apis/render-completions-two-prompts": (0, 0),
    "apis/responses": (19, 6),
    "apis/responses-stream": (19, 6),
}
MADE = {
    "conversations": (CONVERSATIONS, (0, 0)),
    "embeddings": (EMBEDDINGS, (7, 0)),
    "images": (IMAGES, (9, 4160)),
}
EXCHANGES = {**{name: (Exchange.recorded(name), counts) for name, counts in RECORDED.items()}, **MADE}
TOKENS = ("request_input_tokens", "request_output_tokens")
CACHED = "request_cached_tokens"
IN_ANSWER = b'"model":"%s"'
GENERATE = EXCHANGES["apis/generate-minimal"][0]


@dataclass(slots=True)
class Line:
    """A client, the gateway it asks, and what its engines answer with."""

    client: aiohttp.ClientSession
    gateway: Configured
    recorded: RecordedEngine

    async def post(self, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(self.gateway.url + path, data=body, headers=sent) as answer:
            told = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, told, await answer.read()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def module_line(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Line]:
    recorded = RecordedEngine()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(backend(recorded.answering)) for _ in range(2)]
        folder = tmp_path_factory.mktemp("apis-engines")
        gateway = await stack.enter_async_context(configured(APIS, engines, folder, envoy))
        session = aiohttp.ClientSession(headers={"content-type": "application/json"})
        yield Line(await stack.enter_async_context(session), gateway, recorded)


@pytest.fixture
def line(module_line: Line) -> Line:
    module_line.gateway.forget()
    return module_line


@pytest.mark.parametrize("name", list(EXCHANGES))
async def test_every_byte_and_every_count(line: Line, name: str) -> None:
    exchange, counts = EXCHANGES[name]
    line.recorded.replay(exchange)
    async with line.gateway.counting(counts, *TOKENS, model_name=ENGINE_MODEL):
        status, headers, answer = await line.post(exchange.path, exchange.sent)
    seen = line.gateway.seen()
    assert (seen.path, seen.body) == (exchange.path, exchange.sent)
    assert (status, answer) == (exchange.status, exchange.answer)
    assert headers["content-type"] == exchange.headers["content-type"]


@pytest.mark.parametrize("name", list(EXCHANGES))
async def test_every_byte_but_the_name_of_the_model(line: Line, name: str) -> None:
    exchange, counts = EXCHANGES[name]
    line.recorded.replay(exchange)
    sent = exchange.sent.replace(ENGINE_MODEL.encode(), CLIENT_MODEL.encode(), 1)
    assert sent != exchange.sent
    async with line.gateway.counting(counts, *TOKENS, model_name=CLIENT_MODEL):
        status, _, answer = await line.post(exchange.path, sent)
    assert line.gateway.seen().body == exchange.sent
    engines_own, clients = (IN_ANSWER % model.encode() for model in (ENGINE_MODEL, CLIENT_MODEL))
    assert (status, answer) == (exchange.status, exchange.answer.replace(engines_own, clients))


@pytest.mark.parametrize("exchange", [SGLANG, SGLANG_STREAM], ids=["plain", "stream"])
async def test_sglang(line: Line, exchange: Exchange) -> None:
    """It has no model, and a member of that name is not touched."""
    line.recorded.replay(exchange)
    sent = exchange.sent[:-1] + b', "model": "%s"}' % CLIENT_MODEL.encode()
    line.recorded.models |= {CLIENT_MODEL}
    async with line.gateway.counting((5, 2, 3), *TOKENS, CACHED, model_name=""):
        status, _, answer = await line.post("/generate", sent)
    assert line.gateway.seen().body == sent
    assert (status, answer) == (200, exchange.answer)


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", b'{"text": "hello"}', "invalid generate request: input_ids must be provided"),
        (
            "/generate",
            b'{"input_ids": [1], "extra_key": ["a"]}',
            "unsupported generate request: extra_key must be a string",
        ),
        ("/generate", b'{"input_ids": []}', "invalid generate request: input_ids cannot be empty"),
    ],
)
async def test_bad_requests_to_sglang(line: Line, path: str, body: bytes, message: str) -> None:
    status, _, answer = await line.post(path, body)
    assert (status, json.loads(answer)) == (400, {"error": {"message": message}})
    line.gateway.unasked()


async def test_bad_requests_to_vllm(line: Line) -> None:
    status, _, answer = await line.post(GENERATE.path, b'{"model": "m", "token_ids": []}')
    assert (status, json.loads(answer)) == (
        400,
        {
            "error": {
                "message": "invalid generate request: must have non-empty token_ids field",
                "type": "invalid_request_error",
                "param": "token_ids",
                "code": 400,
            }
        },
    )
    line.gateway.unasked()


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/nothing", "/v1/messages/render", "/"])
async def test_paths_that_no_parser_takes(line: Line, path: str) -> None:
    status, _, answer = await line.post(path, b'{"input_ids": [1], "model": "m"}')
    assert status == 400
    assert f"no parser registered matching path suffix for: {path}" in json.loads(answer)["error"]["message"]
    line.gateway.unasked()


class _Shed(Exception):
    """What was answered to a request that was shed."""

    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        self.headers = headers
        self.body = body


@pytest.mark.parametrize("exchange", [SGLANG, GENERATE], ids=["sglang", "vllm"])
async def test_what_may_be_shed_is_shed(line: Line, exchange: Exchange) -> None:
    line.recorded.replay(exchange)

    async def ask(objective: str) -> None:
        status, headers, body = await line.post(
            exchange.path, exchange.sent, x_llm_d_inference_objective=objective
        )
        if status == 429:
            raise _Shed(headers, body)
        assert (status, body) == (200, exchange.answer)

    told = await shed(line.gateway, ask, _Shed)
    assert json.loads(told.body)["error"]["message"] == "system saturated, sheddable request dropped"
    assert told.headers["retry-after"] == "1"
    assert told.headers[names.DROPPED_REASON] == names.REJECTED_SATURATED
