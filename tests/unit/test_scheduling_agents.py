"""agent-identity: which header names the agent's session."""

from random import Random
from typing import Any

import pytest

from epp.director import Director, Plugins
from epp.payload.records import Headers, RawRequest
from epp.pool.ledger import InflightLedger
from epp.pool.store import PoolStore
from epp.scheduling.ports import AGENT_IDENTITY
from tests.data.scheduling import pool, tickets


@pytest.mark.parametrize(
    ("headers", "additional", "expected"),
    [
        ((), [], None),
        ((("x-claude-code-session-id", "a"),), [], "a"),
        ((("x-session-affinity", "a"),), [], "a"),
        ((("session-id", "a"),), [], "a"),
        ((("session_id", "a"),), [], "a"),
        ((("session_id", "d"), ("session-id", "c"), ("x-session-affinity", "b")), [], "b"),
        ((("x-session-affinity", "b"), ("x-claude-code-session-id", "a")), [], "a"),
        ((("x-claude-code-session-id", ""), ("session-id", "c")), [], "c"),
        ((("x-session-id", "e"),), [], None),
        ((("x-session-id", "e"), ("session-id", "c")), ["X-Session-Id"], "e"),
        ((("y", "2"), ("x", "1")), ["x", "y"], "1"),
        ((("y", "2"), ("x", "1")), ["y", "x", "y"], "2"),
        ((("session-id", "a"),), ["x"] * 20, "a"),
        ((("session-id", "a"), ("x-claude-code-session-id", "b")), ["session-id"], "a"),
    ],
)
def test_first_header_there(headers: Headers, additional: list[str], expected: str | None) -> None:
    view = pool.context([]).view
    parameters: dict[str, Any] = {"additionalSessionHeaders": additional} if additional else {}
    hook = tickets.made("agent-identity", view, **parameters)
    found = hook.read(RawRequest("id", "POST", "/", (("user-agent", "z"), *headers), b""))
    assert found.get(AGENT_IDENTITY) == expected
    assert len(found) == (expected is not None)


class Nobody:
    """Records nothing."""

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        raise error


@pytest.mark.parametrize(
    ("headers", "flow"),
    [
        ((), "default-flow"),
        ((("x-claude-code-session-id", "agent"),), "agent"),
        ((("x-claude-code-session-id", "agent"), ("x-llm-d-inference-fairness-id", "mine")), "mine"),
        ((("x-gateway-inference-fairness-id", "mine"), ("session-id", "agent")), "mine"),
        ((("x-llm-d-inference-fairness-id", ""), ("session-id", "agent")), "agent"),
    ],
)
def test_agent_is_the_flow_unless_the_client_names_one(headers: Headers, flow: str) -> None:
    store = PoolStore()
    hook = tickets.made("agent-identity", store.view)
    plugins = Plugins(handler=None, request_hooks=(hook,))  # type: ignore[arg-type]
    director = Director(
        store,
        InflightLedger(16),
        plugins,
        Nobody(),  # type: ignore[arg-type]
        Random(1),
        max_body_bytes=1000,
    )
    raw = RawRequest("id", "POST", "/v1/completions", headers, b'{"model":"m","prompt":"hello"}')
    assert director.prepare(raw, 0.0).flow == flow
