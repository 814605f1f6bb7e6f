"""The picker in Kubernetes: members of its pool, priorities and rewrites from there, and who leads."""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from epp.payload.rewrite import ModelRewrite
from epp.pool.records import Endpoint
from epp.runtime.flag_values import target_ports
from epp.runtime.health import Health
from epp.runtime.kube.api import KubeApi
from epp.runtime.kube.cluster import Cluster, PoolTarget
from epp.runtime.kube.lease import Leadership, lease_name, new_identity
from epp.runtime.kube.policies import Pool, Verdict
from epp.runtime.kube.reviews import Reviews, authorize_on_loop
from epp.runtime.kube.status import StatusWriter
from epp.runtime.metrics_server import Authorize
from epp.runtime.options import Options
from epp.runtime.reload import Policies, Running

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tells:
    """What the picker does with what it hears.

    Attributes:
        running: its parsers, as they change, say which protocols can be served.
    """

    endpoints: Callable[[Sequence[Endpoint]], None]
    policies: Callable[[Policies], None]
    running: Running


class InCluster:
    """What a picker does in Kubernetes beside serving."""

    def __init__(self, api: KubeApi, options: Options, health: Health, tells: Tells) -> None:
        self._api = api
        self._health = health
        self._tells = tells
        self._pool = (False, "")
        self._misfit = ""
        tells.running.heard_by.append(self._judge_pool)
        target = PoolTarget(
            name=options.pool_name,
            namespace=options.pool_namespace,
            group=options.pool_group,
            selector=options.endpoint_selector,
            ports=target_ports(options.endpoint_target_ports),
        )
        self._cluster = Cluster(api, target, self, said=log.warning)
        pool = Pool(options.pool_name, options.pool_group)
        self._status = StatusWriter(api, pool.field_manager, log.warning)
        self._elects = options.ha_enable_leader_election or not options.endpoint_selector
        self._leadership = Leadership(
            api,
            options.pool_namespace,
            lease_name(options.pool_namespace, options.pool_name),
            new_identity(socket.gethostname()),
            self._leads,
        )
        self._leading: asyncio.Task[None] | None = None
        self._resigned = False
        self._reviews = Reviews(api)

    @classmethod
    async def connect(
        cls, options: Options, environment: Mapping[str, str], health: Health, tells: Tells
    ) -> Self:
        """Nothing is asked of the cluster yet.

        Raises:
            ConfigError: what tells how to reach it cannot be used.
        """
        return cls(await KubeApi.connect(options.kubeconfig, environment), options, health, tells)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._cluster.run())
            tasks.create_task(self._status.run())
            if self._elects:
                tasks.create_task(self._lead())

    def authorize(self) -> Authorize:
        """Who may read the metrics, to be asked on another thread than this one."""
        return authorize_on_loop(self._reviews, asyncio.get_running_loop())

    async def _lead(self) -> None:
        """Until `resign`, or cancelled; however often that is, the Lease is given back first."""
        self._leading = leading = asyncio.create_task(self._leadership.run())
        try:
            await asyncio.shield(leading)
        finally:
            self.resign()
            while not leading.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([leading])

    def resign(self) -> None:
        """Let another replica lead."""
        if self._leading is not None and not self._resigned:
            self._resigned = True
            self._leading.cancel()

    async def close(self) -> None:
        """After `run` has ended."""
        await self._api.close()

    # -- what the cluster tells -------------------------------------------------------------------

    def endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self._tells.endpoints(endpoints)

    def pool(self, known: bool, app_protocol: str) -> None:
        self._pool = known, app_protocol
        self._judge_pool()

    def _judge_pool(self) -> None:
        known, app_protocol = self._pool
        served = self._tells.running.plugins.parsers.protocols
        fits = not app_protocol or app_protocol in served
        self._health.pool_known(known and fits)
        misfit = "" if fits else app_protocol
        if misfit and misfit != self._misfit:
            log.error(
                "the pool's appProtocol is none that the configured parsers read: no request is served",
                extra={"app_protocol": app_protocol, "parsers_read": sorted(served)},
            )
        self._misfit = misfit

    def policies(self, objectives: Mapping[str, int], rewrites: tuple[ModelRewrite, ...]) -> None:
        self._tells.policies(Policies(objectives, rewrites))

    def verdicts(self, verdicts: tuple[Verdict, ...]) -> None:
        self._status.wants(verdicts)

    def _leads(self, leads: bool) -> None:
        log.info("leads the replicas of the picker" if leads else "does not lead any more")
        self._health.leads(leads)
        self._status.lead(leads)
