"""Pickers and proxies in the pods of Deployments: processes that run what the pods' objects say.

Command, arguments, environment, volumes, service account and probes are those of the object. Other than on a
node:

- A pod has a loopback address and no network of its own. What listens on all addresses of its pod, or is at
  127.0.0.1 in it, is at the pod's address: in the picker's arguments, of which two are added, and in Envoy's
  configuration.
- The API server is where the harness has it. Names of headless Services are told by a server of ours.
- An image is a program of this machine, with its files, of which those in /tmp alone can be written. It is
  root that runs it, without limits of memory and processor.
- Without a `pace` nobody asks for liveness, and what a preStop hook waits for is not waited for.
"""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from e2e.kube import Namespace
from e2e.kube_client import Thing
from e2e.kube_dns import ClusterNames
from e2e.kube_picker import health_of
from e2e.kube_pods import HOLD, Engine, light
from e2e.kube_probes import READINESS, Care
from e2e.kube_volumes import Volumes, field_of
from e2e.pages import until
from epp.lab.envoy import PickerAddress
from epp.lab.stack import Child
from epp.runtime.admin import CONFIG_PATH
from epp.runtime.options import Options
from epp.wire import health_pb2
from tests.data.kube import image
from tests.data.kube.arguments import options

PICKER: Final = "epp"
PROXY: Final = "envoy"
ENTRYPOINT: Final = next(
    step.rest.strip('[]"').split('", "')
    for step in image.steps((Path(__file__).parents[1] / "Dockerfile").read_text())
    if step.name == "ENTRYPOINT"
)
_ANSWER_S: Final = 60.0
# Its last words become those of the program that is run, by the same number.
_ROOT: Final = """\
set -e
mount -t tmpfs -o size=64m none "$ROOT"
for each in /*; do
  if [ -L "$each" ]; then
    cp -P "$each" "$ROOT$each"
  elif [ -d "$each" ]; then
    mkdir "$ROOT$each"
    case "$each" in
      /etc | /run) ;;
      /proc | /sys | /dev | /tmp) mount --rbind "$each" "$ROOT$each" ;;
      *) mount --rbind "$each" "$ROOT$each"; mount -o remount,bind,ro "$ROOT$each" ;;
    esac
  fi
done
cp -a /etc/. "$ROOT/etc"
rm -f "$ROOT/etc/resolv.conf"
printf %s "$RESOLVER" > "$ROOT/etc/resolv.conf"
exec chroot "$ROOT" sh -c "$INSIDE" "$0" "$@"
"""


def in_root(folder: Path, mounts: Mapping[str, Path], resolver: str, command: Sequence[str]) -> list[str]:
    """The command, run where folders of a pod are mounted and nothing can be written but them and /tmp.

    Needs to be root. `folder`: an empty one. The mounts are the child's own, and go with it.
    """
    inside = ["set -e"]
    for target, source in mounts.items():
        place = shlex.quote(target)
        inside.append(f"mkdir -p {place}; mount --bind {shlex.quote(str(source))} {place}")
    inside += ["mount -o remount,bind,ro /", 'exec "$@"']
    variables = {"ROOT": str(folder), "RESOLVER": resolver, "INSIDE": "\n".join(inside)}
    settings = [f"{key}={value}" for key, value in variables.items()]
    return ["env", *settings, "unshare", "--mount", "sh", "-c", _ROOT, "pod", *command]


@dataclass
class Running:
    """A pod whose containers run: an `Engine`.

    Attributes:
        thing: the pod, as it was when they were started.
        children: by name of the container.
        care: who asks its probes and acts by them, if anybody does.
    """

    thing: Thing
    host: str
    volumes: Volumes
    children: dict[str, Child]
    care: Care | None = None

    @property
    def name(self) -> str:
        name: str = self.thing["metadata"]["name"]
        return name

    @property
    def flags(self) -> Options:
        """Those of the picker."""
        (arguments,) = [each["args"] for each in self.thing["spec"]["containers"] if each["name"] == PICKER]
        return options(arguments)

    @property
    def address(self) -> PickerAddress:
        """Where a gateway asks the picker."""
        return PickerAddress(self.host, self.flags.grpc_port, self.flags.grpc_health_port)

    async def stop(self, grace_s: float) -> None:
        """Without care, the proxy last: its preStop hook waits for the others."""
        if self.care is not None:
            await self.care.end(grace_s)
        for name in sorted(self.children, key=lambda name: name == PROXY):
            await self.children[name].stop(signal.SIGTERM if grace_s else signal.SIGKILL, grace_s)

    async def show_metrics(self, token: str = "") -> tuple[int, str]:
        """Status and text of the picker's /metrics page, for who has this token."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await fetch(f"http://{self.host}:{self.flags.metrics_port}/metrics", headers)

    async def metrics(self) -> str:
        """The same, where all may read it."""
        status, text = await self.show_metrics()
        assert status == 200, text
        return text

    async def configuration(self) -> str:
        """What the picker says it runs with."""
        return (await fetch(f"http://{self.host}:{self.flags.admin_port}{CONFIG_PATH}"))[1]

    async def ready(self, container: str = PICKER) -> bool:
        """What the container's readiness probe says now."""
        (found,) = [each for each in self.thing["spec"]["containers"] if each["name"] == container]
        return await probed(self.host, found, found[READINESS])

    def log(self, container: str = PICKER) -> str:
        return self.children[container].log_path.read_text(errors="replace")

    def complaints(self) -> list[str]:
        """Lines of the picker's log that tell of a fault of its own."""
        marks = ("Traceback", "never retrieved", "was never awaited", '"level":"error"', '"level": "error"')
        if PICKER not in self.children:
            return []
        return [line for line in self.log().splitlines() if any(mark in line for mark in marks)]


