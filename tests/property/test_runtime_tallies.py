"""Our histograms against prometheus_client's: the same observations make the same page."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, enable_created_metrics
from prometheus_client.exposition import generate_latest

from epp.runtime import tallies
from epp.runtime.tallies import Tallies, Tally

BOUNDS = (0.0, 0.005, 0.1, 1, 2.5, 3600)
VALUES = st.lists(
    st.tuples(
        st.sampled_from(("a", 'b"\\\n', "ü")),
        st.one_of(st.sampled_from(BOUNDS), st.floats(0, 5000), st.integers(0, 4000)),
    ),
    max_size=30,
)


def ours(observed: Sequence[tuple[str, float]]) -> str:
    registry = CollectorRegistry()
    made = Tallies("h", "Text.", ("name",), BOUNDS, registry)
    for label, value in observed:
        made.labels(label).observe(value)
    return generate_latest(registry).decode()


def theirs(observed: Sequence[tuple[str, float]]) -> str:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        registry = CollectorRegistry()
        made = Histogram("h", "Text.", ("name",), registry=registry, buckets=BOUNDS)
        for label, value in observed:
            made.labels(label).observe(value)
        return generate_latest(registry).decode()
    finally:
        enable_created_metrics()  # type: ignore[no-untyped-call]


@given(VALUES)
def test_the_page_is_the_same(observed: list[tuple[str, float]]) -> None:
    assert ours(observed) == theirs(observed)


@given(VALUES)
def test_taking_over_counts_is_observing_each(observed: list[tuple[str, float]]) -> None:
    one, counted, taken = Tally(BOUNDS), Tally(BOUNDS), Tally(BOUNDS)
    for number, (_, value) in enumerate(observed):
        one.observe(value)
        (counted if number % 2 else taken).observe(value)
    taken.add(counted.counts, counted.total)
    assert taken.counts == one.counts
    assert taken.total == pytest.approx(one.total)


SHOWN = [("a", 0.005), ("a", 0.006), ("a", 9999.0), ("ü", 0.0)]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("bisect_left", lambda bounds, value: sum(bound <= value for bound in bounds)),
        ("_mark", lambda bound: str(bound)),
        ("zip", lambda *columns, strict: reversed(list(zip(*columns, strict=strict)))),
    ],
)
def test_planted_faults_are_noticed(
    name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = theirs(SHOWN)
    assert ours(SHOWN) == expected
    monkeypatch.setattr(tallies, name, fault, raising=False)
    assert ours(SHOWN) != expected


def test_without_labels_there_is_one_series_from_the_start() -> None:
    registry = CollectorRegistry()
    made = Tallies("h", "Text.", (), BOUNDS, registry)
    assert registry.get_sample_value("h_count") == 0
    made.labels().observe(1)
    assert registry.get_sample_value("h_sum") == 1


def test_labels_are_counted_and_names_are_taken_once() -> None:
    registry = CollectorRegistry()
    made = Tallies("h", "Text.", ("name",), BOUNDS, registry)
    with pytest.raises(ValueError, match="has the labels"):
        made.labels("a", "b")
    with pytest.raises(ValueError, match="Duplicated"):
        Tallies("h", "Text.", (), BOUNDS, registry)
    made.labels("a").observe(1)
    made.remove("a")
    made.remove("never there")
    assert registry.get_sample_value("h_count", {"name": "a"}) is None
