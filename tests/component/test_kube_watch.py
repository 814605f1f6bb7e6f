"""A collection against an HTTP server on loopback that does what API servers were seen to do."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web

from epp.runtime.kube import watch
from epp.runtime.kube.api import UNREACHED, KubeApi, KubeError
from epp.runtime.kube.watch import Backoff, Collection, gathered

PATH = "/api/v1/namespaces/models/pods"
BOTH = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
QUICK = Backoff(first_s=0.005, most_s=0.05, missing_s=0.05)


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    name: str
    resource_version: str


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    phase: str = ""


class ApiServer:
    """One collection, whose calls are answered from `script` while there is something in it.

    An entry of the script is a status, the body of a Status, or a watch: a list of events and how it ends
    (`eof`, `cut`, `stay`). Without a script, lists are paged and watches stay open and tell what is told.

    Attributes:
        knows: whether who watches has looked at all up to a version; a watch is cut when it has.
    """

    def __init__(self) -> None:
        self.version = 100
        self.pods: dict[str, dict[str, Any]] = {}
        self.script: list[Any] = []
        self.lists: list[Mapping[str, str]] = []
        self.watches: list[Mapping[str, str]] = []
        self.open: list[web.StreamResponse] = []
        self.closing = asyncio.Event()
        self.knows: Callable[[str], bool] = lambda version: True
        self._runner: web.AppRunner | None = None
        # Nobody else gets the port while the server is away.
        self._taken = socket.socket()
        self._taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._taken.bind(("127.0.0.1", 0))
        self.port: int = self._taken.getsockname()[1]

    async def start(self) -> None:
        self.closing = asyncio.Event()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    def give_back(self) -> None:
        """The port: after the last `stop`."""
        self._taken.close()

    async def stop(self) -> None:
        self.closing.set()
        assert self._runner is not None
        await self._runner.cleanup()
        self.open.clear()

    def end_watches(self) -> None:
        self.closing.set()
        self.closing = asyncio.Event()

    def put(self, name: str, **more: Any) -> dict[str, Any]:
        """Makes or changes a pod: the event that tells of it."""
        self.version += 1
        kind = "MODIFIED" if name in self.pods else "ADDED"
        head = {"uid": f"uid-{name}", "name": name, "resourceVersion": str(self.version)}
        self.pods[name] = {"metadata": head} | more
        return {"type": kind, "object": self.pods[name]}

    def remove(self, name: str) -> dict[str, Any]:
        self.version += 1
        pod = self.pods.pop(name)
        head = pod["metadata"] | {"resourceVersion": str(self.version)}
        return {"type": "DELETED", "object": pod | {"metadata": head}}

    async def tell(self, *events: dict[str, Any]) -> None:
        text = b"".join(json.dumps(event).encode() + b"\n" for event in events)
        for response in self.open:
            await response.write(text)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path == PATH
        watching = "watch" in request.query
        (self.watches if watching else self.lists).append(dict(request.query))
        entry = self.script.pop(0) if self.script else None
        match entry:
            case int():
                return web.json_response(failure(entry), status=entry)
            case dict():
                headers = {"Retry-After": "1"} if entry["code"] == 429 else {}
                return web.json_response(entry, status=entry["code"], headers=headers)
            case (events, ends):
                assert watching, "the script expects a watch"
                return await self._watch(request, events, ends)
            case None if watching:
                return await self._watch(request, [], "stay")
        assert entry is None
        return self._list(request.query)

    def _list(self, query: Mapping[str, str]) -> web.Response:
        items = list(self.pods.values())
        start = int(query.get("continue", "0"))
        end = start + int(query.get("limit", len(items) + 1))
        head = {"resourceVersion": str(self.version)} | ({"continue": str(end)} if end < len(items) else {})
        return web.json_response({"kind": "PodList", "metadata": head, "items": items[start:end]})

    async def _watch(self, request: web.Request, events: list[Any], ends: str) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        self.open.append(response)
        closing = self.closing
        await self.tell(*events)
        if ends == "stay":
            await closing.wait()
        if ends == "cut":
            # What was read and not yet looked at goes with the connection.
            last = events[-1]["object"]["metadata"]["resourceVersion"]
            await until(lambda: self.knows(last))
            assert request.transport is not None
            request.transport.close()
        if response in self.open:
            self.open.remove(response)
        return response


def failure(code: int, reason: str = "", message: str = "no") -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


def bookmark(version: int) -> dict[str, Any]:
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


EXPIRED = failure(410, "Expired", "too old resource version: 101 (180)")


class Heard:
    """A collection that runs, and what it told."""

    def __init__(self, api: KubeApi, **more: Any) -> None:
        self.told: list[dict[str, str]] = []
        self.said: list[str] = []
        self.collection = Collection(
            api, PATH, Pod, self._changed, said=self.said.append, **{"backoff": QUICK} | more
        )

    def _changed(self, pods: Mapping[str, Pod]) -> None:
        self.told.append({pod.metadata.name: pod.metadata.resource_version for pod in pods.values()})

    @property
    def names(self) -> set[str]:
        return {pod.metadata.name for pod in self.collection.objects.values()}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - conditions are of the outside world
            await asyncio.sleep(0.002)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    try:
        await server.start()
        yield server
        await server.stop()
    finally:
        server.give_back()


@asynccontextmanager
async def following(
    server: ApiServer, folder: Path, *, silence_s: float = 60.0, **more: Any
) -> AsyncIterator[Heard]:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    connected = await KubeApi.connect(str(folder / "kubeconfig"), {})
    api = KubeApi(connected._access, silence_s=silence_s)
    await connected.close()
    heard = Heard(api, **more)
    running = asyncio.create_task(heard.collection.run())
    try:
        yield heard
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
        await api.close()


@BOTH
async def test_list_then_watch(server: ApiServer, tmp_path: Path) -> None:
    server.put("a")
    selectors: dict[str, Any] = {"label_selector": "app=vllm", "field_selector": "metadata.name=a"}
    async with following(server, tmp_path, **selectors) as heard:
        assert not heard.collection.synced
        await until(lambda: server.open)
        assert heard.collection.synced
        assert heard.told == [{"a": "101"}]
        before = heard.collection.objects
        await server.tell(server.put("b"), server.put("a", phase="Running", spec={"x": "y" * (1 << 20)}))
        await until(lambda: heard.told[-1] == {"a": "103", "b": "102"})
        await server.tell(server.remove("b"))
        await until(lambda: heard.names == {"a"})
        assert heard.collection.objects["uid-a"].phase == "Running"
        assert set(before) == {"uid-a"}
        assert before["uid-a"].metadata.resource_version == "101"
        assert heard.said == []
    common = {"labelSelector": "app=vllm", "fieldSelector": "metadata.name=a"}
    assert server.lists == [{"limit": "500"} | common]
    assert server.watches[0].items() >= (common | {"resourceVersion": "101"}).items()
    assert server.watches[0]["allowWatchBookmarks"] == "true"


async def test_an_empty_list_is_told(server: ApiServer, tmp_path: Path) -> None:
    async with following(server, tmp_path) as heard:
        await until(lambda: heard.told == [{}])
        assert heard.collection.synced


@BOTH
async def test_events_that_come_together_are_told_together(server: ApiServer, tmp_path: Path) -> None:
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        await server.tell(*(server.put(f"pod-{number}") for number in range(300)))
        await until(lambda: len(heard.names) == 300)
        assert len(heard.told) < 30
        told = len(heard.told)
        await server.tell(server.put("here"), server.remove("here"), bookmark(server.version))
        await server.tell(server.put("last"))
        await until(lambda: "last" in heard.names)
        assert len(heard.told) <= told + 3
        assert all(now != before for before, now in zip(heard.told, heard.told[1:], strict=False))


async def test_pages(server: ApiServer, tmp_path: Path) -> None:
    for number in range(1200):
        server.put(f"pod-{number}")
    async with following(server, tmp_path) as heard:
        await until(lambda: heard.told)
        assert len(heard.told[0]) == 1200
    assert [asked.get("continue") for asked in server.lists] == [None, "500", "1000"]


async def test_a_watch_begins_where_the_first_page_of_its_list_was(server: ApiServer, tmp_path: Path) -> None:
    """A later page may be of a later version: what the pages before it missed is still to be told."""
    for number in range(1200):
        server.put(f"pod-{number}")
    pages = server._list

    def list_that_ages(query: Mapping[str, str]) -> web.Response:
        server.version += 7
        return pages(query)

    server._list = list_that_ages  # type: ignore[method-assign]
    async with following(server, tmp_path):
        await until(lambda: server.open)
    assert server.watches[0]["resourceVersion"] == str(100 + 1200 + 7)


async def test_a_watch_that_ended_soon_is_no_sign_of_health(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood, but not for long: nor does it do so later, while the next ones are refused."""
    monkeypatch.setattr(watch, "_STEADY_S", 0.2)
    server.script = [None, ([], "eof"), *[500] * 20]
    async with following(server, tmp_path) as heard:
        await until(lambda: not server.script)
        assert [text for text in heard.said if "followed again" in text] == []
        await until(lambda: heard.collection.trouble is None)
        assert heard.said[-1] == f"{PATH}: followed again"


