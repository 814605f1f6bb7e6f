"""Conditions of objectives and rewrites, written by the leader of the replicas."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

import msgspec

from epp import names
from epp.runtime.kube.api import KubeApi, KubeError
from epp.runtime.kube.objects import Condition, PolicyStatus
from epp.runtime.kube.policies import Verdict
from epp.runtime.kube.told import Told

_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {names.OBJECTIVE_RESOURCE: names.OBJECTIVE_KIND, names.MODEL_REWRITE_RESOURCE: names.MODEL_REWRITE_KIND}
)
_OURS: Final = frozenset({names.ACCEPTED, names.CONFLICTED})
"""Types of conditions that go when a verdict has them no longer."""
_APPLY: Final = "application/apply-patch+yaml"
_INVALID: Final = frozenset({400, 415, 422})
_SERVER: Final = "the API server"
_BETWEEN_S: Final = 0.1
_BACKOFF_S: Final = 1.0
_SLOWEST_S: Final = 60.0
_FORBIDDEN_FOR_S: Final = 60.0

_Key = tuple[str, str, str, str]


class _Answer(msgspec.Struct, frozen=True):
    status: PolicyStatus | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    """What was decided for an object, and how it looked before and after; it may be seen late as it was."""

    uid: str
    generation: int
    conditions: tuple[Condition, ...]
    looks: tuple[tuple[Condition, ...], ...]

    def covers(self, verdict: Verdict) -> bool:
        decided = self.uid, self.generation, self.conditions
        return decided == (verdict.uid, verdict.generation, verdict.conditions)


class StatusWriter:
    """Applies verdicts to the status of their objects, server-side, where they differ from what is there.

    Others' conditions on the same objects stay; ours that are wanted no longer go. An object is written anew
    only when its verdict changes or somebody changed its conditions.

    Args:
        manager: Whose the conditions are: what it wrote before is what goes.
        said: Hears what is wrong, once for each reason, and that it is over.
        clock: Monotonic seconds. `wall`: seconds since 1970.
    """

    def __init__(
        self,
        api: KubeApi,
        manager: str,
        said: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._query = {"fieldManager": manager, "force": "true"}
        self._said = said
        self._told = Told(said)
        self._clock = clock
        self._wall = wall
        self._leads = False
        self._wanted: dict[_Key, Verdict] = {}
        self._done: dict[_Key, _Done] = {}
        self._forbidden_until: dict[tuple[str, str], float] = {}
        """By group and resource."""
        self._news = asyncio.Event()

    def wants(self, verdicts: Sequence[Verdict]) -> None:
        """These take the place of all that were wanted."""
        self._wanted = {_key(verdict): verdict for verdict in verdicts}
        self._done = {key: done for key, done in self._done.items() if key in self._wanted}
        self._news.set()

    def lead(self, leads: bool) -> None:
        """Write from now on, or no more."""
        self._leads = leads
        self._done.clear()
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            try:
                due_s = await self._round()
            except (KubeError, msgspec.MsgspecError) as error:
                failures += 1
                await asyncio.sleep(self._failed(error, failures))
                continue
            failures = 0
            try:
                async with asyncio.timeout(due_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _round(self) -> float | None:
        """Write what is due. Returns in how many seconds the next is due by itself, None: nothing is."""
        self._news.clear()
        for key in tuple(self._wanted):
            # It may be another verdict, or none, by now.
            verdict = self._wanted.get(key)
            if not self._leads:
                return None
            if verdict is not None and self._is_due(key, verdict):
                # One that fails for ever comes after all others the next time.
                self._wanted[key] = self._wanted.pop(key)
                await self._write(key, verdict)
                await asyncio.sleep(_BETWEEN_S)
        now = self._clock()
        return min((until - now for until in self._forbidden_until.values() if until > now), default=None)

    def _is_due(self, key: _Key, verdict: Verdict) -> bool:
        forbidden_until = self._forbidden_until.get((verdict.group, verdict.resource))
        if forbidden_until is not None and self._clock() < forbidden_until:
            return False
        done = self._done.get(key)
        if done and done.covers(verdict):
            if verdict.current == done.looks[-1]:
                # Seen as it was left: from now on, any other look is somebody's change.
                self._done[key] = replace(done, looks=done.looks[-1:])
            if verdict.current in done.looks:
                return False
        return differs(verdict)

    async def _write(self, key: _Key, verdict: Verdict) -> None:
        after = verdict.current
        try:
            after = await self._apply(verdict)
        except KubeError as error:
            match error.status:
                case 403:
                    return self._forbidden(verdict, error)
                case 404:
                    # Its watch will tell that it is gone.
                    pass
                case status if status in _INVALID:
                    self._said(f"status of {verdict.resource} {verdict.name}: {error}")
                case _:
                    raise
        looks = verdict.current, after
        self._done[key] = _Done(verdict.uid, verdict.generation, verdict.conditions, looks)
        return None

    async def _apply(self, verdict: Verdict) -> tuple[Condition, ...]:
        """Returns the conditions that the object has then."""
        path = (
            f"/apis/{verdict.group}/{verdict.version}/namespaces/{verdict.namespace}"
            f"/{verdict.resource}/{verdict.name}/status"
        )
        body = self._body(verdict)
        answer = await self._api.send("PATCH", path, body, content_type=_APPLY, query=self._query)
        status = msgspec.json.decode(answer, type=_Answer).status
        self._told.over(_SERVER, "status of objectives and rewrites: works again")
        self._told.over((verdict.group, verdict.resource), f"status of {verdict.resource}: works again")
        return () if status is None else status.conditions or ()

    def _body(self, verdict: Verdict) -> dict[str, object]:
        now = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        since = {(each.type, each.status): each.last_transition_time for each in verdict.current}
        conditions = [
            {
                "type": each.type,
                "status": each.status,
                "reason": each.reason,
                "message": each.message,
                "observedGeneration": verdict.generation,
                "lastTransitionTime": since.get((each.type, each.status)) or now,
            }
            for each in verdict.conditions
        ]
        return {
            "apiVersion": f"{verdict.group}/{verdict.version}",
            "kind": _KINDS[verdict.resource],
            "metadata": {"name": verdict.name, "namespace": verdict.namespace},
            # Even an empty list would be ours.
            **({"status": {"conditions": conditions}} if conditions else {}),
        }

    def _forbidden(self, verdict: Verdict, error: KubeError) -> None:
        of_kind = verdict.group, verdict.resource
        self._forbidden_until[of_kind] = self._clock() + _FORBIDDEN_FOR_S
        text = (
            f"status of {verdict.resource}: {error}; a Role in namespace {verdict.namespace} with patch on "
            f"{verdict.resource}/status of {verdict.group} is missing, so their conditions are not written"
        )
        self._told.trouble(of_kind, error.status, text)

    def _failed(self, error: Exception, failures: int) -> float:
        """Tell it, and say how many seconds to wait."""
        status, after_s = (error.status, error.retry_after_s) if isinstance(error, KubeError) else (0, None)
        text = f"status of objectives and rewrites: {error}; tried again"
        self._told.trouble(_SERVER, (type(error), status), text)
        return min(max(_BACKOFF_S * 2.0 ** min(failures - 1, 10), after_s or 0.0), _SLOWEST_S)


def differs(verdict: Verdict) -> bool:
    """Whether the object's conditions are others than its verdict's, times apart."""
    current = {each.type: each for each in verdict.current}
    if (_OURS & current.keys()) - {each.type for each in verdict.conditions}:
        return True
    return any(
        each.type not in current
        or _says(each, verdict.generation)
        != _says(current[each.type], current[each.type].observed_generation)
        for each in verdict.conditions
    )


def _says(condition: Condition, generation: int) -> tuple[str, str, str, int]:
    return condition.status, condition.reason, condition.message, generation


def _key(verdict: Verdict) -> _Key:
    return verdict.group, verdict.resource, verdict.namespace, verdict.name
