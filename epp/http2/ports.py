"""What the connection asks of those around it, and what it offers to them."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, Protocol

from epp.http2.codes import Status
from epp.http2.errors import CallFault

_SHOWN: Final = 256


class Ending(Enum):
    """How a call came to its end.

    FINISHED: `Peer.finish` was called. RESET: the peer reset the stream. LOST: the connection is gone.
    BROKEN: the peer broke a protocol, HTTP/2 or gRPC, on this stream or on the connection. DEADLINE: its
    `grpc-timeout` ran out. STALLED: it left a message half sent, or replies unread, for too long.
    """

    FINISHED = "finished"
    RESET = "reset"
    LOST = "lost"
    BROKEN = "broken"
    DEADLINE = "deadline"
    STALLED = "stalled"


class Peer(Protocol):
    """The other side of one call, as its server sees it. After `Call.ended` all of this does nothing."""

    def send(self, message: bytes) -> None:
        """One message. Never waits: what the peer has no window for is kept, and charged to the account."""
        ...

    def finish(self, status: Status, details: str = "") -> None:
        """End the call, after all that was sent."""
        ...

    def flush(self) -> None:
        """Have it written: needed after sending at a time of one's own, outside of the methods of `Call`."""
        ...


class Call(Protocol):
    """The server of one gRPC call. None of these may raise; `ended` is called exactly once, last."""

    def received(self, message: bytes) -> None: ...

    def too_large(self) -> None:
        """A message is beyond the limit of messages: finish the call. Nothing more comes."""
        ...

    def no_room(self) -> None:
        """A message does not fit into what the process may hold: finish the call. Nothing more comes."""
        ...

    def half_closed(self) -> None:
        """No more messages. The call may still send."""
        ...

    def ended(self, ending: Ending) -> None: ...


Methods = Mapping[str, Callable[[Peer], Call]]
"""What is served, by path (`/package.Service/Method`)."""


def find_method(methods: Methods, path: str) -> Callable[[Peer], Call]:
    """Raises CallFault (UNIMPLEMENTED) for a path that is not served."""
    make = methods.get(path)
    if make is not None:
        return make
    service, _, method = path[:_SHOWN].lstrip("/").rpartition("/")
    if any(served.startswith(f"/{service}/") for served in methods):
        raise CallFault(Status.UNIMPLEMENTED, f"unknown method {method} for service {service}")
    raise CallFault(Status.UNIMPLEMENTED, f"unknown service {service or path[:_SHOWN]}")


class Account(Protocol):
    """Where bytes held for peers are charged. One for the whole process."""

    def take(self, n: int) -> bool:
        """Reserve `n` bytes. False, and nothing reserved, where they do not fit."""
        ...

    def charge(self, n: int) -> bool:
        """Count `n` bytes that are held already, fit or not. False: a quarter too much is held."""
        ...

    def give(self, n: int) -> None:
        """Return `n` bytes taken or charged before."""
        ...
