"""What describes pool and plugins: saturation by stage, loads by flow, media, counters kept elsewhere."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from epp import names
from epp.director import TIMED_EVERY
from epp.kvcache.embeddings import EmbeddingsCacheProducer, EmbeddingsCounters
from epp.payload.records import RawRequest
from epp.pool.metrics_page import EngineSample
from epp.pool.records import Load, Mask, PoolView
from epp.runtime import gauges as gauges_module
from epp.runtime.app import App
from epp.scheduling.records import Cause, Ended, Placement
from tests.data.runtime import picker as runtime

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
COUNTED = "inflight-load-producer"
MEDIA = "mm-embeddings-cache-producer"


def set_roles(app: App, *roles: str | None) -> None:
    """Endpoints with these roles; None = no label."""
    app.set_endpoints(
        [
            msgspec.structs.replace(
                runtime.endpoint(number), labels={} if role is None else {names.ROLE_LABEL: role}
            )
            for number, role in enumerate(roles, 1)
        ]
    )
    for slot, member in app.store.roster:
        waiting = 5.0 * int(member.name[-1])
        app.store.sampled(slot, EngineSample(waiting=waiting, running=0, kv_usage=0.0, block_size=16), 0.0)


def levels(app: App) -> dict[str, float]:
    app.renew_gauges()
    return {
        series.labels["stage"]: series.value
        for family in app.metrics.registry.collect()
        for series in family.samples
        if series.name == "llm_d_epp_flow_control_pool_saturation"
    }


# -- saturation -------------------------------------------------------------------------------------

# Waiting is 5, 10, 15 ..., so that an endpoint alone is as full as its number says.
STAGES: list[tuple[tuple[str | None, ...], dict[str, float]]] = [
    ((None, None), {"decode": 1.5, "effective": 1.5}),
    (("prefill", "decode"), {"prefill": 1.0, "decode": 2.0, "effective": 2.0}),
    (("decode", "prefill"), {"decode": 1.0, "prefill": 2.0, "effective": 2.0}),
    (("prefill", None, "both"), {"prefill": 2.0, "decode": 2.5, "effective": 2.5}),
    (("prefill", "encode-prefill"), {"prefill": 1.5, "effective": 1.5}),
    (("encode", "decode"), {"decode": 2.0, "effective": 2.0}),
    (("encode",), {"effective": 1.0}),
    ((), {"effective": 1.0}),
]


@pytest.mark.parametrize(("roles", "expected"), STAGES)
def test_saturation_by_stage(roles: tuple[str | None, ...], expected: dict[str, float]) -> None:
    app = runtime.picker()
    set_roles(app, *roles)
    assert levels(app) == pytest.approx(expected)
    assert app.signals().saturation == pytest.approx(expected["effective"])


@pytest.mark.parametrize(
    "fault",
    [
        lambda self, detector, view, load, now: {"effective": 0.0},
        lambda self, detector, view, load, now: {
            "decode": detector.saturation(view, load, view.candidates, now),
            "effective": detector.saturation(view, load, view.candidates, now),
        },
        lambda self, detector, view, load, now: (
            {stage: detector.saturation(view, load, mask.of(view), now) for stage, mask in self._masks}
            | {"effective": detector.saturation(view, load, view.candidates, now)}
        ),
    ],
    ids=["constant", "stages not told apart", "effective over all"],
)
def test_planted_faults_of_the_stages_are_noticed(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges_module._Stages, "levels", fault)
    wrong = 0
    for roles, expected in STAGES:
        app = runtime.picker()
        set_roles(app, *roles)
        wrong += levels(app) != pytest.approx(expected)
    assert wrong


def test_a_stage_that_is_gone_has_no_series() -> None:
    app = runtime.picker()
    set_roles(app, "prefill", "decode")
    assert set(levels(app)) == {"prefill", "decode", "effective"}
    set_roles(app, None)
    assert set(levels(app)) == {"decode", "effective"}


def test_stale_endpoints_are_those_of_the_detector_in_use() -> None:
    app = runtime.picker(3)
    app.renew_gauges()
    labels = {"detector": "utilization-detector"}
    assert runtime.sample(app, "flow_control_stale_endpoints", **labels) == 0
    app.set_endpoints([runtime.endpoint(number) for number in (1, 2, 3, 4, 5)])
    app.renew_gauges()
    assert runtime.sample(app, "flow_control_stale_endpoints", **labels) == 2


def test_a_detector_that_looks_at_no_ages_has_no_stale_endpoints() -> None:
    config = f"""{HEAD}
