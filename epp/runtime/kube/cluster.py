"""The pool as the cluster has it: endpoints, objectives and rewrites, followed for as long as it runs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from epp import names
from epp.payload.rewrite import ModelRewrite
from epp.pool.records import Endpoint
from epp.runtime.kube.api import KubeApi
from epp.runtime.kube.members import Members, pool_ports
from epp.runtime.kube.objects import InferencePool, Pod
from epp.runtime.kube.policies import Judged, Pool, Verdict
from epp.runtime.kube.policy_watch import PolicyWatch
from epp.runtime.kube.told import Told
from epp.runtime.kube.watch import Backoff, Collection

LOOK_AGAIN_S: Final = 30.0
POLICIES_WAIT_S: Final = 3.0
_BACKOFF: Final = Backoff()
_MOST_TEXTS: Final = 1000


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """Which pool to follow: an InferencePool by name, or with a `selector` pods without any pool object.

    Attributes:
        name, namespace: of the pool object; its pods are in the same namespace.
        group: API group of the pool object.
        selector: label selector of the pods as the API writes it; "" = the pool object says.
        ports: target ports by rank; with a selector only.
    """

    name: str
    namespace: str
    group: str = names.POOL_GROUP
    selector: str = ""
    ports: tuple[int, ...] = ()


class Hears(Protocol):
    """What becomes of the news. All are called on the loop, where something differs, and must not raise."""

    def endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """These are the pool's members now."""
        ...

    def pool(self, known: bool, app_protocol: str) -> None:
        """Whether pool and pods have been listed, and what the pool's `appProtocol` says; "" = nothing.

        Before the first True, the members have been told, and so have objectives and rewrites as far as they
        are to be had.
        """
        ...

    def policies(self, objectives: Mapping[str, int], rewrites: tuple[ModelRewrite, ...]) -> None:
        """The cluster's priorities by name of the objective, and its rewrites in their order of precedence.

        They go before what the configuration file says: an objective takes the place of the file's of the
        same name, rewrites come before the file's.
        """
        ...

    def verdicts(self, verdicts: tuple[Verdict, ...]) -> None:
        """What the status of each of the pool's objectives and rewrites is to say; all of them."""
        ...


