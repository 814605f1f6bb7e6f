"""Frames and resets by the thousand: what a proxy may do, and what ends its connection."""

import struct
from collections.abc import Callable

import pytest

from epp.http2.codes import Status
from epp.http2.connection import Connection
from epp.http2.control import Control
from epp.http2.floods import Flood, Floods
from epp.http2.limits import Http2Limits, Rate
from epp.http2.ports import Ending
from epp.http2.rates import Bucket
from epp.http2.streams import Stream
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Wire

CALM, REFUSED, PROTOCOL = 11, 7, 1
ENVOY_RESETS_WITH = 2
LIMITS = Http2Limits()


def settled(limits: Http2Limits = LIMITS, path: str = wire.MUTE) -> tuple[Wire, bytes]:
    """A connection, and a block of request headers that may be sent again and again."""
    peer = Wire(limits)
    for _ in range(2):
        block = peer.block(wire.request(path))
        peer.say(wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, peer.next_id(), block))
    for call in peer.calls:
        call.peer.finish(Status.OK)
    peer.read()
    return peer, block


def opening(stream_id: int, block: bytes, *, end: bool = False) -> bytes:
    return wire.frame(wire.HEADERS, wire.END_HEADERS | (wire.END_STREAM if end else 0), stream_id, block)


# -- frames --------------------------------------------------------------------------------------------

Frame = Callable[[int, int, int], bytes]
"""Of an open stream, one that was cut, and one that the client has reset."""

FRAMES: dict[str, tuple[Frame, Rate]] = {
    "empty DATA": (lambda open_, cut, reset: wire.data(open_, b""), LIMITS.empty_frames),
    "DATA of padding": (
        lambda open_, cut, reset: wire.frame(wire.DATA, wire.PADDED, open_, b"\2\0\0"),
        LIMITS.empty_frames,
    ),
    "empty DATA on a closed stream": (lambda open_, cut, reset: wire.data(cut, b""), LIMITS.empty_frames),
    "RST_STREAM on a closed stream": (lambda open_, cut, reset: wire.reset(reset), LIMITS.empty_frames),
    "unknown frames": (lambda open_, cut, reset: wire.frame(0xFA, 0, 0, b"x"), LIMITS.empty_frames),
    "GOAWAY": (lambda open_, cut, reset: wire.frame(wire.GOAWAY, 0, 0, bytes(8)), LIMITS.empty_frames),
    "acknowledged SETTINGS": (
        lambda open_, cut, reset: wire.frame(wire.SETTINGS, wire.ACK, 0),
        LIMITS.empty_frames,
    ),
    "acknowledged PINGs": (
        lambda open_, cut, reset: wire.frame(wire.PING, wire.ACK, 0, bytes(8)),
        LIMITS.empty_frames,
    ),
    "PING": (lambda open_, cut, reset: wire.frame(wire.PING, 0, 0, bytes(8)), LIMITS.pings),
    "SETTINGS": (lambda open_, cut, reset: wire.settings(window=65_535), LIMITS.settings),
    "PRIORITY": (
        lambda open_, cut, reset: wire.frame(wire.PRIORITY, 0, open_, struct.pack(">IB", 0, 1)),
        LIMITS.priorities,
    ),
    "PRIORITY of idle streams": (
        lambda open_, cut, reset: wire.frame(wire.PRIORITY, 0, 99_999, struct.pack(">IB", 0, 1)),
        LIMITS.priorities,
    ),
    "WINDOW_UPDATE": (lambda open_, cut, reset: wire.window_update(0, 1), LIMITS.window_updates),
    "WINDOW_UPDATE of a stream": (
        lambda open_, cut, reset: wire.window_update(open_, 1),
        LIMITS.window_updates,
    ),
    "WINDOW_UPDATE of a closed stream": (
        lambda open_, cut, reset: wire.window_update(cut, 1),
        LIMITS.window_updates,
    ),
}


def prepared(name: str) -> tuple[Wire, bytes]:
    peer = Wire()
    open_, cut, reset = peer.open(wire.MUTE), peer.open(wire.EAGER), peer.open(wire.MUTE)
    peer.say(wire.data(cut, wire.message()), wire.reset(reset))
    peer.pass_time(200.0)  # what it took to come here is made up for
    return peer, FRAMES[name][0](open_, cut, reset)


@pytest.mark.parametrize("name", FRAMES)
def test_flood_of(name: str) -> None:
    peer, frame = prepared(name)
    burst = FRAMES[name][1].burst
    peer.connection.receive(frame * (burst - 5), peer.now)
    peer.read()
    peer.works()
    peer.say(frame * 10)
    peer.failed_with(CALM)
    assert peer.calls[0].endings == [Ending.BROKEN]


