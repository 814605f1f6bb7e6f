"""`grpc.health.v1` as calls of the own transport: bytes in, bytes and a status out."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from epp.http2.codes import Status
from epp.http2.ports import Call, Ending
from epp.runtime.health import Health
from epp.runtime.health_calls import health_methods
from epp.wire.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse

CHECK, LIST, WATCH = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))
SERVING, NOT_SERVING, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
READINESS = b"\x0a\x09readiness"


@dataclass
class Served:
    """One `Health` behind its methods; calls are made with `call`."""

    health: Health = field(default_factory=Health)
    posted: deque[Callable[[], None]] = field(default_factory=deque)

    def call(self, path: str) -> tuple[Call, "Peer"]:
        peer = Peer()
        return health_methods(self.health, self.posted.append)[path](peer), peer

    def run_posted(self) -> None:
        while self.posted:
            self.posted.popleft()()


class Peer:
    """Writes down what it gets, and sees that nothing comes after the end."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ending: tuple[Status, str] | None = None
        self.flushed: tuple[int, tuple[Status, str] | None] = (0, None)

    def send(self, message: bytes) -> None:
        assert self.ending is None
        self.messages.append(message)

    def flush(self) -> None:
        self.flushed = len(self.messages), self.ending

    def finish(self, status: Status, details: str = "") -> None:
        assert self.ending is None
        self.ending = status, details


@pytest.fixture
def served() -> Served:
    return Served()


def asked(served: Served, path: str, message: bytes) -> "Peer":
    """What became of a call with this one request."""
    call, peer = served.call(path)
    call.received(message)
    call.half_closed()
    served.run_posted()
    return peer


def test_check_answers_when_the_peer_has_said_all(served: Served) -> None:
    call, peer = served.call(CHECK)
    call.received(READINESS)
    assert peer.ending is None
    call.half_closed()
    assert (peer.messages, peer.ending) == ([NOT_SERVING], (Status.OK, ""))
    served.health.pool_known(True)
    assert asked(served, CHECK, READINESS).messages == [SERVING]


def test_list_answers_with_every_known_name(served: Served) -> None:
    peer = asked(served, LIST, b"")
    (message,) = peer.messages
    statuses = {name: each.status for name, each in HealthListResponse.FromString(message).statuses.items()}
    assert statuses == served.health.statuses()
    assert peer.ending == (Status.OK, "")


@pytest.mark.parametrize("path", [CHECK, LIST, WATCH])
def test_bytes_that_are_no_request_are_an_internal_error(served: Served, path: str) -> None:
    peer = asked(served, path, b"\xff")
    assert peer.messages == []
    assert peer.ending is not None
    assert peer.ending[0] is Status.INTERNAL
    assert "not a Health" in peer.ending[1]
    assert served.health.watches == 0


@pytest.mark.parametrize("path", [CHECK, WATCH])
def test_a_name_that_is_not_utf_8_is_an_internal_error(served: Served, path: str) -> None:
    peer = asked(served, path, b"\x0a\x01\xff")
    assert peer.ending is not None
    assert peer.ending[0] is Status.INTERNAL


@pytest.mark.parametrize("path", [CHECK, LIST, WATCH])
def test_a_call_without_a_request_is_not_implemented(served: Served, path: str) -> None:
    call, peer = served.call(path)
    call.half_closed()
    assert peer.ending is not None
    assert peer.ending[0] is Status.UNIMPLEMENTED


@pytest.mark.parametrize("path", [CHECK, LIST, WATCH])
def test_a_second_request_is_not_implemented_and_nothing_is_answered_after_it(
    served: Served, path: str
) -> None:
    call, peer = served.call(path)
    call.received(b"")
    call.received(b"")
    served.run_posted()
    assert peer.messages == []
    assert peer.ending is not None
    assert peer.ending[0] is Status.UNIMPLEMENTED
    call.received(b"")
    call.half_closed()
    call.ended(Ending.FINISHED)
    assert served.health.watches == 0


