"""The scraper against real HTTP servers on loopback."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from epp.config.spec import (
    ExtractorSpec,
    HttpSourceSpec,
    MetricsExtractorSpec,
    MetricsSourceSpec,
    SourceUse,
)
from epp.errors import ConfigError
from epp.lab.stack import free_ports
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime import scrape
from epp.runtime.scrape import Scraper
from tests.data.tls.authority import Authority

PAGE = (Path(__file__).parent.parent / "data" / "pool" / "vllm-0.32-under-load.txt").read_bytes()
DEADLINE_S = 60.0
"""Also for a page: one that comes late because this process stood still is none that failed."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.005)


async def answer_page(request: web.Request) -> web.StreamResponse:
    return web.Response(body=PAGE)


@asynccontextmanager
async def engine(
    handler: Handler = answer_page, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls, reuse_address=True)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def silence() -> AsyncIterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def pool(*ports: int) -> list[Endpoint]:
    return [Endpoint(f"uid-{port}", f"engine-{port}", "default", "127.0.0.1", port) for port in ports]


def store_of(*ports: int) -> PoolStore:
    store = PoolStore()
    store.sync(pool(*ports), time.monotonic())
    return store


def outlive() -> list[str]:
    """Tasks of scrapers; those of servers here end when they hear of it."""
    codes = [getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks()]
    return [code.co_qualname for code in codes if code is not None and code.co_filename == scrape.__file__]


@asynccontextmanager
async def scraping(store: PoolStore, **options: Any) -> AsyncIterator[Scraper]:
    usual = {"interval_s": 0.05, "idle_interval_s": 0.05, "timeout_s": DEADLINE_S}
    scraper = Scraper(store, **usual | options)
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), outcome
        assert outlive() == [], "no scrape outlives the scraper"


def source(spec: HttpSourceSpec, *extractors: ExtractorSpec) -> SourceUse:
    return SourceUse(spec, extractors or (MetricsExtractorSpec(),))


def candidates(store: PoolStore) -> list[int]:
    found: list[int] = np.flatnonzero(store.view.candidates).tolist()
    return found


async def test_pages_reach_the_view() -> None:
    announced: list[bool] = []
    async with engine() as first, engine() as second:
        store = store_of(first, second)
        async with scraping(store, on_sampled=lambda: announced.append(bool(store.view.present.any()))):
            await until(lambda: int(store.view.present.sum()) == 2)
            await until(lambda: bool(announced))
    assert store.view.waiting[:2].tolist() == [8.0, 8.0]
    assert store.view.cache_tokens[:2].tolist() == [2560, 2560]
    assert all(announced), "told after the view was written"


async def test_one_connection_is_kept_and_no_compression_asked_for() -> None:
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.transport, request.headers["Accept-Encoding"]))
        return web.Response(body=PAGE)

    async with engine(handler) as port, scraping(store_of(port)):
        await until(lambda: len(seen) >= 4)
    assert len(set(seen)) == 1
    assert seen[0][1] == "identity"


@pytest.mark.parametrize("kept", [True, False])
async def test_the_connection_of_an_endpoint_that_left_is_closed(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "KEPT_S", 3600.0 if kept else 0.3)
    connections: list[asyncio.Transport] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert isinstance(request.transport, asyncio.Transport)
        connections.append(request.transport)
        return web.Response(body=PAGE)

    async with engine(handler) as left, engine() as stays:
        store = store_of(left, stays)
        async with scraping(store) as scraper:
            await until(lambda: store.view.present.sum() == 2)
            store.sync(pool(stays), time.monotonic())
            before = scraper.scrapes
            if kept:
                await until(lambda: scraper.scrapes >= before + 20)
                assert not any(each.is_closing() for each in connections)
            else:
                await until(lambda: all(each.is_closing() for each in connections))


