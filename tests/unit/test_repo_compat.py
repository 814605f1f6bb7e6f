"""docs/compatibility.md: every case has one of three states, and every test it names exists."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
STATES = ("passes", "different on purpose", "not yet")
SECTIONS = ("Whole requests", "The ext-proc stream", "Choosing")
TEST = re.compile(r"`([\w.]+\.py)::(\w+)`")


class Case(NamedTuple):
    section: str
    name: str
    state: str
    note: str


def cases(page: str) -> list[Case]:
    """The rows of all tables of cases."""
    found = []
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")]
        found += [Case(title, *row) for row in rows[1:]]
    return found


def problems(page: str, files: dict[str, str]) -> list[str]:
    """What is wrong with the page. `files`: text of each test file by its name."""
    found = []
    for case in cases(page):
        tests = TEST.findall(case.note)
        if case.state not in STATES:
            found.append(f"{case.name}: state {case.state!r}")
        if case.state != "not yet" and not tests:
            found.append(f"{case.name}: no test")
        if case.state == "not yet" and not case.note.startswith("Waits for "):
            found.append(f"{case.name}: does not say what it waits for")
    for file, name in TEST.findall(page):
        if not re.search(rf"^(async )?def {name}\(", files.get(file, ""), re.MULTILINE):
            found.append(f"no test {file}::{name}")
    return found


def files_of_tests() -> dict[str, str]:
    return {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def test_every_case_has_a_state_and_every_named_test_exists() -> None:
    page = PAGE.read_text()
    assert {case.section for case in cases(page)} == set(SECTIONS)
    assert len(cases(page)) > 100
    assert problems(page, files_of_tests()) == []


def test_every_compat_case_is_named() -> None:
    named = set(TEST.findall(PAGE.read_text()))
    file = "test_compat_cases.py"
    written = re.findall(r"^def (test_\w+)\(", files_of_tests()[file], re.MULTILINE)
    assert [name for name in written if (file, name) not in named] == []


HEAD = "### One\n\n| Case | State | Note |\n|---|---|---|\n"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("| a | passes | `test_a.py::test_b` |", "no test test_a.py::test_b"),
        ("| a | passes | `test_a.py::test` |", "no test test_a.py::test"),
        ("| a | passes | somewhere |", "a: no test"),
        ("| a | maybe | `test_a.py::test_a` |", "a: state 'maybe'"),
        ("| a | not yet | nobody knows |", "a: does not say what it waits for"),
    ],
)
def test_the_check_sees_faults(row: str, expected: str) -> None:
    files = {"test_a.py": "def test_a() -> None:\n"}
    assert problems(HEAD + "| a | passes | `test_a.py::test_a` |\n", files) == []
    assert problems(HEAD + row + "\n", files) == [expected]
