import json
from typing import Any

import pytest

from epp.payload.answer import AnswerReader
from epp.payload.records import Api, Usage
from epp.payload.shapes import EXACT_BYTES

SSE = "text/event-stream"
JSON = "application/json"


def reader(
    content_type: str = SSE,
    model: str = "m",
    target: str = "m",
    api: Api = Api.CHAT,
    status: int = 200,
    encoding: str = "",
) -> AnswerReader:
    made = AnswerReader(api, model, target)
    made.begin(status, content_type, encoding)
    return made


def usage_in(value: Any) -> Usage | None:
    streamed, plain = reader(), reader(JSON)
    text = json.dumps({"usage": value}).encode()
    streamed.feed(b"data: " + text + b"\n\n", False)
    assert plain.feed(text, True) == text
    assert streamed.usage == plain.usage
    return plain.usage


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 2}, Usage(3, 2)),
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(3, 2)),
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {}}, Usage(3, 2)),
        (
            {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}},
            Usage(3, 2, 0),
        ),
        (
            {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": "1"}},
            Usage(3, 2, 1),
        ),
        ({"prompt_tokens": "12"}, Usage(12, 0)),
        ({"prompt_tokens": "12.0", "completion_tokens": "many"}, Usage(12, 0)),
        ({"prompt_tokens": 12.0, "completion_tokens": [1]}, Usage(12, 0)),
        ({"prompt_tokens": True, "completion_tokens": -5}, Usage(0, 0)),
        ({"prompt_tokens": "1e400", "completion_tokens": "nan"}, Usage(0, 0)),
        ({"prompt_tokens": 10**30, "completion_tokens": 1}, Usage(2**53, 1)),
        ({"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": 7}, Usage(1, 1)),
        ({"prompt_tokens_details": 7}, None),
        ({}, None),
        ("none", None),
        (None, None),
        (7, None),
        ([{"prompt_tokens": 1}], None),
    ],
)
def test_usage_of_any_type(value: Any, expected: Usage | None) -> None:
    assert usage_in(value) == expected


EVENTS_CUT = [
    b'data: {"id":"1","usa',
    b'ge":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DO',
    b"NE]\n\n",
]


def test_usage_of_an_event_cut_in_two() -> None:
    followed = reader()
    assert [followed.feed(chunk, False) for chunk in EVENTS_CUT[:2]] == EVENTS_CUT[:2]
    assert followed.usage == Usage(3, 2)
    assert followed.feed(EVENTS_CUT[2], True) == EVENTS_CUT[2]
    assert followed.usage == Usage(3, 2)


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5}}\n\ndata: [DONE]\n\n',
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5}}\n\n',
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5}}',
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5}}\r\n\r\ndata: [DONE]\r\n\r\n',
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5}}\r\rdata: [DONE]\r\r',
        b'event: chunk\nid: 7\ndata: {"usage":{"prompt_tokens":10,\ndata:"completion_tokens":5}}\n\n',
        (
            b'data:{"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
            b'data:{"usage":{"prompt_tokens":10,"completion_tokens":5}}\n\ndata: {"usage":null}\n\n'
        ),
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5},"x":{"usage":{"prompt_tokens":1}}}\n\n',
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5},"x":NaN}\n\n',
        b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5},"x":"\\ud83d"}\n\n',
        b'\xef\xbb\xbfdata: {"usage":{"prompt_tokens":10,"completion_tokens":5}}\n\ndata: [DONE]\n\n',
        (
            b'data: {"usage":{"prompt_tokens":10,"completion_tokens":5}}\n\n'
            b'data: {"usage":null,"max_tokens":1}\n\ndata: {"max_tokens":1}\n\n'
        ),
        b': "usage"\n\ndata: {"usage":{"prompt_tokens":10,"completion_tokens":5}}\n\n: "usage"\n\n',
    ],
)
def test_usage_of_streams(stream: bytes) -> None:
    for size in (1, 2, 3, 1000):
        followed = reader()
        for start in range(0, len(stream), size):
            followed.feed(stream[start : start + size], False)
        assert followed.finish() == b""
        assert followed.usage == Usage(10, 5)


