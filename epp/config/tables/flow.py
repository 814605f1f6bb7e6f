"""Types of admission and flow control."""

from typing import Final

from epp.config.spec import Kind, KnownType, PluginSpec

BUILT_INS: Final[tuple[PluginSpec, ...]] = ()

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
    KnownType("utilization-detector", Kind.SATURATION_DETECTOR),
    KnownType("concurrency-detector", Kind.SATURATION_DETECTOR),
    KnownType("sheddable-eviction-filter", Kind.EVICTION),
    KnownType("priority-then-time-eviction-order-policy", Kind.EVICTION),
    KnownType("latency-slo-admitter", Kind.ADMITTER),
    KnownType("probabilistic-admitter", Kind.ADMITTER),
    KnownType("disaggregatedset-rollout-screener", Kind.SCREENER),
)
