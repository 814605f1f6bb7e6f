"""The control plane that other tests build on is a real one, and so are the pods in it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml

from e2e.kube import CRDS, POLICY_VERSION, POOL_VERSION, Namespace, pool
from e2e.kube_access import SERVICE_ACCOUNT_FOLDER, Access, in_own_mounts, rule
from e2e.kube_client import KubeClient, Refused, Thing, kube_client, path_of
from e2e.kube_load import one
from e2e.kube_pods import HOLD, POD_IP, Kubelet, Light, deployment, light, pod
from e2e.pages import until
from tools.control_plane import API_SERVER, ETCD, NOBODY, ControlPlane, ControlPlaneError
from tools.control_plane_programs import FOREIGN_CRDS, foreign_crds, pinned

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

CASES: Final = Path(__file__).parents[1] / "tests" / "data" / "kube" / "crd_cases.yaml"
LABELS: Final = {"app": "engine"}
GRACE_S: Final = 600
"""Longer than a test takes: of a pod whose preStop hook lasts until it is let go."""


@asynccontextmanager
async def client_of(plane: ControlPlane, token: str) -> AsyncIterator[KubeClient]:
    async with kube_client(plane.url, plane.ca, token) as client:
        yield client


# -- definitions -----------------------------------------------------------------------------------


def test_crds_apply_again_and_are_served(control_plane: ControlPlane) -> None:
    applied = control_plane.kubectl("apply", "--server-side", *[f"--filename={file}" for file in CRDS])
    assert applied.count("serverside-applied") == len(CRDS)
    listed = control_plane.kubectl("api-resources", "--output=name").split()
    ours = ("inferencepools.inference.networking.k8s.io", "inferenceobjectives.llm-d.ai")
    assert {*ours, "inferencemodelrewrites.llm-d.ai"} <= {*listed}
    assert pinned("k8s.io/kubernetes") in control_plane.kubectl("version")


def test_crds_of_others_apply(control_plane: ControlPlane) -> None:
    control_plane.apply_crds(foreign_crds())
    names = control_plane.kubectl("get", "crds", "--output=name").split()
    assert {f"customresourcedefinition.apiextensions.k8s.io/{name}" for name in FOREIGN_CRDS} <= {*names}


async def test_objects_are_accepted_and_refused(namespace: Namespace) -> None:
    """All cases, each as it says."""
    cases = yaml.safe_load(CASES.read_text())
    wrong = [text for case in cases for text in [await verdict(namespace, case)] if text]
    assert wrong == []
    assert sum("refused" in case for case in cases) > 15 < sum("refused" not in case for case in cases)


async def verdict(namespace: Namespace, case: Thing) -> str:
    """What is wrong with the API server's answer to a case; empty where it is right."""
    version = POOL_VERSION if case["kind"] == "InferencePool" else POLICY_VERSION
    thing = {"apiVersion": version, "kind": case["kind"], "metadata": {"name": case["name"]}}
    if "spec" in case:
        thing["spec"] = case["spec"]
    try:
        made = await namespace.create(thing)
        if "status" in case:
            path = namespace.path(version, case["kind"], case["name"], "status")
            made = await namespace.client.patch(path, {"status": case["status"]})
    except Refused as refused:
        if "refused" not in case:
            return f"{case['name']}: refused: {refused.message}"
        if refused.status not in (400, 422) or case["refused"] not in refused.message:
            return f"{case['name']}: refused with other words: {refused.status} {refused.message}"
        return ""
    if "refused" in case:
        return f"{case['name']}: accepted"
    for path, value in case.get("stored", {}).items():
        if at(made, path) != value:
            return f"{case['name']}: {path} is {at(made, path)!r}, not {value!r}"
    return ""


def at(thing: Any, path: str) -> Any:
    for part in path.split("."):
        thing = thing[int(part)] if isinstance(thing, list) else thing.get(part)
    return thing


async def test_an_unknown_field_is_refused(namespace: Namespace) -> None:
    """As kubectl asks for it."""
    thing = pool("unknown", LABELS)
    thing["spec"]["replicas"] = 2
    thing["metadata"]["namespace"] = namespace.name
    with pytest.raises(Refused, match=r'unknown field "spec\.replicas"'):
        await namespace.client.create(thing, fieldValidation="Strict")


