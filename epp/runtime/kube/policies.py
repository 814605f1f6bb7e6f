"""Which objectives and model rewrites of the cluster count for a pool, and what is to be said about each.

An object counts where its `poolRef` names the pool by group, kind and name; one for another pool is none of
our business, unless it was for this pool before: then the conditions that it got here are to go. Together
with what the configuration file says itself, the cluster's objectives replace the file's of the same name,
and the cluster's rewrites come before the file's.

What is wrong in a rewrite costs the rule it stands in, not its other rules. A condition's reason is that of
the gravest finding, its message tells all of them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from epp import names
from epp.config.decode import quoted
from epp.payload.rewrite import ModelRewrite
from epp.runtime.kube.objects import (
    Condition,
    InferenceModelRewrite,
    InferenceObjective,
    Metadata,
    PoolReference,
)
from epp.runtime.kube.rewrites import INVALID, Review, review_rewrites

MESSAGE_CHARS: Final = 2000
"""Where a condition's message is cut; the API takes 32768."""

_MANAGER: Final = "warmroute"
_MANAGER_CHARS: Final = 128
"""Of a field manager's name; the API takes no longer ones."""
_DIGEST_CHARS: Final = 8

SHADOWED: Final = "Shadowed"
PARTLY_SHADOWED: Final = "PartiallyShadowed"
PARTLY_INVALID: Final = "PartiallyInvalid"

Policy = TypeVar("Policy", InferenceObjective, InferenceModelRewrite)

_PRIORITIES: Final = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an object's status is to say, and what it says now.

    Attributes:
        resource: plural, as in the object's path.
        uid: of the object; another of the same name has another.
        generation: of the object that was judged.
        conditions: those that are ours to write; one that is not there any more is to go. None: the object
            is for another pool now.
        current: all that the object has.
    """

    resource: str
    group: str
    version: str
    namespace: str
    name: str
    uid: str
    generation: int
    conditions: tuple[Condition, ...]
    current: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """What the cluster says about a pool's requests.

    Attributes:
        objectives: priority by name.
        rewrites: the oldest first; only rules that can be used, and only rewrites that have some.
        notes: what an operator should know and no condition tells, or one that may not be written.
    """

    objectives: Mapping[str, int]
    rewrites: tuple[ModelRewrite, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool that is asked about."""

    name: str
    group: str = names.POOL_GROUP

    @property
    def field_manager(self) -> str:
        """Whose the conditions are that this pool's pickers write.

        Another one for each pool: an object that moves from one to the other has two writers for a moment,
        and neither takes away what the other wrote.
        """
        name = f"{_MANAGER}:{self.name}.{self.group}"
        if len(name) > _MANAGER_CHARS:
            digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARS]
            name = f"{name[: _MANAGER_CHARS - _DIGEST_CHARS - 1]}-{digest}"
        return name


def policies(
    pool: Pool,
    objectives: Iterable[InferenceObjective],
    rewrites: Iterable[InferenceModelRewrite],
    *,
    objective_group: str = names.LLM_D_GROUP,
    rewrite_group: str = names.LLM_D_GROUP,
) -> Judged:
    """Judge the objects of the pool's namespace.

    Args:
        objective_group, rewrite_group: the API groups in which the objects were found.
    """
    notes: list[str] = []
    priorities: dict[str, int] = {}
    objectives, rewrites = list(objectives), list(rewrites)
    verdicts = [
        *_withdrawn(pool, names.OBJECTIVE_RESOURCE, objective_group, objectives),
        *_withdrawn(pool, names.MODEL_REWRITE_RESOURCE, rewrite_group, rewrites),
    ]
    for objective in _ours(pool, names.OBJECTIVE_KIND, objectives, notes):
        condition = _judged(objective, pool)
        if condition.status == "True":
            priorities[objective.metadata.name] = objective.spec.priority or 0
        verdict = _verdict(names.OBJECTIVE_RESOURCE, objective_group, objective, (condition,))
        notes += _worth_telling(names.OBJECTIVE_KIND, verdict)
        verdicts.append(verdict)
    usable = []
    for review in review_rewrites(_ours(pool, names.MODEL_REWRITE_KIND, rewrites, notes)):
        if review.rewrite.rules:
            usable.append(review.rewrite)
        conditions = _conditions(review, pool)
        verdict = _verdict(names.MODEL_REWRITE_RESOURCE, rewrite_group, review.judged, conditions)
        notes += _worth_telling(names.MODEL_REWRITE_KIND, verdict)
        verdicts.append(verdict)
    return Judged(priorities, tuple(usable), tuple(verdicts), tuple(notes))


