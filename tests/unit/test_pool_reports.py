"""Faults that users of other pickers met with engine metrics; `docs/field-reports.md` names each of them."""

from typing import Any

import numpy as np
import pytest

from epp.pool.engines import ENGINES, VLLM
from epp.pool.extract import EnginePages, engine_label_keys
from epp.pool.metrics_page import EngineSample, PageReader
from epp.pool.records import Endpoint, LoadReport
from epp.pool.store import PoolStore
from epp.scheduling.scorers import KvCacheUtilizationScorer, LoraAffinityScorer, QueueScorer
from tests.data.scheduling import pool

FULL = EngineSample(waiting=7.0, running=3.0, kv_usage=0.9)
LABELS = engine_label_keys("llm-d.ai/engine-type")


def store_of(count: int) -> PoolStore:
    store = PoolStore(staleness_s=2.0)
    store.sync([Endpoint(f"u{n}", f"pod-{n}", "default", f"10.0.0.{n}", 8000) for n in range(count)], 0.0)
    return store


def pass_time(store: PoolStore, start: float, end: float, *samples: EngineSample) -> None:
    """Pages every 200 ms: endpoint by endpoint, those of the others stay unread."""
    for step in range(round((end - start) / 0.2) + 1):
        for slot, sample in enumerate(samples):
            store.sampled(slot, sample, start + step * 0.2)
        store.refresh(start + step * 0.2, 0.2)


def score(scorer: Any, store: PoolStore, count: int, model: str = "m") -> list[float]:
    ctx = pool.context([pool.Row(str(number)) for number in range(count)], model=model)
    ctx.view = store.view
    ctx.load.requests = ctx.load.prefill_tokens = np.zeros(store.view.capacity, np.int64)
    return [float(value) for value in scorer.score(ctx, store.view.candidates)[:count]]


# -- what a page lacks --------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["waiting", "running", "kv_usage"])
def test_a_figure_that_pages_leave_out_is_not_believed_for_ever(missing: str) -> None:
    store, view = store_of(1), None
    pass_time(store, 0.0, 1.0, FULL)
    told = {"waiting": 1.0, "running": 2.0, "kv_usage": 0.5} | {missing: None}
    partly = EngineSample(**told)  # type: ignore[arg-type]
    view = store.view
    known = {"waiting": view.waiting_known, "running": view.running_known, "kv_usage": view.kv_known}
    pass_time(store, 1.2, 2.8, partly)
    assert known[missing][0], "a page or two without it are no reason"
    pass_time(store, 3.0, 4.0, partly)
    assert {name: bool(mask[0]) for name, mask in known.items()} == {
        name: name != missing for name in ("waiting", "running", "kv_usage")
    }
    assert getattr(view, missing)[0] == 0.0
    assert not view.stale[0]
    pass_time(store, 4.2, 4.4, FULL)
    assert known[missing][0]
    assert getattr(view, missing)[0] == getattr(FULL, missing)


def test_an_endpoint_that_falls_silent_keeps_its_last_figures() -> None:
    store = store_of(1)
    pass_time(store, 0.0, 1.0, FULL)
    pass_time(store, 1.2, 60.0)
    view = store.view
    assert (view.waiting[0], view.running[0], view.kv_usage[0]) == (7.0, 3.0, 0.9)
    assert view.stale[0]
    assert all(mask[0] for mask in (view.waiting_known, view.running_known, view.kv_known))


def test_usage_under_neither_name_is_unknown() -> None:
    """One endpoint tells neither name of the usage; it counts as the median of the others, not as idle."""
    store = store_of(3)
    page = "vllm:num_requests_waiting 0\nvllm:num_requests_running 1\n"
    old, both = (
        "vllm:gpu_cache_usage_perc 0.5\n",
        "vllm:kv_cache_usage_perc 0.8\nvllm:gpu_cache_usage_perc 0.1\n",
    )
    pages = EnginePages(ENGINES, "vllm", LABELS, store.sampled)
    for slot, more in enumerate(("", old, both)):
        extracted = pages.extract(slot, store.roster[slot][1], (page + more).encode(), 0.0)
        assert extracted.failed == (slot == 0)
        assert ("lacks vllm:kv_cache_usage_perc" in extracted.remark) == (slot == 0)
    assert score(KvCacheUtilizationScorer(), store, 3) == pytest.approx([0.5, 0.5, 0.2])


# -- overload -----------------------------------------------------------------------------------------


def test_an_endpoint_that_once_said_it_was_full_is_asked_again() -> None:
    """It said so beside an answer, and no page of it can be read; sent nothing, it says nothing more."""
    store = store_of(2)
    pass_time(store, 0.0, 1.0, FULL, FULL)
    store.reported(0, LoadReport(waiting=500.0, running=64.0, kv_usage=1.0), 1.0)
    assert score(QueueScorer(), store, 2) == [0.0, 1.0]
    for step in range(20):
        store.sampled(1, EngineSample(waiting=1.0, running=1.0, kv_usage=0.5), 1.2 + step * 0.2)
        store.refresh(1.2 + step * 0.2, 0.2)
    assert score(QueueScorer(), store, 2) == [1.0, 0.0]
    assert score(KvCacheUtilizationScorer(), store, 2) == [0.5, 0.5]


def test_a_healthy_page_replaces_a_report_of_overload_at_once() -> None:
    store = store_of(2)
    store.sampled(1, EngineSample(waiting=1.0), 0.0)
    store.reported(0, LoadReport(waiting=500.0), 0.0)
    store.sampled(0, EngineSample(waiting=0.0), 0.2)
    assert score(QueueScorer(), store, 2) == [1.0, 0.0]


# -- adapters -----------------------------------------------------------------------------------------


def test_adapters_listed_as_running_and_waiting_take_their_places_once() -> None:
    both = 'running_lora_adapters="a,b",waiting_lora_adapters="a,b"'
    page = f'vllm:num_requests_waiting 0\nvllm:lora_requests_info{{{both},max_lora="4"}} 1.7e9\n'
    sample = PageReader(VLLM).read(page.encode())
    store = store_of(1)
    store.sampled(0, sample, 0.0)
    adapters = store.view.adapters
    assert adapters is not None
    assert (adapters.count[0], adapters.most[0]) == (2, 4)
    assert score(LoraAffinityScorer(), store, 1, "c") == [0.8]
    assert score(LoraAffinityScorer(), store, 1, "a") == [1.0]


def test_empty_labels_are_no_adapters() -> None:
    lines = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.5e9',
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 1.4e9',
    )
    sample = PageReader(VLLM).read("\n".join(("vllm:num_requests_waiting 0", *lines, "")).encode())
    assert sample.lora is not None
    assert (sample.lora.running, sample.lora.waiting, sample.lora.most) == (frozenset(), frozenset(), 2)
    newer = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="x, y "} 1.6e9'
    sample = PageReader(VLLM).read("\n".join(("vllm:num_requests_waiting 0", newer, *lines, "")).encode())
    assert sample.lora is not None
    assert sample.lora.running == frozenset("xy")


# -- engines ------------------------------------------------------------------------------------------


def test_a_page_of_sglang_without_a_label_is_read() -> None:
    store = store_of(1)
    page = b"sglang:num_queue_reqs 4\nsglang:num_running_reqs 2\nsglang:token_usage 0.3\n"
    extracted = EnginePages(ENGINES, "vllm", LABELS, store.sampled).extract(0, store.roster[0][1], page, 0.0)
    view = store.view
    assert (view.waiting[0], view.running[0], view.kv_usage[0]) == (4.0, 2.0, 0.3)
    assert "label the endpoint" in extracted.remark
