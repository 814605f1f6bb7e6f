"""Bounds on how often and how much."""

from epp.http2.limits import Rate


class Bucket:
    """A token bucket, full at the start."""

    __slots__ = ("_at", "_burst", "_per_s", "_tokens")

    def __init__(self, rate: Rate, now: float) -> None:
        self._burst = self._tokens = float(rate.burst)
        self._per_s = rate.per_s
        self._at = now

    def spend(self, now: float) -> bool:
        """Take one token. False where there is none."""
        tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if tokens < 1.0:
            self._tokens = tokens
            return False
        self._tokens = tokens - 1.0
        return True


class Quota:
    """So many and no more. An `Account` (see `epp.http2.ports`)."""

    __slots__ = ("_limit", "used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def take(self, n: int) -> bool:
        """Reserve `n`. False, and nothing reserved, where they do not fit."""
        if self.used + n > self._limit:
            return False
        self.used += n
        return True

    def charge(self, n: int) -> bool:
        """Count `n` that are there already, whether they fit or not. False: a quarter too much is there."""
        self.used += n
        return self.used <= self._limit + self._limit // 4

    def give(self, n: int) -> None:
        """Return `n` taken or charged before."""
        self.used -= n
