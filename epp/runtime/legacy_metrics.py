"""The deprecated names of metrics, for dashboards that still ask for them (`--legacy-metric-names`).

Nothing is counted twice: a twin is made from the series of the new name when the page is rendered. Labels
that a twin does not have are summed over, which is right for all of them: counts, histograms, requests
running, and gauges whose labels are kept.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from prometheus_client import Metric

from epp import names
from epp.runtime.metrics import Metrics
from epp.runtime.metrics_table import TABLE

_OBJECTIVE: Final = "inference_objective_"
_POOL: Final = "inference_pool_"
_EXTENSION: Final = "inference_extension_"
_SCHEDULER: Final = "llm_d_inference_scheduler_"

_MODELS: Final = ("model_name", "target_model_name")


class Twin(NamedTuple):
    """One deprecated name.

    Attributes:
        name: of the metric in the table whose series it shows.
        legacy: the whole deprecated name.
        labels: kept labels, by their names in the table; None = all.
        renamed: kept labels that the twin calls otherwise.
    """

    name: str
    legacy: str
    labels: tuple[str, ...] | None = None
    renamed: Mapping[str, str] = MappingProxyType({})

    @property
    def shown_labels(self) -> tuple[str, ...]:
        """The twin's own labels."""
        row = next(row for row in TABLE if row.name == self.name)
        kept = row.labels if self.labels is None else self.labels
        return tuple(self.renamed.get(label, label) for label in kept)


TWINS: Final[tuple[Twin, ...]] = (
    Twin("request_total", f"{_OBJECTIVE}request_total", (*_MODELS, "priority")),
    Twin("request_error_total", f"{_OBJECTIVE}request_error_total", (*_MODELS, "error_code")),
    Twin("request_duration_seconds", f"{_OBJECTIVE}request_duration_seconds", _MODELS),
    Twin("request_size_bytes", f"{_OBJECTIVE}request_sizes", _MODELS),
    Twin("response_size_bytes", f"{_OBJECTIVE}response_sizes", _MODELS),
    Twin("request_input_tokens", f"{_OBJECTIVE}input_tokens", _MODELS),
    Twin("request_output_tokens", f"{_OBJECTIVE}output_tokens", _MODELS),
    Twin("request_cached_tokens", f"{_OBJECTIVE}prompt_cached_tokens", _MODELS),
    Twin("request_running", f"{_OBJECTIVE}running_requests", ("model_name",)),
    Twin("request_ntpot_seconds", f"{_OBJECTIVE}normalized_time_per_output_token_seconds", _MODELS),
    Twin("request_ttft_seconds", f"{_OBJECTIVE}request_ttft_seconds", _MODELS),
    Twin("request_streaming_tpot_seconds", f"{_OBJECTIVE}request_tpot_seconds", _MODELS),
    Twin("average_kv_cache_utilization", f"{_POOL}average_kv_cache_utilization"),
    Twin("average_queue_size", f"{_POOL}average_queue_size"),
    Twin("average_running_requests", f"{_POOL}average_running_requests"),
    Twin("ready_endpoints", f"{_POOL}ready_pods"),
    Twin(
        "per_endpoint_queue_size",
        f"{_POOL}per_pod_queue_size",
        renamed={"model_server_endpoint": "model_server_pod"},
    ),
    Twin("scheduler_e2e_duration_seconds", f"{_EXTENSION}scheduler_e2e_duration_seconds"),
    Twin(
        "scheduler_attempts_total",
        f"{_EXTENSION}scheduler_attempts_total",
        renamed={"endpoint_name": "pod_name"},
    ),
    Twin("plugin_duration_seconds", f"{_EXTENSION}plugin_duration_seconds"),
    Twin("info", f"{_EXTENSION}info"),
    Twin("model_rewrite_decisions_total", f"{_EXTENSION}model_rewrite_decisions_total"),
    Twin("datalayer_poll_errors_total", f"{_SCHEDULER}datalayer_poll_errors_total"),
    Twin("datalayer_extract_errors_total", f"{_SCHEDULER}datalayer_extract_errors_total"),
    Twin("prefix_indexer_size", f"{_EXTENSION}prefix_indexer_size", ()),
    Twin("prefix_indexer_hit_ratio", f"{_EXTENSION}prefix_indexer_hit_ratio", ()),
    Twin("prefix_indexer_hit_bytes", f"{_EXTENSION}prefix_indexer_hit_bytes", ()),
    Twin("flow_control_pool_saturation", f"{_EXTENSION}flow_control_pool_saturation"),
)


class LegacyMetrics:
    """All twins, as one collector beside those they are made from."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        metrics.registry.register(self)

    def describe(self) -> Iterator[Metric]:
        for twin in TWINS:
            (made,) = self._metrics.collector(twin.name).describe()
            yield _empty(twin, made)

    def collect(self) -> Iterator[Metric]:
        for twin in TWINS:
            (made,) = self._metrics.collector(twin.name).collect()
            yield _twin_of(twin, made)


def _empty(twin: Twin, made: Metric) -> Metric:
    text = f"Deprecated: use {names.METRIC_PREFIX}{twin.name}. {made.documentation}"
    # A family is called without the suffix that its type adds.
    family = twin.legacy.removesuffix("_total") if made.type == "counter" else twin.legacy
    return Metric(family, text, made.type)


def _twin_of(twin: Twin, made: Metric) -> Metric:
    """The same series under the old name, those summed that differ only in labels which it does not have."""
    metric = _empty(twin, made)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in made.samples:
        labels = tuple(
            (twin.renamed.get(label, label), value)
            for label, value in sample.labels.items()
            if twin.labels is None or label in twin.labels or label == "le"
        )
        key = (metric.name + sample.name.removeprefix(made.name), labels)
        sums[key] = sums.get(key, 0.0) + sample.value
    for (name, kept), total in sums.items():
        metric.add_sample(name, dict(kept), total)
    return metric


def reference() -> str:
    """The part of docs/metrics.md about twins."""
    lines = [
        "",
        "## Deprecated names",
        "",
        "With `--legacy-metric-names` the page has these too, made from the same counts when it is read;",
        "reading it takes about twice as long. What a twin lacks of the labels is summed over.",
        "",
        "| Deprecated name | Labels | Shows |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{twin.legacy}` | {', '.join(f'`{label}`' for label in twin.shown_labels)} | `{twin.name}` |"
        for twin in TWINS
    ]
    return "\n".join(lines) + "\n"
