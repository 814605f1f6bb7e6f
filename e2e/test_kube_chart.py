"""Releases of the chart on a real API server: what it takes, what runs by it, and what stays behind."""

import base64
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, Final

import helm_python
import pytest
import yaml

from e2e.kube import CRDS, POLICY_VERSION, POOL_VERSION, Namespace, model_rewrite, new_namespace, pool
from e2e.kube_client import KubeClient, Thing, kube_client, path_of
from e2e.kube_containers import PICKER, PROXY, Running
from e2e.kube_load import PodLoad
from e2e.kube_picker import proxied
from e2e.kube_release import (
    HTTP_PORT,
    RUN,
    Release,
    answered,
    everything,
    is_accepted,
    refusals,
    restrict,
    same,
    site,
    until_all_is_used,
    until_answered,
)
from e2e.pages import total, until
from tests.contract.test_chart_render import (
    EVERYTHING,
    MATRIX,
    OPEN_METRICS,
    ROUTE,
    SCRAPED,
    SELECTOR,
    SERVICE,
    STANDALONE,
)
from tests.contract.test_config_reference import DATA
from tests.data.chart.rendering import CHART, LABELS, Object, objects, one, values
from tools.control_plane import API_SERVER, ETCD, ControlPlane

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(480),
    pytest.mark.usefixtures("definitions_of_others"),
]

ACCOUNT: Final = "rel-epp"
ENGINES: Final = ("pod-0", "pod-1")
OBJECTIVES: Object = {"router": {"inferenceObjectives": [{"name": "chat", "priority": 10}]}}
CHAT: Final = {"x-llm-d-inference-objective": "chat"}


def configured(name: str) -> Object:
    """Values with a configuration of the field as an object."""
    text = (DATA / f"{name}.yaml").read_text()
    return {"router": {"epp": {"pluginsConfig": helm_python.values_from_yaml(text)}}}


def as_text(name: str) -> Object:
    """Values with the same as a file of one's own."""
    files = {"own.yaml": (DATA / f"{name}.yaml").read_text()}
    return {"router": {"epp": {"pluginsCustomConfig": files, "pluginsConfigFile": "own.yaml"}}}


# -- what is rendered ------------------------------------------------------------------------------


async def test_every_object_is_accepted(namespace: Namespace) -> None:
    """With pods restricted. No word of warning, which the API server has for what is deprecated or unsafe."""
    await restrict(namespace)
    high = "/apis/scheduling.k8s.io/v1/priorityclasses"
    priority = {"metadata": {"name": "high"}, "value": 1000}
    await namespace.client.call("POST", high, priority)
    try:
        found = {
            case: await refusals(namespace, objects(values(given), "rel", namespace.name))
            for case, given in MATRIX.items()
        }
    finally:
        await namespace.client.delete(f"{high}/high")
    assert {case: refused for case, refused in found.items() if refused} == {}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda spec: spec["template"]["spec"]["containers"][0].update(ports=[{"containerPort": 0}]),
            "Required",
        ),
        (lambda spec: spec["template"]["spec"]["containers"][0].update(argz=[]), "unknown field"),
        (lambda spec: spec["template"]["spec"].update(securityContext={}), "violates PodSecurity"),
        (
            lambda spec: spec["template"]["spec"].update(nodeSelector={"beta.kubernetes.io/os": "linux"}),
            "deprecated",
        ),
    ],
    ids=["port", "field", "root", "deprecated"],
)
async def test_a_fault_would_be_refused(
    namespace: Namespace, spoil: Callable[[Any], None], said: str
) -> None:
    await restrict(namespace)
    found = objects(values({}), "rel", namespace.name)
    assert await refusals(namespace, found) == []
    spoil(one(found, "Deployment")["spec"])
    assert said in "\n".join(await refusals(namespace, found))


# -- the life of releases --------------------------------------------------------------------------


async def test_a_release_leaves_nothing_behind(namespace: Namespace) -> None:
    await restrict(namespace)
    before = await everything(namespace.client, namespace.name)
    release = Release(namespace)
    await release.install(values(EVERYTHING, SERVICE))
    first = await everything(namespace.client, namespace.name)
    assert len({key.partition(":")[0] for key in first - before}) > 12, "kinds of objects"
    await release.upgrade(values(EVERYTHING, STANDALONE))
    await release.upgrade(values(EVERYTHING, ROUTE))
    assert first > before
    await release.rollback(1)
    await same(namespace, first, "the first revision is back")
    await release.uninstall()
    await same(namespace, before, "nothing is left")


