"""What is kept of an answer while it passes, and how the events of a stream are counted."""

import json
from typing import Any

import pytest

from epp.payload.answer import AnswerReader
from epp.payload.records import Api, Usage
from epp.payload.shapes import EXACT_BYTES, TAIL_BYTES

SSE, JSON = "text/event-stream", "application/json"


class Counted:
    """An account that knows how much is held, and was at most."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def charge(self, n: int) -> None:
        self.held += n
        self.most = max(self.most, self.held)

    def give(self, n: int) -> None:
        self.held -= n


def reader(api: Api, content_type: str = SSE, model: str = "m", status: int = 200) -> AnswerReader:
    made = AnswerReader(api, model, "m")
    made.begin(status, content_type, "")
    return made


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


# -- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", [Api.IMAGES, Api.EMBEDDINGS])
@pytest.mark.parametrize("usage_first", [True, False])
def test_bulky_answers_are_not_kept(api: Api, usage_first: bool) -> None:
    account = Counted()
    followed = AnswerReader(api, "m", "m", account)
    followed.begin(200, JSON, "")
    usage = ["usage", {"prompt_tokens": 50, "completion_tokens": 7}]
    data = ["data", [{"b64_json": "iVBORw0KGgo" * 200_000, "embedding": [0.125] * 1000}]]
    body = json.dumps(dict([usage, data] if usage_first else [data, usage])).encode()
    for at in range(0, len(body), 16_000):
        followed.feed(body[at : at + 16_000], False)
    assert account.most <= 2 * TAIL_BYTES
    followed.feed(b"", True)
    assert account.held == 0
    assert followed.usage == Usage(50, 7)


NUMBERS, TEXT = json.dumps([0.0] * 60_000), json.dumps(["a"] * 60_000)


@pytest.mark.parametrize("content", [NUMBERS, TEXT])
@pytest.mark.parametrize("shift", range(5))
def test_the_end_that_is_kept_may_look_like_another_document(content: str, shift: int) -> None:
    followed = reader(Api.EMBEDDINGS, JSON)
    usage = '"usage":{"prompt_tokens":50,"total_tokens":50}'
    body = ("{" + " " * shift + f'"data":{content},{usage}}}').encode()
    for at in range(0, len(body), 16_000):
        followed.feed(body[at : at + 16_000], False)
    followed.feed(b"", True)
    assert followed.usage == Usage(50, 0)


@pytest.mark.parametrize("content", [NUMBERS, TEXT])
@pytest.mark.parametrize("shift", range(5))
def test_so_may_the_end_of_an_event(content: str, shift: int) -> None:
    followed = reader(Api.IMAGES)
    usage = '"usage":{"input_tokens":50,"output_tokens":7}'
    body = ("data: {" + " " * shift + f'"data":{content},{usage}}}\n\n').encode()
    for at in range(0, len(body), 16_000):
        followed.feed(body[at : at + 16_000], False)
    assert followed.usage == Usage(50, 7)


def test_a_bulky_event_is_not_kept() -> None:
    account = Counted()
    followed = AnswerReader(Api.IMAGES, "m", "m", account)
    followed.begin(200, SSE, "")
    usage = {"input_tokens": 50, "output_tokens": 7}
    body = stream({"type": "image_generation.completed", "b64_json": "iVBO" * 500_000, "usage": usage})
    for at in range(0, len(body), 16_000):
        followed.feed(body[at : at + 16_000], False)
    assert account.most <= 2 * TAIL_BYTES
    assert followed.usage == Usage(50, 7)
    assert followed.events == 1


@pytest.mark.parametrize("api", [Api.CHAT_RENDER, Api.COMPLETIONS_RENDER])
def test_nothing_is_kept_of_an_answer_without_usage(api: Api) -> None:
    account = Counted()
    followed = AnswerReader(api, "alias", "m", account)
    followed.begin(200, JSON, "")
    for _ in range(100):
        followed.feed(b'{"token_ids":[' + b"1," * 5000, False)
    assert account.most == 0


def test_counts_of_a_list_that_was_too_long_are_not_guessed() -> None:
    followed = reader(Api.SGLANG_GENERATE, JSON)
    outputs = [{"text": text, "meta_info": {"completion_tokens": 1}} for text in ("", "x" * EXACT_BYTES, "")]
    body = json.dumps(outputs).encode()
    for at in range(0, len(body), 60_000):
        followed.feed(body[at : at + 60_000], False)
    followed.feed(b"", True)
    assert followed.usage is None


def test_the_counts_of_a_long_message_are_found() -> None:
    followed = reader(Api.MESSAGES, JSON)
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 5}
    body = json.dumps({"content": "x" * 2 * EXACT_BYTES, "usage": usage}).encode()
    for at in range(0, len(body), 60_000):
        followed.feed(body[at : at + 60_000], False)
    followed.feed(b"", True)
    assert followed.usage == Usage(7, 5, 4)


# -- events --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 0),
        (b"data: {}\n\n", 1),
        (b"data:{}\n\ndata: {}\r\n\r\ndata: {}\r\r", 3),
        (b"data: {}\n\ndata: [DONE]\n\n", 1),
        (b"data: [DONE]\n\ndata: {}\n\ndata:  [DONE] \n\n", 1),
        (b'data: {"a":"[DONE] data: \\ndata: "}\n\n', 1),
        (b": ping\n\nevent: x\nid: 1\ndata: {}\n\nretry: 5\n\n", 1),
        (b"data: {\ndata: }\n\n", 2),
        (b"data\n\nxdata: {}\n\n data: {}\n\n", 0),
        (b"data: {}\n\ndata: {", 2),
        (b"data: {}\n\ndata:", 2),
        (b"data: {}\n\ndat", 1),
        (b"data: {}\n\ndata: {}", 2),
        (b"d1234:{}}\n\nid: {}\n\n", 0),
    ],
)
@pytest.mark.parametrize("api", [Api.CHAT, Api.SGLANG_GENERATE, Api.MESSAGES])
def test_events(api: Api, body: bytes, count: int) -> None:
    opening = b'data: {"choices":[{"delta":{"content":"a"}}],"text":"a","type":"x"}\n\n'
    for size in (1, 2, 7, 1000):
        for renamed in ("m", "alias"):
            followed = reader(api, model=renamed)
            followed.feed(opening, False)
            for at in range(0, len(body), size):
                followed.feed(body[at : at + size], False)
            followed.finish()
            assert followed.events == 1 + count


def test_what_is_not_a_stream_has_no_events() -> None:
    for content_type, status in ((JSON, 200), ("text/plain", 200), (SSE, 500)):
        followed = reader(Api.CHAT, content_type, status=status)
        followed.feed(b"data: {}\n\n", True)
        assert followed.events == 0


def test_a_short_piece_after_the_first_token() -> None:
    followed = reader(Api.CHAT)
    followed.feed(stream({"choices": [{"delta": {"content": "a"}}]}), False)
    for piece in (b"", b"\n", b"\n\n", b"}\n\n", b"data:\n\n"):
        assert followed.feed(piece, False) == piece
    assert followed.events == 2
