"""Control planes of gateways, made from Go modules into the user's cache.

    python tools/gateways.py [PROGRAM ...]    make these, or all (CPU minutes, once)

Each gateway has a folder of pins in `tools/gateways/`. What else its module brings, such as CRDs and charts,
is read in the module's folder. A cold build keeps what it has compiled until its program is made: one that
was killed goes on where it stopped.
"""

import fcntl
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from tools.go_programs import BuildError, cache_folder, go, go_missing

_PINS: Final = Path(__file__).with_name("gateways")
# Neither inlining nor debug data: a third less to compile, and the programs run well enough for tests.
_FLAGS: Final = ("-trimpath", "-gcflags=all=-l -dwarf=false")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Program:
    """What makes a program.

    Attributes:
        pins: name of the folder that pins its modules.
        package: the package of its `main`.
        module: the module that holds it.
        stamp: the variable that tells the program its version, which is its module's.
    """

    pins: str
    package: str
    module: str
    stamp: str


ISTIO: Final = "pilot-discovery"
ENVOY_GATEWAY: Final = "envoy-gateway"
PROGRAMS: Final[Mapping[str, Program]] = {
    ISTIO: Program(
        "istio",
        "istio.io/istio/pilot/cmd/pilot-discovery",
        "istio.io/istio",
        "istio.io/istio/pkg/version.buildVersion",
    ),
    ENVOY_GATEWAY: Program(
        "envoy_gateway",
        "github.com/envoyproxy/gateway/cmd/envoy-gateway",
        "github.com/envoyproxy/gateway",
        "github.com/envoyproxy/gateway/internal/cmd/version.envoyGatewayVersion",
    ),
}


def built(name: str, say: Say = lambda _: None) -> Path:
    """The program; built where the cache has none. One process at a time builds.

    Raises:
        BuildError: Go is missing, or refused; the message says why.
    """
    if missing := go_missing():
        raise BuildError(missing)
    program = _place(name)
    root = cache_folder() / "gateways"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"lock-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            say(f"building {name}")
            objects = root / f"objects-{name}"
            _build(PROGRAMS[name], program, objects)
            shutil.rmtree(objects, ignore_errors=True)
    return program


def found(name: str) -> Path | None:
    """The program where it has been built, else None."""
    if go_missing():
        return None
    program = _place(name)
    return program if program.exists() else None


def version(name: str, module: str = "") -> str:
    """Version of a module that a program is made of; by default its own. Raises KeyError."""
    made = PROGRAMS[name]
    text = (_PINS / made.pins / "go.mod").read_text()
    pins: list[tuple[str, str]] = re.findall(r"^(?:require)?\s+(\S+) (v\S+)", text, re.MULTILINE)
    return dict(pins)[module or made.module]


def module_folder(name: str, module: str = "") -> Path:
    """Where the files of that module are; fetched where Go's cache has none. Raises BuildError."""
    made = PROGRAMS[name]
    said = json.loads(go(_PINS / made.pins, "mod", "download", "-json", module or made.module))
    return Path(said["Dir"])


def _place(name: str) -> Path:
    pins = _PINS / PROGRAMS[name].pins
    digest = hashlib.sha256("\n".join([PROGRAMS[name].package, *_FLAGS, go(pins, "version")]).encode())
    for file in ("go.mod", "go.sum"):
        digest.update((pins / file).read_bytes())
    return cache_folder() / "gateways" / f"{name}-{digest.hexdigest()[:16]}" / name


def _build(made: Program, program: Path, objects: Path) -> None:
    pins = _PINS / made.pins
    program.parent.mkdir(parents=True, exist_ok=True)
    stamped = f"-ldflags=-s -w -X {made.stamp}={version(program.name)}"
    with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
        fresh = Path(scratch, program.name)
        arguments = (*_FLAGS, stamped, "-o", str(fresh), made.package)
        go(pins, "build", "-mod=readonly", *arguments, CGO_ENABLED="0", GOCACHE=str(objects))
        fresh.replace(program)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PROGRAMS)))
def main(names: tuple[str, ...]) -> None:
    """Make programs of gateways; all where none is named."""
    for name in names or PROGRAMS:
        try:
            print(built(name, lambda text: print(text, flush=True)))
        except BuildError as error:
            sys.exit(f"gateways: {error}")


if __name__ == "__main__":
    main()
