"""Clients that leave at any moment: nothing of them stays, neither in the picker nor on an engine."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from yarl import URL

from e2e.pages import complaints, idle, on, settled, total, until
from e2e.questions import Question, ask, openai_client, text_of
from epp.lab.stack import Gateway, LabEngines
from epp.runtime.options import TRANSPORTS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

CLIENTS = 500
AT_ONCE = 40


class Leaves(StrEnum):
    """When a client leaves."""

    IN_HEADERS = "in the headers"
    IN_UPLOAD = "during the upload"
    WAITING = "while it waits"
    IN_ANSWER = "in the middle of the answer"
    ANY_TIME = "after some time, whatever comes"


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def gateway(
    request: pytest.FixtureRequest,
    engines: LabEngines,
    envoy: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("clients-gone")
    async with Gateway(engines.addresses, folder, envoy, picker_flags=on(request.param)) as gateway:
        yield gateway


def question(index: int, draw: random.Random) -> Question:
    # One in forty is read by the picker's decoding process.
    size = 2_200_000 if index % 40 == 0 else draw.choice((500, 5_000, 60_000, 200_000))
    prompt = f"{index} {PROMPT[:size]}"
    return Question(f"gone-{index}", prompt, output_tokens=300, stream=draw.random() < 0.7)


PROMPT = text_of(2_200_000, random.Random(4))


async def leave(url: str, asked: Question, when: Leaves, draw: random.Random) -> None:
    """Ask over a bare connection and drop it: now with a reset, now with an orderly end."""
    to = URL(url)
    reader, writer = await asyncio.open_connection(to.host, to.port)
    body = json.dumps(asked.body).encode()
    head = (
        f"POST {asked.path} HTTP/1.1\r\nhost: {to.host}\r\nx-request-id: {asked.id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    try:
        match when:
            case Leaves.IN_HEADERS:
                writer.write(head[: draw.randrange(len(head) - 2)])
            case Leaves.IN_UPLOAD:
                writer.write(head + body[: draw.randrange(len(body))])
                await writer.drain()
                await asyncio.sleep(draw.random() * 0.05)
            case _:
                writer.write(head + body)
                await writer.drain()
        if when is Leaves.WAITING:
            await asyncio.sleep(draw.random() * 0.1)
        elif when is Leaves.IN_ANSWER:
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(draw.randrange(1, 2_000))
            await asyncio.sleep(draw.random() * 0.2)
    finally:
        if draw.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def cancel(client: AsyncOpenAI, asked: Question, draw: random.Random) -> None:
    """Ask as users do, and give up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(draw.random() * 0.4):
            await ask(client, asked)


async def test_clients_leave_at_random_moments(gateway: Gateway, engines: LabEngines) -> None:
    picker = gateway.pickers[0]
    draw = random.Random(500)
    plan = iter([(question(index, draw), draw.choice(list(Leaves))) for index in range(CLIENTS)])
    left: Counter[str] = Counter()
    placed_before = await total(picker, "request_total")

    async def lane(client: AsyncOpenAI) -> None:
        for asked, when in plan:
            if when is Leaves.ANY_TIME:
                await cancel(client, asked, draw)
            else:
                await leave(gateway.url, asked, when, draw)
            left[when] += 1

    async with openai_client(gateway.url) as client, asyncio.TaskGroup() as lanes:
        for _ in range(AT_ONCE):
            lanes.create_task(lane(client))

    assert set(left) == set(Leaves)
    figures = await settled(picker)
    await idle(engines)
    placed = sum(figures["request_total"]) - placed_before
    print(f"{CLIENTS} clients, {placed:g} of them placed:", dict(left))
    # Those that were gone before their request had ended are no business of any engine.
    assert left[Leaves.IN_ANSWER] <= placed <= CLIENTS - left[Leaves.IN_HEADERS] - left[Leaves.IN_UPLOAD]
    assert complaints(picker) == []
    async with openai_client(gateway.url) as client:
        for stream in (False, True):
            assert (await ask(client, Question("stays", "still there?", stream=stream))).right


async def computing(engines: LabEngines) -> bool:
    return any(each.running for each in (await engines.stats()).engines)


async def test_engine_hears_of_a_client_that_leaves(gateway: Gateway, engines: LabEngines) -> None:
    """An answer that nobody reads is not computed to its end."""
    before = sum(each.generation_tokens for each in (await engines.stats()).engines)
    async with openai_client(gateway.url) as client:
        asking = asyncio.create_task(ask(client, Question("leaves", "a long answer", 50_000, stream=True)))
        await until(lambda: computing(engines), "an engine computes")
        asking.cancel()
        await asyncio.wait([asking])
    await idle(engines)
    assert sum(each.generation_tokens for each in (await engines.stats()).engines) - before < 40_000
    await settled(gateway.pickers[0])
