"""What a plugin type is: kind, parameters, builder; and the I/O spec records that builders may return."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final

import msgspec

from epp import names
from epp.payload.estimate import Estimate
from epp.payload.render import ExactTokens
from epp.pool.engines import ENGINES, VLLM, EngineSpec
from epp.pool.records import PoolView
from epp.scheduling.profiles import Profile
from epp.scheduling.records import FactKey


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


# What sockets and files are opened for when the picker starts.
AT_START: Final = (Kind.DISCOVERY, Kind.DATA_SOURCE, Kind.EXTRACTOR)


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
        content: what a data source fetches or an extractor reads; they go together when it is the same.
        state_parameters: attributes of `params` that shape what the plugin remembers. While they stay the
            same, a plugin in use goes on under a new configuration, and is told the others by
            `reconfigure(params)`. None: with any parameter changed it starts anew.
    """

    type: str
    kind: Kind
    params: ParamsType
    build: Callable[[BuildContext, Any], object]
    stability: Stability
    replaced_by: str | None = None
    needs: Callable[[Any], tuple[FactKey, ...]] = lambda params: ()
    provides: tuple[str, ...] = ()
    content: str = ""
    state_parameters: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class KnownType:
    """A type of the field that is not supported yet."""

    type: str
    kind: Kind
    replaced_by: str | None = None


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Base of parameter structs: camel case in the file, unknown fields refused."""


@dataclass(frozen=True, slots=True)
class TokenEstimateSpec:
    """Prompts are counted where they are parsed, four bytes a token and media by `estimate`.

    Attributes:
        exact: who is asked for the exact tokens besides; the estimate counts where that fails.
    """

    estimate: Estimate = Estimate()
    exact: ExactTokens | None = None


@dataclass(frozen=True, slots=True)
class ParserSpec:
    """A parser of `epp.payload.apis.PARSERS` is in use."""

    type: str


@dataclass(frozen=True, slots=True)
class FileDiscoverySpec:
    """Read endpoints from `path`; follow its changes if `watch`."""

    path: str
    watch: bool


METRICS_PATH: Final = "/metrics"


@dataclass(frozen=True, slots=True)
class HttpSourceSpec:
    """Fetch `scheme://endpoint/path` from every endpoint, every `interval_s` where it is set.

    Attributes:
        subject: what is fetched, for people.
        least_interval_s: no more often where `interval_s` is not set.
        port: instead of the endpoint's own.
        use_node_address: ask at the address of the endpoint's node, where that is known.
        insecure_skip_verify: take any certificate. Otherwise it is verified with the authorities in
            `ca_cert_path`, or those of the system.
        client_cert_path, client_key_path: the picker's own certificate.
    """

    type: ClassVar[str]
    subject: ClassVar[str]
    least_interval_s: ClassVar[float] = 0.0
    scheme: str = "http"
    path: str = "/"
    insecure_skip_verify: bool = True
    interval_s: float | None = None
    port: int | None = None
    ca_cert_path: str | None = None
    client_cert_path: str | None = None
    client_key_path: str | None = None
    use_node_address: bool = False


@dataclass(frozen=True, slots=True)
class MetricsSourceSpec(HttpSourceSpec):
    """The engines' metrics pages. Where the path is the usual one, that of each endpoint's engine counts."""

    type: ClassVar[str] = "metrics-data-source"
    subject: ClassVar[str] = "metrics"
    path: str = METRICS_PATH


@dataclass(frozen=True, slots=True)
class ModelsSourceSpec(HttpSourceSpec):
    """The engines' lists of models, which change when adapters are loaded, not from request to request."""

    type: ClassVar[str] = "models-data-source"
    subject: ClassVar[str] = "models"
    least_interval_s: ClassVar[float] = 5.0
    path: str = "/v1/models"


DCGM_PORT: Final = 9400


@dataclass(frozen=True, slots=True)
class DcgmSourceSpec(HttpSourceSpec):
    """The pages of NVIDIA's DCGM exporter, beside each engine or one for each node.

    The exporter itself looks at the GPUs every 30 s, unless it is told otherwise.
    """

    type: ClassVar[str] = "dcgm-data-source"
    subject: ClassVar[str] = "GPU metrics"
    least_interval_s: ClassVar[float] = 1.0
    path: str = METRICS_PATH
    port: int | None = DCGM_PORT


@dataclass(frozen=True, slots=True)
class MetricsExtractorSpec:
    """How pages are read: by the engine that the label `engine_label_key` names, else by `default_engine`."""

    type: ClassVar[str] = "core-metrics-extractor"
    engine_label_key: str = names.ENGINE_LABELS[0]
    default_engine: str = VLLM.name
    engines: tuple[EngineSpec, ...] = ENGINES


@dataclass(frozen=True, slots=True)
class ModelsExtractorSpec:
    """Lists of models are read as they are; there is nothing to choose."""

    type: ClassVar[str] = "models-data-extractor"


@dataclass(frozen=True, slots=True)
class DcgmExtractorSpec:
    """Pages of GPUs are read as they are; there is nothing to choose."""

    type: ClassVar[str] = "dcgm-extractor"


ExtractorSpec = MetricsExtractorSpec | ModelsExtractorSpec | DcgmExtractorSpec


@dataclass(frozen=True, slots=True)
class SourceUse:
    """A data source and what reads its answers, in that order."""

    source: HttpSourceSpec
    extractors: tuple[ExtractorSpec, ...]
