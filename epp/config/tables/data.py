"""Types of data sources, extractors and discovery."""

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from epp import names
from epp.config.schema import Name, NoParameters
from epp.config.spec import (
    DCGM_PORT,
    METRICS_PATH,
    BuildContext,
    DcgmExtractorSpec,
    DcgmSourceSpec,
    FileDiscoverySpec,
    Kind,
    KnownType,
    MetricsExtractorSpec,
    MetricsSourceSpec,
    ModelsExtractorSpec,
    ModelsSourceSpec,
    Parameters,
    PluginSpec,
    Stability,
)
from epp.durations import Duration
from epp.pool.engines import (
    BLOCK_SIZE_LABEL,
    ENGINES,
    NUM_BLOCKS_LABEL,
    VLLM,
    CacheInfo,
    CustomMetric,
    EngineSpec,
    MetricSpec,
)

HttpPath = Annotated[str, Meta(pattern="^/")]


class FileDiscoveryParams(Parameters, frozen=True):
    """Parameters of `file-discovery`: the endpoints file, and whether to follow its changes."""

    path: Name
    watch_file: bool = False


class HttpSourceParams(Parameters, frozen=True):
    """Parameters of every source that polls endpoints. `interval` None: as the command line says.

    An authority is read only where certificates are verified.
    """

    scheme: Literal["http", "https"] = "http"
    path: HttpPath = "/"
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: Duration | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval <= 0:
            raise ValueError("interval must be above 0")
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("clientCertPath and clientKeyPath go together: give both or none")


class MetricsSourceParams(HttpSourceParams, frozen=True):
    """Parameters of `metrics-data-source`. `port` 0: the endpoint's own."""

    path: HttpPath = METRICS_PATH
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class ModelsSourceParams(HttpSourceParams, frozen=True):
    """Parameters of `models-data-source`. `interval` None: 5s."""

    path: HttpPath = "/v1/models"


class DcgmSourceParams(HttpSourceParams, frozen=True):
    """Parameters of `dcgm-data-source`. `port` 0: the endpoint's own. `interval` None: 1s.

    `use_node_address`: the exporter is that of the pod's node, not one beside the engine.
    """

    path: HttpPath = METRICS_PATH
    port: Annotated[int, Meta(ge=0, le=65535)] = DCGM_PORT
    use_node_address: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_node_address and not self.port:
            raise ValueError(f"useNodeAddress needs a port above 0; the exporter's is {DCGM_PORT}")


class CustomMetricParams(Parameters, frozen=True):
    """A metric that becomes an endpoint's attribute; `optional`: a page may lack it."""

    attribute_key: Name
    metric_spec: Name
    optional: bool = False

    def __post_init__(self) -> None:
        _parse("metricSpec", self.metric_spec)


class EngineConfigParams(Parameters, frozen=True):
    """How one kind of engine tells its state: `name` or `name{label=value,...}` each; empty = not at all.

    The size of the KV cache stands in two labels of `cacheInfoSpec`, or in two metrics of their own.
    """

    later: ClassVar[tuple[str, ...]] = (
        "loraLoadedSpec",
        "loraGPULoadedSpec",
        "loraGPUSlotsSpec",
        "tieredOffloadingSpecs",
    )
    name: Name
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""
    cache_block_size_label_name: str = ""
    cache_num_blocks_label_name: str = ""
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""
    custom_metrics: tuple[CustomMetricParams, ...] = ()

    def __post_init__(self) -> None:
        if self.name == "default":
            raise ValueError("name: default is reserved; choose another")
        for field in msgspec.structs.fields(self):
            if field.encode_name.endswith("Spec"):
                _parse(field.encode_name, getattr(self, field.name))
        keys = [custom.attribute_key for custom in self.custom_metrics]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"customMetrics: attributeKey {key} is there twice")


class CoreMetricsParams(Parameters, frozen=True):
    """Parameters of `core-metrics-extractor`. An engine of the table that is configured here is replaced."""

    engine_label_key: Name = names.ENGINE_LABELS[0]
    default_engine: Name = VLLM.name
    engine_configs: tuple[EngineConfigParams, ...] = ()

    def __post_init__(self) -> None:
        given = [config.name for config in self.engine_configs]
        for name in given:
            if given.count(name) > 1:
                raise ValueError(f"engineConfigs: engine {name} is there twice")
        known = dict.fromkeys([*given, *(engine.name for engine in ENGINES)])
        if self.default_engine not in known:
            raise ValueError(
                f"defaultEngine {self.default_engine} is not in engineConfigs; known: {', '.join(known)}"
            )


