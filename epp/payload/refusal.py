"""An error as the body of an answer, in the shape that OpenAI clients read."""

import json

from epp.errors import RequestError


def refusal_body(error: RequestError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`, `code` being the HTTP status."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.status}
    return json.dumps({"error": fields}, separators=(",", ":")).encode()