async def test_status_does_not_change_the_generation(namespace: Namespace) -> None:
    made = await namespace.create(pool("pool", LABELS))
    parents = [{"parentRef": {"name": "gateway"}}]
    path = namespace.path(POOL_VERSION, "InferencePool", "pool", "status")
    patched = await namespace.client.patch(path, {"status": {"parents": parents}})
    assert patched["metadata"]["generation"] == made["metadata"]["generation"] == 1
    assert patched["status"]["parents"][0]["parentRef"]["name"] == "gateway"


# -- rights ----------------------------------------------------------------------------------------


async def test_a_service_account_has_the_rights_of_its_role_alone(namespace: Namespace) -> None:
    access = await namespace.access([rule("", "pods", "list")])
    async with client_of(namespace.plane, access.token) as client:
        assert await client.items(namespace.path("v1", "Pod")) == []
        for path in (
            path_of("v1", "Pod", "default"),
            namespace.path("v1", "Secret"),
            namespace.path(POOL_VERSION, "InferencePool"),
        ):
            with pytest.raises(Refused, match="cannot list resource") as refused:
                await client.items(path)
            assert refused.value.status == 403
        with pytest.raises(Refused, match="cannot watch"):
            await anext(client.watch(namespace.path("v1", "Pod"), "0"))
        await access.allow([rule("", "pods", "list")], everywhere=True)
        await until(lambda: allowed(client, path_of("v1", "Pod", "default")), "the new role counts")


async def allowed(client: KubeClient, path: str) -> bool:
    try:
        await client.items(path)
    except Refused as refused:
        if refused.status != 403:
            raise
        return False
    return True


async def test_a_known_user_without_a_role_may_do_nothing(control_plane: ControlPlane) -> None:
    with pytest.raises(ControlPlaneError, match="cannot list resource"):
        await asyncio.to_thread(control_plane.kubectl, "get", "pods", user=NOBODY)
    async with client_of(control_plane, "no token of anybody") as client:
        with pytest.raises(Refused) as refused:
            await client.items("/api/v1/pods")
        assert refused.value.status == 401


async def test_tokens_rotate_and_are_revoked(namespace: Namespace) -> None:
    access = await namespace.access([rule("", "pods", "list")])
    first = access.token
    assert time.time() + 500 < access.expires_s < time.time() + 700
    kubeconfig = access.kubeconfig().read_text()
    async with client_of(namespace.plane, first) as client:
        assert await client.items(namespace.path("v1", "Pod")) == []
    await access.revoke()
    await access.rotate()
    assert access.token != first
    assert access.file.read_text() == access.token
    assert access.kubeconfig().read_text() == kubeconfig
    async with client_of(namespace.plane, first) as client:
        await until(lambda: unknown(client, namespace), "the first token counts no more")
    async with client_of(namespace.plane, access.token) as client:
        assert await client.items(namespace.path("v1", "Pod")) == []


async def unknown(client: KubeClient, namespace: Namespace) -> bool:
    try:
        await client.items(namespace.path("v1", "Pod"))
    except Refused as refused:
        return refused.status == 401
    return False


