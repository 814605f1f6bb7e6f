"""What tests of pickers in Kubernetes hold against them: planted faults are seen."""

import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from e2e import pages
from e2e.kube import Namespace
from e2e.kube_line import LABELS, PORT, Line, line
from e2e.kube_load import PodLoad
from e2e.kube_picker import START_S, proxied
from e2e.kube_pods import Kubelet, pod
from e2e.pages import until
from epp.lab.stack import Picker

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

SOON_S: Final = 1.0
"""Longer than what was under way when a fault began."""
LINGERS_S: Final = 240
"""Of a pod that is marked to go and serves on to the end of the test."""


async def engine_dies_unnoticed(made: Line) -> None:
    """The pod stays ready in Kubernetes, and its neighbours with it."""
    for name in ("pod-0", "pod-1", "pod-2"):
        await made.kubelet.engines[name].stop(0.0)


async def picker_dies(made: Line) -> None:
    await made.pickers[0].child.stop(signal.SIGKILL)


async def picker_hangs(made: Line) -> None:
    made.pickers[0].child.send(signal.SIGSTOP)


@pytest.mark.parametrize("fault", [engine_dies_unnoticed, picker_dies, picker_hangs])
async def test_failed_requests_are_seen(
    namespace: Namespace, envoy: Path, fault: Callable[[Line], Awaitable[None]]
) -> None:
    async with line(namespace, envoy) as made, PodLoad(made.url, timeout_s=15.0) as load:
        await load.answered(30)
        assert load.failed() == []
        at_s = time.monotonic()
        await fault(made)
        await until(lambda: load.failed(at_s + SOON_S), "requests fail")


async def test_a_picker_that_hears_of_no_change_is_seen(
    namespace: Namespace, envoy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the pods' addresses from a file, as they were."""
    async with Kubelet(namespace.client, namespace.name, linger_s=LINGERS_S) as kubelet:
        for name in ("a", "b"):
            await namespace.create(pod(name, LABELS, grace_s=LINGERS_S))
        await until(lambda: len(kubelet.addresses) == 2, "the pods run")
        picker = Picker(namespace.folder, [(address, PORT) for address in kubelet.addresses.values()])
        try:
            await picker.start(START_S)
            async with proxied(envoy, picker) as url, PodLoad(url) as load:
                await until(lambda: len(load.pods()) == 2, "both are used")
                deleted_s = await namespace.delete("v1", "Pod", "a")
                await until(lambda: load.pods(deleted_s + SOON_S)["a"], "the deleted one is used")
                monkeypatch.setattr(pages, "DEADLINE_S", SOON_S)
                with pytest.raises(AssertionError, match="the latest told"):
                    await load.comes_to({"b"}, deleted_s)
        finally:
            await picker.child.stop(signal.SIGKILL)
