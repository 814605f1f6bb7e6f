"""Metrics: the table against the field's names, and what each row is fed with."""

import json
import math
import time
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from epp.director import TIMED_EVERY, Prepared
from epp.errors import NeedFailed, NoEndpoints
from epp.http2.codes import ErrorCode
from epp.http2.errors import ConnectionFault, StreamFault
from epp.payload.records import RawRequest, Usage
from epp.payload.render import RenderNeed
from epp.pool.metrics_page import EngineSample
from epp.runtime import metrics as metrics_module
from epp.runtime.app import App
from epp.runtime.metrics import Bounded, Metrics
from epp.runtime.metrics_table import LABEL_SETS, TABLE, reference
from epp.runtime.stream import Stream
from epp.scheduling.inflight import InflightLoadProducer
from epp.scheduling.records import (
    PREFIX_MATCH,
    AnswerHeaders,
    Cause,
    Ended,
    FactKey,
    FirstToken,
    Gaps,
    Placement,
    PlannedMatch,
)
from tests.data.runtime import picker as runtime

MODEL = ("model_name", "target_model_name", "fairness_id", "priority")
PLUGIN = ("plugin_name", "plugin_type")
INFLIGHT = ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority")

# The field's list of its picker's metrics, as far as what they count exists here: type and labels.
FIELD: dict[str, tuple[str, tuple[str, ...]]] = {
    "request_total": ("counter", MODEL),
    "request_error_total": ("counter", (*MODEL, "error_code")),
    "request_duration_seconds": ("histogram", MODEL),
    "request_size_bytes": ("histogram", MODEL),
    "response_size_bytes": ("histogram", MODEL),
    "request_input_tokens": ("histogram", MODEL),
    "request_output_tokens": ("histogram", MODEL),
    "request_cached_tokens": ("histogram", MODEL),
    "request_running": ("gauge", MODEL),
    "request_ntpot_seconds": ("histogram", MODEL),
    "request_ttft_seconds": ("histogram", (*MODEL, "streaming")),
    "request_streaming_tpot_seconds": ("histogram", MODEL),
    "request_streaming_itl_seconds": ("histogram", MODEL),
    "average_kv_cache_utilization": ("gauge", ("name",)),
    "average_queue_size": ("gauge", ("name",)),
    "average_running_requests": ("gauge", ("name",)),
    "std_dev_kv_cache_utilization": ("gauge", ("name",)),
    "std_dev_queue_size": ("gauge", ("name",)),
    "std_dev_running_requests": ("gauge", ("name",)),
    "ready_endpoints": ("gauge", ("name",)),
    "per_endpoint_queue_size": ("gauge", ("name", "model_server_endpoint")),
    "scheduler_e2e_duration_seconds": ("histogram", ()),
    "scheduler_attempts_total": (
        "counter",
        ("status", "target_model_name", "endpoint_name", "namespace", "port"),
    ),
    "plugin_duration_seconds": ("histogram", ("extension_point", "plugin_type", "plugin_name")),
    "request_processing_duration_seconds": ("histogram", ()),
    "response_processing_duration_seconds": ("histogram", ()),
    "info": ("gauge", ("commit", "build_ref")),
    "model_rewrite_decisions_total": ("counter", ("model_rewrite_name", "model_name", "target_model")),
    "datalayer_poll_errors_total": ("counter", ("source_type",)),
    "datalayer_extract_errors_total": ("counter", ("source_type", "extractor_type")),
    "prefix_indexer_size": ("gauge", PLUGIN),
    "prefix_indexer_hit_ratio": ("histogram", PLUGIN),
    "prefix_indexer_hit_bytes": ("histogram", PLUGIN),
    "encoder_cache_queries_total": ("counter", ("plugin_type", "plugin_name", "modality")),
    "encoder_cache_hits_total": ("counter", ("plugin_type", "plugin_name", "pod", "modality")),
    "encoder_cache_hit_ratio": ("histogram", ("plugin_type", "plugin_name")),
    "inflight_requests": ("gauge", INFLIGHT),
    "inflight_tokens": ("gauge", INFLIGHT),
    "flow_control_pool_saturation": ("gauge", ("inference_pool", "stage")),
    "flow_control_stale_endpoints": ("gauge", ("detector",)),
    "extproc_streams_inflight": ("gauge", ()),
    "extproc_streams_total": ("counter", ("code",)),
    "extproc_stream_duration_seconds": ("histogram", ()),
}
OURS = {
    "extproc_held_bytes",
    "extproc_dropped_messages_total",
    "extproc_http2_errors_total",
    "plugin_failures_total",
    "request_needs_failed_total",
    "ledger_overdrafts_total",
    "served_elsewhere_total",
    "config_discovery_errors_total",
    "config_reload_errors_total",
    "config_last_reload_successful",
}
# First, last and number of buckets, from the field's list; its two 32778 are 32768 here.
BUCKETS = {
    "request_duration_seconds": (0.005, 3600, 35),
    "extproc_stream_duration_seconds": (0.005, 3600, 35),
    "request_ttft_seconds": (0.005, 120, 24),
    "request_streaming_tpot_seconds": (0.0005, 2, 19),
    "request_streaming_itl_seconds": (0.001, 2, 15),
    "response_processing_duration_seconds": (0.0001, 5, 15),
    "encoder_cache_hit_ratio": (0, 1, 11),
    "request_ntpot_seconds": (0.001, 10, 13),
    "request_size_bytes": (64, 2**30, 25),
    "response_size_bytes": (1, 65536, 15),
    "request_input_tokens": (1, 1048576, 19),
    "request_output_tokens": (1, 8192, 12),
    "request_cached_tokens": (1, 1048576, 19),
    "scheduler_e2e_duration_seconds": (0.0001, 0.1, 10),
    "plugin_duration_seconds": (0.0001, 0.1, 10),
    "request_processing_duration_seconds": (0.0005, 10, 16),
    "prefix_indexer_hit_ratio": (0, 1, 11),
    "prefix_indexer_hit_bytes": (0, 65536, 14),
}


