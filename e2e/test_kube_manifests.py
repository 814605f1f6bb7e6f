"""`manifests/` on a real API server: as kubectl renders and applies them, and as they run."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from e2e.kube import Namespace
from e2e.kube_client import Thing
from e2e.kube_containers import PICKER
from e2e.kube_load import PodLoad
from e2e.kube_picker import proxied
from e2e.kube_release import (
    HTTP_PORT,
    MANIFESTS,
    SERVED_PODS,
    everything,
    is_accepted,
    kustomization,
    refusals,
    restrict,
    same,
    site,
    until_all_is_used,
)
from e2e.pages import until
from e2e.test_kube_chart import answer, dies
from tests.data.kube import kustomize
from tools.control_plane import ControlPlane

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(480),
    pytest.mark.usefixtures("definitions_of_others"),
]

ACCOUNT: Final = "warmroute-epp"
LABELS: Final = {"app": "vllm"}
ENGINES: Final = ("pod-0", "pod-1")
OVERLAYS: Final = ("gateway", "standalone")
COMPONENTS: Final = sorted(each.name for each in (MANIFESTS / "components").iterdir())
SAMPLES: Final = sorted((MANIFESTS / "samples").glob("*.yaml"))
# What kustomize appends to the name of a ConfigMap whose content its pods have to follow.
HASHED: Final = re.compile(r"\b(warmroute-envoy)-[a-z0-9]{10}\b")


def rendered(plane: ControlPlane, folder: Path) -> list[Thing]:
    """As kubectl does it."""
    return [each for each in yaml.safe_load_all(plane.kubectl("kustomize", str(folder))) if each]


# -- what is rendered ------------------------------------------------------------------------------


def by_name(objects: list[Thing]) -> dict[tuple[str, str], Thing]:
    found = {(each["kind"], HASHED.sub(r"\1", each["metadata"]["name"])): each for each in objects}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_what_other_tests_look_at(
    control_plane: ControlPlane, tmp_path: Path, overlay: str
) -> None:
    """Alone and with each component that it can have."""
    folder, objects = MANIFESTS / "overlays" / overlay, kustomize.render(MANIFESTS / "overlays" / overlay)
    has_lease = overlay == "gateway"
    others = [each for each in COMPONENTS if not (has_lease and each == "lease")]
    for name in ("", *others):
        if name:
            folder = kustomization(tmp_path / name, overlay, name)
            objects = kustomize.built(
                MANIFESTS / "components" / name, kustomize.render(MANIFESTS / "overlays" / overlay)
            )
        text = HASHED.sub(r"\1", control_plane.kubectl("kustomize", str(folder)))
        theirs = by_name([each for each in yaml.safe_load_all(text) if each])
        assert theirs == by_name([plain(each) for each in objects]), name


def plain(thing: Thing) -> Thing:
    """kubectl writes no empty labels."""
    metadata = {key: value for key, value in thing["metadata"].items() if value}
    return {**thing, "metadata": metadata}


@pytest.mark.parametrize("overlay", OVERLAYS)
async def test_every_object_is_accepted(
    control_plane: ControlPlane, namespace: Namespace, tmp_path: Path, overlay: str
) -> None:
    """With all components together, pods restricted, and no word of warning."""
    await restrict(namespace)
    components = [each for each in COMPONENTS if not (overlay == "gateway" and each == "lease")]
    for number, chosen in enumerate(([], components)):
        folder = kustomization(tmp_path / f"{number}", overlay, *chosen, namespace=namespace.name)
        objects = rendered(control_plane, folder)
        assert await refusals(namespace, objects) == []
        for each in objects:
            assert {subject["namespace"] for subject in each.get("subjects", ())} <= {namespace.name}


async def test_every_sample_is_accepted(namespace: Namespace) -> None:
    await restrict(namespace)
    objects = [each for file in SAMPLES for each in kustomize.read(file)]
    assert len({each["kind"] for each in objects}) == 6
    assert await refusals(namespace, objects) == []


def test_definitions_are_accepted(control_plane: ControlPlane) -> None:
    folder = str(MANIFESTS / "crds")
    applied = control_plane.kubectl("apply", "--server-side", "--dry-run=server", "-k", folder)
    assert applied.count("serverside-applied (server dry run)") == 3


# -- what runs by it -------------------------------------------------------------------------------


async def test_behind_a_gateway(
    control_plane: ControlPlane, namespace: Namespace, envoy: Path, tmp_path: Path
) -> None:
    """With the component for readers of metrics. The gateway is a test's Envoy."""
    folder = kustomization(
        tmp_path / "own", "gateway", "metrics-auth", namespace=namespace.name, patches=[SERVED_PODS]
    )
    async with site(namespace, envoy) as made:
        reader = await namespace.access(name="reader")
        await made.engines(*ENGINES, labels=LABELS)
        before = await everything(namespace.client, namespace.name)
        await kubectl(control_plane, "apply", "-k", str(folder))
        samples = [str(MANIFESTS / "samples" / name) for name in ("objectives.yaml", "rewrites.yaml")]
        files = [f"--filename={name}" for name in samples]
        await kubectl(control_plane, "apply", f"--namespace={namespace.name}", *files)
        picker = await made.picker()
        async with proxied(envoy, picker, tls=True) as url:
            await answer(url, {*ENGINES}, headers={"x-llm-d-inference-objective": "interactive"})
        assert [(await picker.show_metrics(shown))[0] for shown in ("", reader.token)] == [401, 403]
        for kind, name in (
            ("InferenceObjective", "interactive"),
            ("InferenceObjective", "batch"),
            ("InferenceModelRewrite", "assistant"),
        ):
            await until(lambda k=kind, n=name: is_accepted(namespace, k, n), f"{name} is accepted")  # type: ignore[misc]
        await until_all_is_used(namespace, ACCOUNT)
        bound = ("create", "clusterrolebinding", f"{namespace.name}-reader")
        await kubectl(
            control_plane,
            *bound,
            "--clusterrole=warmroute-metrics-reader",
            f"--serviceaccount={namespace.name}:reader",
        )
        await until(lambda: reads(picker, reader.token), "who is bound to the role reads metrics")
        await kubectl(control_plane, "delete", "--wait=false", "clusterrolebinding", bound[2])
        await kubectl(control_plane, "delete", "--wait=false", f"--namespace={namespace.name}", *files)
        await kubectl(control_plane, "delete", "--wait=false", "-k", str(folder))
        lease = f"/apis/coordination.k8s.io/v1/leases: {namespace.name}/epp-{namespace.name}-vllm.llm-d.ai"
        await same(namespace, before | {lease}, "what the picker made itself is left")


