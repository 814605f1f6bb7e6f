"""Client, Envoy, pickers and the pods of a pool in one namespace, up and ready."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.kube import PICKER_RULES, Namespace, pool
from e2e.kube_access import Access
from e2e.kube_client import Thing
from e2e.kube_picker import SPREAD, ClusterPicker, pool_flags, proxied, running
from e2e.kube_pods import Kubelet, Starts, light, pod
from e2e.pages import has_ready, until

LABELS: Final = {"app": "engine"}
POOL: Final = "pool"
PORT: Final = 8000
LATE_S: Final = 5.0
"""How late a picker may hear of a change where the machine is busy: what is told at one moment is not held
against requests that began earlier than this after it."""
PRE_STOP_S: Final = 6.0
"""A preStop hook of pods that leave unnoticed: longer than `LATE_S`."""


@dataclass(frozen=True)
class Line:
    """`async with line(...) as made:`.

    Attributes:
        access: of each picker.
        url: of Envoy.
    """

    namespace: Namespace
    kubelet: Kubelet
    pickers: Sequence[ClusterPicker]
    access: Sequence[Access]
    url: str

    async def pod(self, name: str, labels: dict[str, str] = LABELS, ports: Sequence[int] = (PORT,)) -> None:
        """Made, and not waited for."""
        await self.namespace.create(pod(name, labels, ports))

    async def delete_pod(self, name: str, grace_s: int | None = None) -> float:
        return await self.namespace.delete("v1", "Pod", name, grace_s)

    async def know(self, endpoints: int) -> None:
        """Until every picker has so many endpoints."""
        for picker in self.pickers:
            await until(lambda picker=picker: has_ready(picker, endpoints), "the picker knows its endpoints")  # type: ignore[misc]


@asynccontextmanager
async def line(
    namespace: Namespace,
    envoy: Path,
    *,
    pods: int = 3,
    ports: Sequence[int] = (PORT,),
    target_ports: Sequence[int] = (PORT,),
    replicas: int = 1,
    flags: Sequence[str] = (),
    config: str = SPREAD,
    rules: Sequence[Thing] = PICKER_RULES,
    as_in_pod: bool = False,
    linger_s: float = 0.5,
    starts: Starts = light,
    serving: bool = True,
) -> AsyncIterator[Line]:
    """A pool and its pods `pod-0`, ...; each replica of the picker has a service account of its own,
    `picker-0`, ... `serving`: wait until all replicas say that they serve."""
    await namespace.create(pool(POOL, LABELS, target_ports))
    pickers, accesses = [], []
    for number in range(replicas):
        name = f"picker-{number}"
        access = await namespace.access(rules, name=name)
        accesses.append(access)
        options = (*pool_flags(POOL, namespace.name), *flags)
        pickers.append(
            ClusterPicker(namespace.folder, access, options, name=name, config=config, as_in_pod=as_in_pod)
        )
    async with Kubelet(namespace.client, namespace.name, starts, linger_s) as kubelet:
        for number in range(pods):
            await namespace.create(pod(f"pod-{number}", LABELS, ports))
        async with running(*pickers, serving=serving), proxied(envoy, *pickers) as url:
            made = Line(namespace, kubelet, pickers, accesses, url)
            await made.know(pods * len(target_ports))
            yield made
