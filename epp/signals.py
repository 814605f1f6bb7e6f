"""Load and latency as one picker sees them: the record it publishes, and how those of several are added up.

A reader takes records of its own `version` only. Distributions are counts by bucket and not percentiles,
because only counts can be added.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

VERSION: Final = 1

# Each bound is a fifth above the one before: a quantile read from the counts is wrong by a tenth at most.
TTFT_BOUNDS_S: Final = tuple(float(f"{0.001 * 1.2**step:.4g}") for step in range(74))
TPOT_BOUNDS_S: Final = tuple(float(f"{0.0005 * 1.2**step:.4g}") for step in range(50))


class Distribution(msgspec.Struct, frozen=True):
    """Observations by bucket.

    Attributes:
        bounds: upper bounds, rising.
        counts: how many are at most the bound at the same place and above the one before; larger ones last.
        total: sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None without observations."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The bound that at least `share` of the observations do not exceed, evenly spread within its bucket.

        None without observations; the largest bound where the quantile is above it.
        """
        wanted = share * self.count
        if not self.count:
            return None
        seen, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and seen + count >= wanted:
                return lower + (bound - lower) * max(wanted - seen, 0.0) / count
            seen, lower = seen + count, bound
        return self.bounds[-1]

    def share_within(self, limit: float) -> float | None:
        """Share of the observations in buckets that end at `limit` or below; None without observations."""
        within = sum(self.counts[: bisect_right(self.bounds, limit)])
        return within / self.count if self.count else None


class EndpointSignals(msgspec.Struct, frozen=True):
    """One endpoint.

    Attributes:
        role: its label; empty where it has none.
        ready: may be chosen now. One that was removed is listed until its last request has ended.
        age_s: how old its engine's figures are; None = never read.
        waiting, running, kv_usage: its engine's figures, None = not told.
        in_flight, prefill_tokens: sent there and not ended; prompt tokens until the first output token.
    """

    name: str
    namespace: str
    host_port: str
    role: str
    ready: bool
    age_s: float | None
    waiting: float | None
    running: float | None
    kv_usage: float | None
    in_flight: int
    prefill_tokens: int


class Signals(msgspec.Struct, frozen=True):
    """What one picker saw of its pool, or what several did.

    Rates are over the last `window_s`.

    Attributes:
        pickers: how many records are in this one.
        time_s: when it was made, in seconds since 1970; of several the oldest.
        arrivals_per_s: requests that could be read, refused ones included.
        refusals_per_s: those of them that were placed nowhere.
        failures_per_s: placed requests that ended in an error or were cut off.
        offered_prompt_tokens_per_s: estimated when requests come.
        prompt_tokens_per_s, cached_tokens_per_s, output_tokens_per_s: reported by engines, as answers end.
        ttft_s: from a request's arrival to its first output token.
        tpot_s: of streamed answers, time after the first token by the tokens after it.
        itl_s: of streamed answers, times between two chunks.
        saturation: of the pool, as its detector tells; 1 and above is saturated. Of several the largest.
    """

    pool: str
    namespace: str
    time_s: float
    window_s: float
    arrivals_per_s: float
    refusals_per_s: float
    failures_per_s: float
    offered_prompt_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    saturation: float
    endpoints: tuple[EndpointSignals, ...]
    pickers: int = 1
    version: int = VERSION


_RATES: Final = (
    "arrivals_per_s",
    "refusals_per_s",
    "failures_per_s",
    "offered_prompt_tokens_per_s",
    "prompt_tokens_per_s",
    "cached_tokens_per_s",
    "output_tokens_per_s",
)


def decode(data: bytes) -> Signals:
    """Read a record that a picker published.

    Raises:
        ValueError: it is something else, or of another version.
    """
    version = msgspec.json.decode(data, type=_Versioned).version
    if version != VERSION:
        raise ValueError(f"signals of version {version}; this reads version {VERSION}")
    return msgspec.json.decode(data, type=Signals)


class _Versioned(msgspec.Struct):
    version: int


def summed(records: Sequence[Signals]) -> Signals:
    """The pool as the pickers before it see it together.

    What pickers did is added up. What they read from the same engine is not: the freshest figures count.

    Raises:
        ValueError: there is none, or they are of different pools.
    """
    if not records:
        raise ValueError("no signals to add up")
    pools = {(record.namespace, record.pool) for record in records}
    if len(pools) > 1:
        named = ", ".join(sorted(f"{namespace}/{pool}" for namespace, pool in pools))
        raise ValueError(f"signals of different pools: {named}")
    rates = {name: sum(getattr(record, name) for record in records) for name in _RATES}
    return Signals(
        pool=records[0].pool,
        namespace=records[0].namespace,
        time_s=min(record.time_s for record in records),
        window_s=min(record.window_s for record in records),
        **rates,
        ttft_s=_merged(record.ttft_s for record in records),
        tpot_s=_merged(record.tpot_s for record in records),
        itl_s=_merged(record.itl_s for record in records),
        saturation=max(record.saturation for record in records),
        endpoints=_endpoints(records),
        pickers=sum(record.pickers for record in records),
    )


def _merged(parts: Iterable[Distribution]) -> Distribution:
    first, *others = parts
    counts = list(first.counts)
    total = first.total
    for other in others:
        if other.bounds != first.bounds:
            raise ValueError("distributions with different bounds cannot be added")
        counts = [one + more for one, more in zip(counts, other.counts, strict=True)]
        total += other.total
    return Distribution(first.bounds, tuple(counts), total)


@dataclass(slots=True)
class _Seen:
    freshest: EndpointSignals
    in_flight: int = 0
    prefill_tokens: int = 0


def _endpoints(records: Iterable[Signals]) -> tuple[EndpointSignals, ...]:
    found: dict[tuple[str, str, str], _Seen] = {}
    for record in records:
        for endpoint in record.endpoints:
            key = (endpoint.namespace, endpoint.name, endpoint.host_port)
            seen = found.setdefault(key, _Seen(endpoint))
            seen.in_flight += endpoint.in_flight
            seen.prefill_tokens += endpoint.prefill_tokens
            if _age(endpoint) < _age(seen.freshest):
                seen.freshest = endpoint
    return tuple(
        msgspec.structs.replace(seen.freshest, in_flight=seen.in_flight, prefill_tokens=seen.prefill_tokens)
        for seen in found.values()
    )


def _age(endpoint: EndpointSignals) -> float:
    return float("inf") if endpoint.age_s is None else endpoint.age_s
