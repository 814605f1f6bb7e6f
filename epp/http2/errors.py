"""What a peer can do wrong, by how far it reaches. They do not leave this room but for `epp.http2` itself."""

from epp.http2.codes import ErrorCode, Status


class ConnectionFault(Exception):
    """The connection cannot go on: GOAWAY with `code`, and `text` as its debug data."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.text = text


class StreamFault(Exception):
    """One stream is broken, others go on: RST_STREAM with `code`. `text` is for the log."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.text = text


class CallFault(Exception):
    """HTTP/2 is in order, the gRPC call is not: it ends with this status and details."""

    def __init__(self, status: Status, details: str) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status
        self.details = details


class HttpFault(Exception):
    """A request, but none of gRPC: it is answered with this HTTP status and text, for people to read."""

    def __init__(self, http_status: int, text: str) -> None:
        super().__init__(f"{http_status}: {text}")
        self.http_status = http_status
        self.text = text