async def test_a_list_whose_token_expires_begins_again_and_at_last_comes_whole(
    server: ApiServer, tmp_path: Path
) -> None:
    for number in range(600):
        server.put(f"pod-{number}")
    expired = failure(410, "Expired", "The provided continue parameter is too old")
    server.script = [None, expired, None, expired]
    async with following(server, tmp_path) as heard:
        await until(lambda: heard.told)
        assert len(heard.told[0]) == 600
        assert heard.said == []
    asked = [(asked.get("limit"), asked.get("continue")) for asked in server.lists]
    assert asked == [("500", None), ("500", "500"), ("500", None), ("500", "500"), (None, None)]


async def test_what_is_kept_of_a_long_list_is_small(server: ApiServer, tmp_path: Path) -> None:
    for number in range(500):
        server.put(f"pod-{number}", spec={"filler": "x" * 10_000})
    async with following(server, tmp_path) as heard:
        tracemalloc.start()
        try:
            await until(lambda: heard.told and server.open)
            ours = [tracemalloc.Filter(True, "*/kube/*.py"), tracemalloc.Filter(True, "*/client_reqrep.py")]
            taken = tracemalloc.take_snapshot().filter_traces(ours)
            kept = sum(trace.size for trace in taken.statistics("filename"))
        finally:
            tracemalloc.stop()
    assert len(heard.told[0]) == 500
    # The list is 5 MB of text.
    assert 50_000 < kept < 500_000


