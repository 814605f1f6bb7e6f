"""What all tests share: repeatable examples, and how they are spread over processes."""

from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# The same examples in every run, so that a run that fails can be repeated.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What listens on ports stands first: it is one long piece of work, and is to begin at once."""
    items.sort(key=lambda item: not _listens(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _FilesAndSockets(config, log)


class _FilesAndSockets(LoadScopeScheduling):
    """A file goes to one process as a whole; all that listen on ports go to the same: two would take ports
    from each other."""

    def _split_scope(self, nodeid: str) -> str:
        return "sockets" if _listens(nodeid) else nodeid.partition("::")[0]


def _listens(nodeid: str) -> bool:
    return PurePath(nodeid.partition("::")[0]).parent.name in ("component", "e2e")