@dataclass
class Containers:
    """Runs the pods of a namespace: `Kubelet(client, name, starts=Containers(...).start)`.

    Attributes:
        pace: the pods are cared for as in `Care`, at this pace. Their annotation `HOLD` has to leave their
            readiness to that. None: they are ready when they have started.
        api_port: where they reach the API server; None: where it is.
        running: by name of the pod, those that have ended too.
    """

    namespace: Namespace
    envoy: Path
    names: ClusterNames
    pace: float | None = None
    api_port: int | None = None
    running: dict[str, Running] = field(default_factory=dict)

    async def start(self, thing: Thing, address: str, ports: list[int]) -> Engine:
        """Up when all containers are ready by their probes, with a `pace` at once. A pod of anything else is
        an engine.
        """
        containers = [each for each in thing["spec"]["containers"] if each["name"] in (PICKER, PROXY)]
        if not containers:
            return await light(thing, address, ports)
        name = thing["metadata"]["name"]
        folder = self.namespace.folder / name
        volumes = Volumes(
            self.namespace.client, thing, folder / "volumes", lambda volume, text: at(address, volume, text)
        )
        await volumes.write()
        children = {}
        for container in containers:
            (folder / container["name"]).mkdir()
            command = self._command(thing, container, address, volumes, folder / container["name"])
            children[container["name"]] = Child(
                f"{container['name']} of {name}", command, folder / f"{container['name']}.log"
            )
        made = self.running[name] = Running(thing, address, volumes, children)
        try:
            for child in children.values():
                await child.start()
            if self.pace is not None:
                assert HOLD in thing["metadata"]["annotations"]
                made.care = Care(self.namespace.client, thing, children, partial(probed, address), self.pace)
                made.care.begin()
                return made
            for container in containers:
                await _until_ready(made, container["name"])
        except BaseException:
            await made.stop(0.0)
            raise
        return made

    def _command(
        self, thing: Thing, container: Thing, address: str, volumes: Volumes, folder: Path
    ) -> list[str]:
        program = [*container.get("command", ENTRYPOINT), *container.get("args", ())]
        if container["name"] == PROXY:
            program = [str(self.envoy), *container["args"]]
        else:
            assert program[0] == "warmroute"
            here = (f"--grpc-host={address}", f"--admin-host={address}")
            program = [sys.executable, "-m", "epp.cli", *program[1:], *here]
        variables = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.api_port or self.namespace.plane.port),
            **environment(thing, container),
        }
        mounts = {mount["mountPath"]: volumes.at(mount["name"]) for mount in container["volumeMounts"]}
        # Root files and what the harness keeps are in /tmp, which is writable as it is.
        mounts.pop("/tmp", None)
        settings = [f"{key}={value}" for key, value in variables.items()]
        return in_root(folder, mounts, self.names.resolver, ["env", "-i", *settings, *program])


async def _until_ready(running: Running, container: str) -> None:
    child = running.children[container]

    async def answers() -> bool:
        if child.returncode is not None:
            raise child.failed("has ended")
        return await running.ready(container)

    await until(answers, f"{child.name} is ready")


def at(address: str, volume: str, text: bytes) -> bytes:
    """A file of a volume, where the pod has this address: it stands in Envoy's configuration."""
    if volume != PROXY:
        return text
    return text.replace(b"127.0.0.1", address.encode()).replace(b"0.0.0.0", address.encode())


def environment(pod: Thing, container: Thing) -> dict[str, str]:
    variables: dict[str, str] = {}
    for each in container.get("env", ()):
        value = each.get("value") or field_of(pod, each["valueFrom"]["fieldRef"])
        for name, known in variables.items():
            value = value.replace(f"$({name})", known)
        variables[each["name"]] = value
    return variables


async def probed(address: str, container: Thing, probe: Thing) -> bool:
    """What a probe of a container says now."""
    ports = {port["name"]: port for port in container["ports"]}
    match probe:
        case {"grpc": {"port": port, "service": service}}:
            status = await health_of(f"{address}:{port}", service)
            return status == health_pb2.HealthCheckResponse.SERVING
        case {"httpGet": {"path": path, "port": name}}:
            status, _ = await fetch(f"http://{address}:{ports[name]['containerPort']}{path}")
            return 200 <= status < 400
        case {"tcpSocket": {"port": name}}:
            try:
                _, writer = await asyncio.open_connection(address, ports[name]["containerPort"])
            except OSError:
                return False
            writer.close()
            return True
    raise AssertionError(f"no probe of this kind is known here: {probe}")


async def fetch(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Status and text; status 0 where nobody answers."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ANSWER_S)) as session:
        try:
            async with session.get(url, headers=headers) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""
