"""Time: handshakes, half blocks, half messages, unread replies, deadlines, keep-alive, draining."""

import struct

import pytest

from epp.http2 import patience
from epp.http2.codes import Status
from epp.http2.control import Control
from epp.http2.limits import Http2Limits
from epp.http2.patience import Patience
from epp.http2.ports import Ending
from epp.http2.rates import Quota
from epp.http2.streams import Stream
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Frame, Wire

NO_ERROR, PROTOCOL, SETTINGS_TIMEOUT, REFUSED, CALM = 0, 1, 4, 7, 11
UNBOUNDED = (1 << 31) - 1
QUIET = Http2Limits(keepalive_s=0.0)

# -- the handshake -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"", PROTOCOL),
        (wire.PREFACE[:10], PROTOCOL),
        (wire.PREFACE, PROTOCOL),
        (wire.PREFACE + wire.settings()[:5], PROTOCOL),
        (wire.PREFACE + wire.settings(), SETTINGS_TIMEOUT),
    ],
    ids=["nothing", "half a preface", "a preface", "half a frame", "no acknowledgement"],
)
def test_a_handshake_that_does_not_end(said: bytes, code: int) -> None:
    peer = Wire(greet=False)
    for at in range(len(said)):
        peer.say(said[at : at + 1])
    peer.pass_time(9.5)
    assert not peer.connection.over
    peer.pass_time(1.5)
    peer.failed_with(code)


def test_a_handshake_in_time() -> None:
    peer = Wire(greet=False)
    peer.pass_time(9.0)
    for octet in wire.PREFACE + wire.settings() + wire.frame(wire.SETTINGS, wire.ACK, 0):
        peer.say(bytes((octet,)))
    peer.pass_time(30.0)
    peer.works()


# -- slow writers --------------------------------------------------------------------------------------


def test_half_a_header_block() -> None:
    peer = Wire()
    other = peer.open(wire.MUTE)
    stream_id = peer.next_id()
    peer.say(wire.frame(wire.HEADERS, 0, stream_id, b"\x83"))
    for _ in range(9):
        peer.pass_time(1.0)
        peer.say(wire.frame(wire.CONTINUATION, 0, stream_id, b""))
    assert not peer.connection.over
    peer.pass_time(2.0)
    peer.failed_with(CALM)
    assert peer.calls[0].endings == [Ending.BROKEN]
    assert other == 1


def check_half_a_message(said: bytes) -> None:
    peer = Wire(QUIET)
    with peer.bystander():
        stream_id = peer.open(wire.MUTE)
        call = peer.calls[-1]
        peer.say(wire.data(stream_id, said))
    peer.pass_time(115.0)
    assert call.endings == []
    peer.pass_time(20.0)
    assert call.endings == [Ending.STALLED]
    assert (peer.replies[stream_id].status, peer.replies[stream_id].reset) == (4, 0)
    assert "no progress for 120 s" in peer.replies[stream_id].details
    peer.works()
    peer.nothing_left()


@pytest.mark.parametrize("said", [wire.message()[:3], wire.message()[:7], wire.message() + b"\0"])
def test_half_a_message(said: bytes) -> None:
    check_half_a_message(said)


def test_a_slow_message_that_moves() -> None:
    peer = Wire(QUIET)
    stream_id = peer.open(wire.MUTE)
    for octet in wire.message(b"slow"):
        peer.pass_time(100.0, step_s=2.0)
        peer.say(wire.data(stream_id, bytes((octet,))))
    assert (peer.calls[0].got, peer.calls[0].endings) == ([b"slow"], [])


def test_a_call_may_rest_between_messages() -> None:
    peer = Wire()
    stream_id = peer.open()
    peer.say(wire.data(stream_id, wire.message()))
    peer.pass_time(1000.0)
    assert peer.calls[0].endings == []
    peer.say(wire.data(stream_id, wire.message(), end=True))
    assert peer.replies[stream_id].messages == [b"hello"] * 2


def test_a_request_that_is_no_call_and_has_no_end() -> None:
    peer = Wire(QUIET)
    stream_id = peer.open(method="GET")
    peer.say(wire.data(stream_id, b"x"))
    peer.pass_time(135.0)
    assert peer.replies[stream_id].reset == 8
    peer.works()
    peer.nothing_left()


# -- slow readers --------------------------------------------------------------------------------------


def check_windows_that_never_open(window: int) -> None:
    peer = Wire(QUIET)
    peer.say(wire.settings(window=window))
    stream_id = peer.open()
    call = peer.calls[0]
    peer.say(wire.data(stream_id, wire.message(bytes(1000)), end=True))
    assert peer.account.used == 1005 - window
    peer.pass_time(115.0)
    assert call.endings == []
    peer.pass_time(20.0)
    assert call.endings == [Ending.STALLED]
    reply = peer.replies[stream_id]
    assert (reply.status, len(reply.body), reply.reset) == (4, window, None)
    peer.say(wire.settings(window=65_535))
    peer.works()
    peer.nothing_left()