async def test_releases_side_by_side(namespace: Namespace) -> None:
    """Two in one namespace and one in another; one that goes takes nothing of the others with it."""
    async with new_namespace(namespace.plane, namespace.folder) as other:
        apart = Release(other)
        beside = Release(namespace, "beside")
        stays = Release(namespace)
        # Clients name objectives, so two releases of a namespace cannot have the same.
        given = values(EVERYTHING, SERVICE)
        await stays.install(given)
        before = await everything(namespace.client, namespace.name, other.name)
        await apart.install(given)
        await beside.install(values(given, {"router": {"inferenceObjectives": []}}))
        await apart.uninstall()
        await beside.uninstall()
        await same(namespace, before, "one release is left", other.name)
        await stays.uninstall()


async def test_replicas_stay_as_an_autoscaler_wants_them(namespace: Namespace) -> None:
    release = Release(namespace)
    scaled = {"router": {"epp": {"autoscaling": {"enabled": True}}}}
    path = namespace.path("apps/v1", "Deployment", ACCOUNT)
    await release.install(values(scaled))
    await namespace.change(
        namespace.path("apps/v1", "Deployment", ACCOUNT, "scale"), {"spec": {"replicas": 3}}
    )
    await release.upgrade(values(scaled, {"router": {"epp": {"podLabels": {"a": "b"}}}}))
    spec = (await namespace.client.get(path))["spec"]
    assert (spec["replicas"], spec["template"]["metadata"]["labels"]["a"]) == (3, "b")
    await release.uninstall()


async def test_helm_waits_for_a_release_that_becomes_ready(namespace: Namespace) -> None:
    release = Release(namespace)
    made = await release.install(values(SERVICE), wait="watcher", timeout=100)
    assert made["status"] == "deployed"
    assert len(await namespace.ready_pods()) == 3
    await release.uninstall()


async def test_definitions_come_with_a_release_and_outlive_it(
    tmp_path: Path, control_plane: ControlPlane
) -> None:
    """On a control plane that has none of them yet."""
    fresh = shutil.copytree(CHART, tmp_path / "chart")
    for file in (fresh / "charts/crds/crds").iterdir():
        file.write_text(
            file.read_text().replace("\nspec:\n", "\n  labels: {of: another-version}\nspec:\n", 1)
        )
    with ControlPlane(tmp_path / "plane", control_plane.programs, parts=[ETCD, API_SERVER]) as plane:
        async with kube_client(plane.url, plane.ca, plane.token()) as client:
            namespace = Namespace(plane, client, "default", tmp_path)
            release = Release(namespace)
            with pytest.raises(helm_python.HelmError, match="InferencePool"):
                await release.install(values())
            await release.install(values({"crds": {"create": True}}, OBJECTIVES))
            made = await definitions(client)
            assert set(made) == {yaml.safe_load(file.read_text())["metadata"]["name"] for file in CRDS}
            await namespace.create(pool("of-somebody", LABELS))
            await release.upgrade(values({"crds": {"create": True}}), chart=fresh)
            await release.uninstall()
            assert await definitions(client) == made
            pools = await client.items(namespace.path(POOL_VERSION, "InferencePool"))
            assert [each["metadata"]["name"] for each in pools] == ["of-somebody"]


async def definitions(client: KubeClient) -> dict[str, Thing]:
    found = await client.items(path_of("apiextensions.k8s.io/v1", "CustomResourceDefinition"))
    return {each["metadata"]["name"]: each["metadata"].get("labels") for each in found}


# -- what runs by it -------------------------------------------------------------------------------


