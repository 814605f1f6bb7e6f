"""Which connections the chart's network policies let through, by an evaluator of their own rules."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from tests.contract.test_chart_render import MATRIX, SERVICE, STANDALONE
from tests.data.chart.rendering import Object, objects, of_kind, one, values

RELEASE_NAMESPACE = "ns"
ADMIN_PORTS = (19000, 9004)
"""Ports that no container declares: Envoy's pages and the picker's own, both on the loopback interface."""


@dataclass(frozen=True)
class Peer:
    """Who opens a connection."""

    namespace: str
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def namespace_labels(self) -> Mapping[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace}


GATEWAY = Peer("gateway-infra", (("app", "gateway"),))
PROMETHEUS = Peer("monitoring", (("app", "prometheus"),))
CLIENT = Peer("clients", (("app", "chat"),))
NEIGHBOUR = Peer(RELEASE_NAMESPACE, (("app", "vllm-qwen3-32b"),))
PICKER = Peer(
    RELEASE_NAMESPACE,
    (
        ("app.kubernetes.io/name", "warmroute"),
        ("app.kubernetes.io/instance", "rel"),
        ("app.kubernetes.io/component", "endpoint-picker"),
    ),
)
PROXY = Peer(RELEASE_NAMESPACE, (*PICKER.labels[:2], ("app.kubernetes.io/component", "proxy")))
OTHER_PROXY = Peer("other", PROXY.labels)
NAMED = {
    "gateway": GATEWAY,
    "prometheus": PROMETHEUS,
    "client": CLIENT,
    "neighbour": NEIGHBOUR,
    "picker": PICKER,
    "proxy": PROXY,
    "other-proxy": OTHER_PROXY,
}


def selected(selector: Object, labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return dict(selector.get("matchLabels", {})).items() <= labels.items()


def admits(policies: list[Object], template: Object, port: int, peer: Peer) -> bool:
    """Whether a pod takes a connection: one rule of the policies that select it is enough; so is none."""
    metadata, containers = template["metadata"], template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for found in containers for each in found["ports"]}
    ruling = [
        policy["spec"] for policy in policies if selected(policy["spec"]["podSelector"], metadata["labels"])
    ]
    ruling = [spec for spec in ruling if "Ingress" in spec["policyTypes"]]
    return not ruling or any(
        _on_port(rule, port, ports) and _from(rule, peer)
        for spec in ruling
        for rule in spec.get("ingress", ())
    )


def _on_port(rule: Object, port: int, ports: Mapping[str, int]) -> bool:
    wanted = [ports.get(each["port"], each["port"]) for each in rule.get("ports", ())]
    return not wanted or port in wanted


def _from(rule: Object, peer: Peer) -> bool:
    return not rule.get("from") or any(_is(each, peer) for each in rule["from"])


def _is(wanted: Object, peer: Peer) -> bool:
    """One that names no namespace means the policy's."""
    assert set(wanted) <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in wanted:
        there = selected(wanted["namespaceSelector"], peer.namespace_labels)
    else:
        there = peer.namespace == RELEASE_NAMESPACE
    return there and selected(wanted.get("podSelector", {}), dict(peer.labels))


def connections(found: list[Object]) -> set[str]:
    """`peer->deployment:port` of all that are let through, of all ports that anything listens on."""
    policies = of_kind(found, "NetworkPolicy")
    return {
        f"{name}->{deployment}:{label}"
        for (deployment, label, port, template), (name, peer) in product(_ports(found), NAMED.items())
        if admits(policies, template, port, peer)
    }


def _ports(found: list[Object]) -> Iterator[tuple[str, str, int, Object]]:
    for each in of_kind(found, "Deployment"):
        template = each["spec"]["template"]
        listed = [port for one in template["spec"]["containers"] for port in one["ports"]]
        for port in listed:
            yield each["metadata"]["name"], port["name"], port["containerPort"], template
        for number in ADMIN_PORTS:
            yield each["metadata"]["name"], str(number), number, template


def of(who: str, *where: str) -> set[str]:
    return {f"{name}->{place}" for name in who.split() for place in where}


EVERYBODY = " ".join(NAMED)
INFRA = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway-infra"}}}]
SCRAPERS = [
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        "podSelector": {"matchLabels": {"app": "prometheus"}},
    }
]
CLIENTS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "clients"}}}]
NARROW = {"enabled": True, "extProcFrom": INFRA, "metricsFrom": SCRAPERS, "httpFrom": CLIENTS}
TOKENIZER = {"router": {"tokenizer": {"enabled": True, "modelName": "m"}}}
ZMQ = {"router": {"epp": {"extraContainerPorts": [{"name": "zmq", "containerPort": 5557}]}}}


