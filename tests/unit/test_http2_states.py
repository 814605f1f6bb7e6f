"""Every frame on a stream in every state, against RFC 9113 (5.1, 5.1.1, 6.1 to 6.10)."""

import struct
from collections.abc import Callable

import pytest

from epp.http2 import states
from epp.http2.codes import FrameType
from epp.http2.ports import Ending
from epp.http2.states import LEGAL, State, Verdict
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Wire

PROTOCOL_ERROR, STREAM_CLOSED = 1, 5

# -- states, as a client brings them about -------------------------------------------------------------


def idle(peer: Wire) -> int:
    return peer.next_id()


def open_(peer: Wire) -> int:
    return peer.open(wire.MUTE)


def half_closed(peer: Wire) -> int:
    return peer.open(wire.MUTE, end=True)


def ended(peer: Wire) -> int:
    """Both sides have said that they are done."""
    stream_id = peer.open(end=True)
    assert peer.replies[stream_id].ended
    assert peer.replies[stream_id].reset is None
    return stream_id


def reset(peer: Wire) -> int:
    """By the client."""
    stream_id = peer.open(wire.MUTE)
    peer.say(wire.reset(stream_id))
    return stream_id


def cut(peer: Wire) -> int:
    """The server has answered and wants no more."""
    stream_id = peer.open(wire.EAGER)
    peer.say(wire.data(stream_id, wire.message()))
    assert peer.replies[stream_id].ended
    assert peer.replies[stream_id].reset == 0
    return stream_id


def cut_for_a_fault(peer: Wire) -> int:
    stream_id = peer.open(wire.MUTE)
    peer.say(wire.window_update(stream_id, 0))
    assert peer.replies[stream_id].reset == PROTOCOL_ERROR
    return stream_id


def skipped(peer: Wire) -> int:
    """A later stream was opened; this one never was (5.1.1)."""
    stream_id = peer.next_id()
    peer.open(wire.MUTE)
    return stream_id


def even(peer: Wire) -> int:
    """Of the server's numbers, of which it uses none."""
    return peer.open(wire.MUTE) + 1


def even_and_passed(peer: Wire) -> int:
    return peer.open(wire.MUTE) - 1 if peer.open(wire.MUTE) else 0


# -- frames --------------------------------------------------------------------------------------------


def data_frame(peer: Wire, stream_id: int) -> bytes:
    return wire.data(stream_id, wire.message())


def last_data(peer: Wire, stream_id: int) -> bytes:
    return wire.data(stream_id, b"", end=True)


def trailers(peer: Wire, stream_id: int) -> bytes:
    return peer.headers(stream_id, [("x-sum", "1"), ("x-new", str(stream_id))], end=True)


def new_request(peer: Wire, stream_id: int) -> bytes:
    return peer.headers(stream_id, wire.request(wire.MUTE, ("x-new", str(stream_id))))


def in_two_frames(peer: Wire, stream_id: int) -> bytes:
    block = peer.block([("x-sum", "1"), ("x-new", str(stream_id))])
    first = wire.frame(wire.HEADERS, wire.END_STREAM, stream_id, block[:5])
    return first + wire.frame(wire.CONTINUATION, wire.END_HEADERS, stream_id, block[5:])


def priority(peer: Wire, stream_id: int) -> bytes:
    return wire.frame(wire.PRIORITY, 0, stream_id, struct.pack(">IB", 0, 200))


def reset_frame(peer: Wire, stream_id: int) -> bytes:
    return wire.reset(stream_id, 2)


def window(peer: Wire, stream_id: int) -> bytes:
    return wire.window_update(stream_id, 100)


def continuation(peer: Wire, stream_id: int) -> bytes:
    return wire.frame(wire.CONTINUATION, wire.END_HEADERS, stream_id, b"")


def promise(peer: Wire, stream_id: int) -> bytes:
    return wire.frame(wire.PUSH_PROMISE, wire.END_HEADERS, stream_id, struct.pack(">I", stream_id + 1))


def unknown(peer: Wire, stream_id: int) -> bytes:
    return wire.frame(0x2A, 0xFF, stream_id, b"whatever")


def settings_frame(peer: Wire, stream_id: int) -> bytes:
    return wire.frame(wire.SETTINGS, 0, stream_id)


def ping(peer: Wire, stream_id: int) -> bytes:
    return wire.frame(wire.PING, 0, stream_id, bytes(8))


def goaway(peer: Wire, stream_id: int) -> bytes:
    return wire.frame(wire.GOAWAY, 0, stream_id, bytes(8))


Reach = tuple[str, int]
FINE: Reach = ("fine", 0)
CLOSED: Reach = ("stream", STREAM_CLOSED)
END_CLOSED: Reach = ("connection", STREAM_CLOSED)
END: Reach = ("connection", PROTOCOL_ERROR)

