"""Events into the exchange and effects out of it. Plain data: no protobuf, no I/O.

Header names are lower-case str, values bytes. Every event carries `at`, the monotonic second it arrived.
"""

from enum import Enum
from typing import NamedTuple

import msgspec

from epp.errors import RequestError
from epp.payload.records import Api, RawRequest
from epp.scheduling.records import AnswerFact, Cause, Completed, Metadata, Placement, TicketId

Headers = tuple[tuple[str, bytes], ...]

Scores = tuple[tuple[str, float], ...]
"""`address:port` and total score of every endpoint that was scored."""


class BodyMode(Enum):
    """How the proxy sends a body (`ProcessingMode.BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Modes(NamedTuple):
    """Body modes of both directions, from `protocol_config` of the first message."""

    request: BodyMode
    response: BodyMode


class Direction(Enum):
    REQUEST = "request"
    RESPONSE = "response"


# -- events -----------------------------------------------------------------------------------------


class RequestHeaders(msgspec.Struct, frozen=True):
    """`subset`: see `RawRequest.subset`. `modes`: None where the proxy does not say.

    `size`: of the message, in bytes.
    """

    at: float
    headers: Headers
    end_of_stream: bool
    subset: tuple[str, ...] | None = None
    modes: Modes | None = None
    size: int = 0


class RequestChunk(msgspec.Struct, frozen=True, gc=False):
    at: float
    body: bytes
    end_of_stream: bool
    subset: tuple[str, ...] | None = None


class RequestTrailers(msgspec.Struct, frozen=True, gc=False):
    at: float


class ResponseHeaders(msgspec.Struct, frozen=True):
    """`served`: the endpoint the proxy reports to have used.

    `modes`: as in `RequestHeaders`, set where an answer made by the proxy is the first message.
    """

    at: float
    headers: Headers
    end_of_stream: bool
    served: str | None = None
    modes: Modes | None = None


class ResponseChunk(msgspec.Struct, frozen=True, gc=False):
    at: float
    body: bytes
    end_of_stream: bool


class ResponseTrailers(msgspec.Struct, frozen=True, gc=False):
    at: float


class Routed(msgspec.Struct, frozen=True):
    """The router's answer to `Route`.

    Attributes:
        api, model, target_model: what the answer is read as; where the names differ, the client's
            `model` is put back in place of `target_model`.
        body: bytes to forward in place of the client's; None = unchanged.
        remove_headers: names that no longer describe the body (`content-encoding` after inflating).
        stream: the client asked for a stream, where the answer's headers do not tell.
        scores: for the proxy, beside the destination; None = not to be told.
    """

    at: float
    placement: Placement
    api: Api
    model: str
    target_model: str
    body: bytes | None = None
    remove_headers: tuple[str, ...] = ()
    stream: bool = False
    scores: Scores | None = None


class Refused(msgspec.Struct, frozen=True):
    """The router's other answer to `Route`: an answer for the client."""

    at: float
    error: RequestError


class Overflow(msgspec.Struct, frozen=True):
    """A message that the transport could not take whole: beyond its limit, or beyond what may be held."""

    at: float
    error: RequestError


class Edited(msgspec.Struct, frozen=True):
    """What plugins want on the answer; the reply to `Observe`.

    Attributes:
        set_headers: on the answer's headers; after `AnswerHeaders`.
        metadata: on the last reply; after `Completed`.
    """

    at: float
    set_headers: Headers = ()
    metadata: Metadata = ()


class Closed(msgspec.Struct, frozen=True):
    """The stream is over on the proxy's side. `error`: it broke, rather than being half-closed or reset."""

    at: float
    error: bool = False


Event = (
    RequestHeaders
    | RequestChunk
    | RequestTrailers
    | ResponseHeaders
    | ResponseChunk
    | ResponseTrailers
    | Routed
    | Refused
    | Overflow
    | Edited
    | Closed
)

# -- effects ----------------------------------------------------------------------------------------


class HeadersReply(msgspec.Struct, frozen=True):
    """`destination` goes into the header and, with the same value, into dynamic metadata `envoy.lb`.

    `scores` go beside it in the metadata.
    """

    direction: Direction
    set_headers: Headers = ()
    remove_headers: tuple[str, ...] = ()
    destination: str | None = None
    scores: Scores | None = None


class StreamedBodyReply(msgspec.Struct, frozen=True):
    """A piece of a full-duplex body, at most `BODY_CHUNK_BYTES` long."""

    direction: Direction
    body: bytes
    end_of_stream: bool


class BodyReply(msgspec.Struct, frozen=True):
    """Reply to a body message in buffered or streamed mode. `body` None = unchanged.

    In buffered request mode this reply may carry the destination, scores and header edits.
    """

    direction: Direction
    body: bytes | None = None
    set_headers: Headers = ()
    remove_headers: tuple[str, ...] = ()
    destination: str | None = None
    scores: Scores | None = None


class TrailersReply(msgspec.Struct, frozen=True):
    direction: Direction


class ImmediateReply(msgspec.Struct, frozen=True):
    """Ends the HTTP request with this answer.

    With `grpc_status` the client speaks gRPC: the proxy makes a status of it, and of `body` its message.
    """

    status: int
    headers: Headers
    body: bytes
    details: str = ""
    grpc_status: int | None = None


class Reported(msgspec.Struct, frozen=True):
    """The last reply of an answer, with dynamic metadata on it."""

    reply: StreamedBodyReply | BodyReply | TrailersReply
    metadata: Metadata


Reply = HeadersReply | StreamedBodyReply | BodyReply | TrailersReply | ImmediateReply | Reported


class Send(msgspec.Struct, frozen=True):
    reply: Reply


class Route(msgspec.Struct, frozen=True):
    """Ask the router; exactly one `Routed` or `Refused` comes back."""

    raw: RawRequest


class Observe(msgspec.Struct, frozen=True):
    """Tell the director. `AnswerHeaders` and `Completed` are answered by `Edited`."""

    ticket: TicketId
    fact: AnswerFact | Completed


class Finish(msgspec.Struct, frozen=True):
    """Nothing more will come from this exchange; end the stream. Always the last effect, exactly once.

    One exception: where a `Route` is still open, its late `Routed` may be handed in, and is answered by
    `Observe` of `Ended`, so that the placement is released.
    """

    cause: Cause


Effect = Send | Route | Observe | Finish

BODY_CHUNK_BYTES = 62_000
