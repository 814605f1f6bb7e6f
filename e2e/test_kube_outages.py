"""Kubernetes goes away, tokens end, pickers end: the traffic does not notice."""

import asyncio
import base64
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from e2e.kube import PICKER_RULES, POLICY_VERSION, POOL_VERSION, Namespace, model_rewrite, objective, pool
from e2e.kube_access import Access
from e2e.kube_client import Refused, Thing, kube_client
from e2e.kube_lease import hands, leads
from e2e.kube_line import LABELS, POOL, Line, line
from e2e.kube_load import PodLoad
from e2e.kube_picker import ClusterPicker, pool_flags, proxied, running
from e2e.kube_pods import HOLD, Kubelet, pod
from e2e.kube_relay import relayed
from e2e.kube_rights import judged
from e2e.pages import has_ready, total, until
from epp import names
from epp.payload.rewrite import ModelRewrite
from epp.pool.records import Endpoint
from epp.runtime.kube.access import of_kubeconfig
from epp.runtime.kube.api import KubeApi
from epp.runtime.kube.cluster import Cluster, PoolTarget
from epp.runtime.kube.policies import Verdict
from tools.control_plane import API_SERVER, ETCD, ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

LINGERS_S: Final = 120
"""A preStop hook, and grace, of pods that are marked to go and serve on to the end of the test."""
AWAY_S: Final = 3.0
DRAIN_S: Final = 10
"""Long enough that Envoy notices, however busy the machine."""
SILENCE_S: Final = 12.0
"""Longer than the API server needs to agree to a watch, however busy the machine."""
MANY: Final = 90
"""Requests in a row that tell who is asked: one of three pods is in none of them once in 10^14 times."""
_OF_KUBERNETES: Final = ("epp.runtime.in_cluster", "epp.runtime.kube.lease")


# -- what pickers say ------------------------------------------------------------------------------


def warnings(picker: ClusterPicker) -> list[str]:
    """Of the log, without what it says of the configuration."""
    lines = (json.loads(text) for text in picker.log_lines())
    return [each["msg"] for each in lines if each["level"] == "warning" and each["logger"] in _OF_KUBERNETES]


def collections(namespace: Namespace) -> set[str]:
    """Where a picker follows things."""
    kinds = ((POOL_VERSION, "InferencePool"), (POLICY_VERSION, "InferenceObjective"))
    more = (POLICY_VERSION, "InferenceModelRewrite")
    return {namespace.path("v1", "Pod"), *(namespace.path(*kind) for kind in (*kinds, more))}


def told(picker: ClusterPicker, path: str) -> tuple[list[str], list[str]]:
    """What the log says of troubles with a collection, and that they are over."""
    about = [text for text in warnings(picker) if f"{path}:" in text]
    return [text for text in about if "followed again" not in text], [
        text for text in about if "followed again" in text
    ]


async def until_told(picker: ClusterPicker, namespace: Namespace, word: str) -> None:
    """Every collection is in trouble, for a reason that has this word."""
    for path in collections(namespace):
        await until(
            lambda path=path: any(word in text for text in told(picker, path)[0]),  # type: ignore[misc]
            f"the log says {word!r} of {path}",
        )


async def until_over(picker: ClusterPicker, namespace: Namespace, times: int = 1) -> None:
    for path in collections(namespace):
        await until(lambda path=path: len(told(picker, path)[1]) >= times, f"{path} is followed again")  # type: ignore[misc]


def assert_told_once(picker: ClusterPicker, namespace: Namespace) -> None:
    """Each reason once, and once that it is over; of the lease, too."""
    assert repeated(picker) == set()
    for path in collections(namespace):
        troubles, over = told(picker, path)
        assert troubles
        assert len(over) == 1


def repeated(picker: ClusterPicker) -> set[str]:
    return {text for text, times in Counter(warnings(picker)).items() if times > 1}


def assert_well(load: PodLoad, after_s: float = 0.0, before_s: float = float("inf")) -> None:
    """No request that began then failed."""
    begun, failed = load.begun(after_s, before_s), load.failed(after_s, before_s)
    seconds = sorted(round(each.started_s - load.sent[0].started_s, 1) for each in failed)
    assert not failed, (
        f"{len(failed)} of {len(begun)} failed, {seconds[0]} to {seconds[-1]} s in: {failed[0]}"
    )


# -- the API server --------------------------------------------------------------------------------