@BOTH
async def test_restart_of_the_api_server(server: ApiServer, tmp_path: Path) -> None:
    """Open watches end, nobody listens, clients with rights are refused, caches begin anew."""
    server.put("stays")
    server.put("goes")
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        await server.stop()
        await until(lambda: len(heard.said) == 1)
        server.remove("goes")
        server.put("comes")
        starting = failure(503, "ServiceUnavailable", "before all known HTTP paths have been installed")
        initializing = failure(429, "TooManyRequests", "storage is (re)initializing")
        server.script = [
            403,
            starting,
            starting,
            initializing,
            ([{"type": "ERROR", "object": EXPIRED}], "eof"),
        ]
        await server.start()
        await until(lambda: heard.names == {"stays", "comes"} and server.open)
        await server.tell(server.put("later"))
        await until(lambda: "later" in heard.names)
        assert heard.told == [
            {"stays": "101", "goes": "102"},
            {"stays": "101", "comes": "104"},
            {"stays": "101", "comes": "104", "later": "105"},
        ]
        assert heard.collection.trouble is None
    away, forbidden, unavailable, busy, again = heard.said
    assert "cannot connect to 127.0.0.1" in away
    assert away.endswith("; what is known stays in use; trying again")
    assert forbidden.startswith(f"WATCH {PATH}: 403 no; ")
    assert "list and watch" in forbidden
    assert "503 before all known" in unavailable
    assert "429 storage is (re)initializing" in busy
    assert again == f"{PATH}: followed again"
    assert [asked["resourceVersion"] for asked in server.watches] == ["102"] * 6 + ["104"]


