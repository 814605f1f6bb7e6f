"""The ledger against a plain list of requests in flight: exact always, zero in the end."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.pool.ledger import InflightLedger

SLOTS = 6
Step = tuple[str, int, int]
actions = st.sampled_from(["charge", "charge", "first token", "end", "move", "grow"])
step = st.tuples(actions, st.integers(0, 1_000), st.integers(0, 5_000))
steps = st.lists(step, max_size=8) | st.lists(step, min_size=20, max_size=60)


def follow(ledger: InflightLedger, story: list[Step]) -> None:
    """Play the story, compare after each step, end what is left, and find the ledger empty."""
    flying: list[list[int]] = []

    def compare() -> None:
        for slot in range(len(ledger.load.requests)):
            mine = [tokens for owner, tokens in flying if owner == slot]
            assert ledger.load.requests[slot] == len(mine)
            assert ledger.load.prefill_tokens[slot] == sum(mine)
            assert ledger.busy(slot) == bool(mine)
        assert ledger.total_requests == len(flying)
        assert ledger.total_prefill_tokens == sum(tokens for _, tokens in flying)

    for action, which, amount in story:
        if action == "charge":
            flying.append([which % SLOTS, amount])
            ledger.charge(which % SLOTS, amount)
        elif action == "grow":
            ledger.resize(amount % 40)
        elif flying:
            request = flying[which % len(flying)]
            if action == "first token":
                ledger.prefill_done(*request)
                request[1] = 0
            elif action == "move":
                ledger.move(request[0], amount % SLOTS, request[1])
                request[0] = amount % SLOTS
            else:
                flying.remove(request)
                ledger.release(*request)
        compare()
    while flying:
        ledger.release(*flying.pop())
    compare()
    assert ledger.overdrafts == 0


@given(steps)
def test_ledger_is_conserved(story: list[Step]) -> None:
    follow(InflightLedger(SLOTS, strict=True), story)


class KeepsPrefillOnMove(InflightLedger):
    def move(self, from_slot: int, to_slot: int, prefill_tokens: int) -> None:
        self.release(from_slot, 0)
        self.charge(to_slot, prefill_tokens)


class LosesChargesWhenGrowing(InflightLedger):
    def resize(self, capacity: int) -> None:
        grown = InflightLedger(max(capacity, len(self.load.requests)))
        self.load.requests = grown.load.requests
        super().resize(capacity)


class ForgetsPrefillAtTheEnd(InflightLedger):
    def release(self, slot: int, prefill_tokens: int) -> None:
        super().release(slot, 0)


class EndsTheRequestAtTheFirstToken(InflightLedger):
    def prefill_done(self, slot: int, prefill_tokens: int) -> None:
        self.release(slot, prefill_tokens)


class ShrinksBelowItsCharges(InflightLedger):
    def resize(self, capacity: int) -> None:
        self.load.requests = self.load.requests[: max(capacity, SLOTS - 1)]


@pytest.mark.parametrize(
    "faulty",
    [
        KeepsPrefillOnMove,
        LosesChargesWhenGrowing,
        ForgetsPrefillAtTheEnd,
        EndsTheRequestAtTheFirstToken,
        ShrinksBelowItsCharges,
    ],
)
def test_a_faulty_ledger_is_caught(faulty: Callable[..., InflightLedger]) -> None:
    @settings(phases=[Phase.generate], max_examples=300, derandomize=True, database=None)
    @given(steps)
    def search(story: list[Step]) -> None:
        follow(faulty(SLOTS, strict=True), story)

    with pytest.raises((AssertionError, IndexError)):
        search()


def test_an_overdraft_stays_at_zero_and_is_counted() -> None:
    ledger = InflightLedger(2)
    ledger.charge(0, 10)
    ledger.release(0, 25)
    ledger.release(0, 0)
    assert (ledger.total_requests, ledger.total_prefill_tokens, ledger.overdrafts) == (0, 0, 2)
    with pytest.raises(AssertionError, match="slot 1: 1 given back of 0"):
        InflightLedger(2, strict=True).release(1, 0)