# fmt: off
EVERY_BUCKET: dict[str, tuple[float, ...]] = {
    "request_duration_seconds": (
        0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60,
        120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600,
    ),
    "request_ttft_seconds": (
        0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60,
        120,
    ),
    "request_streaming_tpot_seconds": (
        0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8,
        1, 2,
    ),
    "request_streaming_itl_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2,
    ),
    "request_ntpot_seconds": (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
    "scheduler_e2e_duration_seconds": (
        0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
    ),
    "request_processing_duration_seconds": (
        0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
    ),
    "request_output_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "prefix_indexer_hit_bytes": (
        0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536,
    ),
    "prefix_indexer_hit_ratio": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
}
# fmt: on


def test_names_types_and_labels_are_the_fields() -> None:
    ours = {row.name: (row.kind, row.labels) for row in TABLE}
    assert {name: row for name, row in ours.items() if name not in OURS} == FIELD
    assert ours.keys() - FIELD.keys() == OURS
    assert len(ours) == len(TABLE)


def test_buckets_are_the_fields_without_its_slips() -> None:
    found = {
        row.name: (row.buckets[0], row.buckets[-1], len(row.buckets))
        for row in TABLE
        if row.kind == "histogram"
    }
    assert found == BUCKETS
    lists = {row.name: row.buckets for row in TABLE}
    assert {name: lists[name] for name in EVERY_BUCKET} == EVERY_BUCKET
    every = [bound for row in TABLE for bound in row.buckets]
    assert 32778 not in every
    assert all(list(row.buckets) == sorted(set(row.buckets)) for row in TABLE)
    assert 32768 in next(row.buckets for row in TABLE if row.name == "request_input_tokens")


def test_the_reference_has_a_row_for_every_metric() -> None:
    text = reference()
    for row in TABLE:
        assert f"| `{row.name}` | {row.kind} |" in text
        assert row.help in text


# -- one request ------------------------------------------------------------------------------------


class Run:
    """Requests through a real director with the real recorder, at chosen times."""

    def __init__(self, **options: Any) -> None:
        self.app: App = runtime.picker(2, **options)
        self.now = 100.0

    def prepare(self, body: bytes, **headers: str) -> Prepared:
        named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        raw = RawRequest("r-1", "POST", "/v1/chat/completions", named, body)
        return self.app.director.prepare(raw, self.now)

    def place(self, body: bytes = b"", **headers: str) -> Placement:
        placement = self.app.director.submit(self.prepare(body or runtime.chat(), **headers), self.now)
        assert isinstance(placement, Placement)
        return placement

    def tell(self, placement: Placement, at: float, *facts: Any) -> None:
        for fact in facts:
            self.app.director.observe(placement.ticket, fact, self.now + at)

    def whole(
        self, body: bytes = b"", *, status: int = 200, end: Ended | None = None, **headers: str
    ) -> None:
        """A plain request from its arrival to its end."""
        placement = self.place(body, **headers)
        self.tell(placement, 0.1, AnswerHeaders(status, None, False))
        self.tell(placement, 0.2, FirstToken(), end or Ended(Cause.NATURAL, Usage(10, 5), 1, 100))

    def sample(self, name: str, /, **labels: str) -> float:
        value: float = runtime.sample(self.app, name, **labels)
        return value


