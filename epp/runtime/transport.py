"""What every transport of ext-proc streams shares: how it is started and ended, and how its streams end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from epp.errors import ProtocolError
from epp.runtime.stream import Stream

log = logging.getLogger(__name__)

MakeStream = Callable[[Callable[[], None]], Stream]
"""Makes the stream behind one call, given its `wake`."""


class Listener(Protocol):
    """One listening port."""

    async def start(self, address: str) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        ...

    async def stop(self) -> None:
        """Cut what is in flight."""
        ...


class Transport(Listener, Protocol):
    """One listening ext-proc port."""

    async def drain(self) -> None:
        """Take no new streams; return when those in flight have ended."""
        ...


@dataclass(slots=True)
class StreamCounts:
    """How streams end, for metrics.

    Attributes:
        closed: called with the name of a gRPC status.
        dropped: called with how many messages a stream has dropped, where it has dropped any.
    """

    opened: Callable[[], None]
    closed: Callable[[str], None]
    dropped: Callable[[int], None] = lambda count: None


def failure(error: Exception) -> tuple[str, str]:
    """Name of the gRPC status, and details, for what a stream raised. Logs what is our fault."""
    if isinstance(error, ProtocolError):
        return "INVALID_ARGUMENT", str(error)
    log.error("an ext-proc stream failed", exc_info=error)
    return "INTERNAL", "the endpoint picker failed on this stream; its log has the details"
