"""The exchange's conformance scripts, played over a real connection against the transport over grpcio.

Another transport joins by one more entry in TRANSPORTS.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from epp.runtime import grpcio as grpcio_module
from epp.runtime.grpcio import GrpcioTransport, MakeStream, StreamCounts
from epp.runtime.stream import Stream

DATA = Path(__file__).parents[1] / "data" / "extproc"


def _module(name: str, file: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, DATA / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


script = _module("extproc_script", "script.py")
over_wire = _module("extproc_over_wire", "over_wire.py")


def grpcio(make_stream: MakeStream, counts: StreamCounts) -> Any:
    return GrpcioTransport(make_stream, counts, 32 << 20)


TRANSPORTS = [grpcio]
ALL_SCRIPTS = script.load()
SCRIPTS = [played for played in ALL_SCRIPTS if over_wire.playable(played)]


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "late"])
@pytest.mark.parametrize("make", TRANSPORTS)
@pytest.mark.parametrize("played", SCRIPTS, ids=lambda played: played.name)
async def test_script_over_the_wire(played: Any, make: Any, at_once: bool) -> None:
    await over_wire.Player(script, played, make, at_once=at_once).play()


def test_next_to_none_is_left_out() -> None:
    assert len(ALL_SCRIPTS) - len(SCRIPTS) == 1


# -- faults of a transport that the scripts must see ------------------------------------------------


def late_results_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpcio_module._Call, "wake", lambda self: None)


def messages_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(self: Any) -> None:
        while self.stream.outbox:
            await self._context.write(self.stream.outbox.pop())

    monkeypatch.setattr(grpcio_module._Call, "_write", write)


def the_last_message_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(self: Any) -> None:
        while len(self.stream.outbox) > 1:
            await self._context.write(self.stream.outbox.popleft())
        self.stream.outbox.clear()

    monkeypatch.setattr(grpcio_module._Call, "_write", write)


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
        except grpcio_module.ProtocolError:
            return

    monkeypatch.setattr(Stream, "received", received)


@pytest.mark.parametrize(
    "plant",
    [
        late_results_are_not_written,
        messages_overtake,
        the_last_message_is_lost,
        the_stream_does_not_hear_of_its_end,
        an_error_is_taken_for_a_reset,
        an_illegal_message_is_ignored,
    ],
)
async def test_a_faulty_transport_is_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(over_wire, "DEADLINE_S", 0.5)
    seen = 0
    for played in SCRIPTS:
        try:
            await over_wire.Player(script, played, grpcio, at_once=False).play()
        except (AssertionError, TimeoutError):
            seen += 1
            break
    assert seen
