"""What a running picker and its engines say of themselves."""

import asyncio
from collections.abc import Callable, Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from epp import names
from epp.lab.stack import LabEngines, Picker
from epp.runtime.explanations import DECISIONS_PATH

OF_REQUESTS_IN_FLIGHT = (
    "request_running",
    "inflight_requests",
    "inflight_tokens",
    "extproc_streams_inflight",
    "extproc_held_bytes",
)
GAUGES_EVERY_S = 0.2
FLAGS = (f"--refresh-prometheus-metrics-interval={GAUGES_EVERY_S * 1000:g}ms",)
"""Flags of a picker whose gauges are read by tests."""


def on(transport: str) -> tuple[str, ...]:
    """FLAGS of a picker with this transport."""
    return (*FLAGS, f"--transport={transport}")


DEADLINE_S = 60.0

Figures = Mapping[str, list[float]]


async def figures(picker: Picker) -> Figures:
    """Each sample of each metric, by name without prefix, whatever its labels."""
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(await picker.metrics()):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix(names.METRIC_PREFIX), []).append(sample.value)
    return found


async def samples(picker: Picker, name: str) -> list[tuple[Mapping[str, str], float]]:
    """Labels and value of each sample of one metric, without prefix."""
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(await picker.metrics())
        for sample in family.samples
        if sample.name == names.METRIC_PREFIX + name
    ]


async def total(picker: Picker, name: str) -> float:
    return sum((await figures(picker)).get(name, []))


async def has_ready(picker: Picker, count: int) -> bool:
    """Whether so many endpoints may be chosen now."""
    # A picker that has only just opened its ports tells no figures of its pool yet.
    return (await figures(picker)).get("ready_endpoints") == [count]


async def until(holds: Callable[[], object], what: str) -> None:
    """Wait for something that comes soon. `holds` may be awaitable."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        held = holds()
        if await held if asyncio.iscoroutine(held) else held:
            return
        assert asyncio.get_running_loop().time() < deadline, f"still not after {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(0.05)


async def settled(picker: Picker) -> Figures:
    """The picker's figures once nothing is in flight any more; fails where something stays."""
    # Gauges of the pool are renewed now and then: what was true before the load is no proof.
    await asyncio.sleep(2 * GAUGES_EVERY_S)
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        seen = await figures(picker)
        left = {name: seen[name] for name in OF_REQUESTS_IN_FLIGHT if any(seen.get(name, ()))}
        if not left:
            return seen
        assert asyncio.get_running_loop().time() < deadline, f"still in flight: {left}"
        await asyncio.sleep(0.1)


async def idle(engines: LabEngines) -> None:
    """Wait until no engine computes anything; fails where one goes on."""

    async def none_computes() -> bool:
        stats = await engines.stats()
        return not any(engine.running or engine.waiting for engine in stats.engines)

    await until(none_computes, "engines idle")


async def decisions(picker: Picker, last: int = 256, **query: str) -> dict[str, str]:
    """Address that each of the last requests was sent to, by request id."""
    url = picker.admin_url + DECISIONS_PATH
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, params={"last": str(last), **query}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        found = await answer.json()
    return {each["request_id"]: each["legs"][0]["chosen"][0] for each in reversed(found)}


def complaints(picker: Picker) -> list[str]:
    """Lines of the log that tell of a fault in the picker itself."""
    marks = ("Traceback", "stacktrace", "never retrieved", "was never awaited", '"level": "error"')
    lines = picker.child.log_path.read_text(errors="replace").splitlines()
    return [line for line in lines if any(mark in line for mark in marks)]
