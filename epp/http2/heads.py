"""What the header block of a request says to a gRPC server, once it is known to be well-formed.

RFC 9113, 8.2 and 8.3 (which fields may come, and how), gRPC over HTTP/2 (what they mean). Proxies send the
same fields again and again, so whatever was found right is remembered: a field by itself, and the head that
fields make.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

from epp.http2.codes import ErrorCode, Status
from epp.http2.errors import CallFault, HttpFault, StreamFault
from epp.http2.fields import Field, FieldDecoder

IDENTITY: Final = "identity"
GZIP: Final = "gzip"
ENCODINGS: Final = (IDENTITY, GZIP)

NAMES_KEPT: Final = 64
NAME_KEPT_BYTES: Final = 64
FIELDS_KEPT: Final = 256
FIELD_KEPT_BYTES: Final = 512
HEADS_KEPT: Final = 64
HEAD_KEPT_BYTES: Final = 2048

_SHOWN_BYTES: Final = 64

# A token (RFC 9110, 5.6.2), without upper-case letters where it names a field (RFC 9113, 8.2.1).
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# No control characters but tabs; no blanks around it (RFC 9110, 5.5).
_VALUE: Final = re.compile(rb"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")

_AUTHORITY: Final = re.compile(rb'[!-"$-.0->A-~]*')

# Fields whose value has a form of its own, and what to tell of it. Each lets through only what _VALUE does.
_FORMS: Final = {
    b":method": _TOKEN,
    b":scheme": re.compile(rb"[A-Za-z][A-Za-z0-9+\-.]*"),
    b":path": re.compile(rb'/[!-"$-~]*|\*'),
    b":authority": _AUTHORITY,
    b"host": _AUTHORITY,
    b"te": re.compile(rb"trailers", re.IGNORECASE),
    b"content-length": re.compile(rb"[0-9]{1,18}"),
}
_RIGHT: Final = {
    b":method": "a method",
    b":scheme": "a scheme",
    b":path": "a path that begins with / (or is *, for OPTIONS)",
    b":authority": "host and port, without user, path or blanks",
    b"host": "host and port, without user, path or blanks",
    b"te": "trailers, the only value in HTTP/2",
    b"content-length": "a number of bytes",
}
_PSEUDO: Final = frozenset(name for name in _FORMS if name.startswith(b":"))
# RFC 9113, 8.2.2: these speak of a connection of HTTP/1.1.
_CONNECTION_SPECIFIC: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_MATTERING: Final = _PSEUDO | {b"host", b"content-type", b"content-length", b"grpc-encoding", b"grpc-timeout"}
# Stands for the first field that does not matter: where it stands, no pseudo-header may follow.
_ANOTHER: Final = (b"", b"")

_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

_CONTENT_TYPE: Final = re.compile(r"application/grpc(?:\+proto)?[ \t]*(?:;.*)?", re.IGNORECASE)
_SPOKEN: Final = "This port speaks gRPC over HTTP/2: POST with content-type application/grpc"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a gRPC server looks at.

    Attributes:
        scheme, path: empty for CONNECT, which has neither.
        authority: `:authority`, or else `host`.
        content_type: as sent; empty where it is missing.
        timeout_s: None where the client sets no deadline.
        encoding: of the request's messages that are marked as compressed.
        content_length: of the whole body, as announced.
    """

    method: str
    scheme: str
    path: str
    authority: str
    content_type: str
    timeout_s: float | None
    encoding: str
    content_length: int | None


class HeadReader:
    """Heads and trailers of the requests of one connection, in the order of their header blocks.

    Every block is decoded wholly before it is judged: one that is refused leaves the tables of HPACK in step.
    """

    __slots__ = ("_decoder", "_forms", "_heads", "_notes")

    def __init__(self, decoder: FieldDecoder) -> None:
        self._decoder = decoder
        self._forms = dict(_FORMS)  # names found right, and the form of their values
        self._notes: dict[Field, bool] = {}  # fields found right, and whether they matter
        self._heads: dict[tuple[Field, ...], RequestHead] = {}

    def request(self, block: bytes) -> RequestHead:
        """The head of a request.

        Raises:
            ConnectionFault, FieldsTooLarge: as `FieldDecoder.decode` does.
            StreamFault: PROTOCOL_ERROR; the request is malformed.
            CallFault: INTERNAL; it is well-formed, but for its `grpc-timeout`.
        """
        fields = self._decoder.decode(block)
        head = self._heads.get(fields)
        return self._judged(fields) if head is None else head

    def trailers(self, block: bytes) -> None:
        """Trailers of a request; a gRPC server has no use for what they say.

        Raises: as `request` does, but for CallFault.
        """
        for field in self._decoder.decode(block):
            if field[0].startswith(b":"):
                raise _malformed(f"pseudo-header {_shown(field[0])} in trailers")
            if field not in self._notes:
                self._checked(field)

    def _judged(self, fields: tuple[Field, ...]) -> RequestHead:
        """Fields are checked one by one, unless they were before; those that matter make the head."""
        notes = self._notes
        mattering: list[Field] = []
        others = any_new = False
        for field in fields:
            matters = notes.get(field)
            if matters is None:
                matters = self._checked(field)
                any_new = True
            if matters:
                mattering.append(field)
            elif not others:
                mattering.append(_ANOTHER)
                others = True
        key = tuple(mattering)
        head = self._heads.get(key)
        if head is None:
            head = _head(key)
            self._remember(key, head)
        if not any_new:  # with a field that is new each time, all fields together will not come again
            self._remember(fields, head)
        return head

    def _checked(self, field: Field) -> bool:
        """Check a field by itself; whether it matters."""
        name, value = field
        form = self._forms.get(name) or self._form(name)
        if form.fullmatch(value) is None:
            right = _RIGHT.get(name, "a value without control characters and blanks around it")
            raise _malformed(f"{name[:_SHOWN_BYTES].decode()}: {_shown(value)} is not {right}")
        matters = name in _MATTERING
        if len(name) + len(value) <= FIELD_KEPT_BYTES:
            if len(self._notes) == FIELDS_KEPT:
                self._notes.clear()
            self._notes[field] = matters
        return matters

    def _form(self, name: bytes) -> "re.Pattern[bytes]":
        """Check a name that is not known yet; the form of its values."""
        _check_name(name)
        if len(self._forms) < NAMES_KEPT and len(name) <= NAME_KEPT_BYTES:
            self._forms[name] = _VALUE
        return _VALUE

    def _remember(self, fields: tuple[Field, ...], head: RequestHead) -> None:
        if sum(map(len, chain.from_iterable(fields))) <= HEAD_KEPT_BYTES:
            if len(self._heads) == HEADS_KEPT:
                self._heads.clear()
            self._heads[fields] = head


