"""Why this endpoint: a copy of what a decision was made from, and its rendering.

`record_decision` is cheap enough for every request; `explain` and `render_table` do the work when
somebody asks. Nothing here holds prompt text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from epp.pool.records import Endpoint, Floats, Ints, Mask
from epp.scheduling.ports import Ctx
from epp.scheduling.records import Decision, Leg, PluginTiming, PrefixMatch

NOT_READY = "not ready"
OUTSIDE_SUBSET = "outside the subset"


class RecordedDecision(NamedTuple):
    """One decision and the facts it saw, detached from the live columns."""

    request_id: str
    model: str
    target_model: str
    prompt_tokens: int
    endpoints: tuple[Endpoint | None, ...]
    ready: Mask
    present: Mask
    stale: Mask
    waiting_known: Mask
    kv_known: Mask
    waiting: Floats
    running: Floats
    kv_usage: Floats
    in_flight: Ints
    prefill_tokens: Ints
    matches: tuple[tuple[str, PrefixMatch], ...]
    legs: tuple[Leg, ...]


def record_decision(request_id: str, legs: tuple[Leg, ...], ctx: Ctx) -> RecordedDecision:
    """Copy what `explain` needs. Call before the request is charged, so that the load is the one seen."""
    view, load = ctx.view, ctx.load
    matches = tuple(
        (key.producer, _detached(fact)) for key, fact in ctx.facts.items() if isinstance(fact, PrefixMatch)
    )
    return RecordedDecision(
        request_id=request_id,
        model=ctx.request.model,
        target_model=ctx.request.target_model,
        prompt_tokens=ctx.request.prompt_tokens,
        endpoints=view.endpoints,
        ready=view.candidates.copy(),
        present=view.present.copy(),
        stale=view.stale.copy(),
        waiting_known=view.waiting_known.copy(),
        kv_known=view.kv_known.copy(),
        waiting=view.waiting.copy(),
        running=view.running.copy(),
        kv_usage=view.kv_usage.copy(),
        in_flight=load.requests.copy(),
        prefill_tokens=load.prefill_tokens.copy(),
        matches=matches,
        legs=legs,
    )


def _detached(match: PrefixMatch) -> PrefixMatch:
    return PrefixMatch(match.blocks.copy(), match.total_blocks, match.block_tokens, match.total_tokens)


class MatchSeen(msgspec.Struct, frozen=True):
    """Leading blocks of the prompt held, of all its full blocks, according to one producer."""

    producer: str
    blocks: int
    total_blocks: int
    block_tokens: int


class ScoreSeen(msgspec.Struct, frozen=True):
    """One scorer's view of one endpoint: `score` in 0..1, `weighted` = `score` x `weight`."""

    scorer: str
    score: float
    weight: float
    weighted: float


class EndpointSeen(msgspec.Struct, frozen=True):
    """One endpoint as the decision saw it.

    Attributes:
        excluded: what ruled it out: `not ready`, `outside the subset` or a filter's name; None if nothing.
        total, rank: sum of the weighted scores; 1 = highest, equal totals share a rank. None where excluded.
        scraped: False while no metrics page was ever read; the engine's figures are then 0.
        stale: the figures are too old to be trusted.
        waiting, kv_usage: None where no page told them.
        in_flight, prefill_tokens: what this picker had sent there and not seen end.
    """

    name: str
    namespace: str
    host_port: str
    chosen: bool
    excluded: str | None
    rank: int | None
    total: float | None
    scores: tuple[ScoreSeen, ...]
    scraped: bool
    stale: bool
    waiting: float | None
    running: float
    kv_usage: float | None
    in_flight: int
    prefill_tokens: int
    matches: tuple[MatchSeen, ...]


class LegExplained(msgspec.Struct, frozen=True):
    """One role of the placement.

    Attributes:
        chosen: `address:port`, first choice first.
        scorers: name and weight, in the order of every endpoint's `scores`.
        producers: makers of prefix matches, in the order of every endpoint's `matches`.
        endpoints: all members of the pool by rank, excluded ones last.
        timings_us: per plugin, on sampled requests only.
    """

    role: str
    profile: str
    chosen: tuple[str, ...]
    scorers: tuple[tuple[str, float], ...]
    producers: tuple[str, ...]
    endpoints: tuple[EndpointSeen, ...]
    timings_us: dict[str, float]


