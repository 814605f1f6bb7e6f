"""The codec between ext-proc messages and records, read and written with the protobuf stubs."""

from random import Random
from typing import Any

import pytest

from epp import names
from epp.errors import ProtocolError
from epp.extproc import codec, quick
from epp.extproc.records import (
    BodyMode,
    BodyReply,
    Direction,
    HeadersReply,
    ImmediateReply,
    Modes,
    Reply,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    StreamedBodyReply,
    TrailersReply,
)
from epp.wire import ext_proc_pb2 as pb

REQUEST, RESPONSE = Direction.REQUEST, Direction.RESPONSE


def request_headers(**more: Any) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_headers=pb.HttpHeaders(), **more)


def with_subset(wire: pb.ProcessingRequest) -> Any:
    space = wire.metadata_context.filter_metadata[names.SUBSET_NAMESPACE]
    return space.fields[names.DESTINATION_ENDPOINT_SUBSET]


def decoded(wire: pb.ProcessingRequest) -> Any:
    return codec.decode(wire.SerializeToString(), 1.5)


def parsed(reply: Reply) -> pb.ProcessingResponse:
    return pb.ProcessingResponse.FromString(codec.encode(reply))


# -- decode -------------------------------------------------------------------------------------------


def test_header_names_are_lower_case_and_the_raw_value_wins() -> None:
    wire = request_headers()
    add = wire.request_headers.headers.headers.add
    add(key=b":path", value=b"/v1/models")
    add(key=b"X-Gateway-Destination-Endpoint", raw_value=b"raw", value=b"plain")
    add(key=b"x-twice", raw_value=b"1")
    add(key=b"x-twice", raw_value=b"\xff2")
    add(key=b"x-empty")
    wire.request_headers.end_of_stream = True
    assert decoded(wire) == RequestHeaders(
        1.5,
        (
            (":path", b"/v1/models"),
            ("x-gateway-destination-endpoint", b"raw"),
            ("x-twice", b"1"),
            ("x-twice", b"\xff2"),
            ("x-empty", b""),
        ),
        True,
        size=wire.ByteSize(),
    )


@pytest.mark.parametrize("direction", ["request_headers", "response_headers"])
def test_more_headers_than_are_read(direction: str) -> None:
    wire = pb.ProcessingRequest()
    headers = getattr(wire, direction).headers.headers
    for number in range(1024):
        headers.add(key=b"x-%d" % number)
    assert len(decoded(wire).headers) == 1024
    headers.add()
    with pytest.raises(ProtocolError, match="message with 1025 headers; at most 1024 are read"):
        decoded(wire)


MIB = 1 << 20
LARGE_BODY = pb.ProcessingRequest(request_body=pb.HttpBody(body=bytes(3 * MIB), end_of_stream=True))


def test_a_large_body_with_what_proxies_send_beside_it() -> None:
    """Before it or behind it: Go writes the body last."""
    beside = pb.ProcessingRequest(observability_mode=True)
    with_subset(beside).string_value = "a" * (MIB - 1000)
    for message in (
        LARGE_BODY.SerializeToString() + beside.SerializeToString(),
        beside.SerializeToString() + LARGE_BODY.SerializeToString(),
        beside.SerializeToString()
        + b"\xf9\x07"
        + bytes(8)
        + LARGE_BODY.SerializeToString()
        + b"\xfd\x07abcd",
    ):
        event = codec.decode(message, 0.0)
        assert isinstance(event, RequestChunk)
        assert (len(event.body), event.end_of_stream, event.subset) == (3 * MIB, True, ("a" * (MIB - 1000),))


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + quick.write_varint(len(content)) + content


SWELLING: dict[str, bytes] = {
    "headers of two bytes": _field(b"\x12", _field(b"\x0a", b"\x0a\x00" * MIB)),
    "one header": _field(b"\x12", _field(b"\x0a", _field(b"\x0a", _field(b"\x1a", bytes(2 * MIB))))),
    "headers behind a body": b"\x22\x00" + _field(b"\x12", _field(b"\x0a", b"\x0a\x00" * MIB)),
    "metadata": b"\x2a\x00" + _field(b"\x42", b"\x0a\x00" * MIB),
    "bodies of nothing": b"\x22\x00" * MIB,
    "numbers": b"\x22\x00" + b"\x50\x01" * MIB,
    "a number without end": b"\x50" + b"\x80" * (2 * MIB),
    "a group": b"\xfb\x07" + b"\x0a\x00" * MIB + b"\xfc\x07",
}


@pytest.mark.parametrize("name", SWELLING)
def test_what_grows_in_memory_is_not_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ProcessingRequest", None)
    with pytest.raises(ProtocolError, match="message with more than 1048576 bytes beside its body"):
        codec.decode(SWELLING[name], 0.0)