def check_grpc(head: RequestHead) -> None:
    """Judge a request as a call of gRPC.

    Raises:
        HttpFault: 405 or 415; this is no call of gRPC. The text is for whoever points a browser at the port.
        CallFault: UNIMPLEMENTED; its messages may come compressed in a way that is not known here.
    """
    if head.method != "POST":
        raise HttpFault(405, f"{_SPOKEN}. This request is a {head.method[:_SHOWN_BYTES]}.")
    if _CONTENT_TYPE.fullmatch(head.content_type) is None:
        given = ascii(head.content_type[:_SHOWN_BYTES]) if head.content_type else "missing"
        raise HttpFault(415, f"{_SPOKEN}. The content-type of this request is {given}.")
    if head.encoding not in ENCODINGS:
        given, known = ascii(head.encoding[:_SHOWN_BYTES]), ", ".join(ENCODINGS)
        text = f"grpc-encoding: no decompressor for {given} is installed; supported are {known}"
        raise CallFault(Status.UNIMPLEMENTED, text)


def _check_name(name: bytes) -> None:
    """A name other than those in _FORMS."""
    if name.startswith(b":"):
        known = ", ".join(sorted(pseudo.decode() for pseudo in _PSEUDO))
        raise _malformed(f"pseudo-header {_shown(name)}; a request has {known}")
    if _NAME.fullmatch(name) is None:
        raise _malformed(f"field name {_shown(name)}; right are lower-case letters, digits and some signs")
    if name in _CONNECTION_SPECIFIC:
        raise _malformed(f"field {name.decode()}, which HTTP/2 does not have")


def _head(fields: Iterable[Field]) -> RequestHead:
    """The head that fields make, each of which is right by itself.

    Raises:
        StreamFault: PROTOCOL_ERROR; they are not right together.
        CallFault: INTERNAL; no timeout.
    """
    given = _by_name(fields)
    method = given.get(b":method")
    if method is None:
        raise _malformed("no :method")
    _check_target(method, given)
    authority, host = given.get(b":authority"), given.get(b"host")
    if authority is None:
        if host is None:
            raise _malformed("neither :authority nor host")
        authority = host
    elif host is not None and host.lower() != authority.lower():
        raise _malformed(f"host: {_shown(host)} differs from :authority {_shown(authority)}")
    length = given.get(b"content-length")
    timeout = given.get(b"grpc-timeout")
    return RequestHead(
        method=method.decode(),
        scheme=given.get(b":scheme", b"").decode(),
        path=given.get(b":path", b"").decode(),
        authority=authority.decode("latin-1"),
        content_type=given.get(b"content-type", b"").decode("latin-1"),
        timeout_s=None if timeout is None else _timeout_s(timeout),
        encoding=given.get(b"grpc-encoding", IDENTITY.encode()).decode("latin-1"),
        content_length=None if length is None else int(length),
    )


def _by_name(fields: Iterable[Field]) -> dict[bytes, bytes]:
    """Pseudo-headers come first (RFC 9113, 8.3). None comes twice but the same length (RFC 9110, 8.6)."""
    given: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name not in _PSEUDO:
            regular = True
        elif regular:
            raise _malformed(f"pseudo-header {name.decode()} after other fields")
        if name in given and (name != b"content-length" or given[name] != value):
            raise _malformed(f"{name.decode()} twice, as {_shown(given[name])} and as {_shown(value)}")
        given[name] = value
    return given


def _check_target(method: bytes, given: dict[bytes, bytes]) -> None:
    """What has to come with the method (RFC 9113, 8.3.1 and 8.5)."""
    connect = method == b"CONNECT"
    for name in (b":scheme", b":path"):
        if (name in given) == connect:
            with_it = "with" if connect else "without"
            raise _malformed(f"method {_shown(method)} {with_it} {name.decode()}")
    if connect and b":authority" not in given:  # here `host` is not enough
        raise _malformed("method CONNECT without :authority")
    if given.get(b":path") == b"*" and method != b"OPTIONS":
        raise _malformed(f":path * with method {_shown(method)}; it is for OPTIONS")


def _timeout_s(value: bytes) -> float:
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        text = f"grpc-timeout: {_shown(value)}; right are 1 to 8 digits and a unit, one of H M S m u n"
        raise CallFault(Status.INTERNAL, text)
    return int(match[1]) * _UNIT_S[match[2]]


def _malformed(text: str) -> StreamFault:
    return StreamFault(ErrorCode.PROTOCOL_ERROR, f"malformed request: {text}")


def _shown(text: bytes) -> str:
    """Quoted, escaped and not too long."""
    return repr(text[:_SHOWN_BYTES])[1:]
