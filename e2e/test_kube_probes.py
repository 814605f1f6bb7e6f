"""Pods that are cared for as on a node: the care itself, without a control plane."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from e2e.kube_client import Thing
from e2e.kube_probes import LIVENESS, READINESS, Care
from epp.lab.stack import Child

PROBE = {"periodSeconds": 10, "grpc": {}}
POD = {
    "metadata": {"name": "one", "namespace": "here", "uid": "u"},
    "spec": {
        "terminationGracePeriodSeconds": 30,
        "containers": [{"name": "only", "image": "lab/sleep", READINESS: PROBE, LIVENESS: PROBE}],
    },
}


class Objects:
    """Of the API: it knows the pod and takes what it is told."""

    async def get(self, _: str) -> Thing:
        return {"status": {"podIP": "127.0.0.1"}}

    async def patch(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("steps", range(8))
async def test_a_probe_answered_as_the_pod_ends_does_not_keep_it(tmp_path: Path, steps: int) -> None:
    """Wherever in the answer's way through the loop the end comes."""
    answers = asyncio.Event()

    async def ask(*_: Thing) -> bool:
        return await answers.wait()

    child = Child("only", ["sleep", "600"], tmp_path / "log")
    await child.start()
    care = Care(Objects(), POD, {"only": child}, ask)  # type: ignore[arg-type]
    care.begin()
    await asyncio.sleep(0.05)
    answers.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await care.end(0.0)
    assert child.returncode is not None
