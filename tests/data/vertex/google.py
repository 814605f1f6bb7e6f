"""Vertex AI's messages as Google declares them, and real exchanges over HTTP to carry in them.

Names, numbers and types of the fields are those of google/api/httpbody.proto and
google/cloud/aiplatform/v1beta1/prediction_service.proto.
"""

import json
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

RECORDED = Path(__file__).parents[1] / "payload"
PACKAGES = ("google.cloud.aiplatform.v1", "google.cloud.aiplatform.v1beta1")
METHODS = ("ChatCompletions", "StreamRawPredict", "RawPredict")


def _declared() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    body = descriptor_pb2.FileDescriptorProto(name="httpbody.proto", package="google.api", syntax="proto3")
    body.dependency.append("google/protobuf/any.proto")
    message = body.message_type.add(name="HttpBody")
    one, several = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message.field.add(name="content_type", number=1, type=field.TYPE_STRING, label=one)
    message.field.add(name="data", number=2, type=field.TYPE_BYTES, label=one)
    kind = ".google.protobuf.Any"
    message.field.add(name="extensions", number=3, type=field.TYPE_MESSAGE, type_name=kind, label=several)
    pool.Add(body)
    asked = descriptor_pb2.FileDescriptorProto(name="prediction.proto", package=PACKAGES[1], syntax="proto3")
    asked.dependency.append("httpbody.proto")
    kind = ".google.api.HttpBody"
    for method in METHODS:
        message = asked.message_type.add(name=f"{method}Request")
        message.field.add(name="endpoint", number=1, type=field.TYPE_STRING, label=one)
        message.field.add(name="http_body", number=2, type=field.TYPE_MESSAGE, type_name=kind, label=one)
        # A field that a later version may have.
        message.field.add(name="later", number=77, type=field.TYPE_STRING, label=one)
    pool.Add(asked)
    names = ("google.api.HttpBody", *(f"{PACKAGES[1]}.{method}Request" for method in METHODS))
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names]


HttpBody, *_requests = _declared()
REQUESTS = dict(zip(METHODS, _requests, strict=True))


def framed(message: Any, flag: int = 0) -> bytes:
    wire = message if isinstance(message, bytes) else message.SerializeToString()
    return bytes([flag]) + len(wire).to_bytes(4) + wire


def frames(body: bytes) -> list[Any]:
    """The `HttpBody` messages that `body` is made of, to its last byte."""
    found = []
    while body:
        size = int.from_bytes(body[1:5])
        assert body[0] == 0
        assert len(body) >= 5 + size
        found.append(HttpBody.FromString(body[5 : 5 + size]))
        body = body[5 + size :]
    return found


def asked(method: str, document: Any, **fields: Any) -> bytes:
    """A request whose JSON is `document`, or these bytes."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    body = HttpBody(content_type="application/json", data=data)
    return framed(REQUESTS[method](endpoint="projects/p/locations/l/endpoints/e", http_body=body, **fields))


def told(data: bytes, content_type: str = "") -> bytes:
    """One message of an answer."""
    return framed(HttpBody(data=data, content_type=content_type))


def path_of(method: str, package: str = PACKAGES[1]) -> str:
    return f"/{package}.PredictionService/{method}"


def recorded(name: str) -> tuple[bytes, list[bytes]]:
    """The request of a recorded exchange, and the pieces in which its answer came."""
    exchange = json.loads((RECORDED / f"{name}.json").read_text())
    response = exchange["response"]
    chunks = response.get("chunks") or [{"data": response["body"]}]
    pieces = [chunk["data"].encode() for chunk in chunks]
    return exchange["request"]["body"].encode(), pieces
