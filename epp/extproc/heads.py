"""What is read from the headers of a request and of its answer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from epp import names
from epp.extproc.orca import read_load
from epp.extproc.records import Headers
from epp.pool.records import LoadReport

DEFAULT_PATH: Final = "/v1/completions"
CONTENT_LENGTH: Final = "content-length"

PATH_FALLBACKS: Final = ("x-original-path", "x-forwarded-path")
STRIPPED: Final = names.CONTROL_HEADERS - {names.DESTINATION_ENDPOINT}
SWITCHING_PROTOCOLS: Final = 101
GRPC_CONTENT: Final = "application/grpc"

STATUS_OF_GRPC: Final[Mapping[bytes, int]] = MappingProxyType(
    {
        b"1": 499,
        b"2": 500,
        b"3": 400,
        b"4": 504,
        b"5": 404,
        b"6": 409,
        b"7": 403,
        b"8": 429,
        b"9": 400,
        b"10": 409,
        b"11": 400,
        b"12": 501,
        b"13": 500,
        b"14": 503,
        b"15": 500,
        b"16": 401,
    }
)
"""The HTTP status that stands for a gRPC status code (`google/rpc/code.proto`)."""


class RequestHead(NamedTuple):
    """What routing and the reply need of a request's headers.

    Attributes:
        headers: without pseudo headers, as `RawRequest.headers`.
        made_id: whether `request_id` was made here and must be added to the request.
        control: control headers present, to be removed; without the destination, which is overwritten.
        has_length: whether the client sent `content-length`.
        speaks_grpc: whether the client expects a gRPC status.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    request_id: str
    made_id: bool
    control: tuple[str, ...]
    has_length: bool
    speaks_grpc: bool


class AnswerHead(NamedTuple):
    """What reading an answer needs of its headers. `status` (0: none) and `load` as in `AnswerHeaders`."""

    status: int
    content_type: str
    content_encoding: str
    has_length: bool
    load: LoadReport | None

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
    has_length = speaks_grpc = False
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
        elif name == "content-type":
            speaks_grpc = is_grpc(value)
    made_id = not request_id
    return RequestHead(
        method=method,
        path=path or _path_from(plain),
        headers=tuple(plain),
        request_id=new_request_id() if made_id else request_id,
        made_id=made_id,
        control=tuple(control),
        has_length=has_length,
        speaks_grpc=speaks_grpc,
    )


def read_answer_head(headers: Headers) -> AnswerHead:
    status = 0
    content_type = content_encoding = ""
    grpc_status = b""
    load = None
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
        elif name == "grpc-status":
            grpc_status = raw
        elif name == names.ENDPOINT_LOAD_METRICS or name == names.ENDPOINT_LOAD_METRICS_BIN:
            load = read_load(name, raw) or load
    if grpc_status and is_grpc(content_type):
        status = STATUS_OF_GRPC.get(grpc_status, status)
    return AnswerHead(status, content_type, content_encoding, has_length, load)


def is_grpc(content_type: str) -> bool:
    """Whether a proxy takes a request or answer of this type for gRPC (and not, say, for gRPC-Web)."""
    return content_type == GRPC_CONTENT or content_type.startswith(GRPC_CONTENT + "+")


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