def test_one_streamed_request_from_placement_to_end() -> None:
    run = Run()
    body = runtime.chat("x" * 4000)
    labels = {
        "model_name": "m",
        "target_model_name": "t",
        "fairness_id": "team",
        "priority": "0",
    }
    placement = run.place(body, x_llm_d_model_name_rewrite="t", x_llm_d_inference_fairness_id="team")
    chosen = placement.serving.endpoints[0]
    assert run.sample("request_total", **labels) == 1
    assert run.sample("request_running", **labels) == 1
    assert run.sample("request_size_bytes_sum", **labels) == len(body)
    attempt = {"status": "success", "target_model_name": "t", "endpoint_name": chosen.name, "port": "8000"}
    assert run.sample("scheduler_attempts_total", **attempt) == 1
    run.tell(placement, 0.1, AnswerHeaders(200, None, True))
    run.tell(placement, 0.5, FirstToken())
    gaps = Gaps((0, 0, 99, *[0] * 12, 1), 2.0)
    run.tell(placement, 2.5, Ended(Cause.NATURAL, Usage(1000, 101, 64), 101, 5000, gaps))
    assert run.sample("request_running", **labels) == 0
    assert run.sample("request_ttft_seconds_sum", **labels, streaming="true") == pytest.approx(0.5)
    assert run.sample("request_ttft_seconds_count", **labels, streaming="false") == 0
    for name, total in (
        ("request_duration_seconds", 2.5),
        ("response_size_bytes", 5000),
        ("request_input_tokens", 1000),
        ("request_output_tokens", 101),
        ("request_cached_tokens", 64),
        ("request_ntpot_seconds", 2.5 / 101),
        ("request_streaming_tpot_seconds", 2.0 / 100),
    ):
        assert run.sample(f"{name}_count", **labels) == 1, name
        assert run.sample(f"{name}_sum", **labels) == pytest.approx(total), name
    assert run.sample("request_streaming_itl_seconds_count", **labels) == 100
    assert run.sample("request_streaming_itl_seconds_sum", **labels) == pytest.approx(2.0)
    assert run.sample("request_streaming_itl_seconds_bucket", **labels, le="0.005") == 0
    assert run.sample("request_streaming_itl_seconds_bucket", **labels, le="0.01") == 99
    assert run.sample("request_error_total") == 0


def test_a_plain_answer_has_no_time_between_tokens() -> None:
    run = Run()
    run.whole(end=Ended(Cause.NATURAL, Usage(10, 5), 1, 100, Gaps((1,) * 16, 8.0)))
    assert run.sample("request_ttft_seconds_sum", streaming="false") == pytest.approx(0.2)
    assert run.sample("request_streaming_tpot_seconds_count") == 0
    assert run.sample("request_streaming_itl_seconds_count") == 0
    assert run.sample("request_cached_tokens_count") == 0


@pytest.mark.parametrize(("tokens", "per_token", "between_tokens"), [(0, 0, 0), (1, 1, 0), (2, 1, 1)])
def test_times_per_token_need_tokens(tokens: int, per_token: int, between_tokens: int) -> None:
    run = Run()
    placement = run.place()
    run.tell(placement, 0.1, AnswerHeaders(200, None, True), FirstToken())
    run.tell(placement, 1.0, Ended(Cause.NATURAL, Usage(10, tokens, 0), 1, 100))
    assert run.sample("request_cached_tokens_count") == 1, "none is a number"
    assert run.sample("request_ntpot_seconds_count") == per_token
    assert run.sample("request_streaming_tpot_seconds_count") == between_tokens
    assert run.sample("request_output_tokens_count") == 1


def test_a_stream_of_an_error_has_no_time_between_tokens() -> None:
    run = Run()
    placement = run.place()
    run.tell(placement, 0.1, AnswerHeaders(500, None, True), FirstToken())
    run.tell(placement, 1.0, Ended(Cause.NATURAL, None, 1, 100, Gaps((1,) * 16, 8.0)))
    assert run.sample("request_streaming_itl_seconds_count") == 0


def test_an_answer_without_usage_tells_no_tokens() -> None:
    run = Run()
    run.whole(end=Ended(Cause.NATURAL, None, 1, 100))
    assert run.sample("request_duration_seconds_count") == 1
    assert run.sample("request_input_tokens_count") == run.sample("request_ntpot_seconds_count") == 0


def test_an_engines_error_is_counted_and_is_no_first_token() -> None:
    run = Run()
    run.whole(status=500, end=Ended(Cause.NATURAL, None, 1, 100))
    assert run.sample("request_error_total", error_code="ModelServerError") == 1
    assert run.sample("request_ttft_seconds_count") == 0
    assert run.sample("request_running") == 0


@pytest.mark.parametrize("cause", [Cause.CLIENT_DISCONNECT, Cause.ERROR])
def test_an_aborted_request_is_an_error_and_no_duration(cause: Cause) -> None:
    run = Run()
    placement = run.place()
    run.tell(placement, 1.0, Ended(cause, None, 0, 0))
    assert run.sample("request_error_total", error_code=str(cause)) == 1
    assert run.sample("request_duration_seconds_count") == 0
    assert run.sample("request_running") == 0


