"""Types of scorers."""

from typing import Final

from epp.config.schema import NoParameters
from epp.config.spec import BuildContext, Kind, KnownType, PluginSpec, Stability
from epp.kvcache.embeddings import DEFAULT_EMBEDDINGS_PRODUCER, EMBEDDINGS_MATCH, EmbeddingsCacheScorer
from epp.scheduling.attributes import AttributeScorer, AttributeScorerParams
from epp.scheduling.inflight import (
    ActiveRequestScorer,
    ActiveRequestScorerParams,
    TokenLoadScorer,
    TokenLoadScorerParams,
)
from epp.scheduling.label_scorers import (
    ContextLengthFilterScorer,
    ContextLengthParams,
    ContextLengthScorer,
    HeaderLabelAffinityScorer,
    HeaderLabelAffinityScorerParams,
)
from epp.scheduling.no_hit import NoHitLruParams, NoHitLruScorer
from epp.scheduling.records import PREFIX_MATCH, FactKey
from epp.scheduling.scorers import (
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    LoadAwareScorerParams,
    LoraAffinityScorer,
    PrefixCacheScorer,
    PrefixCacheScorerParams,
    QueueScorer,
    RunningRequestsSizeScorer,
)
from epp.scheduling.sessions import EncodedEndpointScorer, SessionAffinityParams, SessionIdScorer


def _queue(context: BuildContext, params: NoParameters) -> QueueScorer:
    return QueueScorer()


def _kv_cache_utilization(context: BuildContext, params: NoParameters) -> KvCacheUtilizationScorer:
    return KvCacheUtilizationScorer()


def _prefix_cache(context: BuildContext, params: PrefixCacheScorerParams) -> PrefixCacheScorer:
    return PrefixCacheScorer(params)


def _running_requests(context: BuildContext, params: NoParameters) -> RunningRequestsSizeScorer:
    return RunningRequestsSizeScorer()


def _load_aware(context: BuildContext, params: LoadAwareScorerParams) -> LoadAwareScorer:
    return LoadAwareScorer(params)


def _lora_affinity(context: BuildContext, params: NoParameters) -> LoraAffinityScorer:
    return LoraAffinityScorer()


def _context_length(context: BuildContext, params: ContextLengthParams) -> ContextLengthScorer:
    return ContextLengthFilterScorer(params) if params.enable_filtering else ContextLengthScorer(params)


def _attribute(context: BuildContext, params: AttributeScorerParams) -> AttributeScorer:
    return AttributeScorer(params)


def _header_label(
    context: BuildContext, params: HeaderLabelAffinityScorerParams
) -> HeaderLabelAffinityScorer:
    return HeaderLabelAffinityScorer(params)


def _prefix_needs(params: PrefixCacheScorerParams) -> tuple[FactKey, ...]:
    return (FactKey(PREFIX_MATCH, params.prefix_match_info_producer_name),)


def _active_request(context: BuildContext, params: ActiveRequestScorerParams) -> ActiveRequestScorer:
    return ActiveRequestScorer(params)


def _token_load(context: BuildContext, params: TokenLoadScorerParams) -> TokenLoadScorer:
    return TokenLoadScorer(params)


def _no_hit_lru(context: BuildContext, params: NoHitLruParams) -> NoHitLruScorer:
    return NoHitLruScorer(context.name, params, context.view)


def _session_affinity(
    context: BuildContext, params: SessionAffinityParams
) -> EncodedEndpointScorer | SessionIdScorer:
    if params.strategy == "session_id":
        return SessionIdScorer(context.name, params, context.view, context.secret)
    return EncodedEndpointScorer(params, context.view)


def _embeddings(context: BuildContext, params: NoParameters) -> EmbeddingsCacheScorer:
    return EmbeddingsCacheScorer()


def _embeddings_needs(params: NoParameters) -> tuple[FactKey, ...]:
    return (FactKey(EMBEDDINGS_MATCH, DEFAULT_EMBEDDINGS_PRODUCER),)


_A: Final = Stability.ALPHA
_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("queue-scorer", Kind.SCORER, NoParameters, _queue, _S),
    PluginSpec("kv-cache-utilization-scorer", Kind.SCORER, NoParameters, _kv_cache_utilization, _S),
    PluginSpec(
        "prefix-cache-scorer", Kind.SCORER, PrefixCacheScorerParams, _prefix_cache, _S, needs=_prefix_needs
    ),
    PluginSpec("running-requests-size-scorer", Kind.SCORER, NoParameters, _running_requests, _S),
    PluginSpec("load-aware-scorer", Kind.SCORER, LoadAwareScorerParams, _load_aware, _S),
    PluginSpec("lora-affinity-scorer", Kind.SCORER, NoParameters, _lora_affinity, _S),
    PluginSpec("context-length-aware", Kind.SCORER, ContextLengthParams, _context_length, _S),
    PluginSpec("endpoint-attribute-scorer", Kind.SCORER, AttributeScorerParams, _attribute, _A),
    PluginSpec(
        "header-label-affinity-scorer", Kind.SCORER, HeaderLabelAffinityScorerParams, _header_label, _A
    ),
    PluginSpec(
        "active-request-scorer",
        Kind.SCORER,
        ActiveRequestScorerParams,
        _active_request,
        _S,
        needs=ActiveRequestScorerParams.needs,
    ),
    PluginSpec(
        "token-load-scorer",
        Kind.SCORER,
        TokenLoadScorerParams,
        _token_load,
        _S,
        needs=TokenLoadScorerParams.needs,
    ),
    PluginSpec("no-hit-lru-scorer", Kind.SCORER, NoHitLruParams, _no_hit_lru, _S, needs=NoHitLruParams.needs),
    PluginSpec(
        "session-affinity-scorer",
        Kind.SCORER,
        SessionAffinityParams,
        _session_affinity,
        _A,
        needs=SessionAffinityParams.needs,
    ),
    PluginSpec(
        "mm-embeddings-cache-scorer", Kind.SCORER, NoParameters, _embeddings, _S, needs=_embeddings_needs
    ),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("precise-prefix-cache-scorer", Kind.SCORER, "precise-prefix-cache-producer"),
    KnownType("latency-scorer", Kind.SCORER),
    KnownType("topology-affinity-scorer", Kind.SCORER),
    KnownType("multicluster-queue-scorer", Kind.SCORER),
    KnownType("multicluster-kv-cache-utilization-scorer", Kind.SCORER),
    KnownType("multicluster-prefix-cache-scorer", Kind.SCORER),
)
