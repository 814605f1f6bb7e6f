"""The proxy's side of a connection, as the soak needs it: fast, and ended in any way."""

import asyncio
import random
from collections.abc import Callable
from itertools import count
from typing import Any

from hpack import Decoder, Encoder

from epp import names
from epp.http2.codes import (
    ACK,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    LAST_STREAM_ID,
    LEAST_MAX_FRAME_BYTES,
    PREFACE,
    ErrorCode,
    FrameType,
    Setting,
)
from epp.http2.frames import (
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    SETTINGS_ACK,
    frame,
    goaway,
    number,
    read_settings,
    rst_stream,
    settings,
    window_update,
)
from epp.http2.messages import MessageReader

WINDOW_BYTES = 1 << 20
STREAM_S = 60.0
BROKEN_FRAME = b"\xff" * FRAME_HEAD_BYTES
HEADERS = (
    (":method", "POST"),
    (":path", names.EXT_PROC_METHOD),
    (":authority", "picker"),
    (":scheme", "http"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


class Stream:
    """One stream as the proxy has it."""

    def __init__(self, stream_id: int, credit: int) -> None:
        self.id = stream_id
        self.credit = credit
        self.replies: list[bytes] = []
        self.status = ""
        self.over = False
        self.reset = False
        self.reader = MessageReader(1 << 26, gzip=False)
        self.changed = asyncio.Event()

    async def replied(self, wanted: int) -> None:
        """Wait for so many replies, or for the end."""
        await self._until(lambda: len(self.replies) >= wanted or self.over)

    async def ended(self) -> None:
        await self._until(lambda: self.over)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(STREAM_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


class Link(asyncio.Protocol):
    """One connection.

    Attributes:
        ending: this side has ended it, or broken it.
        lost: it is gone.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.ending = False
        self.lost = False
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._ids = count(1, 2)
        self._credit = DEFAULT_WINDOW_BYTES
        self._new_credit = DEFAULT_WINDOW_BYTES
        self._granted = asyncio.Event()
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        greeting = settings({Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
        transport.write(PREFACE + greeting + window_update(0, LAST_STREAM_ID - DEFAULT_WINDOW_BYTES))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self.ending = True
        self._granted.set()
        for stream in self.streams.values():
            stream.over = True
            stream.changed.set()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while len(data) - at >= FRAME_HEAD_BYTES:
            word, flags, stream_id = FRAME_HEAD.unpack_from(data, at)
            stop = at + FRAME_HEAD_BYTES + (word >> 8)
            if stop > len(data):
                break
            self._frame(word & 0xFF, flags, stream_id, data[at + FRAME_HEAD_BYTES : stop])
            at = stop
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self.streams.get(stream_id)
        match kind:
            case FrameType.SETTINGS if not flags & ACK:
                self._settings(payload)
            case FrameType.PING if not flags & ACK:
                self._write(frame(FrameType.PING, ACK, 0, payload))
            case FrameType.WINDOW_UPDATE:
                if stream is not None:
                    stream.credit += number(payload)
                elif not stream_id:
                    self._credit += number(payload)
                self._granted.set()
            case FrameType.HEADERS:  # those of streams that are gone count for the header table
                fields: dict[Any, Any] = dict(self._decoder.decode(payload))
                if stream is not None:
                    stream.status = fields.get("grpc-status", "")
            case FrameType.DATA if stream is not None:
                stream.replies += stream.reader.feed(payload)
                self._write(window_update(stream_id, len(payload)))
                stream.changed.set()
        over = kind == FrameType.RST_STREAM or (
            kind in (FrameType.HEADERS, FrameType.DATA) and flags & END_STREAM
        )
        if stream is not None and over:
            self._forget(stream)

    def _settings(self, payload: bytes) -> None:
        for key, value in read_settings(payload):
            if key is Setting.INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.credit += value - self._new_credit
                self._new_credit = value
        self._granted.set()
        self._write(SETTINGS_ACK)

    def _forget(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        stream.over = True
        stream.changed.set()
        self._granted.set()

    def _write(self, data: bytes) -> None:
        if not self.lost and not self.transport.is_closing():
            self.transport.write(data)

    def open(self) -> Stream:
        stream = Stream(next(self._ids), self._new_credit)
        stream.over = self.lost
        self.streams[stream.id] = stream
        self._write(frame(FrameType.HEADERS, END_HEADERS, stream.id, self._encoder.encode(HEADERS)))
        return stream

    async def send(self, stream: Stream, data: bytes) -> None:
        """As the server's windows open; nothing more once the stream is over."""
        while data and not stream.over:
            size = min(len(data), LEAST_MAX_FRAME_BYTES, stream.credit, self._credit)
            if size <= 0:
                self._granted.clear()
                async with asyncio.timeout(STREAM_S):
                    await self._granted.wait()
                continue
            stream.credit -= size
            self._credit -= size
            self._write(frame(FrameType.DATA, 0, stream.id, data[:size]))
            data = data[size:]

    def half_close(self, stream: Stream) -> None:
        if not stream.over:
            self._write(frame(FrameType.DATA, END_STREAM, stream.id))

    def reset(self, stream: Stream) -> None:
        """As proxies do, whatever the reason."""
        stream.reset = True
        if not stream.over:
            self._write(rst_stream(stream.id, ErrorCode.INTERNAL_ERROR))
            self._forget(stream)

    def end(self, draw: random.Random) -> None:
        """In one of the ways in which connections end."""
        if self.ending:
            return
        self.ending = True
        match draw.randrange(4):
            case 0:
                self.transport.abort()
            case 1:
                self.transport.close()
            case 2:
                self.transport.write(BROKEN_FRAME)
            case _:
                self.transport.write(goaway(0, ErrorCode.NO_ERROR, "") + BROKEN_FRAME[:5])
                self.transport.close()