@dataclass(slots=True, eq=False)
class _Pods:
    """The pods of one selector, and the target ports that go with it."""

    selector: str
    ports: tuple[int, ...]
    found: Mapping[str, Pod] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Cluster:
    """Follows one pool.

    What is known stays while the API server is away. A changed selector counts, with the ports of its pool,
    once the pods that it selects have been listed; changed ports alone count at once. A pool that is gone, or
    marked to go, has no endpoints; one whose object cannot be used stays as it was. With a selector in place
    of a pool object, objectives and rewrites are not asked for.
    """

    def __init__(
        self,
        api: KubeApi,
        target: PoolTarget,
        hears: Hears,
        *,
        said: Callable[[str], None],
        look_again_s: float = LOOK_AGAIN_S,
        policies_wait_s: float = POLICIES_WAIT_S,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        """`said` hears, one line each and each once, what an operator should know.

        Args:
            look_again_s: how often definitions of objectives and rewrites that are missing are looked for.
            policies_wait_s: how long, once the pods are listed, `Hears.pool` is put off for objectives and
                rewrites that the API server does not give.
        """
        self._api = api
        self._target = target
        self._hears = hears
        self._said = said
        self._backoff = backoff
        self._policies_wait_s = policies_wait_s
        self._patience: asyncio.TimerHandle | None = None
        self._texts: dict[str, None] = {}
        self._told = Told(said)
        self._pool: InferencePool | None = None
        self._members = Members()
        self._pods: _Pods | None = None
        # Selected, but not listed yet: until then the pods of the old selector count.
        self._next_pods: _Pods | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._policies = PolicyWatch(
            api,
            target.namespace,
            Pool(target.name, target.group),
            self._policies_changed,
            said=said,
            look_again_s=look_again_s,
            backoff=backoff,
        )
        self._judged: Judged | None = None
        self._members_told = False
        self._pool_told = (False, "")
        self._verdicts_told: tuple[Verdict, ...] = ()

    async def run(self) -> None:
        """Until cancelled; nothing that the server does ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self._target.selector:
                    self._select(self._target.selector, self._target.ports)
                else:
                    tasks.create_task(self._policies.run())
                    tasks.create_task(self._pools().run())
        finally:
            if self._patience is not None:
                self._patience.cancel()

    # -- the pool object --------------------------------------------------------------------------

    def _pools(self) -> Collection[InferencePool]:
        group, name = self._target.group, self._target.name

        def said(text: str) -> None:
            status = pools.trouble.status if pools.trouble is not None else 0
            # A Role without rights in a group that nobody has is refused before the group is looked for.
            doubtful = status == 404 or (status == 403 and group != names.POOL_GROUP)
            self._said(
                f"{text}; --pool-group is {group}, the field's is {names.POOL_GROUP}" if doubtful else text
            )

        pools = Collection(
            self._api,
            f"/apis/{group}/{names.POOL_VERSION}/namespaces/{self._target.namespace}/{names.POOL_RESOURCE}",
            InferencePool,
            self._pools_changed,
            field_selector=f"metadata.name={name}",
            said=said,
            backoff=self._backoff,
        )
        return pools

    def _pools_changed(self, found: Mapping[str, InferencePool]) -> None:
        there = (pool for pool in found.values() if pool.metadata.deletion_timestamp is None)
        self._pool = next((pool for pool in there if pool.metadata.name == self._target.name), None)
        place = f"{names.POOL_KIND} {self._target.namespace}/{self._target.name}"
        if self._pool is None:
            self._told.trouble(
                "pool",
                "missing",
                f"there is no {place} (group {self._target.group}): no request can be placed until it is "
                "created; --pool-name and --pool-namespace say which it is",
            )
            self._forget_pods()
        else:
            self._told.over("pool", f"{place} is there")
            self._take(self._pool, place)
        self._tell_verdicts()

    def _take(self, pool: InferencePool, place: str) -> None:
        ports, warnings = pool_ports(pool)
        self._warn(*warnings)
        if not any(ports):
            self._warn(f"{place}: spec.targetPorts has no port that can be used; the pool stays as it was")
        elif not pool.label_selector:
            # An empty selector is one for every pod of the namespace to the API.
            self._warn(f"{place}: spec.selector.matchLabels has no labels; the pool stays as it was")
        else:
            self._select(pool.label_selector, ports)
            self._tell_members()

    # -- pods -------------------------------------------------------------------------------------

    def _select(self, selector: str, ports: tuple[int, ...]) -> None:
        """Follow these pods; those followed already have the new ports at once."""
        if self._next_pods is not None:
            if self._next_pods.selector == selector:
                self._next_pods.ports = ports
                return
            self._next_pods.stop()
            self._next_pods = None
        if self._pods is not None and self._pods.selector == selector:
            self._pods.ports = ports
        else:
            self._next_pods = self._follow(_Pods(selector, ports))

    def _follow(self, pods: _Pods) -> _Pods:
        assert self._tasks is not None, "only while running"
        collection = Collection(
            self._api,
            f"/api/v1/namespaces/{self._target.namespace}/pods",
            Pod,
            lambda found: self._pods_changed(pods, found),
            label_selector=pods.selector,
            said=self._said,
            backoff=self._backoff,
        )
        pods.task = self._tasks.create_task(collection.run())
        return pods

    def _pods_changed(self, pods: _Pods, found: Mapping[str, Pod]) -> None:
        pods.found = found
        if pods is self._next_pods:
            if self._pods is not None:
                self._pods.stop()
            self._pods, self._next_pods = pods, None
            if not found:
                self._warn(
                    f"no pod in namespace {self._target.namespace} has the labels {pods.selector}; "
                    "endpoints come as soon as one does"
                )
        if pods is self._pods:
            self._tell_members()

    def _forget_pods(self) -> None:
        for pods in (self._pods, self._next_pods):
            if pods is not None:
                pods.stop()
        self._pods = self._next_pods = None
        if self._members.update({}, ()):
            self._hears.endpoints(())
        self._tell_pool()

    # -- telling ----------------------------------------------------------------------------------

    def _tell_members(self) -> None:
        if self._pods is None:
            return
        changed = self._members.update(self._pods.found, self._pods.ports)
        self._warn(*self._members.warnings)
        if changed or not self._members_told:
            self._members_told = True
            self._hears.endpoints(self._members.endpoints)
        self._tell_pool()

    def _tell_pool(self) -> None:
        settled = bool(self._target.selector) or self._policies.settled
        known = self._pods is not None and settled
        if self._pods is not None and not settled and self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._policies_wait_s, self._policies.settle)
        protocol = self._pool.spec.app_protocol if self._pool is not None and known else None
        news = known, protocol or ""
        if news != self._pool_told:
            self._pool_told = news
            self._hears.pool(*news)

    def _policies_changed(self, judged: Judged) -> None:
        before, self._judged = self._judged, judged
        self._warn(*judged.notes)
        told = before is not None and (before.objectives, before.rewrites)
        if told != (judged.objectives, judged.rewrites):
            self._hears.policies(judged.objectives, judged.rewrites)
        self._tell_verdicts()
        self._tell_pool()

    def _tell_verdicts(self) -> None:
        """None without a pool: nothing holds in one that is not there."""
        verdicts = self._judged.verdicts if self._judged and self._pool is not None else ()
        if verdicts != self._verdicts_told:
            self._verdicts_told = verdicts
            self._hears.verdicts(verdicts)

    def _warn(self, *texts: str) -> None:
        for text in texts:
            if text not in self._texts:
                if len(self._texts) >= _MOST_TEXTS:
                    del self._texts[next(iter(self._texts))]
                self._texts[text] = None
                self._said(text)
