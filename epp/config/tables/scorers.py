"""Types of scorers."""

from typing import Final

from epp.config.schema import NoParameters
from epp.config.spec import BuildContext, Kind, KnownType, PluginSpec, Stability
from epp.scheduling.records import PREFIX_MATCH, FactKey
from epp.scheduling.scorers import (
    KvCacheUtilizationScorer,
    PrefixCacheScorer,
    PrefixCacheScorerParams,
    QueueScorer,
)


def _queue(context: BuildContext, params: NoParameters) -> QueueScorer:
    return QueueScorer()


def _kv_cache_utilization(context: BuildContext, params: NoParameters) -> KvCacheUtilizationScorer:
    return KvCacheUtilizationScorer()


def _prefix_cache(context: BuildContext, params: PrefixCacheScorerParams) -> PrefixCacheScorer:
    return PrefixCacheScorer(params)


def _prefix_needs(params: PrefixCacheScorerParams) -> tuple[FactKey, ...]:
    return (FactKey(PREFIX_MATCH, params.prefix_match_info_producer_name),)


_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("queue-scorer", Kind.SCORER, NoParameters, _queue, _S),
    PluginSpec("kv-cache-utilization-scorer", Kind.SCORER, NoParameters, _kv_cache_utilization, _S),
    PluginSpec(
        "prefix-cache-scorer", Kind.SCORER, PrefixCacheScorerParams, _prefix_cache, _S, needs=_prefix_needs
    ),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("running-requests-size-scorer", Kind.SCORER),
    KnownType("precise-prefix-cache-scorer", Kind.SCORER, "precise-prefix-cache-producer"),
    KnownType("lora-affinity-scorer", Kind.SCORER),
    KnownType("token-load-scorer", Kind.SCORER),
    KnownType("active-request-scorer", Kind.SCORER),
    KnownType("load-aware-scorer", Kind.SCORER),
    KnownType("context-length-aware", Kind.SCORER),
    KnownType("latency-scorer", Kind.SCORER),
    KnownType("mm-embeddings-cache-scorer", Kind.SCORER),
    KnownType("no-hit-lru-scorer", Kind.SCORER),
    KnownType("session-affinity-scorer", Kind.SCORER),
    KnownType("endpoint-attribute-scorer", Kind.SCORER),
    KnownType("header-label-affinity-scorer", Kind.SCORER),
    KnownType("topology-affinity-scorer", Kind.SCORER),
    KnownType("multicluster-queue-scorer", Kind.SCORER),
    KnownType("multicluster-kv-cache-utilization-scorer", Kind.SCORER),
    KnownType("multicluster-prefix-cache-scorer", Kind.SCORER),
)
