"""vLLM's gRPC API served by `warmroute serve` behind a real Envoy, with metadata for who bills."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from e2e.backends import backend
from e2e.configured import behind_envoy
from e2e.grpc_engine import SERVICE, Engine, engine
from e2e.pages import on, total
from e2e.scripted import SPACE, edits
from epp import names
from epp.lab.stack import HOST, Picker
from epp.runtime.options import TRANSPORTS
from epp.wire import vllm_engine_pb2 as pb
from tests.data.grpc.channels import ALONE

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE_S = 30.0
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: max-score-picker
- type: vllmgrpc-parser
- name: cost
  type: request-attribute-reporter
  parameters:
    attributes:
    - key: {namespace: %s, name: cost}
      expression: usage.prompt_tokens + usage.completion_tokens * 2.0
      condition: usage.completion_tokens > 0.0
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
  - {pluginRef: vllmgrpc-parser}
dataLayer:
  sources:
  - pluginRef: metrics-data-source
    extractors:
    - {pluginRef: core-metrics-extractor}
  discovery: {pluginRef: endpoints}
"""


@dataclass(slots=True)
class Line:
    engines: list[Engine]
    channel: grpc.aio.Channel
    picker: Picker

    async def generate(self, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        call: Any = self.channel.unary_stream(f"/{SERVICE}/Generate")
        answer = call(asked.SerializeToString(), timeout=DEADLINE_S)
        return [pb.GenerateResponse.FromString(message) async for message in answer]


@pytest_asyncio.fixture(loop_scope="session", params=TRANSPORTS)
async def line(request: pytest.FixtureRequest, envoy: Path, tmp_path: Path) -> AsyncIterator[Line]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine()) for _ in range(3)]
        # One page for all. An engine without a page is in question only while it answers calls: all calls
        # would meet on it, whatever their prompts are.
        pages = await stack.enter_async_context(backend())
        addresses = [(HOST, one.port) for one in engines]
        endpoints = tmp_path / "picker-endpoints.yaml"
        flags = (*on(request.param), "--emit-endpoint-scores")
        picker = Picker(tmp_path, addresses, config=CONFIG % (SPACE, pages.port, endpoints), flags=flags)
        changed = edits(tmp_path / "access.log", http2=True)
        port = await stack.enter_async_context(behind_envoy(picker, addresses, envoy, changed))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{port}", ALONE))
        yield Line(engines, channel, picker)
    assert_logged(tmp_path / "access.log", [one.port for one in engines])


def assert_logged(log: Path, ports: list[int]) -> None:
    """Every answer with output told its cost, and every choice the scores of all."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["own"] for line in lines] == [{"cost": 13.0}] * 6 + [None, None]
    chosen = [line["lb"] for line in lines[:7]]
    everyone = {f"{HOST}:{port}" for port in ports}
    for told in chosen:
        scores = told[names.DESTINATION_ENDPOINT_SCORES]
        assert set(scores) == everyone
        assert scores[told[names.DESTINATION_ENDPOINT]] == max(scores.values())
    assert max(chosen[5][names.DESTINATION_ENDPOINT_SCORES].values()) == 1.0


async def test_generate(line: Line) -> None:
    """Equal prompts in token ids meet on one engine; what is no Generate goes through or is refused."""
    ids = b"".join(bytes([0x80 | number & 0x7F, 1 + number % 7]) for number in range(2000))
    asked = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[ids]), stream=True)
    for _ in range(6):
        answers = await line.generate(asked)
        assert [list(answer.chunk.token_ids) for answer in answers] == [[1], [2], [3]]
    assert sorted(len(one.seen) for one in line.engines) == [0, 0, 6]
    other: Any = line.channel.unary_unary(f"/{SERVICE}/GetModelInfo")
    assert await other(b"ab", timeout=DEADLINE_S) == b"abab"
    elsewhere: Any = line.channel.unary_unary("/some.other.Service/Method")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await elsewhere(b"ab", timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no parser" in (refused.value.details() or "")
    assert await total(line.picker, "request_error_total") == 1
