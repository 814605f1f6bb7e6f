"""`warmroute demo`: the same chats through Envoy's round robin and through the picker, side by side."""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from epp.errors import ConfigError, Problem
from epp.lab.envoy import find_envoy
from epp.lab.picture import side_by_side
from epp.lab.player import Answered, Run, play
from epp.lab.servers import FleetStats
from epp.lab.stack import Stack
from epp.lab.workload import (
    Turn,
    Workload,
    infinite_cache_hit_ratio,
    load_workload,
    plan,
    read_mooncake_trace,
)

Floats = NDArray[np.float64]
DEMO_WORKLOAD = Path(__file__).with_name("demo.json")
MOST_LAG = 0.10
REQUESTS_FAILED, ENGINES_LAGGED = 1, 3
"""Exit statuses; the second says that this machine was too busy, not that anything is wrong."""
_TRACE_OUTPUT_TOKENS = 64


class Summary(msgspec.Struct, frozen=True):
    """One policy's figures.

    Attributes:
        ttft_p50_ms, ttft_p90_ms: of the requests that were answered; None where none was.
        hit_ratio: cached prompt tokens of all, as the engines counted them.
        lag_p99_share: how late the engines' steps ended, as a part of a step.
    """

    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    output_tokens_per_s: float
    hit_ratio: float
    requests: int
    errors: int
    requests_per_engine: list[int]
    lag_p99_share: float


@dataclass(frozen=True, slots=True)
class Played:
    """One policy: what clients saw, and what the engines counted."""

    answered: Sequence[Answered]
    stats: FleetStats
    duration_s: float

    def ttft_ms(self) -> Floats:
        return np.array(
            [each.ttft_s * 1e3 for each in self.answered if each.ttft_s is not None and not each.error]
        )

    def summary(self) -> Summary:
        ttft_ms = self.ttft_ms()
        queries = sum(engine.query_tokens for engine in self.stats.engines)
        hits = sum(engine.hit_tokens for engine in self.stats.engines)
        output = sum(each.usage.output_tokens for each in self.answered if each.usage and not each.error)
        p50, p90 = (_percentile(ttft_ms, percent) for percent in (50, 90))
        return Summary(
            ttft_p50_ms=p50,
            ttft_p90_ms=p90,
            output_tokens_per_s=round(output / self.duration_s, 1),
            hit_ratio=round(hits / queries, 4) if queries else 0.0,
            requests=len(self.answered),
            errors=sum(each.error is not None for each in self.answered),
            requests_per_engine=[engine.requests for engine in self.stats.engines],
            lag_p99_share=self.stats.lag.p99_share,
        )


