"""The members of the pool and their scraped state: who may be chosen now."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import isfinite
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from epp.pool.metrics_page import NO_LORA, EngineSample, LoraSample
from epp.pool.named import NamedMasks
from epp.pool.records import Adapters, Endpoint, LoadReport, PoolView

FIRST_CAPACITY: Final = 16
# Failed scrapes in a row after which an endpoint is taken for gone, unless an answer flows from it.
FAILED_SCRAPES_OUT: Final = 3
# How long after the last sign of an answer it still counts as flowing.
ANSWER_FLOWS_S: Final = 5.0
# Addresses in a line of the log.
MOST_TOLD: Final = 20

# Columns of the view and what an unowned slot holds in them.
_COLUMNS: Final[tuple[tuple[str, type[np.generic], float], ...]] = (
    ("identity", np.uint64, 0),
    ("candidates", np.bool_, False),
    ("present", np.bool_, False),
    ("stale", np.bool_, False),
    ("waiting_known", np.bool_, False),
    ("running_known", np.bool_, False),
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
_LOAD: Final = (("waiting", "waiting_known"), ("running", "running_known"), ("kv_usage", "kv_known"))


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

    def told(self) -> dict[str, list[str]]:
        """Who joined and who left, for a line of a log: the first addresses, and how many more there are."""
        return {"joined": _some(self.joined), "left": _some(self.left)}


def _some(endpoints: Sequence[Endpoint]) -> list[str]:
    told = [endpoint.host_port for endpoint in endpoints[:MOST_TOLD]]
    more = len(endpoints) - len(told)
    return [*told, f"and {more} more"] if more else told


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
        # By figure of `_LOAD` and slot: when it was told, and whether beside an answer instead of on a page.
        self._told_at = np.zeros((len(_LOAD), FIRST_CAPACITY))
        self._beside = np.zeros((len(_LOAD), FIRST_CAPACITY), np.bool_)
        self._models = NamedMasks(self.view.models)
        self._running_adapters = NamedMasks({})
        self._waiting_adapters = NamedMasks({})

    def add_attributes(self, keys: Iterable[str]) -> None:
        """Declare columns of `PoolView.attributes`. What is heard under other keys is left alone."""
        for key in keys:
            self.view.attributes.setdefault(key, np.full(self.view.capacity, np.nan))

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
            if successor is endpoint:
                continue
            if successor is None or successor.host_port != endpoint.host_port:
                left.append(endpoint)
                self._leave(slot, endpoint)
            elif successor != endpoint:
                relabelled.append(successor)
            else:
                # The record that is known stays: who looks for changes need not look into it.
                wanted[endpoint.uid] = endpoint
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
        for column in self.view.attributes.values():
            column[slot] = np.nan
        self._models.set(slot, NO_LORA.running, self.view.capacity)
        self._set_adapters(slot, NO_LORA)
        self._refused[slot] = False
        self._failures[slot] = 0
        self._answered_at[slot] = -np.inf

    def _grow(self) -> None:
        view = self.view
        more = view.capacity
        for name, dtype, blank in _COLUMNS:
            setattr(view, name, np.concatenate([getattr(view, name), np.full(more, blank, dtype)]))
        for key, column in view.attributes.items():
            view.attributes[key] = np.concatenate([column, np.full(more, np.nan)])
        for named in (self._models, self._running_adapters, self._waiting_adapters):
            named.grow(more)
        if view.adapters is not None:
            view.adapters.count = np.pad(view.adapters.count, (0, more))
            view.adapters.most = np.pad(view.adapters.most, (0, more))
        self._listed = np.pad(self._listed, (0, more))
        self._refused = np.pad(self._refused, (0, more))
        self._failures = np.pad(self._failures, (0, more))
        self._answered_at = np.pad(self._answered_at, (0, more), constant_values=-np.inf)
        self._told_at = np.pad(self._told_at, ((0, 0), (0, more)))
        self._beside = np.pad(self._beside, ((0, 0), (0, more)))
        self._free.extend(range(view.capacity, view.capacity + more))
        heapify(self._free)
        view.capacity += more

    def _publish(self) -> None:
        """Rewrite what changes only with membership."""
        view = self.view
        owners: list[Endpoint | None] = [None] * view.capacity
        host_ports = [""] * view.capacity
        for slot, endpoint in (*self._draining.items(), *self.roster):
            owners[slot] = endpoint
            # Of a thousand endpoints most are as before: their texts are not made again.
            same = slot < len(view.endpoints) and view.endpoints[slot] is endpoint
            host_ports[slot] = view.host_ports[slot] if same else endpoint.host_port
        view.endpoints = tuple(owners)
        view.host_ports = tuple(host_ports)
        # A member comes after the removed endpoint whose address it may have inherited.
        view.by_host_port = {host_ports[slot]: slot for slot in self._draining}
        view.by_host_port.update((host_ports[slot], slot) for slot, _ in self.roster)
        view.epoch += 1

    # -- what is heard of an endpoint -------------------------------------------------------------

    def sampled(self, slot: int, sample: EngineSample, now: float) -> None:
        """The endpoint's own page was read. What the sample does not tell keeps its value.

        A sample that tells nothing of the load proves the endpoint reachable and no more.
        """
        if not self._listed[slot]:
            return
        self.learned(slot, sample, now)
        if self._failures[slot]:
            self._failures[slot] = 0
            self._refused[slot] = False
            self._choose(now)

    def learned(self, slot: int, sample: EngineSample, now: float) -> None:
        """The same from a page that does not prove the endpoint reachable: another server's, for example."""
        if not self._listed[slot]:
            return
        view = self.view
        if sample.block_size is not None:
            view.block_size[slot] = sample.block_size
        if sample.cache_tokens is not None:
            view.cache_tokens[slot] = sample.cache_tokens
        if sample.hit_tokens is not None:
            view.hit_tokens[slot] = sample.hit_tokens
        if sample.query_tokens is not None:
            view.query_tokens[slot] = sample.query_tokens
        if sample.lora is not None:
            self._set_adapters(slot, sample.lora)
        self._set_load(slot, sample, now, beside=False)

    def reported(self, slot: int, report: LoadReport, now: float) -> None:
        """The endpoint told its load beside an answer. What is no finite amount is left alone."""
        if self._listed[slot]:
            self._set_load(slot, report, now, beside=True)

    def _set_load(self, slot: int, told: EngineSample | LoadReport, now: float, *, beside: bool) -> None:
        view = self.view
        fresh = False
        if told.waiting is not None and 0.0 <= told.waiting < np.inf:
            view.waiting[slot] = told.waiting
            view.waiting_known[slot] = fresh = True
            self._told_at[0, slot], self._beside[0, slot] = now, beside
        if told.running is not None and 0.0 <= told.running < np.inf:
            view.running[slot] = told.running
            view.running_known[slot] = fresh = True
            self._told_at[1, slot], self._beside[1, slot] = now, beside
        if told.kv_usage is not None and 0.0 <= told.kv_usage < np.inf:
            view.kv_usage[slot] = min(told.kv_usage, 1.0)
            view.kv_known[slot] = fresh = True
            self._told_at[2, slot], self._beside[2, slot] = now, beside
        for key, value in told.attributes.items():
            column = view.attributes.get(key)
            if column is not None and isfinite(value):
                column[slot] = value
        if fresh:
            view.present[slot] = True
            view.stale[slot] = False
            view.scraped_at[slot] = now

    def listed_models(self, slot: int, models: frozenset[str]) -> None:
        """The endpoint serves these models and no others."""
        if self._listed[slot]:
            self._models.set(slot, models, self.view.capacity)

    def _set_adapters(self, slot: int, lora: LoraSample) -> None:
        view = self.view
        adapters = view.adapters
        if adapters is None:
            if lora is NO_LORA:
                return
            zeros = np.zeros(view.capacity, np.int64)
            adapters = view.adapters = Adapters(
                self._running_adapters.masks, self._waiting_adapters.masks, zeros, zeros.copy()
            )
        self._running_adapters.set(slot, lora.running, view.capacity)
        self._waiting_adapters.set(slot, lora.waiting, view.capacity)
        adapters.count[slot] = len(lora.running | lora.waiting)
        adapters.most[slot] = lora.most

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

        A figure that newer pages leave out becomes unknown, and so does an old one that was told beside an
        answer: an endpoint that is sent nothing because it once said that it was full cannot say otherwise.

        `interval_s`: how often each endpoint is scraped at present.
        """
        view = self.view
        limit_s = max(self._staleness_s, 3.0 * interval_s)
        np.greater(now - view.scraped_at, limit_s, out=view.stale)
        view.stale &= view.present
        self._forget_untold(now, limit_s)
        if self._draining and self._free_drained():
            self._publish()
        self._choose(now)

    def _forget_untold(self, now: float, limit_s: float) -> None:
        view = self.view
        known_until = np.where(self._beside, now, view.scraped_at) - limit_s
        for figure, (column, known) in enumerate(_LOAD):
            untold = getattr(view, known) & (self._told_at[figure] < known_until[figure])
            if np.count_nonzero(untold):
                getattr(view, known)[untold] = False
                getattr(view, column)[untold] = 0.0

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
