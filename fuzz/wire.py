"""What a peer may expect of a server's bytes, read without the product's code.

`Sent` counts what the peer itself has sent, `Got` complains about the server. Bounds are generous where the
exact figure depends on timing, so that each complaint is a fault.
"""

from dataclasses import dataclass, field

from hpack import Decoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
DEFAULT_WINDOW_BYTES = 65_535
LAST_STREAM_ID = (1 << 31) - 1


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return b"".join(
        (len(payload).to_bytes(3, "big"), bytes((kind, flags)), stream_id.to_bytes(4, "big"), payload)
    )


def settings(*entries: tuple[int, int]) -> bytes:
    payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in entries)
    return frame(SETTINGS, 0, 0, payload)


def split(buffer: bytearray) -> list[tuple[int, int, int, bytes]]:
    """Takes the whole frames off the front: type, flags, stream, payload."""
    frames = []
    at = 0
    while len(buffer) - at >= HEAD_BYTES:
        size = int.from_bytes(buffer[at : at + 3], "big")
        after = at + HEAD_BYTES + size
        if after > len(buffer):
            break
        stream_id = int.from_bytes(buffer[at + 5 : at + 9], "big") & LAST_STREAM_ID
        frames.append((buffer[at + 3], buffer[at + 4], stream_id, bytes(buffer[at + HEAD_BYTES : after])))
        at = after
    del buffer[:at]
    return frames


class Sent:
    """Upper bounds of what the server may do, from the frames that were sent to it, legal or not.

    Attributes:
        size: bytes.
        opened: streams that had a HEADERS frame.
        data: DATA payload bytes, by stream; 0 is all of them.
        granted: window increments, by stream; 0 is the connection.
        window_bytes, frame_bytes: largest initial window and frame size ever set.
        pings, settings: of each how many that ask for an answer.
    """

    def __init__(self) -> None:
        self.size = 0
        self.opened: set[int] = set()
        self.data: dict[int, int] = {}
        self.granted: dict[int, int] = {}
        self.window_bytes = DEFAULT_WINDOW_BYTES
        self.frame_bytes = 16_384
        self.pings = self.settings = 0
        self._buffer = bytearray()
        self._began = False

    def idle(self, stream_id: int) -> bool:
        """Streams that were passed over count as closed (RFC 9113, 5.1.1)."""
        return not stream_id & 1 or stream_id > max(self.opened, default=0)

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        self._buffer += data
        if not self._began:
            if len(self._buffer) < len(PREFACE):
                return
            del self._buffer[: len(PREFACE)]
            self._began = True
        for kind, flags, stream_id, payload in split(self._buffer):
            self._note(kind, flags, stream_id, payload)

    def _note(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == HEADERS:
            self.opened.add(stream_id)
        elif kind == DATA:
            for key in (0, stream_id):
                self.data[key] = self.data.get(key, 0) + len(payload)
        elif kind == WINDOW_UPDATE and len(payload) == 4:
            increment = int.from_bytes(payload, "big") & LAST_STREAM_ID
            self.granted[stream_id] = self.granted.get(stream_id, 0) + increment
        elif kind == PING and not flags & ACK:
            self.pings += 1
        elif kind == SETTINGS and not flags & ACK:
            self.settings += 1
            for at in range(0, len(payload) - 5, 6):
                key, value = (
                    int.from_bytes(payload[at : at + 2], "big"),
                    int.from_bytes(payload[at + 2 : at + 6], "big"),
                )
                if key == INITIAL_WINDOW_SIZE:
                    self.window_bytes = max(self.window_bytes, value)
                elif key == MAX_FRAME_SIZE:
                    self.frame_bytes = max(self.frame_bytes, value)


@dataclass(slots=True)
class Answer:
    """What the server sent on one stream. `over`: it has ended it."""

    started: bool = False
    over: bool = False
    data: int = 0
    granted: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)


