"""A pool of 500 pods with two ports each: all of it is used, and a rolling change of it is followed."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from e2e.backends import PAGE
from e2e.kube import Namespace, pool
from e2e.kube_everywhere import everywhere
from e2e.kube_fleet import Fleet
from e2e.kube_line import HEARD_S, LABELS, POOL
from e2e.kube_load import PodLoad, Sent
from e2e.kube_picker import ClusterPicker, pool_flags, proxied, running
from e2e.kube_pods import pod
from e2e.pages import has_ready, until
from epp.lab.stack import free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PODS: Final = 500
REPLACED: Final = 50
AT_ONCE: Final = 25
TERMINATING_S: Final = HEARD_S + 1.5
"""Long enough that a picker which goes on with them shows it."""
LINE_BYTES: Final = 2000
EACH_IN_TURN: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: no-hit-lru-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: no-hit-lru-scorer}
  - {pluginRef: max-score-picker}
"""
"""Prompts that nobody knows go to the endpoint that longest had none."""

Place = tuple[str, int]


async def test_a_thousand_endpoints(namespace: Namespace, envoy: Path) -> None:
    ports = free_ports(2)
    await namespace.create(pool(POOL, LABELS, ports))
    fleet = Fleet(namespace, lambda name: pod(name, LABELS, ports))
    page = namespace.folder / "page"
    page.write_bytes(PAGE)
    flags = pool_flags(POOL, namespace.name)
    picker = ClusterPicker(namespace.folder, await namespace.access(), flags, config=EACH_IN_TURN)
    # The first of them are listed, the others come while it watches.
    await fleet.grow(PODS // 5)
    async with everywhere(page, ports), running(picker):
        await fleet.grow(PODS - PODS // 5)
        await until(lambda: has_ready(picker, PODS * len(ports)), "all pods and ports are endpoints")
        async with proxied(envoy, picker) as url, PodLoad(url, lanes=16, pause_s=0.0) as load:
            there = {(at, port) for at in fleet.addresses.values() for port in ports}
            await until(lambda: places(load.sent) >= there, "each of them is used")
            assert places(load.sent) == there
            gone_s = await replace(fleet, list(fleet.addresses)[:REPLACED])
            fresh = {(at, port) for at in fleet.addresses.values() for port in ports} - there
            await until(lambda: fresh <= places(load.sent), "the new pods are used")
        assert load.failed() == []
        for address, at_s in gone_s.items():
            assert address not in load.pods(at_s + HEARD_S)
        await until(lambda: has_ready(picker, PODS * len(ports)), "as many as before are endpoints")
        assert max(map(len, picker.log_lines())) < LINE_BYTES


def places(sent: Iterable[Sent]) -> set[Place]:
    return {(each.pod, each.port) for each in sent if each.ok}


async def replace(fleet: Fleet, names: list[str]) -> dict[str, float]:
    """Another pod for each, some at a time. When it was acknowledged that an address is to go."""
    gone_s: dict[str, float] = {}

    async def lane() -> None:
        while names:
            name = names.pop()
            address = fleet.addresses[name]
            await fleet.grow(1)
            gone_s[address] = await fleet.mark(name)
            await asyncio.sleep(TERMINATING_S)
            await fleet.drop([name])

    async with asyncio.TaskGroup() as lanes:
        for _ in range(AT_ONCE):
            lanes.create_task(lane())
    return gone_s
