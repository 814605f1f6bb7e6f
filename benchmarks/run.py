"""The budgets of the design, measured on this machine.

    python benchmarks/run.py [--only SECTION]... [--json FILE] [--smoke]

CPU time on one core unless a row says otherwise: best and median of the repeats, and the best as a share of a
calibration loop timed just before, so that machines (and hours of load) can be compared.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.rows import (
    answers,
    apis,
    header_blocks,
    index,
    machine,
    plugins,
    requests,
    resident,
    scraping,
    transport,
)
from benchmarks.rows.timing import FULL, SMOKE, Effort, Result, calibration_ms

SECTIONS: dict[str, Callable[[Effort], list[Result]]] = {
    "choosing": requests.choosing,
    "counting": requests.counting,
    "apis": apis.preparing,
    "plugins": plugins.costs,
    "long-prompt": requests.long_prompt,
    "index-lookup": index.lookups,
    "index-memory": index.memory,
    "chunk": answers.answer_chunk,
    "request": answers.whole_request,
    "streamed-chat": answers.streamed_chat,
    "header-blocks": header_blocks.reading,
    "own": transport.through_own,
    "grpcio": transport.through_grpcio,
    "scrape": scraping.one_page,
    "idle": scraping.idle,
    "start": scraping.start,
    "resident": resident.memory,
}

LATER = (
    ("index memory, precise", "64 bytes a (block, endpoint)"),
    ("ingest of KV events, prefill store / single decode block", "2 / 10 us a block"),
    ("predictor, two targets, 32 / 512 endpoints", "1.5 / 5 ms"),
    ("resident memory with a precise index", "350 MB"),
    ("sidecar, one streamed chunk", "60 us"),
)

_LINE = "{:<70} {:>8} {:>10} {:>10} {:<6} {:>9}  {}"


def measured(name: str, effort: Effort) -> list[dict[str, object]]:
    """One section: its rows as plain data, with calibration and neighbours of the same minutes."""
    calibrated = calibration_ms()
    neighbours = machine.Neighbours()
    results = SECTIONS[name](effort)
    others = round(neighbours.cores(), 2)
    rows: list[dict[str, object]] = []
    for result in results:
        share = _in_us(result) / (calibrated * 1000) if _in_us(result) else None
        rows.append(
            {
                "section": name,
                "row": result.row,
                "unit": result.unit,
                "budget": result.budget,
                "best": _rounded(result.best),
                "median": _rounded(result.median),
                "of_calibration": None if share is None else round(share, 6),
                "apart": result.apart,
                "detail": {key: _rounded(value) for key, value in result.detail.items()},
                "samples": [_rounded(sample) for sample in result.samples],
                "calibration_ms": round(calibrated, 2),
                "other_cores": others,
            }
        )
        _show(rows[-1])
    return rows


def _in_us(result: Result) -> float:
    """The best as microseconds of CPU; 0 where the unit is none of CPU time."""
    return result.best * {"us": 1.0, "ms": 1000.0}.get(result.unit, 0.0)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _show(row: dict[str, object]) -> None:
    share = row["of_calibration"]
    notes = [f"{key} {value:g}" for key, value in row["detail"].items()]  # type: ignore[attr-defined]
    budget = row["budget"]
    print(
        _LINE.format(
            row["row"],
            "-" if budget is None else f"{budget:g}",
            f"{row['best']:g}",
            f"{row['median']:g}",
            row["unit"],
            "-" if share is None else f"{share * 1000:.3g}",  # type: ignore[operator]
            "; ".join(([str(row["apart"])] if row["apart"] else []) + notes),
        ).rstrip(),
        flush=True,
    )


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(SECTIONS)), help="A section; may be repeated.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write this file.")
@click.option("--smoke", is_flag=True, help="See that every row works; its figures mean nothing.")
def main(only: tuple[str, ...], file: Path | None, smoke: bool) -> None:
    """Measure the budgets, or the sections given by --only."""
    effort = SMOKE if smoke else FULL
    command = " ".join(["benchmarks/run.py", *(f"--only {name}" for name in only), *(["--smoke"] * smoke)])
    report = {
        "command": command,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.describe(),
        "load_before": os.getloadavg(),
        "calibration_ms_before": round(calibration_ms(), 2),
    }
    print(json.dumps(report["machine"]))
    print(f"load {os.getloadavg()[0]:.2f}, calibration {report['calibration_ms_before']} ms\n")
    print(_LINE.format("", "budget", "best", "median", "", "‰ of cal.", "").rstrip())
    rows = [row for name in only or SECTIONS for row in measured(name, effort)]
    for name, budget in () if only else LATER:
        print(_LINE.format(name, "", "later", "", "", "", f"budget {budget}"))
    report |= {
        "load_after": os.getloadavg(),
        "calibration_ms_after": round(calibration_ms(), 2),
        "rows": rows,
        "later": [] if only else [{"row": name, "budget": budget} for name, budget in LATER],
    }
    print(f"\nload {os.getloadavg()[0]:.2f}, calibration {report['calibration_ms_after']} ms")
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
