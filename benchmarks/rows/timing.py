"""CPU time of repeated work, and the yardstick it is held against."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Effort:
    """How hard to measure.

    Attributes:
        repeats: samples of a row; a window of a process counts as one.
        inner: calls (or requests) in one sample of a short row.
        window_s: length of a window in which another process is watched.
        blocks: different blocks in the index that is looked up and weighed.
        pairs: (block, endpoint) pairs in the process whose memory is weighed.
        starts: times a picker is started to see how long it takes.
    """

    repeats: int = 9
    inner: int = 200
    window_s: float = 20.0
    blocks: int = 1_000_000
    pairs: int = 3_000_000
    starts: int = 5


FULL = Effort()
SMOKE = Effort(repeats=1, inner=2, window_s=0.3, blocks=4000, pairs=4000, starts=1)


@dataclass(frozen=True)
class Result:
    """One measured row.

    Attributes:
        samples: in `unit`, in the order they were taken; less is better.
        budget: None where the row explains another one and has none of its own.
        apart: why the row cannot be held against its budget directly; empty where it can.
        detail: further figures of the same run.
    """

    row: str
    unit: str
    budget: float | None
    samples: tuple[float, ...]
    apart: str = ""
    detail: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def cpu_us(
    action: Callable[[], object],
    effort: Effort,
    *,
    per: int = 1,
    inner: int | None = None,
    between: Callable[[], object] = lambda: None,
) -> tuple[float, ...]:
    """CPU microseconds of one call, or of one of the `per` things each call does: a figure a sample.

    `between` runs after each call, unmeasured. Where it matters, give `inner=1` and a call that does much.
    """
    calls = effort.inner if inner is None else inner
    action()
    between()
    samples = []
    for _ in range(effort.repeats):
        start = time.process_time()
        for _ in range(calls):
            action()
        took = time.process_time() - start
        between()
        samples.append(took / calls / per * 1e6)
    return tuple(samples)


def calibration_ms(repeats: int = 7) -> float:
    """Least CPU time of a fixed loop of plain Python: what a CPU millisecond is worth here and now."""

    def loop() -> int:
        total = 0
        for number in range(200_000):
            total += number * number % 7
        return total

    return min(cpu_us(loop, Effort(repeats=repeats), inner=1)) / 1000
