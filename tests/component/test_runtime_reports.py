"""Faults that users of other pickers met with scraping; `docs/field-reports.md` names each of them."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from epp.config.spec import (
    MetricsExtractorSpec,
    MetricsSourceSpec,
    ModelsExtractorSpec,
    ModelsSourceSpec,
    SourceUse,
)
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime import scrape
from epp.runtime.client_tls import ClientTls
from epp.runtime.scrape import MOST_COMPLAINTS, Scraper
from epp.runtime.tls import self_signed

PAGE = (Path(__file__).parent.parent / "data" / "pool" / "vllm-0.32-under-load.txt").read_bytes()
DEADLINE_S = 60.0
"""Also for a page: one that comes late because this process stood still is none that failed."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(status: int = 200, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=PAGE if request.path == "/metrics" else b'{"data":[]}')

    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def store_of(port: int, count: int = 1) -> PoolStore:
    store = PoolStore()
    endpoints = [Endpoint(f"u{n}", f"engine-{n}", "default", "127.0.0.1", port) for n in range(count)]
    store.sync(endpoints, time.monotonic())
    return store


@asynccontextmanager
async def scraping(store: PoolStore, errors: list[str], *sources: SourceUse) -> AsyncIterator[Scraper]:
    used = sources or scrape.DEFAULT_SOURCES
    scraper = Scraper(
        store, used, interval_s=0.05, idle_interval_s=0.05, timeout_s=DEADLINE_S, on_error=errors.append
    )
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# -- a whole fleet in trouble -------------------------------------------------------------------------


async def test_a_fleet_without_metrics_does_not_fill_the_log() -> None:
    errors: list[str] = []
    async with serving(status=500) as port:
        store = store_of(port, 25)
        async with scraping(store, errors) as scraper:
            await until(lambda: scraper.errors >= 100)
            assert int(store.view.candidates.sum()) == 25, "with all of them gone none is"
    assert len(errors) == MOST_COMPLAINTS == 10
    assert len({error.partition(" at ")[0] for error in errors}) == 10
    assert all("HTTP status 500" in error for error in errors)
    assert errors[-1].endswith("the same of others is not said for a while")


# -- certificates -------------------------------------------------------------------------------------


def server_context(folder: Path) -> ssl.SSLContext:
    pair = self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, content in (("tls.crt", pair.chain), ("tls.key", pair.key)):
        (folder / name).write_bytes(content)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


@pytest.mark.parametrize("lax_first", [False, True])
async def test_a_lax_source_leaves_a_strict_one_strict(lax_first: bool, tmp_path: Path) -> None:
    errors: list[str] = []
    lax = SourceUse(MetricsSourceSpec("https", insecure_skip_verify=True), (MetricsExtractorSpec(),))
    strict = SourceUse(
        ModelsSourceSpec("https", insecure_skip_verify=False, interval_s=0.05), (ModelsExtractorSpec(),)
    )
    async with serving(tls=server_context(tmp_path)) as port:
        store = store_of(port)
        sources = (lax, strict) if lax_first else (strict, lax)
        async with scraping(store, errors, *sources) as scraper:
            polled = scraper.counts.poll_errors
            await until(lambda: scraper.scrapes >= 8 and polled[strict.source.type] >= 2)
            await until(lambda: bool(store.view.present[0]))
    assert polled[lax.source.type] == 0
    assert all("certificate verify failed" in error.lower() for error in errors)


def test_each_source_has_a_context_of_its_own() -> None:
    specs = [MetricsSourceSpec("https", insecure_skip_verify=lax) for lax in (True, False, True, False)]
    contexts = [ClientTls(spec).context for spec in specs]
    assert all(isinstance(context, ssl.SSLContext) for context in contexts)
    assert len({id(context) for context in contexts}) == 4
    assert [getattr(context, "verify_mode", None) for context in contexts] == [
        ssl.CERT_NONE,
        ssl.CERT_REQUIRED,
    ] * 2
