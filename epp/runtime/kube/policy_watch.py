"""Objectives and rewrites in the cluster, wherever their definitions are, and what they come to."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from epp import names
from epp.runtime.kube.api import KubeApi, KubeError
from epp.runtime.kube.objects import InferenceModelRewrite, InferenceObjective
from epp.runtime.kube.policies import Judged, Pool, policies
from epp.runtime.kube.told import Told
from epp.runtime.kube.watch import Backoff, Collection

GROUPS: Final = (names.LLM_D_GROUP, names.LEGACY_INFERENCE_GROUP)
"""Where the definitions may be; the first that has one counts."""

T = TypeVar("T", InferenceObjective, InferenceModelRewrite)


class _Resource(msgspec.Struct, frozen=True):
    name: str = ""


class _Resources(msgspec.Struct, frozen=True):
    """What a version of a group serves, as the API's discovery tells it."""

    resources: tuple[_Resource, ...] | None = None


@dataclass(slots=True, eq=False)
class _Kind(Generic[T]):
    """One kind: where it is followed and what was found there.

    Attributes:
        otherwise: what counts without any such objects.
        group: where it is followed; "" = nowhere yet.
        found, found_in: the objects known, and their group. They outlive a change of the group.
    """

    resource: str
    kind: type[T]
    otherwise: str
    group: str = ""
    found: Mapping[str, T] = field(default_factory=dict)
    found_in: str = GROUPS[0]
    synced: bool = False
    task: asyncio.Task[None] | None = None


class PolicyWatch:
    """Follows the objectives and rewrites of a pool's namespace.

    Each kind is looked for in `GROUPS`, again every `look_again_s` until it is found in the first. What is
    known stays while the API server is away and while a definition moves.

    Attributes:
        settled: all that is to be had has been listed, or nobody waits for it any more (`settle`).
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        pool: Pool,
        changed: Callable[[Judged], None],
        *,
        said: Callable[[str], None],
        look_again_s: float,
        backoff: Backoff,
    ) -> None:
        """`changed` is called when settled, and from then on after every change."""
        self.settled = False
        self._api = api
        self._namespace = namespace
        self._pool = pool
        self._changed = changed
        self._said = said
        self._look_again_s = look_again_s
        self._backoff = backoff
        self._told = Told(said)
        self._failures = 0
        self._objectives = _Kind(
            names.OBJECTIVE_RESOURCE,
            InferenceObjective,
            "priorities come from the configuration file alone, else are 0",
        )
        self._rewrites = _Kind(
            names.MODEL_REWRITE_RESOURCE,
            InferenceModelRewrite,
            "models are rewritten by the configuration file alone",
        )

    async def run(self) -> None:
        """Until cancelled; nothing that the server does ends it."""
        async with asyncio.TaskGroup() as tasks:
            pause_s = await self._look(tasks)
            while pause_s:
                await asyncio.sleep(pause_s)
                pause_s = await self._look(tasks)

    # -- where the kinds are ----------------------------------------------------------------------

    async def _look(self, tasks: asyncio.TaskGroup) -> float:
        """Follow each kind where it is now. How long until the next look, in seconds; 0 = none is needed."""
        try:
            served = {GROUPS[0]: await self._served(GROUPS[0])}
            if any(kind.resource not in served[GROUPS[0]] for kind in self._kinds):
                served[GROUPS[1]] = await self._served(GROUPS[1])
        except KubeError as error:
            self._failures += 1
            self._told.trouble("discovery", error.status or str(error), f"{error}; tried again")
            return self._backoff.pause_s(self._failures, error, random.random())
        self._failures = 0
        self._told.over("discovery", "the API server tells again what it serves")
        for kind in self._kinds:
            self._place(kind, [group for group, resources in served.items() if kind.resource in resources])
            if kind.task is None and kind.group:
                kind.task = tasks.create_task(self._collection(kind).run())
        self._settle_when_synced()
        return 0.0 if all(kind.group == GROUPS[0] for kind in self._kinds) else self._look_again_s

    async def _served(self, group: str) -> frozenset[str]:
        path = f"/apis/{group}/{names.POLICY_VERSION}"
        try:
            body = await self._api.get(path)
        except KubeError as error:
            if error.status == 404:
                return frozenset()
            raise
        try:
            served = msgspec.json.decode(body, type=_Resources)
        except msgspec.MsgspecError as error:
            raise KubeError("GET", path, f"not a list of resources: {error}") from None
        return frozenset(resource.name for resource in served.resources or ())

    def _place(self, kind: _Kind[Any], groups: list[str]) -> None:
        """`groups`: where the kind is, the first counts. Where it is nowhere any more, its place is kept."""
        if not groups and not kind.group:
            self._told.trouble(
                kind.resource,
                "missing",
                f"the API server has no {kind.resource} {names.POLICY_VERSION} in {' or '.join(GROUPS)}: "
                f"{kind.otherwise}; looked for again every {self._look_again_s:g} s",
            )
        elif groups and kind.group != groups[0]:
            self._told.over(kind.resource, f"{kind.resource}.{groups[0]} is there and followed")
            if kind.task is not None:
                kind.task.cancel()
                kind.task = None
            kind.group = groups[0]

    # -- what is there ----------------------------------------------------------------------------

    @property
    def _kinds(self) -> tuple[_Kind[Any], ...]:
        return self._objectives, self._rewrites

    def _collection(self, kind: _Kind[T]) -> Collection[T]:
        group = kind.group

        def changed(found: Mapping[str, T]) -> None:
            kind.found, kind.found_in, kind.synced = found, group, True
            self._judge()
            self._settle_when_synced()

        path = f"/apis/{group}/{names.POLICY_VERSION}/namespaces/{self._namespace}/{kind.resource}"
        return Collection(self._api, path, kind.kind, changed, said=self._said, backoff=self._backoff)

    def _settle_when_synced(self) -> None:
        if all(kind.synced or not kind.group for kind in self._kinds):
            self.settle()

    def settle(self) -> None:
        """Wait no longer for what has not been listed yet."""
        if not self.settled:
            self.settled = True
            self._judge()

    def _judge(self) -> None:
        if self.settled:
            self._changed(
                policies(
                    self._pool,
                    self._objectives.found.values(),
                    self._rewrites.found.values(),
                    objective_group=self._objectives.found_in,
                    rewrite_group=self._rewrites.found_in,
                )
            )
