"""Holds requests until their window is over."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import chain
from typing import Any, Final

from epp.director import Found, Need
from epp.kvcache.burst import BurstNeed, BurstPlace, BurstPrefixProducer, BurstWindow, Held
from epp.payload.render import RenderNeed
from epp.runtime.turns import SLICE_S

log = logging.getLogger(__name__)

WOKEN_AT_ONCE: Final = 16


class Windows:
    """Fulfils `BurstNeed`s by a timer for each window, and leaves all else to `render`.

    Requests of a window that is over go on in turns of the loop: `WOKEN_AT_ONCE`, or as many as have their
    place within `SLICE_S`.

    Attributes:
        open: the windows that requests wait in, each with all that came into it.
    """

    def __init__(self, render: Callable[[RenderNeed], Coroutine[Any, Any, bytes]]) -> None:
        self._render = render
        self.open: dict[BurstWindow, list[Held]] = {}
        self._waiting: dict[Held, asyncio.Future[None]] = {}

    async def __call__(self, need: Need) -> Found:
        """Raises NeedFailed. Cancelled, the request leaves its window."""
        if isinstance(need, BurstNeed):
            return await self._wait(need)
        return await self._render(need)

    async def _wait(self, need: BurstNeed) -> BurstPlace:
        held = need.held
        window, fresh = need.producer.enter(held)
        if fresh:
            self.open[window] = []
            _later(window.seconds, lambda: self._over(need.producer, window))
        self.open[window].append(held)
        settled = self._waiting[held] = asyncio.get_running_loop().create_future()
        try:
            await settled
        finally:
            del self._waiting[held]
            held.leave()
        return held.place

    def _over(self, producer: BurstPrefixProducer, window: BurstWindow) -> None:
        came = self.open.pop(window)
        left = [held for held in came if held.window is not window]
        self._go_on(chain(left, producer.settle(window)), came)

    def _go_on(self, settled: Iterator[Held], came: list[Held]) -> None:
        """Wake some of those that came. If a fault ends it, they all go on without a place."""
        until = time.monotonic() + SLICE_S
        try:
            for woken, held in enumerate(settled, 1):
                self._wake(held)
                if woken == WOKEN_AT_ONCE or time.monotonic() >= until:
                    asyncio.get_running_loop().call_later(0, partial(self._go_on, settled, came))
                    return
        except Exception:
            log.exception("requests of a window could not be assigned")
            for held in came:
                self._wake(held)

    def _wake(self, held: Held) -> None:
        """Unless it has gone."""
        settled = self._waiting.get(held)
        if settled is not None and not settled.done():
            settled.set_result(None)


def _later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)
