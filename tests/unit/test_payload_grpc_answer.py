"""Answers of vLLM's gRPC API, cut anywhere, against reading them whole."""

import random
from typing import Any

import pytest

from epp.extproc.limits import BodyBudget
from epp.payload.grpc_answer import GrpcAnswerReader
from epp.payload.kept import Kept
from epp.payload.records import Api, Usage
from epp.payload.shapes import EXACT_BYTES
from epp.wire import vllm_engine_pb2 as pb

GRPC = "application/grpc"


def framed(message: Any, flag: int = 0) -> bytes:
    body = message if isinstance(message, bytes) else message.SerializeToString()
    return bytes([flag]) + len(body).to_bytes(4) + body


def chunk(*ids: int, prompt: int = 0, output: int = 0, cached: int = 0) -> bytes:
    part = pb.GenerateStreamChunk(
        token_ids=ids, prompt_tokens=prompt, completion_tokens=output, cached_tokens=cached
    )
    return framed(pb.GenerateResponse(chunk=part))


def complete(prompt: int, output: int, cached: int) -> bytes:
    part = pb.GenerateComplete(prompt_tokens=prompt, completion_tokens=output, cached_tokens=cached)
    return framed(pb.GenerateResponse(complete=part))


def reader(
    api: Api = Api.VLLM_GRPC_GENERATE, status: int = 200, budget: BodyBudget | None = None, **head: str
) -> GrpcAnswerReader:
    made = GrpcAnswerReader(api, True, budget)
    changes = made.begin(status, head.get("content_type", GRPC), head.get("encoding", ""))
    assert changes is False
    return made


STREAM = [
    chunk(),
    chunk(5),
    chunk(6, 7, prompt=9, output=3, cached=4),
    chunk(8),
    chunk(prompt=9, output=4, cached=4),
]


def follow(made: GrpcAnswerReader, parts: list[bytes]) -> None:
    for part in parts:
        assert made.feed(part, False) is part
    assert made.finish() == b""


def test_a_stream() -> None:
    made = reader()
    seen = []
    for message in STREAM:
        made.feed(message, False)
        seen.append((made.first_token, made.usage))
    assert seen == [
        (False, None),
        (True, None),
        (True, Usage(9, 3, 4)),
        (True, Usage(9, 3, 4)),
        (True, Usage(9, 4, 4)),
    ]
    assert made.events == 5


def test_an_answer_in_one_message() -> None:
    made = reader()
    follow(made, [complete(7, 10, 0)])
    assert (made.first_token, made.usage, made.events) == (True, Usage(7, 10, 0), 1)


def test_an_embedding() -> None:
    made = reader(Api.VLLM_GRPC_EMBED)
    assert made.usage is None
    follow(made, [framed(pb.EmbedResponse(prompt_tokens=6))])
    assert (made.first_token, made.usage) == (True, Usage(6, 0))


def cuts(body: bytes, draw: random.Random) -> list[bytes]:
    """The body in pieces, some of them empty."""
    places = sorted(draw.choices(range(len(body) + 1), k=draw.randint(0, 12)))
    return [body[start:end] for start, end in zip([0, *places], [*places, len(body)], strict=True)]


def _cut_anywhere() -> None:
    draw = random.Random(11)
    body = b"".join([*STREAM, complete(1, 2, 3)])
    for _ in range(400):
        budget = BodyBudget(1 << 20)
        made = reader(budget=budget)
        follow(made, cuts(body, draw))
        assert (made.first_token, made.usage, made.events) == (True, Usage(1, 2, 3), 6)
        assert budget.used == 0


def test_wherever_it_is_cut() -> None:
    _cut_anywhere()


def test_the_last_piece_gives_back_what_was_kept() -> None:
    budget = BodyBudget(1 << 20)
    made = reader(budget=budget)
    made.feed(STREAM[2][:-1], False)
    assert budget.used == len(STREAM[2]) - 1
    made.feed(b"", True)
    assert budget.used == 0


def test_the_first_token_is_where_it_was_completed() -> None:
    made = reader()
    made.feed(STREAM[0] + STREAM[1][:-1], False)
    assert not made.first_token
    made.feed(STREAM[1][-1:], False)
    assert made.first_token


@pytest.mark.parametrize(
    "garbage", [b"\0\0\0\0\2\xff\xff", framed(b"abc", flag=1), framed(b"\xff" * 9, flag=200)]
)
def test_what_cannot_be_read_passes_and_counts_as_output(garbage: bytes) -> None:
    made = reader()
    follow(made, [garbage, complete(1, 2, 0)])
    assert (made.first_token, made.usage) == (True, Usage(1, 2, 0))


def test_a_message_of_another_api_tells_nothing() -> None:
    made = reader()
    follow(made, [framed(b"")])
    assert (made.first_token, made.usage) == (False, None)


def test_a_message_that_is_too_long_is_not_kept() -> None:
    budget = BodyBudget(1 << 30)
    made = reader(budget=budget)
    size = 3 * EXACT_BYTES
    made.feed(b"\0" + size.to_bytes(4) + b"\xff" * 100, False)
    assert made.first_token
    left = size - 100
    while left:
        step = min(left, 1 << 20)
        made.feed(b"\xff" * step, False)
        left -= step
        assert budget.used == 0
    follow(made, [complete(3, 4, 0)])
    assert made.usage == Usage(3, 4, 0)


@pytest.mark.parametrize("status", [400, 503])
def test_an_error_has_no_first_token(status: int) -> None:
    made = reader(status=status)
    follow(made, STREAM)
    assert (made.first_token, made.usage) == (False, None)


def test_another_content_type_is_not_read() -> None:
    made = reader(content_type="text/html")
    follow(made, STREAM)
    assert (made.first_token, made.usage) == (True, None)


# -- faults that these tests must see ------------------------------------------------------------------


def _forgets_the_rest(self: Any, piece: bytes) -> None:
    FOLLOW(self, piece)
    self._partial.clear()


def _reads_one_message_a_piece(self: Any, piece: bytes) -> None:
    FOLLOW(self, piece)
    del self._partial[:1]


def _charges_all_again(kept: Kept) -> None:
    if kept.account is not None:
        kept.account.charge(len(kept))


FOLLOW = GrpcAnswerReader._follow


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (GrpcAnswerReader, "_follow", _forgets_the_rest),
        (GrpcAnswerReader, "_follow", _reads_one_message_a_piece),
        (Kept, "settle", _charges_all_again),
    ],
)
def test_a_faulty_reader_is_seen(where: type, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError):
        _cut_anywhere()
