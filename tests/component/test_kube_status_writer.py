"""Conditions of objectives and rewrites: what is sent, when it is, and when it is not."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from epp.runtime.kube import status
from epp.runtime.kube.api import KubeError
from epp.runtime.kube.objects import Condition
from epp.runtime.kube.policies import Verdict
from epp.runtime.kube.status import StatusWriter, differs

DEADLINE_S = 20.0
SINCE = "2026-01-05T10:00:00Z"
NOW = "2026-02-03T04:05:06Z"
NOW_S = 1770091506.789
PENDING = Condition("Ready", "Unknown", "Pending", "Waiting for controller", 0, "1970-01-01T00:00:00Z")
ACCEPTED = Condition("Accepted", "True", "Accepted", "for pool p")
CONFLICTED = Condition("Conflicted", "True", "PartlyShadowed", "rule 0 by older")


def verdict(
    name: str = "premium",
    *conditions: Condition,
    current: tuple[Condition, ...] = (PENDING,),
    resource: str = "inferenceobjectives",
    uid: str = "u",
    generation: int = 3,
) -> Verdict:
    said = conditions or (ACCEPTED,)
    return Verdict(resource, "llm-d.ai", "v1alpha2", "models", name, uid, generation, said, current)


def as_there(condition: Condition, generation: int = 3, since: str = SINCE) -> Condition:
    return msgspec.structs.replace(condition, observed_generation=generation, last_transition_time=since)


def refused(code: int, reason: str = "", retry_after_s: float | None = None) -> KubeError:
    return KubeError(
        "PATCH", "PATH", "said the server", status=code, reason=reason, retry_after_s=retry_after_s
    )


@dataclass
class Api:
    """Applies as a server does: conditions of this manager by type, those of others stay."""

    conditions: dict[str, tuple[Condition, ...]] = field(default_factory=dict)
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    refuses: Callable[[str], KubeError | None] = lambda name: None
    forms: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    async def send(
        self, method: str, path: str, body: object, *, content_type: str, query: Mapping[str, str]
    ) -> bytes:
        sent = msgspec.json.decode(msgspec.json.encode(body))
        self.calls.append((method, path, sent))
        self.forms.append((content_type, query))
        name = sent["metadata"]["name"]
        await asyncio.sleep(0)
        error = self.refuses(name)
        if error is not None:
            raise error
        applied = msgspec.convert(sent.get("status", {}).get("conditions", []), tuple[Condition, ...])
        others = (each for each in self.conditions.get(name, (PENDING,)) if each.type == "Ready")
        self.conditions[name] = (*others, *applied)
        return msgspec.json.encode({**sent, "status": {"conditions": self.conditions[name]}})

    @property
    def names(self) -> list[str]:
        return [body["metadata"]["name"] for _, _, body in self.calls]


class Writing:
    """A writer that runs in time that passes at once: `slept` holds what it slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = Api()
        self.said: list[str] = []
        self.now = 1000.0
        self.slept: list[float] = []
        self.writer = StatusWriter(
            self.api,  # type: ignore[arg-type]
            "warmroute:pool",
            self.said.append,
            clock=lambda: self.now,
            wall=lambda: NOW_S,
        )
        self._sleep = asyncio.sleep
        monkeypatch.setattr(status.asyncio, "sleep", self._pass)

    async def _pass(self, seconds: float) -> None:
        if seconds:
            self.slept.append(seconds)
        self.now += seconds
        await self._sleep(0)

    @asynccontextmanager
    async def runs(self) -> Any:
        task = asyncio.create_task(self.writer.run())
        try:
            yield self.writer
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def rest(self) -> None:
        """Until nothing happens any more."""
        for _ in range(60):
            await self._sleep(0)

    async def until(self, seen: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not seen():
                await self._sleep(0.001)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    return Writing(monkeypatch)


# -- what is sent -----------------------------------------------------------------------------------


async def test_conditions_are_applied_to_the_status(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.rest()
    (call,) = writing.api.calls
    method, path, body = call
    assert method == "PATCH"
    assert path == "/apis/llm-d.ai/v1alpha2/namespaces/models/inferenceobjectives/premium/status"
    assert writing.api.forms == [
        ("application/apply-patch+yaml", {"fieldManager": "warmroute:pool", "force": "true"})
    ]
    assert body == {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": "premium", "namespace": "models"},
        "status": {
            "conditions": [
                {
                    "type": "Accepted",
                    "status": "True",
                    "reason": "Accepted",
                    "message": "for pool p",
                    "observedGeneration": 3,
                    "lastTransitionTime": NOW,
                }
            ]
        },
    }
    assert writing.said == []


async def test_rewrites_have_their_own_kind(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict("canary", ACCEPTED, CONFLICTED, resource="inferencemodelrewrites")])
        await writing.rest()
    (call,) = writing.api.calls
    assert call[2]["kind"] == "InferenceModelRewrite"
    assert [each["type"] for each in call[2]["status"]["conditions"]] == ["Accepted", "Conflicted"]


async def test_a_transition_keeps_its_time_while_the_status_stays(writing: Writing) -> None:
    current = (as_there(ACCEPTED, generation=2), as_there(CONFLICTED, generation=2))
    settled = msgspec.structs.replace(CONFLICTED, status="False", reason="Resolved")
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict("canary", ACCEPTED, settled, current=current)])
        await writing.rest()
    (call,) = writing.api.calls
    times = {each["type"]: each["lastTransitionTime"] for each in call[2]["status"]["conditions"]}
    assert times == {"Accepted": SINCE, "Conflicted": NOW}


