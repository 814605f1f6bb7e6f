"""Scorers beyond the default ones: expected scores computed by hand."""

from typing import Any

import msgspec
import numpy as np
import pytest

from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.scheduling.attributes import AttributeScorer, AttributeScorerParams
from epp.scheduling.label_scorers import (
    ContextLengthFilterScorer,
    ContextLengthParams,
    ContextLengthScorer,
    HeaderLabelAffinityScorer,
    HeaderLabelAffinityScorerParams,
)
from epp.scheduling.scorers import (
    LoadAwareScorer,
    LoadAwareScorerParams,
    LoraAffinityScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
)
from tests.data.scheduling import pool

Row = pool.Row


def scores(scorer: Any, rows: list[Any], **options: Any) -> list[float]:
    ctx = pool.context(rows, **options)
    return [float(score) for score in scorer.score(ctx, ctx.view.candidates)[: len(rows)]]


# -- load -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Row("1", running=3), Row("2", running=0), Row("3", running=10)], [0.7, 1.0, 0.0]),
        ([Row("1", running=5), Row("2", running=5)], [1.0, 1.0]),
        ([Row("1", running=7)], [1.0]),
        # Trusted facts count alone, whatever is in flight; the queue does not enter.
        ([Row("1", running=2, in_flight=50, waiting=9), Row("2", running=4)], [1.0, 0.0]),
        # Stale: the larger of the last value and what is in flight.
        ([Row("1", running=2, in_flight=6, stale=True), Row("2", running=4), Row("3")], [0, 1 / 3, 1]),
        ([Row("1", running=8, in_flight=6, stale=True), Row("2", running=4), Row("3")], [0, 0.5, 1]),
        # Never scraped: what is in flight.
        ([Row("1", in_flight=3, present=False), Row("2", running=4), Row("3")], [0.25, 0, 1]),
        ([Row("1", present=False), Row("2", running=4), Row("3", running=2)], [1, 0, 0.5]),
        # So for a page without the series.
        ([Row("1", in_flight=3, untold=True), Row("2", running=4), Row("3")], [0.25, 0, 1]),
    ],
)
def test_running_requests_size_scorer(rows: list[Any], expected: list[float]) -> None:
    assert scores(RunningRequestsSizeScorer(), rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("row", "threshold", "expected"),
    [
        (Row("1"), 128, 0.5),
        (Row("1", waiting=64), 128, 0.25),
        (Row("1", waiting=1), 128, 0.49609375),
        (Row("1", waiting=128), 128, 0.0),
        (Row("1", waiting=1000), 128, 0.0),
        (Row("1", waiting=3), 4, 0.125),
        (Row("1", waiting=2, in_flight=3), 4, 0.25),
        (Row("1", waiting=2, in_flight=3, stale=True), 4, 0.125),
        (Row("1", waiting=3, in_flight=2, stale=True), 4, 0.125),
        (Row("1", in_flight=2, present=False), 4, 0.25),
        (Row("1", in_flight=2, untold=True), 4, 0.25),
    ],
)
def test_load_aware_scorer(row: Any, threshold: int, expected: float) -> None:
    scorer = LoadAwareScorer(LoadAwareScorerParams(threshold=threshold))
    # The score is the endpoint's own: a second endpoint changes nothing.
    assert scores(scorer, [row, Row("2", waiting=7)])[0] == expected


def test_load_aware_scorer_has_the_threshold_of_the_field() -> None:
    assert LoadAwareScorerParams().threshold == 128


@pytest.mark.parametrize("figure", ["waiting", "running"])
def test_a_smaller_tree_is_no_reason_where_the_queue_is_long(figure: str) -> None:
    """A cache miss goes to the idle endpoint, whatever each one's cache holds."""
    scorer = QueueScorer() if figure == "waiting" else RunningRequestsSizeScorer()
    busy, idle = Row("1", **{figure: 50}), Row("2", cached=100)
    assert scores(scorer, [busy, idle]) == [0.0, 1.0]


# -- LoRA -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("1", adapters=("x",), most_adapters=4), 1.0),
        (Row("1", adapters=("x", "y"), most_adapters=2), 1.0),
        (Row("1", adapters=("y",), most_adapters=2), 0.8),
        (Row("1", most_adapters=1), 0.8),
        # A free place is worth more than a place in the queue.
        (Row("1", adapters=("y",), waiting_adapters=("x",), most_adapters=3), 0.8),
        (Row("1", adapters=("y",), waiting_adapters=("x",), most_adapters=2), 0.6),
        (Row("1", adapters=("y",), waiting_adapters=("z",), most_adapters=2), 0.0),
        # One set of adapters told as running and waiting: two of four places are taken, not four.
        (Row("1", adapters=("a", "b"), waiting_adapters=("a", "b"), most_adapters=4), 0.8),
        # An engine without adapters, or one that never said.
        (Row("1"), 0.0),
        # What was told last counts, however long ago.
        (Row("1", adapters=("x",), most_adapters=1, stale=True), 1.0),
    ],
)
def test_lora_affinity_scorer(row: Any, expected: float) -> None:
    rows = [row, Row("2", adapters=("w",), most_adapters=1)]
    assert scores(LoraAffinityScorer(), rows, model="x") == [expected, 0.0]


