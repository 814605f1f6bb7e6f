"""Profile handlers and pickers, case by case."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from epp.errors import BadRequest, NoEndpoints
from epp.scheduling.filters import HeaderBasedTestingFilter
from epp.scheduling.handlers import (
    DataParallelProfileHandler,
    DataParallelProfileHandlerParams,
    HeaderProfileHandler,
    HeaderProfileHandlerParams,
)
from epp.scheduling.labels import DECODE_ROLES, PREFILL_ROLES, LabelFilter
from epp.scheduling.pickers import (
    RandomPicker,
    RandomPickerParams,
    WeightedRandomPicker,
    WeightedRandomPickerParams,
)
from epp.scheduling.profiles import FilterStep, Profile
from epp.scheduling.records import Placement, Role, Ticket, TicketId
from tests.data.scheduling import pool

Row = pool.Row


def profile(name: str, plugin: Any, count: int = 1) -> Profile:
    step = FilterStep("filter", "filter", plugin)
    return Profile(name, (step,), (), pool.default_profile(count=count).picker)


STAGES = {
    "decode": profile("decode", LabelFilter(DECODE_ROLES.matches)),
    "prefill": profile("prefill", LabelFilter(PREFILL_ROLES.matches)),
}
WORKERS = [
    Row("1", labels={"llm-d.ai/role": "decode"}),
    Row("2", labels={"llm-d.ai/role": "prefill"}),
]

# -- a profile chosen by header ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "headers", "expected"),
    [
        ({}, (("epp-profile", "prefill"),), "prefill"),
        ({}, (("epp-profile", "decode"),), "decode"),
        ({}, (("epp-profile", " prefill "),), "prefill"),
        ({}, (("epp-profile", "  "),), "decode"),
        ({}, (), "decode"),
        ({"default_profile": "prefill"}, (), "prefill"),
        ({"default_profile": " prefill "}, (), "prefill"),
        ({"header_name": "X-Stage"}, (("x-stage", "prefill"), ("epp-profile", "decode")), "prefill"),
        ({"header_name": " ", "default_profile": ""}, (("epp-profile", "prefill"),), "prefill"),
    ],
)
def test_header_profile_handler(params: dict[str, str], headers: Any, expected: str) -> None:
    handler = HeaderProfileHandler(HeaderProfileHandlerParams(**params), STAGES)
    ctx = pool.context(WORKERS, headers=headers)
    (leg,) = handler.place(ctx, ctx.view.candidates)
    assert leg.decision.profile == expected
    assert leg.role is Role.DECODE
    assert [endpoint.labels["llm-d.ai/role"] for endpoint in leg.endpoints] == [expected]


@pytest.mark.parametrize("value", ["Decode", "encode", "decode,prefill"])
def test_a_header_that_names_no_profile_is_the_clients_mistake(value: str) -> None:
    handler = HeaderProfileHandler(HeaderProfileHandlerParams(), STAGES)
    ctx = pool.context(WORKERS, headers=(("epp-profile", value),))
    expected = f'no scheduling profile configured for "epp-profile" header value "{value}"'
    with pytest.raises(BadRequest, match=re.escape(f"{expected}; configured: decode, prefill")):
        handler.place(ctx, ctx.view.candidates)


@pytest.mark.parametrize("headers", [(), (("epp-profile", "elsewhere"),)])
def test_the_only_profile_always_runs(headers: Any) -> None:
    only = {"main": profile("main", LabelFilter(DECODE_ROLES.matches))}
    ctx = pool.context(WORKERS, headers=headers)
    (leg,) = HeaderProfileHandler(HeaderProfileHandlerParams(), only).place(ctx, ctx.view.candidates)
    assert leg.decision.profile == "main"


def test_a_default_that_is_no_profile_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="defaultProfile 'main' is not a configured.*: decode, prefill"):
        HeaderProfileHandler(HeaderProfileHandlerParams(default_profile="main"), STAGES)


# -- data-parallel ranks ----------------------------------------------------------------------------

RANKS = [
    Row("1", address="10.0.0.1", port=8000),
    Row("2", address="10.0.0.1", port=8001),
    Row("3", address="2001:db8::7", port=8002),
]


def place_rank(entry: str, params: DataParallelProfileHandlerParams) -> tuple[Any, Any]:
    """The leg, and the headers for the engine, of a request for the rank `entry`."""
    handler = DataParallelProfileHandler(params, {"p": profile("p", HeaderBasedTestingFilter(), count=2)})
    ctx = pool.context(RANKS, headers=(("test-epp-endpoint-selection", entry),))
    (leg,) = handler.place(ctx, ctx.view.candidates)
    slot = leg.decision.slots[0]
    ticket = Ticket(TicketId(1), ctx.request, Placement(TicketId(1), (leg,)), slot, 0, 0.0)
    return leg, handler.placed(ctx, ticket)


@pytest.mark.parametrize(
    ("entry", "port", "destination", "rank"),
    [
        ("10.0.0.1:8001", 8000, "10.0.0.1:8000", b"10.0.0.1:8001"),
        ("10.0.0.1:8000", 8000, "10.0.0.1:8000", b"10.0.0.1:8000"),
        ("10.0.0.1:8001", 9000, "10.0.0.1:9000", b"10.0.0.1:8001"),
        ("[2001:db8::7]:8002", 8000, "[2001:db8::7]:8000", b"[2001:db8::7]:8002"),
    ],
)
def test_data_parallel_profile_handler(entry: str, port: int, destination: str, rank: bytes) -> None:
    leg, edits = place_rank(entry, DataParallelProfileHandlerParams(primary_port=port))
    assert [endpoint.host_port for endpoint in leg.endpoints] == [destination]
    assert edits == (("x-data-parallel-host-port", rank),)
    # Charged and remembered is the rank.
    assert pool.context(RANKS).view.host_ports[leg.decision.slots[0]].encode() == rank


def test_every_fallback_is_a_primary_and_the_header_names_the_first_rank() -> None:
    leg, edits = place_rank("10.0.0.1:8001,2001:db8::7", DataParallelProfileHandlerParams())
    assert {endpoint.port for endpoint in leg.endpoints} == {8000}
    assert len(leg.endpoints) == 2
    ranks = {"10.0.0.1": b"10.0.0.1:8001", "2001:db8::7": b"[2001:db8::7]:8002"}
    assert edits == (("x-data-parallel-host-port", ranks[leg.endpoints[0].address]),)


def test_data_parallel_profile_handler_runs_one_profile() -> None:
    with pytest.raises(ValueError, match="runs exactly one scheduling profile, not decode, prefill"):
        DataParallelProfileHandler(DataParallelProfileHandlerParams(), STAGES)


@pytest.mark.parametrize("build", [HeaderProfileHandler, DataParallelProfileHandler])
def test_nobody_there(build: Any) -> None:
    params = (
        HeaderProfileHandlerParams() if build is HeaderProfileHandler else DataParallelProfileHandlerParams()
    )
    ctx = pool.context([Row("1", candidate=False)])
    with pytest.raises(NoEndpoints):
        build(params, {"decode": STAGES["decode"]}).place(ctx, ctx.view.candidates)


# -- pickers ----------------------------------------------------------------------------------------


def picks(picker: Any, totals: list[float], rounds: int = 200) -> Counter[tuple[int, ...]]:
    rows = [Row(str(number)) for number in range(len(totals))]
    ctx = pool.context([*rows, Row("99", candidate=False)])
    column = np.full(ctx.view.capacity, np.nan)
    column[: len(totals)] = totals
    return Counter(picker.pick(ctx, column, ctx.view.candidates) for _ in range(rounds))


def random_picker(count: int = 1) -> RandomPicker:
    return RandomPicker(RandomPickerParams(max_num_of_endpoints=count))


def weighted_picker(count: int = 1) -> WeightedRandomPicker:
    return WeightedRandomPicker(WeightedRandomPickerParams(max_num_of_endpoints=count))


def test_random_picker_looks_at_no_total() -> None:
    assert set(picks(random_picker(), [5.0, 0.0, 1.0])) == {(0,), (1,), (2,)}


@pytest.mark.parametrize("picker", [random_picker, weighted_picker])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_as_many_as_asked_for_and_there_are(picker: Any, count: int) -> None:
    for slots in picks(picker(count), [1.0, 2.0, 3.0], 20):
        assert len(slots) == len(set(slots)) == min(count, 3)
        assert set(slots) <= {0, 1, 2}


def test_a_total_of_zero_comes_after_all_others() -> None:
    found = picks(weighted_picker(4), [0.0, 1e-300, 0.0, 5.0])
    assert {frozenset(slots[:2]) for slots in found} == {frozenset({1, 3})}
    assert {slots[2:] for slots in found} == {(0, 2), (2, 0)}


def test_where_all_totals_are_zero_the_choice_is_random() -> None:
    assert set(picks(weighted_picker(), [0.0, 0.0, 0.0])) == {(0,), (1,), (2,)}


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1.0, 1e300])
def test_totals_of_any_size_can_be_drawn_from(scale: float) -> None:
    found = picks(weighted_picker(2), [scale, scale, 0.0])
    assert set(found) == {(0, 1), (1, 0)}


@pytest.mark.parametrize("picker", [random_picker, weighted_picker])
def test_a_seed_decides(picker: Any) -> None:
    assert picks(picker(2), [1.0, 2.0, 3.0]) == picks(picker(2), [1.0, 2.0, 3.0])
