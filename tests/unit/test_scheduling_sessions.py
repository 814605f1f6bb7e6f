"""Session affinity: what pins a request, what a session is bound to, and what the client is told."""

from base64 import b64encode
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from epp.config.load import load_config
from epp.director import Director, Plugins, Prepared
from epp.payload.records import Headers, RawRequest
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint, Mask
from epp.pool.store import PoolStore
from epp.scheduling import sessions
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.ports import Ctx
from epp.scheduling.profiles import FilterStep, PickerStep, Profile, ScorerStep, run_profile
from epp.scheduling.records import (
    SESSION_ID,
    AnswerHeaders,
    Cause,
    Edits,
    Ended,
    FactKey,
    FirstToken,
    Leg,
    Placement,
    Role,
)
from epp.scheduling.scorers import QueueScorer
from tests.data.scheduling import pool, tickets

Row = pool.Row
ROWS = [Row("1"), Row("2"), Row("3")]
BOTH = ("session-affinity-filter", "session-affinity-scorer")
OK = AnswerHeaders(200, None, False)


def token(name: str) -> str:
    return b64encode(f"default/{name}".encode()).decode()


def context(headers: Headers = (), *, now: float = 0.0, **attributes: str) -> Ctx:
    ctx = pool.context(ROWS, headers=headers)
    ctx.now = now
    ctx.attributes = {name.replace("_", "-"): value for name, value in attributes.items()}
    return ctx


def chosen(plugin: Any, ctx: Ctx, alive: Mask | None = None) -> set[int]:
    """Slots that the plugin pins to: kept by the filter, scored 1 by the scorer; all if it has no wish."""
    mask = ctx.view.candidates if alive is None else alive
    if hasattr(plugin, "keep"):
        return set(np.flatnonzero(plugin.keep(ctx, mask)).tolist())
    scores = plugin.score(ctx, mask)
    assert set(np.unique(scores)) <= {0.0, 1.0}
    wanted = scores == 1.0 if scores.any() else mask
    return set(np.flatnonzero(wanted & mask).tolist())


# -- encoded_endpoint_header --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((("x-session-token", token("2")),), {1}),
        ((), {0, 1, 2}),
        ((("x-session-token", ""),), {0, 1, 2}),
        ((("x-session-token", token("gone")),), {0, 1, 2}),
        ((("x-session-token", b64encode(b"other/2").decode()),), {0, 1, 2}),
        ((("x-session-token", "not base64!"),), {0, 1, 2}),
        ((("x-session-token", "bsd"),), {0, 1, 2}),
        # Characters outside the alphabet are not passed over.
        ((("x-session-token", "*" + token("2")),), {0, 1, 2}),
        ((("x-session-token", "\u00e9\u00e9\u00e9="),), {0, 1, 2}),
        ((("x-session-token", b64encode(b"\xff\xfe").decode()),), {0, 1, 2}),
        # Another header is none of its business; of one sent twice the last counts.
        ((("x-session-id", token("2")),), {0, 1, 2}),
        ((("x-session-token", token("2")), ("x-session-token", token("3"))), {2}),
    ],
)
def test_token_pins(kind: str, headers: Headers, expected: set[int]) -> None:
    ctx = context(headers)
    assert chosen(tickets.made(kind, ctx.view), ctx) == expected


@pytest.mark.parametrize("kind", BOTH)
def test_token_of_an_endpoint_that_is_not_in_question_pins_to_nothing(kind: str) -> None:
    ctx = context((("x-session-token", token("2")),))
    alive = ctx.view.candidates.copy()
    alive[1] = False
    assert chosen(tickets.made(kind, ctx.view), ctx, alive) == {0, 2}


@pytest.mark.parametrize("kind", BOTH)
def test_answer_carries_the_token_of_the_serving_endpoint(kind: str) -> None:
    ctx = context()
    plugin = tickets.made(kind, ctx.view)
    ticket = tickets.single(ctx, 1)
    assert plugin.observe(ticket, OK, 0.0) == (("x-session-token", token("2").encode()),)
    assert plugin.observe(ticket, FirstToken(), 0.0) is None
    ticket.slot = 2
    assert plugin.observe(ticket, OK, 0.0) == (("x-session-token", token("3").encode()),)