def _percentile(values: Floats, percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 1) if len(values) else None


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `warmroute demo` was asked for."""

    workload: Path
    picture: Path
    seed: int | None = None
    json_file: Path | None = None
    trace: Path | None = None
    trace_speed_up: float = 1.0
    trace_limit: int | None = None
    envoy: Path | None = None
    keep: bool = False


def demo(options: DemoOptions, console: Console) -> int:
    """Play both policies, show them, write the files asked for. Returns the exit status.

    Raises:
        ConfigError: the workload or trace cannot be used.
        WarmrouteError: Envoy is missing, or a process did not come up.
    """
    workload = load_workload(options.workload)
    turns = _turns(options, workload)
    envoy = find_envoy(options.envoy)
    with tempfile.TemporaryDirectory(prefix="warmroute-demo-") as folder:
        return asyncio.run(_demo(options, workload, turns, envoy, Path(folder), console))


def _turns(options: DemoOptions, workload: Workload) -> list[Turn]:
    if options.trace is None:
        return plan(workload, options.seed)
    max_prompt_tokens = _trace_prompt_tokens(workload)
    if max_prompt_tokens < 1:
        least = workload.fleet.max_model_len - max_prompt_tokens + 1
        raise ConfigError(
            str(options.workload), Problem("$.fleet.max_model_len", f"must be at least {least} for a trace")
        )
    return read_mooncake_trace(
        options.trace,
        speed_up=options.trace_speed_up,
        seed=options.seed or 0,
        limit=options.trace_limit,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=_TRACE_OUTPUT_TOKENS,
    )


def _trace_prompt_tokens(workload: Workload) -> int:
    """The longest prompt that fits the engines with its answer and the chat template."""
    return workload.fleet.max_model_len - _TRACE_OUTPUT_TOKENS - 64


async def _demo(
    options: DemoOptions,
    workload: Workload,
    turns: Sequence[Turn],
    envoy: Path,
    folder: Path,
    console: Console,
) -> int:
    fleet = workload.fleet
    console.print(
        f"[bold]{fleet.engines} simulated engines[/] ({fleet.fit}, {fleet.cache_tokens:,} tokens of cache "
        f"each), [bold]{len(turns)} requests[/] through a real Envoy, twice."
    )
    if options.trace is not None:
        console.print(
            f"{options.trace}: arrivals {options.trace_speed_up:g} times as fast, those of one timestamp "
            f"spread over 3 s; prompts cut to {_trace_prompt_tokens(workload):,} tokens, answers to "
            f"{_TRACE_OUTPUT_TOKENS}."
        )
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(
            Stack(fleet, workload.model, folder, envoy, engines_first=True)
        )
        round_robin = await _play(stack, stack.round_robin_url, "round robin", workload, turns, console)
        await stack.engines.reset()
        warmroute = await _play(stack, stack.gateway_url, "Warmroute", workload, turns, console)
        best = infinite_cache_hit_ratio(turns, fleet.block_size)
        summaries = {"round_robin": round_robin.summary(), "warmroute": warmroute.summary()}
        console.print(_table(summaries, best))
        _picture(options.picture, round_robin, warmroute, best)
        console.print(f"Picture: {options.picture}")
        if options.json_file is not None:
            _write_json(options.json_file, summaries, best, workload, options)
        status = _judge(summaries, console)
        if options.keep:
            await _keep(stack, workload, console)
        else:
            console.print(
                "To keep it running and send a request of your own with curl: "
                "[bold]warmroute demo --keep[/] (make demo ARGS=--keep)"
            )
    return status


async def _play(
    stack: Stack, url: str, name: str, workload: Workload, turns: Sequence[Turn], console: Console
) -> Played:
    columns = (
        TextColumn(f"{name:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(name, total=len(turns), state="")

        def show(run: Run) -> None:
            progress.update(task, completed=len(run.answered), state=_state(run))

        started = asyncio.get_running_loop().time()
        answered = await play(
            turns, url=url, model=workload.model, speed_up=workload.fleet.speed_up, progress=show
        )
        duration_s = asyncio.get_running_loop().time() - started
    return Played(answered, await stack.engines.stats(), duration_s)


def _state(run: Run) -> str:
    recent = [each for each in run.answered[-50:] if each.ttft_s is not None and each.usage]
    if not recent:
        return ""
    ttft_ms = 1e3 * sum(each.ttft_s or 0.0 for each in recent) / len(recent)
    cached = sum(each.usage.cached_tokens or 0 for each in recent if each.usage)
    prompt = sum(each.usage.prompt_tokens for each in recent if each.usage)
    errors = sum(each.error is not None for each in run.answered)
    return f"TTFT {ttft_ms:6.0f} ms   cached {cached / prompt:4.0%}" + (
        f"   [red]{errors} failed[/]" if errors else ""
    )


def _table(summaries: dict[str, Summary], best: float) -> Table:
    table = Table(title="Simulated engines, real Envoy, real picker", title_justify="left")
    table.add_column("")
    table.add_column("round robin", justify="right")
    table.add_column("Warmroute", justify="right")
    left, right = summaries["round_robin"], summaries["warmroute"]
    table.add_row("TTFT p50, ms", _shown(left.ttft_p50_ms), _shown(right.ttft_p50_ms))
    table.add_row("TTFT p90, ms", _shown(left.ttft_p90_ms), _shown(right.ttft_p90_ms))
    table.add_row("output tokens/s", f"{left.output_tokens_per_s:,.0f}", f"{right.output_tokens_per_s:,.0f}")
    table.add_row("cache hit ratio", f"{left.hit_ratio:.3f}", f"{right.hit_ratio:.3f}")
    if best:
        table.add_row(
            "  of one infinite cache's", f"{left.hit_ratio / best:.0%}", f"{right.hit_ratio / best:.0%}"
        )
    table.add_row("requests", str(left.requests), str(right.requests))
    table.add_row("  failed", str(left.errors), str(right.errors))
    for index, (one, other) in enumerate(
        zip(left.requests_per_engine, right.requests_per_engine, strict=True), 1
    ):
        table.add_row(f"  on engine {index}", str(one), str(other))
    table.add_row("engines' lag, p99 of a step", f"{left.lag_p99_share:.1%}", f"{right.lag_p99_share:.1%}")
    return table


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _judge(summaries: dict[str, Summary], console: Console) -> int:
    """Exit status: 0, unless requests failed or the engines could not keep their own schedule."""
    late = {name: each.lag_p99_share for name, each in summaries.items() if each.lag_p99_share > MOST_LAG}
    failed = {name: each.errors for name, each in summaries.items() if each.errors}
    for name, share in late.items():
        console.print(
            f"[red]{name}: the simulated engines lagged {share:.0%} of a step behind their schedule "
            f"(p99); above {MOST_LAG:.0%} the figures mean nothing.[/] "
            "This machine is too busy: close other programs."
        )
    for name, count in failed.items():
        console.print(f"[red]{name}: {count} requests failed[/]")
    return REQUESTS_FAILED if failed else ENGINES_LAGGED if late else 0


def _write_json(
    path: Path, summaries: dict[str, Summary], best: float, workload: Workload, options: DemoOptions
) -> None:
    """`{"round_robin": {...}, "warmroute": {...}}`, each with its figures and what they were made with."""
    made_with = {
        "infinite_cache_hit_ratio": round(best, 4),
        "workload": workload.name if options.trace is None else str(options.trace),
        "seed": workload.seed if options.seed is None else options.seed,
        "engines": "simulated",
    }
    data = {name: {**msgspec.to_builtins(summary), **made_with} for name, summary in summaries.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")


async def _keep(stack: Stack, workload: Workload, console: Console) -> None:
    body = json.dumps(
        {
            "model": workload.model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 16,
            "stream": True,
        }
    )
    console.print(
        "\nStill running; Ctrl-C ends it. Send a request of your own:\n\n"
        f"  curl -N {stack.gateway_url}/v1/chat/completions \\\n"
        f"    -H 'content-type: application/json' \\\n    -d '{body}'\n\n"
        "and ask why it went where it went:\n\n"
        f"  warmroute explain --admin {stack.pickers[0].admin_url}\n",
        highlight=False,
        soft_wrap=True,
    )
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        console.print("ended")


def _picture(path: Path, round_robin: Played, warmroute: Played, best: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    side_by_side(path, round_robin, warmroute, best)
