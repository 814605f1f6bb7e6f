"""A pool of 500 pods with two ports each on a real control plane: start, CPU, memory, how late decisions are.

    python -m benchmarks.kubernetes [--only SECTION]... [--pods N] [--starts N] [--window S] [--json FILE]

The API server is a real one (`python tools/control_plane.py build`), with the picker's Role; what kubelets
would say of the pods is written straight, and one process answers at all their addresses with a recorded page
of vLLM. `warmroute serve` runs in a process of its own, whose CPU is told alone.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import grpc.aio

from benchmarks.rows import machine, traffic
from benchmarks.rows.children import Serve
from benchmarks.rows.cluster import LARGE, SMALL, SMALL_PODS, Pools, pools
from benchmarks.rows.decisions import asked, decide
from benchmarks.rows.machine import process_cpu_s, resident_mib
from benchmarks.rows.timing import calibration_ms
from e2e.kube import running_plane
from tools.control_plane import ControlPlane

NO_SCRAPING: Final = "--refresh-metrics-interval=300s"
PROBE_EVERY_S: Final = 0.05
SETTLE_S: Final = 3.0
WINDOWS: Final = 3
ROLLS_AT_ONCE: Final = 20
TERMINATING_S: Final = 2.0

Start = Callable[[], AbstractContextManager[Serve]]


@dataclass
class Row:
    """Samples in `unit`, less is better, and further figures of the same run.

    Attributes:
        other_cores: CPU of everything but the picker, those who play the cluster included.
    """

    row: str
    unit: str
    samples: list[float]
    budget: float | None = None
    detail: dict[str, float] = field(default_factory=dict)
    other_cores: float = 0.0

    def __str__(self) -> str:
        notes = "; ".join(f"{key} {value:.4g}" for key, value in self.detail.items())
        best, middle = min(self.samples), statistics.median(self.samples)
        return f"{self.row:<62} {best:>8.4g} {middle:>8.4g} {self.unit:<6} {notes}"


@dataclass(frozen=True)
class Effort:
    """`window_s`: how long a picker is watched at once."""

    starts: int
    window_s: float


Rows = AsyncIterator[Row]


@asynccontextmanager
async def running(start: Start) -> AsyncIterator[Serve]:
    """A picker that is ready."""
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, start())


# -- start ------------------------------------------------------------------------------------------


async def starts(at: Pools, effort: Effort) -> Rows:
    """From exec to health's yes and to the first decision, in turns."""
    kinds: dict[str, tuple[float, Start]] = {
        f"file, {SMALL_PODS} pods": (2.0, lambda: at.file(at.small)),
        f"file, {len(at.large.addresses)} pods": (2.0, lambda: at.file(at.large)),
        f"Kubernetes, {SMALL_PODS} pods": (5.0, lambda: at.cluster(SMALL)),
        f"Kubernetes, {len(at.large.addresses)} pods": (5.0, lambda: at.cluster(LARGE)),
    }
    rows = {name: Row(f"start to ready, {name}", "s", [], budget) for name, (budget, _) in kinds.items()}
    decided: dict[str, list[float]] = {name: [] for name in kinds}
    used: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(effort.starts):
        for name, (_, start) in kinds.items():
            neighbours = machine.Neighbours()
            async with running(start) as picker:
                used[name].append(process_cpu_s(picker.pid))
                asked_at = time.monotonic()
                async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel:
                    await decide(channel, next(traffic.Chats(1000, seed=turn)), turn)
                decided[name].append(picker.ready_s + time.monotonic() - asked_at)
                rows[name].samples.append(picker.ready_s)
            rows[name].other_cores = neighbours.cores()
    for name, row in rows.items():
        row.detail = {
            "first_decision_s": statistics.median(decided[name]),
            "cpu_s": statistics.median(used[name]),
        }
        yield row


# -- while it runs ----------------------------------------------------------------------------------


@dataclass
class Window:
    """What a picker used in a while."""

    cpu_s: float = 0.0
    seconds: float = 0.0
    other_cores: float = 0.0
    resident_mib: float = 0.0

    @property
    def cores(self) -> float:
        return self.cpu_s / self.seconds


@contextmanager
def watched(picker: Serve) -> Iterator[Window]:
    """Known when it is over."""
    window, neighbours = Window(), machine.Neighbours()
    before_s, began = process_cpu_s(picker.pid), time.monotonic()
    yield window
    window.cpu_s, window.seconds = process_cpu_s(picker.pid) - before_s, time.monotonic() - began
    window.other_cores = neighbours.cores() - window.cores
    window.resident_mib = resident_mib(picker.pid)


async def quiet(at: Pools, effort: Effort) -> Rows:
    """Nothing changes, nobody asks. Unless told otherwise every endpoint is scraped once a second."""
    kinds: dict[str, Start] = {
        "file": lambda: at.file(at.large),
        "Kubernetes": lambda: at.cluster(LARGE),
        "file, not scraped": lambda: at.file(at.large, NO_SCRAPING),
        "Kubernetes, not scraped": lambda: at.cluster(LARGE, NO_SCRAPING),
    }
    for name, start in kinds.items():
        async with running(start) as picker:
            await asyncio.sleep(SETTLE_S)
            windows = []
            for _ in range(WINDOWS):
                with watched(picker) as window:
                    await asyncio.sleep(effort.window_s)
                windows.append(window)
        row = Row(f"quiet, {name}", "cores", [window.cores for window in windows])
        row.detail = {"resident_mib": window.resident_mib}
        row.other_cores = window.other_cores
        yield row


