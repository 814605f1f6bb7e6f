"""The soak of `benchmarks/soak.py`, short, and that it would tell of what it is there to find."""

from typing import Any

import pytest

from benchmarks import soak
from benchmarks.soak import LOST, WRONG, Report, Way
from epp.runtime.options import OWN, TRANSPORTS

STREAMS = 1_500


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_stays_of_streams_that_end_in_any_way(transport: str) -> None:
    report = soak.run(STREAMS, connections=8, transport=transport, seed=2)
    assert list(report.problems()) == []
    assert set(report.became) >= {*Way, LOST}
    assert report.became[Way.WHOLE] > STREAMS / 10
    assert report.became[LOST] < STREAMS / 2
    assert report.connections > 10
    counted = sum(report.codes.values())
    assert STREAMS - report.became[LOST] <= counted <= STREAMS
    assert {code.rpartition(" ")[2] for code in report.codes} >= {"OK", "CANCELLED", "INVALID_ARGUMENT"}


def good(**changes: Any) -> Report:
    report = Report(50_000, OWN, 1)
    report.became = {Way.WHOLE: 40_000, LOST: 10_000}
    report.resident = [[90.0, 40.0], [97.0, 42.0]]
    for name, value in changes.items():
        setattr(report, name, value)
    return report


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"left": {"extproc_held_bytes": 3.0}}, "extproc_held_bytes is still 3"),
        ({"became": {Way.WHOLE: 49_999, WRONG: 1}}, "1 streams did not get what they should"),
        ({"became": {Way.WHOLE: 49_998}}, "2 streams have no end"),
        ({"resident": [[90.0], [98.5, 40.0]]}, "the picker grew from 90.0 to 98.5 MiB"),
        ({"resident": [[90.0, 40.0], [90.0, 60.0]]}, "the decoding process grew from 40.0 to 60.0 MiB"),
        ({"complaints": ["Traceback"]}, "Traceback"),
    ],
)
def test_what_it_tells(changes: dict[str, Any], told: str) -> None:
    assert list(good().problems()) == []
    assert list(good(**changes).problems()) == [told]
