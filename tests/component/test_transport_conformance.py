"""The exchange's conformance scripts, played over a real connection against each transport.

Another transport joins by one more entry in TRANSPORTS, and by its own faults in FAULTS.
"""

from collections.abc import Callable
from typing import Any

import pytest

from epp.errors import ProtocolError
from epp.extproc.limits import BodyBudget
from epp.runtime import grpcio as grpcio_module
from epp.runtime import own as own_module
from epp.runtime.grpcio import GrpcioTransport
from epp.runtime.own import OwnTransport
from epp.runtime.stream import Stream
from epp.runtime.transport import MakeStream, StreamCounts
from tests.data.extproc import over_wire, script


def grpcio(make_stream: MakeStream, counts: StreamCounts) -> Any:
    return GrpcioTransport(make_stream, counts, 32 << 20)


def own(make_stream: MakeStream, counts: StreamCounts) -> Any:
    return OwnTransport(make_stream, counts, BodyBudget(1 << 30))


TRANSPORTS = [own, grpcio]
ALL_SCRIPTS = script.load()
SCRIPTS = [played for played in ALL_SCRIPTS if over_wire.playable(played)]
HALF_CLOSABLE = [played for played in SCRIPTS if over_wire.half_closable(played)]


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "late"])
@pytest.mark.parametrize("make", TRANSPORTS)
@pytest.mark.parametrize("played", SCRIPTS, ids=lambda played: played.name)
async def test_script_over_the_wire(played: Any, make: Any, at_once: bool) -> None:
    await over_wire.Player(script, played, make, at_once=at_once).play()


@pytest.mark.parametrize("make", TRANSPORTS)
@pytest.mark.parametrize("played", HALF_CLOSABLE, ids=lambda played: played.name)
async def test_script_whose_proxy_half_closes_where_it_leaves(played: Any, make: Any) -> None:
    await over_wire.Player(script, played, make, at_once=False, half_closes=True).play()


def test_next_to_none_is_left_out() -> None:
    assert len(ALL_SCRIPTS) - len(SCRIPTS) == 2
    assert len(HALF_CLOSABLE) >= 5


# -- faults of a transport that the scripts must see ------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def grpcio_does_not_write_late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpcio_module._Call, "wake", lambda self: None)


def grpcio_lets_messages_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(self: Any) -> None:
        while self.stream.outbox:
            await self._context.write(self.stream.outbox.pop())

    monkeypatch.setattr(grpcio_module._Call, "_write", write)


def grpcio_loses_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(self: Any) -> None:
        while len(self.stream.outbox) > 1:
            await self._context.write(self.stream.outbox.popleft())
        self.stream.outbox.clear()

    monkeypatch.setattr(grpcio_module._Call, "_write", write)


def own_does_not_write_late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module.Process, "_wake", lambda self: None)


def own_does_not_flush_late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module.Process, "_wake", own_module.Process._go_on)


def own_lets_messages_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = own_module.Process._go_on

    def turned_round(self: Any) -> None:
        self._stream.outbox.reverse()
        go_on(self)

    monkeypatch.setattr(own_module.Process, "_go_on", turned_round)


def own_loses_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = own_module.Process._go_on

    def shortened(self: Any) -> None:
        if self._stream.outbox:
            self._stream.outbox.pop()
        go_on(self)

    monkeypatch.setattr(own_module.Process, "_go_on", shortened)


def own_does_not_end_a_finished_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module.Process, "_finish", lambda self, status, details="": None)


def own_does_not_tell_a_stream_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module.Process, "ended", lambda self, ending: self._counts.closed("OK"))


def own_says_nothing_of_what_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module, "failure", lambda error: ("INVALID_ARGUMENT", ""))


def own_drops_the_half_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module.Process, "half_closed", lambda self: None)


def the_stream_does_not_hear_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "closed", lambda self, *, error=False: None)


def an_error_is_taken_for_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Stream.closed
    monkeypatch.setattr(Stream, "closed", lambda self, *, error=False: told(self))


def an_illegal_message_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Stream.received

    def received(self: Stream, message: bytes) -> None:
        try:
            taken(self, message)
        except ProtocolError:
            return

    monkeypatch.setattr(Stream, "received", received)


FAULTS: list[tuple[Any, Plant]] = [
    (grpcio, grpcio_does_not_write_late_results),
    (grpcio, grpcio_lets_messages_overtake),
    (grpcio, grpcio_loses_the_last_message),
    (own, own_does_not_write_late_results),
    (own, own_does_not_flush_late_results),
    (own, own_lets_messages_overtake),
    (own, own_loses_the_last_message),
    (own, own_does_not_end_a_finished_stream),
    (own, own_does_not_tell_a_stream_of_its_end),
    (own, own_says_nothing_of_what_was_wrong),
    *(
        (make, plant)
        for make in TRANSPORTS
        for plant in (
            the_stream_does_not_hear_of_its_end,
            an_error_is_taken_for_a_reset,
            an_illegal_message_is_ignored,
        )
    ),
]


async def seen(make: Any, scripts: list[Any], *, half_closes: bool = False) -> bool:
    """Whether one of the scripts fails."""
    for played in scripts:
        try:
            await over_wire.Player(script, played, make, at_once=False, half_closes=half_closes).play()
        except (AssertionError, TimeoutError):
            return True
    return False


@pytest.mark.parametrize(("make", "plant"), FAULTS)
async def test_a_faulty_transport_is_seen(make: Any, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(over_wire, "DEADLINE_S", 0.5)
    assert await seen(make, SCRIPTS)


async def test_a_half_close_that_is_dropped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own_drops_the_half_close(monkeypatch)
    monkeypatch.setattr(over_wire, "DEADLINE_S", 0.5)
    assert await seen(own, HALF_CLOSABLE, half_closes=True)
