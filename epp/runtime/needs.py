"""Awaits what a request needs to know before it can be placed."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from epp.director import Found, Need, NeedResult
from epp.errors import NeedFailed

LATE: Final = "late"

Perform = Callable[[Need], Coroutine[Any, Any, Found]]
"""Fulfils one need. Raises NeedFailed; is cancelled at the deadline."""


async def nobody(need: Need) -> bytes:
    """Where no one is there to fulfil needs."""
    raise NeedFailed("unreachable", "needs are not fulfilled here")


async def fulfil(needs: Sequence[Need], perform: Perform) -> tuple[NeedResult, ...]:
    """All at the same time, under one deadline: that of the most patient. What is not there then is late.

    One result for each, in order; what `perform` raises is a result too. Cancelled, it cancels them.
    """
    tasks = [asyncio.ensure_future(perform(need)) for need in needs]
    try:
        await asyncio.wait(tasks, timeout=max([need.timeout_s for need in needs]))
    finally:
        results = tuple([_result(task) for task in tasks])
        for task in tasks:
            task.cancel()
    return results


def _result(task: "asyncio.Future[Found]") -> NeedResult:
    if not task.done():
        return NeedFailed(LATE, "not there at its deadline")
    if task.cancelled():
        return NeedFailed("unreachable", "given up")
    error = task.exception()
    if error is None:
        return task.result()
    return error if isinstance(error, Exception) else NeedFailed("unreachable", repr(error))
