from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PredictRequest(_message.Message):
    __slots__ = ("endpoint", "http_body")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HTTP_BODY_FIELD_NUMBER: _ClassVar[int]
    endpoint: bytes
    http_body: HttpBody
    def __init__(self, endpoint: _Optional[bytes] = ..., http_body: _Optional[_Union[HttpBody, _Mapping]] = ...) -> None: ...

class HttpBody(_message.Message):
    __slots__ = ("content_type", "data", "extensions")
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    content_type: bytes
    data: bytes
    extensions: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, content_type: _Optional[bytes] = ..., data: _Optional[bytes] = ..., extensions: _Optional[_Iterable[bytes]] = ...) -> None: ...
