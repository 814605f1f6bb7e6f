"""`grpc.health.v1` on bytes: the answers of every transport, and the calls of our own.

A call that is not in order ends as gRPC's table of status codes says: INTERNAL where the request cannot be
decoded, UNIMPLEMENTED where there is none or more than one (grpcio does not look at a second).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError

from epp import names
from epp.http2.codes import Status
from epp.http2.ports import Ending, Methods, Peer
from epp.runtime.health import Health
from epp.wire.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

_QUOTED_CHARACTERS: Final = 100

Post = Callable[[Callable[[], None]], object]
"""Runs something soon on the thread of the calls, in order; called on any thread. An event loop's
`call_soon_threadsafe`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """How a call ends without an answer."""

    status: Status
    details: str


WATCH_ENDED: Final = Refused(Status.UNAVAILABLE, "the endpoint picker is stopping")

# -- answers --------------------------------------------------------------------------------------


def check(health: Health, message: bytes) -> bytes | Refused:
    """From a HealthCheckRequest to a HealthCheckResponse."""
    service = service_of(message)
    if isinstance(service, Refused):
        return service
    status = health.status(service)
    if status is None:
        known = ", ".join(map(repr, health.statuses()))
        return Refused(Status.NOT_FOUND, f"unknown service {_quoted(service)}; known: {known}")
    return status_message(status)


def list_all(health: Health, message: bytes) -> bytes | Refused:
    """From a HealthListRequest to a HealthListResponse."""
    try:
        HealthListRequest.FromString(message)
    except DecodeError:
        return Refused(Status.INTERNAL, "the request is not a HealthListRequest")
    statuses = {name: HealthCheckResponse(status=status) for name, status in health.statuses().items()}
    return HealthListResponse(statuses=statuses).SerializeToString()


def service_of(message: bytes) -> str | Refused:
    """The name that a HealthCheckRequest asks for."""
    try:
        return HealthCheckRequest.FromString(message).service
    except DecodeError:
        return Refused(Status.INTERNAL, "the request is not a HealthCheckRequest")


def status_message(status: "HealthCheckResponse.ServingStatus") -> bytes:
    """A HealthCheckResponse."""
    return HealthCheckResponse(status=status).SerializeToString()


def _quoted(service: str) -> str:
    """A status is sent as a header: a name as long as a message may be does not fit into it."""
    if len(service) <= _QUOTED_CHARACTERS:
        return repr(service)
    return f"{service[:_QUOTED_CHARACTERS]!r}… ({len(service)} characters)"


# -- calls of the own transport -------------------------------------------------------------------


def health_methods(health: Health, post: Post) -> Methods:
    """Check, List and Watch. `post` leads to the thread on which the transport makes these calls."""
    service = f"/{names.HEALTH_SERVICE}"
    return {
        f"{service}/Check": lambda peer: _Unary(peer, partial(check, health)),
        f"{service}/List": lambda peer: _Unary(peer, partial(list_all, health)),
        f"{service}/Watch": lambda peer: _Watch(peer, health, post),
    }


class _OneRequest(ABC):
    """A call that takes one request."""

    __slots__ = ("_asked", "_over", "_peer")

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._asked = False
        self._over = False

    def received(self, message: bytes) -> None:
        if self._over:
            return
        if self._asked:
            self._refuse(Refused(Status.UNIMPLEMENTED, "the method takes one request, and there was another"))
        else:
            self._asked = True
            self._request(message)

    def too_large(self) -> None:
        self._refuse(Refused(Status.RESOURCE_EXHAUSTED, "the request is larger than the limit of messages"))

    def no_room(self) -> None:
        self._refuse(Refused(Status.RESOURCE_EXHAUSTED, "there is no memory left for the request"))

    def half_closed(self) -> None:
        if not self._over and not self._asked:
            self._refuse(Refused(Status.UNIMPLEMENTED, "the method takes one request, and there was none"))

    def ended(self, ending: Ending) -> None:
        self._over = True

    @abstractmethod
    def _request(self, message: bytes) -> None: ...

    def _refuse(self, refused: Refused) -> None:
        self._finish(refused.status, refused.details)

    def _finish(self, status: Status, details: str = "") -> None:
        if not self._over:
            self._over = True
            self._peer.finish(status, details)


class _Unary(_OneRequest):
    """Answers when the peer has said all: to end before it would take a reset of the stream."""

    __slots__ = ("_answer", "_outcome")

    def __init__(self, peer: Peer, answer: Callable[[bytes], bytes | Refused]) -> None:
        super().__init__(peer)
        self._answer = answer
        self._outcome: bytes | Refused | None = None

    def half_closed(self) -> None:
        super().half_closed()
        if self._over:
            return
        if isinstance(self._outcome, bytes):
            self._peer.send(self._outcome)
            self._finish(Status.OK)
        elif self._outcome is not None:
            self._refuse(self._outcome)

    def _request(self, message: bytes) -> None:
        # Now, not at the end: a message that waited here would be charged to nobody.
        self._outcome = self._answer(message)


class _Watch(_OneRequest):
    """Open until the peer leaves or `Health.end_watches`."""

    __slots__ = ("_health", "_leave", "_post")

    def __init__(self, peer: Peer, health: Health, post: Post) -> None:
        super().__init__(peer)
        self._health = health
        self._post = post
        self._leave: Callable[[], None] | None = None

    def ended(self, ending: Ending) -> None:
        super().ended(ending)
        if self._leave is not None:
            self._leave()

    def _request(self, message: bytes) -> None:
        service = service_of(message)
        if isinstance(service, Refused):
            self._refuse(service)
        else:
            self._leave = self._health.watch(service, self._told)

    def _told(self, status: "HealthCheckResponse.ServingStatus | None") -> None:
        """On whatever thread. The peer belongs to another."""
        self._post(partial(self._show, status))

    def _show(self, status: "HealthCheckResponse.ServingStatus | None") -> None:
        if self._over:  # since it was posted
            return
        if status is None:
            self._refuse(WATCH_ENDED)
        else:
            self._peer.send(status_message(status))
        self._peer.flush()
