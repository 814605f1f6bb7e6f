"""Filters by load, and the one by which tests choose their endpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from epp.payload.records import find_header
from epp.pool.records import Floats, Ints, Mask
from epp.scheduling.membership import ByMembership, Owners
from epp.scheduling.ports import Ctx
from epp.scheduling.records import INFLIGHT_LOAD, FactKey, InflightLoad

DEFAULT_INFLIGHT_PRODUCER = "inflight-load-producer"

# -- caps on load -----------------------------------------------------------------------------------

_ACTIVE: Final = "active-requests"
_SCRAPED: Final[Mapping[str, Callable[[Ctx], Floats]]] = {
    "running-requests": lambda ctx: ctx.view.running,
    "waiting-queue": lambda ctx: ctx.view.waiting,
    "kv-cache-utilization": lambda ctx: ctx.view.kv_usage,
}


class Cap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One condition: the figure is at most `max_value` (a share in 0..1 for `kv-cache-utilization`)."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Annotated[float, Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.metric == "kv-cache-utilization" and self.max_value > 1:
            raise ValueError(
                f"maxValue for {self.metric} is a fraction and must be at most 1, got {self.max_value:g}"
            )


class UtilizationFilterParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `utilization-filter`.

    Attributes:
        conditions: all of them have to hold; one at least.
        fallback_on_empty: keep all where none would be left.
        in_flight_load_producer_name: plugin that counts `active-requests`.
    """

    conditions: tuple[Cap, ...]
    fallback_on_empty: bool = False
    in_flight_load_producer_name: Annotated[str, Meta(min_length=1)] = DEFAULT_INFLIGHT_PRODUCER

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ValueError("conditions needs at least one entry")

    def needs(self) -> tuple[FactKey, ...]:
        """The load in flight, where a condition is about it."""
        active = any(cap.metric == _ACTIVE for cap in self.conditions)
        return (FactKey(INFLIGHT_LOAD, self.in_flight_load_producer_name),) if active else ()


class UtilizationFilter:
    """`utilization-filter`: drops an endpoint when one of its figures is above its cap.

    A figure nobody told (never scraped, an engine without the series, a producer that failed) counts as 0:
    the endpoint stays. Stale: the last value counts.
    """

    def __init__(self, params: UtilizationFilterParams) -> None:
        key = FactKey(INFLIGHT_LOAD, params.in_flight_load_producer_name)

        def active(ctx: Ctx) -> Ints | None:
            load: InflightLoad | None = ctx.facts.get(key)
            return None if load is None else load.requests

        self._caps = tuple((_SCRAPED.get(cap.metric, active), cap.max_value) for cap in params.conditions)
        self._fallback = params.fallback_on_empty

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        kept = alive
        for read, most in self._caps:
            figure = read(ctx)
            if figure is not None:
                kept = kept & (figure <= most)
        if self._fallback and not np.count_nonzero(kept):
            return alive
        return kept


# -- endpoints chosen by a test ---------------------------------------------------------------------

TEST_ENDPOINT_SELECTION: Final = "test-epp-endpoint-selection"


class HeaderBasedTestingFilterParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `header-based-testing-filter`.

    Attributes:
        pass_without_header: keep all for a request without the header, rather than none.
    """

    pass_without_header: bool = False


class HeaderBasedTestingFilter:
    """`header-based-testing-filter`: keeps the endpoints that `test-epp-endpoint-selection` lists.

    Entries are separated by commas, each an IP address (IPv6 with or without brackets) or address and port.
    An entry without a port means the endpoint with the lowest port there. Each address counts once: a second
    entry of it has no effect. For conformance tests; clients must not reach it.
    """

    def __init__(self, *, pass_without_header: bool = False) -> None:
        """`pass_without_header`: keep all where the header is missing or empty, rather than none."""
        self._slots = ByMembership(_slots_by_address)
        self._pass = pass_without_header

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        wanted = find_header(ctx.headers, TEST_ENDPOINT_SELECTION)
        if not wanted and self._pass:
            return alive
        kept = np.zeros(len(alive), np.bool_)
        if not wanted:
            return kept
        slots = self._slots.of(ctx.view)
        served: set[str] = set()
        for entry in wanted.split(","):
            address, port = _address(entry.strip())
            slot = _first_alive(slots.get(address, ()), port, alive)
            if slot is not None and address not in served:
                served.add(address)
                kept[slot] = True
        return kept


def _slots_by_address(owners: Owners) -> dict[str, list[tuple[int, int]]]:
    """Port and slot of the endpoints at each address, by port."""
    found: dict[str, list[tuple[int, int]]] = {}
    for slot, owner in enumerate(owners):
        if owner is not None:
            found.setdefault(owner.address, []).append((owner.port, slot))
    for places in found.values():
        places.sort()
    return found


def _first_alive(places: Sequence[tuple[int, int]], port: str, alive: Mask) -> int | None:
    for number, slot in places:
        if alive[slot] and port in ("", str(number)):
            return slot
    return None


def _address(entry: str) -> tuple[str, str]:
    """Address without brackets, and port or an empty text."""
    if entry.startswith("["):
        address, _, port = entry[1:].partition("]")
        return address, port.removeprefix(":")
    address, colon, port = entry.partition(":")
    return (entry, "") if ":" in port else (address, port)
