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


class PickerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of every picker.

    Attributes:
        max_num_of_endpoints: how many endpoints to name: the first choice and its fallbacks.
    """

    max_num_of_endpoints: Annotated[int, Meta(ge=1, le=2**31)] = 1


class MaxScorePickerParams(PickerParams, frozen=True):
    """Parameters of `max-score-picker`."""


class RandomPickerParams(PickerParams, frozen=True):
    """Parameters of `random-picker`."""


class WeightedRandomPickerParams(PickerParams, frozen=True):
    """Parameters of `weighted-random-picker`."""


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


class RandomPicker:
    """`random-picker`: any of the endpoints, whatever their totals, in random order."""

    def __init__(self, params: RandomPickerParams) -> None:
        self._count = params.max_num_of_endpoints

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        slots = alive.nonzero()[0]
        keys = tie_keys(ctx.view.identity[slots], ctx.draw.getrandbits(64))
        if self._count == 1:
            return (slots.item(keys.argmin()),)
        return tuple(slots[keys.argsort()[: self._count]].tolist())


class WeightedRandomPicker:
    """`weighted-random-picker`: drawn in proportion to the totals, each next one from what is left (A-Res).

    The endpoints with the largest U^(1/total) win, U being uniform in (0, 1) and drawn by endpoint. A total
    of 0 comes after all others, in random order; where all are 0, the order is random altogether.
    """

    def __init__(self, params: WeightedRandomPickerParams) -> None:
        self._count = params.max_num_of_endpoints

    def pick(self, ctx: Ctx, total: Floats, alive: Mask) -> tuple[int, ...]:
        slots = alive.nonzero()[0]
        keys = tie_keys(ctx.view.identity[slots], ctx.draw.getrandbits(64))
        late = _lateness(keys, total[slots])
        if self._count == 1:
            return (slots.item(late.argmin()),)
        return tuple(slots[late.argsort()[: self._count]].tolist())


def _lateness(keys: NDArray[np.uint64], totals: Floats) -> Floats:
    """log(-log(U) / total), which orders like U^(1/total) turned round, and neither overflows nor vanishes.

    For a total of 0 it is above every other, and still in the order of U.
    """
    # 52 bits and a half: the open interval, with both ends representable.
    uniform = ((keys >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    late: Floats = np.log(-np.log(uniform))
    positive = totals > 0.0
    # Logarithms of floats lie within +-750, those of -log(U) within -37 and 4.
    return late - np.log(totals, out=np.full(len(totals), -1e4), where=positive)
