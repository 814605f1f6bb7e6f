"""A million ext-proc streams over one connection without sockets, ended in every way: nothing may stay.

    python -m benchmarks.churn [--streams N] [--seed N] [--json FILE]

The picker is the whole one, put together as `warmroute serve` does it, and the client speaks bytes. What
comes back on each stream is checked. From the moment when every table and cache is full, memory and the
number of objects stay what they are. Exits with 1 where anything is left over. The connection's clock is
simulated.
"""

import gc
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import click

from benchmarks.rows import picker
from benchmarks.rows.answers import SSE
from benchmarks.rows.machine import resident_mib
from benchmarks.rows.traffic import Chats, answer_messages, request_messages, sse_chunks
from epp import names
from epp.http2.codes import END_HEADERS, END_STREAM, PREFACE, ErrorCode, FrameType, Setting, Status
from epp.http2.connection import Connection
from epp.http2.frames import SETTINGS_ACK, frame, rst_stream, settings, window_update
from epp.http2.limits import Http2Limits
from epp.http2.rates import Quota
from epp.runtime.own import OwnTransport

ENDPOINTS = 8
BODIES = 40
BODY_BYTES = 700
CHUNKS = 6
BATCH = 100
BATCH_S = 0.6
UNREAD = 20
TIMEOUT_BATCHES = 4
WARM_STREAMS = 12_000
"""The connection remembers as many as may be open; the other tables are full long before."""
GROWTH_MIB = 4.0
GROWTH_OBJECTS = 3_000
WINDOW_BYTES = 1 << 20


class Way(StrEnum):
    """What a stream is, and how it ends."""

    WHOLE = "whole"
    OPENED = "opened and reset"
    HEADERS = "reset before its body"
    PLACED = "reset before its answer"
    ANSWERED = "reset within its answer"
    LEFT = "ended and reset within its answer"
    HALF_CLOSED = "half-closed"
    HALF_MESSAGE = "ended within a message"
    HALF_RESET = "reset within a message"
    GARBAGE = "a message that is none"
    UNKNOWN = "unknown method"
    PLAIN = "no call of gRPC"
    FAULT = "frame that is not allowed"
    LATE = "beyond its deadline"
    UNREAD = "replies unread, then reset"


SHARES = {
    Way.WHOLE: 25,
    Way.OPENED: 10,
    Way.HEADERS: 10,
    Way.PLACED: 12,
    Way.ANSWERED: 8,
    Way.LEFT: 8,
    Way.HALF_CLOSED: 6,
    Way.HALF_MESSAGE: 4,
    Way.HALF_RESET: 4,
    Way.GARBAGE: 4,
    Way.UNKNOWN: 3,
    Way.PLAIN: 3,
    Way.FAULT: 1,
    Way.LATE: 2,
}
"""Of those that come in batches. FAULT and early resets stay within the rates that are granted."""

STATUSES = {
    Way.WHOLE: Status.OK,
    Way.HALF_CLOSED: Status.OK,
    Way.HALF_MESSAGE: Status.INTERNAL,
    Way.GARBAGE: Status.INVALID_ARGUMENT,
    Way.UNKNOWN: Status.UNIMPLEMENTED,
    Way.LATE: Status.DEADLINE_EXCEEDED,
}


@dataclass
class Reply:
    """What came back on one stream."""

    messages: int = 0
    status: int | None = None
    ended: bool = False
    reset: int | None = None


@dataclass
class Report:
    """What was done, and what was left of it.

    Attributes:
        ways: how many streams of each way.
        wrong: streams that did not get what they should, the first few.
        left: what should be 0, and is not.
        resident_mib, objects: once warm, and at the end.
        fault: what the connection ended by.
    """

    streams: int
    seed: int
    ways: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    resident_mib: list[float] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    fault: str = ""
    seconds: float = 0.0

    def problems(self) -> Iterator[str]:
        """None where all is well."""
        if self.fault:
            yield f"the connection has ended: {self.fault}"
        yield from self.wrong
        for name, value in self.left.items():
            if value:
                yield f"{name} is still {value:g}"
        if self.ways.total() < self.streams:
            yield f"{self.streams - self.ways.total()} streams were not played"
        if len(self.objects) == 2 and self.objects[1] > self.objects[0] + GROWTH_OBJECTS:
            yield f"from {self.objects[0]} objects to {self.objects[1]}"
        if len(self.resident_mib) == 2 and self.resident_mib[1] > self.resident_mib[0] + GROWTH_MIB:
            yield f"from {self.resident_mib[0]:.1f} MiB to {self.resident_mib[1]:.1f} MiB"


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def _block(**changed: str) -> bytes:
    """Request headers as literals that add nothing to the header table (RFC 7541, 6.2.2)."""
    fields = {"method": "POST", "scheme": "http", "path": names.EXT_PROC_METHOD, "authority": "picker"}
    fields["content-type"] = "application/grpc"
    pairs = {**fields, **{name.replace("_", "-"): value for name, value in changed.items()}}
    pseudo = {"method", "scheme", "path", "authority"}
    return b"".join(
        b"\0" + _text(f":{name}" if name in pseudo else name) + _text(value) for name, value in pairs.items()
    )


