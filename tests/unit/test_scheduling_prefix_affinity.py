"""prefix-cache-affinity-filter: who is kept, worked by hand."""

from typing import Any

import numpy as np
import pytest

from epp.config.load import load_config
from epp.scheduling.ports import Ctx
from epp.scheduling.records import INFLIGHT_LOAD, FactKey, InflightLoad
from tests.data.scheduling import pool, tickets

Row = pool.Row
KIND = "prefix-cache-affinity-filter"
LOAD = FactKey(INFLIGHT_LOAD, "inflight-load-producer")


def context(*cached: int, tokens: tuple[int, ...] | None = None, total: int = 100, seed: int = 0) -> Ctx:
    """Endpoints that hold `cached` of `total` blocks and have `tokens` in flight."""
    rows = [Row(str(n), cached=blocks) for n, blocks in enumerate(cached)]
    ctx = pool.context(rows, total_blocks=total, seed=seed)
    if tokens is not None:
        column = np.zeros(ctx.view.capacity, np.int64)
        column[: len(tokens)] = tokens
        ctx.facts[LOAD] = InflightLoad(column, column)
    return ctx


def kept(ctx: Ctx, **parameters: Any) -> list[int]:
    plugin = tickets.made(KIND, ctx.view, **parameters)
    return np.flatnonzero(plugin.keep(ctx, ctx.view.candidates)).tolist()


IDLE = (0, 0, 0)
ALL = [0, 1, 2]


@pytest.mark.parametrize(
    ("cached", "tokens", "parameters", "expected"),
    [
        ((80, 79, 100), IDLE, {}, [0, 2]),
        ((79, 10, 0), IDLE, {}, ALL),
        ((79, 10, 0), IDLE, {"affinityThreshold": 0.79}, [0]),
        ((80, 79, 100), IDLE, {"affinityThreshold": 1}, [2]),
        ((0, 0, 100), IDLE, {"affinityThreshold": 0}, ALL),
        ((100, 0, 0), IDLE, {"explorationProbability": 1}, ALL),
        ((100, 100, 100), IDLE, {}, ALL),
        # 1000 tokens/s: the penalty is the difference in tokens, in ms.
        ((100, 0, 0), (9000, 0, 500), {"peakPrefillThroughput": 1000, "maxTTFTPenaltyMs": 9000}, [0]),
        ((100, 0, 0), (9001, 0, 500), {"peakPrefillThroughput": 1000, "maxTTFTPenaltyMs": 9000}, ALL),
        ((100, 0, 0), (9001, 1, 500), {"peakPrefillThroughput": 1000, "maxTTFTPenaltyMs": 9000}, [0]),
        (
            (100, 0, 0),
            (409_000, 400_000, 500_000),
            {"peakPrefillThroughput": 500, "maxTTFTPenaltyMs": 18000},
            [0],
        ),
        (
            (100, 0, 0),
            (409_001, 400_000, 500_000),
            {"peakPrefillThroughput": 500, "maxTTFTPenaltyMs": 18000},
            ALL,
        ),
        ((100, 90, 0), (9001, 500, 0), {"peakPrefillThroughput": 1000, "maxTTFTPenaltyMs": 9000}, [0, 1]),
        ((100, 0, 0), (10**9, 0, 0), {"maxTTFTPenaltyMs": 0}, [0]),
        ((100, 0, 0), (10**9, 0, 0), {"maxTTFTPenaltyMs": 0, "peakPrefillThroughput": 0}, [0]),
        # The default: 18 s at 15928 tokens/s.
        ((100, 0, 0), (286_704, 0, 0), {}, [0]),
        ((100, 0, 0), (286_705, 0, 0), {}, ALL),
        # Nothing is known of the load, or of the prefixes.
        ((100, 0, 0), None, {}, ALL),
        ((100, 0, 0), None, {"maxTTFTPenaltyMs": 0}, [0]),
        ((100, 0, 0), IDLE, {"prefixMatchInfoProducerName": "other"}, ALL),
        ((100, 0, 0), IDLE, {"inFlightLoadProducerName": "other"}, ALL),
        ((100, 0, 0), IDLE, {"latencyPredictionInfoProducerName": "unused"}, [0]),
        ((100, 0, 0), IDLE, {"ttftSource": "prefillThroughput"}, [0]),
    ],
)
def test_who_is_kept(
    cached: tuple[int, ...], tokens: tuple[int, ...] | None, parameters: dict[str, Any], expected: list[int]
) -> None:
    assert kept(context(*cached, tokens=tokens), **parameters) == expected


def test_prompt_shorter_than_a_block_keeps_all() -> None:
    assert kept(context(0, 0, tokens=(0, 0), total=0)) == [0, 1]


def test_only_those_in_question_count() -> None:
    ctx = context(100, 0, 0, tokens=(500_000, 500_000, 0))
    plugin = tickets.made(KIND, ctx.view)
    alive = ctx.view.candidates.copy()
    alive[2] = False
    assert np.flatnonzero(plugin.keep(ctx, alive)).tolist() == [0]
    alive[0] = False
    assert np.flatnonzero(plugin.keep(ctx, alive)).tolist() == [1]


def test_exploration_happens_as_often_as_asked() -> None:
    explored = sum(
        len(kept(context(100, 0, 0, tokens=IDLE, seed=seed), explorationProbability=0.25)) > 1
        for seed in range(400)
    )
    assert 70 <= explored <= 130


def test_chance_is_not_drawn_without_exploration() -> None:
    ctx = context(100, 0, 0, tokens=IDLE)
    before = ctx.draw.getstate()
    kept(ctx)
    assert ctx.draw.getstate() == before


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"affinityThreshold": 1.1}, "affinityThreshold"),
        ({"explorationProbability": -0.1}, "explorationProbability"),
        ({"maxTTFTPenaltyMs": -1}, "maxTTFTPenaltyMs"),
        ({"peakPrefillThroughput": 0}, "peakPrefillThroughput must be > 0"),
        ({"ttftSource": "latencyPredictor"}, "not supported yet: it needs predicted-latency-producer"),
        ({"ttftSource": "guess"}, "expected prefillThroughput or latencyPredictor"),
        ({"maxTtftPenaltyMs": 1}, "unknown field; did you mean maxTTFTPenaltyMs"),
    ],
)
def test_wrong_parameters(parameters: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tickets.made(KIND, context(0).view, **parameters)


def test_producers_are_made_for_it() -> None:
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: " + KIND
    both = {"approx-prefix-cache-producer", "inflight-load-producer"}
    assert set(load_config(text, "file").producers) == both
    accepting = text + "\n  parameters: {maxTTFTPenaltyMs: 0}\n"
    assert load_config(accepting, "file").producers == ("approx-prefix-cache-producer",)
