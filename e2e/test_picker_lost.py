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
import pytest_asyncio

from e2e.load import Load
from e2e.pages import complaints, decisions, on, settled, total, until
from e2e.questions import MODEL, Outcome, Question, ask, openai_client
from epp import names
from epp.lab.stack import HOST, Gateway, LabEngines, Picker
from epp.lab.workload import Fleet
from epp.runtime.options import OWN, TRANSPORTS
from epp.wire.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tests.data.grpc.channels import ALONE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

INTERVAL_S = 0.5
# Several intervals: Envoy is to take notice meanwhile, on a machine that does ten other things, too.
DRAIN_S = 4
TOKENS_PER_S = 40


def failures(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.right]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def slow_engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LabEngines]:
    """TOKENS_PER_S each answer."""
    fleet = Fleet(
        engines=3,
        fit="llama-8b-h100",
        speed_up=0.25,
        num_blocks=4096,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=32_768,
    )
    async with LabEngines(fleet, MODEL, tmp_path_factory.mktemp("slow")) as engines:
        yield engines


@asynccontextmanager
async def gateway(
    engines: LabEngines,
    envoy: Path,
    folder: Path,
    *,
    fail_open: bool = True,
    pickers: int = 1,
    drain_s: int = DRAIN_S,
    transport: str = OWN,
) -> AsyncIterator[Gateway]:
    flags = (*on(transport), f"--drain-timeout={drain_s}s")
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
            await load.answered(50)
            died_s = time.monotonic()
            await picker.child.stop(signal.SIGKILL)
            await until(lambda: well(line, "picker", 0), "Envoy knows that the picker is gone")
            open_s = time.monotonic()
            await load.answered(100)
            # Without a picker, it is Envoy that finds out which engines are ready.
            dead = engines.ports[1]
            engine_died_s = time.monotonic()
            await engines.kill(dead)
            await until(lambda: well(line, "engines", len(engines.ports) - 1), "Envoy knows that it is gone")
            without_engine_s = time.monotonic()
            before = await requests_by_port(engines)
            await load.answered(60)
            after = await requests_by_port(engines)
            await engines.revive(dead)
            await restarted(picker, load)
        lost = failures(load.outcomes)
        in_outage = [each for each in lost if died_s <= each.ended_s and each.started_s < open_s]
        by_engine = [each for each in lost if engine_died_s <= each.ended_s]
        print(f"fail-open: {len(load.outcomes)} requests, {len(in_outage)} and {len(by_engine)} failed")
        assert [each for each in lost if each not in in_outage and each not in by_engine] == []
        assert [each for each in by_engine if each.started_s >= without_engine_s] == []
        assert {port for port in engines.ports if after[port] > before[port]} == {*engines.ports} - {dead}
        # A broken exchange is an error or no answer, never a wrong one.
        assert all(each.error is not None for each in lost)
        await settled(picker)


async def well(line: Gateway, cluster: str, count: int) -> bool:
    """Whether so many of a cluster's are well, as far as Envoy knows."""
    name = f"cluster.{cluster}.membership_healthy"
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{line.proxy.admin_url}/stats?filter=^{name}$") as answer,
    ):
        return (await answer.text()).strip() == f"{name}: {count}"


async def requests_by_port(engines: LabEngines) -> dict[int, int]:
    return {each.port: each.requests for each in (await engines.stats()).engines}