async def answer(
    url: str,
    wanted: Set[object],
    *,
    after_s: float = 0.0,
    from_now: bool = True,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Until exactly these answer to requests that began after `after_s`, and nobody else does from then on.

    `from_now`: nor does any request fail before.
    """
    async with PodLoad(url, lanes=2, headers=dict(headers or {})) as load:
        await load.comes_to(wanted, after_s)
    assert not from_now or load.failed() == []


async def test_behind_a_gateway(namespace: Namespace, envoy: Path) -> None:
    """The gateway is a test's Envoy. All that the account may do is used, and it asks for nothing else."""
    release = Release(namespace)
    given = values(RUN, SCRAPED, OBJECTIVES)
    async with site(namespace, envoy) as made:
        stranger = (await namespace.access(name="stranger")).token
        await made.engines(*ENGINES, labels=LABELS)
        await made.engines("held", labels=LABELS, held=True)
        before = await everything(namespace.client, namespace.name)
        await release.install(given)
        rules = [{"matches": [{"model": {"value": "assistant"}}], "targets": [{"modelRewrite": "m"}]}]
        await namespace.create(model_rewrite("assistant", "rel", rules))
        picker = await made.picker()
        async with proxied(envoy, picker, tls=True) as url:
            await answer(url, {*ENGINES}, headers=CHAT)
            await shows_metrics(namespace, picker, stranger)
            for kind, name in (("InferenceObjective", "chat"), ("InferenceModelRewrite", "assistant")):
                await until(lambda k=kind, n=name: is_accepted(namespace, k, n), f"{kind} is accepted")  # type: ignore[misc]
            await until_all_is_used(namespace, ACCOUNT)
            await reloads(
                release, values(given, configured("optimized-baseline")), picker, "no-hit-lru-scorer"
            )
            assert await made.picker() is picker
            await answer(url, {*ENGINES})
        await namespace.delete(POLICY_VERSION, "InferenceModelRewrite", "assistant")
        await release.uninstall()
        lease = f"/apis/coordination.k8s.io/v1/leases: {namespace.name}/epp-{namespace.name}-rel.llm-d.ai"
        await same(namespace, before | {lease}, "what the picker made itself is left")


async def shows_metrics(namespace: Namespace, picker: Running, stranger: str) -> None:
    """To who holds the Secret of the chart's ServiceMonitor, and to nobody else."""
    (monitor,) = await namespace.client.items(namespace.path("monitoring.coreos.com/v1", "ServiceMonitor"))
    wanted = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    path = namespace.path("v1", "Secret", wanted["name"])

    async def token() -> str:
        text: str = (await namespace.client.get(path)).get("data", {}).get(wanted["key"], "")
        return base64.b64decode(text).decode()

    await until(token, "the reader's Secret has a token")
    statuses = [(await picker.show_metrics(shown))[0] for shown in ("", "nobody's", stranger, await token())]
    assert statuses == [401, 401, 403, 200]


async def reloads(release: Release, given: Object, picker: Running, plugin: str) -> None:
    """The release gets these values; the picker's files change, and it runs with a plugin it had not had."""
    assert plugin not in await picker.configuration()
    await release.upgrade(given)
    await picker.volumes.write()

    async def has_it() -> bool:
        return plugin in await picker.configuration()

    await until(has_it, f"the picker runs with {plugin}")


async def test_a_proxy_beside_the_picker(namespace: Namespace, envoy: Path) -> None:
    """Without a pool object. When the picker is gone, Envoy spreads over the engines that are ready."""
    given = values(RUN, STANDALONE, SELECTOR, SCRAPED, configured("tiered-prefix-cache-cpu"))
    release = Release(namespace)
    async with site(namespace, envoy) as made:
        stranger = (await namespace.access(name="stranger")).token
        await made.engines(*ENGINES, labels=LABELS)
        await made.engines("held", labels=LABELS, held=True)
        await release.install(given)
        both = await made.picker()
        url = f"http://{both.host}:{HTTP_PORT}"
        await until_answered(url)
        await answer(url, {*ENGINES})
        await shows_metrics(namespace, both, stranger)
        await until_all_is_used(namespace, ACCOUNT)
        await dies(both)
        await answer(url, {*ENGINES}, after_s=time.monotonic(), from_now=False)
        await both.children[PICKER].start()
        await until(both.ready, "the picker is ready again")
        await until_answered(url)
        await answer(url, {*ENGINES})
        await release.uninstall()


async def test_proxies_of_their_own(namespace: Namespace, envoy: Path) -> None:
    """They find pickers and engines by the names of headless Services."""
    router = {"epp": {"replicas": 2}, "proxy": {"replicas": 1}}
    given = values(RUN, SERVICE, OPEN_METRICS, {"router": router}, as_text("optimized-baseline"))
    release = Release(namespace)
    async with site(namespace, envoy) as made:
        await made.engines(*ENGINES, labels=LABELS)
        await made.engines("held", labels=LABELS, held=True)
        await release.install(given)
        pickers = await made.pods(PICKER, 2)
        (proxy,) = await made.pods(PROXY)
        url = f"http://{proxy.host}:{HTTP_PORT}"
        await until_answered(url)
        await until(lambda: all_are_asked(url, pickers), "each picker is asked")
        for picker in pickers:
            await dies(picker)
            await answer(url, {*ENGINES}, after_s=time.monotonic(), from_now=False)
        for picker in pickers:
            await picker.children[PICKER].start()
        await until(lambda: all_are_asked(url, pickers), "each picker is asked again")
        await release.uninstall()


async def dies(picker: Running) -> None:
    await picker.children[PICKER].stop(signal.SIGKILL)


async def all_are_asked(url: str, pickers: list[Running]) -> bool:
    await answered(url, 4)
    for picker in pickers:
        if not await picker.ready() or not await total(picker, "request_total"):
            return False
    return True
