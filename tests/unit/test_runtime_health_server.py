"""The thread behind the health port, with a listener that does nothing."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from epp.runtime.health import Health
from epp.runtime.health_calls import Post
from epp.runtime.health_server import HealthServer


class Listener:
    def __init__(self, fault: Exception | None = None, stop_fault: Exception | None = None) -> None:
        self.fault = fault
        self.stop_fault = stop_fault
        self.events: list[str] = []
        self.threads: set[str] = set()
        self.post: Post | None = None

    def made(self, health: Health, post: Post) -> "Listener":
        self.note("made")
        self.post = post
        return self

    async def start(self, address: str) -> int:
        self.note(f"start {address}")
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        return 1234

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.note("stop")
        if self.stop_fault is not None:
            raise self.stop_fault

    def note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def threads() -> Callable[[], int]:
    """How many health threads there are besides those that others have left behind."""
    before = {*threading.enumerate()}
    return lambda: sum(thread.name == "health" for thread in {*threading.enumerate()} - before)


def test_everything_runs_on_its_thread_which_ends_with_stop(threads: Callable[[], int]) -> None:
    listener = Listener()
    server = HealthServer(Health(), listener.made)
    assert server.start("127.0.0.1:0") == 1234
    done = threading.Event()
    assert listener.post is not None
    listener.post(lambda: (listener.note("posted"), done.set())[-1])
    assert done.wait(60)
    assert threads() == 1
    server.stop()
    assert listener.events == ["made", "start 127.0.0.1:0", "posted", "stop"]
    assert listener.threads == {"health"}
    assert threads() == 0
    server.stop()  # again: nothing


@pytest.mark.parametrize("fault", [OSError(98, "taken"), ValueError("no address")])
def test_what_start_raises_is_raised_where_it_was_called(
    fault: Exception, threads: Callable[[], int]
) -> None:
    server = HealthServer(Health(), Listener(fault).made)
    with pytest.raises(type(fault)) as caught:
        server.start("127.0.0.1:0")
    assert caught.value is fault
    server.stop()
    assert threads() == 0


def test_what_making_it_raises_is_raised_too() -> None:
    def make(health: Health, post: Post) -> Listener:
        raise OSError("no certificate")

    with pytest.raises(OSError, match="no certificate"):
        HealthServer(Health(), make).start("127.0.0.1:0")


def test_a_fault_after_the_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = HealthServer(Health(), Listener(stop_fault=ValueError("odd")).made)
    server.start("127.0.0.1:0")
    with caplog.at_level(logging.ERROR):
        server.stop()
    assert "the health port has ended" in caplog.text
    server.stop()


def test_stop_without_start_does_nothing() -> None:
    HealthServer(Health(), Listener().made).stop()
