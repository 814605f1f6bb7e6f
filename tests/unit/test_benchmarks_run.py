"""Every row of the benchmarks still runs against the code as it is. Its figures are not looked at."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import run
from benchmarks.rows import plugins, timing
from benchmarks.rows.timing import SMOKE, Effort, Result, cpu_us
from epp.config.load import default_config
from epp.config.registry import built_in_registry

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


# -- plugins ----------------------------------------------------------------------------------------


def test_every_type_that_takes_part_in_a_choice_or_its_answer_is_measured() -> None:
    registry = built_in_registry()
    measured = {each.spec.type for each in plugins.additions(registry)}
    other_names = {"by-label-selector", "tokenizer"}
    taking_part = {spec.type for spec in registry.specs.values() if spec.kind in plugins.KINDS}
    assert measured == taking_part - other_names
    assert set(plugins.MINIMAL) <= measured
    labels = [each.label for each in plugins.additions(registry)]
    assert len(set(labels)) == len(labels)


def test_type_without_the_parameters_it_requires_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: given for name, given in plugins.MINIMAL.items() if name != "utilization-filter"}
    monkeypatch.setattr(plugins, "MINIMAL", kept)
    with pytest.raises(LookupError, match="utilization-filter has required parameters"):
        plugins.additions(built_in_registry())


@pytest.mark.parametrize("base", plugins.BASES, ids=lambda base: base.name)
def test_what_plugins_are_held_against_is_the_default(base: plugins.Base) -> None:
    """Written out as a file, so that one plugin can be added to it."""
    default, written = default_config(), plugins.configuration(base)
    for loaded in (default, written):
        (profile,) = loaded.profiles
        assert [(use.name, use.weight) for use in profile.plugins] == [
            ("queue-scorer", 2.0),
            ("kv-cache-utilization-scorer", 2.0),
            ("prefix-cache-scorer", 3.0),
            ("max-score-picker", 1.0),
        ]
    assert {plugin.spec.type for plugin in written.plugins} == {
        plugin.spec.type for plugin in default.plugins
    }
    assert (written.handler, written.detector, written.producers) == (
        default.handler,
        default.detector,
        default.producers,
    )


def test_default_runs_no_code_of_plugins_that_are_not_configured() -> None:
    """These tuples are all that a request passes beside its profile."""
    chosen = plugins.Bench(default_config(), 1).assembly.plugins
    running: list[object] = [*chosen.producers, *chosen.placed, *chosen.answered]
    assert all(hook is running[0] for hook in running)
    assert [*chosen.request_hooks, *chosen.screeners, *chosen.admitters, *chosen.reporters] == []


def test_what_slows_a_whole_round_is_no_cost_of_a_plugin() -> None:
    drift = [100.0, 400.0, 250.0, 90.0, 100.0]
    references = [[one - 2.0 for one in drift], [one + 2.0 for one in drift]]
    assert plugins.more([one + 7.0 for one in drift], references) == pytest.approx((7.0, 7.0, 7.0))
    assert plugins.more([101.0, 403.0, 255.0, 97.0, 109.0], references) == pytest.approx((3.0, 5.0, 7.0))
