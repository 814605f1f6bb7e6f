"""Requests through Envoy reach exactly the pods that are ready, whatever changes under load."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from e2e.kube import POOL_VERSION, Namespace
from e2e.kube_line import HEARD_S, LABELS, POOL, PORT, PRE_STOP_S, Line, line
from e2e.kube_load import PodLoad
from e2e.kube_pods import deployment
from e2e.pages import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ACTIVE_PORTS = "inference.networking.k8s.io/active-ports"


async def heard(load: PodLoad, changed_s: float, answers: int = 60) -> Counter[str]:
    """Who answered of so many requests that know of a change, the last one."""
    await asyncio.sleep(max(0.0, changed_s + HEARD_S - time.monotonic()))
    await load.answered(answers)
    return load.pods(changed_s + HEARD_S)


async def test_other_ports(namespace: Namespace, envoy: Path) -> None:
    ports = (PORT, PORT + 1)
    async with line(namespace, envoy, pods=2, ports=ports) as made, PodLoad(made.url) as load:
        for wanted in ([PORT + 1], [PORT, PORT + 1]):
            patch = {"spec": {"targetPorts": [{"number": port} for port in wanted]}}
            changed_s = await namespace.change(namespace.path(POOL_VERSION, "InferencePool", POOL), patch)
            await heard(load, changed_s)
            assert {each.port for each in load.begun(changed_s + HEARD_S)} == {*wanted}
        changed_s = await namespace.annotate("pod-0", {ACTIVE_PORTS: str(PORT)})
        await heard(load, changed_s, 100)
        reached = {(each.pod, each.port) for each in load.begun(changed_s + HEARD_S)}
        assert reached == {("pod-0", PORT), ("pod-1", PORT), ("pod-1", PORT + 1)}
    assert load.failed() == []


async def test_pods_killed_under_load(namespace: Namespace, envoy: Path) -> None:
    """Without any grace: who had begun may fail, who begins a second later does not."""
    async with line(namespace, envoy, pods=4) as made, PodLoad(made.url) as load:
        await load.answered(60)
        killed_s = [await made.delete_pod(f"pod-{number}", 0) for number in range(2)]
        assert {*await heard(load, killed_s[-1])} == {"pod-2", "pod-3"}
    assert load.failed(killed_s[-1] + HEARD_S) == []


async def test_a_deployment_rolls_over_under_load(namespace: Namespace, envoy: Path) -> None:
    async with line(namespace, envoy, pods=0, linger_s=PRE_STOP_S) as made:
        await namespace.create(deployment("engines", 3, LABELS))
        await made.know(3)
        first = {*made.kubelet.engines}
        async with PodLoad(made.url) as load:
            await load.answered(60)
            assert {*load.pods()} == first
            patch = {"spec": {"template": {"metadata": {"annotations": {"generation": "2"}}}}}
            await namespace.change(namespace.path("apps/v1", "Deployment", "engines"), patch)
            await until(lambda: rolled_over(made, first), "all pods are other ones")
            others_s = time.monotonic()
            assert {*await heard(load, others_s)} == {*made.kubelet.engines}
        assert load.failed() == []


def rolled_over(made: Line, first: set[str]) -> bool:
    return len(made.kubelet.engines) == 3 and not first & {*made.kubelet.engines}
