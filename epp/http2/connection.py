"""One HTTP/2 connection of a gRPC server: bytes in, bytes out."""

from collections.abc import Callable
from typing import Final

from epp.http2 import blocks
from epp.http2.codes import (
    ACK,
    END_STREAM,
    LAST_STREAM_ID,
    LEAST_MAX_FRAME_BYTES,
    PREFACE,
    ErrorCode,
    FrameType,
    Status,
)
from epp.http2.control import Control, greeting
from epp.http2.errors import CallFault, ConnectionFault, HttpFault, StreamFault
from epp.http2.fields import FieldDecoder, FieldsTooLarge
from epp.http2.floods import Flood, Floods
from epp.http2.frames import (
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    MESSAGE_HEAD,
    MESSAGE_HEAD_BYTES,
    goaway,
    number,
    rst_stream,
    unpadded,
    window_update,
)
from epp.http2.header_blocks import HeaderBlock, HeaderBlocks
from epp.http2.heads import HeadReader, RequestHead, check_grpc
from epp.http2.limits import Http2Limits
from epp.http2.messages import MessageReader
from epp.http2.outgoing import Outgoing
from epp.http2.patience import Patience
from epp.http2.ports import Account, Call, Ending, Methods, Peer, find_method
from epp.http2.states import State, judge
from epp.http2.streams import Stream

DATA: Final = int(FrameType.DATA)
OPEN: Final = State.OPEN
HALF_CLOSED: Final = State.HALF_CLOSED
HEADERS_TOO_LARGE: Final = 431
REMEMBERED: Final = 4096

Told = Callable[[ConnectionFault | StreamFault], None]


