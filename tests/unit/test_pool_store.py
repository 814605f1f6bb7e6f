"""Rules of the store that are easier said with one example than with a model."""

import numpy as np
import pytest

from epp.pool.metrics_page import NO_LORA, EngineSample, LoraSample
from epp.pool.records import Endpoint, LoadReport
from epp.pool.store import _COLUMNS, PoolStore

FULL = EngineSample(
    waiting=3.0,
    running=2.0,
    kv_usage=0.5,
    block_size=16,
    cache_tokens=1600,
    hit_tokens=10.0,
    query_tokens=20.0,
)


def endpoint(number: int, **changes: object) -> Endpoint:
    fields = {
        "uid": f"uid-{number}",
        "name": f"vllm-{number}",
        "namespace": "default",
        "address": f"10.0.{number // 256}.{number % 256}",
        "port": 8000,
        "labels": {},
    }
    return Endpoint(**(fields | changes))  # type: ignore[arg-type]


class Diary:
    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []

    def joined(self, slot: int) -> None:
        self.lines.append(("joined", slot))

    def left(self, slot: int) -> None:
        self.lines.append(("left", slot))


def test_the_pool_grows_and_keeps_what_is_known() -> None:
    store = PoolStore()
    store.sync([endpoint(0)], 0.0)
    store.sampled(0, FULL, 0.0)
    store.sync([endpoint(n) for n in range(300)], 0.0)
    view = store.view
    assert view.capacity >= 300
    for column in (view.candidates, view.present, view.waiting, view.hit_tokens, view.identity, view.stale):
        assert len(column) == view.capacity
    assert len(view.endpoints) == len(view.host_ports) == view.capacity
    assert view.candidates.sum() == 300
    assert (view.waiting[0], view.cache_tokens[0], view.hit_tokens[0]) == (3.0, 1600, 10.0)
    assert np.isnan(view.hit_tokens[1:]).all()
    assert len(set(view.identity[:300].tolist())) == 300


LORA = LoraSample(frozenset({"a", "b"}), frozenset({"c"}), 4)
MEMBERS = 12


def seen_of(store: PoolStore, slots: int) -> list[object]:
    """All that the view tells of the first slots."""
    view = store.view
    told: list[object] = [getattr(view, name)[:slots].tolist() for name, _, _ in _COLUMNS]
    masks = (view.models, view.adapters.running, view.adapters.waiting) if view.adapters else (view.models,)
    told += [{name: mask[:slots].tolist() for name, mask in named.items()} for named in masks]
    told += [column[:slots].tolist() for column in view.attributes.values()]
    if view.adapters is not None:
        told += [view.adapters.count[:slots].tolist(), view.adapters.most[:slots].tolist()]
    return [repr(each) for each in told]  # nan is not nan


def story(grows: type[PoolStore], members: int) -> list[list[object]]:
    """What is seen of twelve endpoints, something else being told of each, when so many more join."""
    store = grows(staleness_s=2.0)
    store.add_attributes(("key",))
    store.sync([endpoint(n) for n in range(MEMBERS)], 0.0)
    for slot in range(MEMBERS):
        store.sampled(slot, FULL, 0.0)
    store.reported(1, LoadReport(waiting=9.0, attributes={"key": 2.0}), 0.5)
    store.sampled(2, EngineSample(waiting=1.0, lora=LORA), 1.0)
    store.listed_models(3, frozenset({"m"}))
    store.failed(4, refused=True, now=1.0)
    for slot in (5, 6):
        for _ in range(3):
            store.failed(slot, refused=False, now=1.0)
    store.answering(6, 1.0)
    store.failed(7, refused=False, now=1.0)
    store.sync([endpoint(n) for n in range(MEMBERS + members)], 1.0)
    seen = [seen_of(store, MEMBERS)]
    for now in (1.5, 2.2, 2.8, 3.5, 7.0):
        store.sampled(0, EngineSample(running=5.0), now)
        store.failed(7, refused=False, now=now)
        store.refresh(now, 0.2)
        seen.append(seen_of(store, MEMBERS))
    return seen


