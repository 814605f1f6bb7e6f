"""Messages of vLLM's gRPC API broken at random: a request is read or refused, an answer passes as it is."""

import random
from collections import Counter
from typing import Any

import pytest

from epp.errors import BadRequest
from epp.extproc.limits import BodyBudget
from epp.payload import grpc_answer
from epp.payload.grpc import read_embed, read_generate
from epp.payload.grpc_answer import GrpcAnswerReader
from epp.payload.records import Api
from epp.wire import vllm_engine_pb2 as pb
from tests.data.grpc.frames import broken

MEDIA = pb.MultimodalInputs(
    mm_placeholders=[pb.PlaceholderRange(offset=1, length=3)],
    mm_hashes=[b"hash"],
    pixel_values=pb.TensorData(data=b"pixels"),
)
IDS = pb.TokenizedInput(input_ids=[bytes(range(100)), b"\x80\x01\xff\xff\xff\xff\x0f"])
REQUESTS = [
    pb.GenerateRequest(text=b"hello", stream=True, sampling_params=pb.SamplingParams(max_tokens=7)),
    pb.GenerateRequest(tokenized=IDS, mm_inputs=MEDIA),
    pb.EmbedRequest(tokenized=IDS),
]
ANSWERS = [
    pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1, 2, 300_000])),
    pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[4], prompt_tokens=7, completion_tokens=4)),
    pb.GenerateResponse(complete=pb.GenerateComplete(prompt_tokens=7, completion_tokens=4, cached_tokens=2)),
    pb.EmbedResponse(prompt_tokens=9),
]


def framed(message: Any) -> bytes:
    body = message.SerializeToString()
    return b"\0" + len(body).to_bytes(4) + body


def test_requests() -> None:
    draw = random.Random(1)
    seen: Counter[str] = Counter()
    for _ in range(6000):
        body = broken(draw, framed(draw.choice(REQUESTS)), 5)
        for read in (read_generate, read_embed):
            try:
                request = read(body)
            except BadRequest:
                seen["refused"] += 1
                continue
            (identity,) = request.prompts
            assert -(-len(identity) // 4) == request.prompt_tokens
            seen[request.api] += 1
    assert min(seen["refused"], seen[Api.VLLM_GRPC_GENERATE], seen[Api.VLLM_GRPC_EMBED]) > 500


def _answers() -> Counter[str]:
    draw = random.Random(2)
    seen: Counter[str] = Counter()
    for _ in range(4000):
        wire = b"".join(broken(draw, framed(draw.choice(ANSWERS)), 5) for _ in range(draw.randint(1, 4)))
        budget = BodyBudget(1 << 20)
        api = draw.choice((Api.VLLM_GRPC_GENERATE, Api.VLLM_GRPC_EMBED))
        reader = GrpcAnswerReader(api, True, budget)
        reader.begin(200, "application/grpc", "")
        while wire:
            size = draw.randint(1, 40)
            piece, wire = wire[:size], wire[size:]
            assert reader.feed(piece, False) is piece
            assert budget.used <= 200
        assert reader.finish() == b""
        assert budget.used == 0
        seen["usage"] += reader.usage is not None
        seen["token"] += reader.first_token
        seen["neither"] += reader.usage is None and not reader.first_token
    return seen


def test_answers() -> None:
    assert min(_answers().values()) > 50


# -- faults that these tests must see ------------------------------------------------------------------


class Untolerant:
    @staticmethod
    def FromString(message: bytes) -> Any:
        if len(message) > 30:
            raise ValueError
        return pb.GenerateResponse.FromString(message)


def _keeps_all(self: Any) -> None:
    """The end lets nothing go."""


def _adds_a_byte(self: Any, chunk: bytes, last: bool) -> bytes:
    return FEED(self, chunk, last) + b"\0"


FEED = GrpcAnswerReader.feed


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (grpc_answer, "GenerateResponse", Untolerant),
        (GrpcAnswerReader, "release", _keeps_all),
        (GrpcAnswerReader, "feed", _adds_a_byte),
    ],
)
def test_a_faulty_reader_is_seen(where: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises((AssertionError, ValueError)):
        _answers()
