"""Plays the conformance scripts against a transport over a real connection, and moves messages by hand.

A transport is made from a maker of streams and `StreamCounts`. The proxy's side is grpcio's client, whatever
the server is.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import grpc
import grpc.aio

from epp import names
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget
from epp.extproc.records import Observe, Refused, Routed
from epp.payload.records import RawRequest
from epp.runtime.stream import Deliver, Stream
from epp.runtime.transport import MakeStream, StreamCounts, Transport
from epp.scheduling.records import AnswerFact, AnswerHeaders, Completed, Edits, Ended, Metadata, TicketId
from tests.data.grpc.channels import ALONE

DEADLINE_S = 60.0
GARBAGE = b"\xff\xff"


MakeTransport = Callable[[MakeStream, StreamCounts], Transport]


@asynccontextmanager
async def listening(transport: Transport) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a started transport."""
    port = await transport.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", ALONE) as channel:
            yield channel
    finally:
        await transport.stop()


def process(channel: grpc.aio.Channel) -> Any:
    """One ext-proc call whose messages are bytes."""
    return channel.stream_stream(names.EXT_PROC_METHOD)()


async def read(call: Any) -> bytes | None:
    """The next message; None at the end, however it came."""
    task = asyncio.current_task()
    assert task is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            message = await call.read()
    except grpc.aio.AioRpcError:
        return None
    except asyncio.CancelledError:
        if task.cancelling():
            raise
        return None  # it was the call, not who reads
    return None if message is grpc.aio.EOF else bytes(message)


def faults(records: Iterable[logging.LogRecord]) -> list[logging.LogRecord]:
    """The errors among what was logged."""
    return [record for record in records if record.levelno >= logging.ERROR]


class Counts:
    """How streams ended."""

    def __init__(self) -> None:
        self.open = 0
        self.codes: Counter[str] = Counter()
        self.dropped = 0

    def hooks(self) -> StreamCounts:
        return StreamCounts(self._opened, self._closed, self._dropped)

    def _opened(self) -> None:
        self.open += 1

    def _closed(self, code: str) -> None:
        self.open -= 1
        self.codes[code] += 1

    def _dropped(self, count: int) -> None:
        self.dropped += count


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for another task's work."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - what is waited for knows of no event
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}") from None


class _Watched(Stream):
    """Says how many messages it has dealt with."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.taken = 0
        self.ended = False

    def received(self, message: bytes) -> None:
        try:
            super().received(message)
        finally:
            self.taken += 1

    def closed(self, *, error: bool = False) -> None:
        super().closed(error=error)
        self.ended = True


class ScriptRouter:
    """A router that decides and edits as the script says. `ready`: what it answers at once when asked."""

    def __init__(self) -> None:
        self.ready: Routed | Refused | None = None
        self.told: Routed | Refused | None = None
        self.edits: Edits = ()
        self.metadata: Metadata = ()
        self.deliver: Deliver | None = None
        self.asked: list[RawRequest] = []
        self.facts: list[AnswerFact | Completed] = []
        self.tickets: list[TicketId] = []
        self.placed = 0

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        self.asked.append(raw)
        outcome = self.told = self.ready
        if outcome is None:
            self.deliver = deliver
        else:
            self._count(outcome)
        return outcome

    def gone(self, raw: RawRequest) -> None:
        assert raw in self.asked

    def decide(self, outcome: Routed | Refused) -> None:
        """Later, while the transport waits. A router answers once; what is decided again is left out."""
        if outcome is not self.told and self.deliver is not None:
            deliver, self.deliver = self.deliver, None
            self._count(outcome)
            deliver(outcome)

    def _count(self, outcome: Routed | Refused) -> None:
        self.placed += isinstance(outcome, Routed)

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        self.tickets.append(ticket)
        self.facts.append(fact)
        return self.edits if isinstance(fact, AnswerHeaders) else ()

    def report(self, ticket: TicketId, completed: Completed) -> Metadata:
        self.tickets.append(ticket)
        self.facts.append(completed)
        return self.metadata

    @property
    def ended(self) -> int:
        return sum(isinstance(fact, Ended) for fact in self.facts)


def playable(played: Any) -> bool:
    """Whether a transport can show it: a router lets neither an answer's headers nor its end wait."""
    steps = list(zip(played.steps, played.steps[1:], strict=False))
    left_waiting = [one for one, after in steps if after.kind == "cancel" and one.kind == "in"]
    asked = [effect.get("observe") for one in left_waiting for effect in one.out]
    return "completed" not in asked and ("cancel", "edit") not in [(a.kind, b.kind) for a, b in steps]


def half_closable(played: Any) -> bool:
    """Whether its proxy leaves while it awaits nothing. What it awaits it still gets, having half-closed."""
    kinds = [step.kind for step in played.steps]
    leaves = [
        index for index, step in enumerate(played.steps) if step.kind == "cancel" and not step.event.error
    ]
    return bool(leaves) and "decide" not in kinds[leaves[0] :]


