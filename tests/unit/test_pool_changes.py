"""What is told of a change, and that what has not changed is not made again."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from epp.pool.records import Endpoint
from epp.pool.store import MOST_TOLD, Change, PoolStore


def endpoints(count: int) -> list[Endpoint]:
    return [Endpoint(f"uid-{n}", f"pod-{n}", "ns", f"10.0.{n // 250}.{n % 250}", 8000) for n in range(count)]


@pytest.mark.parametrize("count", [0, 1, MOST_TOLD, MOST_TOLD + 1, 1000])
def test_a_line_of_the_log_has_an_end(count: int) -> None:
    told = Change(joined=tuple(endpoints(count)), left=tuple(endpoints(2))).told()
    addresses = [endpoint.host_port for endpoint in endpoints(count)]
    assert told["joined"][:MOST_TOLD] == addresses[:MOST_TOLD]
    assert told["joined"][MOST_TOLD:] == ([f"and {count - MOST_TOLD} more"] if count > MOST_TOLD else [])
    assert told["left"] == ["10.0.0.0:8000", "10.0.0.1:8000"]
    assert len(str(told)) < 1000


class Counted:
    """How often an endpoint's text is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        make = vars(Endpoint)["host_port"].fget

        def counted(endpoint: Endpoint) -> Any:
            self.made.append(endpoint.uid)
            return make(endpoint)

        monkeypatch.setattr(Endpoint, "host_port", property(counted))

    def of(self, store: PoolStore, members: Iterable[Endpoint]) -> set[str]:
        """Whose, in one change of the pool."""
        self.made.clear()
        store.sync(members, 0.0)
        return {*self.made}


def test_a_change_costs_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand endpoints, one comes, one goes, one moves, and one gets another label."""
    store, members = PoolStore(), endpoints(1000)
    counted = Counted(monkeypatch)
    assert len(counted.of(store, members)) == 1000
    assert counted.of(store, members) == set()
    assert counted.of(store, members[:-1]) <= {"uid-999"}
    assert counted.of(store, members) == {"uid-999"}
    members[3] = msgspec.structs.replace(members[3], address="10.9.9.9")
    assert counted.of(store, members) == {"uid-3"}
    members[4] = msgspec.structs.replace(members[4], labels={"a": "b"})
    assert counted.of(store, members) == {"uid-4"}
    texts = {endpoint.uid: f"{endpoint.address}:8000" for endpoint in members}
    owners = {owner.uid: slot for slot, owner in enumerate(store.view.endpoints) if owner is not None}
    assert {uid: store.view.host_ports[slot] for uid, slot in owners.items()} == texts
    assert store.view.by_host_port == {texts[uid]: slot for uid, slot in owners.items()}


def test_records_that_are_known_stay() -> None:
    """A file of endpoints that is read again makes all of them anew."""
    store = PoolStore()
    store.sync(endpoints(3), 0.0)
    known = store.view.endpoints[:3]
    store.sync(endpoints(4), 0.0)
    assert all(one is other for one, other in zip(known, store.view.endpoints[:3], strict=True))
    assert [endpoint for _, endpoint in store.roster] == endpoints(4)
