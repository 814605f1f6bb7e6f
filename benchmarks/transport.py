"""The transports beside grpc-go, in turns in one run, behind a client that costs less than they do.

    python benchmarks/transport.py [--servers NAME]... [--shapes NAME]... [--rounds N] [--json FILE] [--smoke]

Needs Go. `loadgen` speaks ext-proc as Envoy does and checks every reply; `anchor` is grpc-go with generated
messages. In each round of a shape every server has its turn, in a process of its own. Figures are medians
over the rounds with the least and the greatest; `of anchor` is the median of the rounds' ratios.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.rows import machine
from benchmarks.rows.children import page_server, serve
from benchmarks.rows.timing import calibration_ms
from epp.runtime.tls import self_signed
from tools.go_programs import BuildError, built

MODULE = Path(__file__).with_name("transport")
ENDPOINTS = 8
ANCHOR = "anchor"
BESIDES_S = 200.0
SMOKE_S = 0.4
BUSY_CLIENT_CORES = 0.9
Run = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """One kind of traffic.

    Attributes:
        per: what the server's CPU is divided by: `pick` (a request up to its choice) or `pair` (an answer
            chunk and its reply).
        loads: arguments of `loadgen`, one run after the other on one server; the figures are of the last.
        warm_s: time before measuring, of each load.
        decide_ms: CPU that every decision burns. Only stand-ins can, so that only they meet this shape.
    """

    what: str
    per: str
    loads: tuple[str, ...]
    warm_s: float = 1.0
    tls: bool = False
    decide_ms: float = 0.0


SHAPES = {
    "request": Shape("request without answer, 32 at a time, saturated", "pick", ("-streams 32",)),
    "request-500": Shape("the same at 500 a second", "pick", ("-rate 500",)),
    "request-traced": Shape(
        "request, saturated, traceparent and x-request-id on each stream", "pick", ("-streams 32 -traced",)
    ),
    "request-tls": Shape("request, saturated, over TLS", "pick", ("-streams 32",), tls=True),
    "request-answered": Shape(
        "request and plain answer, 32 at a time, saturated", "pick", ("-streams 32 -chunks 1",)
    ),
    "chat": Shape(
        "request and answer of 100 chunks, 32 at a time, saturated", "pick", ("-streams 32 -chunks 100",)
    ),
    "pair": Shape("chunk and reply, 32 streams, saturated", "pair", ("-streams 32 -chunks -1",)),
    "pair-5000": Shape(
        "chunk and reply, 100 streams, 5,000 a second", "pair", ("-streams 100 -chunks -1 -gap 20ms",)
    ),
    "pair-5000-steps": Shape(
        "the same from 8 engines: the chunks of a step come together",
        "pair",
        ("-streams 100 -chunks -1 -gap 20ms -together 13",),
    ),
    "pair-1000": Shape(
        "chunk and reply, 20 streams, 1,000 a second", "pair", ("-streams 20 -chunks -1 -gap 20ms",)
    ),
    "pair-tls": Shape(
        "chunk and reply, 32 streams, saturated, TLS", "pair", ("-streams 32 -chunks -1",), tls=True
    ),
    "body-200k": Shape("request of 200 kB, 8 at a time", "pick", ("-streams 8 -body 200000",)),
    "body-2m": Shape("request of 2 MB, 4 at a time", "pick", ("-streams 4 -body 2000000",)),
    "streams-1000": Shape(
        "chunk and reply, 1,000 streams, 10 a second each",
        "pair",
        ("-streams 1000 -chunks -1 -gap 100ms",),
        warm_s=3.0,
    ),
    "beside-decisions": Shape(
        "5,000 chunks a second beside 50 decisions of 5 ms CPU a second",
        "pair",
        ("-streams 100 -chunks -1 -gap 20ms -rate 50",),
        warm_s=2.0,
        decide_ms=5.0,
    ),
    "beside-bodies": Shape(
        "5,000 chunks a second beside 2 requests of 2 MB a second",
        "pair",
        ("-streams 100 -chunks -1 -gap 20ms -rate 2 -rate-body 2000000",),
        warm_s=2.0,
    ),
    "memory": Shape(
        "after saturated requests, 1,000 streams and 2 MB bodies on one server: memory at the end",
        "pick",
        ("-streams 32", "-streams 1000 -chunks -1 -gap 100ms", "-streams 4 -body 2000000"),
    ),
}


@dataclass(frozen=True)
class Running:
    """A server that listens on loopback."""

    pid: int
    port: int


@dataclass(frozen=True)
class Setting:
    """What servers are started with. `certificates`: the folder that TLS is served from; empty: none is."""

    folder: Path
    pages: Sequence[int]
    certificates: str
    decide_ms: float


@contextmanager
def _product(transport: str, setting: Setting) -> Iterator[Running]:
    flags = [f"--transport={transport}", "--refresh-metrics-interval=300s"]
    if setting.certificates:
        flags += ["--secure-serving=true", f"--cert-path={setting.certificates}"]
    with serve(setting.folder, setting.pages, *flags) as picker:
        yield Running(picker.pid, picker.grpc_port)


@contextmanager
def _stand_in(command: Sequence[str], setting: Setting) -> Iterator[Running]:
    flags = ["-decide-ms", str(setting.decide_ms)]
    if setting.certificates:
        flags += ["-cert-path", setting.certificates]
    dashes = "" if command[0] != sys.executable else "-"  # Go takes one or two, click only two
    flags = [f"{dashes}{flag}" if flag.startswith("-") else flag for flag in flags]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said:
                raise RuntimeError(f"{' '.join(command)} did not come up")
            yield Running(process.pid, int(said))
        finally:
            process.terminate()


def servers() -> dict[str, Callable[[Setting], AbstractContextManager[Running]]]:
    """By name: `warmroute serve` with each transport, the transports by themselves, and the anchor."""
    python = [sys.executable, "-m", "benchmarks.transport_server"]
    return {
        "own": lambda setting: _product("own", setting),
        "grpcio": lambda setting: _product("grpcio", setting),
        "own-bare": lambda setting: _stand_in([*python, "own"], setting),
        "grpcio-bare": lambda setting: _stand_in([*python, "grpcio"], setting),
        ANCHOR: lambda setting: _stand_in([str(built(MODULE, "./anchor"))], setting),
    }


SERVERS = ("own", "grpcio", "own-bare", "grpcio-bare", ANCHOR)
WHOLE = ("own", "grpcio")


def one_run(shape: Shape, server: str, pages: Sequence[int], certificates: str, seconds: float) -> Run:
    """One server under one shape: what the load generator tells, and what else ran meanwhile."""
    neighbours = machine.Neighbours()
    run: Run = {}
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), pages, certificates if shape.tls else "", shape.decide_ms)
        with servers()[server](setting) as running:
            fresh_mib = machine.resident_mib(running.pid)
            for load in shape.loads:
                run = _loaded(running, shape, load, seconds)
                if run["failures"]:
                    break
    return run | {"fresh_mib": fresh_mib, "other_cores": round(neighbours.cores(), 2)}


def _loaded(running: Running, shape: Shape, load: str, seconds: float) -> Run:
    command = [
        *(str(built(MODULE, "./loadgen")), "-address", f"127.0.0.1:{running.port}", "-pid", str(running.pid)),
        *(
            "-warm",
            f"{shape.warm_s}s",
            "-time",
            f"{seconds}s",
            *(["-tls"] if shape.tls else []),
            *load.split(),
        ),
    ]
    deadline_s = shape.warm_s + seconds + BESIDES_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    try:
        run: Run = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {
            "failures": 1,
            "failure_texts": [done.stderr.strip()[-500:] or f"ended with {done.returncode}"],
        }
    count = run[f"{shape.per}s"]
    # Streams that stay open make none; the figures are of the last load.
    if not count and load == shape.loads[-1]:
        run = run | {"failures": run["failures"] + 1}
        run["failure_texts"].append(f"no {shape.per} in {seconds} s")
    return run | {"cpu_us": run["server_cpu_us"] / max(count, 1)}


def row(name: str, server: str, runs: Sequence[Run], anchors: Sequence[Run]) -> dict[str, object]:
    """One server under one shape, over the rounds. `anchors`: the anchor's runs of the same rounds."""
    shape = SHAPES[name]
    good = [run for run in runs if not run["failures"]]
    ratios = [
        run["cpu_us"] / anchor["cpu_us"]
        for run, anchor in zip(runs, anchors, strict=False)
        if not run["failures"] and not anchor["failures"]
    ]
    figures: dict[str, object] = {}
    if good:
        spent = sum(run["server_user_us"] + run["server_system_us"] for run in good)
        figures = {
            "cpu_us": _spread([run["cpu_us"] for run in good]),
            "of_anchor": _rounded(statistics.median(ratios)) if ratios else None,
            "user_share": _rounded(sum(run["server_user_us"] for run in good) / spent) if spent else None,
            "a_second": _spread([run[f"{shape.per}s"] / run["seconds"] for run in good]),
            "server_cores": _spread([run["server_cpu_us"] / run["seconds"] / 1e6 for run in good]),
            "client_cores": _spread([run["client_cpu_us"] / run["seconds"] / 1e6 for run in good]),
            **{
                f"{kind}_{figure}_ms": _spread([run[f"{kind}_us"][figure] / 1000 for run in good])
                for kind in ("pick", "pair", "late")
                for figure in ("p50", "p99")
            },
            **{
                f"{kind}_mib": _spread([run[f"{kind}_mib"] for run in good])
                for kind in ("fresh", "resident", "peak")
            },
        }
    return {
        "shape": name,
        "server": server,
        "per": shape.per,
        "failures": sum(run["failures"] for run in runs),
        "failure_texts": [text for run in runs for text in run["failure_texts"]][:5],
        **figures,
        "runs": [_plain(run) for run in runs],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _plain(run: Run) -> Run:
    return {key: _rounded(value) if isinstance(value, float) else value for key, value in run.items()}


_LINE = "{:<18} {:<12} {:>22} {:>8} {:>5} {:>8} {:>16} {:>16} {:>12} {:>6}"
_HEAD = (
    "",
    "",
    "CPU us [min-max]",
    "of anch.",
    "user",
    "a second",
    "pick p50/p99 ms",
    "pair p50/p99 ms",
    "MiB, peak",
    "client",
)


def _show(figures: dict[str, Any]) -> None:
    if "cpu_us" not in figures:
        print(
            f"{figures['shape']:<18} {figures['server']:<12} failed: {'; '.join(figures['failure_texts'])}",
            flush=True,
        )
        return
    cpu, share = figures["cpu_us"], figures["of_anchor"]
    times = [
        f"{figures[f'{kind}_p50_ms']['median']:.3g}/{figures[f'{kind}_p99_ms']['median']:.3g}"
        for kind in ("pick", "pair")
    ]
    busy = figures["client_cores"]["median"]
    print(
        _LINE.format(
            figures["shape"],
            figures["server"],
            f"{cpu['median']:.3g} [{cpu['min']:.3g}-{cpu['max']:.3g}]",
            "-" if share is None else f"{share:.2f}",
            "-" if figures["user_share"] is None else f"{figures['user_share']:.2f}",
            f"{figures['a_second']['median']:.0f}",
            *(text if text != "0/0" else "-" for text in times),
            f"{figures['resident_mib']['median']:.0f}, {figures['peak_mib']['median']:.0f}",
            f"{busy:.2f}{'!' if busy > BUSY_CLIENT_CORES else ''}",
        )
        + (f"  {figures['failures']} FAILED: {figures['failure_texts'][0]}" if figures["failures"] else ""),
        flush=True,
    )


def meets(server: str, shape: Shape) -> bool:
    return not (shape.decide_ms and server in WHOLE)


def measured(
    names: Sequence[str], chosen: Sequence[str], rounds: int, seconds: float, *, hurry: bool = False
) -> Iterator[dict[str, object]]:
    """Rows, shape by shape; the servers take turns within each round of a shape."""
    with tempfile.TemporaryDirectory() as certificates, page_server(ENDPOINTS) as pages:
        key, chain = self_signed()
        Path(certificates, "tls.key").write_bytes(key)
        Path(certificates, "tls.crt").write_bytes(chain)
        for name in names:
            shape = SHAPES[name]
            if hurry:
                shape = replace(shape, warm_s=SMOKE_S)
            turns = [server for server in chosen if meets(server, shape)]
            runs: dict[str, list[Run]] = {server: [] for server in turns}
            for _ in range(rounds):
                for server in turns:
                    calibrated = round(calibration_ms(), 2)
                    run = one_run(shape, server, pages, certificates, seconds)
                    runs[server].append(run | {"calibration_ms": calibrated})
            for server in turns:
                yield row(name, server, runs[server], runs.get(ANCHOR, []))


@click.command()
@click.option("--servers", "chosen", multiple=True, type=click.Choice(SERVERS), help="May be repeated.")
@click.option("--shapes", "names", multiple=True, type=click.Choice(list(SHAPES)), help="May be repeated.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=5.0, show_default=True, help="Time of measuring of one run.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write this file.")
@click.option("--smoke", is_flag=True, help="See that it all works; its figures mean nothing.")
def main(
    chosen: tuple[str, ...],
    names: tuple[str, ...],
    rounds: int,
    seconds: float,
    file: Path | None,
    smoke: bool,
) -> None:
    """Measure transports against each other and against grpc-go."""
    if smoke:
        rounds, seconds = 1, SMOKE_S
    try:
        for program in ("./loadgen", "./anchor"):
            built(MODULE, program)
    except BuildError as error:
        sys.exit(f"benchmarks/transport.py: {error}")
    report = {
        "command": f"benchmarks/transport.py {' '.join(sys.argv[1:])}".strip(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.describe(),
        "load_before": os.getloadavg(),
        "calibration_ms_before": round(calibration_ms(), 2),
        "rounds": rounds,
        "seconds": seconds,
    }
    print(json.dumps(report["machine"]))
    print(f"load {os.getloadavg()[0]:.2f}, calibration {report['calibration_ms_before']} ms\n")
    print(_LINE.format(*_HEAD))
    rows = []
    for figures in measured(names or tuple(SHAPES), chosen or SERVERS, rounds, seconds, hurry=smoke):
        rows.append(figures)
        _show(figures)
    report |= {"load_after": os.getloadavg(), "calibration_ms_after": round(calibration_ms(), 2)}
    report |= {"shapes": {name: shape.what for name, shape in SHAPES.items()}, "rows": rows}
    print(f"\nload {os.getloadavg()[0]:.2f}, calibration {report['calibration_ms_after']} ms")
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if any(figures["failures"] for figures in rows) else 0)


if __name__ == "__main__":
    main()