class Explanation(msgspec.Struct, frozen=True):
    """Why a request went where it went. Encodes to JSON as it is."""

    request_id: str
    model: str
    target_model: str
    prompt_tokens: int
    legs: tuple[LegExplained, ...]


def explain(recorded: RecordedDecision) -> Explanation:
    """The whole story of one recorded decision."""
    return Explanation(
        recorded.request_id,
        recorded.model,
        recorded.target_model,
        recorded.prompt_tokens,
        tuple(_leg(recorded, leg) for leg in recorded.legs),
    )


def _leg(recorded: RecordedDecision, leg: Leg) -> LegExplained:
    decision = leg.decision
    seen = [
        _endpoint(recorded, decision, slot, owner)
        for slot, owner in enumerate(recorded.endpoints)
        if owner is not None
    ]
    seen.sort(key=_reading_order)
    return LegExplained(
        role=leg.role.value,
        profile=decision.profile,
        chosen=tuple(endpoint.host_port for endpoint in leg.endpoints),
        scorers=tuple((column.name, column.weight) for column in decision.columns),
        producers=tuple(producer for producer, _ in recorded.matches),
        endpoints=tuple(seen),
        timings_us={timing.plugin_name: _microseconds(timing) for timing in decision.timings},
    )


def _microseconds(timing: PluginTiming) -> float:
    return round(timing.seconds * 1e6, 1)


def _reading_order(seen: EndpointSeen) -> tuple[int, bool, str, str]:
    """By rank, the chosen first among equals; excluded ones last."""
    rank = seen.rank if seen.rank is not None else 1 << 62
    return rank, not seen.chosen, seen.name, seen.host_port


def _endpoint(recorded: RecordedDecision, decision: Decision, slot: int, owner: Endpoint) -> EndpointSeen:
    excluded = _exclusion(recorded, decision, slot)
    alive = excluded is None
    total = float(decision.total[slot])
    return EndpointSeen(
        name=owner.name,
        namespace=owner.namespace,
        host_port=owner.host_port,
        chosen=slot in decision.slots,
        excluded=excluded,
        rank=1 + int(np.count_nonzero(decision.total > total)) if alive else None,
        total=total if alive else None,
        scores=tuple(
            ScoreSeen(
                column.name,
                float(column.scores[slot]),
                column.weight,
                float(column.scores[slot]) * column.weight,
            )
            for column in decision.columns
            if alive
        ),
        scraped=bool(recorded.present[slot]),
        stale=bool(recorded.stale[slot]),
        waiting=float(recorded.waiting[slot]) if recorded.waiting_known[slot] else None,
        running=float(recorded.running[slot]),
        kv_usage=float(recorded.kv_usage[slot]) if recorded.kv_known[slot] else None,
        in_flight=int(recorded.in_flight[slot]),
        prefill_tokens=int(recorded.prefill_tokens[slot]),
        matches=tuple(
            MatchSeen(producer, int(match.blocks[slot]), match.total_blocks, match.block_tokens)
            for producer, match in recorded.matches
        ),
    )


def _exclusion(recorded: RecordedDecision, decision: Decision, slot: int) -> str | None:
    if not decision.candidates[slot]:
        return OUTSIDE_SUBSET if recorded.ready[slot] else NOT_READY
    for name, mask in decision.excluded:
        if mask[slot]:
            return name
    return None


# -- for people -------------------------------------------------------------------------------------


def render_table(explanation: Explanation, width: int = 100, rows: int = 20) -> str:
    """A plain-text table per leg, `rows` endpoints at most, within `width` columns where that is possible."""
    request = f"request {explanation.request_id or '-'}   {_model(explanation)}"
    lines = [f"{request}   prompt {explanation.prompt_tokens} tokens"]
    for leg in explanation.legs:
        fallbacks = f" and {len(leg.chosen) - 1} fallbacks" if leg.chosen[1:] else ""
        lines += ["", f"{leg.role}: profile {leg.profile} chose {', '.join(leg.chosen[:1])}{fallbacks}", ""]
        lines += _table(leg, width, rows)
        if leg.timings_us:
            spent = ", ".join(f"{name} {spent:g}" for name, spent in leg.timings_us.items())
            lines += ["", f"plugin time in us: {spent}"]
    return "\n".join(map(_printable, lines)) + "\n"


