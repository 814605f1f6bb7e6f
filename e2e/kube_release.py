"""Releases of the chart and kustomizations, run in a namespace, and what they leave in a cluster."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

from e2e.kube import POLICY_VERSION, Namespace
from e2e.kube_client import KubeClient, Refused, Thing, path_of
from e2e.kube_containers import PICKER, PROXY, Containers, Running
from e2e.kube_dns import cluster_names
from e2e.kube_load import one
from e2e.kube_pods import HOLD, SERVED, Kubelet, pod
from e2e.kube_rights import Judgement, judged
from e2e.pages import until
from tests.data.chart.rendering import CHART

MANIFESTS: Final = Path(__file__).parents[1] / "manifests"
HTTP_PORT: Final = 8081
"""Where proxies take requests, of chart and manifests."""
NOTICED_S: Final = 2.0
"""How long after a picker's death a proxy knows of it, as the chart's page says."""
RESTRICTED: Final = {
    f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")
}
"""Labels of a namespace that takes pods of no other kind."""
RUN: Final = {
    "router": {
        "epp": {"podAnnotations": {SERVED: "true"}, "flags": {"drain-timeout": "200ms"}},
        "proxy": {"podAnnotations": {SERVED: "true"}},
    }
}
"""Values of a release whose pods are run by us, and do not take their time to end."""

_RBAC: Final = "rbac.authorization.k8s.io/v1"


@dataclass
class Release:
    """One of the chart, by Helm's own engine. Its actions return when the API server has taken them."""

    namespace: Namespace
    name: str = "rel"

    async def install(self, given: Mapping[str, Any], chart: Path = CHART, **options: Any) -> Thing:
        return await self._do(lambda helm: helm.install(chart, self.name, dict(given), **options))

    async def upgrade(self, given: Mapping[str, Any], chart: Path = CHART, **options: Any) -> Thing:
        return await self._do(lambda helm: helm.upgrade(chart, self.name, dict(given), **options))

    async def rollback(self, revision: int | None = None) -> None:
        await self._do(lambda helm: helm.rollback(self.name, version=revision))

    async def uninstall(self) -> None:
        await self._do(lambda helm: helm.uninstall(self.name))

    async def _do(self, action: Callable[[helm_python.Config], Any]) -> Any:
        def act() -> Any:
            kubeconfig = self.namespace.plane.kubeconfig()
            with helm_python.Config(kubeconfig_path=kubeconfig, namespace=self.namespace.name) as helm:
                return action(helm)

        return await asyncio.to_thread(act)


# -- kustomizations --------------------------------------------------------------------------------


def kustomization(folder: Path, overlay: str, *components: str, **also: object) -> Path:
    """The folder of a kustomization of one's own, which takes an overlay and components of ours."""
    folder.mkdir(parents=True)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(MANIFESTS / "overlays" / overlay, folder.resolve())],
        "components": [
            os.path.relpath(MANIFESTS / "components" / each, folder.resolve()) for each in components
        ],
        **also,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


SERVED_PODS: Final = {
    "target": {"kind": "Deployment"},
    "patch": yaml.safe_dump(
        [
            {"op": "add", "path": "/spec/template/metadata/annotations", "value": {SERVED: "true"}},
            {
                "op": "add",
                "path": "/spec/template/spec/containers/0/args/-",
                "value": "--drain-timeout=200ms",
            },
        ]
    ),
}
"""A patch: what `RUN` is for the chart."""


# -- what runs -------------------------------------------------------------------------------------


@dataclass
class Site:
    """A namespace whose pods run: `async with site(...) as made`."""

    namespace: Namespace
    containers: Containers
    kubelet: Kubelet

    async def engines(self, *names: str, labels: dict[str, str], held: bool = False) -> None:
        """Pods that answer at port 8000; returns when they do. `held`: they are not ready."""
        for name in names:
            thing = pod(name, labels, annotations={HOLD: ""} if held else {})
            await self.namespace.create({**thing, "spec": _restricted(thing["spec"])})
        await until(lambda: {*names} <= {*self.kubelet.engines}, "the engines run")

    async def pods(self, container: str, count: int = 1) -> list[Running]:
        """Those that run now with such a container, so many; ready by its probes."""

        def found() -> list[Running]:
            engines = [each for each in self.kubelet.engines.values() if isinstance(each, Running)]
            return [each for each in engines if container in each.children]

        await until(lambda: len(found()) == count, f"{count} pods with {container} are ready")
        return found()

    async def picker(self) -> Running:
        (running,) = await self.pods(PICKER)
        return running

    async def proxy(self) -> Running:
        (running,) = await self.pods(PROXY)
        return running


def _restricted(spec: Thing) -> Thing:
    """A pod's spec that such a namespace takes."""
    of_container = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    of_pod = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    containers = [{**each, "securityContext": of_container} for each in spec["containers"]]
    return {**spec, "securityContext": of_pod, "containers": containers}


@asynccontextmanager
async def site(
    namespace: Namespace, envoy: Path, pace: float | None = None, api_port: int | None = None
) -> AsyncIterator[Site]:
    """Pods run inside, and none of them has told of a fault of its own in the end.

    `pace`, `api_port`: as of `Containers`.
    """
    await restrict(namespace)
    async with cluster_names(namespace.client, namespace.name) as names:
        containers = Containers(namespace, envoy, names, pace, api_port)
        async with Kubelet(namespace.client, namespace.name, containers.start, linger_s=0.1) as kubelet:
            yield Site(namespace, containers, kubelet)
            for running in containers.running.values():
                assert running.complaints() == []


