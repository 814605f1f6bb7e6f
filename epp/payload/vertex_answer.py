"""An answer of Vertex AI's gRPC API followed as it passes, and the client's model name put back into it."""

from google.protobuf.message import DecodeError

from epp.payload.answer import AnswerReader
from epp.payload.framed import FramedAnswer, framed
from epp.payload.kept import Account
from epp.payload.records import Api, Usage
from epp.payload.sse import BYTE_ORDER_MARK
from epp.payload.vertex import CARRIED
from epp.wire.vertex_pb2 import HttpBody

_EVENTS, _JSON, _OTHER = "text/event-stream", "application/json", "application/octet-stream"
_BEFORE_TEXT = BYTE_ORDER_MARK + b" \t\r\n"
_FIELDS_OF_EVENTS = (b"data:", b"event:", b"id:", b"retry:", b":")
_DATA, _END = b"data: ", b"\n\n"


class VertexAnswerReader(FramedAnswer):
    """Follows messages of `google.api.HttpBody`, whose data is an answer of the API that the request carried.

    The data is a stream of events, cut anywhere; a JSON document, cut anywhere; or, where the client asked
    for a stream, a whole event in each message without the words around it. The first data tells which.

    Where the model is renamed, every message is held back until it is whole, and comes out as one message,
    without the part of an event that the next one completes; the others pass as they come.

    Attributes:
        streaming: the client asked for a stream.
        events: events that have passed; of what cannot be read, messages. 0 for a JSON document.
    """

    __slots__ = ("_each", "_form", "_inner", "_passed", "_renames", "_unary")

    def __init__(
        self, api: Api, model: str, target_model: str, streaming: bool, account: Account | None = None
    ) -> None:
        """As `AnswerReader`; `api` is of Vertex."""
        super().__init__(streaming, account)
        self._inner = AnswerReader(CARRIED[api], model, target_model, account)
        self._unary = api is Api.VERTEX_RAW_PREDICT
        self._form = ""
        self._each = False
        self._renames = False
        self._passed: list[bytes] = []

    def begin(self, status: int, content_type: str, content_encoding: str) -> bool:
        super().begin(status, content_type, content_encoding)
        self._renames = self._reads and self._inner.begin(status, _EVENTS, "")
        return self._renames

    @property
    def usage(self) -> Usage | None:
        return self._inner.usage

    def feed(self, chunk: bytes, last: bool) -> bytes:
        if not self._renames:
            return super().feed(chunk, last)
        self._take(chunk)
        passed = b"".join(self._passed)
        self._passed.clear()
        return passed + self.finish() if last else passed

    def finish(self) -> bytes:
        """What is still held: the beginning of an event, in a message of its own, and that of a message."""
        held, rest = self._closed(), bytes(self._partial)
        self.release()
        return held + rest if self._renames else b""

    def release(self) -> None:
        super().release()
        self._inner.release()

    def _read(self, compressed: int, message: bytes) -> None:
        body = None if compressed else _http_body(message)
        if body is None:
            self.events += 1
            self.first_token = True
            self._pass(framed(message, compressed))
            return
        data = body.data
        passed = self._followed(body.content_type, data) if data else data
        if not self._renames:
            return
        if passed != data:
            body.data = passed
            message = body.SerializeToString()
        self._passed.append(framed(message))

    def _followed(self, content_type: bytes, data: bytes) -> bytes:
        """The data as the client gets it."""
        inner = self._inner
        if not self._form and not self._begin_data(content_type, data):
            return data
        before = inner.events
        if self._each:
            line = data.replace(b"\r", b" ").replace(b"\n", b" ")  # between tokens: no string holds one
            passed = inner.feed(b"%b%b%b" % (_DATA, line, _END), False)[len(_DATA) : -len(_END)]
            passed = data if passed == line else passed
        else:
            passed = inner.feed(data, self._unary)
        self.events += inner.events - before
        self.first_token |= inner.first_token
        return passed

    def _begin_data(self, content_type: bytes, data: bytes) -> bool:
        """Whether the first data tells what it is."""
        text = data.lstrip(_BEFORE_TEXT)
        media_type = content_type.partition(b";")[0].strip().lower()
        if text.startswith((b"{", b"[")):
            self._each = self.streaming and not self._unary
            self._form = _EVENTS if self._each else _JSON
        elif media_type == _EVENTS.encode() or text.startswith(_FIELDS_OF_EVENTS):
            self._form = _EVENTS
        elif text:
            self._form = _OTHER
        else:
            return False
        self._inner.begin(200, self._form, "")
        return True

    def _pass(self, unread: bytes) -> None:
        """It passes behind what is held; what follows it is read anew."""
        held = self._closed()
        if self._form:
            self._inner.begin(200, self._form, "")
        if self._renames:
            self._passed += (held, unread)

    def _closed(self) -> bytes:
        """What is held of an event, as a message."""
        inner = self._inner
        before = inner.events
        held = inner.finish()
        self.events += inner.events - before
        return framed(HttpBody(data=held).SerializeToString()) if held else b""


def _http_body(message: bytes) -> HttpBody | None:
    """None: it is none."""
    try:
        return HttpBody.FromString(message)
    except DecodeError:
        return None