def closed(*given: Object, policy: Object) -> list[Object]:
    return objects(values({"router": {"networkPolicy": policy}}, *given))


ASKED = ("rel-epp:grpc", "rel-epp:grpc-health")
WIDE = {"enabled": True}
CASES: dict[str, tuple[tuple[Object, ...], Object, set[str]]] = {
    "gateway": (
        (TOKENIZER, ZMQ),
        NARROW,
        of("gateway", *ASKED) | of("prometheus", "rel-epp:metrics") | of(EVERYBODY, "rel-epp:zmq"),
    ),
    "gateway-wide": ((), WIDE, of(EVERYBODY, *ASKED, "rel-epp:metrics")),
    "sidecar": (
        (STANDALONE, TOKENIZER),
        NARROW,
        of("gateway", *ASKED)
        | of("prometheus", "rel-epp:metrics", "rel-epp:proxy-ready")
        | of("client", "rel-epp:http"),
    ),
    "sidecar-wide": (
        (STANDALONE,),
        WIDE,
        of(EVERYBODY, "rel-epp:metrics", "rel-epp:proxy-ready", "rel-epp:http"),
    ),
    "service": (
        (SERVICE, TOKENIZER),
        NARROW,
        of("gateway proxy", *ASKED)
        | of("prometheus", "rel-epp:metrics", "rel-proxy:proxy-ready")
        | of("client", "rel-proxy:http"),
    ),
    "service-wide": (
        (SERVICE,),
        WIDE,
        of("proxy", *ASKED) | of(EVERYBODY, "rel-epp:metrics", "rel-proxy:proxy-ready", "rel-proxy:http"),
    ),
}
by_case = pytest.mark.parametrize("case", CASES)


@by_case
def test_exactly_these_connections_are_let_through(case: str) -> None:
    """Probes come from the pod's node, and what is inside a pod from there: those no policy is asked for."""
    given, policy, expected = CASES[case]
    assert connections(closed(*given, policy=policy)) == expected


@by_case
def test_what_pods_send_is_free(case: str) -> None:
    """To engines and their metrics, to the API server, to DNS, to who takes traces."""
    given, policy, _ = CASES[case]
    for each in of_kind(closed(*given, policy=policy), "NetworkPolicy"):
        assert each["spec"]["policyTypes"] == ["Ingress"]
        assert "egress" not in each["spec"]


def test_engines_are_left_alone() -> None:
    for case in CASES:
        given, policy, _ = CASES[case]
        for each in of_kind(closed(*given, policy=policy), "NetworkPolicy"):
            assert not selected(each["spec"]["podSelector"], dict(NEIGHBOUR.labels))


@pytest.mark.parametrize("case", ["gateway", "sidecar", "service-closed"])
def test_without_policies_all_is_let_through(case: str) -> None:
    found = objects(values(MATRIX[case], {"router": {"networkPolicy": {"enabled": False}}}))
    assert of_kind(found, "NetworkPolicy") == []
    assert any(name.startswith("client->rel-epp:grpc") for name in connections(found))


FAULTS: dict[str, Callable[[Any], object]] = {
    "selects no pod": lambda spec: spec["podSelector"]["matchLabels"].update({"a": "b"}),
    "a rule without ports": lambda spec: spec["ingress"][-1].pop("ports"),
    "a rule without peers": lambda spec: spec["ingress"][-1].pop("from"),
    "a port that is misspelt": lambda spec: spec["ingress"][0]["ports"][0].update(port="grcp"),
    "no rule": lambda spec: spec.pop("ingress"),
    "the label of another release": lambda spec: spec["ingress"][1]["from"][0]["podSelector"][
        "matchLabels"
    ].update({"app.kubernetes.io/instance": "other"}),
    "any namespace": lambda spec: spec["ingress"][1]["from"][0].update(namespaceSelector={}),
    "what goes out is ruled instead": lambda spec: spec.update(policyTypes=["Egress"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_be_noticed(fault: str) -> None:
    given, policy, expected = CASES["service"]
    found = copy.deepcopy(closed(*given, policy=policy))
    FAULTS[fault](one(found, "NetworkPolicy")["spec"])
    assert connections(found) != expected
