"""What the image holds: tools/install in a clean environment, from what the build's context lets in."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.data.kube import image

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# How pip reaches its registry is the machine's business.
PIP = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, **environment: str) -> str:
    """Output of a command that sees nothing else of this environment."""
    done = subprocess.run(
        command,
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that the image's first stage makes."""
    source, prefix = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("opt") / "warmroute"
    image.build_folder(ROOT, source)
    told = run(
        source / "tools/install",
        prefix,
        PATH=os.defpath,
        HOME=str(source),
        PYTHON=sys.base_prefix + "/bin/python3",
        **PIP,
    )
    assert told == f"warmroute, version {VERSION}\n"
    return prefix


def test_the_command_runs_where_nothing_else_is(prefix: Path) -> None:
    assert run(prefix / "bin/warmroute", "--version") == f"warmroute, version {VERSION}\n"


@pytest.mark.parametrize("config", ["manifests/conformance/config.yaml", "manifests/base/config.yaml"])
def test_it_would_serve(prefix: Path, config: str) -> None:
    told = run(
        *(prefix / "bin/warmroute", "serve", "--validate-only", f"--config-file={ROOT / config}"),
        *("--endpoint=127.0.0.1:8000", "--zap-encoder=json"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert "flags, configuration, endpoints and certificates are right" in told


def test_nothing_is_written_where_it_runs(prefix: Path) -> None:
    before = {each for each in prefix.rglob("*") if each.is_file()}
    run(prefix / "bin/warmroute", "serve", "--help", PYTHONDONTWRITEBYTECODE="1")
    assert {each for each in prefix.rglob("*") if each.is_file()} == before


def test_extras_are_there_and_tools_are_not(prefix: Path) -> None:
    found = "import importlib.util as u; print([bool(u.find_spec(name)) for name in {}])"
    wanted = (
        "epp",
        "kubernetes",
        "cel_expr_python",
        "opentelemetry.sdk",
        "opentelemetry.exporter.otlp.proto.grpc",
    )
    tools = ("pip", "setuptools", "hatchling", "pytest", "matplotlib")
    assert run(prefix / "bin/python", "-c", found.format(wanted)) == f"{[True] * len(wanted)}\n"
    assert run(prefix / "bin/python", "-c", found.format(tools)) == f"{[False] * len(tools)}\n"


def test_the_package_is_the_installed_one(prefix: Path) -> None:
    place = run(prefix / "bin/python", "-c", "import epp; print(epp.__file__)")
    assert Path(place.strip()).is_relative_to(prefix)