def _printable(text: str) -> str:
    """Clients choose request ids and model names; none of them gets to steer a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _model(explanation: Explanation) -> str:
    if not explanation.model:
        return "no model"
    if explanation.target_model in ("", explanation.model):
        return f"model {explanation.model}"
    return f"model {explanation.model} sent as {explanation.target_model}"


@dataclass(frozen=True, slots=True)
class _Column:
    """Header lines and cells of one table column."""

    header: tuple[str, ...]
    cells: list[str]
    left: bool = False

    @property
    def width(self) -> int:
        return max(len(text) for text in (*self.header, *self.cells))

    def padded(self, text: str, width: int) -> str:
        if len(text) > width:
            text = text[: width - 1] + "~"
        return text.ljust(width) if self.left else text.rjust(width)


def _table(leg: LegExplained, width: int, rows: int) -> list[str]:
    shown = tuple(seen for index, seen in enumerate(leg.endpoints) if index < rows or seen.chosen)
    facts = list(_fact_columns(leg, shown))
    columns = [*facts, *_score_columns(leg, shown)]
    widths = [column.width for column in columns]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    # The name gives way first: the address alone says which endpoint it is.
    widths[2] = max(min(8, widths[2]), widths[2] - max(over, 0))
    height = max(len(column.header) for column in columns)
    headers = [("",) * (height - len(column.header)) + column.header for column in columns]
    lines = [_line(columns, [header[level] for header in headers], widths) for level in range(height)]
    lines.append("  ".join("-" * column_width for column_width in widths))
    for row, seen in enumerate(shown):
        if seen.excluded:
            lines.append(_line(facts, [column.cells[row] for column in facts], widths) + f"  {seen.excluded}")
        else:
            lines.append(_line(columns, [column.cells[row] for column in columns], widths))
    if len(leg.endpoints) > len(shown):
        lines.append(f"... and {len(leg.endpoints) - len(shown)} more")
    lines += ["", "> chosen   score columns: weighted, out of the weight   ? unknown   ! stale"]
    return lines


def _line(columns: list[_Column], texts: list[str], widths: list[int]) -> str:
    padded = (column.padded(text, width) for column, text, width in zip(columns, texts, widths, strict=False))
    return "  ".join(padded).rstrip()


def _fact_columns(leg: LegExplained, shown: tuple[EndpointSeen, ...]) -> Iterator[_Column]:
    yield _Column(("",), [">" if seen.chosen else "" for seen in shown])
    yield _Column(("#",), ["-" if seen.rank is None else str(seen.rank) for seen in shown])
    yield _Column(("endpoint",), [seen.name for seen in shown], left=True)
    yield _Column(("address",), [seen.host_port for seen in shown], left=True)
    yield _Column(("wait",), [_fact(seen, seen.waiting, "g") for seen in shown])
    yield _Column(("run",), [_fact(seen, seen.running, "g") for seen in shown])
    yield _Column(("KV",), [_fact(seen, seen.kv_usage, ".0%") for seen in shown])
    yield _Column(("in", "flight"), [str(seen.in_flight) for seen in shown])
    for index, producer in enumerate(leg.producers):
        header = ("cached",) if len(leg.producers) == 1 else ("cached", producer.split("-")[0])
        yield _Column(header, [_match(seen, index) for seen in shown])


def _score_columns(leg: LegExplained, shown: tuple[EndpointSeen, ...]) -> Iterator[_Column]:
    for index, (name, weight) in enumerate(leg.scorers):
        header = (*name.removesuffix("-scorer").split("-"), f"/{weight:g}")
        yield _Column(header, [_score(seen, index) for seen in shown])
    yield _Column(("total",), ["" if seen.total is None else f"{seen.total:.3f}" for seen in shown])


def _fact(seen: EndpointSeen, figure: float | None, form: str) -> str:
    if figure is None or not seen.scraped:
        return "?"
    return f"{figure:{form}}!" if seen.stale else f"{figure:{form}}"


def _match(seen: EndpointSeen, index: int) -> str:
    if index >= len(seen.matches):
        return ""
    return f"{seen.matches[index].blocks}/{seen.matches[index].total_blocks}"


def _score(seen: EndpointSeen, index: int) -> str:
    return f"{seen.scores[index].weighted:.2f}" if index < len(seen.scores) else ""
