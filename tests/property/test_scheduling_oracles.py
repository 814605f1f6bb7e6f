"""Every stateless filter and scorer against a slow computation row by row, in pools of any order and shape.

The rows stand at drawn slots of a larger view, so a plugin that depends on where an endpoint stands, on
free slots or on endpoints out of question differs from its oracle. Faults that are caught follow.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.payload.records import Headers
from epp.pool.records import Floats, Mask
from epp.scheduling.attributes import (
    AttributeFilter,
    AttributeFilterParams,
    AttributeScorer,
    AttributeScorerParams,
)
from epp.scheduling.filters import HeaderBasedTestingFilter, UtilizationFilter, UtilizationFilterParams
from epp.scheduling.label_scorers import (
    ContextLengthFilterScorer,
    ContextLengthParams,
    HeaderLabelAffinityScorer,
    HeaderLabelAffinityScorerParams,
)
from epp.scheduling.labels import ByLabelParams, LabelFilter, LabelSelector
from epp.scheduling.ports import Ctx
from epp.scheduling.scorers import (
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    LoadAwareScorerParams,
    LoraAffinityScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
)
from tests.data.scheduling import pool

Row = pool.Row
Rows = list[Any]

RANGE = "llm-d.ai/context-length-range"
RANGES = ["0-100", "0-50", "50-150", "100-100", "200-100", "none", "", " 10 - 60 ", "0-100000"]
ADAPTERS = ["l1", "l2", "l3"]
ADDRESSES = ["10.0.0.1", "10.0.0.2", "2001:db8::1"]


# -- pools and requests -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the request brings."""

    tokens: int
    model: str
    headers: Headers


def drawn_labels(draw: Random) -> dict[str, str]:
    found = {}
    for key, values in (("a", ["x", "y", ""]), ("b", ["x", "z"]), (RANGE, RANGES)):
        value = draw.choice([None, *values])
        if value is not None:
            found[key] = value
    return found


def drawn_endpoint(draw: Random, name: str, port: int) -> Any:
    row = Row(
        name,
        waiting=draw.choice([0, 1, 2, 7, 31]),
        running=draw.choice([0, 1, 2, 7, 31]),
        kv=draw.choice([0.0, 0.1, 0.5, 1.0]),
        in_flight=draw.randrange(10),
        present=draw.randrange(5) > 0,
        untold=draw.randrange(5) == 0,
        stale=draw.randrange(4) == 0,
        candidate=draw.randrange(4) > 0,
        active=draw.randrange(10),
        attribute=draw.choice([None, 0.0, 1.0, 2.5, -3.0, 10.0, math.inf]),
        adapters=tuple(draw.sample(ADAPTERS, draw.randrange(4))),
        waiting_adapters=tuple(draw.sample(ADAPTERS, draw.randrange(4))),
        most_adapters=draw.randrange(5),
        labels=drawn_labels(draw),
        address=draw.choice(ADDRESSES),
        port=port,
    )
    if not row.present:
        return replace(row, waiting=0, running=0, kv=0.0, stale=False, attribute=None, most_adapters=0)
    return replace(row, waiting=0, running=0, kv=0.0) if row.untold else row


def drawn_pool(draw: Random, count: int) -> Rows:
    rows = [drawn_endpoint(draw, str(number), 8000 + number) for number in range(1, count + 1)]
    rows[0] = replace(rows[0], candidate=True)
    draw.shuffle(rows)
    return rows


def drawn_request(draw: Random) -> Asked:
    headers = []
    if (tier := draw.choice([None, "x", "y", "X", "", "w"])) is not None:
        headers.append(("tier", tier))
    if draw.randrange(4) == 0:
        headers.append(("tier", "y"))
    if draw.randrange(5) > 0:
        entries = [*ADDRESSES, "10.0.0.1:8001", "10.0.0.2:8002", "[2001:db8::1]:8003", "", "no"]
        listed = ",".join(draw.sample(entries, draw.randrange(4)))
        headers.append(("test-epp-endpoint-selection", listed))
    tokens = draw.choice([0, 10, 49, 50, 51, 99, 100, 101, 150, 7000])
    return Asked(tokens, draw.choice([*ADAPTERS, "base"]), tuple(headers))


