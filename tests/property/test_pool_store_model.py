"""The store under random members, scrapes and requests, against a simple model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.pool import store as store_module
from epp.pool.metrics_page import NO_LORA, EngineSample, LoraSample
from epp.pool.records import Endpoint, LoadReport, Mask
from epp.pool.store import PoolStore

STALENESS_S = 2.0
INTERVAL_S = 0.2
Step = tuple[str, int, int]

actions = st.sampled_from(
    ["sync", "sampled", "failed", "failed", "refused", "answering", "charge", "charge", "end", "tick"]
    + ["learned", "reported", "models"]
)
step = st.tuples(actions, st.integers(0, 2**12), st.integers(0, 200))
# Short stories shrink well, long ones reach deep.
steps = st.lists(step, max_size=10) | st.lists(step, min_size=20, max_size=60)


def endpoint(number: int, label: str = "a") -> Endpoint:
    """Pod number // 2 at one of its two addresses."""
    pod = number // 2
    return Endpoint(
        f"pod-{pod}", f"name-{pod}", "default", f"10.0.{number % 2}.{pod}", 8000, {"label": label}
    )


def some(bits: int, names: str) -> frozenset[str]:
    return frozenset(name for at, name in enumerate(names) if bits >> at & 1)


@dataclass
class Life:
    """One endpoint from joining to leaving, as the model knows it."""

    endpoint: Endpoint
    slot: int
    waiting: float | None = None
    waiting_at: float = 0.0
    beside: bool = False
    running: float | None = None
    running_at: float = 0.0
    heat: float | None = None
    lora: LoraSample = NO_LORA
    models: frozenset[str] = frozenset()
    scraped_at: float | None = None
    failures: int = 0
    refused: bool = False
    answered_at: float = -1e9


@dataclass
class Witness:
    """A member that keeps state by slot: it must be told `left` between two owners."""

    busy: Callable[[int], bool]
    owned: set[int] = field(default_factory=set)

    def joined(self, slot: int) -> None:
        assert slot not in self.owned, "a slot changed hands before its state was forgotten"
        assert not self.busy(slot), "requests of the last owner are charged to the next"
        self.owned.add(slot)

    def left(self, slot: int) -> None:
        assert not self.busy(slot), "forgotten while answers still come"
        self.owned.remove(slot)


