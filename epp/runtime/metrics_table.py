"""What is counted: one table, from which the collectors and docs/metrics.md are made.

Names, labels and buckets are the field's.
"""

from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from epp import names
from epp.director import TIMED_EVERY
from epp.runtime.tallies import Tallies
from epp.scheduling.records import GAP_BOUNDS_S

# Different values of one label that clients choose, and sets of them: each set has eleven histograms and 270
# lines on the page. What is beyond is counted together.
LABEL_VALUES = 1000
LABEL_SETS = 1000
OTHER = "other"

# fmt: off
_DURATION = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120,
    180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600,
)
_TPOT = (
    0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8,
    1, 2,
)
# fmt: on
_TTFT = tuple(bound for bound in _DURATION if bound <= 120)
_NTPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SCHEDULER = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_PROCESSING = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ANSWER = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
# The field's lists have 32778 among these powers of two; it is 32768 here.
_POWERS = (1, *(2**power for power in range(3, 21)))
_REQUEST_BYTES = tuple(2**power for power in range(6, 31))
_RESPONSE_BYTES = (1, *(2**power for power in range(3, 17)))
_RATIO = tuple(step / 10 for step in range(11))
_HIT_BYTES = (0, *(2**power for power in range(4, 17)))

_MODEL = ("model_name", "target_model_name", "fairness_id", "priority")
_PLUGIN = ("plugin_name", "plugin_type")
_ENCODER = ("plugin_type", "plugin_name")
_INFLIGHT = ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without the prefix; that of a counter ends in `_total`.
        buckets: upper bounds of a histogram, without infinity.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


