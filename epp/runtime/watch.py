"""Files that change while the picker runs."""

import asyncio
import os
from collections.abc import Sequence
from typing import Final

from epp.errors import ConfigError

# Device, inode, time of change in ns, size: differs after an edit, a rename and a swapped symlink; after
# new permissions, too, with which a file may be read that could not be. The time is not the content's, which
# whoever writes it can put back (`cp -p`, `touch -r`). None: there is no such file.
Signature = tuple[int, int, int, int] | None
# That of no file, be it there or not.
_UNSEEN: Final = (-1, -1, -1, -1)


def signature(path: str | os.PathLike[str]) -> Signature:
    """That of the file `path` leads to, through all symlinks."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size


async def changed(
    paths: Sequence[str | os.PathLike[str]], known: Sequence[Signature], *, poll_s: float, settle_s: float
) -> tuple[Signature, ...]:
    """The signatures of `paths`, once they differ from `known` and have kept still for `settle_s`.

    So a file is not read while it is being written, nor the first of two before the second.
    """
    loaded = tuple(known)
    before = loaded
    while True:
        await asyncio.sleep(poll_s if before == loaded else settle_s)
        seen = tuple(signature(path) for path in paths)
        if seen == before != loaded:
            return seen
        before = seen


class Followed:
    """Files that are to be read when they have changed, and again as long as they cannot be read.

    What can be read and not be used is left alone until it changes.
    """

    def __init__(self, *paths: str | os.PathLike[str], unseen: bool = False) -> None:
        """Changes count from now on: the files are read after this. `unseen`: they were not read so far."""
        self._paths = paths
        self._unseen: tuple[Signature, ...] = (_UNSEEN,) * len(paths)
        self._known = self._unseen if unseen else tuple(map(signature, paths))
        self._failure: tuple[tuple[Signature, ...], str] | None = None

    async def changed(self, *, poll_s: float, settle_s: float) -> None:
        """Until it is time to read them."""
        self._known = await changed(self._paths, self._known, poll_s=poll_s, settle_s=settle_s)

    def failed(self, error: ConfigError) -> bool:
        """What came of reading them; whether that is news."""
        before, self._failure = self._failure, (self._known, str(error))
        if error.unread:
            self._known = self._unseen
        return self._failure != before