def test_refusals_are_counted_by_code() -> None:
    run = Run()
    prepared = run.prepare(runtime.chat(), x_llm_d_model_name_rewrite="t")
    metrics = run.app.metrics
    metrics.refused(prepared, NoEndpoints("none"))
    metrics.refused(None, NoEndpoints("none"))
    assert run.sample("request_error_total", error_code="ServiceUnavailable", model_name="m") == 1
    assert run.sample("request_error_total", error_code="ServiceUnavailable", model_name="") == 1
    assert run.sample("scheduler_attempts_total", status="failure", target_model_name="t") == 1


def test_the_prefix_match_of_the_chosen_endpoint() -> None:
    run = Run()
    body = runtime.chat("x" * 4000)
    run.whole(body)
    run.whole(body)
    assert run.sample("prefix_indexer_hit_ratio_count") == 2
    assert run.sample("prefix_indexer_hit_ratio_sum") == 1.0, "nothing, then everything"
    assert run.sample("prefix_indexer_hit_bytes_sum") == pytest.approx(4000, abs=256)
    assert run.sample("prefix_indexer_hit_ratio_count", plugin_type="approx-prefix-cache-producer") == 2


BY_LOAD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: active-request-scorer
- type: prefix-cache-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: active-request-scorer
  - pluginRef: prefix-cache-scorer
  - pluginRef: max-score-picker
"""


def test_facts_of_another_kind_are_no_prefix_match() -> None:
    run = Run(config=BY_LOAD)
    run.whole(runtime.chat("x" * 4000))
    assert run.sample("request_total") == 1
    assert run.sample("prefix_indexer_hit_ratio_count") == 1
    assert names_in(run, "prefix_indexer_hit_ratio_count", "plugin_name") == {"approx-prefix-cache-producer"}
    assert len(run.app.recorder.decisions) == 1


def test_where_prompts_are_planned_to_go_is_no_match() -> None:
    run = Run()
    prepared, ticket, _ = run.app.director._tickets[run.place().ticket]
    planned = PlannedMatch(np.ones(16, np.int64), 4, 64, 256, 0)
    run.app.metrics.placed(prepared, replace(ticket, facts={FactKey(PREFIX_MATCH, "burst"): planned}))
    assert run.sample("request_total") == 2
    assert run.sample("prefix_indexer_hit_ratio_count") == 1


EVERY_POINT = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: agent-identity
- type: probabilistic-admitter
- type: inflight-load-producer
- type: request-attribute-reporter
  parameters: {attributes: [{key: {name: cost}, expression: usage.prompt_tokens}]}
- {name: sticky, type: active-request-scorer}
- type: decode-filter
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: sticky, weight: 2}
  - {pluginRef: max-score-picker}
"""


def timed(run: Run) -> dict[tuple[str, str, str], float]:
    """How often each plugin was timed, by extension point, type and name."""
    return {
        (series.labels["extension_point"], series.labels["plugin_type"], series.labels["plugin_name"]): (
            series.value
        )
        for series in series_of(run.app.metrics, "plugin_duration_seconds_count")
    }


def test_plugins_of_every_extension_point_are_timed_on_sampled_requests_only() -> None:
    run = Run(config=EVERY_POINT)
    for _ in range(TIMED_EVERY + 1):
        run.whole()
    scored, counted = "active-request-scorer", "inflight-load-producer"
    expected = {
        ("RequestHeader", "agent-identity", "agent-identity"): 2,
        ("DataProducer", counted, counted): 2,
        ("Admission", "probabilistic-admitter", "probabilistic-admitter"): 2,
        ("ProfileHandler", "single-profile-handler", "single-profile-handler"): 2,
        ("Filter", "decode-filter", "decode-filter"): 2,
        ("Scorer", scored, "sticky"): 2,
        ("Picker", "max-score-picker", "max-score-picker"): 2,
        ("PreRequest", counted, counted): 2,
    }
    found = timed(run)
    assert {key: found.get(key) for key in expected} == expected
    assert run.sample("plugin_duration_seconds_sum") > 0


def test_a_plugin_that_fails_on_a_sampled_request_is_called_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InflightLoadProducer, "produce", lambda self, ctx: 1 / 0)
    run = Run(config=EVERY_POINT)
    run.whole()
    assert run.sample("plugin_failures_total", plugin_class="InflightLoadProducer") == 1


def test_priorities_are_labels() -> None:
    run = Run(config=RULES)
    run.whole(x_llm_d_inference_objective="interactive")
    run.whole(x_llm_d_inference_objective="batch")
    run.whole()
    for priority, seen in (("10", 1), ("-10", 1), ("0", 1)):
        assert run.sample("request_total", priority=priority) == seen
    assert run.sample("request_duration_seconds_count", priority="-10") == 1


RULES = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
objectives: [{name: interactive, priority: 10}, {name: batch, priority: -10}]
modelRewrites:
- name: canary
  rules:
  - matches: [{model: {type: Exact, value: m}}]
    targets: [{modelRewrite: m}]
  - matches: [{model: {type: Exact, value: n}}]
    targets: [{modelRewrite: served}]
