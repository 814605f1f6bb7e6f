"""A pool under load written down as rows, for tests of admission."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from epp.payload.records import Api, InferenceRequest
from epp.pool.records import Load
from epp.pool.store import empty_view
from epp.scheduling.ports import Ctx

NOW = 1000.0


@dataclass(frozen=True)
class Row:
    """One endpoint. `age_s`: of its figures. `stale`: what the pool says about them."""

    waiting: float = 0
    kv: float = 0.0
    requests: int = 0
    tokens: int = 0
    age_s: float = 0.05
    stale: bool = False
    present: bool = True
    candidate: bool = True


def context(rows: Sequence[Row], *, priority: int = 0, draw: Random | None = None) -> Ctx:
    """The rows at slots 0, 1, 2 ...; two free slots follow, with rubbish in them."""
    size, places = len(rows) + 2, range(len(rows))
    view = empty_view(size)
    load = Load(np.full(size, 10**6, np.int64), np.full(size, 10**9, np.int64))
    view.waiting[:] = 10**6
    view.kv_usage[:] = 1.0
    view.present[places] = [row.present for row in rows]
    view.stale[places] = [row.stale for row in rows]
    view.scraped_at[places] = [NOW - row.age_s if row.present else 0.0 for row in rows]
    view.waiting[places] = [row.waiting for row in rows]
    view.kv_usage[places] = [row.kv for row in rows]
    view.candidates[places] = [row.candidate for row in rows]
    load.requests[places] = [row.requests for row in rows]
    load.prefill_tokens[places] = [row.tokens for row in rows]
    request = InferenceRequest(Api.CHAT, "model", "model")
    return Ctx(request, view, load, {}, NOW, draw or Random(0), priority=priority)
