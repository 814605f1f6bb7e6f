"""The index of runs with an order of use and a capacity per slot: a model of caches seen from outside."""

from collections.abc import Sequence
from itertools import islice

from epp.kvcache.runs import KEY_BYTES, RunIndex, SlotMask, packed, slots_of

EVICTED_REMEMBERED = 256
# An insertion that overflows evicts this fraction of the capacity more than it must.
SLACK = 64
RUNS_PER_SCAN = 64


class LruRunIndex(RunIndex):
    """What slots hold if each evicts its least recently used blocks, the end of a chain before its beginning.

    Further invariants:

    5. `held[slot]` is in order of use, oldest first, and a run stands before (is older than) every run that
       a chain through it passes earlier. So the oldest run has nothing behind it, and taking blocks from its
       end leaves no gap.
    6. Some slot holds the whole of each run: ends that nobody holds are forgotten.
    7. `blocks[slot] <= capacity[slot]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.capacity: list[int] = []
        self._evicted: list[dict[int, None]] = []

    def grow(self, slots: int) -> None:
        """Know at least `slots` slots; new ones hold nothing and may not, until they have a capacity."""
        for _ in range(len(self.held), slots):
            self.capacity.append(0)
            self._evicted.append({})
        super().grow(slots)

    def set_capacity(self, slot: int, blocks: int) -> None:
        """From now on the slot holds at most `blocks`; what is too much is evicted at once."""
        self.capacity[slot] = blocks
        if self.blocks[slot] > blocks:
            self.evict(slot, self.blocks[slot] - blocks)

    def insert(self, chain: Sequence[int], slot: int) -> None:
        """The slot used the chain now: it holds all of it, and these blocks are its newest."""
        own = self.held[slot]
        path: list[int] = []
        position, end, open_ended = 0, len(chain), None
        while position < end:
            run = self._run_of_head.get(chain[position])
            if run is None:
                keys = self._unknown(chain, position)
                if open_ended is not None and self._only_holder(open_ended, slot):
                    self._lengthen(open_ended, slot, packed(keys))
                else:
                    open_ended = self._new_run(packed(keys))
                    self._set_held(open_ended, slot, len(keys))
                    path.append(open_ended)
                position += len(keys)
                continue
            shared = self._shared(run, chain, position)
            open_ended = run if shared == self._length(run) else None
            held = own.get(run, 0)
            if held > shared:
                run = self._split(run, shared, path)
            elif held < shared:
                self._set_held(run, slot, shared)
            path.append(run)
            position += shared
        self._touch(path, slot)
        if self.blocks[slot] > self.capacity[slot]:
            self.evict(slot, self.blocks[slot] - self.capacity[slot] + self.capacity[slot] // SLACK)

    def _touch(self, path: Sequence[int], slot: int) -> None:
        """Make the runs of a path, as far as held, the slot's newest, the first of them last."""
        own = self.held[slot]
        for run in reversed(path):
            if run in own:
                own[run] = own.pop(run)

    def _split(self, run: int, cut: int, path: Sequence[int]) -> int:
        """Cut a run where a chain leaves it, so that its end may age apart. Returns the run of its beginning.

        The end keeps the run's number and with it its age. The beginning is the newest of all who hold it;
        `path`, the runs before it, is touched with it (invariant 5).
        """
        keys, length = self._keys[run], self._length(run)
        levels = {length: self._whole[run], **(self._partial[run] or {})}
        del self._run_of_head[self._key_at(run, 0)]
        front = self._new_run(keys[: cut * KEY_BYTES])
        self._keys[run] = keys[cut * KEY_BYTES :]
        self._run_of_head[self._key_at(run, 0)] = run
        front_levels: dict[int, SlotMask] = {}
        back_levels: dict[int, SlotMask] = {}
        for held, mask in levels.items():
            in_front, in_back = min(held, cut), max(held - cut, 0)
            front_levels[in_front] = front_levels.get(in_front, 0) | mask
            if in_back:
                back_levels[in_back] = mask
            for slot in slots_of(mask):
                own = self.held[slot]
                own[front] = in_front
                if in_back:
                    own[run] = in_back
                else:
                    del own[run]
                self._touch([*path, front], slot)
        self._set_levels(front, front_levels)
        self._set_levels(run, back_levels)
        return front

    def _set_levels(self, run: int, levels: dict[int, SlotMask]) -> None:
        self._whole[run] = levels.pop(self._length(run), 0)
        self._partial[run] = levels or None

    def evict(self, slot: int, blocks: int) -> None:
        """Take the slot's least recently used `blocks` blocks away (all, if it holds fewer)."""
        own = self.held[slot]
        while own:
            # A dict keeps deleted entries at its front until it is resized: one scan of them for many runs.
            for run in list(islice(own, RUNS_PER_SCAN)):
                if blocks <= 0:
                    return
                held = own[run]
                taken = min(blocks, held)
                self._remember_evicted(slot, self._key_at(run, held - taken))
                self._lower(run, slot, held - taken)
                blocks -= taken

    def _remember_evicted(self, slot: int, key: int) -> None:
        evicted = self._evicted[slot]
        if len(evicted) >= EVICTED_REMEMBERED:
            del evicted[next(iter(evicted))]
        evicted[key] = None

    def was_evicted(self, key: int, slot: int) -> bool:
        """Whether this key is the first that a chain lost at the slot by one of its last evictions."""
        return key in self._evicted[slot]

    def truncate(self, chain: Sequence[int], slot: int, keep: int) -> None:
        """The slot holds the first `keep` blocks of this chain at most."""
        own = self.held[slot]
        position = 0
        while position < len(chain):
            run = self._run_of_head.get(chain[position])
            if run is None:  # forgotten: what lies behind it may stand on its own
                position += len(self._unknown(chain, position))
                continue
            shared = self._shared(run, chain, position)
            kept = max(keep - position, 0)
            if shared > kept and own.get(run, 0) > kept:
                self._lower(run, slot, kept)
            position += shared

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        for run in list(self.held[slot]):
            self._lower(run, slot, 0)
        self._evicted[slot].clear()

    def _lower(self, run: int, slot: int, length: int) -> None:
        """The slot holds less of a run than before; what nobody holds now is forgotten."""
        self._set_held(run, slot, length)
        if self._whole[run]:
            return
        levels = self._partial[run]
        if not levels:
            self._drop_run(run)
            return
        longest = max(levels)
        self._keys[run] = self._keys[run][: longest * KEY_BYTES]
        self._set_levels(run, levels)
