"""The reader against hand-made lines: aliases, odd numbers, odd labels, and pages that are none."""

import random
from pathlib import Path

import pytest

from epp.errors import PageError
from epp.pool.engines import ENGINES, VLLM
from epp.pool.metrics_page import NO_LORA, EngineSample, PageReader

read_page = PageReader(VLLM).read
DATA = Path(__file__).parent.parent / "data" / "pool"
HEADER = b"# HELP vllm:num_requests_waiting Requests.\n# TYPE vllm:num_requests_waiting gauge\n"


def read(*lines: str) -> EngineSample:
    return read_page(HEADER + "\n".join(lines).encode() + b"\n")


def test_old_name_of_kv_usage_is_read_and_the_new_one_wins() -> None:
    old, new = "vllm:gpu_cache_usage_perc 0.25", "vllm:kv_cache_usage_perc 0.5"
    assert read(old).kv_usage == 0.25
    assert read(new).kv_usage == 0.5
    assert read(old, new).kv_usage == read(new, old).kv_usage == 0.5
    assert read("vllm:kv_cache_usage_perc NaN", old).kv_usage == 0.25
    assert read().kv_usage is None


@pytest.mark.parametrize(
    "value", ["NaN", "nan", "+Inf", "-Inf", "Infinity", "-1", "1e999", "x", "", "{", "0x10"]
)
def test_no_amount_is_unknown(value: str) -> None:
    sample = read(
        f"vllm:num_requests_waiting {value}",
        f"vllm:kv_cache_usage_perc {value}",
        f"vllm:prefix_cache_hits_total {value}",
        "vllm:num_requests_running 2",
    )
    assert sample == EngineSample(running=2.0, lora=NO_LORA)


def test_one_unreadable_rank_makes_the_sum_unknown() -> None:
    assert (
        read('vllm:num_requests_waiting{engine="0"} 3', 'vllm:num_requests_waiting{engine="1"} NaN').waiting
        is None
    )


def test_sums_that_overflow_are_unknown() -> None:
    assert (
        read("vllm:num_requests_waiting 1e308", 'vllm:num_requests_waiting{engine="1"} 1e308').waiting is None
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7.0), ("7.0", 7.0), ("7e0", 7.0), ("+7", 7.0), ("7 1395066363000", 7.0), ('7 # {id="9"} 1', 7.0)],
)
@pytest.mark.parametrize(
    "labels",
    [
        "",
        "{}",
        " {}",
        '{model_name="a"}',
        '{model_name="a } 9"}',
        r'{model_name="say \"} 9\" \\",engine="0",}',
        '{model_name="vllm:num_requests_waiting 9"}',
        '{model_name="#"}',
    ],
)
def test_labels_and_forms_of_a_sample(labels: str, text: str, value: float) -> None:
    assert read(f"vllm:num_requests_waiting{labels} {text}").waiting == value
    assert read_page(f"vllm:num_requests_waiting{labels}\t{text}".encode()).waiting == value


def test_what_other_exporters_write_does_not_disturb() -> None:
    sample = read_page(
        b'{"http.server.duration",le="1"} 3\n'
        b'{"vllm:num_requests_waiting"} 9\n'
        b"vllm:num_requests_waiting 1e3 1395066363000\n"
        b'vllm:num_requests_running 2 # {trace_id="x"} 0.5 1395066363.0\n'
        b"vllm:kv_cache_usage_perc NaN\n"
        b"# EOF\n"
    )
    assert (sample.waiting, sample.running, sample.kv_usage) == (1000.0, 2.0, None)


def test_series_of_several_models_are_summed() -> None:
    assert (
        read(
            'vllm:num_requests_waiting{model_name="a"} 5', 'vllm:num_requests_waiting{model_name="b"} 2'
        ).waiting
        == 7
    )


