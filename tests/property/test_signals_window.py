"""Signals against a plain computation from all that happened, and how records of several pickers add up."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp import names, signals
from epp.payload.records import Usage
from epp.pool.metrics_page import EngineSample
from epp.runtime.signal_window import WINDOW_S, SignalWindow
from epp.scheduling.records import Cause, Ended, Gaps
from epp.signals import Distribution, EndpointSignals, Signals, decode, summed
from tests.data.runtime import picker as runtime


class Asked:
    """As much of a request as the window looks at."""

    def __init__(self, tokens: int, received_at: float) -> None:
        self.request = self
        self.prompt_tokens = tokens
        self.received_at = received_at


class Placed:
    """As much of a ticket."""

    def __init__(self, first_token_at: float, status: int = 200, streaming: bool = True) -> None:
        self.first_token_at = first_token_at
        self.status = status
        self.streaming = streaming


Event = tuple[str, float, int]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("placed", "refused", "unread", "first", "error", "ended", "failed", "cut")),
        st.floats(0, 7, allow_nan=False),
        st.integers(1, 5000),
    ),
    max_size=40,
)


def feed(window: Any, events: list[Event]) -> tuple[float, list[Event]]:
    """Play the events at their distances from 1000 on; returns the time and them with their times."""
    at, timed = 1000.0, []
    for kind, wait_s, tokens in events:
        at += wait_s
        timed.append((kind, at, tokens))
        asked: Any = Asked(tokens, at - 0.25)
        ticket: Any = Placed(at - 2.0, 400 if kind in ("failed", "error") else 399)
        cause = Cause.CLIENT_DISCONNECT if kind == "cut" else Cause.NATURAL
        match kind:
            case "placed":
                window.placed(asked, at)
            case "refused":
                window.refused(asked, at)
            case "unread":
                window.refused(None, at)
            case "first" | "error":
                window.first_token(asked, ticket, at)
            case _:
                gaps = Gaps((0, tokens, *[0] * 14), 0.004 * tokens)
                window.ended(ticket, Ended(cause, Usage(tokens, tokens, tokens // 2), 1, 1, gaps), at)
    return at, timed


def read(window: Any, now: float) -> Signals:
    app = runtime.picker(1)
    made: Signals = window.read(
        app.store.view, app.ledger.load, pool="p", namespace="n", saturation=0.5, now=now, time_s=5.0
    )
    return made


def totals(record: Signals) -> dict[str, float]:
    return {
        "arrivals": record.arrivals_per_s * record.window_s,
        "refusals": record.refusals_per_s * record.window_s,
        "failures": record.failures_per_s * record.window_s,
        "offered": record.offered_prompt_tokens_per_s * record.window_s,
        "prompt": record.prompt_tokens_per_s * record.window_s,
        "cached": record.cached_tokens_per_s * record.window_s,
        "output": record.output_tokens_per_s * record.window_s,
        "ttft": record.ttft_s.count,
        "tpot": record.tpot_s.count,
        "itl": record.itl_s.count,
        "itl_s": record.itl_s.total,
    }


def expected(timed: list[Event], now: float) -> dict[str, float]:
    recent = [(kind, tokens) for kind, at, tokens in timed if int(now) - WINDOW_S < int(at)]

    def total(*kinds: str) -> int:
        return sum(tokens for kind, tokens in recent if kind in kinds)

    def count(*kinds: str) -> int:
        return sum(kind in kinds for kind, _ in recent)

    streamed = ("ended", "cut")
    return {
        "arrivals": count("placed", "refused"),
        "refusals": count("refused"),
        "failures": count("failed", "cut"),
        "offered": total("placed", "refused"),
        "prompt": total("ended", "failed", "cut"),
        "cached": sum(tokens // 2 for kind, tokens in recent if kind in ("ended", "failed", "cut")),
        "output": total("ended", "failed", "cut"),
        "ttft": count("first"),
        "tpot": sum(kind in streamed and tokens > 1 for kind, tokens in recent),
        "itl": total(*streamed),
        "itl_s": 0.004 * total(*streamed),
    }


@given(EVENTS, st.floats(0, 40))
def test_the_last_half_minute_and_nothing_else(events: list[Event], later_s: float) -> None:
    window = SignalWindow()
    at, timed = feed(window, events)
    record = read(window, at + later_s)
    assert totals(record) == pytest.approx(expected(timed, at + later_s))
    assert 1.0 <= record.window_s <= WINDOW_S


SHOWN: list[Event] = [
    ("placed", 0.0, 10),
    ("refused", 35.0, 10),
    ("first", 1.0, 10),
    ("error", 0.0, 10),
    ("ended", 0.5, 40),
    ("failed", 0.5, 40),
]


class Forgets(SignalWindow):
    def _at(self, now: float) -> Any:
        self._current.number = -1
        return super()._at(now)


class Keeps(SignalWindow):
    def _at(self, now: float) -> Any:
        return super()._at(1000.0 + WINDOW_S)


class CountsUnread(SignalWindow):
    def refused(self, prepared: Any, now: float) -> None:
        super().refused(Asked(1, now), now)  # type: ignore[arg-type]


class FailuresAreFast(SignalWindow):
    def ended(self, ticket: Any, fact: Ended, now: float) -> None:
        ticket.status = 200
        super().ended(ticket, fact, now)


class ErrorsAreFast(SignalWindow):
    def first_token(self, prepared: Any, ticket: Any, now: float) -> None:
        ticket.status = 200
        super().first_token(prepared, ticket, now)


@pytest.mark.parametrize("faulty", [Forgets, Keeps, CountsUnread, FailuresAreFast, ErrorsAreFast])
def test_planted_faults_of_the_window_are_noticed(faulty: type[SignalWindow]) -> None:
    events = [*SHOWN, ("unread", 0.1, 1)]
    for window, right in ((SignalWindow(), True), (faulty(), False)):
        at, timed = feed(window, events)
        assert (totals(read(window, at)) == pytest.approx(expected(timed, at))) is right


def test_a_window_that_has_just_begun_is_short() -> None:
    window = SignalWindow()
    feed(window, [("placed", 0.0, 1), ("placed", 5.0, 1)])
    assert read(window, 1005.0).window_s == 5.0
    assert read(window, 1005.0).arrivals_per_s == pytest.approx(0.4)
    assert read(SignalWindow(), 1005.0).arrivals_per_s == 0.0


def test_endpoints_with_what_is_known_of_them() -> None:
    app = runtime.picker(1)
    app.store.sampled(0, EngineSample(waiting=3, kv_usage=0.25), 1000.0)
    (seen,) = app.recorder.signals.read(
        app.store.view, app.ledger.load, pool="p", namespace="n", saturation=0, now=1002.0, time_s=0
    ).endpoints
    assert seen == EndpointSignals("pod-1", "default", "10.0.0.1:8000", "", True, 2.0, 3.0, 0.0, 0.25, 0, 0)
    app.set_endpoints([msgspec.structs.replace(runtime.endpoint(7), labels={names.ROLE_LABEL: "prefill"})])
    app.store.refresh(1002.0, 0.2)
    (unseen,) = app.recorder.signals.read(
        app.store.view, app.ledger.load, pool="p", namespace="n", saturation=0, now=1002.0, time_s=0
    ).endpoints
    assert (unseen.role, unseen.age_s, unseen.waiting, unseen.kv_usage) == ("prefill", None, None, None)


def test_an_endpoint_that_drains_is_listed_until_its_last_request_has_ended() -> None:
    app = runtime.picker(1)
    app.ledger.charge(0, 100)
    app.set_endpoints([runtime.endpoint(2)])
    by_name = {seen.name: seen for seen in app.signals().endpoints}
    assert (by_name["pod-1"].ready, by_name["pod-1"].in_flight, by_name["pod-1"].prefill_tokens) == (
        False,
        1,
        100,
    )
    assert by_name["pod-2"].ready
    app.ledger.release(0, 100)
    app.store.refresh(1e9, 0.2)
    assert {seen.name for seen in app.signals().endpoints} == {"pod-2"}


# -- distributions ----------------------------------------------------------------------------------


@given(st.lists(st.floats(0.002, 500), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_within_a_bucket_of_the_true_one(values: list[float], share: float) -> None:
    window = SignalWindow()
    for value in values:
        asked: Any = Asked(1, 1000.0 - value)
        ticket: Any = Placed(1000.0)
        window.first_token(asked, ticket, 1000.0)
    found = read(window, 1000.0).ttft_s
    true = float(np.quantile(values, share, method="inverted_cdf"))
    quantile = found.quantile(share)
    assert quantile is not None
    assert true / 1.21 <= quantile <= true * 1.21
    assert found.mean == pytest.approx(np.mean(values))
    assert found.share_within(600) == 1.0


def test_nothing_observed_has_no_mean_and_no_quantile() -> None:
    empty = Distribution((1.0, 2.0), (0, 0, 0), 0.0)
    assert (empty.count, empty.mean, empty.quantile(0.5), empty.share_within(1.0)) == (0, None, None, None)
    beyond = Distribution((1.0, 2.0), (0, 0, 4), 40.0)
    assert (beyond.quantile(0.5), beyond.share_within(2.0)) == (2.0, 0.0)
    some = Distribution((1.0, 2.0), (3, 1, 0), 4.0)
    assert (some.share_within(1.0), some.share_within(1.9), some.share_within(2.0)) == (0.75, 0.75, 1.0)


# -- several pickers --------------------------------------------------------------------------------


def one(rate: float, age_s: float | None = 1.0, in_flight: int = 1, **changed: Any) -> Signals:
    endpoint = EndpointSignals("e", "n", "h:1", "", True, age_s, rate, 1.0, 0.5, in_flight, 10 * in_flight)
    spread = Distribution((1.0, 2.0), (1, 2, 3), rate)
    record = Signals("p", "n", 10.0 + rate, 30.0, *[rate] * 7, spread, spread, spread, rate, (endpoint,))
    return msgspec.structs.replace(record, **changed)


def test_records_of_pickers_add_up_but_engines_are_seen_once() -> None:
    both = summed([one(1.0, age_s=5.0, in_flight=2), one(2.0, age_s=0.5, in_flight=3)])
    assert (both.arrivals_per_s, both.output_tokens_per_s, both.pickers) == (3.0, 3.0, 2)
    assert (both.ttft_s.counts, both.ttft_s.total) == ((2, 4, 6), 3.0)
    assert (both.saturation, both.time_s) == (2.0, 11.0)
    (seen,) = both.endpoints
    assert (seen.in_flight, seen.prefill_tokens) == (5, 50)
    assert (seen.waiting, seen.age_s) == (2.0, 0.5)
    unread = summed([one(1.0, age_s=None), one(2.0, age_s=9.0)])
    assert unread.endpoints[0].age_s == 9.0


@given(st.lists(st.floats(0, 10).map(one), min_size=1, max_size=5), st.data())
def test_the_order_and_grouping_of_records_do_not_matter(records: list[Signals], data: Any) -> None:
    shuffled = data.draw(st.permutations(records))
    cut = data.draw(st.integers(1, len(records)))
    grouped = [summed(shuffled[:cut]), *shuffled[cut:]]
    found, wanted = summed(grouped), summed(records)
    assert found.pickers == wanted.pickers == len(records)
    assert found.arrivals_per_s == pytest.approx(wanted.arrivals_per_s)
    assert found.itl_s.counts == wanted.itl_s.counts
    assert found.endpoints[0].in_flight == wanted.endpoints[0].in_flight


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_merged", lambda parts: next(iter(parts))),
        ("_age", lambda endpoint: 0.0),
        ("_RATES", ("arrivals_per_s",) * 1),
    ],
)
def test_planted_faults_of_the_sum_are_noticed(
    name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, name, fault)
    with pytest.raises((AssertionError, TypeError)):
        test_records_of_pickers_add_up_but_engines_are_seen_once()


def test_what_cannot_be_added_is_said() -> None:
    with pytest.raises(ValueError, match="no signals"):
        summed([])
    with pytest.raises(ValueError, match="different pools: n/p, n/q"):
        summed([one(1.0), one(1.0, pool="q")])
    other = Distribution((1.0, 3.0), (1, 2, 3), 1.0)
    with pytest.raises(ValueError, match="different bounds"):
        summed([one(1.0), one(1.0, ttft_s=other)])


def test_a_record_is_read_back_and_another_version_is_refused() -> None:
    record = one(1.5)
    assert decode(msgspec.json.encode(record)) == record
    with pytest.raises(ValueError, match="signals of version 2; this reads version 1"):
        decode(msgspec.json.encode({"version": 2}))
    for broken in (b"", b"{}", b"[]", b'{"version": 1}'):
        with pytest.raises(ValueError, match=r"."):
            decode(broken)


@pytest.mark.parametrize("age_s", [0.0, 0.5, 40.0])
def test_an_endpoint_is_as_old_as_its_last_figures(age_s: float) -> None:
    assert [endpoint.age_s for endpoint in read(SignalWindow(), age_s).endpoints] == [age_s]
