"""Scorers by the endpoints' labels: a label against a header, a range of lengths against the prompt."""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import msgspec
import numpy as np
from msgspec import Meta

from epp.payload.records import find_header
from epp.pool.records import Floats, Ints, Mask
from epp.scheduling.header_names import header_name
from epp.scheduling.membership import ByMembership, Owners
from epp.scheduling.ports import Ctx

# -- a label equal to a header ----------------------------------------------------------------------


class HeaderLabelAffinityScorerParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"
):
    """Parameters of `header-label-affinity-scorer`: the header and the label to compare."""

    header_name: Annotated[str, Meta(min_length=1)]
    label_key: Annotated[str, Meta(min_length=1)]

    def __post_init__(self) -> None:
        header_name(self.header_name)


@dataclass(frozen=True, slots=True)
class _LabelValues:
    """The values of one label, numbered: by slot, -1 where there is no label."""

    numbers: dict[str, int]
    by_slot: Ints


class HeaderLabelAffinityScorer:
    """`header-label-affinity-scorer`: 1 where the label equals the header, else 0.

    No header, or an empty one: 0 for all. Of several such headers the last counts. Scraped facts do not
    enter, so their age does not either.
    """

    def __init__(self, params: HeaderLabelAffinityScorerParams) -> None:
        self._header = header_name(params.header_name)
        self._values = ByMembership(lambda owners: _label_values(owners, params.label_key))

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        wanted = find_header(ctx.headers, self._header)
        if not wanted:
            return np.zeros(len(alive))
        values = self._values.of(ctx.view)
        # -2 is the number of no value.
        scores: Floats = (values.by_slot == values.numbers.get(wanted, -2)).astype(np.float64)
        return scores


def _label_values(owners: Owners, key: str) -> _LabelValues:
    numbers: dict[str, int] = {}
    by_slot = np.full(len(owners), -1, np.int64)
    for slot, owner in enumerate(owners):
        if owner is not None and (value := owner.labels.get(key)) is not None:
            by_slot[slot] = numbers.setdefault(value, len(numbers))
    return _LabelValues(numbers, by_slot)


# -- context length ---------------------------------------------------------------------------------


class ContextLengthParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `context-length-aware`.

    Attributes:
        label: holds `min-max`, the prompt tokens an endpoint is meant for, both included.
        enable_filtering: rule out endpoints whose range the prompt is outside of.
    """

    later: ClassVar[tuple[str, ...]] = ("reusableTokensProducerName",)
    label: Annotated[str, Meta(min_length=1)] = "llm-d.ai/context-length-range"
    enable_filtering: bool = False


@dataclass(frozen=True, slots=True)
class _Ranges:
    """The ranges by slot, such that the score within one is `base + slope x (high - tokens)`."""

    low: Floats
    high: Floats
    base: Floats
    slope: Floats

    def outside(self, tokens: int) -> Floats:
        """How far the prompt is outside each range; 0 and less within."""
        return np.maximum(self.low - tokens, tokens - self.high)


class ContextLengthScorer:
    """`context-length-aware`: the narrower the range around the prompt, and the more room in it, the better.

    Within the range: 0.3 + 0.7 x (0.7 / (1 + width / 10000) + 0.3 x (max - tokens) / width); 1 for a range
    of one number. Outside: 0.3 / (1 + distance / 1000). Without the label 0.5, which is more than a wide
    range gets. A label that is no range (`min-max`, min <= max): 0. As the formula of the field has it, a
    prompt near the end of a narrow range scores higher in a wider one.

    Tokens are those of all prompts of the request, estimated where it brings text; 0 where the body is not
    shown. Scraped facts do not enter, so their age does not either.
    """

    def __init__(self, params: ContextLengthParams) -> None:
        self._ranges = ByMembership(lambda owners: _ranges(owners, params.label))

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        ranges = self._ranges.of(ctx.view)
        tokens = ctx.request.prompt_tokens
        distance = ranges.outside(tokens)
        within = ranges.base + ranges.slope * (ranges.high - tokens)
        return np.where(distance > 0.0, 0.3 / (1.0 + np.maximum(distance, 0.0) / 1000.0), within)


class ContextLengthFilterScorer(ContextLengthScorer):
    """`context-length-aware` with `enableFiltering`: also rules out what the prompt is outside of.

    Endpoints without the label stay; those whose label is no range do not.
    """

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        kept: Mask = self._ranges.of(ctx.view).outside(ctx.request.prompt_tokens) <= 0.0
        return kept


_RANGE: Final = re.compile(r"\s*\+?([0-9]{1,18})\s*-\s*\+?([0-9]{1,18})\s*")
# Rows of `_Ranges`: everything is within the one at a flat 0.5, and infinitely far from the other.
_UNLABELLED: Final = (0.0, 1e18, 0.5, 0.0)
_NO_RANGE: Final = (np.inf, 0.0, 0.0, 0.0)


def _ranges(owners: Owners, label: str) -> _Ranges:
    rows = np.empty((len(owners), 4))
    for slot, owner in enumerate(owners):
        rows[slot] = _range(None if owner is None else owner.labels.get(label))
    return _Ranges(*np.ascontiguousarray(rows.T))


def _range(value: str | None) -> tuple[float, float, float, float]:
    if value is None:
        return _UNLABELLED
    found = _RANGE.fullmatch(value)
    low, high = (int(found[1]), int(found[2])) if found else (1, 0)
    if low > high:
        return _NO_RANGE
    if low == high:
        return low, high, 1.0, 0.0
    width = high - low
    return low, high, 0.3 + 0.7 * (0.7 / (1.0 + width / 10000.0)), 0.7 * 0.3 / width
