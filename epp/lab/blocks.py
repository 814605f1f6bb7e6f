"""The block pool of one engine: which KV blocks are in use, what they hold, which one is evicted next."""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Fixed number of KV blocks with reference counts and an LRU of the unreferenced ones.

    A block may carry a key that names its content and everything before it. Unreferenced blocks keep
    their content until they are taken again, oldest first. A released sequence enters the LRU last
    block first, so that of one prompt the tail is evicted before the head. One key may be held by
    several blocks (a prompt of whole blocks computes its last block again); lookups find the oldest.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._key_of: list[int | None] = [None] * size
        self._unreferenced: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self._holder: dict[int, int] = {}
        self._duplicates: dict[int, list[int]] = {}

    @property
    def unreferenced(self) -> int:
        """Blocks that may be taken, cached content or not."""
        return len(self._unreferenced)

    def find(self, keys: Sequence[int], limit: int) -> list[int]:
        """Blocks that hold the longest prefix of `keys`, at most `limit` of them. Holds none of them."""
        found: list[int] = []
        holder = self._holder
        for index in range(min(limit, len(keys))):
            block = holder.get(keys[index])
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, found: Sequence[int], new: int) -> bool:
        """Whether `found` can be held and `new` blocks taken besides."""
        references = self._references
        idle = sum(1 for block in found if references[block] == 0)
        return idle + new <= len(self._unreferenced)

    def hold(self, found: Sequence[int]) -> None:
        """Adds one reference to each block."""
        references = self._references
        for block in found:
            if references[block] == 0:
                del self._unreferenced[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """The `count` least recently used blocks, referenced once, their content forgotten.

        `count` is at most `unreferenced`.
        """
        taken = []
        for _ in range(count):
            block, _none = self._unreferenced.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def name(self, block: int, key: int) -> None:
        """Says that a block without a key holds the content `key`."""
        self._key_of[block] = key
        if self._holder.setdefault(key, block) != block:
            self._duplicates.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block of a sequence, its last block first."""
        references = self._references
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                self._unreferenced[block] = None

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is None:
            return
        self._key_of[block] = None
        duplicates = self._duplicates.get(key)
        if duplicates is None:
            del self._holder[key]
            return
        if self._holder[key] == block:
            self._holder[key] = duplicates.pop(0)
        else:
            duplicates.remove(block)
        if not duplicates:
            del self._duplicates[key]
