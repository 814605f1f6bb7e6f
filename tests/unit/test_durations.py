"""Durations as Go's `time.ParseDuration` takes them, for flags and for the configuration file."""

import re

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from epp.durations import Duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        (0, 0.0),
        (0.0, 0.0),
        ("+0", 0.0),
        ("-0", 0.0),
        ("-0s", 0.0),
        ("0s", 0.0),
        ("50ms", 0.05),
        ("200ms", 0.2),
        ("5s", 5.0),
        ("+5s", 5.0),
        ("005s", 5.0),
        ("1m30s", 90.0),
        ("30s1m", 90.0),
        ("1s1s", 2.0),
        ("1.5h", 5400.0),
        ("1h0m0.5s", 3600.5),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("10us", 1e-5),
        ("1500us", 0.0015),
        ("1500\u00b5s", 0.0015),
        ("1500\u03bcs", 0.0015),
        ("2000000ns", 0.002),
        ("2562047h47m16s", 9223372036.0),
    ],
)
def test_durations(value: object, seconds: float) -> None:
    assert Duration.parse(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [
        *("", "5", "s", "5 s", " 5s", "5s ", "1x", "1s2", "\u0665s", "1,5s", ".s", "1s 2s", "00", "5S", "1d"),
        *("+", "-", "+-1s", "1s+1s", "1..5s", "1e3s", "infs", "0x1s", 5, 0.5, None, True, False, [], {}),
    ],
)
def test_what_is_no_duration_is_told_the_right_form(value: object) -> None:
    with pytest.raises(ValueError, match=r"is not a duration; write a number with a unit, such as 200ms"):
        Duration.parse(value)


@pytest.mark.parametrize("value", ["-1s", "-.5ms", "-1h1ns"])
def test_negative_ones_are_refused_as_such(value: str) -> None:
    with pytest.raises(ValueError, match=f"'{value}' is negative; write a number with a unit"):
        Duration.parse(value)


@pytest.mark.parametrize("value", ["2562048h", "9" * 99 + "s", "9" * 999 + "ns", "9223372037s"])
def test_what_go_cannot_count_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="is longer than 292 years; write a number"):
        Duration.parse(value)


@given(st.integers(0, 10_000_000))
def test_a_duration_is_read_as_it_is_shown(milliseconds: int) -> None:
    duration = Duration(milliseconds / 1000)
    assert Duration.parse(str(duration)) == pytest.approx(duration, rel=1e-5)


UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def scanned(text: str) -> float | None:
    """Oracle: the grammar as Go's documentation tells it, read character by character."""
    rest = text[1:] if text[:1] in ("+", "-") else text
    if rest == "0":
        return 0.0
    total = 0.0
    while rest:
        number = unit = ""
        while rest and rest[0] in "0123456789.":
            number, rest = number + rest[0], rest[1:]
        while rest and rest[0] not in "0123456789.":
            unit, rest = unit + rest[0], rest[1:]
        if number.count(".") > 1 or number in ("", ".") or unit not in UNITS:
            return None
        total += float(number) * UNITS[unit]
    return None if not text.strip("+-") or (text[0] == "-" and total) else total


def check(kind: type[Duration], text: str) -> None:
    expected = scanned(text)
    try:
        found = kind.parse(text)
    except ValueError as error:
        said = str(error)
        assert expected is None
        assert said.startswith(repr(text))
        assert said.endswith("such as 200ms, 5s or 1m30s")
    else:
        assert found == pytest.approx(expected)


TEXTS = st.text(max_size=9) | st.builds(
    "{}{}".format,
    st.sampled_from(["", "", "", "+", "-"]),
    st.lists(
        st.builds(
            "{}{}".format,
            st.sampled_from(["0", "7", "1.5", ".25", "3.", "00", ".", "1..2", ""]),
            st.sampled_from([*UNITS, "", "S", "d"]),
        ),
        max_size=3,
    ).map("".join),
)


@settings(max_examples=400)
@given(TEXTS)
@example("1m1ms")
def test_any_text_is_read_as_the_grammar_says(text: str) -> None:
    check(Duration, text)


class Signed(Duration):
    """Fault: negative durations."""

    @classmethod
    def parse(cls, value: object) -> Duration:
        assert isinstance(value, str)
        return Duration(-Duration.parse(value[1:])) if value[:1] == "-" else Duration.parse(value)


class Unitless(Duration):
    """Fault: a number alone is seconds."""

    @classmethod
    def parse(cls, value: object) -> Duration:
        assert isinstance(value, str)
        return Duration(float(value)) if value.isdigit() else Duration.parse(value)


class Last(Duration):
    """Fault: of two parts, only the last counts."""

    @classmethod
    def parse(cls, value: object) -> Duration:
        assert isinstance(value, str)
        whole = Duration.parse(value)
        parts = re.findall(r"[0-9.]+[^0-9.]+", value)
        return Duration.parse(parts[-1]) if parts else whole


class Silent(Duration):
    """Fault: an error without words."""

    @classmethod
    def parse(cls, value: object) -> Duration:
        try:
            return Duration.parse(value)
        except ValueError:
            raise ValueError from None


@pytest.mark.parametrize("fault", [Signed, Unitless, Last, Silent])
def test_the_check_sees_faults(fault: type[Duration]) -> None:
    @settings(max_examples=1000, database=None, phases=[Phase.generate], derandomize=True)
    @given(TEXTS)
    def search(text: str) -> None:
        check(fault, text)

    with pytest.raises((AssertionError, ExceptionGroup)):
        search()