async def test_a_refusing_endpoint_leaves_and_comes_back() -> None:
    errors: list[str] = []
    (gone,) = free_ports(1)
    async with engine() as port:
        store = store_of(port, gone)
        # An answer that still flows excuses failed scrapes, but not a closed port.
        store.answering(1, time.monotonic() + 3600)
        async with scraping(store, on_error=errors.append) as scraper:
            await until(lambda: candidates(store) == [0])
            await until(lambda: scraper.errors >= 3)
            async with engine(port=gone):
                await until(lambda: candidates(store) == [0, 1])
                await until(lambda: bool(store.view.present[1]))
    assert errors[0] == f"metrics of engine-{gone} at http://127.0.0.1:{gone}/metrics: connection refused"
    assert len(errors) == 1, "said once, not at every scrape"


async def test_an_endpoint_that_dies_leaves_and_comes_back() -> None:
    async with engine() as port:
        async with engine(port=free_ports(1)[0]) as mortal:
            store = store_of(port, mortal)
            scraping_both = scraping(store)
            await scraping_both.__aenter__()
            await until(lambda: int(store.view.present.sum()) == 2)
        try:
            await until(lambda: candidates(store) == [0])
            async with engine(port=mortal):
                await until(lambda: candidates(store) == [0, 1])
        finally:
            await scraping_both.__aexit__(None, None, None)


async def test_silent_endpoints_hold_up_no_other() -> None:
    hits = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal hits
        hits += 1
        return web.Response(body=PAGE)

    async with silence() as first, silence() as second, engine(handler) as port:
        store = store_of(first, second, port)
        async with scraping(store) as scraper:
            await until(lambda: hits >= 10)
            assert scraper.scrapes <= hits + 3, "one scrape in flight to each silent endpoint, not more"
            assert scraper.errors == 0


async def test_silent_endpoints_leave_after_three_deadlines() -> None:
    errors: list[str] = []
    async with silence() as dark, engine() as port:
        store = store_of(dark, port)
        async with scraping(store, timeout_s=0.5, on_error=errors.append):
            await until(lambda: candidates(store) == [1])
    assert f"metrics of engine-{dark}" in errors[0]
    assert errors[0].endswith("no answer within 0.5 s")


async def test_a_flowing_answer_keeps_a_silent_endpoint() -> None:
    async with silence() as dark, engine() as port:
        store = store_of(dark, port)
        for slot in (0, 1):  # the other one, too, may miss so short a deadline
            store.answering(slot, time.monotonic() + 3600)
        async with scraping(store, timeout_s=0.2) as scraper:
            await until(lambda: scraper.errors >= 6)
            assert candidates(store) == [0, 1]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"body": b"[]", "content_type": "application/json"}, "not a metrics page, it starts with b'[]'"),
        ({"body": b""}, "empty page"),
        ({"body": PAGE, "status": 503}, "HTTP status 503"),
        ({"body": PAGE, "status": 302, "headers": {"location": "/elsewhere"}}, "HTTP status 302"),
        ({"body": b"\x1f\x8b" * 9, "headers": {"content-encoding": "gzip"}}, "not a metrics page"),
        ({"body": PAGE * 4}, "page larger than 100000 bytes"),
    ],
)
async def test_bad_pages_are_failures(
    response: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "MAX_PAGE_BYTES", 100_000)
    errors: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(**response)

    async with engine(handler) as bad, engine() as good:
        store = store_of(bad, good)
        async with scraping(store, on_error=errors.append):
            await until(lambda: candidates(store) == [1])
    assert reason in errors[0]
    assert not store.view.present[0]