@pytest.mark.parametrize(
    ("api", "data", "is_token"),
    [
        (Api.CHAT, '{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (Api.CHAT, '{"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}', False),
        (Api.CHAT, '{"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[]}}]}', False),
        (Api.CHAT, '{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', True),
        (Api.CHAT, '{"choices":[{"delta":{"role":"assistant","reasoning_content":"a"}}]}', True),
        (Api.CHAT, '{"choices":[{"delta":{"role":"assistant","tool_calls":[{"index":0}]}}]}', True),
        (Api.CHAT, '{"choices":[{"delta":{"content":"a"}}]}', True),
        (Api.CHAT, '{"choices":[{"delta":{"content":""}}]}', True),
        (Api.CHAT, '{"choices":[{"delta":{},"finish_reason":"stop"}]}', True),
        (Api.CHAT, '{"choices":[],"prompt_filter_results":[]}', False),
        (Api.CHAT, '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":0}}', False),
        (Api.CHAT, '{"choices":null}', False),
        (Api.CHAT, '{"error":{"message":"broken"}}', False),
        (Api.CHAT, '{"choices":[{"delta":{"content":"a"},"logprobs":{"top":[-Infinity,NaN]}}]}', True),
        (Api.CHAT, '{"choices":[{"delta":{"content":"\\ud83d"}}]}', True),
        (Api.CHAT, '{"choices":[{"delta":{"role":"assistant","content":""},"logprobs":NaN}]}', False),
        (Api.CHAT, '{"error":{"message":"broken","param":NaN}}', False),
        (Api.CHAT, '{"choices":[{"delta":{"content":"NaN"}}', False),
        (Api.CHAT, "[DONE]", False),
        (Api.CHAT, "", False),
        (Api.COMPLETIONS, '{"choices":[{"text":"a"}]}', True),
        (Api.COMPLETIONS, '{"choices":[{"text":""}]}', True),
        (Api.COMPLETIONS, '{"choices":[]}', False),
    ],
)
def test_first_token(api: Api, data: str, is_token: bool) -> None:
    followed = reader(api=api)
    followed.feed(f"data: {data}\n".encode(), False)
    assert not followed.first_token
    followed.feed(b"\n", False)
    assert followed.first_token is is_token


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
@pytest.mark.parametrize("content_type", [SSE, JSON])
def test_errors_have_no_tokens(status: int, content_type: str) -> None:
    followed = reader(content_type, "alias", "m", status=status)
    body = b'data: {"model":"m","choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":1}}\n\n'
    assert followed.feed(body, True) == body
    assert not followed.first_token
    assert followed.usage is None


@pytest.mark.parametrize(
    ("content_type", "streaming", "may_change"),
    [
        ("text/event-stream; charset=utf-8", True, True),
        ("Text/Event-Stream", True, True),
        ("application/json", False, True),
        ("application/problem+json; charset=utf-8", False, True),
        ("", False, True),
        ("text/plain", False, False),
        ("audio/mpeg", False, False),
    ],
)
def test_kinds_of_answers(content_type: str, streaming: bool, may_change: bool) -> None:
    made = AnswerReader(Api.CHAT, "alias", "m")
    assert made.begin(200, content_type, "") is may_change
    assert made.streaming is streaming


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_compressed_answers_pass_unread(encoding: str) -> None:
    made = AnswerReader(Api.CHAT, "alias", "m")
    assert not made.begin(200, JSON, encoding)
    chunk = b'{"model":"m","usage":{"prompt_tokens":1}}'
    assert made.feed(chunk, True) == chunk
    assert made.first_token
    assert made.usage is None
    assert made.begin(200, JSON, "Identity")


@pytest.mark.parametrize(("model", "target"), [("m", "m"), ("", "m"), ("m", ""), ("", "")])
def test_nothing_to_put_back(model: str, target: str) -> None:
    assert not AnswerReader(Api.CHAT, model, target).begin(200, SSE, "")


def test_passthrough_answers_pass_unread() -> None:
    followed = reader(SSE, "alias", "m", Api.PASSTHROUGH)
    chunk = b'data: {"model":"m"}\n\n'
    assert followed.feed(chunk, False) is chunk
    assert followed.first_token
    assert followed.streaming


def renamed(body: str, content_type: str, client: str = "alias", engine: str = "meta/llama-3") -> str:
    results = set()
    for size in (1, 2, 5, 1000):
        followed = reader(content_type, client, engine)
        data = body.encode()
        out = b"".join(followed.feed(data[at : at + size], False) for at in range(0, len(data), size))
        results.add((out + followed.finish()).decode())
    assert len(results) == 1
    return results.pop()


@pytest.mark.parametrize(
    "document",
    [
        '{"model":@}',
        '{"model": @}',
        ' \n{ "id" : "x" , "model"\t:\n@ , "n":1}',
        '{"choices":[{"model":"meta/llama-3","text":"\\"model\\":\\"meta/llama-3\\""}],"model":@,"usage":{}}',
        '{"a":{"b":{"model":"meta/llama-3"},"c":["}","{[",{"model":"meta/llama-3"}]},"model":@}',
        '{"text":"meta/llama-3","a":"model","b":"\\\\","c":"\\"","d":-1.5e3,"e":null,"model":@}',
        '{"":"","x\\"model":"meta/llama-3","model":@}',
        '{"mod\\u0065l":@}',
    ],
)
@pytest.mark.parametrize("spelled", ['"meta/llama-3"', '"meta\\/llama-3"', '"m\\u0065ta/llama-3"'])
def test_only_the_objects_own_model_is_renamed(document: str, spelled: str) -> None:
    before, after = document.replace("@", spelled), document.replace("@", '"alias"')
    assert renamed(before, JSON) == after
    one_line = " ".join(before.split("\n"))
    for event in ("data: @\n\n", "data:@\r\n\r\n", "event: x\ndata: @\nid: 1\n\n", "data: @"):
        expected = event.replace("@", " ".join(after.split("\n")))
        assert renamed(event.replace("@", one_line), SSE) == expected
    lines = event_of_lines(before), event_of_lines(after)
    assert renamed(lines[0], SSE) == lines[1]


BYTE_ORDER_MARK = "\ufeff"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (JSON, '{"model":@}'),
        (JSON, ' {"a":1,"model":@}'),
        (SSE, 'data: {"model":@}\n\ndata: {"model":@}\n\ndata: [DONE]\n\n'),
        (SSE, 'data: {"model":@}\r\n\r\n'),
        (SSE, 'event: x\ndata: {"model":@}'),
        (SSE, '\n\ndata: {"model":@}\n\n'),
    ],
)
def test_a_byte_order_mark_in_front_changes_nothing(content_type: str, body: str) -> None:
    marked = BYTE_ORDER_MARK + body.replace("@", '"meta/llama-3"')
    assert renamed(marked, content_type) == BYTE_ORDER_MARK + body.replace("@", '"alias"')
    followed = reader(content_type, "alias", "meta/llama-3")
    followed.feed(marked.encode(), True)
    assert followed.events == body.count("data: {")


