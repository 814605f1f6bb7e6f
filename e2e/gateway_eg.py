"""A real Envoy Gateway on a control plane of its own, and our chart behind it as a user installs it."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

from e2e.gateway_eg_net import BridgeNames, Network, api_relay, network
from e2e.gateway_eg_pods import CONTROLLER, PROXY, Placed, PlacedContainers, told
from e2e.gateway_plane import SlicedPlane
from e2e.kube import CRDS, Namespace, new_namespace
from e2e.kube_client import KubeClient, Thing, kube_client, path_of
from e2e.kube_containers import PICKER, Containers
from e2e.kube_dns import cluster_names
from e2e.kube_pods import SERVED, Kubelet, create_node, pod
from e2e.kube_release import RUN, Release, Site
from e2e.pages import until
from tests.data.chart.rendering import merged
from tools.control_plane import ControlPlane, ControlPlaneError, write_kubeconfig
from tools.control_plane_programs import found_programs
from tools.gateways_eg import EnvoyGateway, found_envoy_gateway

SYSTEM: Final = "envoy-gateway-system"
PAGE: Final = Path(__file__).parents[1] / "docs" / "gateways.md"
GATEWAY: Final = "inference-gateway"
RELEASE: Final = "vllm"
EXTENSION: Final = f"{RELEASE}-epp"
"""Name of the picker's Service, and of the policies of the release."""
LABELS: Final = {"app": "vllm"}
LISTENER_PORT: Final = 10080
"""Of the proxy's container, for port 80 of a listener."""
API: Final = "gateway.envoyproxy.io/v1alpha1"
GATEWAY_API: Final = "gateway.networking.k8s.io/v1"
POLICIES: Final = ("ClientTrafficPolicy", "BackendTrafficPolicy", "EnvoyExtensionPolicy")
ROUTED: Final[Thing] = {
    "provider": {"name": "envoy-gateway"},
    "httpRoute": {"create": True},
    "router": {"modelServers": {"matchLabels": LABELS}},
}
"""Values of a release behind such a gateway, and nothing that is not the chart's own default."""
PLAIN: Final[Thing] = {"router": {"epp": {"flags": {"secure-serving": False}}}}


@dataclass
class Gateways:
    """Envoy Gateway runs: `async with gateways(...)`.

    Attributes:
        system: the namespace of its own, in which the proxies are, too.
        version: of Envoy Gateway.
    """

    plane: ControlPlane
    system: Namespace
    network: Network
    containers: PlacedContainers
    kubelet: Kubelet
    version: str

    async def proxy(self, namespace: str) -> Placed:
        """The proxy of the Gateway of this namespace, ready."""

        def found() -> list[Placed]:
            made = [each for each in self.kubelet.engines.values() if isinstance(each, Placed)]
            return [each for each in made if _is_of(each.thing, namespace)]

        await until(lambda: len(found()) == 1, f"the proxy of {namespace} is ready")
        return found()[0]

    @property
    def controller(self) -> Placed:
        (found,) = [each for name, each in self.kubelet.engines.items() if name.startswith(CONTROLLER)]
        assert isinstance(found, Placed)
        return found


def _is_of(pod: Thing, namespace: str) -> bool:
    labels = pod["metadata"]["labels"]
    return bool(labels.get("gateway.envoyproxy.io/owning-gateway-namespace") == namespace)


@contextmanager
def sliced_plane(folder: Path) -> Iterator[tuple[ControlPlane, EnvoyGateway]]:
    """With the CRDs of ours, of Gateway API and of Envoy Gateway. Raises ControlPlaneError."""
    binaries, release = found_programs(), found_envoy_gateway()
    if binaries is None or release is None:
        raise ControlPlaneError(
            "not built: run `python tools/control_plane.py build` and `python tools/gateways.py`"
        )
    with SlicedPlane(folder, binaries) as plane:
        plane.apply_crds((*CRDS, *release.crds))
        yield plane, release


