"""A pool of the chart behind a gateway of Istio's: Envoy with the configuration that Istio gives it.

Istio makes the gateway's Deployment. Its pod is run here by Envoy alone, without Istio's agent: what that
would write into Envoy's first configuration is taken from the pod's object.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from e2e.gateway_istio_plane import Istio, pod_address
from e2e.kube import POOL_VERSION, Namespace
from e2e.kube_client import Thing
from e2e.kube_containers import PICKER, Containers, Running, fetch
from e2e.kube_dns import cluster_names
from e2e.kube_load import one
from e2e.kube_pods import HOLD, SERVED, Engine, Kubelet, pod
from e2e.kube_release import RUN, Release
from e2e.pages import until
from epp.lab.envoy import EnvoyProcess
from epp.lab.stack import HOST, free_ports
from epp.runtime.explanations import DECISIONS_PATH
from tests.data.chart.rendering import LABELS, Object, values

GATEWAY: Final = "inference-gateway"
PROXY: Final = "istio-proxy"
"""Name of the container in the pods of Istio's gateways."""
ROUTED: Final[Object] = {"provider": {"name": "istio"}, "httpRoute": {"create": True}}
"""Values of a release behind such a gateway, and nothing that is not the chart's own default."""

_GATEWAY_API: Final = "gateway.networking.k8s.io/v1"
_METADATA: Final = "ISTIO_META_"
_HTTP2: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def gateway(port: int) -> Thing:
    """A Gateway; without a load balancer, which nobody would make here."""
    return {
        "apiVersion": _GATEWAY_API,
        "kind": "Gateway",
        "metadata": {"name": GATEWAY, "annotations": {"networking.istio.io/service-type": "ClusterIP"}},
        "spec": {
            "gatewayClassName": "istio",
            "listeners": [{"name": "http", "port": port, "protocol": "HTTP"}],
            "infrastructure": {"annotations": {SERVED: "true"}},
        },
    }


@dataclass
class Proxy:
    """Envoy in the pod of a gateway: an `Engine`.

    Attributes:
        envoy: its process.
    """

    envoy: EnvoyProcess
    address: str

    async def stop(self, grace_s: float) -> None:
        await self.envoy.stop(grace_s)

    async def counters(self, suffix: str) -> dict[str, int]:
        """Those whose names end so, zeros left out."""
        _, text = await fetch(f"{self.envoy.admin_url}/stats?usedonly")
        pairs = (line.rsplit(": ", 1) for line in text.splitlines())
        return {name: int(value) for name, value in pairs if name.endswith(suffix) and value.isdecimal()}

    async def configuration(self) -> dict[str, Any]:
        """All that it was given, by kind."""
        _, text = await fetch(f"{self.envoy.admin_url}/config_dump?include_eds")
        return {each["@type"].rpartition(".")[2]: each for each in json.loads(text)["configs"]}


@dataclass
class Proxies(Containers):
    """Runs pods of Istio's gateways too."""

    istio: Istio | None = None
    proxies: list[Proxy] = field(default_factory=list)

    async def start(self, thing: Thing, address: str, ports: list[int]) -> Engine:
        found = [each for each in thing["spec"]["containers"] if each["name"] == PROXY]
        if not found:
            return await super().start(thing, address, ports)
        assert self.istio is not None
        (admin,) = free_ports(1)
        first = bootstrap(thing, found[0], address, self.istio.xds, admin)
        process = EnvoyProcess(self.envoy, json.dumps(first), admin_port=admin)
        await process.start(60.0)
        made = Proxy(process, address)
        self.proxies.append(made)
        return made


def bootstrap(pod: Thing, container: Thing, address: str, xds: int, admin: int) -> Thing:
    """What Istio's agent writes for Envoy in such a pod, without probes, metrics and certificates."""
    metadata, name = pod["metadata"], pod["metadata"]["name"]
    namespace, labels = metadata["namespace"], metadata["labels"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    told = {key.removeprefix(_METADATA): given[key] for key in given if key.startswith(_METADATA)}
    node = {
        "id": f"router~{address}~{name}.{namespace}~{namespace}.svc.cluster.local",
        "cluster": f"{labels['service.istio.io/canonical-name']}.{namespace}",
        "metadata": {
            **told,
            **{"NAME": name, "NAMESPACE": namespace, "INSTANCE_IPS": address, "LABELS": labels},
            **{"SERVICE_ACCOUNT": pod["spec"]["serviceAccountName"], "ANNOTATIONS": metadata["annotations"]},
            **{"ISTIO_VERSION": "1.31.0", "PROXY_CONFIG": json.loads(given["PROXY_CONFIG"])},
        },
    }
    source = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
    http2: Thing = {"explicit_http_config": {"http2_protocol_options": {}}}
    options = {_HTTP2: {"@type": f"type.googleapis.com/{_HTTP2}", **http2}}
    return {
        "node": node,
        "admin": {"address": _address(HOST, admin)},
        "layered_runtime": {"layers": [{"name": "istio", "static_layer": _RUNTIME}]},
        "dynamic_resources": {
            "lds_config": source,
            "cds_config": source,
            "ads_config": {
                **{"api_type": "DELTA_GRPC", "transport_api_version": "V3"},
                **{"set_node_on_first_message_only": True},
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}],
            },
        },
        "static_resources": {
            "clusters": [
                {
                    **{"name": "xds-grpc", "type": "STATIC", "connect_timeout": "1s"},
                    "typed_extension_protocol_options": options,
                    "load_assignment": {
                        "cluster_name": "xds-grpc",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(HOST, xds)}}]}],
                    },
                }
            ]
        },
    }


