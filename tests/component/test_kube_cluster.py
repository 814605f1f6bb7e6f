"""A pool followed through list and watch of an API server in memory: what is told, when, in which order."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from epp import names
from epp.payload.rewrite import ModelRewrite
from epp.pool.records import Endpoint
from epp.runtime.kube.api import KubeApi, KubeError
from epp.runtime.kube.cluster import Cluster, PoolTarget
from epp.runtime.kube.policies import Verdict
from epp.runtime.kube.watch import Backoff

PODS = "/api/v1/namespaces/llm/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"
DISCOVERY, LEGACY_DISCOVERY = "/apis/llm-d.ai/v1alpha2", "/apis/inference.networking.x-k8s.io/v1alpha2"
OBJECTIVES = f"{DISCOVERY}/namespaces/llm/inferenceobjectives"
REWRITES = f"{DISCOVERY}/namespaces/llm/inferencemodelrewrites"
LEGACY_OBJECTIVES = f"{LEGACY_DISCOVERY}/namespaces/llm/inferenceobjectives"
LEGACY_REWRITES = f"{LEGACY_DISCOVERY}/namespaces/llm/inferencemodelrewrites"
REF = {"group": names.POOL_GROUP, "kind": names.POOL_KIND, "name": "pool"}
# Path, version, the object before and after.
Change = tuple[str, int, dict[str, Any] | None, dict[str, Any] | None]
NO_QUERY: Mapping[str, str] = {}
QUICK = Backoff(first_s=0.01, most_s=0.02, missing_s=0.02)
PATIENCE_S = 3600.0
"""For policies, where no test is about it."""


class FakeApi:
    """Collections with versions, selectors and watches. `broken` gives the error for calls by path."""

    def __init__(self, *collections: str) -> None:
        self.broken: dict[str, KubeError] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.asked: list[str] = []
        self._objects: dict[str, dict[str, dict[str, Any]]] = {path: {} for path in collections}
        self._version = 100
        self._log: list[Change] = []
        self._watches: list[tuple[str, Mapping[str, str], asyncio.Queue[bytes]]] = []

    def serve(self, *collections: str) -> None:
        for path in collections:
            self._objects.setdefault(path, {})

    def put(self, path: str, name: str, **written: Any) -> None:
        """Create the object, or replace it; `metadata` is filled in."""
        before = self._objects[path].get(name)
        self._version += 1
        given = written.pop("metadata", {})
        metadata = {
            "name": name,
            "namespace": "llm",
            "uid": given.get("uid") or (before["metadata"]["uid"] if before else f"{name}-{self._version}"),
            "resourceVersion": str(self._version),
            "generation": 1,
            "creationTimestamp": before["metadata"]["creationTimestamp"]
            if before
            else "2026-01-01T00:00:00Z",
            **given,
        }
        made = {"metadata": metadata, **written}
        self._objects[path][name] = made
        self._happened(path, before, made)

    def delete(self, path: str, name: str) -> None:
        gone = self._objects[path].pop(name)
        self._version += 1
        last = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self._version)}}
        self._happened(path, last, None)

    def _happened(self, path: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        self._log.append((path, self._version, before, after))
        for at, query, events in self._watches:
            for event in seen(at, query, self._log[-1:]):
                events.put_nowait(event)

    @property
    def watched(self) -> list[tuple[str, str]]:
        return [(path, query.get("labelSelector", "")) for path, query, _ in self._watches]

    async def get(self, path: str, query: Mapping[str, str] = NO_QUERY) -> bytes:
        self.asked.append(path)
        # The answer is the server's of this moment, however late it arrives.
        answer = self._answer(path, query)
        hold = self.held.get(query.get("labelSelector", path))
        await (hold.wait() if hold else asyncio.sleep(0))
        if isinstance(answer, KubeError):
            raise answer
        return json.dumps(answer).encode()

    def _answer(self, path: str, query: Mapping[str, str]) -> Any:
        if path in self.broken:
            return self.broken[path]
        if path in self._objects:
            items = [found for found in self._objects[path].values() if selected(found, query)]
            return {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        resources = [
            {"name": at.rpartition("/")[2]} for at in self._objects if at.startswith(f"{path}/namespaces/")
        ]
        return {"resources": resources} if resources else KubeError("GET", path, "not found", status=404)

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[list[bytes], None]:
        if path in self.broken:
            raise self.broken[path]
        events: asyncio.Queue[bytes] = asyncio.Queue()
        since = int(query["resourceVersion"])
        for event in seen(path, query, [entry for entry in self._log if entry[1] > since]):
            events.put_nowait(event)
        entry = (path, query, events)
        self._watches.append(entry)
        try:
            yield []
            while True:
                yield [await events.get()]
        finally:
            self._watches.remove(entry)


def seen(path: str, query: Mapping[str, str], changes: Sequence[Change]) -> list[bytes]:
    """The events that a watch with these selectors is told of the changes."""
    events = []
    for at, _, before, after in changes:
        was = before is not None and selected(before, query)
        now = after is not None and selected(after, query)
        if at == path and (was or now):
            kind = "DELETED" if not now else "MODIFIED" if was else "ADDED"
            events.append(json.dumps({"type": kind, "object": after or before}).encode())
    return events


def selected(made: dict[str, Any], query: Mapping[str, str]) -> bool:
    labels = made["metadata"].get("labels", {})
    wanted = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    field = query.get("fieldSelector", "")
    return all(labels.get(key) == value for key, value in wanted) and (
        not field or field == f"metadata.name={made['metadata']['name']}"
    )


class Heard:
    """Notes every call in `calls`, and the last of each."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.told: list[str] = []
        self.members: list[str] | None = None
        self.known: tuple[bool, str] | None = None
        self.priorities: Mapping[str, int] | None = None
        self.rewrites: list[str] | None = None
        self.judged: dict[str, tuple[str, str]] = {}

    def endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self.calls.append("endpoints")
        self.members = sorted(endpoint.host_port for endpoint in endpoints)

    def pool(self, known: bool, app_protocol: str) -> None:
        self.calls.append(f"pool {known}")
        self.known = known, app_protocol

    def policies(self, objectives: Mapping[str, int], rewrites: tuple[ModelRewrite, ...]) -> None:
        self.calls.append("policies")
        self.priorities, self.rewrites = objectives, [rewrite.name for rewrite in rewrites]

    def verdicts(self, verdicts: tuple[Verdict, ...]) -> None:
        self.calls.append("verdicts")
        self.judged = {verdict.name: (verdict.group, verdict.conditions[0].status) for verdict in verdicts}


