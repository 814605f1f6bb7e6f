"""Vertex AI's gRPC API served by `warmroute serve` behind a real Envoy, under another model's name."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from e2e.backends import backend
from e2e.configured import behind_envoy
from e2e.grpc_engine import serving
from e2e.pages import on, settled, total
from e2e.scripted import edits
from epp.lab.stack import HOST, Picker
from epp.runtime.options import TRANSPORTS
from tests.data.grpc.channels import ALONE
from tests.data.vertex.google import PACKAGES, REQUESTS, HttpBody, path_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE_S = 30.0
TARGET = "engine/a-name-that-is-longer-" * 6
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: max-score-picker
- type: vertexai-parser
- type: metrics-data-source
  parameters: {port: %d}
- type: core-metrics-extractor
- name: endpoints
  type: file-discovery
  parameters: {path: %s, watchFile: true}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer}
  - {pluginRef: max-score-picker}
requestHandler:
  parsers:
  - {pluginRef: vertexai-parser}
dataLayer:
  sources:
  - pluginRef: metrics-data-source
    extractors:
    - {pluginRef: core-metrics-extractor}
  discovery: {pluginRef: endpoints}
modelRewrites:
- name: one
  rules:
  - matches: [{model: {type: Exact, value: mine}}]
    targets: [{modelRewrite: %s}]
"""


@dataclass(slots=True)
class Engine:
    """Answers with the model it was asked for."""

    seen: list[Any] = field(default_factory=list)
    port: int = 0

    async def stream(self, asked: bytes, context: Any) -> AsyncIterator[bytes]:
        """Two events, the second of them in two messages; then the usage and the end in one."""
        model = self._model(asked)
        for text in (
            event(model, choices=[{"delta": {"content": "a"}}]),
            *halves(event(model, choices=[{"delta": {"content": "b"}}])),
            event(model, choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
            + b"data: [DONE]\n\n",
        ):
            yield HttpBody(content_type="text/event-stream", data=text).SerializeToString()
            await asyncio.sleep(0.01)

    async def one(self, asked: bytes, context: Any) -> bytes:
        document = {"id": "1", "model": self._model(asked), "usage": {"input_tokens": 5, "output_tokens": 3}}
        body = HttpBody(content_type="application/json", data=json.dumps(document).encode())
        body.extensions.add(type_url="t/x", value=b"kept")
        return bytes(body.SerializeToString())

    async def other(self, asked: bytes, context: Any) -> bytes:
        return asked * 2

    def _model(self, asked: bytes) -> Any:
        request = REQUESTS["RawPredict"].FromString(asked)
        assert request.endpoint == "projects/p"
        self.seen.append(json.loads(request.http_body.data))
        return self.seen[-1].get("model")


def event(model: Any, **fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"id": "1", "model": model, **fields}).encode()


def halves(text: bytes) -> tuple[bytes, bytes]:
    """Cut in the model's name."""
    at = text.index(b'"model"') + 15
    return text[:at], text[at:]


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    methods = {
        "ChatCompletions": grpc.unary_stream_rpc_method_handler(made.stream),
        "RawPredict": grpc.unary_unary_rpc_method_handler(made.one),
        "Predict": grpc.unary_unary_rpc_method_handler(made.other),
    }
    async with serving(methods, *(f"{package}.PredictionService" for package in PACKAGES)) as made.port:
        yield made


@dataclass(slots=True)
class Line:
    engines: list[Engine]
    channel: grpc.aio.Channel
    picker: Picker

    async def chat(self, document: Any, package: str = PACKAGES[1]) -> list[Any]:
        call: Any = self.channel.unary_stream(path_of("ChatCompletions", package))
        answer = call(asked(document), timeout=DEADLINE_S)
        return [HttpBody.FromString(message) async for message in answer]

    async def ask(self, method: str, message: bytes) -> bytes:
        call: Any = self.channel.unary_unary(path_of(method))
        return bytes(await call(message, timeout=DEADLINE_S))

    @property
    def seen(self) -> list[int]:
        return sorted(len(one.seen) for one in self.engines)


def asked(document: Any) -> bytes:
    body = HttpBody(data=json.dumps(document).encode())
    return bytes(REQUESTS["RawPredict"](endpoint="projects/p", http_body=body).SerializeToString())


@pytest_asyncio.fixture(loop_scope="session", params=TRANSPORTS)
async def line(request: pytest.FixtureRequest, envoy: Path, tmp_path: Path) -> AsyncIterator[Line]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine()) for _ in range(3)]
        # One page for all. An engine without a page is in question only while it answers calls: all calls
        # would meet on it, whatever their prompts are.
        pages = await stack.enter_async_context(backend())
        addresses = [(HOST, one.port) for one in engines]
        config = CONFIG % (pages.port, tmp_path / "picker-endpoints.yaml", TARGET)
        picker = Picker(tmp_path, addresses, config=config, flags=on(request.param))
        changed = edits(tmp_path / "access.log", http2=True)
        port = await stack.enter_async_context(behind_envoy(picker, addresses, envoy, changed))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{port}", ALONE))
        yield Line(engines, channel, picker)


async def test_calls(line: Line) -> None:
    """Equal prompts meet on one engine, which is asked for its model; the client gets the name it knows."""
    chat = {"model": "mine", "messages": [{"role": "user", "content": "tell " * 2000}], "stream": True}
    for package in PACKAGES * 2:
        messages = await line.chat(chat, package)
        told = b"".join(message.data for message in messages)
        events = [json.loads(each[6:]) for each in told.split(b"\n\n")[:-2]]
        assert [each["model"] for each in events] == ["mine"] * 3
        assert told.endswith(b"\n\ndata: [DONE]\n\n")
        assert len(messages) == 4
    assert line.seen == [0, 0, 4]
    (busy,) = [one for one in line.engines if one.seen]
    assert busy.seen[-1] == {**chat, "model": TARGET}
    turn = {"input": "hello", "model": "mine"}
    answer = HttpBody.FromString(await line.ask("RawPredict", asked(turn)))
    assert json.loads(answer.data)["model"] == "mine"
    assert (answer.content_type, answer.extensions[0].value) == ("application/json", b"kept")
    assert await line.ask("Predict", b"\xff" * 70_000) == b"\xff" * 140_000
    await settled(line.picker)
    assert await total(line.picker, "request_input_tokens_sum") == 4 * 7 + 5
    assert await total(line.picker, "request_output_tokens_sum") == 4 * 2 + 3


async def test_what_cannot_be_read_is_refused_with_its_reason(line: Line) -> None:
    chat = {"messages": [{"role": "user", "content": "hello " * 1000}]}
    for message, compression, reason in (
        (b"\xff", None, "not a google.cloud.aiplatform RawPredictRequest"),
        (b"", None, "must have `http_body`"),
        (asked(chat), None, "must have input field"),
        (asked({"input": "hello " * 1000}), grpc.Compression.Gzip, "compressed"),
    ):
        call: Any = line.channel.unary_unary(path_of("RawPredict"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(message, timeout=DEADLINE_S, compression=compression)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in (refused.value.details() or "")
    elsewhere: Any = line.channel.unary_unary("/some.other.Service/ChatCompletions")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await elsewhere(asked(chat), timeout=DEADLINE_S)
    assert "no parser" in (refused.value.details() or "")
    assert line.seen == [0, 0, 0]