async def changes(at: Pools, effort: Effort) -> Rows:
    """One pod changes, pages are not scraped: cores at one change a second; what each costs, at twenty."""
    name = next(iter(at.large.addresses))
    path = at.namespace.path("v1", "Pod", name)

    async def annotated(turn: int) -> None:
        await at.namespace.client.patch(path, {"metadata": {"annotations": {"turn": str(turn)}}})

    async def flapping(turn: int) -> None:
        await at.large.ready(name, turn % 2 == 1)

    async with running(lambda: at.cluster(LARGE, NO_SCRAPING)) as picker:
        await asyncio.sleep(SETTLE_S)
        for what, change in (("annotation", annotated), ("readiness", flapping)):
            slow = Row(f"a pod's {what} changes once a second, not scraped", "cores", [])
            each = Row(f"a pod's {what} changes: each", "ms", [])
            for _ in range(WINDOWS):
                with watched(picker) as before:
                    await asyncio.sleep(effort.window_s)
                with watched(picker) as window:
                    await _every(1.0, change, effort.window_s)
                slow.samples.append(window.cores)
                slow.other_cores = window.other_cores
                with watched(picker) as window:
                    turns = await _every(0.05, change, effort.window_s)
                each.samples.append((window.cores - before.cores) * window.seconds * 1000 / turns)
                each.other_cores, each.detail = window.other_cores, {"a_second": turns / window.seconds}
            yield slow
            yield each
    await at.large.ready(name, True)


async def _every(period_s: float, change: Callable[[int], Awaitable[None]], seconds: float) -> int:
    """How many changes there were."""
    began, turn = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        await change(turn)
        turn += 1
        await asyncio.sleep(max(0.0, began + turn * period_s - time.monotonic()))
    return turn


async def rolling(at: Pools, effort: Effort) -> Rows:
    """Every pod is replaced, twenty at a time, while a decision is asked for every 50 ms."""
    pods = len(at.large.addresses)
    for suffix, flags in ((", not scraped", [NO_SCRAPING]), ("", [])):
        async with running(lambda flags=flags: at.cluster(LARGE, *flags)) as picker:  # type: ignore[misc]
            await asyncio.sleep(SETTLE_S)
            async with asked(picker.grpc_port, PROBE_EVERY_S) as late:
                with watched(picker) as window:
                    await asyncio.sleep(effort.window_s)
            yield _lateness(f"a decision, quiet{suffix}", late, window)
            async with asked(picker.grpc_port, PROBE_EVERY_S) as late:
                with watched(picker) as window:
                    await _roll(at)
            yield _lateness(f"a decision, while all pods are replaced{suffix}", late, window)
            row = Row(f"all pods replaced, CPU a pod{suffix}", "ms", [window.cpu_s * 1000 / pods])
            row.detail = {
                "pods_a_second": pods / window.seconds,
                "cores": window.cores,
                "resident_mib": window.resident_mib,
            }
            row.other_cores = window.other_cores
            yield row


def _lateness(what: str, late: list[float], window: Window) -> Row:
    """The median is the row, the worst are its detail."""
    row = Row(what, "ms", [statistics.median(late)], other_cores=window.other_cores)
    row.detail = {
        "p99": sorted(late)[int(0.99 * len(late))],
        "longest": max(late),
        "count": len(late),
        "cores": window.cores,
    }
    return row


async def _roll(at: Pools) -> None:
    waiting = list(at.large.addresses)

    async def lane() -> None:
        while waiting:
            await at.large.replace(waiting.pop(), TERMINATING_S)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(ROLLS_AT_ONCE):
            lanes.create_task(lane())


# -- all --------------------------------------------------------------------------------------------

SECTIONS: Final[dict[str, Callable[[Pools, Effort], Rows]]] = {
    "starts": starts,
    "quiet": quiet,
    "changes": changes,
    "rolling": rolling,
}


async def measured(
    plane: ControlPlane, folder: Path, sections: list[str], pods: int, effort: Effort
) -> list[Row]:
    rows = []
    began = time.monotonic()
    async with pools(plane, folder, pods) as at:
        print(f"{pods} pods made in {time.monotonic() - began:.1f} s", flush=True)
        for name in sections:
            async for row in SECTIONS[name](at, effort):
                rows.append(row)
                print(row, flush=True)
    return rows


def rounded(told: Any) -> Any:
    """With four digits that count."""
    match told:
        case float():
            return float(f"{told:.4g}")
        case list():
            return [rounded(each) for each in told]
        case dict():
            return {key: rounded(each) for key, each in told.items()}
    return told


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(SECTIONS)), help="A section; may be repeated.")
@click.option("--pods", default=500, show_default=True, help="Of the large pool.")
@click.option("--starts", default=5, show_default=True, help="Of each kind.")
@click.option("--window", default=20.0, show_default=True, help="Seconds in which a picker is watched.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write this file.")
def main(only: tuple[str, ...], pods: int, starts: int, window: float, file: Path | None) -> None:
    """Measure, or the sections given by --only."""
    sections = list(only or SECTIONS)
    report = {
        "command": " ".join(
            [
                "python -m benchmarks.kubernetes",
                *(f"--only {name}" for name in only),
                f"--pods {pods} --starts {starts} --window {window:g}",
            ]
        ),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.describe(),
        "load_before": os.getloadavg(),
        "calibration_ms": round(calibration_ms(), 2),
    }
    with tempfile.TemporaryDirectory() as name, running_plane(Path(name) / "plane") as plane:
        rows = asyncio.run(measured(plane, Path(name), sections, pods, Effort(starts, window)))
    report |= {"load_after": os.getloadavg(), "rows": [rounded(asdict(row)) for row in rows]}
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
