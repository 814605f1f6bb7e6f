"""One HTTP request into what routing needs to know of it, and its body with another model name."""

import json

import msgspec

from epp.errors import PayloadTooLarge
from epp.payload.apis import DEFAULT_PARSERS, DIALECTS, PASSTHROUGH, ParserSet
from epp.payload.body import Span
from epp.payload.encoding import encodings, inflate
from epp.payload.media import Media
from epp.payload.records import InferenceRequest, RawRequest


class Parsed(msgspec.Struct, frozen=True):
    """A request as read.

    Attributes:
        request: `target_model` equals `model`.
        body: as received.
        plain: the body inflated, or what it carries; the same object where it is neither.
        model_span: first byte and end in `plain` of the model's JSON value (a string with its quotes, or
            null); None where the body has no model or is not read.
    """

    request: InferenceRequest
    body: bytes
    plain: bytes
    model_span: Span | None


class Rewritten(msgspec.Struct, frozen=True):
    """Bytes to forward, and headers that no longer describe them."""

    body: bytes
    remove_headers: tuple[str, ...]


def parse_request(raw: RawRequest, *, max_bytes: int, parsers: ParserSet = DEFAULT_PARSERS) -> Parsed:
    """Read a request. Methods other than POST and encodings that are not known here pass through unread.

    Of a body that was not shown only the API is known, by its path.

    Raises:
        BadRequest: no parser takes the path, or the body is broken, is not one JSON object, or lacks or
            doubles what its API requires.
        PayloadTooLarge: the body, as sent or inflated, has more than `max_bytes`.
    """
    body = raw.body
    if len(body) > max_bytes:
        raise PayloadTooLarge(f"the body has {len(body)} bytes, which is more than the limit of {max_bytes}")
    dialect = parsers.dialect_of(raw.path) if raw.method == "POST" else PASSTHROUGH
    if not raw.body_shown:
        return Parsed(InferenceRequest(dialect.api), body, body, None)
    plain = body
    if dialect.read is not None and (applied := encodings(raw.headers)):
        # What has an envelope is gRPC's, which compresses messages and no bodies.
        if dialect.envelope is not None or applied not in (("gzip",), ("deflate",)):
            dialect = PASSTHROUGH
        elif plain:
            plain = inflate(plain, applied[0], max_bytes)
    if dialect.read is None:
        return Parsed(InferenceRequest(dialect.api), body, plain, None)
    if dialect.envelope is not None:
        plain = dialect.envelope.opened(body)
    request, model_span = dialect.read(dialect.api, plain, Media(raw.headers, parsers.estimate))
    return Parsed(request, body, plain, model_span)


def rewrite_model(parsed: Parsed, target: str) -> Rewritten:
    """The body with `target` as its model, every other byte as it was; all of it where the API has none.

    What carries the JSON of an API is written anew: its other fields stay, their order on the wire may not.
    """
    dialect = DIALECTS[parsed.request.api]
    if not dialect.rewrites_model:
        return Rewritten(parsed.body, ())
    plain = renamed(parsed, target)
    if dialect.envelope is not None:
        return Rewritten(dialect.envelope.refilled(parsed.body, plain), ())
    inflated = parsed.plain is not parsed.body
    return Rewritten(plain, ("content-encoding",) if inflated else ())


def renamed(parsed: Parsed, target: str) -> bytes:
    """`plain` of an API whose model can be rewritten, with `target` as its model."""
    name = json.dumps(target).encode()
    plain = parsed.plain
    if parsed.model_span is None:
        start = end = plain.index(b"{") + 1
        name = b'"model":' + name + (b"" if plain[end:].lstrip().startswith(b"}") else b",")
    else:
        start, end = parsed.model_span
    return plain[:start] + name + plain[end:]
