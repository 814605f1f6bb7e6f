"""The other side of an `epp.http2` connection, byte by byte, and calls that tell what they lived through.

Frames are built and read here without the code under test.
"""

import gzip
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hpack import Decoder, Encoder

from epp.http2.codes import Status
from epp.http2.connection import Connection
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.limits import Http2Limits
from epp.http2.ports import Account, Call, Ending, Peer
from epp.http2.rates import Quota
from epp.http2.streams import Stream

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PLENTY = 1 << 40

SERVICE = "/test.Echo/"
ECHO = SERVICE + "Echo"
MUTE = SERVICE + "Mute"
EAGER = SERVICE + "Eager"

Fields = list[tuple[str, str]]


def request(path: str = ECHO, *more: tuple[str, str], **changed: str | None) -> Fields:
    """The fields of a gRPC request. `changed` takes method, scheme and so on; None leaves one out."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "picker", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    for name, value in changed.items():
        wanted = name.replace("_", "-")
        wanted = f":{wanted}" if f":{wanted}" in fields else wanted
        if value is None:
            del fields[wanted]
        else:
            fields[wanted] = value
    return [*fields.items(), *more]


def message(body: bytes = b"hello", flag: int = 0) -> bytes:
    """One gRPC message with its head."""
    return struct.pack(">BI", flag, len(body)) + body


def zipped(body: bytes) -> bytes:
    return message(gzip.compress(body, mtime=0), 1)


def messages(stream: bytes) -> list[bytes]:
    """The bodies of gRPC messages, none cut off."""
    bodies = []
    while stream:
        flag, size = struct.unpack_from(">BI", stream)
        assert flag == 0
        assert len(stream) >= 5 + size, "a message is cut off"
        bodies.append(stream[5 : 5 + size])
        stream = stream[5 + size :]
    return bodies


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream_id) + payload


def data(stream_id: int, payload: bytes, *, end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end else 0, stream_id, payload)


def reset(stream_id: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, stream_id, struct.pack(">I", code))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">I", increment))


def settings(**values: int) -> bytes:
    numbers = {"table": 1, "push": 2, "streams": 3, "window": 4, "frame": 5, "list": 6}
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", numbers[k], v) for k, v in values.items()))


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """Error code of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[4:8] if self.kind == GOAWAY else self.payload)

    @property
    def ends(self) -> bool:
        return self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM)


def frames(written: bytes) -> Iterator[Frame]:
    """What a server writes: whole frames."""
    while written:
        size = int.from_bytes(written[:3])
        assert len(written) >= 9 + size, "a frame is cut off"
        stream_id = int.from_bytes(written[5:9])
        assert stream_id < 1 << 31, "the reserved bit is set"
        yield Frame(written[3], written[4], stream_id, written[9 : 9 + size])
        written = written[9 + size :]


