"""Reads large request bodies in a child process.

One decode is one C call under the interpreter's lock (4.7 ms for 4 MiB): a thread would not help.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import msgspec

from epp.errors import InternalError
from epp.payload.records import Api, RawRequest
from epp.payload.request import Parsed, api_of, parse_request

log = logging.getLogger(__name__)

CHILD_BODY_BYTES = 2 << 20
# A compressed body counts as this many times its size; a hostile one may inflate a thousand times.
_INFLATED_SIZE = 64
_ATTEMPTS = 2


def is_large(raw: RawRequest) -> bool:
    """Whether the event loop should not read this body itself."""
    size = len(raw.body)
    if size <= CHILD_BODY_BYTES // _INFLATED_SIZE:
        return False
    if raw.header("content-encoding"):
        size *= _INFLATED_SIZE
    return size > CHILD_BODY_BYTES and api_of(raw.path) is not Api.PASSTHROUGH


@dataclass(slots=True)
class Decoder:
    """A child process that parses large bodies; started by the first of them."""

    max_body_bytes: int
    _pool: ProcessPoolExecutor | None = field(default=None, init=False)

    async def parse(self, raw: RawRequest) -> Parsed:
        """As `parse_request`.

        Raises:
            RequestError: as `parse_request` does.
            InternalError: the child died over it, twice. It is not read here: it would be this process then.
        """
        for _ in range(_ATTEMPTS):
            pool = self._pool = self._pool or _start()
            try:
                parsed = await asyncio.get_running_loop().run_in_executor(
                    pool, _parse, raw, self.max_body_bytes
                )
            except BrokenProcessPool:
                log.warning("the process that reads large bodies died; a new one is started")
                if self._pool is pool:  # else another request has seen to it
                    self.close()
            else:
                return _with_body(parsed, raw.body)
        raise InternalError("the endpoint picker could not read this body; its log has the details")

    def close(self) -> None:
        """What is being read is given up."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _with_body(parsed: Parsed, body: bytes) -> Parsed:
    """Undo `_parse`'s saving."""
    return msgspec.structs.replace(parsed, body=body, plain=parsed.plain or body)


# -- in the child -----------------------------------------------------------------------------------


def _start() -> ProcessPoolExecutor:
    # Forking would copy threads' locks in whatever state they are in.
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to parent and child alike
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The pool's own pipes do not end when the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _parse(raw: RawRequest, max_bytes: int) -> Parsed:
    """The body, which the parent has, does not travel back."""
    parsed = parse_request(raw, max_bytes=max_bytes)
    plain = b"" if parsed.plain is parsed.body else parsed.plain
    return msgspec.structs.replace(parsed, body=b"", plain=plain)
