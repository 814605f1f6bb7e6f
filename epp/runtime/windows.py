"""Holds requests until their window is over."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from epp.director import Found, Need
from epp.kvcache.burst import BurstNeed, BurstPlace, BurstPrefixProducer, BurstWindow
from epp.payload.render import RenderNeed


class Windows:
    """Fulfils `BurstNeed`s by a timer for each window, and leaves all else to `render`.

    Attributes:
        open: the windows that requests wait in.
    """

    def __init__(self, render: Callable[[RenderNeed], Coroutine[Any, Any, bytes]]) -> None:
        self._render = render
        self.open: dict[BurstWindow, asyncio.Event] = {}

    async def __call__(self, need: Need) -> Found:
        """Raises NeedFailed. Cancelled, the request leaves its window."""
        if isinstance(need, BurstNeed):
            return await self._wait(need)
        return await self._render(need)

    async def _wait(self, need: BurstNeed) -> BurstPlace:
        window, fresh = need.producer.enter(need.held)
        if fresh:
            self.open[window] = asyncio.Event()
            _later(window.seconds, lambda: self._over(need.producer, window))
        try:
            await self.open[window].wait()
        finally:
            need.held.leave()
        return need.held.place

    def _over(self, producer: BurstPrefixProducer, window: BurstWindow) -> None:
        over = self.open.pop(window)
        try:
            producer.settle(window)
        finally:
            over.set()


def _later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)
