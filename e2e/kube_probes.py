"""Containers of a pod, cared for as a kubelet does: probes, restarts, preStop hooks, the pod's conditions.

Other than on a node, a container that has ended is started again at once, however often.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from e2e.kube_client import STRATEGIC, KubeClient, Thing, path_of
from e2e.kube_pods import at_last
from e2e.pages import until
from epp.lab.stack import Child

LIVENESS: Final = "livenessProbe"
READINESS: Final = "readinessProbe"
LEAST_GRACE_S: Final = 2.0
"""What a container is left after its preStop hook, whatever that took."""
_KNOWN: Final = {
    *("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold", "failureThreshold"),
    *("terminationGracePeriodSeconds", "grpc", "httpGet", "tcpSocket"),
}

Ask = Callable[[Thing, Thing], Awaitable[bool]]
"""A container and a probe of it -> whether it answers as wanted, for as long as that takes."""


@dataclass(frozen=True)
class Times:
    """What a probe's object says of time, with the defaults of the API."""

    initial_s: float
    period_s: float
    timeout_s: float
    successes: int
    failures: int
    grace_s: float

    @classmethod
    def of(cls, probe: Thing, grace_s: float, pace: float) -> "Times":
        """`grace_s`: the pod's. All but the time-out, which is of one question, is multiplied by `pace`."""
        assert probe.keys() <= _KNOWN, f"of this probe not all is known here: {probe}"
        return cls(
            probe.get("initialDelaySeconds", 0) * pace,
            probe.get("periodSeconds", 10) * pace,
            probe.get("timeoutSeconds", 1),
            probe.get("successThreshold", 1),
            probe.get("failureThreshold", 3),
            probe.get("terminationGracePeriodSeconds", grace_s) * pace,
        )


@dataclass
class Care:
    """Of one pod, from `begin` to `end`.

    Attributes:
        children: by name of the container; they run at `begin`.
        pace: times of probes, and the grace of restarts, are multiplied by it. Below 1: sooner; but a
            container has its whole time until it answers first, for what runs starts no faster.
        ready: containers that are, by their probes; one without a probe is as long as it runs.
        restarts: by name of the container.
        because: of each restart, in their order: `livenessProbe` or `exit`.
    """

    client: KubeClient
    pod: Thing
    children: Mapping[str, Child]
    ask: Ask
    pace: float = 1.0
    ready: set[str] = field(default_factory=set)
    restarts: dict[str, int] = field(default_factory=dict)
    because: list[str] = field(default_factory=list)
    _answered: set[str] = field(default_factory=set)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        for each in self._containers:
            assert "startupProbe" not in each, "no startup probe is known here"
            self._tasks.append(asyncio.create_task(self._run(each)))
        self._tasks.append(asyncio.create_task(self._tell()))

    async def end(self, grace_s: float) -> None:
        """All at the same time, each after its preStop hook; a grace of 0 waits for nothing."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(each, grace_s) for each in self._containers))
        for result in results:
            if isinstance(result, Exception):
                raise result

    @property
    def _containers(self) -> list[Thing]:
        return [each for each in self.pod["spec"]["containers"] if each["name"] in self.children]

    async def _run(self, container: Thing) -> None:
        name, child = container["name"], self.children[container["name"]]
        while True:
            await _first(child.wait(), self._until_dead(container), self._follow_readiness(container))
            self._mark(name, ready=False)
            self._answered.discard(name)
            if child.returncode is None:
                await self._stop(container, self._times(container, LIVENESS).grace_s)
                self.because.append(LIVENESS)
            else:
                self.because.append("exit")
            self.restarts[name] = self.restarts.get(name, 0) + 1
            self._changed.set()
            await child.start()

    def _times(self, container: Thing, kind: str) -> Times:
        grace_s = float(self.pod["spec"]["terminationGracePeriodSeconds"])
        return Times.of(container[kind], grace_s, self.pace)

    async def _until_dead(self, container: Thing) -> None:
        """Until liveness has failed as often in a row as its threshold says."""
        if LIVENESS not in container:
            await asyncio.get_running_loop().create_future()
        times, failed = self._times(container, LIVENESS), 0.0
        await asyncio.sleep(times.initial_s)
        while failed < times.failures:
            said = await self._asked(container, LIVENESS, times)
            weight = 1.0 if container["name"] in self._answered else self.pace
            failed = 0.0 if said else failed + weight

    async def _follow_readiness(self, container: Thing) -> None:
        if READINESS not in container:
            self._mark(container["name"], ready=True)
            await asyncio.get_running_loop().create_future()
        times, run = self._times(container, READINESS), 0
        await asyncio.sleep(times.initial_s)
        while True:
            # Successes in a row, or failures below zero.
            said = await self._asked(container, READINESS, times)
            run = max(run, 0) + 1 if said else min(run, 0) - 1
            if run >= times.successes or -run >= times.failures:
                self._mark(container["name"], ready=said)

    async def _asked(self, container: Thing, kind: str, times: Times) -> bool:
        """Asks once, and returns when it is time to ask again."""
        pause = asyncio.create_task(asyncio.sleep(times.period_s))
        try:
            said = False
            with suppress(TimeoutError):
                async with asyncio.timeout(times.timeout_s):
                    said = await self.ask(container, container[kind])
            await pause
        finally:
            pause.cancel()
        if said:
            self._answered.add(container["name"])
        return said

    async def _stop(self, container: Thing, grace_s: float) -> None:
        child, left_s = self.children[container["name"]], grace_s
        if hook := container.get("lifecycle", {}).get("preStop"):
            waits_s = min(float(hook["sleep"]["seconds"]), grace_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(waits_s):
                    await child.wait()
            left_s = max(LEAST_GRACE_S if grace_s else 0.0, grace_s - waits_s)
        await child.stop(signal.SIGTERM if grace_s else signal.SIGKILL, left_s)

    def _mark(self, name: str, *, ready: bool) -> None:
        if ready != (name in self.ready):
            (self.ready.add if ready else self.ready.discard)(name)
            self._changed.set()

    async def _tell(self) -> None:
        """Conditions and restarts into the pod's status, once somebody has given it its address."""
        metadata = self.pod["metadata"]
        path = path_of("v1", "Pod", metadata["namespace"], metadata["name"])
        pod: Thing = {}

        async def look() -> None:
            nonlocal pod
            pod = await self.client.get(path)

        async def has_address() -> bool:
            return not await at_last(look) or "podIP" in pod["status"]

        def told() -> Awaitable[Thing]:
            body = {"metadata": {"uid": metadata["uid"]}, "status": self._status()}
            return self.client.patch(f"{path}/status", body, STRATEGIC)

        await until(has_address, f"pod {metadata['name']} has its address")
        there = True
        while there:
            await self._changed.wait()
            self._changed.clear()
            there = await at_last(told)

    def _status(self) -> Thing:
        whole = str(self.ready == {*self.children})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        kinds = ("ContainersReady", "Ready")
        return {
            "conditions": [{"type": kind, "status": whole, "lastTransitionTime": now} for kind in kinds],
            "containerStatuses": [
                {
                    **{"name": each["name"], "image": each["image"], "imageID": "", "started": True},
                    "ready": each["name"] in self.ready,
                    "restartCount": self.restarts.get(each["name"], 0),
                }
                for each in self._containers
            ],
        }


async def _first(*ways: Coroutine[Any, Any, object]) -> None:
    """Until one of them has ended, or failed; the others are given up."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
