"""A connection between a peer that sends anything and calls that do what calls may do."""

from collections.abc import Callable

from epp.http2.codes import Status
from epp.http2.connection import Connection
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.limits import Http2Limits, Rate
from epp.http2.ports import Ending, Peer
from fuzz.wire import Got, Sent

LIMITS = Http2Limits(
    streams=6,
    header_list_bytes=2000,
    header_block_bytes=3000,
    header_frames=4,
    message_bytes=16_384,
    stream_window_bytes=70_000,
    connection_window_bytes=200_000,
    output_bytes=30_000,
    early_resets=Rate(burst=20, per_s=1),
    faults=Rate(burst=20, per_s=1),
    pings=Rate(burst=20, per_s=1),
    settings=Rate(burst=10, per_s=1),
    priorities=Rate(burst=20, per_s=1),
    window_updates=Rate(burst=100, per_s=10),
    empty_frames=Rate(burst=20, per_s=1),
)
HELD_BYTES = 8000
STREAMS = 5
FLOOD_BYTES = 20_000
# Bytes of answers for a byte of the peer, messages of calls apart: the shortest request of all is a HEADERS
# frame of ten bytes, answered by an HTTP status with a line of text.
ANSWER_RATIO = 40
ANSWER_BYTES = 2000
TAKES = 10_000


class Account:
    """Sees that what is given was taken. Attributes: `held`, `highest` (bytes)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = self.highest = 0

    def take(self, n: int) -> bool:
        assert n >= 0
        if self.held + n > self._limit:
            return False
        self.charge(n)
        return True

    def charge(self, n: int) -> bool:
        assert n >= 0
        self.held += n
        self.highest = max(self.highest, self.held)
        return self.held <= self._limit + self._limit // 4

    def give(self, n: int) -> None:
        assert 0 <= n <= self.held, f"{n} given back of {self.held}"
        self.held -= n


class EchoCall:
    """Each message is sent back. Sees that it is told of nothing after it has finished or ended.

    Attributes: `endings`, `sent` (bytes of messages).
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.endings: list[Ending] = []
        self.sent = 0
        self.finished = self.refused = self.halved = False

    @property
    def over(self) -> bool:
        """Nothing more may be received."""
        return bool(self.endings) or self.finished or self.refused or self.halved

    def send(self, message: bytes) -> None:
        self.sent += len(message) + 5
        self.peer.send(message)

    def finish(self, status: Status = Status.OK, details: str = "") -> None:
        self.finished = True
        self.peer.finish(status, details)

    def received(self, message: bytes) -> None:
        assert not self.over, "a message after the end"
        assert len(message) <= LIMITS.message_bytes
        self.got(message)

    def got(self, message: bytes) -> None:
        self.send(message)

    def too_large(self) -> None:
        self._refuse()

    def no_room(self) -> None:
        self._refuse()

    def half_closed(self) -> None:
        assert not self.over, "half-closed after the end"
        self.halved = True
        self.finish()

    def ended(self, ending: Ending) -> None:
        assert not self.endings, f"ended twice: {self.endings}, {ending}"
        assert ending is not Ending.FINISHED or self.finished, "ended as finished, and never was"
        self.endings.append(ending)
        self.peer.send(b"after the end")
        self.peer.finish(Status.INTERNAL, "after the end")

    def _refuse(self) -> None:
        assert not self.over, "refused after the end"
        self.refused = True
        self.finish(Status.RESOURCE_EXHAUSTED, "too much é")


class EarlyCall(EchoCall):
    """Finishes at the first message, and goes on."""

    def got(self, message: bytes) -> None:
        self.send(message)
        self.finish(Status.ABORTED, "enough")
        self.peer.finish(Status.OK)


class DoorCall(EchoCall):
    """Finishes before it is served."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.finish(Status.UNAVAILABLE, "closed")


class FloodCall(EchoCall):
    """Sends more than there is window for."""

    def got(self, message: bytes) -> None:
        for _ in range(3):
            self.send(bytes(FLOOD_BYTES))


class LateCall(EchoCall):
    """Says nothing until it is told to."""

    def got(self, message: bytes) -> None: ...

    def half_closed(self) -> None:
        self.halved = True


CALLS: dict[str, type[EchoCall]] = {
    "/fuzz.Calls/Echo": EchoCall,
    "/fuzz.Calls/Early": EarlyCall,
    "/fuzz.Calls/Door": DoorCall,
    "/fuzz.Calls/Flood": FloodCall,
    "/fuzz.Calls/Late": LateCall,
}

MakeConnection = Callable[..., Connection]


class Rig:
    """One connection and all that is around it. `feed`, `tick` and so on, then `close`."""

    def __init__(self, make: MakeConnection = Connection) -> None:
        self.calls: list[EchoCall] = []
        self.account = Account(HELD_BYTES)
        self.slots = Account(STREAMS)
        self.sent = Sent()
        self.got = Got(self.sent, LIMITS.connection_window_bytes)
        self.now = 1000.0
        self.paused = False
        self.turns = 1
        methods = {path: self._serving(kind) for path, kind in CALLS.items()}
        self.connection = make(
            methods, LIMITS, self.account, self.slots, self.now, told=self._told, flush=lambda: None
        )
        self.settle()

    def feed(self, data: bytes) -> None:
        self.sent.feed(data)
        self.connection.receive(data, self.now)
        self.settle()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.turns += 1
        self.connection.tick(self.now)
        self.settle()

    def drain(self) -> None:
        self.connection.drain()
        self.settle()

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.connection.pause()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.connection.resume()
            self.settle()

    def reply(self, index: int, *, end: bool) -> None:
        """One of the calls, alive or not, has something to say by itself."""
        if not self.calls:
            return
        call = self.calls[index % len(self.calls)]
        call.send(b"late")
        if end:
            call.finish()
        self.settle()

    def settle(self) -> None:
        """Write all that can be written, and see that the connection keeps its promises."""
        if not self.paused or self.connection.over:
            for _ in range(TAKES):
                data = self.connection.take()
                if not data:
                    break
                self.got.feed(data)
            else:
                raise AssertionError("output without end")
        open_calls = sum(not call.endings for call in self.calls)
        assert open_calls <= self.connection.streams, "a call without a stream"
        assert self.connection.streams <= LIMITS.streams, "more streams than there may be"
        assert not (self.connection.over and self.connection.streams), "over, with open streams"
        assert self.slots.highest <= STREAMS
        sent = sum(call.sent for call in self.calls)
        assert self.account.highest <= HELD_BYTES + sent + ANSWER_BYTES, "more held than was taken and sent"
        most = sent + ANSWER_RATIO * self.sent.size + ANSWER_BYTES + self.turns * 100
        assert self.got.size <= most, (
            f"{self.got.size} bytes of output for {self.sent.size} and {sent} of messages"
        )

    def close(self) -> None:
        self.connection.lose()
        self.settle()
        assert all(len(call.endings) == 1 for call in self.calls), "a call that did not end"
        assert self.connection.streams == 0
        assert self.account.held == 0, f"{self.account.held} bytes were never given back"
        assert self.slots.held == 0, f"{self.slots.held} streams were never given back"

    def _serving(self, kind: type[EchoCall]) -> Callable[[Peer], EchoCall]:
        def serve(peer: Peer) -> EchoCall:
            call = kind(peer)
            self.calls.append(call)
            return call

        return serve

    @staticmethod
    def _told(fault: ConnectionFault | StreamFault) -> None:
        assert str(fault)
