"""Which changes of a file are seen, on a real file system."""

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError, Problem, Unread
from epp.runtime import watch
from epp.runtime.watch import Followed, Signature, changed, signature

BEFORE, AFTER = "content", "CONTENT"

Change = Callable[[Path], object]


def write_in_place(file: Path) -> None:
    file.write_text(AFTER)


def write_and_put_the_time_back(file: Path) -> None:
    times = file.stat()
    file.write_text(AFTER)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def append(file: Path) -> None:
    with file.open("a") as more:
        more.write("!")


def rename_over_with_the_time_of_before(file: Path) -> None:
    times = file.stat()
    fresh = file.with_suffix(".new")
    fresh.write_text(AFTER)
    os.utime(fresh, ns=(times.st_atime_ns, times.st_mtime_ns))
    fresh.rename(file)


def forbid(file: Path) -> None:
    file.chmod(0)


def swap_the_link(file: Path) -> None:
    target = file.parent / "other"
    target.write_text(BEFORE)
    link = file.parent / "link"
    link.symlink_to(target)
    link.rename(file)


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


CHANGES: list[Change] = [
    write_in_place,
    write_and_put_the_time_back,
    append,
    rename_over_with_the_time_of_before,
    forbid,
    swap_the_link,
    link_to_itself,
    Path.unlink,
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_text(BEFORE)
    ticked(made)
    return made


def ticked(file: Path) -> None:
    """What changes from now on does so at another time than the file did: some kernels count in jiffies."""
    other = file.with_suffix(".clock")
    deadline = time.monotonic() + 60
    while True:
        other.write_text("")
        other.chmod(0o600)
        if other.stat().st_ctime_ns != file.stat().st_ctime_ns:
            break
        assert time.monotonic() < deadline
        time.sleep(0.001)
    other.unlink()


def check_a_change_is_seen(change: Change, file: Path, look: Callable[[Path], Any] = signature) -> None:
    before = look(file)
    change(file)
    assert look(file) != before


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Change, file: Path) -> None:
    check_a_change_is_seen(change, file)


def test_what_could_not_be_read_and_then_can_is_seen(file: Path) -> None:
    file.chmod(0)
    ticked(file)
    check_a_change_is_seen(lambda it: it.chmod(0o600), file)


def test_reading_is_no_change(file: Path) -> None:
    before = signature(file)
    file.read_text()
    with file.open("rb") as opened:
        assert signature(f"/proc/self/fd/{opened.fileno()}") == before
    assert signature(file) == before != signature(file.parent)


@pytest.mark.parametrize("path", ["none", "file/below", "nul\0", "n" * 300])
def test_where_there_is_no_file(path: str, file: Path) -> None:
    assert signature(file.parent / path) is None
    assert signature(os.fspath(file.parent) + "/" + path) is None


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        (("st_dev", "st_ino", "st_mtime_ns", "st_size"), write_and_put_the_time_back),
        (("st_dev", "st_ino", "st_mtime_ns", "st_size"), forbid),
        (("st_dev", "st_ino", "st_size"), write_in_place),
        (("st_dev", "st_mtime_ns", "st_size"), rename_over_with_the_time_of_before),
    ],
)
def test_planted_signatures_that_miss_a_change_are_noticed(
    fields: tuple[str, ...], change: Change, file: Path
) -> None:
    def planted(path: Path) -> Any:
        found = path.stat()
        return tuple(getattr(found, field) for field in fields)

    with pytest.raises(AssertionError):
        check_a_change_is_seen(change, file, planted)


# -- waiting for changes ------------------------------------------------------------------------------

POLL_S, SETTLE_S = 7.0, 3.0
A, B, C = (1, 1, 1, 1), (1, 1, 2, 1), None


async def polled(*seen: tuple[Signature, ...], known: tuple[Signature, ...]) -> list[Any]:
    """Pauses, and at the end what was returned, when the looks at two files find this."""
    looks = iter([one for look in seen for one in look])
    log: list[Any] = []

    async def sleep(seconds: float) -> None:
        log.append(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "signature", lambda path: next(looks))
        patch.setattr("epp.runtime.watch.asyncio.sleep", sleep)
        found = await changed(("one", "other"), known, poll_s=POLL_S, settle_s=SETTLE_S)
    return [*log, found]


@pytest.mark.parametrize(
    ("seen", "log"),
    [
        ([(B, A), (B, A)], [POLL_S, SETTLE_S, (B, A)]),
        ([(A, A), (A, A), (A, B), (A, B)], [POLL_S, POLL_S, POLL_S, SETTLE_S, (A, B)]),
        ([(B, A), (B, B), (B, B)], [POLL_S, SETTLE_S, SETTLE_S, (B, B)]),
        ([(C, A), (C, A)], [POLL_S, SETTLE_S, (C, A)]),
        ([(C, A), (A, A), (B, A), (B, A)], [POLL_S, SETTLE_S, POLL_S, SETTLE_S, (B, A)]),
    ],
    ids=["at_once", "after_a_while", "one_after_the_other", "gone", "back_before_it_settled"],
)
async def test_files_are_waited_for_until_they_keep_still(
    seen: list[tuple[Signature, ...]], log: list[Any]
) -> None:
    assert await polled(*seen, known=(A, A)) == log


# -- reading again ------------------------------------------------------------------------------------

UNREAD = ConfigError("file", Problem("a", "is wrong"), Unread("b", "cannot be read: Too many open files"))
WRONG = ConfigError("file", Problem("a", "is wrong"))


async def is_due(followed: Followed) -> bool:
    """Whether the files are to be read, as far as some looks at them without a pause can tell."""
    looking = asyncio.create_task(followed.changed(poll_s=0, settle_s=0))
    for _ in range(10):
        await asyncio.sleep(0)
    due = looking.done()
    looking.cancel()
    await asyncio.wait([looking])
    assert not due or looking.exception() is None
    return due


async def test_what_was_not_read_so_far_is_due(file: Path) -> None:
    assert await is_due(Followed(file, unseen=True))
    assert await is_due(Followed(file.with_name("none"), unseen=True))
    followed = Followed(file)
    assert not await is_due(followed)
    write_in_place(file)
    assert await is_due(followed)
    assert not await is_due(followed)


async def test_what_cannot_be_read_is_due_again_and_told_once(file: Path) -> None:
    followed = Followed(file)
    append(file)
    for news in (True, False, False):
        assert await is_due(followed)
        assert followed.failed(UNREAD) is news
    assert await is_due(followed)
    assert followed.failed(WRONG)
    assert not await is_due(followed)


async def test_what_cannot_be_used_is_due_and_news_when_it_changed(file: Path) -> None:
    followed = Followed(file)
    for _ in range(3):
        append(file)
        ticked(file)
        assert await is_due(followed)
        assert followed.failed(WRONG)
        assert not await is_due(followed)


def test_what_could_not_be_read_is_said_so() -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    assert str(Unread.because("b", error)) == "b: cannot be read: Too many open files"
    assert str(Unread.because("", ValueError("embedded null byte"))) == "cannot be read: embedded null byte"
    assert (UNREAD.unread, WRONG.unread) == (True, False)
