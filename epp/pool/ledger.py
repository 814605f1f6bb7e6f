"""What this picker has in flight to each endpoint."""

import numpy as np

from epp.pool.records import Ints, Load


class InflightLedger:
    """The one owner of `Load`: every charge is given back, whatever became of the request.

    A caller that gives back more than was charged has a fault. The columns stay at zero then, since a
    negative load would draw all traffic to the endpoint; the fault is counted in `overdrafts`.

    Attributes:
        strict: raise AssertionError on an overdraft (for tests and simulations).
        overdrafts: times more was given back than was charged.
    """

    def __init__(self, capacity: int, *, strict: bool = False) -> None:
        self.load = Load(np.zeros(capacity, np.int64), np.zeros(capacity, np.int64))
        self.strict = strict
        self.overdrafts = 0

    @property
    def total_requests(self) -> int:
        return int(self.load.requests.sum())

    @property
    def total_prefill_tokens(self) -> int:
        return int(self.load.prefill_tokens.sum())

    def busy(self, slot: int) -> bool:
        """Something is in flight to the slot, so it must not get a new owner."""
        return bool(self.load.requests[slot] or self.load.prefill_tokens[slot])

    def resize(self, capacity: int) -> None:
        """Follow the view's capacity. Columns never shrink."""
        missing = capacity - len(self.load.requests)
        if missing > 0:
            self.load.requests = np.pad(self.load.requests, (0, missing))
            self.load.prefill_tokens = np.pad(self.load.prefill_tokens, (0, missing))

    def charge(self, slot: int, prefill_tokens: int) -> None:
        """A request was sent to the slot; `prefill_tokens` of its prompt are to be computed there."""
        self.load.requests[slot] += 1
        self.load.prefill_tokens[slot] += prefill_tokens

    def prefill_done(self, slot: int, prefill_tokens: int) -> None:
        """The first token came: its prompt is computed."""
        self._give_back(self.load.prefill_tokens, slot, prefill_tokens)

    def release(self, slot: int, prefill_tokens: int) -> None:
        """A request ended. `prefill_tokens`: what is still charged for it, 0 after `prefill_done`."""
        self._give_back(self.load.requests, slot, 1)
        self._give_back(self.load.prefill_tokens, slot, prefill_tokens)

    def move(self, from_slot: int, to_slot: int, prefill_tokens: int) -> None:
        """Another endpoint than the charged one serves the request."""
        self.release(from_slot, prefill_tokens)
        self.charge(to_slot, prefill_tokens)

    def _give_back(self, column: Ints, slot: int, amount: int) -> None:
        rest = column[slot] - amount
        if rest < 0:
            self.overdrafts += 1
            if self.strict:
                raise AssertionError(f"slot {slot}: {amount} given back of {column[slot]} charged")
            rest = 0
        column[slot] = rest