async def until_all_is_used(namespace: Namespace, account: str) -> None:
    """Until a service account has used all it may do; fails where it asked for anything else."""
    rules = await rules_of(namespace, account)
    user = f"system:serviceaccount:{namespace.name}:{account}"
    judgement = judged(rules, namespace.plane.audit(user))

    def is_used() -> bool:
        nonlocal judgement
        judgement = judged(rules, namespace.plane.audit(user))
        return not judgement.unused or bool(judgement.refused)

    try:
        await until(is_used, f"all rights of {account} are used")
    finally:
        assert judgement == Judgement(set(), set()), judgement


async def rules_of(namespace: Namespace, account: str) -> list[Thing]:
    """What roles give to a service account, by all bindings there are."""
    client = namespace.client
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace.name}
    rules: list[Thing] = []
    for binding in (
        *await client.items(path_of(_RBAC, "RoleBinding", namespace.name)),
        *await client.items(path_of(_RBAC, "ClusterRoleBinding")),
    ):
        if any(each.items() >= subject.items() for each in binding.get("subjects", ())):
            role = binding["roleRef"]
            within = "" if role["kind"] == "ClusterRole" else namespace.name
            rules += (await client.get(path_of(_RBAC, role["kind"], within, role["name"])))["rules"]
    return rules


async def is_accepted(namespace: Namespace, kind: str, name: str) -> bool:
    found = await namespace.client.get(namespace.path(POLICY_VERSION, kind, name))
    conditions = found.get("status", {}).get("conditions", ())
    return any(each["type"] == "Accepted" and each["status"] == "True" for each in conditions)


async def answered(url: str, count: int, **headers: str) -> set[str]:
    """Who answered so many requests, one after the other, none of which failed."""
    sent = [await one(url, f"{number}", **headers) for number in range(count)]
    failed = [each for each in sent if not each.ok]
    assert not failed, failed
    return {each.pod for each in sent}


async def until_answered(url: str) -> None:
    async def is_answered() -> bool:
        return (await one(url)).ok

    await until(is_answered, f"{url} answers")


# -- what is there ---------------------------------------------------------------------------------


_ASIDE = ("events", "namespaces")


async def everything(client: KubeClient, *namespaces: str) -> set[str]:
    """Every object of every kind in these namespaces or in none; events and other namespaces aside."""
    groups = (await client.get("/apis"))["groups"]
    roots = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]
    found: set[str] = set()
    for root in roots:
        for kind in (await client.get(root))["resources"]:
            if "list" not in kind["verbs"] or "/" in kind["name"] or kind["name"] in _ASIDE:
                continue
            for listed in await _items(client, f"{root}/{kind['name']}"):
                metadata = listed["metadata"]
                namespace = metadata.get("namespace", "")
                if not kind["namespaced"] or namespace in namespaces:
                    found.add(f"{root}/{kind['name']}: {namespace}/{metadata['name']}")
    return found


async def _items(client: KubeClient, path: str) -> list[Thing]:
    while True:
        try:
            return await client.items(path)
        except Refused as refused:
            # A kind whose definition has just come; one that has just gone.
            if refused.status == 404:
                return []
            if refused.status != 429:
                raise
        await asyncio.sleep(0.2)


async def same(namespace: Namespace, wanted: set[str], what: str, *others: str) -> None:
    """Until exactly these are there, but for what others than Helm's templates give their names to."""
    different: set[str] = set()

    async def is_same() -> bool:
        nonlocal different
        found = await everything(namespace.client, namespace.name, *others)
        different = {key for key in found ^ wanted if not any(part in key for part in _NAMED_BY_OTHERS)}
        return not different

    try:
        await until(is_same, what)
    except AssertionError as error:
        raise AssertionError(f"{error}: {sorted(different)}") from None


_NAMED_BY_OTHERS: Final = (
    "/replicasets: ",
    "/pods: ",
    "/ipaddresses: ",
    "/sh.helm.release.v1.",
    "/kube-root-ca.crt",
)


async def refusals(namespace: Namespace, objects: Sequence[Thing]) -> list[str]:
    """Why the API server would not take these, or not gladly; pods of Deployments are tried like the rest."""
    found = [said for each in objects for said in await _refused(namespace, each)]
    # A pod is taken only where its service account is there.
    accounts = [each for each in objects if each["kind"] == "ServiceAccount"]
    for account in accounts:
        await namespace.create(account)
    found += [said for each in _pods(objects) for said in await _refused(namespace, each)]
    for account in accounts:
        await namespace.delete("v1", "ServiceAccount", account["metadata"]["name"])
    return found


async def _refused(namespace: Namespace, thing: Thing) -> list[str]:
    metadata = thing["metadata"]
    if not thing["kind"].startswith("Cluster"):
        thing = {**thing, "metadata": {"namespace": namespace.name, **metadata}}
    told = f"{thing['kind']} {metadata.get('name', '')}"
    heard = len(namespace.client.warned)
    try:
        await namespace.client.create(thing, dryRun="All", fieldValidation="Strict")
    except Refused as refused:
        return [f"{told}: {refused}"]
    return [f"{told}: {warning}" for warning in namespace.client.warned[heard:]]


def _pods(objects: Sequence[Thing]) -> list[Thing]:
    found = []
    for each in objects:
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]
            name = {"generateName": f"{each['metadata']['name']}-"}
            found.append(
                {"apiVersion": "v1", "kind": "Pod", **template, "metadata": template["metadata"] | name}
            )
    return found


async def restrict(namespace: Namespace) -> None:
    """From now on it takes no pods but restricted ones."""
    await namespace.change(
        path_of("v1", "Namespace", "", namespace.name), {"metadata": {"labels": RESTRICTED}}
    )
    stranger = pod("stranger", {})

    async def is_refused() -> bool:
        return bool(await _refused(namespace, stranger))

    # The API server learns of labels by watching them.
    await until(is_refused, "pods of another kind are refused")
