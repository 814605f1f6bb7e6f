"""Which of a picker's replicas leads: a Lease of `coordination.k8s.io/v1`, kept as client-go keeps it.

The record is the field's, so that replicas of the Go picker and ours take it over from each other. Two never
lead at once, whatever their wall clocks say and however late answers come:

- A leader counts its time from before it sent the last renewal that was answered, and stops by itself
  `renew_s` later. `leads` looks at the clock, so this holds for a process that was stopped, too.
- Others count from when they saw the record change, which is later, and wait for the longer duration that
  stands in the record.
- A write carries the version it read; the server refuses it where another came first.

What this needs of clocks: that none runs 1.5 times as fast as another (duration by renewal deadline).
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from epp.runtime.kube.api import KubeApi, KubeError
from epp.runtime.kube.told import Told

log = logging.getLogger(__name__)

_API_VERSION: Final = "coordination.k8s.io/v1"
_NAME_CHARS: Final = 253
_DIGEST_CHARS: Final = 8
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_REFUSED: Final = frozenset({403, _NOT_FOUND})
_SLOWEST_S: Final = 30.0
"""Between tries where the API server refuses leases."""
_RELEASE_S: Final = 3.0
_RELEASED_FOR_S: Final = 1


def lease_name(namespace: str, pool: str) -> str:
    """The field's name of a picker's lease; one that were too long ends in a digest of the whole."""
    name, suffix = f"epp-{namespace}-{pool}", ".llm-d.ai"
    room = _NAME_CHARS - len(suffix)
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARS]
        name = f"{name[: room - _DIGEST_CHARS - 1].rstrip('-.')}-{digest}"
    return name + suffix


def new_identity(hostname: str) -> str:
    """Who a process is, in the field's form. Another one in each call."""
    return f"{hostname}_{uuid.uuid4()}"


class _Spec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct, frozen=True, rename="camel"):
    """`metadata` goes back as it came, its version and labels of others included."""

    metadata: msgspec.Raw
    spec: _Spec = _Spec()
    api_version: str = _API_VERSION
    kind: str = "Lease"

    @property
    def holder(self) -> str:
        return self.spec.holder_identity or ""


