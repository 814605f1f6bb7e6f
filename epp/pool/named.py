"""Which slots go with which name."""

from typing import Final

import numpy as np

from epp.pool.records import Mask

_NO_NAMES: Final[frozenset[str]] = frozenset()


class NamedMasks:
    """A mask of slots for each name. A name that goes with no slot is not kept.

    Attributes:
        masks: by name. Masks are replaced when the capacity grows, so keep the mapping, not a mask.
    """

    def __init__(self, masks: dict[str, Mask]) -> None:
        self.masks = masks
        self._names: dict[int, frozenset[str]] = {}

    def set(self, slot: int, names: frozenset[str], capacity: int) -> None:
        """From now on the slot goes with `names` and no others."""
        before = self._names.get(slot, _NO_NAMES)
        if names == before:
            return
        for name in before - names:
            mask = self.masks[name]
            mask[slot] = False
            if not mask.any():
                del self.masks[name]
        for name in names - before:
            self.masks.setdefault(name, np.zeros(capacity, np.bool_))[slot] = True
        if names:
            self._names[slot] = names
        else:
            del self._names[slot]

    def grow(self, more: int) -> None:
        """Capacity has grown by `more` slots, which go with no name."""
        for name, mask in self.masks.items():
            self.masks[name] = np.pad(mask, (0, more))
