"""A namespace of a real control plane, and what tests do in it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final

from e2e.kube_access import Access, rule
from e2e.kube_client import AWAY, KubeClient, Refused, Thing, kube_client, path_of
from e2e.kube_pods import create_node
from epp import names
from tools.control_plane import ADMIN, ControlPlane, ControlPlaneError
from tools.control_plane_programs import found_programs

CRDS: Final = tuple(
    Path(__file__).parents[1] / "manifests" / "crds" / f"{kind}s.yaml"
    for kind in ("inferencepool", "inferenceobjective", "inferencemodelrewrite")
)
POOL_VERSION: Final = f"{names.POOL_GROUP}/v1"
POLICY_VERSION: Final = "llm-d.ai/v1alpha2"

PICKER_RULES: Final = (
    rule("", "pods", "list watch"),
    rule(names.POOL_GROUP, "inferencepools", "list watch"),
    rule("llm-d.ai", ["inferenceobjectives", "inferencemodelrewrites"], "list watch"),
    rule("llm-d.ai", ["inferenceobjectives/status", "inferencemodelrewrites/status"], "patch"),
    rule("coordination.k8s.io", "leases", "create get update"),
)
"""What a picker of a pool may do in its namespace; without authentication of who reads its metrics."""


@contextmanager
def running_plane(folder: Path) -> Iterator[ControlPlane]:
    """A control plane with our CRDs and a node. Raises ControlPlaneError where its programs are not there."""
    binaries = found_programs()
    if binaries is None:
        raise ControlPlaneError(
            "the programs of the control plane are not built: run `python tools/control_plane.py build`"
        )
    with ControlPlane(folder, binaries) as plane:
        plane.apply_crds(CRDS)
        asyncio.run(_prepare(plane))
        yield plane


async def _prepare(plane: ControlPlane) -> None:
    async with kube_client(plane.url, plane.ca, plane.token()) as client:
        await create_node(client)


@dataclass(frozen=True)
class Namespace:
    """A namespace of a test's own. Whoever makes objects here leaves them to its end.

    Attributes:
        client: may do all.
        folder: for the test's files.
    """

    plane: ControlPlane
    client: KubeClient
    name: str
    folder: Path

    def path(self, api_version: str, kind: str, name: str = "", subresource: str = "") -> str:
        return path_of(api_version, kind, self.name, name, subresource)

    async def create(self, thing: Thing) -> Thing:
        return await self.client.create({**thing, "metadata": {**thing["metadata"], "namespace": self.name}})

    async def access(
        self, rules: Sequence[Thing] = PICKER_RULES, cluster_rules: Sequence[Thing] = (), name: str = "picker"
    ) -> Access:
        """A service account of the namespace with these rights."""
        access = Access(self.plane, self.client, self.name, self.folder / f"access-{name}", name)
        return await access.create(rules, cluster_rules)

    # Each of these returns when it was acknowledged, by the monotonic clock.

    async def change(self, path: str, patch: Thing) -> float:
        """A merge patch."""
        await self.client.patch(path, patch)
        return time.monotonic()

    async def annotate(self, pod: str, annotations: Mapping[str, str | None]) -> float:
        """Sets a pod's annotations; None takes one away."""
        return await self.change(
            self.path("v1", "Pod", pod), {"metadata": {"annotations": dict(annotations)}}
        )

    async def relabel(self, pod: str, labels: Mapping[str, str | None]) -> float:
        """Sets a pod's labels; None takes one away."""
        return await self.change(self.path("v1", "Pod", pod), {"metadata": {"labels": dict(labels)}})

    async def delete(self, api_version: str, kind: str, name: str, grace_s: int | None = None) -> float:
        await self.client.delete(self.path(api_version, kind, name), grace_s)
        return time.monotonic()

    async def ready_pods(self, selector: str = "") -> list[str]:
        """Names of the pods that are ready and not about to end."""
        query = {"labelSelector": selector} if selector else {}
        pods = await self.client.items(self.path("v1", "Pod"), **query)
        return sorted(pod["metadata"]["name"] for pod in pods if _ready(pod))


def _ready(pod: Thing) -> bool:
    conditions = pod["status"].get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


@asynccontextmanager
async def new_namespace(plane: ControlPlane, folder: Path) -> AsyncIterator[Namespace]:
    """One that is there, with its default service account; deleted at the end, which takes its time."""
    async with kube_client(plane.url, plane.ca, plane.token(ADMIN)) as client:
        name = f"t-{token_hex(4)}"
        await client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        try:
            await _until_there(client, path_of("v1", "ServiceAccount", name, "default"))
            yield Namespace(plane, client, name, folder)
        finally:
            # What a test has against an API server that is away, it has said itself.
            with suppress(Refused, *AWAY):
                await client.delete(path_of("v1", "Namespace", "", name))
                # No kubelet is left that would let its pods go.
                await client.delete(path_of("v1", "Pod", name), 0)


async def _until_there(client: KubeClient, path: str) -> None:
    for _ in range(1200):
        try:
            await client.get(path)
        except Refused as refused:
            if refused.status != 404:
                raise
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError(f"{path} does not come into being")


# -- objects ---------------------------------------------------------------------------------------


def pool(
    name: str,
    labels: Mapping[str, str],
    ports: Sequence[int] = (8000,),
    *,
    app_protocol: str = "",
    api_version: str = POOL_VERSION,
) -> Thing:
    spec: Thing = {
        "selector": {"matchLabels": dict(labels)},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "epp", "port": {"number": names.GRPC_PORT}},
    }
    if app_protocol:
        spec["appProtocol"] = app_protocol
    return {"apiVersion": api_version, "kind": "InferencePool", "metadata": {"name": name}, "spec": spec}


def objective(name: str, of_pool: str, priority: int) -> Thing:
    spec = {"priority": priority, "poolRef": {"name": of_pool}}
    return {
        "apiVersion": POLICY_VERSION,
        "kind": "InferenceObjective",
        "metadata": {"name": name},
        "spec": spec,
    }


def model_rewrite(name: str, of_pool: str, rules: Sequence[Thing]) -> Thing:
    spec = {"poolRef": {"name": of_pool}, "rules": list(rules)}
    return {
        "apiVersion": POLICY_VERSION,
        "kind": "InferenceModelRewrite",
        "metadata": {"name": name},
        "spec": spec,
    }
