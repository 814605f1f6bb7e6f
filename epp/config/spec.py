"""What a plugin type is: kind, parameters, builder; and the I/O spec records that builders may return."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from epp import names
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


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Base of parameter structs: camel case in the file, unknown fields refused."""


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
