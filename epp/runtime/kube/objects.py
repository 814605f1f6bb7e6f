"""Objects of the Kubernetes API, as far as they are read.

Decoded straight from the API server's JSON; what is not declared here is skipped, not kept. Lists and
mappings may be left out or null, as Go writers do. Instants are the API's own text, RFC 3339 in UTC to the
second, which sorts as time does.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class _Read(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """What is decoded has no cycles, so the garbage collector need not look at it."""


class Metadata(_Read, frozen=True):
    """What every object says of itself. `generate_name`: what the names of a set of pods begin with."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    generate_name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    @property
    def age_order(self) -> tuple[str, str]:
        """Sorts objects of one kind and namespace from the oldest to the youngest, ties by name."""
        return self.creation_timestamp or "", self.name


class ManagedFields(_Read, frozen=True):
    """Who has written something of an object, how, and by which of its subresources."""

    manager: str = ""
    operation: str = ""
    subresource: str = ""


class PolicyMetadata(Metadata, frozen=True):
    """That of an object whose status we write."""

    managed_fields: tuple[ManagedFields, ...] | None = None

    def has_status_of(self, manager: str) -> bool:
        """Whether something in the status is there because this manager applied it."""
        applied = ManagedFields(manager, "Apply", "status")
        return applied in (self.managed_fields or ())


class Condition(_Read, frozen=True):
    """One entry of `status.conditions`. `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""


class PolicyStatus(_Read, frozen=True):
    """The status of an objective or a rewrite."""

    conditions: tuple[Condition, ...] | None = None


# -- pods -----------------------------------------------------------------------------------------


class ContainerPort(_Read, frozen=True):
    """A port that a container declares."""

    container_port: int = 0


class Container(_Read, frozen=True):
    """A container of a pod."""

    ports: tuple[ContainerPort, ...] | None = None


class PodSpec(_Read, frozen=True):
    """`init_containers` matter: a sidecar that stands before the engine is one that keeps running."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None


class PodCondition(_Read, frozen=True):
    """One entry of a pod's conditions."""

    type: str = ""
    status: str = ""


class PodStatus(_Read, frozen=True):
    """`pod_ip` is empty until the pod has a network. `host_ip`: address of its node."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    host_ip: str = msgspec.field(default="", name="hostIP")
    conditions: tuple[PodCondition, ...] | None = None


class Pod(_Read, frozen=True):
    """A pod."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def ready(self) -> bool:
        """The aggregate Ready condition, readiness gates included, and not about to end."""
        if self.metadata.deletion_timestamp is not None:
            return False
        for condition in self.status.conditions or ():
            if condition.type == "Ready":
                return condition.status == "True"
        return False

    @property
    def declared_ports(self) -> frozenset[int]:
        """The ports its containers declare; a pod may well serve on others, or declare none."""
        return frozenset(
            port.container_port
            for containers in (self.spec.containers, self.spec.init_containers)
            for container in containers or ()
            for port in container.ports or ()
        )


# -- the pool -------------------------------------------------------------------------------------


class TargetPort(_Read, frozen=True):
    """A port of the engines. `number` is a port where the definition of the kind is the field's own."""

    number: Any = None


class Selector(_Read, frozen=True):
    """Labels that the pool's pods have, all of them."""

    match_labels: dict[str, str] | None = None


class InferencePoolSpec(_Read, frozen=True):
    """`app_protocol`: `http` or `kubernetes.io/h2c`; empty says nothing."""

    selector: Selector = Selector()
    target_ports: tuple[TargetPort, ...] | None = None
    app_protocol: str | None = None


class InferencePool(_Read, frozen=True):
    """The pool whose picker this is. Its status belongs to the gateway."""

    metadata: Metadata
    spec: InferencePoolSpec = InferencePoolSpec()

    @property
    def label_selector(self) -> str:
        """The selector as a query wants it; empty where it has no labels, which selects nothing."""
        labels: Mapping[str, str] = self.spec.selector.match_labels or {}
        return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


# -- what is said about its requests ---------------------------------------------------------------


class PoolReference(_Read, frozen=True):
    """The pool that an object is about; None = not said."""

    name: str = ""
    group: str | None = None
    kind: str | None = None


class InferenceObjectiveSpec(_Read, frozen=True):
    """`priority`: None = not said, which means 0."""

    pool_ref: PoolReference | None = None
    priority: int | None = None


class InferenceObjective(_Read, frozen=True):
    """A priority that requests may ask for by the object's name."""

    metadata: PolicyMetadata
    spec: InferenceObjectiveSpec = InferenceObjectiveSpec()
    status: PolicyStatus = PolicyStatus()


class ModelMatch(_Read, frozen=True):
    """The name of a model in a request."""

    value: str = ""
    type: str | None = None


class RewriteMatch(_Read, frozen=True):
    """Which requests a rule is about."""

    model: ModelMatch | None = None


class TargetModel(_Read, frozen=True):
    """A model to ask for instead."""

    model_rewrite: str = ""
    weight: int | None = None


class ModelRewriteRule(_Read, frozen=True):
    """Without matches, a rule for every model."""

    matches: tuple[RewriteMatch, ...] | None = None
    targets: tuple[TargetModel, ...] | None = None


class InferenceModelRewriteSpec(_Read, frozen=True):
    """Rules in their order of precedence."""

    pool_ref: PoolReference | None = None
    rules: tuple[ModelRewriteRule, ...] | None = None


class InferenceModelRewrite(_Read, frozen=True):
    """Rules by which the model of a request is replaced."""

    metadata: PolicyMetadata
    spec: InferenceModelRewriteSpec = InferenceModelRewriteSpec()
    status: PolicyStatus = PolicyStatus()
