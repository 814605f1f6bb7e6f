"""Reads request bodies in a child process that would hold up the event loop for more than 5 ms.

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
import numpy as np

from epp.errors import InternalError
from epp.payload.apis import DEFAULT_PARSERS, ErrorShape, ParserSet
from epp.payload.records import RawRequest
from epp.payload.request import Parsed, parse_request

log = logging.getLogger(__name__)

CHILD_BODY_BYTES = 2 << 20
IN_PLACE_US = 5000.0
_SURELY_SMALL_BYTES = 32 << 10
_BINARY_IN_PLACE_BYTES = 128 << 10  # at 0.02 to 0.04 us a byte, by how small its values are
_ATTEMPTS = 2

# What reading and placing costs: a byte, an escape, a string, an object or list, an item of a list.
_BYTE_US, _ESCAPE_US, _STRING_US, _NESTED_US, _ITEM_US = 0.0016, 0.012, 1.2, 1.3, 0.03
_QUOTE, _BACKSLASH, _COMMA, _OPENING, _LOWER = b'"\\,{ '
_LOOK_BYTES = 64 << 10  # stays in the processor's cache


def is_large(raw: RawRequest, parsers: ParserSet = DEFAULT_PARSERS) -> bool:
    """Whether the event loop should not read this body itself.

    What a compressed body holds is not known before it is inflated: a thousand times its size, at worst.
    """
    size = len(raw.body)
    compressed = size > 0 and raw.header("content-encoding") is not None
    if size <= _SURELY_SMALL_BYTES and not compressed:
        return False
    dialect = parsers.find(raw.path)
    if dialect is None or dialect.read is None:
        return False
    if compressed or size > CHILD_BODY_BYTES:
        return True
    if dialect.shape is ErrorShape.GRPC:
        return size > _BINARY_IN_PLACE_BYTES
    return _is_laborious(raw.body)


def _is_laborious(body: bytes) -> bool:
    """Whether many small values make it cost more than `IN_PLACE_US`: short messages, token ids, escapes.

    Takes 0.5 us a kilobyte. Quotes and brackets count unless an escape says that they are text.
    """
    labour_us = _BYTE_US * len(body)
    bytes_of = np.frombuffer(body, np.uint8)
    for start in range(0, len(body), _LOOK_BYTES):
        look = bytes_of[start : start + _LOOK_BYTES]
        plain = look != _BACKSLASH
        quotes = np.count_nonzero((look[1:] == _QUOTE) & plain[:-1])
        nested = np.count_nonzero(((look[:-1] | _LOWER) == _OPENING) & plain[1:])
        items = np.count_nonzero(look == _COMMA)
        labour_us += _STRING_US / 2 * quotes + _NESTED_US * nested + _ITEM_US * items
        labour_us += _ESCAPE_US * (len(look) - np.count_nonzero(plain))
        if labour_us > IN_PLACE_US:
            return True
    return False


@dataclass(slots=True)
class Decoder:
    """A child process that parses large bodies; started by the first of them."""

    max_body_bytes: int
    parsers: ParserSet = DEFAULT_PARSERS
    _pool: ProcessPoolExecutor | None = field(default=None, init=False)
    _reading: int = field(default=0, init=False)

    async def parse(self, raw: RawRequest) -> Parsed:
        """As `parse_request`.

        Raises:
            RequestError: as `parse_request` does.
            InternalError: the child died over it, twice. It is not read here: it would be this process then.
        """
        for _ in range(_ATTEMPTS):
            pool = self._pool = self._pool or _start()
            try:
                self._reading += 1
                parsed = await asyncio.get_running_loop().run_in_executor(
                    pool, _parse, raw, self.max_body_bytes, self.parsers
                )
            except BrokenProcessPool:
                log.warning("the process that reads large bodies died; a new one is started")
                if self._pool is pool:  # else another request has seen to it
                    self.close()
            else:
                return _with_body(parsed, raw.body)
            finally:
                self._reading -= 1
        raise InternalError("the endpoint picker could not read this body; its log has the details")

    def close(self) -> None:
        """What is being read is given up."""
        if self._pool is not None:
            # An idle child ends at once. Not waited for, it ends while the interpreter does, which may then
            # write into a pipe that the pool has just closed: a traceback in the log.
            self._pool.shutdown(wait=not self._reading, cancel_futures=True)
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


def _parse(raw: RawRequest, max_bytes: int, parsers: ParserSet) -> Parsed:
    """The body, which the parent has, does not travel back."""
    parsed = parse_request(raw, max_bytes=max_bytes, parsers=parsers)
    plain = b"" if parsed.plain is parsed.body else parsed.plain
    return msgspec.structs.replace(parsed, body=b"", plain=plain)