def test_modes_are_read_where_the_proxy_says_them() -> None:
    assert decoded(request_headers()).modes is None
    config = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED)
    modes = decoded(request_headers(protocol_config=config)).modes
    assert modes == Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)


def test_every_body_mode_of_the_protocol_has_a_record() -> None:
    assert {mode.name: mode.value for mode in BodyMode} == dict(pb.BodySendMode.items())


def test_an_unknown_body_mode_is_refused() -> None:
    wire = request_headers(protocol_config=pb.ProtocolConfiguration())
    unknown = wire.SerializeToString().replace(b"\x5a\x00", b"\x5a\x02\x08\x63")
    with pytest.raises(ProtocolError, match="protocol_config: 99"):
        codec.decode(unknown, 0.0)


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (["10.0.0.1:8000", "[fd00::1]:8000"], ("10.0.0.1:8000", "[fd00::1]:8000")),
        (["10.0.0.1:8080", 12345, None, True], ("10.0.0.1:8080",)),
        (["  10.0.0.1:1 ", ""], ("10.0.0.1:1",)),
        ([], ()),
        ("10.0.0.1:8000, 10.0.0.2:8000,", ("10.0.0.1:8000", "10.0.0.2:8000")),
        ("", ()),
        (7, ()),
        (None, ()),
        ({"a": "b"}, ()),
    ],
)
def test_subset_hint(hint: Any, subset: tuple[str, ...]) -> None:
    head, body = request_headers(), pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x"))
    for wire in (head, body):
        fields = wire.metadata_context.filter_metadata[names.SUBSET_NAMESPACE]
        fields.update({names.DESTINATION_ENDPOINT_SUBSET: hint})
        assert decoded(wire).subset == subset


def test_no_subset_hint() -> None:
    wire = request_headers()
    assert decoded(wire).subset is None
    wire.metadata_context.filter_metadata["envoy.lb"].update({names.DESTINATION_ENDPOINT_SUBSET: ["a:1"]})
    assert decoded(wire).subset is None
    wire.metadata_context.filter_metadata[names.SUBSET_NAMESPACE].update({"other": ["a:1"]})
    assert decoded(wire).subset is None


def test_served_endpoint() -> None:
    wire = pb.ProcessingRequest(response_headers=pb.HttpHeaders(end_of_stream=True))
    assert decoded(wire) == ResponseHeaders(1.5, (), True)
    fields = wire.metadata_context.filter_metadata[names.LB_NAMESPACE]
    fields.update({names.DESTINATION_ENDPOINT_SERVED: "10.0.0.1:8000"})
    assert decoded(wire) == ResponseHeaders(1.5, (), True, "10.0.0.1:8000")
    fields.update({names.DESTINATION_ENDPOINT_SERVED: 8000})
    assert decoded(wire).served is None


def test_bodies_and_trailers() -> None:
    body = pb.HttpBody(body=b"\x00\xff", end_of_stream=True)
    assert decoded(pb.ProcessingRequest(request_body=body)) == RequestChunk(1.5, b"\x00\xff", True)
    assert decoded(pb.ProcessingRequest(response_body=body)) == ResponseChunk(1.5, b"\x00\xff", True)
    trailers = pb.HttpTrailers()
    assert decoded(pb.ProcessingRequest(request_trailers=trailers)) == RequestTrailers(1.5)
    assert decoded(pb.ProcessingRequest(response_trailers=trailers)) == ResponseTrailers(1.5)


def test_unknown_fields_and_any_order_of_fields_are_tolerated() -> None:
    body = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x")).SerializeToString()
    unknown = b"\xfa\x01\x03abc"
    metadata = pb.ProcessingRequest(observability_mode=True).SerializeToString()
    assert codec.decode(metadata + unknown + body, 0.0) == ResponseChunk(0.0, b"x", False)
    assert codec.decode(body + unknown + metadata, 0.0) == ResponseChunk(0.0, b"x", False)


def test_a_message_without_content_is_refused() -> None:
    for message in (b"", pb.ProcessingRequest(observability_mode=True).SerializeToString()):
        with pytest.raises(ProtocolError, match="no headers, body or trailers"):
            codec.decode(message, 0.0)
    with pytest.raises(ProtocolError, match="not a ProcessingRequest"):
        codec.decode(b"\xff\xff\xff", 0.0)


def test_any_bytes_raise_nothing_but_protocol_errors() -> None:
    draw = Random(11)
    wire = request_headers(protocol_config=pb.ProtocolConfiguration(request_body_mode=pb.BUFFERED))
    wire.request_headers.headers.headers.add(key=b"a", raw_value=b"b")
    with_subset(wire).list_value.values.add(string_value="10.0.0.1:8000")
    valid = wire.SerializeToString()
    read = refused = 0
    for _ in range(20_000):
        if draw.random() < 0.3:
            message = draw.randbytes(draw.randrange(40))
        else:
            spoiled = bytearray(valid)
            for _ in range(draw.randrange(3)):
                spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
            message = bytes(spoiled[: draw.randrange(len(spoiled))] if draw.random() < 0.3 else spoiled)
        try:
            codec.decode(message, 0.0)
            read += 1
        except ProtocolError:
            refused += 1
    assert min(read, refused) > 500


