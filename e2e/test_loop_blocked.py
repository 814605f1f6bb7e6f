"""A picker whose event loop is blocked says so on its health port, and goes on when it can."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from epp.lab.stack import HOST, Picker
from epp.wire.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tests.data.grpc.channels import ALONE

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
CHECK = "/grpc.health.v1.Health/Check"
BLOCKING = """
import os, runpy, signal, sys, time

go_on = sys.argv.pop(1)


def block(*_):  # on the loop's thread
    while not os.path.exists(go_on):
        time.sleep(0.05)


signal.signal(signal.SIGUSR1, block)
sys.argv[0] = "epp.cli"
runpy.run_module("epp.cli", run_name="__main__")
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def blockable(folder: Path) -> Picker:
    picker = Picker(folder, [(HOST, 1)], flags=["--drain-timeout=0s"])
    before, after = picker.child.command[:1], picker.child.command[3:]
    picker.child.command = [*before, "-c", BLOCKING, str(folder / "go-on"), *after]
    return picker


async def until(asked: Callable[[], Awaitable[object]], wanted: object) -> None:
    async with asyncio.timeout(60):
        while await asked() != wanted:  # noqa: ASYNC110 another process changes it
            await asyncio.sleep(0.2)


async def test_a_blocked_picker_is_not_ready_until_it_goes_on(tmp_path: Path) -> None:
    picker = blockable(tmp_path)
    async with grpc.aio.insecure_channel(f"{HOST}:{picker.health_port}", ALONE) as channel:
        check = channel.unary_unary(CHECK, lambda name: HealthCheckRequest(service=name).SerializeToString())

        async def health(name: str) -> object:
            return HealthCheckResponse.FromString(await check(name)).status

        async def stood_still() -> bool:
            return "the event loop stands still" in picker.child.log_path.read_text()

        await picker.start()
        try:
            await until(lambda: health("readiness"), SERVING)
            picker.child.send(signal.SIGUSR1)
            await until(lambda: health("readiness"), NOT_SERVING)
            assert await health("liveness") == SERVING
            (tmp_path / "go-on").touch()
            await until(lambda: health("readiness"), SERVING)
            await until(stood_still, True)
        finally:
            await picker.child.stop(signal.SIGTERM, 40)
