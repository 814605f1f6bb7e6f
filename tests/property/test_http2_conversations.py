"""Conversations of many streams with an independent client (the `h2` library), cut into random segments.

A run is drawn from a seeded generator: who speaks when, how much the client lets in, where the network cuts,
when the socket is full. The oracle knows what was sent, and what may become of it.
"""

import struct
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.http2 import connection as connection_module
from epp.http2.codes import Status
from epp.http2.connection import Connection
from epp.http2.control import Control
from epp.http2.limits import MIB, Http2Limits
from epp.http2.outgoing import Outgoing
from epp.http2.ports import Ending, Peer
from epp.http2.rates import Quota
from epp.http2.states import State
from epp.http2.streams import Stream
from tests.data.http2 import peer as wire

STEPS = 300
SIZES = (0, 1, 4, 200, 1000, 16_378, 16_379, 16_380, 20_000, 300_000)
WINDOWS = (0, 1, 7, 1000, 16_384, 65_535, 1 << 20)
SOCKET_BYTES = 200_000
ROUNDS = 500


class Planned(wire.Lived):
    """Does what its plan says: replies at once or later, and finishes early, in the end, or never."""

    def __init__(self, peer: Peer, draw: Random) -> None:
        super().__init__(peer)
        self._draw = draw
        self.sent: list[bytes] = []
        self.late: list[bytes] = []
        self.finish_after = draw.choice((None, None, None, 1, 2, 4))
        self.finished = False
        self.status = draw.choice((Status.OK, Status.OK, Status.INVALID_ARGUMENT))
        self.details = "" if self.status is Status.OK else draw.choice(("", "bad é %"))

    def received(self, body: bytes) -> None:
        assert not self.finished, "a message after finish"
        super().received(body)
        for _ in range(self._draw.choice((0, 1, 1, 1, 2))):
            reply = self._draw.randbytes(self._draw.choice((len(body), 3)))
            if self._draw.random() < 0.7 and not self.late:
                self.send(reply)
            else:
                self.late.append(reply)
        if self.finish_after == len(self.got):
            self.finish()

    def half_closed(self) -> None:
        super().half_closed()
        if not self.late or self._draw.random() < 0.5:
            self.finish()

    def send(self, body: bytes) -> None:
        self.sent.append(body)
        self.peer.send(body)

    def finish(self) -> None:
        self.finished = True
        self.late.clear()
        self.peer.finish(self.status, self.details)

    def go_on(self) -> None:
        """What was put off, at a time of the call's own."""
        if self.endings or self.finished:
            return
        if self.late:
            self.send(self.late.pop(0))
        elif "half-closed" in self.events:
            self.finish()
        self.peer.flush()


class Sender:
    """The client's side of one stream."""

    def __init__(self, draw: Random, total: int) -> None:
        self.messages = [
            draw.randbytes(draw.choice(SIZES[:total])) for _ in range(draw.choice((0, 1, 1, 3, 6)))
        ]
        self.left = b"".join(map(wire.message, self.messages))
        self.ending = draw.choice(("data", "data", "empty", "trailers", "reset"))
        self.reset_at = draw.randrange(len(self.left) + 1) if self.ending == "reset" else -1
        self.done = False  # it says no more
        self.was_reset = False  # by this client
        self.reply = wire.Reply()


