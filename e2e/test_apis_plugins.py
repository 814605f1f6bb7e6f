"""Plugins that place requests by what clients and engines say, as client libraries meet them."""

import json
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from e2e.backends import PAGE, Backend, backend
from e2e.configured import FULL, WAITING, Configured, configured
from e2e.pages import until
from e2e.questions import openai_client
from e2e.recorded_engine import ENGINE_MODEL, Exchange, RecordedEngine
from epp import names
from epp.lab.stack import HOST

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEAD = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
dataLayer:
  discovery: {pluginRef: endpoints}
"""
PLACES = """\
plugins:
- name: endpoints
  type: file-discovery
  parameters: {path: %s, watchFile: true}
- type: agent-identity
- type: header-profile-handler
  parameters: {defaultProfile: decode}
- type: random-picker
- type: max-score-picker
- type: lora-affinity-scorer
- name: token
  type: session-affinity-filter
- name: agent
  type: session-affinity-filter
  parameters:
    strategy: session_id
    sessionIdConfig:
      sources:
      - {attribute: agent-identity}
schedulingProfiles:
- name: decode
  plugins:
  - {pluginRef: token}
  - {pluginRef: random-picker}
- name: agents
  plugins:
  - {pluginRef: agent}
  - {pluginRef: random-picker}
- name: adapters
  plugins:
  - {pluginRef: lora-affinity-scorer}
  - {pluginRef: max-score-picker}
"""
RANKS = """\
plugins:
- name: endpoints
  type: file-discovery
  parameters: {path: %s, watchFile: true}
- type: data-parallel-profile-handler
  parameters: {primaryPort: PRIMARY}
- type: queue-scorer
- type: max-score-picker
"""
ADAPTERS = b"""\
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="1",running_lora_adapters="%s",waiting_lora_adapters=""} 1.79e+09
"""
HELLO: Any = [{"role": "user", "content": "hello"}]
EXCHANGES = tuple(Exchange.recorded(name) for name in ("chat", "apis/messages", "apis/responses"))
ALPHA = "--allow-experimental-plugins"
TOKEN = "x-session-token"
AGENT = "x-claude-code-session-id"
PROFILE = "EPP-Profile"


@dataclass(slots=True)
class Line:
    client: AsyncOpenAI
    gateway: Configured

    async def ask(self, count: int = 1, model: str = ENGINE_MODEL, **headers: str) -> str:
        """Ask so often; returns the session's token in the last answer."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        for _ in range(count):
            answer = await self.client.chat.completions.with_raw_response.create(
                model=model, messages=HELLO, extra_headers=sent
            )
        return str(answer.headers[TOKEN])

    async def spreads(self, model: str = ENGINE_MODEL, **headers: str) -> None:
        """Requests like this one reach every engine, which a hundred would by chance."""
        for _ in range(100):
            await self.ask(1, model, **headers)
            if all(engine.seen for engine in self.gateway.engines):
                break
        assert 0 not in self.shares()

    def shares(self) -> list[int]:
        """Requests that reached each engine since the last call."""
        shares = [len(engine.seen) for engine in self.gateway.engines]
        self.gateway.forget()
        return shares


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def module_line(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Line]:
    """Three engines; the second runs an adapter, the third another, and neither has room for one more."""
    answering = RecordedEngine().replay(*EXCHANGES).answering
    pages = (PAGE, PAGE + ADAPTERS % b"sql-adapter", PAGE + ADAPTERS % b"chat-adapter")
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(backend(answering, page)) for page in pages]
        folder = tmp_path_factory.mktemp("apis-plugins")
        gateway = await stack.enter_async_context(configured(HEAD + PLACES, engines, folder, envoy, ALPHA))
        client = await stack.enter_async_context(openai_client(gateway.url))
        yield Line(client, gateway)


@pytest.fixture
def line(module_line: Line) -> Line:
    module_line.gateway.forget()
    return module_line


