"""Spans of requests: the tree, whom it hangs from, what the engine is told, and a real export by OTLP."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode

from epp.config.load import default_config, load_config
from epp.errors import ConfigError
from epp.extproc.records import Refused, Routed
from epp.lab.stack import free_ports
from epp.payload.records import RawRequest, Usage
from epp.runtime import tracing as tracing_module
from epp.runtime.app import App
from epp.runtime.options import Options
from epp.runtime.router import Router
from epp.runtime.tracing import TracedRouter, Tracing
from epp.runtime.tracing_setup import TracingSetup, router_maker, tracing_setup
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken
from epp.wire import ext_proc_pb2 as pb
from tests.data.runtime import picker as runtime

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0c9902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


class Traced:
    """A picker whose spans stay here."""

    def __init__(self, ratio: float = 1.0, endpoints: int = 2, config: str = "") -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)
        loaded = load_config(config, "config.yaml") if config else default_config()
        self.app = App.assemble(
            Options(), loaded, lambda *arguments, **named: TracedRouter(self.tracing, *arguments, **named)
        )
        self.app.ledger.strict = True
        self.app.set_endpoints([runtime.endpoint(number) for number in range(1, endpoints + 1)])

    async def route(self, body: bytes = b"", **headers: str) -> Any:
        named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        raw = RawRequest("r-1", "POST", "/v1/chat/completions", named, body or runtime.chat("x" * 400))
        late: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        outcome = self.app.router.route(raw, late.set_result)
        return await late if outcome is None else outcome

    async def whole(self, cause: Cause = Cause.NATURAL, status: int = 200, **headers: str) -> Any:
        routed = await self.route(**headers)
        assert isinstance(routed, Routed)
        for fact in (
            AnswerHeaders(status, None, True),
            FirstToken(),
            Ended(cause, Usage(10, 5), 1, 1),
        ):
            self.app.router.observe(routed.placement.ticket, fact)
        assert not any(runtime.left_over(self.app).values())
        return routed

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def traceparent(routed: Any) -> str:
    return dict(routed.placement.set_headers)["traceparent"].decode()


TREE = {
    "gateway.request": None,
    "gateway.request_orchestration": "gateway.request",
    "run_scheduler_profile": "gateway.request_orchestration",
    "filter_endpoints": "run_scheduler_profile",
    "llm_d.epp.scoring": "run_scheduler_profile",
    "llm_d.epp.scorer.queue-scorer": "llm_d.epp.scoring",
    "llm_d.epp.scorer.kv-cache-utilization-scorer": "llm_d.epp.scoring",
    "llm_d.epp.scorer.prefix-cache-scorer": "llm_d.epp.scoring",
    "pick_endpoints": "run_scheduler_profile",
}


def mistakes(traced: Traced) -> list[str]:
    """What is wrong with the spans of one whole request, placed first of all."""
    spans = traced.spans
    wrong = [f"{name} is missing" for name in TREE.keys() - spans.keys()]
    wrong += [f"{name} is too much" for name in spans.keys() - TREE.keys()]
    by_id = {span.context.span_id: span for span in spans.values() if span.context}
    for name, span in spans.items():
        parent = by_id[span.parent.span_id] if span.parent else None
        if (parent.name if parent else None) != TREE.get(name):
            wrong.append(f"{name} hangs from {parent.name if parent else None}")
        assert span.start_time is not None
        assert span.end_time is not None
        if span.end_time < span.start_time:
            wrong.append(f"{name} ends before it begins")
        if parent is not None and not (parent.start_time or 0) <= span.start_time:
            wrong.append(f"{name} begins before its parent")
    return wrong


async def test_the_spans_of_a_request() -> None:
    traced = Traced()
    await traced.whole()
    assert mistakes(traced) == []
    spans = traced.spans
    request, orchestration = spans["gateway.request"], spans["gateway.request_orchestration"]
    assert request.kind is orchestration.kind is SpanKind.SERVER
    assert dict(request.attributes or {}) == {
        "gen_ai.request.id": "r-1",
        "gen_ai.request.model": "m",
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
    }
    assert [event.name for event in request.events] == ["first_token"]
    assert request.status.status_code is StatusCode.UNSET
    scoring = dict(spans["llm_d.epp.scoring"].attributes or {})
    assert scoring == {"llm_d.epp.scorer.count": 3, "llm_d.epp.scoring.candidate_endpoints": 2}
    queue = dict(spans["llm_d.epp.scorer.queue-scorer"].attributes or {})
    assert queue["llm_d.epp.scorer.type"] == queue["llm_d.epp.scorer.name"] == "queue-scorer"
    assert queue["llm_d.epp.scorer.weight"] == 2.0
    assert queue["llm_d.epp.scorer.endpoints_scored"] == 2
    picked = dict(spans["pick_endpoints"].attributes or {})
    assert picked["llm_d.epp.picker.candidate_endpoints"] == 2
    assert picked["llm_d.epp.picker.top_endpoints"][0] in ("pod-1", "pod-2")
    assert len(picked["llm_d.epp.picker.top_scores"]) == len(picked["llm_d.epp.picker.top_endpoints"])


async def test_every_traced_request_has_its_plugins_timed_not_only_sampled_ones() -> None:
    traced = Traced()
    for _ in range(3):
        await traced.whole()
    names = [span.name for span in traced.exporter.get_finished_spans()]
    assert names.count("llm_d.epp.scorer.queue-scorer") == 3


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("set_span_in_context", lambda span, context=None: context),
        ("SCORER", "scorer."),
        ("_spent_ns", lambda timings: -1_000_000),
    ],
)
async def test_planted_faults_in_the_tree_are_noticed(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing_module, name, fault)
    traced = Traced()
    await traced.whole()
    assert mistakes(traced)


# -- whom a trace hangs from, and what the engine hears ---------------------------------------------


async def test_a_trace_goes_on_from_the_clients_and_to_the_engine() -> None:
    traced = Traced(ratio=0.0)
    routed = await traced.whole(traceparent=SAMPLED, tracestate="a=b", baggage="k=v")
    request = traced.spans["gateway.request"]
    assert request.context is not None
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert traceparent(routed) == f"00-{TRACE}-{request.context.span_id:016x}-01"
    # What goes through unchanged need not be set.
    assert [name for name, _ in routed.placement.set_headers] == ["traceparent"]


async def test_a_trace_that_is_not_sampled_makes_no_spans_but_is_told_on() -> None:
    for ratio, headers in ((1.0, {"traceparent": UNSAMPLED}), (0.0, {})):
        traced = Traced(ratio)
        version, trace, _, flags = traceparent(await traced.whole(**headers)).split("-")
        assert (version, int(flags, 16) & 1) == ("00", 0)
        assert trace == TRACE if headers else trace != TRACE
        assert traced.spans == {}
        assert isinstance(traced.app.router, TracedRouter)
        assert traced.app.router._placed == traced.app.router._routing == {}


@pytest.mark.parametrize("broken", ["", "00-zz", SAMPLED + "-x" * 5000, "\x00"])
async def test_a_broken_parent_begins_a_new_trace(broken: str) -> None:
    traced = Traced()
    await traced.whole(traceparent=broken)
    request = traced.spans["gateway.request"]
    assert request.parent is None
    assert mistakes(traced) == []


async def test_headers_of_plugins_stay() -> None:
    config = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}]
"""
    routed = await Traced(config=config).route()
    assert {name for name, _ in routed.placement.set_headers} >= {"traceparent"}