@pytest.mark.parametrize("window", [0, 1, 1000])
def test_windows_that_never_open(window: int) -> None:
    check_windows_that_never_open(window)


def test_the_window_of_the_connection_never_opens() -> None:
    peer = Wire(QUIET)
    peer.say(wire.settings(window=1 << 20))
    held = [peer.open() for _ in range(3)]
    for stream_id in held:
        whole = wire.message(bytes(50_000))
        peer.say(*(wire.data(stream_id, whole[at : at + 16_384]) for at in range(0, 50_005, 16_384)))
    peer.pass_time(135.0)
    assert {call.endings[0] for call in peer.calls if call.endings} == {Ending.STALLED}
    assert sum(bool(call.endings) for call in peer.calls) == 3 - (65_535 // 50_005)
    for stream_id in held:
        peer.say(wire.reset(stream_id))
    peer.say(wire.window_update(0, 1 << 20))
    peer.works()
    peer.nothing_left()


def test_a_slow_reader_that_moves() -> None:
    peer = Wire(QUIET)
    peer.say(wire.settings(window=0))
    stream_id = peer.open()
    peer.say(wire.data(stream_id, wire.message(b"slow"), end=True))
    for _ in range(9):
        peer.pass_time(100.0, step_s=2.0)
        peer.say(wire.window_update(stream_id, 1))
    assert peer.replies[stream_id].messages == [b"slow"]
    peer.nothing_left()


def check_unread_replies_beyond_what_may_be_held() -> None:
    """Whoever reads nothing at all is given up early, so that others are served again."""
    account = Quota(100_000)
    peer, other = Wire(QUIET, account=account), Wire(QUIET, account=account)
    peer.say(wire.settings(window=0))
    slow = peer.open()
    stuck = [peer.open() for _ in range(8)]
    for stream_id in (slow, *stuck):
        peer.say(wire.data(stream_id, wire.message(bytes(15_000))))
    assert account.used > 100_000
    refused = other.open()
    other.say(wire.data(refused, wire.message(bytes(15_000))[:100]))
    assert other.calls[0].events == ["no room"]
    for _ in range(20):
        peer.pass_time(1.0)
        peer.say(wire.window_update(slow, 1))
    assert [call.endings for call in peer.calls] == [[], *[[Ending.STALLED]] * 8]
    other.works()
    peer.say(wire.window_update(slow, 20_000))
    assert peer.replies[slow].messages == [bytes(15_000)]


def test_unread_replies_beyond_what_may_be_held() -> None:
    check_unread_replies_beyond_what_may_be_held()


def test_unread_replies_that_are_as_patient_when_full_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PRESSED_STALL_S", 120.0)
    with pytest.raises(AssertionError):
        check_unread_replies_beyond_what_may_be_held()


class Tenfold(wire.Lived):
    """Sends ten times what it is sent: more than one frame."""

    def received(self, body: bytes) -> None:
        super().received(body)
        self.peer.send(body * 10)


def check_no_unread_reply_beyond_a_quarter_more() -> None:
    """Whoever leaves replies unread adds none when too much is held, at whatever speed. Others read on."""
    account = Quota(100_000)
    also = {"/tenfold": Tenfold}
    peer, reader = Wire(QUIET, account=account), Wire(QUIET, account=account, also=also)
    reader.say(wire.settings(window=1 << 20), wire.window_update(0, 1 << 20))
    read = reader.open("/tenfold")
    peer.say(wire.settings(window=0))
    for _ in range(30):
        stream_id = peer.open()
        for _ in range(2):
            peer.say(wire.data(stream_id, wire.message(bytes(8_000))))
            assert account.used <= 125_000
        reader.say(wire.data(read, wire.message(bytes(2_000))))
    assert reader.replies[read].messages == [bytes(20_000)] * 30
    assert [call.endings for call in peer.calls] == [[]] * 7 + [[Ending.STALLED]] * 23
    peer.pass_time(25.0)
    assert account.used == 0


def test_no_unread_reply_beyond_a_quarter_more() -> None:
    check_no_unread_reply_beyond_a_quarter_more()


def never_too_much(quota: Quota, n: int) -> bool:
    quota.used += n
    return True


def always_too_much(quota: Quota, n: int) -> bool:
    quota.used += n
    return False


def forgotten(stream: Stream, status: Status, details: str, ending: Ending) -> None:
    """Refuses the message alone."""


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Quota, "charge", never_too_much),
        (Quota, "charge", always_too_much),
        (Stream, "give_up", forgotten),
    ],
)
def test_unread_replies_without_a_bound_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: object
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        check_no_unread_reply_beyond_a_quarter_more()


