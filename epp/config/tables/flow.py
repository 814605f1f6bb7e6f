"""Types of admission and flow control."""

from typing import Final

from epp.config.spec import BuildContext, Kind, KnownType, PluginSpec, Stability
from epp.flow.admission import ProbabilisticAdmitter, ProbabilisticAdmitterParams
from epp.flow.saturation import (
    ConcurrencyDetector,
    ConcurrencyDetectorParams,
    UtilizationDetector,
    UtilizationDetectorParams,
)


def _utilization(context: BuildContext, params: UtilizationDetectorParams) -> UtilizationDetector:
    return UtilizationDetector(params)


def _concurrency(context: BuildContext, params: ConcurrencyDetectorParams) -> ConcurrencyDetector:
    return ConcurrencyDetector(params)


def _probabilistic(context: BuildContext, params: ProbabilisticAdmitterParams) -> ProbabilisticAdmitter:
    return ProbabilisticAdmitter(params)


_B: Final = Stability.BETA
_DETECTOR: Final = Kind.SATURATION_DETECTOR

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("utilization-detector", _DETECTOR, UtilizationDetectorParams, _utilization, _B),
    PluginSpec("concurrency-detector", _DETECTOR, ConcurrencyDetectorParams, _concurrency, _B),
    PluginSpec("probabilistic-admitter", Kind.ADMITTER, ProbabilisticAdmitterParams, _probabilistic, _B),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("global-strict-fairness-policy", Kind.FAIRNESS),
    KnownType("round-robin-fairness-policy", Kind.FAIRNESS),
    KnownType("program-aware-fairness", Kind.FAIRNESS),
    KnownType("fcfs-ordering-policy", Kind.ORDERING),
    KnownType("edf-ordering-policy", Kind.ORDERING),
    KnownType("slo-deadline-ordering-policy", Kind.ORDERING),
    KnownType("static-usage-limit-policy", Kind.USAGE_LIMIT),
    KnownType("priority-holdback-policy", Kind.USAGE_LIMIT),
    KnownType("soft-reflective-ceiling-policy", Kind.USAGE_LIMIT),
    KnownType("sheddable-eviction-filter", Kind.EVICTION),
    KnownType("priority-then-time-eviction-order-policy", Kind.EVICTION),
    KnownType("latency-slo-admitter", Kind.ADMITTER),
    KnownType("disaggregatedset-rollout-screener", Kind.SCREENER),
)
