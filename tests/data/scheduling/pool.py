"""A pool written down as rows, for tests: one row an endpoint, placed at any slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import xxhash

from epp.payload.records import Api, Headers, InferenceRequest
from epp.pool.records import Adapters, Endpoint, Load, PoolView
from epp.pool.store import empty_view
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.ports import Ctx, Picker
from epp.scheduling.profiles import PickerStep, Profile, ScorerStep
from epp.scheduling.records import INFLIGHT_LOAD, PREFIX_MATCH, FactKey, InflightLoad, PrefixMatch
from epp.scheduling.scorers import (
    DEFAULT_PREFIX_PRODUCER,
    KvCacheUtilizationScorer,
    PrefixCacheScorer,
    PrefixCacheScorerParams,
    QueueScorer,
)

TOTAL_BLOCKS = 100
BLOCK_TOKENS = 64
ATTRIBUTE = "custom.figure"
INFLIGHT_KEY = FactKey(INFLIGHT_LOAD, "inflight-load-producer")


@dataclass(frozen=True)
class Row:
    """One endpoint.

    Attributes:
        cached: leading blocks held, of TOTAL_BLOCKS. untold: the page lacks the load.
        active: requests in flight as a producer counts them. attribute: the figure ATTRIBUTE.
        adapters, waiting_adapters: LoRA, with `most_adapters` places.
    """

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
    active: int = 0
    attribute: float | None = None
    adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    most_adapters: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    port: int = 8000


def context(
    rows: Sequence[Row],
    *,
    slots: Sequence[int] | None = None,
    capacity: int | None = None,
    seed: int = 0,
    total_blocks: int = TOTAL_BLOCKS,
    model: str = "model",
    prompt_tokens: int | None = None,
    headers: Headers = (),
) -> Ctx:
    """The rows at `slots` (0, 1, 2 ... by default) of a view with spare room.

    Adapters, attributes and the producer's load are there only where a row has any.
    """
    places = list(slots) if slots is not None else list(range(len(rows)))
    size = capacity if capacity is not None else max(places, default=-1) + 3

    endpoints: list[Endpoint | None] = [None] * size
    for place, row in zip(places, rows, strict=True):
        address = row.address or f"10.0.0.{row.name}"
        endpoints[place] = Endpoint(row.name, row.name, "default", address, row.port, row.labels)
    view = empty_view(size)
    view.endpoints = tuple(endpoints)
    view.host_ports = tuple("" if endpoint is None else endpoint.host_port for endpoint in endpoints)
    view.identity[places] = [xxhash.xxh3_64_intdigest(row.name.encode()) for row in rows]
    view.candidates[places] = [row.candidate for row in rows]
    view.present[places] = [row.present for row in rows]
    view.stale[places] = [row.stale for row in rows]
    told = [row.present and not row.untold for row in rows]
    view.waiting_known[places] = view.running_known[places] = view.kv_known[places] = told
    view.waiting[places] = [row.waiting for row in rows]
    view.running[places] = [row.running for row in rows]
    view.kv_usage[places] = [row.kv for row in rows]
    load = Load(np.zeros(size, np.int64), np.zeros(size, np.int64))
    load.requests[places] = [row.in_flight for row in rows]
    blocks = np.zeros(size, np.int64)
    blocks[places] = [row.cached for row in rows]
    match = PrefixMatch(blocks, total_blocks, BLOCK_TOKENS, total_blocks * BLOCK_TOKENS)
    tokens = match.total_tokens if prompt_tokens is None else prompt_tokens
    request = InferenceRequest(Api.CHAT, model, model, prompt_tokens=tokens)
    facts: dict[FactKey, Any] = {FactKey(PREFIX_MATCH, DEFAULT_PREFIX_PRODUCER): match}
    _add_seldom_facts(rows, places, view, facts)
    return Ctx(request, view, load, facts, 0.0, Random(seed), headers=headers)


def _add_seldom_facts(
    rows: Sequence[Row], places: Sequence[int], view: PoolView, facts: dict[FactKey, Any]
) -> None:
    if any(row.active for row in rows):
        active = np.zeros(view.capacity, np.int64)
        active[list(places)] = [row.active for row in rows]
        facts[INFLIGHT_KEY] = InflightLoad(active, np.zeros(view.capacity, np.int64))
    if any(row.attribute is not None for row in rows):
        figure = np.full(view.capacity, np.nan)
        figure[list(places)] = [np.nan if row.attribute is None else row.attribute for row in rows]
        view.attributes = {ATTRIBUTE: figure}
    if any(row.adapters or row.waiting_adapters or row.most_adapters for row in rows):
        adapters = Adapters({}, {}, np.zeros(view.capacity, np.int64), np.zeros(view.capacity, np.int64))
        for place, row in zip(places, rows, strict=True):
            for names, masks in (
                (row.adapters, adapters.running),
                (row.waiting_adapters, adapters.waiting),
            ):
                for name in names:
                    masks.setdefault(name, np.zeros(view.capacity, np.bool_))[place] = True
            adapters.count[place] = len({*row.adapters, *row.waiting_adapters})
            adapters.most[place] = row.most_adapters
        view.adapters = adapters


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
