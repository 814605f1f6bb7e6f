"""Answers of Vertex AI's gRPC API, message by message."""

import json
from typing import Any

import pytest

from epp.extproc.limits import BodyBudget
from epp.payload.answer import AnswerReader
from epp.payload.readers import READERS, answer_reader
from epp.payload.records import Api, Usage
from epp.payload.shapes import EXACT_BYTES
from epp.payload.vertex import CARRIED
from epp.payload.vertex_answer import VertexAnswerReader
from tests.data.vertex.google import HttpBody, framed, frames, recorded, told

ENGINE, CLIENT = "acme/tiny-llama", "mine"
GRPC, SSE, JSON = "application/grpc", "text/event-stream", "application/json"
CHAT, STREAM_RAW, RAW = CARRIED


def reader(
    api: Api = CHAT,
    *,
    stream: bool = True,
    client: str = CLIENT,
    status: int = 200,
    content_type: str = GRPC,
    budget: BodyBudget | None = None,
) -> VertexAnswerReader:
    made = VertexAnswerReader(api, client, ENGINE, stream, budget)
    renames = status < 400 and content_type.startswith(GRPC) and client not in ("", ENGINE)
    assert made.begin(status, content_type, "") is renames
    return made


def chunk(text: str = "a", model: str = ENGINE, **fields: Any) -> dict[str, Any]:
    return {"id": "1", "model": model, "choices": [{"index": 0, "delta": {"content": text}}], **fields}