async def test_an_api_server_that_is_killed_and_comes_back(
    mortal_plane: ControlPlane, namespace: Namespace, envoy: Path
) -> None:
    async with line(namespace, envoy, linger_s=LINGERS_S) as made, PodLoad(made.url) as load:
        picker = made.pickers[0]
        await load.answered(60)
        killed_s = time.monotonic()
        mortal_plane.kill(API_SERVER)
        await until_told(picker, namespace, "what is known stays in use")
        await load.answered(MANY)
        assert await picker.serves()
        mortal_plane.spawn(API_SERVER)
        await asyncio.to_thread(mortal_plane.wait_ready, API_SERVER)
        back_s = time.monotonic()
        assert {*load.pods(killed_s, back_s)} == {"pod-0", "pod-1", "pod-2"}
        # At once: the picker may be waiting still before it asks again.
        await made.pod("pod-3")
        await made.delete_pod("pod-1", LINGERS_S)
        await namespace.annotate("pod-0", {HOLD: ""})
        await until(lambda: latest(load) == {"pod-2", "pod-3"}, "the picker knows of the changes")
        print(f"API server back: changes made at once were known {time.monotonic() - back_s:.1f} s later")
        again_s = await namespace.annotate("pod-0", {HOLD: None})
        await load.comes_to({"pod-0", "pod-2", "pod-3"}, again_s)
        await until_over(picker, namespace)
    assert_well(load)
    assert_told_once(picker, namespace)


def latest(load: PodLoad) -> set[str]:
    return {each.pod for each in load.latest(0.0)}


async def test_what_changes_while_nothing_is_heard_and_nobody_remembers(
    mortal_plane: ControlPlane, namespace: Namespace, envoy: Path
) -> None:
    """The picker's watches are too old for an API server that began after the changes (410)."""
    async with (
        relayed(namespace, "picker-0") as (behind, (relay,)),
        line(behind, envoy, linger_s=LINGERS_S) as made,
        PodLoad(made.url) as load,
    ):
        await load.answered(60)
        await relay.cut()
        listed = lists(made)
        await made.pod("pod-3")
        await made.delete_pod("pod-1", LINGERS_S)
        await namespace.annotate("pod-0", {HOLD: ""})
        await until(lambda: is_held(namespace, "pod-0"), "the held pod is not ready")
        mortal_plane.kill(API_SERVER)
        mortal_plane.spawn(API_SERVER)
        await asyncio.to_thread(mortal_plane.wait_ready, API_SERVER)
        assert latest(load) == {"pod-0", "pod-1", "pod-2"}
        await relay.heal()
        await until(lambda: latest(load) == {"pod-2", "pod-3"}, "the picker knows of the changes")
        again_s = await namespace.annotate("pod-0", {HOLD: None})
        await load.comes_to({"pod-0", "pod-2", "pod-3"}, again_s)
        await until_over(made.pickers[0], namespace)
    assert_well(load)
    assert lists(made)["pods"] > listed["pods"]
    assert_told_once(made.pickers[0], namespace)


async def is_held(namespace: Namespace, name: str) -> bool:
    return name not in await namespace.ready_pods()


def lists(made: Line) -> Counter[str]:
    """How often a picker has listed what it follows, by resource."""
    asked = made.namespace.plane.audit(made.access[0].user)
    return Counter(each.object_ref.resource for each in asked if each.verb == "list" and each.status == 200)


async def test_etcd_that_is_killed_and_an_api_server_that_is_frozen(
    mortal_plane: ControlPlane, namespace: Namespace, envoy: Path
) -> None:
    async with line(namespace, envoy, linger_s=LINGERS_S) as made, PodLoad(made.url) as load:
        await load.answered(60)
        mortal_plane.kill(API_SERVER, signal.SIGSTOP)
        await asyncio.sleep(AWAY_S)
        mortal_plane.kill(API_SERVER, signal.SIGCONT)
        held_s = await namespace.annotate("pod-0", {HOLD: ""})
        await load.comes_to({"pod-1", "pod-2"}, held_s)
        # A lease that is not renewed in time is told: its term goes on.
        assert [text for text in warnings(made.pickers[0]) if not text.startswith("lease ")] == []

        mortal_plane.kill(ETCD)
        await asyncio.sleep(AWAY_S)
        mortal_plane.revive()
        await asyncio.to_thread(mortal_plane.wait_ready, ETCD, API_SERVER)
        back_s = time.monotonic()
        await made.delete_pod("pod-1", LINGERS_S)
        await made.pod("pod-3")
        await until(lambda: "pod-3" in load.pods(back_s), "the new pod gets requests")
        heard_s = time.monotonic()
        print(f"etcd back: a new pod is used {heard_s - back_s:.1f} s later")
        await load.comes_to({"pod-2", "pod-3"}, heard_s)
        assert await made.pickers[0].serves()
    assert_well(load)


