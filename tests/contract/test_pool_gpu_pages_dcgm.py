"""Pages in the form of NVIDIA's DCGM exporter, of a node and beside an engine."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from epp.pool import extract
from epp.pool.extract import GPU_UTILIZATION, GpuPages
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore

DATA = Path(__file__).parents[1] / "data" / "pool"
NODE, SIDECAR = (DATA / f"dcgm-exporter-{where}.txt" for where in ("node", "sidecar"))


def figures(file: Path, *pods: str) -> list[float]:
    """Of an endpoint of each pod, all of which read the page."""
    store = PoolStore()
    store.add_attributes([GPU_UTILIZATION])
    store.sync(
        [Endpoint(f"u{n}", f"e{n}", "llm", "10.0.0.1", 8000 + n, pod=p) for n, p in enumerate(pods)], 0
    )
    reader = GpuPages(store)
    for slot, endpoint in store.roster:
        reader.extract(slot, endpoint, file.read_bytes(), 1.0)
    column = store.view.attributes[GPU_UTILIZATION]
    return [column.item(slot) for slot, _ in store.roster]


def check() -> None:
    # GPU 3 is nobody's, so at 12 it counts for all; GPUs 0 and 1 are at 41 and 67, GPU 2 at 98.
    found = figures(NODE, "vllm-0", "vllm-0", "vllm-1", "vllm-2", "")
    np.testing.assert_allclose(found, [0.67, 0.67, 0.98, 0.12, 0.98])
    np.testing.assert_allclose(figures(SIDECAR, "vllm-0", ""), [0.88, 0.88])


def test_each_pod_has_the_figure_of_its_busiest_gpu() -> None:
    check()


def every_line(patch: pytest.MonkeyPatch) -> None:
    """Takes the exporter's other series too."""
    patch.setattr(extract, "_GPU_UTIL_SERIES", "DCGM_FI_DEV_MEM_COPY_UTIL")


def blind_to_pods(patch: pytest.MonkeyPatch) -> None:
    read = extract.SeriesReader.read
    patch.setattr(extract.SeriesReader, "read", lambda *a: [(None, value) for _, value in read(*a)])


def only_named_pods(patch: pytest.MonkeyPatch) -> None:
    read = extract.SeriesReader.read
    patch.setattr(extract.SeriesReader, "read", lambda *a: [(pod or "", value) for pod, value in read(*a)])


def one_gpu_of_each_pod_counts(patch: pytest.MonkeyPatch) -> None:
    read = extract.SeriesReader.read
    patch.setattr(extract.SeriesReader, "read", lambda *a: list(dict(reversed(read(*a))).items()))


@pytest.mark.parametrize("fault", [every_line, blind_to_pods, only_named_pods, one_gpu_of_each_pod_counts])
def test_a_fault_is_caught(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            check()