def check_a_pool_that_grows(grows: type[PoolStore]) -> None:
    """What is known of the members is as in one whose pool stays small."""
    assert story(grows, 100) == story(PoolStore, 1)


def test_a_pool_that_grows_forgets_nothing() -> None:
    check_a_pool_that_grows(PoolStore)


@pytest.mark.parametrize("lost", ["_refused", "_failures", "_answered_at", "_told_at", "_beside"])
def test_whatever_is_lost_when_a_pool_grows_is_noticed(lost: str) -> None:
    class Loses(PoolStore):
        def _grow(self) -> None:
            super()._grow()
            setattr(self, lost, np.roll(getattr(self, lost), 1, axis=-1))

    with pytest.raises(AssertionError):
        check_a_pool_that_grows(Loses)


def test_a_new_label_or_name_keeps_slot_and_facts() -> None:
    diary = Diary()
    store = PoolStore(members=[diary])
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.sampled(1, FULL, 0.0)
    epoch = store.view.epoch
    renamed = endpoint(1, name="other", labels={"llm-d.ai/role": "prefill"})
    change = store.sync([endpoint(0), renamed], 1.0)
    assert (change.joined, change.left, change.relabelled) == ((), (), (renamed,))
    assert store.view.endpoints[1] == renamed
    assert store.view.waiting[1] == 3.0
    assert store.view.epoch > epoch
    assert diary.lines == [("joined", 0), ("joined", 1)]


@pytest.mark.parametrize("place", [{"address": "10.9.9.9"}, {"port": 8001}])
def test_another_address_or_port_is_another_life(place: dict[str, object]) -> None:
    diary = Diary()
    store = PoolStore(members=[diary])
    store.sync([endpoint(0)], 0.0)
    store.sampled(0, FULL, 0.0)
    change = store.sync([endpoint(0, **place)], 1.0)
    assert (change.joined, change.left) == ((endpoint(0, **place),), (endpoint(0),))
    assert diary.lines == [("joined", 0), ("left", 0), ("joined", 0)]
    assert not store.view.present[0]


def test_nothing_new_changes_nothing() -> None:
    store = PoolStore()
    assert store.sync([endpoint(0)], 0.0)
    roster, epoch = store.roster, store.view.epoch
    assert not store.sync([endpoint(0)], 1.0)
    assert store.roster is roster
    assert store.view.epoch == epoch


def test_an_inherited_address_starts_clean() -> None:
    flying = {0}
    store = PoolStore(busy=flying.__contains__)
    store.sync([endpoint(0)], 0.0)
    store.sampled(0, FULL, 0.0)
    store.sync([endpoint(1, address="10.0.0.0")], 0.0)
    assert store.slot_of("10.0.0.0:8000") == 1
    assert not store.view.present[1]
    assert np.flatnonzero(store.view.candidates).tolist() == [1]
    flying.clear()
    store.refresh(1.0, 0.2)
    assert store.view.endpoints[0] is None
    assert store.slot_of("10.0.0.0:8000") == 1


def test_a_removed_endpoint_is_known_until_its_last_answer() -> None:
    flying, diary = {0}, Diary()
    store = PoolStore(members=[diary], busy=flying.__contains__)
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.sync([endpoint(1)], 0.0)
    assert store.slot_of("10.0.0.0:8000") == 0
    assert not store.view.candidates[0]
    store.sampled(0, FULL, 0.0)
    assert not store.view.present[0]
    assert ("left", 0) not in diary.lines
    store.sync([endpoint(0), endpoint(1)], 0.0)
    assert store.slot_of("10.0.0.0:8000") == 2
    flying.clear()
    assert not store.sync([endpoint(0), endpoint(1)], 0.0)
    assert store.view.endpoints[0] is None
    assert diary.lines == [("joined", 0), ("joined", 1), ("joined", 2), ("left", 0)]