@pytest.mark.parametrize("kind", BOTH)
def test_header_of_the_configuration_is_trimmed_and_lowered(kind: str) -> None:
    ctx = context((("x-my-token", token("3")),))
    plugin = tickets.made(kind, ctx.view, encodedEndpointHeaderConfig={"header": " X-My-Token "})
    assert chosen(plugin, ctx) == {2}
    assert plugin.observe(tickets.single(ctx, 0), OK, 0.0) == (("x-my-token", token("1").encode()),)


def test_names_follow_the_membership() -> None:
    ctx = context((("x-session-token", token("late")),))
    plugin = tickets.made(BOTH[0], ctx.view)
    assert chosen(plugin, ctx) == {0, 1, 2}
    owners = list(ctx.view.endpoints)
    owners[2] = Endpoint("uid-late", "late", "default", "10.0.0.9", 8000)
    ctx.view.endpoints = tuple(owners)
    assert chosen(plugin, ctx) == {2}


def prefill_and_decode(ctx: Ctx, prefill: int, decode: int) -> tuple[Leg, Leg]:
    return tickets.leg(ctx, (prefill,), role=Role.PREFILL), tickets.leg(ctx, (decode,))


@pytest.mark.parametrize("kind", BOTH)
def test_prefill_and_decode_have_a_token_each(kind: str) -> None:
    ctx = context((("x-session-token", token("2")), ("x-session-token-prefill", token("1"))))
    decode = tickets.made(kind, ctx.view)
    header = {"header": "x-session-token-prefill"}
    prefill = tickets.made(kind, ctx.view, profileName="prefill", encodedEndpointHeaderConfig=header)
    assert (chosen(decode, ctx), chosen(prefill, ctx)) == ({1}, {0})
    split = tickets.ticket(ctx, *prefill_and_decode(ctx, 0, 2))
    assert decode.observe(split, OK, 0.0) == (("x-session-token", token("3").encode()),)
    assert prefill.observe(split, OK, 0.0) == (("x-session-token-prefill", token("1").encode()),)
    whole = tickets.single(ctx, 2)
    assert decode.observe(whole, OK, 0.0) == (("x-session-token", token("3").encode()),)
    assert prefill.observe(whole, OK, 0.0) is None


# -- session_id ---------------------------------------------------------------------------------------

NAMED: Headers = (("x-session-id", "s1"),)


def pinning(kind: str, ctx: Ctx, **parameters: Any) -> Any:
    return tickets.made(kind, ctx.view, strategy="session_id", **parameters)


@pytest.mark.parametrize("kind", BOTH)
def test_session_is_bound_where_it_was_placed(kind: str) -> None:
    ctx = context(NAMED)
    plugin = pinning(kind, ctx)
    assert chosen(plugin, ctx) == {0, 1, 2}
    plugin.placed(ctx, tickets.single(ctx, 1))
    assert chosen(plugin, context(NAMED)) == {1}
    assert chosen(plugin, context((("x-session-id", " s1 "),))) == {1}
    assert chosen(plugin, context((("x-session-id", "s2"),))) == {0, 1, 2}
    assert chosen(plugin, context()) == {0, 1, 2}
    assert plugin.observe(tickets.single(ctx, 1), OK, 0.0) is None, "nothing is written back"
    assert plugin.state()["endpoints"] == [{"endpoint": "default/2", "sessions": 1}]


