"""Guards of the generated pages, and of what the written ones name."""

import re
from pathlib import Path

import pytest

from epp import names
from epp.runtime.metrics_table import TABLE
from epp.runtime.options import flags
from tools import docs

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_generated_pages_are_fresh() -> None:
    assert docs.stale(ROOT) == []


def test_the_check_sees_a_missing_and_a_changed_page(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    assert docs.stale(tmp_path) == list(docs.pages())
    for name, text in docs.pages().items():
        (tmp_path / name).write_text(text)
    assert docs.stale(tmp_path) == []
    (tmp_path / "docs" / "flags.md").write_text(docs.pages()["docs/flags.md"] + "\n")
    assert docs.stale(tmp_path) == ["docs/flags.md"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_metrics_that_pages_name_exist(page: Path) -> None:
    known = {names.METRIC_PREFIX + row.name for row in TABLE}
    parts = {f"{name}{suffix}" for name in known for suffix in ("", "_bucket", "_sum", "_count")}
    named = set(re.findall(rf"\b{names.METRIC_PREFIX}[a-z_]+[a-z]\b", page.read_text()))
    assert named - parts == set()


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_flags_of_serve_that_pages_show_exist(page: Path) -> None:
    known = {name for flag in flags() for name in flag.names}
    shown = re.findall(r"warmroute serve ([^\n`]*)", page.read_text())
    named = {flag for line in shown for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line)}
    assert named - known == set()
