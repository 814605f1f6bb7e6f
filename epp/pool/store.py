"""The members of the pool and their scraped state: who may be chosen now."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from epp.pool.metrics_page import EngineSample
from epp.pool.records import Endpoint, PoolView

FIRST_CAPACITY: Final = 16
# Failed scrapes in a row after which an endpoint is taken for gone, unless an answer flows from it.
FAILED_SCRAPES_OUT: Final = 3
# How long after the last sign of an answer it still counts as flowing.
ANSWER_FLOWS_S: Final = 5.0

# Columns of the view and what an unowned slot holds in them.
_COLUMNS: Final[tuple[tuple[str, type[np.generic], float], ...]] = (
    ("identity", np.uint64, 0),
    ("candidates", np.bool_, False),
    ("present", np.bool_, False),
    ("stale", np.bool_, False),
    ("waiting_known", np.bool_, False),
    ("kv_known", np.bool_, False),
    ("waiting", np.float64, 0.0),
    ("running", np.float64, 0.0),
    ("kv_usage", np.float64, 0.0),
    ("block_size", np.int64, 0),
    ("cache_tokens", np.int64, 0),
    ("hit_tokens", np.float64, np.nan),
    ("query_tokens", np.float64, np.nan),
    ("scraped_at", np.float64, 0.0),
)


class Member(Protocol):
    """Something that keeps state by slot."""

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot."""
        ...

    def left(self, slot: int) -> None:
        """The slot's owner is gone for good; forget everything about it."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """What a `sync` did. An endpoint that moved to another address is in `left` and in `joined`."""

    joined: tuple[Endpoint, ...] = ()
    left: tuple[Endpoint, ...] = ()
    relabelled: tuple[Endpoint, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.relabelled)


class PoolStore:
    """The one owner of `PoolView`.

    A removed endpoint leaves the candidates at once. It keeps its slot while requests are in flight to it
    (`busy`): the slot is freed later, in `refresh`, after every member was told `left`. So nothing that is
    kept by slot, the ledger's charges included, ever passes to the slot's next owner.

    Attributes:
        roster: slots and endpoints of the current members, by slot; replaced when membership changes.
    """

    def __init__(
        self,
        *,
        staleness_s: float = 2.0,
        members: Sequence[Member] = (),
        busy: Callable[[int], bool] = lambda slot: False,
    ) -> None:
        self.view = empty_view(FIRST_CAPACITY)
        self.roster: tuple[tuple[int, Endpoint], ...] = ()
        self._staleness_s = staleness_s
        self._members = list(members)
        self._busy = busy
        self._free = list(range(FIRST_CAPACITY))
        self._slots: dict[str, int] = {}
        self._draining: dict[int, Endpoint] = {}
        self._listed = np.zeros(FIRST_CAPACITY, np.bool_)
        self._refused = np.zeros(FIRST_CAPACITY, np.bool_)
        self._failures = np.zeros(FIRST_CAPACITY, np.int64)
        self._answered_at = np.full(FIRST_CAPACITY, -np.inf)

    def add_member(self, member: Member) -> None:
        """From now on `member` is told who joins and leaves; it hears of present owners at once."""
        self._members.append(member)
        for slot, endpoint in enumerate(self.view.endpoints):
            if endpoint is not None:
                member.joined(slot)

    def slot_of(self, host_port: str) -> int | None:
        """Slot of the endpoint at `address:port`; that of a removed one while its slot is kept."""
        return self.view.by_host_port.get(host_port)

    # -- membership -------------------------------------------------------------------------------

    def sync(self, endpoints: Iterable[Endpoint], now: float) -> Change:
        """Make the given endpoints the pool's members. Of two with one uid the later counts.

        New labels or a new name leave the slot and what is known about it. A new address or port is a new
        life: caches and counters belong to the process that answered there, so the slot changes hands.
        Capacity may grow; columns kept elsewhere have to follow `view.capacity` before the next choice.
        """
        wanted = {endpoint.uid: endpoint for endpoint in endpoints}
        left, relabelled = [], []
        for slot, endpoint in self.roster:
            successor = wanted.get(endpoint.uid)
            if successor is None or successor.host_port != endpoint.host_port:
                left.append(endpoint)
                self._leave(slot, endpoint)
            elif successor != endpoint:
                relabelled.append(successor)
        freed = self._free_drained()
        joined = [endpoint for uid, endpoint in wanted.items() if uid not in self._slots]
        for endpoint in joined:
            self._join(endpoint)
        change = Change(tuple(joined), tuple(left), tuple(relabelled))
        if change or freed:
            members = {self._slots[uid]: endpoint for uid, endpoint in wanted.items()}
            self.roster = tuple(sorted(members.items()))
            self._publish()
            for endpoint in joined:
                for member in self._members:
                    member.joined(self._slots[endpoint.uid])
        self._choose(now)
        return change

    def _join(self, endpoint: Endpoint) -> None:
        if not self._free:
            self._grow()
        slot = heappop(self._free)
        self._slots[endpoint.uid] = slot
        self._listed[slot] = True
        self.view.identity[slot] = xxhash.xxh3_64_intdigest(endpoint.uid.encode("utf-8", "surrogatepass"))

    def _leave(self, slot: int, endpoint: Endpoint) -> None:
        del self._slots[endpoint.uid]
        self._listed[slot] = False
        self._draining[slot] = endpoint

    def _free_drained(self) -> bool:
        done = [slot for slot in self._draining if not self._busy(slot)]
        for slot in done:
            for member in self._members:
                member.left(slot)
            del self._draining[slot]
            self._blank(slot)
            heappush(self._free, slot)
        return bool(done)

    def _blank(self, slot: int) -> None:
        for name, _, blank in _COLUMNS:
            getattr(self.view, name)[slot] = blank
        self._refused[slot] = False
        self._failures[slot] = 0
        self._answered_at[slot] = -np.inf

    def _grow(self) -> None:
        view = self.view
        more = view.capacity
        for name, dtype, blank in _COLUMNS:
            setattr(view, name, np.concatenate([getattr(view, name), np.full(more, blank, dtype)]))
        self._listed = np.pad(self._listed, (0, more))
        self._refused = np.pad(self._refused, (0, more))
        self._failures = np.pad(self._failures, (0, more))
        self._answered_at = np.pad(self._answered_at, (0, more), constant_values=-np.inf)
        self._free.extend(range(view.capacity, view.capacity + more))
        heapify(self._free)
        view.capacity += more

    def _publish(self) -> None:
        """Rewrite what changes only with membership."""
        view = self.view
        owners: list[Endpoint | None] = [None] * view.capacity
        for slot, endpoint in (*self._draining.items(), *self.roster):
            owners[slot] = endpoint
        view.endpoints = tuple(owners)
        view.host_ports = tuple(endpoint.host_port if endpoint else "" for endpoint in owners)
        # A member comes after the removed endpoint whose address it may have inherited.
        view.by_host_port = {view.host_ports[slot]: slot for slot in self._draining}
        view.by_host_port.update((endpoint.host_port, slot) for slot, endpoint in self.roster)
        view.epoch += 1

    # -- what is heard of an endpoint -------------------------------------------------------------

    def sampled(self, slot: int, sample: EngineSample, now: float) -> None:
        """A scrape succeeded. What the sample does not tell keeps its value.

        A sample that tells nothing of the load proves the endpoint reachable and no more.
        """
        if not self._listed[slot]:
            return
        view = self.view
        if sample.waiting is not None:
            view.waiting[slot] = sample.waiting
            view.waiting_known[slot] = True
        if sample.running is not None:
            view.running[slot] = sample.running
        if sample.kv_usage is not None:
            view.kv_usage[slot] = sample.kv_usage
            view.kv_known[slot] = True
        if sample.block_size is not None:
            view.block_size[slot] = sample.block_size
        if sample.cache_tokens is not None:
            view.cache_tokens[slot] = sample.cache_tokens
        if sample.hit_tokens is not None:
            view.hit_tokens[slot] = sample.hit_tokens
        if sample.query_tokens is not None:
            view.query_tokens[slot] = sample.query_tokens
        if sample.waiting is not None or sample.running is not None or sample.kv_usage is not None:
            view.present[slot] = True
            view.stale[slot] = False
            view.scraped_at[slot] = now
        if self._failures[slot]:
            self._failures[slot] = 0
            self._refused[slot] = False
            self._choose(now)

    def failed(self, slot: int, *, refused: bool, now: float) -> None:
        """A scrape failed; `refused`: nothing listens at the endpoint's port, until a scrape succeeds."""
        if self._listed[slot]:
            self._failures[slot] += 1
            self._refused[slot] |= refused
            self._choose(now)

    def answering(self, slot: int, now: float) -> None:
        """An answer is flowing from the endpoint."""
        self._answered_at[slot] = now
        if self._failures[slot]:
            self._choose(now)

    def refresh(self, now: float, interval_s: float) -> None:
        """Let time pass: recompute `stale` and the candidates, free the slots of drained endpoints.

        `interval_s`: how often each endpoint is scraped at present.
        """
        view = self.view
        limit_s = max(self._staleness_s, 3.0 * interval_s)
        np.greater(now - view.scraped_at, limit_s, out=view.stale)
        view.stale &= view.present
        if self._draining and self._free_drained():
            self._publish()
        self._choose(now)

    def _choose(self, now: float) -> None:
        """Candidates: members not known to be unreachable; all of them when none would be left."""
        silent = now - self._answered_at > ANSWER_FLOWS_S
        gone = self._refused | ((self._failures >= FAILED_SCRAPES_OUT) & silent)
        candidates = self.view.candidates
        np.greater(self._listed, gone, out=candidates)
        if not candidates.any():
            np.copyto(candidates, self._listed)


def empty_view(capacity: int) -> PoolView:
    """A view without endpoints."""
    columns: dict[str, Any] = {name: np.full(capacity, blank, dtype) for name, dtype, blank in _COLUMNS}
    return PoolView(
        capacity=capacity,
        endpoints=(None,) * capacity,
        host_ports=("",) * capacity,
        **columns,
    )
