"""Exactly the pods that are ready get requests, whatever becomes of pods, their labels and annotations."""

import asyncio
import itertools
import json
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import pytest

from e2e.kube import POOL_VERSION, Namespace
from e2e.kube_client import Refused, Thing
from e2e.kube_line import LABELS, LATE_S, POOL, PORT, PRE_STOP_S, Line, line
from e2e.kube_load import PodLoad, Sent, one
from e2e.kube_picker import CONFIG, ClusterPicker
from e2e.kube_pods import HOLD, POD_IP, new_address, pod
from e2e.pages import samples, until
from epp import names
from epp.runtime.explanations import DECISIONS_PATH

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

POD: Final = ("v1", "Pod")
UNLIKELY: Final = 1e-12


def place_of(sent: Sent) -> tuple[str, int]:
    return sent.pod, sent.port


# -- what is true of all that happens to pods ------------------------------------------------------


@dataclass
class Journal:
    """Who was a member of the pool when, by what the API server tells whoever watches.

    Attributes:
        spans: by name of the pod, from when to when it was one, by the monotonic clock.
        there: pods that there are, members or not.
    """

    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    there: set[str] = field(default_factory=set)
    _now: dict[str, float] = field(default_factory=dict)

    def note(self, kind: str, thing: Thing) -> None:
        name, at_s = thing["metadata"]["name"], time.monotonic()
        (self.there.discard if kind == "DELETED" else self.there.add)(name)
        if kind != "DELETED" and member(thing):
            self._now.setdefault(name, at_s)
        elif name in self._now:
            self.spans[name].append((self._now.pop(name), at_s))

    def close(self) -> None:
        for name, since_s in self._now.items():
            self.spans[name].append((since_s, float("inf")))

    def members(self) -> set[str]:
        return {*self._now}

    def strangers(self, sent: list[Sent]) -> list[Sent]:
        """Requests answered by a pod that had been none for `LATE_S` when they began.

        Nor for as long after they ended: a test may hear later than the picker does.
        """
        return [
            each
            for each in sent
            if each.ok
            and not any(
                since_s - LATE_S <= each.ended_s and each.started_s - LATE_S <= until_s
                for since_s, until_s in self.spans.get(each.pod, ())
            )
        ]

    def passed_over(self, sent: list[Sent]) -> list[str]:
        """Pods that got nothing while they were members for as many requests as make that no chance."""
        most = max(len(self.members_at(each.started_s)) for each in sent)
        found = []
        for name, spans in self.spans.items():
            for since_s, until_s in spans:
                during = [each for each in sent if since_s + LATE_S <= each.started_s < until_s]
                chance = (1 - 1 / most) ** len(during)
                if chance < UNLIKELY and not any(each.pod == name for each in during):
                    found.append(name)
        return found

    def members_at(self, at_s: float) -> set[str]:
        return {
            name
            for name, spans in self.spans.items()
            if any(since_s <= at_s < until_s for since_s, until_s in spans)
        }


def member(thing: Thing) -> bool:
    metadata = thing["metadata"]
    conditions = thing.get("status", {}).get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    selected = LABELS.items() <= metadata.get("labels", {}).items()
    return ready and selected and not metadata.get("deletionTimestamp")


@asynccontextmanager
async def journal(namespace: Namespace) -> AsyncIterator[Journal]:
    """Written inside."""
    kept = Journal()
    listed = await namespace.client.get(namespace.path(*POD))
    for thing in listed["items"]:
        kept.note("ADDED", thing)

    async def follow() -> None:
        version = listed["metadata"]["resourceVersion"]
        async for kind, thing in namespace.client.watch(namespace.path(*POD), version):
            kept.note(kind, thing)

    following = asyncio.create_task(follow())
    try:
        yield kept
    finally:
        assert not following.done(), "nobody has told what became of the pods"
        following.cancel()
        kept.close()