def event(document: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(document).encode()


USAGE = {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}
OPENING = {"id": "1", "model": ENGINE, "choices": [{"index": 0, "delta": {"role": "assistant"}}]}


def test_each_api_has_its_reader() -> None:
    for api in CARRIED:
        assert isinstance(answer_reader(api, "m", "m", stream=True), VertexAnswerReader)
        assert answer_reader(api, "m", "m", stream=True).streaming
        assert not READERS[api](api, "m", "m", False, None).streaming


@pytest.mark.parametrize(
    ("name", "api", "stream"),
    [
        ("chat-stream-continuous-usage", CHAT, True),
        ("chat-max-completion-tokens", CHAT, False),
        ("apis/responses-stream", STREAM_RAW, True),
        ("apis/responses", STREAM_RAW, False),
        ("apis/responses", RAW, False),
    ],
)
@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("client", [CLIENT, ""])
def test_a_recorded_answer_is_what_it_is_over_http(
    name: str, api: Api, stream: bool, typed: bool, client: str
) -> None:
    """Each piece in a message of its own; with or without its type in the first of them."""
    _, pieces = recorded(name)
    kind = SSE if stream else JSON
    http = AnswerReader(CARRIED[api], client, ENGINE)
    http.begin(200, kind, "")
    made = reader(api, stream=stream, client=client)
    for number, piece in enumerate(pieces):
        message = told(piece, kind if typed and not number else "")
        if api is RAW:
            (got,) = frames(made.feed(message, False))
            assert got.data == http.feed(piece, True)
            continue
        (got,) = frames(made.feed(message, False))
        assert got.data == http.feed(piece, False)
        assert (made.first_token, made.events) == (http.first_token, http.events)
    assert (made.finish(), http.finish()) == (b"", b"")
    assert made.usage == http.usage
    assert made.usage is not None
    assert made.usage.output_tokens > 0
    assert made.first_token


def test_lengths_are_those_of_the_renamed_messages() -> None:
    """A name that makes both lengths take another byte; type and extensions stay."""
    client = "a-model-with-a-longer-name-" * 8
    made = reader(client=client)
    message = HttpBody(content_type=SSE, data=event(chunk()))
    message.extensions.add(type_url="t/x", value=b"\1")
    (got,) = frames(made.feed(framed(message), False))
    assert json.loads(got.data[6:]) == chunk(model=client)
    message.data = got.data
    assert got == message


def test_what_names_no_model_of_the_engine_passes_to_the_byte() -> None:
    made = reader()
    short = b'data: {"model":"other"}\n\n' * 2
    # Out of order, and with a field that nobody knows.
    odd = framed(b"\x12%c%b\x0a\x11%b\x92\x06\x01x" % (len(short), short, SSE.encode()))
    for message in (odd, told(event(chunk(model="other")), SSE), told(b"data: [DONE]\n\n"), told(b"")):
        assert made.feed(message, False) == message


def test_json_that_names_no_model_of_the_engine_passes_to_the_byte() -> None:
    made = reader()
    indented = json.dumps(chunk(model="other"), indent=2).encode()
    for number, data in enumerate((indented, b"", indented.replace(b"\n", b"\r\n"))):
        assert made.feed(told(data), False) == told(data)
        assert made.events == (1, 1, 2)[number]


# -- JSON without the words of events ------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 1])
def test_an_event_in_each_message(indent: int | None) -> None:
    documents = [OPENING, chunk("a"), chunk("b"), {**chunk(""), "choices": [], "usage": USAGE}]
    made = reader()
    seen = []
    for document in documents:
        (got,) = frames(made.feed(told(json.dumps(document, indent=indent).encode()), False))
        assert json.loads(got.data) == {**document, "model": CLIENT}
        seen.append((made.first_token, made.events, made.usage))
    assert [first for first, _, _ in seen] == [False, True, True, True]
    assert [events for _, events, _ in seen] == [1, 2, 3, 4]
    assert [usage for _, _, usage in seen] == [None, None, None, Usage(10, 20)]
    assert made.finish() == b""


def test_an_event_of_responses_in_each_message() -> None:
    response = {"id": "1", "model": ENGINE}
    documents = [
        {"type": "response.created", "response": response},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": {**response, "usage": {"input_tokens": 3}}},
    ]
    made = reader(STREAM_RAW)
    got = [made.feed(told(json.dumps(document).encode()), False) for document in documents]
    models = [json.loads(frames(one)[0].data).get("response", {}).get("model") for one in got]
    assert models == [CLIENT, None, CLIENT]
    assert (made.first_token, made.events, made.usage) == (True, 3, Usage(3, 0))


def test_a_document_in_several_messages() -> None:
    document = json.dumps({**chunk(), "usage": USAGE}).encode()
    made = reader(stream=False)
    passed = b"".join(made.feed(told(document[at : at + 7]), False) for at in range(0, len(document), 7))
    assert made.finish() == b""
    assert made.usage == Usage(10, 20)
    data = b"".join(message.data for message in frames(passed))
    assert json.loads(data) == {**chunk(model=CLIENT), "usage": USAGE}
    assert made.events == 0


# -- pieces --------------------------------------------------------------------------------------------


def test_an_event_in_two_messages_is_renamed_in_the_later_one() -> None:
    whole = event(chunk("a"))
    cut = whole.index(ENGINE.encode()) + 3
    made = reader()
    (first,) = frames(made.feed(told(whole[:cut], SSE), False))
    (second,) = frames(made.feed(told(whole[cut:]), False))
    assert (first.content_type, first.data) == (SSE, b"")
    assert json.loads(second.data[6:]) == chunk("a", model=CLIENT)


@pytest.mark.parametrize("last", [True, False])
def test_what_is_held_at_the_end_comes_in_a_message_of_its_own(last: bool) -> None:
    made = reader()
    passed = made.feed(told(event(chunk()) + event(chunk("b"))[:-2]), last)
    passed += b"" if last else made.finish()
    one, two = frames(passed)
    assert [json.loads(message.data[6:]) for message in (one, two)] == [
        chunk(model=CLIENT),
        chunk("b", model=CLIENT),
    ]


def test_the_one_message_of_an_answer_stays_one() -> None:
    """Of `RawPredict` a client takes no second message."""
    created = event({"type": "response.created", "response": {"model": ENGINE}})
    for data in (created[:-2], b'{"model":"acm', b"data: x"):
        budget = BodyBudget(1 << 20)
        made = reader(RAW, budget=budget)
        (got,) = frames(made.feed(told(data), False) + made.finish())
        assert got.data == data.replace(ENGINE.encode(), CLIENT.encode())
        assert budget.used == 0


def test_a_message_that_is_not_whole_at_the_end_passes() -> None:
    budget = BodyBudget(1 << 20)
    made = reader(budget=budget)
    cut = told(event(chunk()))[:-4]
    assert made.feed(cut, False) == b""
    assert budget.used == len(cut)
    assert made.finish() == cut
    assert budget.used == 0


def test_release_gives_everything_back() -> None:
    budget = BodyBudget(1 << 20)
    made = reader(budget=budget)
    made.feed(told(event(chunk())[:-3]) + b"\0\0\0", False)
    assert budget.used > 3
    made.release()
    assert budget.used == 0


# -- what cannot be read -------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [framed(b"abc", flag=1), framed(b"\xff"), framed(b"\x0f" * 9, flag=200)])
def test_what_cannot_be_read_passes_in_its_place(odd: bytes) -> None:
    """Behind what is held of an event, and in front of what comes next."""
    held, after = b"data: held", event(chunk("b"))
    made = reader()
    passed = made.feed(told(held, SSE) + odd + told(after), False)
    assert made.first_token
    assert made.events == 3
    at = passed.index(odd)
    assert b"".join(message.data for message in frames(passed[:at])) == held
    (got,) = frames(passed[at + len(odd) :])
    assert json.loads(got.data[6:]) == chunk("b", model=CLIENT)


def test_nothing_held_nothing_added_around_what_cannot_be_read() -> None:
    odd = framed(b"abc", flag=1)
    assert reader().feed(odd, False) == odd
    assert reader(client="").feed(odd, False) is odd


def test_a_message_that_is_too_long_passes_unkept() -> None:
    budget = BodyBudget(1 << 30)
    made = reader(budget=budget)
    size = EXACT_BYTES + 3_000_000
    head = b"\0" + size.to_bytes(4)
    passed = [made.feed(told(b"data: held", SSE) + head + b"\xff" * 100, False)]
    assert made.first_token
    for at in range(100, size, 1 << 20):
        passed.append(made.feed(b"\xff" * min(1 << 20, size - at), False))
        assert budget.used == 0
    passed.append(made.feed(told(event(chunk("b", usage=USAGE))), True))
    whole = b"".join(passed)
    at = whole.index(head)
    assert b"".join(message.data for message in frames(whole[:at])) == b"data: held"
    (got,) = frames(whole[at + 5 + size :])
    assert json.loads(got.data[6:])["model"] == CLIENT
    assert made.usage == Usage(10, 20)


def test_data_of_another_kind_passes_unread() -> None:
    made = reader()
    for data in (b"\x89PNG\r\n\x1a\n", event(chunk(usage=USAGE))):
        message = told(data, "image/png")
        assert made.feed(message, False) == message
    assert (made.first_token, made.usage, made.events) == (True, None, 0)


def test_blank_data_says_nothing_yet() -> None:
    made = reader()
    for data in (b"", b" \n", b"\xef\xbb\xbf"):
        assert made.feed(told(data), False) == told(data)
    assert not made.first_token
    (got,) = frames(made.feed(told(event(chunk())), False))
    assert json.loads(got.data[6:])["model"] == CLIENT


@pytest.mark.parametrize(("status", "content_type"), [(400, GRPC), (503, GRPC), (200, "text/html")])
def test_errors_and_other_answers_are_left_alone(status: int, content_type: str) -> None:
    made = reader(status=status, content_type=content_type)
    message = told(event(chunk(usage=USAGE)))
    assert made.feed(message, False) is message
    assert made.feed(b"\0", True) == b"\0"
    assert (made.first_token, made.usage) == (status == 200, None)


@pytest.mark.parametrize("client", ["", ENGINE])
def test_without_another_name_every_piece_passes_at_once(client: str) -> None:
    made = reader(client=client)
    whole = told(event(OPENING), SSE) + told(event(chunk(usage=USAGE)))
    for at in range(0, len(whole), 9):
        piece = whole[at : at + 9]
        assert made.feed(piece, False) is piece
    assert made.finish() == b""
    assert (made.first_token, made.usage, made.events) == (True, Usage(10, 20), 2)