class Leadership:
    """Takes the lease when it is free, keeps it, gives it back.

    Args:
        changed: Called on the loop when this process begins or ceases to lead; must not raise.
        said: Hears what is wrong, once for each reason, and that it is over.
        duration_s: How long others leave a leader alone that is not heard of; whole seconds.
        renew_s: How long a leader goes on without a renewal.
        retry_s: Between tries, to renew or to take.
        clock: Monotonic seconds. `wall`: seconds since 1970, for readers of the record alone.

    Raises:
        ValueError: not duration_s > renew_s > retry_s > 0.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        lease_name: str,
        identity: str,
        changed: Callable[[bool], None],
        *,
        said: Callable[[str], None] = log.warning,
        duration_s: float = 15.0,
        renew_s: float = 10.0,
        retry_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not duration_s > renew_s > retry_s > 0.0:
            raise ValueError(f"duration {duration_s} > renew {renew_s} > retry {retry_s} > 0 does not hold")
        self.identity = identity
        self._api = api
        self._namespace = namespace
        self._name = lease_name
        self._all = f"/apis/{_API_VERSION}/namespaces/{namespace}/leases"
        self._one = f"{self._all}/{lease_name}"
        self._changed = changed
        self._told = Told(said)
        self._duration_s = duration_s
        self._renew_s = renew_s
        self._retry_s = retry_s
        self._clock = clock
        self._wall = wall

        self._lease: _Lease | None = None
        """The record as last seen; None: not seen, or seen to be gone."""
        self._free_at = -float("inf")
        """By the record; while it is ours, always."""
        self._leads_until = -float("inf")
        self._led = False
        """What `changed` heard last."""
        self._wrote = False
        self._refusals = 0

    @property
    def leads(self) -> bool:
        """May be asked on any thread."""
        return self._clock() < self._leads_until

    @property
    def holder(self) -> str:
        """Who holds the lease, as last seen; empty: nobody, or not known."""
        return "" if self._lease is None else self._lease.holder

    async def run(self) -> None:
        """Until cancelled. The holder is cleared on the way out, so that another replica need not wait."""
        try:
            while True:
                pause_s = await self._turn()
                await asyncio.sleep(pause_s)
        finally:
            await self._leave()

    async def _turn(self) -> float:
        """One try to take or keep the lease. Returns the seconds until the next."""
        self._settle()
        pause_s = self._retry_s
        try:
            await self._take_or_keep()
        except (KubeError, TimeoutError, msgspec.MsgspecError) as error:
            pause_s = self._failed(error)
        else:
            self._refusals = 0
            self._told.over(self._name, f"{self}: works again")
        self._settle()
        now = self._clock()
        # What comes due earlier is not slept through: the end of a term, ours or another's.
        return min([pause_s, *(due - now for due in (self._leads_until, self._free_at) if due > now)])

    async def _take_or_keep(self) -> None:
        if self.leads and await self._renewed():
            return
        await self._look()
        if self._clock() >= self._free_at:
            await self._claim()

    async def _renewed(self) -> bool:
        """With one call, as nobody else should have written. False: somebody did."""
        try:
            await self._claim()
        except KubeError as error:
            if error.status not in (_CONFLICT, _NOT_FOUND):
                raise
            return False
        return True

    async def _look(self) -> None:
        """Read the record."""
        try:
            lease = msgspec.json.decode(await self._ask("GET", self._one), type=_Lease)
        except KubeError as error:
            if error.status != _NOT_FOUND:
                raise
            # Who held it may not know yet that it is gone: `_free_at` stays.
            self._lease = None
            self._leads_until = -float("inf")
            return
        before, self._lease = self._lease, lease
        if lease.holder != self.identity:
            self._leads_until = -float("inf")
        if lease.holder in ("", self.identity):
            self._free_at = -float("inf")
        elif before is None or before.spec != lease.spec:
            self._free_at = self._clock() + (lease.spec.lease_duration_seconds or self._duration_s)
        self._note_holder(before)

    async def _claim(self) -> None:
        """Write the record with us as its holder, from now on."""
        before, sent_at = self._lease, self._clock()
        self._wrote = True
        if before is None:
            metadata = msgspec.Raw(msgspec.json.encode({"name": self._name, "namespace": self._namespace}))
            answer = await self._ask("POST", self._all, _Lease(metadata, self._claimed(None)))
        else:
            answer = await self._ask("PUT", self._one, _Lease(before.metadata, self._claimed(before)))
        self._lease = msgspec.json.decode(answer, type=_Lease)
        self._free_at = -float("inf")
        self._leads_until = sent_at + self._renew_s
        self._note_holder(before)
        self._settle()

    def _claimed(self, before: _Lease | None) -> _Spec:
        now = self._now()
        acquired, transitions = now, 0
        if before is not None:
            transitions = before.spec.lease_transitions or 0
            if before.holder == self.identity:
                acquired = before.spec.acquire_time or now
            else:
                transitions += 1
        return _Spec(self.identity, int(self._duration_s), acquired, now, transitions)

    async def _ask(self, method: str, path: str, body: _Lease | None = None) -> bytes:
        """Twice at least before a term is over, and never beyond it."""
        limit_s = self._renew_s / 2
        if self.leads:
            limit_s = min(limit_s, self._leads_until - self._clock())
        async with asyncio.timeout(limit_s):
            return await (self._api.get(path) if body is None else self._api.send(method, path, body))

    async def _leave(self) -> None:
        """Stop leading, then clear the holder if that is us, at once rather than surely."""
        self._leads_until = -float("inf")
        self._settle()
        if not self._wrote:
            return
        try:
            async with asyncio.timeout(_RELEASE_S):
                released = False
                while not released:
                    released = await self._released()
        except (KubeError, TimeoutError, msgspec.MsgspecError) as error:
            text = f"{self}: not given back, so it stays taken for a while: {_why(error)}"
            self._told.trouble(self._name, "release", text)

    async def _released(self) -> bool:
        """Whether the holder is not us any more. False: a renewal that was under way came between."""
        await self._look()
        if self._lease is None or self._lease.holder != self.identity:
            return True
        now = self._now()
        spec = _Spec("", _RELEASED_FOR_S, now, now, self._lease.spec.lease_transitions or 0)
        try:
            await self._ask("PUT", self._one, _Lease(self._lease.metadata, spec))
        except KubeError as error:
            if error.status != _CONFLICT:
                raise
            return False
        return True

    def _settle(self) -> None:
        if self._led != self.leads:
            self._led = not self._led
            self._changed(self._led)

    def _failed(self, error: Exception) -> float:
        """Tell it, and say how many seconds to wait."""
        status = error.status if isinstance(error, KubeError) else 0
        if status == _CONFLICT:
            return self._retry_s
        text = f"{self}: {_why(error)}"
        if status in _REFUSED:
            text += (
                f"; is there a namespace {self._namespace}, and in it a Role for this service account "
                "with get, create and update on leases of coordination.k8s.io?"
            )
        leads = self.leads
        what = "leads on until its term ends" if leads else "does not lead"
        self._told.trouble(self._name, (type(error), status, leads), f"{text}; this replica {what}")
        if leads:
            return self._retry_s
        if status in _REFUSED:
            self._refusals += 1
            return max(self._retry_s, min(self._retry_s * 2.0**self._refusals, _SLOWEST_S))
        after_s = error.retry_after_s if isinstance(error, KubeError) else None
        return max(self._retry_s, min(after_s or 0.0, _SLOWEST_S))

    def _note_holder(self, before: _Lease | None) -> None:
        holder = self.holder
        if before is None or before.holder != holder:
            log.info("the lease changed hands", extra={"lease": self._name, "holder": holder})

    def _now(self) -> str:
        """In the form of a MicroTime, whose readers insist on six digits."""
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def __str__(self) -> str:
        return f"lease {self._namespace}/{self._name}"


def _why(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)
