"""OpenAI's APIs as its client library uses them, in front of engines that answer as vLLM was recorded to."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from e2e.backends import backend
from e2e.configured import APIS, CLIENT_MODEL, Configured, configured, emptied, shed
from e2e.questions import openai_client
from e2e.recorded_engine import CONVERSATIONS, EMBEDDINGS, ENGINE_MODEL, IMAGES, Exchange, RecordedEngine
from epp import names

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = Exchange.recorded("chat")
CHAT_STREAM = Exchange.recorded("chat-stream-usage")
COMPLETIONS = Exchange.recorded("completions")
COMPLETIONS_STREAM = Exchange.recorded("completions-stream-usage")
RESPONSES = Exchange.recorded("apis/responses")
RESPONSES_STREAM = Exchange.recorded("apis/responses-stream")
UNKNOWN_MODEL = Exchange.recorded("error-chat-unknown-model")
MODELS = Exchange.recorded("answers/get-models")
SERVED = (
    *(CHAT, CHAT_STREAM, COMPLETIONS, COMPLETIONS_STREAM, RESPONSES, RESPONSES_STREAM),
    *(EMBEDDINGS, IMAGES, CONVERSATIONS, UNKNOWN_MODEL, MODELS),
)
MODEL_NAMES = (ENGINE_MODEL, CLIENT_MODEL)
OF_PROXY_TO_ENGINE = {
    *("connection", "content-length", "transfer-encoding", "x-request-id"),
    *("x-forwarded-for", "x-forwarded-proto", "x-envoy-external-address"),
    names.DESTINATION_ENDPOINT,
}
OF_PROXY_TO_CLIENT = {"transfer-encoding", "date", names.WENT_INTO_RESPONSE_HEADERS}
HELLO: Any = [{"role": "user", "content": "hello"}]
TOKENS = ("request_input_tokens", "request_output_tokens")


@dataclass(slots=True)
class Line:
    """A client, the gateway it asks, and the body that it sent last."""

    client: AsyncOpenAI
    gateway: Configured
    sent: bytes = b""

    async def hear(self, request: httpx2.Request) -> None:
        self.sent = request.content


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def module_line(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Line]:
    answering = RecordedEngine().replay(*SERVED).answering
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(backend(answering)) for _ in range(2)]
        folder = tmp_path_factory.mktemp("apis-openai")
        gateway = await stack.enter_async_context(configured(APIS, engines, folder, envoy))
        line = Line(None, gateway)  # type: ignore[arg-type]
        http_client = openai.DefaultAsyncHttpxClient(event_hooks={"request": [line.hear]})
        line.client = await stack.enter_async_context(openai_client(gateway.url, http_client=http_client))
        yield line


@pytest.fixture
def line(module_line: Line) -> Line:
    module_line.gateway.forget()
    return module_line


def arrived(line: Line, path: str, model: str) -> None:
    """The engine got what the client's library sent, with its own name for the model."""
    seen = line.gateway.seen()
    assert seen.path == path
    assert json.dumps(model).encode() in line.sent
    assert seen.body == line.sent.replace(json.dumps(model).encode(), json.dumps(ENGINE_MODEL).encode(), 1)
    assert seen.header("content-length") in ([], [str(len(seen.body))])


def named(told: Any, model: str) -> Any:
    """What an engine said, as it would have with another name for its model."""
    text = json.dumps(told).replace(f'"model": {json.dumps(ENGINE_MODEL)}', f'"model": {json.dumps(model)}')
    return json.loads(text)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_chat(line: Line, model: str) -> None:
    async with line.gateway.counting((31, 6), *TOKENS, model_name=model, target_model_name=ENGINE_MODEL):
        chat = await line.client.chat.completions.create(model=model, messages=HELLO, max_tokens=6)
    arrived(line, "/v1/chat/completions", model)
    assert chat.model == model
    assert chat.to_dict() == named(CHAT.said, model)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_chat_stream(line: Line, model: str) -> None:
    async with line.gateway.counting((31, 6), *TOKENS, model_name=model):
        stream = await line.client.chat.completions.create(
            model=model, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    arrived(line, "/v1/chat/completions", model)
    assert {chunk.model for chunk in chunks} == {model}
    assert [chunk.to_dict() for chunk in chunks] == named(CHAT_STREAM.events, model)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_completions(line: Line, model: str) -> None:
    usage = COMPLETIONS.said["usage"]
    expected = usage["prompt_tokens"], usage["completion_tokens"]
    async with line.gateway.counting(expected, *TOKENS, model_name=model):
        completion = await line.client.completions.create(model=model, prompt="naïve \\ 日本")
    arrived(line, "/v1/completions", model)
    assert completion.to_dict() == named(COMPLETIONS.said, model)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_completions_stream(line: Line, model: str) -> None:
    usage = COMPLETIONS_STREAM.events[-1]["usage"]
    expected = usage["prompt_tokens"], usage["completion_tokens"]
    async with line.gateway.counting(expected, *TOKENS, model_name=model):
        stream = await line.client.completions.create(model=model, prompt=[54, 690, 520], stream=True)
        chunks = [chunk async for chunk in stream]
    arrived(line, "/v1/completions", model)
    assert [chunk.to_dict() for chunk in chunks] == named(COMPLETIONS_STREAM.events, model)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_embeddings(line: Line, model: str) -> None:
    async with line.gateway.counting((7, 0), *TOKENS, model_name=model):
        found = await line.client.embeddings.create(
            model=model, input=["free", "software"], encoding_format="float"
        )
    arrived(line, "/v1/embeddings", model)
    assert found.to_dict() == named(EMBEDDINGS.said, model)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_responses(line: Line, model: str) -> None:
    async with line.gateway.counting((19, 6), *TOKENS, model_name=model):
        response = await line.client.responses.create(
            model=model, input="What is free software?", max_output_tokens=6
        )
    arrived(line, "/v1/responses", model)
    assert (response.model, response.output_text) == (model, "ainv Library author modif Com")
    assert response.to_dict() == named(RESPONSES.said, model)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_responses_stream(line: Line, model: str) -> None:
    async with line.gateway.counting((19, 6), *TOKENS, model_name=model):
        stream = await line.client.responses.create(
            model=model, input=[{"role": "user", "content": "What is free software?"}], stream=True
        )
        events = [event async for event in stream]
    arrived(line, "/v1/responses", model)
    assert events[-1].type == "response.completed"
    assert events[-1].response.model == model
    assert [event.to_dict() for event in events] == named(RESPONSES_STREAM.events, model)


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_images(line: Line, model: str) -> None:
    async with line.gateway.counting((9, 4160), *TOKENS, model_name=model):
        images = await line.client.images.generate(model=model, prompt="a route in the snow", size="512x512")
    arrived(line, "/v1/images/generations", model)
    assert images.to_dict() == IMAGES.said


@pytest.mark.parametrize("model", MODEL_NAMES)
async def test_conversations(line: Line, model: str) -> None:
    """OpenAI's own API has no model here, engines' has."""
    conversation = await line.client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "hello"}], extra_body={"model": model}
    )
    arrived(line, "/v1/conversations", model)
    assert conversation.to_dict() == CONVERSATIONS.said