def _ours(pool: Pool, kind: str, found: Iterable[Policy], notes: list[str]) -> list[Policy]:
    """Those for the pool, the oldest first. Of two with one name the younger: the other is gone already."""
    ours: dict[str, Policy] = {}
    for one in sorted(found, key=lambda one: one.metadata.age_order):
        reference = one.spec.pool_ref
        if reference is None or one.metadata.deletion_timestamp is not None:
            continue
        if _names(reference, pool):
            ours.pop(one.metadata.name, None)
            ours[one.metadata.name] = one
        elif reference.name == pool.name:
            notes.append(_nearly(kind, one.metadata, reference, pool))
    return list(ours.values())


def _withdrawn(pool: Pool, resource: str, group: str, found: Iterable[Policy]) -> Iterable[Verdict]:
    """Of objects that are for another pool now, and still say what they were in this one."""
    for one in found:
        reference = one.spec.pool_ref
        ours = reference is not None and _names(reference, pool)
        if not ours and one.metadata.has_status_of(pool.field_manager):
            yield _verdict(resource, group, one, ())


def _names(reference: PoolReference, pool: Pool) -> bool:
    """What a reference leaves out is as its definition has it."""
    group = names.POOL_GROUP if reference.group is None else reference.group
    kind = reference.kind or names.POOL_KIND
    return (reference.name, group, kind) == (pool.name, pool.group, names.POOL_KIND)


def _nearly(kind: str, metadata: Metadata, reference: PoolReference, pool: Pool) -> str:
    group = names.POOL_GROUP if reference.group is None else reference.group
    return (
        f"{kind} {metadata.namespace}/{metadata.name} is for {quoted(reference.kind or names.POOL_KIND)} "
        f"{pool.name} of group {quoted(group)} and is ignored; for this picker's pool set spec.poolRef.group "
        f"to {pool.group} and spec.poolRef.kind to {names.POOL_KIND}"
    )


# -- verdicts -------------------------------------------------------------------------------------


def _verdict(resource: str, group: str, judged: Policy, conditions: tuple[Condition, ...]) -> Verdict:
    metadata = judged.metadata
    return Verdict(
        resource=resource,
        group=group,
        version=names.POLICY_VERSION,
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        generation=metadata.generation,
        conditions=conditions,
        current=judged.status.conditions or (),
    )


def _condition(type_: str, status: bool, reason: str, message: str) -> Condition:
    if len(message) > MESSAGE_CHARS:
        message = f"{message[: MESSAGE_CHARS - 3]}..."
    return Condition(type_, "True" if status else "False", reason, message)


def _judged(objective: InferenceObjective, pool: Pool) -> Condition:
    priority = objective.spec.priority or 0
    if priority not in _PRIORITIES:
        wrong = f"spec.priority is {priority}; it must fit into 32 bits. The objective is left out"
        return _condition(names.ACCEPTED, False, INVALID, wrong)
    shed = "; below 0 they are the first to be refused under load" if priority < 0 else ""
    message = f"requests to pool {pool.name} that name this objective have priority {priority}{shed}"
    return _condition(names.ACCEPTED, True, names.ACCEPTED, message)


def _conditions(review: Review, pool: Pool) -> tuple[Condition, ...]:
    findings = [finding.text for finding in review.findings]
    if not review.rewrite.rules:
        return (_condition(names.ACCEPTED, False, review.findings[0].reason, "; ".join(findings)),)
    if not review.counts:
        message = "; ".join(["no request is rewritten by it, see condition Conflicted", *findings])
        return (
            _condition(names.ACCEPTED, False, names.CONFLICTED, message),
            _condition(names.CONFLICTED, True, SHADOWED, "; ".join(review.shadowed)),
        )
    reason = review.findings[0].reason if findings else names.ACCEPTED
    message = "; ".join(findings) or f"its rules are in effect in pool {pool.name}"
    accepted = _condition(names.ACCEPTED, True, PARTLY_INVALID if reason == INVALID else reason, message)
    if not review.shadowed:
        return (accepted,)
    return accepted, _condition(names.CONFLICTED, True, PARTLY_SHADOWED, "; ".join(review.shadowed))


def _worth_telling(kind: str, verdict: Verdict) -> Iterable[str]:
    for condition in verdict.conditions:
        if condition.type == names.CONFLICTED or condition.reason not in {names.ACCEPTED, names.CONFLICTED}:
            yield f"{kind} {verdict.namespace}/{verdict.name}: {condition.message}"