@pytest.mark.parametrize(
    "line",
    [
        "# HELP vllm:num_requests_waiting 9",
        "# vllm:num_requests_waiting 9",
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9',
        "my_vllm:num_requests_waiting 9",
        " vllm:num_requests_waiting_total 9",
        "vllm:external_prefix_cache_hits_total 9",
        "vllm:prefix_cache_hits_created 9",
        "sglang:num_queue_reqs 9",
    ],
)
def test_other_lines_are_not_taken(line: str) -> None:
    assert read(line) == EngineSample(lora=NO_LORA)


def test_usage_stays_within_one() -> None:
    assert read("vllm:kv_cache_usage_perc 1.0000002").kv_usage == 1.0


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ('block_size="16",num_gpu_blocks="100"', (16, 1600)),
        ('num_gpu_blocks="100",block_size="16"', (16, 1600)),
        ('block_size="16",num_gpu_blocks="None"', (16, None)),
        ('block_size="None",num_gpu_blocks="100"', (None, None)),
        ('block_size="0",num_gpu_blocks="100"', (None, None)),
        ('mamba_block_size="8",num_gpu_blocks_override="7",block_size="16",num_gpu_blocks="100"', (16, 1600)),
        ('mamba_block_size="8",num_gpu_blocks_override="7"', (None, None)),
        ('note="block_size=\\"8\\"",block_size="16",num_gpu_blocks="2"', (16, 32)),
        ('block_size="16",num_gpu_blocks="99999999999999999999"', (16, None)),
        ('block_size="-16",num_gpu_blocks="1"', (None, None)),
    ],
)
def test_cache_size(labels: str, expected: tuple[int | None, int | None]) -> None:
    sample = read(f"vllm:cache_config_info{{{labels}}} 1.0")
    assert (sample.block_size, sample.cache_tokens) == expected


def test_cache_size_of_the_largest_line_counts() -> None:
    lines = [
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{n}"}} 1' for n in ("None", "40", "80")
    ]
    assert read(*lines).cache_tokens == read(*reversed(lines)).cache_tokens == 80 * 16


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\n",
        b"[]",
        b'{"detail":"Not Found"}',
        b"<!DOCTYPE html><html><body>vllm:num_requests_waiting 3</body></html>",
        b"\x1f\x8b\x08\x00" + bytes(range(256)),
        b"Internal Server Error",
        b"vllm:num_requests_waiting",
    ],
)
def test_what_is_no_page(page: bytes) -> None:
    with pytest.raises(PageError):
        read_page(page)


def test_garbage_never_escapes_as_another_error() -> None:
    draw = random.Random(20)
    pages = [path.read_bytes() for path in sorted(DATA.glob("*.txt"))]
    readers = [PageReader(engine) for engine in ENGINES]
    read_or_refused = 0
    for _ in range(1500):
        page = bytearray(draw.choice(pages))
        at = draw.randrange(len(page))
        match draw.randrange(5):
            case 0:
                page = page[:at]
            case 1:
                page = page[at:]
            case 2:
                for _ in range(200):
                    page[draw.randrange(len(page))] = draw.randrange(256)
            case 3:
                page[at:at] = draw.choice([b'"', b"{", b"}", b"\n", b"\\", b"\0", b"9" * 400, b"# "]) * 5
            case _:
                page = bytearray(draw.randbytes(draw.randrange(300)))
        try:
            sample = draw.choice(readers).read(bytes(page))
        except PageError:
            read_or_refused += 1
        else:
            read_or_refused += 1
            for value in (sample.waiting, sample.running, sample.hit_tokens, sample.query_tokens):
                assert value is None or 0.0 <= value < float("inf")
            assert sample.kv_usage is None or 0.0 <= sample.kv_usage <= 1.0
            assert sample.cache_tokens is None or 0 < sample.cache_tokens < 2**63
    assert read_or_refused == 1500


def test_hostile_labels_take_no_long_time_to_refuse() -> None:
    line = b'vllm:num_requests_waiting{a="' + b'\\"' * 100_000
    assert read_page(HEADER + line).waiting is None
    assert read_page(HEADER + b"vllm:num_requests_waiting{" + b'""' * 100_000).waiting is None