BLOCK = _block()
BLOCKS = {
    Way.UNKNOWN: _block(path="/envoy.service.ext_proc.v3.ExternalProcessor/Sing"),
    Way.PLAIN: _block(method="GET"),
    Way.LATE: _block(grpc_timeout="1S"),
}


class Client:
    """The proxy's side of one connection. Does what it wants, and reads what comes."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._bodies = [request_messages(body, at) for at, body in zip(range(BODIES), Chats(BODY_BYTES, 3))]  # noqa: B905
        served = picker.endpoints(1)[0].host_port
        self._answer = answer_messages(sse_chunks(CHUNKS), served, SSE)
        self.replies: dict[int, Reply] = {}
        self.unreturned = 0

    def opening(self, stream_id: int, way: Way) -> bytes:
        block = BLOCKS.get(way, BLOCK)
        if way not in BLOCKS and self._draw.random() < 0.3:  # a new field each time, kept in the header table
            block += b"\x40" + _text("traceparent") + _text(f"00-{self._draw.getrandbits(128):032x}-01")
        flags = END_HEADERS | (END_STREAM if way is Way.PLAIN else 0)
        return frame(FrameType.HEADERS, flags, stream_id, block)

    def messages(self, way: Way) -> list[bytes]:
        """Those that are said before the stream is ended."""
        request = self._draw.choice(self._bodies)
        match way:
            case Way.WHOLE:
                return request + self._answer
            case Way.ANSWERED | Way.LEFT:
                return request + self._answer[: self._draw.randint(1, len(self._answer) - 1)]
            case Way.PLACED | Way.UNREAD:
                return request
            case Way.HEADERS | Way.HALF_CLOSED | Way.HALF_MESSAGE | Way.HALF_RESET | Way.LATE:
                return request[:1]
            case Way.GARBAGE:
                return [request[0], b"\xff\xff\xff"]
            case _:
                return []

    def said(self, stream_id: int, way: Way) -> bytes:
        """All that precedes the end."""
        parts = [self.opening(stream_id, way)]
        parts += [
            frame(FrameType.DATA, 0, stream_id, struct.pack(">BI", 0, len(message)) + message)
            for message in self.messages(way)
        ]
        if way in (Way.HALF_MESSAGE, Way.HALF_RESET):
            parts.append(frame(FrameType.DATA, 0, stream_id, struct.pack(">BI", 0, 5000) + bytes(3000)))
        return b"".join(parts)

    def ending(self, stream_id: int, way: Way) -> bytes:
        match way:
            case Way.HALF_CLOSED | Way.HALF_MESSAGE:
                return frame(FrameType.DATA, END_STREAM, stream_id)
            case Way.LEFT:
                end = frame(FrameType.DATA, END_STREAM, stream_id)
                return end + rst_stream(stream_id, ErrorCode.INTERNAL_ERROR)
            case Way.FAULT:
                return window_update(stream_id, 0)
            case Way.PLAIN | Way.LATE:
                return b""
            case _:
                return rst_stream(stream_id, ErrorCode.INTERNAL_ERROR)

    def read(self, written: bytes) -> None:
        at = 0
        while at < len(written):
            word, flags, stream_id = struct.unpack_from(">IBI", written, at)
            at, kind, size = at + 9, word & 0xFF, word >> 8
            reply = self.replies.get(stream_id)
            if reply is not None:
                self._note(reply, kind, flags, written[at : at + size])
            at += size

    def _note(self, reply: Reply, kind: int, flags: int, payload: bytes) -> None:
        if kind == FrameType.DATA:
            self.unreturned += len(payload)
            reply.messages += 1
        elif kind == FrameType.HEADERS:
            name, _, rest = payload.partition(b"grpc-status")
            if rest:
                reply.status = int(rest[1 : 1 + rest[0]])
        elif kind == FrameType.RST_STREAM:
            reply.reset = int.from_bytes(payload)
        reply.ended |= kind <= FrameType.HEADERS and bool(flags & END_STREAM)

    def returned(self) -> bytes:
        """The connection's window, for what was read."""
        size, self.unreturned = self.unreturned, 0
        return window_update(0, size) if size else b""


def is_right(way: Way, reply: Reply) -> bool:
    """Whether a stream has got what it should when it is over."""
    if way in STATUSES:
        replied = reply.messages > 0 if way is Way.WHOLE else True
        return replied and reply.ended and reply.status == STATUSES[way]
    match way:
        case Way.PLAIN:
            return reply.ended and reply.messages == 1 and reply.reset is None
        case Way.FAULT:
            return reply.reset == ErrorCode.PROTOCOL_ERROR
        case Way.PLACED | Way.ANSWERED:
            return reply.messages > 0 and not reply.ended and reply.reset is None
        case Way.LEFT:
            return reply.messages > 0 and reply.reset is None
        case _:
            return reply == Reply()


