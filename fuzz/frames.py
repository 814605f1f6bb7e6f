"""Bytes as the doings of a peer that knows HTTP/2 and gRPC, but not its manners."""

import gzip
from collections.abc import Callable

from hpack import Encoder, NeverIndexedHeaderTuple

from epp.http2.connection import Connection
from fuzz import wire
from fuzz.connection import CALLS, MakeConnection, Rig
from fuzz.draw import Draw

Fields = list[tuple[str, str]]


def _block(fields: Fields) -> bytes:
    """A header block that depends on no other."""
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in fields], huffman=False)


def _request(
    path: str, *more: tuple[str, str], method: str = "POST", content: str = "application/grpc"
) -> bytes:
    fields = [
        (":method", method),
        (":scheme", "http"),
        (":path", path),
        (":authority", "fuzz"),
        ("te", "trailers"),
    ]
    return _block([*fields, ("content-type", content), *more])


ECHO = "/fuzz.Calls/Echo"
REQUESTS = (
    *(_request(path) for path in CALLS),
    _request(ECHO, ("grpc-encoding", "gzip")),
    _request(ECHO, ("grpc-timeout", "900m")),
    _request(ECHO, ("grpc-timeout", "99999999H")),
    _request(ECHO, ("content-length", "12")),
    _request("/fuzz.Calls/Flood", ("grpc-timeout", "5S")),
    _request(ECHO, ("grpc-encoding", "snappy")),
    _request(ECHO, ("grpc-timeout", "soon")),
    _request("/fuzz.Calls/None"),
    _request("/fuzz.None/Echo"),
    _request(ECHO, method="GET"),
    _request(ECHO, content="text/html"),
    _block([(":method", "POST")]),
    _block([("grpc-status", "0")]),
    _request(ECHO, ("x", "y" * 1900)),
    b"\x00\x05:path",
)
# Adds a long path to the dynamic table, and a request that refers to it: short blocks that unfold.
LONG_PATH = b"\x83\x86\x44\x7f\xa1\x07/" + b"p" * 1055 + b"\x41\x01a\x5f\x10application/grpc"
REFERS = b"\x83\x86\xc0\xbf\xbe"
MESSAGES = (
    b"\0\0\0\0\0",
    b"\0\0\0\0\x02hi",
    b"\0\0\0\0\x02hi" * 3,
    b"\0\0\0\x05\xdc" + bytes(1500),
    b"\0\0\0\x05\xdc" + bytes(700),
    b"\0\0\0\x40\x01",
    b"\0\0\0\x0b\xb8" + bytes(3000),
    b"\0\0\0",
    b"\0\0\0\0\x05h",
    b"\x02\0\0\0\0",
    b"",
    *(
        b"\x01" + len(body).to_bytes(4, "big") + body
        for body in (gzip.compress(b"hi"), gzip.compress(bytes(17_000)), b"?")
    ),
)
STREAM_IDS = (0, 1, 3, 5, 7, 9, 11, 2)
INCREMENTS = (0, 1, 100, 20_000, 65_535, 1 << 20, wire.LAST_STREAM_ID)
CODES = (0, 1, 2, 8)
VALUES = (0, 1, 2, 100, 16_384, 65_535, 1 << 20, wire.LAST_STREAM_ID, 0xFFFF_FFFF)
SECONDS = (0.0, 0.001, 1.0, 3.0, 10.0, 30.0, 130.0)