TABLE: tuple[Metric, ...] = (
    Metric("request_total", "counter", _MODEL, "Requests placed on an endpoint."),
    Metric(
        "request_error_total",
        "counter",
        (*_MODEL, "error_code"),
        "Requests refused by the picker or answered with a status of 400 or above.",
    ),
    Metric(
        "request_duration_seconds", "histogram", _MODEL, "From arrival to the end of the answer.", _DURATION
    ),
    Metric("request_size_bytes", "histogram", _MODEL, "Request bodies as received.", _REQUEST_BYTES),
    Metric("response_size_bytes", "histogram", _MODEL, "Answer bodies.", _RESPONSE_BYTES),
    Metric("request_input_tokens", "histogram", _MODEL, "Prompt tokens the engine reported.", _POWERS),
    Metric("request_output_tokens", "histogram", _MODEL, "Output tokens the engine reported.", _POWERS[:12]),
    Metric("request_cached_tokens", "histogram", _MODEL, "Prompt tokens the engine had cached.", _POWERS),
    Metric("request_running", "gauge", _MODEL, "Requests placed and not ended."),
    Metric(
        "request_ntpot_seconds",
        "histogram",
        _MODEL,
        "Request duration divided by output tokens.",
        _NTPOT,
    ),
    Metric(
        "request_ttft_seconds",
        "histogram",
        (*_MODEL, "streaming"),
        "From arrival to the first output token.",
        _TTFT,
    ),
    Metric(
        "request_streaming_tpot_seconds",
        "histogram",
        _MODEL,
        "Streamed answers: time after the first token divided by the tokens after it.",
        _TPOT,
    ),
    Metric(
        "request_streaming_itl_seconds",
        "histogram",
        _MODEL,
        "Streamed answers: time between two body chunks, from the first output token on.",
        GAP_BOUNDS_S,
    ),
    Metric(
        "average_kv_cache_utilization",
        "gauge",
        ("name",),
        "Mean KV cache usage of fresh endpoints that tell it, 0 to 1; 0 where none does.",
    ),
    Metric(
        "average_queue_size",
        "gauge",
        ("name",),
        "Mean waiting requests of fresh endpoints that tell them; 0 where none does.",
    ),
    Metric("average_running_requests", "gauge", ("name",), "Mean running requests of fresh endpoints."),
    Metric("std_dev_kv_cache_utilization", "gauge", ("name",), "Standard deviation of KV cache usage."),
    Metric("std_dev_queue_size", "gauge", ("name",), "Standard deviation of waiting requests."),
    Metric("std_dev_running_requests", "gauge", ("name",), "Standard deviation of running requests."),
    Metric("ready_endpoints", "gauge", ("name",), "Endpoints that may be chosen now."),
    Metric(
        "per_endpoint_queue_size",
        "gauge",
        ("name", "model_server_endpoint"),
        "Waiting requests of each endpoint that tells them.",
    ),
    Metric("scheduler_e2e_duration_seconds", "histogram", (), "The choice of an endpoint.", _SCHEDULER),
    Metric(
        "plugin_duration_seconds",
        "histogram",
        ("extension_point", "plugin_type", "plugin_name"),
        f"One call of a plugin, measured on one request in {TIMED_EVERY}; of a profile handler with the "
        "profiles it ran.",
        _SCHEDULER,
    ),
    Metric(
        "scheduler_attempts_total",
        "counter",
        ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        "Choices made (success) or failed (failure).",
    ),
    Metric(
        "request_processing_duration_seconds",
        "histogram",
        (),
        "From the complete request to its placement: reading the body and choosing.",
        _PROCESSING,
    ),
    Metric(
        "response_processing_duration_seconds",
        "histogram",
        (),
        f"Time spent on one answer's messages, from its headers to its end; one stream in {TIMED_EVERY}.",
        _ANSWER,
    ),
    Metric("info", "gauge", ("commit", "build_ref"), "Build of this picker; always 1."),
    Metric(
        "model_rewrite_decisions_total",
        "counter",
        ("model_rewrite_name", "model_name", "target_model"),
        "Decisions of rewrite rules, those for the same model included.",
    ),
    Metric(
        "datalayer_poll_errors_total", "counter", ("source_type",), "Asking an engine for its state failed."
    ),
    Metric(
        "datalayer_extract_errors_total",
        "counter",
        ("source_type", "extractor_type"),
        "An engine's answer lacked something that is read from it.",
    ),
    Metric("prefix_indexer_size", "gauge", _PLUGIN, "Pairs of block and endpoint in the prefix index."),
    Metric(
        "prefix_indexer_hit_ratio",
        "histogram",
        _PLUGIN,
        "Share of the prompt held by the chosen endpoint.",
        _RATIO,
    ),
    Metric(
        "prefix_indexer_hit_bytes",
        "histogram",
        _PLUGIN,
        "Prompt bytes held by the chosen endpoint.",
        _HIT_BYTES,
    ),
    Metric(
        "encoder_cache_queries_total",
        "counter",
        (*_ENCODER, "modality"),
        "Media looked up among those that endpoints encoded.",
    ),
    Metric(
        "encoder_cache_hits_total",
        "counter",
        (*_ENCODER, "pod", "modality"),
        "Media found, by endpoint (`namespace/name`).",
    ),
    Metric(
        "encoder_cache_hit_ratio",
        "histogram",
        _ENCODER,
        "Share of a request's media that an endpoint encoded already, once for each endpoint.",
        _RATIO,
    ),
    Metric(
        "inflight_requests",
        "gauge",
        _INFLIGHT,
        "Requests in flight to each endpoint, counted by the picker's own ledger (`inflight-ledger`, without "
        "fairness id and priority) and by each `inflight-load-producer`.",
    ),
    Metric(
        "inflight_tokens",
        "gauge",
        _INFLIGHT,
        "Uncached prompt tokens in flight to each endpoint until its first output token; of a producer with "
        "the output it estimates.",
    ),
    Metric(
        "flow_control_pool_saturation",
        "gauge",
        ("inference_pool", "stage"),
        "How full the saturation detector finds the pool, 1 and above is saturated: endpoints that prefill, "
        "those that decode, and the larger of both (`effective`). A stage without endpoints has no series.",
    ),
    Metric(
        "flow_control_stale_endpoints",
        "gauge",
        ("detector",),
        "Candidates whose figures are missing or too old for the saturation detector.",
    ),
    Metric("extproc_streams_inflight", "gauge", (), "Open ext-proc streams."),
    Metric("extproc_streams_total", "counter", ("code",), "Finished ext-proc streams by how they ended."),
    Metric(
        "extproc_stream_duration_seconds",
        "histogram",
        (),
        "From a stream's opening to its end.",
        _DURATION,
    ),
    Metric("extproc_held_bytes", "gauge", (), "Bytes of requests and answers held in the process."),
    Metric(
        "extproc_dropped_messages_total",
        "counter",
        (),
        "Body messages of a proxy that came after their body had ended; they were dropped.",
    ),
    Metric(
        "extproc_http2_errors_total",
        "counter",
        ("scope", "code"),
        "What proxies did wrong in HTTP/2, by its reach (stream, connection) and error code.",
    ),
    Metric(
        "plugin_failures_total", "counter", ("plugin_class",), "Plugin calls that failed; the work went on."
    ),
    Metric(
        "request_needs_failed_total",
        "counter",
        ("need", "reason"),
        "Requests placed without what had to be found out (`RenderNeed`: their exact tokens; `BurstNeed`: "
        "where the others of their window go): it was `late`, `unreachable`, `refused`, `unreadable`, too "
        "much was waiting for it (`busy`, `full`), or the picker failed (`fault`).",
    ),
    Metric(
        "ledger_overdrafts_total",
        "counter",
        (),
        "Times more load was given back than was charged: a fault of this picker. Always 0.",
    ),
    Metric(
        "served_elsewhere_total",
        "counter",
        ("where",),
        "Answers from another endpoint than the chosen one: in the `pool` or `outside` of it.",
    ),
    Metric(
        "config_discovery_errors_total",
        "counter",
        (),
        "Discovery files that could not be used; the old one stays.",
    ),
    Metric(
        "config_reload_errors_total",
        "counter",
        (),
        "Configuration files that could not be used; the old configuration stays.",
    ),
    Metric(
        "config_last_reload_successful",
        "gauge",
        (),
        "1 where the configuration in use is that of the file, 0 after a file that could not be used.",
    ),
)


Collector = Counter | Gauge | Tallies


def collectors(registry: CollectorRegistry) -> dict[str, Collector]:
    """The table as live collectors, by name without prefix."""
    made: dict[str, Collector] = {}
    for row in TABLE:
        name = names.METRIC_PREFIX + row.name
        match row.kind:
            case "counter":
                made[row.name] = Counter(name, row.help, row.labels, registry=registry)
            case "gauge":
                made[row.name] = Gauge(name, row.help, row.labels, registry=registry)
            case "histogram":
                made[row.name] = Tallies(name, row.help, row.labels, row.buckets, registry)
    return made


def reference() -> str:
    """docs/metrics.md: the table for people."""
    lines = [
        "# Metrics",
        "",
        f"Served at `:{names.METRICS_PORT}/metrics`. Every name has the prefix `{names.METRIC_PREFIX}`;",
        "histograms add `_bucket`, `_sum` and `_count`. Labels that come from clients are bounded: after",
        f"{LABEL_VALUES} models or flows, or {LABEL_SETS} combinations of them, the rest is `{OTHER}`;",
        "models that rewrite rules name keep their names. What describes the pool, its endpoints and plugins",
        "is renewed at `--refresh-prometheus-metrics-interval`; the series of an endpoint end with it.",
        "",
        "| Name | Type | Labels | Meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.help} |"
        for row in TABLE
    ]
    return "\n".join(lines) + "\n"
