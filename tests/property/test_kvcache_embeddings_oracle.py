"""The index of embeddings against one list of digests for each slot."""

from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.kvcache.embeddings import EmbeddingsIndex

SLOTS = 4
Step = tuple[str, int, list[int]]
kinds = st.sampled_from(["insert", "insert", "insert", "remove", "clear"])
digests = st.lists(st.integers(0, 12), min_size=1, max_size=7, unique=True)
steps = st.lists(st.tuples(kinds, st.integers(0, SLOTS - 1), digests), max_size=40)


def follow(index: EmbeddingsIndex, capacity: int, story: list[Step]) -> None:
    """Play the story on lists, oldest first, and compare after each step."""
    model: list[list[int]] = [[] for _ in range(SLOTS)]
    for kind, slot, given_digests in story:
        own = model[slot]
        if kind == "insert":
            fresh = index.insert(given_digests, slot)
            assert list(fresh) == [digest for digest in given_digests if digest not in own]
            own[:] = [digest for digest in own if digest not in given_digests] + given_digests
            del own[: max(len(own) - capacity, 0)]
        elif kind == "remove":
            index.remove(given_digests, slot)
            own[:] = [digest for digest in own if digest not in given_digests]
        else:
            index.clear(slot)
            own.clear()
        for at, expected in enumerate(model):
            assert list(index.held.get(at, ())) == expected
        known = {digest for held in model for digest in held}
        assert set(index.slots) == known
        for digest in known:
            assert index.slots[digest] == sum(1 << at for at, held in enumerate(model) if digest in held)


@settings(max_examples=80)
@given(steps, st.integers(1, 8))
def test_index_is_the_lists(story: list[Step], capacity: int) -> None:
    follow(EmbeddingsIndex(capacity), capacity, story)


class DoesNotRenew(EmbeddingsIndex):
    def insert(self, digests: Sequence[int], slot: int) -> tuple[int, ...]:
        own = self.held.get(slot, {})
        known = tuple(digest for digest in digests if digest in own)
        return super().insert([digest for digest in digests if digest not in known], slot)


class KeepsBitsOfTheEvicted(EmbeddingsIndex):
    def remove(self, digests: Sequence[int], slot: int) -> None:
        for digest in digests:
            self.held.get(slot, {}).pop(digest, None)


class HoldsOneTooMany(EmbeddingsIndex):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity + 1)


class ForgetsEveryHolder(EmbeddingsIndex):
    def clear(self, slot: int) -> None:
        for digest in self.held.pop(slot, {}):
            self.slots.pop(digest, None)


@pytest.mark.parametrize("fault", [DoesNotRenew, KeepsBitsOfTheEvicted, HoldsOneTooMany, ForgetsEveryHolder])
def test_planted_faults_are_seen(fault: type[EmbeddingsIndex]) -> None:
    @settings(max_examples=300, phases=(Phase.generate,), derandomize=True, database=None)
    @given(steps, st.integers(1, 8))
    def tell(story: list[Step], capacity: int) -> None:
        follow(fault(capacity), capacity, story)

    with pytest.raises(AssertionError):
        tell()