"""


def asked(model: str) -> bytes:
    return runtime.chat().replace(b'"m"', b'"%s"' % model.encode())


def test_decisions_of_rewrite_rules_are_counted_those_for_the_same_model_too() -> None:
    app = runtime.picker(config=RULES)
    for model in ("m", "n", "n", "other-model"):
        raw = RawRequest("r", "POST", "/v1/chat/completions", (), asked(model))
        app.router.route(raw, lambda outcome: None)
    for model, target, seen in (("m", "m", 1), ("n", "served", 2)):
        labels = {"model_rewrite_name": "canary", "model_name": model, "target_model": target}
        assert runtime.sample(app, "model_rewrite_decisions_total", **labels) == seen
    assert runtime.sample(app, "model_rewrite_decisions_total") == 3


def test_models_in_decisions_of_rules_are_bounded() -> None:
    app = runtime.picker(config=EVERY_ROW)
    app.metrics._models.limit = 1
    for model in ("first", "second", "third"):
        raw = RawRequest("r", "POST", "/v1/chat/completions", (), asked(model))
        app.router.route(raw, lambda outcome: None)
    for model, seen in (("first", 1), ("other", 2)):
        labels = {"model_name": model, "target_model": "served"}
        assert runtime.sample(app, "model_rewrite_decisions_total", **labels) == seen


def test_models_that_rules_name_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "LABEL_SETS", 5)
    run = Run(config=RULES)
    for number in range(20):
        run.whole(asked(f"model-{number}"), x_llm_d_inference_fairness_id=f"f{number}")
    run.whole(asked("n"), x_llm_d_inference_fairness_id="late")
    assert run.sample("request_total", model_name="n", target_model_name="served", fairness_id="other") == 1
    assert run.sample("request_total", model_name="other") == 15


def test_a_request_ends_in_the_series_it_began_in() -> None:
    """Though a rule names its model in between, and another model is named no more."""
    run = Run()
    run.app.metrics._models.limit = 1
    run.app.metrics.pin({"was"})
    run.whole(asked("first"))
    began = [run.place(asked("was")), run.place(asked("will"))]
    run.app.metrics.pin({"will"})
    later = run.place(asked("will"))
    running = {"other": 1.0, "was": 1.0, "will": 1.0, "first": 0.0}
    assert {each: run.sample("request_running", model_name=each) for each in running} == running
    run.tell(began[1], 0.5, FirstToken())
    assert run.sample("request_ttft_seconds_count", model_name="other") == 1
    for placement in (*began, later):
        run.tell(placement, 1.0, Ended(Cause.NATURAL, None, 1, 1))
    assert {series.value for series in series_of(run.app.metrics, "request_running")} == {0.0}
    assert run.app.metrics._placed == {}


@pytest.mark.parametrize("fault", ["unpinned", "limit ignored", "pinned counted"])
def test_a_fault_of_the_bounds_is_noticed(fault: str) -> None:
    bounded = Bounded(limit=1, pinned=frozenset() if fault == "unpinned" else frozenset({"p"}))
    if fault == "limit ignored":
        bounded.limit = 10**6
    if fault == "pinned counted":
        bounded.pinned, bounded._seen = frozenset(), {"p"}
    assert [bounded(value) for value in ("a", "p", "b")] != ["a", "p", "other"]


def test_times_of_the_choice() -> None:
    run = Run()
    run.app.metrics.decided(0.02, 0.0005)
    assert run.sample("scheduler_e2e_duration_seconds_sum") == pytest.approx(0.0005)
    assert run.sample("request_processing_duration_seconds_sum") == pytest.approx(0.0205)


def test_an_answer_from_another_endpoint_is_counted_by_where_it_is() -> None:
    run = Run()
    placement = run.place()
    chosen = placement.serving.endpoints[0].host_port
    other = next(each.host_port for _, each in run.app.store.roster if each.host_port != chosen)
    run.tell(placement, 0.1, AnswerHeaders(200, chosen, False))
    assert run.sample("served_elsewhere_total") == 0
    run.tell(placement, 0.1, AnswerHeaders(200, other, False))
    run.tell(placement, 0.1, AnswerHeaders(200, "192.0.2.1:1", False))
    assert run.sample("served_elsewhere_total", where="pool") == 1
    assert run.sample("served_elsewhere_total", where="outside") == 1


# -- bounds -----------------------------------------------------------------------------------------


def test_values_beyond_the_limit_become_other() -> None:
    bounded = Bounded(limit=2)
    assert [bounded(value) for value in ("a", "b", "c", "a", "d", "b")] == [
        "a",
        "b",
        "other",
        "a",
        "other",
        "b",
    ]


def test_labels_from_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "LABEL_SETS", 20)
    run = Run()
    running = [
        run.place(
            runtime.chat().replace(b'"m"', b'"m%d"' % (number % 7)),
            x_llm_d_inference_fairness_id=f"f{number}",
        )
        for number in range(60)
    ]
    assert run.sample("request_total") == 60
    assert run.sample("request_total", model_name="other", fairness_id="other") == 40
    for placement in running:
        run.tell(placement, 1.0, Ended(Cause.NATURAL, None, 1, 1))
    assert {series.value for series in series_of(run.app.metrics, "request_running")} == {0.0}
    assert len(series_of(run.app.metrics, "request_running")) == 21


def test_a_hundred_thousand_names_make_no_more_series_than_the_limit() -> None:
    metrics = Metrics("pool", ("", ""))
    prepared = Run().prepare(runtime.chat())
    error = NoEndpoints("none")
    for number in range(3000):
        request = type(prepared.request)(
            api=prepared.request.api, model=f"m{number}", target_model=f"m{number}"
        )
        metrics.refused(
            type(prepared)(
                request_id="",
                request=request,
                flow=f"f{number}",
                subset=None,
                body=None,
                remove_headers=(),
                body_bytes=0,
                received_at=0.0,
            ),
            error,
        )
    assert len(series_of(metrics, "request_error_total")) <= LABEL_SETS + 1
    assert len(metrics._known) == LABEL_SETS, "what clients call things fills no memory"
    assert (
        metrics.registry.get_sample_value(
            "llm_d_epp_request_error_total",
            {**dict.fromkeys(MODEL[:3], "other"), "priority": "0", "error_code": "ServiceUnavailable"},
        )
        == 3000 - LABEL_SETS
    )


def series_of(metrics: Metrics, name: str) -> list[Any]:
    wanted = f"llm_d_epp_{name}"
    return [
        series for family in metrics.registry.collect() for series in family.samples if series.name == wanted
    ]


# -- the pool ---------------------------------------------------------------------------------------


def renew(run: Run) -> None:
    run.app.renew_gauges()


def test_the_gauges_of_the_pool() -> None:
    run = Run(pool_name="p")
    store = run.app.store
    store.sampled(0, EngineSample(waiting=1, running=4, kv_usage=0.5), 0.0)
    store.sampled(1, EngineSample(waiting=0, running=0, kv_usage=0.1), 0.0)
    run.app.budget.take(77)
    renew(run)
    for name, value in (
        ("average_queue_size", 0.5),
        ("average_running_requests", 2.0),
        ("average_kv_cache_utilization", 0.3),
        ("std_dev_queue_size", 0.5),
        ("std_dev_running_requests", 2.0),
        ("std_dev_kv_cache_utilization", 0.2),
        ("ready_endpoints", 2),
    ):
        assert run.sample(name, name="p") == pytest.approx(value), name
    assert run.sample("per_endpoint_queue_size", name="p", model_server_endpoint="pod-1") == 1
    assert run.sample("extproc_held_bytes") == 77
    assert run.sample("ledger_overdrafts_total") == 0


def test_a_pool_without_fresh_endpoints_publishes_zero_not_nan() -> None:
    run = Run()
    run.app.store.refresh(1000.0, 0.2)
    renew(run)
    for name in ("average_queue_size", "std_dev_queue_size", "average_kv_cache_utilization"):
        assert run.sample(name) == 0.0
    run.app.set_endpoints([])
    renew(run)
    assert run.sample("ready_endpoints") == 0
    text = generate_latest(run.app.metrics.registry).decode()
    assert not [s for f in text_string_to_metric_families(text) for s in f.samples if math.isnan(s.value)]


PARTLY_TOLD = (EngineSample(waiting=4, kv_usage=0.4), EngineSample(running=6), EngineSample(waiting=2))


def gauges(run: Run) -> dict[str, float]:
    return {
        f"{kind}_{name}": run.sample(f"{kind}_{name}")
        for kind in ("average", "std_dev")
        for name in ("queue_size", "kv_cache_utilization")
    }


def partly_told() -> Run:
    run = Run()
    run.app.set_endpoints([runtime.endpoint(number) for number in range(3, 3 + len(PARTLY_TOLD))])
    for (slot, _), sample in zip(run.app.store.roster, PARTLY_TOLD, strict=True):
        run.app.store.sampled(slot, sample, 0.0)
    return run


TOLD = {
    "average_queue_size": 3.0,
    "std_dev_queue_size": 1.0,
    "average_kv_cache_utilization": 0.4,
    "std_dev_kv_cache_utilization": 0.0,
}


def test_what_an_engine_does_not_tell_is_no_zero_in_the_mean() -> None:
    run = partly_told()
    renew(run)
    assert gauges(run) == pytest.approx(TOLD)
    assert names_in(run, "per_endpoint_queue_size", "model_server_endpoint") == {"pod-3", "pod-5"}


@pytest.mark.parametrize("mask", ["waiting_known", "kv_known"])
def test_a_mask_that_says_all_is_told_is_noticed(mask: str) -> None:
    run = partly_told()
    getattr(run.app.store.view, mask)[:] = True
    renew(run)
    wrong = {name for name, value in gauges(run).items() if value != pytest.approx(TOLD[name])}
    affected = "queue_size" if mask == "waiting_known" else "kv_cache_utilization"
    assert wrong == {f"average_{affected}", f"std_dev_{affected}"}


def test_figures_that_no_engine_tells_are_published_as_zero() -> None:
    run = partly_told()
    for (slot, _), sample in zip(run.app.store.roster, PARTLY_TOLD, strict=True):
        run.app.store.sampled(slot, sample, 0.0)
    run.app.set_endpoints([runtime.endpoint(9)])
    ((slot, _),) = run.app.store.roster
    run.app.store.sampled(slot, EngineSample(running=6), 0.0)
    renew(run)
    assert set(gauges(run).values()) == {0.0}
    assert run.sample("average_running_requests") == 6
    assert len(series_of(run.app.metrics, "average_queue_size")) == 1
    assert series_of(run.app.metrics, "per_endpoint_queue_size") == []


def test_what_is_in_flight_to_each_endpoint_and_that_it_ends() -> None:
    run = Run()
    placement = run.place(runtime.chat("x" * 4000))
    chosen = placement.serving.endpoints[0].name
    renew(run)
    assert run.sample("inflight_requests", endpoint_name=chosen, producer_name="inflight-ledger") == 1
    assert run.sample("inflight_tokens", endpoint_name=chosen) > 900
    assert run.sample("inflight_requests") == 1
    run.tell(placement, 1.0, Ended(Cause.NATURAL, None, 1, 1))
    renew(run)
    assert run.sample("inflight_requests") == run.sample("inflight_tokens") == 0
    assert len(series_of(run.app.metrics, "inflight_requests")) == 2


def test_series_of_an_endpoint_go_with_it_but_not_before_its_last_request() -> None:
    run = Run()
    placement = run.place()
    gone = placement.serving.endpoints[0]
    others = [each for _, each in run.app.store.roster if each is not gone]
    renew(run)
    run.app.set_endpoints(others)
    renew(run)
    assert run.sample("inflight_requests", endpoint_name=gone.name) == 1
    assert names_in(run, "per_endpoint_queue_size", "model_server_endpoint") == {each.name for each in others}
    assert run.sample("scheduler_attempts_total", endpoint_name=gone.name) == 1
    run.tell(placement, 1.0, Ended(Cause.NATURAL, None, 1, 1))
    run.app.store.refresh(run.now, 0.2)
    renew(run)
    assert names_in(run, "inflight_requests", "endpoint_name") == {each.name for each in others}
    assert names_in(run, "inflight_tokens", "endpoint_name") == {each.name for each in others}
    assert gone.name not in names_in(run, "scheduler_attempts_total", "endpoint_name")


def names_in(run: Run, name: str, label: str) -> set[str]:
    return {series.labels[label] for series in series_of(run.app.metrics, name)}


def test_a_recreated_pod_of_the_same_name_shares_its_series() -> None:
    """The old one drains while the new one serves: one series, the sum; none is removed under the other."""
    run = Run()
    run.app.set_endpoints([runtime.endpoint(1, "old")])
    first = run.place()
    run.app.set_endpoints([runtime.endpoint(1, "new")])
    second, third = run.place(), run.place()
    (slot, _), *_ = run.app.store.roster
    run.app.store.sampled(slot, EngineSample(waiting=5), 0.0)
    renew(run)
    assert run.sample("inflight_requests", endpoint_name="pod-1") == 3
    assert run.sample("per_endpoint_queue_size", model_server_endpoint="pod-1") == 5
    run.tell(first, 1.0, Ended(Cause.NATURAL, None, 1, 1))
    run.app.store.refresh(run.now, 0.2)
    renew(run)
    assert run.sample("inflight_requests", endpoint_name="pod-1") == 2
    assert run.sample("scheduler_attempts_total", endpoint_name="pod-1") == 3
    run.place()
    renew(run)
    assert run.sample("scheduler_attempts_total", endpoint_name="pod-1") == 4
    for placement in (second, third):
        run.tell(placement, 1.0, Ended(Cause.NATURAL, None, 1, 1))
    renew(run)
    assert run.sample("inflight_requests", endpoint_name="pod-1") == 1


def test_counters_kept_elsewhere_are_followed() -> None:
    run = Run()
    run.app.ledger.strict = False
    for _ in range(2):
        run.app.ledger.release(0, 0)
        renew(run)
    assert run.sample("ledger_overdrafts_total") == 2
    metrics = run.app.metrics
    for total in (3, 3, 7):
        metrics.total("datalayer_poll_errors_total", total, "metrics-data-source")
    assert run.sample("datalayer_poll_errors_total", source_type="metrics-data-source") == 7


EVERY_ROW = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: mm-embeddings-cache-producer}, {type: prefix-cache-scorer}, {type: max-score-picker}]
schedulingProfiles:
- {name: default, plugins: [{pluginRef: prefix-cache-scorer}, {pluginRef: max-score-picker}]}
modelRewrites: [{name: any, rules: [{targets: [{modelRewrite: served}]}]}]
"""


