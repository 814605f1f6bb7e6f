"""The proxy's end of one HTTP/2 connection, frame by frame: what no client library would do, too."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from epp import names
from tests.data.extproc.over_wire import until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 16_384
DEFAULT_WINDOW = 65_535
HEADERS = (
    (":method", "POST"),
    (":path", names.EXT_PROC_METHOD),
    (":authority", "picker"),
    (":scheme", "http"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


@dataclass(slots=True)
class Heard:
    """What came on one stream. `reset`: the code of RST_STREAM; `ended`: END_STREAM came."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    reset: int | None = None
    ended: bool = False

    @property
    def messages(self) -> list[bytes]:
        """Those that are whole."""
        found, at = [], 0
        while at + 5 <= len(self.data):
            size = int.from_bytes(self.data[at + 1 : at + 5])
            if at + 5 + size > len(self.data):
                break
            found.append(bytes(self.data[at + 5 : at + 5 + size]))
            at += 5 + size
        return found

    @property
    def status(self) -> str | None:
        """The gRPC status, of trailers or of an answer that has nothing else."""
        return self.trailers.get("grpc-status", self.headers.get("grpc-status"))


def framed(*messages: bytes) -> bytes:
    """Messages as gRPC puts them into a stream."""
    return b"".join(b"\0" + len(message).to_bytes(4) + message for message in messages)


class Proxy:
    """One connection. Made by `connected`.

    Attributes:
        grants: what is read is granted anew. Without it, windows stay as they were.
        heard: by stream.
        goaways: last stream and code of each.
        settled: the server's settings came.
        closed: the server has closed the connection, or it broke.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, grants: bool) -> None:
        self.reader = reader
        self.writer = writer
        self.grants = grants
        self.acks_pings = True
        self.heard: dict[int, Heard] = {}
        self.goaways: list[tuple[int, int]] = []
        self.pings: list[bytes] = []
        self.closed = False
        self._decoder = Decoder()
        self._encoder = Encoder()
        self._ids = count(1, 2)
        self._credit = {0: DEFAULT_WINDOW}
        self._new_credit = DEFAULT_WINDOW
        self.settled = False

    # -- what it says --------------------------------------------------------------------------------

    def write(self, *frames: Frame) -> None:
        self.writer.write(b"".join(frame.serialize() for frame in frames))

    def greet(self, window: int) -> None:
        self.writer.write(PREFACE)
        self.write(SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: window}))
        if window > DEFAULT_WINDOW:
            self.write(WindowUpdateFrame(0, window_increment=window - DEFAULT_WINDOW))

    def open(self, *, end: bool = False, **headers: str) -> int:
        """Open a stream. A pseudo-header is named without its colon, as `_path`."""
        changed = {
            name.replace("_", ":" if name[0] == "_" else "-"): value for name, value in headers.items()
        }
        block = self._encoder.encode((dict(HEADERS) | changed).items())
        stream_id = next(self._ids)
        self.heard[stream_id] = Heard()
        self._credit[stream_id] = self._new_credit
        flags = ["END_HEADERS", *(["END_STREAM"] if end else [])]
        self.write(HeadersFrame(stream_id, data=block, flags=flags))
        return stream_id

    async def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """As DATA frames, as the server's windows open."""
        await until(lambda: self.settled, "the server's settings")
        credit = self._credit
        while data or end:
            if data:
                await until(lambda: (credit[0] > 0 and credit[stream_id] > 0) or self.closed, "a window")
            size = min(len(data), FRAME_BYTES, credit[0], credit[stream_id])
            piece, data = data[:size], data[size:]
            last = end and not data
            credit[0] -= size
            credit[stream_id] -= size
            self.write(DataFrame(stream_id, data=piece, flags=["END_STREAM"] if last else []))
            await self.writer.drain()
            if last:
                return

    async def begin(self, *messages: bytes, **headers: str) -> int:
        """Open a stream and say this on it."""
        stream_id = self.open(**headers)
        await self.send(stream_id, framed(*messages))
        return stream_id

    def reset(self, stream_id: int, code: int = 2) -> None:
        """As proxies end every stream."""
        self.write(RstStreamFrame(stream_id, error_code=code))

    def grant(self, stream_id: int, size: int) -> None:
        self.write(WindowUpdateFrame(stream_id, window_increment=size))

    def break_off(self) -> None:
        """Without a word of TCP but RST."""
        self.writer.transport.abort()

    # -- what it hears -------------------------------------------------------------------------------

    async def messages(self, stream_id: int, wanted: int) -> list[bytes]:
        """So many, or all there are when the stream has ended."""
        heard = self.heard[stream_id]
        await until(lambda: self.is_over(stream_id) or len(heard.messages) >= wanted, f"{wanted} messages")
        return heard.messages

    def is_over(self, stream_id: int) -> bool:
        heard = self.heard[stream_id]
        return heard.ended or heard.reset is not None or self.closed

    async def ended(self, stream_id: int) -> Heard:
        await until(lambda: self.is_over(stream_id), "the stream's end")
        return self.heard[stream_id]

    async def is_closed(self) -> bool:
        await until(lambda: self.closed, "the connection's end")
        return self.closed

    async def listen(self) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self.reader.readexactly(9)
                frame, size = Frame.parse_frame_header(memoryview(head))
                frame.parse_body(memoryview(await self.reader.readexactly(size)))
                self._take(frame)
        self.closed = True

    def _take(self, frame: Frame) -> None:
        match frame:
            case SettingsFrame() if "ACK" not in frame.flags:
                self._new_credit = frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, DEFAULT_WINDOW)
                for stream_id in self.heard:
                    self._credit[stream_id] += self._new_credit - DEFAULT_WINDOW
                self.settled = True
                self.write(SettingsFrame(flags=["ACK"]))
            case PingFrame() if "ACK" not in frame.flags:
                self.pings.append(frame.opaque_data)
                if self.acks_pings:
                    self.write(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
            case GoAwayFrame():
                self.goaways.append((frame.last_stream_id, frame.error_code))
            case WindowUpdateFrame():
                self._credit[frame.stream_id] += frame.window_increment
            case HeadersFrame():
                heard = self.heard[frame.stream_id]
                fields = dict(self._decoder.decode(frame.data))
                if heard.headers:
                    heard.trailers = fields
                else:
                    heard.headers = fields
                heard.ended = "END_STREAM" in frame.flags
            case DataFrame():
                heard = self.heard[frame.stream_id]
                heard.data += frame.data
                heard.ended = "END_STREAM" in frame.flags
                if self.grants and frame.flow_controlled_length:
                    self.grant(0, frame.flow_controlled_length)
                    self.grant(frame.stream_id, frame.flow_controlled_length)
            case RstStreamFrame():
                self.heard[frame.stream_id].reset = frame.error_code


class Written:
    """A server's transport, in the place of which it stands, and the sizes of what it is given to write."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self._transport.write(data)


@asynccontextmanager
async def connected(
    port: int,
    host: str = "127.0.0.1",
    *,
    window: int = DEFAULT_WINDOW,
    grants: bool = True,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Proxy]:
    """A connection that has sent its preface. `window`: of each stream; of the connection too, if larger."""
    name = "picker" if tls else None
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=name)
    proxy = Proxy(reader, writer, grants=grants)
    proxy.greet(window)
    listening = asyncio.create_task(proxy.listen())
    try:
        yield proxy
    finally:
        writer.transport.abort()
        await listening
