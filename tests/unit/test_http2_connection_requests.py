"""Requests: what becomes a call, what a call hears, and how others are turned away."""

import gzip
from collections.abc import Callable

import pytest

from epp.http2.codes import Status
from epp.http2.heads import HeadReader
from epp.http2.limits import KIB, Http2Limits
from epp.http2.ports import Ending
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Reply, Wire


def asked(peer: Wire, *bodies: bytes, path: str = wire.ECHO, **changed: str | None) -> Reply:
    """A whole request in one segment, and what came back."""
    stream_id = peer.next_id()
    head = peer.headers(stream_id, wire.request(path, **changed), end=not bodies)
    last = len(bodies) - 1
    peer.say(head, *(wire.data(stream_id, body, end=at == last) for at, body in enumerate(bodies)))
    return peer.replies[stream_id]


def test_a_call_from_first_to_last_byte() -> None:
    peer = Wire()
    stream_id = peer.open()
    assert stream_id not in peer.replies
    answers = peer.say(wire.data(stream_id, wire.message(b"one")))
    assert [one.kind for one in answers] == [wire.HEADERS, wire.DATA]
    answers = peer.say(wire.data(stream_id, wire.message(b"two"), end=True))
    assert [(one.kind, one.flags) for one in answers] == [
        (wire.DATA, 0),
        (wire.HEADERS, wire.END_HEADERS | wire.END_STREAM),
    ]
    reply = peer.replies[stream_id]
    assert reply.headers == [(":status", "200"), ("content-type", "application/grpc")]
    assert reply.messages == [b"one", b"two"]
    assert reply.trailers == [("grpc-status", "0")]
    (call,) = peer.calls
    assert (call.got, call.events, call.endings) == ([b"one", b"two"], ["half-closed"], [Ending.FINISHED])
    peer.nothing_left()


@pytest.mark.parametrize("end", ["data", "empty", "trailers"])
def test_a_half_close_in_each_form(end: str) -> None:
    peer = Wire()
    stream_id = peer.open()
    peer.say(wire.data(stream_id, wire.message(), end=end == "data"))
    if end == "empty":
        peer.say(wire.data(stream_id, b"", end=True))
    elif end == "trailers":
        peer.say(peer.headers(stream_id, [("x-sum", "1")], end=True))
    assert peer.calls[0].events == ["half-closed"]
    assert peer.replies[stream_id].status == 0
    assert peer.replies[stream_id].reset is None
    peer.nothing_left()


def test_an_answer_before_the_request_has_ended_cuts_it_off() -> None:
    """Trailers, then RST_STREAM(NO_ERROR): RFC 9113, 8.1. What is under way is dropped."""
    peer = Wire()
    stream_id = peer.open(wire.EAGER)
    answers = peer.say(wire.data(stream_id, wire.message(b"one") + wire.message(b"two") + b"\0\0"))
    assert [one.kind for one in answers] == [wire.HEADERS, wire.DATA, wire.HEADERS, wire.RST_STREAM]
    assert answers[-1].code == 0
    assert peer.say(wire.data(stream_id, wire.message(b"three"), end=True), wire.reset(stream_id, 2)) == []
    assert peer.calls[0].got == [b"one"]
    assert peer.told == []
    peer.nothing_left()


def test_messages_of_many_frames_and_frames_of_many_messages() -> None:
    peer = Wire()
    bodies = [b"", b"a", bytes(40_000), b"b" * 5, b""]
    stream = b"".join(map(wire.message, bodies))
    reply = asked(peer, *(stream[at : at + 9000] for at in range(0, len(stream), 9000)))
    assert peer.calls[0].got == bodies
    assert reply.messages == bodies


def test_a_call_that_speaks_when_it_likes() -> None:
    peer = Wire()
    flushed: list[None] = []
    peer.connection.out.flush = lambda: flushed.append(None)
    stream_id = peer.open(wire.MUTE)
    sender = peer.calls[0].peer
    sender.send(b"first")
    sender.flush()
    assert flushed == [None]
    peer.read()
    assert peer.replies[stream_id].messages == [b"first"]
    sender.send(b"second")
    sender.finish(Status.ABORTED, "enough")
    sender.finish(Status.OK)
    sender.send(b"third")
    peer.read()
    reply = peer.replies[stream_id]
    assert reply.messages == [b"first", b"second"]
    assert (reply.status, reply.details, reply.reset) == (10, "enough", 0)
    peer.nothing_left()


def test_a_status_alone() -> None:
    peer = Wire()
    stream_id = peer.open(wire.MUTE, end=True)
    peer.calls[0].peer.finish(Status.INVALID_ARGUMENT, "no: 100%")
    (answer,) = peer.read()
    assert answer.ends
    reply = peer.replies[stream_id]
    assert (reply.http_status, reply.status, reply.details) == (200, 3, "no: 100%25")
    assert reply.trailers is None


