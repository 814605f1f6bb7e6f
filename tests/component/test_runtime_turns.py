"""Placements take turns with what comes over sockets."""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import uvloop

from epp.config.load import load_config
from epp.errors import PayloadTooLarge
from epp.runtime import router as router_module
from epp.runtime import turns as turns_module
from epp.runtime.app import App
from epp.runtime.router import Router
from epp.runtime.stream import Stream
from epp.runtime.turns import SLICE_S, Turns
from tests.data.runtime import picker as runtime

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
PIECES = 6


class Time:
    """A clock that moves when work is done."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# -- the queue --------------------------------------------------------------------------------------


class Conversation(asyncio.Protocol):
    """The first byte brings much work at once; each piece of it makes one more byte arrive."""

    def __init__(self, turns: Turns, time: Time, far: socket.socket, cost_s: float, pieces: int) -> None:
        self.turns = turns
        self.time = time
        self.far = far
        self.cost_s = cost_s
        self.pieces = pieces
        self.heard: list[str] = []
        self.over = asyncio.Event()

    def work(self, number: int) -> None:
        self.time.now += self.cost_s
        self.heard.append(str(number))
        self.far.send(b"x")

    def data_received(self, data: bytes) -> None:
        self.heard.append("read")
        if len(self.heard) == 1:
            for number in range(self.pieces):
                if self.turns.free:
                    self.work(number)
                    self.turns.spent(self.cost_s)
                else:
                    self.turns.wait(lambda number=number: self.work(number))  # type: ignore[misc]
        if sum(entry != "read" for entry in self.heard) == self.pieces:
            self.over.set()


def converse(
    loop: str, cost_s: float, pieces: int = PIECES, make: Callable[[Time], Turns] = Turns
) -> list[str]:
    """What was heard, in order: numbers of the pieces of work, and `read`."""

    async def run() -> list[str]:
        near, far = socket.socketpair()
        time = Time()
        conversation = Conversation(make(time), time, far, cost_s, pieces)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: conversation, sock=near)
        far.send(b"x")
        async with asyncio.timeout(60):
            await conversation.over.wait()
        transport.close()
        far.close()
        assert conversation.turns.waiting == 0
        return conversation.heard

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(run())


def in_turn(pieces: int) -> list[str]:
    return [entry for number in range(pieces) for entry in ("read", str(number))] + ["read"]


@pytest.mark.parametrize("loop", LOOPS)
def test_sockets_are_heard_between_two_pieces_that_fill_a_slice(loop: str) -> None:
    assert converse(loop, SLICE_S) == in_turn(PIECES)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_slice_ends_when_its_time_is_used_up(loop: str) -> None:
    """Of pieces of 0.4 ms three fit: the third begins before the slice has passed."""
    heard = converse(loop, 0.4 * SLICE_S, pieces=9)
    assert heard == ["read", "0", "1", "2", "read", "3", "4", "5", "read", "6", "7", "8", "read"]


@pytest.mark.parametrize("loop", LOOPS)
def test_cheap_work_is_done_in_place(loop: str) -> None:
    assert converse(loop, 0.01 * SLICE_S) == ["read", *map(str, range(PIECES))]


class AtOnce(Turns):
    """The first slice comes in the turn's own call."""

    def _turn(self) -> None:
        self._used_s = 0.0
        self._slice()


class Greedy(Turns):
    """A slice does not look at the clock."""

    def _slice(self) -> None:
        while self._waiting:
            self._waiting.popleft()()
        self._go_on()


class LastFirst(Turns):
    def wait(self, work: Callable[[], None]) -> None:
        self._waiting.appendleft(work)


class Boundless(Turns):
    """The time used in place is not counted."""

    def spent(self, seconds: float) -> None:
        super().spent(0.0)


@pytest.mark.parametrize("fault", [AtOnce, Greedy, LastFirst, Boundless])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_planted_fault_is_noticed(loop: str, fault: type[Turns]) -> None:
    assert converse(loop, SLICE_S, make=fault) != in_turn(PIECES)


async def test_time_used_in_one_turn_is_forgotten_in_the_next() -> None:
    turns = Turns(Time())
    for _ in range(3):
        turns.spent(0.6 * SLICE_S)
        assert turns.free
        turns.spent(0.6 * SLICE_S)
        assert not turns.free
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert turns.free


async def test_who_comes_while_others_wait_joins_the_tail() -> None:
    done: list[int] = []
    turns = Turns(Time())
    turns.spent(SLICE_S)
    turns.wait(lambda: turns.do(lambda: done.append(3)))
    turns.wait(lambda: done.append(1))
    turns.do(lambda: done.append(2))
    assert done == []
    await turn_comes(lambda: len(done) == 3)
    assert done == [1, 2, 3]


