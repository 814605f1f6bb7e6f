"""Admission without queues: what is turned away at once while the pool is full."""

from math import pow as power_of
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from epp.errors import Saturated
from epp.pool.records import Mask, PoolView
from epp.scheduling.ports import Ctx, SaturationDetector


class LegacyAdmission:
    """Admission while the feature gate `flowControl` is off: sheds requests of a priority below 0.

    They are refused while the detector tells 1 or more of the candidates; all others pass. Where there is no
    candidate at all everything passes, to be answered 503 when the choice is made: an empty pool is no
    overload (the field answers 429).
    """

    def __init__(self, detector: SaturationDetector) -> None:
        self._detector = detector

    def admit(self, ctx: Ctx, alive: Mask) -> None:
        """Raises Saturated for a request that is shed."""
        if ctx.priority >= 0 or not np.count_nonzero(alive):
            return
        if self._detector.saturation(ctx.view, ctx.load, alive, ctx.now) >= 1.0:
            raise Saturated("system saturated, sheddable request dropped")


class ProbabilisticAdmitterParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `probabilistic-admitter`: thresholds of fullness, and the curve of its probability."""

    queue_depth_threshold: Annotated[int, Meta(ge=1)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0)] = 0.8
    power: Annotated[float, Meta(gt=0)] = 5.0
    k: Annotated[float, Meta(gt=0)] = 300.0


class ProbabilisticAdmitter:
    """`probabilistic-admitter`: refuses requests of a priority below 0 with P = min(s^power x k, 1).

    s is the mean over candidates of max(waiting / `queueDepthThreshold`, KV usage / `kvCacheUtilThreshold`).
    An endpoint never scraped counts 1. Of a stale one the last figures count, however old: this admitter, as
    the field has it, has no limit of age. With the defaults everything is refused from s = 0.32 on.

    The client gets 429 (the field turns every refusal of an admitter into 500).
    """

    def __init__(self, params: ProbabilisticAdmitterParams) -> None:
        self._queue = float(params.queue_depth_threshold)
        self._kv = params.kv_cache_util_threshold
        self._power = params.power
        self._k = params.k

    def admit(self, ctx: Ctx, alive: Mask) -> None:
        """Raises Saturated for a request that is shed."""
        if ctx.priority >= 0 or not np.count_nonzero(alive):
            return
        saturation = self._saturation(ctx.view, alive)
        probability = self._probability(saturation)
        if ctx.draw.random() < probability:
            raise Saturated(
                "request cannot be admitted: probabilistic-admitter: rejected, "
                f"saturation={saturation:.3f} prob={probability:.2f}"
            )

    def _saturation(self, view: PoolView, alive: Mask) -> float:
        fullness = np.maximum(view.waiting / self._queue, view.kv_usage / self._kv)
        return float(np.where(view.present, fullness, 1.0)[alive].mean())

    def _probability(self, saturation: float) -> float:
        try:
            return min(power_of(saturation, self._power) * self._k, 1.0)
        except OverflowError:
            return 1.0
