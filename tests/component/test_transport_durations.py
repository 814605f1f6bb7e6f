"""How long streams took is told of each of them, however it ends."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from epp.runtime.app import App
from epp.runtime.options import TRANSPORTS
from epp.runtime.stream import Stream
from tests.data.extproc import over_wire as wire
from tests.data.runtime import picker as runtime

ASKED = [runtime.request_headers(), *runtime.request_body(runtime.chat())]
LONG = [runtime.request_headers(), *runtime.request_body(runtime.chat("x" * 300_000))]
ANSWERED = [runtime.response_headers(), runtime.response_body(b"{}")]


async def say(call: Any, *messages: bytes) -> None:
    for message in messages:
        await call.write(message)


async def to_the_end(call: Any) -> None:
    while await wire.read(call) is not None:
        pass


async def whole(call: Any) -> None:
    """The proxy passes the whole answer on."""
    await say(call, *ASKED, *ANSWERED)
    await to_the_end(call)


async def long_body(call: Any) -> None:
    await say(call, *LONG, *ANSWERED)
    await to_the_end(call)


async def refused(call: Any) -> None:
    await say(call, runtime.request_headers(), *runtime.request_body(b"{"))
    await to_the_end(call)


async def without_an_answer(call: Any) -> None:
    await say(call, *ASKED)
    await call.done_writing()
    await to_the_end(call)


async def cut_off(call: Any) -> None:
    await say(call, *ASKED, ANSWERED[0])
    for _ in range(3):
        await wire.read(call)
    call.cancel()


async def out_of_place(call: Any) -> None:
    await say(call, ANSWERED[1])
    await to_the_end(call)


# Each with whether messages of an answer came.
ENDS: list[tuple[Callable[[Any], Awaitable[None]], bool]] = [
    (whole, True),
    (long_body, True),
    (refused, False),
    (without_an_answer, False),
    (cut_off, True),
    (out_of_place, True),
]


def told(app: App, name: str) -> float:
    return runtime.sample(app, f"{name}_count")


async def check_an_end(
    transport: str, end: Callable[[Any], Awaitable[None]], answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epp.runtime.app.TIMED_EVERY", 1)
    app = runtime.picker(transport=transport)
    try:
        async with wire.listening(app.transport(None)) as channel:
            for number in (1, 2):
                await end(wire.process(channel))
                await wire.until(lambda: runtime.sample(app, "extproc_streams_total") == number, "it ended")  # noqa: B023
            names = "extproc_stream_duration_seconds", "response_processing_duration_seconds"
            assert [told(app, name) for name in names] == [2, 2 * answered]
        assert not any(runtime.left_over(app).values())
    finally:
        app.router.close()
        await app.renders.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("end", "answered"), ENDS)
async def test_each_stream_is_timed_once(
    transport: str, end: Callable[[Any], Awaitable[None]], answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_an_end(transport, end, answered, monkeypatch)


def only_unfinished(self: Stream, *, error: bool = False) -> None:
    if not self.finished:
        CLOSED(self, error=error)


def only_finished(self: Stream, *, error: bool = False) -> None:
    if self.finished:
        CLOSED(self, error=error)


def twice(self: Stream, *, error: bool = False) -> None:
    CLOSED(self, error=error)
    CLOSED(self, error=error)


CLOSED = Stream.closed


@pytest.mark.parametrize(
    ("fault", "end"), [(only_unfinished, whole), (only_finished, cut_off), (twice, whole)]
)
async def test_streams_that_are_timed_wrongly_are_noticed(
    fault: Any, end: Callable[[Any], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "closed", fault)
    with pytest.raises(AssertionError):
        await check_an_end(TRANSPORTS[0], end, True, monkeypatch)
