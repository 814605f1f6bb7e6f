"""Flow control both ways, turns, and what waits for a peer or a socket that takes nothing."""

import struct

import pytest

from epp.http2.codes import Status
from epp.http2.limits import KIB, MIB, Http2Limits
from epp.http2.outgoing import Outgoing
from epp.http2.ports import Ending
from epp.http2.streams import Stream
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Wire


def updates(peer: Wire, stream_id: int) -> list[int]:
    return [
        int.from_bytes(one.payload)
        for one in peer.log
        if one.kind == wire.WINDOW_UPDATE and one.stream_id == stream_id
    ]


def check_turns() -> None:
    """Whatever the messages, streams that wait send a frame each in turn."""
    peer = Wire()
    peer.say(wire.settings(window=1 << 20))
    held = [peer.open(wire.MUTE) for _ in range(4)]
    peer.calls[0].peer.send(bytes(500_000))
    for call in peer.calls[1:]:
        call.peer.send(bytes(40_000))
    peer.read()
    assert sum(len(reply.body) for reply in peer.replies.values()) == 65_535
    received = [len(peer.replies[stream_id].body) for stream_id in held]
    assert max(received) - min(received) <= 16_384
    peer.say(wire.window_update(0, 120_000))
    assert [len(peer.replies[stream_id].body) for stream_id in held[1:]] == [40_005] * 3
    peer.say(wire.window_update(0, 1 << 20))
    assert peer.replies[held[0]].messages == [bytes(500_000)]


def check_shrunk_window() -> None:
    """SETTINGS may take back what a stream was granted (RFC 9113, 6.9.2)."""
    peer = Wire()
    peer.say(wire.settings(window=100_000))
    stream_id = peer.open(wire.MUTE)
    other = peer.open(wire.MUTE)
    peer.calls[0].peer.send(bytes(80_000))
    peer.read()
    assert len(peer.replies[stream_id].body) == 65_535  # the connection's window
    peer.say(wire.settings(window=10_000))
    peer.say(wire.window_update(0, 1 << 20))
    assert len(peer.replies[stream_id].body) == 65_535
    peer.calls[1].peer.send(bytes(20_000))
    peer.read()
    assert len(peer.replies[other].body) == 10_000
    peer.say(wire.window_update(stream_id, 55_535))  # not a byte yet: it had 55,535 too many
    assert len(peer.replies[stream_id].body) == 65_535
    peer.say(wire.window_update(stream_id, 5))
    assert len(peer.replies[stream_id].body) == 65_540
    peer.say(wire.settings(window=1 << 20))
    assert peer.replies[stream_id].messages == [bytes(80_000)]
    assert peer.replies[other].messages == [bytes(20_000)]


def check_window_given_back() -> None:
    """A stream gives back what it read when half of it is used up, but not while its replies wait."""
    peer = Wire(Http2Limits(stream_window_bytes=65_535))
    peer.say(wire.settings(window=20_000), wire.window_update(0, MIB))
    stream_id = peer.open()
    whole = wire.message(bytes(15_000))
    peer.say(wire.data(stream_id, whole))
    assert updates(peer, stream_id) == []
    for _ in range(3):
        peer.say(wire.data(stream_id, whole))
    assert updates(peer, stream_id) == []  # half is used up; three replies wait
    assert peer.account.used == 4 * 15_005 - 20_000
    peer.say(wire.window_update(stream_id, 4 * 15_005 - 20_000))
    assert updates(peer, stream_id) == [4 * 15_005]
    assert peer.replies[stream_id].messages == [bytes(15_000)] * 4
    for _ in range(2):
        peer.say(wire.window_update(stream_id, 30_000), wire.data(stream_id, whole))
    assert updates(peer, stream_id) == [4 * 15_005]
    peer.say(wire.window_update(stream_id, 30_000), wire.data(stream_id, whole))
    assert updates(peer, stream_id) == [4 * 15_005, 3 * 15_005]


def check_trailers_come_last() -> None:
    peer = Wire()
    peer.say(wire.settings(window=100))
    stream_id = peer.open()
    peer.say(wire.data(stream_id, wire.message(bytes(500)), end=True))
    reply = peer.replies[stream_id]
    assert (len(reply.body), reply.ended, reply.trailers) == (100, False, None)
    assert peer.calls[0].endings == []
    peer.say(wire.window_update(stream_id, 404))
    assert (len(reply.body), reply.trailers) == (504, None)
    peer.say(wire.window_update(stream_id, 1))
    assert (reply.messages, reply.trailers) == ([bytes(500)], [("grpc-status", "0")])
    assert peer.calls[0].endings == [Ending.FINISHED]
    peer.nothing_left()


def check_room_of_the_socket() -> None:
    peer = Wire(Http2Limits(output_bytes=64 * KIB))
    peer.say(wire.settings(window=MIB), wire.window_update(0, 8 * MIB))
    for _ in range(4):
        peer.open(wire.MUTE)
        peer.calls[-1].peer.send(bytes(300_000))
        peer.calls[-1].peer.send(b"small")
    peer.read()
    assert all(reply.messages == [bytes(300_000), b"small"] for reply in peer.replies.values())
    assert 60 * KIB < peer.largest_write_bytes <= 64 * KIB


