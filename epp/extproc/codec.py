"""Between ext-proc messages on the wire and the exchange's records; the only module here with protobuf."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from epp import names
from epp.errors import ProtocolError
from epp.extproc.quick import END_OF_STREAM, START, beside_bodies, body_layout, piece
from epp.extproc.records import (
    BodyMode,
    BodyReply,
    Direction,
    Event,
    Headers,
    HeadersReply,
    ImmediateReply,
    Modes,
    Reply,
    Reported,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    Scores,
    StreamedBodyReply,
    TrailersReply,
)
from epp.wire.ext_proc_pb2 import (
    CommonResponse,
    HeaderMap,
    HeaderMutation,
    HeaderValueOption,
    ProcessingRequest,
    ProcessingResponse,
)

OVERWRITE: Final = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
DESTINATIONS_KEPT: Final = 4096
TAILS_KEPT: Final = 4096
TAIL_BYTES: Final = 512
BESIDE_BYTES: Final = 1 << 20
MOST_HEADERS: Final = 1024
"""Of one message: bytes beside bodies, as `beside_bodies` counts them, and headers. Proxies send far less.

What is small on the wire is large in memory: an empty header of two bytes grows a hundredfold.
"""

NO_METADATA: Final = b"\x42\x00"
"""An empty `metadata_context`: what Envoy puts behind every body where it forwards no metadata."""

REQUEST: Final = Direction.REQUEST
RESPONSE: Final = Direction.RESPONSE


def decode(message: bytes, at: float) -> Event:
    """Read one `ProcessingRequest`; `at` is when it arrived, in monotonic seconds.

    A body message of a usual form is read as bytes, any other through the stubs, with the same result.
    Raises ProtocolError for bytes that are none, for a kind of message or body mode not known here, and for
    more headers and metadata than a proxy sends.
    """
    layout = body_layout(message[START])
    if layout is not None:
        of_answer, body, ends, size, behind = layout
        tail = message[behind]
        if (
            tail == NO_METADATA
            or len(message) == size
            or (of_answer and 0 < len(tail) <= TAIL_BYTES and _is_inert(tail))
        ) and (not ends or message[size - 2 : size] == END_OF_STREAM):
            if of_answer:
                return ResponseChunk(at, message[body], ends)
            return RequestChunk(at, message[body], ends)
    return decode_in_full(message, at)


@lru_cache(maxsize=TAILS_KEPT)
def _is_inert(tail: bytes) -> bool:
    """Whether `tail` changes nothing behind an answer's body: fields beside the content, all of them valid.

    A message is the merge of its fields, so what is true behind one body is true behind any.
    """
    try:
        return ProcessingRequest.FromString(tail).WhichOneof("request") is None
    except DecodeError:
        return False


def decode_in_full(message: bytes, at: float) -> Event:
    """As `decode`, with the stubs whatever the form of the message."""
    if len(message) > BESIDE_BYTES and beside_bodies(message, BESIDE_BYTES) > BESIDE_BYTES:
        raise ProtocolError(f"message with more than {BESIDE_BYTES} bytes beside its body")
    try:
        wire = ProcessingRequest.FromString(message)
    except DecodeError:
        raise ProtocolError("message is not a ProcessingRequest of envoy.service.ext_proc.v3") from None
    kind = wire.WhichOneof("request")
    if kind == "response_body":
        part = wire.response_body
        return ResponseChunk(at, part.body, part.end_of_stream)
    if kind == "request_body":
        part = wire.request_body
        return RequestChunk(at, part.body, part.end_of_stream, _subset(wire))
    if kind == "request_headers":
        head = wire.request_headers
        fields = _headers(head.headers)
        return RequestHeaders(at, fields, head.end_of_stream, _subset(wire), _modes(wire), len(message))
    if kind == "response_headers":
        head = wire.response_headers
        return ResponseHeaders(at, _headers(head.headers), head.end_of_stream, _served(wire), _modes(wire))
    if kind == "request_trailers":
        return RequestTrailers(at)
    if kind == "response_trailers":
        return ResponseTrailers(at)
    raise ProtocolError("ProcessingRequest carries no headers, body or trailers message")


def encode(reply: Reply) -> bytes:
    """Write one `ProcessingResponse`."""
    if isinstance(reply, StreamedBodyReply):
        return piece(reply.direction is RESPONSE, reply.body, reply.end_of_stream)
    wire = ProcessingResponse()
    match reply:
        case HeadersReply():
            part = wire.request_headers if reply.direction is REQUEST else wire.response_headers
            part.SetInParent()
            return _with_edits(wire, part.response, reply)
        case BodyReply():
            body = wire.request_body if reply.direction is REQUEST else wire.response_body
            body.SetInParent()
            if reply.body is not None:
                body.response.body_mutation.body = reply.body
            return _with_edits(wire, body.response, reply)
        case TrailersReply():
            end = wire.request_trailers if reply.direction is REQUEST else wire.response_trailers
            end.SetInParent()
            return wire.SerializeToString()
        case ImmediateReply():
            answer = wire.immediate_response
            answer.status.code = reply.status
            answer.body = reply.body
            answer.details = reply.details
            if reply.grpc_status is not None:
                answer.grpc_status.status = reply.grpc_status
            _set_headers(answer.headers, reply.headers)
            return wire.SerializeToString()
        case Reported():
            for namespace, key, figure in reply.metadata:
                wire.dynamic_metadata.fields[namespace].struct_value.fields[key].number_value = figure
            # Messages merge when their bytes are joined.
            return encode(reply.reply) + wire.SerializeToString()


def _with_edits(wire: ProcessingResponse, common: CommonResponse, reply: HeadersReply | BodyReply) -> bytes:
    """The message with header edits and destination; the route depends on the destination header."""
    if reply.set_headers:
        _set_headers(common.header_mutation, reply.set_headers)
    if reply.remove_headers:
        common.header_mutation.remove_headers.extend(reply.remove_headers)
    if reply.destination is None:
        return wire.SerializeToString()
    destination = ((names.DESTINATION_ENDPOINT, reply.destination.encode()),)
    _set_headers(common.header_mutation, destination)
    common.clear_route_cache = True
    if reply.scores is None:
        return wire.SerializeToString() + _destination_metadata(reply.destination)
    return wire.SerializeToString() + _scored_metadata(reply.destination, reply.scores)


def _set_headers(mutation: HeaderMutation, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key = name.encode()
        option.header.raw_value = value
        option.append_action = OVERWRITE


@lru_cache(maxsize=DESTINATIONS_KEPT)
def _destination_metadata(destination: str) -> bytes:
    """A `ProcessingResponse` with nothing but the metadata: messages merge when their bytes are joined."""
    wire = ProcessingResponse()
    chosen = wire.dynamic_metadata.fields[names.LB_NAMESPACE].struct_value
    chosen.fields[names.DESTINATION_ENDPOINT].string_value = destination
    return wire.SerializeToString()


def _scored_metadata(destination: str, scores: Scores) -> bytes:
    """As `_destination_metadata`, with the scores in the same namespace."""
    wire = ProcessingResponse.FromString(_destination_metadata(destination))
    chosen = wire.dynamic_metadata.fields[names.LB_NAMESPACE].struct_value
    scored = chosen.fields[names.DESTINATION_ENDPOINT_SCORES].struct_value
    scored.SetInParent()
    for host_port, score in scores:
        scored.fields[host_port].number_value = score
    return wire.SerializeToString()


def _headers(headers: HeaderMap) -> Headers:
    if len(headers.headers) > MOST_HEADERS:
        raise ProtocolError(f"message with {len(headers.headers)} headers; at most {MOST_HEADERS} are read")
    return tuple(
        [
            (header.key.decode("latin-1").lower(), header.raw_value or header.value)
            for header in headers.headers
        ]
    )


def _modes(wire: ProcessingRequest) -> Modes | None:
    if not wire.HasField("protocol_config"):
        return None
    config = wire.protocol_config
    try:
        return Modes(BodyMode(config.request_body_mode), BodyMode(config.response_body_mode))
    except ValueError as error:
        raise ProtocolError(f"protocol_config: {error}") from None


def _subset(wire: ProcessingRequest) -> tuple[str, ...] | None:
    """Entries of the subset hint: a list of strings, or one string with commas. None where there is no hint.

    A hint that holds no string restricts to nothing.
    """
    hint = _metadata(wire, names.SUBSET_NAMESPACE, names.DESTINATION_ENDPOINT_SUBSET)
    if hint is None:
        return None
    entries: Iterable[str] = ()
    if hint.WhichOneof("kind") == "string_value":
        entries = hint.string_value.split(",")
    elif hint.WhichOneof("kind") == "list_value":
        entries = [
            entry.string_value
            for entry in hint.list_value.values
            if entry.WhichOneof("kind") == "string_value"
        ]
    return tuple([entry.strip() for entry in entries if entry.strip()])


def _served(wire: ProcessingRequest) -> str | None:
    served = _metadata(wire, names.LB_NAMESPACE, names.DESTINATION_ENDPOINT_SERVED)
    return (served.string_value or None) if served is not None else None


def _metadata(wire: ProcessingRequest, namespace: str, key: str) -> Value | None:
    """One value of the filter metadata. Looks before it takes: taking a missing map entry would make it."""
    if not wire.HasField("metadata_context"):
        return None
    spaces = wire.metadata_context.filter_metadata
    if namespace not in spaces:
        return None
    fields = spaces[namespace].fields
    return fields.get(key)
