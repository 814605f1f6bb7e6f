"""What is made of h2spec's report, and of a machine without Go."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.go_programs import BuildError, built, cache_folder, go_missing
from tools.h2spec import ALLOWED, PACKAGE, PINS, Case, Report, read, wrong

# As h2spec 2.2.1 writes it: what it says of failures is not escaped.
REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites>
  <testsuite name="3.5. Preface" package="http2/3.5" id="3.5" tests="2" skipped="1" failures="0" errors="0">
    <testcase package="http2/3.5" classname="Sends client connection preface" time="0.0004"></testcase>
    <testcase package="http2/3.5" classname="Sends it &lt;again&gt;" time="0.0"><skipped></skipped></testcase>
  </testsuite>
  <testsuite name="6.7. PING" package="http2/6.7" id="6.7" tests="2" skipped="0" failures="0" errors="2">
    <testcase package="http2/6.7" classname="Sends a PING frame" time="2.0"><error>GOAWAY Frame
Connection closed
DATA Frame (debug: <a & b>)</error></testcase>
    <testcase package="http2/6.7" classname="Sends another" time="2.0"><error>Timeout</error></testcase>
  </testsuite>
</testsuites>"""


def test_report_is_read_case_by_case() -> None:
    assert read(REPORT) == (
        Case("http2/3.5/1", "Sends client connection preface", "passed"),
        Case("http2/3.5/2", "Sends it <again>", "skipped"),
        Case(
            "http2/6.7/1",
            "Sends a PING frame",
            "failed",
            ("GOAWAY Frame", "Connection closed"),
            "DATA Frame (debug: <a & b>)",
        ),
        Case("http2/6.7/2", "Sends another", "failed", (), "Timeout"),
    )
    with pytest.raises(ElementTree.ParseError):
        read("no report")


def test_what_fails_is_told_with_what_was_expected() -> None:
    report = Report(read(REPORT), "4 tests, 1 passed, 1 skipped, 2 failed")
    first, second = wrong(report, {})
    assert first == (
        "http2/6.7/1: Sends a PING frame\n"
        "    expected: GOAWAY Frame | Connection closed\n"
        "    actual: DATA Frame (debug: <a & b>)"
    )
    assert second.startswith("http2/6.7/2: ")
    assert wrong(report, {"http2/6.7/1": "why"}) == [second]
    assert wrong(report, {"http2/6.7/1": "why", "http2/6.7/2": "why"}) == []


def test_what_is_allowed_must_fail_where_it_is_tried() -> None:
    report = Report((Case("http2/6.7/1", "Sends a PING frame", "passed"),), "")
    assert wrong(report, {"http2/6.7/1": "why", "http2/6.9/1": "not tried here"}) == [
        "http2/6.7/1: allowed to fail, but does not"
    ]


def test_every_allowed_case_has_its_reason() -> None:
    assert len(ALLOWED) <= 7
    assert all(reason.strip() for reason in ALLOWED.values())


def test_without_go_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "`go`" in go_missing()
    with pytest.raises(BuildError, match="not installed"):
        built(PINS, PACKAGE)


def test_cache_is_where_the_user_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative/cache"):  # a path that is not absolute does not count
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == tmp_path / ".cache" / "warmroute"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/warmroute")
