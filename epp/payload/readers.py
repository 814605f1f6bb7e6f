"""Which reader follows the answers of which API."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from epp.payload.answer import Answer, AnswerReader
from epp.payload.grpc_answer import GrpcAnswerReader
from epp.payload.kept import Account
from epp.payload.records import Api
from epp.payload.shapes import SHAPES
from epp.payload.vertex import CARRIED
from epp.payload.vertex_answer import VertexAnswerReader

Maker = Callable[[Api, str, str, bool, Account | None], Answer]
"""Makes a reader of: API, the client's model name, the engine's, whether a stream was asked for, account."""


def _http(api: Api, model: str, target_model: str, stream: bool, account: Account | None) -> Answer:
    return AnswerReader(api, model, target_model, account)


def _grpc(api: Api, model: str, target_model: str, stream: bool, account: Account | None) -> Answer:
    return GrpcAnswerReader(api, stream, account)


def _vertex(api: Api, model: str, target_model: str, stream: bool, account: Account | None) -> Answer:
    return VertexAnswerReader(api, model, target_model, stream, account)


READERS: Final[Mapping[Api, Maker]] = MappingProxyType(
    {
        **dict.fromkeys(SHAPES, _http),
        Api.VLLM_GRPC_GENERATE: _grpc,
        Api.VLLM_GRPC_EMBED: _grpc,
        **dict.fromkeys(CARRIED, _vertex),
    }
)


def answer_reader(
    api: Api, model: str, target_model: str, account: Account | None = None, *, stream: bool = False
) -> Answer:
    """What follows one answer of `api`. That of an API without a row passes unread.

    `target_model` is the name in the engine's answer, `model` the client's to put in its place; what the
    reader keeps of the body is charged to `account`. `stream`: the client asked for a stream, for APIs
    whose answers do not say that they are one.
    """
    return READERS.get(api, _http)(api, model, target_model, stream, account)
