"""Reads request bodies in a child process that would hold up the event loop for more than 5 ms.

One decode is one C call under the interpreter's lock (4.7 ms for 4 MiB): a thread would not help.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import FrameType
from typing import TypeVar

import msgspec
import numpy as np

from epp.errors import InternalError, NeedFailed, PayloadTooLarge
from epp.payload.apis import DEFAULT_PARSERS, ErrorShape, ParserSet
from epp.payload.records import InferenceRequest, RawRequest
from epp.payload.render import UNREADABLE, with_tokens
from epp.payload.request import Parsed, parse_request

log = logging.getLogger(__name__)

CHILD_BODY_BYTES = 2 << 20
IN_PLACE_US = 5000.0
CHILD_CPU_S = 2.0
"""What the child gives to one body. Text of 32 MiB takes a tenth of that, as many empty objects a minute."""

_SURELY_SMALL_BYTES = 32 << 10
_BINARY_IN_PLACE_BYTES = 128 << 10  # at 0.02 to 0.04 us a byte, by how small its values are
_ATTEMPTS = 2

# What reading and placing costs: a byte, an escape, a string, an object or list, an item of a list.
_BYTE_US, _ESCAPE_US, _STRING_US, _NESTED_US, _ITEM_US = 0.0016, 0.012, 1.2, 1.3, 0.03
_QUOTE, _BACKSLASH, _COMMA, _OPENING, _LOWER = b'"\\,{ '
_LOOK_BYTES = 128 << 10  # stays in the processor's cache


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
    return is_laborious(raw.body)


def is_laborious(body: bytes) -> bool:
    """Whether many small values make it cost more than `IN_PLACE_US`: short messages, token ids, escapes.

    Takes 0.3 us a kilobyte, 0.5 with escapes. Quotes and brackets count unless an escape says that they are
    text.
    """
    labour_us = _BYTE_US * len(body)
    bytes_of = np.frombuffer(body, np.uint8)
    for start in range(0, len(body), _LOOK_BYTES):
        look = bytes_of[start : start + _LOOK_BYTES]
        quotes, openings = look == _QUOTE, (look | _LOWER) == _OPENING
        if body.find(b"\\", start, start + _LOOK_BYTES) >= 0:
            plain = look != _BACKSLASH
            quotes[1:] &= plain[:-1]
            openings[:-1] &= plain[1:]
            labour_us += _ESCAPE_US * (len(look) - np.count_nonzero(plain))
        labour_us += _STRING_US / 2 * np.count_nonzero(quotes) + _NESTED_US * np.count_nonzero(openings)
        labour_us += _ITEM_US * np.count_nonzero(look == _COMMA)
        if labour_us > IN_PLACE_US:
            return True
    return False


T = TypeVar("T")


@dataclass(slots=True)
class Decoder:
    """A child process that parses large bodies, one after the other; started by the first of them."""

    max_body_bytes: int
    parsers: ParserSet = DEFAULT_PARSERS
    _pool: ProcessPoolExecutor | None = field(default=None, init=False)
    _reading: int = field(default=0, init=False)

    async def parse(self, raw: RawRequest) -> Parsed:
        """As `parse_request`.

        Raises:
            RequestError: as `parse_request` does; PayloadTooLarge also where it takes over `CHILD_CPU_S`.
            InternalError: the child died over it, twice. It is not read here: it would be this process then.
        """
        return _with_body(await self._in_child(_parse, raw, self.max_body_bytes, self.parsers), raw.body)

    async def with_tokens(self, request: InferenceRequest, answer: bytes) -> InferenceRequest:
        """As `epp.payload.render.with_tokens`.

        Raises:
            NeedFailed: as that does; also where it takes over `CHILD_CPU_S`.
            InternalError: as `parse`.
        """
        bare = msgspec.structs.replace(request, prompts=(b"",) * len(request.prompts), media=())
        found = await self._in_child(_with_tokens, bare, answer)
        if isinstance(found, str):
            raise NeedFailed(UNREADABLE, found)
        return msgspec.structs.replace(
            request,
            prompts=found.prompts,
            prompt_tokens=found.prompt_tokens,
            media=found.media or request.media,
        )

    async def _in_child(self, call: Callable[..., T], *arguments: object) -> T:
        for _ in range(_ATTEMPTS):
            pool = self._pool = self._pool or _start()
            try:
                self._reading += 1
                return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)
            except BrokenProcessPool:
                log.warning("the process that reads large bodies died; a new one is started")
                if self._pool is pool:  # else another request has seen to it
                    self.close()
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
    signal.signal(signal.SIGPROF, _too_long)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The pool's own pipes do not end when the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _parse(raw: RawRequest, max_bytes: int, parsers: ParserSet) -> Parsed:
    """The body, which the parent has, does not travel back."""
    parsed = _timed(lambda: parse_request(raw, max_bytes=max_bytes, parsers=parsers))
    plain = b"" if parsed.plain is parsed.body else parsed.plain
    return msgspec.structs.replace(parsed, body=b"", plain=plain)


def _with_tokens(request: InferenceRequest, answer: bytes) -> InferenceRequest | str:
    """Or what is wrong with the answer."""
    try:
        return _timed(lambda: with_tokens(request, answer))
    except (NeedFailed, PayloadTooLarge) as error:
        return str(error)


def _timed(read: Callable[[], T]) -> T:
    """A single C call is not cut short: what follows it is."""
    # Again and again: what is raised in a finalizer, or in what the collector calls, is lost.
    signal.setitimer(signal.ITIMER_PROF, CHILD_CPU_S, CHILD_CPU_S / 10)
    try:
        return read()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise PayloadTooLarge(
        f"the body has so many values that they are not read within {CHILD_CPU_S:g} s of CPU time; send fewer"
    )