@dataclass
class Fate:
    """What happens to pods, one thing after the other; some of it to be undone later."""

    made: Line
    kept: Journal
    chance: Random = field(default_factory=lambda: Random(6))
    held: list[str] = field(default_factory=list)
    astray: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    made_by_now: set[str] = field(default_factory=lambda: {"pod-0", "pod-1", "pod-2"})
    _count: int = 0

    async def strikes(self) -> None:
        changes = [self.comes]
        if len(self.members) > 2:
            changes += [self.goes, self.is_not_ready, self.is_relabelled]
        changes += [self.ready_again] * bool(self.held) + [self.is_back] * bool(self.astray)
        changes += [self.comes_again] * bool(self.ended)
        await self.chance.choice(changes)()

    async def comes(self) -> None:
        self._count += 1
        self.made_by_now.add(self.latest)
        await self.made.pod(self.latest)

    async def goes(self) -> None:
        name = self.one_of_members()
        await self.made.delete_pod(name)
        self.gone.append(name)

    async def comes_again(self) -> None:
        """Under the name of one that is gone, as in a StatefulSet; at another address."""
        name = self.ended[-1]
        self.gone.remove(name)
        await self.made.pod(name)

    async def is_not_ready(self) -> None:
        self.held.append(self.one_of_members())
        await self.made.namespace.annotate(self.held[-1], {HOLD: ""})

    async def ready_again(self) -> None:
        await self.made.namespace.annotate(self.held.pop(), {HOLD: None})

    async def is_relabelled(self) -> None:
        self.astray.append(self.one_of_members())
        await self.made.namespace.relabel(self.astray[-1], {"app": "other"})

    async def is_back(self) -> None:
        await self.made.namespace.relabel(self.astray.pop(), LABELS)

    @property
    def latest(self) -> str:
        """The last that came."""
        return f"late-{self._count}"

    @property
    def ended(self) -> list[str]:
        """Of those that are to go, the ones whose objects are gone."""
        return [name for name in self.gone if name not in self.kept.there]

    @property
    def members(self) -> set[str]:
        return self.kept.members() & self.wanted

    @property
    def wanted(self) -> set[str]:
        """Who is a member once all has come to pass."""
        return self.made_by_now - {*self.gone, *self.held, *self.astray}

    def one_of_members(self) -> str:
        return self.chance.choice(sorted(self.members))


async def is_gone(namespace: Namespace, name: str) -> bool:
    try:
        await namespace.client.get(namespace.path(*POD, name))
    except Refused as refused:
        return refused.status == 404
    return False


async def test_nobody_but_members_is_asked_and_every_member_is(namespace: Namespace, envoy: Path) -> None:
    """Pods come, go, come again, are not ready, and lose and get back their labels. No request fails."""
    async with (
        line(namespace, envoy, linger_s=PRE_STOP_S) as made,
        journal(namespace) as kept,
        PodLoad(made.url) as load,
    ):
        await load.comes_to({"pod-0", "pod-1", "pod-2"}, 0.0)
        fate = Fate(made, kept)
        for _ in range(24):
            await fate.strikes()
            await asyncio.sleep(0.35)
        await fate.comes()
        await until(lambda: kept.members() == fate.wanted, "all has come to pass")
        await load.comes_to(fate.wanted, time.monotonic(), count=500)
    assert load.failed() == []
    assert kept.strangers(load.sent) == []
    assert kept.passed_over(load.sent) == []
    assert len(kept.members_at(load.sent[-1].started_s)) >= 2
    assert {"pod-0", fate.latest} < {*load.pods()}


# -- identity --------------------------------------------------------------------------------------


