"""Batches of a burst against the formula played out step by step, and against what must hold of any."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import xxhash
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.kvcache import burst_plan
from epp.kvcache.burst_plan import Assigned, BurstRules, Chains, assign

Texts = tuple[str, ...]

RULES = st.builds(BurstRules, st.none() | st.integers(1, 3), st.integers(0, 3), st.booleans())
# Few letters and few lengths, so that much is equal and much is shared.
TEXTS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=2).map(tuple)
BATCHES = st.lists(TEXTS, max_size=14)
SMALL = settings(max_examples=150, deadline=None)


def chained(texts: Texts) -> Chains:
    """Keys of which each stands for all letters up to it."""
    return tuple(
        [[xxhash.xxh3_64_intdigest(text[: end + 1].encode()) for end in range(len(text))] for text in texts]
    )


def assigned(batch: Sequence[Chains], replicas: int, rules: BurstRules) -> list[Assigned | None]:
    """By the requests' order."""
    found = dict(assign(batch, replicas, rules))
    assert sorted(found) == list(range(len(batch)))
    return [found[number] for number in range(len(batch))]


class Formula:
    """Slow and plain: who holds what is a set of pairs, the least loaded is looked for among all."""

    def __init__(self, batch: Sequence[Texts], replicas: int, rules: BurstRules) -> None:
        self.batch, self.rules, self.replicas = batch, rules, range(replicas)
        self.load = dict.fromkeys(self.replicas, 0)
        self.held: set[tuple[str, int]] = set()
        self.places: list[Assigned | None] = [None] * len(batch)
        if replicas:
            self.play()

    def blocks(self, texts: Texts) -> list[str]:
        """The prefix that each block stands for, over all texts."""
        return [text[: end + 1] for text in texts for end in range(len(text))]

    def play(self) -> None:
        units: dict[Texts, list[int]] = {}
        for number, texts in enumerate(self.batch):
            if texts:
                units.setdefault(texts, []).append(number)
        least = self.rules.min_colocate
        several = [texts for texts, members in units.items() if len(members) > 1]
        alone = [texts for texts, members in units.items() if len(members) == 1 and least]
        placed = [texts for texts in alone if self.shares(texts, least)]
        order = [
            *sorted(several, key=lambda texts: -len(self.blocks(texts))),
            *sorted(placed, key=lambda texts: -len(self.blocks(texts))),
        ]
        costs = [len(self.blocks(texts)) if self.rules.by_tokens else len(units[texts]) for texts in order]
        self.fair = math.ceil(sum(costs) / len(self.replicas))
        for texts in order:
            self.place(texts, units[texts])

    def shares(self, texts: Texts, least: int) -> bool:
        begin = self.blocks(texts)[:least]
        others = [self.blocks(other)[:least] for other in self.batch]
        return len(begin) == least and others.count(begin) > 1

    def match(self, texts: Texts, replica: int) -> int:
        found = 0
        for block in self.blocks(texts):
            if not any((block, other) in self.held for other in self.replicas):
                break
            found += (block, replica) in self.held
        return found

    def place(self, texts: Texts, members: list[int]) -> None:
        rules, total = self.rules, len(self.blocks(texts))
        known = rules.min_colocate > 0 or rules.by_tokens
        matches = {replica: self.match(texts, replica) if known else 0 for replica in self.replicas}
        most = rules.max_per_replica or len(members)
        here: Counter[int] = Counter()
        replica = self.choose(matches, here, most, first=True)
        for member in members:
            if here[replica] >= most:  # one is filled up before the next
                replica = self.choose(matches, here, most, first=False)
            held = total if here[replica] else matches[replica]
            self.places[member] = Assigned(replica, held)
            self.load[replica] += total - held if rules.by_tokens else 1
            here[replica] += 1
        self.held |= {(block, replica) for replica in here for block in self.blocks(texts)}

    def choose(self, matches: dict[int, int], here: Counter[int], most: int, *, first: bool) -> int:
        if first and self.rules.min_colocate:
            sharing = [
                replica
                for replica in self.replicas
                if matches[replica] >= self.rules.min_colocate and self.load[replica] < self.fair
            ]
            if sharing:
                return min(sharing, key=lambda replica: (-matches[replica], self.load[replica], replica))
        free = [replica for replica in self.replicas if here[replica] < most] or list(self.replicas)
        return min(free, key=lambda replica: (self.load[replica], replica))


def check_formula(batch: Sequence[Texts], replicas: int, rules: BurstRules) -> None:
    expected = Formula(batch, replicas, rules).places
    assert assigned([chained(texts) for texts in batch], replicas, rules) == expected


def check_caps(batch: Sequence[Texts], replicas: int, rules: BurstRules) -> None:
    """Once each and only where there is something in common; within the limits; evenly without them."""
    places = assigned([chained(texts) for texts in batch], replicas, rules)
    assert len(places) == len(batch)
    counts: dict[Texts, Counter[int]] = {}
    for texts, place in zip(batch, places, strict=True):
        if place is None:
            assert not texts or not replicas or batch.count(texts) == 1
            continue
        assert place.replica in range(replicas)
        assert 0 <= place.ahead <= sum(map(len, texts))
        assert batch.count(texts) > 1 or rules.min_colocate
        counts.setdefault(texts, Counter())[place.replica] += 1
    most = rules.max_per_replica
    for texts, here in counts.items():
        assert sum(here.values()) == batch.count(texts), "a unit is placed as a whole"
        if most is None:
            assert len(here) == 1, "and together"
        elif sum(here.values()) <= most * replicas:
            assert max(here.values()) <= most
        else:
            assert min(here[replica] for replica in range(replicas)) >= most
    if counts and most is None and not (rules.min_colocate or rules.by_tokens):
        loads = sum(counts.values(), Counter())
        largest = max(sum(here.values()) for here in counts.values())
        assert max(loads.values()) - min(loads[replica] for replica in range(replicas)) <= largest


