"""What becomes of requests and health as pools come, change and go, and what objectives and rewrites do."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from e2e.kube import PICKER_RULES, POLICY_VERSION, POOL_VERSION, Namespace, model_rewrite, objective, pool
from e2e.kube_access import rule
from e2e.kube_client import Thing
from e2e.kube_line import LABELS, POOL, PORT, line
from e2e.kube_load import MODEL, PodLoad, ask, one
from e2e.kube_picker import SPREAD, ClusterPicker, pool_flags, proxied, running, selector_flags
from e2e.kube_pods import Kubelet, Light, pod
from e2e.pages import has_ready, samples, until
from epp import names
from epp.wire.health_pb2 import HealthCheckResponse

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

LEGACY_GROUP: Final = names.LEGACY_INFERENCE_GROUP
READY_NAMES: Final = ("", names.READINESS, names.EXT_PROC_SERVICE, names.INFERENCE_EXTENSION)
A_SECOND_S: Final = 1.1
"""After which an object is younger than another one for sure."""
GRPC_ALONE: Final = """\
requestHandler:
  parsers:
  - {pluginRef: vllmgrpc-parser}
"""


async def is_healthy(picker: ClusterPicker, serving: bool) -> bool:
    """Whether all names say the same of requests; that the process lives is always said."""
    wanted = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
    told = [await picker.status(name) for name in READY_NAMES]
    assert await picker.status(names.LIVENESS) == HealthCheckResponse.SERVING
    return told == [wanted] * len(READY_NAMES)


async def becomes(picker: ClusterPicker, serving: bool) -> None:
    await until(lambda: is_healthy(picker, serving), f"health says {'' if serving else 'not '}serving")


def says(picker: ClusterPicker, *words: str) -> bool:
    return any(all(word in text for word in words) for text in picker.log_lines())


# -- pools -----------------------------------------------------------------------------------------


async def test_the_life_of_a_pool(namespace: Namespace, envoy: Path) -> None:
    """Missing, made without pods, served, marked to go, gone, and made again as another one."""
    picker = ClusterPicker(namespace.folder, await namespace.access(), pool_flags(POOL, namespace.name))
    async with (
        running(picker, serving=False),
        Kubelet(namespace.client, namespace.name) as kubelet,
        proxied(envoy, picker) as url,
    ):
        await until(lambda: says(picker, f"there is no InferencePool {namespace.name}/{POOL}"), "it is told")
        assert await is_healthy(picker, serving=False)
        assert (await one(url)).status >= 500  # that of a proxy without a picker
        made = pool(POOL, {"app": "nobody"})
        made["metadata"]["finalizers"] = ["lab.warmroute/stays"]
        await namespace.create(made)
        await becomes(picker, serving=True)
        assert says(picker, "no pod in namespace", "app=nobody")
        await until(lambda: refused_with(url, names.REJECTED_NO_ENDPOINTS), "refused with the reason")
        await namespace.create(pod("late", {"app": "nobody"}))
        await until(lambda: answered(url), "the pod is there, and answers")

        late = engine(kubelet, "late")
        late.go_on.clear()
        heard = len(late.models)
        running_on = asyncio.create_task(one(url))
        await until(lambda: len(late.models) > heard, "a request is on its way")
        await namespace.delete(POOL_VERSION, "InferencePool", POOL)
        await becomes(picker, serving=False)
        late.go_on.set()
        assert (await running_on).ok
        assert (await one(url)).status >= 500  # that of a proxy without a picker
        # Marked to go is gone; that it goes is no news.
        gone = {"metadata": {"finalizers": None}}
        await namespace.change(namespace.path(POOL_VERSION, "InferencePool", POOL), gone)
        await namespace.create(pod("other", LABELS))
        await namespace.create(pool(POOL, LABELS))
        await becomes(picker, serving=True)
        await until(lambda: answered(url), "the other pool's pod answers")
        assert (await one(url)).pod == "other"


def engine(kubelet: Kubelet, name: str) -> Light:
    found = kubelet.engines[name]
    assert isinstance(found, Light)
    return found


async def answered(url: str) -> bool:
    return (await one(url)).ok


async def refused_with(url: str, reason: str) -> bool:
    """Envoy, too, answers 503 until it has asked the picker for its health."""
    async with aiohttp.ClientSession() as session:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            return (answer.status, answer.headers.get(names.DROPPED_REASON)) == (503, reason)


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "not-allowed"])
async def test_the_group_of_the_pool_is_another(namespace: Namespace, allowed: bool) -> None:
    """The log names flag and group, whether or not the role is of the same mistake."""
    await namespace.create(pool(POOL, LABELS))
    rules = (*PICKER_RULES, rule(LEGACY_GROUP, "inferencepools", "list watch")) if allowed else PICKER_RULES
    flags = (*pool_flags(POOL, namespace.name), f"--pool-group={LEGACY_GROUP}")
    picker = ClusterPicker(namespace.folder, await namespace.access(rules), flags)
    async with running(picker, serving=False):
        right = f"--pool-group is {LEGACY_GROUP}, the field's is {names.POOL_GROUP}"
        await until(lambda: says(picker, right), "the log tells what is wrong")
        assert await is_healthy(picker, serving=False)


async def test_a_protocol_that_no_parser_reads(namespace: Namespace) -> None:
    """A pool says it, or the configuration file stops or begins to."""
    await namespace.create(pool(POOL, LABELS, app_protocol="http"))
    path = namespace.path(POOL_VERSION, "InferencePool", POOL)
    flags = pool_flags(POOL, namespace.name)
    grpc_alone = SPREAD.replace("plugins:\n", "plugins:\n- type: vllmgrpc-parser\n", 1) + GRPC_ALONE
    picker = ClusterPicker(namespace.folder, await namespace.access(), flags, config=grpc_alone)
    async with running(picker, serving=False, expected="the pool's appProtocol is none"):
        await until(lambda: says(picker, "appProtocol", '"app_protocol": "http"'), "the log tells it")
        assert await is_healthy(picker, serving=False)
        await namespace.change(path, {"spec": {"appProtocol": names.H2C_PROTOCOL}})
        await becomes(picker, serving=True)
        await namespace.change(path, {"spec": {"appProtocol": "http"}})
        await becomes(picker, serving=False)
        picker.configure(SPREAD)
        await becomes(picker, serving=True)
        picker.configure(grpc_alone)
        await becomes(picker, serving=False)


async def test_a_selector_in_place_of_a_pool(namespace: Namespace, envoy: Path) -> None:
    """In a pod, with two labels and two ports. Nothing but pods is asked for."""
    selector = "app=a,tier=new"
    flags = selector_flags(selector, [PORT, PORT + 1], namespace.name)
    access = await namespace.access([rule("", "pods", "list watch")])
    named = {"POD_NAME": "warmroute-5f9c-x7k2p"}
    picker = ClusterPicker(namespace.folder, access, flags, as_in_pod=True, environment=named)
    pods: Mapping[str, Mapping[str, str]] = {
        "one": {"app": "a", "tier": "new"},
        "two": {"app": "a", "tier": "new", "more": "yes"},
        "old": {"app": "a", "tier": "old"},
        "other": {"app": "b", "tier": "new"},
    }
    async with Kubelet(namespace.client, namespace.name), running(picker), proxied(envoy, picker) as url:
        assert await is_healthy(picker, serving=True)
        assert says(picker, "no pod in namespace", selector)
        for name, labels in pods.items():
            await namespace.create(pod(name, labels, (PORT, PORT + 1)))
        await until(lambda: all_ready(namespace, len(pods)), "the pods are ready")
        await until(lambda: has_ready(picker, 4), "the picker knows two of them, and two ports of each")
        async with PodLoad(url) as load:
            await load.comes_to({"one", "two"}, time.monotonic())
            assert {each.port for each in load.sent} == {PORT, PORT + 1}
            changed_s = await namespace.relabel("one", {"tier": None})
            await load.comes_to({"two"}, changed_s)
            changed_s = await namespace.relabel("other", {"app": "a"})
            await load.comes_to({"two", "other"}, changed_s)
        assert load.failed() == []
    audit = namespace.plane.audit(access.user)
    asked = {(each.verb, each.object_ref.resource, each.status) for each in audit}
    assert asked == {("list", "pods", 200), ("watch", "pods", 200)}


async def all_ready(namespace: Namespace, count: int) -> bool:
    return len(await namespace.ready_pods()) == count


# -- objectives and rewrites -----------------------------------------------------------------------

FILE_OF_POLICIES: Final = (
    SPREAD
    + """\
