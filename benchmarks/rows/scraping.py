"""Reading engines' pages: one page, and a pool that is only scraped."""

import asyncio
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.rows.children import page_server, serve
from benchmarks.rows.machine import process_cpu_s, resident_mib
from benchmarks.rows.picker import PAGE
from benchmarks.rows.timing import Effort, Result, cpu_us
from epp.pool.engines import VLLM
from epp.pool.metrics_page import PageReader
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime.scrape import Scraper

ENDPOINTS = 100
INTERVAL_S = 0.2
SETTLE_SHARE = 0.1
PATIENCE_S = 60.0
"""A page that comes late on a busy machine says nothing of what reading it costs."""


def one_page(effort: Effort) -> list[Result]:
    """Fetch and read of a vLLM page, 100 endpoints every 200 ms, in the groups of real traffic."""
    page = PAGE.read_bytes()
    read_page = PageReader(VLLM).read
    reading = cpu_us(lambda: read_page(page), effort, inner=max(1, effort.inner // 10))
    with page_server(ENDPOINTS) as ports:
        samples = uvloop.run(_scraped(ports, effort))
    return [
        Result(
            "scrape of one vLLM page (55 kB): fetch and read",
            "us",
            300.0,
            samples,
            detail={"of_it_reading_us": min(reading), "endpoints": float(ENDPOINTS)},
        )
    ]


async def _scraped(ports: list[int], effort: Effort) -> tuple[float, ...]:
    store = PoolStore()
    now = time.monotonic()
    store.sync([Endpoint(f"uid-{p}", f"pod-{p}", "default", "127.0.0.1", p) for p in ports], now)
    scraper = Scraper(store, interval_s=INTERVAL_S, timeout_s=PATIENCE_S, on_error=_failed)
    window_s = effort.window_s / 4
    running = asyncio.create_task(scraper.run())
    samples = []
    while not scraper.scrapes and not running.done():
        scraper.busy(time.monotonic())
        await asyncio.sleep(INTERVAL_S)
    for _ in range(min(effort.repeats, 3)):
        before, before_s = scraper.scrapes, time.process_time()
        until = time.monotonic() + window_s
        while time.monotonic() < until or scraper.scrapes == before:
            if running.done():
                await running  # a page could not be read
            scraper.busy(time.monotonic())
            await asyncio.sleep(min(INTERVAL_S, window_s))
        samples.append((time.process_time() - before_s) / (scraper.scrapes - before) * 1e6)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return tuple(samples)


def _failed(message: str) -> None:
    raise RuntimeError(message)


def idle(effort: Effort) -> list[Result]:
    """A running picker with 100 endpoints and no traffic: cores, and its memory with nothing in the index."""
    with (
        tempfile.TemporaryDirectory() as folder,
        page_server(ENDPOINTS) as ports,
        serve(Path(folder), ports) as picker,
    ):
        time.sleep(effort.window_s * SETTLE_SHARE)
        cores = []
        for _ in range(min(effort.repeats, 3)):
            before_s, began = process_cpu_s(picker.pid), time.monotonic()
            time.sleep(effort.window_s)
            cores.append((process_cpu_s(picker.pid) - before_s) / (time.monotonic() - began))
        resident = resident_mib(picker.pid)
    return [
        Result(f"idle, {ENDPOINTS} endpoints", "cores", 0.2, tuple(cores), detail={"resident_mib": resident})
    ]


def start(effort: Effort) -> list[Result]:
    """From exec to health's yes, endpoints from a file."""
    waited, used = [], []
    with page_server(8) as ports:
        for _ in range(effort.starts):
            with tempfile.TemporaryDirectory() as folder, serve(Path(folder), ports) as picker:
                waited.append(picker.ready_s)
                used.append(process_cpu_s(picker.pid))
    return [Result("start to ready, file", "s", 2.0, tuple(waited), detail={"cpu_s": min(used)})]
