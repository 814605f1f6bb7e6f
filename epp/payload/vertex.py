"""Requests of Vertex AI's gRPC API (`PredictionService`): messages that carry JSON of OpenAI's APIs."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from google.protobuf.message import DecodeError

from epp.errors import BadRequest
from epp.payload.framed import FRAME_HEADER_BYTES, framed, request_message
from epp.payload.records import Api
from epp.wire.vertex_pb2 import PredictRequest

SERVICE: Final = "PredictionService"
PACKAGES: Final = ("google.cloud.aiplatform.v1", "google.cloud.aiplatform.v1beta1")
"""Where Google has the service. Others may have it elsewhere."""

CARRIED: Final = MappingProxyType(
    {
        Api.VERTEX_CHAT_COMPLETIONS: Api.CHAT,
        Api.VERTEX_STREAM_RAW_PREDICT: Api.RESPONSES,
        Api.VERTEX_RAW_PREDICT: Api.RESPONSES,
    }
)
"""The API of the JSON that requests and answers carry. That of the raw methods is the field's choice."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The message that a request of `method` is."""

    method: str

    def opened(self, body: bytes) -> bytes:
        """The JSON in it.

        Raises:
            BadRequest: the body is no frame of that message, is compressed, or has no `http_body`.
        """
        message = request_message(body, self.method)
        try:
            request = PredictRequest.FromString(message)
        except DecodeError:
            raise BadRequest(
                f"invalid {self.method} request: not a google.cloud.aiplatform {self.method}Request"
            ) from None
        if not request.HasField("http_body"):
            raise BadRequest(f"invalid {self.method} request: must have `http_body`", "http_body")
        return request.http_body.data

    def refilled(self, body: bytes, data: bytes) -> bytes:
        """`body`, which could be opened, with other JSON in it. All else that it holds stays."""
        message = request_message(body, self.method)
        request = PredictRequest.FromString(message)
        request.http_body.data = data
        return framed(request.SerializeToString()) + body[FRAME_HEADER_BYTES + len(message) :]