def with_picture() -> bytes:
    image = {"type": "image_url", "image_url": {"url": "http://pictures.example/1.png"}}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()


def answer_in_a_timed_stream(app: App) -> None:
    """A whole exchange through the stream whose turn it is to be timed."""
    app.streams = TIMED_EVERY - 1
    stream = app.stream(lambda: None)
    for message in (
        runtime.request_headers(),
        *runtime.request_body(runtime.chat()),
        runtime.response_headers(),
        runtime.response_body(b"{}"),
    ):
        stream.received(message)
    stream.closed()


def test_the_messages_of_an_answer_are_timed_in_one_stream_of_many() -> None:
    app = runtime.picker()
    kinds = [type(app.stream(lambda: None)) for _ in range(2 * TIMED_EVERY)]
    assert [number for number, kind in enumerate(kinds, 1) if kind is not Stream] == [
        TIMED_EVERY,
        2 * TIMED_EVERY,
    ]
    began_s = time.perf_counter()
    answer_in_a_timed_stream(app)
    took_s = time.perf_counter() - began_s
    assert runtime.sample(app, "response_processing_duration_seconds_count") == 1
    assert 0 < runtime.sample(app, "response_processing_duration_seconds_sum") <= took_s
    app.streams = TIMED_EVERY - 1
    unanswered = app.stream(lambda: None)
    unanswered.received(runtime.request_headers())
    unanswered.closed()
    assert runtime.sample(app, "response_processing_duration_seconds_count") == 1
    assert runtime.left_over(app)["requests"] == 0