async def test_conditions_go_by_applying_none(writing: Writing) -> None:
    gone = msgspec.structs.replace(CONFLICTED, type="Accepted")
    verdict_of_none = replace(verdict(current=(PENDING, as_there(gone))), conditions=())
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict_of_none])
        await writing.rest()
        writer.wants([replace(verdict_of_none, current=(PENDING,))])
        await writing.rest()
    (call,) = writing.api.calls
    assert call[2] == {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": "premium", "namespace": "models"},
    }


# -- when -------------------------------------------------------------------------------------------


def test_what_differs() -> None:
    there = as_there(ACCEPTED)
    changes = {"status": "False", "reason": "Invalid", "message": "other", "observed_generation": 2}
    assert not differs(verdict(current=(there, PENDING)))
    assert not differs(verdict(current=(PENDING, as_there(ACCEPTED, since=NOW))))
    for name, value in changes.items():
        assert differs(verdict(current=(msgspec.structs.replace(there, **{name: value}),))), name
    assert differs(verdict(current=()))
    assert differs(verdict(current=(there, as_there(CONFLICTED)))), "what is wanted no longer goes"
    assert differs(verdict("premium", ACCEPTED, CONFLICTED, current=(there,)))


async def test_only_the_leader_writes(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.wants([verdict()])
        await writing.rest()
        assert writing.api.calls == []
        writer.lead(True)
        await writing.rest()
        assert writing.api.names == ["premium"]
        writer.lead(False)
        writer.wants([verdict("other")])
        await writing.rest()
        assert writing.api.names == ["premium"]


async def test_nothing_is_written_where_nothing_differs(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict(current=(PENDING, as_there(ACCEPTED)))])
        await writing.rest()
    assert writing.api.calls == []


