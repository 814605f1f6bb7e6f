"""A picker that dies or leaves under load: fail-open, fail-closed, and a second picker that takes over."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from e2e.load import Load
from e2e.pages import FLAGS, complaints, settled, total, until
from e2e.questions import Outcome, Question, ask, openai_client
from epp import names
from epp.lab.stack import HOST, Gateway, LabEngines, Picker
from epp.wire.health_pb2 import HealthCheckRequest, HealthCheckResponse

pytestmark = pytest.mark.asyncio(loop_scope="session")

INTERVAL_S = 0.5
# Beyond one interval: the check's own way, and a machine that does ten other things.
MARGIN_S = 1.0


def failures(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.right]


@asynccontextmanager
async def gateway(
    engines: LabEngines, envoy: Path, folder: Path, *, fail_open: bool = True, pickers: int = 1, drain_s: int = 2
) -> AsyncIterator[Gateway]:
    flags = (*FLAGS, f"--drain-timeout={drain_s}s")
    async with Gateway(
        engines.addresses,
        folder,
        envoy,
        fail_open=fail_open,
        picker_count=pickers,
        picker_flags=flags,
        health_interval_s=INTERVAL_S,
    ) as gateway:
        yield gateway


async def restarted(picker: Picker, load: Load) -> None:
    """Start it on its old ports and wait until it is asked again."""
    await picker.start()

    async def is_asked() -> bool:
        return await total(picker, "request_total") > 0

    await until(is_asked, "the picker that was started again is asked")
    await load.answered(50)


async def test_fail_open(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    async with gateway(engines, envoy, tmp_path) as line:
        picker = line.pickers[0]
        async with Load(line.url) as load:
            await load.answered(100)
            died_s = time.monotonic()
            await picker.child.stop(signal.SIGKILL)
            await asyncio.sleep(INTERVAL_S + MARGIN_S)
            await load.answered(200)
            # Without a picker, it is Envoy that finds out which engines are ready.
            dead = engines.ports[1]
            await engines.kill(dead)
            await asyncio.sleep(2 * INTERVAL_S + MARGIN_S)
            without_engine_s = time.monotonic()
            await load.answered(200)
            before = {each.port: each.requests for each in (await engines.stats()).engines}
            await load.answered(100)
            after = {each.port: each.requests for each in (await engines.stats()).engines}
            with_engine_s = time.monotonic()
            await engines.revive(dead)
            await restarted(picker, load)
        assert failures(load.begun_after(0.0, died_s - 5.0)) == []
        open_again_s = died_s + INTERVAL_S + MARGIN_S
        lost = failures(load.outcomes)
        in_outage = [each for each in lost if died_s <= each.ended_s and each.started_s < open_again_s]
        by_engine = [each for each in lost if open_again_s <= each.started_s < without_engine_s]
        print(f"fail-open: {len(load.outcomes)} requests, {len(in_outage)} and {len(by_engine)} failed")
        assert [each for each in lost if each not in in_outage and each not in by_engine] == []
        assert failures(load.begun_after(without_engine_s, with_engine_s)) == []
        assert all(after[port] > before[port] for port in engines.ports if port != dead)
        assert before[dead] == after[dead]
        # A broken exchange is an error or no answer, never a wrong one.
        assert all(each.error is not None for each in lost)
        await settled(picker)


async def test_fail_closed(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    async with gateway(engines, envoy, tmp_path, fail_open=False) as line:
        picker = line.pickers[0]
        async with Load(line.url, lanes=4) as load:
            await load.answered(50)
            before = sum(each.requests for each in (await engines.stats()).engines)
            died_s = time.monotonic()
            await picker.child.stop(signal.SIGKILL)
            closed_s = time.monotonic()
            await load.answered(100)
            await asyncio.sleep(INTERVAL_S + MARGIN_S)
            await load.answered(20)
            reopened_s = time.monotonic()
            await restarted(picker, load)
        assert failures([each for each in load.outcomes if each.ended_s < died_s]) == []
        refused = [each for each in load.begun_after(closed_s) if each.ended_s < reopened_s]
        assert len(refused) >= 100
        assert {each.status is not None and 500 <= each.status < 600 for each in refused} == {True}
        # Nothing went past the picker.
        assert before <= sum(each.requests for each in (await engines.stats()).engines)
        assert load.outcomes[-1].right
        await settled(picker)


async def ready(picker: Picker, service: str = names.EXT_PROC_SERVICE) -> bool:
    async with grpc.aio.insecure_channel(f"{HOST}:{picker.health_port}") as channel:
        check = channel.unary_unary(
            f"/{names.HEALTH_SERVICE}/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        answer = await check(HealthCheckRequest(service=service))
        return bool(answer.status == HealthCheckResponse.SERVING)


async def test_sigterm_with_a_second_picker(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    async with gateway(engines, envoy, tmp_path, pickers=2) as line, openai_client(line.url) as client:
        first, second = line.pickers
        # Streams of over four seconds: some of them on either picker, whichever Envoy takes.
        long = [
            asyncio.create_task(ask(client, Question(f"long-{index}", f"long {index}", 3000, stream=True)))
            for index in range(8)
        ]
        await until(lambda: _streams(first), "the first picker has streams")
        async with Load(line.url, lanes=12) as load:
            await load.answered(100)
            assert await ready(first)
            told_s = time.monotonic()
            first.child.send(signal.SIGTERM)
            await until(lambda: _refuses(first), "the first picker says it is not ready")
            assert await ready(first, names.LIVENESS)
            # Both drain times end while the long streams go on.
            await asyncio.sleep(3.0)
            assert first.child.returncode is None
            await load.answered(200)
            outcomes = await asyncio.gather(*long)
            assert failures(list(outcomes)) == []
            assert all(outcome.ended_s > told_s + 3.0 for outcome in outcomes)
            assert await asyncio.wait_for(first.child.wait(), 30.0) == 0
            await load.answered(100)
        print(f"SIGTERM: {len(load.outcomes)} requests, {len(load.begun_after(told_s))} of them after it")
        assert failures(load.outcomes) == []
        await settled(second)
        assert complaints(first) + complaints(second) == []


async def _streams(picker: Picker) -> bool:
    return await total(picker, "extproc_streams_inflight") > 0


async def _refuses(picker: Picker) -> bool:
    return not await ready(picker)


async def test_second_signal_ends_at_once(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    async with gateway(engines, envoy, tmp_path, drain_s=60) as line, openai_client(line.url) as client:
        picker = line.pickers[0]
        cut = asyncio.create_task(ask(client, Question("cut", "cut short", 20_000, stream=True)))
        await until(lambda: _streams(picker), "a stream is open")
        picker.child.send(signal.SIGTERM)
        await until(lambda: _refuses(picker), "the picker says it is not ready")
        picker.child.send(signal.SIGTERM)
        assert await asyncio.wait_for(picker.child.wait(), 30.0) == 0
        assert (await cut).error is not None
        assert complaints(picker) == []


async def test_a_picker_alone_serves_while_it_drains(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    # Envoy takes notice by its health check only; until then it goes on asking.
    async with gateway(engines, envoy, tmp_path) as line, Load(line.url, lanes=8) as load:
        picker = line.pickers[0]
        await load.answered(50)
        picker.child.send(signal.SIGTERM)
        assert await asyncio.wait_for(picker.child.wait(), 30.0) == 0
        await load.answered(100)
    assert failures(load.outcomes) == []
    assert complaints(picker) == []


async def test_metrics_end_with_the_picker(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    async with gateway(engines, envoy, tmp_path, drain_s=0) as line:
        picker = line.pickers[0]
        picker.child.send(signal.SIGINT)
        assert await asyncio.wait_for(picker.child.wait(), 30.0) == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await picker.metrics()
