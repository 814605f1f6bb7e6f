"""Proxies whose picker is gone or breaks off: clients are told to come again, not that they met a fault."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc
import pytest

from e2e import test_envoy_fail_open as proxies
from epp.lab.envoy import BodyModes, envoy_config
from epp.wire import ext_proc_pb2 as pb

STATUS: Final = "              status_on_error: {code: ServiceUnavailable}\n"


class Breaking(proxies.Picker):
    """Breaks off every stream at its first message of a kind, by an error, or once it is stopped."""

    at: str = "request_headers"
    fails: bool = True
    asked: asyncio.Event

    async def process(
        self, messages: AsyncIterator[pb.ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProcessingResponse]:
        async for message in messages:
            if message.WhichOneof("request") != self.at:
                continue
            self.asked.set()
            if self.fails:
                await context.abort(grpc.StatusCode.INTERNAL, "a fault")
            await asyncio.sleep(60)
            yield pb.ProcessingResponse()


class BreakingAtBody(Breaking):
    at = "request_body"


async def statuses(setup: proxies.Setup) -> list[int]:
    """What clients get: the picker fails, dies with the request, has just died, is known to be dead."""
    picker = setup.picker
    assert isinstance(picker, Breaking)
    picker.asked = asyncio.Event()
    found = [(await setup.ask())[0]]
    picker.fails = False
    picker.asked.clear()
    asking = asyncio.create_task(setup.ask())
    async with asyncio.timeout(60):
        await picker.asked.wait()
    serving, _health = picker.servers
    await serving.stop(None)
    # Its health port still answers: nobody can know yet that it is gone.
    found += [(await asking)[0], (await setup.ask())[0]]
    await picker.stop()
    await setup.left_alone()
    return [*found, (await setup.ask())[0]]


@pytest.mark.parametrize("mode", [BodyModes.FULL_DUPLEX, BodyModes.BUFFERED])
async def test_closed_without_a_picker_is_503(monkeypatch: pytest.MonkeyPatch, mode: BodyModes) -> None:
    monkeypatch.setattr(proxies, "Picker", Breaking)
    async with proxies.around_envoy(fail_open=False, mode=mode, health_port=True) as setup:
        assert await statuses(setup) == [503] * 4
        assert sum(engine.requests for engine in setup.engines) == 0


async def test_open_until_the_picker_is_known_to_be_gone_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body was handed over, so that no engine can have the request."""
    monkeypatch.setattr(proxies, "Picker", BreakingAtBody)
    async with proxies.around_envoy(health_port=True) as setup:
        assert await statuses(setup) == [503, 503, 503, 200]


async def test_an_envoy_left_to_itself_answers_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why the configuration says otherwise."""
    monkeypatch.setattr(proxies, "Picker", Breaking)
    monkeypatch.setattr(proxies, "envoy_config", _left_to_itself)
    async with proxies.around_envoy(fail_open=False, health_port=True) as setup:
        assert await statuses(setup) == [500] * 4


def _left_to_itself(**options: object) -> str:
    text = envoy_config(**options)  # type: ignore[arg-type]
    assert text.count(STATUS) == 1
    return text.replace(STATUS, "")
