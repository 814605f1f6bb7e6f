"""Anthropic's API as its client library uses it, in front of engines that answer as vLLM was recorded to."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from e2e.backends import backend
from e2e.configured import APIS, CLIENT_MODEL, Configured, configured, emptied, shed
from e2e.recorded_engine import ENGINE_MODEL, MESSAGES_CACHED, Exchange, RecordedEngine
from epp import names

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES = Exchange.recorded("apis/messages")
STREAM = Exchange.recorded("apis/messages-stream")
COUNT_TOKENS = Exchange.recorded("apis/messages-count-tokens")
UNKNOWN_MODEL = Exchange.recorded("apis/messages-unknown-model")
SERVED = (MESSAGES, STREAM, COUNT_TOKENS, UNKNOWN_MODEL)
MODEL_NAMES = (ENGINE_MODEL, CLIENT_MODEL)
HELLO: Any = [{"role": "user", "content": "hello"}]
TOKENS = ("request_input_tokens", "request_output_tokens")
CACHED = "request_cached_tokens"
OF_CONNECTION = {"connection", "content-length"}
TEXT = "ainv Library author modif Com"


@dataclass(slots=True)
class Line:
    """A client, the gateway it asks, what its engines answer with, and what the client sent last."""

    client: AsyncAnthropic
    gateway: Configured
    recorded: RecordedEngine
    sent: httpx2.Request | None = None

    async def hear(self, request: httpx2.Request) -> None:
        self.sent = request


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def module_line(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Line]:
    recorded = RecordedEngine().replay(*SERVED)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(backend(recorded.answering)) for _ in range(2)]
        folder = tmp_path_factory.mktemp("apis-anthropic")
        gateway = await stack.enter_async_context(configured(APIS, engines, folder, envoy))
        line = Line(None, gateway, recorded)  # type: ignore[arg-type]
        client = AsyncAnthropic(
            api_key="none",
            base_url=gateway.url,
            max_retries=0,
            timeout=100.0,
            http_client=anthropic.DefaultAsyncHttpxClient(event_hooks={"request": [line.hear]}),
        )
        line.client = await stack.enter_async_context(client)
        yield line


@pytest.fixture
def line(module_line: Line) -> Line:
    module_line.gateway.forget()
    return module_line


def arrived(line: Line, path: str, model: str) -> None:
    """The engine got what the client's library sent, with its own name for the model."""
    seen, sent = line.gateway.seen(), line.sent
    assert sent is not None
    assert seen.path == sent.url.raw_path.decode() == path
    assert json.dumps(model).encode() in sent.content
    assert seen.body == sent.content.replace(json.dumps(model).encode(), json.dumps(ENGINE_MODEL).encode(), 1)
    assert {name: seen.header(name) for name in sent.headers.keys() - OF_CONNECTION} == {
        name: [value] for name, value in sent.headers.items() if name not in OF_CONNECTION
    }


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_message(line: Line, model: str) -> None:
    async with line.gateway.counting((31, 6), *TOKENS, model_name=model, target_model_name=ENGINE_MODEL):
        message = await line.client.messages.create(model=model, max_tokens=6, messages=HELLO, system="Be.")
    arrived(line, "/v1/messages", model)
    assert (message.model, message.usage.input_tokens) == (model, 31)
    assert message.to_dict() == {**MESSAGES.said, "model": model}


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_message_stream(line: Line, model: str) -> None:
    async with line.gateway.counting((31, 6), *TOKENS, model_name=model):
        stream = await line.client.messages.create(model=model, max_tokens=6, messages=HELLO, stream=True)
        events = [event.to_dict() async for event in stream]
    arrived(line, "/v1/messages", model)
    start, *rest = STREAM.events
    assert events == [{**start, "message": {**start["message"], "model": model}}, *rest]


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_message_put_together_by_the_library(line: Line, model: str) -> None:
    """As coding agents ask, whose path has a query."""
    async with line.client.messages.stream(
        model=model, max_tokens=6, messages=HELLO, extra_query={"beta": "true"}
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    arrived(line, "/v1/messages?beta=true", model)
    assert (text, message.model, message.stop_reason) == (TEXT, model, "max_tokens")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (31, 6)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_a_cached_prompt_counts_whole(line: Line, model: str) -> None:
    """The parts of a prompt come at the start of a stream, its output at the end."""
    line.recorded.replay(MESSAGES_CACHED)
    try:
        async with (
            line.gateway.counting((2071, 3, 2048), *TOKENS, CACHED, model_name=model),
            line.client.messages.stream(model=model, max_tokens=6, messages=HELLO) as stream,
        ):
            message = await stream.get_final_message()
    finally:
        line.recorded.replay(STREAM)
    arrived(line, "/v1/messages", model)
    assert (message.model, message.usage.cache_read_input_tokens) == (model, 2048)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_count_tokens(line: Line, model: str) -> None:
    async with line.gateway.counting((0, 0), *TOKENS):
        counted = await line.client.messages.count_tokens(model=model, messages=HELLO)
    arrived(line, "/v1/messages/count_tokens", model)
    assert counted.to_dict() == COUNT_TOKENS.said


# -- errors -------------------------------------------------------------------------------------------


async def test_bad_requests(line: Line) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await line.client.messages.create(
            model=ENGINE_MODEL, max_tokens=6, messages=[], extra_headers={names.REQUEST_ID: "asked-1"}
        )
    told = caught.value
    assert told.type == "invalid_request_error"
    assert told.api_message is not None
    assert "messages" in told.api_message
    assert isinstance(told.body, dict)
    assert told.body["request_id"] == "asked-1"
    with pytest.raises(anthropic.BadRequestError, match="model not found in request body"):
        await line.client.messages.create(model="", max_tokens=6, messages=HELLO)
    line.gateway.unasked()


async def test_paths_that_no_parser_takes(line: Line) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await line.client.messages.batches.create(requests=[])
    assert "no parser registered matching path suffix for: /v1/messages/batches" in str(caught.value)
    line.gateway.unasked()


async def test_errors_of_engines_come_as_they_are(line: Line) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await line.client.messages.create(model="nope", max_tokens=6, messages=HELLO)
    assert line.sent is not None
    assert caught.value.response.content == UNKNOWN_MODEL.answer
    assert line.gateway.seen().body == line.sent.content


async def test_what_may_be_shed_is_shed(line: Line) -> None:
    async def ask(objective: str) -> None:
        headers = {names.OBJECTIVE[0]: objective} if objective else {}
        headers[names.REQUEST_ID] = "asked-2"
        await line.client.messages.create(
            model=CLIENT_MODEL, max_tokens=6, messages=HELLO, extra_headers=headers
        )

    told = await shed(line.gateway, ask, anthropic.RateLimitError)
    assert (told.type, told.api_message) == (
        "rate_limit_error",
        "system saturated, sheddable request dropped",
    )
    assert isinstance(told.body, dict)
    assert told.body["request_id"] == "asked-2"
    assert told.response.headers["retry-after"] == "1"
    assert told.response.headers[names.DROPPED_REASON] == names.REJECTED_SATURATED


async def test_no_endpoints(line: Line) -> None:
    async with emptied(line.gateway):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await line.client.messages.create(model=CLIENT_MODEL, max_tokens=6, messages=HELLO)
    told = caught.value
    assert (told.status_code, told.type) == (503, "overloaded_error")
    assert isinstance(told.body, dict)
    assert told.body["request_id"]
    assert told.response.headers[names.DROPPED_REASON] == names.REJECTED_NO_ENDPOINTS
