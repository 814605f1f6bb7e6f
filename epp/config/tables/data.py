"""Types of data sources, extractors and discovery."""

from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta

from epp import names
from epp.config.schema import Name
from epp.config.spec import (
    BuildContext,
    FileDiscoverySpec,
    Kind,
    KnownType,
    MetricsExtractorSpec,
    MetricsSourceSpec,
    Parameters,
    PluginSpec,
    Stability,
)
from epp.durations import Duration


class FileDiscoveryParams(Parameters, frozen=True):
    """Parameters of `file-discovery`: the endpoints file, and whether to follow its changes."""

    path: Name
    watch_file: bool = False


class MetricsSourceParams(Parameters, frozen=True):
    """Parameters of `metrics-data-source`. `interval` None: as the command line says."""

    later: ClassVar[tuple[str, ...]] = ("port", "caCertPath", "clientCertPath", "clientKeyPath")
    scheme: Literal["http", "https"] = "http"
    path: Annotated[str, Meta(pattern="^/")] = "/metrics"
    insecure_skip_verify: bool = True
    interval: Duration | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval <= 0:
            raise ValueError("interval must be above 0")


class CoreMetricsParams(Parameters, frozen=True):
    """Parameters of `core-metrics-extractor`."""

    later: ClassVar[tuple[str, ...]] = ("engineConfigs",)
    engine_label_key: Name = names.ENGINE_LABELS[0]
    default_engine: Literal["vllm"] = "vllm"


def _file_discovery(context: BuildContext, params: FileDiscoveryParams) -> FileDiscoverySpec:
    return FileDiscoverySpec(params.path, params.watch_file)


def _metrics_source(context: BuildContext, params: MetricsSourceParams) -> MetricsSourceSpec:
    interval_s = None if params.interval is None else float(params.interval)
    return MetricsSourceSpec(params.scheme, params.path, params.insecure_skip_verify, interval_s)


def _metrics_extractor(context: BuildContext, params: CoreMetricsParams) -> MetricsExtractorSpec:
    return MetricsExtractorSpec(params.engine_label_key, params.default_engine)


_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("file-discovery", Kind.DISCOVERY, FileDiscoveryParams, _file_discovery, _S),
    PluginSpec("metrics-data-source", Kind.DATA_SOURCE, MetricsSourceParams, _metrics_source, _S),
    PluginSpec("core-metrics-extractor", Kind.EXTRACTOR, CoreMetricsParams, _metrics_extractor, _S),
)

LATER: Final[tuple[KnownType, ...]] = (
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
)
