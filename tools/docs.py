"""Write the generated pages of `docs/` (`make docs`), or check that they are fresh."""

import argparse
import sys
from pathlib import Path

from epp.config.reference import plugin_reference
from epp.config.registry import built_in_registry
from epp.runtime import legacy_metrics, metrics_table, options

ROOT = Path(__file__).resolve().parents[1]


def pages() -> dict[str, str]:
    """Path below the repository and content."""
    return {
        "docs/flags.md": options.reference(),
        "docs/metrics.md": metrics_table.reference() + legacy_metrics.reference(),
        "docs/plugins.md": plugin_reference(built_in_registry()),
    }


def stale(root: Path) -> list[str]:
    """Pages below `root` that are missing or differ from what would be written."""
    return [name for name, text in pages().items() if _content(root / name) != text]


def _content(file: Path) -> str | None:
    return file.read_text() if file.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is not fresh")
    if not parser.parse_args().check:
        for name, text in pages().items():
            (ROOT / name).write_text(text)
    elif names := stale(ROOT):
        sys.exit(f"not fresh, run `make docs`: {', '.join(names)}")


if __name__ == "__main__":
    main()