def check_order(both: tuple[list[Texts], list[Texts]], replicas: int, rules: BurstRules) -> None:
    """Where no two units are equally long, it does not matter who came first."""

    def counted(texts: Sequence[Texts]) -> Counter[tuple[Texts, Assigned | None]]:
        return Counter(zip(texts, assigned([chained(each) for each in texts], replicas, rules), strict=True))

    batch, shuffled = both
    assert counted(batch) == counted(shuffled)


@SMALL
@given(BATCHES, st.integers(0, 4), RULES)
def test_the_formula(batch: list[Texts], replicas: int, rules: BurstRules) -> None:
    check_formula(batch, replicas, rules)


@SMALL
@given(BATCHES, st.integers(0, 4), RULES)
def test_what_holds_of_any_batch(batch: list[Texts], replicas: int, rules: BurstRules) -> None:
    check_caps(batch, replicas, rules)


BY_LENGTH: list[Texts] = [("a" * length if length % 2 else "ab" * (length // 2),) for length in range(1, 6)]


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[Texts], list[Texts]]:
    batch = draw(st.lists(st.sampled_from(BY_LENGTH), max_size=14))
    return batch, draw(st.permutations(batch))


@SMALL
@given(orders(), st.integers(1, 4), RULES)
def test_who_came_first_matters_for_ties_alone(
    both: tuple[list[Texts], list[Texts]], replicas: int, rules: BurstRules
) -> None:
    check_order(both, replicas, rules)


# -- planted faults -----------------------------------------------------------------------------------

Placing = burst_plan._Placing
RIGHT: Any = {name: getattr(Placing, name) for name in ("_least_loaded", "_most_shared", "_charge", "place")}


def ignores_the_limit(self: Any, taken: Any, below: int, aside: Any) -> Any:
    return RIGHT["_least_loaded"](self, {}, below, aside)


def allows_one_more(self: Any, unit: Any) -> Any:
    rules = self._rules
    if rules.max_per_replica is not None:
        self._rules = replace(rules, max_per_replica=rules.max_per_replica + 1)
    try:
        return list(RIGHT["place"](self, unit))
    finally:
        self._rules = rules


def stampedes(self: Any, shared: Any) -> Any:
    fair, self._fair_share = self._fair_share, 10**9
    try:
        return RIGHT["_most_shared"](self, shared)
    finally:
        self._fair_share = fair


def never_together(self: Any, shared: Any) -> None:
    return None


def forgets_loads(self: Any, replica: int, load: int) -> None:
    return None


def charges_all_blocks(self: Any, replica: int, load: int) -> None:
    RIGHT["_charge"](self, replica, load + self._rules.by_tokens)


def loses_the_last(self: Any, unit: Any) -> Any:
    places = list(RIGHT["place"](self, unit))
    return [*places[:-1], None]


def groups_by_first_prompt(batch: Sequence[Chains], min_colocate: int) -> Any:
    return RIGHT_UNITS([chains[:1] for chains in batch], min_colocate)


def shortest_first(unit: Any) -> int:
    return int(unit.blocks)


RIGHT_UNITS = burst_plan._units
FAULTS = [
    (Placing, "_least_loaded", ignores_the_limit),
    (Placing, "place", allows_one_more),
    (Placing, "_most_shared", stampedes),
    (Placing, "_most_shared", never_together),
    (Placing, "_charge", forgets_loads),
    (Placing, "_charge", charges_all_blocks),
    (Placing, "place", loses_the_last),
    (burst_plan, "_units", groups_by_first_prompt),
    (burst_plan, "_longest_first", shortest_first),
]
CAUGHT_BY_CAPS = (allows_one_more, forgets_loads, loses_the_last)
QUICK = settings(
    max_examples=3000,
    deadline=None,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
)


@pytest.mark.parametrize(
    ("owner", "name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_planted_faults_are_caught(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        QUICK(given(BATCHES, st.integers(0, 4), RULES)(check_formula))()
    if fault in CAUGHT_BY_CAPS:
        with pytest.raises(AssertionError):
            QUICK(given(BATCHES, st.integers(0, 4), RULES)(check_caps))()


def test_an_order_that_matters_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst_plan, "_longest_first", lambda unit: 0)
    with pytest.raises(AssertionError):
        QUICK(given(orders(), st.integers(1, 4), RULES)(check_order))()


def test_the_oracle_sees_every_kind_of_choice() -> None:
    """By hand: the longer pair first; what shares 2 blocks with it joins it, its share being 3 of 5."""
    batch: list[Texts] = [("aab",), ("bb",), ("aab",), ("aaa",), ("bb",), ("b",)]
    found = [place and place.replica for place in Formula(batch, 2, BurstRules(None, 2)).places]
    assert found == [0, 1, 0, 0, 1, None]
    assert list(chain.from_iterable(chained(("aab", "a"))))[0] == chained(("a",))[0][0]