async def test_fail_closed(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    async with gateway(engines, envoy, tmp_path, fail_open=False) as line:
        picker = line.pickers[0]
        async with Load(line.url, lanes=4) as load:
            await load.answered(50)
            died_s = time.monotonic()
            await picker.child.stop(signal.SIGKILL)
            closed_s = time.monotonic()
            await load.answered(20)
            before = await requests_by_port(engines)
            await load.answered(20)
            await until(lambda: well(line, "picker", 0), "Envoy knows that the picker is gone")
            await load.answered(20)
            after = await requests_by_port(engines)
            reopened_s = time.monotonic()
            await restarted(picker, load)
        assert failures([each for each in load.outcomes if each.ended_s < died_s]) == []
        refused = [each for each in load.begun_after(closed_s) if each.ended_s < reopened_s]
        assert len(refused) >= 50
        assert all(each.status is not None and 500 <= each.status < 600 for each in refused)
        assert before == after
        assert load.outcomes[-1].right
        await settled(picker)


async def ready(picker: Picker, service: str = names.EXT_PROC_SERVICE) -> bool:
    async with grpc.aio.insecure_channel(f"{HOST}:{picker.health_port}", ALONE) as channel:
        check = channel.unary_unary(
            f"/{names.HEALTH_SERVICE}/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        answer = await check(HealthCheckRequest(service=service))
        return bool(answer.status == HealthCheckResponse.SERVING)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_sigterm_with_a_second_picker(
    slow_engines: LabEngines, envoy: Path, tmp_path: Path, transport: str
) -> None:
    async with (
        gateway(slow_engines, envoy, tmp_path, pickers=2, transport=transport) as line,
        openai_client(line.url) as client,
    ):
        first, second = line.pickers
        async with Load(line.url, lanes=8, output_tokens=4) as load:
            began_s = time.monotonic()
            await load.answered(40)
            # Streams that last longer than the drain, wherever this machine will be with it by then. Some are
            # by either picker: Envoy takes the one with fewer of two that it draws, so that all by one would
            # need as many draws of that one alone.
            lasting_s = DRAIN_S + 2 + 4 * (time.monotonic() - began_s)
            length = round(min(lasting_s, 80.0) * TOKENS_PER_S)
            questions = [
                Question(f"long-{index}", f"long {index}", length, stream=True) for index in range(16)
            ]
            assert await ready(first)
            long = [asyncio.create_task(ask(client, question)) for question in questions]
            await until(lambda: _have_placed(line.pickers, questions), "each stream has its picker")
            by_first = await decisions(first)
            first.child.send(signal.SIGTERM)
            told_s = time.monotonic()
            await until(lambda: _refuses(first), "the first picker says it is not ready")
            assert await ready(first, names.LIVENESS)
            ended = asyncio.create_task(first.child.wait())
            outcomes = await asyncio.gather(*long)
            assert failures(list(outcomes)) == []
            kept_open = [each for each in outcomes if each.question.id in by_first]
            assert max(each.ended_s for each in kept_open) > told_s + DRAIN_S
            async with asyncio.timeout(60.0):
                assert await ended == 0
            await load.answered(100)
        print(f"SIGTERM: {len(load.outcomes)} requests, {len(load.begun_after(told_s))} of them after it")
        assert failures(load.outcomes) == []
        await settled(second)
        assert complaints(first) + complaints(second) == []


async def _streams(picker: Picker) -> bool:
    return await total(picker, "extproc_streams_inflight") > 0


async def _have_placed(pickers: list[Picker], questions: list[Question]) -> bool:
    seen = await asyncio.gather(*map(decisions, pickers))
    return {question.id for question in questions} <= {name for each in seen for name in each}


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
        async with asyncio.timeout(60.0):
            assert await picker.child.wait() == 0
        assert (await cut).error is not None
        assert complaints(picker) == []


async def test_a_lone_picker_serves_while_it_drains(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    # Envoy takes notice by its health check only; until then it goes on asking.
    async with gateway(engines, envoy, tmp_path) as line, Load(line.url, lanes=8) as load:
        picker = line.pickers[0]
        await load.answered(50)
        picker.child.send(signal.SIGTERM)
        async with asyncio.timeout(60.0):
            assert await picker.child.wait() == 0
        await load.answered(100)
    assert failures(load.outcomes) == []
    assert complaints(picker) == []


async def test_metrics_end_with_the_picker(engines: LabEngines, envoy: Path, tmp_path: Path) -> None:
    async with gateway(engines, envoy, tmp_path, drain_s=0) as line:
        picker = line.pickers[0]
        picker.child.send(signal.SIGINT)
        async with asyncio.timeout(60.0):
            assert await picker.child.wait() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await picker.metrics()
