"""A pool of 500 pods with two ports each: all of it is used, and a rolling change of it is followed."""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import pytest

from e2e import pages
from e2e.backends import PAGE
from e2e.kube import Namespace, pool
from e2e.kube_everywhere import everywhere
from e2e.kube_fleet import Fleet
from e2e.kube_line import LABELS, POOL
from e2e.kube_load import PodLoad, Sent, served_by
from e2e.kube_picker import ClusterPicker, pool_flags, proxied, running
from e2e.kube_pods import pod
from e2e.pages import has_ready, until
from epp.lab.stack import free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PODS: Final = 500
DEADLINE_S: Final = 300.0
REPLACED: Final = 50
AT_ONCE: Final = 25
A_FEW: Final = 100
IN_A_ROW: Final = 2 * 2 * PODS
"""Requests that reach everything that is used."""
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


async def test_a_thousand_endpoints(
    namespace: Namespace, envoy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What others wait a minute for is said of a thousand here.
    monkeypatch.setattr(pages, "DEADLINE_S", DEADLINE_S)
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
            await after_some(load, lambda: places(load.sent) >= there, "each of them is used")
            assert places(load.sent) == there
            leaving = list(fleet.addresses)[:REPLACED]
            gone = {fleet.addresses[name] for name in leaving}
            await replace(fleet, leaving)
            # They are there and would answer until nobody asks them any more.
            await after_some(load, lambda: not gone & asked(load), "those that leave get nothing")
            known_s = time.monotonic()
            await fleet.drop(leaving)
            fresh = {(at, port) for at in fleet.addresses.values() for port in ports} - there
            await after_some(load, lambda: places(load.sent) >= fresh, "the new pods are used")
        assert load.failed() == []
        assert not gone & {*load.pods(known_s)}
        await until(lambda: has_ready(picker, PODS * len(ports)), "as many as before are endpoints")
        assert max(map(len, picker.log_lines())) < LINE_BYTES


async def after_some(load: PodLoad, holds: Callable[[], bool], what: str) -> None:
    """By so many requests as reach everything several times, however long those take."""
    for _ in range(5 * IN_A_ROW // A_FEW):
        if holds():
            return
        await load.answered(A_FEW)
    raise AssertionError(f"still not after {len(load.sent)} requests: {what}")


def asked(load: PodLoad) -> set[str]:
    """Addresses of all that is in use."""
    return {*served_by(load.sent[-IN_A_ROW:])}


def places(sent: Iterable[Sent]) -> set[Place]:
    return {(each.pod, each.port) for each in sent if each.ok}


async def replace(fleet: Fleet, leaving: Iterable[str]) -> None:
    """Another pod for each, some at a time; those that leave are marked to go."""
    waiting = list(leaving)

    async def lane() -> None:
        while waiting:
            name = waiting.pop()
            await fleet.grow(1)
            await fleet.mark(name)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(AT_ONCE):
            lanes.create_task(lane())