async def test_conversations_without_a_model_pass(line: Line) -> None:
    """The library sends none."""
    conversation = await line.client.conversations.create(items=[{"role": "user", "content": "hello"}])
    assert conversation.to_dict() == CONVERSATIONS.said


async def test_what_is_no_post_goes_through(line: Line) -> None:
    models = [model async for model in await line.client.models.list()]
    assert [model.to_dict() for model in models] == MODELS.said["data"]
    assert line.gateway.seen().body == b""


async def test_nobody_adds_what_was_not_asked_for(line: Line) -> None:
    answer = await line.client.chat.completions.with_raw_response.create(model=ENGINE_MODEL, messages=HELLO)
    seen = line.gateway.seen()
    heard = [name for name, _ in seen.headers]
    asked = {name.lower() for name in answer.http_request.headers}
    assert set(heard) ^ asked == OF_PROXY_TO_ENGINE
    assert len(heard) == len(set(heard))
    told = {name.lower() for name in answer.headers}
    assert told ^ CHAT.headers.keys() == OF_PROXY_TO_CLIENT
    assert answer.content == CHAT.answer


# -- errors -------------------------------------------------------------------------------------------


async def test_bad_requests(line: Line) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await line.client.responses.create(model=ENGINE_MODEL)
    told = caught.value
    assert (told.type, told.param) == ("invalid_request_error", "input")
    assert "invalid responses request: must have input field" in told.message
    with pytest.raises(openai.BadRequestError, match="must have items field"):
        await line.client.conversations.create(extra_body={"model": ENGINE_MODEL})
    with pytest.raises(openai.BadRequestError, match="model not found in request body"):
        await line.client.responses.create(input="hello")
    with pytest.raises(openai.BadRequestError, match="must have valid messages field") as caught:
        await line.client.chat.completions.create(model=ENGINE_MODEL, messages=[])
    assert caught.value.param == "messages"
    line.gateway.unasked()


async def test_paths_that_no_parser_takes(line: Line) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await line.client.moderations.create(input="x")
    assert "no parser registered matching path suffix for: /v1/moderations" in caught.value.message
    assert "chat/completions" in caught.value.message
    line.gateway.unasked()


async def test_errors_of_engines_come_as_they_are(line: Line) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await line.client.chat.completions.create(model="nope", messages=HELLO)
    assert caught.value.response.content == UNKNOWN_MODEL.answer
    line.gateway.seen()


async def test_what_may_be_shed_is_shed(line: Line) -> None:
    async def ask(objective: str) -> None:
        headers = {names.OBJECTIVE[0]: objective} if objective else {}
        await line.client.chat.completions.create(model=ENGINE_MODEL, messages=HELLO, extra_headers=headers)

    told = await shed(line.gateway, ask, openai.RateLimitError)
    assert told.type == "rate_limit_error"
    assert "system saturated, sheddable request dropped" in told.message
    assert told.response.headers["retry-after"] == "1"
    assert told.response.headers[names.DROPPED_REASON] == names.REJECTED_SATURATED


async def test_no_endpoints(line: Line) -> None:
    async with emptied(line.gateway):
        with pytest.raises(openai.InternalServerError) as caught:
            await line.client.responses.create(model=ENGINE_MODEL, input="hello")
    assert (caught.value.status_code, caught.value.type) == (503, "service_unavailable_error")
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.response.headers[names.DROPPED_REASON] == names.REJECTED_NO_ENDPOINTS
