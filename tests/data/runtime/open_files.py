"""A process that has as many files open as it may."""

import builtins
import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def too_many_open_files(*places: Path | str) -> Iterator[list[object]]:
    """What was tried in vain: to read a file at or below these paths, or to call what has such a name.

    Names are of what opens files out of Python's sight (`epp.runtime.tls._server_context`).
    """
    tried: list[object] = []
    folders = [place for place in places if isinstance(place, Path)]
    right = io.open

    def refuse(what: object, *_: Any, **__: Any) -> Any:
        tried.append(what)
        raise OSError(errno.EMFILE, "Too many open files")

    def guarded(file: Any, mode: str = "r", *how: Any, **more: Any) -> Any:
        by_name = "r" in mode and isinstance(file, str | os.PathLike)
        if by_name and any(Path(file).is_relative_to(folder) for folder in folders):
            refuse(file)
        return right(file, mode, *how, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", guarded)
        patch.setattr(io, "open", guarded)
        for place in places:
            if isinstance(place, str):
                patch.setattr(place, refuse)
        yield tried
