"""Programs written in Go, built from modules of this repository into the user's cache.

`go` takes the modules from wherever it is configured to; `go.sum` says what they must be.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class BuildError(Exception):
    """Go is missing, or refused to build; the message says why."""


def go_missing() -> str:
    """Why nothing can be built here; empty where it can."""
    return "" if shutil.which("go") else "the Go toolchain is not installed: no `go` on the PATH"


def built(module: Path, package: str) -> Path:
    """The program that `package` of the module in folder `module` makes; built where the cache has none.

    `package` is a path as `go build` takes it. Cached by the module's files and the version of Go. Several
    processes may ask for one program at a time.

    Raises:
        BuildError: as it says.
    """
    if missing := go_missing():
        raise BuildError(missing)
    name = package.rpartition("/")[2]
    program = cache_folder() / name / _key(module, package) / name
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        _build(module, package, program)
    return program


def cache_folder() -> Path:
    """Where what can be built again is kept (XDG Base Directory Specification)."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "warmroute"


def _key(module: Path, package: str) -> str:
    digest = hashlib.sha256(f"{package}\n{go(module, 'version')}".encode())
    for file in sorted(file for file in module.rglob("*") if file.suffix in {".go", ".mod", ".sum"}):
        content = file.read_bytes()
        digest.update(f"\n{file.relative_to(module)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _build(module: Path, package: str, program: Path) -> None:
    """Into a name of its own first: who finds `program` finds a whole one."""
    with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
        fresh = Path(scratch) / program.name
        go(module, "build", "-mod=readonly", "-o", str(fresh), package)
        fresh.replace(program)


def go(module: Path, *arguments: str, **settings: str) -> str:
    """What `go` with these arguments prints in folder `module`; `settings` are added to its environment.

    Raises:
        BuildError: it failed; ends with what it said.
    """
    done = subprocess.run(
        ["go", *arguments],
        cwd=module,
        env=os.environ | {"GOWORK": "off"} | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise BuildError(f"go {arguments[0]}, in {module}:\n{said[-4000:]}")
    return done.stdout
