"""The index of runs against brute force: random use, invariants, capacity, and faults that must be seen."""

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from struct import unpack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.kvcache.lru import SLACK, LruRunIndex
from epp.kvcache.runs import lengths, slots_of

Chain = list[int]
UNLIMITED = 1 << 40


def keys_of(index: LruRunIndex, run: int) -> Chain:
    stored = index._keys[run]
    return list(unpack(f"<{len(stored) // 8}Q", stored))


def forest(draw: random.Random, count: int, blocks: int = 40) -> list[Chain]:
    """Chains that share beginnings, as prompts do."""
    chains: list[Chain] = []
    for _ in range(count):
        shared: Chain = []
        if chains and draw.random() < 0.8:
            base = draw.choice(chains)
            shared = base[: draw.randint(0, len(base))]
        chains.append(shared + [draw.getrandbits(64) for _ in range(draw.randint(1, blocks))])
    return chains


def brute_length(held: set[int], chain: Sequence[int]) -> int:
    for count, key in enumerate(chain):
        if key not in held:
            return count
    return len(chain)


def common(one: Chain, other: Chain) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def check_structure(index: LruRunIndex) -> list[set[int]]:
    """Invariants 1-4, 6 and 7; returns the keys each slot holds, read from the raw structure."""
    where: dict[int, int] = {}
    for head, run in index._run_of_head.items():
        keys = keys_of(index, run)
        assert keys[0] == head
        for key in keys:
            assert key not in where, "a key lives in one run, once"
            where[key] = run
        levels = {len(keys): index._whole[run], **(index._partial[run] or {})}
        assert index._partial[run] is None or (index._partial[run] and all(index._partial[run].values()))
        seen = 0
        for length, mask in levels.items():
            assert 0 < length <= len(keys)
            assert not seen & mask, "one length per slot and run"
            seen |= mask
            assert all(index.held[slot][run] == length for slot in slots_of(mask))
        assert seen == sum(1 << slot for slot, own in enumerate(index.held) if run in own)
        assert index._whole[run], "an end that nobody holds is forgotten"
    assert sorted(index._free) == sorted(set(range(len(index._keys))) - set(index._run_of_head.values()))
    result = []
    for slot, own in enumerate(index.held):
        held = [key for run, length in own.items() for key in keys_of(index, run)[:length]]
        assert len(held) == len(set(held)) == sum(own.values()) == index.blocks[slot]
        assert index.blocks[slot] <= index.capacity[slot]
        result.append(set(held))
    return result


def check_order(index: LruRunIndex, chains: list[Chain]) -> None:
    """Invariant 5: along any chain, what comes first was used last."""
    paths = set()
    for chain in chains:
        path, position = [], 0
        while position < len(chain) and (run := index._run_of_head.get(chain[position])) is not None:
            path.append(run)
            position += index._shared(run, chain, position)
        paths.add(tuple(path))
    for own in filter(None, index.held):
        age = {run: place for place, run in enumerate(own)}
        for order in paths:
            places = [age[run] for run in order if run in age]
            assert all(later < earlier for earlier, later in pairwise(places))


def check_answers(index: LruRunIndex, held: list[set[int]], chain: Chain) -> None:
    slots = len(held)
    steps = index.match(chain)
    assert lengths(steps, slots).tolist() == [brute_length(own, chain) for own in held]
    for (mask, blocks), (inner, more) in pairwise(steps):
        assert inner & ~mask == 0
        assert inner != mask
        assert more > blocks


