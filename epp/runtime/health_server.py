"""The health port of the own transport: an event loop on a thread of its own."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Final

import uvloop

from epp.http2.limits import KIB, MIB, Http2Limits
from epp.http2.rates import Quota
from epp.runtime.health import Health
from epp.runtime.health_calls import Post, health_methods
from epp.runtime.http2 import Http2Server
from epp.runtime.transport import Listener

log = logging.getLogger(__name__)

CONNECTIONS: Final = 256
STREAMS: Final = 4096
HELD_BYTES: Final = 8 * MIB
LIMITS: Final = Http2Limits(
    streams=1024,
    message_bytes=16 * KIB,
    stream_window_bytes=64 * KIB,
    connection_window_bytes=256 * KIB,
    output_bytes=64 * KIB,
)
"""A request is a name, an answer a few bytes."""


def http2_port(health: Health, post: Post) -> Listener:
    """The health port over the picker's own HTTP/2.

    What it holds is counted apart from ext-proc: it must answer when that is full, and from its own thread.
    """
    return Http2Server(
        health_methods(health, post), LIMITS, Quota(HELD_BYTES), connections=CONNECTIONS, streams=STREAMS
    )


class HealthServer:
    """The health port, on a thread of its own, so that a busy event loop is not taken for a dead process."""

    def __init__(self, health: Health, make: Callable[[Health, Post], Listener] = http2_port) -> None:
        """`make` is called on the thread, with what leads there from others (see `health_methods`)."""
        self._health = health
        self._make = make
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()

    def start(self, address: str) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        started: Future[int] = Future()
        # A daemon: if the main thread dies without `stop`, so must a process that says it serves.
        self._thread = Thread(target=self._run, args=(address, started), name="health", daemon=True)
        self._thread.start()
        try:
            return started.result()
        except BaseException:
            self._thread.join()
            raise

    def stop(self) -> None:
        """Returns when nothing runs any more."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._end.set)
        if self._thread is not None:
            self._thread.join()

    def _run(self, address: str, started: "Future[int]") -> None:
        try:
            uvloop.run(self._serve(address, started))
        except Exception as error:
            if started.done():
                log.exception("the health port has ended by a fault of its own")
            else:
                started.set_exception(error)

    async def _serve(self, address: str, started: "Future[int]") -> None:
        loop = asyncio.get_running_loop()
        listener = self._make(self._health, loop.call_soon_threadsafe)
        port = await listener.start(address)
        self._loop = loop
        started.set_result(port)
        await self._end.wait()
        await listener.stop()
