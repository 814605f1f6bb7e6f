"""Types of filters."""

from typing import Final

from epp.config.schema import NoParameters
from epp.config.spec import BuildContext, Kind, KnownType, PluginSpec, Stability
from epp.scheduling.attributes import AttributeFilter, AttributeFilterParams
from epp.scheduling.filters import (
    HeaderBasedTestingFilter,
    HeaderBasedTestingFilterParams,
    UtilizationFilter,
    UtilizationFilterParams,
)
from epp.scheduling.labels import (
    DECODE_ROLES,
    ENCODE_ROLES,
    PREFILL_ROLES,
    ByLabelParams,
    LabelFilter,
    LabelSelector,
)
from epp.scheduling.prefix_affinity import PrefixAffinityFilter, PrefixAffinityParams
from epp.scheduling.sessions import EncodedEndpointFilter, SessionAffinityParams, SessionIdFilter


def _labels(context: BuildContext, params: LabelSelector | ByLabelParams) -> LabelFilter:
    return LabelFilter(params.matches)


def _decode(context: BuildContext, params: NoParameters) -> LabelFilter:
    return LabelFilter(DECODE_ROLES.matches)


def _prefill(context: BuildContext, params: NoParameters) -> LabelFilter:
    return LabelFilter(PREFILL_ROLES.matches)


def _encode(context: BuildContext, params: NoParameters) -> LabelFilter:
    return LabelFilter(ENCODE_ROLES.matches)


def _attribute(context: BuildContext, params: AttributeFilterParams) -> AttributeFilter:
    return AttributeFilter(params)


def _utilization(context: BuildContext, params: UtilizationFilterParams) -> UtilizationFilter:
    return UtilizationFilter(params)


def _header_based_testing(
    context: BuildContext, params: HeaderBasedTestingFilterParams
) -> HeaderBasedTestingFilter:
    return HeaderBasedTestingFilter(pass_without_header=params.pass_without_header)


def _prefix_affinity(context: BuildContext, params: PrefixAffinityParams) -> PrefixAffinityFilter:
    return PrefixAffinityFilter(params)


def _session_affinity(
    context: BuildContext, params: SessionAffinityParams
) -> EncodedEndpointFilter | SessionIdFilter:
    if params.strategy == "session_id":
        return SessionIdFilter(context.name, params, context.view, context.secret)
    return EncodedEndpointFilter(params, context.view)


_A: Final = Stability.ALPHA
_B: Final = Stability.BETA
_SELECTOR: Final = "label-selector-filter"

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec(_SELECTOR, Kind.FILTER, LabelSelector, _labels, _B),
    PluginSpec("by-label-selector", Kind.FILTER, LabelSelector, _labels, _B, replaced_by=_SELECTOR),
    PluginSpec("by-label", Kind.FILTER, ByLabelParams, _labels, _B, replaced_by=_SELECTOR),
    PluginSpec("decode-filter", Kind.FILTER, NoParameters, _decode, _B),
    PluginSpec("prefill-filter", Kind.FILTER, NoParameters, _prefill, _B),
    PluginSpec("encode-filter", Kind.FILTER, NoParameters, _encode, _B),
    PluginSpec("endpoint-attribute-filter", Kind.FILTER, AttributeFilterParams, _attribute, _A),
    PluginSpec(
        "utilization-filter",
        Kind.FILTER,
        UtilizationFilterParams,
        _utilization,
        _A,
        needs=UtilizationFilterParams.needs,
    ),
    PluginSpec(
        "header-based-testing-filter",
        Kind.FILTER,
        HeaderBasedTestingFilterParams,
        _header_based_testing,
        _B,
    ),
    PluginSpec(
        "prefix-cache-affinity-filter",
        Kind.FILTER,
        PrefixAffinityParams,
        _prefix_affinity,
        _B,
        needs=PrefixAffinityParams.needs,
    ),
    PluginSpec(
        "session-affinity-filter",
        Kind.FILTER,
        SessionAffinityParams,
        _session_affinity,
        _A,
        needs=SessionAffinityParams.needs,
    ),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("slo-headroom-tier-filter", Kind.FILTER),
    KnownType("topology-affinity-filter", Kind.FILTER),
    KnownType("multicluster-session-affinity-filter", Kind.FILTER),
)