class Connection:
    """The server's side of one connection.

    `receive` what came, write what `take` returns until it returns nothing, `tick` about twice a second, and
    `lose` it when the socket is gone. Calls are made by `methods` and told of everything within these calls.

    What a peer does wrong ends the stream or the connection with the code of RFC 9113, and is told to
    `told`; nothing is raised.

    Attributes:
        fault: what the connection ended by.
        over: nothing more is received; what `take` returns is the last to be written.
        out: what is to be written.
    """

    __slots__ = (
        "_blocks",
        "_control",
        "_floods",
        "_gone",
        "_handlers",
        "_heads",
        "_heard_at",
        "_limits",
        "_methods",
        "_now",
        "_patience",
        "_preface_done",
        "_rest",
        "_slots",
        "_steady",
        "_streams",
        "_told",
        "_unreturned",
        "_window_half",
        "fault",
        "out",
        "over",
    )

    def __init__(
        self,
        methods: Methods,
        limits: Http2Limits,
        account: Account,
        streams: Account,
        now: float,
        told: Told = lambda fault: None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """`account`: for bytes held. `streams`: for streams open in the process.

        `flush` is called when a call has sent something at a time of its own.
        """
        self._methods = methods
        self._limits = limits
        self._slots = streams
        self._told = told
        self._now = self._heard_at = now
        self._streams: dict[int, Stream] = {}
        self._gone: dict[int, State] = {}
        self._heads = HeadReader(FieldDecoder(limits.header_list_bytes))
        self._blocks = HeaderBlocks(limits)
        self._unreturned = 0
        self._window_half = limits.connection_window_bytes // 2
        self._rest = b""
        self._preface_done = False
        self._steady = False
        self.fault: ConnectionFault | None = None
        self.over = False
        self.out = Outgoing(account, limits.output_bytes, flush)
        self.out.parts += greeting(limits)
        self._floods = Floods(limits, now)
        self._patience = Patience(limits, self.out, self._streams, now)
        self._control = Control(self.out, self._floods, self._patience, self._streams)
        self._handlers = {
            FrameType.DATA: self._stray_data,
            FrameType.HEADERS: self._headers,
            FrameType.PRIORITY: self._control.priority,
            FrameType.RST_STREAM: self._rst_stream,
            FrameType.SETTINGS: self._settings,
            FrameType.PUSH_PROMISE: self._control.push_promise,
            FrameType.PING: self._control.ping,
            FrameType.GOAWAY: self._control.goaway,
            FrameType.WINDOW_UPDATE: self._window_update,
            FrameType.CONTINUATION: self._continuation,
        }

    # -- for the transport ---------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """How many are open."""
        return len(self._streams)

    @property
    def drained(self) -> bool:
        """No stream is open, and none will be: the peer has read that, or had the time to."""
        return not self._streams and self._control.refuse_above < LAST_STREAM_ID

    def receive(self, data: bytes, now: float) -> None:
        """Bytes from the peer, as they come."""
        if self.over:
            return
        self._now = self._heard_at = now
        try:
            self._rest = self._frames(self._rest + data if self._rest else data)
        except ConnectionFault as fault:
            self._fail(fault)

    def take(self) -> bytes:
        """What is to be written now. To be asked again until it is empty, unless the socket is paused."""
        return self.out.take()

    def pause(self) -> None:
        """The socket takes nothing more: what there is to send waits. The transport stops reading, too."""
        self.out.pause(self._now)

    def resume(self) -> None:
        """The socket takes more again."""
        self.out.resume()

    def drain(self) -> None:
        """Tell the peer to open no more streams here. Those on their way are still served."""
        if not self.over:
            self._control.drain(self._now)

    def tick(self, now: float) -> None:
        """Time has passed: deadlines, stalls, silence."""
        if self.over:
            return
        self._now = now
        try:
            self._blocks.check(now)
            self._patience.check(now, self._heard_at)
            self._control.tick(now)
        except ConnectionFault as fault:
            self._fail(fault)

    def lose(self) -> None:
        """The socket is gone."""
        if not self.over:
            self.over = True
            self._end_all(Ending.LOST)

    # -- frames --------------------------------------------------------------------------------------

    def _frames(self, data: bytes) -> bytes:
        """Handle every whole frame; returns the rest."""
        at, end = 0, len(data)
        if not self._preface_done:
            if not data.startswith(PREFACE[:end]):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 only")
            if end < len(PREFACE):
                return data
            self._preface_done = True
            at = len(PREFACE)
        while end - at >= FRAME_HEAD_BYTES:
            word, flags, stream_id = FRAME_HEAD.unpack_from(data, at)
            size = word >> 8
            if size > LEAST_MAX_FRAME_BYTES:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, f"frame of {size} bytes, above {LEAST_MAX_FRAME_BYTES}"
                )
            at += FRAME_HEAD_BYTES
            if at + size > end:
                return data[at - FRAME_HEAD_BYTES :]
            kind = word & 0xFF
            if kind == DATA and self._steady:
                self._data(stream_id & 0x7FFFFFFF, flags, data, at, at + size)
            else:
                self._frame(kind, flags, stream_id & 0x7FFFFFFF, data[at : at + size])
            at += size
        return data[at:]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Any frame but DATA for a stream that is open."""
        if not self._patience.settings_came and (kind != FrameType.SETTINGS or flags & ACK):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if self._blocks.open and kind != FrameType.CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block must be continued first")
        handler = self._handlers.get(kind)  # type: ignore[call-overload]
        if handler is None:
            self._floods.count(Flood.EMPTY_FRAMES, self._now)
            return
        self._control.now = self._now
        try:
            handler(flags, stream_id, payload)
        except StreamFault as fault:
            self._reset(stream_id, fault)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._control.settings(flags, stream_id, payload)
        self._steady = True

    def _data(self, stream_id: int, flags: int, data: bytes, at: int, stop: int) -> None:
        size = stop - at
        self._unreturned += size
        if self._unreturned > self._window_half:
            self._give_back_connection()
        stream = self._streams.get(stream_id)
        if stream is None or stream.state is not OPEN:
            self._frame(DATA, flags, stream_id, data[at:stop])
            return
        stream.window -= size
        stream.unreturned += size
        if flags & END_STREAM:
            stream.state = HALF_CLOSED  # before the call hears of it, and may answer: then both have ended
        try:
            if stream.window < 0:
                raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the stream's window")
            if not stream.direct or flags > END_STREAM or size < MESSAGE_HEAD_BYTES:
                self._odd_data(stream, flags, data[at:stop])
            elif MESSAGE_HEAD.unpack_from(data, at) == (0, size - MESSAGE_HEAD_BYTES):
                stream.call.received(data[at + MESSAGE_HEAD_BYTES : stop])  # the usual case by far
            else:
                stream.take_pieces(data[at:stop])
            if flags & END_STREAM:
                stream.half_close()
        except StreamFault as fault:
            self._reset(stream_id, fault)
            return
        if stream.unreturned > stream.window_half:
            stream.give_back()

    def _stray_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._misplaced(FrameType.DATA, stream_id, self._streams.get(stream_id))
        if not payload and not flags & END_STREAM:
            self._floods.count(Flood.EMPTY_FRAMES, self._now)

    def _odd_data(self, stream: Stream, flags: int, payload: bytes) -> None:
        """DATA that may be padded, too short for a message, in the midst of one, or not wanted."""
        payload = unpadded(flags, payload)
        if not payload and not flags & END_STREAM:
            self._floods.count(Flood.EMPTY_FRAMES, self._now)
        if stream.content_left is not None:
            stream.content_left -= len(payload)
            if stream.content_left < 0:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "more DATA than content-length says")
        if payload and stream.reading:
            stream.take_pieces(payload)

    # -- header blocks -------------------------------------------------------------------------------

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._blocks.begin(flags, stream_id, payload, self._now)
        self._steady = block is not None
        if block is not None:
            self._block_complete(block)

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._blocks.go_on(flags, stream_id, payload)
        self._steady = block is not None
        if block is not None:
            self._block_complete(block)

    def _block_complete(self, block: HeaderBlock) -> None:
        """The block is always decoded, whatever becomes of it, so that the header tables stay in step."""
        stream = self._streams.get(block.stream_id)
        if stream is None and self._is_idle(block.stream_id):
            self._request(block)
            return
        fault: StreamFault | None = None
        try:
            self._heads.trailers(block.fragments)
        except StreamFault as error:
            fault = error
        except FieldsTooLarge as error:
            fault = StreamFault(ErrorCode.ENHANCE_YOUR_CALM, f"trailers: {error}")
        if stream is None or stream.state is not OPEN:
            if fault is not None:  # it was decoded, however costly that was
                self._floods.count(Flood.FAULTS, self._now, fault.text)
            self._misplaced(FrameType.HEADERS, block.stream_id, stream)
            return
        if fault is None and block.depends_on == block.stream_id:
            fault = StreamFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
        if fault is None and not block.ends_stream:
            fault = StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
        if fault is not None:
            raise fault
        stream.half_close()

    def _request(self, block: HeaderBlock) -> None:
        stream_id = block.stream_id
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "clients open streams of odd numbers")
        self._control.last_id = stream_id
        head: RequestHead | None = None
        try:
            head = self._heads.request(block.fragments)
            if block.depends_on == stream_id:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
            check_grpc(head)
            make = find_method(self._methods, head.path)
        except CallFault as fault:
            self._answer_fault(block, fault)
        except HttpFault as fault:
            self._refuse(block, head, fault.http_status, fault.text)
        except FieldsTooLarge as fault:
            self._floods.count(Flood.FAULTS, self._now, str(fault))  # costly to decode
            self._refuse(block, head, HEADERS_TOO_LARGE, str(fault))
        else:
            self._serve(block, head, make)

    def _serve(self, block: HeaderBlock, head: RequestHead, make: Callable[[Peer], Call]) -> None:
        stream = self._open(block, gzip=head.encoding == "gzip")
        stream.content_left = head.content_length
        if head.timeout_s is not None:
            self._patience.expect(stream, self._now + head.timeout_s)
        stream.begin(make(stream))
        if block.ends_stream:
            stream.half_close()

    def _answer_fault(self, block: HeaderBlock, fault: CallFault) -> None:
        """A whole answer in one frame, without a stream to remember."""
        stream_id = block.stream_id
        encodings = fault.status is Status.UNIMPLEMENTED
        self.out.headers(
            stream_id, blocks.trailers_only(fault.status, fault.details, encodings=encodings), end=True
        )
        if block.ends_stream:
            self._remember(stream_id, State.ENDED)
        else:
            self.out.parts.append(rst_stream(stream_id, ErrorCode.NO_ERROR))
            self._remember(stream_id, State.CUT)

    def _refuse(self, block: HeaderBlock, head: RequestHead | None, http_status: int, text: str) -> None:
        """No call of gRPC: it gets a plain answer once its body has passed unread."""
        body = f"{text}\n".encode()
        stream = self._open(block, gzip=False)
        stream.content_left = head.content_length if head is not None else None
        wanted = b"" if head is not None and head.method == "HEAD" else body
        stream.refusal = (blocks.plain(http_status, len(body)), wanted)
        stream.partial = True
        if block.ends_stream:
            stream.half_close()

    # -- streams -------------------------------------------------------------------------------------

    def _open(self, block: HeaderBlock, *, gzip: bool) -> Stream:
        limits = self._limits
        if block.stream_id > self._control.refuse_above or len(self._streams) >= limits.streams:
            raise StreamFault(ErrorCode.REFUSED_STREAM, "no more streams here")
        reader = MessageReader(limits.message_bytes, gzip)
        stream = Stream(block.stream_id, self.out, limits.stream_window_bytes, reader, self._stream_over)
        if not self._slots.take(1):
            raise StreamFault(ErrorCode.REFUSED_STREAM, "no more streams in this process")
        self._streams[block.stream_id] = stream
        return stream

    def _stream_over(self, stream: Stream, ending: Ending) -> None:
        """The stream has left the states in which it lives."""
        del self._streams[stream.id]
        self._slots.give(1)
        self._remember(stream.id, stream.state)
        stream.call.ended(ending)

    def _remember(self, stream_id: int, state: State) -> None:
        gone = self._gone
        gone[stream_id] = state
        if len(gone) > max(REMEMBERED, self._limits.streams):  # those that the peer may still think open
            del gone[next(iter(gone))]

    def _misplaced(self, kind: FrameType, stream_id: int, stream: Stream | None) -> None:
        """A frame for a stream that is not open. Raises StreamFault, ConnectionFault."""
        if stream is not None:
            state = stream.state
        elif self._is_idle(stream_id):
            state = State.IDLE
        else:
            state = self._gone.get(stream_id, State.FORGOTTEN)
        judge(state, kind, stream_id)

    def _is_idle(self, stream_id: int) -> bool:
        return stream_id > self._control.last_id or not stream_id & 1

    def _reset(self, stream_id: int, fault: StreamFault) -> None:
        """Our answer to what a peer did wrong on one stream."""
        self._told(fault)
        if fault.code is ErrorCode.REFUSED_STREAM:
            self._floods.count(Flood.EARLY_RESETS, self._now)
        else:
            self._floods.count(Flood.FAULTS, self._now, fault.text)
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.cut(fault.code, Ending.BROKEN)
            return
        if self._is_idle(stream_id):  # RST_STREAM is not allowed there
            raise ConnectionFault(fault.code, fault.text)
        self.out.parts.append(rst_stream(stream_id, fault.code))
        self._remember(stream_id, State.CUT)

    def _end_all(self, ending: Ending) -> None:
        for stream in list(self._streams.values()):
            stream.leave(State.CUT, ending)

    def _fail(self, fault: ConnectionFault) -> None:
        self.fault = fault
        self.over = True
        self._told(fault)
        self._end_all(Ending.LOST if fault.code is ErrorCode.NO_ERROR else Ending.BROKEN)
        last_id = min(self._control.last_id, self._control.refuse_above)
        self.out.parts.append(goaway(last_id, fault.code, fault.text))

    # -- windows -------------------------------------------------------------------------------------

    def _give_back_connection(self) -> None:
        """What came is held by calls and charged to the account; the connection itself holds nothing.

        So the peer always has half its window or more, and no frame is too large for it.
        """
        self.out.parts.append(window_update(0, self._unreturned))
        self._unreturned = 0

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not of four bytes")
        self._floods.count(Flood.WINDOW_UPDATES, self._now)
        increment = number(payload)
        if not stream_id:
            if not increment:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            if not self.out.grant(increment):
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is above 2^31-1")
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            self._misplaced(FrameType.WINDOW_UPDATE, stream_id, None)
            return
        if not increment:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
        if not stream.grant(increment):
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is above 2^31-1")

    def _rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is not of four bytes")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._misplaced(FrameType.RST_STREAM, stream_id, None)
            if self._gone.get(stream_id) in (State.ENDED, State.CUT):
                # Proxies end every stream so, often before they have read our trailers.
                self._gone[stream_id] = State.RESET
            else:
                self._floods.count(Flood.EMPTY_FRAMES, self._now)
            return
        if not stream.started:
            self._floods.count(Flood.EARLY_RESETS, self._now)
        stream.leave(State.RESET, Ending.RESET)
