"""What is said about a decision: detached from the live columns, complete, readable."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.pool.records import Mask
from epp.scheduling.explain import Explanation, explain, record_decision, render_table
from epp.scheduling.ports import Ctx
from epp.scheduling.profiles import FilterStep, SingleProfileHandler
from epp.scheduling.records import INFLIGHT_LOAD, PREFIX_MATCH, SESSION_ID, FactKey, InflightLoad
from tests.data.scheduling import pool

Row = pool.Row

ROWS = [
    Row("1", waiting=2, running=5, kv=0.4, cached=92, in_flight=7),
    Row("2"),
    Row("3", waiting=31, kv=0.9, cached=88, stale=True),
    Row("4", present=False),
    Row("5", candidate=False),
    Row("6"),
    Row("7", waiting=1),
    Row("8", running=3, untold=True),
]


class NotTheSeventh:
    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        kept = np.ones(len(alive), np.bool_)
        kept[6] = False
        return kept


def explained(request_id: str = "r-1", clock: Any = None) -> tuple[Ctx, Explanation]:
    """One decision over ROWS: the fifth is not ready, the sixth outside the subset, the seventh filtered."""
    ctx = pool.context(ROWS)
    ctx.clock = clock
    filters = (FilterStep("no-7", "test-filter", NotTheSeventh()),)
    handler = SingleProfileHandler(replace(pool.default_profile(), filters=filters))
    alive = ctx.view.candidates.copy()
    alive[5] = False
    recorded = record_decision(request_id, handler.place(ctx, alive), ctx)
    for live in (
        ctx.view.waiting,
        ctx.view.kv_usage,
        ctx.view.present,
        ctx.view.candidates,
        ctx.load.requests,
    ):
        live[:] = 1
    next(iter(ctx.facts.values())).blocks[:] = 0
    return ctx, explain(recorded)


def test_every_member_is_accounted_for() -> None:
    _, explanation = explained()
    (leg,) = explanation.legs
    assert (leg.role, leg.profile, leg.chosen) == ("decode", "default", ("10.0.0.1:8000",))
    assert {seen.name: seen.excluded for seen in leg.endpoints} == {
        "1": None,
        "2": None,
        "3": None,
        "4": None,
        "5": "not ready",
        "6": "outside the subset",
        "7": "no-7",
        "8": None,
    }
    assert [seen.name for seen in leg.endpoints if seen.chosen] == ["1"]
    assert [seen.name for seen in leg.endpoints][:1] == ["1"]


def test_the_facts_are_those_of_the_moment() -> None:
    _, explanation = explained()
    first = next(seen for seen in explanation.legs[0].endpoints if seen.name == "1")
    assert (first.waiting, first.running, first.kv_usage, first.in_flight) == (2, 5, 0.4, 7)
    assert (first.scraped, first.stale) == (True, False)
    (match,) = first.matches
    assert (match.blocks, match.total_blocks, match.block_tokens) == (92, 100, 64)
    by_name = {seen.name: seen for seen in explanation.legs[0].endpoints}
    assert by_name["3"].stale
    assert not by_name["4"].scraped


def test_only_prefix_matches_are_matches() -> None:
    """Other plugins leave records of other kinds; a decision is kept whatever they are."""
    ctx = pool.context(ROWS)
    ctx.facts[FactKey(INFLIGHT_LOAD, "inflight")] = InflightLoad(ctx.load.requests, ctx.load.requests)
    ctx.facts[FactKey(SESSION_ID, "sessions")] = "session"
    legs = SingleProfileHandler(pool.default_profile()).place(ctx, ctx.view.candidates)
    recorded = record_decision("r", legs, ctx)
    kinds = {key.kind for key in ctx.facts}
    assert kinds == {PREFIX_MATCH, INFLIGHT_LOAD, SESSION_ID}
    assert [producer for producer, _ in recorded.matches] == [
        key.producer for key in ctx.facts if key.kind == PREFIX_MATCH
    ]


def test_scores_add_up() -> None:
    _, explanation = explained()
    for seen in explanation.legs[0].endpoints:
        if seen.excluded:
            assert (seen.total, seen.rank, seen.scores) == (None, None, ())
            continue
        assert seen.total == pytest.approx(sum(score.weighted for score in seen.scores))
        assert all(score.weighted == pytest.approx(score.weight * score.score) for score in seen.scores)
    first = explanation.legs[0].endpoints[0]
    assert first.scores[2].score == pytest.approx(0.92)
    assert first.scores[0].score == pytest.approx(29 / 31)


def test_ranks_follow_totals_and_ties_share_them() -> None:
    _, explanation = explained()
    ranks = [(seen.name, seen.rank) for seen in explanation.legs[0].endpoints if seen.rank is not None]
    # 2 and 4 are both idle and cold; of 8 nobody knows how full it is.
    assert ranks == [("1", 1), ("2", 2), ("4", 2), ("8", 4), ("3", 5)]


def test_an_explanation_is_json() -> None:
    _, explanation = explained()
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation


def test_the_table_shows_it_all_within_its_width() -> None:
    _, explanation = explained()
    table = render_table(explanation)
    lines = table.splitlines()
    assert max(map(len, lines)) <= 100
    assert "request r-1" in lines[0]
    assert "profile default chose 10.0.0.1:8000" in table
    (row,) = [line for line in lines if "10.0.0.1:8000" in line and line.startswith(">  1")]
    assert row.split()[2:] == [
        "1",
        "10.0.0.1:8000",
        "2",
        "5",
        "40%",
        "7",
        "92/100",
        "1.87",
        "1.20",
        "2.76",
        "5.831",
    ]
    (stale,) = [line for line in lines if "10.0.0.3:8000" in line]
    assert "31!" in stale
    assert "90%!" in stale
    (unseen,) = [line for line in lines if "10.0.0.4:8000" in line]
    assert unseen.split()[3:6] == ["?", "?", "?"]
    (untold,) = [line for line in lines if "10.0.0.8:8000" in line]
    assert untold.split()[3:6] == ["?", "3", "?"]
    assert any(line.endswith("outside the subset") for line in lines)
    assert any(line.endswith("no-7") for line in lines)


def table_of_names(length: int, width: int) -> str:
    ctx = pool.context([Row("9", waiting=waiting) for waiting in (1, 2)])
    ctx.view.endpoints = tuple(
        None if owner is None else msgspec.structs.replace(owner, name="a" * length)
        for owner in ctx.view.endpoints
    )
    legs = SingleProfileHandler(pool.default_profile()).place(ctx, ctx.view.candidates)
    return render_table(explain(record_decision("r", legs, ctx)), width=width)


def table_width(table: str) -> int:
    (rule,) = [line for line in table.splitlines() if line and not line.strip("- ")]
    return len(rule)


@pytest.mark.parametrize("length", [1, 8, 9, 30, 200])
def test_only_long_names_give_way_and_only_as_far_as_they_must(length: int) -> None:
    whole = table_of_names(length, 10_000)
    for width in (60, 80, 100, 120, 300):
        table = table_of_names(length, width)
        least = table_width(whole) - max(length - 8, 0)
        assert table_width(table) == min(max(width, least), table_width(whole))
        assert "10.0.0.9:8000" in table
        assert (table == whole) == (table_width(table) == table_width(whole))
        assert ("a~" in table) == (table != whole)


def test_a_large_pool_is_cut_but_never_the_chosen() -> None:
    ctx = pool.context([Row(str(number), waiting=number) for number in range(60)])
    legs = SingleProfileHandler(pool.default_profile(count=30)).place(ctx, ctx.view.candidates)
    table = render_table(explain(record_decision("r", legs, ctx)), rows=5)
    assert table.count("\n> ") == 30 + 1  # the legend has one
    assert "... and 30 more" in table


def test_as_many_rows_as_asked_for() -> None:
    ctx = pool.context([Row(str(number), waiting=number) for number in range(12)])
    legs = SingleProfileHandler(pool.default_profile()).place(ctx, ctx.view.candidates)
    explanation = explain(record_decision("r", legs, ctx))
    for rows in (1, 5, 11):
        table = render_table(explanation, rows=rows)
        assert sum(":8000 " in line for line in table.splitlines()) == rows
        assert f"... and {12 - rows} more" in table
    assert " more" not in render_table(explanation, rows=12)


def test_clients_cannot_steer_the_terminal() -> None:
    _, explanation = explained(request_id="\x1b[2Jx")
    evil = msgspec.structs.replace(explanation, model="m\x1b]0;t\x07", target_model="a\nb")
    assert (
        render_table(evil).splitlines()[0] == "request ?[2Jx   model m?]0;t? sent as a?b   prompt 6400 tokens"
    )


def test_timings_are_shown_where_taken() -> None:
    assert "plugin time" not in render_table(explained()[1])
    ticks = iter(range(100))
    _, explanation = explained(clock=lambda: next(ticks) * 1e-6)
    assert explanation.legs[0].timings_us["queue-scorer"] == 1.0
    assert "plugin time in us: no-7 1, queue-scorer 1" in render_table(explanation)


def test_facts_of_other_kinds_are_left_out() -> None:
    ctx = pool.context([Row("1", cached=40, active=3), Row("2")])
    assert pool.INFLIGHT_KEY in ctx.facts
    legs = SingleProfileHandler(pool.default_profile()).place(ctx, ctx.view.candidates)
    (leg,) = explain(record_decision("r", legs, ctx)).legs
    assert leg.producers == ("approx-prefix-cache-producer",)