# -- the formulas, row by row -----------------------------------------------------------------------

Scores = Callable[[Any, Rows, Asked], float]


def candidates(rows: Rows) -> Rows:
    return [row for row in rows if row.candidate]


def min_max(figure: Callable[[Any], float]) -> Scores:
    def score(row: Any, rows: Rows, asked: Asked) -> float:
        figures = [figure(each) for each in candidates(rows)]
        low, high = min(figures), max(figures)
        return 1.0 if low == high else (high - figure(row)) / (high - low)

    return score


def queue(row: Any) -> float:
    if not row.present or row.untold:
        return row.in_flight
    return max(row.waiting, row.in_flight) if row.stale else row.waiting


def running(row: Any) -> float:
    if not row.present or row.untold:
        return row.in_flight
    return max(row.running, row.in_flight) if row.stale else row.running


def load_aware(row: Any, rows: Rows, asked: Asked) -> float:
    return 0.5 if queue(row) == 0 else 0.5 * (1 - min(queue(row), 8) / 8)


def kv(row: Any, rows: Rows, asked: Asked) -> float:
    if row.present and row.untold:
        told = sorted(each.kv for each in candidates(rows) if each.present and not each.untold)
        return 1 - (told[(len(told) - 1) // 2] if told else 0.0)
    return 1 - row.kv


def lora(row: Any, rows: Rows, asked: Asked) -> float:
    if asked.model in row.adapters:
        return 1.0
    if len(set(row.adapters) | set(row.waiting_adapters)) < row.most_adapters:
        return 0.8
    return 0.6 if asked.model in row.waiting_adapters else 0.0


def bounds(row: Any) -> tuple[int, int] | None:
    parts = row.labels[RANGE].split("-")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        return None
    low, high = (int(part) for part in parts)
    return (low, high) if low <= high else None


def context_length(row: Any, rows: Rows, asked: Asked) -> float:
    if RANGE not in row.labels:
        return 0.5
    found = bounds(row)
    if found is None:
        return 0.0
    low, high = found
    if low <= asked.tokens <= high:
        if low == high:
            return 1.0
        width = high - low
        raw = 0.7 * (1 / (1 + width / 10000)) + 0.3 * ((high - asked.tokens) / width)
        return 0.3 + 0.7 * raw
    distance = asked.tokens - high if asked.tokens > high else low - asked.tokens
    return 0.3 / (1 + distance / 1000)


def header_label(row: Any, rows: Rows, asked: Asked) -> float:
    wanted = [value for name, value in asked.headers if name == "tier"]
    return float(bool(wanted and wanted[-1]) and row.labels.get("a") == wanted[-1])


def attribute(lower: bool, fixed: tuple[float, float] | None) -> Scores:
    def score(row: Any, rows: Rows, asked: Asked) -> float:
        if row.attribute is None or math.isinf(row.attribute):
            return 0.0
        figures = [each.attribute for each in candidates(rows) if each.attribute is not None]
        figures = [figure for figure in figures if not math.isinf(figure)]
        low, high = fixed or (min(figures), max(figures))
        if low == high:
            return 1.0
        share = max(0.0, min(1.0, (row.attribute - low) / (high - low)))
        return 1 - share if lower else share

    return score


Keeps = Callable[[Any, Rows, Asked], bool]


def fallback(keep: Keeps) -> Keeps:
    def kept(row: Any, rows: Rows, asked: Asked) -> bool:
        return keep(row, rows, asked) or not any(keep(each, rows, asked) for each in candidates(rows))

    return kept


def selector(row: Any, rows: Rows, asked: Asked) -> bool:
    a, b = row.labels.get("a"), row.labels.get("b")
    return (a is None or a not in ("y",)) and b is not None and row.labels.get(RANGE, "-") != "none"


SELECTOR = {
    "matchExpressions": [
        {"key": "a", "operator": "NotIn", "values": ["y"]},
        {"key": "b", "operator": "Exists"},
        {"key": RANGE, "operator": "NotIn", "values": ["none"]},
    ]
}


def by_label(row: Any, rows: Rows, asked: Asked) -> bool:
    return row.labels["a"] in ("x", "y") if "a" in row.labels else True


def threshold(compare: Callable[[float, float], bool], missing: bool) -> Keeps:
    def kept(row: Any, rows: Rows, asked: Asked) -> bool:
        return missing if row.attribute is None else compare(row.attribute, 1.0)

    return kept


def capped(row: Any, rows: Rows, asked: Asked) -> bool:
    return row.active <= 6 and row.running <= 7 and row.waiting <= 2 and row.kv <= 0.5


def in_range(row: Any, rows: Rows, asked: Asked) -> bool:
    if RANGE not in row.labels:
        return True
    found = bounds(row)
    return found is not None and found[0] <= asked.tokens <= found[1]


def listed_for_test(row: Any, rows: Rows, asked: Asked) -> bool:
    listed = [value for name, value in asked.headers if name == "test-epp-endpoint-selection"]
    chosen: dict[str, Any] = {}
    for entry in listed[-1].split(",") if listed else []:
        for each in sorted(candidates(rows), key=lambda each: each.port):
            bracketed = f"[{each.address}]" if ":" in each.address else each.address
            if entry in (each.address, bracketed, f"{bracketed}:{each.port}"):
                chosen.setdefault(each.address, each)
    return any(each is row for each in chosen.values())


# -- comparing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A plugin, made anew for each example, and the slow form of it."""

    make: Callable[[], Any]
    slow: Callable[[Any, Rows, Asked], float]


def compare(case: Case, rows: Rows, asked: Asked, draw: Random) -> None:
    """Twice with the same plugin: rows at other places are another membership."""
    plugin = case.make()
    for _ in range(2):
        size = len(rows) + draw.randrange(6)
        slots = draw.sample(range(size), len(rows))
        ctx = pool.context(
            rows,
            slots=slots,
            capacity=size,
            model=asked.model,
            prompt_tokens=asked.tokens,
            headers=asked.headers,
        )
        alive = ctx.view.candidates
        before = alive.copy()
        found = plugin.keep(ctx, alive) if hasattr(plugin, "keep") else plugin.score(ctx, alive)
        assert found.shape == alive.shape
        assert (alive == before).all()
        for slot, row in zip(slots, rows, strict=True):
            if row.candidate:
                assert float(found[slot]) == pytest.approx(float(case.slow(row, rows, asked)), abs=1e-12)


def run(case: Case, phases: tuple[Phase, ...], examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
    )
    @given(st.integers(1, 8), st.integers(0, 2**32))
    def searched(count: int, seed: int) -> None:
        draw = Random(seed)
        compare(case, drawn_pool(draw, count), drawn_request(draw), draw)

    searched()


def attribute_scorer(kind: str, **normalization: Any) -> AttributeScorer:
    algorithm = {"type": f"linear_{kind}_is_better", "normalization": normalization}
    params = {"attributeKey": pool.ATTRIBUTE, "algorithm": algorithm}
    return AttributeScorer(msgspec.convert(params, AttributeScorerParams))


def attribute_filter(operator_name: str, **options: Any) -> AttributeFilter:
    algorithm = {"type": "threshold", "threshold": {"operator": operator_name, "value": 1.0}}
    params = {"attribute": pool.ATTRIBUTE, "algorithm": algorithm, **options}
    return AttributeFilter(msgspec.convert(params, AttributeFilterParams))


def utilization_filter(**options: Any) -> UtilizationFilter:
    caps = {"active-requests": 6, "running-requests": 7, "waiting-queue": 2, "kv-cache-utilization": 0.5}
    conditions = [{"metric": metric, "maxValue": most} for metric, most in caps.items()]
    return UtilizationFilter(msgspec.convert({"conditions": conditions, **options}, UtilizationFilterParams))


def label_filter(params: type[msgspec.Struct], value: dict[str, Any]) -> LabelFilter:
    converted: Any = msgspec.convert(value, params)
    return LabelFilter(converted.matches)


def header_label_scorer() -> HeaderLabelAffinityScorer:
    return HeaderLabelAffinityScorer(HeaderLabelAffinityScorerParams(header_name="Tier", label_key="a"))


class Alone:
    """The scoring half of a plugin that also filters."""

    def __init__(self, plugin: Any) -> None:
        self.score = plugin.score


class Filtering:
    """The filtering half of a plugin that also scores."""

    def __init__(self, plugin: Any) -> None:
        self.keep = plugin.keep


def context_plugin() -> ContextLengthFilterScorer:
    return ContextLengthFilterScorer(ContextLengthParams(enable_filtering=True))


FIXED = {"fixedRange": {"min": -1, "max": 4}}
BY_LABEL = {"label": "a", "validValues": ["x", "y"], "allowsNoLabel": True}

CASES = {
    "queue": Case(QueueScorer, min_max(queue)),
    "running": Case(RunningRequestsSizeScorer, min_max(running)),
    "load-aware": Case(lambda: LoadAwareScorer(LoadAwareScorerParams(threshold=8)), load_aware),
    "kv": Case(KvCacheUtilizationScorer, kv),
    "lora": Case(LoraAffinityScorer, lora),
    "context-length": Case(lambda: Alone(context_plugin()), context_length),
    "header-label": Case(header_label_scorer, header_label),
    "attribute, adaptive, lower": Case(lambda: attribute_scorer("lower"), attribute(True, None)),
    "attribute, adaptive, higher": Case(lambda: attribute_scorer("higher"), attribute(False, None)),
    "attribute, fixed, lower": Case(lambda: attribute_scorer("lower", **FIXED), attribute(True, (-1, 4))),
    "attribute, fixed, higher": Case(lambda: attribute_scorer("higher", **FIXED), attribute(False, (-1, 4))),
    "selector": Case(lambda: label_filter(LabelSelector, SELECTOR), selector),
    "by-label": Case(lambda: label_filter(ByLabelParams, BY_LABEL), by_label),
    "threshold": Case(lambda: attribute_filter("LessThan"), threshold(operator.lt, True)),
    "threshold, missing fails": Case(
        lambda: attribute_filter("NotEqual", onMissing="Fail"), threshold(operator.ne, False)
    ),
    "threshold, fallback": Case(
        lambda: attribute_filter("GreaterThanOrEqual", onMissing="Fail", fallbackOnEmpty=True),
        fallback(threshold(operator.ge, False)),
    ),
    "utilization": Case(utilization_filter, capped),
    "utilization, fallback": Case(lambda: utilization_filter(fallbackOnEmpty=True), fallback(capped)),
    "context-length as a filter": Case(lambda: Filtering(context_plugin()), in_range),
    "testing": Case(HeaderBasedTestingFilter, listed_for_test),
}


@pytest.mark.parametrize("name", CASES)
def test_the_formula_holds(name: str) -> None:
    run(CASES[name], tuple(Phase), 60)


# -- faults -----------------------------------------------------------------------------------------


class Score:
    """A scorer from a function."""

    def __init__(self, score: Callable[[Ctx, Mask], Any]) -> None:
        self.score = score


class Keep:
    """A filter from a function."""

    def __init__(self, keep: Callable[[Ctx, Mask], Any]) -> None:
        self.keep = keep


def spread(figure: Floats, among: Mask) -> Floats:
    low, high = figure[among].min(), figure[among].max()
    return np.ones(len(figure)) if low == high else (high - figure) / (high - low)


def everywhere(ctx: Ctx) -> Mask:
    return np.ones(ctx.view.capacity, np.bool_)


def with_label(ctx: Ctx, matches: Callable[[dict[str, str]], bool]) -> Mask:
    owners = ctx.view.endpoints
    return np.array([owner is not None and matches(dict(owner.labels)) for owner in owners])


class Frozen:
    """Looks at labels when it first sees a pool, and never again."""

    def __init__(self, plugin: Any, method: str) -> None:
        self._plugin = plugin
        self._first: Any = None
        setattr(self, method, self._call)
        self._method = method

    def _call(self, ctx: Ctx, alive: Mask) -> Any:
        if self._first is None:
            self._first = getattr(self._plugin, self._method)(ctx, alive)
        return np.resize(self._first, len(alive))


def doubtful_queue(ctx: Ctx, stale: bool, unknown: bool) -> Floats:
    view = ctx.view
    figure = np.where(view.stale & stale, np.maximum(view.waiting, ctx.load.requests), view.waiting)
    return np.where(~view.waiting_known & unknown, ctx.load.requests, figure)


def lora_scores(ctx: Ctx, *, twice: bool = False, full: bool = False, queue_first: bool = False) -> Floats:
    adapters = ctx.view.adapters
    if adapters is None:
        return np.zeros(ctx.view.capacity)
    nobody = np.zeros(ctx.view.capacity, np.bool_)
    waits = adapters.waiting.get(ctx.request.model, nobody)
    taken = adapters.count.copy()
    if twice:
        taken = sum((mask.astype(int) for mask in adapters.running.values()), np.zeros(len(taken), int))
        taken = taken + sum((mask.astype(int) for mask in adapters.waiting.values()), np.zeros_like(taken))
    fits = taken <= adapters.most if full else taken < adapters.most
    scores = np.where(fits, 0.8, np.where(waits, 0.6, 0.0))
    if queue_first:
        scores = np.where(waits, 0.6, np.where(fits, 0.8, 0.0))
    return np.where(adapters.running.get(ctx.request.model, nobody), 1.0, scores)


def header(ctx: Ctx, first: bool = False, lower: bool = False) -> str | None:
    found = [value for name, value in ctx.headers if name == "tier"]
    value = (found[0] if first else found[-1]) if found else None
    return value.lower() if value and lower else value


def equal_label(ctx: Ctx, wanted: str | None) -> Floats:
    return with_label(ctx, lambda each: each.get("a") == wanted).astype(float)


def figures(ctx: Ctx) -> Floats:
    return ctx.view.attributes.get(pool.ATTRIBUTE, np.full(ctx.view.capacity, np.nan))


def attribute_range(ctx: Ctx, among: Mask, missing: float = 0.0) -> Floats:
    figure = figures(ctx)
    told = np.isfinite(figure)
    if not (told & among).any():
        return np.zeros(len(figure))
    low, high = figure[told & among].min(), figure[told & among].max()
    if low == high:
        return told.astype(float)
    return np.where(told, (high - np.where(told, figure, high)) / (high - low), missing)


def fixed_range(ctx: Ctx, clip: bool = True, lower: bool = True, missing: float = 0.0) -> Floats:
    figure = figures(ctx)
    told = np.isfinite(figure)
    share = (np.where(told, figure, 0.0) + 1) / 5
    share = np.clip(share, 0, 1) if clip else share
    return np.where(told, 1 - share if lower else share, missing)


def broken_selector(key: str, matches: Callable[[str | None], bool]) -> Keep:
    rules: dict[str, Callable[[str | None], bool]] = {
        "a": lambda value: value != "y",
        "b": lambda value: value is not None,
        RANGE: lambda value: value != "none",
    }
    rules[key] = matches
    return Keep(
        lambda ctx, alive: with_label(
            ctx, lambda each: all(rule(each.get(name)) for name, rule in rules.items())
        )
    )


def caps(ctx: Ctx, *, strict: bool = False, any_of: bool = False, load: bool = True) -> Mask:
    view = ctx.view
    fact = ctx.facts.get(pool.INFLIGHT_KEY)
    active = fact.requests if fact is not None and load else np.zeros(view.capacity)
    compare = np.less if strict else np.less_equal
    held = [
        compare(active, 6),
        compare(view.running, 7),
        compare(view.waiting, 2),
        compare(view.kv_usage, 0.5),
    ]
    return np.logical_or.reduce(held) if any_of else np.logical_and.reduce(held)


def listed(
    ctx: Ctx,
    alive: Mask,
    *,
    all_ports: bool = False,
    anyone: bool = False,
    ports: bool = True,
    by_slot: bool = False,
) -> Mask:
    mask = np.zeros(len(alive), np.bool_)
    wanted = dict(ctx.headers).get("test-epp-endpoint-selection")
    owners = [(slot, owner) for slot, owner in enumerate(ctx.view.endpoints) if owner is not None]
    owners.sort(key=lambda each: each[0] if by_slot else each[1].port)
    seen: set[str] = set()
    for entry in wanted.split(",") if wanted else []:
        for slot, owner in owners:
            bare = f"[{owner.address}]" if ":" in owner.address else owner.address
            matches = entry in (owner.address, bare) or (ports and entry == f"{bare}:{owner.port}")
            if matches and (anyone or alive[slot]) and (all_ports or owner.address not in seen):
                seen.add(owner.address)
                mask[slot] = True
    return mask


def or_all(kept: Mask, among: Mask) -> Mask:
    return kept if (kept & among).any() else np.ones(len(kept), np.bool_)


def context_scores(ctx: Ctx, **changed: float) -> Floats:
    """The formula with one constant changed."""
    rules = {"edge": 0, "unlabelled": 0.5, "broken": 0.0, "scale": 1000.0, "share": 0.7, **changed}
    scores = np.zeros(ctx.view.capacity)
    tokens = ctx.request.prompt_tokens
    for slot, owner in enumerate(ctx.view.endpoints):
        if owner is None:
            continue
        found = bounds(owner) if RANGE in owner.labels else None
        if found is None:
            scores[slot] = rules["broken"] if RANGE in owner.labels else rules["unlabelled"]
            continue
        low, high = found
        if low <= tokens <= high - rules["edge"]:
            width = high - low
            raw = rules["share"] / (1 + width / 10000) + 0.3 * ((high - tokens) / width if width else 1)
            scores[slot] = 1.0 if not width else 0.3 + 0.7 * raw
        else:
            scores[slot] = 0.3 / (1 + max(low - tokens, tokens - high) / rules["scale"])
    return scores


def compared(compare: Any, missing: bool) -> Keep:
    return Keep(
        lambda ctx, alive: np.where(
            np.isnan(figures(ctx)), missing, compare(np.nan_to_num(figures(ctx)), 1.0)
        )
    )


FAULTS: list[tuple[str, Callable[[], Any]]] = [
    ("queue", lambda: Score(lambda ctx, alive: spread(doubtful_queue(ctx, True, True), everywhere(ctx)))),
    ("queue", lambda: Score(lambda ctx, alive: spread(doubtful_queue(ctx, False, True), alive))),
    ("queue", lambda: Score(lambda ctx, alive: spread(doubtful_queue(ctx, True, False), alive))),
    ("running", lambda: Score(lambda ctx, alive: spread(ctx.view.running, alive))),
    ("running", lambda: Score(lambda ctx, alive: spread(ctx.view.running, everywhere(ctx)))),
    ("running", lambda: QueueScorer()),
    ("running", lambda: Score(lambda ctx, alive: 1 - RunningRequestsSizeScorer().score(ctx, alive))),
    ("load-aware", lambda: Score(lambda ctx, alive: 0.5 * (1 - doubtful_queue(ctx, True, True) / 8))),
    ("load-aware", lambda: LoadAwareScorer(LoadAwareScorerParams())),
    ("load-aware", lambda: Score(lambda ctx, alive: 0.5 * (1 - np.minimum(ctx.view.waiting, 8) / 8))),
    ("kv", lambda: Score(lambda ctx, alive: 1 - ctx.view.kv_usage)),
    ("kv", lambda: Score(lambda ctx, alive: ctx.view.kv_usage)),
    ("kv", lambda: Score(lambda ctx, alive: np.where(ctx.view.kv_known, 1 - ctx.view.kv_usage, 0.5))),
    ("lora", lambda: Score(lambda ctx, alive: lora_scores(ctx, twice=True))),
    ("lora", lambda: Score(lambda ctx, alive: lora_scores(ctx, full=True))),
    ("lora", lambda: Score(lambda ctx, alive: lora_scores(ctx, queue_first=True))),
    ("context-length", lambda: Score(lambda ctx, alive: context_scores(ctx, edge=1))),
    ("context-length", lambda: Score(lambda ctx, alive: context_scores(ctx, unlabelled=1.0))),
    ("context-length", lambda: Score(lambda ctx, alive: context_scores(ctx, broken=0.5))),
    ("context-length", lambda: Score(lambda ctx, alive: context_scores(ctx, scale=10.0))),
    ("context-length", lambda: Score(lambda ctx, alive: context_scores(ctx, share=1.0))),
    ("context-length", lambda: Frozen(context_plugin(), "score")),
    ("header-label", lambda: Score(lambda ctx, alive: equal_label(ctx, header(ctx, first=True)))),
    ("header-label", lambda: Score(lambda ctx, alive: equal_label(ctx, header(ctx, lower=True)))),
    ("header-label", lambda: Score(lambda ctx, alive: equal_label(ctx, header(ctx)))),
    ("header-label", lambda: Frozen(header_label_scorer(), "score")),
    ("attribute, adaptive, lower", lambda: Score(lambda ctx, alive: attribute_range(ctx, everywhere(ctx)))),
    ("attribute, adaptive, lower", lambda: Score(lambda ctx, alive: attribute_range(ctx, alive, 0.5))),
    ("attribute, adaptive, lower", lambda: attribute_scorer("higher")),
    ("attribute, adaptive, higher", lambda: attribute_scorer("lower")),
    ("attribute, adaptive, higher", lambda: Score(lambda ctx, alive: 1 - attribute_range(ctx, alive))),
    ("attribute, adaptive, higher", lambda: attribute_scorer("higher", **FIXED)),
    ("attribute, fixed, lower", lambda: Score(lambda ctx, alive: fixed_range(ctx, clip=False))),
    ("attribute, fixed, lower", lambda: Score(lambda ctx, alive: fixed_range(ctx, lower=False))),
    ("attribute, fixed, lower", lambda: Score(lambda ctx, alive: fixed_range(ctx, missing=1.0))),
    ("attribute, fixed, higher", lambda: Score(lambda ctx, alive: fixed_range(ctx, clip=False, lower=False))),
    ("attribute, fixed, higher", lambda: attribute_scorer("higher")),
    ("attribute, fixed, higher", lambda: Score(lambda ctx, alive: fixed_range(ctx))),
    ("selector", lambda: broken_selector("a", lambda value: value not in (None, "y"))),
    ("selector", lambda: broken_selector("b", lambda value: value is not None and value != "z")),
    ("selector", lambda: broken_selector("a", lambda value: value in (None, "x"))),
    ("selector", lambda: Frozen(label_filter(LabelSelector, SELECTOR), "keep")),
    ("by-label", lambda: label_filter(ByLabelParams, {**BY_LABEL, "allowsNoLabel": False})),
    ("by-label", lambda: label_filter(ByLabelParams, {**BY_LABEL, "validValues": ["x", "y", ""]})),
    ("by-label", lambda: label_filter(ByLabelParams, {**BY_LABEL, "validValues": ["x"]})),
    ("threshold", lambda: compared(np.less_equal, True)),
    ("threshold", lambda: compared(np.less, False)),
    ("threshold", lambda: compared(np.greater, True)),
    ("threshold, missing fails", lambda: Keep(lambda ctx, alive: figures(ctx) != 1.0)),
    ("threshold, missing fails", lambda: compared(np.not_equal, True)),
    ("threshold, missing fails", lambda: compared(np.equal, False)),
    ("threshold, fallback", lambda: attribute_filter("GreaterThanOrEqual", onMissing="Fail")),
    ("threshold, fallback", lambda: attribute_filter("GreaterThanOrEqual", fallbackOnEmpty=True)),
    (
        "threshold, fallback",
        lambda: Keep(lambda ctx, alive: or_all(np.nan_to_num(figures(ctx), nan=-9) >= 1, everywhere(ctx))),
    ),
    ("utilization", lambda: Keep(lambda ctx, alive: caps(ctx, strict=True))),
    ("utilization", lambda: Keep(lambda ctx, alive: caps(ctx, any_of=True))),
    ("utilization", lambda: Keep(lambda ctx, alive: caps(ctx, load=False))),
    ("utilization", lambda: Keep(lambda ctx, alive: caps(ctx) & ctx.view.present)),
    ("utilization, fallback", lambda: utilization_filter()),
    ("utilization, fallback", lambda: Keep(lambda ctx, alive: or_all(caps(ctx), everywhere(ctx)))),
    ("utilization, fallback", lambda: Keep(lambda ctx, alive: or_all(caps(ctx, strict=True), alive))),
    (
        "context-length as a filter",
        lambda: Keep(lambda ctx, alive: context_scores(ctx, unlabelled=0.0) > 0.3),
    ),
    ("context-length as a filter", lambda: Keep(lambda ctx, alive: context_scores(ctx, broken=0.5) > 0.3)),
    ("context-length as a filter", lambda: Keep(lambda ctx, alive: context_scores(ctx, edge=1) > 0.3)),
    ("context-length as a filter", lambda: Frozen(context_plugin(), "keep")),
    ("testing", lambda: Keep(lambda ctx, alive: listed(ctx, alive, all_ports=True))),
    ("testing", lambda: Keep(lambda ctx, alive: listed(ctx, alive, anyone=True))),
    ("testing", lambda: Keep(lambda ctx, alive: listed(ctx, alive, ports=False))),
    ("testing", lambda: Keep(lambda ctx, alive: listed(ctx, alive, by_slot=True))),
]

# What the faults above are made of, without a fault.
SOUND: list[tuple[str, Callable[[], Any]]] = [
    ("queue", lambda: Score(lambda ctx, alive: spread(doubtful_queue(ctx, True, True), alive))),
    ("lora", lambda: Score(lambda ctx, alive: lora_scores(ctx))),
    ("context-length", lambda: Score(lambda ctx, alive: context_scores(ctx))),
    ("attribute, adaptive, lower", lambda: Score(lambda ctx, alive: attribute_range(ctx, alive))),
    ("attribute, fixed, lower", lambda: Score(lambda ctx, alive: fixed_range(ctx))),
    ("selector", lambda: broken_selector("b", lambda value: value is not None)),
    ("threshold", lambda: compared(np.less, True)),
    ("utilization", lambda: Keep(lambda ctx, alive: caps(ctx))),
    ("utilization, fallback", lambda: Keep(lambda ctx, alive: or_all(caps(ctx), alive))),
    ("testing", lambda: Keep(lambda ctx, alive: listed(ctx, alive))),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_faults_are_caught(number: int) -> None:
    name, make = FAULTS[number]
    with pytest.raises(AssertionError):
        run(Case(make, CASES[name].slow), (Phase.generate,), 300)


@pytest.mark.parametrize("number", range(len(SOUND)))
def test_the_faults_differ_by_their_fault_alone(number: int) -> None:
    name, make = SOUND[number]
    run(Case(make, CASES[name].slow), (Phase.generate,), 60)


def test_every_oracle_has_three_faults() -> None:
    named = [name for name, _ in FAULTS]
    assert {name: named.count(name) for name in CASES if named.count(name) < 3} == {}
