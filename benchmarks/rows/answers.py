"""A request and its answer through exchange, codec and everything else but the transport."""

import gc
import time
import uuid

from benchmarks.rows import picker, traffic
from benchmarks.rows.timing import Effort, Result, cpu_us
from epp.director import Edits
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import Routed
from epp.payload.records import Api, RawRequest
from epp.runtime.app import App
from epp.runtime.stream import Deliver, Stream
from epp.scheduling.records import AnswerFact, Placement, TicketId

OTHER_BATCH = 20
SSE = "text/event-stream; charset=utf-8"
JSON = "application/json"


class _Placed:
    """Routes that place everything at once, and hear nothing."""

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed:
        return Routed(0.0, _placement(), Api.CHAT, traffic.MODEL, traffic.MODEL)

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        return ()


def answer_chunk(effort: Effort) -> list[Result]:
    """One chunk in the middle of a streamed chat, about 260 bytes: `Stream.received`, up to the reply."""
    exchange = Exchange(BodyBudget(1 << 30), Limits(), lambda: "made")
    stream = Stream(exchange, _Placed(), lambda: 0.5, lambda: None)
    opening, *chunks, _ = traffic.answer_messages(traffic.sse_chunks(), "10.0.0.1:8000", SSE)
    for message in (*traffic.request_messages(next(traffic.Chats(1000, seed=21)), 1), opening, *chunks[:3]):
        stream.received(message)
    middle = chunks[3:-3]

    def passing() -> None:
        for message in middle:
            stream.received(message)
        stream.outbox.clear()

    samples = cpu_us(passing, effort, per=len(middle), inner=max(1, effort.inner // 10))
    return [Result("one streamed answer chunk in exchange and codec", "us", 4.0, samples)]


def _placement() -> Placement:
    director, _, _ = picker.director(1)
    prepared = director.prepare(traffic.raw_request(next(traffic.Chats(1000, seed=20)), 1), 0.0)
    return picker.placed(director.submit(prepared, 0.0))


class _Streams:
    """Requests of one form, each over a stream of its own; made and dropped between measurements."""

    def __init__(self, app: App, chunks: list[bytes], content_type: str, count: int) -> None:
        self._app = app
        self._chats = traffic.Chats(1000, seed=22)
        self._chunks, self._content_type, self._count = chunks, content_type, count
        self._number = 0
        self.renew()

    def renew(self) -> None:
        self._waiting = []
        answers = {
            endpoint.host_port: traffic.answer_messages(self._chunks, endpoint.host_port, self._content_type)
            for _, endpoint in self._app.store.roster
        }
        for _ in range(self._count):
            self._number += 1
            self._waiting.append(traffic.request_messages(next(self._chats), self._number))
        self._answers = answers

    def run(self) -> None:
        """Every message in, every reply out. The proxy half-closes nothing: it resets when all is through."""
        app, clock = self._app, time.monotonic
        for request in self._waiting:
            exchange = Exchange(app.budget, app.limits, lambda: str(uuid.uuid4()))
            stream = Stream(exchange, app.router, clock, lambda: None)
            for message in request:
                stream.received(message)
            reply = stream.outbox.popleft()
            stream.outbox.clear()
            for message in self._answers[_destination(reply)]:
                stream.received(message)
                while stream.outbox:
                    stream.outbox.popleft()
            assert stream.finished


def _destination(reply: bytes) -> str:
    """The `address:port` in a reply to request headers: the last value in it, written as metadata."""
    return reply[reply.rindex(b"\x1a") + 2 :].decode()


def whole_request(effort: Effort) -> list[Result]:
    """A 1 kB request with a plain answer: everything `warmroute serve` does but the transport."""
    return [
        Result(
            "1 kB request, plain answer, everything",
            "us",
            350.0,
            _measured(effort, [traffic.plain_answer()], JSON),
            apart="without transport",
        )
    ]


def streamed_chat(effort: Effort) -> list[Result]:
    """The same with a streamed answer of 100 chunks."""
    samples = _measured(effort, traffic.sse_chunks(), SSE)
    return [
        Result(
            "one streamed chat of 100 chunks, everything",
            "ms",
            1.6,
            tuple(sample / 1000 for sample in samples),
            apart="without transport",
        )
    ]


def _measured(effort: Effort, chunks: list[bytes], content_type: str) -> tuple[float, ...]:
    count = min(OTHER_BATCH, effort.inner)
    streams = _Streams(picker.app(32), chunks, content_type, count)
    gc.collect()
    return cpu_us(streams.run, effort, per=count, inner=1, between=streams.renew)