@pytest.mark.parametrize("kind", BOTH)
def test_binding_moves_only_when_its_endpoint_was_not_in_question(kind: str) -> None:
    ctx = context(NAMED)
    plugin = pinning(kind, ctx)
    plugin.placed(ctx, tickets.single(ctx, 1))
    # Outweighed: the endpoint was there, the picker took another one.
    plugin.placed(ctx, tickets.single(ctx, 2))
    assert chosen(plugin, ctx) == {1}
    alive = ctx.view.candidates.copy()
    alive[1] = False
    assert chosen(plugin, ctx, alive) == {0, 2}
    plugin.placed(ctx, tickets.single(ctx, 2, alive=alive))
    assert chosen(plugin, ctx) == {2}


@pytest.mark.parametrize("kind", BOTH)
def test_binding_follows_the_endpoint_that_served(kind: str) -> None:
    ctx = context(NAMED)
    plugin = pinning(kind, ctx)
    ticket = tickets.single(ctx, 1)
    plugin.placed(ctx, ticket)
    ticket.slot = 2
    plugin.observe(ticket, OK, 1.0)
    assert chosen(plugin, context(NAMED)) == {2}
    # A request that had outweighed the binding does not take it along.
    other = context(NAMED)
    elsewhere = tickets.single(other, 0)
    plugin.placed(other, elsewhere)
    elsewhere.slot = 1
    plugin.observe(elsewhere, OK, 2.0)
    assert chosen(plugin, context(NAMED)) == {2}


@pytest.mark.parametrize("kind", BOTH)
def test_endpoint_that_left_unbinds_its_sessions(kind: str) -> None:
    ctx = context(NAMED)
    plugin = pinning(kind, ctx)
    plugin.placed(ctx, tickets.single(ctx, 1))
    plugin.left(1)
    plugin.joined(1)  # its slot has another owner now
    assert chosen(plugin, ctx) == {0, 1, 2}
    assert plugin.state()["endpoints"] == []
    plugin.placed(ctx, tickets.single(ctx, 2))
    assert chosen(plugin, ctx) == {2}


@pytest.mark.parametrize("kind", BOTH)
def test_unused_sessions_expire_at_a_sweep(kind: str) -> None:
    ctx = context(NAMED, now=100.0)
    plugin = pinning(kind, ctx)
    plugin.refresh(99.0)
    plugin.placed(ctx, tickets.single(ctx, 1))
    plugin.refresh(400.0)
    assert chosen(plugin, ctx) == {1}, "unused for exactly its time to live"
    plugin.refresh(409.9)
    assert chosen(plugin, ctx) == {1}, "no sweep is due"
    plugin.refresh(410.0)
    assert chosen(plugin, ctx) == {0, 1, 2}
    assert plugin.state()["sessions"] == 0


@pytest.mark.parametrize("kind", BOTH)
def test_use_renews_and_being_outweighed_does_not(kind: str) -> None:
    ctx = context(NAMED, now=0.0)
    settings = {"evictionTtlSeconds": 20, "evictionSweepSeconds": 1}
    plugin = pinning(kind, ctx, sessionIdConfig=settings)
    plugin.placed(ctx, tickets.single(ctx, 1))
    ctx.now = 15.0
    plugin.placed(ctx, tickets.single(ctx, 1))
    plugin.refresh(30.0)
    assert chosen(plugin, ctx) == {1}
    ctx.now = 34.0
    plugin.placed(ctx, tickets.single(ctx, 2))
    plugin.refresh(36.0)
    assert chosen(plugin, ctx) == {0, 1, 2}


SOURCES = [
    {"header": "X-Session-Id"},
    {"attribute": "agent-identity"},
    {"attribute": "SessionIDDataKey", "producer": "cookies"},
]


@pytest.mark.parametrize("kind", BOTH)
def test_sources_in_their_order(kind: str) -> None:
    first = context(NAMED, agent_identity="a1")
    plugin = pinning(kind, first, sessionIdConfig={"sources": SOURCES})
    plugin.placed(first, tickets.single(first, 0))
    agent = context(agent_identity="a1")
    assert chosen(plugin, agent) == {0, 1, 2}, "the header won over the attribute"
    plugin.placed(agent, tickets.single(agent, 1))
    assert chosen(plugin, context(agent_identity="a1")) == {1}
    assert chosen(plugin, context((("x-session-id", "  "),), agent_identity="a1")) == {1}
    cookie = context()
    cookie.facts[FactKey(SESSION_ID, "cookies")] = "c1"
    plugin.placed(cookie, tickets.single(cookie, 2))
    assert chosen(plugin, cookie) == {2}
    # The same name is the same session, wherever it is read.
    assert chosen(plugin, context(agent_identity="c1")) == {2}