def test_to_go_on_sending_is_no_sign_of_reading() -> None:
    peer = Wire(QUIET)
    peer.say(wire.settings(window=0))
    stream_id = peer.open()
    peer.say(wire.data(stream_id, wire.message(b"unread")))
    for octet in wire.message(bytes(60)):
        peer.say(wire.data(stream_id, bytes((octet,))))
        peer.pass_time(2.0)
    assert peer.calls[0].endings == [Ending.STALLED]
    peer.works()


def test_a_socket_that_takes_nothing() -> None:
    """The peer does not read at all: neither replies nor PINGs reach it."""
    peer = Wire()
    stream_id = peer.open()
    peer.connection.pause()
    peer.say(wire.data(stream_id, wire.message()))
    peer.pass_time(115.0)
    assert not peer.connection.over
    assert peer.account.used == 10
    peer.pass_time(20.0)
    assert peer.connection.over
    assert peer.connection.fault is not None
    assert peer.connection.fault.code == CALM
    assert len(peer.calls[0].endings) == 1
    peer.nothing_left()


def test_a_socket_that_takes_little() -> None:
    peer = Wire()
    stream_id = peer.open()
    peer.say(wire.data(stream_id, wire.message()))
    for _ in range(10):
        peer.connection.pause()
        peer.pass_time(60.0)
        peer.connection.resume()
        peer.pass_time(1.0)
    peer.say(wire.data(stream_id, wire.message(), end=True))
    assert peer.replies[stream_id].messages == [b"hello"] * 2


# -- deadlines -----------------------------------------------------------------------------------------


def check_deadline(timeout: str, seconds: float) -> None:
    peer = Wire()
    with peer.bystander():
        stream_id = peer.open(wire.MUTE, grpc_timeout=timeout)
        call = peer.calls[-1]
        peer.pass_time(seconds - 0.6)
        assert call.endings == []
        peer.pass_time(1.2)
        assert call.endings == [Ending.DEADLINE]
        assert (peer.replies[stream_id].status, peer.replies[stream_id].reset) == (4, 0)
    peer.nothing_left()


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        ("2S", 2.0),
        ("1500m", 1.5),
        ("2000000u", 2.0),
        ("99999999n", 0.1),
        ("1M", 60.0),
        ("0S", 0.0),
    ],
)
def test_deadline(timeout: str, seconds: float) -> None:
    check_deadline(timeout, seconds)


def test_deadlines_of_calls_that_are_over_matter_to_nobody() -> None:
    peer = Wire()
    for _ in range(5000):
        stream_id = peer.open(grpc_timeout="1S")
        peer.say(wire.data(stream_id, b"", end=True))
    later = peer.open(wire.MUTE, grpc_timeout="3S")
    assert len(peer.connection._patience._deadlines) < 3000
    peer.pass_time(2.0)
    assert peer.calls[-1].endings == []
    peer.pass_time(2.0)
    assert peer.calls[-1].endings == [Ending.DEADLINE]
    assert peer.replies[later].status == 4
    peer.nothing_left()


def test_a_deadline_ends_a_reply_that_waits() -> None:
    peer = Wire()
    peer.say(wire.settings(window=3))
    stream_id = peer.open(wire.MUTE, grpc_timeout="2S")
    peer.calls[0].peer.send(b"never read")
    peer.calls[0].peer.finish(Status.OK)
    peer.pass_time(3.0)
    assert (peer.replies[stream_id].status, len(peer.replies[stream_id].body)) == (4, 3)
    peer.nothing_left()


# -- keep-alive ----------------------------------------------------------------------------------------


def pings(frames: list[Frame]) -> list[bytes]:
    return [one.payload for one in frames if one.kind == wire.PING and not one.flags]


def check_keepalive() -> None:
    peer = Wire()
    stream_id = peer.open(wire.MUTE)
    assert pings(peer.pass_time(59.0)) == []
    assert len(pings(peer.pass_time(2.0, alive=False))) == 1
    assert pings(peer.pass_time(19.0, alive=False)) == []
    assert not peer.connection.over
    peer.pass_time(2.0, alive=False)
    peer.failed_with(NO_ERROR)
    assert peer.calls[0].endings == [Ending.LOST]
    assert stream_id not in peer.replies


def test_keepalive() -> None:
    check_keepalive()


def test_whoever_answers_lives() -> None:
    peer = Wire()
    assert len(pings(peer.pass_time(600.0))) == 10
    peer.works()


