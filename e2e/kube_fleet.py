"""Many pods at once: what a kubelet would say of them is written straight, by whoever holds the fleet."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from e2e.kube import Namespace
from e2e.kube_client import STRATEGIC, Thing, path_of

_AT_ONCE: Final = 16
_A_NETWORK: Final = 250


@dataclass
class Fleet:
    """Pods `<name>-0`, `<name>-1`, ..., each at a loopback address of its own.

    Attributes:
        made: what to create for a name; has `SERVED`, so that nobody else looks after it.
        network: 127.NETWORK.0.0/16 is this fleet's.
        addresses: by name, of the pods that there are.
    """

    namespace: Namespace
    made: Callable[[str], Thing]
    name: str = "fleet"
    network: int = 66
    addresses: dict[str, str] = field(default_factory=dict)
    _count: int = 0
    _containers: dict[str, list[Thing]] = field(default_factory=dict)

    async def grow(self, count: int) -> list[str]:
        """So many pods more, ready; their names."""
        fresh = {}
        for number in range(self._count, self._count + count):
            address = f"127.{self.network}.{number // _A_NETWORK}.{number % _A_NETWORK + 1}"
            fresh[f"{self.name}-{number}"] = address
        self._count += count
        self.addresses |= fresh
        await _each(fresh, self._start)
        return list(fresh)

    async def ready(self, name: str, ready: bool) -> float:
        """Whether the pod is ready. When it was acknowledged, by the monotonic clock."""
        await self.namespace.client.patch(self._path(name), self._status(name, ready), STRATEGIC)
        return time.monotonic()

    async def mark(self, name: str) -> float:
        """Deleted, but with a grace period that nobody ends. When it was acknowledged."""
        return await self.namespace.delete("v1", "Pod", name)

    async def drop(self, names: Iterable[str]) -> None:
        """The objects go."""
        await _each(names, self._drop)

    async def _start(self, name: str) -> None:
        made = await self.namespace.create(self.made(name))
        self._containers[name] = made["spec"]["containers"]
        await self.ready(name, True)

    async def _drop(self, name: str) -> None:
        await self.namespace.delete("v1", "Pod", name, 0)
        del self.addresses[name], self._containers[name]

    def _path(self, name: str) -> str:
        return path_of("v1", "Pod", self.namespace.name, name, "status")

    def _status(self, name: str, ready: bool) -> Thing:
        now, said = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "True" if ready else "False"
        states = {"PodScheduled": "True", "Initialized": "True", "ContainersReady": said, "Ready": said}
        address = self.addresses[name]
        return {
            "status": {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "hostIP": "127.0.0.1",
                "startTime": now,
                "conditions": [
                    {"type": kind, "status": value, "lastTransitionTime": now}
                    for kind, value in states.items()
                ],
                "containerStatuses": [
                    {
                        **{"name": container["name"], "image": container["image"], "imageID": ""},
                        **{"ready": ready, "started": True, "restartCount": 0},
                        "state": {"running": {"startedAt": now}},
                    }
                    for container in self._containers[name]
                ],
            }
        }


async def _each(names: Iterable[str], do: Callable[[str], Awaitable[None]]) -> None:
    """A few at a time."""
    waiting = list(reversed(list(names)))

    async def lane() -> None:
        while waiting:
            await do(waiting.pop())

    async with asyncio.TaskGroup() as lanes:
        for _ in range(_AT_ONCE):
            lanes.create_task(lane())