async def test_the_engine_is_told_over_the_wire() -> None:
    traced = Traced()
    stream = traced.app.stream(lambda: None)
    stream.received(runtime.request_headers(traceparent=UNSAMPLED))
    for message in runtime.request_body(runtime.chat()):
        stream.received(message)
    mutation = pb.ProcessingResponse.FromString(stream.outbox[0]).request_headers.response.header_mutation
    told = {bytes(option.header.key): bytes(option.header.raw_value) for option in mutation.set_headers}
    assert told[b"traceparent"].startswith(f"00-{TRACE}-".encode())
    assert told[b"traceparent"] != UNSAMPLED.encode()
    assert b"traceparent" not in mutation.remove_headers
    stream.closed()


# -- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "body", "status"), [(0, b"", 503), (2, b"{", 400), (2, b'{"model":"m"}', 400)]
)
async def test_a_refused_request_is_an_error(endpoints: int, body: bytes, status: int) -> None:
    traced = Traced(endpoints=endpoints)
    assert isinstance(await traced.route(body), Refused)
    spans = traced.spans
    assert set(spans) == {"gateway.request", "gateway.request_orchestration"}
    for span in spans.values():
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description
        assert [event.name for event in span.events] == ["exception"]
    assert (spans["gateway.request"].attributes or {})["http.response.status_code"] == status


@pytest.mark.parametrize(
    ("cause", "status", "said"),
    [
        (Cause.CLIENT_DISCONNECT, 200, "ClientDisconnect"),
        (Cause.NATURAL, 502, "the engine answered 502"),
        (Cause.NATURAL, 404, None),
    ],
)
async def test_how_a_request_ended(cause: Cause, status: int, said: str | None) -> None:
    traced = Traced()
    await traced.whole(cause, status)
    found = traced.spans["gateway.request"].status
    assert found.description == said
    assert (found.status_code is StatusCode.ERROR) is (said is not None)