_RUNTIME: Final = {
    "envoy.reloadable_features.http_reject_path_with_fragment": False,
    "envoy.reloadable_features.coalesce_lb_rebuilds_on_batch_update": False,
}
"""What Istio's agent sets of Envoy's runtime, as far as it bears on requests and endpoints."""


def _address(host: str, port: int) -> Thing:
    return {"socket_address": {"address": host, "port_value": port}}


# -- a namespace with all of it --------------------------------------------------------------------


@dataclass
class IstioSite:
    """A namespace with a gateway: `async with istio_site(...) as made`.

    Attributes:
        port: where the gateway listens.
    """

    namespace: Namespace
    containers: Proxies
    kubelet: Kubelet
    release: Release
    port: int

    async def install(self, *given: Mapping[str, Any]) -> Running:
        """The release behind the gateway; a picker of it, once one is ready."""
        await self.release.install(values(RUN, ROUTED, *given))
        await until(self.found, "a picker is ready")
        return self.found()[0]

    async def address(self) -> str:
        """URL of the gateway."""
        return f"http://{(await self.proxy()).address}:{self.port}"

    async def url(self) -> str:
        """The same, once requests that come there are told to the picker."""
        url = await self.address()

        async def is_asked() -> bool:
            await one(url)
            return any([await chosen(each, 1) for each in self.found()])

        await until(is_asked, "the gateway asks a picker")
        return url

    async def engines(self, *names: str, ports: tuple[int, ...] = (8000,), held: bool = False) -> None:
        for name in names:
            await self.namespace.create(pod(name, LABELS, ports, annotations={HOLD: ""} if held else {}))
        await until(lambda: {*names} <= {*self.kubelet.engines}, "the engines run")

    def found(self) -> list[Running]:
        """Pickers that run now."""
        engines = [each for each in self.kubelet.engines.values() if isinstance(each, Running)]
        return [each for each in engines if PICKER in each.children]

    async def pickers(self, count: int) -> list[Running]:
        """The same, once there are so many."""
        await until(lambda: len(self.found()) == count, f"{count} pickers are ready")
        return self.found()

    async def proxy(self) -> Proxy:
        await until(lambda: self.containers.proxies, "the gateway's proxy runs")
        return self.containers.proxies[-1]

    async def pool(self) -> Thing:
        return await self.namespace.client.get(self.namespace.path(POOL_VERSION, "InferencePool", "rel"))


@asynccontextmanager
async def istio_site(namespace: Namespace, envoy: Any, istio: Istio) -> AsyncIterator[IstioSite]:
    """Pods run inside. In the end no picker has told of a fault of its own, and Envoy refused nothing."""
    (port,) = free_ports(1)
    async with cluster_names(namespace.client, namespace.name) as names:
        containers = Proxies(namespace, envoy, names, istio=istio)
        kubelet = Kubelet(namespace.client, namespace.name, containers.start, 0.1, pod_address)
        async with kubelet:
            made = IstioSite(namespace, containers, kubelet, Release(namespace), port)
            path = f"/apis/{_GATEWAY_API}/namespaces/{namespace.name}/gateways"
            await namespace.client.call("POST", path, gateway(port))
            yield made
            for running in containers.running.values():
                assert running.complaints() == []
            for proxy in containers.proxies:
                assert await proxy.counters("update_rejected") == {}


async def chosen(picker: Running, last: int) -> list[str]:
    """Addresses that the picker chose for the last requests, the newest first."""
    url = f"http://{picker.host}:{picker.flags.admin_port}{DECISIONS_PATH}?last={last}"
    _, text = await fetch(url)
    return [each["legs"][0]["chosen"][0] for each in msgspec.json.decode(text)]
