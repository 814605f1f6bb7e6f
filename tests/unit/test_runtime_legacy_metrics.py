"""Deprecated names: every twin against the series it shows, summed by a plain computation."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from epp import names
from epp.payload.records import RawRequest, Usage
from epp.runtime import legacy_metrics
from epp.runtime.app import App
from epp.runtime.legacy_metrics import TWINS
from epp.runtime.metrics_table import TABLE
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken
from tests.data.runtime import picker as runtime

MODELS = ("model_name", "target_model_name")
# The field's third column, as far as what it counts exists here: labels by deprecated name.
FIELD: dict[str, tuple[str, ...]] = {
    "inference_objective_request_total": (*MODELS, "priority"),
    "inference_objective_request_error_total": (*MODELS, "error_code"),
    "inference_objective_request_duration_seconds": MODELS,
    "inference_objective_request_sizes": MODELS,
    "inference_objective_response_sizes": MODELS,
    "inference_objective_input_tokens": MODELS,
    "inference_objective_output_tokens": MODELS,
    "inference_objective_prompt_cached_tokens": MODELS,
    "inference_objective_running_requests": ("model_name",),
    "inference_objective_normalized_time_per_output_token_seconds": MODELS,
    "inference_objective_request_ttft_seconds": MODELS,
    "inference_objective_request_tpot_seconds": MODELS,
    "inference_pool_average_kv_cache_utilization": ("name",),
    "inference_pool_average_queue_size": ("name",),
    "inference_pool_average_running_requests": ("name",),
    "inference_pool_ready_pods": ("name",),
    "inference_pool_per_pod_queue_size": ("name", "model_server_pod"),
    "inference_extension_scheduler_e2e_duration_seconds": (),
    "inference_extension_scheduler_attempts_total": (
        "status",
        "target_model_name",
        "pod_name",
        "namespace",
        "port",
    ),
    "inference_extension_plugin_duration_seconds": ("extension_point", "plugin_type", "plugin_name"),
    "inference_extension_info": ("commit", "build_ref"),
    "inference_extension_model_rewrite_decisions_total": (
        "model_rewrite_name",
        "model_name",
        "target_model",
    ),
    "llm_d_inference_scheduler_datalayer_poll_errors_total": ("source_type",),
    "llm_d_inference_scheduler_datalayer_extract_errors_total": ("source_type", "extractor_type"),
    "inference_extension_prefix_indexer_size": (),
    "inference_extension_prefix_indexer_hit_ratio": (),
    "inference_extension_prefix_indexer_hit_bytes": (),
    "inference_extension_flow_control_pool_saturation": ("inference_pool", "stage"),
}

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {name: one, type: approx-prefix-cache-producer}
- {name: two, type: approx-prefix-cache-producer}
objectives: [{name: batch, priority: -10}]
modelRewrites:
- name: any
  rules: [{matches: [{model: {type: Exact, value: n}}], targets: [{modelRewrite: served}]}]
"""

Series = dict[tuple[tuple[str, str], ...], float]


def page(app: App) -> dict[str, Series]:
    """All series of the page, by name and labels."""
    found: defaultdict[str, Series] = defaultdict(dict)
    for family in text_string_to_metric_families(generate_latest(app.metrics.registry).decode()):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture
def app() -> App:
    """A picker after requests that differ in every label."""
    made = runtime.picker(2, config=CONFIG, pool_name="p", legacy_metric_names=True)
    for number in range(12):
        headers = [("x-llm-d-inference-fairness-id", f"flow-{number % 3}")]
        if number % 2:
            headers.append(("x-llm-d-inference-objective", "batch"))
        body = runtime.chat("x" * 100 * number).replace(b'"m"', b'"n"' if number % 4 else b'"m"')
        raw = RawRequest("r", "POST", "/v1/chat/completions", tuple(headers), body)
        prepared = made.director.prepare(raw, 100.0)
        placement: Any = made.director.submit(prepared, 100.0)
        made.recorder.decided(prepared, 100.01, 100.02)
        if number == 11:
            break
        status = 500 if number % 5 == 4 else 200
        for at, fact in (
            (100.5, AnswerHeaders(status, None, number % 3 == 0)),
            (101.0, FirstToken()),
            (102.0 + number, Ended(Cause.NATURAL, Usage(10 * number, 5 + number, number), 3, 300)),
        ):
            made.director.observe(placement.ticket, fact, at)
    made.scraper.counts.poll_errors["metrics-data-source"] = 2
    made.scraper.counts.extract_errors["metrics-data-source", "core-metrics-extractor"] = 3
    made.renew_gauges()
    return made


