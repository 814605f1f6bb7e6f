"""Endpoints told one event after another, against endpoints worked out anew from all pods that are there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp import names
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime.kube import members as members_module
from epp.runtime.kube.members import Members
from epp.runtime.kube.objects import Pod

PORTS = ((8000,), (8000, 8001), (8001, 8000), (8001,), (0, 8001, 8001), ())
ADDRESSES = ("10.0.0.1", "10.0.0.2", "fd00::1", "", "nowhere")
ANNOTATIONS = (None, "8000", "8001, 8000", "", "9000,8001x")


@dataclass(frozen=True)
class Fact:
    """A pod as the test thinks of it."""

    uid: int
    name: str
    created: int
    address: str = ADDRESSES[0]
    ready: bool = True
    going: bool = False
    label: str = "a"
    annotation: str | None = None
    declared: int = 0
    beat: int = 0
    node: str = ""


def written(fact: Fact) -> Pod:
    """The pod as the API server tells it; `beat` is something that nobody reads."""
    annotations = {"beat": str(fact.beat)}
    if fact.annotation is not None:
        annotations[names.ACTIVE_PORTS[0]] = fact.annotation
    pod = {
        "metadata": {
            "uid": str(fact.uid),
            "name": fact.name,
            "namespace": "llm",
            "creationTimestamp": f"2026-01-{fact.created:02}T00:00:00Z",
            "deletionTimestamp": "2026-02-01T00:00:00Z" if fact.going else None,
            "labels": {"label": fact.label},
            "annotations": annotations,
        },
        "spec": {"containers": [{"ports": [{"containerPort": fact.declared}]}] if fact.declared else []},
        "status": {
            "podIP": fact.address,
            "hostIP": fact.node,
            "conditions": [{"type": "Ready", "status": str(fact.ready)}],
        },
    }
    return msgspec.convert(pod, Pod)


def expected(facts: Mapping[int, Fact], ports: tuple[int, ...]) -> dict[str, Endpoint]:
    """By `address:port`, from nothing but the pods there are."""
    claims: dict[str, list[tuple[bool, int, str, Endpoint]]] = {}
    for fact in facts.values():
        if not fact.ready or fact.going or fact.address in {"", "nowhere"}:
            continue
        said = {
            None: {8000, 8001},
            "8000": {8000},
            "8001, 8000": {8000, 8001},
            "": set(),
            "9000,8001x": {8001},
        }
        for port in {8000, 8001} & set(ports) & said[fact.annotation]:
            endpoint = Endpoint(
                f"{fact.uid}:{port}",
                f"{fact.name}-rank-{ports.index(port)}",
                "llm",
                fact.address,
                port,
                {"label": fact.label},
                fact.name,
                fact.node,
            )
            claim = fact.declared == port, fact.created, str(fact.uid), endpoint
            claims.setdefault(endpoint.host_port, []).append(claim)
    return {place: max(rivals, key=lambda claim: claim[:3])[3] for place, rivals in claims.items()}


changes = st.sampled_from(
    ["make", "make", "make", "remove", "recreate", "address", "ready", "going", "label", "annotation"]
    + ["declared", "beat", "node", "ports", "listed anew"]
)
step = st.tuples(changes, st.integers(0, 30), st.integers(0, 30))
steps = st.lists(step, max_size=8) | st.lists(step, min_size=10, max_size=40)


class Story:
    """Pods that change as the steps say."""

    def __init__(self) -> None:
        self.facts: dict[int, Fact] = {}
        self.pods: dict[str, Pod] = {}
        self.ports = PORTS[0]
        self._made = 0

    def play(self, change: str, which: int, value: int) -> None:
        fact = list(self.facts.values())[which % len(self.facts)] if self.facts else None
        match change:
            case "make":
                self._make(f"pod-{self._made}", value)
            case "ports":
                self.ports = PORTS[value % len(PORTS)]
            case "listed anew":
                self.pods = {
                    uid: msgspec.convert(msgspec.to_builtins(pod), Pod) for uid, pod in self.pods.items()
                }
            case "remove" | "recreate" if fact is not None:
                del self.facts[fact.uid], self.pods[str(fact.uid)]
                if change == "recreate":
                    self._make(fact.name, value)
            case _ if fact is not None:
                self._tell(self._changed(fact, change, value))

    def _changed(self, fact: Fact, change: str, value: int) -> Fact:
        match change:
            case "address":
                return replace(fact, address=ADDRESSES[value % len(ADDRESSES)])
            case "ready":
                return replace(fact, ready=not fact.ready)
            case "going":
                return replace(fact, going=True)
            case "label":
                return replace(fact, label="ab"[value % 2])
            case "annotation":
                return replace(fact, annotation=ANNOTATIONS[value % len(ANNOTATIONS)])
            case "node":
                return replace(fact, node=ADDRESSES[value % 4])
            case "declared":
                return replace(fact, declared=(0, 8000, 8001)[value % 3])
        return replace(fact, beat=value)

    def _make(self, name: str, value: int) -> None:
        self._made += 1
        address = ADDRESSES[value % 3]
        self._tell(Fact(self._made, name, 1 + value % 5, address, declared=(0, 8000, 8001)[value // 3 % 3]))

    def _tell(self, fact: Fact) -> None:
        self.facts[fact.uid] = fact
        self.pods = {**self.pods, str(fact.uid): written(fact)}


def follow(members: Members, story: list[tuple[str, int, int]]) -> None:
    """What was told last is what is there, and nothing is told where nothing changed."""
    going_on = Story()
    told: tuple[Endpoint, ...] = ()
    store = PoolStore()
    for step in story:
        going_on.play(*step)
        before = told
        if members.update(dict(going_on.pods), going_on.ports):
            told = members.endpoints
            assert told != before
            store.sync(told, 0.0)
        right = expected(going_on.facts, going_on.ports)
        assert {endpoint.host_port: endpoint for endpoint in told} == right
        assert len(told) == len(right)
        assert {endpoint.uid: endpoint for _, endpoint in store.roster} == {
            endpoint.uid: endpoint for endpoint in right.values()
        }
        afresh = Members()
        afresh.update(dict(reversed(going_on.pods.items())), going_on.ports)
        assert (afresh.endpoints, afresh.warnings) == (told, members.warnings)


@settings(max_examples=150)
@given(steps)
def test_members_are_what_is_there(story: list[tuple[str, int, int]]) -> None:
    follow(Members(), story)


# -- faults ---------------------------------------------------------------------------------------


def keeps_old_ports(patch: pytest.MonkeyPatch) -> type[Members]:
    class Faulty(Members):
        def update(self, pods: Mapping[str, Pod], ports: tuple[int, ...]) -> bool:
            return super().update(pods, self._ports or ports)

    return Faulty


def keeps_pods_that_are_gone(patch: pytest.MonkeyPatch) -> type[Members]:
    class Faulty(Members):
        def update(self, pods: Mapping[str, Pod], ports: tuple[int, ...]) -> bool:
            known = {uid: member.pod for uid, member in self._members.items()}
            return super().update(known | dict(pods), ports)

    return Faulty


def does_not_look_at_labels(patch: pytest.MonkeyPatch) -> type[Members]:
    patch.setattr(
        members_module,
        "_differ",
        lambda one, other: [e.host_port for e in one.endpoints] != [e.host_port for e in other.endpoints],
    )
    return Members


def the_first_at_an_address_stays(patch: pytest.MonkeyPatch) -> type[Members]:
    patch.setattr(members_module._Member, "precedence", lambda self, port: (False, "", ""))
    return Members


def forgets_what_decides_between_rivals(patch: pytest.MonkeyPatch) -> type[Members]:
    patch.setattr(members_module, "_differ", lambda one, other: one.endpoints != other.endpoints)
    return Members


def takes_pods_that_are_going(patch: pytest.MonkeyPatch) -> type[Members]:
    patch.setattr(
        Pod,
        "ready",
        property(
            lambda pod: any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
        ),
    )
    return Members


def knows_a_pod_by_its_name(patch: pytest.MonkeyPatch) -> type[Members]:
    class Faulty(Members):
        def update(self, pods: Mapping[str, Pod], ports: tuple[int, ...]) -> bool:
            named = {
                pod.metadata.uid: msgspec.structs.replace(
                    pod, metadata=msgspec.structs.replace(pod.metadata, uid=pod.metadata.name)
                )
                for pod in pods.values()
            }
            return super().update(named, ports)

    return Faulty


FAULTS: list[Callable[[pytest.MonkeyPatch], type[Members]]] = [
    keeps_old_ports,
    keeps_pods_that_are_gone,
    does_not_look_at_labels,
    the_first_at_an_address_stays,
    forgets_what_decides_between_rivals,
    takes_pods_that_are_going,
    knows_a_pod_by_its_name,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: Callable[[pytest.MonkeyPatch], type[Members]]) -> None:
    @settings(phases=[Phase.generate], max_examples=300, derandomize=True, database=None)
    @given(steps)
    def finds(story: list[tuple[str, int, int]]) -> None:
        follow(faulty(), story)

    with pytest.MonkeyPatch.context() as patch:
        faulty = fault(patch)
        with pytest.raises(AssertionError):
            finds()
