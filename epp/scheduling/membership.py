"""What plugins derive from who is in the pool: columns and masks made once for each membership."""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import numpy as np

from epp.pool.records import Endpoint, Mask, PoolView

Owners = tuple[Endpoint | None, ...]
"""`PoolView.endpoints`: the owner of each slot."""

SHOWN_ENDPOINTS: Final = 100
"""Most endpoints that a plugin's `state()` lists."""

T = TypeVar("T")


class ByMembership(Generic[T]):
    """Something derived from the endpoints and their labels, made anew when membership or a label changes.

    `PoolStore` replaces `PoolView.endpoints` as a whole, so the tuple itself says whether anything changed.
    """

    def __init__(self, derive: Callable[[Owners], T]) -> None:
        """`derive` must not keep state: it may be called for any view."""
        self._derive = derive
        self._owners: Owners = ()
        self._derived = derive(())

    def of(self, view: PoolView) -> T:
        """What `derive` makes of the view's endpoints."""
        owners = view.endpoints
        if owners is not self._owners:
            self._derived = self._derive(owners)
            self._owners = owners
        return self._derived


def mask_where(owners: Owners, matches: Callable[[Endpoint], bool]) -> Mask:
    """Slots whose owner `matches`. Read-only, so that it can be handed out again and again."""
    mask = np.fromiter((owner is not None and matches(owner) for owner in owners), np.bool_, len(owners))
    mask.setflags(write=False)
    return mask
