"""Objectives and rewrites of the cluster: which are the pool's, what they come to, what their status says."""

import re
from typing import Any

import msgspec
import pytest

from epp import names
from epp.flow.objectives import Objectives
from epp.payload.rewrite import RewriteRules
from epp.runtime.kube.objects import (
    Condition,
    InferenceModelRewrite,
    InferenceObjective,
    ManagedFields,
)
from epp.runtime.kube.policies import MESSAGE_CHARS, Judged, Pool, Verdict, policies

POOL = Pool("pool")
OURS = {"group": names.POOL_GROUP, "kind": names.POOL_KIND, "name": "pool"}
REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def metadata(name: str, age: int = 0, **more: Any) -> dict[str, Any]:
    """`age`: in days, 0 = the youngest."""
    created = f"2026-01-{30 - age:02}T00:00:00Z"
    return {
        "name": name,
        "namespace": "llm",
        "uid": name,
        "generation": 3,
        "creationTimestamp": created,
        **more,
    }


def objective(
    name: str, ref: dict[str, Any] | None = OURS, *, age: int = 0, **spec: Any
) -> InferenceObjective:
    written = {"metadata": metadata(name, age), "spec": {"poolRef": ref, **spec}}
    return msgspec.convert(written, InferenceObjective)


def rewrite(
    name: str, *rules: dict[str, Any], ref: dict[str, Any] | None = OURS, age: int = 0, **more: Any
) -> InferenceModelRewrite:
    written = {"metadata": metadata(name, age, **more), "spec": {"poolRef": ref, "rules": list(rules)}}
    return msgspec.convert(written, InferenceModelRewrite)


def rule(models: str, *targets: str | tuple[str, int]) -> dict[str, Any]:
    """`models`: names with spaces between them; "*" = a rule for every model."""
    made = [
        {"modelRewrite": target}
        if isinstance(target, str)
        else {"modelRewrite": target[0], "weight": target[1]}
        for target in targets
    ]
    if models == "*":
        return {"targets": made}
    return {
        "matches": [{"model": {"type": "Exact", "value": model}} for model in models.split()],
        "targets": made,
    }


def of_rewrites(*rewrites: InferenceModelRewrite) -> Judged:
    judged = policies(POOL, (), rewrites)
    for verdict in judged.verdicts:
        for condition in verdict.conditions:
            assert REASON.fullmatch(condition.reason)
            assert condition.status in {"True", "False"}
            assert condition.message
            assert condition.message.isprintable()
    return judged


def conditions(verdict: Verdict) -> dict[str, Condition]:
    return {condition.type: condition for condition in verdict.conditions}


def verdict_of(judged: Judged, name: str) -> dict[str, Condition]:
    (verdict,) = (verdict for verdict in judged.verdicts if verdict.name == name)
    return conditions(verdict)


def accepted(judged: Judged, name: str) -> tuple[str, str]:
    condition = verdict_of(judged, name)[names.ACCEPTED]
    return condition.status, condition.reason


# -- objectives -----------------------------------------------------------------------------------


def test_priorities_by_name() -> None:
    judged = policies(
        POOL, [objective("high", priority=5), objective("unset"), objective("low", priority=-1)], ()
    )
    assert judged.objectives == {"high": 5, "unset": 0, "low": -1}
    assert Objectives(judged.objectives).priority("high") == 5
    high, low = verdict_of(judged, "high")[names.ACCEPTED], verdict_of(judged, "low")[names.ACCEPTED]
    assert (high.status, high.reason) == ("True", "Accepted")
    assert "priority 5" in high.message
    assert "refused" in low.message
    assert judged.notes == ()


def test_a_verdict_says_what_it_is_about() -> None:
    pending = Condition("Ready", "Unknown", "Pending", "Waiting for controller", 0, "1970-01-01T00:00:00Z")
    found = msgspec.convert(
        {
            "metadata": metadata("a"),
            "spec": {"poolRef": OURS},
            "status": {"conditions": [msgspec.to_builtins(pending)]},
        },
        InferenceObjective,
    )
    (verdict,) = policies(POOL, [found], (), objective_group=names.LEGACY_INFERENCE_GROUP).verdicts
    assert (verdict.resource, verdict.group, verdict.version) == (
        "inferenceobjectives",
        "inference.networking.x-k8s.io",
        "v1alpha2",
    )
    assert (verdict.namespace, verdict.name, verdict.generation) == ("llm", "a", 3)
    assert verdict.current == (pending,)


def managed_by(manager: str, found: InferenceObjective, **differs: str) -> InferenceObjective:
    entry = {"manager": manager, "operation": "Apply", "subresource": "status", **differs}
    managed = msgspec.convert(
        [{"manager": "kubectl", "operation": "Update"}, entry], tuple[ManagedFields, ...]
    )
    return msgspec.structs.replace(
        found, metadata=msgspec.structs.replace(found.metadata, managed_fields=managed)
    )


