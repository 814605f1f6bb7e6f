"""Requests through Envoy reach exactly the pods that are ready, whatever changes under load."""

import time
from pathlib import Path

import pytest

from e2e.kube import POOL_VERSION, Namespace
from e2e.kube_line import LABELS, POOL, PORT, Line, line
from e2e.kube_load import PodLoad, Sent
from e2e.kube_pods import deployment
from e2e.pages import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

ACTIVE_PORTS = "inference.networking.k8s.io/active-ports"
PRE_STOP_S = 25.0
"""Of pods that leave unnoticed: longer than a picker takes to hear of it, however busy the machine."""


def port_of(sent: Sent) -> int:
    return sent.port


def place_of(sent: Sent) -> tuple[str, int]:
    return sent.pod, sent.port


async def test_other_ports(namespace: Namespace, envoy: Path) -> None:
    ports = (PORT, PORT + 1)
    async with line(namespace, envoy, pods=2, ports=ports) as made, PodLoad(made.url) as load:
        for wanted in ([PORT + 1], [PORT, PORT + 1]):
            patch = {"spec": {"targetPorts": [{"number": port} for port in wanted]}}
            changed_s = await namespace.change(namespace.path(POOL_VERSION, "InferencePool", POOL), patch)
            await load.comes_to({*wanted}, changed_s, port_of)
        changed_s = await namespace.annotate("pod-0", {ACTIVE_PORTS: str(PORT)})
        wanted_places = {("pod-0", PORT), ("pod-1", PORT), ("pod-1", PORT + 1)}
        await load.comes_to(wanted_places, changed_s, place_of)
    assert load.failed() == []


async def test_pods_killed_under_load(namespace: Namespace, envoy: Path) -> None:
    """Without any grace: who began before the picker knew of it may fail, nobody later."""
    async with line(namespace, envoy, pods=4) as made, PodLoad(made.url) as load:
        await load.answered(60)
        killed_s = [await made.delete_pod(f"pod-{number}", 0) for number in range(2)]
        known_s = await load.comes_to({"pod-2", "pod-3"}, killed_s[-1])
    assert load.failed(known_s) == []


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
            await until(lambda: len(fresh(made, first)) == 3, "there are as many other pods")
            await load.comes_to(fresh(made, first), time.monotonic())
            made.kubelet.let_go.set()
            await until(lambda: not first & {*made.kubelet.engines}, "the first ones are gone")
            await load.comes_to(fresh(made, first), time.monotonic())
        assert load.failed() == []


def fresh(made: Line, first: set[str]) -> set[object]:
    """Pods that run now, and are none of the first."""
    running: set[object] = {*made.kubelet.engines}
    return running - first