@pytest.mark.parametrize("name", [name for name, (_, rate) in FRAMES.items() if rate.per_s < 10_000])
def test_steady(name: str) -> None:
    """At the rate that is granted for as long as it likes; at twice the rate not for long."""
    peer, frame = prepared(name)
    burst, per_s = FRAMES[name][1].burst, FRAMES[name][1].per_s
    for _ in range(2 * int(burst / per_s) + 10):
        peer.now += 1.0
        peer.connection.receive(frame * int(per_s), peer.now)
        peer.connection.take()
    assert not peer.connection.over
    peer.works()
    seconds = 0
    while not peer.connection.over and seconds < 3 * burst / per_s:
        seconds += 1
        peer.now += 1.0
        peer.connection.receive(frame * int(per_s * 2), peer.now)
        peer.read()
    assert seconds >= 0.9 * burst / per_s
    peer.failed_with(CALM)


def test_ways_of_saying_nothing_are_counted_together() -> None:
    peer, empty = prepared("empty DATA")
    _, unknown = prepared("unknown frames")
    peer.say((empty + unknown) * 502)
    peer.failed_with(CALM)


def test_keepalive_of_a_proxy() -> None:
    """Envoy's shortest: a PING a second, for an hour."""
    peer = Wire()
    for second in range(3600):
        peer.now += 1.0
        (answer,) = peer.say(wire.frame(wire.PING, 0, 0, struct.pack(">Q", second)))
        assert (answer.flags, answer.payload) == (wire.ACK, struct.pack(">Q", second))
        peer.connection.tick(peer.now)
    peer.works()


