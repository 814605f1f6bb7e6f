"""An engine of the lab driven by the clock of an event loop, and how well it keeps its schedule."""

import asyncio
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, Protocol

import msgspec
import numpy as np

from epp.lab.engine import Engine, EngineSpec, StepResult

EARLY_S: Final = 0.0005
"""Event loops round timers up to a millisecond: asked this much earlier, a step ends around its time."""

KEPT_STEPS: Final = 20_000

TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Sink(Protocol):
    """Where the tokens of one sequence go."""

    def first(self, cached_tokens: int) -> None:
        """Called right before the first token."""

    def token(self) -> None:
        """One more token. Called as often as tokens were asked for."""


class LagSummary(msgspec.Struct, frozen=True):
    """How late the last steps ended against the schedule, every token of theirs written.

    `*_ms` are wall milliseconds; `*_share` are parts of the step's own wall duration.
    """

    steps: int
    step_p50_ms: float
    p50_ms: float
    p99_ms: float
    p50_share: float
    p99_share: float


@dataclass(slots=True)
class Lag:
    """Lateness and duration, in wall seconds, of the last `KEPT_STEPS` steps."""

    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def record(self, late_s: float, step_s: float) -> None:
        """A step that ended early by a timer's grain is on time."""
        self.late_s.append(late_s if late_s > 0.0 else 0.0)
        self.step_s.append(step_s)


def summarize(lags: Sequence[Lag]) -> LagSummary:
    """Over all steps kept by `lags`; zeros when there was none."""
    late = np.fromiter(itertools.chain.from_iterable(lag.late_s for lag in lags), np.float64)
    step = np.fromiter(itertools.chain.from_iterable(lag.step_s for lag in lags), np.float64)
    if not len(late):
        return LagSummary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50_s, p99_s = np.percentile(late, (50, 99))
    p50_share, p99_share = np.percentile(late / step, (50, 99))
    return LagSummary(
        steps=len(late),
        step_p50_ms=round(float(np.median(step)) * 1e3, 3),
        p50_ms=round(float(p50_s) * 1e3, 3),
        p99_ms=round(float(p99_s) * 1e3, 3),
        p50_share=round(float(p50_share), 4),
        p99_share=round(float(p99_share), 4),
    )


class Histogram:
    """Counts of values per bucket; `bounds` are inclusive upper ends."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class _Active:
    sink: Sink
    submitted_at: float
    token_at: float = 0.0


class RealtimeEngine:
    """Runs an engine `speedup` times as fast as the hardware it stands for.

    The schedule is the engine's own: a step begins where the one before was due to end, however late
    its tokens were written, so lateness shows as lag and never as a slower engine. `ttft` and `itl`
    are wall seconds, as a client sees them. Belongs to the running event loop.
    """

    def __init__(self, spec: EngineSpec, speedup: float) -> None:
        self.engine = Engine(spec)
        self.lag = Lag()
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.itl = Histogram(ITL_BUCKETS_S)
        self.submitted = 0
        self._speedup = speedup
        self._epoch = monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._active: dict[int, _Active] = {}
        self._ids = itertools.count()

    def submit(
        self,
        chain: Sequence[int],
        prompt_tokens: int,
        output_tokens: int,
        output_chain: Sequence[int],
        sink: Sink,
    ) -> int:
        """As `Engine.submit`; tokens go to `sink`. Returns the id to cancel it with."""
        request_id = next(self._ids)
        self.engine.submit(request_id, chain, prompt_tokens, output_tokens, output_chain)
        self._active[request_id] = _Active(sink, monotonic())
        self.submitted += 1
        if self._timer is None:
            # Not at once: what arrives in the same turn of the loop shares the first batch.
            self._timer = self._loop.call_soon(self._begin)
        return request_id

    def cancel(self, request_id: int) -> None:
        """The sink hears nothing more. Ended and unknown ids are ignored."""
        if self._active.pop(request_id, None) is not None:
            self.engine.cancel(request_id)

    def stop(self) -> None:
        """No sink hears anything more. The engine is not used again."""
        self._active.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._start_step((monotonic() - self._epoch) * self._speedup)

    def _start_step(self, at: float) -> None:
        ends_at = self.engine.start_step(at)
        if ends_at is None:
            self._timer = None
            return
        self._arm(self._epoch + ends_at / self._speedup)

    def _arm(self, due: float) -> None:
        delay = due - EARLY_S - monotonic()
        if delay > 0.0:
            self._timer = self._loop.call_later(delay, self._end_step, due)
        else:
            self._timer = self._loop.call_soon(self._end_step, due)

    def _end_step(self, due: float) -> None:
        now = monotonic()
        if now < due - 2 * EARLY_S:
            self._arm(due)
            return
        result = self.engine.finish_step()
        self._deliver(result, now)
        self.lag.record(monotonic() - due, (result.ended_at - result.started_at) / self._speedup)
        self._start_step(result.ended_at)

    def _deliver(self, result: StepResult, now: float) -> None:
        active_by_id = self._active
        for request_id in result.tokens:
            active = active_by_id[request_id]
            if request_id in result.first:
                active.sink.first(result.first[request_id])
                self.ttft.observe(now - active.submitted_at)
            else:
                self.itl.observe(now - active.token_at)
            active.token_at = now
            active.sink.token()
        for request_id in result.finished:
            del active_by_id[request_id]
