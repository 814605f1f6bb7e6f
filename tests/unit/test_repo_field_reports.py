"""docs/field-reports.md: every report has one of three states, and every test it names exists."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-reports.md"
STATES = ("tested", "not possible here", "later")
TEST = re.compile(r"`([\w.]+\.py)::(\w+)`")
IDS = re.findall(
    "E[0-9]+",
    """
E001 E002 E004 E005 E007 E008 E010 E011 E013 E014 E016 E017 E019 E020 E022 E023 E025 E026 E028
E029 E031 E032 E034 E035 E037 E038 E040 E041 E043 E044 E046 E047 E049 E050
E052 E053 E055 E056 E058 E059 E061 E062 E064 E065 E067 E068 E070 E071 E073 E074 E076 E077
E109
E121 E122 E124 E125 E127 E128 E130 E131
E133 E134 E136 E137 E139 E140 E142 E143 E145 E146
E164 E166 E167 E169 E170 E172 E173 E175 E176 E178 E179 E181 E182
E184 E185 E187 E188
E190 E191 E193 E194 E196
E208 E209 E211 E212
""",
)


class Report(NamedTuple):
    id: str
    fault: str
    state: str
    note: str


def reports(page: str) -> list[Report]:
    rows = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| E")]
    return [Report(*row) for row in rows]


def problems(page: str, files: dict[str, str], ids: list[str]) -> list[str]:
    """What is wrong with the page. `files`: text of each test file by its name."""
    found = []
    told = [report.id for report in reports(page)]
    found += [f"{each}: missing" for each in ids if each not in told]
    found += [f"{each}: unknown or said twice" for each in told if each not in ids or told.count(each) > 1]
    for report in reports(page):
        if report.state not in STATES:
            found.append(f"{report.id}: state {report.state!r}")
        if report.state == "tested" and not TEST.search(report.note):
            found.append(f"{report.id}: no test")
        if report.state == "later" and not re.search(r"\b[Ww]aits? for ", report.note):
            found.append(f"{report.id}: does not say what it waits for")
        if not report.fault or not report.note:
            found.append(f"{report.id}: says nothing")
    for file, name in TEST.findall(page):
        if not re.search(rf"^(async )?def {name}\(", files.get(file, ""), re.MULTILINE):
            found.append(f"no test {file}::{name}")
    return found


def files_of_tests() -> dict[str, str]:
    paths = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "e2e").glob("test_*.py")]
    return {path.name: path.read_text() for path in paths}


def test_every_report_has_a_state_and_every_named_test_exists() -> None:
    assert problems(PAGE.read_text(), files_of_tests(), IDS) == []


def test_every_test_of_a_report_is_named() -> None:
    named = set(TEST.findall(PAGE.read_text()))
    files = {name: text for name, text in files_of_tests().items() if name.endswith("_reports.py")}
    del files[Path(__file__).name]
    assert len(files) >= 5
    written = {(name, test) for name, text in files.items() for test in re.findall(r"def (test_\w+)\(", text)}
    assert written - named == set()


GOOD = "| E001 | a fault | tested | `test_a.py::test_a` |\n"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("| E002 | a fault | tested | `test_a.py::test_b` |", "no test test_a.py::test_b"),
        ("| E002 | a fault | tested | somewhere |", "E002: no test"),
        ("| E002 | a fault | maybe | `test_a.py::test_a` |", "E002: state 'maybe'"),
        ("| E002 | a fault | later | nobody knows |", "E002: does not say what it waits for"),
        ("| E002 |  | not possible here | there is no such thing |", "E002: says nothing"),
        ("", "E002: missing"),
    ],
)
def test_the_check_sees_faults(row: str, expected: str) -> None:
    files = {"test_a.py": "def test_a() -> None:\n"}
    assert problems(GOOD + GOOD.replace("E001", "E002"), files, ["E001", "E002"]) == []
    assert problems(GOOD + row + "\n", files, ["E001", "E002"]) == [expected]


def test_the_check_sees_rows_too_many() -> None:
    files = {"test_a.py": "def test_a() -> None:\n"}
    assert problems(GOOD + GOOD, files, ["E001"]) == ["E001: unknown or said twice"] * 2
    assert problems(GOOD, files, []) == ["E001: unknown or said twice"]