def test_an_answer_of_nothing_but_a_byte_order_mark_passes() -> None:
    assert renamed(BYTE_ORDER_MARK, JSON) == BYTE_ORDER_MARK
    assert renamed(BYTE_ORDER_MARK, SSE) == BYTE_ORDER_MARK


def event_of_lines(document: str) -> str:
    return "".join(f"data: {line}\n" for line in document.replace(",", ",\n").split("\n")) + "\n"


@pytest.mark.parametrize(
    "document",
    [
        '{"model":"other"}',
        '{"model":null,"x":{"model":"meta/llama-3"}}',
        '{"model":["meta/llama-3"]}',
        '{"x":{"model":"meta/llama-3"}}',
        '[{"model":"meta/llama-3"}]',
        '"model"',
        "meta/llama-3",
        '{"model" "meta/llama-3"}',
        '{"model":"meta/llama-3',
        '{"mod',
        '{"a":"\\',
        "{}",
        "",
        "}{",
        '{{"model":"meta/llama-3"}}',
        "[DONE]",
    ],
)
def test_nothing_else_is_renamed(document: str) -> None:
    assert renamed(document, JSON) == document
    assert renamed(f"data: {document}\n\n", SSE) == f"data: {document}\n\n"


def test_odd_names() -> None:
    engine, client = 'a"b\\c/é\u20ac', 'ü "x"\n'
    for spelled in (json.dumps(engine), json.dumps(engine, ensure_ascii=False)):
        after = renamed(f'{{"model":{spelled},"x":{spelled}}}', JSON, client, engine)
        assert after == f'{{"model":{json.dumps(client)},"x":{spelled}}}'