@asynccontextmanager
async def following(api: FakeApi, target: PoolTarget | None = None, **how: Any) -> AsyncIterator[Heard]:
    heard = Heard()
    how = {"look_again_s": 0.02, "policies_wait_s": PATIENCE_S, "backoff": QUICK, **how}
    cluster = Cluster(
        cast(KubeApi, api), target or PoolTarget("pool", "llm"), heard, said=heard.told.append, **how
    )
    task = asyncio.create_task(cluster.run())
    try:
        yield heard
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not api.watched


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if holds():
                return
            await asyncio.sleep(0.002)


@pytest.fixture
async def patience(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What is to happen when it ends, once it has begun; it ends when a test does that."""
    begun: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay_s: float, call: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
        if delay_s == PATIENCE_S:
            begun.append(call)
        return later(delay_s, call, *args, **more)

    monkeypatch.setattr(loop, "call_later", call_later)
    return begun


async def nothing_more(heard: Heard) -> None:
    before = list(heard.calls)
    await asyncio.sleep(0.06)
    assert heard.calls == before


def pods(api: FakeApi, *last: int, app: str = "a", ready: str = "True", **metadata: Any) -> None:
    for number in last:
        api.put(
            PODS,
            f"vllm-{number}",
            metadata={"labels": {"app": app}, **metadata},
            spec={"containers": [{"name": "engine"}]},
            status={"podIP": f"10.0.0.{number}", "conditions": [{"type": "Ready", "status": ready}]},
        )


def pool(api: FakeApi, *ports: Any, app: str | None = "a", **more: Any) -> None:
    metadata = more.pop("metadata", {})
    spec = {
        "selector": {"matchLabels": {"app": app} if app else {}},
        "targetPorts": [{"number": port} for port in ports or (8000,)],
        **more,
    }
    api.put(POOLS, "pool", metadata=metadata, spec=spec)


def objective(api: FakeApi, name: str, priority: int, path: str = OBJECTIVES) -> None:
    api.put(path, name, spec={"poolRef": REF, "priority": priority})


def rewrite(api: FakeApi, name: str, path: str = REWRITES) -> None:
    targets = [{"modelRewrite": "b"}]
    api.put(
        path,
        name,
        spec={"poolRef": REF, "rules": [{"matches": [{"model": {"value": name}}], "targets": targets}]},
    )


@pytest.fixture
def api() -> FakeApi:
    api = FakeApi(PODS, POOLS, OBJECTIVES, REWRITES)
    pods(api, 1, 2)
    pods(api, 3, app="b")
    pool(api, appProtocol="kubernetes.io/h2c")
    return api


async def test_members_and_policies_are_told_before_the_pool_is(api: FakeApi) -> None:
    objective(api, "high", 5)
    rewrite(api, "a")
    async with following(api) as heard:
        await until(lambda: heard.known == (True, "kubernetes.io/h2c"))
        assert heard.members == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert (heard.priorities, heard.rewrites) == ({"high": 5}, ["a"])
        assert heard.judged == {"high": ("llm-d.ai", "True"), "a": ("llm-d.ai", "True")}
        assert sorted(heard.calls) == ["endpoints", "policies", "pool True", "verdicts"]
        assert heard.calls.index("pool True") > heard.calls.index("policies")
        assert heard.calls.index("pool True") > heard.calls.index("endpoints")
        assert heard.told == []
        assert LEGACY_DISCOVERY not in api.asked
        await nothing_more(heard)


async def test_an_empty_pool_is_told_before_it_is_known(api: FakeApi) -> None:
    pool(api, app="nobody")
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        assert heard.members == []
        assert heard.calls.index("endpoints") < heard.calls.index("pool True")
        assert ["app=nobody" in text for text in heard.told] == [True]


async def test_pods_come_and_go(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        pods(api, 4)
        await until(lambda: heard.members == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.4:8000"])
        pods(api, 1, deletionTimestamp="2026-01-02T00:00:00Z")
        pods(api, 2, ready="False")
        await until(lambda: heard.members == ["10.0.0.4:8000"])
        api.delete(PODS, "vllm-4")
        await until(lambda: heard.members == [])
        assert heard.known == (True, "kubernetes.io/h2c")


async def test_a_pod_event_that_changes_nothing_is_not_told(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        pods(api, 1, annotations={"heartbeat": "1"})
        pods(api, 9, ready="False")
        await nothing_more(heard)


async def test_a_changed_selector_counts_when_its_pods_are_listed(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        api.held["app=b"] = asyncio.Event()
        pool(api, 9000, app="b")
        await until(lambda: api.asked.count(PODS) == 2)
        assert heard.members == ["10.0.0.1:8000", "10.0.0.2:8000"]
        # Until then the old ones are followed.
        pods(api, 2, deletionTimestamp="2026-01-02T00:00:00Z")
        await until(lambda: heard.members == ["10.0.0.1:8000"])
        pool(api, 9001, app="b")
        await asyncio.sleep(0.02)
        assert heard.members == ["10.0.0.1:8000"]
        api.held.pop("app=b").set()
        await until(lambda: heard.members == ["10.0.0.3:9001"])
        await until(lambda: (PODS, "app=a") not in api.watched)
        assert "pool False" not in heard.calls


async def test_a_selector_changed_there_and_back_follows_what_it_did(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        api.held["app=b"] = asyncio.Event()
        pool(api, app="b")
        await until(lambda: api.asked.count(PODS) == 2)
        pool(api, 8001, app="a")
        await until(lambda: heard.members == ["10.0.0.1:8001", "10.0.0.2:8001"])
        api.held.pop("app=b").set()
        await nothing_more(heard)
        assert [path for path in api.watched if path[0] == PODS] == [(PODS, "app=a")]


async def test_a_pool_that_goes_while_its_new_pods_are_listed_leaves_nothing_followed(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        api.held["app=b"] = asyncio.Event()
        pool(api, app="b")
        await until(lambda: api.asked.count(PODS) == 2)
        api.delete(POOLS, "pool")
        await until(lambda: heard.calls[-1] == "pool False")
        api.held.pop("app=b").set()
        await nothing_more(heard)
        assert [path for path in api.watched if path[0] == PODS] == []


async def test_changed_ports_count_at_once(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        listed = api.asked.count(PODS)
        pool(api, 8000, 8001)
        await until(lambda: heard.members is not None and len(heard.members) == 4)
        pool(api, 8001)
        await until(lambda: heard.members == ["10.0.0.1:8001", "10.0.0.2:8001"])
        assert api.asked.count(PODS) == listed


async def test_a_pool_deleted_and_made_again(api: FakeApi) -> None:
    objective(api, "high", 5)
    pool(api)
    async with following(api) as heard:
        for _ in range(2):
            await until(lambda: heard.known == (True, ""))
            await until(lambda: list(heard.judged) == ["high"])
            assert heard.members == ["10.0.0.1:8000", "10.0.0.2:8000"]
            api.delete(POOLS, "pool")
            await until(lambda: heard.known == (False, ""))
            await until(lambda: heard.judged == {})
            assert heard.members == []
            assert heard.priorities == {"high": 5}
            pool(api)
        await until(lambda: heard.known == (True, ""))
    missing = [text for text in heard.told if text.startswith("there is no InferencePool llm/pool")]
    assert len(missing) == 2
    assert "--pool-name" in missing[0]
    assert heard.told.count("InferencePool llm/pool is there") == 2


async def test_a_pool_marked_to_go_is_gone(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        pool(api, metadata={"deletionTimestamp": "2026-01-02T00:00:00Z"})
        await until(lambda: heard.known == (False, ""))
        assert heard.members == []


async def test_a_pool_that_comes_later_is_found(api: FakeApi) -> None:
    api.delete(POOLS, "pool")
    async with following(api) as heard:
        await until(lambda: bool(heard.told))
        assert heard.known is None
        assert "endpoints" not in heard.calls
        pool(api)
        await until(lambda: heard.known == (True, ""))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"app": None}, "spec.selector.matchLabels has no labels"),
        ({"targetPorts": [{"number": 70000}]}, "spec.targetPorts has no port that can be used"),
        ({"targetPorts": []}, "spec.targetPorts has no port that can be used"),
    ],
)
async def test_a_pool_that_cannot_be_used_stays_as_it_was(
    api: FakeApi, bad: dict[str, Any], said: str
) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        pool(api, **bad)
        await until(lambda: any(said in text for text in heard.told))
        pool(api, **bad)
        await asyncio.sleep(0.02)
        assert sum(said in text for text in heard.told) == 1
        assert heard.members == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert not any(path == PODS and not selector for path, selector in api.watched)


async def test_one_bad_port_costs_no_more_than_itself(api: FakeApi) -> None:
    pool(api, 70000, 8001)
    async with following(api) as heard:
        await until(lambda: heard.members == ["10.0.0.1:8001", "10.0.0.2:8001"])
        assert any("spec.targetPorts[0].number" in text for text in heard.told)


async def test_a_wrong_group_is_told_with_the_right_one() -> None:
    api = FakeApi(PODS)
    async with following(api, PoolTarget("pool", "llm", "inference.networking.x-k8s.io")) as heard:
        await until(lambda: any("inferencepools" in text for text in heard.told))
        (text,) = (text for text in heard.told if "inferencepools" in text)
        assert (
            "--pool-group is inference.networking.x-k8s.io, the field's is inference.networking.k8s.io"
            in text
        )
        await asyncio.sleep(0.06)
        assert sum("inferencepools" in text for text in heard.told) == 1


@pytest.mark.parametrize(("group", "told"), [(names.LEGACY_INFERENCE_GROUP, True), (names.POOL_GROUP, False)])
async def test_a_wrong_group_without_rights_is_told_too(group: str, told: bool) -> None:
    """Who may do nothing in a group is not told that there is none."""
    api = FakeApi(PODS)
    path = POOLS.replace(names.POOL_GROUP, group)
    api.broken[path] = KubeError("GET", path, "may not", status=403, reason="Forbidden")
    async with following(api, PoolTarget("pool", "llm", group)) as heard:
        await until(lambda: any("a Role has to allow list and watch" in text for text in heard.told))
        assert any("--pool-group is" in text for text in heard.told) == told


async def test_a_definition_of_the_pool_that_comes_later_is_found() -> None:
    api = FakeApi(PODS)
    pods(api, 1)
    async with following(api) as heard:
        await until(lambda: len(heard.told) >= 3)
        api.serve(POOLS)
        pool(api)
        await until(lambda: heard.known == (True, ""))


async def test_what_is_known_stays_while_the_api_server_is_away(api: FakeApi) -> None:
    objective(api, "high", 5)
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        away = KubeError("GET", PODS, "connection refused")
        api.broken = dict.fromkeys((PODS, POOLS, OBJECTIVES, REWRITES), away)
        for path, _, events in list(api._watches):
            events.put_nowait(b'{"type":"ERROR","object":{"code":410,"reason":"Expired"}}')
            assert path in api.broken
        await until(lambda: not api.watched)
        pods(api, 1, deletionTimestamp="2026-01-02T00:00:00Z")
        objective(api, "high", 6)
        await nothing_more(heard)
        api.broken = {}
        await until(lambda: heard.members == ["10.0.0.2:8000"])
        await until(lambda: heard.priorities == {"high": 6})
        assert "pool False" not in heard.calls


# -- objectives and rewrites ----------------------------------------------------------------------


async def test_changes_of_objectives_and_rewrites_are_told(api: FakeApi) -> None:
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        assert (heard.priorities, heard.rewrites) == ({}, [])
        objective(api, "high", 5)
        rewrite(api, "a")
        await until(lambda: heard.priorities == {"high": 5} and heard.rewrites == ["a"])
        api.delete(OBJECTIVES, "high")
        await until(lambda: heard.priorities == {} and list(heard.judged) == ["a"])


async def test_a_written_status_gives_new_verdicts_and_no_new_policies(api: FakeApi) -> None:
    objective(api, "high", 5)
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        before = heard.calls.count("verdicts")
        status = {
            "conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted", "message": "m"}]
        }
        api.put(OBJECTIVES, "high", spec={"poolRef": REF, "priority": 5}, status=status)
        await until(lambda: heard.calls.count("verdicts") > before)
        await nothing_more(heard)
        assert heard.calls.count("verdicts") == before + 1
        assert heard.calls.count("policies") == 1


async def test_a_finding_is_told_once(api: FakeApi) -> None:
    api.put(REWRITES, "bad", spec={"poolRef": REF, "rules": [{"targets": []}]})
    async with following(api) as heard:
        await until(lambda: heard.judged == {"bad": ("llm-d.ai", "False")})
        for priority in range(3):
            objective(api, "high", priority)
            await until(lambda priority=priority: heard.priorities == {"high": priority})
        assert [text.split(":")[0] for text in heard.told] == ["InferenceModelRewrite llm/bad"]


async def test_the_older_group_serves_where_the_first_has_no_definition(api: FakeApi) -> None:
    older = FakeApi(PODS, POOLS, LEGACY_OBJECTIVES, REWRITES)
    pods(older, 1)
    pool(older)
    objective(older, "old", 1, LEGACY_OBJECTIVES)
    rewrite(older, "a")
    async with following(older) as heard:
        await until(lambda: heard.known is not None)
        assert heard.judged == {
            "old": (names.LEGACY_INFERENCE_GROUP, "True"),
            "a": (names.LLM_D_GROUP, "True"),
        }
        assert heard.priorities == {"old": 1}
        assert heard.told == []
        # The definition moves: the first group counts as soon as it is there, and the other no more.
        older.held[OBJECTIVES] = asyncio.Event()
        older.serve(OBJECTIVES)
        objective(older, "new", 2)
        await until(lambda: OBJECTIVES in older.asked)
        assert heard.priorities == {"old": 1}
        older.held.pop(OBJECTIVES).set()
        await until(lambda: heard.priorities == {"new": 2})
        assert heard.judged["new"] == (names.LLM_D_GROUP, "True")
        assert (LEGACY_OBJECTIVES, "") not in older.watched


async def test_without_definitions_the_picker_goes_on_and_finds_them_later() -> None:
    api = FakeApi(PODS, POOLS)
    pods(api, 1)
    pool(api)
    async with following(api) as heard:
        await until(lambda: heard.known is not None)
        assert (heard.priorities, heard.rewrites) == ({}, [])
        await asyncio.sleep(0.06)
        assert [("inferenceobjectives" in text, "inferencemodelrewrites" in text) for text in heard.told] == [
            (True, False),
            (False, True),
        ]
        api.serve(OBJECTIVES, REWRITES)
        objective(api, "high", 5)
        await until(lambda: heard.priorities == {"high": 5})
        assert any("inferenceobjectives.llm-d.ai is there" in text for text in heard.told)


async def test_policies_are_waited_for_however_late_the_api_server_comes(
    api: FakeApi, patience: list[Callable[[], None]]
) -> None:
    objective(api, "high", 5)
    api.delete(POOLS, "pool")
    api.broken = dict.fromkeys((PODS, DISCOVERY), KubeError("GET", "", "connection refused"))
    async with following(api) as heard:
        await until(lambda: len(heard.told) >= 2)
        await nothing_more(heard)
        assert heard.calls == []
        assert not patience, "it begins when the pods are listed"
        api.held[OBJECTIVES] = asyncio.Event()
        api.broken = {}
        pool(api)
        await until(lambda: bool(patience))
        assert heard.members is not None
        assert heard.known is None
        api.held.pop(OBJECTIVES).set()
        await until(lambda: heard.known is not None)
        assert heard.priorities == {"high": 5}


async def test_policies_that_may_not_be_read_delay_the_pool_a_little(
    api: FakeApi, patience: list[Callable[[], None]]
) -> None:
    api.broken[OBJECTIVES] = KubeError("GET", OBJECTIVES, "may not", status=403, reason="Forbidden")
    rewrite(api, "a")
    async with following(api) as heard:
        await until(lambda: heard.members is not None and bool(heard.told))
        await nothing_more(heard)
        assert heard.known is None
        (it_ends,) = patience
        it_ends()
        assert heard.known is not None
        assert (heard.priorities, heard.rewrites) == ({}, ["a"])
        assert any("may not" in text for text in heard.told)


async def test_discovery_that_fails_is_tried_again_and_told_once(api: FakeApi) -> None:
    api.broken[DISCOVERY] = KubeError("GET", DISCOVERY, "busy", status=503)
    objective(api, "high", 5)
    async with following(api) as heard:
        await until(lambda: api.asked.count(DISCOVERY) > 3)
        assert heard.known is None
        # One that fails says nothing about the older group.
        assert LEGACY_DISCOVERY not in api.asked
        del api.broken[DISCOVERY]
        await until(lambda: heard.known is not None)
        assert heard.priorities == {"high": 5}
        assert sum("busy" in text for text in heard.told) == 1


# -- without a pool object ------------------------------------------------------------------------


async def test_with_a_selector_nothing_but_pods_is_asked_for(api: FakeApi) -> None:
    objective(api, "high", 5)
    async with following(api, PoolTarget("pool", "llm", selector="app=b", ports=(8000, 8001))) as heard:
        await until(lambda: heard.known == (True, ""))
        assert heard.members == ["10.0.0.3:8000", "10.0.0.3:8001"]
        assert heard.calls == ["endpoints", "pool True"]
        assert set(api.asked) == {PODS}