async def test_files_as_in_a_pod(namespace: Namespace) -> None:
    access = await namespace.access([rule("", "pods", "list")])
    folder, variables = access.in_cluster()
    before = there(SERVICE_ACCOUNT_FOLDER)
    script = f"cat {SERVICE_ACCOUNT_FOLDER}/namespace {SERVICE_ACCOUNT_FOLDER}/token; ls -a /run"
    process = await asyncio.create_subprocess_exec(
        *in_own_mounts(["sh", "-c", script], folder), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.decode().startswith(namespace.name + access.token)
    assert there(SERVICE_ACCOUNT_FOLDER) == before, "the mount is not the child's alone"
    assert f"https://127.0.0.1:{variables['KUBERNETES_SERVICE_PORT']}" == namespace.plane.url


def there(path: str) -> list[str]:
    """Names of the files in a folder, which may be missing; one that this machine has of its own counts."""
    return sorted(str(each.resolve()) for each in Path(path).glob("*"))


async def test_the_audit_log_tells_who_asked_for_what(namespace: Namespace) -> None:
    access = await namespace.access([rule("", "pods", "list watch")])
    async with client_of(namespace.plane, access.token) as client:
        await client.items(namespace.path("v1", "Pod"))
        with pytest.raises(Refused):
            await client.items(namespace.path("v1", "Secret"))
        await namespace.create(pod("late", LABELS, served=False))
        async with aclosing(client.watch(namespace.path("v1", "Pod"), "0")) as events:
            kind, thing = await anext(events)
            assert (kind, thing["metadata"]["name"]) == ("ADDED", "late")
    wanted = {
        ("list", "pods", namespace.name, 200),
        ("list", "secrets", namespace.name, 403),
        ("watch", "pods", namespace.name, 200),
    }
    # A line is written when a request has ended, which its client may know earlier.
    await until(lambda: seen(namespace, access) >= wanted, "all that was asked is in the log")
    assert seen(namespace, access) == wanted


def seen(namespace: Namespace, access: Access) -> set[tuple[str, str, str, int]]:
    return {
        (each.verb, each.object_ref.resource, each.object_ref.namespace, each.status)
        for each in namespace.plane.audit(access.user)
    }


# -- pods ------------------------------------------------------------------------------------------


async def test_kwok_makes_pods_ready_with_addresses(namespace: Namespace) -> None:
    await namespace.create(deployment("engines", 3, LABELS, served=False))
    await namespace.create(pod("chosen", LABELS, served=False, annotations={POD_IP: "127.66.0.7"}))
    await namespace.create(pod("held", LABELS, served=False, annotations={HOLD: ""}))

    async def four_ready() -> bool:
        return len(await namespace.ready_pods()) == 4

    await until(four_ready, "the pods are ready")
    pods = {
        each["metadata"]["name"]: each for each in await namespace.client.items(namespace.path("v1", "Pod"))
    }
    assert pods["chosen"]["status"]["podIP"] == "127.66.0.7"
    assert pods["held"]["status"]["phase"] == "Pending"
    addresses = {each["status"].get("podIP") for name, each in pods.items() if name.startswith("engines-")}
    assert len(addresses) == 3
    assert all(address.startswith("127.64.") for address in addresses)
    await namespace.annotate("held", {HOLD: None})
    await until(lambda: is_ready(namespace, "held"), "the held pod is ready")
    await namespace.delete("v1", "Pod", "held")
    await until(lambda: is_gone(namespace, "held"), "the deleted pod is gone")


async def is_ready(namespace: Namespace, name: str) -> bool:
    return name in await namespace.ready_pods()


async def is_gone(namespace: Namespace, name: str) -> bool:
    return name not in {
        each["metadata"]["name"] for each in await namespace.client.items(namespace.path("v1", "Pod"))
    }


async def test_pods_answer_while_they_are_there(namespace: Namespace) -> None:
    async with Kubelet(namespace.client, namespace.name, linger_s=GRACE_S) as kubelet:
        await namespace.create(pod("a", LABELS, ports=(8000, 8001), grace_s=GRACE_S))
        await until(lambda: is_ready(namespace, "a"), "the pod is ready")
        address = kubelet.addresses["a"]
        for port in (8000, 8001):
            sent = await one(f"http://{address}:{port}")
            assert (sent.status, sent.pod, sent.port) == (200, "a", port)
        await namespace.annotate("a", {HOLD: ""})
        await until(lambda: is_not_ready(namespace, "a"), "the held pod is not ready")
        assert (await one(f"http://{address}:8000")).ok
        await namespace.annotate("a", {HOLD: None})
        await until(lambda: is_ready(namespace, "a"), "the pod is ready again")
        await namespace.delete("v1", "Pod", "a")
        there = await namespace.client.get(namespace.path("v1", "Pod", "a"))
        assert there["metadata"]["deletionTimestamp"]
        assert (await one(f"http://{address}:8000")).ok, "its preStop hook runs still"
        kubelet.let_go.set()
        await until(lambda: is_gone(namespace, "a"), "the pod is gone")
        assert not (await one(f"http://{address}:8000")).ok
        assert not kubelet.engines
        assert not kubelet.addresses


async def is_not_ready(namespace: Namespace, name: str) -> bool:
    return not await is_ready(namespace, name)


async def test_running_requests_end_within_the_grace_of_their_pod(namespace: Namespace) -> None:
    async with Kubelet(namespace.client, namespace.name, linger_s=0.0) as kubelet:
        for name, grace_s in (("patient", 30), ("killed", 0)):
            await namespace.create(pod(name, LABELS))
            await until(lambda name=name: is_ready(namespace, name), "the pod is ready")  # type: ignore[misc]
            engine = kubelet.engines[name]
            assert isinstance(engine, Light)
            engine.go_on.clear()
            asked = asyncio.create_task(one(f"http://{kubelet.addresses[name]}:8000"))
            await until(lambda engine=engine: engine.seen, "the request has come")  # type: ignore[misc]
            await namespace.delete("v1", "Pod", name, grace_s)
            if grace_s:
                await until(lambda engine=engine: engine.stopping, "it is told to end")  # type: ignore[misc]
                engine.go_on.set()
            assert (await asked).ok == bool(grace_s)
            await until(lambda name=name: is_gone(namespace, name), "the pod is gone")  # type: ignore[misc]
            await until(lambda: not kubelet.engines, "its engine has ended")


async def test_a_deployment_rolls_over_served_pods(namespace: Namespace) -> None:
    async with Kubelet(namespace.client, namespace.name, light, linger_s=0.1) as kubelet:
        await namespace.create(deployment("engines", 2, LABELS))
        await until(lambda: len(kubelet.engines) == 2, "two engines run")
        first = {*kubelet.engines}
        patch = {"spec": {"template": {"metadata": {"annotations": {"generation": "2"}}}}}
        await namespace.change(namespace.path("apps/v1", "Deployment", "engines"), patch)
        await until(
            lambda: len(kubelet.engines) == 2 and not first & {*kubelet.engines},
            "both engines are other ones",
        )
        assert len(await namespace.ready_pods()) >= 2


# -- the processes ---------------------------------------------------------------------------------


async def test_killed_parts_come_back_with_all_there_was(
    mortal_plane: ControlPlane, namespace: Namespace
) -> None:
    async with Kubelet(namespace.client, namespace.name) as kubelet:
        await namespace.create(pool("pool", LABELS))
        await namespace.create(pod("a", LABELS))
        await until(lambda: is_ready(namespace, "a"), "the pod is ready")
        address = kubelet.addresses["a"]
        watched: list[str] = []
        watching = asyncio.create_task(watch_pods(namespace, watched))
        await until(lambda: watched, "the watch is open")
        mortal_plane.kill(API_SERVER)
        assert (await one(f"http://{address}:8000")).ok
        with pytest.raises(aiohttp.ClientError):
            await namespace.client.get("/readyz")
        async with asyncio.timeout(60):
            await watching
        mortal_plane.spawn(API_SERVER)
        await asyncio.to_thread(mortal_plane.wait_ready, API_SERVER)
        mortal_plane.kill(ETCD)
        mortal_plane.revive()
        await asyncio.to_thread(mortal_plane.wait_ready)
        await until(lambda: answers(namespace.client), "the API server has found etcd again")
        found = await namespace.client.items(namespace.path(POOL_VERSION, "InferencePool"))
        assert [each["metadata"]["name"] for each in found] == ["pool"]
        await namespace.create(pod("b", LABELS))
        await until(lambda: is_ready(namespace, "b"), "the kubelet goes on")
        assert sorted(kubelet.engines) == ["a", "b"]
        assert (await one(f"http://{kubelet.addresses['b']}:8000")).pod == "b"


async def watch_pods(namespace: Namespace, seen: list[str]) -> None:
    """Names of the pods in the events of one watch, until it ends."""
    with suppress(aiohttp.ClientError):
        async for _, thing in namespace.client.watch(namespace.path("v1", "Pod"), "0"):
            seen.append(thing["metadata"]["name"])


async def answers(client: KubeClient) -> bool:
    try:
        await client.items("/api/v1/nodes")
    except (Refused, aiohttp.ClientError):
        return False
    return True


def test_a_part_that_ends_is_told_with_its_last_words(tmp_path: Path, control_plane: ControlPlane) -> None:
    broken = ControlPlane(tmp_path, control_plane.programs, parts=[ETCD])
    (tmp_path / "etcd").write_text("no folder")
    with pytest.raises(
        ControlPlaneError, match=r"etcd ended with status \d+; its last output:\n(?s:.*)not a directory"
    ):
        broken.start()