@pytest.mark.parametrize("method", ["begin", "understood", "placed", "headers", "observed"])
async def test_a_fault_in_tracing_costs_no_request(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def planted(*arguments: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(Tracing, method, planted)
    traced = Traced()
    for _ in range(3):
        await traced.whole()
    assert [record.getMessage() for record in caplog.records if "tracing failed" in record.getMessage()] == [
        "tracing failed; requests are served on, and it is not logged again"
    ]
    monkeypatch.undo()
    monkeypatch.setattr(Tracing, "refused", planted)
    assert isinstance(await traced.route(b"{"), Refused)


async def test_a_large_body_is_routed_late_and_traced_the_same() -> None:
    traced = Traced()
    try:
        routed = await traced.route(runtime.chat("x" * 3_000_000))
        assert traceparent(routed)
        traced.app.router.observe(routed.placement.ticket, Ended(Cause.NATURAL, None, 1, 1))
        assert mistakes(traced) == []
    finally:
        traced.app.router.close()


# -- setting up -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, TracingSetup("console", 0.1, False)),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER_ARG": "1"}, TracingSetup("otlp", 1.0, False)),
        ({"OTEL_TRACES_EXPORTER": "", "OTEL_TRACES_SAMPLER_ARG": ""}, TracingSetup("console", 0.1, False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, TracingSetup("console", 0.1, False)),
        ({"OTEL_SERVICE_NAME": "x"}, TracingSetup("console", 0.1, True)),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=x"}, TracingSetup("console", 0.1, True)),
    ],
)
def test_what_the_environment_says(environment: dict[str, str], expected: TracingSetup) -> None:
    assert tracing_setup(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_SAMPLER": "always_on", "OTEL_TRACES_SAMPLER_ARG": "1"},
        {"OTEL_TRACES_SAMPLER_ARG": "half"},
        {"OTEL_TRACES_SAMPLER_ARG": "2"},
        {"OTEL_TRACES_SAMPLER_ARG": "nan"},
    ],
)
def test_a_sampler_that_is_not_there_is_warned_about(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert tracing_setup(environment).ratio == 0.1
    assert "a tenth of the traces is sampled" in caplog.text


def test_an_unknown_exporter_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="OTEL_TRACES_EXPORTER.*'zipkin' is unknown; write one of console, otlp"
    ):
        tracing_setup({"OTEL_TRACES_EXPORTER": "zipkin"})


def test_without_opentelemetry_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "epp.runtime.tracing")
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(ConfigError, match=r"--tracing.*pip install 'warmroute\[otel\]'"),
        router_maker(TracingSetup()),
    ):
        pass
    with router_maker(None) as make_router:
        assert make_router is Router


def test_console_spans_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with router_maker(TracingSetup("console", 1.0)) as make_router:
        app = App.assemble(Options(), default_config(), make_router)
        app.router.route(RawRequest("r-1", "POST", "/v1/chat/completions", (), b"{"), lambda outcome: None)
    assert '"name": "gateway.request"' in capsys.readouterr().out


class Collector:
    """A collector of OTLP over gRPC."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def export(self, request: bytes, context: Any) -> bytes:
        self.received.append(service.ExportTraceServiceRequest.FromString(request))
        return bytes(service.ExportTraceServiceResponse().SerializeToString())


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made, port = Collector(), free_ports(1)[0]
    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(made.export)
    method = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(method, {"Export": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield made
    server.stop(0).wait()


def test_spans_reach_a_collector_by_otlp(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=inference")
    with router_maker(TracingSetup("otlp", 1.0)) as make_router:
        app = App.assemble(Options(), default_config(), make_router)
        app.router.route(RawRequest("r-1", "POST", "/v1/chat/completions", (), b"{"), lambda outcome: None)
    (batch,) = [batch for request in collector.received for batch in request.resource_spans]
    resource = {each.key: each.value.string_value for each in batch.resource.attributes}
    assert (resource["service.name"], resource["team"]) == ("warmroute", "inference")
    assert resource["service.version"]
    spans = [span.name for scope in batch.scope_spans for span in scope.spans]
    assert sorted(spans) == ["gateway.request", "gateway.request_orchestration"]


def test_a_collector_that_is_not_there_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    with router_maker(TracingSetup("otlp", 1.0)) as make_router:
        app = App.assemble(Options(), default_config(), make_router)
        outcome = app.router.route(
            RawRequest("r-1", "POST", "/v1/chat/completions", (), b"{"), lambda outcome: None
        )
    assert isinstance(outcome, Refused)


def test_the_name_of_the_service_is_the_environments(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "epp-a")
    with router_maker(
        tracing_setup({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SERVICE_NAME": "epp-a"})._replace(ratio=1.0)
    ) as make:
        app = App.assemble(Options(), default_config(), make)
        app.router.route(RawRequest("r-1", "POST", "/", (), b"{"), lambda outcome: None)
    attributes = collector.received[0].resource_spans[0].resource.attributes
    assert {"epp-a"} == {each.value.string_value for each in attributes if each.key == "service.name"}


NEEDING = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: token-producer, parameters: {modelName: m, vllm: {url: "http://127.0.0.1:1", timeout: 20s}}}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
"""


async def test_a_request_that_waits_for_its_tokens_has_its_spans() -> None:
    traced = Traced(config=NEEDING)
    await traced.whole()
    assert mistakes(traced) == []
    assert not vars(traced.app.router)["_routing"]
    assert runtime.sample(traced.app, "request_needs_failed_total", reason="unreachable") == 1
    await traced.app.renders.close()
