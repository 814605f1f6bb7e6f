"""Names of headless Services, as the DNS of a cluster tells them."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import inet_aton
from typing import Any, Final

from e2e.kube_client import KubeClient, Thing, path_of
from e2e.kube_pods import new_address

DOMAIN: Final = "cluster.local"
_A: Final = 1
_ANSWER: Final = 0x8580
_NO_SUCH_NAME: Final = 3
_TTL_S: Final = 1


class ClusterNames(asyncio.DatagramProtocol):
    """Answers each question by what is there then; who asks for a name that is not there is told so.

    Attributes:
        resolver: what a pod of the namespace finds in /etc/resolv.conf.
    """

    def __init__(self, client: KubeClient, namespace: str, address: str) -> None:
        self.resolver = (
            f"nameserver {address}\nsearch {namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}\noptions ndots:5\n"
        )
        self._client = client
        self._namespace = namespace
        self._asked: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.DatagramTransport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        task = asyncio.create_task(self._answer(data, address))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def end(self) -> None:
        """Who has no answer yet gets none."""
        asked = tuple(self._asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    async def _answer(self, data: bytes, address: tuple[str, int]) -> None:
        labels, place = [], 12
        while size := data[place]:
            labels.append(data[place + 1 : place + 1 + size].decode().lower())
            place += 1 + size
        (kind,) = struct.unpack_from("!H", data, place + 1)
        found = await self._addresses(".".join(labels))
        told = found if kind == _A else []
        flags = _ANSWER | (0 if found else _NO_SUCH_NAME)
        head = data[:2] + struct.pack("!5H", flags, 1, len(told), 0, 0)
        records = (struct.pack("!HHHIH", 0xC00C, _A, 1, _TTL_S, 4) + inet_aton(each) for each in told)
        self._transport.sendto(head + data[12 : place + 5] + b"".join(records), address)

    async def _addresses(self, name: str) -> list[str]:
        service, _, rest = name.partition(".")
        if rest != f"{self._namespace}.svc.{DOMAIN}":
            return []
        services = await self._client.items(path_of("v1", "Service", self._namespace))
        for each in services:
            spec = each["spec"]
            if each["metadata"]["name"] == service and spec["clusterIP"] == "None":
                selector = ",".join(f"{key}={value}" for key, value in spec["selector"].items())
                pods = await self._client.items(path_of("v1", "Pod", self._namespace), labelSelector=selector)
                unready = spec.get("publishNotReadyAddresses", False)
                return [pod["status"]["podIP"] for pod in pods if _counts(pod, unready)]
        return []


def _counts(pod: Thing, unready: bool) -> bool:
    status, ending = pod["status"], "deletionTimestamp" in pod["metadata"]
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    return "podIP" in status and (unready or (ready and not ending))


@asynccontextmanager
async def cluster_names(client: KubeClient, namespace: str) -> AsyncIterator[ClusterNames]:
    """A server that listens inside; needs to be root, for the port has a low number."""
    address = new_address()
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: ClusterNames(client, namespace, address), (address, 53)
    )
    try:
        yield names
    finally:
        transport.close()
        await names.end()
