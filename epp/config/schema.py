"""The file format `EndpointPickerConfig`, as structs. Field names are those of the file in camel case."""

import re
from math import isfinite
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from epp.durations import Duration

Name = Annotated[str, Meta(min_length=1)]


class Quantity(int):
    """A whole number, written in the file as `5000`, `1k` (1000) or `10Gi` (10 x 2^30)."""

    __slots__ = ()
    expected: ClassVar[str] = "a quantity such as 5000, 1k or 10Gi, not negative"

    @classmethod
    def parse(cls, value: object) -> "Quantity":
        """Raises ValueError when `value` is not a quantity."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not (found := _QUANTITY.fullmatch(value)):
            raise ValueError
        amount = float(found[1]) * UNITS[found[2] or ""]
        if not isfinite(amount) or amount != int(amount):
            raise ValueError
        return cls(amount)


_NUMBER: Final = r"[0-9]{1,15}(?:\.[0-9]{0,15})?"
_QUANTITY: Final = re.compile(rf"({_NUMBER})(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
UNITS: Final = {
    "": 1,
    **{unit: 10 ** (3 * power) for power, unit in enumerate("kMGTP", 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGTP", 1)},
}


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class NoParameters(_Section, frozen=True):
    """For plugins without parameters."""


class PluginEntry(_Section, frozen=True):
    """One plugin. `name` defaults to `type`; names are unique. `parameters` belong to the type."""

    type: Name
    name: Name | None = None
    parameters: dict[str, Any] | None = None


class PluginRef(_Section, frozen=True):
    """A plugin by name."""

    plugin_ref: Name


class ProfilePlugin(_Section, frozen=True):
    """A plugin's part in a profile. `weight` matters for scorers only."""

    plugin_ref: Name
    weight: Annotated[float, Meta(ge=0)] | None = None


class ProfileEntry(_Section, frozen=True):
    """A scheduling profile."""

    name: Name
    plugins: tuple[ProfilePlugin, ...] = ()


class SourceEntry(_Section, frozen=True):
    """A data source and what reads its answers."""

    plugin_ref: Name
    extractors: tuple[PluginRef, ...] = ()


class DataLayer(_Section, frozen=True):
    """Where facts about endpoints come from.

    Attributes:
        inject_defaults: add the metrics source and its extractor where none is named.
        discovery: what lists the endpoints; without it they come from the command line.
    """

    inject_defaults: bool = True
    sources: tuple[SourceEntry, ...] = ()
    discovery: PluginRef | None = None
    peer_discovery: PluginRef | None = None
    cross_replica_syncer_plugin_ref: Name | None = None
    cross_replica_sync_interval: Duration | None = None


class BandTemplate(_Section, frozen=True):
    """Limits and policies of priority bands; 0 = the default."""

    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    fairness_policy_ref: Name | None = None
    ordering_policy_ref: Name | None = None


class PriorityBand(BandTemplate, frozen=True, kw_only=True):
    """The band of one priority."""

    priority: int


class DetectorRef(_Section, frozen=True):
    """A saturation detector by name; empty = the default one."""

    plugin_ref: str = ""


class FlowControl(_Section, frozen=True):
    """Queues in front of the pool; used while the feature gate `flowControl` is on.

    Attributes:
        saturation_detector: says when the pool is full. It counts without the gate too.
    """

    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    default_request_ttl: Duration | None = msgspec.field(default=None, name="defaultRequestTTL")
    no_endpoint_request_ttl: Duration | None = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_priority_band: BandTemplate | None = None
    default_negative_priority_band: BandTemplate | None = None
    priority_bands: tuple[PriorityBand, ...] = ()
    usage_limit_policy_plugin_ref: Name | None = None
    saturation_detector: DetectorRef | None = None
    enable_eviction: bool = False


class RequestHandler(_Section, frozen=True):
    """How requests are read."""

    parsers: tuple[PluginRef, ...] = ()


class ObjectiveEntry(_Section, frozen=True):
    """An objective: what it is called in requests, and its priority; below 0 they may be shed."""

    name: Name
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0


class ModelMatch(_Section, frozen=True):
    """A model's name in a request."""

    value: Name
    type: Literal["Exact"] = "Exact"


class RewriteMatch(_Section, frozen=True):
    """Which requests a rewrite rule is about."""

    model: ModelMatch


class RewriteTargetEntry(_Section, frozen=True):
    """A model to ask for instead. Without any weight in the rule its targets get equal shares."""

    model_rewrite: Name
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RewriteRuleEntry(_Section, frozen=True):
    """A rewrite rule: for one of the matches, or without any for every model."""

    targets: tuple[RewriteTargetEntry, ...]
    matches: tuple[RewriteMatch, ...] = ()


class ModelRewriteEntry(_Section, frozen=True):
    """Rewrite rules under one name."""

    name: Name
    rules: tuple[RewriteRuleEntry, ...]


class EndpointPickerConfig(_Section, frozen=True):
    """The whole file.

    `objectives` and `model_rewrites` have the form of the specs of InferenceObjective and
    InferenceModelRewrite. `saturation_detector` and `parser` are deprecated places of fields further down.
    """

    api_version: Name
    kind: Name
    feature_gates: tuple[str, ...] = ()
    plugins: tuple[PluginEntry, ...] = ()
    scheduling_profiles: tuple[ProfileEntry, ...] = ()
    data_layer: DataLayer | None = None
    flow_control: FlowControl | None = None
    request_handler: RequestHandler | None = None
    saturation_detector: DetectorRef | None = None
    parser: PluginRef | None = None
    objectives: tuple[ObjectiveEntry, ...] = ()
    model_rewrites: tuple[ModelRewriteEntry, ...] = ()