async def reads(picker: Any, token: str) -> bool:
    status, _ = await picker.show_metrics(token)
    return bool(status == 200)


async def test_a_proxy_beside_the_picker(
    control_plane: ControlPlane, namespace: Namespace, envoy: Path, tmp_path: Path
) -> None:
    """It fails closed: without its picker it answers nobody."""
    folder = kustomization(tmp_path / "own", "standalone", namespace=namespace.name, patches=[SERVED_PODS])
    async with site(namespace, envoy) as made:
        await made.engines(*ENGINES, labels=LABELS)
        before = await everything(namespace.client, namespace.name)
        await kubectl(control_plane, "apply", "-k", str(folder))
        both = await made.picker()
        url = f"http://{both.host}:{HTTP_PORT}"
        await answer(url, {*ENGINES}, from_now=False)
        assert (await both.show_metrics())[0] == 200
        await dies(both)
        async with PodLoad(url, lanes=2) as load:
            await load.comes_to({503}, time.monotonic())
        assert load.pods() == {}
        await both.children[PICKER].start()
        await until(both.ready, "the picker is ready again")
        await answer(url, {*ENGINES}, from_now=False)
        await until_all_is_used(namespace, ACCOUNT)
        await kubectl(control_plane, "delete", "--wait=false", "-k", str(folder))
        await same(namespace, before, "nothing is left")


async def kubectl(plane: ControlPlane, *arguments: str) -> None:
    await asyncio.to_thread(plane.kubectl, *arguments)
