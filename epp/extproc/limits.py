"""How many bytes of bodies may be held, by one request and by the process."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on bodies.

    Attributes:
        body_bytes: most bytes of one request body; beyond it the request gets 413.
        held_bytes: most bytes held at one time in the process; a request body that goes beyond it gets 429.
    """

    body_bytes: int = 32 * MIB
    held_bytes: int = 1024 * MIB


class BodyBudget:
    """Bytes held in the process for requests and answers. One per process, shared by all exchanges.

    Request bodies are held only where they fit. What is read of answers is held in any case, up to a limit
    of each, and leaves less for request bodies.
    """

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

    def charge(self, n: int) -> None:
        """Count `n` bytes that are held already, whether they fit or not."""
        self.used += n

    def give(self, n: int) -> None:
        """Return `n` bytes taken or charged before."""
        self.used -= n
