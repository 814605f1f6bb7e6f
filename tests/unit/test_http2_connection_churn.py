"""The churn of `benchmarks/churn.py`, short, and that it would tell of what it is there to find."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import churn
from benchmarks.churn import Report, Way
from epp.http2.connection import Connection
from epp.http2.ports import Ending
from epp.http2.states import State
from epp.http2.streams import Stream
from epp.runtime.own import Process

STREAMS = 12_000
FEW = 1_200


def test_nothing_stays_of_streams_that_end_in_any_way() -> None:
    report = churn.run(STREAMS, seed=2)
    assert list(report.problems()) == []
    assert set(report.ways) == set(Way)
    assert min(report.ways.values()) > STREAMS / 200
    assert len(report.objects) == len(report.resident_mib) == 2


def test_report(tmp_path: Path) -> None:
    done = CliRunner().invoke(churn.main, ["--streams", "100", "--json", str(tmp_path / "churn.json")])
    assert done.exit_code == 0, done.output
    assert " streams in " in done.output
    assert '"left"' in (tmp_path / "churn.json").read_text()


def good(**changes: Any) -> Report:
    report = Report(1000, 1, Counter(whole=1000), objects=[1000, 2000], resident_mib=[90.0, 91.0])
    for name, value in changes.items():
        setattr(report, name, value)
    return report


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"left": {"held bytes": 3.0}}, "held bytes is still 3"),
        ({"wrong": ["stream 1"]}, "stream 1"),
        ({"ways": Counter(whole=990)}, "10 streams were not played"),
        ({"fault": "CALM"}, "the connection has ended: CALM"),
        ({"objects": [1000, 9000]}, "from 1000 objects to 9000"),
        ({"resident_mib": [90.0, 99.0]}, "from 90.0 MiB to 99.0 MiB"),
    ],
)
def test_what_it_tells(changes: dict[str, Any], told: str) -> None:
    assert list(good().problems()) == []
    assert list(good(**changes).problems()) == [told]


# -- planted faults --------------------------------------------------------------------------------------


def _stream_stays(patch: pytest.MonkeyPatch) -> None:
    right = Connection._stream_over

    def wrong(connection: Connection, stream: Stream, ending: Ending) -> None:
        right(connection, stream, ending)
        if ending is Ending.DEADLINE:
            connection._streams[stream.id] = stream

    patch.setattr(Connection, "_stream_over", wrong)


def _place_in_the_process_stays(patch: pytest.MonkeyPatch) -> None:
    def wrong(connection: Connection, stream: Stream, ending: Ending) -> None:
        del connection._streams[stream.id]
        if ending is not Ending.BROKEN:
            connection._slots.give(1)
        connection._remember(stream.id, stream.state)
        stream.call.ended(ending)

    patch.setattr(Connection, "_stream_over", wrong)


def _bytes_stay(patch: pytest.MonkeyPatch) -> None:
    right = Stream.leave

    def wrong(stream: Stream, state: State, ending: Ending) -> None:
        stream._waiting_bytes = 0
        right(stream, state, ending)

    patch.setattr(Stream, "leave", wrong)


def _ticket_stays(patch: pytest.MonkeyPatch) -> None:
    right = Process.ended

    def wrong(call: Process, ending: Ending) -> None:
        if ending is not Ending.RESET:
            right(call, ending)

    patch.setattr(Process, "ended", wrong)


def _call_is_kept(patch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    right = Connection._stream_over

    def wrong(connection: Connection, stream: Stream, ending: Ending) -> None:
        right(connection, stream, ending)
        kept.append(stream)

    patch.setattr(Connection, "_stream_over", wrong)
    patch.setattr(churn, "WARM_STREAMS", FEW // 2)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_stream_stays, "streams is still"),
        (_place_in_the_process_stays, "streams of the process is still"),
        (_bytes_stay, "held bytes is still"),
        (_ticket_stays, "tickets is still"),
        (_call_is_kept, "objects to"),
    ],
)
def test_a_fault_is_found(fault: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    problems = list(churn.run(FEW, seed=1).problems())
    assert any(told in problem for problem in problems), problems


def test_few_streams_leave_nothing_either() -> None:
    assert list(churn.run(FEW, seed=1).problems()) == []