class Watching(KubeApi):
    """Notes in `agreed` which collections are watched: the server has said so."""

    agreed: set[str]

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[list[bytes], None]:
        async with aclosing(super().watch(path, query)) as batches:
            async for lines in batches:
                self.agreed.add(path)
                yield lines


class Heard:
    """What a cluster told last."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.known = False

    def endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self.names = {each.name.rpartition("-rank-")[0] for each in endpoints}

    def pool(self, known: bool, app_protocol: str) -> None:
        self.known = known

    def policies(self, objectives: Mapping[str, int], rewrites: tuple[ModelRewrite, ...]) -> None: ...

    def verdicts(self, verdicts: tuple[Verdict, ...]) -> None: ...


async def test_a_connection_that_dies_without_a_word(namespace: Namespace) -> None:
    """With a limit of silence that a test can wait for; a picker's is longer."""
    async with (
        relayed(namespace, "picker") as (behind, (relay,)),
        Kubelet(namespace.client, namespace.name),
    ):
        access = await behind.access()
        await namespace.create(pool(POOL, LABELS))
        for name in ("a", "b"):
            await namespace.create(pod(name, LABELS))
        api = Watching(await of_kubeconfig(str(access.kubeconfig()), {}), silence_s=SILENCE_S)
        api.agreed = set()
        hears, said = Heard(), list[str]()
        cluster = Cluster(api, PoolTarget(POOL, namespace.name), hears, said=said.append)
        following = asyncio.create_task(cluster.run())
        try:
            await until(lambda: hears.known and hears.names == {"a", "b"}, "the pods are known")
            await until(lambda: api.agreed == collections(namespace), "all is watched")
            relay.silence()
            await namespace.delete("v1", "Pod", "a", 0)
            await namespace.create(pod("c", LABELS))
            await until(lambda: hears.names == {"b", "c"}, "what happened meanwhile is known")
            assert said == []
        finally:
            following.cancel()
            await asyncio.wait([following])
            await api.close()