def test_identity_belongs_to_the_endpoint_not_to_its_slot() -> None:
    first, second = PoolStore(), PoolStore()
    first.sync([endpoint(0), endpoint(1)], 0.0)
    second.sync([endpoint(1), endpoint(0)], 0.0)
    assert first.view.identity[:2].tolist() == second.view.identity[:2].tolist()[::-1]


def test_a_late_member_hears_of_present_owners() -> None:
    store, diary = PoolStore(), Diary()
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.add_member(diary)
    assert diary.lines == [("joined", 0), ("joined", 1)]


def test_what_a_sample_does_not_tell_keeps_its_value() -> None:
    store = PoolStore()
    store.sync([endpoint(0)], 0.0)
    store.sampled(0, FULL, 0.0)
    store.sampled(0, EngineSample(waiting=9.0), 5.0)
    view = store.view
    assert (view.waiting[0], view.running[0], view.kv_usage[0], view.block_size[0]) == (9.0, 2.0, 0.5, 16)
    assert view.scraped_at[0] == 5.0


def test_what_no_page_told_is_unknown() -> None:
    store = PoolStore()
    store.sync([endpoint(0)], 0.0)
    view = store.view
    store.sampled(0, EngineSample(running=1.0), 0.0)
    assert (view.present[0], view.waiting_known[0], view.kv_known[0]) == (True, False, False)
    store.sampled(0, EngineSample(kv_usage=0.5), 0.0)
    store.sampled(0, EngineSample(waiting=0.0), 0.0)
    store.sampled(0, EngineSample(running=1.0), 0.0)
    assert (view.waiting_known[0], view.kv_known[0], view.kv_usage[0]) == (True, True, 0.5)


def test_a_sample_without_load_proves_reachable_and_no_more() -> None:
    store = PoolStore()
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.failed(0, refused=True, now=0.0)
    assert not store.view.candidates[0]
    store.sampled(0, EngineSample(), 1.0)
    assert store.view.candidates[0]
    assert not store.view.present[0]


def test_three_failures_put_out_unless_an_answer_flows() -> None:
    store = PoolStore()
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.answering(0, 10.0)
    for _ in range(3):
        assert store.view.candidates.sum() == 2
        store.failed(0, refused=False, now=11.0)
        store.failed(1, refused=False, now=11.0)
    assert np.flatnonzero(store.view.candidates).tolist() == [0]
    store.refresh(16.0, 0.2)
    assert store.view.candidates.sum() == 2, "with both gone none is"
    store.sampled(1, FULL, 16.0)
    assert np.flatnonzero(store.view.candidates).tolist() == [1]


def test_a_refusing_endpoint_is_out_at_once_though_an_answer_flows() -> None:
    store = PoolStore()
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.answering(0, 1.0)
    store.failed(0, refused=True, now=1.0)
    assert np.flatnonzero(store.view.candidates).tolist() == [1]


def test_an_endpoint_that_refused_stays_out_until_it_is_read() -> None:
    store = PoolStore()
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.failed(0, refused=True, now=1.0)
    store.failed(0, refused=False, now=2.0)
    assert np.flatnonzero(store.view.candidates).tolist() == [1]
    store.sampled(0, FULL, 3.0)
    assert store.view.candidates.sum() == 2


@pytest.mark.parametrize(("interval_s", "fresh_for_s"), [(0.2, 2.0), (1.0, 3.0), (5.0, 15.0)])
def test_staleness_allows_three_intervals(interval_s: float, fresh_for_s: float) -> None:
    store = PoolStore(staleness_s=2.0)
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.sampled(0, FULL, 100.0)
    store.refresh(100.0 + fresh_for_s, interval_s)
    assert not store.view.stale.any()
    store.refresh(100.1 + fresh_for_s, interval_s)
    assert np.flatnonzero(store.view.stale).tolist() == [0], "never scraped is not stale"
    store.sampled(0, FULL, 200.0)
    assert not store.view.stale.any()


