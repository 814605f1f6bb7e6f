"""h2spec against `warmroute serve`, and the building of programs in Go."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from tools.go_programs import BuildError, built, go_missing
from tools.h2spec import ALLOWED, CASES, PACKAGE, PINS, against_picker, wrong

pytestmark = [pytest.mark.go, pytest.mark.skipif(bool(go_missing()), reason=go_missing())]

MODULE = {
    "go.mod": "module tiny\n\ngo 1.21\n",
    "say/main.go": 'package main\n\nfunc main() { print("one") }\n',
}


@pytest.fixture(scope="session")
def h2spec() -> Path:
    return built(PINS, PACKAGE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_own_transport_passes(h2spec: Path, tmp_path: Path, tls: bool) -> None:
    report = await against_picker(h2spec, tmp_path, "own", tls=tls)
    assert not (complaints := wrong(report, ALLOWED)), "\n".join(complaints)
    assert [case.id for case in report.cases if case.outcome == "skipped"] == []
    assert len(report.cases) == CASES
    assert report.closing.startswith(f"{CASES} tests, ")


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    ("section", "failing"),
    [
        ("http2/5.4.1", {"http2/5.4.1/1", "http2/5.4.1/2"}),
        ("http2/6.7", {"http2/6.7/3"}),
        ("http2/8.1.2/1", {"http2/8.1.2/1"}),
    ],
)
async def test_it_sees_what_a_server_lets_pass(
    h2spec: Path, tmp_path: Path, section: str, failing: set[str], tls: bool
) -> None:
    """grpcio takes a PING with a stream, one that is cut short, and header names in capitals."""
    report = await against_picker(h2spec, tmp_path, "grpcio", tls=tls, sections=[section], answer_s=1)
    failed = {case.id: case for case in report.cases if case.outcome == "failed"}
    assert failing <= failed.keys()
    assert all(failed[case].expected and failed[case].actual for case in failing)
    told = "\n".join(wrong(report, {}))
    assert all(f"{case}: " in told for case in failing)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache for this test alone. Go's own stays, or it would build its library anew."""
    kept = subprocess.run(["go", "env", "GOCACHE"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("GOCACHE", kept.strip())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _module(folder: Path) -> Path:
    for name, text in MODULE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def _says(program: Path) -> str:
    process = await asyncio.create_subprocess_exec(str(program), stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    return said.decode()


async def test_a_program_is_built_once_for_one_source(cache: Path, tmp_path: Path) -> None:
    module = _module(tmp_path / "module")
    together = await asyncio.gather(*[asyncio.to_thread(built, module, "./say") for _ in range(3)])
    (one,) = set(together)
    assert await _says(one) == "one"
    assert one.is_relative_to(cache / "warmroute" / "say")
    assert [file.name for file in one.parent.iterdir()] == ["say"]
    one.write_bytes(b"from the cache")
    assert built(module, "./say").read_bytes() == b"from the cache"

    (module / "say" / "main.go").write_text(MODULE["say/main.go"].replace("one", "two"))
    assert await _says(built(module, "./say")) == "two"


@pytest.mark.usefixtures("cache")
def test_what_go_refuses_is_told(tmp_path: Path) -> None:
    module = _module(tmp_path / "module")
    (module / "say" / "main.go").write_text("package main\n\nfunc main() { unheardOf() }\n")
    with pytest.raises(BuildError, match="undefined: unheardOf"):
        built(module, "./say")
