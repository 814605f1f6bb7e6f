"""The index of runs: which slots hold how many leading blocks of a chain of keys.

A *run* is a stretch of consecutive keys, stored once as bytes and found by its first key. A chained key
says everything that stands before it, therefore

- one comparison of a run's last key proves the whole run, and bisection finds where a chain leaves it;
- after any match the next key alone finds where the chain goes on: runs need no pointers to each other,
  and a run may be branched from anywhere without being cut.

So a lookup costs the number of runs on the way, neither the blocks nor the slots. Sets of slots are bit
masks in Python ints.

Invariants (checked by tests/property/test_kvcache_index.py):

1. A key lives in one run, once.
2. `_run_of_head` maps the first key of every living run to its number, and nothing else.
3. `held[slot][run]` = n > 0 exactly if the slot's bit is in `_whole[run]` (n = the run's length) or in
   `_partial[run][n]` (n shorter); a bit is in one of these at most. No mask in `_partial` is 0, no
   dict empty.
4. `blocks[slot]` is the sum of `held[slot]`.
"""

from collections.abc import Iterator, Sequence
from struct import pack

import numpy as np

from epp.pool.records import Ints

KEY_BYTES = 8
# Up to so many slots a loop over bits is cheaper than the fixed cost of numpy's calls.
FEW = 16

SlotMask = int
"""A set of slots: bit s for slot s."""

Step = tuple[SlotMask, int]