class Conversation:
    """One connection from its first byte to its last call."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = Random(seed)
        self.output_bytes = draw.choice((1000, 16_384, 100_000, MIB))
        self.limits = Http2Limits(
            streams=draw.choice((3, 100)),
            stream_window_bytes=draw.choice((65_535, 70_000, MIB)),
            connection_window_bytes=draw.choice((70_000, 200_000, MIB)),
            output_bytes=self.output_bytes,
        )
        self.account = Quota(wire.PLENTY)
        self.slots = Quota(1000)
        self.told: list[Any] = []
        self.calls: dict[int, Planned] = {}
        self.flush_due = False
        self.now = 50.0
        self.server = Connection(
            {f"{wire.SERVICE}{number}": self._maker(number) for number in range(1, 200, 2)},
            self.limits,
            self.account,
            self.slots,
            self.now,
            self.told.append,
            self._flush_soon,
        )
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.senders: dict[int, Sender] = {}
        self.unread: dict[int, int] = defaultdict(int)  # came, and not given back; 0 is the connection
        self.to_server, self.to_client = bytearray(), bytearray()
        self.paused = self.settling = False
        self.sizes = draw.choice((4, 6, len(SIZES)))
        self.most_streams = draw.choice((2, 8, 20))
        self.unacked = 1
        codes = h2.settings.SettingCodes
        frame_bytes = draw.choice((16_384, 16_384, 100_000))
        own = {codes.INITIAL_WINDOW_SIZE: draw.choice(WINDOWS), codes.MAX_FRAME_SIZE: frame_bytes}
        self.client.local_settings = h2.settings.Settings(client=True, initial_values=own)
        self.client.max_inbound_frame_size = frame_bytes
        self.client.initiate_connection()

    def _maker(self, number: int) -> Callable[[Peer], Planned]:
        def make(peer: Peer) -> Planned:
            assert number not in self.calls
            self.calls[number] = Planned(peer, Random(self.draw.random()))
            return self.calls[number]

        return make

    def _flush_soon(self) -> None:
        self.flush_due = True

    # -- the client ------------------------------------------------------------------------------------

    def _resettle(self) -> None:
        """Other settings in the midst of it all. `h2` cannot keep two changes apart that are on their way."""
        if self.unacked:
            return
        self.unacked += 1
        codes = h2.settings.SettingCodes
        values = {codes.INITIAL_WINDOW_SIZE: self.draw.choice(WINDOWS)}
        if self.draw.random() < 0.3:
            values[codes.HEADER_TABLE_SIZE] = self.draw.choice((0, 100, 4096))
        self.client.update_settings(values)

    def _open(self) -> None:
        if len(self.senders) >= self.most_streams:
            return
        if (
            self.client.open_outbound_streams >= self.limits.streams
        ):  # though its SETTINGS may be on their way
            return
        stream_id = self.client.get_next_available_stream_id()
        sender = self.senders[stream_id] = Sender(self.draw, self.sizes)
        fields = wire.request(f"{wire.SERVICE}{stream_id}", ("x-turn", str(self.draw.random())))
        if self.draw.random() < 0.2 and sender.ending != "reset":
            fields.append(("content-length", str(len(sender.left))))
        sender.done = not sender.left and sender.ending == "empty"
        self.client.send_headers(stream_id, fields, end_stream=sender.done)
        self.client.increment_flow_control_window(1, stream_id)  # else a window of 0 never opens

    def _speak(self, stream_id: int) -> None:
        """A piece of what a stream has to say."""
        sender = self.senders[stream_id]
        if sender.done:
            return
        if sender.ending == "reset" and len(sender.left) <= sender.reset_at:
            self.client.reset_stream(stream_id, self.draw.choice((2, 8)))
            sender.done = sender.was_reset = True
            return
        room = min(
            self.client.local_flow_control_window(stream_id),
            self.client.max_outbound_frame_size,
            len(sender.left),
        )
        size = room if self.draw.random() < 0.6 else self.draw.randint(0, room)
        ends = size == len(sender.left) and sender.ending == "data"
        padding = None
        if size < room and room - size < 200 and self.draw.random() < 0.3:
            padding = room - size - 1
        if size or ends:
            piece, sender.left = sender.left[:size], sender.left[size:]
            self.client.send_data(stream_id, piece, end_stream=ends, pad_length=padding)
            sender.done = ends
        if not sender.left and not sender.done and sender.ending in ("empty", "trailers"):
            sender.done = True
            if sender.ending == "empty":
                self.client.end_stream(stream_id)
            else:
                self.client.send_headers(stream_id, [("x-checksum", "1")], end_stream=True)

    def _let_in(self, most: int) -> None:
        """Open windows by some of what was read."""
        for stream_id in list(self.unread):
            amount = min(self.unread[stream_id], most)
            if not amount:
                continue
            self.unread[stream_id] -= amount
            if stream_id == 0 or not self.senders[stream_id].reply.ended:
                try:
                    self.client.increment_flow_control_window(amount, stream_id or None)
                except (h2.exceptions.StreamClosedError, KeyError):  # it forgets those that are closed
                    assert self.senders[stream_id].was_reset

    def _hear(self, event: Any) -> None:
        stream_id = getattr(event, "stream_id", None)
        sender = self.senders.get(stream_id) if stream_id else None
        match event:
            case h2.events.ResponseReceived():
                assert sender is not None
                sender.reply.headers = list(event.headers)
            case h2.events.DataReceived():
                assert sender is not None
                sender.reply.body += event.data
                self.unread[stream_id] += event.flow_controlled_length
                self.unread[0] += event.flow_controlled_length
            case h2.events.TrailersReceived():
                assert sender is not None
                sender.reply.trailers = list(event.headers)
            case h2.events.StreamEnded():
                assert sender is not None
                sender.reply.ended = True
            case h2.events.StreamReset():
                assert sender is not None
                if event.remote_reset:
                    assert sender.reply.ended, "a reset in place of trailers"
                    assert event.error_code == 0
                    sender.done = True
            case h2.events.SettingsAcknowledged():
                self.unacked -= 1
            case h2.events.ConnectionTerminated():
                raise AssertionError(f"GOAWAY {event.error_code}: {event.additional_data!r}")

    # -- the network -----------------------------------------------------------------------------------

    def _piece(self, pipe: bytearray) -> bytes:
        size = len(pipe) if self.settling else self.draw.choice((1, 9, 100, 5000, 70_000, len(pipe)))
        piece = bytes(pipe[:size])
        del pipe[:size]
        return piece

    def _to_server(self) -> None:
        self.to_server += self.client.data_to_send()
        if self.to_server and not self.paused:
            self.server.receive(self._piece(self.to_server), self.now)
            self._flush()

    def _flush(self) -> None:
        """As a transport does: everything, unless the socket is full."""
        self.flush_due = False
        while written := self.server.take():
            held = sum(len(frame.payload) for frame in wire.frames(written) if frame.kind == wire.DATA)
            assert held <= self.output_bytes, "more at a time than is handed to the socket"
            self.to_client += written
            if len(self.to_client) > SOCKET_BYTES and not self.paused:
                self._pause()
        assert self.slots.used == self.server.streams
        assert self.account.used >= 0

    def _pause(self) -> None:
        self.paused = True
        self.server.pause()

    def _to_client(self) -> None:
        if self.to_client:
            for event in self.client.receive_data(self._piece(self.to_client)):
                self._hear(event)
        if self.paused and len(self.to_client) < SOCKET_BYTES / 4:
            self.paused = False
            self.server.resume()
            self._flush()

    def _pass_time(self) -> None:
        self.now += 0.01
        self.server.tick(self.now)
        self._flush()

    # -- the run ---------------------------------------------------------------------------------------

    def run(self) -> None:
        draw = self.draw
        acts: tuple[tuple[Callable[[], None], float], ...] = (
            (self._open, 2),
            (lambda: self._any(self._speak), 8),
            (self._to_server, 5),
            (self._to_client, 5),
            (lambda: self._let_in(draw.choice((1, 100, 20_000, 1 << 20))), 3),
            (lambda: self._any_call(), 3),
            (self._resettle, 0.3),
            (lambda: self.client.ping(draw.randbytes(8)), 0.3),
            (self._pause, 0.2),
            (self._pass_time, 0.3),
        )
        weights = [weight for _, weight in acts]
        for act, _ in draw.choices(acts, weights, k=STEPS):
            act()
        self._settle()
        self._check()

    def _any(self, act: Callable[[int], None]) -> None:
        if self.senders:
            act(self.draw.choice(list(self.senders)))

    def _any_call(self) -> None:
        if self.calls:
            self.draw.choice(list(self.calls.values())).go_on()
        if self.flush_due and not self.paused:
            self._flush()

    def _settle(self) -> None:
        """Everybody says what is left, and reads what there is."""
        self.settling = True
        settled = False
        for _ in range(ROUNDS):
            if not settled and not self.unacked:
                settled = True
                self.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
            for stream_id in self.senders:
                self._speak(stream_id)
            for call in self.calls.values():
                call.go_on()
            if self.flush_due and not self.paused:
                self._flush()
            self._let_in(1 << 20)
            self._to_server()
            self._to_client()
            quiet = not (self.to_server or self.to_client or self.client.data_to_send())
            if quiet and all(sender.done for sender in self.senders.values()) and not self.server.streams:
                return
        raise AssertionError(f"no end: {self.server.streams} streams, paused: {self.paused}")

    def _check(self) -> None:
        assert self.told == []
        assert not self.server.over
        assert self.server.streams == self.slots.used == 0
        assert self.account.used == 0
        assert set(self.calls) == set(self.senders)
        for stream_id, sender in self.senders.items():
            self._check_stream(sender, self.calls[stream_id])

    def _check_stream(self, sender: Sender, call: Planned) -> None:
        assert len(call.endings) == 1
        assert call.got == sender.messages[: len(call.got)]
        reply = sender.reply
        if call.endings == [Ending.RESET]:
            assert sender.was_reset
        else:
            assert call.endings == [Ending.FINISHED]
            assert call.finished
        if not sender.was_reset:
            assert reply.ended
            assert len(call.got) == call.finish_after or call.got == sender.messages
            assert reply.messages == call.sent
            assert reply.http_status == 200
            assert reply.status == call.status
            if call.details:
                assert reply.details == "bad %C3%A9 %25"
        else:
            sent = b"".join(map(wire.message, call.sent))
            assert sent.startswith(reply.body)


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_calls_and_client_get_exactly_what_the_other_sent(seed: int) -> None:
    Conversation(seed).run()


# -- faults that the conversations must find -----------------------------------------------------------

Fault = Callable[[pytest.MonkeyPatch], None]


def _window_of_a_stream_is_not_charged(patch: pytest.MonkeyPatch) -> None:
    right = Stream.send_waiting

    def wrong(stream: Stream, most: int) -> bool:
        credit = stream.credit
        right(stream, most)
        stream.credit = credit
        return stream.waits

    patch.setattr(Stream, "send_waiting", wrong)


def _window_of_the_connection_is_not_charged(patch: pytest.MonkeyPatch) -> None:
    right = Outgoing.take

    def wrong(out: Outgoing) -> bytes:
        out.credit = max(out.credit, 1000)
        return right(out)

    patch.setattr(Outgoing, "take", wrong)


def _window_of_the_connection_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Connection, "_give_back_connection", lambda connection: None)


def _window_that_shrank_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outgoing, "drop", lambda out, stream: None)


def _window_of_new_streams_is_the_old_one(patch: pytest.MonkeyPatch) -> None:
    right = Control._resize_windows

    def wrong(control: Control, window_bytes: int) -> None:
        right(control, window_bytes)
        control._out.window_bytes = 65_535

    patch.setattr(Control, "_resize_windows", wrong)


def _end_of_stream_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "half_close", lambda stream: None)


def _trailers_overtake_messages(patch: pytest.MonkeyPatch) -> None:
    def wrong(stream: Stream, status: Status, details: str = "") -> None:
        if stream._finish is None:
            stream._finish = (status, details, Ending.FINISHED)
            stream._end()

    patch.setattr(Stream, "finish", wrong)


def _messages_overtake_messages(patch: pytest.MonkeyPatch) -> None:
    right = Stream._wait

    def wrong(stream: Stream, body: bytes) -> None:
        right(stream, body)
        stream._waiting.rotate(len(stream._waiting) > 2)

    patch.setattr(Stream, "_wait", wrong)


def _closed_stream_stays(patch: pytest.MonkeyPatch) -> None:
    def wrong(connection: Connection, stream: Stream, ending: Ending) -> None:
        connection._slots.give(1)
        connection._remember(stream.id, stream.state)
        stream.call.ended(ending)

    patch.setattr(Connection, "_stream_over", wrong)


def _what_waits_stays_charged_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    right = Stream.leave

    def wrong(stream: Stream, state: State, ending: Ending) -> None:
        if ending is Ending.RESET:
            stream._waiting_bytes = 0
        right(stream, state, ending)

    patch.setattr(Stream, "leave", wrong)


def _half_a_message_stays_charged(patch: pytest.MonkeyPatch) -> None:
    right = Stream.leave

    def wrong(stream: Stream, state: State, ending: Ending) -> None:
        stream.held = 0
        right(stream, state, ending)

    patch.setattr(Stream, "leave", wrong)


def _more_than_the_socket_is_to_have(patch: pytest.MonkeyPatch) -> None:
    right = Outgoing.__init__

    def wrong(out: Outgoing, account: Any, output_bytes: int, flush: Any) -> None:
        right(out, account, output_bytes * 2, flush)

    patch.setattr(Outgoing, "__init__", wrong)


def _paused_socket_is_written_to_no_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outgoing, "resume", lambda out: None)


def _smaller_header_table_is_not_acknowledged(patch: pytest.MonkeyPatch) -> None:
    right = Outgoing.__init__

    def wrong(out: Outgoing, *more: Any) -> None:
        right(out, *more)
        out._table_given_up = True

    patch.setattr(Outgoing, "__init__", wrong)


def _padding_is_taken_for_content(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(connection_module, "unpadded", lambda flags, payload: payload)


# The oracle, the client or the connection itself trips over it.
FOUND = (AssertionError, h2.exceptions.ProtocolError, IndexError, struct.error)

FAULTS: tuple[Fault, ...] = (
    wire.keep_the_window_of_a_stalled_stream,
    _window_of_a_stream_is_not_charged,
    _window_of_the_connection_is_not_charged,
    _window_of_the_connection_is_not_given_back,
    _window_that_shrank_is_used,
    _window_of_new_streams_is_the_old_one,
    _end_of_stream_is_lost,
    _trailers_overtake_messages,
    _messages_overtake_messages,
    _closed_stream_stays,
    _what_waits_stays_charged_after_a_reset,
    _half_a_message_stays_charged,
    _more_than_the_socket_is_to_have,
    _paused_socket_is_written_to_no_more,
    _smaller_header_table_is_not_acknowledged,
    _padding_is_taken_for_content,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)

    def some_conversations() -> None:
        for seed in range(100):
            Conversation(seed).run()

    with pytest.raises(FOUND):
        some_conversations()
