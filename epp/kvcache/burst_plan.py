"""Requests that came together, assigned together: those that share prompts to one endpoint, the rest of the
load spread.

The formula is that of `burst-prefix-cache-producer`:

- Requests with the same prompts are a *unit*. A request of its own is a unit only where `min_colocate` is
  above 0 and another request of the batch has the same first `min_colocate` blocks.
- Units of several requests are placed before those of one; in each of the two, those with more blocks come
  first, equally long ones in the order in which they came.
- A unit goes to the endpoint with the longest shared prefix of what was placed before, if that is
  `min_colocate` blocks at least and the endpoint has less than its fair share, ceil(total / endpoints);
  otherwise, and for all that exceeds `max_per_replica` there, to the least loaded one. Where every endpoint
  has `max_per_replica` of the unit, the others of it are put one by one on the least loaded.
- Load is requests of this batch; with `by_tokens` the unit's blocks less those shared with what is there,
  once for each endpoint it lands on. The total is the sum of the units' requests, or blocks.

What is odd about it, and kept: the fair share bounds where a unit may begin, not what it adds, so one large
unit exceeds it; with `by_tokens` the total counts what is shared in full, so the bound is loose.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat
from sys import maxsize
from typing import NamedTuple

import numpy as np

from epp.kvcache.lru import LruRunIndex
from epp.kvcache.runs import lengths
from epp.pool.records import Ints

Chains = tuple[Sequence[int], ...]
"""Chained keys of a request's prompts, none of them empty."""


@dataclass(frozen=True, slots=True)
class BurstRules:
    """How a batch is assigned.

    Attributes:
        max_per_replica: requests of one unit on one endpoint; None = no limit.
        min_colocate: blocks that units have to share to be placed together; 0 = they are not.
        by_tokens: load is blocks, not requests.
    """

    max_per_replica: int | None = None
    min_colocate: int = 0
    by_tokens: bool = False


class Assigned(NamedTuple):
    """Where a request goes.

    Attributes:
        replica: place in the list of endpoints.
        ahead: its leading blocks that requests placed there before are computing.
    """

    replica: int
    ahead: int


class _Unit(NamedTuple):
    members: Sequence[int]
    chains: Chains
    blocks: int


def assign(
    batch: Sequence[Chains], replicas: int, rules: BurstRules
) -> Iterator[tuple[int, Assigned | None]]:
    """One place for each request, by its number; None where it is no matter of this batch. These come first.

    The first step sorts the batch; each further one takes as long as placing one request and noting its
    blocks.

    Args:
        replicas: how many endpoints there are; of equally loaded ones the first is taken.
    """
    units = _units(batch, rules.min_colocate) if replicas else []
    concerned = {member for unit in units for member in unit.members}
    for number in range(len(batch)):
        if number not in concerned:
            yield number, None
    if units:
        placing = _Placing(units, replicas, rules)
        for unit in units:
            yield from zip(unit.members, placing.place(unit), strict=True)


def _units(batch: Sequence[Chains], min_colocate: int) -> list[_Unit]:
    """In the order in which they are placed."""
    members: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for number, chains in enumerate(batch):
        if chains:
            # A chained key stands for everything before it, too.
            members.setdefault(tuple([(len(each), each[-1]) for each in chains]), []).append(number)
    units = [_Unit(same, batch[same[0]], sum(map(len, batch[same[0]]))) for same in members.values()]
    several = [unit for unit in units if len(unit.members) > 1]
    single = _sharing(units, min_colocate) if min_colocate else []
    return [*sorted(several, key=_longest_first), *sorted(single, key=_longest_first)]


def _longest_first(unit: _Unit) -> int:
    return -unit.blocks


def _sharing(units: Sequence[_Unit], min_colocate: int) -> list[_Unit]:
    """Those of one request whose first blocks another request has too."""
    begins = [_beginning(unit, min_colocate) for unit in units]
    requests: dict[tuple[tuple[int, int], ...], int] = {}
    for unit, begin in zip(units, begins, strict=True):
        requests[begin] = requests.get(begin, 0) + len(unit.members)
    return [
        unit
        for unit, begin in zip(units, begins, strict=True)
        if len(unit.members) == 1 and begin and requests[begin] > 1
    ]


