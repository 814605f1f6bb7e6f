"""vLLM's gRPC API through a real Envoy, with a real gRPC client and engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from e2e.grpc_engine import SERVICE, Engine, engine
from e2e.scripted import Script, ScriptedGateway, scripted_gateway
from epp import errors
from epp.lab.stack import HOST
from epp.payload.records import Usage
from epp.runtime.options import TRANSPORTS
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken
from epp.wire import vllm_engine_pb2 as pb
from tests.data.grpc.channels import ALONE

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE_S = 30.0


@dataclass(slots=True)
class Line:
    gateway: ScriptedGateway
    engine: Engine
    channel: grpc.aio.Channel

    @property
    def script(self) -> Script:
        return self.gateway.script

    async def generate(self, asked: bytes) -> list[pb.GenerateResponse]:
        call: Any = self.channel.unary_stream(f"/{SERVICE}/Generate")(asked, timeout=DEADLINE_S)
        return [pb.GenerateResponse.FromString(message) async for message in call]

    async def ask(self, method: str, asked: bytes) -> bytes:
        call: Any = self.channel.unary_unary(f"/{SERVICE}/{method}")
        return bytes(await call(asked, timeout=DEADLINE_S))

    async def over(self) -> Ended:
        async with asyncio.timeout(DEADLINE_S):
            while not (ended := self.script.heard(Ended)):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        found: Ended = ended[-1]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def started(
    request: pytest.FixtureRequest, envoy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Line]:
    folder = tmp_path_factory.mktemp("grpc")
    async with engine() as made:
        script = Script((HOST, made.port))
        async with (
            scripted_gateway(script, envoy, folder, request.param, http2=True) as gateway,
            grpc.aio.insecure_channel(f"{HOST}:{gateway.port}", ALONE) as channel,
        ):
            yield Line(gateway, made, channel)


@pytest.fixture
def line(started: Line) -> Line:
    """With nothing said and nothing heard yet."""
    started.script.refuse = None
    started.script.facts.clear()
    started.engine.fails = None
    started.engine.seen.clear()
    return started


async def test_a_stream_of_tokens(line: Line) -> None:
    asked = pb.GenerateRequest(text=b"hello", stream=True).SerializeToString()
    answers = await line.generate(asked)
    assert [list(answer.chunk.token_ids) for answer in answers] == [[1], [2], [3]]
    assert [seen for seen, _ in line.engine.seen] == [asked]
    ended = await line.over()
    assert (ended.cause, ended.usage) == (Cause.NATURAL, Usage(7, 3, 0))
    (headers,) = line.script.heard(AnswerHeaders)
    assert (headers.status, headers.streaming) == (200, True)
    assert len(line.script.heard(FirstToken)) == 1


async def test_an_answer_in_one_message(line: Line) -> None:
    ids = pb.TokenizedInput(input_ids=[bytes(range(100))])
    asked = pb.GenerateRequest(tokenized=ids).SerializeToString()
    (answer,) = await line.generate(asked)
    assert answer.complete.completion_tokens == 3
    ended = await line.over()
    assert (ended.cause, ended.usage) == (Cause.NATURAL, Usage(7, 3, 2))


async def test_an_embedding(line: Line) -> None:
    asked = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[b"\1\2"])).SerializeToString()
    answer = pb.EmbedResponse.FromString(await line.ask("Embed", asked))
    assert answer.prompt_tokens == 5
    assert (await line.over()).usage == Usage(5, 0)


async def test_other_methods_pass_unread(line: Line) -> None:
    asked = b"\xff" * 70_000
    assert await line.ask("GetModelInfo", asked) == asked * 2
    ended = await line.over()
    assert (ended.cause, ended.usage) == (Cause.NATURAL, None)


async def test_the_engines_own_refusal(line: Line) -> None:
    line.engine.fails = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await line.generate(pb.GenerateRequest(text=b"hello").SerializeToString())
    assert (refused.value.code(), refused.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the engine is full",
    )
    assert (await line.over()).cause is Cause.NATURAL
    assert [headers.status for headers in line.script.heard(AnswerHeaders)] == [503]
    assert line.script.heard(FirstToken) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BadRequest("no such thing: 50 % of “it”"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.PayloadTooLarge("too large"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Saturated("full\nretry"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.InternalError("our fault"), grpc.StatusCode.INTERNAL),
        (errors.NoEndpoints("nobody here"), grpc.StatusCode.UNAVAILABLE),
    ],
    ids=lambda value: getattr(value, "name", None) or type(value).__name__,
)
async def test_our_refusals(line: Line, error: errors.RequestError, code: grpc.StatusCode) -> None:
    line.script.refuse = error
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await line.generate(pb.GenerateRequest(text=b"hello").SerializeToString())
    assert (refused.value.code(), refused.value.details()) == (code, error.message)
    told = dict((*refused.value.initial_metadata(), *refused.value.trailing_metadata()))
    assert told.get("x-llm-d-request-dropped-reason") == error.reason
    assert told.get("retry-after") == (str(error.retry_after_s) if error.retry_after_s else None)
    assert line.engine.seen == []


async def test_what_cannot_be_read_is_refused_with_its_reason(line: Line) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await line.generate(b"\xff\xff\xff")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "vllm.grpc.engine.GenerateRequest" in (refused.value.details() or "")


async def test_compressed_messages_are_refused_with_the_reason(line: Line) -> None:
    asked = pb.GenerateRequest(text=b"hello " * 1000).SerializeToString()
    call: Any = line.channel.unary_stream(f"/{SERVICE}/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call(asked, timeout=DEADLINE_S, compression=grpc.Compression.Gzip):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "compressed" in (refused.value.details() or "")
