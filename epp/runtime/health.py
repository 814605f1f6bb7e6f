"""Whether requests can be served, for those who ask once and for those who watch.

How it is asked is in the modules beside this one: `health_calls` (own transport), `health_grpcio`, and
`health_server` (the health port of the own transport).
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock

from epp import names
from epp.wire.health_pb2 import HealthCheckResponse

Tell = Callable[["HealthCheckResponse.ServingStatus | None"], object]
"""Hears a status; None, last, when the watch ends. It must neither block nor raise."""


@dataclass(slots=True, eq=False)
class _Watch:
    """`service` is None for every unknown name: a peer's text, of any length, is not kept."""

    service: str | None
    tell: Tell
    told: "HealthCheckResponse.ServingStatus | None" = None


class Health:
    """Whether requests can be served. Changed, read and watched on any thread.

    `liveness` says that the event loop turns, whatever the pool looks like. Every other known name, and the
    empty one, says that it does so without long stops, that the pool is known, that the picker leads where
    only a leader is to serve, and that it is not draining. A pool known to be empty is known: its requests
    are refused with the reason, which a proxy that takes the picker for absent cannot tell.
    """

    _READY = ("", names.READINESS, names.EXT_PROC_SERVICE, names.INFERENCE_EXTENSION)

    def __init__(self, *, leader_only: bool = False) -> None:
        """`leader_only`: of several pickers only the one that leads is to serve."""
        # Held while watchers are told, so that all hear the same order of changes, and nobody anything after
        # leaving. It can be taken again, because a watcher may leave when it is told.
        self._lock = RLock()
        self._watches: dict[_Watch, None] = {}
        self._pool_known = False
        self._leader_only = leader_only
        self._leads = not leader_only
        self._draining = False
        self._stalled = False
        self._stuck = False
        self._ended = False

    def pool_known(self, known: bool) -> None:
        """Whether there is a pool that the picker can serve, and its members have been told."""
        with self._lock:
            self._pool_known = known
            self._tell_all()

    def leads(self, leads: bool) -> None:
        """Whether this picker leads; of no interest unless only a leader is to serve."""
        with self._lock:
            self._leads = leads or not self._leader_only
            self._tell_all()

    def loop_turns(self, *, stalled: bool, stuck: bool) -> None:
        """Whether the event loop has stood still for long, and for so long that it will not go on."""
        with self._lock:
            self._stalled, self._stuck = stalled, stuck
            self._tell_all()

    def draining(self) -> None:
        """No new requests, please."""
        with self._lock:
            self._draining = True
            self._tell_all()

    def end_watches(self) -> None:
        """End every watch, those to come included, each after its last status. No new requests from now on.

        A server that waits for its calls to end would else wait for those who watch its health.
        """
        with self._lock:
            self._draining = self._ended = True
            self._tell_all()

    @property
    def ready(self) -> bool:
        return self._pool_known and self._leads and not (self._draining or self._stalled)

    @property
    def watches(self) -> int:
        """How many are open."""
        return len(self._watches)

    def status(self, service: str) -> "HealthCheckResponse.ServingStatus | None":
        """The `ServingStatus` of a service name; None where the name is unknown."""
        if service == names.LIVENESS:
            return HealthCheckResponse.NOT_SERVING if self._stuck else HealthCheckResponse.SERVING
        if service in self._READY:
            return HealthCheckResponse.SERVING if self.ready else HealthCheckResponse.NOT_SERVING
        return None

    def statuses(self) -> "dict[str, HealthCheckResponse.ServingStatus]":
        """Of every known name."""
        known = (names.LIVENESS, *self._READY)
        return {service: status for service in known if (status := self.status(service)) is not None}

    def watch(self, service: str, tell: Tell) -> Callable[[], None]:
        """Tell the status now, before this returns, and then every change of it, never one twice in a row.

        An unknown name has the status SERVICE_UNKNOWN. `tell` is called on the thread that calls this, and
        later on the one that makes the change: a watcher on another event loop passes on to that.

        Returns:
            What ends the watch, to be called from any thread: `tell` is not called after it has returned.
            Calling it again does nothing.
        """
        watch = _Watch(service if self.status(service) is not None else None, tell)

        def leave() -> None:
            with self._lock:
                self._watches.pop(watch, None)

        with self._lock:
            self._watches[watch] = None
            self._tell(watch)
        return leave

    def _tell_all(self) -> None:
        for watch in tuple(self._watches):
            self._tell(watch)

    def _tell(self, watch: _Watch) -> None:
        status = None if watch.service is None else self.status(watch.service)
        if status is None:
            status = HealthCheckResponse.SERVICE_UNKNOWN
        if watch in self._watches and status != watch.told:
            watch.told = status
            watch.tell(status)
        if watch in self._watches and self._ended:
            del self._watches[watch]
            watch.tell(None)
