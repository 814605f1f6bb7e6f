"""Heads of requests: what is malformed (RFC 9113, 8), what is no gRPC, and what is left of the rest."""

import hpack
import pytest

from epp.http2.codes import ErrorCode, Status
from epp.http2.errors import CallFault, ConnectionFault, HttpFault, StreamFault
from epp.http2.fields import Field, FieldDecoder, FieldsTooLarge
from epp.http2.heads import (
    FIELD_KEPT_BYTES,
    FIELDS_KEPT,
    HEAD_KEPT_BYTES,
    HEADS_KEPT,
    NAMES_KEPT,
    HeadReader,
    RequestHead,
    check_grpc,
)

METHOD, SCHEME = (b":method", b"POST"), (b":scheme", b"http")
PATH, AUTHORITY = (b":path", b"/package.Service/Method"), (b":authority", b"picker:9002")
PSEUDO = [METHOD, SCHEME, PATH, AUTHORITY]
GRPC = (b"content-type", b"application/grpc")
ENVOY = [*PSEUDO, (b"te", b"trailers"), GRPC, (b"x-envoy-internal", b"true"), (b"x-forwarded-for", b"::1")]
PLAIN = RequestHead(
    method="POST",
    scheme="http",
    path="/package.Service/Method",
    authority="picker:9002",
    content_type="application/grpc",
    timeout_s=None,
    encoding="identity",
    content_length=None,
)


class Connection:
    """A client's encoder and the reader at the other end."""

    def __init__(self, list_bytes: int = 32 * 1024) -> None:
        self.encoder = hpack.Encoder()
        self.reader = HeadReader(FieldDecoder(list_bytes))

    def request(self, fields: list[Field]) -> RequestHead:
        return self.reader.request(self.encoder.encode(fields))

    def trailers(self, fields: list[Field]) -> None:
        self.reader.trailers(self.encoder.encode(fields))


def head(*fields: Field) -> RequestHead:
    return Connection().request([*PSEUDO, *fields])


def changed(**changes: object) -> RequestHead:
    values = {name: getattr(PLAIN, name) for name in RequestHead.__slots__}
    return RequestHead(**{**values, **changes})


def test_what_envoy_sends() -> None:
    connection = Connection()
    for _ in range(3):
        assert connection.request(ENVOY) == PLAIN


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ((b"grpc-timeout", b"250m"), {"timeout_s": 0.25}),
        ((b"grpc-encoding", b"gzip"), {"encoding": "gzip"}),
        ((b"content-length", b"0"), {"content_length": 0}),
        ((b"content-length", b"00123"), {"content_length": 123}),
        ((b"host", b"PICKER:9002"), {}),
        ((b"te", b"Trailers"), {}),
        ((b"x-empty", b""), {}),
        ((b"x-blank-within", b"a \t b"), {}),
        ((b"x-latin", b"caf\xe9 \xff"), {}),
        ((b"!#$%&'*+-.^_`|~09az", b"odd, but a token"), {}),
    ],
)
def test_fields(field: Field, changes: dict[str, object]) -> None:
    assert head(GRPC, field) == changed(**changes)


def test_length_may_be_said_twice() -> None:
    assert head((b"content-length", b"7"), (b"content-length", b"7")).content_length == 7


def test_missing_fields() -> None:
    assert head() == changed(content_type="")
    assert Connection().request([METHOD, SCHEME, PATH, (b"host", b"a")]).authority == "a"


def test_other_methods_and_targets() -> None:
    options = Connection().request([(b":method", b"OPTIONS"), SCHEME, (b":path", b"*"), AUTHORITY])
    assert (options.method, options.path) == ("OPTIONS", "*")
    connect = Connection().request([(b":method", b"CONNECT"), AUTHORITY])
    assert (connect.method, connect.scheme, connect.path) == ("CONNECT", "", "")


