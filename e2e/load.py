"""Steady load of small requests while a test does something to the line."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from openai import AsyncOpenAI

from e2e.pages import until
from e2e.questions import Outcome, Question, ask, openai_client


@dataclass(slots=True)
class Load:
    """`async with Load(url) as load`: lanes that ask one question after the other until the block ends.

    Each has its own connections, as clients have. Half of the answers are streamed.
    """

    url: str
    lanes: int = 8
    output_tokens: int = 12
    outcomes: list[Outcome] = field(default_factory=list)
    _stop: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _exit: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        for lane in range(self.lanes):
            client = await self._exit.enter_async_context(openai_client(self.url))
            self._tasks.append(asyncio.create_task(self._lane(lane, client)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._exit.aclose()

    async def _lane(self, lane: int, client: AsyncOpenAI) -> None:
        for turn in itertools.count():
            if self._stop:
                return
            prompt = f"lane {lane}, turn {turn}: " + "the same words in every turn of it " * 20
            question = Question(f"load-{lane}-{turn}", prompt, self.output_tokens, stream=turn % 2 == 0)
            outcome = await ask(client, question)
            self.outcomes.append(outcome)
            if outcome.error is not None:
                await asyncio.sleep(0.02)

    async def answered(self, count: int) -> None:
        """Wait until so many more requests have ended, whatever became of them."""
        wanted = len(self.outcomes) + count
        await until(lambda: len(self.outcomes) >= wanted, f"{count} more requests ended")

    def begun_after(self, at_s: float, before_s: float = float("inf")) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if at_s <= outcome.started_s < before_s]