def _parse(field: str, text: str) -> tuple[MetricSpec, ...]:
    """The metric as the only alternative; none for an empty text. Raises ValueError, naming `field`."""
    try:
        return (MetricSpec.parse(text),) if text else ()
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _file_discovery(context: BuildContext, params: FileDiscoveryParams) -> FileDiscoverySpec:
    return FileDiscoverySpec(params.path, params.watch_file)


def _metrics_source(context: BuildContext, params: MetricsSourceParams) -> MetricsSourceSpec:
    return MetricsSourceSpec(**_http_source(params), port=params.port or None)


def _models_source(context: BuildContext, params: ModelsSourceParams) -> ModelsSourceSpec:
    return ModelsSourceSpec(**_http_source(params))


def _dcgm_source(context: BuildContext, params: DcgmSourceParams) -> DcgmSourceSpec:
    return DcgmSourceSpec(
        **_http_source(params), port=params.port or None, use_node_address=params.use_node_address
    )


def _http_source(params: HttpSourceParams) -> dict[str, Any]:
    return {
        "scheme": params.scheme,
        "path": params.path,
        "insecure_skip_verify": params.insecure_skip_verify,
        "interval_s": None if params.interval is None else float(params.interval),
        "ca_cert_path": params.ca_cert_path or None,
        "client_cert_path": params.client_cert_path or None,
        "client_key_path": params.client_key_path or None,
    }


def _metrics_extractor(context: BuildContext, params: CoreMetricsParams) -> MetricsExtractorSpec:
    given = {config.name: _engine(config) for config in params.engine_configs}
    engines = {engine.name: engine for engine in ENGINES} | given
    return MetricsExtractorSpec(params.engine_label_key, params.default_engine, tuple(engines.values()))


def _engine(config: EngineConfigParams) -> EngineSpec:
    cache_info = None
    if config.cache_info_spec:
        cache_info = CacheInfo(
            MetricSpec.parse(config.cache_info_spec),
            config.cache_block_size_label_name or BLOCK_SIZE_LABEL,
            config.cache_num_blocks_label_name or NUM_BLOCKS_LABEL,
        )
    return EngineSpec(
        config.name,
        waiting=_parse("queuedRequestsSpec", config.queued_requests_spec),
        running=_parse("runningRequestsSpec", config.running_requests_spec),
        kv_usage=_parse("kvUsageSpec", config.kv_usage_spec),
        lora=MetricSpec.parse(config.lora_spec) if config.lora_spec else None,
        cache_info=cache_info,
        block_size=_parse("cacheBlockSizeSpec", config.cache_block_size_spec),
        num_blocks=_parse("cacheNumBlocksSpec", config.cache_num_blocks_spec),
        custom=tuple(
            CustomMetric(custom.attribute_key, MetricSpec.parse(custom.metric_spec), custom.optional)
            for custom in config.custom_metrics
        ),
    )


def _models_extractor(context: BuildContext, params: NoParameters) -> ModelsExtractorSpec:
    return ModelsExtractorSpec()


def _dcgm_extractor(context: BuildContext, params: NoParameters) -> DcgmExtractorSpec:
    return DcgmExtractorSpec()


_A: Final = Stability.ALPHA
_S: Final = Stability.STABLE

_PAGE: Final = "metrics page"
_LIST: Final = "list of models"
_GPUS: Final = "page of GPUs"

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("file-discovery", Kind.DISCOVERY, FileDiscoveryParams, _file_discovery, _S),
    PluginSpec(
        "metrics-data-source", Kind.DATA_SOURCE, MetricsSourceParams, _metrics_source, _S, content=_PAGE
    ),
    PluginSpec(
        "core-metrics-extractor", Kind.EXTRACTOR, CoreMetricsParams, _metrics_extractor, _S, content=_PAGE
    ),
    PluginSpec("models-data-source", Kind.DATA_SOURCE, ModelsSourceParams, _models_source, _S, content=_LIST),
    PluginSpec("models-data-extractor", Kind.EXTRACTOR, NoParameters, _models_extractor, _S, content=_LIST),
    PluginSpec("dcgm-data-source", Kind.DATA_SOURCE, DcgmSourceParams, _dcgm_source, _A, content=_GPUS),
    PluginSpec("dcgm-extractor", Kind.EXTRACTOR, NoParameters, _dcgm_extractor, _A, content=_GPUS),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("topology-extractor", Kind.EXTRACTOR),
    KnownType("k8s-notification-source", Kind.DATA_SOURCE),
    KnownType("endpoint-notification-source", Kind.DATA_SOURCE),
    KnownType("multicluster-metrics-data-source", Kind.DATA_SOURCE),
    KnownType("multicluster-metrics-extractor", Kind.EXTRACTOR),
    KnownType("multicluster-file-discovery", Kind.DISCOVERY),
)