@pytest.mark.parametrize("kind", BOTH)
def test_profile_name_binds_its_own_leg(kind: str) -> None:
    ctx = context(NAMED)
    decode = pinning(kind, ctx)
    prefill = pinning(kind, ctx, name="other", profileName="prefill")
    split = tickets.ticket(ctx, *prefill_and_decode(ctx, 0, 2))
    for plugin in (decode, prefill):
        plugin.placed(ctx, split)
    assert (chosen(decode, ctx), chosen(prefill, ctx)) == ({2}, {0})
    # Another serving endpoint is no news of the prefill one.
    split.slot = 1
    for plugin in (decode, prefill):
        plugin.observe(split, OK, 0.0)
    assert (chosen(decode, ctx), chosen(prefill, ctx)) == ({1}, {0})
    fresh = pinning(kind, ctx, profileName="prefill")
    fresh.placed(ctx, tickets.single(ctx, 2))
    assert chosen(fresh, ctx) == {0, 1, 2}, "the profile did not run"


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 100)
    ctx = context()
    plugin = pinning(BOTH[0], ctx)
    for number in range(5_000):
        ctx.headers = (("x-session-id", f"{number}" * 50),)
        plugin.placed(ctx, tickets.single(ctx, number % 3))
    assert len(plugin.bindings) == 100
    assert chosen(plugin, ctx) == {4_999 % 3}
    ctx.headers = (("x-session-id", "4900" * 50),)
    assert chosen(plugin, ctx) == {4_900 % 3}
    ctx.headers = (("x-session-id", "4899" * 50),)
    assert chosen(plugin, ctx) == {0, 1, 2}


def test_state_names_no_session() -> None:
    ctx = context((("x-session-id", "private-name"),))
    plugin = pinning(BOTH[0], ctx)
    plugin.placed(ctx, tickets.single(ctx, 1))
    assert "private-name" not in repr(plugin.state())
    assert plugin.state()["sessions"] == 1


def test_a_strategy_costs_only_its_own_hooks() -> None:
    view = context().view
    for kind in BOTH:
        assert not hasattr(tickets.made(kind, view), "placed")
        assert not hasattr(tickets.made(kind, view), "refresh")


