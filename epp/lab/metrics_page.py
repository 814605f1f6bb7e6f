"""The `/metrics` page of a lab engine: names, help texts, types and labels of vLLM 0.32."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from time import time
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from epp.lab.engine import EngineSpec, Totals
from epp.lab.realtime import Histogram, RealtimeEngine

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_1_0_0

_number: Callable[[float], str] = floatToGoString

_WAITING_BY_REASON = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
    "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
    "Sum of all reasons equals vllm:num_requests_waiting."
)
_QUERIES = "Prefix cache queries, in terms of number of queried tokens."
_HITS = "Prefix cache hits, in terms of number of cached tokens."
_CACHED = "Number of cached prompt tokens (local + external)."
_CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "engine": "0",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "xxhash",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric of the page, with its present values by value of `label` ("" = no such label)."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]
    name: str
    text: str
    values: Mapping[str, float]
    label: str = ""
    total: float = 0.0

    def numbers(self) -> Iterator[float]:
        """Values in the order of the page's lines."""
        yield from self.values.values()
        if self.kind is HistogramMetricFamily:
            yield self.values["+Inf"]
            yield self.total


class MetricsPage:
    """Renders one engine's state in the text format. Counters start with the engine.

    prometheus_client lays the page out once, which takes it about 1 ms; after that only the values
    are put in (a tenth of that), because the page is read many times a second beside the engine's steps.
    """

    def __init__(self, driver: RealtimeEngine, model: str) -> None:
        self._driver = driver
        self._template = _template(self._families(), {"engine": "0", "model_name": model}, driver.engine.spec)

    def render(self) -> bytes:
        numbers = [_number(number) for family in self._families() for number in family.numbers()]
        return (self._template % tuple(numbers)).encode()

    def _families(self) -> tuple[_Family, ...]:
        engine, totals = self._driver.engine, self._driver.engine.totals
        return (
            _gauge("num_requests_running", "Number of requests in model execution batches.", engine.running),
            _gauge("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting),
            _Family(
                GaugeMetricFamily,
                "num_requests_waiting_by_reason",
                _WAITING_BY_REASON,
                {"capacity": engine.waiting, "deferred": 0},
                "reason",
            ),
            _gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.kv_usage),
            _counter("prefix_cache_queries", _QUERIES, totals.query_tokens),
            _counter("prefix_cache_hits", _HITS, totals.hit_tokens),
            _counter(
                "num_preemptions", "Cumulative number of preemption from the engine.", totals.preemptions
            ),
            _counter("prompt_tokens", "Number of prefill tokens processed.", totals.prompt_tokens),
            _prompt_tokens_by_source(totals),
            _counter("prompt_tokens_cached", _CACHED, totals.cached_tokens),
            _counter("generation_tokens", "Number of generation tokens processed.", totals.generation_tokens),
            _request_success(totals),
            _histogram(
                "time_to_first_token_seconds",
                "Histogram of time to first token in seconds.",
                self._driver.ttft,
            ),
            _histogram(
                "inter_token_latency_seconds",
                "Histogram of inter-token latency in seconds.",
                self._driver.itl,
            ),
        )


def _gauge(name: str, text: str, value: float) -> _Family:
    return _Family(GaugeMetricFamily, name, text, {"": value})


def _counter(name: str, text: str, value: float) -> _Family:
    return _Family(CounterMetricFamily, name, text, {"": value})


def _histogram(name: str, text: str, histogram: Histogram) -> _Family:
    bounds = [*map(_number, histogram.bounds), "+Inf"]
    counts = dict(zip(bounds, accumulate(histogram.counts), strict=True))
    return _Family(HistogramMetricFamily, name, text, counts, "le", histogram.total)


def _prompt_tokens_by_source(totals: Totals) -> _Family:
    values = {
        "local_compute": totals.prompt_tokens - totals.cached_tokens,
        "local_cache_hit": totals.cached_tokens,
        "external_kv_transfer": 0,
    }
    text = "Number of prompt tokens by source."
    return _Family(CounterMetricFamily, "prompt_tokens_by_source", text, values, "source")


def _request_success(totals: Totals) -> _Family:
    values = {"stop": 0, "length": totals.finished, "abort": 0, "error": 0, "repetition": 0}
    text = "Count of successfully processed requests."
    return _Family(CounterMetricFamily, "request_success", text, values, "finished_reason")


def _template(families: Iterable[_Family], labels: dict[str, str], spec: EngineSpec) -> str:
    """The page with `%s` for every value that changes."""
    created = time()
    layout = CollectorRegistry(auto_describe=False)
    layout.register(_Layout([*(_laid_out(family, labels, created) for family in families)]))
    lines = []
    for line in generate_latest(layout).decode().replace("%", "%%").splitlines():
        series, _, value = line.rpartition(" ")
        constant = line.startswith("#") or value == _number(created)
        lines.append(line if constant else f"{series} %s")
    info = CollectorRegistry(auto_describe=False)
    info.register(_Layout([_cache_config(spec)]))
    return "\n".join(lines) + "\n" + generate_latest(info).decode().replace("%", "%%")


def _laid_out(family: _Family, labels: dict[str, str], created: float) -> Metric:
    name = f"vllm:{family.name}"
    metric = family.kind(name, family.text)
    suffix = {CounterMetricFamily: "_total", HistogramMetricFamily: "_bucket"}.get(family.kind, "")
    series = [{**labels, family.label: value} if family.label else labels for value in family.values]
    for one in series:
        metric.add_sample(name + suffix, one, 0)
    if family.kind is HistogramMetricFamily:
        metric.add_sample(f"{name}_count", labels, 0)
        metric.add_sample(f"{name}_sum", labels, 0)
        series = [labels]
    if suffix:
        for one in series:
            metric.add_sample(f"{name}_created", one, created)
    return metric


class _Layout(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _cache_config(spec: EngineSpec) -> Metric:
    cache_tokens = spec.num_blocks * spec.block_size
    labels = {
        **_CACHE_CONFIG,
        "block_size": str(spec.block_size),
        "effective_attention_block_size": str(spec.block_size),
        "kv_cache_size_tokens": str(cache_tokens),
        "kv_cache_max_concurrency": f"{cache_tokens / spec.max_model_len:g}",
        "num_gpu_blocks": str(spec.num_blocks),
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig")
    family.add_sample("vllm:cache_config_info", labels, 1.0)
    return family