def test_time_spent_on_the_request_is_not_the_answers() -> None:
    app = runtime.picker()
    app.streams = TIMED_EVERY - 1
    stream: Any = app.stream(lambda: None)
    ticks = count()
    stream._timer = lambda: float(next(ticks))
    for message in (runtime.request_headers(), *runtime.request_body(runtime.chat())):
        stream.received(message)
    assert next(ticks) == 0
    for message in (runtime.response_headers(), runtime.response_body(b"{}")):
        stream.received(message)
    stream.closed()
    assert runtime.sample(app, "response_processing_duration_seconds_sum") == 2.0


def test_every_row_of_the_table_is_fed() -> None:
    """Whatever is not told by the requests above comes from here: no row stands there without a value."""
    run = Run(config=EVERY_ROW)
    run.whole(runtime.chat("x" * 4000), end=Ended(Cause.NATURAL, Usage(10, 5, 3), 1, 1))
    for _ in range(2):
        run.whole(with_picture())
    run.app.recorder.decided(run.prepare(runtime.chat()), 0.0, 0.1)
    run.tell(streamed := run.place(), 0.1, AnswerHeaders(200, "192.0.2.1:1", True))
    run.tell(streamed, 0.2, FirstToken())
    run.tell(streamed, 0.3, Ended(Cause.NATURAL, Usage(10, 5), 1, 1, Gaps((1,) * 16, 5.0)))
    run.app.scraper.counts.poll_errors["metrics-data-source"] = 1
    run.app.scraper.counts.extract_errors["metrics-data-source", "core-metrics-extractor"] = 1
    answer_in_a_timed_stream(run.app)
    run.whole(status=503)
    run.app.metrics.decided(0.1, 0.1)
    run.app.recorder.plugin_failed(run, RuntimeError("planted"))
    need = RenderNeed("http://render", b"{}", 5.0)
    for error in (NeedFailed("late", "planted"), RuntimeError("planted"), NeedFailed("late", "planted")):
        run.app.recorder.need_failed(need, error)
    assert run.sample("request_needs_failed_total", need="RenderNeed", reason="late") == 2
    assert run.sample("request_needs_failed_total", need="RenderNeed", reason="fault") == 1
    run.app.renew_gauges()
    run.app.discovery_failed("planted")
    counts = run.app.stream_counts()
    counts.opened()
    counts.closed("OK")
    run.app._http2_fault(StreamFault(ErrorCode.PROTOCOL_ERROR, "planted"))
    run.app._http2_fault(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "planted"))
    assert run.sample("extproc_http2_errors_total", scope="stream", code="PROTOCOL_ERROR") == 1
    assert run.sample("extproc_http2_errors_total", scope="connection", code="ENHANCE_YOUR_CALM") == 1
    counts.dropped(2)
    assert run.sample("extproc_dropped_messages_total") == 2
    for row in TABLE:
        suffix = "_count" if row.kind == "histogram" else ""
        series = series_of(run.app.metrics, row.name + suffix)
        assert series, row.name
        if row.kind == "histogram":
            assert sum(one.value for one in series) > 0, row.name