def use(
    make: Callable[[], LruRunIndex], seed: int, slots: int, capacity: int, removing: bool, steps: int = 120
) -> None:
    """Random operations; everything checked after each of them, with many slots after some of them."""
    draw = random.Random(seed)
    index = make()
    index.grow(slots)
    for slot in range(slots):
        index.set_capacity(slot, capacity)
    chains = forest(draw, 40)
    model: list[set[int]] = [set() for _ in range(slots)]
    for step in range(steps):
        chain, slot, kind = draw.choice(chains), draw.randrange(slots), draw.random()
        chain = chain[: draw.randint(1, len(chain))]
        if kind < 0.8 or not removing:
            index.insert(chain, slot)
            model[slot].update(chain)
            if len(chain) <= capacity - capacity // SLACK:
                assert lengths(index.match(chain), slots)[slot] == len(chain)
        elif kind < 0.9:
            keep = draw.randint(0, len(chain))
            before = [lengths(index.match(q), slots) for q in chains]
            index.truncate(chain, slot, keep)
            for q, old in zip(chains, before, strict=True):
                want = old.copy()
                if common(q, chain) > keep:
                    want[slot] = min(want[slot], keep)
                assert lengths(index.match(q), slots).tolist() == want.tolist()
        elif kind < 0.95:
            count, had = draw.randint(1, 60), index.blocks[slot]
            index.evict(slot, count)
            assert index.blocks[slot] == max(0, had - count)
        else:
            index.clear(slot)
            model[slot].clear()
            assert not index.held[slot]
        if step % (1 + slots // 40):
            continue
        held = check_structure(index)
        check_order(index, chains)
        assert all(own <= all_time for own, all_time in zip(held, model, strict=True))
        if not removing and capacity == UNLIMITED:
            assert held == model
        if not removing:
            for own in filter(None, held):
                assert all(not set(q[brute_length(own, q) :]) & own for q in chains), "no gaps"
        for q in draw.sample(chains, 3):
            check_answers(index, held, q)
    for slot in range(slots):
        index.clear(slot)
    assert not index._run_of_head
    assert len(index._free) == len(index._keys)


SIZES = st.sampled_from([3, 5, 20, 64, 65, 200])


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32), slots=SIZES, removing=st.booleans())
def test_unlimited_index_equals_sets_of_keys(seed: int, slots: int, removing: bool) -> None:
    use(LruRunIndex, seed, slots, UNLIMITED, removing, steps=80)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32), slots=SIZES, capacity=st.integers(1, 200), removing=st.booleans())
def test_limited_index_keeps_its_invariants(seed: int, slots: int, capacity: int, removing: bool) -> None:
    use(LruRunIndex, seed, slots, capacity, removing, steps=80)


class ComparesOnlyLengths(LruRunIndex):
    """Takes a run for matched when the chain is long enough, without comparing."""

    def _shared(self, run: int, chain: Sequence[int], position: int) -> int:
        return min(self._length(run), len(chain) - position)


class ForgetsHeads(LruRunIndex):
    """Stores keys again that already head a run."""

    def _unknown(self, chain: Sequence[int], position: int) -> Sequence[int]:
        return chain[position:]


class TouchesHeadFirst(LruRunIndex):
    """The beginning of a chain ages before its end."""

    def _touch(self, path: Sequence[int], slot: int) -> None:
        super()._touch(list(reversed(path)), slot)


class KeepsStaleMasks(LruRunIndex):
    """A slot's bit stays behind when it holds less."""

    def _remove_holder(self, run: int, bit: int, length: int) -> None:
        if length == self._length(run):
            super()._remove_holder(run, bit, length)


class SplitLosesShorterHolders(LruRunIndex):
    """Cutting a run keeps the bits of those alone who hold the whole of a part."""

    def _set_levels(self, run: int, levels: dict[int, int]) -> None:
        super()._set_levels(
            run, {length: mask for length, mask in levels.items() if length == self._length(run)}
        )


class TruncatesOneTooFew(LruRunIndex):
    def truncate(self, chain: Sequence[int], slot: int, keep: int) -> None:
        super().truncate(chain, slot, keep + 1)


class EvictsTheNewest(LruRunIndex):
    def evict(self, slot: int, blocks: int) -> None:
        own = self.held[slot]
        for run in list(reversed(own)):
            taken = min(blocks, own[run])
            self._lower(run, slot, own[run] - taken)
            blocks -= taken
            if not blocks:
                return


class LeavesAncestorsOld(LruRunIndex):
    """A split makes the beginning of a run newer than what stands before it, for the other holders."""

    def _split(self, run: int, cut: int, path: Sequence[int]) -> int:
        return super()._split(run, cut, ())


FAULTS = [
    ComparesOnlyLengths,
    ForgetsHeads,
    TouchesHeadFirst,
    KeepsStaleMasks,
    SplitLosesShorterHolders,
    TruncatesOneTooFew,
    EvictsTheNewest,
    LeavesAncestorsOld,
]