async def test_a_pod_made_again_starts_clean(namespace: Namespace, envoy: Path) -> None:
    """Under the same name and address, or one of them, or as another pod at the address of one before.

    All of that happens while the picker does not look: it hears of both pods at once.
    """
    prompt = "what the engine has in its cache " * 60
    addresses = new_address(), new_address()

    async def put(name: str, address: str) -> None:
        await namespace.create(pod(name, LABELS, annotations={POD_IP: address}))
        await until(lambda: is_ready(namespace, name), "the pod is ready")

    async with line(namespace, envoy, pods=0, config=CONFIG) as made:
        await put("engine-0", addresses[0])
        await made.know(1)
        assert await warm(made, prompt) == [False, True, True]
        for name, address, grace_s in (
            ("engine-0", addresses[0], None),
            ("engine-0", addresses[1], None),
            ("engine-1", addresses[1], 0),
        ):
            (before,) = made.kubelet.engines
            known = len(await explained(made.pickers[0]))
            made.pickers[0].child.send(signal.SIGSTOP)
            await made.delete_pod(before, grace_s)
            await until(lambda before=before: is_gone(namespace, before), "the pod is gone")  # type: ignore[misc]
            await put(name, address)
            made.pickers[0].child.send(signal.SIGCONT)
            await until(lambda known=known: is_cold(made, prompt, known), "the picker hears of another pod")  # type: ignore[misc]
            assert await warm(made, prompt) == [True, True, True]
            decision = (await explained(made.pickers[0]))[0]
            # One that has left is shown for a while, and takes no part.
            taking_part = [seen for seen in decision["legs"][0]["endpoints"] if not seen["excluded"]]
            assert [seen["name"] for seen in taking_part] == [f"{name}-rank-0"]
            assert decision["legs"][0]["chosen"] == [f"{address}:{PORT}"]


async def is_cold(made: Line, prompt: str, known: int) -> bool:
    """Asks once: until the picker hears of the new pod, it believes what it knew of the one before.

    `known`: how many decisions there were before. It is the first of the later ones for the new pod that
    counts, whatever became of its request.
    """
    await one(made.url, prompt)
    decisions = await explained(made.pickers[0])
    fresh = decisions[: len(decisions) - known]
    placed = [each for each in fresh if any(leg["chosen"] for leg in each["legs"])]
    return any(chosen(each)["matches"][0]["blocks"] == 0 for each in placed)


async def is_answered(made: Line, prompt: str) -> bool:
    return (await one(made.url, prompt)).ok


async def warm(made: Line, prompt: str) -> list[bool]:
    """Whether the picker believed the prompt to be cached where it sent it, three times.

    Envoy may need a moment to see that the picker is there again, and asks it nothing before.
    """
    for _ in range(3):
        await until(lambda: is_answered(made, prompt), "the request is answered")
    latest = (await explained(made.pickers[0]))[:3]
    return [chosen(each)["matches"][0]["blocks"] > 0 for each in reversed(latest)]


