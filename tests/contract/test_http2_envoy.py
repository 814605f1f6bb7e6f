"""What Envoy sent to a picker, recorded byte by byte, means the same however the network cuts it."""

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp import names
from epp.http2.codes import Status
from epp.http2.connection import Connection
from epp.http2.messages import MessageReader
from epp.http2.ports import Ending
from epp.wire import ext_proc_pb2 as pb
from tests.data.http2 import peer as wire
from tests.data.http2.peer import Wire

RECORDINGS = {
    file.stem.removeprefix("envoy-"): file.read_bytes()
    for file in sorted((Path(__file__).parents[1] / "data" / "http2").glob("envoy-*.bin"))
}
RECORDED = {
    name: list(wire.frames(recording.removeprefix(wire.PREFACE))) for name, recording in RECORDINGS.items()
}
CHAT = ("request_headers", "request_body", "request_body", "response_headers")


class Attentive(wire.Lived):
    """Answers each message, and has heard enough when the answer's body has ended, as a picker does."""

    def received(self, body: bytes) -> None:
        super().received(body)
        self.peer.send(body[:20])
        said = pb.ProcessingRequest.FromString(body)
        if said.response_body.end_of_stream:
            self.peer.finish(Status.OK)


def bodies(name: str) -> dict[int, list[bytes]]:
    """The messages of each stream, read without the connection."""
    streams: dict[int, bytes] = defaultdict(bytes)
    for one in RECORDED[name]:
        if one.kind == wire.DATA:
            streams[one.stream_id] += one.payload
    return {stream_id: wire.messages(whole) for stream_id, whole in streams.items()}


def replayed(name: str, kind: type[wire.Lived], cuts: list[int]) -> Wire:
    peer = Wire(greet=False, also={names.EXT_PROC_METHOD: kind})
    recording = RECORDINGS[name]
    for start, end in zip([0, *cuts], [*cuts, len(recording)], strict=True):
        peer.now += 0.001
        peer.say(recording[start:end])
    return peer


def check(name: str, cuts: list[int]) -> None:
    expected = bodies(name)
    peer = replayed(name, wire.Lived, cuts)
    assert [call.got for call in peer.calls] == list(expected.values())
    assert [call.endings for call in peer.calls] == [[Ending.RESET]] * 4
    # Only the last client leaves; Envoy then says that there is no more before it resets.
    assert [call.events for call in peer.calls] == [[], [], [], ["half-closed"]]
    assert peer.told == []
    assert peer.replies == {}
    peer.nothing_left()

    peer = replayed(name, Attentive, cuts)
    assert [call.got for call in peer.calls] == list(expected.values())
    assert [call.endings for call in peer.calls] == [[Ending.FINISHED]] * 3 + [[Ending.RESET]]
    replies = list(peer.replies.values())
    assert [reply.status for reply in replies] == [0, 0, 0, None]
    assert [reply.messages for reply in replies] == [
        [body[:20] for body in messages] for messages in expected.values()
    ]
    assert peer.told == []
    assert peer.goaways == []
    peer.nothing_left()


def cuts_of(name: str, size: int) -> list[int]:
    return list(range(size, len(RECORDINGS[name]), size))


def test_recordings_are_what_they_are_said_to_be() -> None:
    assert set(RECORDINGS) == {"chats", "traced"}
    for name, frames in RECORDED.items():
        assert [(one.stream_id, one.code) for one in frames if one.kind == wire.RST_STREAM] == [
            (1, 2),
            (3, 2),
            (5, 2),
            (7, 2),
        ]
        for messages in bodies(name).values():
            said = [pb.ProcessingRequest.FromString(body) for body in messages]
            assert tuple(one.WhichOneof("request") for one in said[:4]) == CHAT
            assert {one.WhichOneof("request") for one in said[4:]} == {"response_body"}


@pytest.mark.parametrize("size", [1, 2, 9, 100, 1000, 1 << 20])
@pytest.mark.parametrize("name", list(RECORDINGS))
def test_cut_evenly(name: str, size: int) -> None:
    check(name, cuts_of(name, size))


@pytest.mark.parametrize("name", list(RECORDINGS))
def test_cut_before_within_and_after_each_head(name: str) -> None:
    at = len(wire.PREFACE)
    for one in RECORDED[name]:
        for cut in (at, at + 4, at + 9):
            check(name, [cut])
        at += 9 + len(one.payload)
    assert at == len(RECORDINGS[name])


@settings(max_examples=50)
@given(st.data())
def test_cut_anywhere(draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from(list(RECORDINGS)))
    cuts = draw.draw(st.lists(st.integers(0, len(RECORDINGS[name])), max_size=60))
    check(name, sorted(cuts))


@pytest.mark.parametrize("name", list(RECORDINGS))
def test_the_rest_of_the_connection_works_after_a_recording(name: str) -> None:
    peer = replayed(name, Attentive, [])
    peer.say(wire.window_update(0, 1000))
    # The recording's header table is Envoy's; a client that adds nothing to it can go on.
    block = b"".join(
        b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in field) for field in wire.request()
    )
    peer.say(wire.frame(wire.HEADERS, wire.END_HEADERS, 9, block), wire.data(9, wire.message(), end=True))
    assert peer.replies[9].messages == [b"hello"]
    assert peer.replies[9].status == 0


# -- planted faults --------------------------------------------------------------------------------------


def _loses_a_cut_head(patch: pytest.MonkeyPatch) -> None:
    right = Connection._frames

    def wrong(connection: Connection, data: bytes) -> bytes:
        rest = right(connection, data)
        return b"" if len(rest) < 9 and connection._preface_done else rest

    patch.setattr(Connection, "_frames", wrong)


def _loses_all_but_the_first_message_of_a_frame(patch: pytest.MonkeyPatch) -> None:
    right = MessageReader.feed
    patch.setattr(MessageReader, "feed", lambda reader, payload: list(right(reader, payload))[:1])


def _loses_the_end(patch: pytest.MonkeyPatch) -> None:
    right = Connection._data

    def wrong(connection: Connection, stream_id: int, flags: int, data: bytes, at: int, stop: int) -> None:
        right(connection, stream_id, 0, data, at, stop)

    patch.setattr(Connection, "_data", wrong)


def _counts_normal_ends_as_faults(patch: pytest.MonkeyPatch) -> None:
    right = Connection._rst_stream

    def wrong(connection: Connection, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id not in connection._streams:
            connection._told(AssertionError("a stream that is over"))  # type: ignore[arg-type]
        right(connection, flags, stream_id, payload)

    patch.setattr(Connection, "_rst_stream", wrong)


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        (_loses_a_cut_head, 100),
        (_loses_all_but_the_first_message_of_a_frame, 1 << 20),
        (_loses_the_end, 1 << 20),
        (_counts_normal_ends_as_faults, 1 << 20),
    ],
)
def test_a_fault_is_found(fault: object, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(fault)
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check("chats", cuts_of("chats", size))
