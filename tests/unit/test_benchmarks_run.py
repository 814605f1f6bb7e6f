"""Every row of the benchmarks still runs against the code as it is. Its figures are not looked at."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import run
from benchmarks.rows import timing
from benchmarks.rows.timing import SMOKE, Effort, Result, cpu_us

UNITS = {"us", "ms", "s", "bytes", "cores", "MiB"}


@pytest.mark.parametrize("section", list(run.SECTIONS))
def test_section_yields_rows(section: str) -> None:
    results = run.SECTIONS[section](SMOKE)
    assert results
    for result in results:
        assert result.unit in UNITS
        assert result.samples
        assert all(math.isfinite(sample) and sample >= 0 for sample in result.samples)
        assert all(math.isfinite(figure) for figure in result.detail.values())


def test_report_says_what_was_measured_on_what(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(run.main, ["--smoke", "--only", "chunk", "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["command"] == "benchmarks/run.py --only chunk --smoke"
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["python"].startswith("3.")
    assert len(report["load_before"]) == len(report["load_after"]) == 3
    (row,) = report["rows"]
    assert row["row"] in done.output
    assert row["of_calibration"] == pytest.approx(row["best"] / (row["calibration_ms"] * 1000), rel=0.02)


def test_rows_have_names_of_their_own_and_none_is_left_for_later() -> None:
    rows = [result.row for name in ("choosing", "counting", "chunk") for result in run.SECTIONS[name](SMOKE)]
    assert len(set(rows)) == len(rows)
    assert not set(rows) & {name for name, _ in run.LATER}


def test_time_is_shared_out_among_calls_and_things(monkeypatch: pytest.MonkeyPatch) -> None:
    spent_s = 0.0

    def action() -> None:
        nonlocal spent_s
        spent_s += 0.5

    def between() -> None:
        nonlocal spent_s
        spent_s += 100.0

    monkeypatch.setattr(timing.time, "process_time", lambda: spent_s)
    samples = cpu_us(action, Effort(repeats=3, inner=4), per=10, between=between)
    assert samples == (0.5 / 10 * 1e6,) * 3


def test_best_is_the_least_sample_and_median_the_middle_one() -> None:
    result = Result("row", "us", 1.0, (5.0, 1.0, 3.0))
    assert (result.best, result.median) == (1.0, 3.0)