class RunIndex:
    """The structure shared by all modes: reading, and the primitives that writing is made of.

    Chains are sequences of distinct keys in 0..2^64-1. Per run there are only bytes, ints and small dicts
    of ints, none of which the garbage collector has to visit.
    """

    def __init__(self) -> None:
        self.held: list[dict[int, int]] = []
        self.blocks: list[int] = []
        self._bit: list[SlotMask] = []
        self._run_of_head: dict[int, int] = {}
        self._keys: list[bytes] = []
        self._whole: list[SlotMask] = []
        self._partial: list[dict[int, SlotMask] | None] = []
        self._free: list[int] = []

    def grow(self, slots: int) -> None:
        """Know at least `slots` slots; new ones hold nothing."""
        for slot in range(len(self.held), slots):
            self.held.append({})
            self.blocks.append(0)
            self._bit.append(1 << slot)

    # -- reading ----------------------------------------------------------------------------------

    def match(self, chain: Sequence[int]) -> list[Step]:
        """Who holds how much of a chain, as steps `(mask, blocks)`.

        The slots of a step's mask hold the first `blocks` blocks, without a gap. Along the list blocks grow
        and masks shrink, each within the one before: a slot's length is that of the last step it is in.
        """
        run_of_head, whole, partial = self._run_of_head, self._whole, self._partial
        alive, position, end = -1, 0, len(chain)
        steps: list[Step] = []
        while position < end:
            run = run_of_head.get(chain[position])
            if run is None:
                break
            shared = self._shared(run, chain, position)
            levels = partial[run]
            holders = whole[run]
            if levels:
                for mask in levels.values():
                    holders |= mask
            staying = alive & holders
            if staying != alive:
                if position:
                    steps.append((alive, position))
                alive = staying
            if levels:
                for length in sorted(levels):
                    if length >= shared or not alive:
                        break
                    staying = alive & ~levels[length]
                    if staying != alive:
                        steps.append((alive, position + length))
                        alive = staying
            if not alive:
                return steps
            position += shared
        if position:
            steps.append((alive, position))
        return steps

    def _shared(self, run: int, chain: Sequence[int], position: int) -> int:
        """How many leading keys of a run equal `chain[position:]`; the first is known to."""
        keys = self._keys[run]
        length, left = len(keys) // KEY_BYTES, len(chain) - position
        if length <= left and chain[position + length - 1] == int.from_bytes(keys[-KEY_BYTES:], "little"):
            return length
        equal, differs = 1, min(length, left) + 1
        while differs - equal > 1:
            middle = (equal + differs) // 2
            if self._key_at(run, middle - 1) == chain[position + middle - 1]:
                equal = middle
            else:
                differs = middle
        return equal

    def _length(self, run: int) -> int:
        return len(self._keys[run]) // KEY_BYTES

    def _key_at(self, run: int, offset: int) -> int:
        at = offset * KEY_BYTES
        return int.from_bytes(self._keys[run][at : at + KEY_BYTES], "little")

    # -- primitives of writing --------------------------------------------------------------------

    def _new_run(self, keys: bytes) -> int:
        """Store keys that no run has; nobody holds them yet."""
        if self._free:
            run = self._free.pop()
            self._keys[run] = keys
        else:
            run = len(self._keys)
            self._keys.append(keys)
            self._whole.append(0)
            self._partial.append(None)
        self._run_of_head[self._key_at(run, 0)] = run
        return run

    def _drop_run(self, run: int) -> None:
        """Forget a run that nobody holds."""
        del self._run_of_head[self._key_at(run, 0)]
        self._keys[run] = b""
        self._free.append(run)

    def _set_held(self, run: int, slot: int, length: int) -> None:
        """The slot now holds the first `length` blocks of the run; a new entry is the slot's newest."""
        own, bit = self.held[slot], self._bit[slot]
        before = own.get(run, 0)
        if before == length:
            return
        if before:
            self._remove_holder(run, bit, before)
        if length:
            self._add_holder(run, bit, length)
            own[run] = length
        else:
            del own[run]
        self.blocks[slot] += length - before

    def _add_holder(self, run: int, bit: SlotMask, length: int) -> None:
        if length == self._length(run):
            # An only holder's mask is the slot's own int object, shared by all its runs.
            self._whole[run] = self._whole[run] | bit if self._whole[run] else bit
            return
        levels = self._partial[run]
        if levels is None:
            levels = self._partial[run] = {}
        levels[length] = levels.get(length, 0) | bit

    def _remove_holder(self, run: int, bit: SlotMask, length: int) -> None:
        if length == self._length(run):
            self._whole[run] &= ~bit
            return
        levels = self._partial[run]
        assert levels is not None
        levels[length] &= ~bit
        if not levels[length]:
            del levels[length]
            if not levels:
                self._partial[run] = None

    def _only_holder(self, run: int, slot: int) -> bool:
        return self._whole[run] == self._bit[slot] and not self._partial[run]

    def _lengthen(self, run: int, slot: int, keys: bytes) -> None:
        """Add keys that no run has to the end of a run that this slot alone holds, wholly."""
        self._keys[run] += keys
        self.held[slot][run] = self._length(run)
        self.blocks[slot] += len(keys) // KEY_BYTES

    def _unknown(self, chain: Sequence[int], position: int) -> Sequence[int]:
        """The keys from `position`, which no run has, up to the first one that heads a run.

        Such a head exists where the blocks before a run were forgotten earlier than the run.
        """
        keys = chain[position:]
        if self._run_of_head.keys().isdisjoint(keys):
            return keys
        heads = self._run_of_head
        return keys[: next(offset for offset, key in enumerate(keys) if key in heads)]


def packed(keys: Sequence[int]) -> bytes:
    """Keys in the form a run stores them."""
    return pack(f"<{len(keys)}Q", *keys)


def lengths(steps: Sequence[Step], slots: int) -> Ints:
    """The steps of `RunIndex.match` as one number of blocks per slot, 0 where nothing is held."""
    blocks_by_slot = np.zeros(slots, np.int64)
    further = 0
    for mask, blocks in reversed(steps):
        leaving, further = mask & ~further, mask
        if leaving.bit_count() <= FEW:
            while leaving:
                lowest = leaving & -leaving
                blocks_by_slot[lowest.bit_length() - 1] = blocks
                leaving ^= lowest
        else:
            octets = np.frombuffer(leaving.to_bytes((slots + 7) // 8, "little"), np.uint8)
            blocks_by_slot[np.unpackbits(octets, count=slots, bitorder="little").view(np.bool_)] = blocks
    return blocks_by_slot


def slots_of(mask: SlotMask) -> Iterator[int]:
    """The slots of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
