"""Networks of pods on this machine, for proxies that listen where they were told to and on nothing else.

A `Network` is a bridge; what runs in a `place` of it has loopback, ports and an address of its own, as a pod
has. What is run by the test itself gets other addresses, which belong to the machine. None of them is a
loopback address: EndpointSlices take no such. Needs to be root.
"""

import asyncio
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socket import inet_aton, inet_ntoa
from struct import pack, unpack
from typing import Final

from e2e.kube_client import KubeClient, path_of
from e2e.kube_dns import DOMAIN, ClusterNames
from e2e.kube_relay import Relay
from epp.lab.stack import free_ports

# Kept by RFC 2544 for benchmarks: no one routes them.
_PLACES: Final = unpack("!I", inet_aton("198.18.0.0"))[0]
_OWN: Final = unpack("!I", inet_aton("198.19.0.0"))[0]
_MAX: Final = 200
API_NAME: Final = "kubernetes.default.svc"
"""As the API server's certificate has it."""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _address(network: int, number: int, host: int) -> str:
    return inet_ntoa(pack("!I", network + (number << 8) + host))


@dataclass
class Network:
    """`with network() as made`.

    Attributes:
        gateway: address of this machine in it.
    """

    number: int
    _places: dict[str, str] = field(default_factory=dict)
    _hosts: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(2, 250)))
    _own: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(1, 250)))

    @property
    def gateway(self) -> str:
        return _address(_PLACES, self.number, 1)

    @property
    def bridge(self) -> str:
        return f"wr{self.number}"

    def own_address(self) -> str:
        """A new one, of this machine."""
        return _address(_OWN, self.number, next(self._own))

    def place_address(self) -> str:
        """A new one, for a place."""
        return _address(_PLACES, self.number, next(self._hosts))

    def open(self, address: str) -> None:
        """Makes the place with this address."""
        host = address.rpartition(".")[2]
        name, outside = f"{self.bridge}-{host}", f"{self.bridge}v{host}"
        _ip("netns", "add", name)
        self._places[address] = name
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", outside, "master", self.bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "route", "add", "default", "via", self.gateway)

    def close(self, address: str) -> None:
        name = self._places.pop(address, None)
        if name is not None:
            _ip("netns", "del", name)

    def cut(self, address: str, other: str) -> None:
        """From now on nothing in a place reaches the other address: it is told so at once."""
        _ip("-n", self._places[address], "route", "add", "unreachable", other)

    def inside(self, address: str, command: Sequence[str]) -> list[str]:
        """The command, run in a place."""
        return ["nsenter", f"--net=/run/netns/{self._places[address]}", *command]


@contextmanager
def network() -> Iterator[Network]:
    """One that no other run on this machine has."""
    for turn in range(_MAX):
        made = Network((os.getpid() + turn) % _MAX)
        with suppress(OSError):
            _ip("link", "add", made.bridge, "type", "bridge")
            break
    else:
        raise OSError("no bridge can be made: this needs to be root, on Linux")
    own = f"{_address(_OWN, made.number, 0)}/24"
    try:
        _ip("addr", "add", f"{made.gateway}/24", "dev", made.bridge)
        _ip("link", "set", made.bridge, "up")
        _ip("route", "replace", "local", own, "dev", "lo")
        yield made
    finally:
        for address in (*made._places,):
            made.close(address)
        with suppress(OSError):
            _ip("route", "del", "local", own, "dev", "lo")
        _ip("link", "del", made.bridge)


@dataclass
class BridgeRelay(Relay):
    """The API server for places, on the bridge's address."""

    host: str = ""

    async def heal(self) -> None:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)


def api_relay(made: Network, to_port: int) -> BridgeRelay:
    return BridgeRelay(to_port, free_ports(1)[0], host=made.gateway)


class BridgeNames(ClusterNames):
    """Each Service by the addresses of its pods, whether headless or not: nobody plays kube-proxy here.

    Ports of Services that are asked for by name must be those of their pods.
    """

    def __init__(self, client: KubeClient, namespace: str, made: Network) -> None:
        super().__init__(client, namespace, made.gateway)
        self._api = made.gateway

    async def _addresses(self, name: str) -> list[str]:
        if name == f"{API_NAME}.{DOMAIN}":
            return [self._api]
        parts = name.removesuffix(f".svc.{DOMAIN}").split(".")
        if not name.endswith(f".svc.{DOMAIN}") or len(parts) != 2:
            return []
        service, namespace = parts
        for each in await self._client.items(path_of("v1", "Service", namespace)):
            if each["metadata"]["name"] == service and each["spec"].get("selector"):
                selector = ",".join(f"{key}={value}" for key, value in each["spec"]["selector"].items())
                pods = await self._client.items(path_of("v1", "Pod", namespace), labelSelector=selector)
                return [pod["status"]["podIP"] for pod in pods if "podIP" in pod["status"]]
        return []