@pytest.mark.parametrize("faulty", FAULTS)
def test_faults_are_seen(faulty: type[LruRunIndex]) -> None:
    def several_seeds() -> None:
        for seed in range(12):
            use(faulty, seed, 3, 150, removing=bool(seed % 2))

    with pytest.raises((AssertionError, LookupError)):
        several_seeds()


def hit_shares(seed: int, slots: int, capacity: int, turns: int) -> tuple[float, float]:
    """Share of prompt blocks found on the endpoint used: by the index, and by an exact LRU of blocks."""
    draw = random.Random(seed)
    index = LruRunIndex()
    index.grow(slots)
    for slot in range(slots):
        index.set_capacity(slot, capacity)
    exact: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(slots)]
    systems = [[draw.getrandbits(64) for _ in range(100)] for _ in range(3)]
    talks: list[tuple[Chain, int]] = []
    found = wanted = total = 0
    for _ in range(turns):
        if len(talks) < 60 or draw.random() < 0.1:
            talks = [*talks, (draw.choice(systems), draw.randrange(slots))][-150:]
        number = min(int(draw.expovariate(0.03)), len(talks) - 1)
        chain, home = talks[number]
        chain = chain + [draw.getrandbits(64) for _ in range(draw.randint(1, 30))]
        talks[number] = chain, home
        slot = home if draw.random() < 0.8 else draw.randrange(slots)
        blocks = exact[slot]
        found += int(lengths(index.match(chain), slots)[slot])
        wanted += brute_length(set(blocks), chain)
        total += len(chain)
        index.insert(chain, slot)
        for key in reversed(chain):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > capacity:
            blocks.popitem(last=False)
    return found / total, wanted / total


@pytest.mark.parametrize("seed", [1, 2])
def test_evicts_nearly_as_well_as_an_exact_lru(seed: int) -> None:
    share, exact = hit_shares(seed, slots=4, capacity=3000, turns=2500)
    assert exact > 0.5
    assert share == pytest.approx(exact, abs=0.01)


def test_capacity_may_change_at_any_time() -> None:
    index = LruRunIndex()
    index.grow(2)
    index.set_capacity(0, 100)
    index.set_capacity(1, 100)
    chain = list(range(1, 91))
    index.insert(chain, 0)
    index.insert(chain, 1)
    index.set_capacity(0, 30)
    assert index.blocks == [30, 90]
    assert lengths(index.match(chain), 2).tolist() == [30, 90]
    index.set_capacity(0, 0)
    assert lengths(index.match(chain), 2).tolist() == [0, 90]
    index.insert(chain, 0)
    assert index.blocks[0] == 0


def test_a_chain_longer_than_the_capacity_keeps_its_beginning() -> None:
    index = LruRunIndex()
    index.grow(1)
    index.set_capacity(0, 64)
    chain = list(range(1, 1001))
    index.insert(chain, 0)
    held = int(lengths(index.match(chain), 1)[0])
    assert 62 <= held <= 64
    assert index.was_evicted(chain[held], 0)
    assert not index.was_evicted(chain[0], 0)


def test_an_old_conversation_does_not_stay_with_a_used_system_prompt() -> None:
    index = LruRunIndex()
    index.grow(1)
    index.set_capacity(0, 100)
    system, old = list(range(1, 11)), list(range(100, 150))
    index.insert(system + old, 0)
    for talk in range(10):
        index.insert(system + list(range(1000 * talk + 1000, 1000 * talk + 1010)), 0)
    assert lengths(index.match(system + old), 1)[0] < len(system + old)
    assert lengths(index.match(system), 1)[0] == len(system)


@given(st.lists(st.integers(0, 199), max_size=200), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_lengths_write_each_slot_of_nested_steps(order: list[int], most: int) -> None:
    draw = random.Random(most)
    want = np.zeros(200, np.int64)
    for slot in order:
        want[slot] = draw.randint(1, most)
    depths = sorted(set(want.tolist()) - {0})
    steps = [(sum(1 << slot for slot in range(200) if want[slot] >= blocks), blocks) for blocks in depths]
    assert lengths(steps, 200).tolist() == want.tolist()
