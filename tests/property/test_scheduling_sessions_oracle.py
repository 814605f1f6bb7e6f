"""Session bindings against a plain list in order of use."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.scheduling import sessions
from epp.scheduling.sessions import SessionBindings

SLOTS = 3
TTL_S, SWEEP_S, MOST = 20.0, 5.0, 6
Step = tuple[str, int, int, int]
kinds = st.sampled_from(["bind", "bind", "bind", "look", "left", "sweep"])
steps = st.lists(
    st.tuples(kinds, st.integers(0, 9), st.integers(0, SLOTS - 1), st.integers(0, 8)), max_size=40
)


@pytest.fixture(autouse=True)
def few_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", MOST)


def follow(bindings: SessionBindings, story: list[Step]) -> None:
    """Play the story on a list of (session, slot or None where that one left, last use)."""
    model: list[tuple[int, int | None, float]] = []
    now, swept_at = 1000.0, 0.0
    for kind, session, slot, passed in story:
        now += passed
        if kind == "bind":
            bindings.bind(bindings.key(f"s{session}"), slot, now)
            model = [row for row in model if row[0] != session][-MOST:]
            model = [*model, (session, slot, now)][-MOST:]
        elif kind == "left":
            bindings.left(slot)
            model = [(name, None if at == slot else at, used) for name, at, used in model]
        elif kind == "sweep":
            bindings.sweep(now)
            if now - swept_at >= SWEEP_S:
                swept_at = now
                model = [row for row in model if now - row[2] <= TTL_S]
        bound = {name: at for name, at, _ in model}
        for name in range(10):
            assert bindings.slot(bindings.key(f"s{name}")) == bound.get(name)
        assert len(bindings) == len(model)
        for at in range(SLOTS):
            assert bindings.by_slot()[at] == sum(slot == at for slot in bound.values())


@settings(max_examples=80)
@given(steps)
def test_bindings_are_the_list(story: list[Step]) -> None:
    follow(SessionBindings(TTL_S, SWEEP_S, b"secret"), story)


class DoesNotRenew(SessionBindings):
    def bind(self, key: bytes, slot: int, now: float) -> None:
        before = self._bound.get(key)
        super().bind(key, slot, before[2] if before else now)


class KeepsItsPlaceInTheOrder(SessionBindings):
    def bind(self, key: bytes, slot: int, now: float) -> None:
        order = list(self._bound)
        super().bind(key, slot, now)
        if key in order:
            for other in order[order.index(key) + 1 :]:
                self._bound.move_to_end(other)


class PassesSessionsToTheNextOwner(SessionBindings):
    def left(self, slot: int) -> None: ...


class SweepsAlways(SessionBindings):
    def sweep(self, now: float) -> None:
        self._swept_at = 0.0
        super().sweep(now)


class DropsTheLatest(SessionBindings):
    def bind(self, key: bytes, slot: int, now: float) -> None:
        full = len(self) == MOST and key not in self._bound
        oldest = next(iter(self._bound.items())) if full else None
        super().bind(key, slot, now)
        if oldest:
            del self._bound[key]
            self._bound[oldest[0]] = oldest[1]


FAULTS = (
    DoesNotRenew,
    KeepsItsPlaceInTheOrder,
    PassesSessionsToTheNextOwner,
    SweepsAlways,
    DropsTheLatest,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: type[SessionBindings]) -> None:
    @settings(max_examples=300, phases=(Phase.generate,), derandomize=True, database=None)
    @given(steps)
    def tell(story: list[Step]) -> None:
        follow(fault(TTL_S, SWEEP_S, b"secret"), story)

    with pytest.raises(AssertionError):
        tell()
