"""The last half minute of requests, kept a second at a time, and the record of signals made from it."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from epp import names
from epp.director import Prepared
from epp.pool.records import Load, PoolView
from epp.scheduling.records import GAP_BOUNDS_S, Cause, Ended, Ticket
from epp.signals import TPOT_BOUNDS_S, TTFT_BOUNDS_S, Distribution, EndpointSignals, Signals

WINDOW_S: Final = 30
"""Long enough for a few requests of a quiet pool, short enough to follow a burst."""


@dataclass(slots=True)
class _Counts:
    """Observations by bucket."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def _empty(bounds: tuple[float, ...]) -> _Counts:
    return _Counts(bounds, [0] * (len(bounds) + 1))


@dataclass(slots=True)
class _Second:
    """What happened in one second."""

    number: int = -1
    arrivals: int = 0
    refusals: int = 0
    failures: int = 0
    offered_prompt_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: _Counts = field(default_factory=lambda: _empty(TTFT_BOUNDS_S))
    tpot: _Counts = field(default_factory=lambda: _empty(TPOT_BOUNDS_S))
    itl: _Counts = field(default_factory=lambda: _empty(GAP_BOUNDS_S))


class SignalWindow:
    """The one owner of this state. A few hundred nanoseconds a fact; reading it costs a fraction of a
    millisecond.
    """

    def __init__(self) -> None:
        self._ring = [_Second() for _ in range(WINDOW_S)]
        self._current = self._ring[0]
        self._began: float | None = None

    def _at(self, now: float) -> _Second:
        number = int(now)
        current = self._current
        if current.number != number:
            if self._began is None:
                self._began = now
            current = self._current = self._ring[number % WINDOW_S] = _Second(number)
        return current

    def placed(self, prepared: Prepared, now: float) -> None:
        second = self._at(now)
        second.arrivals += 1
        second.offered_prompt_tokens += prepared.request.prompt_tokens

    def refused(self, prepared: Prepared | None, now: float) -> None:
        """`prepared`: None where the request could not be read, which is no load."""
        if prepared is not None:
            self.placed(prepared, now)
            self._current.refusals += 1

    def first_token(self, prepared: Prepared, ticket: Ticket, now: float) -> None:
        if ticket.status < 400:
            self._at(now).ttft.observe(now - prepared.received_at)

    def ended(self, ticket: Ticket, fact: Ended, now: float) -> None:
        second = self._at(now)
        if ticket.status >= 400 or fact.cause is not Cause.NATURAL:
            second.failures += 1
        usage, gaps = fact.usage, fact.gaps
        if usage is not None:
            second.prompt_tokens += usage.prompt_tokens
            second.cached_tokens += usage.cached_tokens or 0
            second.output_tokens += usage.output_tokens
        if not ticket.streaming or ticket.status >= 400:
            return
        if gaps is not None:
            second.itl.total += gaps.seconds
            for place, count in enumerate(gaps.counts):
                if count:
                    second.itl.counts[place] += count
        if usage is not None and usage.output_tokens > 1 and ticket.first_token_at is not None:
            second.tpot.observe((now - ticket.first_token_at) / (usage.output_tokens - 1))

    def read(
        self,
        view: PoolView,
        load: Load,
        *,
        pool: str,
        namespace: str,
        saturation: float,
        now: float,
        time_s: float,
    ) -> Signals:
        """The record as of `now`; `time_s` is the same moment in seconds since 1970."""
        oldest = int(now) - WINDOW_S + 1
        seconds = [second for second in self._ring if oldest <= second.number <= now]
        # The current second is not over, and a window that has just begun is not full.
        window_s = min(now - oldest, now - self._began if self._began is not None else 0.0)
        per_s = 1.0 / max(window_s, 1.0)
        return Signals(
            pool=pool,
            namespace=namespace,
            time_s=time_s,
            window_s=max(window_s, 1.0),
            arrivals_per_s=sum(second.arrivals for second in seconds) * per_s,
            refusals_per_s=sum(second.refusals for second in seconds) * per_s,
            failures_per_s=sum(second.failures for second in seconds) * per_s,
            offered_prompt_tokens_per_s=sum(second.offered_prompt_tokens for second in seconds) * per_s,
            prompt_tokens_per_s=sum(second.prompt_tokens for second in seconds) * per_s,
            cached_tokens_per_s=sum(second.cached_tokens for second in seconds) * per_s,
            output_tokens_per_s=sum(second.output_tokens for second in seconds) * per_s,
            ttft_s=_distribution(TTFT_BOUNDS_S, [second.ttft for second in seconds]),
            tpot_s=_distribution(TPOT_BOUNDS_S, [second.tpot for second in seconds]),
            itl_s=_distribution(GAP_BOUNDS_S, [second.itl for second in seconds]),
            saturation=saturation,
            endpoints=_endpoints(view, load, now),
        )


def _distribution(bounds: tuple[float, ...], parts: list[_Counts]) -> Distribution:
    counts = tuple(map(sum, zip([0] * (len(bounds) + 1), *(part.counts for part in parts), strict=True)))
    return Distribution(bounds, counts, sum(part.total for part in parts))


def _endpoints(view: PoolView, load: Load, now: float) -> tuple[EndpointSignals, ...]:
    return tuple(
        EndpointSignals(
            name=owner.name,
            namespace=owner.namespace,
            host_port=owner.host_port,
            role=owner.labels.get(names.ROLE_LABEL, ""),
            ready=bool(view.candidates[slot]),
            age_s=max(now - float(view.scraped_at[slot]), 0.0) if view.present[slot] else None,
            **_figures(view, slot),
            in_flight=int(load.requests[slot]),
            prefill_tokens=int(load.prefill_tokens[slot]),
        )
        for slot, owner in enumerate(view.endpoints)
        if owner is not None
    )


def _figures(view: PoolView, slot: int) -> dict[str, float | None]:
    return {
        "waiting": float(view.waiting[slot]) if view.waiting_known[slot] else None,
        "running": float(view.running[slot]) if view.running_known[slot] else None,
        "kv_usage": float(view.kv_usage[slot]) if view.kv_known[slot] else None,
    }
