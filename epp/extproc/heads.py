"""What is read from the headers of a request and of its answer."""

from collections.abc import Callable
from typing import Final, NamedTuple

from epp import names
from epp.extproc.records import Headers

DEFAULT_PATH: Final = "/v1/completions"
CONTENT_LENGTH: Final = "content-length"

PATH_FALLBACKS: Final = ("x-original-path", "x-forwarded-path")
STRIPPED: Final = names.CONTROL_HEADERS - {names.DESTINATION_ENDPOINT}
SWITCHING_PROTOCOLS: Final = 101


class RequestHead(NamedTuple):
    """What routing and the reply need of a request's headers.

    Attributes:
        headers: without pseudo headers, as `RawRequest.headers`.
        made_id: whether `request_id` was made here and must be added to the request.
        control: control headers present, to be removed; without the destination, which is overwritten.
        has_length: whether the client sent `content-length`.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    request_id: str
    made_id: bool
    control: tuple[str, ...]
    has_length: bool


class AnswerHead(NamedTuple):
    """What reading an answer needs of its headers. `status` is 0 where there is none that is a number."""

    status: int
    content_type: str
    content_encoding: str
    has_length: bool

    @property
    def informational(self) -> bool:
        """A 1xx answer that another one follows."""
        return 100 <= self.status < 200 and self.status != SWITCHING_PROTOCOLS


def read_request_head(headers: Headers, bodyless: bool, new_request_id: Callable[[], str]) -> RequestHead:
    """`bodyless` stands in for a missing `:method`: GET without a body, POST with one."""
    method = "GET" if bodyless else "POST"
    path = request_id = ""
    plain = []
    control = []
    has_length = False
    for name, raw in headers:
        value = text(raw)
        if name[:1] == ":":
            if name == ":method":
                method = value
            elif name == ":path":
                path = value
            continue
        plain.append((name, value))
        if name == names.REQUEST_ID:
            request_id = value
        elif name in STRIPPED:
            if name not in control:
                control.append(name)
        elif name == CONTENT_LENGTH:
            has_length = True
    made_id = not request_id
    return RequestHead(
        method=method,
        path=path or _path_from(plain),
        headers=tuple(plain),
        request_id=new_request_id() if made_id else request_id,
        made_id=made_id,
        control=tuple(control),
        has_length=has_length,
    )


def read_answer_head(headers: Headers) -> AnswerHead:
    status = 0
    content_type = content_encoding = ""
    has_length = False
    for name, raw in headers:
        if name == ":status":
            status = int(raw) if raw.isdigit() and len(raw) <= 3 else 0
        elif name == "content-type":
            content_type = text(raw)
        elif name == "content-encoding":
            content_encoding = text(raw)
        elif name == CONTENT_LENGTH:
            has_length = True
    return AnswerHead(status, content_type, content_encoding, has_length)


def text(raw: bytes) -> str:
    """A header value as str: UTF-8 where it is, else one character a byte. Never fails."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _path_from(headers: list[tuple[str, str]]) -> str:
    for wanted in PATH_FALLBACKS:
        for name, value in headers:
            if name == wanted and value:
                return value
    return DEFAULT_PATH
