"""What Kubernetes itself makes of a release: budgets and spread pods; and a release's rights in clusters that
have objectives and rewrites in their older group."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from e2e.kube import CRDS, Namespace, model_rewrite, new_namespace, objective
from e2e.kube_client import Refused, Thing, path_of
from e2e.kube_pods import create_node
from e2e.kube_release import RUN, Release, Site, rules_of, site
from e2e.kube_rights import Judgement, Right, judged
from e2e.pages import until
from tests.contract.test_chart_render import OPEN_METRICS, SERVICE
from tests.data.chart.rendering import Object, values
from tools.control_plane import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

ZONE: Final = "topology.kubernetes.io/zone"
SPREAD: Final = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule"}


@asynccontextmanager
async def zones(namespace: Namespace, *names: str) -> AsyncIterator[dict[str, str]]:
    """A node in each of these zones; the label that they have and others have not."""
    label = {"lab.warmroute/of": namespace.name}
    nodes = [f"{namespace.name}-{name}" for name in names]
    for node, name in zip(nodes, names, strict=True):
        await create_node(namespace.client, node)
        await namespace.change(
            path_of("v1", "Node", "", node), {"metadata": {"labels": {**label, ZONE: name}}}
        )
    try:
        yield label
    finally:
        for node in nodes:
            await namespace.client.delete(path_of("v1", "Node", "", node))


async def test_controllers_do_what_the_values_say(namespace: Namespace) -> None:
    release = Release(namespace)
    async with zones(namespace, "a", "b") as nodes:
        epp = {"replicas": 5, "topologySpreadConstraints": [SPREAD], "nodeSelector": nodes}
        proxy = {"podDisruptionBudget": {"minAvailable": 1}, "replicas": 2}
        given = values(SERVICE, {"router": {"epp": epp, "proxy": proxy}})
        await release.install(values(given, budget_of({"maxUnavailable": 2})))

        # The scheduler spreads.
        await until(lambda: by_zone(namespace, nodes), "the pickers run")
        assert sorted((await by_zone(namespace, nodes)).values()) == [2, 3]

        # Budgets count the release's own pods. One that allows nothing lets no pod go.
        await until(lambda: allows(namespace, "rel-epp", 5, 2), "two pickers may go")
        await until(lambda: allows(namespace, "rel-proxy", 2, 1), "one proxy may go")
        picker = (await pods(namespace, "endpoint-picker"))[0]
        await evict(namespace, picker)
        await release.upgrade(values(given, budget_of({"minAvailable": 5})))
        # A pod that has not run yet may always go.
        await until(lambda: all_run(namespace, 5), "the one in place of the first runs")
        await until(lambda: allows(namespace, "rel-epp", 5, 0), "no picker may go")
        picker = (await pods(namespace, "endpoint-picker"))[0]
        with pytest.raises(Refused, match="disruption budget"):
            await evict(namespace, picker)
        await release.uninstall()


def budget_of(spec: Object) -> Object:
    return {"router": {"epp": {"podDisruptionBudget": spec}}}


async def pods(namespace: Namespace, component: str) -> list[Thing]:
    selector = f"app.kubernetes.io/instance=rel,app.kubernetes.io/component={component}"
    listed = await namespace.client.items(namespace.path("v1", "Pod"), labelSelector=selector)
    return [each for each in listed if "deletionTimestamp" not in each["metadata"]]


async def all_run(namespace: Namespace, count: int) -> bool:
    phases = [each["status"]["phase"] for each in await pods(namespace, "endpoint-picker")]
    return phases == ["Running"] * count


async def by_zone(namespace: Namespace, nodes: dict[str, str]) -> Counter[str]:
    """How many pickers are in each zone, once all are."""
    placed = [each["spec"].get("nodeName", "") for each in await pods(namespace, "endpoint-picker")]
    return Counter(placed) if len(placed) == 5 and all(placed) else Counter()


async def allows(namespace: Namespace, name: str, pods_there: int, allowed: int) -> bool:
    found = await namespace.client.get(namespace.path("policy/v1", "PodDisruptionBudget", name))
    status = found.get("status", {})
    return (status.get("expectedPods"), status.get("disruptionsAllowed")) == (pods_there, allowed)


async def evict(namespace: Namespace, pod: Thing) -> None:
    name = pod["metadata"]["name"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace.name},
    }
    await namespace.client.call("POST", namespace.path("v1", "Pod", name, "eviction"), body)


# -- the older group -------------------------------------------------------------------------------

OLDER: Final = "inference.networking.x-k8s.io"
NEWER: Final = "llm-d.ai"
LEGACY: Final = {"router": {"legacyPolicies": True}}
REWRITES: Final = [{"matches": [{"model": {"value": "assistant"}}], "targets": [{"modelRewrite": "m"}]}]


async def test_objectives_and_rewrites_of_the_older_group(
    tmp_path: Path, control_plane: ControlPlane, envoy: Path
) -> None:
    """On a control plane that has them there alone at first, and then where they are now as well."""
    pool_crd, *newer = CRDS
    older = [tmp_path / file.name for file in newer]
    for file, copy in zip(newer, older, strict=True):
        copy.write_text(file.read_text().replace(NEWER, OLDER))
    with ControlPlane(tmp_path / "plane", control_plane.programs) as plane:
        plane.apply_crds([pool_crd, *older])
        async with new_namespace(plane, tmp_path) as namespace:
            await create_node(namespace.client)
            async with site(namespace, envoy) as made:
                # Each by a name of its own: rights, what was asked for and the lease are one release's.
                await without_the_value_it_is_refused(Release(namespace, "without"), made)
                await uses_its_rights_in_both_groups(Release(namespace, "both"), made, newer)


async def without_the_value_it_is_refused(release: Release, made: Site) -> None:
    """Which its log says; it serves all the same."""
    await release.install(values(RUN, OPEN_METRICS))
    picker = await made.picker()
    await until(lambda: asked_in_vain(release), "it asks for the older group")
    await until(lambda: OLDER in picker.log(), "it says so")
    assert await picker.ready()
    await release.uninstall()
    await until(lambda: not made.kubelet.engines, "the picker is gone")


async def asked_in_vain(release: Release) -> bool:
    judgement = await judgement_of(release)
    return {(right.group, right.verb) for right in judgement.refused} == {(OLDER, "list")}


async def judgement_of(release: Release) -> Judgement:
    namespace, account = release.namespace, f"{release.name}-epp"
    user = f"system:serviceaccount:{namespace.name}:{account}"
    return judged(await rules_of(namespace, account), namespace.plane.audit(user))


async def uses_its_rights_in_both_groups(release: Release, made: Site, newer: list[Path]) -> None:
    plane = release.namespace.plane
    await release.install(values(RUN, OPEN_METRICS, LEGACY))
    await made.picker()
    await create_policies(release, OLDER)
    only_newer = {
        Right(NEWER, resource, verb)
        for resources, verbs in (
            (("inferenceobjectives", "inferencemodelrewrites"), ("list", "watch")),
            (("inferenceobjectives/status", "inferencemodelrewrites/status"), ("patch",)),
        )
        for resource in resources
        for verb in verbs
    }

    judgement = Judgement(set(), set())

    async def all_but_those_are_used() -> bool:
        nonlocal judgement
        judgement = await judgement_of(release)
        assert judgement.refused == set()
        return judgement.unused == only_newer

    try:
        await until(all_but_those_are_used, "all is used but what is for the newer group")
    finally:
        assert judgement.unused == only_newer
    plane.apply_crds(newer)
    await create_policies(release, NEWER)
    await until(lambda: nothing_is_unused(release), "all is used")
    await release.uninstall()


async def nothing_is_unused(release: Release) -> bool:
    judgement = await judgement_of(release)
    assert judgement.refused == set()
    return not judgement.unused


async def create_policies(release: Release, group: str) -> None:
    for each in (objective("chat", release.name, 10), model_rewrite("assistant", release.name, REWRITES)):
        await until(lambda thing=each: is_created(release.namespace, thing, group), "its kind is served")  # type: ignore[misc]


async def is_created(namespace: Namespace, thing: Thing, group: str) -> bool:
    """Nothing, where the API server does not serve yet what it has been told to serve."""
    try:
        await namespace.create({**thing, "apiVersion": f"{group}/v1alpha2"})
    except Refused as refused:
        if refused.status != 404:
            raise
        return False
    return True