MALFORMED: list[tuple[list[Field], str]] = [
    # names
    ([*PSEUDO, (b"X-Upper", b"a")], "field name 'X-Upper'"),
    ([*PSEUDO, (b"", b"a")], "field name ''"),
    ([*PSEUDO, (b"a b", b"a")], "field name 'a b'"),
    ([*PSEUDO, (b"a:b", b"a")], "field name 'a:b'"),
    ([*PSEUDO, (b"a\x00", b"a")], r"field name 'a\\x00'"),
    ([*PSEUDO, (b"a\n", b"a")], r"field name 'a\\n'"),
    ([*PSEUDO, (b"caf\xe9", b"a")], r"field name 'caf\\xe9'"),
    ([*PSEUDO, (b"a\x7f", b"a")], "field name"),
    ([*PSEUDO, (b"(a)", b"a")], "field name"),
    # values
    *(([*PSEUDO, (b"a", b"x" + bytes([byte]) + b"y")], "control characters") for byte in (0, 10, 13, 1, 127)),
    *(([*PSEUDO, (b"a", value)], "blanks around") for value in (b" a", b"a ", b"\ta", b"a\t", b" ", b"\t")),
    ([*PSEUDO, (b"a", b"a\n")], "control characters"),
    ([*PSEUDO, (b"content-type", b"application/grpc ")], "content-type: 'application/grpc '"),
    # pseudo-headers
    ([*PSEUDO, (b":status", b"200")], "pseudo-header ':status'"),
    ([*PSEUDO, (b":protocol", b"websocket")], "pseudo-header ':protocol'"),
    ([*PSEUDO, (b":", b"")], "pseudo-header ':'"),
    ([*PSEUDO, (b":Path", b"/")], "pseudo-header ':Path'"),
    ([METHOD, SCHEME, PATH, (b"a", b"b"), AUTHORITY], "pseudo-header :authority after other fields"),
    ([METHOD, SCHEME, PATH, GRPC, AUTHORITY], "pseudo-header :authority after other fields"),
    *(([*PSEUDO, field], f"{field[0].decode()} twice") for field in PSEUDO),
    ([*PSEUDO, (b":path", b"/other")], "'/package.Service/Method' and as '/other'"),
    (PSEUDO[1:], "no :method"),
    ([METHOD, PATH, AUTHORITY], "method 'POST' without :scheme"),
    ([METHOD, SCHEME, AUTHORITY], "method 'POST' without :path"),
    ([METHOD, SCHEME, PATH], "neither :authority nor host"),
    ([], "no :method"),
    ([GRPC], "no :method"),
    # their values
    *(
        ([METHOD, SCHEME, (b":path", path), AUTHORITY], ":path")
        for path in (b"", b"a", b"/a b", b"/a#b", b"*")
    ),
    *(([(b":method", method), SCHEME, PATH, AUTHORITY], ":method") for method in (b"", b"GET /", b"G\x00")),
    *(([METHOD, (b":scheme", scheme), PATH, AUTHORITY], ":scheme") for scheme in (b"", b"1", b"http:")),
    *(
        ([METHOD, SCHEME, PATH, (b":authority", authority)], "host and port, without user")
        for authority in (b"user@host", b"host/path", b"a b", b"host?", b"host#")
    ),
    ([METHOD, SCHEME, PATH, (b"host", b"user@host")], "host: 'user@host' is not host and port"),
    # CONNECT
    ([(b":method", b"CONNECT"), SCHEME, AUTHORITY], "'CONNECT' with :scheme"),
    ([(b":method", b"CONNECT"), PATH, AUTHORITY], "'CONNECT' with :path"),
    ([(b":method", b"CONNECT"), (b"host", b"a")], "CONNECT without :authority"),
    # fields of HTTP/1.1
    *(
        ([*PSEUDO, (name, b"close")], f"field {name.decode()}, which HTTP/2 does not have")
        for name in (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
    ),
    *(([*PSEUDO, (b"te", te)], "not trailers") for te in (b"gzip", b"trailers, deflate", b"", b"trailersx")),
    # contradictions
    *(
        ([*PSEUDO, (b"content-length", n)], "a number of bytes")
        for n in (b"", b"-1", b"1,1", b"x", b"9" * 19)
    ),
    (
        [*PSEUDO, (b"content-length", b"1"), (b"content-length", b"2")],
        "content-length twice, as '1' and as '2'",
    ),
    ([*PSEUDO, (b"host", b"other")], "host: 'other' differs from :authority 'picker:9002'"),
    ([*PSEUDO, (b"host", b"picker:9002"), (b"host", b"picker:9002")], "host twice"),
    ([*PSEUDO, GRPC, GRPC], "content-type twice"),
    ([*PSEUDO, (b"grpc-timeout", b"1S"), (b"grpc-timeout", b"2S")], "grpc-timeout twice"),
]


@pytest.mark.parametrize(("fields", "text"), MALFORMED)
def test_malformed_request_breaks_its_stream_alone(fields: list[Field], text: str) -> None:
    connection = Connection()
    for _ in range(3):  # the second and third time its fields are indexed
        with pytest.raises(StreamFault, match=text) as caught:
            connection.request(fields)
        assert caught.value.code is ErrorCode.PROTOCOL_ERROR
        assert connection.request(ENVOY) == PLAIN


@pytest.mark.parametrize("known", [[*PSEUDO, GRPC], ENVOY])
@pytest.mark.parametrize(("fields", "text"), MALFORMED)
def test_also_where_all_of_its_fields_are_known_to_be_right(
    known: list[Field], fields: list[Field], text: str
) -> None:
    connection = Connection()
    connection.request(known)
    connection.trailers([field for field in ENVOY if not field[0].startswith(b":")])
    connection.trailers([(b"a", b"b"), (b"content-length", b"1"), (b"content-length", b"2")])
    with pytest.raises(StreamFault, match=text):
        connection.request(fields)


def test_what_was_refused_leaves_the_tables_in_step() -> None:
    connection = Connection()
    with pytest.raises(StreamFault):
        connection.request([(b"Bad", b"1"), *ENVOY, (b"good", b"2"), (b"x", b"\x00")])
    indexed = connection.encoder.encode(ENVOY)
    assert len(indexed) == len(ENVOY)
    assert connection.reader.request(indexed) == PLAIN


@pytest.mark.parametrize("size", [100, 10_000])
def test_texts_are_short(size: int) -> None:
    for field in ((b"Name" * size, b""), (b"a" * size, b"\x00" * size), (b":path", b" " * size)):
        with pytest.raises(StreamFault) as caught:
            Connection(1 << 20).request([field])
        assert len(caught.value.text) < 500


class TestTrailers:
    def test_regular_fields(self) -> None:
        connection = Connection()
        for _ in range(2):
            connection.trailers([(b"grpc-status", b"0"), (b"x-checksum", b"abc")])
            connection.trailers([])

    @pytest.mark.parametrize(
        "field", [METHOD, (b":status", b"200"), (b"X", b""), (b"a", b"\n"), (b"connection", b"close")]
    )
    def test_the_rules_of_fields_hold(self, field: Field) -> None:
        connection = Connection()
        connection.request(ENVOY)
        for _ in range(2):
            with pytest.raises(StreamFault) as caught:
                connection.trailers([(b"a", b"b"), field])
            assert caught.value.code is ErrorCode.PROTOCOL_ERROR
        assert connection.request(ENVOY) == PLAIN


class TestFaultsOfTheBlock:
    @pytest.mark.parametrize("read", ["request", "trailers"])
    def test_compression(self, read: str) -> None:
        with pytest.raises(ConnectionFault):
            getattr(Connection().reader, read)(b"\x80")

    @pytest.mark.parametrize("read", ["request", "trailers"])
    def test_size(self, read: str) -> None:
        connection = Connection(list_bytes=1000)
        block = connection.encoder.encode([*PSEUDO, (b"x", b"y" * 900)])
        with pytest.raises(FieldsTooLarge):
            getattr(connection.reader, read)(block)
        assert connection.request(ENVOY) == PLAIN


class TestTimeout:
    @pytest.mark.parametrize(
        ("value", "timeout_s"),
        [
            *((b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9)),
            *((b"0S", 0), (b"00000001S", 1), (b"99999999H", 99_999_999 * 3600)),
        ],
    )
    def test_units(self, value: bytes, timeout_s: float) -> None:
        assert head((b"grpc-timeout", value)).timeout_s == pytest.approx(timeout_s)

    @pytest.mark.parametrize(
        "value", [b"", b"1", b"S", b"1s", b"123456789S", b"-1S", b"1.5S", b"1 S", b"1SS", b"\xb2S"]
    )
    def test_other_forms(self, value: bytes) -> None:
        connection = Connection()
        for _ in range(2):
            with pytest.raises(
                CallFault, match="grpc-timeout: .*; right are 1 to 8 digits and a unit"
            ) as caught:
                connection.request([*PSEUDO, GRPC, (b"grpc-timeout", value)])
            assert caught.value.status is Status.INTERNAL
        assert connection.request(ENVOY) == PLAIN


class TestCheckGrpc:
    @pytest.mark.parametrize(
        "content_type",
        [
            *(
                "application/grpc",
                "application/grpc+proto",
                "application/grpc;charset=utf-8",
                "Application/gRPC",
            ),
            *("application/grpc ; a=b", "application/grpc+proto; a=b"),
        ],
    )
    def test_calls(self, content_type: str) -> None:
        for encoding in ("identity", "gzip"):
            check_grpc(changed(content_type=content_type, encoding=encoding))

    @pytest.mark.parametrize("method", ["GET", "post", "CONNECT", "OPTIONS"])
    def test_method(self, method: str) -> None:
        with pytest.raises(HttpFault) as caught:
            check_grpc(changed(method=method, content_type=""))
        assert caught.value.http_status == 405
        assert caught.value.text == (
            "This port speaks gRPC over HTTP/2: POST with content-type application/grpc. "
            f"This request is a {method}."
        )

    @pytest.mark.parametrize(
        ("content_type", "shown"),
        [
            ("", "missing"),
            ("application/json", "'application/json'"),
            ("application/grpc-web", "'application/grpc-web'"),
            ("application/grpc+json", "'application/grpc+json'"),
            ("application/grpcx", "'application/grpcx'"),
            ("text/plain; application/grpc", "'text/plain; application/grpc'"),
            ("\xe9" * 100, "'" + "\\xe9" * 64 + "'"),
        ],
    )
    def test_content_type(self, content_type: str, shown: str) -> None:
        with pytest.raises(HttpFault) as caught:
            check_grpc(changed(content_type=content_type))
        assert caught.value.http_status == 415
        assert caught.value.text == (
            "This port speaks gRPC over HTTP/2: POST with content-type application/grpc. "
            f"The content-type of this request is {shown}."
        )

    @pytest.mark.parametrize("encoding", ["zstd", "", "GZIP", "gzip, identity"])
    def test_encoding(self, encoding: str) -> None:
        with pytest.raises(CallFault) as caught:
            check_grpc(changed(encoding=encoding))
        assert caught.value.status is Status.UNIMPLEMENTED
        assert caught.value.details == (
            f"grpc-encoding: no decompressor for '{encoding}' is installed; supported are identity, gzip"
        )


class TestRemembered:
    def test_same_bytes_after_the_table_moved(self) -> None:
        encoder, reader = hpack.Encoder(), HeadReader(FieldDecoder(32 * 1024))
        known = [METHOD, SCHEME, AUTHORITY]
        reader.request(encoder.encode([*known, PATH]))
        block = encoder.encode([*known, PATH])
        assert reader.request(block).path == "/package.Service/Method"
        other = hpack.Encoder()
        for fields in ([*known, PATH], [AUTHORITY, (b":path", b"/a/B")]):
            moved = other.encode(fields)
        with pytest.raises(StreamFault):
            reader.request(moved)  # no method: malformed, but its path is now where the other one was
        assert other.encode([METHOD, SCHEME, AUTHORITY, PATH]) != block
        assert reader.request(bytes([*b"\x83\x86", 0x80 | 64, 0x80 | 62])).path == "/a/B"

    def test_head_that_comes_again_is_the_same(self) -> None:
        connection = Connection()
        first = connection.request(ENVOY)
        assert connection.request(ENVOY) is first
        assert connection.request([*ENVOY, (b"traceparent", b"00-01-02-03")]) is first

    def test_order_of_the_others_does_not_hide_a_late_pseudo_header(self) -> None:
        connection = Connection()
        connection.request([*PSEUDO, (b"a", b"b")])
        connection.request([*PSEUDO[:3], AUTHORITY, (b"a", b"b")])
        with pytest.raises(StreamFault, match="after other fields"):
            connection.request([(b"a", b"b"), *PSEUDO])

    def test_memory_is_bounded(self) -> None:
        connection = Connection(list_bytes=1 << 20)
        reader = connection.reader
        for n in range(300):
            fields = [
                *PSEUDO,
                (b"name-%d" % n, b"v"),
                (b"long", b"v" * n * 2),
                (b"grpc-timeout", b"%dm" % n),
            ]
            for _ in range(2):
                assert connection.request(fields).timeout_s == pytest.approx(n / 1000)
            connection.request([*PSEUDO, (b"content-type", b"t" * 1000 * (n % 5))])
        assert 0 < len(reader._forms) <= NAMES_KEPT
        assert 0 < len(reader._notes) <= FIELDS_KEPT
        assert 0 < len(reader._heads) <= HEADS_KEPT
        assert max(len(name) + len(value) for name, value in reader._notes) <= FIELD_KEPT_BYTES
        assert max(sum(len(n) + len(v) for n, v in fields) for fields in reader._heads) <= HEAD_KEPT_BYTES