def test_bytes_of_a_plain_answer_flow_while_it_is_renamed() -> None:
    followed = reader(JSON, "alias", "m")
    opening = b'{"choices":[{"text":"'
    assert followed.feed(opening, False) == opening
    for _ in range(100):
        assert followed.feed(b"abc \\n" * 100, False) == b"abc \\n" * 100
    assert followed.feed(b'"}],"mo', False) == b'"}],'
    assert followed.feed(b'del":"m"}', True) == b'"model":"alias"}'


def test_one_event_at_most_is_held_back() -> None:
    followed = reader(SSE, "alias", "m")
    event, expected = b'data: {"model":"m"}\n\n', b'data: {"model":"alias"}\n\n'
    assert followed.feed(event + event[:9], False) == expected
    assert followed.feed(event[9:] + event, False) == expected * 2
    assert followed.feed(event[:-1], False) == b""
    assert followed.finish() == expected[:-1]
    assert followed.finish() == b""


@pytest.mark.parametrize("opening", [b'{"', b'{"model":"', b'{"a":1,"model" : "'])
def test_a_name_without_end_is_not_held_back(opening: bytes) -> None:
    """What may still become the model's name is held, but no more of it than any name has."""
    followed = reader(JSON, "alias", "m")
    piece = b"k" * 4096
    sent, passed = opening, followed.feed(opening, False)
    for _ in range(50):
        sent += piece
        passed += followed.feed(piece, False)
        assert len(sent) - len(passed) < 80 << 10
    assert passed + followed.finish() == sent


def test_a_long_answer_is_read_exactly() -> None:
    text = "x" * (EXACT_BYTES - 1000)
    body = json.dumps({"usage": {"prompt_tokens": 7, "completion_tokens": 8}, "text": text}).encode()
    followed = reader(JSON)
    for start in range(0, len(body), 60_000):
        followed.feed(body[start : start + 60_000], False)
    followed.feed(b"", True)
    assert followed.usage == Usage(7, 8)


@pytest.mark.parametrize("members", [("usage", "text"), ("text", "usage")])
def test_a_longer_answer_is_read_at_its_ends(members: tuple[str, str]) -> None:
    document = {"usage": {"prompt_tokens": 7, "completion_tokens": 8}, "text": "x" * (3 * EXACT_BYTES)}
    body = json.dumps({name: document[name] for name in members}).encode()
    followed = reader(JSON)
    for start in range(0, len(body), 60_000):
        followed.feed(body[start : start + 60_000], False)
    followed.feed(b"", True)
    assert followed.usage == Usage(7, 8)


@pytest.mark.parametrize("left", [10, 30, 40, 60, 100_000])
def test_usage_at_the_end_of_an_event_that_is_too_long_to_keep(left: int) -> None:
    picture = b'data: {"type":"image_generation.completed","b64_json":"' + b"A" * 300_000
    event = picture + b'","usage":{"input_tokens":10,"output_tokens":5}}\n\n'
    followed = reader(SSE, api=Api.IMAGES)
    followed.feed(event[:-left], False)
    assert followed.usage is None
    followed.feed(event[-left:], False)
    followed.feed(b"data: [DONE]\n\n", True)
    assert followed.usage == Usage(10, 5)


def test_an_event_without_end_flows_on() -> None:
    followed = reader(SSE, "alias", "m")
    chunk = b"data: " + b"x" * 100_000
    count = EXACT_BYTES // len(chunk) + 10
    out = b"".join(followed.feed(chunk, False) for _ in range(count))
    assert out == chunk * count
    tail = b'\n\ndata: {"model":"m","usage":{"prompt_tokens":7,"completion_tokens":8}}\n\n'
    assert followed.feed(tail, True) == tail
    assert followed.usage == Usage(7, 8)


def test_a_reader_that_was_not_begun_passes_everything() -> None:
    followed = AnswerReader(Api.CHAT, "a", "b")
    assert followed.feed(b'data: {"model":"b"}\n\n', True) == b'data: {"model":"b"}\n\n'
    assert followed.finish() == b""


def test_the_final_headers_begin_anew() -> None:
    followed = AnswerReader(Api.CHAT, "alias", "m")
    assert not followed.begin(103, "text/html", "")
    assert followed.begin(200, SSE, "")
    assert followed.feed(b'data: {"model":"m"}\n\n', False) == b'data: {"model":"alias"}\n\n'
