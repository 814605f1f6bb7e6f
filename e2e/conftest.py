from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.conftest_kube import control_plane as control_plane
from e2e.conftest_kube import definitions_of_others as definitions_of_others
from e2e.conftest_kube import mortal_plane as mortal_plane
from e2e.conftest_kube import namespace as namespace
from e2e.pages import FLAGS, complaints, on, settled
from e2e.questions import MODEL
from epp.lab.envoy import find_envoy
from epp.lab.stack import Gateway, LabEngines
from epp.lab.workload import Fleet
from epp.runtime.options import GRPCIO

# Fast enough that no test waits for them, slow enough that a stream of a hundred tokens can be caught midway.
FLEET = Fleet(
    engines=4,
    fit="llama-8b-h100",
    speed_up=4.0,
    num_blocks=16_385,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
)


@pytest.fixture(scope="session")
def envoy() -> Path:
    return find_envoy()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LabEngines]:
    """Lab engines for tests that leave them as they were."""
    async with LabEngines(FLEET, MODEL, tmp_path_factory.mktemp("engines")) as engines:
        yield engines


# Tests use the default transport. Those that tell most about a transport also run on the other one.


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(
    engines: LabEngines, envoy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A picker that logs all it can, in front of `engines`, for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("gateway")
    async with Gateway(engines.addresses, folder, envoy, picker_flags=(*FLAGS, "-v=4")) as gateway:
        yield gateway
        await settled(gateway.pickers[0])
        assert complaints(gateway.pickers[0]) == []


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def grpcio_gateway(
    engines: LabEngines, envoy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("grpcio")
    async with Gateway(engines.addresses, folder, envoy, picker_flags=on(GRPCIO)) as gateway:
        yield gateway
        await settled(gateway.pickers[0])
        assert complaints(gateway.pickers[0]) == []


@pytest.fixture(params=["gateway", "grpcio_gateway"], ids=["own", "grpcio"])
def each_gateway(request: pytest.FixtureRequest) -> Gateway:
    """`gateway`, and one like it on the other transport."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Gateway)
    return found
