"""A source of GPU metrics against exporters on loopback, beside the engines and at their nodes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from aiohttp import web

from epp.config.load import build, load_config
from epp.config.spec import DcgmExtractorSpec, DcgmSourceSpec, SourceUse
from epp.lab.stack import free_ports
from epp.pool.extract import GPU_UTILIZATION
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime.scrape import Scraper

DATA = Path(__file__).parents[1] / "data"
NODE = (DATA / "pool" / "dcgm-exporter-node.txt").read_bytes()
SIDECAR = (DATA / "pool" / "dcgm-exporter-sidecar.txt").read_bytes()
DEADLINE_S = 60.0
"""Also for a page: one that comes late because this process stood still is none that failed."""
BESIDE, AT_NODE = "127.0.0.1", "127.0.0.2"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.005)


@asynccontextmanager
async def exporter(page: bytes, address: str, port: int = 0) -> AsyncIterator[tuple[int, list[str]]]:
    """Its port, which nobody else takes when it has closed, and the hosts it was asked for."""
    port = port or free_ports(1)[0]
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.host)
        return web.Response(body=page)

    app = web.Application()
    app.router.add_get("/metrics", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    try:
        yield port, asked
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scraping(
    store: PoolStore, spec: DcgmSourceSpec, errors: list[str] | None = None
) -> AsyncIterator[Scraper]:
    use = SourceUse(spec, (DcgmExtractorSpec(),))
    said = [] if errors is None else errors
    scraper = Scraper(
        store, [use], interval_s=0.05, idle_interval_s=0.05, timeout_s=DEADLINE_S, on_error=said.append
    )
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def endpoint(rank: int, pod: str, node: str = "") -> Endpoint:
    return Endpoint(f"{pod}:{rank}", f"{pod}-rank-{rank}", "llm", BESIDE, 8000 + rank, {}, pod, node)


def store_of(*endpoints: Endpoint) -> PoolStore:
    store = PoolStore()
    store.sync(endpoints, time.monotonic())
    return store


def figures(store: PoolStore) -> list[float]:
    column = store.view.attributes[GPU_UTILIZATION]
    return [column.item(slot) for slot, _ in store.roster]


def known(store: PoolStore) -> bool:
    return not np.isnan(figures(store)).any()


async def test_an_exporter_beside_the_engine_or_at_its_node() -> None:
    endpoints = [
        endpoint(0, "vllm-0", AT_NODE),
        endpoint(1, "vllm-0", AT_NODE),
        endpoint(2, "vllm-1", AT_NODE),
    ]
    async with exporter(SIDECAR, BESIDE) as (port, beside), exporter(NODE, AT_NODE, port) as (_, node):
        store = store_of(*endpoints)
        async with scraping(store, DcgmSourceSpec(port=port)) as scraper:
            assert np.isnan(figures(store)).all(), "declared from the start"
            await until(lambda: known(store))
        assert figures(store) == [0.88, 0.88, 0.88]
        assert (set(beside), node) == ({f"{BESIDE}:{port}"}, [])
        assert scraper.counts.poll_errors == {"dcgm-data-source": 0}
        beside.clear()
        store = store_of(*endpoints)
        async with scraping(store, DcgmSourceSpec(port=port, use_node_address=True)):
            await until(lambda: known(store))
        assert figures(store) == [0.67, 0.67, 0.98]
        assert (beside, set(node)) == ([], {f"{AT_NODE}:{port}"})


async def test_without_a_known_node_the_endpoint_itself_is_asked_and_that_is_said_once() -> None:
    errors: list[str] = []
    static = (endpoint(0, "a"), endpoint(1, "b"))
    async with exporter(SIDECAR, BESIDE) as (port, beside), exporter(NODE, AT_NODE, port) as (_, node):
        store = store_of(*static)
        async with scraping(store, DcgmSourceSpec(port=port, use_node_address=True, interval_s=0.05), errors):
            await until(lambda: known(store))
            store.sync([*static, endpoint(2, "c")], time.monotonic())
            await until(lambda: known(store))
            assert (figures(store), node) == ([0.88] * 3, [])
            # The node becomes known: the same endpoint is asked there from now on.
            asked = len(beside)
            store.sync([endpoint(n, pod, AT_NODE) for n, pod in enumerate("abc")], time.monotonic())
            await until(lambda: len(node) >= 3)
            assert len(beside) - asked <= 3, "but what was under way"
            await until(lambda: figures(store) == [0.12] * 3)
    (said,) = errors
    assert said == (
        "GPU metrics of a-rank-0: useNodeAddress: the address of its node is not known, only pods of "
        "Kubernetes have one; such endpoints are asked at their own address"
    )


async def test_trouble_with_an_exporter_is_said_and_costs_no_endpoint_its_place() -> None:
    errors: list[str] = []
    store = store_of(endpoint(0, "vllm-0"), endpoint(1, "other"))
    named = NODE.replace(b'"} 12\n', b'",pod=""} 12\n')
    async with exporter(named, BESIDE) as (port, _):
        spec = DcgmSourceSpec(port=port, interval_s=0.05)
        async with scraping(store, spec, errors) as scraper:
            counted = scraper.counts.extract_errors
            await until(lambda: counted["dcgm-data-source", "dcgm-extractor"] >= 5)
            assert scraper.errors == 0
    place = f"http://{BESIDE}:{port}/metrics"
    nothing = 'metric "DCGM_FI_DEV_GPU_UTIL" present but has no samples for pod "other"'
    assert errors == [f"GPU metrics of other-rank-1 at {place}: {nothing}"]
    async with scraping(store, spec, errors) as scraper:
        await until(lambda: scraper.counts.poll_errors["dcgm-data-source"] >= 8)
    assert f"GPU metrics of vllm-0-rank-0 at {place}: connection refused" in errors
    assert np.flatnonzero(store.view.candidates).tolist() == [0, 1]
    np.testing.assert_equal(figures(store), [0.67, np.nan])


async def test_exporters_are_asked_once_a_second_at_most_unless_the_file_says_otherwise() -> None:
    scraper = Scraper(PoolStore(), interval_s=0.2)
    scraper.busy(0.0)
    assert scraper.interval_of(DcgmSourceSpec(), 0.0) == 1.0
    assert scraper.interval_of(DcgmSourceSpec(interval_s=0.3), 0.0) == 0.3
    assert Scraper(PoolStore(), interval_s=2.0).interval_of(DcgmSourceSpec(), 0.0) == 2.0


async def test_the_reference_configuration_fills_its_column() -> None:
    text = (DATA / "config" / "gpu-utilization.yaml").read_text()
    async with exporter(SIDECAR, BESIDE) as (port, _):
        loaded = load_config(text.replace("port: 9400", f"port: {port}"), "gpu-utilization.yaml")
        store = store_of(endpoint(0, "vllm-0"))
        assembly = build(loaded, store.view, b"secret")
        (use,) = (use for use in assembly.sources if use.source.type == "dcgm-data-source")
        assert (use.extractors, use.source.port) == ((DcgmExtractorSpec(),), port)
        assert isinstance(use.source, DcgmSourceSpec)
        async with scraping(store, use.source):
            await until(lambda: known(store))
    assert figures(store) == [0.88]
    assert set(assembly.attributes) == set(store.view.attributes)
