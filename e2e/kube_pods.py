"""Pods that something answers for: a kubelet as a test wants it, and light engines on the pods' addresses."""

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol, Self

from aiohttp import web
from aiohttp.web_request import BaseRequest

from e2e.backends import PAGE
from e2e.kube_client import AWAY, STRATEGIC, KubeClient, Refused, Thing, path_of
from e2e.listeners import shut
from e2e.pages import until
from tools.control_plane import KWOK_NODES

NODE: Final = "lab-node"
SERVED: Final = "lab.warmroute/served"
"""Annotation of pods whose kubelet a `Kubelet` is; kwok leaves them alone."""
HOLD: Final = "lab.warmroute/hold"
"""Annotation of pods that are not to be ready; it may come and go."""
POD_IP: Final = "lab.warmroute/pod-ip"
"""Annotation that chooses a pod's address."""
SERVED_BY: Final = "x-served-by"
"""Header in which an answer names its pod."""
SERVED_PORT: Final = "x-served-port"
"""And the port, which tells ranks of a pod apart."""

_ADDRESSES = itertools.count(2)
# Several runs on one machine keep out of each other's way.
_NETWORK: Final = 80 + os.getpid() % 150
_AGAIN_S = 0.1
_POLL_S = 0.02


def pod(
    name: str,
    labels: Mapping[str, str],
    ports: Sequence[int] = (8000,),
    *,
    annotations: Mapping[str, str] | None = None,
    served: bool = True,
    grace_s: int = 30,
) -> Thing:
    """A pod on `NODE`; `served`: by a `Kubelet`, else by kwok, and then nothing answers at its address."""
    return {"apiVersion": "v1", "kind": "Pod", **_template(name, labels, ports, annotations, served, grace_s)}