objectives:
- {name: silver, priority: 3}
modelRewrites:
- name: of-the-file
  rules:
  - matches: [{model: {value: filed}}]
    targets: [{modelRewrite: file/target}]
"""
)
OBJECTIVE: Final = names.OBJECTIVE[0]


def for_group(thing: Thing, group: str) -> Thing:
    thing["spec"]["poolRef"]["group"] = group
    return thing


def renamed(model: str, *targets: str) -> Thing:
    """A rule."""
    return {"matches": [{"model": {"value": model}}], "targets": [{"modelRewrite": to} for to in targets]}


async def test_objectives_and_rewrites_while_serving(namespace: Namespace, envoy: Path) -> None:
    """Added, changed, deleted; beside those of the file; and those of another pool or group."""

    def path(kind: str, name: str) -> str:
        return namespace.path(POLICY_VERSION, kind, name)

    async with line(namespace, envoy, pods=1, config=FILE_OF_POLICIES) as made:
        (picker,) = made.pickers
        policies = Policies(picker, made.url, engine(made.kubelet, "pod-0"))
        async with PodLoad(made.url, lanes=2) as load:
            assert await policies.priorities("gold", "silver") == {"gold": 0, "silver": 3}
            assert await policies.models("asked", "filed") == {"asked": "asked", "filed": "file/target"}

            # Those that are none of ours first: whoever knows the others has seen them.
            for thing in (
                objective("elsewhere", "another-pool", 9),
                for_group(objective("alien", POOL, 9), "llm-d.ai"),
                objective("gold", POOL, 7),
                objective("silver", POOL, 5),
                model_rewrite("elsewhere", "another-pool", [renamed("other", "engine/wrong")]),
                for_group(model_rewrite("alien", POOL, [renamed("other", "engine/wrong")]), "llm-d.ai"),
                model_rewrite("first", POOL, [renamed("asked", "engine/one")]),
                model_rewrite("over-the-file", POOL, [renamed("filed", "engine/filed")]),
            ):
                await namespace.create(thing)
            await policies.come_to(
                {"gold": 7, "silver": 5, "elsewhere": 0, "alien": 0},
                {"asked": "engine/one", "other": "other", "filed": "engine/filed"},
            )
            for kind in (names.OBJECTIVE_KIND, names.MODEL_REWRITE_KIND):
                assert says(picker, f"{kind} {namespace.name}/alien", "llm-d.ai", names.POOL_GROUP)
            assert not says(picker, "/elsewhere")

            await namespace.change(path(names.OBJECTIVE_KIND, "gold"), {"spec": {"priority": -1}})
            await namespace.client.delete(path(names.OBJECTIVE_KIND, "silver"))
            first = path(names.MODEL_REWRITE_KIND, "first")
            await namespace.change(first, {"spec": {"rules": [renamed("asked", "engine/two")]}})
            await namespace.client.delete(path(names.MODEL_REWRITE_KIND, "over-the-file"))
            # The older one has precedence. Times are in whole seconds, of one second the first name counts.
            younger = [renamed("asked", "engine/young"), renamed("young", "engine/young")]
            await asyncio.sleep(A_SECOND_S)
            await namespace.create(model_rewrite("a-younger", POOL, younger))
            await policies.come_to(
                {"gold": -1, "silver": 3},
                {"asked": "engine/two", "filed": "file/target", "young": "engine/young"},
            )

            await namespace.client.delete(first)
            await namespace.client.delete(path(names.OBJECTIVE_KIND, "gold"))
            to_ours = {"spec": {"poolRef": {"name": POOL}}}
            await namespace.change(path(names.OBJECTIVE_KIND, "elsewhere"), to_ours)
            await policies.come_to({"gold": 0, "elsewhere": 9}, {"asked": "engine/young"})
        assert load.failed() == []
        decided = {
            (labels["model_rewrite_name"], labels["model_name"], labels["target_model"])
            for labels, _ in await samples(picker, "model_rewrite_decisions_total")
        }
        assert decided >= {
            ("of-the-file", "filed", "file/target"),
            ("first", "asked", "engine/one"),
            ("over-the-file", "filed", "engine/filed"),
            ("first", "asked", "engine/two"),
            ("a-younger", "asked", "engine/young"),
        }


@dataclass
class Policies:
    """What a picker makes of objectives and rewrites, by requests that each have a model of their own."""

    picker: ClusterPicker
    url: str
    light: Light
    _asked: Iterator[int] = field(default_factory=itertools.count)

    async def come_to(self, priorities: Mapping[str, int], models: Mapping[str, str]) -> None:
        """Until all of them are so at once."""
        seen: list[object] = []

        async def holds() -> bool:
            seen[:] = [await self.priorities(*priorities), await self.models(*models)]
            return seen == [priorities, models]

        try:
            await until(holds, f"it is {priorities} and {models}")
        except AssertionError as late:
            raise AssertionError(f"{late}; it is {seen}") from None

    async def priorities(self, *objectives: str) -> dict[str, int]:
        """What the metrics say of one request each, by name of its objective."""
        number = next(self._asked)
        async with aiohttp.ClientSession() as session:
            for name in objectives:
                assert (await ask(session, self.url, "hello", f"{name}-{number}", {OBJECTIVE: name})).ok
        found = await samples(self.picker, "request_total")
        told = {labels["model_name"]: labels["priority"] for labels, _ in found}
        return {name: int(told[f"{name}-{number}"]) for name in objectives}

    async def models(self, *asked: str) -> dict[str, str]:
        """Which model the engine hears of for each that is asked for, while the client sees its own."""
        heard = {}
        async with aiohttp.ClientSession() as session:
            for model in asked:
                prompt = {"messages": [{"role": "user", "content": "hello"}], "model": model}
                async with session.post(f"{self.url}/v1/chat/completions", json=prompt) as answer:
                    body: dict[str, Any] = await answer.json()
                    assert (answer.status, body["model"]) == (200, model)
                heard[model] = next(each for each in reversed(self.light.models) if each != MODEL)
        return heard