def _beginning(unit: _Unit, blocks: int) -> tuple[tuple[int, int], ...]:
    """What stands for its first so many blocks; nothing where it has less."""
    if unit.blocks < blocks:
        return ()
    begin: list[tuple[int, int]] = []
    for keys in unit.chains:
        looked_at = min(len(keys), blocks)
        begin.append((looked_at, keys[looked_at - 1]))
        blocks -= looked_at
        if not blocks:
            break
    return tuple(begin)


class _Placing:
    """What was placed so far, by endpoint.

    `_least` is a heap of (load, endpoint); an entry whose load is not the endpoint's any more is void.
    """

    def __init__(self, units: Sequence[_Unit], replicas: int, rules: BurstRules) -> None:
        self._rules = rules
        self._replicas = replicas
        self._load = [0] * replicas
        self._least = [(0, replica) for replica in range(replicas)]
        total = sum([unit.blocks if rules.by_tokens else len(unit.members) for unit in units])
        self._fair_share = -(-total // replicas)
        self._index: LruRunIndex | None = None
        if rules.min_colocate or rules.by_tokens:
            self._index = LruRunIndex()
            self._index.grow(replicas)
            room = sum([unit.blocks for unit in units])
            for replica in range(replicas):
                self._index.set_capacity(replica, room)

    def place(self, unit: _Unit) -> Iterator[Assigned]:
        """Where each of its requests goes, in order. Its blocks are noted with the first on an endpoint."""
        rules, blocks = self._rules, unit.blocks
        shared = self._shared(unit.chains)
        most = below = rules.max_per_replica or maxsize
        taken: dict[int, int] = {}
        aside: list[tuple[int, int]] = []
        left = len(unit.members)
        replica = None if shared is None else self._most_shared(shared)
        while left:
            if replica is None:
                replica = self._least_loaded(taken, below, aside)
            if replica is None:
                # Every endpoint has as many of the unit as it may: now the load alone counts.
                self._restore(aside)
                below = maxsize
                continue
            here = taken.get(replica, 0)
            run = min(left, max(most - here, 1))
            ahead = blocks if here else 0 if shared is None else int(shared[replica])
            taken[replica] = here + run
            left -= run
            self._charge(replica, blocks - ahead if rules.by_tokens else run)
            if not here:
                self._hold(unit.chains, replica)
            yield Assigned(replica, ahead)
            yield from repeat(Assigned(replica, blocks), run - 1)
            replica = None
        self._restore(aside)

    def _charge(self, replica: int, load: int) -> None:
        if load:
            self._load[replica] += load
            heappush(self._least, (self._load[replica], replica))

    def _restore(self, aside: list[tuple[int, int]]) -> None:
        for entry in aside:
            heappush(self._least, entry)
        aside.clear()

    def _hold(self, chains: Chains, replica: int) -> None:
        if self._index is not None:
            for keys in chains:
                self._index.insert(keys, replica)

    def _shared(self, chains: Chains) -> Ints | None:
        """Leading blocks held, over all prompts up to the first that nobody holds to its end.

        None where the rules do not ask for it.
        """
        if self._index is None:
            return None
        shared = np.zeros(self._replicas, np.int64)
        for keys in chains:
            steps = self._index.match(keys)
            shared += lengths(steps, self._replicas)
            if not steps or steps[-1][1] < len(keys):
                break
        return shared

    def _most_shared(self, shared: Ints) -> int | None:
        """The endpoint to begin with by what it shares; None where none is to be preferred."""
        least = self._rules.min_colocate
        if not least:
            return None
        load = self._load
        found = [
            (-int(shared[replica]), load[replica], int(replica))
            for replica in np.flatnonzero(shared >= least)
            if load[replica] < self._fair_share
        ]
        return min(found)[2] if found else None

    def _least_loaded(self, taken: dict[int, int], below: int, aside: list[tuple[int, int]]) -> int | None:
        """Of the endpoints with less than `below` of the unit; `aside` takes the entries of the others."""
        least, load = self._least, self._load
        while least:
            entry = least[0]
            replica = entry[1]
            if entry[0] == load[replica]:
                if taken.get(replica, 0) < below:
                    return replica
                aside.append(entry)
            heappop(least)
        return None