@pytest.mark.parametrize("path", [CHECK, LIST, WATCH])
@pytest.mark.parametrize("event", ["too_large", "no_room"])
def test_a_request_beyond_the_limits_is_refused(served: Served, path: str, event: str) -> None:
    call, peer = served.call(path)
    getattr(call, event)()
    call.half_closed()
    assert peer.ending is not None
    assert peer.ending[0] is Status.RESOURCE_EXHAUSTED


def test_an_unknown_name_is_not_found_and_a_long_one_is_cut(served: Served) -> None:
    peer = asked(served, CHECK, HealthCheckRequest(service="nö\n").SerializeToString())
    assert peer.ending is not None
    assert peer.ending[0] is Status.NOT_FOUND
    assert peer.ending[1].startswith("unknown service 'nö\\n'; known: 'liveness', '', 'readiness'")
    peer = asked(served, CHECK, HealthCheckRequest(service="x" * 1_000_000).SerializeToString())
    assert peer.ending is not None
    assert peer.ending[0] is Status.NOT_FOUND
    assert "1000000 characters" in peer.ending[1]
    assert len(peer.ending[1]) < 500


def test_a_watch_tells_the_status_and_each_change_until_the_peer_leaves(served: Served) -> None:
    call, peer = served.call(WATCH)
    call.received(READINESS)
    call.half_closed()
    served.run_posted()
    assert peer.messages == [NOT_SERVING]
    served.health.pool_known(True)
    served.health.pool_known(True)
    assert peer.messages == [NOT_SERVING]  # the change is made on another thread
    served.run_posted()
    assert peer.messages == [NOT_SERVING, SERVING]
    assert peer.flushed == (2, None)
    assert served.health.watches == 1
    call.ended(Ending.RESET)
    assert served.health.watches == 0
    served.health.draining()
    assert not served.posted
    assert peer.ending is None


def test_two_changes_at_once_are_two_messages(served: Served) -> None:
    call, peer = served.call(WATCH)
    call.received(b"")
    served.health.pool_known(True)
    served.health.draining()
    served.run_posted()
    assert peer.messages == [NOT_SERVING, SERVING, NOT_SERVING]


def test_what_was_posted_before_the_end_is_dropped(served: Served) -> None:
    call, peer = served.call(WATCH)
    call.received(b"")
    call.ended(Ending.LOST)
    served.run_posted()
    assert peer.messages == []


def test_a_watch_of_an_unknown_name_stays_open(served: Served) -> None:
    call, peer = served.call(WATCH)
    call.received(HealthCheckRequest(service="nope").SerializeToString())
    served.health.pool_known(True)
    served.run_posted()
    assert (peer.messages, peer.ending) == ([UNKNOWN], None)
    assert served.health.watches == 1


def test_a_second_request_that_is_too_large_ends_the_watch(served: Served) -> None:
    call, peer = served.call(WATCH)
    call.received(READINESS)
    served.run_posted()
    served.health.pool_known(True)
    call.too_large()
    served.run_posted()
    assert peer.messages == [NOT_SERVING]
    assert peer.ending is not None
    assert peer.ending[0] is Status.RESOURCE_EXHAUSTED
    call.ended(Ending.FINISHED)
    assert served.health.watches == 0


def test_when_watches_end_the_last_status_comes_first(served: Served) -> None:
    served.health.pool_known(True)
    call, peer = served.call(WATCH)
    call.received(READINESS)
    served.health.end_watches()
    late, late_peer = served.call(WATCH)
    late.received(READINESS)
    served.run_posted()
    assert peer.messages == [SERVING, NOT_SERVING]
    assert late_peer.messages == [NOT_SERVING]
    for each in (peer, late_peer):
        assert each.ending is not None
        assert each.ending[0] is Status.UNAVAILABLE
        assert each.flushed == (len(each.messages), each.ending)
    assert served.health.watches == 0
    for each in (call, late):
        each.ended(Ending.FINISHED)


def test_the_bytes_are_those_of_the_messages() -> None:
    for status, message in ((1, SERVING), (2, NOT_SERVING), (3, UNKNOWN)):
        assert HealthCheckResponse.FromString(message).status == status
    assert HealthCheckRequest.FromString(READINESS).service == "readiness"
