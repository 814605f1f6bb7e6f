"""What users are told about their objectives and rewrites: by one replica, and only when it changes."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from e2e.kube import PICKER_RULES, POLICY_VERSION, POOL_VERSION, Namespace, model_rewrite, objective, pool
from e2e.kube_access import Access
from e2e.kube_client import APPLY, MERGE, Thing
from e2e.kube_lease import leads
from e2e.kube_line import LABELS, POOL
from e2e.kube_load import one
from e2e.kube_picker import ClusterPicker, pool_flags, proxied, running
from e2e.kube_pods import Kubelet, pod
from e2e.pages import has_ready, until
from epp import names
from epp.runtime.kube.policies import Pool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

OBJECTIVE: Final = "InferenceObjective"
REWRITE: Final = "InferenceModelRewrite"
DRAIN: Final = "--drain-timeout=500ms"
MANAGER: Final = Pool(POOL).field_manager
STATUSES: Final = ("inferenceobjectives", "inferencemodelrewrites")


# -- what is there ---------------------------------------------------------------------------------


def rewrites(models: str, *targets: str, **weights: int) -> Thing:
    """A rule: these models, with spaces between them, are served by these targets."""
    matches = [{"model": {"value": model}} for model in models.split()]
    made = [
        {"modelRewrite": each, **({"weight": weights[each]} if each in weights else {})} for each in targets
    ]
    return {"matches": matches, **({"targets": made} if made else {})}


async def read(namespace: Namespace, kind: str, name: str) -> Thing:
    return await namespace.client.get(namespace.path(POLICY_VERSION, kind, name))


def conditions(thing: Thing) -> dict[str, Thing]:
    return {each["type"]: each for each in thing.get("status", {}).get("conditions", ())}


def says(thing: Thing) -> dict[str, str]:
    """Status and reason of each of our conditions, by type."""
    return {
        kind: f"{each['status']} {each['reason']}"
        for kind, each in conditions(thing).items()
        if kind in (names.ACCEPTED, names.CONFLICTED)
    }


async def tells(namespace: Namespace, kind: str, name: str, **wanted: str) -> Thing:
    """The object once its conditions are these, of its present generation."""
    found: list[Thing] = []

    async def told() -> bool:
        thing = await read(namespace, kind, name)
        found[:] = [thing]
        news = conditions(thing).values()
        seen = {each.get("observedGeneration") for each in news if each["type"] in wanted}
        return says(thing) == wanted and seen <= {thing["metadata"]["generation"]}

    try:
        await until(told, f"{name} says {wanted}")
    except AssertionError as late:
        raise AssertionError(f"{late}; it says {found[0].get('status')}") from None
    return found[0]


def managers(thing: Thing) -> set[tuple[str, str]]:
    """Who has written the status, and how."""
    entries = thing["metadata"]["managedFields"]
    return {(each["manager"], each["operation"]) for each in entries if each.get("subresource") == "status"}


def written(namespace: Namespace, *accounts: str) -> Counter[tuple[str, str]]:
    """How often each account wrote the status of each object."""
    asked = (
        (account, each)
        for account in accounts or ("picker-0", "picker-1")
        for each in namespace.plane.audit(f"system:serviceaccount:{namespace.name}:{account}")
        if each.verb == "patch"
    )
    found: Counter[tuple[str, str]] = Counter()
    for account, each in asked:
        assert each.object_ref.subresource == "status", each
        found[account, each.object_ref.name] += 1
    return found


async def are_written(namespace: Namespace, wanted: Mapping[tuple[str, str], int], *accounts: str) -> None:
    """Until so many writes are in the audit log, which has a line a moment after its write; and no others."""
    await until(lambda: written(namespace, *accounts) >= Counter(wanted), f"{wanted} are written")
    assert written(namespace, *accounts) == wanted


def since(condition: Thing) -> datetime:
    return datetime.strptime(condition["lastTransitionTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


async def in_a_later_second_than(*things: Thing) -> None:
    """Waits until a new condition is told apart by its time, which Kubernetes writes in whole seconds."""
    newest = max(since(each) for thing in things for each in conditions(thing).values())
    await asyncio.sleep(max(0.0, (newest + timedelta(seconds=1.05) - datetime.now(UTC)).total_seconds()))


async def account_of(namespace: Namespace, number: int, rules: Sequence[Thing] = PICKER_RULES) -> Access:
    return await namespace.access(rules, name=f"picker-{number}")


def replica(namespace: Namespace, access: Access, of_pool: str = POOL) -> ClusterPicker:
    """A picker that has the name of its account."""
    flags = (*pool_flags(of_pool, namespace.name), DRAIN)
    return ClusterPicker(namespace.folder, access, flags, name=access.name)


@asynccontextmanager
async def two_replicas(namespace: Namespace) -> AsyncIterator[tuple[ClusterPicker, ClusterPicker]]:
    """The one that leads and the other, of a pool without pods."""
    pickers = [replica(namespace, await account_of(namespace, number)) for number in range(2)]
    async with running(*pickers):
        await until(lambda: any(map(leads, pickers)), "one of the replicas leads")
        leader, other = sorted(pickers, key=leads, reverse=True)
        assert not leads(other)
        yield leader, other


def account(picker: ClusterPicker) -> str:
    return picker.config_file.name.removesuffix("-config.yaml")


async def applied(namespace: Namespace, kind: str, name: str, condition: Thing) -> None:
    """A condition of somebody else's."""
    body = {
        "apiVersion": POLICY_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "status": {"conditions": [condition]},
    }
    path = namespace.path(POLICY_VERSION, kind, name, "status")
    await namespace.client.patch(path, body, APPLY, fieldManager="somebody")