class Player:
    """One script on one connection.

    `at_once`: the router answers as soon as it is asked, where it can. `half_closes`: a proxy that leaves
    ends its own side only, where the scripts have it reset the stream.
    """

    def __init__(
        self, script: Any, played: Any, make: MakeTransport, *, at_once: bool, half_closes: bool = False
    ) -> None:
        self.script = script
        self.played = played
        self.at_once = at_once
        self.half_closes = half_closes
        self.router = ScriptRouter()
        self.budget = BodyBudget(played.limits.held_bytes)
        self.counts = Counts()
        self.now = 0.0
        self.streams: list[_Watched] = []
        self.replies: list[dict[str, Any]] = []
        self._made = count(1)
        self.transport = make(self._stream, self.counts.hooks())

    def _stream(self, wake: Callable[[], None]) -> Stream:
        made_id = lambda: f"made-{next(self._made)}"  # noqa: E731
        exchange = Exchange(self.budget, self.played.limits, made_id, reports=self.played.reports)
        stream = _Watched(exchange, self.router, lambda: self.now, wake)
        self.streams.append(stream)
        return stream

    async def play(self) -> None:
        async with listening(self.transport) as channel:
            call = process(channel)
            await call.wait_for_connection()
            reading = asyncio.create_task(self._collect(call))
            sent = 0
            expected: list[Any] = []
            refused = None
            await until(lambda: bool(self.streams), "a stream")
            for index, step in enumerate(self.played.steps):
                self.now = step.event.at
                if step.kind in {"in", "illegal"} and not self.streams[0].finished:
                    self._prepare(index)
                    await call.write(self.script.to_wire(step.event))
                    sent += 1
                    await self._dealt_with(sent)
                if step.kind == "illegal":
                    refused = step.out
                elif step.kind == "decide":
                    self.router.decide(step.event)
                elif step.kind == "cancel" and refused is None:
                    await self._cancel(call, step.event.error)
                if step.kind != "illegal":
                    expected += step.out
                    await self._arrived(expected)
            await self._close(call, reading, expected, refused)

    def _prepare(self, index: int) -> None:
        """Let the router know what follows this message, as far as nothing comes between."""
        later = self.played.steps[index + 1 :]
        decides = self.at_once and bool(later) and later[0].kind == "decide"
        self.router.ready = later[0].event if decides else None
        self.router.edits = self.router.metadata = ()
        edits = [step.event for step in later if step.kind == "edit"]
        if edits:
            self.router.edits = edits[0].set_headers
            self.router.metadata = next((edit.metadata for edit in edits if edit.metadata), ())

    async def _dealt_with(self, sent: int) -> None:
        stream = self.streams[0]
        await until(lambda: stream.taken >= sent or stream.finished or stream.ended, "the message is taken")

    async def _arrived(self, expected: list[Any]) -> None:
        wanted = len(self._replies_among(expected))
        await until(lambda: len(self.replies) >= wanted, f"{wanted} replies")

    def _replies_among(self, effects: list[Any]) -> list[Any]:
        return [effect for effect in effects if any(kind in effect for kind in self.script.REPLIES)]

    async def _collect(self, call: Any) -> None:
        while (message := await read(call)) is not None:
            self.replies.append(self.script.show_wire(message))

    async def _cancel(self, call: Any, error: bool) -> None:
        if self.streams[0].finished:
            return
        if error:
            await call.write(GARBAGE)
        elif self.half_closes:
            await call.done_writing()
        else:
            call.cancel()
        await until(lambda: self.streams[0].ended, "the stream hears of its end")

    async def _close(self, call: Any, reading: Any, expected: list[Any], refused: str | None) -> None:
        stream = self.streams[0]
        if stream.finished or refused is not None:
            async with asyncio.timeout(DEADLINE_S):
                await reading
        call.cancel()
        await reading
        await until(lambda: self.counts.open == 0, "the stream is over")
        replies = self._replies_among(expected)
        assert self.script.matches(replies, self.replies), f"wanted {replies}\ngot    {self.replies}"
        facts = [effect for effect in expected if "observe" in effect]
        told = [
            self.script.show(Observe(ticket, fact))
            for ticket, fact in zip(self.router.tickets, self.router.facts, strict=True)
        ]
        assert self.script.matches(facts, told[: len(facts)]), f"wanted {facts}\ngot    {told}"
        # A script may stop in the middle; what is told then is that the stream was closed.
        assert all(one["observe"] == "ended" for one in told[len(facts) :])
        routes = [effect for effect in expected if "route" in effect]
        asked = [self.script.show(self.script.Route(raw)) for raw in self.router.asked]
        assert self.script.matches(routes, asked), f"wanted {routes}\ngot    {asked}"
        assert self.router.ended == self.router.placed
        assert self.budget.used == 0
        if refused is not None:
            assert self.counts.codes == {"INVALID_ARGUMENT": 1}
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused in await call.details()
