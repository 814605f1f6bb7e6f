"""Engines die under load: each answer that comes is right, each that fails was on a dead engine."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.pages import complaints, decisions, has_ready, idle, on, settled, total, until
from e2e.questions import MODEL, Outcome, Question, ask, openai_client, text_of
from epp.lab.stack import HOST, LabEngines, Picker, Stack
from epp.lab.workload import Fleet
from epp.payload.records import Api
from epp.runtime.options import OWN, TRANSPORTS

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLEET = Fleet(
    engines=8,
    fit="llama-8b-h100",
    speed_up=4.0,
    num_blocks=16_385,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
)
AT_ONCE = 64
SMALLEST, LARGEST = 1_000, 400_000
# A refused scrape takes an engine out, and engines are scraped every 0.2 s under traffic. The rest is for
# machines that do ten other things.
FOUND_OUT_S = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TRANSPORTS)
async def stack(
    request: pytest.FixtureRequest, envoy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("killed")
    async with Stack(FLEET, MODEL, folder, envoy, picker_flags=on(request.param)) as stack:
        yield stack


@dataclass(frozen=True, slots=True)
class Outage:
    """An engine that was dead from one time to another."""

    address: str
    from_s: float
    to_s: float


@dataclass(slots=True)
class Killer:
    """Kills an engine every `every_s` and brings it back `down_s` later."""

    engines: LabEngines
    every_s: float
    down_s: float
    draw: random.Random
    outages: list[Outage] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.every_s - self.down_s)
            port = self.draw.choice(self.engines.ports)
            died_s = time.monotonic()
            await self.engines.kill(port)
            try:
                await asyncio.sleep(self.down_s)
            finally:
                await self.engines.revive(port)
                self.outages.append(Outage(f"{HOST}:{port}", died_s, time.monotonic()))


async def watch(picker: Picker, chosen: dict[str, str]) -> None:
    """Keep note of where requests went: the picker forgets old decisions."""
    while True:
        chosen |= await decisions(picker)
        await asyncio.sleep(1.5)


def questions(count: int, draw: random.Random) -> list[Question]:
    """Sizes are spread evenly over the magnitudes; a third opens with one of a few long system prompts."""
    systems = [text_of(20_000, draw) for _ in range(4)]
    text = text_of(2 * LARGEST, draw)
    made = []
    for index in range(count):
        size = round(SMALLEST * (LARGEST / SMALLEST) ** draw.random())
        start = draw.randrange(len(text) // 2)
        # The cut is by characters, of which most have one byte.
        prompt = f"{index} {text[start : start + size - 200]}"
        shares = size > 30_000 and index % 3 == 0
        made.append(
            Question(
                id=f"killed-{index}",
                prompt=prompt[: size - 20_000] if shares else prompt,
                output_tokens=draw.choice((1, 8, 16, 24, 100)),
                stream=draw.random() < 0.5,
                system=draw.choice(systems) if shares else "",
                api=Api.COMPLETIONS if index % 10 == 7 else Api.CHAT,
            )
        )
    return made


async def play(stack: Stack, asked: list[Question], chosen: dict[str, str]) -> list[Outcome]:
    """All questions, so many at a time. Where a failed one was sent is asked for at once."""
    waiting = iter(asked)
    outcomes = []

    async def lane() -> None:
        for question in waiting:
            outcome = await ask(client, question)
            outcomes.append(outcome)
            if outcome.error is not None:
                chosen.update(await decisions(stack.pickers[0], request_id=question.id))

    async with openai_client(stack.gateway_url) as client, asyncio.TaskGroup() as lanes:
        for _ in range(AT_ONCE):
            lanes.create_task(lane())
    return outcomes


def explained(outcome: Outcome, chosen: dict[str, str], outages: list[Outage]) -> bool:
    """Its engine was dead at some time of its life, and it was not sent there long after the death."""
    address = chosen.get(outcome.question.id)
    return any(
        outage.address == address
        and outage.from_s < outcome.ended_s
        and outcome.started_s < min(outage.to_s, outage.from_s + FOUND_OUT_S)
        for outage in outages
    ) and (outcome.status is None or 500 <= outcome.status < 600)


async def engines_die_under_load(stack: Stack, count: int, every_s: float, down_s: float) -> None:
    picker = stack.pickers[0]
    draw = random.Random(count)
    placed_before = await total(picker, "request_total")
    killer = Killer(stack.engines, every_s, down_s, draw)
    chosen: dict[str, str] = {}
    tasks = [asyncio.create_task(killer.run()), asyncio.create_task(watch(picker, chosen))]
    try:
        outcomes = await play(stack, questions(count, draw), chosen)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    assert len(outcomes) == count
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    wrong = [outcome for outcome in outcomes if outcome.error is None and not outcome.right]
    unexplained = [outcome for outcome in failed if not explained(outcome, chosen, killer.outages)]
    print(
        f"{count} requests, {len(killer.outages)} kills, {len(failed)} failed:",
        *Counter(f"{type(each.error).__name__} {each.status}" for each in failed).items(),
    )
    assert killer.outages
    assert wrong == []
    assert unexplained == []
    # What was in flight at a death, and what was sent before it was found out; never a share of all.
    assert len(failed) <= AT_ONCE * len(killer.outages)
    assert len(failed) < count / 2

    await idle(stack.engines)
    figures = await settled(picker)
    assert sum(figures["request_total"]) - placed_before == count
    assert len(figures["inflight_requests"]) == FLEET.engines
    await until(lambda: has_ready(picker, FLEET.engines), "every engine is back")
    assert complaints(picker) == []


async def test_two_engines_die_under_load(stack: Stack) -> None:
    await engines_die_under_load(stack, 300, every_s=2.5, down_s=1.2)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stack", [OWN], indirect=True)
async def test_engines_die_all_the_time(stack: Stack) -> None:
    await engines_die_under_load(stack, 2000, every_s=5.0, down_s=2.5)