@asynccontextmanager
async def gateways(
    plane: ControlPlane, release: EnvoyGateway, folder: Path, envoy: Path
) -> AsyncIterator[Gateways]:
    """Envoy Gateway, installed from its chart; none of its processes is left at the end."""
    with network() as net:
        async with (
            kube_client(plane.url, plane.ca, plane.token()) as client,
            api_relay(net, plane.port) as relay,
        ):
            await create_node(client)
            await _install(plane, client, release, folder)
            system = Namespace(plane, client, SYSTEM, folder)
            transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: BridgeNames(client, SYSTEM, net), (net.gateway, 53)
            )
            programs = {CONTROLLER: release.program, PROXY: envoy}
            containers = PlacedContainers(system, net, names.resolver, relay.port, programs)
            kubelet = Kubelet(client, SYSTEM, containers.start, linger_s=0.1, new_address=net.place_address)
            try:
                async with kubelet:
                    made = Gateways(plane, system, net, containers, kubelet, release.version)
                    await until(
                        lambda: any(name.startswith(CONTROLLER) for name in kubelet.engines),
                        "Envoy Gateway runs",
                    )
                    yield made
            finally:
                transport.close()


async def _install(plane: ControlPlane, client: KubeClient, release: EnvoyGateway, folder: Path) -> None:
    # On a machine without time to spare a lease is lost, and whoever loses it ends.
    alone = {"provider": {"kubernetes": {"leaderElection": {"disable": True}}}}
    given = {
        "crds": {"enabled": False},
        # Its webhook would be called by the API server, which has no way to Services here.
        "topologyInjector": {"enabled": False},
        "deployment": {"pod": {"annotations": {SERVED: "true"}}},
        "config": {"envoyGateway": {"extensionApis": {"enableBackend": True}, **alone}},
    }
    with helm_python.Chart.load(release.chart) as chart:
        texts = chart.render(given, name="eg", namespace=SYSTEM)
    manifests = [text for path, text in texts.items() if not path.endswith("NOTES.txt")]
    found = [each for text in manifests for each in yaml.safe_load_all(text) if each]
    (job,) = [each for each in found if each["kind"] == "Job"]
    await client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    await apply(plane, [each for each in found if each is not job])
    await _make_certificates(plane, release, job, folder)
    proxies = {"envoyDeployment": {"replicas": 1, "pod": {"annotations": {SERVED: "true"}}}}
    settings = {
        "apiVersion": API,
        "kind": "EnvoyProxy",
        "metadata": {"name": "run", "namespace": SYSTEM},
        "spec": {"provider": {"type": "Kubernetes", "kubernetes": proxies}},
    }
    (gateway_class,) = [each for each in documented() if each["kind"] == "GatewayClass"]
    named = {"group": "gateway.envoyproxy.io", "kind": "EnvoyProxy", "name": "run", "namespace": SYSTEM}
    await apply(plane, [settings, merged(gateway_class, {"spec": {"parametersRef": named}})])


