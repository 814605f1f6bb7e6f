"""Fixtures of tests that need a control plane."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.kube import Namespace, new_namespace, running_plane
from tools.control_plane import CONTROLLERS, KWOK, SCHEDULER, ControlPlane
from tools.control_plane_programs import foreign_crds


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for the whole run, for tests that leave its processes alone."""
    with running_plane(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture(scope="session")
def definitions_of_others(control_plane: ControlPlane) -> None:
    """HTTPRoute, ServiceMonitor, DestinationRule."""
    control_plane.apply_crds(foreign_crds())


@pytest.fixture
def mortal_plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The same, for a test that kills its processes: what is dead at the end is started again."""
    yield control_plane
    # After a long outage those who ask the API server would wait for half a minute before they try again.
    for part in (CONTROLLERS, SCHEDULER):
        control_plane.kill(part)
    control_plane.revive()
    control_plane.wait_ready()
    # And kwok would leave its nodes alone until the leases of the kwok before it have ended: about as long as
    # it takes others to find that nobody renews them, and to call all pods unready.
    control_plane.kill(KWOK)
    control_plane.kubectl("delete", "leases", "--all", "--namespace=kube-node-lease")
    control_plane.revive()


@pytest_asyncio.fixture
async def namespace(control_plane: ControlPlane, tmp_path: Path) -> AsyncIterator[Namespace]:
    async with new_namespace(control_plane, tmp_path) as namespace:
        yield namespace