def deployment(
    name: str,
    replicas: int,
    labels: Mapping[str, str],
    ports: Sequence[int] = (8000,),
    *,
    annotations: Mapping[str, str] | None = None,
    served: bool = True,
) -> Thing:
    """As many pods, put on `NODE` and replaced one after the other where their template changes."""
    template = _template("", labels, ports, annotations, served, 30)
    del template["metadata"]["name"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    spec = {"replicas": replicas, "selector": {"matchLabels": dict(labels)}, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {**spec, "strategy": rolling},
    }


def _template(
    name: str,
    labels: Mapping[str, str],
    ports: Sequence[int],
    annotations: Mapping[str, str] | None,
    served: bool,
    grace_s: int,
) -> Thing:
    marks = {SERVED: "true"} if served else {}
    container = {
        "name": "engine",
        "image": "lab/engine",
        "ports": [{"containerPort": port} for port in ports],
    }
    return {
        "metadata": {"name": name, "labels": dict(labels), "annotations": marks | dict(annotations or {})},
        "spec": {
            "nodeName": NODE,
            "terminationGracePeriodSeconds": grace_s,
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }


async def create_node(client: KubeClient, name: str = NODE) -> None:
    """A node that kwok keeps ready; without one, pods that name it are collected as garbage."""
    annotation, _, value = KWOK_NODES.partition("=")
    metadata = {"name": name, "annotations": {annotation: value}}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    await at_last(lambda: client.create(node))


def new_address() -> str:
    """A loopback address no pod of this run has had, outside of kwok's."""
    number = next(_ADDRESSES)
    return f"127.{_NETWORK}.{number // 250}.{number % 250 + 1}"


# -- what answers ----------------------------------------------------------------------------------


class Engine(Protocol):
    """What a pod runs."""

    async def stop(self, grace_s: float) -> None:
        """As SIGTERM does: nothing new, what runs may end within the grace. Grace 0: at once."""


Starts = Callable[[Thing, str, list[int]], Awaitable[Engine]]
"""Runs a pod on an address and ports; returns when they are open."""


@dataclass
class Light:
    """An engine that computes nothing: it names its pod, after `answer_s`.

    Attributes:
        go_on: requests are answered while it is set, as it is at first.
        stopping: told to end.
        seen: paths of the requests that reached it, its metrics and health left out.
        models: that those asked for.
    """

    name: str
    answer_s: float = 0.0
    page: bytes = PAGE
    seen: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    _server: web.Server = field(init=False)
    _listeners: list[asyncio.Server] = field(init=False, default_factory=list)
    _busy: set[object] = field(init=False, default_factory=set)

    async def start(self, address: str, ports: Sequence[int]) -> Self:
        """Listens whole, or not at all."""
        self.go_on.set()
        self._server = web.Server(self._handle, access_log=None)
        loop = asyncio.get_running_loop()
        try:
            for port in ports:
                listener = await loop.create_server(self._server, address, port, start_serving=False)
                self._listeners.append(listener)
                await listener.start_serving()
        except BaseException:
            await self.stop(0.0)
            raise
        return self

    async def stop(self, grace_s: float) -> None:
        self.stopping = True
        await shut(*self._listeners)
        for connection in self._server.connections:
            if connection in self._busy:
                connection.close()  # with its answer
            else:
                connection.force_close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._all_closed()
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._server.shutdown(timeout=0.01)

    async def _all_closed(self) -> None:
        for _ in itertools.count():
            if not self._server.connections:
                return
            await asyncio.sleep(_POLL_S)

    async def _handle(self, request: BaseRequest) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            return await self._answered(request)
        finally:
            self._busy.discard(request.protocol)

    async def _answered(self, request: BaseRequest) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(body=self.page, content_type="text/plain")
        if request.path in ("/health", "/v1/models"):
            return web.json_response({"data": []})
        self.seen.append(request.path)
        asked = json.loads(await request.read())
        self.models.append(asked.get("model", ""))
        if self.answer_s:
            await asyncio.sleep(self.answer_s)
        await self.go_on.wait()
        # Envoy repeats headers of engines.
        local = request.transport.get_extra_info("sockname") if request.transport else ("", 0)
        headers = {SERVED_BY: self.name, SERVED_PORT: str(local[1])}
        return await _answer(request, asked, self.name, headers)


async def _answer(
    request: BaseRequest, asked: Thing, name: str, headers: dict[str, str]
) -> web.StreamResponse:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head: dict[str, Any] = {"id": "answer", "created": 0, "model": asked.get("model", "")}
    choice = {"index": 0, "finish_reason": "stop"}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": name}
        whole = {
            **head,
            "object": "chat.completion",
            "choices": [{**choice, "message": message}],
            "usage": usage,
        }
        return web.json_response(whole, headers=headers)
    response = web.StreamResponse(headers=headers | {"content-type": "text/event-stream"})
    await response.prepare(request)
    chunk = {**head, "object": "chat.completion.chunk", "choices": [{**choice, "delta": {"content": name}}]}
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


async def light(thing: Thing, address: str, ports: list[int]) -> Light:
    """Runs a pod as `Light`."""
    return await Light(thing["metadata"]["name"]).start(address, ports)


# -- the kubelet -----------------------------------------------------------------------------------


@dataclass
class _Running:
    address: str
    engine: Engine
    held: bool
    begun: str


@dataclass
class Kubelet:
    """Runs the pods of one namespace that have `SERVED`: `async with Kubelet(...) as kubelet:`.

    A pod is ready once its engine listens. It is deleted as a real kubelet does it: the engine serves on for
    `linger_s` (a preStop hook), gets its SIGTERM, and when it has ended the object goes. The API server may
    go away meanwhile.

    Attributes:
        let_go: preStop hooks end while it is set.
        new_address: of a pod that no annotation gives one.
        engines: what runs now, by name of the pod.
    """

    client: KubeClient
    namespace: str
    starts: Starts = light
    linger_s: float = 0.5
    new_address: Callable[[], str] = new_address
    engines: dict[str, Engine] = field(default_factory=dict)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    _running: dict[str, _Running] = field(default_factory=dict)
    _latest: dict[str, Thing] = field(default_factory=dict)
    _work: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._watcher, *self._work.values()) if task is not None]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        stops = (running.engine.stop(0.0) for running in self._running.values())
        results += await asyncio.gather(*stops, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _addresses(self) -> set[str]:
        return {running.address for running in self._running.values()}

    @property
    def addresses(self) -> dict[str, str]:
        """Address by name of the pod, of what runs now."""
        names = {uid: thing["metadata"]["name"] for uid, thing in self._latest.items()}
        return {names[uid]: running.address for uid, running in self._running.items() if uid in names}

    async def _follow(self) -> None:
        path = path_of("v1", "Pod", self.namespace)
        while True:
            try:
                listed = await self.client.get(path)
                there = {thing["metadata"]["uid"]: thing for thing in listed["items"]}
                for uid in [uid for uid in self._latest if uid not in there]:
                    self._gone(uid)
                for thing in there.values():
                    self._seen(thing)
                async with aclosing(self.client.watch(path, listed["metadata"]["resourceVersion"])) as events:
                    async for kind, thing in events:
                        if kind == "ERROR":
                            break
                        if kind == "DELETED":
                            self._gone(thing["metadata"]["uid"])
                        else:
                            self._seen(thing)
            except (Refused, *AWAY):
                await asyncio.sleep(_AGAIN_S)

    def _seen(self, thing: Thing) -> None:
        metadata, uid = thing["metadata"], thing["metadata"]["uid"]
        if SERVED not in metadata.get("annotations", {}) or not thing["spec"].get("nodeName"):
            return
        self._latest[uid] = thing
        if self._idle(uid):
            self._work[uid] = asyncio.create_task(self._care(uid))

    def _idle(self, uid: str) -> bool:
        """Whether nobody cares for it now. Care that failed is not taken up: the test is told at the end."""
        task = self._work.get(uid)
        return task is None or (task.done() and task.exception() is None)

    def _gone(self, uid: str) -> None:
        """Deleted by force, or already by us: what still runs is killed."""
        self._latest.pop(uid, None)
        if uid in self._running and self._idle(uid):
            self._work[uid] = asyncio.create_task(self._kill(uid))

    async def _care(self, uid: str) -> None:
        """Until the pod is as its object wants it."""
        while (thing := self._latest.get(uid)) is not None:
            if thing["metadata"].get("deletionTimestamp"):
                await self._end(uid, thing)
                return
            held = HOLD in thing["metadata"]["annotations"]
            running = self._running.get(uid)
            if running is None:
                if await self._started(uid, thing, held):
                    await self._tell(thing, self._running[uid])
            elif running.held != held:
                running.held = held
                await self._tell(thing, running)
            elif thing is self._latest.get(uid):
                return
        await self._kill(uid)

    async def _started(self, uid: str, thing: Thing, held: bool) -> bool:
        """Whether it runs now. One that is to go meanwhile need not come up: what it needs may go first."""
        try:
            await self._start(uid, thing, held)
        except Exception:
            latest = self._latest.get(uid)
            if latest is None or latest["metadata"].get("deletionTimestamp"):
                return False
            raise
        return True

    async def _start(self, uid: str, thing: Thing, held: bool) -> None:
        metadata = thing["metadata"]
        address = metadata["annotations"].get(POD_IP) or self.new_address()
        # That of a pod which is gone, and whose engine ends just now.
        await until(lambda: address not in self._addresses(), f"nobody is at {address} any more")
        ports = [port["containerPort"] for port in thing["spec"]["containers"][0].get("ports", ())]
        engine = await self.starts(thing, address, ports)
        self._running[uid] = _Running(address, engine, held, _now())
        self.engines[metadata["name"]] = engine

    async def _tell(self, thing: Thing, running: _Running) -> None:
        ready = "False" if running.held else "True"
        now = _now()
        state = {"running": {"startedAt": running.begun}}
        container = thing["spec"]["containers"][0]
        status = {
            "phase": "Running",
            "podIP": running.address,
            "podIPs": [{"ip": running.address}],
            "startTime": running.begun,
            "conditions": [
                {"type": kind, "status": value, "lastTransitionTime": now}
                for kind, value in (("Initialized", "True"), ("ContainersReady", ready), ("Ready", ready))
            ],
            "containerStatuses": [
                {
                    **{"name": container["name"], "image": container["image"], "imageID": ""},
                    **{"ready": not running.held, "started": True, "restartCount": 0, "state": state},
                }
            ],
        }
        path = path_of("v1", "Pod", self.namespace, thing["metadata"]["name"], "status")
        body = {"metadata": {"uid": thing["metadata"]["uid"]}, "status": status}
        await at_last(lambda: self.client.patch(path, body, STRATEGIC))

    async def _end(self, uid: str, thing: Thing) -> None:
        metadata = thing["metadata"]
        grace_s = float(metadata.get("deletionGracePeriodSeconds", 0))
        running = self._running.get(uid)
        if running is not None:
            linger_s = min(self.linger_s, grace_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await self.let_go.wait()
            await running.engine.stop(grace_s - linger_s)
            self._forget(uid)
        path = path_of("v1", "Pod", self.namespace, metadata["name"])
        await at_last(lambda: self.client.delete(path, 0, uid))

    async def _kill(self, uid: str) -> None:
        running = self._running.get(uid)
        if running is not None:
            await running.engine.stop(0.0)
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        engine = self._running.pop(uid).engine
        for name in [name for name, each in self.engines.items() if each is engine]:
            del self.engines[name]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def at_last(call: Callable[[], Awaitable[object]]) -> bool:
    """Until the API server has taken it: True; or says that the object is another one or gone: False."""
    while True:
        try:
            await call()
        except Refused as refused:
            if refused.status in (404, 409):
                return False
            if refused.status not in (403, 429, 500, 502, 503, 504):
                raise
        except AWAY:
            pass
        else:
            return True
        await asyncio.sleep(_AGAIN_S)