async def test_what_was_written_is_not_written_again_before_it_is_seen(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.rest()
        writer.wants([verdict(), verdict("other")])  # the watch has not told of the write yet
        await writing.rest()
        assert writing.api.names == ["premium", "other"]
        seen = verdict(current=writing.api.conditions["premium"])
        writer.wants([seen])
        await writing.rest()
        assert len(writing.api.calls) == 2
        writer.wants([verdict()])  # somebody has taken it away
        await writing.rest()
        assert writing.api.names == ["premium", "other", "premium"]


async def test_what_was_written_counts_for_one_object_and_one_term(writing: Writing) -> None:
    """Not for another of the same name, nor after others may have led: then what is seen counts."""
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.rest()
        writer.wants([])
        writer.wants([verdict()])
        await writing.rest()
        assert writing.api.names == ["premium"] * 2
        writer.wants([verdict(uid="v")])  # deleted and made again between two looks
        await writing.rest()
        writer.wants([verdict(uid="v")])
        await writing.rest()
        assert writing.api.names == ["premium"] * 3
        writer.lead(False)
        await writing.rest()
        writer.lead(True)
        await writing.rest()
        assert writing.api.names == ["premium"] * 4


async def test_a_new_verdict_or_generation_is_written(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.rest()
        writer.wants([verdict(generation=4, current=writing.api.conditions["premium"])])
        await writing.rest()
        denied = msgspec.structs.replace(ACCEPTED, status="False", reason="Invalid")
        writer.wants([verdict("premium", denied, generation=4, current=writing.api.conditions["premium"])])
        await writing.rest()
    sent = [body["status"]["conditions"][0] for _, _, body in writing.api.calls]
    assert [(each["status"], each["observedGeneration"]) for each in sent] == [
        ("True", 3),
        ("True", 4),
        ("False", 4),
    ]


async def test_another_managers_condition_of_our_type_is_no_endless_fight(writing: Writing) -> None:
    """A server keeps it however often we apply without it."""
    theirs = as_there(CONFLICTED)
    writing.api.conditions["premium"] = (msgspec.structs.replace(theirs, type="Ready"),)
    current: tuple[Condition, ...] = (theirs,)
    async with writing.runs() as writer:
        writer.lead(True)
        for _ in range(5):
            writer.wants([verdict(current=current)])
            await writing.rest()
            applied = [each for each in writing.api.conditions["premium"] if each.type == "Accepted"]
            current = (theirs, *applied)
    assert len(writing.api.calls) <= 2


async def test_writes_are_spread(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict(f"o{number}") for number in range(20)])
        await writing.until(lambda: len(writing.slept) == 20)
    assert writing.slept == [0.1] * 20


async def test_a_verdict_that_was_withdrawn_is_not_written(writing: Writing) -> None:
    async with writing.runs() as writer:
        writer.lead(True)
        writing.api.refuses = lambda name: writer.wants([verdict("b")]) or None
        writer.wants([verdict("a"), verdict("b"), verdict("c")])
        await writing.rest()
    assert writing.api.names == ["a", "b"]


# -- what goes wrong --------------------------------------------------------------------------------


async def test_a_missing_role_is_said_once_and_tried_every_minute(writing: Writing) -> None:
    api, writer = writing.api, writing.writer
    api.refuses = lambda name: refused(403, "Forbidden") if name.startswith("o") else None
    writer.lead(True)
    writer.wants([verdict("o1"), verdict("o2"), verdict("r1", resource="inferencemodelrewrites")])
    due_s = await writer._round()
    assert api.names == ["o1", "r1"], "one refusal is for all of a kind"
    assert due_s == pytest.approx(60.0, abs=1.0)
    (said,) = writing.said
    assert said.startswith(
        "status of inferenceobjectives: PATCH PATH: 403 said the server; a Role in namespace"
    )
    assert "with patch on inferenceobjectives/status of llm-d.ai is missing" in said
    assert await writer._round() is not None
    assert len(api.calls) == 2
    writing.now += 60.0
    await writer._round()
    assert api.names[2:] == ["o2"], "another one, in case it is the one that is wrong"
    assert len(writing.said) == 1
    api.refuses = lambda name: None
    writing.now += 60.0
    assert await writer._round() is None
    assert sorted(api.names[3:]) == ["o1", "o2"]
    assert writing.said[1:] == ["status of inferenceobjectives: works again"]


async def test_trouble_is_said_once_and_left_alone_for_longer_and_longer(writing: Writing) -> None:
    writing.api.refuses = lambda name: refused(503)
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.until(lambda: len(writing.slept) >= 9)
        assert writing.slept[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
        writing.api.refuses = lambda name: None
        await writing.until(lambda: "premium" in writing.api.conditions)
        await writing.rest()
        assert writing.said == [
            "status of objectives and rewrites: PATCH PATH: 503 said the server; tried again",
            "status of objectives and rewrites: works again",
        ]
        # What comes later is trouble anew.
        writing.api.refuses = lambda name: refused(503)
        writing.slept.clear()
        writer.wants([verdict("other")])
        await writing.until(lambda: len(writing.slept) >= 2)
        assert writing.slept[:2] == [1.0, 2.0]
    assert len(writing.said) == 3


async def test_a_server_that_asks_for_time_gets_it(writing: Writing) -> None:
    writing.api.refuses = lambda name: refused(429, "TooManyRequests", retry_after_s=7.0)
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.until(lambda: writing.slept)
    assert writing.slept[0] == 7.0


async def test_one_that_fails_for_ever_holds_up_no_other(writing: Writing) -> None:
    writing.api.refuses = lambda name: refused(500) if name == "bad" else None
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict("bad"), verdict("a"), verdict("b")])
        await writing.until(lambda: {"a", "b"} <= writing.api.conditions.keys())


async def test_one_that_is_gone_is_dropped(writing: Writing) -> None:
    writing.api.refuses = lambda name: refused(404, "NotFound")
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.rest()
        writer.wants([verdict()])
        await writing.rest()
    assert writing.api.names == ["premium"]
    assert writing.said == []


async def test_what_a_server_does_not_take_is_said_and_not_sent_again(writing: Writing) -> None:
    writing.api.refuses = lambda name: refused(422, "Invalid") if name == "premium" else None
    async with writing.runs() as writer:
        writer.lead(True)
        writer.wants([verdict()])
        await writing.rest()
        writer.wants([verdict(), verdict("other")])
        await writing.rest()
    assert writing.api.names == ["premium", "other"]
    assert writing.said == ["status of inferenceobjectives premium: PATCH PATH: 422 said the server"]
