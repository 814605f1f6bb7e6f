"""Filters: what each keeps, case by case."""

from typing import Any

import msgspec
import pytest

from epp import names
from epp.errors import Saturated
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.scheduling.attributes import AttributeFilter, AttributeFilterParams
from epp.scheduling.filters import HeaderBasedTestingFilter, UtilizationFilter, UtilizationFilterParams
from epp.scheduling.labels import (
    DECODE_ROLES,
    ENCODE_ROLES,
    PREFILL_ROLES,
    ByLabelParams,
    LabelFilter,
    LabelSelector,
)
from epp.scheduling.profiles import FilterStep, Profile, run_profile
from tests.data.scheduling import pool

Row = pool.Row


def kept(plugin: Any, rows: list[Any], **options: Any) -> list[str]:
    """Names of the candidates that the filter leaves."""
    ctx = pool.context(rows, **options)
    mask = plugin.keep(ctx, ctx.view.candidates) & ctx.view.candidates
    return [row.name for row, keep in zip(rows, mask, strict=False) if keep]


# -- labels -----------------------------------------------------------------------------------------

GPUS = [
    Row("1", labels={"gpu": "h100", "zone": "a"}),
    Row("2", labels={"gpu": "a100", "zone": "b"}),
    Row("3", labels={"gpu": "", "zone": "a"}),
    Row("4", labels={"zone": "b"}),
    Row("5", candidate=False, labels={"gpu": "h100", "zone": "a"}),
]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, "1234"),
        ({"matchLabels": {}}, "1234"),
        ({"matchLabels": {"gpu": "h100"}}, "1"),
        ({"matchLabels": {"gpu": ""}}, "3"),
        ({"matchLabels": {"zone": "b", "gpu": "a100"}}, "2"),
        ({"matchLabels": {"zone": "b", "gpu": "h100"}}, ""),
        ({"matchLabels": {"absent": ""}}, ""),
        ({"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100", "a100"]}]}, "12"),
        ({"matchExpressions": [{"key": "gpu", "operator": "In", "values": [""]}]}, "3"),
        # Without the label a value is not among them.
        ({"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["h100"]}]}, "234"),
        ({"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": [""]}]}, "124"),
        ({"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, "123"),
        ({"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}, "4"),
        # All of it has to hold.
        (
            {
                "matchLabels": {"zone": "b"},
                "matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["h100"]}],
            },
            "24",
        ),
        (
            {
                "matchExpressions": [
                    {"key": "gpu", "operator": "Exists"},
                    {"key": "zone", "operator": "NotIn", "values": ["a"]},
                ]
            },
            "2",
        ),
    ],
)
def test_label_selector_filter(selector: dict[str, Any], expected: str) -> None:
    params = msgspec.convert(selector, LabelSelector)
    assert kept(LabelFilter(params.matches), GPUS) == list(expected)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"label": "gpu", "validValues": ["h100", "a100"]}, "12"),
        ({"label": "gpu", "validValues": ["h100"], "allowsNoLabel": True}, "14"),
        ({"label": "gpu", "allowsNoLabel": True}, "4"),
        # An absent label has the value of an empty one, as in the field.
        ({"label": "gpu", "validValues": [""]}, "34"),
    ],
)
def test_by_label(params: dict[str, Any], expected: str) -> None:
    converted = msgspec.convert(params, ByLabelParams)
    assert kept(LabelFilter(converted.matches), GPUS) == list(expected)


ROLES = ("decode", "prefill", "encode", "prefill-decode", "encode-prefill", "encode-prefill-decode", "both")


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (DECODE_ROLES, {"decode", "prefill-decode", "both", "encode-prefill-decode", "none"}),
        (
            PREFILL_ROLES,
            {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"},
        ),
        (ENCODE_ROLES, {"encode", "encode-prefill", "encode-prefill-decode"}),
    ],
)
def test_role_filters(roles: ByLabelParams, expected: set[str]) -> None:
    rows = [Row(role, address=f"10.0.0.{n}", labels={names.ROLE_LABEL: role}) for n, role in enumerate(ROLES)]
    rows += [Row("none", address="10.0.1.1"), Row("odd", address="10.0.1.2", labels={names.ROLE_LABEL: ""})]
    assert set(kept(LabelFilter(roles.matches), rows)) == expected