def check_paused_socket() -> None:
    """What it does not take waits in its stream, charged; frames of control go on."""
    peer = Wire()
    peer.say(wire.settings(window=MIB))
    stream_id = peer.open()
    peer.connection.pause()
    answers = peer.say(wire.data(stream_id, wire.message(bytes(1000))), wire.frame(wire.PING, 0, 0, bytes(8)))
    assert wire.DATA not in [one.kind for one in answers]
    assert wire.PING in [one.kind for one in answers]
    peer.say(wire.window_update(stream_id, 1000), wire.window_update(0, 1000))
    assert peer.replies[stream_id].body == b""
    assert peer.account.used == 1005
    peer.connection.resume()
    peer.read()
    assert peer.replies[stream_id].messages == [bytes(1000)]
    assert peer.account.used == 0


CHECKS = (
    check_turns,
    check_shrunk_window,
    check_window_given_back,
    check_trailers_come_last,
    check_room_of_the_socket,
    check_paused_socket,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_windows(check: object) -> None:
    assert callable(check)
    check()


@pytest.mark.parametrize("most", [16_384, 20_000, (1 << 24) - 1])
def test_frames_are_as_long_as_the_peer_takes_them(most: int) -> None:
    peer = Wire()
    peer.say(wire.settings(window=MIB, frame=most), wire.window_update(0, MIB))
    stream_id = peer.open(wire.MUTE)
    for size in (100_000, 18_000):
        peer.calls[0].peer.send(bytes(size))
    longest = max(len(one.payload) for one in peer.read() if one.kind == wire.DATA)
    assert longest == min(most, 100_005)
    peer.say(wire.settings(frame=16_384))
    peer.calls[0].peer.send(bytes(100_000))
    assert max(len(one.payload) for one in peer.read() if one.kind == wire.DATA) == 16_384
    assert peer.replies[stream_id].messages == [bytes(100_000), bytes(18_000), bytes(100_000)]


def test_smaller_header_table_is_acknowledged_in_the_first_block() -> None:
    """RFC 9113, 4.3.1: the peer's decoder insists on it."""
    peer = Wire()
    peer.say(wire.settings(table=0))
    peer._decoder.max_allowed_table_size = 0
    for _ in range(3):
        stream_id = peer.open()
        peer.say(wire.data(stream_id, wire.message(), end=True))
        assert peer.replies[stream_id].status == 0
        assert peer._decoder.header_table_size == 0


def test_data_for_streams_that_are_over_counts_for_the_connection() -> None:
    """RFC 9113, 5.1: it is dropped, and what it took of the connection's window comes back."""
    peer = Wire(Http2Limits(connection_window_bytes=100_000))
    over = peer.open(wire.EAGER)
    peer.say(wire.data(over, wire.message()))
    for _ in range(20):
        peer.say(wire.data(over, bytes(16_384)))
    assert sum(updates(peer, 0)) >= 20 * 16_384 + 34_465 - 50_000
    assert peer.told == []


def test_padding_counts_and_comes_back() -> None:
    peer = Wire(Http2Limits(stream_window_bytes=65_535))
    stream_id = peer.open(wire.MUTE)
    for _ in range(4000):
        peer.say(wire.frame(wire.DATA, wire.PADDED, stream_id, b"\xc8" + wire.message(b"x") + bytes(200)))
    assert len(peer.calls[0].got) == 4000
    assert sum(updates(peer, stream_id)) > 4000 * 207 - 65_535


def test_a_late_answer_to_a_reset_stream_is_not_kept() -> None:
    peer = Wire()
    stream_id = peer.open(wire.MUTE)
    peer.say(wire.reset(stream_id))
    sender = peer.calls[0].peer
    sender.send(bytes(100_000))
    sender.finish(Status.OK)
    assert peer.read() == []
    peer.nothing_left()


# -- planted faults --------------------------------------------------------------------------------------


def _starves(patch: pytest.MonkeyPatch) -> None:
    """The stream whose turn it is keeps it."""

    def wrong(out: Outgoing) -> None:
        ready = out.waiting
        while ready and out.credit > 0 and out.room > 0:
            stream = next(iter(ready))
            if not stream.send_waiting(min(out.credit, out.room, out.max_frame_bytes)):
                ready.pop(stream, None)

    patch.setattr(Outgoing, "_take_turns", wrong)


def _shrunk_window_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outgoing, "drop", lambda out, stream: None)


def _window_is_given_back_while_replies_wait(patch: pytest.MonkeyPatch) -> None:
    right = Stream.give_back

    def wrong(stream: Stream) -> None:
        waiting, stream._waiting = stream._waiting, type(stream._waiting)()
        right(stream)
        stream._waiting = waiting

    patch.setattr(Stream, "give_back", wrong)


def _trailers_overtake(patch: pytest.MonkeyPatch) -> None:
    right = Stream.finish

    def wrong(stream: Stream, status: Status, details: str = "") -> None:
        waiting, stream._waiting = stream._waiting, type(stream._waiting)()
        right(stream, status, details)
        stream._waiting = waiting

    patch.setattr(Stream, "finish", wrong)


def _room_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    right = Outgoing._take_turns

    def wrong(out: Outgoing) -> None:
        out.room = 1 << 30
        right(out)

    patch.setattr(Outgoing, "_take_turns", wrong)


def _pause_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outgoing, "pause", lambda out, now: None)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (_starves, check_turns),
        (_shrunk_window_is_used, check_shrunk_window),
        (wire.keep_the_window_of_a_stalled_stream, check_window_given_back),
        (_window_is_given_back_while_replies_wait, check_window_given_back),
        (_trailers_overtake, check_trailers_come_last),
        (_room_is_not_kept, check_room_of_the_socket),
        (_pause_is_forgotten, check_paused_socket),
    ],
    ids=lambda part: part.__name__.strip("_"),
)
def test_a_fault_is_found(fault: object, check: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(fault)
    assert callable(check)
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, struct.error)):
        check()