COLUMNS = (data_frame, last_data, trailers, in_two_frames, new_request, reset_frame, window)
# Where the RFC leaves a choice: "may treat as a connection error STREAM_CLOSED" is used once a stream has
# ended both ways, and never where frames can still be under way that the peer sent before it knew.
ROWS: dict[Callable[[Wire], int], tuple[Reach, ...]] = {
    #                 DATA        last DATA   trailers    in two      request     RST_STREAM  WINDOW_UPDATE
    idle:            (END,        END,        ("stream", PROTOCOL_ERROR), ("stream", PROTOCOL_ERROR),
                                                                      FINE,       END,        END),
    open_:           (FINE,       FINE,       FINE,       FINE,       ("stream", PROTOCOL_ERROR),
                                                                                  FINE,       FINE),
    half_closed:     (CLOSED,     CLOSED,     CLOSED,     CLOSED,     CLOSED,     FINE,       FINE),
    ended:           (END_CLOSED, END_CLOSED, END_CLOSED, END_CLOSED, END_CLOSED, FINE,       FINE),
    reset:           (CLOSED,     CLOSED,     CLOSED,     CLOSED,     CLOSED,     FINE,       FINE),
    cut:             (FINE,       FINE,       FINE,       FINE,       FINE,       FINE,       FINE),
    cut_for_a_fault: (FINE,       FINE,       FINE,       FINE,       FINE,       FINE,       FINE),
    skipped:         (CLOSED,     CLOSED,     END,        END,        END,        FINE,       FINE),
    even:            (END,        END,        END,        END,        END,        END,        END),
    even_and_passed: (END,        END,        END,        END,        END,        END,        END),
}  # fmt: skip
EVERYWHERE = {
    priority: FINE,
    unknown: FINE,
    continuation: END,
    promise: END,
    settings_frame: END,
    ping: END,
    goaway: END,
}
CASES = [
    (state, frame, reach)
    for state, row in ROWS.items()
    for frame, reach in [*zip(COLUMNS, row, strict=True), *EVERYWHERE.items()]
]


def named(part: object) -> str:
    return part.__name__.strip("_") if callable(part) else ""


@pytest.mark.parametrize(("state", "frame", "reach"), CASES, ids=named)
def test_frame_in_state(
    state: Callable[[Wire], int], frame: Callable[[Wire, int], bytes], reach: Reach
) -> None:
    peer = Wire()
    how_far, code = reach
    if how_far == "connection":
        stream_id = state(peer)
        peer.say(frame(peer, stream_id))
        peer.failed_with(code)
        return
    with peer.bystander():
        stream_id = state(peer)
        told = len(peer.told)
        was_reset = peer.replies[stream_id].reset if stream_id in peer.replies else None
        # What is reset once stays so: a second RST_STREAM may only follow a frame that earns it.
        if was_reset is None and how_far == "fine":
            peer.say(frame(peer, stream_id))
            assert stream_id not in peer.replies or peer.replies[stream_id].reset is None
        elif how_far == "fine":
            assert peer.say(frame(peer, stream_id)) == []
        else:
            resets = [one for one in peer.say(frame(peer, stream_id)) if one.kind == wire.RST_STREAM]
            assert [(one.stream_id, one.code) for one in resets] == [(stream_id, code)]
        assert len(peer.told) - told == (how_far == "stream")


def test_what_frames_on_an_open_stream_do() -> None:
    peer = Wire()
    taken = open_(peer)
    peer.say(data_frame(peer, taken))
    call = peer.calls[-1]
    assert (call.got, call.events, call.endings) == ([b"hello"], [], [])
    peer.say(trailers(peer, taken))
    assert (call.events, call.endings) == (["half-closed"], [])
    peer.say(reset_frame(peer, taken))
    assert call.endings == [Ending.RESET]
    peer.nothing_left()


def test_a_fault_ends_the_call() -> None:
    peer = Wire()
    half_way = half_closed(peer)
    peer.say(data_frame(peer, half_way))
    assert peer.calls[-1].endings == [Ending.BROKEN]
    assert peer.calls[-1].got == []
    peer.nothing_left()


def test_a_stream_forgotten_for_long_is_closed_all_the_same() -> None:
    peer = Wire()
    with peer.bystander():
        long_ago = reset(peer)
        for _ in range(12_000):
            stream_id = peer.next_id()
            peer.say(peer.headers(stream_id, wire.request(), end=True))
        assert peer.say(wire.reset(long_ago), wire.window_update(long_ago, 1)) == []
        (answer,) = peer.say(data_frame(peer, long_ago))
        assert (answer.kind, answer.code) == (wire.RST_STREAM, STREAM_CLOSED)


def test_table_holds_every_state_and_kind() -> None:
    assert set(LEGAL) == set(State)
    kinds = {FrameType.DATA, FrameType.HEADERS, FrameType.RST_STREAM, FrameType.WINDOW_UPDATE}
    assert all(set(row) == kinds for row in LEGAL.values())


@pytest.mark.parametrize(
    ("state", "kind", "verdict", "setup", "frame"),
    [
        (State.IDLE, FrameType.DATA, Verdict.IGNORE, idle, data_frame),
        (State.IDLE, FrameType.WINDOW_UPDATE, Verdict.RESET, even, window),
        (State.HALF_CLOSED, FrameType.DATA, Verdict.IGNORE, half_closed, data_frame),
        (State.ENDED, FrameType.HEADERS, Verdict.RESET, ended, trailers),
        (State.ENDED, FrameType.RST_STREAM, Verdict.CLOSE, ended, reset_frame),
        (State.CUT, FrameType.DATA, Verdict.RESET, cut, data_frame),
        (State.CUT, FrameType.HEADERS, Verdict.CLOSE, cut_for_a_fault, new_request),
        (State.RESET, FrameType.DATA, Verdict.TAKE, reset, data_frame),
        (State.FORGOTTEN, FrameType.HEADERS, Verdict.IGNORE, skipped, new_request),
    ],
)
def test_a_wrong_cell_is_found(
    state: State,
    kind: FrameType,
    verdict: Verdict,
    setup: Callable[[Wire], int],
    frame: Callable[[Wire, int], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (reach,) = (reach for one, other, reach in CASES if (one, other) == (setup, frame))
    test_frame_in_state(setup, frame, reach)
    monkeypatch.setattr(states, "LEGAL", {**LEGAL, state: {**LEGAL[state], kind: verdict}})
    with pytest.raises(AssertionError):
        test_frame_in_state(setup, frame, reach)