def test_one_frame_of_settings_changes_windows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window of each stream, however often it names a size: 2,700 times 10,000 would take seconds."""
    peer, block = settled()
    ids = peer.next_ids(1000)
    peer.say(*(opening(stream_id, block) for stream_id in ids))
    assert peer.connection.streams == 1000
    granted = 0
    right = Stream.grant

    def counted(stream: Stream, increment: int) -> bool:
        nonlocal granted
        granted += 1
        return right(stream, increment)

    monkeypatch.setattr(Stream, "grant", counted)
    sizes = [5, 70_000] * 1365
    peer.say(wire.frame(wire.SETTINGS, 0, 0, b"".join(struct.pack(">HI", 4, size) for size in sizes)))
    assert granted <= 1000
    peer.calls[-1].peer.send(bytes(69_000))
    peer.say(wire.window_update(0, 10_000))
    assert len(peer.replies[ids[-1]].body) == 69_005


def measured(rounds: int, *, with_data: bool) -> Wire:
    """A client of gRPC that sends a PING whenever it has got DATA, to learn how long the way is."""
    peer = Wire()
    peer.say(wire.settings(window=1 << 24), wire.window_update(0, 1 << 24))
    stream_id = peer.open()
    chunk = wire.data(stream_id, wire.message())
    for _ in range(rounds):
        if with_data:
            peer.connection.receive(chunk, peer.now)
            peer.connection.take()
        peer.connection.receive(wire.frame(wire.PING, 0, 0, bytes(8)), peer.now)
        peer.read()
    return peer


def check_pings_that_follow_data() -> None:
    peer = measured(3 * LIMITS.pings.burst, with_data=True)
    peer.works()
    measured(LIMITS.pings.burst - 5, with_data=False).works()


def test_pings_that_follow_data() -> None:
    check_pings_that_follow_data()


def test_pings_without_data_between_them_are_a_flood() -> None:
    peer = measured(3 * LIMITS.pings.burst, with_data=False)
    peer.failed_with(CALM)
    peer = measured(1, with_data=True)
    peer.say(wire.frame(wire.PING, 0, 0, bytes(8)) * (LIMITS.pings.burst + 5))
    peer.failed_with(CALM)


# -- resets by the peer ----------------------------------------------------------------------------------


def check_mass_abort(count: int, end: bool, replied: bool, limits: Http2Limits = LIMITS) -> None:
    """All clients behind a proxy leave at once: RST_STREAM, after END_STREAM in the same segment or alone."""
    peer, block = settled(limits)
    ids = peer.next_ids(count)
    peer.say(*(opening(stream_id, block) for stream_id in ids))
    assert peer.connection.streams == count
    if replied:
        for call in peer.calls[-count:]:
            call.peer.send(b"reply")
        peer.say(wire.window_update(0, 1 << 20))
    said = []
    for stream_id in ids:
        if end:
            said.append(wire.data(stream_id, b"", end=True))
        said.append(wire.reset(stream_id, ENVOY_RESETS_WITH))
    peer.say(*said)
    assert [call.endings for call in peer.calls[-count:]] == [[Ending.RESET]] * count
    assert peer.told == []
    peer.works()
    peer.nothing_left()


@pytest.mark.parametrize("replied", [False, True], ids=["before replies", "after replies"])
@pytest.mark.parametrize("end", [False, True], ids=["reset alone", "end and reset"])
@pytest.mark.parametrize("count", [1024, 10_000])
def test_mass_abort(count: int, end: bool, replied: bool) -> None:
    check_mass_abort(count, end, replied)


def check_resets_that_cross_our_end(count: int) -> None:
    """We have finished them all; the proxy resets them all before it has read that."""
    peer, block = settled()
    ids = peer.next_ids(count)
    peer.say(*(opening(stream_id, block, end=at % 2 == 0) for at, stream_id in enumerate(ids)))
    for call in peer.calls[-count:]:
        call.peer.finish(Status.OK)
    peer.say(*(wire.reset(stream_id, ENVOY_RESETS_WITH) for stream_id in ids))
    assert [call.endings for call in peer.calls[-count:]] == [[Ending.FINISHED]] * count
    assert peer.told == []
    peer.works()
    peer.nothing_left()


@pytest.mark.parametrize("count", [1024, 10_000])
def test_resets_that_cross_our_end(count: int) -> None:
    check_resets_that_cross_our_end(count)


@pytest.mark.parametrize("count", [1024, 10_000])
def test_requests_answered_early_whose_bodies_are_under_way(count: int) -> None:
    """Envoy still sends what it has queued, then resets."""
    peer, block = settled()
    ids = peer.next_ids(count)
    peer.say(*(opening(stream_id, block) for stream_id in ids))
    for call in peer.calls[-count:]:
        call.peer.finish(Status.RESOURCE_EXHAUSTED)
    body = wire.message(bytes(400))
    for stream_id in ids:
        peer.connection.receive(wire.data(stream_id, body) * 3 + wire.reset(stream_id, 2), peer.now)
    peer.read()
    assert peer.told == []
    peer.works()


def check_normal_ends(count: int, per_s: int) -> None:
    """Every stream is reset (INTERNAL_ERROR) when its trailers have come, as Envoy ends all that go well."""
    peer, block = settled(path=wire.EAGER)
    receive, take = peer.connection.receive, peer.connection.take
    body = wire.message()
    batch = per_s // 10
    for _ in range(count // batch):
        peer.now += 0.1
        ids = peer.next_ids(batch)
        receive(b"".join(opening(one, block) + wire.data(one, body) for one in ids), peer.now)
        assert len(take()) > batch * 40
        receive(b"".join(wire.reset(one, ENVOY_RESETS_WITH) for one in ids), peer.now)
        assert take() == b""
        receive(wire.window_update(0, 10 * batch), peer.now)
        assert [call.endings for call in peer.calls[-batch:]] == [[Ending.FINISHED]] * batch
        peer.calls.clear()
    assert not peer.connection.over, peer.connection.fault
    assert peer.told == []


def test_normal_ends() -> None:
    check_normal_ends(40_000, 5000)


def rapid_reset(seconds: int, per_s: int) -> Wire:
    """Streams that are opened and reset in one segment."""
    peer, block = settled()
    for _ in range(seconds):
        peer.now += 1.0
        for one in peer.next_ids(per_s):
            peer.connection.receive(opening(one, block) + wire.reset(one), peer.now)
        peer.connection.tick(peer.now)
        peer.read()
    return peer


def test_rapid_reset() -> None:
    peer = rapid_reset(20, 1000)
    peer.failed_with(CALM)
    assert 12_000 <= len(peer.calls) <= 13_000
    assert b"before they got a reply" in peer.goaways[0].payload


def test_clients_that_leave_now_and_then() -> None:
    peer = rapid_reset(100, 150)
    peer.works()
    peer.nothing_left()


def test_streams_beyond_the_limit_by_the_thousand() -> None:
    peer, block = settled(Http2Limits(streams=10))
    for stream_id in peer.next_ids(10_500):
        peer.connection.receive(opening(stream_id, block), peer.now)
    peer.read()
    peer.failed_with(CALM)
    assert [fault.code for fault in peer.told[:-1]] == [REFUSED] * 10_001


# -- resets that the peer brings us to -------------------------------------------------------------------

MADE_US_RESET: dict[str, Callable[[int], bytes]] = {
    "window by nothing": lambda stream_id: wire.window_update(stream_id, 0),
    "window too large": lambda stream_id: wire.window_update(stream_id, (1 << 31) - 1),
    "priority of four bytes": lambda stream_id: wire.frame(wire.PRIORITY, 0, stream_id, bytes(4)),
    "priority on itself": lambda stream_id: wire.frame(
        wire.PRIORITY, 0, stream_id, struct.pack(">IB", stream_id, 1)
    ),
    "DATA after the end": lambda stream_id: wire.data(stream_id, b"", end=True) + wire.data(stream_id, b"x"),
    "trailers after the end": lambda stream_id: (
        wire.data(stream_id, b"", end=True) + opening(stream_id, b"", end=True)
    ),
    "trailers without end": lambda stream_id: opening(stream_id, b""),
    "DATA after a reset": lambda stream_id: wire.reset(stream_id) + wire.data(stream_id, b"x"),
}


def check_made_us_reset(name: str) -> None:
    """Each at twenty times the rate that is granted: there must be an end to it."""
    peer, block = settled()
    per_s = 20 * int(LIMITS.faults.per_s)
    opened = 0
    for _ in range(60):
        peer.now += 1.0
        for stream_id in peer.next_ids(per_s):
            peer.connection.receive(opening(stream_id, block) + MADE_US_RESET[name](stream_id), peer.now)
            opened += not peer.connection.over
        peer.read()
    peer.failed_with(CALM)
    assert LIMITS.faults.burst <= opened <= LIMITS.faults.burst * 1.1
    assert b"faults; the last: " in peer.goaways[0].payload


@pytest.mark.parametrize("name", MADE_US_RESET)
def test_made_us_reset(name: str) -> None:
    check_made_us_reset(name)


def test_costly_trailers_of_a_stream_that_is_over() -> None:
    """Blocks that are decoded and ignored, because their stream is over, have cost as much as any other."""
    peer = Wire()
    stream_id = peer.open(wire.EAGER)
    big = peer.block([("x-big", "a" * 3000)])
    peer.say(wire.data(stream_id, wire.message()))
    peer.say(opening(peer.next_id(), big))  # malformed, and yet it is in the table
    block = b"\xbe" * 12
    told = len(peer.told)
    for _ in range(LIMITS.faults.burst - 5):
        peer.connection.receive(opening(stream_id, block, end=True), peer.now)
    peer.read()
    assert len(peer.told) == told
    peer.works()
    peer.say(opening(stream_id, block, end=True) * 10)
    peer.failed_with(CALM)


# -- the bucket ----------------------------------------------------------------------------------------


def test_bucket() -> None:
    bucket = Bucket(Rate(burst=3, per_s=2), 10.0)
    assert [bucket.spend(10.0) for _ in range(5)] == [True, True, True, False, False]
    assert [bucket.spend(10.5), bucket.spend(10.5)] == [True, False]
    assert [bucket.spend(10.75), bucket.spend(11.0)] == [False, True]
    assert [bucket.spend(1000.0) for _ in range(4)] == [True, True, True, False]


# -- planted faults --------------------------------------------------------------------------------------


def test_a_bucket_that_never_fills_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "spend", lambda bucket, now: True)
    with pytest.raises(AssertionError):
        test_flood_of("PING")
    with pytest.raises(AssertionError):
        test_rapid_reset()
    with pytest.raises(AssertionError):
        check_made_us_reset("window by nothing")


def test_pings_that_are_all_counted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Control.ping

    def wrong(control: Control, flags: int, stream_id: int, payload: bytes) -> None:
        control._out.data_written = False
        right(control, flags, stream_id, payload)

    monkeypatch.setattr(Control, "ping", wrong)
    with pytest.raises(AssertionError):
        check_pings_that_follow_data()


def test_normal_ends_taken_for_early_resets_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Connection._rst_stream

    def wrong(connection: Connection, flags: int, stream_id: int, payload: bytes) -> None:
        connection._floods.count(Flood.EARLY_RESETS, connection._now)
        right(connection, flags, stream_id, payload)

    monkeypatch.setattr(Connection, "_rst_stream", wrong)
    with pytest.raises(AssertionError):
        check_normal_ends(20_000, 5000)


def test_streams_forgotten_too_soon_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Connection._remember

    def wrong(connection: Connection, stream_id: int, state: object) -> None:
        right(connection, stream_id, state)  # type: ignore[arg-type]
        if len(connection._gone) > 4096:
            del connection._gone[next(iter(connection._gone))]

    monkeypatch.setattr(Connection, "_remember", wrong)
    with pytest.raises(AssertionError):
        check_resets_that_cross_our_end(10_000)


def test_a_burst_too_small_for_a_mass_abort_is_found() -> None:
    with pytest.raises(AssertionError):
        check_mass_abort(1024, False, False, Http2Limits(early_resets=Rate(burst=1000, per_s=200)))


def test_resets_of_ours_that_are_not_counted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Floods.count

    def wrong(floods: Floods, what: Flood, now: float, last: str = "") -> None:
        if what is not Flood.FAULTS:
            right(floods, what, now, last)

    monkeypatch.setattr(Floods, "count", wrong)
    with pytest.raises(AssertionError):
        check_made_us_reset("trailers without end")
