"""Guards of what is built, locked and generated."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import proto

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {
    name: [Requirement(line) for line in lines]
    for name, lines in PROJECT["project"]["optional-dependencies"].items()
}
RUNTIME = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
BUILD = [Requirement(line) for line in PROJECT["build-system"]["requires"]]
GROUPS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["dependency-groups"].items()}

PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==([^ ;\\]+)[^\n]*((?:\n    --hash=sha256:[0-9a-f]{64}[^\n]*)*)", re.MULTILINE
)


def pins(text: str) -> dict[str, list[tuple[Version, int]]]:
    """Of a lock: name -> every pinned version (one per marker) with its number of hashes."""
    found: dict[str, list[tuple[Version, int]]] = {}
    for name, version, hashes in PIN.findall(text):
        found.setdefault(canonicalize_name(name), []).append((Version(version), hashes.count("--hash=")))
    return found


def unmet(requirements: list[Requirement], lock: str) -> list[str]:
    """Requirements that the lock lacks, pins outside their range, or pins without a hash."""
    pinned = pins(lock)
    faults = []
    for requirement in requirements:
        versions = pinned.get(canonicalize_name(requirement.name), [])
        if not versions or not all(requirement.specifier.contains(v) and hashes for v, hashes in versions):
            faults.append(str(requirement))
    return faults


@pytest.mark.parametrize(
    ("lock", "requirements"),
    [
        ("runtime.txt", RUNTIME),
        ("dev.txt", RUNTIME + EXTRAS["lab"] + GROUPS["dev"]),
        ("image.txt", RUNTIME + EXTRAS["cel"] + EXTRAS["otel"]),
        ("build.txt", BUILD),
        ("envoy.txt", GROUPS["envoy"]),
        ("lock.txt", GROUPS["lock"]),
    ],
)
def test_lock_holds_every_dependency(lock: str, requirements: list[Requirement]) -> None:
    assert requirements
    assert unmet(requirements, (LOCKS / lock).read_text()) == []


def test_every_pin_has_hashes_and_no_line_is_an_option() -> None:
    for lock in LOCKS.glob("*.txt"):
        text = lock.read_text()
        entries = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
        assert len(entries) == len(PIN.findall(text)), lock.name
        assert all(hashes for versions in pins(text).values() for _, hashes in versions), lock.name


@pytest.mark.parametrize("lock", ["runtime.txt", "image.txt", "build.txt"])
def test_what_is_shipped_has_the_versions_of_the_developers(lock: str) -> None:
    shipped, dev = (pins((LOCKS / name).read_text()) for name in (lock, "dev.txt"))
    assert shipped == {name: dev.get(name) for name in shipped}


@pytest.mark.parametrize(
    "fault",
    [
        ("click==8.5.1", "clack==8.5.1"),
        ("click==8.5.1", "click==1.0"),
        ("    --hash=sha256:" + "0" * 64, "    --hash=sha256:short"),
    ],
)
def test_lock_guard_sees_faults(fault: tuple[str, str]) -> None:
    lock = f"click==8.5.1 \\\n    --hash=sha256:{'0' * 64}\n    # via warmroute\n"
    assert unmet([Requirement("click>=8.1")], lock) == []
    assert unmet([Requirement("click>=8.1")], lock.replace(*fault)) == ["click>=8.1"]


def gencode_version() -> Version:
    stub = (ROOT / "epp" / "wire" / "ext_proc_pb2.py").read_text()
    found = re.search(r"^# Protobuf Python Version: (\S+)$", stub, re.MULTILINE)
    assert found
    return Version(found.group(1))


def test_protobuf_runtime_accepts_the_stubs() -> None:
    # Stubs refuse a runtime older than their generator, and one of another major version.
    generator = gencode_version()
    (allowed,) = (r.specifier for r in RUNTIME if r.name == "protobuf")
    assert allowed.contains(generator)
    assert not allowed.contains(f"{generator.major}.{generator.minor - 1}.99")
    assert not allowed.contains(f"{generator.major + 1}.0.0")
    for lock in ("runtime.txt", "image.txt", "dev.txt"):
        ((locked, _),) = pins((LOCKS / lock).read_text())["protobuf"]
        assert locked >= generator


def test_stubs_are_fresh() -> None:
    assert proto.stale(ROOT) == []


def test_freshness_check_sees_stale_missing_and_orphaned_stubs(tmp_path: Path) -> None:
    proto.generate(tmp_path)
    wire = tmp_path / "epp" / "wire"
    assert proto.stale(tmp_path) == []
    (wire / "health_pb2.py").write_text("")
    (wire / "ext_proc_pb2.pyi").unlink()
    (wire / "gone_pb2.py").write_text("")
    assert proto.stale(tmp_path) == [
        "epp/wire/ext_proc_pb2.pyi",
        "epp/wire/gone_pb2.py",
        "epp/wire/health_pb2.py",
    ]


def test_wheel_holds_the_package_its_types_and_the_command(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("warmroute-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    sources = (*(ROOT / "epp").rglob("*.py"), *(ROOT / "epp").rglob("*.in"), *(ROOT / "epp").rglob("*.pyi"))
    assert {source.relative_to(ROOT).as_posix() for source in sources} <= names
    assert {"epp/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {"epp", info}
    assert "warmroute = epp.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
