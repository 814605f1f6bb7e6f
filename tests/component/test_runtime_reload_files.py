"""The configuration file as it really changes: written in place, renamed over, swapped by a ConfigMap."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from epp.durations import Duration
from epp.errors import ConfigError
from epp.runtime.app import App, read_config
from epp.runtime.options import Options
from epp.runtime.reload import ConfigFile
from tests.data.runtime import picker as runtime
from tests.data.runtime.open_files import too_many_open_files

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
DEADLINE_S = 60.0


def text(priority: int) -> str:
    return f"{HEAD}objectives: [{{name: o, priority: {priority}}}]\n"


def write_in_place(file: Path, content: str) -> None:
    file.write_text(content)


def rename_over(file: Path, content: str) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(content)
    fresh.rename(file)


def swap_config_map(file: Path, content: str) -> None:
    """As the kubelet does it: `file` leads through the link `..data` to a folder that is replaced whole."""
    folder = file.parent
    generation = folder / f"..{len(list(folder.iterdir()))}"
    generation.mkdir()
    (generation / file.name).write_text(content)
    link = folder / "..data_tmp"
    link.symlink_to(generation.name)
    link.rename(folder / "..data")
    if not file.is_symlink():
        file.unlink(missing_ok=True)
        file.symlink_to(Path("..data", file.name))


@asynccontextmanager
async def following(file: Path) -> AsyncIterator[App]:
    options = Options(config_file=str(file), seed=1)
    app = App.assemble(options, read_config(options))
    app.set_endpoints([runtime.endpoint(1)])
    follower = ConfigFile(
        str(file), lambda: read_config(options), app.use, app.metrics, poll_s=0.01, settle_s=0.01
    )
    task = asyncio.create_task(follower.follow())
    try:
        yield app
    finally:
        assert not task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.01)


def priority(app: App) -> int:
    return app.director.plugins.objectives.priority("o")


def counts(app: App) -> tuple[float, float]:
    """Errors so far, and whether the last one worked."""
    return runtime.sample(app, "config_reload_errors_total"), runtime.sample(
        app, "config_last_reload_successful"
    )


@pytest.mark.parametrize("change", [write_in_place, rename_over, swap_config_map])
async def test_a_changed_file_comes_into_use(change: Callable[[Path, str], None], tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    change(file, text(1))
    async with following(file) as app:
        assert (priority(app), counts(app)) == (1, (0, 1))
        for number in (2, 3):
            change(file, text(number))
            await until(lambda wanted=number: priority(app) == wanted)  # type: ignore[misc]
        assert counts(app) == (0, 1)


async def test_a_file_that_changed_before_it_was_followed_is_read(tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(text(1))
    options = Options(config_file=str(file))
    app = App.assemble(options, read_config(options))
    times = file.stat()
    file.write_text(text(2))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    follower = ConfigFile(
        str(file), lambda: read_config(options), app.use, app.metrics, poll_s=0.01, settle_s=0.01
    )
    task = asyncio.create_task(follower.follow())
    await until(lambda: priority(app) == 2)
    task.cancel()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            f"{HEAD}plugins: [{{type: a}}, {{type: b}}]\n",
            ["unknown plugin type 'a'", "unknown plugin type 'b'"],
        ),
        ("kind: [", ["not valid YAML"]),
        ("", ["empty: expected apiVersion"]),
        (None, ["cannot be read: No such file"]),
    ],
)
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(
    content: str | None, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(text(1))
    async with following(file) as app:
        assembly = app.assembly
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        await until(lambda: counts(app) == (1, 0))
        await asyncio.sleep(0.1)
        assert (app.assembly, counts(app)) == (assembly, (1, 0))
        problems = [record for record in caplog.records if "the old configuration stays" in record.message]
        assert len(problems) == len(said)
        for record, part in zip(problems, said, strict=True):
            assert part in record.problem  # type: ignore[attr-defined]
            assert record.levelname == "ERROR"
        # In one piece: a file that is not there is looked for again and again, on a thread.
        rename_over(file, text(5))
        await until(lambda: priority(app) == 5)
        assert counts(app) == (1, 1)


async def test_a_file_that_could_not_be_read_for_a_moment_is_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it changes when that is over."""
    file = tmp_path / "epp.yaml"
    file.write_text(text(1))
    async with following(file) as app:
        await until(lambda: counts(app) == (0, 1))
        with too_many_open_files(file) as tried:
            write_in_place(file, text(2))
            await until(lambda: len(tried) >= 3)
            assert (priority(app), counts(app)) == (1, (1, 0))
        await until(lambda: (priority(app), counts(app)) == (2, (1, 1)))
    (record,) = (record for record in caplog.records if "the old configuration stays" in record.message)
    assert "cannot be read: Too many open files" in record.problem  # type: ignore[attr-defined]


async def test_what_needs_a_restart_is_told_and_the_rest_comes_into_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(text(1))
    async with following(file) as app:
        file.write_text(f"{text(2)}dataLayer: {{injectDefaults: false}}\n")
        await until(lambda: priority(app) == 2)
        assert counts(app) == (0, 0), "not all of the file is in use"
        assert "restart needed" in str(app.running.effective)
        (warning,) = [record for record in caplog.records if "restart needed" in record.message]
        assert warning.paths == ["$.dataLayer.sources"]  # type: ignore[attr-defined]
        file.write_text(text(3))
        await until(lambda: priority(app) == 3)
        assert counts(app) == (0, 1)


async def test_a_fault_of_a_plugin_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(text(1))

    def broken(self: Any, members: Any) -> None:
        raise ZeroDivisionError

    async with following(file) as app:
        with monkeypatch.context() as patch:
            patch.setattr("epp.runtime.reload.PluginMembers.use", broken)
            file.write_text(text(2))
            await until(lambda: counts(app) == (1, 0))
            assert priority(app) == 1
        file.write_text(text(3))
        await until(lambda: priority(app) == 3)


async def test_alpha_plugins_need_the_flag_after_the_start_too(tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(text(1))
    async with following(file) as app:
        file.write_text(f"{text(2)}plugins: [{{type: agent-identity}}]\n")
        await until(lambda: counts(app) == (1, 0))
        assert priority(app) == 1


@pytest.mark.parametrize(("watched", "follows"), [(True, True), (False, False)])
async def test_the_running_picker_follows_unless_told_not_to(
    watched: bool, follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(text(1))
    options = Options(
        config_file=str(file),
        watch_config_file=watched,
        endpoint=("127.0.0.1:1",),
        secure_serving=False,
        grpc_port=0,
        grpc_health_port=0,
        metrics_port=0,
        admin_port=0,
        grpc_host="127.0.0.1",
        drain_timeout=Duration(0.0),
    )
    app = App.assemble(options, read_config(options))
    started = asyncio.Event()

    async def follow(self: ConfigFile) -> None:
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ConfigFile, "follow", follow)
    stop: asyncio.Queue[Any] = asyncio.Queue()
    monkeypatch.setattr("epp.runtime.app._signals", lambda: stop)
    running = asyncio.create_task(app.run())
    await until(lambda: started.is_set() or (not follows and app.health.ready))
    await asyncio.sleep(0.05)
    assert started.is_set() == follows
    stop.put_nowait(None)
    stop.put_nowait(None)
    async with asyncio.timeout(DEADLINE_S):
        await running


def test_a_broken_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(Options(config_file=str(tmp_path / "none.yaml")))
