"""Histograms that cost a bisection, not a walk along the buckets, and that take what was counted elsewhere.

prometheus_client's own take a lock and compare with one bound after the other: 2.5 to 3.5 us an observation,
ten a request, where this is 0.3 us. They are observed by one thread; another renders them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.utils import floatToGoString


class Tally:
    """One series.

    Attributes:
        counts: observations by bucket, the one beyond all bounds last; not cumulative.
        total: sum of what was observed.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Take over observations that were counted elsewhere by the same buckets."""
        for place, count in enumerate(counts):
            if count:
                self.counts[place] += count
        self.total += total


class Tallies:
    """A histogram with its series by label values; one without labels has its one series from the start.

    Attributes:
        name: without the suffixes of its series.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        bounds: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        """`bounds`: rising, without infinity."""
        self.name = name
        self._text = text
        self._names = labels
        self._bounds = bounds
        self._marks = tuple(map(_mark, (*bounds, inf)))
        self._series: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        """The series of these label values, made when it is not there."""
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._names):
                raise ValueError(f"{self.name} has the labels {self._names}, not {len(values)}")
            found = self._series[values] = Tally(self._bounds)
        return found

    def remove(self, *values: str) -> None:
        self._series.pop(values, None)

    def describe(self) -> Iterator[Metric]:
        yield Metric(self.name, self._text, "histogram")

    def collect(self) -> Iterator[Metric]:
        """All series as the exposition format wants them: buckets cumulative, then count and sum."""
        metric = Metric(self.name, self._text, "histogram")
        # A copy: the observing thread may add a series meanwhile.
        for values, tally in list(self._series.items()):
            labels = dict(zip(self._names, values, strict=True))
            running = 0
            for mark, count in zip(self._marks, list(tally.counts), strict=True):
                running += count
                metric.add_sample(f"{self.name}_bucket", {**labels, "le": mark}, float(running))
            metric.add_sample(f"{self.name}_count", labels, float(running))
            metric.add_sample(f"{self.name}_sum", labels, tally.total)
        yield metric


def _mark(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