class Peer:
    """What it sends, frame by frame."""

    def __init__(self, draw: Draw, rig: Rig) -> None:
        self.draw = draw
        self.rig = rig
        self.next_id = 1

    def stream_id(self) -> int:
        """The last one opened, most often."""
        choice = self.draw.below(16)
        return STREAM_IDS[choice] if choice < len(STREAM_IDS) else max(1, self.next_id - 2)

    def padded(self, flags: int, payload: bytes) -> tuple[int, bytes]:
        if self.draw.below(8):
            return flags, payload
        size = self.draw.below(256)
        return flags | 0x8, bytes((size,)) + payload + bytes(min(size, self.draw.below(256)))

    def request(self) -> bytes:
        draw = self.draw
        block = draw.pick((*REQUESTS, LONG_PATH, REFERS, None))
        if block is None:
            block = draw.block()
        flags = draw.pick((0x4, 0x4, 0x4, 0x5, 0x5, 0x0, 0x1, 0x24))
        if flags & 0x20:
            block = draw.take(5).ljust(5, b"\0") + block
        stream_id = self.next_id
        if draw.below(8):
            self.next_id += 2
        else:
            stream_id = self.stream_id()
        flags, payload = self.padded(flags, block)
        return wire.frame(wire.HEADERS, flags, stream_id, payload)

    def data(self) -> bytes:
        message = self.draw.pick((*MESSAGES, None))
        if message is None:
            message = self.draw.block()
        flags, payload = self.padded(self.draw.pick((0, 0, 0, 1)), message)
        return wire.frame(wire.DATA, flags, self.stream_id(), payload)

    def trailers(self) -> bytes:
        return wire.frame(wire.HEADERS, self.draw.pick((5, 4)), self.stream_id(), _block([("x", "y")]))

    def continuation(self) -> bytes:
        block = self.draw.pick((b"", REQUESTS[0], REQUESTS[0][20:], bytes(900)))
        return wire.frame(wire.CONTINUATION, self.draw.pick((4, 0)), self.stream_id(), block)

    def reset(self) -> bytes:
        return wire.frame(wire.RST_STREAM, 0, self.stream_id(), self.draw.pick(CODES).to_bytes(4, "big"))

    def window(self) -> bytes:
        increment = self.draw.pick(INCREMENTS).to_bytes(4, "big")
        return wire.frame(wire.WINDOW_UPDATE, 0, self.stream_id(), increment)

    def settings(self) -> bytes:
        if not self.draw.below(6):
            return wire.frame(wire.SETTINGS, 1, 0)
        return wire.settings(
            *((self.draw.below(9), self.draw.pick(VALUES)) for _ in range(self.draw.below(4)))
        )

    def ping(self) -> bytes:
        payload = self.draw.pick((b"01234567", b"draining", b"alive?  "))
        return wire.frame(wire.PING, self.draw.below(2), 0, payload)

    def priority(self) -> bytes:
        payload = self.stream_id().to_bytes(4, "big") + b"\x10"
        return wire.frame(wire.PRIORITY, 0, self.stream_id(), payload[: self.draw.pick((5, 5, 5, 4))])

    def goaway(self) -> bytes:
        return wire.frame(wire.GOAWAY, 0, 0, bytes(self.draw.pick((8, 20, 3))))

    def anything(self) -> bytes:
        kind, flags = self.draw.below(12), self.draw.below(256)
        return wire.frame(kind, flags, self.stream_id(), self.draw.block())

    def junk(self) -> bytes:
        return self.draw.block()

    def happening(self) -> bytes:
        """Something that is not on the wire."""
        rig, draw = self.rig, self.draw
        match draw.below(8):
            case 0 | 1:
                rig.tick(draw.pick(SECONDS))
            case 2:
                rig.pause()
            case 3 | 4:
                rig.resume()
            case 5:
                rig.drain()
            case _:
                rig.reply(draw.below(8), end=draw.flag())
        return b""


SENDS: tuple[Callable[[Peer], bytes], ...] = (
    Peer.request, Peer.request, Peer.request, Peer.request,
    Peer.data, Peer.data, Peer.data, Peer.data,
    Peer.trailers, Peer.continuation, Peer.reset, Peer.reset,
    Peer.window, Peer.window, Peer.settings, Peer.ping,
    Peer.priority, Peer.goaway, Peer.anything, Peer.junk,
    Peer.happening, Peer.happening, Peer.happening, Peer.happening,
)  # fmt: skip


def frames(data: bytes, make: MakeConnection = Connection) -> None:
    """Each step is one frame or another happening; steps may arrive together, in pieces, or many times."""
    draw, rig = Draw(data), Rig(make)
    peer = Peer(draw, rig)
    waiting = wire.PREFACE + wire.settings()
    while draw.left:
        piece = draw.pick(SENDS)(peer)
        arrival = draw.below(16)
        if arrival == 0:
            piece *= 1 + draw.below(64)
        waiting += piece
        if arrival == 1:
            continue
        cut = draw.below(len(waiting) + 1) if arrival == 2 else len(waiting)
        rig.feed(waiting[:cut])
        waiting = waiting[cut:]
    rig.feed(waiting)
    rig.resume()
    rig.close()


def raw(data: bytes, make: MakeConnection = Connection) -> None:
    """After a proper beginning, anything, in pieces of one size: that of the first byte, 0 for whole."""
    rig = Rig(make)
    rig.feed(wire.PREFACE + wire.settings())
    size = data[0] if data and data[0] else len(data) + 1
    for at in range(1, len(data), size):
        rig.feed(data[at : at + size])
    rig.tick(1.0)
    rig.close()
