"""Several data sources at once, each against real HTTP servers on loopback."""

import asyncio
import shutil
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from epp.config.spec import (
    HttpSourceSpec,
    MetricsExtractorSpec,
    MetricsSourceSpec,
    ModelsExtractorSpec,
    ModelsSourceSpec,
    SourceUse,
)
from epp.errors import ConfigError
from epp.lab.stack import free_ports
from epp.pool.engines import ENGINES, CustomMetric, EngineSpec, MetricSpec
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime import scrape
from epp.runtime.client_tls import ClientTls
from epp.runtime.scrape import Scraper
from tests.data.tls.authority import Authority

DATA = Path(__file__).parent.parent / "data" / "pool"
PAGE = (DATA / "vllm-0.32-under-load.txt").read_bytes()
LOAD = SourceUse(MetricsSourceSpec(), (MetricsExtractorSpec(),))
MODELS = SourceUse(ModelsSourceSpec(interval_s=0.05), (ModelsExtractorSpec(),))
DEADLINE_S = 60.0
"""Also for a page: one that comes late because this process stood still is none that failed."""
Pages = dict[str, bytes | int]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(pages: Pages, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[str]]]:
    """A server with these pages (a number is a status): its port, and the paths asked for."""
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        found = pages.get(request.path, 404)
        return web.Response(status=found) if isinstance(found, int) else web.Response(body=found)

    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield runner.addresses[0][1], asked
    finally:
        await runner.cleanup()


def store_of(*ports: int, **labels: str) -> PoolStore:
    store = PoolStore()
    pool = [Endpoint(f"uid-{port}", f"engine-{port}", "default", "127.0.0.1", port, labels) for port in ports]
    store.sync(pool, time.monotonic())
    return store


def outlive() -> list[str]:
    """Tasks of scrapers; those of servers here end when they hear of it."""
    codes = [getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks()]
    return [code.co_qualname for code in codes if code is not None and code.co_filename == scrape.__file__]


@asynccontextmanager
async def scraping(store: PoolStore, *sources: SourceUse, **options: Any) -> AsyncIterator[Scraper]:
    usual = {"interval_s": 0.05, "idle_interval_s": 0.05, "timeout_s": DEADLINE_S}
    scraper = Scraper(store, sources, **usual | options)
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), outcome
        assert outlive() == [], "no scrape outlives the scraper"


def candidates(store: PoolStore) -> list[int]:
    found: list[int] = np.flatnonzero(store.view.candidates).tolist()
    return found


async def test_load_and_models_come_from_one_server() -> None:
    models = b'{"object":"list","data":[{"id":"base"},{"id":"sql-adapter"}]}'
    async with serving({"/metrics": PAGE, "/v1/models": models}) as (port, asked):
        store = store_of(port)
        async with scraping(store, LOAD, MODELS) as scraper:
            await until(lambda: bool(store.view.models) and bool(store.view.present[0]))
    assert set(asked) == {"/metrics", "/v1/models"}
    assert store.view.waiting[0] == 8.0
    assert sorted(store.view.models) == ["base", "sql-adapter"]
    assert store.view.adapters is not None
    assert store.view.adapters.running["sql-adapter"][0]
    assert scraper.counts.poll_errors == {"metrics-data-source": 0, "models-data-source": 0}
    assert scraper.counts.extract_errors == {
        ("metrics-data-source", "core-metrics-extractor"): 0,
        ("models-data-source", "models-data-extractor"): 0,
    }


class Overheard(PoolStore):
    """Remembers who was blamed for a failed scrape, and how often it was told that scrapes come."""

    def __init__(self) -> None:
        super().__init__()
        self.blamed: set[int] = set()
        self.intervals_s: set[float] = set()

    def failed(self, slot: int, *, refused: bool, now: float) -> None:
        self.blamed.add(slot)
        super().failed(slot, refused=refused, now=now)

    def refresh(self, now: float, interval_s: float) -> None:
        self.intervals_s.add(interval_s)
        super().refresh(now, interval_s)


