"""Types of filters."""

from typing import Final

from epp.config.spec import Kind, KnownType, PluginSpec

BUILT_INS: Final[tuple[PluginSpec, ...]] = ()

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("label-selector-filter", Kind.FILTER),
    KnownType("by-label-selector", Kind.FILTER, "label-selector-filter"),
    KnownType("by-label", Kind.FILTER, "label-selector-filter"),
    KnownType("decode-filter", Kind.FILTER),
    KnownType("prefill-filter", Kind.FILTER),
    KnownType("encode-filter", Kind.FILTER),
    KnownType("endpoint-attribute-filter", Kind.FILTER),
    KnownType("prefix-cache-affinity-filter", Kind.FILTER),
    KnownType("slo-headroom-tier-filter", Kind.FILTER),
    KnownType("session-affinity-filter", Kind.FILTER),
    KnownType("topology-affinity-filter", Kind.FILTER),
    KnownType("utilization-filter", Kind.FILTER),
    KnownType("header-based-testing-filter", Kind.FILTER),
    KnownType("multicluster-session-affinity-filter", Kind.FILTER),
)