@pytest.mark.parametrize("ends", ["eof", "cut"])
async def test_a_watch_that_ends_goes_on_where_it_was(server: ApiServer, tmp_path: Path, ends: str) -> None:
    server.put("a")
    server.script = [None, ([server.put("b"), server.put("a")], ends), ([bookmark(150)], ends)]
    del server.pods["b"]
    async with following(server, tmp_path) as heard:
        server.knows = lambda version: heard.collection._version == version
        await until(lambda: len(server.watches) == 3 and server.open)
        assert heard.said == []
    assert [asked["resourceVersion"] for asked in server.watches] == ["103", "103", "150"]
    assert len(server.lists) == 1


@pytest.mark.parametrize("as_event", [True, False])
async def test_gone_lists_again_and_tells_the_difference_once(
    server: ApiServer, tmp_path: Path, as_event: bool
) -> None:
    server.put("a")
    server.put("b")
    event = ([{"type": "ERROR", "object": EXPIRED}], "eof")
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        server.remove("a")
        server.script = [event if as_event else EXPIRED, None, None, EXPIRED]
        await server.tell({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "102"}}})
        server.end_watches()
        await until(lambda: len(server.lists) == 2 and server.open)
        assert heard.told == [{"a": "101", "b": "102"}, {"b": "102"}]
        assert heard.said == []


@pytest.mark.parametrize(
    "answer",
    [
        failure(504, "Timeout", "Too large resource version: 100, current: 7")
        | {"details": {"causes": [{"reason": "ResourceVersionTooLarge"}]}},
        failure(400, "BadRequest", "invalid resourceVersion"),
    ],
)
async def test_a_version_that_the_server_does_not_take(
    server: ApiServer, tmp_path: Path, answer: dict[str, Any]
) -> None:
    server.script = [None, answer]
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        assert len(server.lists) == 2
        assert len(heard.told) == 1


async def test_a_resource_that_is_installed_later(server: ApiServer, tmp_path: Path) -> None:
    server.script = [404] * 4
    async with following(server, tmp_path) as heard:
        await until(lambda: heard.collection.trouble)
        assert heard.collection.trouble is not None
        assert heard.collection.trouble.status == 404
        await until(lambda: heard.collection.synced and heard.collection.trouble is None)
        assert len(heard.said) == 2
        assert "CustomResourceDefinition" in heard.said[0]
        assert heard.said[1] == f"{PATH}: followed again"


async def test_silence_is_followed_by_a_new_watch(server: ApiServer, tmp_path: Path) -> None:
    server.put("a")
    async with following(server, tmp_path, silence_s=0.1) as heard:
        await until(lambda: len(server.watches) >= 3)
        assert len(server.lists) == 1
        assert heard.told == [{"a": "101"}]


async def test_a_server_that_ends_every_watch_at_once(server: ApiServer, tmp_path: Path) -> None:
    server.script = [None, *[([], "eof")] * 8]
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open and not server.script and heard.collection.trouble is None)
        assert heard.said == [
            f"WATCH {PATH}: the server ended it at once; what is known stays in use; trying again",
            f"{PATH}: followed again",
        ]
        assert len(server.lists) == 1


async def test_an_object_that_cannot_be_read_stays_as_it_was(server: ApiServer, tmp_path: Path) -> None:
    server.put("good")
    server.put("bad", phase=3)
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        assert heard.told == [{"good": "101"}]
        await server.tell(server.put("bad", phase=4), server.put("good", phase=5), server.put("new"))
        await until(lambda: "new" in heard.names)
        assert heard.told[-1] == {"good": "101", "new": "105"}
        await server.tell(server.put("bad", phase="Running"))
        await until(lambda: "bad" in heard.names)
        await server.tell(server.put("bad", phase=6), server.remove("good"))
        await until(lambda: "good" not in heard.names)
        assert heard.told[-1] == {"bad": "106", "new": "105"}
        assert [line.split(" cannot be read")[0] for line in heard.said] == [
            f"{PATH}: bad",
            f"{PATH}: good",
            f"{PATH}: bad",
        ]
        assert "$.phase" in heard.said[0]
    assert len(server.watches) == 1