class Model:
    def __init__(self, make: Callable[..., PoolStore]) -> None:
        self.flying: list[int] = []
        self.witness = Witness(self.busy)
        self.store = make(staleness_s=STALENESS_S, members=[self.witness], busy=self.busy)
        self.store.add_attributes(["heat"])
        self.lives: dict[str, Life] = {}
        self.now = 100.0
        self.drained = True

    def busy(self, slot: int) -> bool:
        return slot in self.flying

    def play(self, action: str, which: int, amount: int) -> None:
        if action == "sync":
            self.sync([endpoint(n, "ab"[amount % 2]) for n in range(12) if which >> n & 1])
        elif action == "tick":
            self.now += amount / 20
            self.store.refresh(self.now, INTERVAL_S)
            for life in self.lives.values():
                self.forget(life)
        elif action == "end":
            if self.flying:
                self.flying.pop(which % len(self.flying))
        elif self.lives:
            self.hear(action, list(self.lives.values())[which % len(self.lives)], amount)
        self.compare(freed=action in ("sync", "tick"))

    def hear(self, action: str, life: Life, amount: int) -> None:
        if action == "charge":
            self.flying.append(life.slot)
        elif action == "answering":
            life.answered_at = self.now
            self.store.answering(life.slot, self.now)
        elif action == "sampled":
            life.failures, life.refused = 0, False
            self.store.sampled(life.slot, self.told(life, amount), self.now)
        elif action == "learned":
            self.store.learned(life.slot, self.told(life, amount), self.now)
        elif action == "reported":
            life.waiting, life.scraped_at, life.heat = float(amount), self.now, float(amount)
            life.waiting_at, life.beside = self.now, True
            report = LoadReport(waiting=float(amount), attributes={"heat": float(amount), "other": 1.0})
            self.store.reported(life.slot, report, self.now)
        elif action == "models":
            life.models = some(amount, "mnop")
            self.store.listed_models(life.slot, life.models)
        else:
            refused = action == "refused"
            life.refused = life.refused or refused
            for _ in range(1 + amount % 3):
                life.failures += 1
                self.store.failed(life.slot, refused=refused, now=self.now)

    def told(self, life: Life, amount: int) -> EngineSample:
        """A page with the queue or, one in three, with the running requests alone."""
        life.scraped_at = self.now
        life.lora = LoraSample(some(amount, "abc"), some(amount // 8, "abc"), amount % 5)
        if amount % 3 == 0:
            life.running, life.running_at = float(amount), self.now
            return EngineSample(running=float(amount), lora=life.lora)
        life.waiting, life.waiting_at, life.beside = float(amount), self.now, False
        return EngineSample(waiting=float(amount), lora=life.lora)

    def forget(self, life: Life) -> None:
        if life.scraped_at is None:
            return
        if (self.now if life.beside else life.scraped_at) - STALENESS_S > life.waiting_at:
            life.waiting = None
        if life.scraped_at - STALENESS_S > life.running_at:
            life.running = None

    def sync(self, endpoints: list[Endpoint]) -> None:
        wanted = {one.uid: one for one in endpoints}
        change = self.store.sync(endpoints, self.now)
        before, self.lives = self.lives, {}
        slots = {one.uid: slot for slot, one in self.store.roster}
        assert slots.keys() == wanted.keys()
        for uid, one in wanted.items():
            life = before.get(uid)
            if life is None or life.endpoint.host_port != one.host_port:
                assert one in change.joined
                assert life is None or life.endpoint in change.left
                life = Life(one, slots[uid])
            else:
                assert (one in change.relabelled) == (one != life.endpoint)
            life.endpoint = one
            assert slots[uid] == life.slot
            self.lives[uid] = life

    def compare(self, freed: bool) -> None:
        view, lives = self.store.view, list(self.lives.values())
        assert {life.slot: life.endpoint for life in lives} == dict(self.store.roster)
        kept = {life.slot for life in lives} | set(self.flying)
        assert self.witness.owned >= kept
        if freed:
            assert self.witness.owned == kept
        assert {slot for slot, owner in enumerate(view.endpoints) if owner} == self.witness.owned
        for life in lives:
            assert view.endpoints[life.slot] == life.endpoint
            assert view.host_ports[life.slot] == life.endpoint.host_port
            assert self.store.slot_of(life.endpoint.host_port) == life.slot
            assert view.waiting[life.slot] == (life.waiting or 0.0)
            assert view.waiting_known[life.slot] == (life.waiting is not None)
            assert view.running[life.slot] == (life.running or 0.0)
            assert view.running_known[life.slot] == (life.running is not None)
            assert view.present[life.slot] == (life.scraped_at is not None)
            if freed:
                old = life.scraped_at is not None and self.now - life.scraped_at > STALENESS_S
                assert view.stale[life.slot] == old
        self.compare_candidates(lives)
        free = [slot for slot in range(view.capacity) if slot not in self.witness.owned]
        for column in (
            view.identity,
            view.present,
            view.stale,
            view.waiting,
            view.waiting_known,
            view.running_known,
            view.scraped_at,
            view.candidates,
        ):
            assert not column[free].any()

        self.compare_names(lives, free)

    def compare_names(self, lives: list[Life], free: list[int]) -> None:
        view = self.store.view
        heat = view.attributes["heat"]
        assert np.isnan(heat[free]).all()
        for life in lives:
            assert heat[life.slot] == life.heat if life.heat is not None else np.isnan(heat[life.slot])
        self.compare_masks(view.models, {life.slot: life.models for life in lives}, free)
        if view.adapters is None:
            assert all(life.lora == NO_LORA for life in lives)
            return
        adapters = view.adapters
        self.compare_masks(adapters.running, {life.slot: life.lora.running for life in lives}, free)
        self.compare_masks(adapters.waiting, {life.slot: life.lora.waiting for life in lives}, free)
        assert len(adapters.count) == len(adapters.most) == view.capacity
        assert not adapters.count[free].any()
        assert not adapters.most[free].any()
        for life in lives:
            assert adapters.count[life.slot] == len(life.lora.running | life.lora.waiting)
            assert adapters.most[life.slot] == life.lora.most

    def compare_masks(self, masks: dict[str, Mask], told: dict[int, frozenset[str]], free: list[int]) -> None:
        assert set(masks) >= frozenset[str]().union(*told.values())
        for name, mask in masks.items():
            assert len(mask) == self.store.view.capacity
            assert mask.any(), "a name that goes with no slot"
            assert not mask[free].any(), "a name of a slot's last owner"
            assert {slot for slot in told if mask[slot]} == {slot for slot in told if name in told[slot]}

    def compare_candidates(self, lives: list[Life]) -> None:
        fit = {
            life.slot
            for life in lives
            if not life.refused and (life.failures < 3 or self.now - life.answered_at <= 5.0)
        }
        expected = fit or {life.slot for life in lives}
        assert set(np.flatnonzero(self.store.view.candidates).tolist()) == expected


def follow(make: Callable[..., PoolStore], story: list[Step]) -> None:
    model = Model(make)
    for step in story:
        model.play(*step)
    model.sync([])
    model.flying.clear()
    model.store.refresh(model.now, INTERVAL_S)
    model.compare(freed=True)
    assert model.witness.owned == set()
    assert not model.store.view.by_host_port


@given(steps)
def test_store_follows_the_model(story: list[Step]) -> None:
    follow(PoolStore, story)


class ReusesBusySlots(PoolStore):
    def _free_drained(self) -> bool:
        self._busy = lambda slot: False
        return super()._free_drained()


class TellsNobodyWhoLeft(PoolStore):
    def _free_drained(self) -> bool:
        members, self._members = self._members, []
        freed = super()._free_drained()
        self._members = members
        return freed


class LeavesFactsBehind(PoolStore):
    def _blank(self, slot: int) -> None:
        pass


class LeavesAdaptersBehind(PoolStore):
    def _set_adapters(self, slot: int, lora: LoraSample) -> None:
        if lora is not NO_LORA:
            super()._set_adapters(slot, lora)


class LeavesAttributesBehind(PoolStore):
    def _blank(self, slot: int) -> None:
        heat = self.view.attributes["heat"][slot]
        super()._blank(slot)
        self.view.attributes["heat"][slot] = heat


class KeepsOldModels(PoolStore):
    def listed_models(self, slot: int, models: frozenset[str]) -> None:
        known = frozenset(name for name, mask in self.view.models.items() if mask[slot])
        super().listed_models(slot, models | known)


class TakesAReportForReach(PoolStore):
    def learned(self, slot: int, sample: EngineSample, now: float) -> None:
        super().learned(slot, sample, now)
        if self._listed[slot]:
            self._failures[slot], self._refused[slot] = 0, False
            self._choose(now)


class LetsAllLeave(PoolStore):
    def _choose(self, now: float) -> None:
        silent = now - self._answered_at > 5.0
        gone = self._refused | ((self._failures >= 3) & silent)
        np.greater(self._listed, gone, out=self.view.candidates)


class NeverForgives(PoolStore):
    def sampled(self, slot: int, sample: EngineSample, now: float) -> None:
        failures = self._failures[slot]
        super().sampled(slot, sample, now)
        self._failures[slot] = failures


class ForgetsARefusal(PoolStore):
    def failed(self, slot: int, *, refused: bool, now: float) -> None:
        self._refused[slot] = False
        super().failed(slot, refused=refused, now=now)


class KeepsTheSlotAtANewAddress(PoolStore):
    def sync(self, endpoints: list[Endpoint], now: float) -> store_module.Change:  # type: ignore[override]
        known = {one.uid: one for _, one in self.roster}
        return super().sync([known.get(one.uid, one) for one in endpoints], now)


class DoesNotSeeAnswers(PoolStore):
    def answering(self, slot: int, now: float) -> None:
        pass


class BelievesForEver(PoolStore):
    def _forget_untold(self, now: float, limit_s: float) -> None:
        pass


class ForgetsTheSilent(PoolStore):
    def _forget_untold(self, now: float, limit_s: float) -> None:
        self._beside[:] = True
        super()._forget_untold(now, limit_s)


class TakesAReportForAPage(PoolStore):
    def reported(self, slot: int, report: LoadReport, now: float) -> None:
        super().reported(slot, report, now)
        self._beside[:] = False


FAULTS = [
    ReusesBusySlots,
    TellsNobodyWhoLeft,
    LeavesFactsBehind,
    LeavesAdaptersBehind,
    LeavesAttributesBehind,
    KeepsOldModels,
    TakesAReportForReach,
    LetsAllLeave,
    NeverForgives,
    ForgetsARefusal,
    KeepsTheSlotAtANewAddress,
    DoesNotSeeAnswers,
    BelievesForEver,
    ForgetsTheSilent,
    TakesAReportForAPage,
]


@pytest.mark.parametrize("faulty", FAULTS)
def test_a_faulty_store_is_caught(faulty: Callable[..., PoolStore]) -> None:
    @settings(phases=[Phase.generate], max_examples=500, derandomize=True, database=None)
    @given(steps)
    def search(story: list[Step]) -> None:
        follow(faulty, story)

    with pytest.raises((AssertionError, KeyError)):
        search()