def test_names_and_attributes_follow_the_capacity() -> None:
    store = PoolStore()
    store.add_attributes(["heat"])
    store.sync([endpoint(n) for n in range(3)], 0.0)
    store.sampled(
        1, EngineSample(lora=LoraSample(frozenset("a"), frozenset("ab"), 4), attributes={"heat": 2.0}), 0.0
    )
    store.listed_models(1, frozenset({"base"}))
    store.sync([endpoint(n) for n in range(40)], 0.0)
    view = store.view
    assert view.capacity > 40
    assert view.adapters is not None
    for mask in (view.adapters.running["a"], view.adapters.waiting["b"], view.models["base"]):
        assert (len(mask), np.flatnonzero(mask).tolist()) == (view.capacity, [1])
    assert len(view.adapters.count) == len(view.adapters.most) == view.capacity
    assert (view.adapters.count[1], view.adapters.most[1]) == (2, 4)
    assert view.attributes["heat"][1] == 2.0
    assert np.isnan(view.attributes["heat"][[0, 2, 39]]).all()


def test_adapters_are_unknown_until_an_engine_tells_of_any() -> None:
    store = PoolStore()
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.sampled(0, EngineSample(waiting=1.0, lora=NO_LORA), 0.0)
    assert store.view.adapters is None
    store.sampled(0, EngineSample(lora=LoraSample(frozenset("a"))), 0.0)
    store.sampled(0, EngineSample(waiting=1.0), 0.0)
    assert store.view.adapters is not None
    assert list(store.view.adapters.running) == ["a"], "an engine without such a series takes nothing away"
    store.sampled(0, EngineSample(lora=NO_LORA), 0.0)
    assert store.view.adapters.running == {}, "the engine started anew"


def test_a_report_tells_load_and_declared_attributes() -> None:
    store = PoolStore()
    store.add_attributes(["heat"])
    store.sync([endpoint(0)], 0.0)
    store.reported(
        0, LoadReport(waiting=2.0, running=3.0, kv_usage=1.5, attributes={"heat": -1.0, "x": 1.0}), 7.0
    )
    view = store.view
    assert (view.waiting[0], view.running[0], view.kv_usage[0]) == (2.0, 3.0, 1.0)
    assert [view.waiting_known[0], view.running_known[0], view.kv_known[0]] == [True] * 3
    assert (view.present[0], view.scraped_at[0]) == (True, 7.0)
    assert {key: column[0] for key, column in view.attributes.items()} == {"heat": -1.0}


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, -float("inf")])
def test_what_is_no_amount_in_a_report_is_left_alone(odd: float) -> None:
    store = PoolStore()
    store.add_attributes(["heat"])
    store.sync([endpoint(0)], 0.0)
    store.reported(0, LoadReport(odd, odd, odd, {"heat": odd}), 7.0)
    view = store.view
    assert [view.waiting_known[0], view.running_known[0], view.kv_known[0], view.present[0]] == [False] * 4
    assert np.isnan(view.attributes["heat"][0]) or view.attributes["heat"][0] == -1.0


def test_a_report_and_another_servers_page_bring_no_silent_endpoint_back() -> None:
    store = PoolStore()
    store.sync([endpoint(0), endpoint(1)], 0.0)
    store.failed(0, refused=True, now=0.0)
    store.reported(0, LoadReport(waiting=1.0), 0.0)
    store.learned(0, EngineSample(waiting=1.0), 0.0)
    assert np.flatnonzero(store.view.candidates).tolist() == [1]
    store.sampled(0, EngineSample(waiting=1.0), 0.0)
    assert np.flatnonzero(store.view.candidates).tolist() == [0, 1]


def test_nothing_is_learnt_of_a_removed_endpoint() -> None:
    store = PoolStore(busy=lambda slot: True)
    store.add_attributes(["heat"])
    store.sync([endpoint(0)], 0.0)
    store.sync([], 0.0)
    store.reported(0, LoadReport(waiting=1.0, attributes={"heat": 1.0}), 0.0)
    store.learned(0, EngineSample(waiting=1.0, lora=LoraSample(frozenset("a"))), 0.0)
    store.listed_models(0, frozenset("m"))
    view = store.view
    assert not view.present[0]
    assert (view.models, view.adapters) == ({}, None)
    assert np.isnan(view.attributes["heat"][0])
