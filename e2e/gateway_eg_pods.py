"""Pods of Envoy Gateway: the control plane's own, and those of the proxies that it makes Deployments for.

Command, arguments, environment, volumes, service account and readiness are those of the objects, and each
pod has its own network, so that nothing in them or in what the proxies are told is replaced. Other than on a
node:

- An image is a program of this machine: the proxy's is the stock Envoy of the tests, whichever the object
  names. It is root that runs it, without limits of memory and processor.
- The proxy's second container, the shutdown manager, is not run, and no preStop hook is waited for.
- A Service's name leads to its pods, and the name of the API server to the harness's.
"""

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from e2e.gateway_eg_net import API_NAME, Network
from e2e.kube import Namespace
from e2e.kube_client import Thing
from e2e.kube_containers import Running, fetch, in_root
from e2e.kube_pods import Engine
from e2e.kube_volumes import Volumes, field_of
from e2e.pages import until
from epp.lab.stack import Child

ADMIN_PORT: Final = 19000
CONTROLLER: Final = "envoy-gateway"
PROXY: Final = "envoy"


@dataclass(kw_only=True)
class Placed(Running):
    """A pod in a place of its own, which goes with it."""

    network: Network

    async def stop(self, grace_s: float) -> None:
        await super().stop(grace_s)
        self.network.close(self.host)

    @property
    def program(self) -> Child:
        (child,) = self.children.values()
        return child

    @property
    def text(self) -> str:
        """Its log."""
        return self.program.log_path.read_text(errors="replace")

    def inside(self, *command: str) -> list[str]:
        return self.network.inside(self.host, command)


@dataclass
class PlacedContainers:
    """Runs them: `Kubelet(client, name, starts=PlacedContainers(...).start)`."""

    namespace: Namespace
    network: Network
    resolver: str
    api_port: int
    programs: dict[str, Path]
    running: dict[str, Placed] = field(default_factory=dict)

    async def start(self, thing: Thing, address: str, ports: list[int]) -> Engine:
        """Up when its container of a name in `programs` is ready by its probe."""
        (container,) = [each for each in thing["spec"]["containers"] if each["name"] in self.programs]
        name = thing["metadata"]["name"]
        folder = self.namespace.folder / name
        (folder / "root").mkdir(parents=True)
        volumes = Volumes(self.namespace.client, thing, folder / "volumes", lambda _, text: text)
        await volumes.write()
        # What is told of an address of the pod before there is a status.
        thing = {**thing, "status": {**thing.get("status", {}), "podIP": address, "hostIP": address}}
        self.network.open(address)
        command = self.network.inside(address, self._command(thing, container, volumes, folder / "root"))
        child = Child(name, command, folder / "log")
        children = {container["name"]: child}
        made = self.running[name] = Placed(thing, address, volumes, children, network=self.network)
        try:
            await child.start()
            await _until_ready(made, container)
        except BaseException:
            await made.stop(0.0)
            raise
        return made

    def _command(self, thing: Thing, container: Thing, volumes: Volumes, root: Path) -> list[str]:
        variables = {
            "PATH": os.environ["PATH"],
            "KUBERNETES_SERVICE_HOST": API_NAME,
            "KUBERNETES_SERVICE_PORT": str(self.api_port),
            **_environment(thing, container),
        }
        arguments = list(container.get("args", ()))
        for key, value in variables.items():
            arguments = [each.replace(f"$({key})", value) for each in arguments]
        mounts = {mount["mountPath"]: volumes.at(mount["name"]) for mount in container["volumeMounts"]}
        if cache := mounts.pop("/var/lib/eg/wasm", None):
            # No folder can be made in one of this machine's.
            (cache / "eg" / "wasm").mkdir(parents=True)
            mounts["/var/lib"] = cache
        settings = [f"{key}={value}" for key, value in variables.items()]
        program = [str(self.programs[container["name"]]), *arguments]
        return in_root(root, mounts, self.resolver, ["env", "-i", *settings, *program])


def _environment(pod: Thing, container: Thing) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in container.get("env", ()):
        match each:
            case {"valueFrom": {"fieldRef": reference}}:
                found[each["name"]] = field_of(pod, reference)
            case {"value": value}:
                found[each["name"]] = value
    return found


async def _until_ready(made: Placed, container: Thing) -> None:
    probe = container["readinessProbe"]["httpGet"]
    url = f"http://{made.host}:{probe['port']}{probe['path']}"

    async def answers() -> bool:
        if made.program.returncode is not None:
            raise made.program.failed("has ended")
        return (await fetch(url))[0] == 200

    await until(answers, f"{made.name} is ready")


async def told(made: Placed, path: str) -> str:
    """What the proxy's admin server says, which listens in its pod alone."""
    process = await asyncio.create_subprocess_exec(
        *made.inside("curl", "-s", f"http://127.0.0.1:{ADMIN_PORT}{path}"),
        stdout=asyncio.subprocess.PIPE,
    )
    return (await process.communicate())[0].decode()


async def kill(made: Running) -> None:
    """Its programs die; the pod's object tells nothing of it."""
    for child in made.children.values():
        await child.stop(signal.SIGKILL)