plugins: [{{type: concurrency-detector}}]
flowControl: {{saturationDetector: {{pluginRef: concurrency-detector}}}}
"""
    app = runtime.picker(config=config)
    app.renew_gauges()
    names_shown = [family.name for family in app.metrics.registry.collect() if family.samples]
    assert "llm_d_epp_flow_control_stale_endpoints" not in names_shown
    assert "llm_d_epp_flow_control_pool_saturation" in names_shown


# -- loads ------------------------------------------------------------------------------------------


def place(app: App, body: bytes, **headers: str) -> Placement:
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    raw = RawRequest("r", "POST", "/v1/chat/completions", named, body)
    placement = app.director.submit(app.director.prepare(raw, 0.0), 0.0)
    assert isinstance(placement, Placement)
    return placement


def end(app: App, placement: Placement) -> None:
    app.director.observe(placement.ticket, Ended(Cause.NATURAL, None, 1, 1), 1.0)


def test_loads_of_a_producer_by_flow_and_priority_beside_the_ledgers() -> None:
    config = f"""{HEAD}
plugins: [{{type: {COUNTED}}}, {{type: active-request-scorer}}, {{type: max-score-picker}}]
schedulingProfiles:
- {{name: default, plugins: [{{pluginRef: active-request-scorer}}, {{pluginRef: max-score-picker}}]}}
objectives: [{{name: batch, priority: -1}}]
"""
    app = runtime.picker(2, config=config)
    body = runtime.chat("x" * 400)
    held = [
        place(app, body, x_llm_d_inference_fairness_id="a"),
        place(app, body, x_llm_d_inference_fairness_id="a", x_llm_d_inference_objective="batch"),
        place(app, body, x_llm_d_inference_fairness_id="b"),
    ]
    app.renew_gauges()
    for labels, count in (
        ({"fairness_id": "a", "priority": "0"}, 1),
        ({"fairness_id": "a", "priority": "-1"}, 1),
        ({"fairness_id": "b"}, 1),
        ({}, 3),
    ):
        assert runtime.sample(app, "inflight_requests", producer_name=COUNTED, **labels) == count
    assert runtime.sample(app, "inflight_tokens", producer_name=COUNTED) > 100
    assert runtime.sample(app, "inflight_requests", producer_name="inflight-ledger") == 3
    for placement in held:
        end(app, placement)
    app.renew_gauges()
    assert runtime.sample(app, "inflight_requests") == 0
    assert COUNTED not in {
        series.labels["producer_name"]
        for family in app.metrics.registry.collect()
        for series in family.samples
        if series.name == "llm_d_epp_inflight_requests"
    }


def test_endpoints_of_one_name_are_one_series_and_ports_tell_attempts_apart() -> None:
    app = runtime.picker(0, seed=7)  # draws decide between the twins, and both are to have requests
    twins = [
        msgspec.structs.replace(runtime.endpoint(number), name="pod", namespace=namespace, port=port)
        for number, namespace, port in ((1, "one", 8000), (2, "two", 8001))
    ]
    app.set_endpoints(twins)
    for slot, _ in app.store.roster:
        app.store.sampled(slot, EngineSample(waiting=3.0), 0.0)
    held = [place(app, runtime.chat(str(number) * 400)) for number in range(8)]
    assert {placement.serving.endpoints[0].port for placement in held} == {8000, 8001}
    for _ in range(2):
        app.renew_gauges()
        assert runtime.sample(app, "per_endpoint_queue_size", model_server_endpoint="pod") == 6
        assert runtime.sample(app, "scheduler_attempts_total", endpoint_name="pod") == 8
    kept, gone = twins
    app.set_endpoints([kept])
    for placement in held:
        end(app, placement)
    app.store.refresh(10.0, 0.2)
    app.renew_gauges()
    assert runtime.sample(app, "scheduler_attempts_total", port=str(kept.port)) > 0
    assert runtime.sample(app, "scheduler_attempts_total", port=str(gone.port)) == 0


def test_flows_in_loads_are_bounded_as_elsewhere() -> None:
    app = runtime.picker(1, config=f"{HEAD}plugins: [{{type: {COUNTED}}}, {{type: active-request-scorer}}]\n")
    app.metrics._flows.limit = 1
    for flow in ("a", "b", "c"):
        place(app, runtime.chat(), x_llm_d_inference_fairness_id=flow)
    app.renew_gauges()
    for flow, count in (("a", 1), ("other", 2), ("b", 0)):
        assert runtime.sample(app, "inflight_requests", producer_name=COUNTED, fairness_id=flow) == count


# -- media ------------------------------------------------------------------------------------------


def picture(number: int) -> bytes:
    image = {"type": "image_url", "image_url": {"url": f"http://pictures.example/{number}.png"}}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()


def test_media_look_ups_by_kind_and_endpoint() -> None:
    app = runtime.picker(1, config=f"{HEAD}plugins: [{{name: media, type: {MEDIA}}}]\n")
    plugin = {"plugin_type": MEDIA, "plugin_name": "media"}
    for number in (1, 1, 2, 1):
        end(app, place(app, picture(number)))
        app.renew_gauges()
    hits = {**plugin, "pod": "default/pod-1", "modality": "image"}
    assert runtime.sample(app, "encoder_cache_queries_total", **plugin, modality="image") == 4
    assert runtime.sample(app, "encoder_cache_hits_total", **hits) == 2
    assert runtime.sample(app, "encoder_cache_hit_ratio_count", **plugin) == 4
    assert runtime.sample(app, "encoder_cache_hit_ratio_sum", **plugin) == 2
    assert runtime.sample(app, "encoder_cache_hit_ratio_bucket", **plugin, le="0.9") == 2
    app.set_endpoints([runtime.endpoint(2)])
    app.store.refresh(10.0, 0.2)
    app.renew_gauges()
    assert runtime.sample(app, "encoder_cache_hits_total") == 0
    assert runtime.sample(app, "encoder_cache_queries_total") == 4


def test_media_of_a_recreated_pod_go_on_in_its_series() -> None:
    app = runtime.picker(0, config=f"{HEAD}plugins: [{{name: media, type: {MEDIA}}}]\n")
    app.set_endpoints([runtime.endpoint(1, "old")])
    end(app, place(app, picture(1)))
    held = place(app, picture(1))
    app.set_endpoints([runtime.endpoint(1, "new")])
    end(app, place(app, picture(2)))
    end(app, place(app, picture(2)))
    app.renew_gauges()
    assert runtime.sample(app, "encoder_cache_hits_total", pod="default/pod-1") == 2
    end(app, held)


def test_look_ups_of_a_plugin_that_took_anothers_place_are_added() -> None:
    app = runtime.picker(1, config=f"{HEAD}plugins: [{{name: media, type: {MEDIA}}}]\n")
    producer = app.assembly.named["media"]
    assert isinstance(producer, EmbeddingsCacheProducer)
    for look_ups, seen in ((3, 3), (1, 4), (4, 8)):
        producer.counters = EmbeddingsCounters()
        for _ in range(look_ups):
            end(app, place(app, picture(1)))
        for _ in range(2):
            app.renew_gauges()
            assert runtime.sample(app, "encoder_cache_hit_ratio_count", plugin_name="media") == seen


# -- counts kept elsewhere --------------------------------------------------------------------------


def test_errors_of_sources_and_extractors() -> None:
    app = runtime.picker()
    app.scraper.counts.poll_errors |= {"metrics-data-source": 3, "models-data-source": 1}
    app.scraper.counts.extract_errors["models-data-source", "models-data-extractor"] = 2
    for _ in range(2):
        app.renew_gauges()
    assert runtime.sample(app, "datalayer_poll_errors_total", source_type="models-data-source") == 1
    assert runtime.sample(app, "datalayer_poll_errors_total") == 4
    kinds = {"source_type": "models-data-source", "extractor_type": "models-data-extractor"}
    assert runtime.sample(app, "datalayer_extract_errors_total", **kinds) == 2


def test_a_count_that_began_anew_goes_on_from_there() -> None:
    metrics = runtime.picker().metrics
    for total in (3, 5, 2, 2, 4):
        metrics.total("datalayer_poll_errors_total", total, "s")
    assert (
        metrics.registry.get_sample_value("llm_d_epp_datalayer_poll_errors_total", {"source_type": "s"})
        == 5 + 4
    )


def test_a_series_that_ended_comes_back_with_its_own_count() -> None:
    app = runtime.picker()
    hits: tuple[str, ...] = ("type", "name", "default/pod-0", "image")
    for told in ({hits: 10.0}, {}, {hits: 12.0}, {hits: 13.0}, {}):
        app.metrics.totals("encoder_cache_hits_total", told)
        assert runtime.sample(app, "encoder_cache_hits_total") == told.get(hits, 0)
    assert app.metrics._totals == {}


def test_a_detector_hears_of_candidates_only() -> None:
    app = runtime.picker(3)
    seen: list[Mask] = []

    class Detector:
        def saturation(self, view: PoolView, load: Load, alive: Mask, now: float) -> float:
            seen.append(alive.copy())
            return 0.0

    app.set_endpoints([runtime.endpoint(1)])
    found = gauges_module._Stages().levels(Detector(), app.store.view, app.ledger.load, 0.0)
    assert found == {"decode": 0.0, "effective": 0.0}
    assert [int(np.count_nonzero(alive)) for alive in seen] == [1]


def test_streams_are_timed_from_their_opening_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    app = runtime.picker()
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    streams = [app.stream(lambda: None) for _ in range(TIMED_EVERY)]
    now[0] = 102.5
    for stream in streams:
        stream.closed()
    assert runtime.sample(app, "extproc_stream_duration_seconds_count") == TIMED_EVERY
    assert runtime.sample(app, "extproc_stream_duration_seconds_sum") == pytest.approx(2.5 * TIMED_EVERY)