@pytest.mark.parametrize("ref", [None, {"name": "another"}, {**OURS, "kind": "Other"}])
def test_what_an_object_for_another_pool_got_here_is_to_go(ref: dict[str, str] | None) -> None:
    judged = policies(POOL, [managed_by(POOL.field_manager, objective("a", ref, priority=5))], ())
    assert judged.objectives == {}
    (verdict,) = judged.verdicts
    assert (verdict.resource, verdict.name, verdict.conditions) == (names.OBJECTIVE_RESOURCE, "a", ())


def test_an_object_that_is_ours_is_judged_once_whatever_we_wrote_before() -> None:
    judged = policies(POOL, [managed_by(POOL.field_manager, objective("a", priority=5))], ())
    assert accepted(judged, "a") == ("True", "Accepted")


def test_what_others_wrote_stays() -> None:
    elsewhere = objective("a", {"name": "another"})
    ours = POOL.field_manager
    for other in (
        managed_by(Pool("another").field_manager, elsewhere),
        managed_by(ours, elsewhere, operation="Update"),
        managed_by(ours, elsewhere, subresource=""),
    ):
        assert policies(POOL, [other], ()).verdicts == ()


def test_each_pool_has_a_field_manager_that_the_api_takes() -> None:
    long = "p" * 200
    pools = [Pool("a"), Pool("b"), Pool("a", "b"), Pool(long), Pool(long, "b"), Pool(f"{long}p")]
    managers = {pool.field_manager for pool in pools}
    assert len(managers) == len(pools)
    assert max(map(len, managers)) == 128
    assert all(manager.startswith("warmroute:") and manager.isprintable() for manager in managers)


@pytest.mark.parametrize(
    "ref",
    [
        None,
        {"name": "another"},
        {"name": "another", "group": names.POOL_GROUP, "kind": names.POOL_KIND},
    ],
)
def test_an_object_for_another_pool_is_none_of_our_business(ref: dict[str, str] | None) -> None:
    judged = policies(POOL, [objective("a", ref, priority=5)], [rewrite("b", rule("a", "b"), ref=ref)])
    assert judged == Judged({}, (), (), ())


@pytest.mark.parametrize(
    "ref",
    [
        {"name": "pool", "group": "llm-d.ai", "kind": names.POOL_KIND},
        {"name": "pool", "group": "", "kind": names.POOL_KIND},
        {"name": "pool", "group": names.POOL_GROUP, "kind": "Service"},
    ],
)
def test_a_pool_of_the_same_name_and_another_kind_is_not_ours_but_worth_a_note(ref: dict[str, str]) -> None:
    judged = policies(POOL, [objective("a", ref)], [rewrite("b", rule("a", "b"), ref=ref)])
    assert (judged.objectives, judged.rewrites, judged.verdicts) == ({}, (), ())
    for kind, note in zip(
        ["InferenceObjective llm/a", "InferenceModelRewrite llm/b"], judged.notes, strict=True
    ):
        assert note.startswith(kind)
        assert f"spec.poolRef.group to {names.POOL_GROUP}" in note


def test_what_a_reference_leaves_out_is_the_pools() -> None:
    assert policies(POOL, [objective("a", {"name": "pool"}, priority=5)], ()).objectives == {"a": 5}
    other = Pool("pool", "example.com")
    assert policies(other, [objective("a", {"name": "pool"})], ()).objectives == {}
    assert policies(other, [objective("a", OURS | {"group": "example.com"})], ()).objectives == {"a": 0}


def test_of_two_objectives_with_one_name_the_pool_reference_decides() -> None:
    found = [objective("a", OURS | {"name": "another"}, priority=9), objective("a", priority=5, age=2)]
    for given in (found, found[::-1]):
        judged = policies(POOL, given, ())
        assert judged.objectives == {"a": 5}
        assert len(judged.verdicts) == 1


def test_a_recreated_object_replaces_the_one_that_is_gone() -> None:
    found = [objective("a", priority=1, age=2), objective("a", priority=5)]
    judged = policies(POOL, found[::-1], ())
    assert judged.objectives == {"a": 5}
    assert len(judged.verdicts) == 1


def test_an_object_that_is_about_to_go_is_gone() -> None:
    going = rewrite("a", rule("a", "b"), deletionTimestamp="2026-01-30T00:00:00Z")
    assert of_rewrites(going) == Judged({}, (), (), ())


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1])
def test_a_priority_that_the_field_cannot_hold_is_refused(priority: int) -> None:
    judged = policies(POOL, [objective("a", priority=priority), objective("b", priority=2**31 - 1)], ())
    assert judged.objectives == {"b": 2**31 - 1}
    assert accepted(judged, "a") == ("False", "Invalid")
    assert judged.notes[0].startswith("InferenceObjective llm/a: spec.priority is ")


