"""A large pool and a small one on a real control plane, and pickers of them."""

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.rows.children import Serve, file_config, serve_with
from benchmarks.rows.picker import PAGE
from e2e.kube import Namespace, new_namespace, pool
from e2e.kube_client import Thing
from e2e.kube_everywhere import everywhere
from e2e.kube_fleet import Fleet
from e2e.kube_picker import pool_flags
from e2e.kube_pods import NODE, SERVED
from epp.lab.stack import free_ports
from tools.control_plane import ControlPlane

LARGE, SMALL = "large", "small"
SMALL_PODS: Final = 4
_LABEL = "pool"


@dataclass
class Pools:
    """Pods of both have the same two ports, and one process answers at all of them with a page of vLLM.

    Attributes:
        folder: for files and logs of pickers.
        kubeconfig: of a service account that may do what pickers may.
    """

    namespace: Namespace
    folder: Path
    kubeconfig: Path
    ports: Sequence[int]
    large: Fleet
    small: Fleet
    _numbers: "Iterator[int]" = field(default_factory=itertools.count)

    def cluster(self, of_pool: str, *flags: str) -> AbstractContextManager[Serve]:
        """A picker that finds its pool in Kubernetes."""
        where = pool_flags(of_pool, self.namespace.name)
        return serve_with(self._new_folder(), f"--kubeconfig={self.kubeconfig}", *where, *flags)

    def file(self, fleet: Fleet, *flags: str) -> AbstractContextManager[Serve]:
        """A picker that is told the same endpoints by a file."""
        folder = self._new_folder()
        places = [(address, port) for address in fleet.addresses.values() for port in self.ports]
        return serve_with(folder, "--config-file", str(file_config(folder, places)), *flags)

    def _new_folder(self) -> Path:
        folder = self.folder / f"picker-{next(self._numbers)}"
        folder.mkdir()
        return folder


@asynccontextmanager
async def pools(plane: ControlPlane, folder: Path, pods: int) -> AsyncIterator[Pools]:
    """With `pods` pods in the large one, all ready."""
    ports = free_ports(2)
    async with new_namespace(plane, folder) as namespace, everywhere(PAGE, ports):
        fleets = {}
        for network, name in ((66, LARGE), (67, SMALL)):
            await namespace.create(pool(name, {_LABEL: name}, ports))
            made = partial(engine_pod, labels={_LABEL: name}, ports=ports)
            fleets[name] = Fleet(namespace, made, name, network)
        await fleets[LARGE].grow(pods)
        await fleets[SMALL].grow(SMALL_PODS)
        access = await namespace.access()
        yield Pools(namespace, folder, access.kubeconfig(), ports, fleets[LARGE], fleets[SMALL])


def engine_pod(name: str, labels: dict[str, str], ports: Sequence[int]) -> Thing:
    """A pod as charts of engines make them: most of its JSON is of no concern to a picker."""
    settings = [{"name": f"VLLM_SETTING_{n}", "value": f"value-of-setting-number-{n:04d}"} for n in range(30)]
    probe = {"httpGet": {"path": "/health", "port": ports[0]}, "periodSeconds": 10, "failureThreshold": 60}
    volumes = ("dshm", "model-cache", "triton", "config", "tmp")
    much = {"memory": "64Gi", "cpu": "16"}
    engine = {
        "name": "vllm",
        "image": "example/vllm-openai:v0.32.0",
        "command": ["/bin/sh", "-c"],
        "args": [
            "exec vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 131072 --data-parallel-size 2"
        ],
        "env": settings,
        "ports": [{"containerPort": port, "name": f"rank-{rank}"} for rank, port in enumerate(ports)],
        "resources": {"limits": much, "requests": much},
        **{"startupProbe": probe, "readinessProbe": probe, "livenessProbe": probe},
        "volumeMounts": [{"name": volume, "mountPath": f"/mnt/{volume}"} for volume in volumes],
    }
    sidecar = {
        "name": "routing-sidecar",
        "image": "example/routing-sidecar:v0.10.0",
        "args": ["--port=8200", "--secure-proxy=false"],
        "env": settings[:8],
        "ports": [{"containerPort": 8200}],
    }
    more = {"app.kubernetes.io/name": "vllm", "llm-d.ai/role": "decode", "pod-template-hash": "6d9f7c8b5d"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels | more,
            "annotations": {SERVED: "true", "prometheus.io/scrape": "true", "example.com/revision": "1"},
        },
        "spec": {
            "nodeName": NODE,
            "automountServiceAccountToken": False,
            "containers": [engine, sidecar],
            "volumes": [{"name": volume, "emptyDir": {}} for volume in volumes],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
    }
