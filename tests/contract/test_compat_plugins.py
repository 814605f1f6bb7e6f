"""Cases of whole requests in which objectives, rules, adapters, parsers, sessions, reporters or spans matter.

`docs/compatibility.md` names each of them.
"""

import json
from base64 import b64decode
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from epp import names
from epp.runtime.tracing import TracedRouter, Tracing
from tests.data.compat import line

P, Line = line.P, line.Line
config, model_labels, prompt = line.config, line.model_labels, line.prompt

THREE = (P(3, 0.2), P(0, 0.1), P(10, 0.2))
OBJECTIVE, FAIRNESS = names.OBJECTIVE[0], names.FAIRNESS_ID[0]
REWRITE = names.MODEL_NAME_REWRITE[0]

OBJECTIVES = [
    {"name": "sql-lora", "priority": 2},
    {"name": "my-model", "priority": 2},
    {"name": "direct-model", "priority": 2},
    {"name": "sql-lora-sheddable"},
    {"name": "batch", "priority": -1},
]
REWRITES = [
    {
        "name": "rewrite",
        "rules": [
            {
                "matches": [{"model": {"type": "Exact", "value": "model-to-be-rewritten"}}],
                "targets": [{"modelRewrite": "rewritten-model"}],
            }
        ],
    }
]
SCORERS = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer", "lora-affinity-scorer")


def picker(*pods: Any, **sections: Any) -> Any:
    """Queue, KV usage, prefix and adapters, each with weight 1; objectives and rewrite rules."""
    sections = {"objectives": OBJECTIVES, "modelRewrites": REWRITES, **sections}
    return Line(*pods, config=config(*({"type": scorer} for scorer in SCORERS), uses=SCORERS, **sections))


def objective(name: str, target: str = "", **more: str) -> dict[str, str]:
    return {OBJECTIVE: name, **({REWRITE: target} if target else {}), **more}


# -- objectives ---------------------------------------------------------------------------------------


def test_the_priority_of_the_objective_is_counted() -> None:
    pool = picker(*THREE)
    asked = pool.ask(prompt(), headers=objective("my-model", "my-model-12345"))
    assert asked.destination == "192.168.1.2:8000"
    assert json.loads(asked.body("request"))["model"] == "my-model-12345"
    assert pool.sample("request_total", **model_labels("my-model", "my-model-12345", priority=2)) == 1


@pytest.mark.parametrize(
    ("headers", "priority"),
    [
        (objective("sql-lora-sheddable"), 0),
        (objective("nobody-knows"), 0),
        ({"x-gateway-inference-objective": "sql-lora"}, 2),
        ({"x-gateway-inference-objective": "sql-lora", OBJECTIVE: "batch"}, -1),
        ({}, 0),
    ],
)
def test_a_request_has_the_priority_of_its_objective(headers: dict[str, str], priority: int) -> None:
    pool = picker(*THREE)
    pool.ask(prompt(), headers=headers)
    assert pool.sample("request_total", **model_labels("my-model", "my-model", priority=priority)) == 1


FULL = (P(1000, 1.0), P(1000, 1.0))


def test_a_saturated_pool_drops_what_may_be_shed_and_nothing_else() -> None:
    pool = picker(*FULL)
    status, message, headers = pool.ask(prompt(), headers=objective("batch")).refusal
    assert (status, message) == (429, "system saturated, sheddable request dropped")
    assert headers[names.DROPPED_REASON] == "rejected-saturated"
    assert headers["retry-after"] == "1"
    assert pool.ask(prompt(), headers=objective("sql-lora-sheddable")).destination
    assert picker(P(5, 0.1), P(4, 0.1)).ask(prompt(), headers=objective("batch")).destination


def test_what_may_be_shed_gets_503_from_an_empty_pool() -> None:
    status, _, headers = picker().ask(prompt(), headers=objective("batch")).refusal
    assert (status, headers[names.DROPPED_REASON]) == (503, "rejected-no-endpoints")