async def test_a_page_cut_short_is_a_failure() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": str(len(PAGE))})
        await response.prepare(request)
        await response.write(PAGE[: len(PAGE) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    async with engine(handler) as bad, engine() as good:
        store = store_of(bad, good)
        async with scraping(store):
            await until(lambda: candidates(store) == [1])
    assert not store.view.present[0]


async def test_missing_series_are_said_and_the_rest_is_used() -> None:
    errors: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=PAGE.replace(b"vllm:kv_cache_usage_perc", b"vllm:kv_something"))

    async with engine(handler) as port:
        store = store_of(port)
        async with scraping(store, on_error=errors.append) as scraper:
            await until(lambda: scraper.scrapes >= 4 and bool(store.view.present[0]))
    assert store.view.waiting[0] == 8.0
    assert [error.partition(": ")[2] for error in errors] == ["the page lacks vllm:kv_cache_usage_perc"]


async def test_traffic_ends_the_idle_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "BUSY_FOR_S", DEADLINE_S)
    hits = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal hits
        hits += 1
        return web.Response(body=PAGE)

    async with engine(handler) as port, scraping(store_of(port), idle_interval_s=3600.0) as scraper:
        await until(lambda: hits == 1)
        await asyncio.sleep(0.1)
        assert hits == 1
        now = time.monotonic()
        assert scraper.interval_s(now) == 3600.0
        scraper.busy(now)
        assert scraper.interval_s(now) == 0.05
        await until(lambda: hits >= 3)


async def test_a_page_under_way_does_not_describe_the_slots_next_owner() -> None:
    asked, release = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        asked.set()
        await release.wait()
        return web.Response(body=PAGE)

    async with engine(slow) as old, silence() as new:
        store = store_of(old)
        async with scraping(store) as scraper:
            await asked.wait()
            store.sync(pool(new), time.monotonic())
            assert store.slot_of(f"127.0.0.1:{new}") == 0, "the slot changed hands"
            release.set()
            await until(lambda: scraper.scrapes >= 2)
            await asyncio.sleep(0.1)
        assert not store.view.present[0]


async def test_new_members_are_read_and_removed_ones_left_alone() -> None:
    hits: dict[int, int] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.url.port is not None
        hits[request.url.port] = hits.get(request.url.port, 0) + 1
        return web.Response(body=PAGE)

    async with engine(handler) as first, engine(handler) as second:
        store = store_of(first)
        async with scraping(store):
            await until(lambda: hits.get(first, 0) >= 1)
            store.sync(pool(second), time.monotonic())
            await until(lambda: hits.get(second, 0) >= 2)
            before = hits[first]
            await until(lambda: hits[second] >= 5)
            assert hits[first] <= before + 1


async def test_large_pools_are_read_in_groups_that_miss_nobody() -> None:
    async with engine() as port:
        store = PoolStore()
        # 127.0.0.0/8 is all loopback, but only one address listens: the others refuse.
        store.sync(
            [Endpoint(f"uid-{n}", f"e-{n}", "default", f"127.0.0.{1 + n}", port) for n in range(90)],
            time.monotonic(),
        )
        async with scraping(store) as scraper:
            await until(lambda: scraper.scrapes >= 180)
            await until(lambda: candidates(store) == [0])
            await until(lambda: scraper.errors >= 89)


async def test_certificates_are_verified_unless_told_otherwise(tmp_path: Path) -> None:
    server_tls = Authority(tmp_path).server()
    errors: list[str] = []
    async with engine(tls=server_tls) as port:
        verifying = source(MetricsSourceSpec("https", insecure_skip_verify=False))
        async with scraping(store_of(port), sources=[verifying], on_error=errors.append) as scraper:
            await until(lambda: scraper.errors >= 1)
        assert "certificate verify failed" in errors[0].lower()
        store = store_of(port)
        async with scraping(store, sources=[source(MetricsSourceSpec("https"))]):
            await until(lambda: bool(store.view.present[0]))


@pytest.mark.parametrize("interval_s", [0.0, 0.049, -1.0, float("nan")])
def test_too_short_an_interval_is_refused(interval_s: float) -> None:
    with pytest.raises(ConfigError, match="--refresh-metrics-interval: .*the least is 50ms"):
        Scraper(PoolStore(), interval_s=interval_s)


def test_idle_is_never_faster_than_busy() -> None:
    scraper = Scraper(PoolStore(), interval_s=7.0)
    assert scraper.interval_s(0.0) == 7.0