class Churn:
    """One picker, one connection, one client."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._draw = random.Random(report.seed)
        self.app = picker.app(ENDPOINTS)
        self.app.ledger.strict = True
        transport = OwnTransport(self.app.stream, self.app.stream_counts(), self.app.budget)
        self._slots = Quota(100_000)
        self._now = 0.0
        self._connection = Connection(
            {names.EXT_PROC_METHOD: transport._process},
            Http2Limits(keepalive_s=0.0),
            self.app.budget,
            self._slots,
            self._now,
        )
        self._client = Client(self._draw)
        self._next_id = 1
        self._late: list[list[int]] = []
        self._say(PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES}) + SETTINGS_ACK)
        self._say(window_update(0, 16 * WINDOW_BYTES))

    def run(self) -> None:
        report, begun = self.report, time.perf_counter()
        batches = 0
        while report.ways.total() < report.streams and not self._connection.over:
            self._batch()
            batches += 1
            if batches % 10 == 0:
                self._unread()
            if not report.objects and report.ways.total() >= max(WARM_STREAMS, report.streams // 10):
                self._weigh()
        self._now += 2.0
        for _ in range(TIMEOUT_BATCHES):
            self._end_late()
        self._weigh()
        report.seconds = time.perf_counter() - begun
        report.fault = str(self._connection.fault or "")
        report.left = self.left()

    def left(self) -> dict[str, float]:
        """What is 0 when all is over."""
        app = self.app
        return {
            "streams": self._connection.streams,
            "streams of the process": self._slots.used,
            "held bytes": app.budget.used,
            "tickets": app.director.in_flight,
            "requests in flight": app.ledger.total_requests,
            "tokens in flight": app.ledger.total_prefill_tokens,
            "overdrafts": app.ledger.overdrafts,
        }

    def _batch(self) -> None:
        """A hundred streams at a time, interleaved; most end at once, some at their deadline."""
        ways = self._draw.choices(list(SHARES), list(SHARES.values()), k=BATCH)
        streams = list(zip(self._ids(BATCH), ways, strict=True))
        self._say(b"".join(self._client.said(*stream) for stream in streams))
        self._draw.shuffle(streams)
        self._say(b"".join(self._client.ending(*stream) for stream in streams))
        self._late.append([stream_id for stream_id, way in streams if way is Way.LATE])
        for stream_id, way in streams:
            if way is not Way.LATE:
                self._over(stream_id, way)
        self._now += BATCH_S
        self._connection.tick(self._now)
        self._say(self._client.returned())
        if len(self._late) > TIMEOUT_BATCHES:
            self._end_late()

    def _end_late(self) -> None:
        self._connection.tick(self._now)
        self._say(b"")
        for stream_id in self._late.pop(0) if self._late else ():
            self._over(stream_id, Way.LATE)

    def _unread(self) -> None:
        """Streams whose windows are closed: what is for them waits, until they are reset."""
        ids = self._ids(UNREAD)
        self._say(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
        self._say(b"".join(self._client.said(stream_id, Way.UNREAD) for stream_id in ids))
        if self.app.budget.used < UNREAD * 100:
            self.report.wrong.append(
                f"{self.app.budget.used} bytes held for {UNREAD} streams with unread replies"
            )
        self._say(b"".join(self._client.ending(stream_id, Way.UNREAD) for stream_id in ids))
        self._say(settings({Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES}))
        for stream_id in ids:
            self._over(stream_id, Way.UNREAD)

    def _ids(self, count: int) -> range:
        ids = range(self._next_id, self._next_id + 2 * count, 2)
        self._next_id = ids.stop
        self._client.replies.update((stream_id, Reply()) for stream_id in ids)
        return ids

    def _say(self, said: bytes) -> None:
        self._connection.receive(said, self._now)
        while written := self._connection.take():
            self._client.read(written)

    def _over(self, stream_id: int, way: Way) -> None:
        reply = self._client.replies.pop(stream_id)
        self.report.ways[way] += 1
        if not is_right(way, reply) and len(self.report.wrong) < 10:
            self.report.wrong.append(f"stream {stream_id} ({way}): {reply}")

    def _weigh(self) -> None:
        gc.collect()
        self.report.objects.append(len(gc.get_objects()))
        self.report.resident_mib.append(resident_mib())


def run(streams: int, seed: int) -> Report:
    report = Report(streams, seed)
    Churn(report).run()
    return report


@click.command()
@click.option("--streams", default=1_000_000, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures.")
def main(streams: int, seed: int, file: Path | None) -> None:
    """Churn through streams, and say what they left behind."""
    report = run(streams, seed)
    played = report.ways.total()
    print(
        f"{played} streams in {report.seconds:.1f} s,"
        f" {played / report.seconds:,.0f} a second with the client's own work"
    )
    print("they were:", ", ".join(f"{way} {count}" for way, count in sorted(report.ways.items())))
    print("objects once warm and at the end:", report.objects)
    print("resident once warm and at the end, MiB:", [round(size, 1) for size in report.resident_mib])
    if file is not None:
        file.write_text(json.dumps(vars(report), indent=1) + "\n")
    problems = list(report.problems())
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
