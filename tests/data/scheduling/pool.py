"""A pool written down as rows, for tests: one row an endpoint, placed at any slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import xxhash

from epp.payload.records import Api, InferenceRequest
from epp.pool.records import Endpoint, Load
from epp.pool.store import empty_view
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.ports import Ctx, Picker
from epp.scheduling.profiles import PickerStep, Profile, ScorerStep
from epp.scheduling.records import PREFIX_MATCH, FactKey, PrefixMatch
from epp.scheduling.scorers import (
    DEFAULT_PREFIX_PRODUCER,
    KvCacheUtilizationScorer,
    PrefixCacheScorer,
    PrefixCacheScorerParams,
    QueueScorer,
)

TOTAL_BLOCKS = 100
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Row:
    """One endpoint. `cached`: leading blocks held, of TOTAL_BLOCKS. `untold`: the page lacks the load."""

    name: str
    waiting: float = 0
    running: float = 0
    kv: float = 0.0
    cached: int = 0
    in_flight: int = 0
    present: bool = True
    untold: bool = False
    stale: bool = False
    candidate: bool = True


def context(
    rows: Sequence[Row],
    *,
    slots: Sequence[int] | None = None,
    capacity: int | None = None,
    seed: int = 0,
    total_blocks: int = TOTAL_BLOCKS,
) -> Ctx:
    """The rows at `slots` (0, 1, 2 ... by default) of a view with spare room."""
    places = list(slots) if slots is not None else list(range(len(rows)))
    size = capacity if capacity is not None else max(places, default=-1) + 3

    endpoints: list[Endpoint | None] = [None] * size
    for place, row in zip(places, rows, strict=True):
        endpoints[place] = Endpoint(row.name, row.name, "default", f"10.0.0.{row.name}", 8000)
    view = empty_view(size)
    view.endpoints = tuple(endpoints)
    view.host_ports = tuple("" if endpoint is None else endpoint.host_port for endpoint in endpoints)
    view.identity[places] = [xxhash.xxh3_64_intdigest(row.name.encode()) for row in rows]
    view.candidates[places] = [row.candidate for row in rows]
    view.present[places] = [row.present for row in rows]
    view.stale[places] = [row.stale for row in rows]
    view.waiting_known[places] = view.kv_known[places] = [row.present and not row.untold for row in rows]
    view.waiting[places] = [row.waiting for row in rows]
    view.running[places] = [row.running for row in rows]
    view.kv_usage[places] = [row.kv for row in rows]
    load = Load(np.zeros(size, np.int64), np.zeros(size, np.int64))
    load.requests[places] = [row.in_flight for row in rows]
    blocks = np.zeros(size, np.int64)
    blocks[places] = [row.cached for row in rows]
    match = PrefixMatch(blocks, total_blocks, BLOCK_TOKENS, total_blocks * BLOCK_TOKENS)
    request = InferenceRequest(Api.CHAT, "model", "model", prompt_tokens=match.total_tokens)
    facts = {FactKey(PREFIX_MATCH, DEFAULT_PREFIX_PRODUCER): match}
    return Ctx(request, view, load, facts, 0.0, Random(seed))


def default_profile(weights: tuple[float, float, float] = (2, 2, 3), count: int = 1) -> Profile:
    """queue, kv and prefix scorer with `weights`, and max-score-picker."""
    scorers = (QueueScorer(), KvCacheUtilizationScorer(), PrefixCacheScorer(PrefixCacheScorerParams()))
    names = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
    steps = zip(names, weights, scorers, strict=True)
    return Profile(
        "default",
        (),
        tuple(ScorerStep(name, name, weight, scorer) for name, weight, scorer in steps),
        picker(MaxScorePicker(MaxScorePickerParams(max_num_of_endpoints=count))),
    )


def picker(plugin: Picker) -> PickerStep:
    """`plugin` as a profile's picker."""
    return PickerStep("max-score-picker", "max-score-picker", plugin)