# -- parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"strategy": "cookie"}, "strategy: expected encoded_endpoint_header or session_id"),
        ({"sessionIdConfig": {"sources": [{}]}}, "exactly one of header or attribute must be set"),
        ({"sessionIdConfig": {"sources": [{"header": "a", "attribute": "b"}]}}, "exactly one of header"),
        ({"sessionIdConfig": {"sources": [{"header": "a", "producer": "b"}]}}, "belong together"),
        ({"sessionIdConfig": {"sources": [{"attribute": "SessionIDDataKey"}]}}, "belong together"),
        ({"sessionIdConfig": {"evictionTtlSeconds": -1}}, "evictionTtlSeconds"),
        ({"sessionIdConfig": {"evictionSweepSeconds": -1}}, "evictionSweepSeconds"),
        ({"headerName": "x"}, "headerName: unknown field"),
    ],
)
@pytest.mark.parametrize("kind", BOTH)
def test_wrong_parameters(kind: str, parameters: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tickets.made(kind, context().view, **parameters)


def test_zero_means_the_default() -> None:
    zeros = {"evictionTtlSeconds": 0, "evictionSweepSeconds": 0, "sources": []}
    ctx = context(NAMED, now=0.0)
    plugin = pinning(BOTH[0], ctx, sessionIdConfig=zeros)
    plugin.placed(ctx, tickets.single(ctx, 1))
    plugin.refresh(300.0)
    assert chosen(plugin, ctx) == {1}


# -- session-id-producer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "headers", "expected"),
    [
        ({}, (("x-session-id", "a"),), "a"),
        ({}, (), None),
        ({"headerName": " X-Mine "}, (("x-mine", " a "), ("x-session-id", "b")), "a"),
        ({"headerName": "x-mine"}, (("x-mine", "  "),), None),
        ({"headerName": "x-mine"}, (("x-mine", "a"), ("x-mine", "b")), "b"),
        ({"cookieName": "sid"}, (("cookie", "a=1; sid=two; b=3"),), "two"),
        ({"cookieName": "sid"}, (("cookie", "a=1;sid=x=y ;b"),), "x=y"),
        ({"cookieName": "sid"}, (("cookie", "sid=first; sid=second"),), "first"),
        ({"cookieName": "sid"}, (("cookie", "a=1"), ("cookie", "sid=two")), "two"),
        ({"cookieName": "sid"}, (("cookie", "SID=two; sid; xsid=3"),), None),
        ({"cookieName": "sid"}, (("x-session-id", "a"),), None),
    ],
)
def test_session_id_producer(parameters: dict[str, str], headers: Headers, expected: str | None) -> None:
    ctx = context(headers)
    producer = tickets.made("session-id-producer", ctx.view, name="mine", **parameters)
    producer.produce(ctx)
    assert ctx.facts.get(FactKey(SESSION_ID, "mine")) == expected
    assert producer.provides == (FactKey(SESSION_ID, "mine"),)


def test_session_id_producer_reads_one_place() -> None:
    with pytest.raises(ValueError, match="exactly one of headerName or cookieName is to be set, not both"):
        tickets.made("session-id-producer", context().view, headerName="a", cookieName="b")


# -- through the director -----------------------------------------------------------------------------


class Silent:
    def placed(self, *heard: Any) -> None: ...
    def served_elsewhere(self, *heard: Any) -> None: ...
    def observed(self, *heard: Any) -> None: ...

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        raise error


class Line:
    """A director over four endpoints whose one profile, or two, has the given plugin.

    Chance picks among equals, so that a second request goes where the first went only if it is pinned.
    """

    def __init__(self, kind: str, parameters: dict[str, Any], seed: int) -> None:
        self.ledger = InflightLedger(16, strict=True)
        self.store = PoolStore(busy=self.ledger.busy)
        self.pods = [Endpoint(f"u{n}", f"pod-{n}", "default", f"10.0.0.{n}", 8000) for n in range(4)]
        self.store.sync(self.pods, 0.0)
        plugin = tickets.made(kind, self.store.view, **parameters)
        self.store.add_member(plugin) if hasattr(plugin, "joined") else None
        profile = Profile("default", (), (ScorerStep("q", "q", 1.0, QueueScorer()),), picker())
        if hasattr(plugin, "keep"):
            profile = replace(profile, filters=(FilterStep(kind, kind, plugin),))
        else:
            profile = replace(profile, scorers=(*profile.scorers, ScorerStep(kind, kind, 1.0, plugin)))
        self.plugins = Plugins(
            OneProfile(profile),
            request_hooks=(tickets.made("agent-identity", self.store.view),),
            placed=(plugin,) if hasattr(plugin, "placed") else (),
            answered=(plugin,),
        )
        self.director = Director(
            self.store, self.ledger, self.plugins, Silent(), Random(seed), max_body_bytes=10_000
        )

    def ask(self, *headers: tuple[str, str], served: str | None = None) -> tuple[str, Edits]:
        """One request from the first to the last: name of its endpoint, headers set on the answer."""
        raw = RawRequest("id", "POST", "/v1/completions", headers, b'{"model":"m","prompt":"hello"}')
        prepared: Prepared = self.director.prepare(raw, 1.0)
        placement = self.director.submit(prepared, 1.0)
        assert isinstance(placement, Placement)
        edits = self.director.observe(placement.ticket, AnswerHeaders(200, served, False), 2.0)
        self.director.observe(placement.ticket, FirstToken(), 2.0)
        self.director.observe(placement.ticket, Ended(Cause.NATURAL, None, 1, 1), 2.0)
        return placement.serving.endpoints[0].name, edits