def test_a_pool_without_adapters_prefers_nobody() -> None:
    assert scores(LoraAffinityScorer(), [Row("1"), Row("2")], model="x") == [0.0, 0.0]


def test_a_base_model_is_scored_as_an_adapter_that_is_loaded_nowhere() -> None:
    rows = [Row("1", adapters=("x",), most_adapters=2), Row("2", adapters=("x",), most_adapters=1), Row("3")]
    assert scores(LoraAffinityScorer(), rows, model="base") == [0.8, 0.0, 0.0]


def test_the_adapter_is_the_one_the_engine_is_asked_for() -> None:
    ctx = pool.context([Row("1", adapters=("x",), most_adapters=1)], model="alias")
    ctx.request = msgspec.structs.replace(ctx.request, target_model="x")
    assert LoraAffinityScorer().score(ctx, ctx.view.candidates)[0] == 1.0


# -- context length ---------------------------------------------------------------------------------

RANGE = "llm-d.ai/context-length-range"


@pytest.mark.parametrize(
    ("label", "tokens", "expected"),
    [
        # Width 10000 and half of it free: 0.7 / 2 + 0.3 / 2 = 0.5, of the 0.7 above 0.3.
        ("0-10000", 5000, 0.3 + 0.7 * 0.5),
        ("0-10000", 0, 0.3 + 0.7 * 0.65),
        ("0-10000", 10000, 0.3 + 0.7 * 0.35),
        ("2000-12000", 2000, 0.3 + 0.7 * 0.65),
        ("500-500", 500, 1.0),
        (" 0 - 10000 ", 5000, 0.65),
        ("+0-10000", 5000, 0.65),
        # Outside, a thousand tokens away: half of 0.3.
        ("0-10000", 11000, 0.15),
        ("2000-3000", 1000, 0.15),
        ("2000-3000", 1999, 0.3 / 1.001),
        (None, 5000, 0.5),
        ("", 5000, 0.0),
        ("5000", 5000, 0.0),
        ("0-1-2", 1, 0.0),
        ("-5-10", 1, 0.0),
        ("9-3", 5, 0.0),
        ("0-8k", 5, 0.0),
        ("0-1_000", 5, 0.0),
    ],
)
def test_context_length_aware(label: str | None, tokens: int, expected: float) -> None:
    row = Row("1", labels={} if label is None else {RANGE: label})
    found = scores(ContextLengthScorer(ContextLengthParams()), [row, Row("2")], prompt_tokens=tokens)
    assert found == pytest.approx([expected, 0.5])


def test_narrow_ranges_win_but_near_their_end_those_with_headroom_do() -> None:
    rows = [Row(str(size), labels={"size": f"0-{size}"}) for size in (2048, 8192, 131072)]
    scorer = ContextLengthScorer(ContextLengthParams(label="size"))
    for tokens, best in ((100, 0), (2048, 1), (2049, 1), (9000, 2), (200_000, 2)):
        found = scores(scorer, rows, prompt_tokens=tokens)
        assert found.index(max(found)) == best


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [(0, [1, 1, 0, 0, 0]), (10, [1, 1, 1, 0, 0]), (11, [1, 0, 1, 0, 0]), (99, [1, 0, 0, 1, 0])],
)
def test_context_length_aware_as_a_filter(tokens: int, kept: list[int]) -> None:
    labels: list[dict[str, str]] = [{}, {RANGE: "0-10"}, {RANGE: "10-20"}, {RANGE: "99-99"}, {RANGE: "all"}]
    rows = [Row(str(number), labels=each) for number, each in enumerate(labels)]
    ctx = pool.context(rows, prompt_tokens=tokens)
    plugin = ContextLengthFilterScorer(ContextLengthParams(enable_filtering=True))
    assert plugin.keep(ctx, ctx.view.candidates)[:5].tolist() == kept


def test_only_the_filtering_kind_filters() -> None:
    assert not hasattr(ContextLengthScorer(ContextLengthParams()), "keep")


