"""What all tests share: repeatable examples, and how they are spread over processes."""

from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

from epp.lab import stack

# The same examples in every run, so that a run that fails can be repeated.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")
# Nor do they follow the literals of whatever modules this process happens to have imported by now.
assert callable(providers._get_local_constants)
providers._get_local_constants = lambda: providers._local_constants


_LONG = ("e2e", "component")
"""Folders whose tests start processes and wait for them, the longest first."""


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run tests beside each other take their ports from ranges of their own."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        numbers = stack.PORTS.numbers
        share = len(numbers) // worker["workercount"]
        begin = share * int(worker["workerid"].removeprefix("gw"))
        stack.PORTS = stack.Ports(numbers[begin : begin + share])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest pieces of work stand first: they are to begin at once."""
    rank = {folder: place - len(_LONG) for place, folder in enumerate(_LONG)}
    items.sort(key=lambda item: rank.get(_folder(item.nodeid), 0))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _FilesAndFolders(config, log)


class _FilesAndFolders(LoadScopeScheduling):
    """A file goes to one process as a whole, and so do all of `e2e`, which share engines and gateways, and
    all of `tests/component`: two of a kind at once would keep each other waiting."""

    def _split_scope(self, nodeid: str) -> str:
        folder = _folder(nodeid)
        return folder if folder in _LONG else nodeid.partition("::")[0]


def _folder(nodeid: str) -> str:
    return PurePath(nodeid.partition("::")[0]).parent.name