class Got:
    """The server's side of a connection.

    Attributes:
        size: bytes.
        answers: by stream.
        goaway: (last stream, code) of the last GOAWAY.
    """

    def __init__(self, sent: Sent, connection_window_bytes: int) -> None:
        self.size = 0
        self.answers: dict[int, Answer] = {}
        self.goaway: tuple[int, int] | None = None
        self._sent = sent
        self._extra_bytes = connection_window_bytes - DEFAULT_WINDOW_BYTES
        self._decoder = Decoder()
        self._granted = self._data = self._frames = self._pongs = self._acks = 0

    def feed(self, data: bytes) -> None:
        """What was taken at one time: whole frames."""
        self.size += len(data)
        buffer = bytearray(data)
        for kind, flags, stream_id, payload in split(buffer):
            self._check(kind, flags, stream_id, payload)
            self._frames += 1
        assert not buffer, "a frame is cut off"

    def _check(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        assert self.goaway is None or not self.goaway[1], "a frame after the GOAWAY that ends the connection"
        assert (kind == SETTINGS and not flags) == (self._frames == 0), "SETTINGS come first, and once"
        assert len(payload) <= self._sent.frame_bytes, f"a frame of {len(payload)} bytes"
        if kind in (SETTINGS, PING, GOAWAY):
            assert stream_id == 0
            self._of_connection(kind, flags, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(stream_id, int.from_bytes(payload, "big"))
        else:
            assert not self._sent.idle(stream_id), (
                f"a frame of type {kind} on stream {stream_id}, which is idle"
            )
            answer = self.answers.setdefault(stream_id, Answer())
            if kind == RST_STREAM:
                assert len(payload) == 4
                answer.over = True
                return
            assert not answer.over, f"a frame of type {kind} after the end of stream {stream_id}"
            answer.over = bool(flags & END_STREAM)
            if kind == HEADERS:
                self._headers(answer, flags, payload)
            else:
                assert kind == DATA, f"a frame of type {kind}"
                self._take_data(stream_id, answer, payload)

    def _of_connection(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == SETTINGS:
            self._acks += flags & ACK
            assert self._acks <= self._sent.settings, "SETTINGS acknowledged that nobody sent"
        elif kind == PING:
            assert len(payload) == 8
            self._pongs += flags & ACK
            assert self._pongs <= self._sent.pings, "a PING answered that nobody sent"
        else:
            last, code = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
            assert last <= max(self._sent.opened, default=0) or last == LAST_STREAM_ID, (
                "GOAWAY: unknown stream"
            )
            assert self.goaway is None or last <= self.goaway[0], "GOAWAY: last stream grew"
            self.goaway = (last, code)

    def _window_update(self, stream_id: int, increment: int) -> None:
        assert 0 < increment <= LAST_STREAM_ID
        if not stream_id:
            self._granted += increment
            received = self._sent.data.get(0, 0)
            assert self._granted <= self._extra_bytes + received, "more given back than came"
            return
        assert stream_id in self._sent.opened, f"WINDOW_UPDATE on stream {stream_id}, which is idle"
        answer = self.answers.setdefault(stream_id, Answer())
        assert not answer.over, f"WINDOW_UPDATE after the end of stream {stream_id}"
        answer.granted += increment
        assert answer.granted <= self._sent.data.get(stream_id, 0), (
            f"stream {stream_id}: more given back than came"
        )

    def _headers(self, answer: Answer, flags: int, payload: bytes) -> None:
        assert flags & END_HEADERS
        fields = [
            (name.decode("ascii"), value.decode("ascii"))
            for name, value in self._decoder.decode(payload, raw=True)
        ]
        assert all(value == value.strip() and value.isprintable() for _, value in fields)
        names = [name for name, _ in fields]
        assert len(set(names)) == len(names)
        if answer.started:
            assert flags & END_STREAM, "trailers that do not end the stream"
            assert "grpc-status" in names
            assert ":status" not in names
        else:
            assert names[0] == ":status"
        answer.started = True
        answer.fields += fields

    def _take_data(self, stream_id: int, answer: Answer, payload: bytes) -> None:
        sent = self._sent
        assert answer.started, "DATA before HEADERS"
        answer.data += len(payload)
        self._data += len(payload)
        assert answer.data <= sent.window_bytes + sent.granted.get(stream_id, 0), (
            "DATA beyond the stream's window"
        )
        assert self._data <= DEFAULT_WINDOW_BYTES + sent.granted.get(0, 0), (
            "DATA beyond the connection's window"
        )
