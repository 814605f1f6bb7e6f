"""Which plugin types there are: built in, known but not supported yet, offered by installed packages."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from epp import names
from epp.config.schema import Name, NoParameters
from epp.durations import Duration
from epp.kvcache.approximate import ApproximateParams, ApproximatePrefixProducer
from epp.pool.records import PoolView
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.profiles import Profile, SingleProfileHandler
from epp.scheduling.records import PREFIX_MATCH, FactKey
from epp.scheduling.scorers import (
    DEFAULT_PREFIX_PRODUCER,
    KvCacheUtilizationScorer,
    PrefixCacheScorer,
    PrefixCacheScorerParams,
    QueueScorer,
)

ENTRY_POINT_GROUP: Final = "warmroute.plugins"


class Kind(StrEnum):
    """What a plugin is for."""

    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"
    PROFILE_HANDLER = "profile handler"
    DECIDER = "disaggregation decider"
    PRODUCER = "data producer"
    DATA_SOURCE = "data source"
    EXTRACTOR = "extractor"
    DISCOVERY = "discovery"
    PARSER = "parser"
    FAIRNESS = "fairness policy"
    ORDERING = "ordering policy"
    USAGE_LIMIT = "usage limit policy"
    SATURATION_DETECTOR = "saturation detector"
    EVICTION = "eviction policy"
    ADMITTER = "admitter"
    SCREENER = "screener"
    REQUEST_HOOK = "request hook"
    RESPONSE_HOOK = "response hook"


class Stability(StrEnum):
    """How much a plugin may still change. Using an alpha one is warned about."""

    ALPHA = "alpha"
    BETA = "beta"
    STABLE = "stable"


ParamsType = type[msgspec.Struct]


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a builder gets.

    Attributes:
        name: the plugin's name in the file.
        secret: random for each process; the root of cache keys.
        profiles: the scheduling profiles, by name; empty but for a profile handler.
    """

    name: str
    view: PoolView
    secret: bytes
    profiles: Mapping[str, Profile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A plugin type.

    Attributes:
        params: frozen struct of its parameters; unknown fields are refused.
        build: makes the plugin, or the I/O spec record that the runtime acts on.
        replaced_by: set where the type is deprecated.
        needs: facts it reads, from its parameters.
        provides: kinds of fact it makes, each under its own name.
    """

    type: str
    kind: Kind
    params: ParamsType
    build: Callable[[BuildContext, Any], object]
    stability: Stability
    replaced_by: str | None = None
    needs: Callable[[Any], tuple[FactKey, ...]] = lambda params: ()
    provides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownType:
    """A type of the field that is not supported yet."""

    type: str
    kind: Kind
    replaced_by: str | None = None


# -- parameters and I/O specs of what the runtime does ----------------------------------------------


class _Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class EstimateParams(_Parameters, frozen=True):
    """How tokens are estimated: four bytes each, without anything to set."""

    later: ClassVar[tuple[str, ...]] = ("image", "video")


class TokenProducerParams(_Parameters, frozen=True):
    """Parameters of `token-producer`: tokens are estimated."""

    later: ClassVar[tuple[str, ...]] = ("modelName", "vllm", "udsTokenizerConfig")
    estimate: EstimateParams = EstimateParams()


class FileDiscoveryParams(_Parameters, frozen=True):
    """Parameters of `file-discovery`: the endpoints file, and whether to follow its changes."""

    path: Name
    watch_file: bool = False


class MetricsSourceParams(_Parameters, frozen=True):
    """Parameters of `metrics-data-source`. `interval` None: as the command line says."""

    later: ClassVar[tuple[str, ...]] = ("port", "caCertPath", "clientCertPath", "clientKeyPath")
    scheme: Literal["http", "https"] = "http"
    path: Annotated[str, Meta(pattern="^/")] = "/metrics"
    insecure_skip_verify: bool = True
    interval: Duration | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval <= 0:
            raise ValueError("interval must be above 0")


class CoreMetricsParams(_Parameters, frozen=True):
    """Parameters of `core-metrics-extractor`."""

    later: ClassVar[tuple[str, ...]] = ("engineConfigs",)
    engine_label_key: Name = names.ENGINE_LABELS[0]
    default_engine: Literal["vllm"] = "vllm"


@dataclass(frozen=True, slots=True)
class TokenEstimateSpec:
    """Prompts are counted at four bytes a token where they are parsed; nothing is to be started."""


@dataclass(frozen=True, slots=True)
class FileDiscoverySpec:
    """Read endpoints from `path`; follow its changes if `watch`."""

    path: str
    watch: bool


@dataclass(frozen=True, slots=True)
class MetricsSourceSpec:
    """Scrape `scheme://endpoint/path`, every `interval_s` where it is set."""

    scheme: str = "http"
    path: str = "/metrics"
    insecure_skip_verify: bool = True
    interval_s: float | None = None


@dataclass(frozen=True, slots=True)
class MetricsExtractorSpec:
    """How pages are read: by the engine that the label `engine_label_key` names, else by `default_engine`."""

    engine_label_key: str = names.ENGINE_LABELS[0]
    default_engine: str = "vllm"


def _queue(context: BuildContext, params: NoParameters) -> QueueScorer:
    return QueueScorer()


def _kv_cache_utilization(context: BuildContext, params: NoParameters) -> KvCacheUtilizationScorer:
    return KvCacheUtilizationScorer()


def _prefix_cache(context: BuildContext, params: PrefixCacheScorerParams) -> PrefixCacheScorer:
    return PrefixCacheScorer(params)


def _prefix_needs(params: PrefixCacheScorerParams) -> tuple[FactKey, ...]:
    return (FactKey(PREFIX_MATCH, params.prefix_match_info_producer_name),)


def _max_score(context: BuildContext, params: MaxScorePickerParams) -> MaxScorePicker:
    return MaxScorePicker(params)


def _single_profile(context: BuildContext, params: NoParameters) -> SingleProfileHandler:
    (profile,) = context.profiles.values()
    return SingleProfileHandler(profile)


def _approximate(context: BuildContext, params: ApproximateParams) -> ApproximatePrefixProducer:
    return ApproximatePrefixProducer(context.name, params, context.view, context.secret)


def _tokens(context: BuildContext, params: TokenProducerParams) -> TokenEstimateSpec:
    return TokenEstimateSpec()


def _file_discovery(context: BuildContext, params: FileDiscoveryParams) -> FileDiscoverySpec:
    return FileDiscoverySpec(params.path, params.watch_file)


def _metrics_source(context: BuildContext, params: MetricsSourceParams) -> MetricsSourceSpec:
    interval_s = None if params.interval is None else float(params.interval)
    return MetricsSourceSpec(params.scheme, params.path, params.insecure_skip_verify, interval_s)


def _metrics_extractor(context: BuildContext, params: CoreMetricsParams) -> MetricsExtractorSpec:
    return MetricsExtractorSpec(params.engine_label_key, params.default_engine)


# -- the tables -------------------------------------------------------------------------------------

_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("queue-scorer", Kind.SCORER, NoParameters, _queue, _S),
    PluginSpec("kv-cache-utilization-scorer", Kind.SCORER, NoParameters, _kv_cache_utilization, _S),
    PluginSpec(
        "prefix-cache-scorer", Kind.SCORER, PrefixCacheScorerParams, _prefix_cache, _S, needs=_prefix_needs
    ),
    PluginSpec("max-score-picker", Kind.PICKER, MaxScorePickerParams, _max_score, _S),
    PluginSpec("single-profile-handler", Kind.PROFILE_HANDLER, NoParameters, _single_profile, _S),
    PluginSpec(
        DEFAULT_PREFIX_PRODUCER, Kind.PRODUCER, ApproximateParams, _approximate, _S, provides=(PREFIX_MATCH,)
    ),
    PluginSpec("token-producer", Kind.PRODUCER, TokenProducerParams, _tokens, _S),
    PluginSpec("file-discovery", Kind.DISCOVERY, FileDiscoveryParams, _file_discovery, _S),
    PluginSpec("metrics-data-source", Kind.DATA_SOURCE, MetricsSourceParams, _metrics_source, _S),
    PluginSpec("core-metrics-extractor", Kind.EXTRACTOR, CoreMetricsParams, _metrics_extractor, _S),
)

NOT_YET: Final[tuple[KnownType, ...]] = (
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
    KnownType("random-picker", Kind.PICKER),
    KnownType("weighted-random-picker", Kind.PICKER),
    KnownType("disagg-profile-handler", Kind.PROFILE_HANDLER),
    KnownType("pd-profile-handler", Kind.PROFILE_HANDLER, "disagg-profile-handler"),
    KnownType("disagg-headers-handler", Kind.REQUEST_HOOK, "disagg-profile-handler"),
    KnownType("prefill-header-handler", Kind.REQUEST_HOOK, "disagg-profile-handler"),
    KnownType("data-parallel-profile-handler", Kind.PROFILE_HANDLER),
    KnownType("header-profile-handler", Kind.PROFILE_HANDLER),
    KnownType("always-disagg-pd-decider", Kind.DECIDER),
    KnownType("prefix-based-pd-decider", Kind.DECIDER),
    KnownType("always-disagg-multimodal-decider", Kind.DECIDER),
    KnownType("tokenizer", Kind.PRODUCER, "token-producer"),
    KnownType("precise-prefix-cache-producer", Kind.PRODUCER),
    KnownType("burst-prefix-cache-producer", Kind.PRODUCER),
    KnownType("inflight-load-producer", Kind.PRODUCER),
    KnownType("predicted-latency-producer", Kind.PRODUCER),
    KnownType("mm-embeddings-cache-producer", Kind.PRODUCER),
    KnownType("p2p-source-producer", Kind.PRODUCER),
    KnownType("session-id-producer", Kind.PRODUCER),
    KnownType("multicluster-approx-prefix-cache-producer", Kind.PRODUCER),
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
    KnownType("request-attribute-reporter", Kind.RESPONSE_HOOK),
    KnownType("destination-endpoint-served-verifier", Kind.RESPONSE_HOOK),
    KnownType("agent-identity", Kind.REQUEST_HOOK),
    KnownType("disaggregatedset-rollout-screener", Kind.SCREENER),
    KnownType("models-data-source", Kind.DATA_SOURCE),
    KnownType("models-data-extractor", Kind.EXTRACTOR),
    KnownType("dcgm-data-source", Kind.DATA_SOURCE),
    KnownType("dcgm-extractor", Kind.EXTRACTOR),
    KnownType("topology-extractor", Kind.EXTRACTOR),
    KnownType("k8s-notification-source", Kind.DATA_SOURCE),
    KnownType("endpoint-notification-source", Kind.DATA_SOURCE),
    KnownType("multicluster-metrics-data-source", Kind.DATA_SOURCE),
    KnownType("multicluster-metrics-extractor", Kind.EXTRACTOR),
    KnownType("multicluster-file-discovery", Kind.DISCOVERY),
    KnownType("openai-parser", Kind.PARSER),
    KnownType("anthropic-parser", Kind.PARSER),
    KnownType("vllmhttp-parser", Kind.PARSER),
    KnownType("sglanghttp-parser", Kind.PARSER),
    KnownType("vllmgrpc-parser", Kind.PARSER),
    KnownType("vertexai-parser", Kind.PARSER),
    KnownType("passthrough-parser", Kind.PARSER),
)


# -- looking a type up ------------------------------------------------------------------------------


class PluginImportError(Exception):
    """A package offers the type but its specification cannot be had."""


def _installed(type_name: str) -> Iterable[tuple[str, Callable[[], object]]]:
    """Entry points of that name: where each points, and how to load it."""
    found = entry_points(group=ENTRY_POINT_GROUP, name=type_name)
    return [(point.value, point.load) for point in found]


@dataclass(frozen=True, slots=True)
class Registry:
    """Plugin types by name. `installed` lists what other packages offer under a name."""

    specs: Mapping[str, PluginSpec]
    not_yet: Mapping[str, KnownType]
    installed: Callable[[str], Iterable[tuple[str, Callable[[], object]]]] = _installed

    def find(self, type_name: str) -> PluginSpec | KnownType | None:
        """What `type_name` is; None = unknown. Code of other packages is loaded only when asked for by name.

        Raises:
            PluginImportError: an installed package offers the type, but not a usable `PluginSpec`.
        """
        if (spec := self.specs.get(type_name)) is not None:
            return spec
        offers = list(self.installed(type_name))
        if len(offers) > 1:
            places = " and ".join(place for place, _ in offers)
            raise PluginImportError(f"offered twice, by {places}; uninstall one")
        for place, load in offers:
            return _loaded(type_name, place, load)
        return self.not_yet.get(type_name)

    def types(self) -> list[str]:
        """Every supported type, then every other known one."""
        return [*self.specs, *self.not_yet]


def _loaded(type_name: str, place: str, load: Callable[[], object]) -> PluginSpec:
    try:
        spec = load()
    except Exception as error:
        raise PluginImportError(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(spec, PluginSpec) or spec.type != type_name:
        raise PluginImportError(f"{place} is not the PluginSpec of {type_name}")
    return spec


def built_in_registry() -> Registry:
    """The types above, and those of installed packages."""
    return Registry({spec.type: spec for spec in BUILT_INS}, {known.type: known for known in NOT_YET})
