"""What the engines call their figures: one row of a table for each engine."""

import re
from dataclasses import dataclass
from typing import Final

BLOCK_SIZE_LABEL: Final = "block_size"
NUM_BLOCKS_LABEL: Final = "num_gpu_blocks"

_NAME: Final = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\}\s*)?", re.DOTALL)
_LABEL: Final = re.compile(
    r"""\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^'\\]*)'|([^"',=~{}\s]+))\s*(?:,|$)"""
)
_ESCAPE: Final = re.compile(r'\\([\\"n])')


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric by name; only its series with these labels, where some are given."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "MetricSpec":
        """From `name` or `name{label=value,other="value"}`; quotes are optional.

        Raises:
            ValueError: it is neither; says what would be right.
        """
        found = _NAME.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:60]!r} is not a metric; {_RIGHT}")
        labels, at, inside = [], 0, (found[2] or "").strip()
        while at < len(inside):
            label = _LABEL.match(inside, at)
            if label is None:
                raise ValueError(f"{inside[at : at + 40]!r} is not label=value; {_RIGHT}")
            value = next((group for group in label.groups()[1:] if group is not None), "")
            labels.append((label[1], unescaped(value)))
            at = label.end()
        return cls(found[1], tuple(labels))

    def __str__(self) -> str:
        inside = ",".join(f"{label}={value}" for label, value in self.labels)
        return f"{self.name}{{{inside}}}" if inside else self.name


_RIGHT: Final = "write name or name{label=value,...}"


def unescaped(text: str) -> str:
    """A label's value as it is meant, from how it stands between quotes."""
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text) if "\\" in text else text


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """An info series that tells the size of the KV cache in two of its labels."""

    metric: MetricSpec
    block_size_label: str = BLOCK_SIZE_LABEL
    num_blocks_label: str = NUM_BLOCKS_LABEL


@dataclass(frozen=True, slots=True)
class CustomMetric:
    """A metric that becomes a column of `PoolView.attributes`; `optional`: a page may lack it."""

    attribute: str
    metric: MetricSpec
    optional: bool = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How one kind of engine tells its state.

    A figure has alternatives, newest name first: the first that a page tells counts. None given: the engine
    has no such figure. Where a metric has several series (data-parallel ranks behind one port, models), they
    are summed; `kv_usage` is their mean.

    Attributes:
        name: what the engine label says.
        waiting, running: requests. kv_usage: share of the KV cache in use.
        lora: info series of vLLM's form, its value the time it was written.
        cache_info: size of the KV cache in labels. block_size, num_blocks: the same as figures.
        prefix_hits, prefix_queries: tokens found in and looked up in the engine's prefix cache, counters.
        path: where the engine serves its page, when that is not `/metrics`.
    """

    name: str
    waiting: tuple[MetricSpec, ...] = ()
    running: tuple[MetricSpec, ...] = ()
    kv_usage: tuple[MetricSpec, ...] = ()
    lora: MetricSpec | None = None
    cache_info: CacheInfo | None = None
    block_size: tuple[MetricSpec, ...] = ()
    num_blocks: tuple[MetricSpec, ...] = ()
    prefix_hits: tuple[MetricSpec, ...] = ()
    prefix_queries: tuple[MetricSpec, ...] = ()
    custom: tuple[CustomMetric, ...] = ()
    path: str | None = None


def _any(*texts: str) -> tuple[MetricSpec, ...]:
    return tuple(map(MetricSpec.parse, texts))


VLLM: Final = EngineSpec(
    "vllm",
    waiting=_any("vllm:num_requests_waiting"),
    running=_any("vllm:num_requests_running"),
    kv_usage=_any("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    lora=MetricSpec("vllm:lora_requests_info"),
    cache_info=CacheInfo(MetricSpec("vllm:cache_config_info")),
    prefix_hits=_any("vllm:prefix_cache_hits_total"),
    prefix_queries=_any("vllm:prefix_cache_queries_total"),
)

ENGINES: Final[tuple[EngineSpec, ...]] = (
    VLLM,
    # Its cache size moved from labels to two gauges with 0.5.11.
    EngineSpec(
        "sglang",
        waiting=_any("sglang:num_queue_reqs"),
        running=_any("sglang:num_running_reqs"),
        kv_usage=_any("sglang:token_usage"),
        cache_info=CacheInfo(MetricSpec("sglang:cache_config_info"), "page_size", "num_pages"),
        block_size=_any("sglang:page_size"),
        num_blocks=_any("sglang:num_pages"),
    ),
    # Its /metrics is a JSON list of iterations.
    EngineSpec(
        "trtllm-serve",
        waiting=_any("trtllm_num_requests_waiting"),
        running=_any("trtllm_num_requests_running"),
        kv_usage=_any("trtllm_kv_cache_utilization"),
        block_size=_any("trtllm_kv_cache_tokens_per_block"),
        num_blocks=_any("trtllm_kv_cache_max_blocks"),
        path="/prometheus/metrics",
    ),
    EngineSpec(
        "triton-tensorrt-llm",
        waiting=_any("nv_trt_llm_request_metrics{request_type=waiting}"),
        running=_any("nv_trt_llm_request_metrics{request_type=scheduled}"),
        kv_usage=_any("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}"),
        block_size=_any("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}"),
        num_blocks=_any("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}"),
    ),
    # nv_inference_exec_count counts executions since the start. The field takes it for the requests that run
    # now; here a page that declares it a counter leaves `running` unknown.
    EngineSpec(
        "triton",
        waiting=_any("nv_inference_pending_request_count"),
        running=_any("nv_inference_exec_count"),
    ),
)
