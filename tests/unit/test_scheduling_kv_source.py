"""p2p-source-producer: which endpoint the KV blocks may be fetched from."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from epp.scheduling.kv_source import fnv1a_32
from epp.scheduling.ports import Ctx
from epp.scheduling.records import PREFIX_MATCH, FactKey, Role
from tests.data.scheduling import pool, tickets

Row = pool.Row
KIND = "p2p-source-producer"
HEADER = "x-kv-cache-source-host-port"


def context(*rows: Any, request_id: str = "r", slots: list[int] | None = None) -> Ctx:
    ctx = pool.context(list(rows), slots=slots)
    ctx.request_id = request_id
    return ctx


def source(ctx: Ctx, computing: int, **parameters: Any) -> str | None:
    plugin = tickets.made(KIND, ctx.view, **parameters)
    edits = plugin.placed(ctx, tickets.single(ctx, computing))
    if edits is None:
        return None
    ((header, value),) = edits
    assert header == HEADER
    return str(value.decode())


@pytest.mark.parametrize(
    ("cached", "computing", "parameters", "expected"),
    [
        ((50, 0, 0), 1, {}, "10.0.0.0:8000"),
        ((50, 0, 0), 0, {}, None),
        ((0, 0, 0), 0, {}, None),
        ((50, 49, 0), 1, {}, {None, "10.0.0.0:8000"}),
        ((50, 40, 0), 1, {}, "10.0.0.0:8000"),
        # 10 blocks of 64 tokens ahead.
        ((50, 40, 0), 1, {"minCachedTokenDelta": 640}, "10.0.0.0:8000"),
        ((50, 40, 0), 1, {"minCachedTokenDelta": 641}, None),
        ((50, 0, 0), 1, {"prefixMatchInfoProducerName": "other"}, None),
        # One block: nothing is within a block of it but itself.
        ((1, 0, 0), 2, {}, "10.0.0.0:8000"),
    ],
)
def test_source(cached: tuple[int, ...], computing: int, parameters: dict[str, Any], expected: Any) -> None:
    rows = [Row(str(n), cached=blocks) for n, blocks in enumerate(cached)]
    found = source(context(*rows), computing, **parameters)
    assert found in expected if isinstance(expected, set) else found == expected


def test_source_is_a_candidate() -> None:
    ctx = context(Row("1", cached=50, candidate=False), Row("2", cached=20), Row("3"))
    assert source(ctx, 2) == "10.0.0.2:8000"


@pytest.mark.parametrize(("name", "expected"), [({}, "10.0.0.3:8000"), ({"prefillProfileName": "p"}, None)])
def test_prefill_endpoint_computes_where_there_is_one(name: dict[str, str], expected: str | None) -> None:
    ctx = context(Row("1"), Row("2", cached=50), Row("3", cached=50))
    ctx.facts[FactKey(PREFIX_MATCH, "approx-prefix-cache-producer")].blocks[1] = 0
    plugin = tickets.made(KIND, ctx.view, **name)
    legs = tickets.leg(ctx, (0,), role=Role.PREFILL), tickets.leg(ctx, (2,))
    edits = plugin.placed(ctx, tickets.ticket(ctx, *legs))
    assert (edits and edits[0][1].decode()) == expected


def test_ties_are_spread_by_load() -> None:
    """Two hold the most, a third one block less; weights 1, 1/2 and 1/4. Two blocks less are too few."""
    rows = [Row("1", cached=50), Row("2", cached=50, waiting=1), Row("3", cached=49, waiting=3)]
    rows += [Row("4"), Row("5", cached=48)]
    chance = Random(1)
    ids = (f"{chance.getrandbits(128):032x}" for _ in range(2100))
    found = Counter(source(context(*rows, request_id=name), 3) for name in ids)
    shares = [found[f"10.0.0.{n}:8000"] / 2100 for n in (1, 2, 3)]
    assert shares == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.04)


def test_same_request_draws_the_same_source_wherever_endpoints_stand() -> None:
    rows = [Row(str(n), cached=50, waiting=n % 3) for n in range(6)] + [Row("9")]
    for number in range(50):
        here = source(context(*rows, request_id=f"{number}"), 6)
        there = source(context(*rows, request_id=f"{number}", slots=[9, 4, 7, 1, 0, 3, 2]), 2)
        assert here == there


def test_hash() -> None:
    """Values of the algorithm's authors."""
    assert [fnv1a_32(text) for text in (b"", b"a", b"foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]


def test_parameters() -> None:
    with pytest.raises(ValueError, match="minCachedTokenDelta"):
        tickets.made(KIND, context(Row("1")).view, minCachedTokenDelta=0)
