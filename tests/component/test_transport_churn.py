"""The churn of `benchmarks/churn.py`, short, and that it would tell of what it is there to find."""

import pytest

from benchmarks import churn
from epp.http2.connection import Connection
from epp.http2.ports import Ending
from epp.http2.rates import Quota
from epp.http2.streams import Stream
from epp.runtime.own import Process

STREAMS = 3_000


def test_nothing_stays_of_streams_on_one_connection() -> None:
    assert list(churn.problems(STREAMS, seed=3)) == []


def ends_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "ended", lambda self, ending: None)


def places_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quota, "give", lambda self, n: None)


def resets_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Stream.leave

    def deaf(self: Stream, state: object, ending: Ending) -> None:
        if ending is not Ending.RESET:
            leave(self, state, ending)  # type: ignore[arg-type]

    monkeypatch.setattr(Stream, "leave", deaf)


def a_lost_connection_is_shrugged_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "lose", lambda self: None)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (ends_are_not_told, "streams without an end"),
        (places_are_not_given_back, "the connection ended|stream quota"),
        (resets_are_not_heard, "requests in flight|the connection ended"),
        (a_lost_connection_is_shrugged_off, "left by a lost connection"),
    ],
)
def test_what_it_tells(fault: object, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)  # type: ignore[operator]
    found = list(churn.problems(400, seed=4))
    assert any(part in problem for problem in found for part in told.split("|")), found
