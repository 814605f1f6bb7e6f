"""What cares for pods as on a node does, and a relay: themselves, without a control plane."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e.kube_client import Refused, Thing
from e2e.kube_pods import Engine, Kubelet, Light, new_address, pod
from e2e.kube_probes import LIVENESS, READINESS, Care
from e2e.kube_relay import Relay
from e2e.pages import until
from epp.lab.stack import HOST, Child

PROBE = {"periodSeconds": 10, "grpc": {}}
POD = {
    "metadata": {"name": "one", "namespace": "here", "uid": "u"},
    "spec": {
        "terminationGracePeriodSeconds": 30,
        "containers": [{"name": "only", "image": "lab/sleep", READINESS: PROBE, LIVENESS: PROBE}],
    },
}


class Objects:
    """Of the API: it knows the pod and takes what it is told."""

    async def get(self, _: str) -> Thing:
        return {"status": {"podIP": "127.0.0.1"}}

    async def patch(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("steps", range(8))
async def test_a_probe_answered_as_the_pod_ends_does_not_keep_it(tmp_path: Path, steps: int) -> None:
    """Wherever in the answer's way through the loop the end comes."""
    answers, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def ask(*_: Thing) -> bool:
        asked.release()
        return await answers.wait()

    child = Child("only", ["sleep", "600"], tmp_path / "log")
    await child.start()
    care = Care(Objects(), POD, {"only": child}, ask)  # type: ignore[arg-type]
    care.begin()
    async with asyncio.timeout(60):
        for _ in (READINESS, LIVENESS):
            await asked.acquire()
    answers.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await care.end(0.0)
    assert child.returncode is not None


async def test_a_probe_that_fails_by_itself_is_no_failure_of_the_container(tmp_path: Path) -> None:
    """The container is left as it is, and who ends the care is told."""

    async def ask(*_: Thing) -> bool:
        raise LookupError("no such port")

    child = Child("only", ["sleep", "600"], tmp_path / "log")
    await child.start()
    pid = child.pid
    care = Care(Objects(), POD, {"only": child}, ask)  # type: ignore[arg-type]
    care.begin()
    await until(lambda: any(task.done() for task in care._tasks), "who cares has given up")
    assert (child.pid, child.returncode, care.restarts) == (pid, None, {})
    with pytest.raises(LookupError, match="no such port"):
        await care.end(0.0)
    assert child.returncode is not None


class Busy(Objects):
    """It has something else to do, and then takes what it is told; `refusals`: how often each is refused."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.told: list[Thing] = []

    async def patch(self, _: str, patch: Thing, *more: Any) -> None:
        if self.refusals:
            raise self.refusals.pop()
        self.told.append(patch["status"])


async def test_a_pods_status_is_told_to_an_api_server_that_is_busy_or_away(tmp_path: Path) -> None:
    async def ask(*_: Thing) -> bool:
        return True

    objects = Busy(Refused(429, ""), Refused(500, ""), Refused(504, ""), aiohttp.ServerDisconnectedError())
    child = Child("only", ["sleep", "600"], tmp_path / "log")
    await child.start()
    care = Care(objects, POD, {"only": child}, ask, pace=0.001)  # type: ignore[arg-type]
    care.begin()
    await until(lambda: objects.told, "the status is told")
    await care.end(0.0)
    assert {each["status"] for each in objects.told[-1]["conditions"]} == {"True"}


# -- the kubelet -----------------------------------------------------------------------------------


class Pods:
    """Of the API: one pod, which may be marked to go."""

    def __init__(self) -> None:
        self.pod = pod("one", {}) | {"status": {}}
        self.pod["metadata"] |= {"uid": "u", "namespace": "here"}
        self.events: asyncio.Queue[tuple[str, Thing]] = asyncio.Queue()
        self.deleted = asyncio.Event()

    async def get(self, _: str) -> Thing:
        return {"items": [self.pod], "metadata": {"resourceVersion": "1"}}

    async def watch(self, *_: str) -> AsyncGenerator[tuple[str, Thing], None]:
        while True:
            yield await self.events.get()

    async def delete(self, *_: Any) -> None:
        self.deleted.set()

    def mark(self) -> None:
        marks = {"deletionTimestamp": "now", "deletionGracePeriodSeconds": 30}
        self.events.put_nowait(("MODIFIED", {**self.pod, "metadata": self.pod["metadata"] | marks}))


@pytest.mark.parametrize("marked", [True, False])
async def test_a_pod_that_does_not_come_up_is_a_fault_unless_it_is_to_go(marked: bool) -> None:
    pods, begun, fails = Pods(), asyncio.Event(), asyncio.Event()

    async def start(*_: Any) -> Engine:
        begun.set()
        await fails.wait()
        raise LookupError("what it mounts is gone")

    async with asyncio.timeout(60):
        with nullcontext() if marked else pytest.raises(LookupError, match="what it mounts"):
            async with Kubelet(pods, "here", start) as kubelet:  # type: ignore[arg-type]
                await begun.wait()
                if marked:
                    pods.mark()
                    await until(lambda: "deletionTimestamp" in str(kubelet._latest), "it is heard of")
                fails.set()
                if marked:
                    await pods.deleted.wait()
                else:
                    await until(lambda: not kubelet._idle("u") and kubelet._work["u"].done(), "it failed")


@pytest.mark.parametrize("steps", range(12))
async def test_an_engine_that_is_given_up_while_it_starts_leaves_no_port_open(steps: int) -> None:
    """Wherever in its start that is."""
    address, engine = new_address(), Light("one")
    starting = asyncio.create_task(engine.start(address, [8000, 8001]))
    for _ in range(steps):
        await asyncio.sleep(0)
    given_up = starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    if not given_up or not starting.cancelled():
        await engine.stop(0.0)
    for port in (8000, 8001):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address, port)


# -- the relay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
async def test_no_connection_outlives_a_cut(steps: int) -> None:
    """Nor one that was only being made."""
    served: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(writer)
        await reader.read()
        writer.close()
        served.discard(writer)

    server = await asyncio.start_server(serve, HOST, 0)
    async with server, Relay(server.sockets[0].getsockname()[1]) as relay:
        with socket.create_connection((HOST, relay.port)) as client:
            client.setblocking(False)
            for _ in range(steps):
                await asyncio.sleep(0)
            await relay.cut()
            async with asyncio.timeout(60):
                with suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        await until(lambda: not served, "nothing has come to the other side, or it is over")
        assert not relay._open
