"""An event loop whose end gRPC's library does not tell the next one of."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

_LIBRARY = "grpc._cython.cygrpc"


class Loop(asyncio.SelectorEventLoop):
    """asyncio's, that takes no news from gRPC once it is closed.

    One poller of gRPC serves all loops of a process. What ends after its own loop was closed (a call that was
    cancelled last, say) it takes there from within the loop of another test, whose log would tell of it.
    """

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed() and getattr(callback, "__module__", "") == _LIBRARY:
            return asyncio.Handle(callback, args, self, context)
        return super().call_soon_threadsafe(callback, *args, context=context)