async def test_only_load_decides_who_can_be_reached() -> None:
    errors: list[str] = []
    (closed,) = free_ports(1)
    elsewhere = SourceUse(MetricsSourceSpec(port=closed, interval_s=0.06), (MetricsExtractorSpec(),))
    async with (
        serving({"/metrics": PAGE, "/v1/models": 500}) as (first, _),
        serving({"/metrics": PAGE}) as other,
    ):
        store = Overheard()
        store.sync([member for _, member in store_of(first, other[0]).roster], time.monotonic())
        async with scraping(store, LOAD, MODELS, elsewhere, on_error=errors.append) as scraper:
            await until(lambda: scraper.counts.poll_errors["models-data-source"] >= 8)
            await until(lambda: scraper.counts.poll_errors["metrics-data-source"] >= 8)
            assert candidates(store) == [0, 1]
            assert (store.blamed, store.intervals_s) == (set(), {0.05})
            await until(lambda: not store.view.stale.any())
            assert scraper.errors == sum(scraper.counts.poll_errors.values())
    assert f"models of engine-{first} at http://127.0.0.1:{first}/v1/models: HTTP status 500" in errors
    assert f"metrics of engine-{first} at http://127.0.0.1:{closed}/metrics: connection refused" in errors
    assert len(errors) == 4, "each trouble once"


async def test_a_source_of_models_that_is_named_first_decides_nothing() -> None:
    announced: list[bool] = []
    async with (
        serving({"/metrics": 500, "/v1/models": b'{"data":[]}'}) as (bad, _),
        serving({"/metrics": PAGE}) as good,
    ):
        store = store_of(bad, good[0])
        watch = scraping(store, MODELS, LOAD, on_sampled=lambda: announced.append(True))
        async with watch:
            await until(lambda: candidates(store) == [1])
            await until(lambda: bool(announced))


async def test_a_page_at_another_port() -> None:
    async with serving({"/metrics": PAGE}) as (port, asked):
        # Nothing listens at the endpoint's own port.
        store = store_of(1)
        use = SourceUse(MetricsSourceSpec(port=port), (MetricsExtractorSpec(),))
        async with scraping(store, use):
            await until(lambda: bool(store.view.present[0]))
    assert asked[0] == "/metrics"
    ipv6 = Endpoint("u", "n", "d", "::1", 8000)
    other = PoolStore()
    other.sync([ipv6], 0.0)
    errors: list[str] = []
    async with scraping(other, use, on_error=errors.append):
        await until(lambda: bool(errors))
    assert f"http://[::1]:{port}/metrics" in errors[0]


async def test_a_refusal_at_another_port_is_no_proof_that_the_engine_is_gone() -> None:
    (closed,) = free_ports(1)
    store = store_of(7, 8)
    for slot in (0, 1):
        store.answering(slot, time.monotonic() + 3600)
    async with scraping(
        store, SourceUse(MetricsSourceSpec(port=closed), (MetricsExtractorSpec(),))
    ) as scraper:
        await until(lambda: scraper.errors >= 8)
        assert candidates(store) == [0, 1]
        store.answering(0, time.monotonic() - 3600)
        await until(lambda: candidates(store) == [1])


@pytest.mark.parametrize(
    ("spec", "labels", "expected"),
    [
        (MetricsSourceSpec(), {"llm-d.ai/engine-type": "trtllm-serve"}, "/prometheus/metrics"),
        (MetricsSourceSpec(path="/mine"), {"llm-d.ai/engine-type": "trtllm-serve"}, "/mine"),
        (MetricsSourceSpec(path="/a/b?c=d"), {}, "/a/b"),
        (MetricsSourceSpec(), {"llm-d.ai/engine-type": "sglang"}, "/metrics"),
    ],
)
async def test_the_path_of_the_engine(spec: HttpSourceSpec, labels: dict[str, str], expected: str) -> None:
    async with serving({}) as (port, asked):
        store = PoolStore()
        store.sync([Endpoint("u", "n", "d", "127.0.0.1", port, labels)], 0.0)
        async with scraping(store, SourceUse(spec, (MetricsExtractorSpec(),))):
            await until(lambda: bool(asked))
    assert asked[0] == expected