class OneProfile:
    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def place(self, ctx: Ctx, alive: Mask) -> tuple[Leg, ...]:
        decision = run_profile(self.profile, ctx, alive)
        owners = tuple(owner for slot in decision.slots if (owner := ctx.view.endpoints[slot]))
        return (Leg(Role.DECODE, owners, decision),)


def picker() -> PickerStep:
    return PickerStep("max-score-picker", "max-score-picker", MaxScorePicker(MaxScorePickerParams()))


@pytest.mark.parametrize("kind", BOTH)
def test_token_on_the_first_answer_pins_the_second_request(kind: str) -> None:
    for seed in range(5):
        line = Line(kind, {}, seed)
        first, edits = line.ask()
        ((header, value),) = edits
        assert header == "x-session-token"
        again = [line.ask((header, value.decode())) for _ in range(4)]
        assert {name for name, _ in again} == {first}
        assert {answer for _, answer in again} == {edits}


@pytest.mark.parametrize("kind", BOTH)
def test_pinned_pod_that_is_gone_leaves_all_others(kind: str) -> None:
    line = Line(kind, {}, 1)
    first, edits = line.ask()
    line.store.sync([pod for pod in line.pods if pod.name != first], 3.0)
    second, renewed = line.ask((edits[0][0], edits[0][1].decode()))
    assert second != first
    assert renewed != edits, "the answer names the new one"


@pytest.mark.parametrize("kind", BOTH)
def test_session_id_strategy_by_header_and_by_agent(kind: str) -> None:
    config = {"sources": [{"header": "x-session-id"}, {"attribute": "agent-identity"}]}
    for seed in range(5):
        line = Line(kind, {"strategy": "session_id", "sessionIdConfig": config}, seed)
        mine, agent = ("x-session-id", "one"), ("x-claude-code-session-id", "two")
        first, edits = line.ask(mine)
        assert edits == ()
        assert {line.ask(mine)[0] for _ in range(4)} == {first}
        other, _ = line.ask(agent)
        assert {line.ask(agent)[0] for _ in range(4)} == {other}
        assert {line.ask(mine, agent)[0] for _ in range(4)} == {first}, "the header wins"


@pytest.mark.parametrize("kind", BOTH)
def test_recreated_pod_of_the_same_name_is_no_endpoint_of_old_sessions(kind: str) -> None:
    line = Line(kind, {"strategy": "session_id"}, 3)
    mine = ("x-session-id", "one")
    first, _ = line.ask(mine)
    others = [pod for pod in line.pods if pod.name != first]
    line.store.sync(others, 3.0)
    line.store.refresh(4.0, 1.0)
    line.store.sync([*others, Endpoint("new", first, "default", "10.0.0.77", 8000)], 5.0)
    (plugin,) = line.plugins.answered
    assert plugin.state()["endpoints"] == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", BOTH)
def test_session_follows_a_request_that_the_proxy_sent_elsewhere(kind: str) -> None:
    line = Line(kind, {"strategy": "session_id"}, 3)
    mine = ("x-session-id", "one")
    first, _ = line.ask(mine)
    other = next(pod for pod in line.pods if pod.name != first)
    line.ask(mine, served=other.host_port)
    assert line.ask(mine)[0] == other.name


def test_producer_is_made_where_a_source_needs_it() -> None:
    text = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: session-affinity-scorer
  parameters:
    strategy: session_id
    sessionIdConfig:
      sources: [{attribute: SessionIDDataKey, producer: session-id-producer}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: session-affinity-scorer}]
"""
    assert load_config(text, "file").producers == ("session-id-producer",)
