"""How many bytes of request bodies may be held, by one request and by the process."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on request bodies.

    Attributes:
        body_bytes: most bytes of one request body; beyond it the request gets 413.
        held_bytes: most bytes of all request bodies held at one time in the process; beyond it, 429.
    """

    body_bytes: int = 32 * MIB
    held_bytes: int = 1024 * MIB


class BodyBudget:
    """Bytes of request bodies held in the process. One per process, shared by all exchanges."""

    __slots__ = ("_limit_bytes", "used")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used = 0

    def take(self, n: int) -> bool:
        """Reserve `n` bytes. False, and nothing reserved, where they do not fit."""
        if self.used + n > self._limit_bytes:
            return False
        self.used += n
        return True

    def give(self, n: int) -> None:
        """Return `n` bytes taken before."""
        self.used -= n
