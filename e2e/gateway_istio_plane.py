"""A control plane on which a real Istio runs, and addresses for pods that EndpointSlices take."""

import asyncio
import itertools
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import helm_python
import yaml

from e2e.gateway_plane import SlicedPlane
from e2e.kube import CRDS
from e2e.kube_client import KubeClient, Thing, kube_client, path_of
from e2e.kube_pods import create_node
from epp.lab.stack import HOST, free_ports
from tools.control_plane import ControlPlane, ControlPlaneError, write_kubeconfig
from tools.control_plane_programs import found_programs
from tools.gateways import ISTIO, found, module_folder

SYSTEM: Final = "istio-system"
VALUES: Final = {
    "pilot": {
        "env": {
            "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
            # What follows leaves out filters that Istio's own build of Envoy has, and Envoy's does not.
            "PILOT_ENABLE_ALPN_FILTER": "false",
            "PILOT_ENABLE_METADATA_EXCHANGE": "false",
        }
    },
    "telemetry": {"enabled": False},
    # No pod here has a sidecar, and Istio's agent, which has the certificates, does not run.
    "meshConfig": {"enableAutoMtls": False},
}
"""Of Istio's chart for its control plane."""
RUN_ELSEWHERE: Final = ("Deployment", "HorizontalPodAutoscaler")
"""What its chart makes to run it, which we do."""
WEBHOOKS: Final = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
"""The API server cannot reach them: nobody routes Services' addresses here."""

_READY_S: Final = 60.0
# Set aside for benchmarks (RFC 2544); several runs on one machine keep out of each other's way.
_NETWORK: Final = f"198.18.{200 + os.getpid() % 56}"
_NUMBERS: Final = itertools.count(1)


@contextmanager
def pod_network() -> Iterator[None]:
    """Inside, addresses of `pod_address` are this machine's own. EndpointSlices take none of 127.0.0.0/8.

    Needs to be root. Raises ControlPlaneError.
    """
    route = ("local", f"{_NETWORK}.0/24", "dev", "lo")
    done = subprocess.run(["ip", "route", "replace", *route], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ControlPlaneError(f"no network for pods: ip route replace {' '.join(route)}: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", *route], check=False)


def pod_address() -> str:
    """One that no pod of this run has had."""
    return f"{_NETWORK}.{next(_NUMBERS)}"


def definitions() -> list[Path]:
    """Files of CRDs that Istio works with: its own, and those of the Gateway API that it is built for."""
    gateway_api = module_folder(ISTIO, "sigs.k8s.io/gateway-api") / "config" / "crd" / "standard"
    own = module_folder(ISTIO) / "manifests" / "charts" / "base" / "files" / "crd-all.gen.yaml"
    kinds = sorted(gateway_api.glob("gateway.networking.k8s.io_[!v]*.yaml"))
    return [own, *kinds]


def objects() -> list[Thing]:
    """What Istio's chart makes of `VALUES`."""
    chart = module_folder(ISTIO) / "manifests" / "charts" / "istio-control" / "istio-discovery"
    with helm_python.Chart.load(chart) as loaded:
        texts = loaded.render(VALUES, name="istiod", namespace=SYSTEM)
    manifests = (text for path, text in sorted(texts.items()) if not path.endswith("NOTES.txt"))
    return [each for text in manifests for each in yaml.load_all(text, yaml.CSafeLoader) if each]


async def install(client: KubeClient) -> dict[str, str]:
    """Makes what the chart makes but for what runs it; what its container's environment would be."""
    made = objects()
    await client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    for each in made:
        if each["kind"] not in (*RUN_ELSEWHERE, *WEBHOOKS):
            await client.create(each)
    (deployment,) = [each for each in made if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


async def account_token(client: KubeClient) -> str:
    """Of Istio's service account, so that it may do what its chart lets it do and nothing else."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
    spec = {"expirationSeconds": 7200}
    path = path_of("v1", "ServiceAccount", SYSTEM, "istiod", "token")
    token: str = (await client.call("POST", path, body | {"spec": spec}))["status"]["token"]
    return token


@dataclass
class Istio:
    """Istio's control plane as a process: `with Istio(...)`, ready inside.

    Attributes:
        folder: for its files; its own.
        xds: port at which proxies ask it, in plain text.
    """

    plane: ControlPlane
    folder: Path
    program: Path
    environment: Mapping[str, str]
    token: str

    def __post_init__(self) -> None:
        self.xds, self._http, self._https, self._tls, self._monitoring, self._introspection = free_ports(6)

    def __enter__(self) -> "Istio":
        self.folder.mkdir(parents=True)
        file = self.folder / "kubeconfig"
        write_kubeconfig(file, self.plane.url, self.plane.ca, {"token": self.token})
        ours = {"POD_NAME": "istiod-0", "POD_NAMESPACE": SYSTEM, "SERVICE_ACCOUNT": "istiod"}
        variables = {"PATH": os.environ["PATH"]} | dict(self.environment) | ours
        variables.pop("KUBECONFIG", None)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(self.program), *self._arguments(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=variables,
            )
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def log(self) -> Path:
        return self.folder / "istiod.log"

    def _arguments(self, kubeconfig: Path) -> list[str]:
        return [
            *("discovery", "--domain=cluster.local", f"--namespace={SYSTEM}", f"--kubeconfig={kubeconfig}"),
            *(f"--grpcAddr={HOST}:{self.xds}", f"--secureGRPCAddr={HOST}:{self._tls}"),
            *(f"--httpAddr={HOST}:{self._http}", f"--httpsAddr={HOST}:{self._https}"),
            *(f"--monitoringAddr={HOST}:{self._monitoring}", f"--ctrlz_port={self._introspection}"),
            *("--log_output_level=default:info", "--shutdownDuration=0s"),
        ]

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while not _answers(f"http://{HOST}:{self._http}/ready"):
            late = time.monotonic() > deadline
            if late or self._process.poll() is not None:
                end = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                what = f"was not ready after {_READY_S:g} s" if late else "has ended"
                raise ControlPlaneError(f"istiod {what}; its last output:\n{end}")
            time.sleep(0.1)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def running_istio(folder: Path) -> Iterator[Istio]:
    """Istio on a control plane of its own, with a node and our CRDs. Raises ControlPlaneError, BuildError."""
    binaries, program = found_programs(), found(ISTIO)
    if binaries is None or program is None:
        raise ControlPlaneError(
            "programs are missing: run `python tools/control_plane.py build` and `python tools/gateways.py`"
        )
    with pod_network(), SlicedPlane(folder / "plane", binaries) as plane:
        plane.apply_crds([*CRDS, *definitions()])
        environment, token = asyncio.run(_prepare(plane))
        with Istio(plane, folder / "istio", program, environment, token) as istio:
            yield istio


async def _prepare(plane: ControlPlane) -> tuple[dict[str, str], str]:
    async with kube_client(plane.url, plane.ca, plane.token()) as client:
        await create_node(client)
        return await install(client), await account_token(client)