async def test_a_new_label_changes_reader_and_path() -> None:
    page = (DATA / "trtllm-serve.txt").read_bytes()
    async with serving({"/metrics": b"[]", "/prometheus/metrics": page}) as (port, _):
        store = store_of(port)
        async with scraping(store, LOAD) as scraper:
            await until(lambda: scraper.errors >= 1)
            labels = {"llm-d.ai/engine-type": "trtllm-serve"}
            store.sync([Endpoint(f"uid-{port}", "n", "default", "127.0.0.1", port, labels)], time.monotonic())
            await until(lambda: bool(store.view.present[0]))
    assert store.view.waiting[0] == 1.0


async def test_custom_metrics_reach_their_columns() -> None:
    engine = EngineSpec(
        "mine",
        waiting=(MetricSpec("q"),),
        custom=(CustomMetric("depth", MetricSpec("depth")), CustomMetric("lost", MetricSpec("lost"))),
    )
    extractor = MetricsExtractorSpec(default_engine="mine", engines=(*ENGINES, engine))
    errors: list[str] = []
    async with serving({"/metrics": b"q 3\ndepth 4.5\n"}) as (port, _):
        store = store_of(port)
        assert store.view.attributes == {}
        use = SourceUse(MetricsSourceSpec(), (extractor,))
        async with scraping(store, use, on_error=errors.append) as scraper:
            assert sorted(store.view.attributes) == ["depth", "lost"], "declared from the start"
            await until(
                lambda: scraper.counts.extract_errors["metrics-data-source", "core-metrics-extractor"] >= 4
            )
    assert store.view.attributes["depth"][0] == 4.5
    assert np.isnan(store.view.attributes["lost"][0])
    assert scraper.errors == 0, "what is missing on a page is no failed poll"
    assert [error.partition(": ")[2] for error in errors] == ["the page lacks lost"]


async def test_each_source_has_its_interval() -> None:
    async with serving({"/metrics": PAGE, "/slow": PAGE, "/v1/models": b'{"data":[]}'}) as (port, asked):
        began = time.monotonic()
        slow = SourceUse(MetricsSourceSpec(path="/slow", interval_s=3600.0), (MetricsExtractorSpec(),))
        unhurried = SourceUse(ModelsSourceSpec(), (ModelsExtractorSpec(),))
        async with scraping(store_of(port), LOAD, slow, unhurried) as scraper:
            await until(lambda: asked.count("/metrics") >= 8)
            now = time.monotonic()
            assert asked.count("/slow") == 1
            assert 1 <= asked.count("/v1/models") <= 1 + (now - began) // 5.0
            models = asked.count("/v1/models")
            assert scraper.interval_of(slow.source, now) == 3600.0
            assert scraper.interval_of(unhurried.source, now) == 5.0
            assert scraper.interval_s(now) == 0.05
            scraper.busy(now)
            await until(lambda: asked.count("/v1/models") > models)
    tiny = MetricsSourceSpec(interval_s=0.001)
    assert Scraper(PoolStore(), [SourceUse(tiny, ())]).interval_of(tiny, -float("inf")) == 1.0


async def test_no_source_at_all() -> None:
    store = store_of(1)
    async with scraping(store) as scraper:
        await asyncio.sleep(0.05)
        assert (scraper.scrapes, scraper.interval_s(0.0)) == (0, 0.05)
    assert candidates(store) == [0]