def suffixes(kind: str) -> tuple[str, ...]:
    return ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)


def mistakes(app: App) -> list[str]:
    """Twins whose series are not those of the new name summed over the labels they lack."""
    shown = page(app)
    wrong = []
    kinds = {row.name: row.kind for row in TABLE}
    for twin in TWINS:
        ours = {new: old for old, new in twin.renamed.items()}
        kept = {ours.get(label, label): label for label in (*FIELD[twin.legacy], "le")}
        for suffix in suffixes(kinds[twin.name]):
            expected: defaultdict[tuple[tuple[str, str], ...], float] = defaultdict(float)
            for labels, value in shown[f"{names.METRIC_PREFIX}{twin.name}{suffix}"].items():
                reduced = sorted((kept[label], text) for label, text in labels if label in kept)
                expected[tuple(reduced)] += value
            if not expected or shown[twin.legacy + suffix] != pytest.approx(dict(expected)):
                wrong.append(twin.legacy + suffix)
    return wrong


def test_names_and_labels_are_the_fields() -> None:
    assert {twin.legacy: twin.shown_labels for twin in TWINS} == FIELD
    assert len(TWINS) == len(FIELD)


def test_every_twin_shows_the_series_of_its_metric(app: App) -> None:
    assert mistakes(app) == []


def test_some_series_by_hand(app: App) -> None:
    shown = page(app)
    labels = (("model_name", "n"), ("target_model_name", "served"))
    assert shown["inference_objective_running_requests"] == {
        (("model_name", "n"),): 1,
        (("model_name", "m"),): 0,
    }
    assert shown["inference_objective_request_total"][(*labels[:1], ("priority", "-10"), *labels[1:])] == 6
    assert shown["inference_objective_request_duration_seconds_count"][labels] == 8
    assert shown["inference_pool_ready_pods"][(("name", "p"),)] == 2
    assert set(dict(next(iter(shown["inference_extension_scheduler_attempts_total"])))) == {
        "status",
        "target_model_name",
        "pod_name",
        "namespace",
        "port",
    }


@pytest.mark.parametrize(
    "fault",
    [
        lambda twin, made: legacy_metrics._empty(twin, made),
        lambda twin, made: real(twin._replace(labels=None), made),
        lambda twin, made: real(twin._replace(renamed={}), made),
        lambda twin, made: last_wins(twin, made),
    ],
    ids=["nothing", "all labels", "not renamed", "not summed"],
)
def test_planted_faults_are_noticed(
    fault: Callable[..., Any], app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy_metrics, "_twin_of", fault)
    assert mistakes(app)


real = legacy_metrics._twin_of


def last_wins(twin: Any, made: Any) -> Any:
    metric = real(twin, made)
    metric.samples = [sample._replace(value=sample.value / 2) for sample in metric.samples]
    return metric


def test_without_the_flag_there_are_none(app: App) -> None:
    plain = page(runtime.picker(1))
    assert not [name for name in plain if not name.startswith(names.METRIC_PREFIX)]
    assert len(page(app)) > len(plain)


def test_nothing_is_counted_a_second_time(app: App) -> None:
    before = page(app)
    assert page(app) == before


def test_the_reference_names_every_twin() -> None:
    text = legacy_metrics.reference()
    for twin in TWINS:
        assert f"| `{twin.legacy}` |" in text
        assert text.count(f"| `{twin.name}` |") == 1