async def test_many_objects_that_cannot_be_read_are_not_all_named(server: ApiServer, tmp_path: Path) -> None:
    for number in range(50):
        server.put(f"bad-{number}", phase=3)
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        assert heard.told == [{}]
        assert len(heard.said) == 10
        assert "bad-0 cannot be read and is left out" in heard.said[0]


@pytest.mark.parametrize(
    "line", [b"not json", b'{"type": "ADDED"}', b'{"type": "ADDED", "object": {"metadata": 3}}']
)
async def test_a_line_that_is_no_event_lists_again(server: ApiServer, tmp_path: Path, line: bytes) -> None:
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        server.put("a")
        await server.open[0].write(line + b"\n")
        await until(lambda: heard.names == {"a"})
        assert len(server.lists) == 2
        assert "not an event" in heard.said[0]


async def test_an_answer_that_is_no_list(server: ApiServer, tmp_path: Path) -> None:
    head = {"resourceVersion": "1"}
    server.script = [
        {"code": 200, "metadata": {}},
        {"code": 200, "items": 3},
        {"code": 200, "metadata": head, "items": [{"metadata": 4}]},
    ]
    async with following(server, tmp_path) as heard:
        await until(lambda: heard.collection.synced)
        assert "metadata.resourceVersion is missing" in heard.said[0]
        assert "not a list: Expected `array" in heard.said[1]
        assert "not a list: Expected `object`, got `int` - at `$.metadata`" in heard.said[2]


async def test_who_stops_leaves_nothing_open(server: ApiServer, tmp_path: Path) -> None:
    async with following(server, tmp_path) as heard:
        await until(lambda: server.open)
        transport = server.open[0]._req.transport  # type: ignore[union-attr]
        assert heard.collection.synced
    await until(lambda: transport is None or transport.is_closing())


def test_pauses() -> None:
    error = KubeError("GET", PATH, "no")
    backoff = Backoff()
    pauses = [backoff.pause_s(failures, error, 0.0) for failures in (1, 2, 3, 6, 7, 5000)]
    assert pauses == [0.2, 0.4, 0.8, 6.4, 10.0, 10.0]
    assert backoff.pause_s(1, error, 0.999) == pytest.approx(0.1, abs=0.001)
    missing = KubeError("GET", PATH, "no", status=404)
    assert [backoff.pause_s(failures, missing, 0.0) for failures in (1, 9)] == [0.2, 25.0]
    away = KubeError("GET", PATH, "no", reason=UNREACHED)
    assert [backoff.pause_s(failures, away, 0.0) for failures in (1, 2, 9)] == [0.2, 0.4, 0.5]
    busy = KubeError("GET", PATH, "no", status=429, retry_after_s=7.0)
    assert [backoff.pause_s(9, busy, draw) for draw in (0.0, 0.5)] == [7.0, 8.75]
    assert backoff.pause_s(1, KubeError("GET", PATH, "no", retry_after_s=1e9), 0.0) == 60.0


async def test_lines_are_gathered_but_not_for_ever() -> None:
    async def steady() -> AsyncIterator[list[bytes]]:
        for number in range(100):
            yield [b"%d" % number]
            await asyncio.sleep(0.001)
        raise KubeError("WATCH", PATH, "cut")

    batches: list[list[bytes]] = []

    async def gather() -> None:
        async for batch in gathered(steady()):
            batches.append(batch)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(KubeError, match="cut"):
        await gather()
    assert [line for batch in batches for line in batch] == [b"%d" % number for number in range(100)]
    assert len(batches) >= 2
