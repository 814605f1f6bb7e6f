"""Pickers: from one total per endpoint to the endpoints to use, in order."""

from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from epp.pool.records import Floats, Mask
from epp.scheduling.ports import Ctx

# Odd multipliers of the 64-bit finalizer that turns (endpoint, nonce) into a sort key.
_MIX_1: Final = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2: Final = np.uint64(0xC4CEB9FE1A85EC53)
_HALF: Final = np.uint64(33)


def tie_keys(identity: NDArray[np.uint64], nonce: int) -> NDArray[np.uint64]:
    """A random order of endpoints: one 64-bit key each, from its identity and one draw.

    The key belongs to the endpoint, not to its slot: the same draw orders the same endpoints alike
    wherever they stand.
    """
    keys = identity ^ np.uint64(nonce)
    keys ^= keys >> _HALF
    keys *= _MIX_1
    keys ^= keys >> _HALF
    keys *= _MIX_2
    keys ^= keys >> _HALF
    return keys


class MaxScorePickerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `max-score-picker`.

    Attributes:
        max_num_of_endpoints: how many endpoints to name: the first choice and its fallbacks.
    """

    max_num_of_endpoints: Annotated[int, Meta(ge=1, le=2**31)] = 1


class MaxScorePicker:
    """`max-score-picker`: the highest totals first. Equal totals stand in random order, drawn by endpoint."""

    def __init__(self, params: MaxScorePickerParams) -> None:
        self._count = params.max_num_of_endpoints

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        slots = alive.nonzero()[0]
        totals = total[slots]
        if self._count == 1:
            tied = slots[totals == totals.item(totals.argmax())]
            if len(tied) == 1:
                return (tied.item(0),)
            keys = tie_keys(ctx.view.identity[tied], ctx.draw.getrandbits(64))
            return (tied.item(keys.argmin()),)
        if self._count < len(slots):
            at_least = np.partition(totals, -self._count)[-self._count]
            slots = slots[totals >= at_least]
            totals = total[slots]
        keys = tie_keys(ctx.view.identity[slots], ctx.draw.getrandbits(64))
        order = np.lexsort((keys, -totals))[: self._count]
        return tuple(slots[order].tolist())