# -- rewrites -------------------------------------------------------------------------------------


def test_rewrites_count_from_the_oldest_ties_by_name() -> None:
    judged = of_rewrites(
        rewrite("young", rule("a", "1")),
        rewrite("b-old", rule("b", "2"), age=5),
        rewrite("a-old", rule("c", "3"), age=5),
    )
    assert [found.name for found in judged.rewrites] == ["a-old", "b-old", "young"]
    assert {accepted(judged, name) for name in ("young", "a-old", "b-old")} == {("True", "Accepted")}
    assert judged.notes == ()


def test_rules_reach_the_router_as_they_are_written() -> None:
    (found,) = of_rewrites(rewrite("a", rule("x y", ("v1", 90), ("v2", 10)), rule("*", "z"))).rewrites
    assert found.rules[0].models == ("x", "y")
    assert [(target.model_rewrite, target.weight) for target in found.rules[0].targets] == [
        ("v1", 90),
        ("v2", 10),
    ]
    assert found.rules[1].models == ()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"matches": [{"model": {"value": "a"}}]}, "no targets"),
        ({"matches": [{"model": {"value": "a"}}], "targets": []}, "no targets"),
        (rule("a", ""), "targets[0].modelRewrite is missing"),
        (rule("a", ("b", 0)), "targets[0].weight is 0; it must be from 1 to 1000000"),
        (rule("a", ("b", 5), ("c", -5)), "targets[1].weight is -5"),
        (rule("a", ("b", 1_000_001)), "targets[0].weight is 1000001"),
        ({"matches": [{}], "targets": [{"modelRewrite": "b"}]}, "matches[0].model.value is missing"),
        (
            {"matches": [{"model": {"value": ""}}], "targets": [{"modelRewrite": "b"}]},
            "matches[0].model.value",
        ),
        (
            {"matches": [{"model": {"type": "Regex", "value": "a.*"}}], "targets": [{"modelRewrite": "b"}]},
            "type is 'Regex'; known is Exact",
        ),
    ],
)
def test_a_bad_rule_is_left_out_and_the_others_count(bad: dict[str, Any], said: str) -> None:
    judged = of_rewrites(rewrite("some", bad, rule("fine", "better")), rewrite("all", bad))
    assert accepted(judged, "some") == ("True", "PartiallyInvalid")
    assert accepted(judged, "all") == ("False", "Invalid")
    for name in ("some", "all"):
        message = verdict_of(judged, name)[names.ACCEPTED].message
        assert "rules[0] is left out: " in message
        assert said in message
        assert f"InferenceModelRewrite llm/{name}: {message}" in judged.notes
    (usable,) = judged.rewrites
    assert [found.models for found in usable.rules] == [("fine",)]
    rules = RewriteRules(judged.rewrites)
    assert rules.target("fine", None) is not None  # type: ignore[arg-type]
    assert rules.target("anything", None) is None  # type: ignore[arg-type]


def test_a_rewrite_without_rules_is_refused() -> None:
    judged = of_rewrites(rewrite("empty"))
    assert accepted(judged, "empty") == ("False", "NoRules")
    assert judged.rewrites == ()


def test_targets_without_a_weight_beside_weighted_ones_are_told() -> None:
    judged = of_rewrites(rewrite("a", rule("x", ("v1", 90), "v2")), rewrite("b", rule("y", "v1", "v2")))
    assert accepted(judged, "a") == ("True", "WeightsMissing")
    assert "rules[0] never chooses 'v2'" in verdict_of(judged, "a")[names.ACCEPTED].message
    assert accepted(judged, "b") == ("True", "Accepted")
    assert len(judged.rewrites) == 2


# -- conflicts ------------------------------------------------------------------------------------


def test_a_rewrite_whose_every_rule_is_shadowed_is_not_accepted() -> None:
    judged = of_rewrites(
        rewrite("old", rule("x", "1"), rule("*", "0"), age=1), rewrite("new", rule("x", "2"), rule("*", "3"))
    )
    assert accepted(judged, "old") == ("True", "Accepted")
    assert names.CONFLICTED not in verdict_of(judged, "old")
    assert accepted(judged, "new") == ("False", "Conflicted")
    conflict = verdict_of(judged, "new")[names.CONFLICTED]
    assert (conflict.status, conflict.reason) == ("True", "Shadowed")
    assert "rules[0] has no effect for model 'x': rules[0] of old is of the older object" in conflict.message
    assert "rules[1] has no effect for every model: rules[1] of old" in conflict.message
    assert len(judged.notes) == 1