async def explained(picker: ClusterPicker, last: int = 256) -> list[dict[str, Any]]:
    """What `warmroute explain` tells, the newest first."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(picker.admin_url + DECISIONS_PATH, params={"last": str(last)}) as answer,
    ):
        found: list[dict[str, Any]] = await answer.json()
        return found


def chosen(decision: dict[str, Any]) -> dict[str, Any]:
    (seen,) = [each for each in decision["legs"][0]["endpoints"] if each["chosen"]]
    found: dict[str, Any] = seen
    return found


async def is_ready(namespace: Namespace, name: str) -> bool:
    return name in await namespace.ready_pods()


# -- ports, labels, selectors ----------------------------------------------------------------------


async def test_annotations_say_which_ports_serve(namespace: Namespace, envoy: Path) -> None:
    newer, older = names.ACTIVE_PORTS
    ports = (PORT, PORT + 1)
    whole = {("pod-1", port) for port in ports}
    steps: tuple[tuple[dict[str, str | None], set[tuple[str, int]]], ...] = (
        ({newer: f"{PORT + 1}, 9999, x"}, whole | {("pod-0", PORT + 1)}),
        ({newer: str(PORT), older: str(PORT + 1)}, whole | {("pod-0", PORT)}),
        ({newer: None}, whole | {("pod-0", PORT + 1)}),
        ({newer: ""}, whole),
        ({newer: None, older: None}, whole | {("pod-0", port) for port in ports}),
    )
    async with line(namespace, envoy, pods=2, ports=ports, target_ports=ports) as made:
        picker = made.pickers[0]
        async with PodLoad(made.url) as load:
            for annotations, wanted in steps:
                changed_s = await namespace.annotate("pod-0", annotations)
                await load.comes_to(wanted, changed_s, place_of)
                ranks = {f"{name}-rank-{ports.index(port)}" for name, port in wanted}
                seen = (await explained(picker, 1))[0]["legs"][0]["endpoints"]
                assert {each["name"] for each in seen if not each["excluded"]} == ranks
                assert {each["namespace"] for each in seen} == {namespace.name}
                await until(lambda ranks=ranks: queues(picker, ranks), "gauges are of these endpoints")  # type: ignore[misc]
        assert load.failed() == []
        for name, port in itertools.product(("pod-0", "pod-1"), ports):
            labels = {
                "endpoint_name": f"{name}-rank-{ports.index(port)}",
                "namespace": namespace.name,
                "port": str(port),
            }
            attempts = await samples(picker, "scheduler_attempts_total")
            placed = [value for told, value in attempts if labels.items() <= told.items()]
            assert sum(placed) > 0, f"{labels} not in {attempts}"
    ignored = [text for text in picker.log_lines() if "9999, x" in text]
    assert len(ignored) == 1
    assert newer in ignored[0]


async def queues(picker: ClusterPicker, endpoints: set[str]) -> bool:
    """Whether there is a gauge for each of these endpoints, and for no others."""
    told = await samples(picker, "per_endpoint_queue_size")
    return {labels["model_server_endpoint"] for labels, _ in told} == endpoints and all(
        labels["name"] == POOL for labels, _ in told
    )


async def test_another_selector_and_other_ports_at_once(namespace: Namespace, envoy: Path) -> None:
    """The new pods are never asked at the old port, nor the old ones at the new port."""
    other = {"app": "other", "tier": "new"}
    async with line(namespace, envoy, pods=2) as made, PodLoad(made.url) as load:
        for name, labels in (("other-0", other), ("other-1", {"app": "other"})):
            await made.pod(name, labels, (PORT + 1,))
        await until(lambda: all_ready(namespace, 4), "the other pods are ready")
        await load.answered(30)
        changed_s = await change_pool(namespace, {"app": "other"}, PORT + 1)
        await load.comes_to({("other-0", PORT + 1), ("other-1", PORT + 1)}, changed_s, place_of)
        changes = len(membership_changes(made.pickers[0]))
        narrowed_s = await change_pool(namespace, other, PORT + 1)
        await load.comes_to({("other-0", PORT + 1)}, narrowed_s, place_of)
        # Who is selected by both has not left and joined.
        (change,) = membership_changes(made.pickers[0])[changes:]
        assert (change["joined"], change["left"]) == ([], [f"{made.kubelet.addresses['other-1']}:{PORT + 1}"])
    assert load.failed() == []


async def all_ready(namespace: Namespace, count: int) -> bool:
    return len(await namespace.ready_pods()) == count


async def change_pool(namespace: Namespace, labels: Mapping[str, str], port: int) -> float:
    """Of labels, those that are not named stay: a merge."""
    spec = {"selector": {"matchLabels": dict(labels)}, "targetPorts": [{"number": port}]}
    return await namespace.change(namespace.path(POOL_VERSION, "InferencePool", POOL), {"spec": spec})


def membership_changes(picker: ClusterPicker) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in picker.log_lines() if text.startswith("{")]
    return [each for each in lines if each.get("msg") == "endpoints changed"]
