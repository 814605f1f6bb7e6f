"""Options: durations in the Go form, what is wrong with values, and the flags made from the struct."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.runtime.options import Duration, Options, flags, reference


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("0s", 0.0),
        ("50ms", 0.05),
        ("200ms", 0.2),
        ("5s", 5.0),
        ("1m30s", 90.0),
        ("1h0m0.5s", 3600.5),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("1500us", 0.0015),
        ("1500\u00b5s", 0.0015),
        ("1500\u03bcs", 0.0015),
        ("2000000ns", 0.002),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration.parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 s", "-1s", "1x", "1s2", "\u0665s", "1,5s", ".s", "1s 2s", "00"]
)
def test_what_is_no_duration_is_told_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match="write a number with a unit, such as 200ms"):
        Duration.parse(text)


@given(st.integers(0, 10_000_000))
def test_a_duration_is_read_as_it_is_shown(milliseconds: int) -> None:
    duration = Duration(milliseconds / 1000)
    assert Duration.parse(str(duration)) == pytest.approx(duration, rel=1e-5)


def test_the_defaults_are_right() -> None:
    assert list(Options().problems()) == []


def test_every_wrong_value_is_named_by_its_flag() -> None:
    wrong = Options(
        grpc_port=65536,
        grpc_health_port=-1,
        metrics_port=1 << 20,
        admin_port=-5,
        max_request_body_bytes=0,
        max_held_bytes=-1,
        refresh_prometheus_metrics_interval=Duration(0.0),
        zap_encoder="xml",
    )
    assert [problem.path for problem in wrong.problems()] == [
        "--grpc-port",
        "--grpc-health-port",
        "--metrics-port",
        "--admin-port",
        "--max-request-body-bytes",
        "--max-held-bytes",
        "--refresh-prometheus-metrics-interval",
        "--zap-encoder",
    ]
    assert "'xml' is no log format; write json or console" in str(list(wrong.problems())[-1])


def test_every_field_is_one_flag_with_help_and_default() -> None:
    fields = msgspec.structs.fields(Options)
    made = {flag.field: flag for flag in flags()}
    assert list(made) == [field.name for field in fields]
    for field in fields:
        flag = made[field.name]
        assert flag.default == field.default
        assert flag.help.endswith(".")
        assert flag.names[0].strip("-").replace("-", "_") == field.name
    assert made["v"].names == ("-v", "--v")
    shown = {name: flag.shown_default for name, flag in made.items()}
    assert (shown["config_file"], shown["secure_serving"], shown["tracing"]) == ("", "true", "false")
    assert (shown["refresh_metrics_interval"], shown["drain_timeout"], shown["seed"]) == (
        "200ms",
        "30s",
        "-1",
    )


def test_the_reference_has_a_row_for_every_flag() -> None:
    rows = re.findall(r"^\| `(--?[a-z-]+)`", reference(), re.MULTILINE)
    assert rows == [flag.names[0] for flag in flags()]