def test_a_rewrite_that_is_shadowed_in_part_is_accepted_and_conflicted() -> None:
    judged = of_rewrites(rewrite("old", rule("x", "1"), age=1), rewrite("new", rule("x y", "2")))
    assert accepted(judged, "new") == ("True", "Accepted")
    conflict = verdict_of(judged, "new")[names.CONFLICTED]
    assert (conflict.status, conflict.reason) == ("True", "PartiallyShadowed")
    assert "'x'" in conflict.message
    assert "'y'" not in conflict.message


def test_a_rule_shadowed_by_one_of_its_own_object_says_so() -> None:
    judged = of_rewrites(rewrite("a", rule("x", "1"), rule("x", "2"), rule("z z", "3")))
    conflict = verdict_of(judged, "a")[names.CONFLICTED]
    assert conflict.message == "rules[1] has no effect for model 'x': rules[0] comes first"


def test_rules_for_every_model_do_not_shadow_rules_for_one() -> None:
    judged = of_rewrites(rewrite("old", rule("*", "0"), age=1), rewrite("new", rule("x", "1")))
    assert {accepted(judged, name) for name in ("old", "new")} == {("True", "Accepted")}


def test_a_bad_rule_shadows_nothing_and_indices_are_those_of_the_object() -> None:
    judged = of_rewrites(
        rewrite("old", {"matches": [{"model": {"value": "x"}}]}, rule("y", "1"), age=1),
        rewrite("new", rule("x", "2"), rule("y", "3")),
    )
    conflict = verdict_of(judged, "new")[names.CONFLICTED]
    assert conflict.message == "rules[1] has no effect for model 'y': rules[1] of old is of the older object"


# -- loops and rules that do nothing --------------------------------------------------------------


def test_models_rewritten_to_each_other_are_told_to_everyone_who_takes_part() -> None:
    judged = of_rewrites(
        rewrite("one", rule("a", "b"), age=2),
        rewrite("two", rule("b", "c"), rule("c", "a"), age=1),
        rewrite("chain", rule("x", "a")),
    )
    assert accepted(judged, "one") == accepted(judged, "two") == ("True", "RewriteLoop")
    assert accepted(judged, "chain") == ("True", "Accepted")
    message = verdict_of(judged, "one")[names.ACCEPTED].message
    assert "rules[0] and rules[0] of two and rules[1] of two" in message
    assert "'a', 'b', 'c'" in message
    # They count all the same: a request is rewritten once.
    assert len(judged.rewrites) == 3


@pytest.mark.parametrize(
    "rules",
    [
        # A canary keeps a share of the requests where they are.
        [rule("a", ("a", 90), ("b", 10))],
        [rule("a", "b"), rule("b", "c")],
        [rule("*", "a"), rule("a", "b")],
        # Kept from the rule for every model.
        [rule("a", "a"), rule("*", "b")],
    ],
)
def test_what_only_looks_like_a_loop_is_fine(rules: list[dict[str, Any]]) -> None:
    assert accepted(of_rewrites(rewrite("a", *rules)), "a") == ("True", "Accepted")


def test_a_shadowed_rule_makes_no_loop() -> None:
    judged = of_rewrites(
        rewrite("old", rule("a", "b"), rule("b", "c"), age=1), rewrite("new", rule("b", "a"))
    )
    assert accepted(judged, "old") == ("True", "Accepted")


def test_a_model_rewritten_to_itself_is_told() -> None:
    judged = of_rewrites(rewrite("a", rule("x", "x"), rule("y", "z")))
    assert accepted(judged, "a") == ("True", "NoEffect")
    assert "rules[0] rewrites model 'x' to itself" in verdict_of(judged, "a")[names.ACCEPTED].message


def test_the_gravest_finding_gives_the_reason_and_all_are_told() -> None:
    judged = of_rewrites(rewrite("a", rule("x", "x"), rule("p", ("q", 1), "r"), rule("y")))
    assert accepted(judged, "a") == ("True", "PartiallyInvalid")
    message = verdict_of(judged, "a")[names.ACCEPTED].message
    assert [message.index(text) for text in ("left out", "never chooses", "to itself")] == sorted(
        message.index(text) for text in ("left out", "never chooses", "to itself")
    )


def test_messages_are_bounded_and_printable() -> None:
    hostile = [rule(f"\x1b[31m{i}\u202e" + "x" * 5000, "") for i in range(500)]
    (verdict,) = of_rewrites(rewrite("a", *hostile, *hostile)).verdicts
    assert all(len(condition.message) <= MESSAGE_CHARS for condition in verdict.conditions)


def test_a_circle_of_many_thousand_models_ends() -> None:
    size = 20_000
    rules = [rule(f"m{i}", f"m{(i + 1) % size}") for i in range(size)]
    judged = of_rewrites(rewrite("a", *rules))
    assert accepted(judged, "a") == ("True", "RewriteLoop")
    assert "and 19995 more" in verdict_of(judged, "a")[names.ACCEPTED].message
