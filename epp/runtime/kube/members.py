"""Which endpoints a pool's pods are.

One endpoint for each ready pod and target port. Its name is the field's, `<pod>-rank-<position of the port>`;
its identity is the pod's uid with the port, so that a recreated pod starts clean and a port that changes its
position keeps what is known about it. Its labels are the pod's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from epp import names
from epp.config.decode import quoted
from epp.pool.records import Endpoint
from epp.runtime.discovery import parse_address, parse_port
from epp.runtime.kube.objects import InferencePool, Pod

# The field reads an entry up to the first character that is no digit: `8000/tcp` is 8000.
_LEADING_PORT: Final = re.compile(r"\+?0*([1-9][0-9]{0,4})(?![0-9])")

Ranks = tuple[tuple[int, int], ...]
"""Position and number of each target port that can be used."""


def pool_ports(pool: InferencePool) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """A pool's target ports by rank, 0 in place of one that cannot be used, and what is wrong with those."""
    ports: list[int] = []
    warnings = []
    for rank, target in enumerate(pool.spec.target_ports or ()):
        port, place = 0, f"{_pool(pool)}: spec.targetPorts[{rank}].number"
        try:
            port = parse_port(target.number)
        except ValueError as error:
            warnings.append(f"{place}: {error}; it is left out")
        if port and port in ports:
            warnings.append(f"{place}: {port} is there already; a port counts once")
            port = 0
        ports.append(port)
    return tuple(ports), tuple(warnings)


def _pool(pool: InferencePool) -> str:
    return f"{names.POOL_KIND} {pool.metadata.namespace}/{pool.metadata.name}"


