"""How many bytes of bodies may be held, by one request and by the process."""

from dataclasses import dataclass

from epp.http2.limits import MIB
from epp.http2.rates import Quota


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on bodies.

    Attributes:
        body_bytes: most bytes of one request body; beyond it the request gets 413.
        held_bytes: most bytes held at one time in the process; a request body that goes beyond it gets 429.
    """

    body_bytes: int = 32 * MIB
    held_bytes: int = 1024 * MIB


class BodyBudget(Quota):
    """Bytes held in the process for requests and answers. One per process, shared by all exchanges.

    Request bodies are held only where they fit. What is read of answers is held in any case, up to a limit
    of each, and leaves less for request bodies.
    """

    __slots__ = ()
