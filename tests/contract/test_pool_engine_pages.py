"""One page of each engine, read by the engine's row of the table."""

from pathlib import Path

import pytest

from epp.pool.engines import ENGINES
from epp.pool.metrics_page import EngineGuess, EngineSample, PageReader

DATA = Path(__file__).parent.parent / "data" / "pool"
ROWS = {engine.name: engine for engine in ENGINES}

PAGES = {
    "sglang-0.5.10.txt": (
        "sglang",
        EngineSample(waiting=2826.0, running=162.0, kv_usage=0.28, block_size=1, cache_tokens=200_000),
    ),
    # 3 and 1 waiting, 5 and 2 running, 3125 and 3100 pages.
    "sglang-0.5.12-two-ranks.txt": (
        "sglang",
        EngineSample(waiting=4.0, running=7.0, kv_usage=0.375, block_size=64, cache_tokens=64 * 6225),
    ),
    "trtllm-serve.txt": (
        "trtllm-serve",
        EngineSample(waiting=1.0, running=3.0, kv_usage=0.0625, block_size=32, cache_tokens=32 * 21129),
    ),
    # The execution counter beside them is not this row's.
    "triton-tensorrt-llm.txt": (
        "triton-tensorrt-llm",
        EngineSample(waiting=3.0, running=4.0, kv_usage=0.4, block_size=64, cache_tokens=64 * 6239),
    ),
    # 3 and 11 pending; 370 executions since the start are no requests that run now.
    "triton.txt": ("triton", EngineSample(waiting=14.0, counters=("nv_inference_exec_count",))),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_of_an_engine(name: str) -> None:
    engine, expected = PAGES[name]
    reader = PageReader(ROWS[engine])
    sample = reader.read((DATA / name).read_bytes())
    assert sample == expected
    assert reader.untold(sample) == ()


@pytest.mark.parametrize("name", PAGES)
def test_nobody_else_understands_it(name: str) -> None:
    """But plain Triton, which answers beside its TensorRT-LLM backend."""
    engine, _ = PAGES[name]
    for other in ENGINES:
        if other.name not in (engine, "triton"):
            reader = PageReader(other)
            sample = reader.read((DATA / name).read_bytes())
            assert not sample.tells_load
            assert reader.untold(sample) != ()


@pytest.mark.parametrize("name", PAGES)
def test_its_engine_is_told_from_its_metrics(name: str) -> None:
    assert EngineGuess(ENGINES).engine_of((DATA / name).read_bytes()) == PAGES[name][0]


def test_vllm_is_told_from_its_metrics_and_a_page_without_load_is_nobodys() -> None:
    guess = EngineGuess(ENGINES)
    assert guess.engine_of((DATA / "vllm-0.32-under-load.txt").read_bytes()) == "vllm"
    assert guess.engine_of((DATA / "vllm-0.32-render-only.txt").read_bytes()) is None
    assert guess.engine_of(b"my_vllm:num_requests_waiting 3\nsglang:num_queue_reqs_more 1\n") is None


def test_a_figure_is_read_whatever_type_it_says_but_counter() -> None:
    page = "sglang:num_queue_reqs 4\n"
    reader = PageReader(ROWS["sglang"])
    for header in ("", "# TYPE sglang:num_queue_reqs gauge\n", "# TYPE sglang:num_queue_reqs untyped\n"):
        assert reader.read((header + page).encode()).waiting == 4.0
    declared = reader.read(f"# TYPE sglang:num_queue_reqs counter\r\n{page}".encode())
    assert (declared.waiting, declared.counters) == (None, ("sglang:num_queue_reqs",))
    other = reader.read(f"# TYPE sglang:other counter\n{page}".encode())
    assert (other.waiting, other.counters) == (4.0, ())


def test_names_are_the_fields() -> None:
    def texts(engine: str) -> list[str]:
        row = ROWS[engine]
        specs = [row.waiting[0], row.running[0], *row.kv_usage[:1], *row.block_size, *row.num_blocks]
        return [*map(str, specs), *([str(row.lora)] if row.lora else [])]

    assert texts("vllm") == [
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:lora_requests_info",
    ]
    assert texts("sglang") == [
        "sglang:num_queue_reqs",
        "sglang:num_running_reqs",
        "sglang:token_usage",
        "sglang:page_size",
        "sglang:num_pages",
    ]
    assert texts("trtllm-serve") == [
        "trtllm_num_requests_waiting",
        "trtllm_num_requests_running",
        "trtllm_kv_cache_utilization",
        "trtllm_kv_cache_tokens_per_block",
        "trtllm_kv_cache_max_blocks",
    ]
    blocks = "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="
    assert texts("triton-tensorrt-llm") == [
        "nv_trt_llm_request_metrics{request_type=waiting}",
        "nv_trt_llm_request_metrics{request_type=scheduled}",
        f"{blocks}fraction}}",
        f"{blocks}tokens_per}}",
        f"{blocks}max}}",
    ]
    assert texts("triton") == ["nv_inference_pending_request_count", "nv_inference_exec_count"]