async def test_a_session_token_leads_back(line: Line) -> None:
    await line.spreads()
    token = await line.ask()
    (chosen,) = [index for index, share in enumerate(line.shares()) if share]
    assert b64decode(token) == f"default/engine-{chosen}".encode()
    async with openai_client(line.gateway.url, default_headers={TOKEN: token}) as client:
        for _ in range(4):
            await client.chat.completions.create(model=ENGINE_MODEL, messages=HELLO)
            answer = await client.responses.with_raw_response.create(model=ENGINE_MODEL, input="hello")
            assert answer.headers[TOKEN] == token
    assert [index for index, share in enumerate(line.shares()) if share] == [chosen]
    await line.spreads(x_session_token="bm9uZQ==")


async def test_an_agent_stays_where_it_is(line: Line) -> None:
    headers = {PROFILE: "agents"}
    await line.spreads(**headers)
    client = anthropic.AsyncAnthropic(
        api_key="none", base_url=line.gateway.url, max_retries=0, default_headers={AGENT: "s-1", **headers}
    )
    async with client, line.gateway.counting((31 * 8,), "request_input_tokens", fairness_id="s-1"):
        for _ in range(8):
            await client.messages.create(model=ENGINE_MODEL, max_tokens=6, messages=HELLO)
    assert sorted(line.shares()) == [0, 0, 8]
    agents = [{AGENT: f"s-{number}", **headers} for number in range(2, 82)]
    for agent in agents:
        await line.ask(1, **agent)
    assert 0 not in line.shares()


async def test_an_adapter_is_asked_for_where_it_runs(line: Line) -> None:
    headers = {PROFILE: "adapters"}
    await line.ask(5, "sql-adapter", **headers)
    assert line.shares() == [0, 5, 0]
    await line.ask(5, "chat-adapter", **headers)
    assert line.shares() == [0, 0, 5]
    await line.spreads("sql-adapter")


async def test_a_profile_that_is_not_there(line: Line) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await line.ask(1, ENGINE_MODEL, **{PROFILE: "prefil"})
    for said in ("epp-profile", '"prefil"', "decode", "agents", "adapters"):
        assert said in caught.value.message
    line.gateway.unasked()


async def test_other_paths_pass_with_the_default_parsers(line: Line) -> None:
    with pytest.raises(openai.NotFoundError):
        await line.client.moderations.create(input="x")
    seen = line.gateway.seen()
    assert (seen.path, json.loads(seen.body)) == ("/v1/moderations", {"input": "x"})


async def test_the_sidecar_is_told_the_rank(envoy: Path, tmp_path: Path) -> None:
    """Both engines are ranks of one pod; its primary port gets what either is chosen for."""
    answering = RecordedEngine().replay(*EXCHANGES).answering
    async with (
        backend(answering) as primary,
        backend(answering) as second,
        configured(
            HEAD + RANKS.replace("PRIMARY", str(primary.port)), [primary, second], tmp_path, envoy
        ) as gateway,
        openai_client(gateway.url, default_headers={names.DATA_PARALLEL_HOST_PORT: "10.9.9.9:1"}) as client,
    ):
        for idle in (primary, second):
            await only_idle(gateway, idle)
            for _ in range(3):
                await client.chat.completions.create(model=ENGINE_MODEL, messages=HELLO)
            assert ranks(gateway.engines) == {(primary.port, idle.port): 3}
            gateway.forget()


async def only_idle(gateway: Configured, idle: Backend) -> None:
    """Requests wait at all engines but this one, and the picker knows."""
    for engine in gateway.engines:
        engine.page = PAGE if engine is idle else FULL
    due = [0.0 if engine is idle else WAITING for engine in gateway.engines]

    async def is_known() -> bool:
        return await gateway.queues() == due

    await until(is_known, f"queues are {due}")


def ranks(engines: Sequence[Backend]) -> Counter[tuple[int, int]]:
    """Requests by the port that they reached, and the one they are for."""
    found: Counter[tuple[int, int]] = Counter()
    for engine in engines:
        for seen in engine.seen:
            (rank,) = seen.header(names.DATA_PARALLEL_HOST_PORT)
            host, _, port = rank.rpartition(":")
            assert host == HOST
            found[engine.port, int(port)] += 1
    return found