def test_a_role_changed_on_a_living_endpoint_counts_for_the_next_request() -> None:
    store = PoolStore()
    ctx = pool.context([Row("1")])
    ctx.view = store.view
    plugin = LabelFilter(PREFILL_ROLES.matches)
    for role, expected in (("decode", False), ("prefill", True), ("decode", False)):
        labels = {names.ROLE_LABEL: role}
        store.sync([Endpoint("uid", "pod", "default", "10.0.0.1", 8000, labels)], 0.0)
        assert bool(plugin.keep(ctx, store.view.candidates)[0]) is expected


def test_a_grown_pool_is_looked_at_anew() -> None:
    store = PoolStore()
    ctx = pool.context([Row("1")])
    ctx.view = store.view
    plugin = LabelFilter(DECODE_ROLES.matches)
    for count in (1, 16, 17, 40, 3):
        members = [Endpoint(f"u{n}", f"p{n}", "default", f"10.0.0.{n}", 8000) for n in range(count)]
        store.sync(members, 0.0)
        mask = plugin.keep(ctx, store.view.candidates)
        assert len(mask) == store.view.capacity
        assert (mask & store.view.candidates).sum() == count


def test_labels_are_read_once_for_a_membership() -> None:
    asked: list[str] = []

    def matches(labels: Any) -> bool:
        asked.append(labels["name"])
        return True

    plugin = LabelFilter(matches)
    ctx = pool.context([Row("1", labels={"name": "a"}), Row("2", labels={"name": "b"})])
    for _ in range(5):
        plugin.keep(ctx, ctx.view.candidates)
    assert asked == ["a", "b"]


def test_a_filters_mask_cannot_be_written_through() -> None:
    ctx = pool.context([Row("1")])
    with pytest.raises(ValueError, match="read-only"):
        LabelFilter(DECODE_ROLES.matches).keep(ctx, ctx.view.candidates)[0] = False


def test_nothing_left_is_said_with_the_filters_name() -> None:
    ctx = pool.context([Row("1"), Row("2")])
    step = FilterStep("prefill", "prefill-filter", LabelFilter(PREFILL_ROLES.matches))
    profile = Profile("p", (step,), (), pool.default_profile().picker)
    with pytest.raises(Saturated, match="prefill excluded 2"):
        run_profile(profile, ctx, ctx.view.candidates)


# -- attributes -------------------------------------------------------------------------------------

FIGURES = [Row("1", attribute=1.5), Row("2", attribute=2), Row("3", attribute=3, stale=True), Row("4")]


def attribute_filter(operator: str, value: float, **options: Any) -> AttributeFilter:
    threshold = {"operator": operator, "value": value}
    algorithm = {"type": "threshold", "threshold": threshold}
    params = {"attribute": pool.ATTRIBUTE, "algorithm": algorithm, **options}
    return AttributeFilter(msgspec.convert(params, AttributeFilterParams))


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("LessThan", "1"),
        ("LessThanOrEqual", "12"),
        ("GreaterThan", "3"),
        ("GreaterThanOrEqual", "23"),
        ("Equal", "2"),
        ("NotEqual", "13"),
    ],
)
def test_endpoint_attribute_filter(operator: str, expected: str) -> None:
    assert kept(attribute_filter(operator, 2, onMissing="Fail"), FIGURES) == list(expected)
    assert kept(attribute_filter(operator, 2), FIGURES) == [*expected, "4"]
    assert kept(attribute_filter(operator, 2, onMissing="Pass"), FIGURES) == [*expected, "4"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"onMissing": "Fail"}, ""),
        ({"onMissing": "Fail", "fallbackOnEmpty": True}, "1234"),
        # Whoever passes for want of a figure is somebody: no fallback.
        ({"onMissing": "Pass", "fallbackOnEmpty": True}, "4"),
    ],
)
def test_endpoint_attribute_filter_that_leaves_nothing(options: dict[str, Any], expected: str) -> None:
    assert kept(attribute_filter("GreaterThan", 9, **options), FIGURES) == list(expected)


def test_the_fallback_looks_at_candidates_only() -> None:
    rows = [Row("1", attribute=1), Row("2", attribute=10, candidate=False)]
    assert kept(attribute_filter("GreaterThan", 9, fallbackOnEmpty=True), rows) == ["1"]


def test_a_figure_nobody_reads_is_missing_everywhere() -> None:
    rows = [Row("1"), Row("2")]
    assert kept(attribute_filter("LessThan", 1), rows) == ["1", "2"]
    assert kept(attribute_filter("LessThan", 1, onMissing="Fail"), rows) == []