async def test_a_picker_that_starts_without_an_api_server(namespace: Namespace, envoy: Path) -> None:
    await namespace.create(pool(POOL, LABELS))
    await namespace.create(pod("pod-0", LABELS))
    async with relayed(namespace, "picker") as (behind, (relay,)):
        await relay.cut()
        access = await behind.access()
        picker = ClusterPicker(namespace.folder, access, pool_flags(POOL, namespace.name))
        async with Kubelet(namespace.client, namespace.name), running(picker, serving=False):
            async with proxied(envoy, picker) as url, PodLoad(url, lanes=2) as load:
                await until(lambda: trouble_of_pool(picker, namespace), "the log says that nothing answers")
                assert not await picker.serves()
                assert await picker.serves(names.LIVENESS)
                await load.answered(5)
                assert {each.status // 100 for each in load.sent} == {5}
                await relay.heal()
                await until(picker.serves, "the picker serves")
                await until(lambda: load.pods(), "requests are answered")
                answered_s = time.monotonic()
                await load.answered(20)
            assert_well(load, answered_s)
            said = warnings(picker)
            assert repeated(picker) == set()
            assert any("tells again what it serves" in text for text in said)
            assert len(said) <= 6, said


def trouble_of_pool(picker: ClusterPicker, namespace: Namespace) -> bool:
    path = namespace.path(POOL_VERSION, "InferencePool")
    return any("nothing is known yet" in text for text in told(picker, path)[0])


# -- tokens and rights -----------------------------------------------------------------------------


async def test_tokens_that_rotate_in_a_pod(namespace: Namespace, envoy: Path) -> None:
    async with (
        relayed(namespace, "picker-0") as (behind, (relay,)),
        line(behind, envoy, as_in_pod=True) as made,
        PodLoad(made.url, pause_s=0.05) as load,
    ):
        access = made.access[0]
        first, of_first = credential(access), parts(access)[1]["kubernetes.io"]["secret"]["name"]
        await access.rotate()
        assert credential(access) != first
        # Calls to keep the lease come one after the other: then none with the first token is under way.
        beginning = datetime.min.replace(tzinfo=UTC)
        await until(
            lambda: credential(access) in credentials(namespace, access, beginning), "the new token is used"
        )
        await namespace.delete("v1", "Secret", of_first)
        rotated = datetime.now(UTC)
        relay.reset()
        await made.pod("pod-3")
        await until(lambda: "pod-3" in load.pods(), "the new pod gets requests")
        assert credentials(namespace, access, rotated) == {credential(access)}
    assert_well(load)
    # A lease that was asked for as its connection ended is told.
    assert [text for text in warnings(made.pickers[0]) if not text.startswith("lease ")] == []


def credential(access: Access) -> str:
    return f"JTI={parts(access)[1]['jti']}"


def parts(access: Access) -> list[Thing]:
    """Head and claims of the account's token."""
    encoded = access.token.split(".")[:2]
    return [json.loads(base64.urlsafe_b64decode(each + "=" * (-len(each) % 4))) for each in encoded]


def credentials(namespace: Namespace, access: Access, since: datetime) -> set[str]:
    """Which tokens the requests of this account came with."""
    kind = "authentication.kubernetes.io/credential-id"
    lines = (namespace.plane.folder / "audit.log").read_bytes().split(b"\n")[:-1]
    asked = (json.loads(text) for text in lines if access.user.encode() in text)
    return {
        each["user"]["extra"][kind][0]
        for each in asked
        if each["user"]["username"] == access.user
        and datetime.fromisoformat(each["requestReceivedTimestamp"]) > since
    }


async def test_a_token_that_ends_and_rights_that_are_taken_away(namespace: Namespace, envoy: Path) -> None:
    async with (
        relayed(namespace, "picker-0") as (behind, (relay,)),
        line(behind, envoy, linger_s=LINGERS_S) as made,
        PodLoad(made.url, pause_s=0.05) as load,
    ):
        picker, access = made.pickers[0], made.access[0]
        # What is open stays open, whatever becomes of token and rights.
        replace_token(access, ended(access, namespace.plane))
        relay.reset()
        await until_told(picker, namespace, "401")
        assert await picker.serves()
        await access.rotate()
        await until_over(picker, namespace)

        await take_rights(namespace, access)
        await until(lambda: is_refused(namespace, access), "the API server knows that they are taken away")
        relay.reset()
        await until_told(picker, namespace, "; a Role has to allow list and watch")
        assert await picker.serves()
        deleted_s = await made.delete_pod("pod-0", LINGERS_S)
        await load.answered(MANY)
        assert {*load.pods(deleted_s)} == {"pod-0", "pod-1", "pod-2"}
        await access.allow(PICKER_RULES)
        await until_over(picker, namespace, times=2)
        await load.comes_to({"pod-1", "pod-2"}, time.monotonic())
    assert_well(load)
    assert all("again" in text.split()[-1] for text in repeated(picker)), "only that it is over is told twice"
    for path in collections(namespace):
        troubles, _ = told(picker, path)
        assert [text.split()[2] for text in troubles] == ["401", "403"], troubles


def ended(access: Access, plane: ControlPlane) -> str:
    """The account's token as if it had been given two hours ago for one."""
    head, claims = parts(access)
    hour_s = 3600
    before = {key: claims[key] - 2 * hour_s for key in ("iat", "nbf")} | {"exp": claims["iat"] - hour_s}
    signed = b".".join(_encoded(json.dumps(each).encode()) for each in (head, claims | before))
    key = load_pem_private_key((plane.folder / "sa.key").read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    both = decode_dss_signature(key.sign(signed, ECDSA(SHA256())))
    signature = _encoded(b"".join(each.to_bytes(32, "big") for each in both))
    return (signed + b"." + signature).decode()


def _encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def replace_token(access: Access, token: str) -> None:
    fresh = access.folder / "fresh"
    fresh.write_text(token)
    fresh.replace(access.folder / "..data" / "token")


async def take_rights(namespace: Namespace, access: Access) -> None:
    """All roles of an account."""
    path = namespace.path("rbac.authorization.k8s.io/v1", "RoleBinding")
    for each in await namespace.client.items(path):
        if any(subject["name"] == access.name for subject in each["subjects"]):
            await namespace.client.delete(f"{path}/{each['metadata']['name']}")


async def is_refused(namespace: Namespace, access: Access) -> bool:
    """Whether the account may not list pods: the API server, too, learns of roles by watching them."""
    async with kube_client(namespace.plane.url, namespace.plane.ca, access.token) as client:
        try:
            await client.items(namespace.path("v1", "Pod"))
        except Refused as refused:
            return refused.status == 403
    return False


# -- pickers ---------------------------------------------------------------------------------------


async def test_pickers_that_restart_one_after_the_other(namespace: Namespace, envoy: Path) -> None:
    flags = (f"--drain-timeout={DRAIN_S}s",)
    async with line(namespace, envoy, replicas=2, flags=flags) as made, PodLoad(made.url) as load:
        for picker in made.pickers:
            await load.answered(60)
            picker.child.send(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await picker.child.wait() == 0
            await load.answered(60)
            await picker.start_serving()
            await until(lambda picker=picker: is_asked(picker), "the one that was started again is asked")  # type: ignore[misc]
        await load.answered(60)
        killed_s = time.monotonic()
        await made.pickers[0].child.stop(signal.SIGKILL)
        # Envoy asks the dead one until it finds its health port shut.
        well_s = await load.is_well(killed_s)
        lasted_s = max((each.started_s for each in load.failed(killed_s)), default=killed_s) - killed_s
        print(f"picker killed: requests that began up to {lasted_s:.1f} s later failed")
        await load.comes_to({"pod-0", "pod-1", "pod-2"}, well_s)
    assert [each for each in load.failed() if each.ended_s < killed_s] == []
    assert_well(load, well_s)


async def is_asked(picker: ClusterPicker) -> bool:
    return await total(picker, "request_total") > 0


async def test_one_of_two_pickers_loses_the_api_server(namespace: Namespace, envoy: Path) -> None:
    """What it does not hear of, it finds out from engines that do not answer; the other one hears of it."""
    async with (
        relayed(namespace, "picker-0") as (behind, (relay,)),
        line(behind, envoy, replicas=2) as made,
        PodLoad(made.url) as load,
    ):
        lone, other = made.pickers
        await load.answered(60)
        await relay.cut()
        await until_told(lone, namespace, "what is known stays in use")
        cut_s = time.monotonic()
        await made.pod("pod-3")
        await until(lambda: has_ready(other, 4), "the other picker knows the new pod")
        assert await has_ready(lone, 3)
        # Of all requests few reach a pod that one of the two knows: no number of them makes it sure.
        await until(lambda: load.pods(cut_s).keys() == {*made.kubelet.engines}, "each pod is asked")
        assert await lone.serves()
        asked = await total(lone, "request_total")
        deleted_s = await made.delete_pod("pod-0")
        await until(lambda: has_ready(lone, 2), "the lone picker finds out that pod-0 answers no more")
        found_s = time.monotonic()
        print(f"a picker without API server found out that a pod had ended {found_s - deleted_s:.1f} s later")
        well_s = await load.is_well(found_s)
        await until(lambda: "pod-3" in load.pods(well_s), "the other picker knows more pods still")
        assert await total(lone, "request_total") > asked
        await relay.heal()
        await until_over(lone, namespace)
        await made.know(3)
        await load.comes_to({"pod-1", "pod-2", "pod-3"}, time.monotonic())
    assert [each for each in load.failed() if each.ended_s < deleted_s] == []
    assert_well(load, well_s)
    assert "pod-0" not in load.pods(well_s)


# -- who leads, and what it may do ------------------------------------------------------------------


async def accepted(namespace: Namespace, kind: str, name: str) -> bool:
    thing = await namespace.client.get(namespace.path(POLICY_VERSION, kind, name))
    return condition(thing, "Accepted").get("status") == "True"


def condition(thing: Thing, kind: str) -> Thing:
    found = [each for each in thing.get("status", {}).get("conditions", ()) if each["type"] == kind]
    return found[0] if found else {}


async def test_a_leader_that_ends_at_once_hands_over_all_the_same(namespace: Namespace, envoy: Path) -> None:
    async with (
        line(namespace, envoy, replicas=2, flags=("--drain-timeout=0s",)) as made,
        hands(namespace) as holders,
    ):
        await until(lambda: any(map(leads, made.pickers)), "one of the replicas leads")
        leader, other = sorted(made.pickers, key=leads, reverse=True)
        await leader.child.stop(signal.SIGTERM, grace_s=60)
        await until(lambda: leads(other), "handed over")
        await until(lambda: len(holders) >= 3, "the lease has passed from hand to hand")
        assert holders[-2] == "", "it was given back"


async def test_every_right_is_used_and_no_other_asked_for(namespace: Namespace, envoy: Path) -> None:
    async with line(namespace, envoy, replicas=1) as made:
        await namespace.create(objective("high", POOL, 10))
        rules = [{"targets": [{"modelRewrite": "lab/other"}]}]
        await namespace.create(model_rewrite("all", POOL, rules))
        for kind, name in (("InferenceObjective", "high"), ("InferenceModelRewrite", "all")):
            await until(
                lambda kind=kind, name=name: accepted(namespace, kind, name),  # type: ignore[misc]
                f"{kind} has its condition",
            )
        user = made.access[0].user
        # The lease is renewed every 2 s.
        await until(lambda: not judged(PICKER_RULES, namespace.plane.audit(user)).unused, "all are used")
        assert not judged(PICKER_RULES, namespace.plane.audit(user)).refused