@dataclass(frozen=True, slots=True)
class _Member:
    """A pod and what it comes to. Of the pod nothing else matters to the pool.

    `order`: where its endpoints come among the pool's; kept, since all are sorted at each change.
    """

    pod: Pod
    order: tuple[str, str, str]
    endpoints: tuple[Endpoint, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tells(self) -> bool:
        """Whether the pool is another one without it."""
        return bool(self.endpoints or self.warnings)

    def precedence(self, port: int) -> tuple[bool, str, str]:
        """Among pods at one address, the highest has the port."""
        metadata = self.pod.metadata
        return port in self.pod.declared_ports, metadata.creation_timestamp or "", metadata.uid


class Members:
    """The endpoints of pods that change one by one: an event costs what it changes.

    A pod counts while its Ready condition is True and it is not terminating; it has to have an address. All
    target ports serve, unless an annotation (`names.ACTIVE_PORTS`) says which: what it names besides, or
    twice, or what is no port is ignored, and an empty one stands for none. Two pods at one address and port
    are one endpoint: that of the pod that declares the port, else that of the youngest, for an address is
    handed on. A pod that declares other ports than the target ports is an endpoint all the same, with a
    warning.

    Attributes:
        endpoints: as of the last `update`, by namespace and name of their pods.
        warnings: what is wrong with some; each text stays the same for as long as its cause does, and counts
            for all the pods of one set.
    """

    def __init__(self) -> None:
        self.endpoints: tuple[Endpoint, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self._ports: tuple[int, ...] = ()
        self._members: dict[str, _Member] = {}

    def update(self, pods: Mapping[str, Pod], ports: tuple[int, ...]) -> bool:
        """Take the pods, by uid, and the target ports, by rank, for what is there now.

        A number that is no port, or a second time the same, is no rank.
        A pod is looked at when it is another object than the last time. Most events of pods (one that comes
        or goes without being ready, an annotation, a container's state) leave the endpoints as they are.

        Returns:
            whether `endpoints` differ from before.
        """
        known = self._members if ports == self._ports else {}
        moved = ports != self._ports
        ranks = _ranks(ports)
        members = {}
        fresh = 0
        for uid, pod in pods.items():
            before = known.get(uid)
            if before is None:
                fresh += 1
                member = _member(pod, ranks)
                moved |= member.tells
            elif before.pod is not pod:
                member = _member(pod, ranks)
                if _differ(before, member):
                    moved = True
                else:
                    member = _Member(pod, before.order, before.endpoints, before.warnings)
            else:
                member = before
            members[uid] = member
        if len(members) - fresh != len(known):
            moved |= any(known[uid].tells for uid in known.keys() - members.keys())
        self._members, self._ports = members, ports
        if not moved:
            return False
        endpoints, self.warnings = _merged(members.values())
        if endpoints == self.endpoints:
            return False
        self.endpoints = endpoints
        return True


def _differ(before: _Member, after: _Member) -> bool:
    return (
        after.endpoints != before.endpoints
        or after.warnings != before.warnings
        # What decides between pods at one address.
        or after.pod.spec != before.pod.spec
    )


def _ranks(ports: tuple[int, ...]) -> Ranks:
    first: dict[int, int] = {}
    for rank, port in enumerate(ports):
        if 1 <= port <= 65535:
            first.setdefault(port, rank)
    return tuple((rank, port) for port, rank in first.items())


def _member(pod: Pod, ranks: Ranks) -> _Member:
    metadata = pod.metadata
    order = metadata.namespace, metadata.name, metadata.uid
    if not pod.ready or not pod.status.pod_ip:
        return _Member(pod, order)
    try:
        address = parse_address(pod.status.pod_ip)
    except ValueError as error:
        return _Member(pod, order, (), (f"pod {metadata.namespace}/{metadata.name}: status.podIP: {error}",))
    warnings: list[str] = []
    active = _active(pod, ranks, warnings)
    labels = _labels(pod, warnings)
    node_address = _node_address(pod, warnings)
    if active:
        _check_declared(pod, active, warnings)
    endpoints = tuple(
        Endpoint(
            f"{metadata.uid}:{port}",
            f"{metadata.name}-rank-{rank}",
            metadata.namespace,
            address,
            port,
            labels,
            metadata.name,
            node_address,
        )
        for rank, port in active
    )
    return _Member(pod, order, endpoints, tuple(warnings))


def _pod_set(pod: Pod) -> str:
    """The pods that were made alike, so that one warning does for all."""
    metadata = pod.metadata
    made_alike = f"{metadata.generate_name}*" if metadata.generate_name else metadata.name
    return f"pods {metadata.namespace}/{made_alike}"


def _active(pod: Pod, ranks: Ranks, warnings: list[str]) -> Ranks:
    annotations = pod.metadata.annotations
    key = next((key for key in names.ACTIVE_PORTS if key in annotations), None) if annotations else None
    if annotations is None or key is None:
        return ranks
    known = {port for _, port in ranks}
    wanted = set()
    ignored = []
    for entry in annotations[key].split(","):
        number = _LEADING_PORT.match(entry.strip())
        port = int(number[1]) if number else 0
        if port in known:
            wanted.add(port)
        elif entry.strip():
            ignored.append(entry.strip())
    if ignored:
        warnings.append(
            f"{_pod_set(pod)}: annotation {key} names {quoted(', '.join(ignored))}, which is none of the "
            f"target ports {_listed(known)}: ignored"
        )
    return tuple(ranked for ranked in ranks if ranked[1] in wanted)


def _labels(pod: Pod, warnings: list[str]) -> Mapping[str, str]:
    labels = pod.metadata.labels or {}
    if "".join(labels).isprintable() and "".join(labels.values()).isprintable():
        return labels
    warnings.append(f"{_pod_set(pod)}: labels with characters that cannot be printed are left out")
    return {key: text for key, text in labels.items() if key.isprintable() and text.isprintable()}


def _node_address(pod: Pod, warnings: list[str]) -> str:
    if not pod.status.host_ip:
        return ""
    try:
        return parse_address(pod.status.host_ip)
    except ValueError as error:
        warnings.append(f"{_pod_set(pod)}: status.hostIP: {error}; the node is taken for unknown")
        return ""


def _check_declared(pod: Pod, active: Ranks, warnings: list[str]) -> None:
    declared = pod.declared_ports
    ports = {port for _, port in active}
    if declared and not declared & ports:
        warnings.append(
            f"{_pod_set(pod)} declare the container ports {_listed(declared)} and none of the target ports "
            f"{_listed(ports)}; requests go to the target ports all the same. Put the port where the engine "
            f"listens into the pool's spec.targetPorts, or declare it as a containerPort"
        )


def _listed(ports: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ports)))


def _merged(members: Iterable[_Member]) -> tuple[tuple[Endpoint, ...], tuple[str, ...]]:
    """All endpoints, one for each address and port, and every warning once."""
    owners: dict[tuple[str, int], tuple[_Member, Endpoint]] = {}
    warnings: dict[str, None] = {}
    for member in sorted(members, key=attrgetter("order")):
        if member.warnings:
            warnings.update(dict.fromkeys(member.warnings))
        for endpoint in member.endpoints:
            place = endpoint.address, endpoint.port
            owner, _ = owners.setdefault(place, (member, endpoint))
            if owner is member:
                continue
            warnings[_shared(owner, member)] = None
            if member.precedence(endpoint.port) > owner.precedence(endpoint.port):
                owners[place] = member, endpoint
    return tuple(endpoint for _, endpoint in owners.values()), tuple(warnings)


def _shared(one: _Member, other: _Member) -> str:
    sets = " and ".join(sorted({_pod_set(one.pod), _pod_set(other.pod)}))
    return (
        f"{sets} share addresses: each address and port is one endpoint, that of the pod that declares the "
        f"port, else of the youngest. On the network of one node (hostNetwork), annotation "
        f"{names.ACTIVE_PORTS[0]} says which ports are a pod's own"
    )