# -- caps on load -----------------------------------------------------------------------------------


def utilization_filter(*caps: tuple[str, float], **options: Any) -> UtilizationFilter:
    conditions = [{"metric": metric, "maxValue": most} for metric, most in caps]
    return UtilizationFilter(msgspec.convert({"conditions": conditions, **options}, UtilizationFilterParams))


BUSY = [
    Row("1", running=10, waiting=0, kv=0.5, active=10),
    Row("2", running=41, waiting=0, kv=0.8, active=2),
    Row("3", running=10, waiting=1, kv=0.9, active=11),
    # Never scraped: nothing is known against it but what is in flight.
    Row("4", present=False, active=12),
    # Stale: the last value counts.
    Row("5", running=50, waiting=5, kv=0.95, active=3, stale=True),
]


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        ([("running-requests", 40)], "134"),
        ([("running-requests", 41)], "1234"),
        ([("waiting-queue", 0)], "124"),
        ([("kv-cache-utilization", 0.8)], "124"),
        ([("active-requests", 10)], "125"),
        ([("running-requests", 40), ("waiting-queue", 0)], "14"),
        ([("active-requests", 10), ("kv-cache-utilization", 0.8)], "12"),
        ([("running-requests", 0), ("active-requests", 0)], ""),
    ],
)
def test_utilization_filter(caps: list[tuple[str, float]], expected: str) -> None:
    assert kept(utilization_filter(*caps), BUSY) == list(expected)


def test_utilization_filter_that_leaves_nothing() -> None:
    assert kept(utilization_filter(("active-requests", 1)), BUSY) == []
    assert kept(utilization_filter(("active-requests", 1), fallbackOnEmpty=True), BUSY) == list("12345")
    rows = [Row("1", waiting=3), Row("2", candidate=False)]
    assert kept(utilization_filter(("waiting-queue", 1), fallbackOnEmpty=True), rows) == ["1"]


def test_active_requests_come_from_the_named_producer() -> None:
    mine = utilization_filter(("active-requests", 5), inFlightLoadProducerName="mine")
    assert kept(mine, BUSY) == list("12345"), "a producer that failed is no load"
    params = {"conditions": [{"metric": "active-requests", "maxValue": 1}]}
    assert msgspec.convert(params, UtilizationFilterParams).needs() == (pool.INFLIGHT_KEY,)
    scraped = {"conditions": [{"metric": "waiting-queue", "maxValue": 1}]}
    assert msgspec.convert(scraped, UtilizationFilterParams).needs() == ()


# -- endpoints chosen by a test ---------------------------------------------------------------------

RANKS = [
    Row("1", address="10.0.0.1", port=8001),
    Row("2", address="10.0.0.1", port=8000),
    Row("3", address="10.0.0.2", port=8000),
    Row("4", address="2001:db8::7", port=8000),
    Row("5", address="10.0.0.3", port=8000, candidate=False),
    Row("6", address="10.0.0.3", port=8001),
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10.0.0.2", "3"),
        ("10.0.0.2:8000", "3"),
        ("10.0.0.2:9", ""),
        (" 10.0.0.2 , 2001:db8::7 ", "34"),
        ("[2001:db8::7]", "4"),
        ("[2001:db8::7]:8000", "4"),
        ("[2001:db8::7]:8001", ""),
        ("10.0.0.1:8001", "1"),
        # Without a port: the lowest there. A second entry of an address has no effect.
        ("10.0.0.1", "2"),
        ("10.0.0.1:8001,10.0.0.1:8000", "1"),
        ("10.0.0.1:7,10.0.0.1:8001", "1"),
        # Whoever is out already stays out.
        ("10.0.0.3", "6"),
        ("10.0.0.3:8000", ""),
        ("10.0.0.9,,", ""),
        ("", ""),
        (",", ""),
        ("nonsense:x", ""),
    ],
)
def test_header_based_testing_filter(value: str, expected: str) -> None:
    headers = (("test-epp-endpoint-selection", value),)
    assert kept(HeaderBasedTestingFilter(), RANKS, headers=headers) == list(expected)


def test_header_based_testing_filter_without_its_header_keeps_nothing() -> None:
    assert kept(HeaderBasedTestingFilter(), RANKS) == []
