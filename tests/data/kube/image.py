"""The Dockerfile as data, and what of the repository a build of it sees."""

import re
import shlex
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One instruction. `stage`: that it belongs to, from 0; -1 = before the first."""

    stage: int
    name: str
    rest: str


def steps(dockerfile: str) -> list[Step]:
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE)).splitlines()
    found: list[Step] = []
    stage = -1
    for line in filter(None, map(str.strip, lines)):
        name, _, rest = line.partition(" ")
        stage += name == "FROM"
        found.append(Step(stage, name, rest.strip()))
    return found


def copies(dockerfile: str, stage: int) -> Iterator[tuple[list[str], str]]:
    """Sources and destination of what a stage takes from the context."""
    for step in steps(dockerfile):
        words = shlex.split(step.rest)
        if (step.stage, step.name) == (stage, "COPY") and not words[0].startswith("--from"):
            yield words[:-1], words[-1]


def let_in(dockerignore: str, path: str) -> bool:
    """Whether a file is in the build's context: the last line that fits it or a folder above it counts."""
    inside = True
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for line in dockerignore.splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        wanted = pattern.removeprefix("!").strip("/")
        anywhere = wanted.removeprefix("**/")
        fits = any(
            fnmatchcase(each, wanted)
            and each.count("/") == wanted.count("/")
            or (anywhere != wanted and fnmatchcase(each.rpartition("/")[2], anywhere))
            for each in above
        )
        if fits:
            inside = pattern.startswith("!")
    return inside


def build_folder(root: Path, to: Path, stage: int = 0) -> None:
    """What the stage's COPY instructions put into its working directory, from a context that is let in."""
    dockerfile, ignored = (root / "Dockerfile").read_text(), (root / ".dockerignore").read_text()
    for sources, destination in copies(dockerfile, stage):
        for source in sources:
            _copy(root, source, to, destination, ignored)


def _copy(root: Path, source: str, to: Path, destination: str, ignored: str) -> None:
    origin = root / source
    files = [origin] if origin.is_file() else [each for each in origin.rglob("*") if each.is_file()]
    for file in files:
        path = file.relative_to(root).as_posix()
        if not let_in(ignored, path):
            continue
        # A folder's contents are copied, not the folder.
        within = file.name if origin.is_file() else file.relative_to(origin)
        target = to / destination / within if destination.endswith("/") else to / destination
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