def test_a_refusal_of_an_admitter_keeps_its_status() -> None:
    plugins = ({"type": "queue-scorer"}, {"type": "probabilistic-admitter", "parameters": {"k": 1e9}})
    half_full = (P(3, 0.1), P(3, 0.1))
    pool = Line(*half_full, config=config(*plugins, uses=["queue-scorer"], objectives=OBJECTIVES))
    status, message, headers = pool.ask(prompt(), headers=objective("batch")).refusal
    assert status == 429
    assert message.startswith("request cannot be admitted: probabilistic-admitter: rejected")
    assert headers[names.DROPPED_REASON] == "rejected-saturated"
    assert pool.ask(prompt(), headers=objective("my-model")).destination


def test_the_filters_left_nobody() -> None:
    plugins = ({"type": "label-selector-filter", "parameters": {"matchLabels": {"gpu": "h100"}}},)
    pool = Line(P(labels={"gpu": "l4"}), config=config(*plugins, uses=["label-selector-filter"]))
    status, message, headers = pool.ask(prompt()).refusal
    assert status == 429
    assert message.startswith("no endpoints available for the given request")
    assert headers[names.DROPPED_REASON] == "rejected-saturated"


# -- adapters -----------------------------------------------------------------------------------------

TARGET = "sql-lora-1fdg2"
ADAPTERS = {
    "active, and a short queue": (
        (P(0, 0.2, adapters="ab"), P(0, 0.1, adapters=("a", TARGET)), P(10, 0.2, adapters="ab")),
        1,
    ),
    "active, against KV usage": (
        (P(10, 0.2, adapters="ab"), P(10, 0.4, adapters=("a", TARGET)), P(10, 0.3, adapters="a")),
        1,
    ),
    "nothing is shed": (
        (P(6, 0.2, adapters=("a", TARGET)), P(0, 0.85, adapters="a"), P(10, 0.9, adapters="a")),
        0,
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_endpoint_of_the_active_adapter(name: str) -> None:
    pods, pod = ADAPTERS[name]
    pool = picker(*pods)
    asked = pool.ask(prompt("sql-lora"), headers=objective("sql-lora", TARGET))
    assert asked.pod == pod
    assert pool.sample("request_total", **model_labels("sql-lora", TARGET, priority=2)) == 1


# -- rewrite rules ------------------------------------------------------------------------------------


def test_a_rewrite_rule_changes_body_and_label_and_the_answer_back() -> None:
    pool = picker(P(0, 0.1, adapters=("a", "rewritten-model")))
    asked = pool.ask(prompt("model-to-be-rewritten"), headers={REWRITE: "by-header"})
    assert json.loads(asked.body("request"))["model"] == "rewritten-model"
    labels = model_labels("model-to-be-rewritten", "rewritten-model")
    assert pool.sample("request_total", **labels) == 1
    asked.answer(b'{"model":"rewritten-model"}')
    assert asked.body("response") == b'{"model":"model-to-be-rewritten"}'
    told = {"model_rewrite_name": "rewrite", "target_model": "rewritten-model"}
    decisions = pool.sample("model_rewrite_decisions_total", model_name="model-to-be-rewritten", **told)
    assert decisions == 1


def test_a_rule_for_every_model_fills_a_missing_one_in() -> None:
    rules = [{"name": "all", "rules": [{"targets": [{"modelRewrite": "llama"}]}]}]
    pool = picker(P(), modelRewrites=rules)
    asked = pool.ask(prompt(model=None))
    assert json.loads(asked.body("request"))["model"] == "llama"
    assert pool.sample("request_total", **model_labels("", "llama")) == 1
    assert picker(P()).ask(prompt(model=None)).refusal[:2] == (400, "model not found in request body")


# -- parsers ------------------------------------------------------------------------------------------


def with_parsers(*types: str, pods: Any = THREE) -> Any:
    scorers = SCORERS[:2]
    return Line(
        *pods,
        config=config(
            *({"type": each} for each in (*scorers, *types)),
            uses=scorers,
            objectives=OBJECTIVES,
            requestHandler={"parsers": [{"pluginRef": each} for each in types]},
        ),
    )


@pytest.mark.parametrize("path", ["/any/path", "/v1/completions"])
def test_the_passthrough_parser_reads_nothing_and_the_objective_still_counts(path: str) -> None:
    pool = with_parsers("passthrough-parser")
    asked = pool.ask(b"passthrough-parser", path=path, headers=objective("my-model"))
    assert asked.pod == 1
    assert asked.body("request") == b"passthrough-parser"
    assert pool.sample("request_total", **model_labels("", "", priority=2)) == 1


def test_a_path_that_no_listed_parser_takes_is_refused() -> None:
    status, message, _ = with_parsers("anthropic-parser").ask(prompt()).refusal
    assert status == 400
    assert message.startswith("no parser registered matching path suffix for: /v1/completions")


MESSAGES = json.dumps({"model": "claude", "messages": [{"role": "user", "content": "hi"}]}).encode()


def test_messages_of_anthropic_are_read_by_default() -> None:
    """The prompt is all three parts of the input."""
    pool = Line(P())
    asked = pool.ask(MESSAGES, path="/v1/messages", headers={REWRITE: "llama"})
    assert json.loads(asked.body("request"))["model"] == "llama"
    usage = {"input_tokens": 4, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1}
    asked.answer(json.dumps({"model": "llama", "usage": {**usage, "output_tokens": 5}}).encode())
    assert json.loads(asked.body("response"))["model"] == "claude"
    assert pool.sample("request_input_tokens_sum", **model_labels("claude", "llama")) == 7


def test_counting_tokens_passes_unread_and_its_end_is_seen() -> None:
    pool = Line(P())
    asked = pool.ask(MESSAGES, path="/v1/messages/count_tokens")
    assert asked.body("request") == MESSAGES
    answer = b'{"input_tokens":7,"usage":{"input_tokens":7,"output_tokens":0}}'
    asked.answer(answer)
    assert asked.body("response") == answer
    labels = model_labels("claude", "claude")
    assert pool.sample("request_duration_seconds_count", **labels) == 1
    assert pool.sample("request_input_tokens_count", **labels) == 0
    assert asked.finished
    assert pool.idle


# -- sessions and agents ------------------------------------------------------------------------------

AFFINITY = ("session-affinity-filter", "session-affinity-scorer")
TWO = (P(), P())
AGENT = "x-claude-code-session-id"


def pinning(kind: str, **parameters: Any) -> Any:
    """Two endpoints that only a session tells apart: chance picks among equals."""
    plugin = {"type": kind, "parameters": parameters}
    return Line(*TWO, config=config(plugin, {"type": "agent-identity"}, uses=[kind]))


def answered(pool: Any, **headers: str) -> Any:
    asked = pool.ask(prompt(), headers={name.replace("_", "-"): value for name, value in headers.items()})
    asked.answer(b'{"choices":[]}')
    return asked


@pytest.mark.parametrize("kind", AFFINITY)
def test_the_token_of_the_first_answer_pins_the_second_request(kind: str) -> None:
    pool = pinning(kind)
    seen = set()
    for _ in range(12):
        first = answered(pool)
        token = first.answer_head["set"]["x-session-token"]
        assert b64decode(token).decode() == f"default/pod-{first.destination}"
        assert answered(pool, x_session_token=token).pod == first.pod
        seen.add(first.pod)
    assert seen == {0, 1}


BY_ID = {"sources": [{"header": "x-session-id"}, {"attribute": "agent-identity"}]}


@pytest.mark.parametrize("kind", AFFINITY)
def test_a_session_by_header_or_agent_and_the_header_wins(kind: str) -> None:
    pool = pinning(kind, strategy="session_id", sessionIdConfig=BY_ID)
    mine: list[int] = []
    for number in range(12):
        mine.append(answered(pool, x_session_id=f"mine-{number}").pod)
        agents = answered(pool, **{AGENT: f"agent-{number}"}).pod
        assert answered(pool, x_session_id=f"mine-{number}").pod == mine[-1]
        assert answered(pool, **{AGENT: f"agent-{number}"}).pod == agents
        both = {"x_session_id": f"mine-{number}", AGENT: f"agent-{number}"}
        assert answered(pool, **both).pod == mine[-1]
    assert set(mine) == {0, 1}


@pytest.mark.parametrize(
    ("headers", "flow"), [({AGENT: "agent"}, "agent"), ({AGENT: "agent", FAIRNESS: "tenant"}, "tenant")]
)
def test_an_agent_is_the_flow_unless_the_client_names_one(headers: dict[str, str], flow: str) -> None:
    pool = pinning("session-affinity-filter")
    pool.ask(prompt(), headers=headers)
    assert pool.sample("request_total", **model_labels("my-model", "my-model", flow=flow)) == 1


# -- metadata -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tell_scores", [False, True])
def test_scores_are_told_where_asked_for(tell_scores: bool) -> None:
    pods = (P(0, 0.0), P(10, 0.0), P(5, 0.0))
    pool = Line(
        *pods, config=config({"type": "queue-scorer"}, uses=["queue-scorer"]), tell_scores=tell_scores
    )
    head = pool.ask(prompt()).head
    expected = {"192.168.1.1:8000": 1.0, "192.168.1.2:8000": 0.0, "192.168.1.3:8000": 0.5}
    assert head.get("scores") == (expected if tell_scores else None)


REPORTER = {
    "type": "request-attribute-reporter",
    "parameters": {"attributes": [{"key": {"name": "tokens"}, "expression": "usage.completion_tokens"}]},
}
USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
PLAIN = json.dumps({"choices": [], "usage": USAGE}).encode()
EVENTS = (b'data: {"choices":[{"text":"x"}]}\n\n', b"data: " + PLAIN + b"\n\n", b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ((PLAIN,), {}),
        ((PLAIN[:20], PLAIN[20:], b""), {}),
        (EVENTS, {"content_type": line.SSE}),
        ((PLAIN,), {"trailers": True}),
    ],
)
def test_a_reporters_figure_is_on_the_last_message_only(pieces: Any, answer: Any) -> None:
    pool = Line(P(), config=config(REPORTER, {"type": "queue-scorer"}, uses=["queue-scorer"]))
    asked = pool.ask(prompt())
    asked.answer(*pieces, **answer)
    *before, last = asked.replies
    assert last["metadata"] == {"envoy.lb": {"tokens": 10.0}}
    assert not any("metadata" in reply for reply in before)
    assert b"".join(content for content, _ in asked.pieces("response")) == b"".join(pieces)
    assert pool.idle


# -- spans --------------------------------------------------------------------------------------------


def test_a_request_has_its_spans_and_the_engine_is_told_of_the_trace() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    pool = picker(*THREE)
    plain = pool.router
    pool.router = TracedRouter(
        Tracing(provider), pool.director, pool.recorder, plain.decoder, lambda: pool.now, lambda now: None
    )
    parent = "4bf92f3577b34da6a3ce929d0e0e4736"
    asked = pool.ask(prompt(), headers={"traceparent": f"00-{parent}-00f067aa0ba902b7-01"})
    assert asked.pod == 1
    asked.answer(PLAIN)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request, orchestration = spans["gateway.request"], spans["gateway.request_orchestration"]
    assert orchestration.parent.span_id == request.context.span_id
    assert f"{request.context.trace_id:032x}" == parent
    assert asked.head["set"]["traceparent"] == f"00-{parent}-{request.context.span_id:016x}-01"


# -- conformance --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "told"),
    [
        ("192.168.1.1:8000", "192.168.1.1:8000"),
        (None, "fail: missing destination endpoint served metadata"),
    ],
)
def test_who_served_is_told_to_a_conformance_test(served: str | None, told: str) -> None:
    verifier = {"type": "destination-endpoint-served-verifier"}
    asked = Line(P(), config=config(verifier)).ask(prompt("m"))
    asked.answer(b"{}", served=served)
    assert dict(asked.answer_head["set"])["x-conformance-test-served-endpoint"] == told
