"""Filter and scorer by one figure that the engines' pages tell beyond the usual ones."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from epp.pool.records import Floats, Mask, PoolView
from epp.scheduling.ports import Ctx

_OPERATORS: Final[Mapping[str, Callable[[Floats, float], Any]]] = {
    "LessThan": np.less,
    "LessThanOrEqual": np.less_equal,
    "GreaterThan": np.greater,
    "GreaterThanOrEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
}


class Threshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """An endpoint is kept where `figure operator value` holds."""

    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]
    value: float

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ValueError(f"value must be a finite number, not {self.value}")


class FilterAlgorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How the filter decides: by one threshold."""

    later: ClassVar[tuple[str, ...]] = ("range", "topK", "percentile")
    type: Literal["threshold"]
    threshold: Threshold


class AttributeFilterParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `endpoint-attribute-filter`.

    Attributes:
        attribute: key of the figure. With a `/` in it `producer` is required, because the two were once
            written as one text, which would match nothing.
        producer: plugin that reads the figure. Keys of all of them are in one list here, so it only says
            that the `/` is meant.
        on_missing: whether an endpoint without the figure passes.
        fallback_on_empty: keep all where none would be left.
    """

    attribute: Annotated[str, Meta(min_length=1)]
    algorithm: FilterAlgorithm
    producer: str | None = None
    on_missing: Literal["Pass", "Fail"] = "Pass"
    fallback_on_empty: bool = False

    def __post_init__(self) -> None:
        _check_attribute("attribute", self.attribute, self.producer)


class AttributeFilter:
    """`endpoint-attribute-filter`: keeps the endpoints whose figure passes the threshold.

    A figure that no page told (never scraped, or an engine without it) is decided by `onMissing`. Stale: the
    last value counts.

    Attributes:
        attribute: key of the column it reads.
    """

    def __init__(self, params: AttributeFilterParams) -> None:
        threshold = params.algorithm.threshold
        self.attribute = params.attribute
        self._compare = _OPERATORS[threshold.operator]
        self._value = threshold.value
        self._missing_passes = params.on_missing == "Pass"
        self._fallback = params.fallback_on_empty

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        figure = _figure(ctx.view, self.attribute)
        missing = np.isnan(figure)
        passes: Mask = self._compare(figure, self._value)
        kept = passes | missing if self._missing_passes else passes > missing
        if self._fallback and not np.count_nonzero(kept & alive):
            return alive
        return kept


class FixedRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Figures from `min` to `max` become 0 to 1, those outside the nearer of the two."""

    min: float
    max: float

    def __post_init__(self) -> None:
        if not (isfinite(self.min) and isfinite(self.max) and self.min < self.max):
            raise ValueError(f"requires min < max, got min {self.min:g}, max {self.max:g}")


class AdaptiveRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The range is that of the endpoints in question."""


class Normalization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """At most one of the two; neither = `adaptiveRange`."""

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None

    def __post_init__(self) -> None:
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("at most one normalization strategy, got both fixedRange and adaptiveRange")


class ScorerAlgorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which end of the range is better, and which range."""

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class AttributeScorerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `endpoint-attribute-scorer`; `attribute_key` and `producer` as in the filter."""

    later: ClassVar[tuple[str, ...]] = ("source", "metadataNamespace", "metadataField")
    attribute_key: Annotated[str, Meta(min_length=1)]
    algorithm: ScorerAlgorithm
    producer: str | None = None

    def __post_init__(self) -> None:
        _check_attribute("attributeKey", self.attribute_key, self.producer)


class AttributeScorer:
    """`endpoint-attribute-scorer`: (figure - min) / (max - min), or 1 - that where lower is better.

    With `fixedRange` min and max are given and figures beyond count as the nearer of them. With
    `adaptiveRange` they are those over `alive`; 1 where all that have the figure have the same.

    A figure that no page told, or an infinite one, scores 0 and does not enter the range. Stale: the last
    value counts.

    Attributes:
        attribute: key of the column it reads.
    """

    def __init__(self, params: AttributeScorerParams) -> None:
        self.attribute = params.attribute_key
        self._lower_is_better = params.algorithm.type == "linear_lower_is_better"
        self._fixed = params.algorithm.normalization.fixed_range

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        figure = _figure(ctx.view, self.attribute)
        told = np.isfinite(figure)
        if self._fixed is not None:
            least, most = self._fixed.min, self._fixed.max
        else:
            of_alive = figure[told & alive]
            if not len(of_alive):
                return np.zeros(len(alive))
            least, most = of_alive.item(of_alive.argmin()), of_alive.item(of_alive.argmax())
            if least == most:
                return told.astype(np.float64)
        share = (np.where(told, figure, least).clip(least, most) - least) / (most - least)
        if self._lower_is_better:
            share = 1.0 - share
        return np.where(told, share, 0.0)


def _figure(view: PoolView, attribute: str) -> Floats:
    """The column; all NaN where nothing reads such a figure."""
    figure = view.attributes.get(attribute)
    return np.full(view.capacity, np.nan) if figure is None else figure


def _check_attribute(field: str, attribute: str, producer: str | None) -> None:
    if producer is None and "/" in attribute:
        name, _, maker = attribute.rpartition("/")
        raise ValueError(
            f'{field} {attribute!r} contains "/" but no producer is set: write {field}: {name!r} and '
            f'producer: {maker!r}, or set producer where the "/" belongs to the name'
        )
