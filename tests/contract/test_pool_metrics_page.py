"""Pages recorded from vLLM 0.32.0; the values below were read from the files by eye."""

from pathlib import Path

import pytest

from epp.pool.engines import VLLM
from epp.pool.metrics_page import NO_LORA, EngineSample, LoraSample, PageReader

READER = PageReader(VLLM)
read_page = READER.read
DATA = Path(__file__).parent.parent / "data" / "pool"
NOTHING = EngineSample(lora=NO_LORA)

RECORDED = {
    "vllm-0.32-under-load.txt": EngineSample(
        waiting=8.0,
        running=4.0,
        kv_usage=0.40506329113924056,
        block_size=32,
        cache_tokens=80 * 32,
        hit_tokens=32.0,
        query_tokens=840.0,
        # The newer of two series: one for each set of adapters there has been.
        lora=LoraSample(frozenset({"sql-adapter"}), frozenset({"sql-adapter"}), 1),
    ),
    # Two ranks: 4 and 0 waiting, 4 and 3 running; both cache lines carry the sum of 160 blocks.
    "vllm-0.32-two-ranks-under-load.txt": EngineSample(
        waiting=4.0,
        running=7.0,
        kv_usage=(0.35443037974683544 + 0.3417721518987342) / 2,
        block_size=32,
        cache_tokens=160 * 32,
        hit_tokens=416.0 + 640.0,
        query_tokens=2800.0 + 1704.0,
        lora=LoraSample(most=1),
    ),
    # Its external_prefix_cache_* series (377 of 477 tokens) are not the engine's own cache.
    "vllm-0.32-decode-nixl.txt": EngineSample(
        waiting=0.0,
        running=0.0,
        kv_usage=0.0,
        block_size=16,
        cache_tokens=160 * 16,
        hit_tokens=96.0,
        query_tokens=573.0,
        lora=LoraSample(most=1),
    ),
    "vllm-0.32-render-only.txt": NOTHING,
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_page(name: str) -> None:
    assert read_page((DATA / name).read_bytes()) == RECORDED[name]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_page_without_comments_or_with_dos_line_ends(name: str) -> None:
    page = (DATA / name).read_bytes()
    assert read_page(page.replace(b"\n", b"\r\n")) == RECORDED[name]
    lines = [line for line in page.splitlines(keepends=True) if not line.startswith(b"#")]
    if RECORDED[name] != NOTHING:
        assert read_page(b"".join(lines)) == RECORDED[name]


def test_order_of_families_does_not_matter() -> None:
    name = "vllm-0.32-two-ranks-under-load.txt"
    lines = (DATA / name).read_bytes().splitlines()
    assert read_page(b"\n".join(reversed(lines))) == RECORDED[name]


def test_a_server_without_an_engine_tells_no_load() -> None:
    sample = read_page((DATA / "vllm-0.32-render-only.txt").read_bytes())
    assert READER.untold(sample) == (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
    )