# -- header and label -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((("x-tier", "gold"),), [1.0, 0.0, 0.0, 0.0]),
        ((("x-tier", "silver"),), [0.0, 1.0, 0.0, 0.0]),
        ((("x-tier", "bronze"),), [0.0, 0.0, 0.0, 0.0]),
        ((("x-tier", "Gold"),), [0.0, 0.0, 0.0, 0.0]),
        ((("x-tier", ""),), [0.0, 0.0, 0.0, 0.0]),
        ((), [0.0, 0.0, 0.0, 0.0]),
        ((("x-tier", "gold"), ("x-tier", "silver")), [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_header_label_affinity_scorer(headers: Any, expected: list[float]) -> None:
    params = HeaderLabelAffinityScorerParams(header_name="X-Tier", label_key="tier")
    rows = [
        Row("1", labels={"tier": "gold"}),
        Row("2", labels={"tier": "silver"}, stale=True),
        Row("3", labels={"tier": ""}),
        Row("4", labels={"other": "gold"}),
    ]
    assert scores(HeaderLabelAffinityScorer(params), rows, headers=headers) == expected


def test_a_label_changed_on_a_living_endpoint_counts_for_the_next_request() -> None:
    scorer = HeaderLabelAffinityScorer(HeaderLabelAffinityScorerParams(header_name="h", label_key="tier"))
    store = PoolStore()
    first = Endpoint("uid", "pod", "default", "10.0.0.1", 8000, {"tier": "gold"})
    ctx = pool.context([Row("1")], headers=(("h", "gold"),))
    ctx.view = store.view
    for labels, expected in (({"tier": "gold"}, 1.0), ({"tier": "silver"}, 0.0), ({"tier": "gold"}, 1.0)):
        store.sync([msgspec.structs.replace(first, labels=labels)], 0.0)
        assert scorer.score(ctx, store.view.candidates)[0] == expected


# -- attributes -------------------------------------------------------------------------------------


def attribute_scorer(kind: str, normalization: dict[str, Any] | None = None) -> AttributeScorer:
    algorithm = {"type": f"linear_{kind}_is_better", "normalization": normalization or {}}
    params = {"attributeKey": pool.ATTRIBUTE, "algorithm": algorithm}
    return AttributeScorer(msgspec.convert(params, AttributeScorerParams))


FIXED = {"fixedRange": {"min": 10, "max": 20}}


@pytest.mark.parametrize(
    ("kind", "normalization", "figures", "expected"),
    [
        ("higher", None, [2, 4, 12], [0.0, 0.2, 1.0]),
        ("lower", None, [2, 4, 12], [1.0, 0.8, 0.0]),
        ("lower", {"adaptiveRange": {}}, [2, 4, 12], [1.0, 0.8, 0.0]),
        ("lower", None, [-1, 1], [1.0, 0.0]),
        ("lower", None, [3, 3, None], [1.0, 1.0, 0.0]),
        ("higher", None, [3, None], [1.0, 0.0]),
        ("lower", None, [0, None, 10], [1.0, 0.0, 0.0]),
        ("lower", None, [None, None], [0.0, 0.0]),
        ("lower", None, [0, 10, float("inf")], [1.0, 0.0, 0.0]),
        ("higher", FIXED, [10, 15, 20], [0.0, 0.5, 1.0]),
        ("lower", FIXED, [10, 15, 20], [1.0, 0.5, 0.0]),
        ("higher", FIXED, [-5, 99, None], [0.0, 1.0, 0.0]),
        ("lower", FIXED, [-5, 99, None], [1.0, 0.0, 0.0]),
        ("lower", FIXED, [None], [0.0]),
    ],
)
def test_endpoint_attribute_scorer(
    kind: str, normalization: dict[str, Any] | None, figures: list[Any], expected: list[float]
) -> None:
    rows = [Row(str(number), attribute=figure) for number, figure in enumerate(figures)]
    assert scores(attribute_scorer(kind, normalization), rows) == pytest.approx(expected)


def test_the_adaptive_range_is_that_of_the_endpoints_in_question() -> None:
    rows = [Row("1", attribute=1000, candidate=False), Row("2", attribute=4), Row("3", attribute=6)]
    assert scores(attribute_scorer("lower"), rows)[1:] == [1.0, 0.0]


def test_an_old_figure_counts_as_it_is() -> None:
    rows = [Row("1", attribute=1, stale=True), Row("2", attribute=3), Row("3", attribute=2)]
    assert scores(attribute_scorer("lower"), rows) == [1.0, 0.0, 0.5]


def test_scores_do_not_share_memory_with_the_pool() -> None:
    ctx = pool.context([Row("1", attribute=1.0), Row("2", attribute=2.0)])
    before = ctx.view.attributes[pool.ATTRIBUTE].copy()
    attribute_scorer("higher").score(ctx, ctx.view.candidates)[:] = 7.0
    np.testing.assert_array_equal(ctx.view.attributes[pool.ATTRIBUTE], before)