REVIEWED: Final = {
    "type": "Reviewed",
    "status": "True",
    "reason": "ByHand",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


# -- what users are told ---------------------------------------------------------------------------

ACCEPTED: Final = {"Accepted": "True Accepted"}
RULES: Final[dict[str, tuple[list[Thing], dict[str, str]]]] = {
    "a-first": ([rewrites("m1", "x")], ACCEPTED),
    "b-shadowed": (
        [rewrites("m1", "y")],
        {"Accepted": "False Conflicted", "Conflicted": "True Shadowed"},
    ),
    "c-partly": (
        [rewrites("m1", "y"), rewrites("m2", "y")],
        {**ACCEPTED, "Conflicted": "True PartiallyShadowed"},
    ),
    "d-empty": ([], {"Accepted": "False NoRules"}),
    "e-invalid": ([rewrites("m3")], {"Accepted": "False Invalid"}),
    "f-partly-invalid": ([rewrites("m3"), rewrites("m3", "x")], {"Accepted": "True PartiallyInvalid"}),
    "g-weights": ([rewrites("m4", "x", "y", x=1)], {"Accepted": "True WeightsMissing"}),
    "h-loop": ([rewrites("m5", "m6")], {"Accepted": "True RewriteLoop"}),
    "i-loop": ([rewrites("m6", "m5")], {"Accepted": "True RewriteLoop"}),
    "j-same": ([rewrites("m7", "m7")], {"Accepted": "True NoEffect"}),
}
"""Rules of a rewrite, and what is said about it; of objects as old as each other, the first name counts."""


async def test_one_replica_tells_each_object_once_what_became_of_it(namespace: Namespace) -> None:
    await namespace.create(pool(POOL, LABELS))
    gateway = {
        "parentRef": {"name": "gateway", "kind": "Gateway", "group": "gateway.networking.k8s.io"},
        "conditions": [{**REVIEWED, "type": "Accepted", "reason": "Accepted"}],
    }
    pool_path = namespace.path(POOL_VERSION, "InferencePool", POOL)
    await namespace.client.patch(f"{pool_path}/status", {"status": {"parents": [gateway]}}, MERGE)
    pool_before = await namespace.client.get(pool_path)
    for name, (rules, _) in RULES.items():
        await namespace.create(model_rewrite(name, POOL, rules))
    await namespace.create(objective("plain", POOL, 5))
    await namespace.create(objective("low", POOL, -1))
    foreign = objective("foreign", POOL, 1)
    foreign["spec"]["poolRef"]["group"] = "llm-d.ai"
    await namespace.create(foreign)
    await namespace.create(objective("elsewhere", "another", 1))
    await namespace.create(model_rewrite("k-elsewhere", "another", [rewrites("m1", "y")]))
    await applied(namespace, OBJECTIVE, "plain", REVIEWED)
    await applied(namespace, REWRITE, "a-first", REVIEWED)
    begun = datetime.now(UTC) - timedelta(seconds=1)
    async with two_replicas(namespace) as (leader, other):
        told = {name: await tells(namespace, REWRITE, name, **wanted) for name, (_, wanted) in RULES.items()}
        told |= {name: await tells(namespace, OBJECTIVE, name, **ACCEPTED) for name in ("plain", "low")}
        ended = datetime.now(UTC) + timedelta(seconds=1)
        # Who writes more than it needs to is given the time for it.
        await asyncio.sleep(0.5)
        await are_written(namespace, {(account(leader), name): 1 for name in told})
        for line_of in (leader, other):
            await until(lambda line_of=line_of: notes(line_of), "whose the foreign one is, is told")  # type: ignore[misc]
            assert notes(line_of) == 1
    for name, thing in told.items():
        reviewed = {("somebody", "Apply")} if name in ("plain", "a-first") else set()
        assert managers(thing) == {(MANAGER, "Apply")} | reviewed
        ours = [each for kind, each in conditions(thing).items() if kind != "Reviewed"]
        assert all(begun <= since(each) <= ended for each in ours)
        assert all(each["message"] for each in ours)
        assert ("Reviewed" in conditions(thing)) == bool(reviewed)
    for name in ("plain", "a-first"):
        assert conditions(told[name])["Reviewed"] == REVIEWED
    assert "a-first" in conditions(told["b-shadowed"])["Conflicted"]["message"]
    assert "rules[0]" in conditions(told["c-partly"])["Conflicted"]["message"]
    assert "i-loop" in conditions(told["h-loop"])["Accepted"]["message"]
    assert "refused" in conditions(told["low"])["Accepted"]["message"]
    for kind, name in ((OBJECTIVE, "foreign"), (OBJECTIVE, "elsewhere"), (REWRITE, "k-elsewhere")):
        assert not managers(await read(namespace, kind, name))
    assert await namespace.client.get(pool_path) == pool_before


def notes(picker: ClusterPicker) -> int:
    return sum("set spec.poolRef.group to" in text for text in picker.log_lines())


async def test_conditions_are_written_when_there_is_a_reason(namespace: Namespace) -> None:
    """What changes them, what does not, and who writes when the leader has gone."""
    await namespace.create(pool(POOL, LABELS))
    await namespace.create(objective("plain", POOL, 5))
    await namespace.create(model_rewrite("a-older", POOL, [rewrites("m", "x")]))
    await namespace.create(model_rewrite("b-younger", POOL, [rewrites("m", "y")]))
    shadowed = {"Accepted": "False Conflicted", "Conflicted": "True Shadowed"}
    async with two_replicas(namespace) as (leader, other):
        first = await tells(namespace, OBJECTIVE, "plain", **ACCEPTED)
        before = await tells(namespace, REWRITE, "b-younger", **shadowed)
        await tells(namespace, REWRITE, "a-older", **ACCEPTED)
        plain, writer = namespace.path(POLICY_VERSION, OBJECTIVE, "plain"), account(leader)

        # A label is no reason, a new priority is, and the condition is as old as before.
        await namespace.change(plain, {"metadata": {"labels": {"seen": "yes"}}})
        await namespace.create(objective("marker", POOL, 1))
        await tells(namespace, OBJECTIVE, "marker", **ACCEPTED)
        initially = {(writer, name): 1 for name in ("plain", "a-older", "b-younger", "marker")}
        await are_written(namespace, initially)
        await in_a_later_second_than(first, before)
        await namespace.change(plain, {"spec": {"priority": 6}})
        second = await tells(namespace, OBJECTIVE, "plain", **ACCEPTED)
        assert "priority 6" in conditions(second)["Accepted"]["message"]
        assert since(conditions(second)["Accepted"]) == since(conditions(first)["Accepted"])

        # The older one goes, and what it shadowed counts, since now.
        await namespace.delete(POLICY_VERSION, REWRITE, "a-older")
        after = await tells(namespace, REWRITE, "b-younger", **ACCEPTED)
        assert since(conditions(after)["Accepted"]) > since(conditions(before)["Accepted"])

        # Somebody writes over ours.
        forged = {**REVIEWED, "type": "Accepted", "status": "False", "reason": "ByHand"}
        await namespace.client.patch(f"{plain}/status", {"status": {"conditions": [forged]}}, MERGE)
        await tells(namespace, OBJECTIVE, "plain", **ACCEPTED)
        wanted = {(writer, "plain"): 3, (writer, "b-younger"): 2, (writer, "a-older"): 1}
        await are_written(namespace, {**wanted, (writer, "marker"): 1})

        # Another leader finds all as it should be, and writes what is new.
        await leader.child.stop(signal.SIGTERM, 60)
        await until(lambda: leads(other), "the other replica leads")
        await namespace.create(objective("new", POOL, 1))
        await tells(namespace, OBJECTIVE, "new", **ACCEPTED)
        await are_written(namespace, {(account(other), "new"): 1}, account(other))


async def test_an_object_that_moves_to_another_pool_takes_nothing_along(namespace: Namespace) -> None:
    pools = (POOL, "second")
    for name in pools:
        await namespace.create(pool(name, LABELS))
    await namespace.create(objective("wanderer", POOL, 1))
    await namespace.create(model_rewrite("wanderer", POOL, [rewrites("m", "x")]))
    kinds = (OBJECTIVE, REWRITE)
    for kind in kinds:
        await applied(namespace, kind, "wanderer", REVIEWED)
    accesses = [await account_of(namespace, number) for number in range(2)]
    async with running(*map(replica, [namespace] * 2, accesses, pools)):
        for kind in kinds:
            await tells(namespace, kind, "wanderer", **ACCEPTED)
        for name in ("second", POOL, "second"):
            manager = Pool(name).field_manager
            for kind in kinds:
                patch = {"spec": {"poolRef": {"name": name}}}
                await namespace.change(namespace.path(POLICY_VERSION, kind, "wanderer"), patch)
            for kind in kinds:
                await only(namespace, kind, {manager, "somebody"})
                there = await tells(namespace, kind, "wanderer", **ACCEPTED)
                assert f"pool {name}" in conditions(there)["Accepted"]["message"]
        # Nobody speaks for a pool without a picker: the object is as one that nobody has looked at.
        for kind in kinds:
            patch = {"spec": {"poolRef": {"name": "third"}}}
            await namespace.change(namespace.path(POLICY_VERSION, kind, "wanderer"), patch)
        for kind in kinds:
            await only(namespace, kind, {"somebody"})
            there = await read(namespace, kind, "wanderer")
            assert conditions(there)["Reviewed"] == REVIEWED
            assert says(there).get("Accepted") in (None, "Unknown Pending")
        # Each arrival and each departure is written for each kind, and nobody fights: who sees the other's
        # write later than its own may repeat that once, and then all are quiet.
        await until(lambda: is_quiet(namespace), "nobody writes any more")
        assert sum(written(namespace).values()) <= 2 * 2 * (4 + 4)


async def is_quiet(namespace: Namespace) -> bool:
    before = written(namespace)
    await asyncio.sleep(0.5)
    return written(namespace) == before


async def only(namespace: Namespace, kind: str, wanted: set[str]) -> None:
    """Until these alone have written the wanderer's status."""

    async def held() -> bool:
        return {manager for manager, _ in managers(await read(namespace, kind, "wanderer"))} == wanted

    await until(held, f"only {wanted} have written the status")


# -- rights ----------------------------------------------------------------------------------------


def without(resource: str) -> list[Thing]:
    """A picker's rights but for these."""
    return [each for each in PICKER_RULES if not any(resource in named for named in each["resources"])]


def refused(namespace: Namespace, picker: ClusterPicker) -> Counter[tuple[str, str]]:
    """What a picker asked for without the right to: how often, by resource and verb."""
    asked = namespace.plane.audit(f"system:serviceaccount:{namespace.name}:{account(picker)}")
    return Counter((each.object_ref.resource, each.verb) for each in asked if each.status == 403)


def told(picker: ClusterPicker, what: str) -> list[str]:
    return [text for text in picker.log_lines() if what in text]


async def answers(url: str) -> bool:
    return (await one(url)).ok


async def test_missing_rights_cost_conditions_and_nothing_else(namespace: Namespace, envoy: Path) -> None:
    """One replica may not have the lease, the other may not write status. Each says so once, both serve."""
    await namespace.create(pool(POOL, LABELS))
    for number in range(2):
        await namespace.create(objective(f"goal-{number}", POOL, number))
    await namespace.create(model_rewrite("a-rewrite", POOL, [rewrites("m", "x")]))
    accesses = [
        await account_of(namespace, number, without(what))
        for number, what in enumerate(("leases", "/status"))
    ]
    leaseless, silent = pickers = [replica(namespace, access) for access in accesses]
    async with (
        Kubelet(namespace.client, namespace.name),
        running(*pickers),
        proxied(envoy, *pickers) as url,
    ):
        await namespace.create(pod("a", LABELS))
        await until(lambda: leads(silent), "who may have the lease leads")
        patches = {(resource, "patch") for resource in STATUSES}
        await until(lambda: refused(namespace, silent).keys() >= patches, "it tried to write")
        await namespace.change(namespace.path(POLICY_VERSION, OBJECTIVE, "goal-0"), {"spec": {"priority": 7}})
        for picker in pickers:
            await until(lambda picker=picker: has_ready(picker, 1), "both know the pod")  # type: ignore[misc]
        await until(lambda: answers(url), "requests are answered")
        await until(
            lambda: refused(namespace, leaseless)[("leases", "get")] > 1, "it tried for the lease again"
        )
        for _ in range(10):
            assert (await one(url)).ok
        assert refused(namespace, silent).keys() == patches
        for picker, missing in (
            (leaseless, "with get, create and update on leases"),
            *((silent, f"with patch on {resource}/status") for resource in STATUSES),
        ):
            await until(lambda lines=(picker, missing): told(*lines), f"it says that it is {missing}")  # type: ignore[misc]
            (line,) = told(picker, missing)
            assert '"level": "warning"' in line
        assert not leads(leaseless)
        # With the right that was missing it writes what the other could not.
        await accesses[0].allow([each for each in PICKER_RULES if "leases" in each["resources"]])
        await silent.child.stop(signal.SIGTERM, 60)
        for number in range(2):
            await tells(namespace, OBJECTIVE, f"goal-{number}", **ACCEPTED)
        await tells(namespace, REWRITE, "a-rewrite", **ACCEPTED)
        assert sum(": works again" in text for text in leaseless.log_lines()) == 1
