"""Endpoints of a pool's pods: which pods count, on which ports, under which name and identity."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from epp import names
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime.kube.members import Members, pool_ports
from epp.runtime.kube.objects import InferencePool, Pod

NEW, OLD = names.ACTIVE_PORTS


def pod(
    name: str = "vllm-0",
    ip: str | None = "10.0.0.5",
    *,
    node_ip: str | None = "192.168.0.1",
    ready: str | None = "True",
    uid: str = "",
    created: str = "2026-01-01T00:00:00Z",
    declares: tuple[int, ...] = (),
    sidecar: tuple[int, ...] = (),
    conditions: tuple[tuple[str, str], ...] = (),
    **metadata: Any,
) -> Pod:
    """A pod as the API server writes it, among much that nobody reads."""
    conditions = (*conditions, *((("Ready", ready),) if ready is not None else ()))
    spec: dict[str, Any] = {
        "nodeName": "node-1",
        "containers": [{"name": "engine", "image": "engine", "resources": {"limits": {"cpu": "4"}}}],
    }
    if declares:
        ports = [{"containerPort": port, "protocol": "TCP"} for port in declares]
        spec["containers"][0]["ports"] = ports
    if sidecar:
        ports = [{"containerPort": port} for port in sidecar]
        spec["initContainers"] = [{"name": "proxy", "restartPolicy": "Always", "ports": ports}]
    written = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": uid or f"uid-of-{name}",
            "resourceVersion": "17",
            "creationTimestamp": created,
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
            **metadata,
        },
        "spec": spec,
        "status": {
            "phase": "Running",
            "conditions": [{"type": kind, "status": status} for kind, status in conditions],
            **({} if node_ip is None else {"hostIP": node_ip, "hostIPs": [{"ip": node_ip}]}),
            **({} if ip is None else {"podIP": ip, "podIPs": [{"ip": ip}]}),
        },
    }
    return msgspec.json.decode(json.dumps(written), type=Pod)


def active(text: str, key: str = NEW) -> dict[str, str]:
    return {key: text}


def pod_endpoints(
    pods: Iterable[Pod], ports: tuple[int, ...]
) -> tuple[tuple[Endpoint, ...], tuple[str, ...]]:
    """Of pods that are all there at once."""
    members = Members()
    members.update({pod.metadata.uid: pod for pod in pods}, ports)
    return members.endpoints, members.warnings


def addresses(*pods: Pod, ports: tuple[int, ...] = (8000,)) -> list[str]:
    endpoints, _ = pod_endpoints(pods, ports)
    return [endpoint.host_port for endpoint in endpoints]


def warnings(*pods: Pod, ports: tuple[int, ...] = (8000,)) -> tuple[str, ...]:
    return pod_endpoints(pods, ports)[1]


def pool(**spec: Any) -> InferencePool:
    return msgspec.convert({"metadata": {"name": "pool", "namespace": "llm"}, "spec": spec}, InferencePool)


def test_each_target_port_of_a_ready_pod_is_an_endpoint() -> None:
    labels = {"app": "vllm", names.ROLE_LABEL: "decode", names.ENGINE_LABELS[1]: "sglang"}
    endpoints, told = pod_endpoints([pod(labels=labels, declares=(8000, 8001))], (8000, 8001))
    of_pod: Any = {"labels": labels, "pod": "vllm-0", "node_address": "192.168.0.1"}
    assert endpoints == (
        Endpoint("uid-of-vllm-0:8000", "vllm-0-rank-0", "llm", "10.0.0.5", 8000, **of_pod),
        Endpoint("uid-of-vllm-0:8001", "vllm-0-rank-1", "llm", "10.0.0.5", 8001, **of_pod),
    )
    assert told == ()


@pytest.mark.parametrize(
    ("node_ip", "address"),
    [(None, ""), ("", ""), ("FD00::0:1", "fd00::1"), ("10.1.2.3", "10.1.2.3")],
)
def test_a_node_may_not_be_known(node_ip: str | None, address: str) -> None:
    (endpoint,), told = pod_endpoints([pod(node_ip=node_ip)], (8000,))
    assert (endpoint.node_address, told) == (address, ())


def test_a_node_whose_address_is_none_costs_the_pod_nothing_but_its_node() -> None:
    (endpoint,), (text,) = pod_endpoints([pod(node_ip="\x1b[2J")], (8000,))
    assert (endpoint.host_port, endpoint.node_address) == ("10.0.0.5:8000", "")
    assert text.startswith("pods llm/vllm-0: status.hostIP: ")
    assert text.isprintable()


def test_eight_ports_are_eight_ranks() -> None:
    endpoints, _ = pod_endpoints([pod()], tuple(range(8000, 8008)))
    assert [endpoint.name for endpoint in endpoints] == [f"vllm-0-rank-{rank}" for rank in range(8)]


@pytest.mark.parametrize(
    "unfit",
    [
        pod(ready=None),
        pod(ready="False"),
        pod(ready="Unknown"),
        # All containers run, but a readiness gate is not met.
        pod(ready="False", conditions=(("ContainersReady", "True"), ("example.com/gate", "False"))),
        pod(deletionTimestamp="2026-01-01T00:00:30Z", deletionGracePeriodSeconds=30),
        pod(ip=None),
        pod(ip=""),
    ],
)
def test_a_pod_that_cannot_serve_has_no_endpoint_and_is_nothing_to_warn_of(unfit: Pod) -> None:
    assert pod_endpoints([unfit], (8000,)) == ((), ())


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (None, [8000, 8001, 8002]),
        ({}, [8000, 8001, 8002]),
        (active("8001"), [8001]),
        (active("8002,8000"), [8000, 8002]),
        (active(" 8000 ,\t8002 "), [8000, 8002]),
        (active(""), []),
        (active(" , ,"), []),
        (active("8000,8000"), [8000]),
        (active("eight,8001"), [8001]),
        (active("-8000,8001"), [8001]),
        (active("0,9000,8001"), [8001]),
        (active("+8000"), [8000]),
        (active("08001"), [8001]),
        (active("8000/tcp"), [8000]),
        (active("80000"), []),
        (active("8" * 5000), []),
        (active("\uff18\uff10\uff10\uff10"), []),
        (active("8001", OLD), [8001]),
        ({NEW: "8000", OLD: "8001"}, [8000]),
        ({NEW: "", OLD: "8001"}, []),
    ],
)
def test_an_annotation_says_which_ports_serve(annotations: Any, expected: list[int]) -> None:
    endpoints, _ = pod_endpoints([pod(annotations=annotations)], (8000, 8001, 8002))
    assert [endpoint.port for endpoint in endpoints] == expected
    # A port keeps its rank, whichever others serve.
    assert [endpoint.name[-1] for endpoint in endpoints] == [str(port - 8000) for port in expected]


def test_a_port_of_the_annotation_that_the_pool_does_not_have_is_told() -> None:
    (text,) = warnings(pod(annotations=active("9000,8000")))
    assert "llm/vllm-0" in text
    assert f"{NEW} names '9000'" in text
    assert "target ports 8000" in text
    assert warnings(pod(annotations=active("8000,8000, "))) == ()


@pytest.mark.parametrize(
    ("ip", "host_port"),
    [
        ("fd00::5", "[fd00::5]:8000"),
        ("FD00:0:0:0:0:0:0:5", "[fd00::5]:8000"),
        ("127.64.0.9", "127.64.0.9:8000"),
    ],
)
def test_addresses_have_one_spelling(ip: str, host_port: str) -> None:
    assert addresses(pod(ip=ip)) == [host_port]


@pytest.mark.parametrize(
    "ip", ["10.0.0.300", "vllm-0.llm.svc", "0.0.0.0", "fe80::1%eth0", "ff02::1", "\x1b[2J"]
)
def test_a_pod_without_a_usable_address_is_told_and_left_out(ip: str) -> None:
    (endpoint,), (text,) = pod_endpoints([pod("broken", ip), pod("fine")], (8000,))
    assert endpoint.name == "fine-rank-0"
    assert text.startswith("pod llm/broken: status.podIP: ")
    assert text.isprintable()


@pytest.mark.parametrize("ports", [(0,), (-1,), (65536,), ()])
def test_numbers_that_are_no_ports_are_no_ranks(ports: tuple[int, ...]) -> None:
    assert addresses(pod(), ports=ports) == []
    endpoints, _ = pod_endpoints([pod()], (*ports, 8000, 8000))
    assert [(endpoint.port, endpoint.name) for endpoint in endpoints] == [(8000, f"vllm-0-rank-{len(ports)}")]


def test_labels_that_cannot_be_printed_are_left_out_and_told() -> None:
    (endpoint,), (text,) = pod_endpoints([pod(labels={"a": "b", "c": "d\n", "\x7fe": "f"})], (8000,))
    assert endpoint.labels == {"a": "b"}
    assert text.isprintable()


# -- declared ports -------------------------------------------------------------------------------


def test_declared_ports_that_miss_the_target_ports_are_told_once_for_pods_made_alike() -> None:
    pods = [
        pod(f"vllm-7d9f-{i}", f"10.0.0.{i}", declares=(8300, 9090), generateName="vllm-7d9f-")
        for i in range(1, 4)
    ]
    endpoints, (text,) = pod_endpoints(pods, (8000,))
    assert len(endpoints) == 3
    assert "llm/vllm-7d9f-*" in text
    assert "8300, 9090" in text
    assert "spec.targetPorts" in text
    assert warnings(*pods[:2]) == (text,)


@pytest.mark.parametrize(
    "fine",
    [
        pod(),
        pod(declares=(9090, 8000)),
        # The proxy beside the engine has the pool's port, the engine another.
        pod(declares=(8200,), sidecar=(8000,)),
        # Nothing is sent there.
        pod(declares=(8300,), annotations=active("")),
        pod(declares=(8300,), ready="False"),
    ],
)
def test_pods_whose_ports_fit_are_not_told_of(fine: Pod) -> None:
    assert warnings(fine) == ()


# -- one address, one endpoint --------------------------------------------------------------------


def test_pods_on_one_nodes_network_share_no_endpoint() -> None:
    pods = [
        pod(f"dp-{rank}", "192.168.0.1", declares=(8000 + rank,), generateName="dp-") for rank in range(4)
    ]
    endpoints, told = pod_endpoints(pods, (8000, 8001, 8002, 8003))
    assert sorted((endpoint.port, endpoint.name) for endpoint in endpoints) == [
        (8000 + rank, f"dp-{rank}-rank-{rank}") for rank in range(4)
    ]
    assert len(told) == 1
    assert NEW in told[0]


def test_an_address_that_was_handed_on_is_the_younger_pods() -> None:
    lost = pod("a", created="2026-01-01T00:00:00Z")
    heir = pod("b", created="2026-01-02T00:00:00Z")
    for pods in ((lost, heir), (heir, lost)):
        (endpoint,), (text,) = pod_endpoints(pods, (8000,))
        assert endpoint.name == "b-rank-0"
        assert "llm/a" in text
        assert "llm/b" in text


def test_a_reused_address_starts_clean_and_a_returned_pod_has_its_new_one() -> None:
    """Pod a goes, b gets its address, a comes back at another: nothing of the old a is left."""
    store = PoolStore()
    members = Members()

    def follow(*pods: Pod) -> None:
        members.update({pod.metadata.uid: pod for pod in pods}, (8000,))
        store.sync(members.endpoints, 0.0)

    follow(pod("a", "10.0.0.5", uid="1"))
    first = store.slot_of("10.0.0.5:8000")
    assert first is not None
    before = store.view.identity[first]
    follow(pod("b", "10.0.0.5", uid="2"))
    follow(pod("b", "10.0.0.5", uid="2"), pod("a", "10.0.0.9", uid="3"))
    owners = {endpoint.host_port: endpoint for _, endpoint in store.roster}
    assert {at: owner.name for at, owner in owners.items()} == {
        "10.0.0.5:8000": "b-rank-0",
        "10.0.0.9:8000": "a-rank-0",
    }
    assert before not in [store.view.identity[slot] for slot, _ in store.roster]


def test_a_pod_that_moves_is_the_same_endpoint_elsewhere() -> None:
    store = PoolStore()
    store.sync(pod_endpoints([pod(ip="10.0.0.5")], (8000,))[0], 0.0)
    change = store.sync(pod_endpoints([pod(ip="10.0.0.6")], (8000,))[0], 1.0)
    assert [endpoint.host_port for endpoint in change.joined] == ["10.0.0.6:8000"]
    assert [endpoint.host_port for endpoint in change.left] == ["10.0.0.5:8000"]


def test_a_port_that_changes_its_rank_keeps_what_is_known_about_it() -> None:
    store = PoolStore()
    store.sync(pod_endpoints([pod()], (8000, 8001))[0], 0.0)
    change = store.sync(pod_endpoints([pod()], (8001,))[0], 1.0)
    assert [endpoint.name for endpoint in change.left] == ["vllm-0-rank-0"]
    assert [endpoint.name for endpoint in change.relabelled] == ["vllm-0-rank-0"]
    assert not change.joined


# -- one event after another ----------------------------------------------------------------------


def following(*pods: Pod, ports: tuple[int, ...] = (8000,)) -> tuple[Members, dict[str, Pod]]:
    members, known = Members(), {pod.metadata.uid: pod for pod in pods}
    assert members.update(known, ports) == bool(pods)
    return members, known


def test_what_changes_no_endpoint_is_no_change() -> None:
    members, known = following(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    before = members.endpoints
    beat = pod("a", "10.0.0.1", conditions=(("ContainersReady", "True"),), annotations={"beat": "2"})
    assert not members.update(known | {"uid-of-a": beat}, (8000,))
    assert not members.update(known | {"new": pod("new", ready="False", uid="new")}, (8000,))
    assert members.endpoints is before


def test_a_label_that_changes_on_a_living_pod_is_a_change() -> None:
    members, known = following(pod(labels={names.ROLE_LABEL: "decode"}))
    assert members.update(known | {"uid-of-vllm-0": pod(labels={names.ROLE_LABEL: "prefill"})}, (8000,))
    assert members.endpoints[0].labels == {names.ROLE_LABEL: "prefill"}


def test_a_node_that_becomes_known_is_a_change_of_the_same_endpoint() -> None:
    members, known = following(pod(node_ip=None))
    store = PoolStore()
    store.sync(members.endpoints, 0.0)
    assert members.update(known | {"uid-of-vllm-0": pod()}, (8000,))
    change = store.sync(members.endpoints, 0.0)
    assert (change.joined, change.left) == ((), ())
    assert [endpoint.node_address for _, endpoint in store.roster] == ["192.168.0.1"]


def test_ports_apply_to_pods_already_known() -> None:
    members, known = following(pod(), ports=(8000,))
    assert members.update(known, (8000, 8001))
    assert len(members.endpoints) == 2
    assert members.update(known, (8001,))
    assert [endpoint.port for endpoint in members.endpoints] == [8001]
    assert not members.update(known, (8001,))


def test_a_terminating_pod_leaves_at_once() -> None:
    members, known = following(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    assert members.update(
        known | {"uid-of-a": pod("a", "10.0.0.1", deletionTimestamp="2026-01-01T00:00:30Z")}, (8000,)
    )
    assert [endpoint.name for endpoint in members.endpoints] == ["b-rank-0"]


def test_warnings_are_of_what_is_there_now() -> None:
    members, known = following(pod(declares=(8300,)))
    assert len(members.warnings) == 1
    members.update(known | {"uid-of-vllm-0": pod(declares=(8000,))}, (8000,))
    assert members.warnings == ()


# -- the pool's own ports -------------------------------------------------------------------------


def test_ports_of_a_pool_keep_their_rank() -> None:
    assert pool_ports(pool(targetPorts=[{"number": 8000}, {"number": 8001}])) == ((8000, 8001), ())
    assert pool_ports(pool()) == ((), ())


@pytest.mark.parametrize("number", [0, -1, 65536, 10**30, None, 1.5, True, "http", [8000], {"a": 1}])
def test_a_target_port_that_is_none_is_told_and_left_out(number: Any) -> None:
    ports, (text,) = pool_ports(pool(targetPorts=[{"number": number}, {"number": 8001}]))
    assert ports == (0, 8001)
    assert text.startswith("InferencePool llm/pool: spec.targetPorts[0].number: ")
    assert "1 to 65535" in text


def test_a_target_port_counts_once() -> None:
    ports, (text,) = pool_ports(pool(targetPorts=[{"number": 8000}, {"number": 8000}]))
    assert ports == (8000, 0)
    assert "spec.targetPorts[1].number" in text


def test_what_the_api_server_leaves_out_or_writes_as_null_can_be_read() -> None:
    bare = b'{"metadata":{"name":"a","creationTimestamp":null,"labels":null},"spec":{"containers":null}}'
    assert pod_endpoints([msgspec.json.decode(bare, type=Pod)], (8000,)) == ((), ())
