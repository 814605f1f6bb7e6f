"""Generate the protobuf stubs of `epp/wire` from `proto/` (`make proto`), or check that they are fresh.

The stubs depend on the version of grpcio-tools, which is locked. No service stubs are generated: method
paths are strings in `epp/names.py`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "proto"
WELL_KNOWN = Path(grpc_tools.__file__).with_name("_proto")


def generate(output: Path) -> None:
    """Write `epp/wire/*_pb2.py` and `.pyi` below `output`.

    Raises:
        SystemExit: protoc refused a source (it has said why on stderr).
    """
    files = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.proto"))
    paths = (f"-I{SOURCES}", f"-I{WELL_KNOWN}", f"--python_out={output}", f"--pyi_out={output}")
    status = protoc.main(["protoc", *paths, *files])
    if status:
        raise SystemExit(status)


def stale(root: Path) -> list[str]:
    """Stubs below `root` that are missing, differ from fresh ones, or come from no source any more."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = contents(Path(scratch))
    committed = contents(root)
    return sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))


def contents(root: Path) -> dict[str, bytes]:
    stubs = (root / "epp" / "wire").glob("*_pb2*")
    return {stub.relative_to(root).as_posix(): stub.read_bytes() for stub in stubs if stub.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a stub is not fresh")
    if not parser.parse_args().check:
        generate(ROOT)
    elif names := stale(ROOT):
        sys.exit(f"not fresh, run `make proto`: {', '.join(names)}")


if __name__ == "__main__":
    main()