async def test_a_fault_in_one_piece_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()

    def fail() -> None:
        raise ValueError("planted")

    turns = Turns(Time())
    turns.spent(SLICE_S)
    turns.wait(fail)
    turns.wait(done.set)
    async with asyncio.timeout(60):
        await done.wait()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_closing_gives_up_what_waits() -> None:
    done: list[int] = []
    turns = Turns(Time())
    turns.spent(SLICE_S)
    turns.wait(lambda: done.append(1))
    turns.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (done, turns.waiting, turns.free) == ([], 0, True)


def test_without_a_loop_it_is_always_free() -> None:
    turns = Turns(Time())
    for _ in range(3):
        turns.spent(SLICE_S)
        assert turns.free


# -- requests ---------------------------------------------------------------------------------------


class Asked:
    """One request with its body, and what came of it."""

    def __init__(self, app: App) -> None:
        self.woken = 0
        self.stream = Stream(*_parts(app), self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def ask(self, body: bytes = b"") -> None:
        for message in (runtime.request_headers(), *runtime.request_body(body or runtime.chat())):
            self.stream.received(message)

    @property
    def kinds(self) -> list[str]:
        return [runtime.kind(message) for message in self.stream.outbox]

    def answer(self) -> None:
        for message in (runtime.response_headers(), runtime.response_body(b"{}")):
            self.stream.received(message)


def _parts(app: App) -> tuple[Any, Any, Callable[[], float]]:
    made = app.stream(lambda: None)
    return made._exchange, app.router, lambda: 100.0


async def asked_long(app: App, turns: int) -> Asked:
    """A request with a long body, so many turns later."""
    asked = Asked(app)
    asked.ask(runtime.chat("x" * 300_000))
    for _ in range(turns):
        await asyncio.sleep(0)
    return asked


PLACED = ["request_headers", "request_body"]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    """Any placement uses up the time of a turn."""
    monkeypatch.setattr(turns_module, "SLICE_S", 1e-12)
    return runtime.picker()


async def turn_comes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for knows of no event
            await asyncio.sleep(0)


async def test_requests_of_one_turn_are_placed_one_after_the_other(app: App) -> None:
    requests = [Asked(app) for _ in range(4)]
    for request in requests:
        request.ask()
    assert [request.kinds for request in requests] == [PLACED, [], [], []]
    seen: list[list[int]] = []
    while not all(request.woken for request in requests[1:]):
        await asyncio.sleep(0)
        seen.append([request.woken for request in requests])
    assert sorted(map(tuple, seen)) == list(map(tuple, seen)), "first come, first served"
    assert [0, 1, 0, 0] in seen
    assert [request.kinds for request in requests] == [PLACED] * 4
    for request in requests:
        request.answer()
        assert request.stream.finished
    assert not any(runtime.left_over(app).values())


async def test_a_refusal_that_waited_for_its_turn(app: App) -> None:
    first, second = Asked(app), Asked(app)
    first.ask()
    second.ask(b"{")
    await turn_comes(lambda: second.woken == 1)
    assert second.kinds == ["immediate_response"]
    assert second.stream.finished


@pytest.mark.parametrize("error", [False, True])
async def test_who_leaves_while_waiting_is_released_once(app: App, error: bool) -> None:
    first, gone, last = Asked(app), Asked(app), Asked(app)
    for request in (first, gone, last):
        request.ask()
    gone.stream.closed(error=error)
    assert gone.stream.finished
    await turn_comes(lambda: last.woken == 1)
    assert gone.kinds == []
    assert app.director.in_flight == app.ledger.total_requests == 2
    for request in (first, last):
        request.answer()
    assert not any(runtime.left_over(app).values())


async def test_who_is_in_the_queue_when_the_picker_ends_holds_nothing(app: App) -> None:
    first, second = Asked(app), Asked(app)
    first.ask()
    second.ask()
    first.stream.closed()
    second.stream.closed()
    app.router.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert second.woken == 0
    assert not any(runtime.left_over(app).values())


OTHER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: max-score-picker}]
"""

# -- long bodies ------------------------------------------------------------------------------------


async def check_a_long_body(app: App, monkeypatch: pytest.MonkeyPatch, size: int, *, apart: bool) -> None:
    """What is done with it, and the turns of the loop between."""
    order: list[str] = []

    def told(owner: Any, name: str, step: str) -> None:
        right = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            order.append(step)
            return right(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapped)

    async def tick() -> None:
        while True:
            order.append("turn")
            await asyncio.sleep(0)

    told(router_module, "is_large", "look")
    told(app.director, "prepare", "read")
    told(app.director, "submit", "place")
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    order.clear()
    asked = Asked(app)
    asked.ask(runtime.chat("x" * size))
    assert order == ([] if apart else ["look", "read", "place"])
    await turn_comes(lambda: "place" in order)
    ticking.cancel()
    assert [step for step in order if step != "turn"] == ["look", "read", "place"]
    if apart:
        at = [order.index(step) for step in ("look", "read", "place")]
        assert all("turn" in order[one:other] for one, other in zip([0, *at], at, strict=False))
    assert asked.kinds[:2] == PLACED
    asked.answer()
    assert not any(runtime.left_over(app).values())


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
@pytest.mark.parametrize(("size", "apart"), [(100, False), (300_000, True), (1_900_000, True)])
async def test_a_long_body_is_looked_at_read_and_placed_in_turns(
    size: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "SLICE_S", 1e-12)
    await check_a_long_body(runtime.picker(), monkeypatch, size, apart=apart)


async def test_a_long_body_that_cannot_be_read_is_refused(app: App) -> None:
    asked = Asked(app)
    asked.ask(b"x" * 300_000)
    await turn_comes(lambda: asked.woken == 1)
    assert asked.kinds == ["immediate_response"]
    assert not any(runtime.left_over(app).values())


def broken(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("step", ["is_large", "prepare", "traffic", "submit"])
async def test_whatever_breaks_in_a_later_turn_the_client_is_answered(
    step: str, size: int, app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, asked = Asked(app), Asked(app)
    first.ask()
    owner, name = {
        "is_large": (router_module, "is_large"),
        "prepare": (app.director, "prepare"),
        "traffic": (app.router, "_traffic"),
        "submit": (app.director, "submit"),
    }[step]
    monkeypatch.setattr(owner, name, broken)
    asked.ask(runtime.chat("x" * size))
    await turn_comes(lambda: asked.woken == 1)
    assert [runtime.refusal(message)[0] for message in asked.stream.outbox] == [500]
    assert asked.stream.finished
    (said,) = [record for record in caplog.records if record.message == "request failed"]
    assert vars(said)["path"] == "/v1/chat/completions"
    first.answer()
    assert not any(runtime.left_over(app).values())


@pytest.mark.parametrize("turns", range(6))
async def test_who_leaves_between_the_turns_of_a_long_body_leaves_nothing(app: App, turns: int) -> None:
    asked = await asked_long(app, turns)
    asked.stream.closed(error=True)
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked.stream.finished
    assert app.router._gone == set()
    assert not any(runtime.left_over(app).values())


@pytest.mark.parametrize("turns", range(6))
async def test_who_is_refused_between_the_turns_of_a_long_body_leaves_nothing(app: App, turns: int) -> None:
    """The transport had to, for a message that came meanwhile."""
    asked = await asked_long(app, turns)
    asked.stream.refuse(PayloadTooLarge("larger than messages may be"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked.stream.finished
    assert asked.kinds[-1] == "immediate_response"
    assert not any(runtime.left_over(app).values())


@pytest.mark.parametrize("turns", range(6))
async def test_a_configuration_that_comes_between_the_turns_of_a_long_body(app: App, turns: int) -> None:
    """What comes after it goes by the new one, and the one before is let go of."""
    asked = await asked_long(app, turns)
    placed = app.director.in_flight
    before = app.running.plugins
    app.use(load_config(OTHER, "config.yaml"))
    await turn_comes(lambda: asked.woken == 1)
    assert app.director.follows(before) == bool(placed)
    assert app.director.follows(app.running.plugins) != bool(placed)
    asked.answer()
    app.running.release(app.director)
    assert app.running._retired == []
    assert not any(runtime.left_over(app).values())


async def test_those_with_long_bodies_keep_their_order_and_let_short_ones_by(app: App) -> None:
    first = Asked(app)
    first.ask()
    long = [Asked(app) for _ in range(3)]
    for request in long:
        request.ask(runtime.chat("x" * 300_000))
    short = Asked(app)
    short.ask()
    order: list[int] = []
    waiting = [*long, short]
    while len(order) < len(waiting):
        await asyncio.sleep(0)
        order += [number for number, one in enumerate(waiting) if one.woken and number not in order]
    assert order == [3, 0, 1, 2]


def looks_and_reads(router: Router, raw: Any, received_at: float, deliver: Any) -> Any:
    router_module.is_large(raw, router._director.plugins.parsers)
    return router._routed(raw, partial(router._director.prepare, raw, received_at), deliver)


def at_once(router: Router, raw: Any, deliver: Any) -> Any:
    return router._route(raw, router._clock(), deliver)


class InPlace(Turns):
    def wait(self, work: Callable[[], None]) -> None:
        work()


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Router, "_route", looks_and_reads),
        (Router, "route", at_once),
        (router_module, "Turns", InPlace),
        (router_module, "LONG_BODY_BYTES", 1 << 30),
    ],
)
async def test_a_long_body_in_too_few_turns_is_noticed(
    owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "SLICE_S", 1e-12)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        await check_a_long_body(runtime.picker(), monkeypatch, 300_000, apart=True)