async def _make_certificates(plane: ControlPlane, release: EnvoyGateway, job: Thing, folder: Path) -> None:
    """What the chart's Job does, as its service account."""
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    token = plane.kubectl("create", "token", spec["serviceAccountName"], "-n", SYSTEM).strip()
    file = folder / "certgen-kubeconfig"
    write_kubeconfig(file, plane.url, plane.ca, {"token": token})
    done = await asyncio.to_thread(
        subprocess.run,
        [str(release.program), *container["command"][1:], *container.get("args", ())],
        env={"KUBECONFIG": str(file), "ENVOY_GATEWAY_NAMESPACE": SYSTEM, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def apply(plane: ControlPlane, objects: Sequence[Thing], namespace: str = "") -> None:
    """By the real kubectl, with validation of all fields."""
    if not objects:
        return
    within = ("-n", namespace) if namespace else ()
    text = "\n---\n".join(json.dumps(each) for each in objects)
    command = ("apply", "--server-side", "--validate=strict", *within, "-f", "-")
    await asyncio.to_thread(plane.kubectl, *command, stdin=text)


def documented() -> list[Thing]:
    """What the page gives users to apply beside a release."""
    section = PAGE.read_text().partition("\n## Envoy Gateway\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return list(yaml.safe_load_all(text))


# -- a site ----------------------------------------------------------------------------------------


@dataclass
class Behind:
    """A namespace with a Gateway, engines and a release of the chart: `async with behind(...)`.

    Attributes:
        url: of the proxy.
    """

    made: Gateways
    site: Site
    release: Release
    proxy: Placed

    @property
    def namespace(self) -> Namespace:
        return self.site.namespace

    @property
    def url(self) -> str:
        return f"http://{self.proxy.host}:{LISTENER_PORT}"

    async def change(self, kind: str, name: str, patch: Thing) -> None:
        """A merge patch of one of Envoy Gateway's own objects; returns when it was taken."""
        await self.namespace.change(path_of(API, kind, self.namespace.name, name), patch)

    async def conditions(self, kind: str, name: str) -> dict[str, tuple[str, str]]:
        """Status and message by type, of a policy."""
        found = await self.namespace.client.get(path_of(API, kind, self.namespace.name, name))
        listed = [each for one in found.get("status", {}).get("ancestors", ()) for each in one["conditions"]]
        return {each["type"]: (each["status"], each["message"]) for each in listed}

    async def until_accepted(self, kind: str, name: str) -> None:
        found: dict[str, tuple[str, str]] = {}

        async def is_accepted() -> bool:
            nonlocal found
            found = await self.conditions(kind, name)
            return found.get("Accepted", ("", ""))[0] == "True"

        try:
            await until(is_accepted, f"{kind} {name} is accepted")
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from None

    async def config(self) -> str:
        """What the proxy runs with."""
        return await told(self.proxy, "/config_dump?include_eds")

    async def until_configured(self, *texts: str) -> None:
        """Until each of these stands in what the proxy runs with."""
        seen = ""

        async def is_configured() -> bool:
            nonlocal seen
            seen = await self.config()
            return all(text in seen for text in texts)

        await until(is_configured, f"the proxy has {texts}")

    async def knows(self, count: int) -> None:
        """Until the proxy has so many engines."""

        async def has_them() -> bool:
            lines = (await told(self.proxy, "/clusters")).splitlines()
            mark = f"httproute/{self.namespace.name}/{RELEASE}/rule/0::"
            known = [line for line in lines if mark in line and "::health_flags::" in line]
            return len(known) == count

        await until(has_them, f"the proxy knows {count} engines")


@asynccontextmanager
async def placed_site(made: Gateways, namespace: Namespace, envoy: Path) -> AsyncIterator[Site]:
    """As `kube_release.site`, at addresses that an EndpointSlice may name."""
    async with cluster_names(namespace.client, namespace.name) as names:
        containers = Containers(namespace, envoy, names)
        kubelet = Kubelet(
            namespace.client,
            namespace.name,
            containers.start,
            linger_s=0.1,
            new_address=made.network.own_address,
        )
        async with kubelet:
            yield Site(namespace, containers, kubelet)
            for running in containers.running.values():
                assert running.complaints() == []


@asynccontextmanager
async def behind(
    made: Gateways,
    envoy: Path,
    folder: Path,
    *,
    engines: int = 3,
    ports: Sequence[int] = (8000,),
    given: Mapping[str, Any] = PLAIN,
    before: Sequence[Thing] = (),
) -> AsyncIterator[Behind]:
    """A release with these values over `ROUTED`, and the page's Gateway; all is up, known and accepted.

    `before`: objects that are there first.
    """
    async with new_namespace(made.plane, folder) as namespace, placed_site(made, namespace, envoy) as place:
        gateway = [each for each in documented() if each["kind"] == "Gateway"]
        await apply(made.plane, [*before, *gateway], namespace.name)
        release = Release(namespace, RELEASE)
        await release.install(merged(merged(ROUTED, RUN), given))
        for number in range(engines):
            await namespace.create(pod(f"pod-{number}", LABELS, ports))
        await place.pods(PICKER)
        found = Behind(made, place, release, await made.proxy(namespace.name))
        for kind in POLICIES:
            await found.until_accepted(kind, EXTENSION)
        await found.knows(engines * len(ports))
        yield found