def test_any_sign_of_life_will_do() -> None:
    peer = Wire()
    assert len(pings(peer.pass_time(70.0, alive=False))) == 1
    peer.say(wire.window_update(0, 1))
    assert pings(peer.pass_time(59.0, alive=False)) == []
    peer.works()


def test_no_keepalive() -> None:
    peer = Wire(QUIET)
    assert pings(peer.pass_time(5000.0, step_s=5.0, alive=False)) == []
    peer.works()


# -- draining ------------------------------------------------------------------------------------------


def last_ids(peer: Wire) -> list[int]:
    for one in peer.goaways:
        assert one.code == NO_ERROR
    return [struct.unpack(">I", one.payload[:4])[0] for one in peer.goaways]


def check_drain(*, answers: bool) -> None:
    """GOAWAY twice (RFC 9113, 6.8): streams that were under way are served, later ones refused."""
    peer = Wire()
    before = peer.open()
    peer.connection.drain()
    peer.connection.drain()
    (ping,) = pings(peer.read())
    assert last_ids(peer) == [UNBOUNDED]
    assert not peer.connection.drained
    meanwhile = peer.open()
    assert last_ids(peer) == [UNBOUNDED]
    if answers:
        peer.say(wire.frame(wire.PING, wire.ACK, 0, ping))
    else:
        peer.pass_time(1.5, alive=False)
        assert last_ids(peer) == [UNBOUNDED], "it may not have read of it"
        peer.pass_time(1.5, alive=False)
    assert last_ids(peer) == [UNBOUNDED, meanwhile]
    after = peer.open()
    assert peer.replies[after].reset == REFUSED
    for stream_id in (before, meanwhile):
        assert not peer.connection.drained
        peer.say(wire.data(stream_id, wire.message(), end=True))
        assert (peer.replies[stream_id].status, peer.replies[stream_id].messages) == (0, [b"hello"])
    assert peer.connection.drained
    assert not peer.connection.over
    assert last_ids(peer) == [UNBOUNDED, meanwhile]
    peer.nothing_left()


@pytest.mark.parametrize("answers", [True, False])
def test_drain(answers: bool) -> None:
    check_drain(answers=answers)


def test_a_fault_while_draining_names_the_last_stream_that_was_taken() -> None:
    peer = Wire()
    taken = peer.open(wire.MUTE)
    peer.connection.drain()
    peer.pass_time(3.0, alive=False)
    peer.open(wire.MUTE)
    peer.say(wire.window_update(0, 0))
    assert [struct.unpack(">I", one.payload[:4])[0] for one in peer.goaways] == [UNBOUNDED, taken, taken]


def test_goaway_of_the_peer() -> None:
    """It opens no more streams; those that are open go on, and so does its keep-alive."""
    peer = Wire()
    with peer.bystander():
        peer.say(wire.frame(wire.GOAWAY, 0, 0, bytes(8) + b"bye"))
    assert peer.goaways == []


def test_a_lost_connection() -> None:
    peer = Wire()
    peer.say(wire.settings(window=0))
    for path in (wire.ECHO, wire.MUTE, wire.EAGER):
        stream_id = peer.open(path)
        peer.say(wire.data(stream_id, wire.message() + b"\0\0\0\0\5a"))
    peer.connection.lose()
    peer.connection.lose()
    assert [call.endings for call in peer.calls] == [[Ending.LOST]] * 3
    assert peer.read() == []
    peer.connection.drain()
    assert peer.read() == []
    peer.nothing_left()


# -- planted faults --------------------------------------------------------------------------------------


def test_a_sweep_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "_sweep", lambda patience, now: None)
    with pytest.raises(AssertionError):
        check_half_a_message(b"\0")
    with pytest.raises(AssertionError):
        check_windows_that_never_open(0)


def test_deadlines_that_are_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "_expire", lambda patience, now: None)
    with pytest.raises(AssertionError):
        check_deadline("2S", 2.0)


def test_silence_that_is_put_up_with_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "_keep_alive", lambda patience, now, heard_at: None)
    with pytest.raises(AssertionError):
        check_keepalive()


def test_a_door_that_stays_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "_close_door", lambda control: None)
    with pytest.raises(AssertionError):
        check_drain(answers=True)


def test_a_door_that_is_closed_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "tick", lambda control, now: control._close_door())
    with pytest.raises(AssertionError):
        check_drain(answers=False)


def test_a_stream_that_is_given_up_silently_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Stream, "give_up", lambda stream, status, details, ending: stream.leave(stream.state.CUT, ending)
    )
    with pytest.raises((AssertionError, KeyError)):
        check_half_a_message(b"\0")
