"""Steady requests that tell which pod answered: what a change did shows in those that begin after it."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

import aiohttp

from e2e.kube_pods import SERVED_BY, SERVED_PORT
from e2e.pages import until

MODEL = "lab/light"
LATEST: Final = 100
"""Requests in a row that tell who is asked: one of four pods is in none of them once in 10^12 times."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request, by the monotonic clock. `status`: 0 where no whole answer came, and `detail` says why."""

    started_s: float
    ended_s: float
    status: int
    pod: str
    port: int
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200


def pod_of(sent: Sent) -> str:
    return sent.pod


@dataclass(slots=True)
class PodLoad:
    """`async with PodLoad(url) as load`: lanes that ask one after the other until the block ends.

    Every other answer is streamed. Of a failed request nothing is tried again.

    Attributes:
        sent: in the order in which they ended.
    """

    url: str
    lanes: int = 8
    pause_s: float = 0.01
    headers: dict[str, str] = field(default_factory=dict)
    model: str = MODEL
    timeout_s: float = 30.0
    sent: list[Sent] = field(default_factory=list)
    _stop: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._lane(lane)) for lane in range(self.lanes)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def answered(self, count: int) -> None:
        """Wait until so many more have ended, whatever became of them."""
        wanted = len(self.sent) + count
        await until(lambda: len(self.sent) >= wanted, f"{count} more requests ended")

    async def comes_to(
        self,
        wanted: Set[object],
        after_s: float,
        tells: Callable[[Sent], object] = pod_of,
        count: int = LATEST,
    ) -> float:
        """Until requests that began after `after_s` reach exactly these, and from then on do so.

        How long a change takes to be known depends on the machine; that it is known for good from some moment
        on does not. Which moment is returned.
        """

        def told(sent: Iterable[Sent]) -> set[object]:
            return {tells(each) if each.ok else each.status for each in sent}

        def reached() -> bool:
            latest = self.latest(after_s, count)
            return len(latest) == count and told(latest) == wanted

        try:
            await until(reached, f"{sorted(map(str, wanted))} answer, and nobody else")
        except AssertionError as late:
            raise AssertionError(f"{late}; the latest told {told(self.latest(after_s, count))}") from None
        return await self._stays(lambda later: told(later) == wanted, count)

    async def is_well(self, after_s: float, count: int = LATEST) -> float:
        """Until requests that began after `after_s` are answered, so many in a row; when that was."""

        def holds() -> bool:
            latest = self.latest(after_s, count)
            return len(latest) == count and all(each.ok for each in latest)

        await until(holds, f"{count} requests in a row are answered")
        return await self._stays(lambda later: all(each.ok for each in later), count)

    async def _stays(self, holds: Callable[[list[Sent]], bool], count: int) -> float:
        """Requests that begin from now on are so, too. Returns the moment."""
        since_s = time.monotonic()
        await self.answered(count + self.lanes)
        later = self.begun(since_s)
        assert holds(later), f"it did not stay so: {[each for each in later if not each.ok] or later}"
        return since_s

    def latest(self, after_s: float, count: int = LATEST) -> list[Sent]:
        """The last that ended, those that began before left out."""
        return [each for each in self.sent[-count:] if each.started_s >= after_s]

    def begun(self, after_s: float = 0.0, before_s: float = float("inf")) -> list[Sent]:
        return [each for each in self.sent if after_s <= each.started_s < before_s]

    def failed(self, after_s: float = 0.0, before_s: float = float("inf")) -> list[Sent]:
        """Those among `begun` that came to nothing."""
        return [each for each in self.begun(after_s, before_s) if not each.ok]

    def pods(self, after_s: float = 0.0, before_s: float = float("inf")) -> Counter[str]:
        """Who answered how many of `begun`."""
        return served_by(self.begun(after_s, before_s))

    async def _lane(self, lane: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.timeout_s)) as session:
            for turn in itertools.count():
                if self._stop:
                    return
                sent = await ask(
                    session, self.url, f"{lane}-{turn}", self.model, self.headers, stream=turn % 2 == 1
                )
                self.sent.append(sent)
                await asyncio.sleep(self.pause_s)


def served_by(sent: Iterable[Sent]) -> Counter[str]:
    return Counter(each.pod for each in sent if each.ok)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    model: str = MODEL,
    headers: dict[str, str] | None = None,
    *,
    stream: bool = False,
) -> Sent:
    """Ask once; nothing is raised for what the server does."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": stream}
    started_s = time.monotonic()
    status, pod, port, detail = 0, "", 0, ""
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            text = await answer.text()
            pod, port = answer.headers.get(SERVED_BY, ""), int(answer.headers.get(SERVED_PORT, 0))
            status = answer.status
            if status != 200:
                detail = text[:200]
            elif stream and "data: [DONE]" not in text:
                status, detail = 0, "the stream broke off"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        detail = repr(error)
    return Sent(started_s, time.monotonic(), status, pod, port, detail)


async def one(url: str, prompt: str = "hello", **headers: str) -> Sent:
    """One request on a connection of its own."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
        with suppress(ConnectionError):
            return await ask(session, url, prompt, headers=headers)
    raise AssertionError("closing the connection failed")