# -- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def https(**fields: Any) -> SourceUse:
    return SourceUse(MetricsSourceSpec("https", **fields), (MetricsExtractorSpec(),))


async def test_both_sides_show_certificates(authority: Authority) -> None:
    certificate, key = authority.issue("client")
    good = {"ca_cert_path": authority.ca, "client_cert_path": certificate, "client_key_path": key}
    async with serving({"/metrics": PAGE}, authority.server(clients=True)) as (port, _):
        for verified in (False, True):
            present = (store := store_of(port)).view.present
            async with scraping(store, https(insecure_skip_verify=not verified, **good)):
                await until(lambda present=present: bool(present.any()))  # type: ignore[misc]
        for fields in ({}, {"insecure_skip_verify": False, **good, "ca_cert_path": None}):
            async with scraping(store_of(port), https(**fields)) as scraper:
                await until(lambda: scraper.errors >= 1)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("ca_cert_path", "metrics-data-source: caCertPath: /none cannot be used: No such file"),
        (
            "client_cert_path",
            "metrics-data-source: clientCertPath: /none with .* cannot be used: No such file",
        ),
    ],
)
def test_a_file_that_is_missing(authority: Authority, field: str, says: str) -> None:
    certificate, key = authority.issue("client")
    fields: dict[str, Any] = {"client_cert_path": certificate, "client_key_path": key, field: "/none"}
    with pytest.raises(ConfigError, match=says):
        Scraper(PoolStore(), [https(insecure_skip_verify=False, **fields)])


def test_a_key_of_another_certificate(authority: Authority) -> None:
    certificate, _ = authority.issue("client")
    _, key = authority.issue("other")
    with pytest.raises(ConfigError, match="clientCertPath: .*client.crt with .*other.key cannot be used"):
        ClientTls(MetricsSourceSpec("https", client_cert_path=certificate, client_key_path=key))


def test_files_are_not_read_where_they_do_not_count() -> None:
    assert (
        ClientTls(MetricsSourceSpec("http", ca_cert_path="/none", client_cert_path="/none")).context is True
    )
    ClientTls(MetricsSourceSpec("https", ca_cert_path="/none"))


async def test_trouble_with_files_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    complaints = ["bad", "bad", "worse", None, "worse", "worse"]

    async def follow() -> str | None:
        return complaints.pop(0)

    poller = Scraper(PoolStore(), (LOAD,), on_error=said.append)._pollers[0]
    monkeypatch.setattr(poller._tls, "follow", follow)
    while complaints:
        await poller._follow_files()
    assert [line.partition(";")[0] for line in said] == ["bad", "worse", "worse"]


async def test_changed_files_are_followed_and_bad_ones_are_not(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("client")
    tls = ClientTls(MetricsSourceSpec("https", client_cert_path=certificate, client_key_path=key))
    first = tls.context
    assert (await tls.follow(), tls.context) == (None, first)
    (tmp_path / "client.crt").write_text("half a certifi")
    assert "clientCertPath" in (await tls.follow() or "")
    assert tls.context is first
    shutil.copy(authority.issue("next")[0], certificate)
    shutil.copy(tmp_path / "next.key", key)
    assert await tls.follow() is None
    assert tls.context is not first


async def test_the_loop_goes_on_while_changed_files_are_read(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = authority.issue("client")
    tls = ClientTls(MetricsSourceSpec("https", client_cert_path=certificate, client_key_path=key))
    made, went_on = ssl.create_default_context, threading.Event()

    def held_up(**how: Any) -> ssl.SSLContext:
        assert went_on.wait(DEADLINE_S), "the loop stands still"
        return made(**how)

    monkeypatch.setattr(ssl, "create_default_context", held_up)
    shutil.copy(authority.issue("next")[0], certificate)
    shutil.copy(Path(key).with_name("next.key"), key)
    asyncio.get_running_loop().call_soon(went_on.set)
    before = tls.context
    assert await tls.follow() is None
    assert tls.context is not before
