"""The lab's `/metrics` page against a page of a real vLLM 0.32."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.lab.engine import FITS, EngineSpec, Totals
from epp.lab.metrics_page import CONTENT_TYPE, MetricsPage
from epp.lab.realtime import RealtimeEngine

RECORDED = Path(__file__).parents[1] / "data" / "lab"
PAGE = (RECORDED / "metrics-under-load.txt").read_text()
SPEC = EngineSpec(FITS["llama-8b-h100"], num_blocks=80, block_size=32, max_model_len=2048)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Nothing:
    def first(self, cached_tokens: int) -> None:
        pass

    def token(self) -> None:
        pass


async def page_and_driver() -> tuple[MetricsPage, RealtimeEngine]:
    driver = RealtimeEngine(SPEC, speedup=1.0)
    return MetricsPage(driver, "acme/tiny-llama"), driver


def comments(page: str) -> dict[str, list[str]]:
    """`# HELP` and `# TYPE` lines by the name they are about."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if line.startswith("#"):
            found.setdefault(line.split()[2], []).append(line)
    return found


def series(page: str) -> dict[str, list[list[tuple[str, str]]]]:
    """Labels, in order, of each series, by sample name."""
    found: dict[str, list[list[tuple[str, str]]]] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            found.setdefault(name, []).append(LABEL.findall(line))
    return found


async def rendered() -> str:
    page, _ = await page_and_driver()
    return page.render().decode()


async def test_help_and_type_lines_are_the_recorded_ones() -> None:
    theirs = comments(PAGE)
    mine = comments(await rendered())
    assert len(mine) > 20
    assert mine == {name: theirs[name] for name in mine}


async def test_families_come_in_the_recorded_order() -> None:
    mine, theirs = (list(comments(page)) for page in (await rendered(), PAGE))
    assert mine == [name for name in theirs if name in mine]


async def test_series_have_the_recorded_labels() -> None:
    theirs, mine = series(PAGE), series(await rendered())
    for name, labels in mine.items():
        if name == "vllm:cache_config_info":
            assert [[label for label, _ in one] for one in labels] == [
                [label for label, _ in one] for one in theirs[name]
            ]
        else:
            assert labels == theirs[name], name


async def test_content_type() -> None:
    headers = dict(json.loads((RECORDED / "metrics-headers.json").read_text())["headers"])
    assert headers["content-type"] == CONTENT_TYPE


async def test_cache_size_is_told_as_recorded() -> None:
    told = {"block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "engine"}
    mine, theirs = (
        {label: value for label, value in series(page)["vllm:cache_config_info"][0] if label in told}
        for page in (await rendered(), PAGE)
    )
    assert mine == theirs


async def test_every_value_stands_at_its_own_series() -> None:
    """All numbers differ, so that no two can be exchanged unseen."""
    page, driver = await page_and_driver()
    driver.engine.totals = Totals(
        query_tokens=1001,
        hit_tokens=302,
        prompt_tokens=903,
        cached_tokens=204,
        generation_tokens=505,
        preemptions=6,
        finished=7,
    )
    for request in range(6):
        driver.submit([], 31, 4, [], Nothing())
        if request == 1:
            driver.engine.start_step(0.0)
    driver.ttft.observe(0.03)
    driver.ttft.observe(3000.0)
    driver.itl.observe(0.025)
    driver.stop()
    told = {}
    for family in text_string_to_metric_families(page.render().decode()):
        for sample in family.samples:
            extra = [
                value for label, value in sample.labels.items() if label not in ("engine", "model_name", "le")
            ]
            if not sample.name.endswith(("_created", "_bucket", "_info")):
                told[(sample.name.removeprefix("vllm:"), *extra)] = sample.value
    assert told == {
        ("num_requests_running",): 2,
        ("num_requests_waiting",): 4,
        ("num_requests_waiting_by_reason", "capacity"): 4,
        ("num_requests_waiting_by_reason", "deferred"): 0,
        ("kv_cache_usage_perc",): pytest.approx(2 / 79),
        ("prefix_cache_queries_total",): 1063,
        ("prefix_cache_hits_total",): 302,
        ("num_preemptions_total",): 6,
        ("prompt_tokens_total",): 903,
        ("prompt_tokens_by_source_total", "local_compute"): 699,
        ("prompt_tokens_by_source_total", "local_cache_hit"): 204,
        ("prompt_tokens_by_source_total", "external_kv_transfer"): 0,
        ("prompt_tokens_cached_total",): 204,
        ("generation_tokens_total",): 505,
        ("request_success_total", "stop"): 0,
        ("request_success_total", "length"): 7,
        ("request_success_total", "abort"): 0,
        ("request_success_total", "error"): 0,
        ("request_success_total", "repetition"): 0,
        ("time_to_first_token_seconds_count",): 2,
        ("time_to_first_token_seconds_sum",): 3000.03,
        ("inter_token_latency_seconds_count",): 1,
        ("inter_token_latency_seconds_sum",): 0.025,
    }


async def test_histogram_buckets_are_cumulative_with_inclusive_ends() -> None:
    page, driver = await page_and_driver()
    for value in (0.025, 0.0251, 99.0):
        driver.itl.observe(value)
    counts = {}
    for family in text_string_to_metric_families(page.render().decode()):
        for sample in family.samples:
            if sample.name == "vllm:inter_token_latency_seconds_bucket":
                counts[sample.labels["le"]] = sample.value
    assert (counts["0.01"], counts["0.025"], counts["0.05"], counts["80.0"], counts["+Inf"]) == (
        0,
        1,
        2,
        2,
        3,
    )


@pytest.mark.parametrize(
    ("of", "spoil"),
    [
        (comments, lambda page: page.replace("# TYPE vllm:num_requests_waiting gauge", "# TYPE x gauge")),
        (comments, lambda page: page.replace("in terms of number of cached tokens", "cached tokens")),
        (series, lambda page: page.replace('engine="0",', "")),
        (series, lambda page: page.replace('le="0.025"', 'le="0.026"')),
    ],
)
async def test_the_comparison_sees_faults(of: object, spoil: object) -> None:
    page = await rendered()
    spoilt = spoil(page)  # type: ignore[operator]
    assert spoilt != page
    assert of(spoilt) != of(page)  # type: ignore[operator]