# -- encode -------------------------------------------------------------------------------------------


def test_the_pick_is_in_header_and_metadata_and_clears_the_route() -> None:
    reply = HeadersReply(REQUEST, (("x-request-id", b"r"),), ("x-slo-ttft-ms",), "10.0.0.1:8000,[fd00::1]:1")
    for _ in range(2):
        wire = parsed(reply)
        assert wire.WhichOneof("response") == "request_headers"
        common = wire.request_headers.response
        assert common.clear_route_cache
        assert [
            (one.header.key, one.header.raw_value, one.header.value, one.append_action)
            for one in common.header_mutation.set_headers
        ] == [
            (b"x-request-id", b"r", b"", pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD),
            (
                b"x-gateway-destination-endpoint",
                b"10.0.0.1:8000,[fd00::1]:1",
                b"",
                pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            ),
        ]
        assert list(common.header_mutation.remove_headers) == ["x-slo-ttft-ms"]
        lb = wire.dynamic_metadata["envoy.lb"]
        assert dict(lb) == {"x-gateway-destination-endpoint": "10.0.0.1:8000,[fd00::1]:1"}
        assert list(wire.dynamic_metadata.fields) == ["envoy.lb"]


def test_a_reply_without_pick_has_no_metadata() -> None:
    for direction in Direction:
        wire = parsed(HeadersReply(direction))
        assert wire.WhichOneof("response") == f"{direction.value}_headers"
        assert not wire.HasField("dynamic_metadata")
        assert not getattr(wire, f"{direction.value}_headers").response.clear_route_cache


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("body", [b"", b"\x00\xffdata", b"x" * 62_000])
def test_streamed_pieces(direction: Direction, body: bytes, end: bool) -> None:
    wire = parsed(StreamedBodyReply(direction, body, end))
    assert wire.WhichOneof("response") == f"{direction.value}_body"
    mutation = getattr(wire, f"{direction.value}_body").response.body_mutation
    assert mutation.WhichOneof("mutation") == "streamed_response"
    assert (mutation.streamed_response.body, mutation.streamed_response.end_of_stream) == (body, end)


@pytest.mark.parametrize("direction", Direction)
def test_body_replies(direction: Direction) -> None:
    unchanged = parsed(BodyReply(direction))
    assert unchanged.WhichOneof("response") == f"{direction.value}_body"
    assert not getattr(unchanged, f"{direction.value}_body").response.HasField("body_mutation")
    for body in (b"", b"new"):
        changed = parsed(BodyReply(direction, body, (("content-length", b"3"),)))
        common = getattr(changed, f"{direction.value}_body").response
        assert common.body_mutation.WhichOneof("mutation") == "body"
        assert common.body_mutation.body == body
        assert common.header_mutation.set_headers[0].header.raw_value == b"3"


def test_a_buffered_body_can_carry_the_pick() -> None:
    wire = parsed(BodyReply(REQUEST, None, destination="10.0.0.1:8000"))
    assert wire.request_body.response.clear_route_cache
    assert not wire.request_body.response.HasField("body_mutation")
    assert dict(wire.dynamic_metadata["envoy.lb"]) == {"x-gateway-destination-endpoint": "10.0.0.1:8000"}


@pytest.mark.parametrize("direction", Direction)
def test_trailers_replies(direction: Direction) -> None:
    assert parsed(TrailersReply(direction)).WhichOneof("response") == f"{direction.value}_trailers"


def test_immediate_replies() -> None:
    wire = parsed(ImmediateReply(503, (("retry-after", b"1"),), b'{"error":{}}', "short"))
    answer = wire.immediate_response
    assert (answer.status.code, answer.body, answer.details) == (503, b'{"error":{}}', "short")
    assert answer.headers.set_headers[0].header.key == b"retry-after"
    assert not answer.HasField("grpc_status")


@pytest.mark.parametrize("size", [1, 2, 126, 127, 128, 260, 16_383, 16_384, 62_000])
@pytest.mark.parametrize("direction", [Direction.REQUEST, Direction.RESPONSE])
@pytest.mark.parametrize("last", [False, True])
def test_a_streamed_piece_is_what_the_stubs_write(size: int, direction: Direction, last: bool) -> None:
    for fill in (b"a", b"\x0a"):  # the second looks like a field
        wire = pb.ProcessingResponse()
        side = wire.response_body if direction is Direction.RESPONSE else wire.request_body
        piece = side.response.body_mutation.streamed_response
        piece.body = fill * size
        piece.end_of_stream = last
        assert codec.encode(StreamedBodyReply(direction, fill * size, last)) == wire.SerializeToString()
