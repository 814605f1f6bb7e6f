"""Every way in which bodies reach the picker, with and without TLS."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from e2e.pages import complaints, decisions, figures, on, settled, until
from e2e.questions import MODEL, Question, ask, openai_client
from epp.lab.envoy import BodyModes
from epp.lab.stack import Gateway, LabEngines
from epp.payload.records import Api
from epp.runtime.options import GRPCIO, OWN

pytestmark = pytest.mark.asyncio(loop_scope="session")


LINES = [
    *((mode, tls, OWN) for mode in BodyModes for tls in (False, True)),
    (BodyModes.FULL_DUPLEX, False, GRPCIO),
    (BodyModes.FULL_DUPLEX, True, GRPCIO),
    (BodyModes.BUFFERED, False, GRPCIO),
]


@dataclass(frozen=True, slots=True)
class Line:
    gateway: Gateway
    mode: BodyModes


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=LINES,
    ids=[f"{mode.value}{'-tls' if tls else ''}-{transport}" for mode, tls, transport in LINES],
)
async def line(
    request: pytest.FixtureRequest,
    engines: LabEngines,
    envoy: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Line]:
    mode, tls, transport = request.param
    folder = tmp_path_factory.mktemp("modes")
    async with Gateway(
        engines.addresses, folder, envoy, mode=mode, tls=tls, fail_open=False, picker_flags=on(transport)
    ) as gateway:
        yield Line(gateway, mode)
        await settled(gateway.pickers[0])
        assert complaints(gateway.pickers[0]) == []


async def test_answers(line: Line) -> None:
    """Whole and streamed ones, of small and large requests, several at a time."""
    sizes = (1_000, 61_000, 62_500, 400_000)
    questions = [
        Question(f"mode-{size}-{stream}-{api.value}", f"{api.value} {'x' * size}", 24, stream, api=api)
        for size in sizes
        for stream in (False, True)
        for api in (Api.CHAT, Api.COMPLETIONS)
    ]
    async with openai_client(line.gateway.url) as client:
        outcomes = await asyncio.gather(*[ask(client, question) for question in questions])
    assert [outcome for outcome in outcomes if not outcome.right] == []
    placed = await decisions(line.gateway.pickers[0])
    assert {question.id for question in questions} <= set(placed)


async def test_requests_without_a_body(line: Line) -> None:
    async with openai_client(line.gateway.url) as client:
        models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]


async def test_uploads_without_a_length(line: Line) -> None:
    question = Question("in-pieces", "word " * 30_000, stream=True)

    async def pieces() -> AsyncIterator[bytes]:
        body = aiohttp.JsonPayload(question.body)
        data = body.decode().encode()
        for start in range(0, len(data), 10_000):
            yield data[start : start + 10_000]
            await asyncio.sleep(0.001)

    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(line.gateway.url + question.path, data=pieces(), headers=headers) as answer,
    ):
        text = await answer.text()
    assert answer.status == 200
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"finish_reason":"length"') == 1


async def test_equal_prompts_meet_again(line: Line) -> None:
    """Where the picker sees bodies, the engine that has the prompt gets it."""
    document = "a long document, which many ask about " * 600
    picker = line.gateway.pickers[0]
    async with openai_client(line.gateway.url) as client:
        for turn in range(8):
            outcome = await ask(client, Question(f"sticky-{turn}", f"question {turn}", system=document))
            assert outcome.right
    seen = await decisions(picker)
    engines = {seen[f"sticky-{turn}"] for turn in range(8)}

    async def are_indexed() -> bool:
        return all((await figures(picker)).get("prefix_indexer_size", [0.0]))

    if line.mode is BodyModes.HEADERS_ONLY:
        await settled(picker)
        assert not await are_indexed()
    else:
        assert len(engines) == 1
        await until(are_indexed, "the index has the document's blocks")
