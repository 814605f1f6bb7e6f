"""What a client is told whose request is not served, in the form that it reads."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from epp import names
from epp.errors import RequestError
from epp.extproc.heads import RequestHead
from epp.extproc.records import Headers, ImmediateReply
from epp.http2.codes import Status
from epp.payload.apis import PARSERS, ParserSet
from epp.payload.records import Api
from epp.payload.refusal import refusal_body

EVERY_API: Final = ParserSet(PARSERS)
JSON_CONTENT: Final[Headers] = (("content-type", b"application/json"),)

GRPC_STATUS: Final[Mapping[int, Status]] = MappingProxyType(
    {
        400: Status.INVALID_ARGUMENT,
        401: Status.UNAUTHENTICATED,
        403: Status.PERMISSION_DENIED,
        404: Status.NOT_FOUND,
        412: Status.FAILED_PRECONDITION,
        413: Status.RESOURCE_EXHAUSTED,
        429: Status.RESOURCE_EXHAUSTED,
        500: Status.INTERNAL,
        503: Status.UNAVAILABLE,
    }
)
"""What an HTTP status is to a client that speaks gRPC. A proxy left to itself says UNAVAILABLE for 429."""


def refusal(error: RequestError, head: RequestHead | None) -> ImmediateReply:
    """The answer to a request with these headers; None: they have not come yet.

    A gRPC client gets a status and a message, which the proxy makes of an answer without a content type; any
    other one gets JSON as its API has it.
    """
    headers: Headers = ()
    if error.reason is not None:
        headers += ((names.DROPPED_REASON, error.reason.encode()),)
    if error.retry_after_s is not None:
        headers += (("retry-after", str(error.retry_after_s).encode()),)
    details = f"warmroute_{error.type}"
    if head is not None and head.speaks_grpc:
        status = GRPC_STATUS.get(error.status, Status.UNKNOWN)
        return ImmediateReply(error.status, headers, error.message.encode(), details, status)
    headers = JSON_CONTENT + headers
    if head is None:
        return ImmediateReply(error.status, headers, refusal_body(error), details)
    api = _api(head)
    # Where its client library looks for the id to show beside the error.
    name = "request-id" if api in PARSERS["anthropic-parser"].apis else names.REQUEST_ID
    headers += ((name, head.request_id.encode()),)
    return ImmediateReply(error.status, headers, refusal_body(error, api, head.request_id), details)


def _api(head: RequestHead) -> Api | None:
    """By the path, whatever is configured to be read: what the client speaks does not depend on that."""
    dialect = EVERY_API.find(head.path)
    return None if dialect is None else dialect.api