class Lived:
    """A call that keeps what it is told. The base of those that do something."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.got: list[bytes] = []
        self.events: list[str] = []
        self.endings: list[Ending] = []

    def received(self, body: bytes) -> None:
        assert not self.endings, "told of a message after the end"
        self.got.append(body)

    def too_large(self) -> None:
        self.events.append("too large")
        self.peer.finish(Status.RESOURCE_EXHAUSTED, "too large")

    def no_room(self) -> None:
        self.events.append("no room")
        self.peer.finish(Status.UNAVAILABLE, "no room")

    def half_closed(self) -> None:
        assert not self.endings, "told of a half-close after the end"
        self.events.append("half-closed")

    def ended(self, ending: Ending) -> None:
        self.endings.append(ending)
        self.peer.send(b"too late")
        self.peer.finish(Status.INTERNAL, "too late")


class Echo(Lived):
    """Sends each message back, and finishes when there are no more."""

    def received(self, body: bytes) -> None:
        super().received(body)
        self.peer.send(body)

    def half_closed(self) -> None:
        super().half_closed()
        self.peer.finish(Status.OK)


class Eager(Lived):
    """Answers the first message, and has heard enough."""

    def received(self, body: bytes) -> None:
        super().received(body)
        self.peer.send(body)
        self.peer.finish(Status.OK)


@dataclass
class Reply:
    """What a client has got on one stream."""

    headers: Fields | None = None
    body: bytes = b""
    trailers: Fields | None = None
    ended: bool = False
    reset: int | None = None

    @property
    def messages(self) -> list[bytes]:
        return messages(self.body)

    @property
    def status(self) -> int | None:
        """grpc-status."""
        fields = self.trailers or self.headers or []
        found = dict(fields).get("grpc-status")
        return None if found is None else int(found)

    @property
    def details(self) -> str:
        return dict(self.trailers or self.headers or [])["grpc-message"]

    @property
    def http_status(self) -> int:
        return int(dict(self.headers or [])[":status"])


@dataclass
class Wire:
    """A connection and its client, who may say anything.

    Attributes:
        greet: it has begun well.
        also: calls by path, beside those above.
        now: the time; tests move it.
        calls: in the order in which they were opened, however they ended.
        told: of the client's faults.
        replies: by stream.
        log: every frame of the server, in order.
    """

    limits: Http2Limits = field(default_factory=Http2Limits)
    account: Account = field(default_factory=lambda: Quota(PLENTY))
    slots: Quota = field(default_factory=lambda: Quota(1_000_000))
    greet: bool = True
    also: dict[str, type[Lived]] = field(default_factory=dict)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.calls: list[Lived] = []
        self.told: list[ConnectionFault | StreamFault] = []
        self.replies: dict[int, Reply] = {}
        self.log: list[Frame] = []
        self.largest_write_bytes = 0
        self.encoder = Encoder()
        self._decoder = Decoder()
        self._next_id = 1
        methods: dict[str, Callable[[Peer], Call]] = {
            path: self._maker(kind)
            for path, kind in {ECHO: Echo, MUTE: Lived, EAGER: Eager, **self.also}.items()
        }
        self.connection = Connection(
            methods, self.limits, self.account, self.slots, self.now, self.told.append, lambda: None
        )
        if self.greet:
            self.say(PREFACE, settings(), frame(SETTINGS, ACK, 0))

    def _maker(self, kind: type[Lived]) -> Callable[[Peer], Call]:
        def make(peer: Peer) -> Call:
            call = kind(peer)
            self.calls.append(call)
            return call

        return make

    # -- what the client says --------------------------------------------------------------------------

    def say(self, *parts: bytes) -> list[Frame]:
        """In one segment; the frames that come back."""
        self.connection.receive(b"".join(parts), self.now)
        return self.read()

    def block(self, fields: Fields) -> bytes:
        return bytes(self.encoder.encode(fields))

    def headers(self, stream_id: int, fields: Fields, *, end: bool = False) -> bytes:
        block, end_stream = self.block(fields), END_STREAM if end else 0
        if len(block) <= 16_384:
            return frame(HEADERS, END_HEADERS | end_stream, stream_id, block)
        parts = [frame(HEADERS, end_stream, stream_id, block[:16_384])]
        for at in range(16_384, len(block), 16_384):
            last = END_HEADERS if at + 16_384 >= len(block) else 0
            parts.append(frame(CONTINUATION, last, stream_id, block[at : at + 16_384]))
        return b"".join(parts)

    def next_id(self) -> int:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        return stream_id

    def next_ids(self, count: int) -> range:
        first, self._next_id = self._next_id, self._next_id + 2 * count
        return range(first, self._next_id, 2)

    def open(self, path: str = ECHO, *more: tuple[str, str], end: bool = False, **changed: str | None) -> int:
        """A request whose headers have been taken."""
        stream_id = self.next_id()
        self.say(self.headers(stream_id, request(path, *more, **changed), end=end))
        return stream_id

    def pass_time(self, seconds: float, step_s: float = 0.5, *, alive: bool = True) -> list[Frame]:
        """`alive`: the client answers PINGs."""
        seen: list[Frame] = []
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            self.connection.tick(self.now)
            new = self.read()
            seen += new
            for one in new if alive else ():
                if one.kind == PING:
                    seen += self.say(frame(PING, ACK, 0, one.payload))
        return seen

    # -- what comes back -------------------------------------------------------------------------------

    def read(self) -> list[Frame]:
        """Everything that is written now."""
        seen: list[Frame] = []
        while written := self.connection.take():
            new = list(frames(written))
            size = sum(len(one.payload) for one in new if one.kind == DATA)
            self.largest_write_bytes = max(self.largest_write_bytes, size)
            seen += new
        self.log += seen
        for one in seen:
            self._note(one)
        return seen

    def _note(self, one: Frame) -> None:
        if not one.stream_id:
            return
        reply = self.replies.setdefault(one.stream_id, Reply())
        assert reply.reset is None, f"{one} after RST_STREAM"
        if one.kind == RST_STREAM:
            reply.reset = one.code
        elif one.kind in (DATA, HEADERS):
            assert not reply.ended, f"{one} after END_STREAM"
            reply.ended = one.ends
            if one.kind == DATA:
                reply.body += one.payload
            else:
                fields = [(str(name), str(value)) for name, value in self._decoder.decode(one.payload)]
                if reply.headers is None:
                    reply.headers = fields
                else:
                    assert one.ends, "headers in the middle"
                    reply.trailers = fields

    @property
    def goaways(self) -> list[Frame]:
        return [one for one in self.log if one.kind == GOAWAY]

    # -- checks ------------------------------------------------------------------------------------------

    def works(self) -> None:
        """A new call goes its whole way, with a body of several frames."""
        body = bytes(range(256)) * 256
        stream_id = self.open()
        cut = [message(body)[at : at + 16_384] for at in range(0, len(body) + 5, 16_384)]
        parts = [data(stream_id, piece) for piece in cut]
        parts.append(window_update(stream_id, 100_000))
        parts.append(window_update(0, 100_000))
        self.say(*parts)
        self.say(data(stream_id, message(b"two"), end=True))
        assert stream_id in self.replies, "no reply"
        reply = self.replies[stream_id]
        assert reply.messages == [body, b"two"]
        assert (reply.status, reply.ended, reply.reset) == (0, True, None)
        assert self.calls[-1].endings == [Ending.FINISHED]
        assert not self.connection.over

    def nothing_left(self) -> None:
        """No stream, no byte charged, and every call heard of its end once."""
        assert self.connection.streams == 0
        assert self.slots.used == 0
        assert isinstance(self.account, Quota)
        assert self.account.used == 0
        assert [len(call.endings) for call in self.calls] == [1] * len(self.calls)

    @contextmanager
    def bystander(self) -> Iterator[None]:
        """Another call is under way, in the middle of a message; whatever happens meanwhile, it ends well."""
        stream_id = self.open()
        call = self.calls[-1]
        whole = message(bytes(1000))
        self.say(data(stream_id, whole[:300]))
        yield
        assert not self.connection.over, f"the connection has ended: {self.connection.fault}"
        self.say(data(stream_id, whole[300:], end=True))
        reply = self.replies[stream_id]
        assert reply.messages == [bytes(1000)]
        assert (reply.status, reply.ended, reply.reset) == (0, True, None)
        assert call.endings == [Ending.FINISHED]
        self.works()
        assert not self.goaways

    def failed_with(self, code: int) -> None:
        """The connection has ended by GOAWAY of this code, and everything is given back."""
        fault = self.connection.fault
        assert fault is not None, f"the connection goes on; wanted code {code}"
        assert self.connection.over
        assert (fault.code, self.goaways[-1].code) == (code, code)
        assert self.goaways[-1].payload[8:].decode("ascii") == fault.text
        assert self.log[-1].kind == GOAWAY
        assert self.told[-1] is fault
        self.nothing_left()
        assert self.say(data(1, b"more")) == []
        assert self.pass_time(1.0) == []
        self.connection.lose()
        self.nothing_left()


# -- faults to plant --------------------------------------------------------------------------------


def keep_the_window_of_a_stalled_stream(patch: pytest.MonkeyPatch) -> None:
    """A fault to plant: what a stream owes its peer is not given back when its replies have left."""
    right = Stream.send_waiting

    def wrong(stream: Stream, most: int) -> bool:
        unreturned, stream.unreturned = stream.unreturned, 0
        more = right(stream, most)
        stream.unreturned = unreturned
        return more

    patch.setattr(Stream, "send_waiting", wrong)