# -- gRPC ----------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[Wire], Reply], Status, str]] = {
    "unknown service": (
        lambda peer: asked(peer, b"", path="/nobody.Here/Echo"),
        Status.UNIMPLEMENTED,
        "unknown service nobody.Here",
    ),
    "unknown method": (
        lambda peer: asked(peer, b"", path=wire.SERVICE + "Sing"),
        Status.UNIMPLEMENTED,
        "unknown method Sing for service test.Echo",
    ),
    "no method": (lambda peer: asked(peer, b"", path="/"), Status.UNIMPLEMENTED, "unknown service /"),
    "unknown encoding": (
        lambda peer: asked(peer, b"", grpc_encoding="snappy"),
        Status.UNIMPLEMENTED,
        "no decompressor for 'snappy'",
    ),
    "timeout in words": (lambda peer: asked(peer, b"", grpc_timeout="soon"), Status.INTERNAL, "grpc-timeout"),
    "timeout without unit": (
        lambda peer: asked(peer, b"", grpc_timeout="10"),
        Status.INTERNAL,
        "grpc-timeout",
    ),
    "timeout of nine digits": (
        lambda peer: asked(peer, b"", grpc_timeout="123456789n"),
        Status.INTERNAL,
        "grpc-timeout",
    ),
    "compressed without an encoding": (
        lambda peer: asked(peer, wire.zipped(b"x")),
        Status.INTERNAL,
        "compressed flag set",
    ),
    "compressed flag of 2": (
        lambda peer: asked(peer, wire.message(b"x", 2)),
        Status.INTERNAL,
        "compressed flag 2",
    ),
    "no gzip": (
        lambda peer: asked(peer, wire.message(b"not gzip", 1), grpc_encoding="gzip"),
        Status.INTERNAL,
        "not valid gzip",
    ),
    "half a gzip": (
        lambda peer: asked(
            peer, wire.message(gzip.compress(b"x" * 100, mtime=0)[:20], 1), grpc_encoding="gzip"
        ),
        Status.INTERNAL,
        "not valid gzip",
    ),
    "half a message": (
        lambda peer: asked(peer, wire.message()[:7]),
        Status.INTERNAL,
        "the last message is cut off",
    ),
    "half a head": (lambda peer: asked(peer, b"\0\0"), Status.INTERNAL, "the last message is cut off"),
    "gzip beyond the limit": (
        lambda peer: asked(peer, wire.zipped(bytes(70 * KIB)), grpc_encoding="gzip"),
        Status.RESOURCE_EXHAUSTED,
        "too large",
    ),
    "message beyond the limit": (
        lambda peer: asked(peer, wire.message(bytes(70 * KIB))[:16_384]),
        Status.RESOURCE_EXHAUSTED,
        "too large",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_is_told_in_the_status(name: str) -> None:
    ask, status, text = FAULTS[name]
    peer = Wire(Http2Limits(message_bytes=64 * KIB))
    with peer.bystander():
        reply = ask(peer)
        assert (reply.http_status, reply.status, reply.ended) == (200, status, True)
        assert text in reply.details
        # Nothing is to be cut off where the fault is in what ends the request.
        assert reply.reset == (0 if status is Status.UNIMPLEMENTED or "timeout" in name else None)
        if name == "unknown encoding":
            assert dict(reply.headers or [])["grpc-accept-encoding"] == "identity,gzip"
        assert peer.told == []
    peer.nothing_left()


def test_a_fault_before_the_request_has_ended_cuts_it_off() -> None:
    peer = Wire()
    with peer.bystander():
        stream_id = peer.open("/nobody.Here/Echo")
        assert (peer.replies[stream_id].status, peer.replies[stream_id].reset) == (12, 0)
        assert peer.say(wire.data(stream_id, wire.message(), end=True)) == []
    peer.nothing_left()


def test_what_precedes_a_broken_message_is_served() -> None:
    peer = Wire()
    reply = asked(peer, wire.message(b"one") + wire.message(b"two", 7) + wire.message(b"three"))
    assert reply.messages == [b"one"]
    assert reply.status == Status.INTERNAL
    assert (peer.calls[0].got, peer.calls[0].endings) == ([b"one"], [Ending.BROKEN])


def test_gzip() -> None:
    peer = Wire()
    reply = asked(peer, wire.zipped(b"a" * 5000) + wire.message(b"plain"), grpc_encoding="gzip")
    assert reply.messages == [b"a" * 5000, b"plain"]
    reply = asked(peer, wire.message(b"plain"), grpc_encoding="identity")
    assert reply.messages == [b"plain"]


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_other_names_of_grpc(content_type: str) -> None:
    assert asked(Wire(), wire.message(), content_type=content_type).status == 0


# -- no gRPC -------------------------------------------------------------------------------------------

NO_GRPC: dict[str, tuple[Callable[[Wire], Reply], int, str]] = {
    "GET": (lambda peer: asked(peer, method="GET"), 405, "This request is a GET"),
    "PUT with a body": (lambda peer: asked(peer, b"abc", b"def", method="PUT"), 405, "This request is a PUT"),
    "no content-type": (lambda peer: asked(peer, b"abc", content_type=None), 415, "missing"),
    "json": (lambda peer: asked(peer, b"{}", content_type="application/json"), 415, "application/json"),
    "grpc-web": (lambda peer: asked(peer, b"", content_type="application/grpc-web"), 415, "grpc-web"),
    "too many headers": (
        lambda peer: asked(peer, wire.message(), x_filler="a" * 33_000),
        431,
        "at most 32768",
    ),
}


@pytest.mark.parametrize("name", NO_GRPC)
def test_no_call_of_grpc_is_answered_for_people_to_read(name: str) -> None:
    ask, http_status, text = NO_GRPC[name]
    peer = Wire(Http2Limits(header_block_bytes=100 * KIB))
    with peer.bystander():
        reply = ask(peer)
        assert (reply.http_status, reply.ended, reply.trailers, reply.reset) == (
            http_status,
            True,
            None,
            None,
        )
        headers = dict(reply.headers or [])
        assert headers["content-type"].startswith("text/plain")
        assert headers["content-length"] == str(len(reply.body))
        assert text in reply.body.decode()
        assert reply.body.endswith(b"\n")
        assert headers.get("allow") == ("POST" if http_status == 405 else None)
        assert peer.told == []
        assert len(peer.calls) == 1
    peer.nothing_left()


def check_head(peer: Wire, **more: str) -> None:
    """As GET is answered, without the text (RFC 9110, 9.3.2)."""
    asked_for = asked(peer, method="GET", **more)
    reply = asked(peer, method="HEAD", **more)
    length = {"content-length": str(len(asked_for.body) + 1)}  # its name is a letter longer
    assert dict(reply.headers or []) == dict(asked_for.headers or []) | length
    assert (reply.body, reply.ended, reply.reset) == (b"", True, None)
    peer.nothing_left()


def test_head_is_answered_without_a_body() -> None:
    check_head(Wire())


def test_head_is_answered_without_a_window() -> None:
    peer = Wire()
    stream_id = peer.open(method="HEAD")
    peer.say(wire.settings(window=0))
    peer.say(wire.data(stream_id, b"unread", end=True))
    assert peer.replies[stream_id].ended
    peer.nothing_left()


def test_a_body_that_nobody_wants_passes_unread() -> None:
    """The answer waits for its end; its bytes are given back, and charged to nobody."""
    peer = Wire()
    with peer.bystander():
        stream_id = peer.open(method="GET")
        for _ in range(200):
            peer.say(wire.data(stream_id, bytes(16_384)))
            assert peer.account.used < 1000
        given_back = sum(int.from_bytes(one.payload) for one in peer.log if one.stream_id == stream_id)
        assert given_back > 2 << 20
        peer.say(wire.data(stream_id, b"", end=True))
        assert peer.replies[stream_id].http_status == 405
    peer.nothing_left()


def test_a_body_that_nobody_wants_and_that_lies_about_its_length() -> None:
    peer = Wire()
    with peer.bystander():
        stream_id = peer.open(method="GET", content_length="3")
        peer.say(wire.data(stream_id, b"abcd", end=True))
        assert peer.replies[stream_id].reset == 1
        stream_id = peer.open(method="GET", content_length="3", end=True)
        assert peer.replies[stream_id].reset == 1
    peer.nothing_left()


def test_the_answer_to_no_call_of_grpc_waits_for_its_window() -> None:
    peer = Wire()
    peer.say(wire.settings(window=10))
    reply = asked(peer, method="GET")
    assert (len(reply.body), reply.ended) == (10, False)
    peer.say(wire.settings(window=1000))
    assert reply.ended
    assert reply.body.endswith(b"GET.\n")
    peer.nothing_left()


def test_a_right_content_length() -> None:
    peer = Wire()
    body = wire.message(b"a" * 100) + wire.message(b"b")
    reply = asked(peer, body[:50], body[50:], content_length=str(len(body)))
    assert (reply.status, reply.messages) == (0, [b"a" * 100, b"b"])
    assert asked(peer, content_length="0").status == 0


# -- faults planted into the connection ------------------------------------------------------------------


def check_trailers_that_come_late(peer: Wire) -> None:
    """Those of a stream that is over must still feed the header table."""
    with peer.bystander():
        stream_id = peer.open(wire.EAGER)
        peer.say(wire.data(stream_id, wire.message()))
        peer.say(peer.headers(stream_id, [("x-new", "value")], end=True))
        assert peer.open(wire.MUTE, ("x-new", "value")) == stream_id + 2
        assert len(peer.calls) == 3


def test_a_block_that_is_not_decoded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trailers_that_come_late(Wire())
    monkeypatch.setattr(HeadReader, "trailers", lambda reader, block: None)
    with pytest.raises((AssertionError, KeyError)):
        check_trailers_that_come_late(Wire())
