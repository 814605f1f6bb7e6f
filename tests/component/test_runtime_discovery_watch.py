"""The endpoints file followed on a real file system."""

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epp.pool.records import Endpoint
from epp.runtime.discovery import MAX_FILE_BYTES, FileDiscovery
from tests.data.runtime.open_files import too_many_open_files


def pool(*ports: int) -> str:
    lines = [f'- {{name: engine-{port}, address: 10.0.0.1, port: "{port}"}}\n' for port in ports]
    return "endpoints:\n" + "".join(lines) if lines else "endpoints: []\n"


class Heard:
    def __init__(self) -> None:
        self.pools: list[list[int]] = []
        self.errors: list[str] = []

    def apply(self, endpoints: list[Endpoint]) -> None:
        self.pools.append([endpoint.port for endpoint in endpoints])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(path: Path, first: list[int]) -> AsyncIterator[Heard]:
    heard = Heard()
    discovery = FileDiscovery(str(path), True, heard.apply, heard.errors.append, poll_s=0.02)
    assert [endpoint.port for endpoint in discovery.load()] == first
    task = asyncio.create_task(discovery.run())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_edited_and_a_replaced_file_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(pool(1))
    async with watching(path, [1]) as heard:
        path.write_text(pool(1, 2))
        await until(lambda: heard.pools == [[1, 2]])
        (tmp_path / "new.yaml").write_text(pool(3))
        os.replace(tmp_path / "new.yaml", path)
        await until(lambda: heard.pools == [[1, 2], [3]])
    assert heard.errors == []


async def test_a_swapped_config_map_link_is_followed(tmp_path: Path) -> None:
    for name, ports in (("v1", [1]), ("v2", [2, 3])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pool.yaml").write_text(pool(*ports))
    (tmp_path / "..data").symlink_to("v1")
    path = tmp_path / "pool.yaml"
    path.symlink_to("..data/pool.yaml")
    async with watching(path, [1]) as heard:
        (tmp_path / "..data_tmp").symlink_to("v2")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
        await until(lambda: heard.pools == [[2, 3]])
    assert heard.errors == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("endpoints: [{name: a}]", "$.endpoints[0].address: is missing"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than 1 MiB"),
        ("{", "neither YAML nor JSON"),
    ],
    ids=["wrong", "large", "broken"],
)
async def test_a_broken_file_keeps_the_pool_and_is_read_and_reported_once(
    content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counted(path: str, mode: str) -> Any:
        reads.append(path)
        return open(path, mode)

    monkeypatch.setattr("epp.runtime.discovery.open", counted, raising=False)
    path = tmp_path / "pool.yaml"
    path.write_text(pool(1))
    async with watching(path, [1]) as heard:
        path.write_text(content)
        await until(lambda: len(heard.errors) == 1)
        await asyncio.sleep(0.2)
        assert len(heard.errors) == 1
        assert len(reads) == 2, "at the start, and once more"
        assert f"{path}: {said}" in heard.errors[0]
        assert heard.errors[0].endswith("the endpoints stay as they were")
        assert heard.pools == []
        path.write_text(pool(4))
        await until(lambda: heard.pools == [[4]])


async def test_a_missing_file_keeps_the_pool_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(pool(1))
    async with watching(path, [1]) as heard:
        path.unlink()
        await until(lambda: len(heard.errors) == 1)
        assert "No such file" in heard.errors[0]
        path.write_text(pool(1, 5))
        await until(lambda: heard.pools == [[1, 5]])


async def test_a_file_that_can_be_read_again_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded(path: str, mode: str) -> Any:
        """As it is for who is not root."""
        if not os.stat(path).st_mode & stat.S_IRUSR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open(path, mode)

    monkeypatch.setattr("epp.runtime.discovery.open", guarded, raising=False)
    path = tmp_path / "pool.yaml"
    path.write_text(pool(1))
    async with watching(path, [1]) as heard:
        times = path.stat()
        path.chmod(0)
        path.write_text(pool(2))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        await until(lambda: len(heard.errors) == 1)
        assert "cannot be read: Permission denied" in heard.errors[0]
        assert heard.pools == []
        path.chmod(0o400)
        await until(lambda: heard.pools == [[2]])
    assert len(heard.errors) == 1


async def test_a_file_that_could_not_be_read_for_a_moment_is_read_later(tmp_path: Path) -> None:
    """Nothing of it changes when that is over."""
    path = tmp_path / "pool.yaml"
    path.write_text(pool(1))
    async with watching(path, [1]) as heard:
        with too_many_open_files(path) as tried:
            path.write_text(pool(1, 2))
            await until(lambda: len(tried) >= 3)
            assert len(heard.errors) == 1
            assert "cannot be read: Too many open files" in heard.errors[0]
        await until(lambda: heard.pools == [[1, 2]])
        await asyncio.sleep(0.1)
    assert heard.pools == [[1, 2]]
    assert len(heard.errors) == 1


async def test_a_file_half_written_is_not_taken_for_a_smaller_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(pool(1))
    async with watching(path, [1]) as heard:
        with path.open("w") as file:
            for line in pool(*range(1, 40)).splitlines(keepends=True):
                file.write(line)
                file.flush()
                await asyncio.sleep(0.005)
        await until(lambda: bool(heard.pools))
        assert heard.pools[-1] == list(range(1, 40))
        assert all(len(ports) in (1, 39) for ports in heard.pools)


async def test_an_unwatched_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(pool(1))
    await FileDiscovery(str(path), False, Heard().apply).run()
