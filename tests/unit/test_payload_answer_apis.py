"""Where each HTTP API has its usage, its first token and its model, on bytes as its engines write them."""

import json
from typing import Any

import pytest

from epp.payload.answer import AnswerReader
from epp.payload.readers import READERS, answer_reader
from epp.payload.records import Api, Usage
from epp.payload.shapes import SHAPES
from epp.payload.usage import MOST_OUTPUTS
from epp.payload.vertex import CARRIED

SSE, JSON = "text/event-stream", "application/json"
GRPC = (Api.VLLM_GRPC_GENERATE, Api.VLLM_GRPC_EMBED, *CARRIED)


def reader(api: Api, content_type: str = SSE, model: str = "m", status: int = 200) -> AnswerReader:
    made = AnswerReader(api, model, "m")
    made.begin(status, content_type, "")
    return made


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def usage_of_stream(api: Api, *events: Any) -> Usage | None:
    followed = reader(api)
    for event in events:
        followed.feed(stream(event), False)
    whole = reader(api)
    whole.feed(stream(*events), True)
    assert followed.usage == whole.usage
    return followed.usage


def usage_of_document(api: Api, document: Any) -> Usage | None:
    followed = reader(api, JSON)
    followed.feed(json.dumps(document).encode(), True)
    return followed.usage


def test_every_http_api_has_a_row() -> None:
    http = {api for api in Api if api not in GRPC}
    assert set(SHAPES) == http
    assert http <= set(READERS)
    for api in http:
        assert isinstance(answer_reader(api, "m", "m"), AnswerReader)


def test_an_api_without_a_row_passes_unread() -> None:
    followed = AnswerReader(Api.VLLM_GRPC_GENERATE, "alias", "m")
    assert not followed.begin(200, JSON, "")
    assert followed.feed(b'{"model":"m","usage":{"prompt_tokens":1}}', True) == (
        b'{"model":"m","usage":{"prompt_tokens":1}}'
    )
    assert followed.usage is None


# -- usage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "document", "expected"),
    [
        (Api.EMBEDDINGS, {"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}, Usage(8, 0)),
        (
            Api.RESPONSES,
            {
                "usage": {
                    "input_tokens": 19,
                    "output_tokens": 6,
                    "input_tokens_details": {"cached_tokens": 16},
                }
            },
            Usage(19, 6, 16),
        ),
        (Api.RESPONSES, {"response": {"usage": {"input_tokens": 1}}}, None),
        (Api.CONVERSATIONS, {"id": "conv_1", "object": "conversation", "metadata": {}}, None),
        (Api.CHAT_RENDER, {"token_ids": [1], "usage": {"prompt_tokens": 1}}, None),
        (Api.COMPLETIONS_RENDER, [{"token_ids": [1], "usage": {"prompt_tokens": 1}}], None),
        (
            Api.IMAGES,
            {
                "data": [{"b64_json": "iVBO"}],
                "usage": {
                    "input_tokens": 50,
                    "output_tokens": 4160,
                    "total_tokens": 4210,
                    "input_tokens_details": {"text_tokens": 50, "image_tokens": 0},
                },
            },
            Usage(50, 4160),
        ),
        (Api.MESSAGES, {"usage": {"input_tokens": 31, "output_tokens": 6}}, Usage(31, 6)),
        (
            Api.MESSAGES,
            {
                "usage": {
                    "input_tokens": 15,
                    "output_tokens": 6,
                    "cache_read_input_tokens": 16,
                    "cache_creation_input_tokens": 4,
                }
            },
            Usage(35, 6, 16),
        ),
        (
            Api.MESSAGES,
            {"usage": {"input_tokens": 0, "output_tokens": 1, "cache_read_input_tokens": 16}},
            Usage(16, 1, 16),
        ),
        (
            Api.MESSAGES,
            {"usage": {"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": None}},
            Usage(3, 1),
        ),
        (Api.MESSAGES, {"usage": {"input_tokens": "3", "cache_read_input_tokens": [1]}}, Usage(3, 0, 0)),
        (Api.MESSAGES, {"usage": {"cache_read_input_tokens": 16}}, None),
        (Api.MESSAGES, {"usage": "none"}, None),
        (Api.COUNT_TOKENS, {"input_tokens": 31, "usage": {"input_tokens": 31}}, None),
        (Api.VLLM_GENERATE, {"usage": {"prompt_tokens": 4, "completion_tokens": 2}}, Usage(4, 2)),
        (
            Api.SGLANG_GENERATE,
            {
                "text": "a",
                "meta_info": {
                    "finish_reason": {"type": "length", "length": 2},
                    "prompt_tokens": 4,
                    "completion_tokens": 2,
                    "cached_tokens": 3,
                },
            },
            Usage(4, 2, 3),
        ),
        (
            Api.SGLANG_GENERATE,
            [
                {"text": "a", "meta_info": {"prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 3}},
                {"text": "b", "meta_info": {"prompt_tokens": 5, "completion_tokens": 1}},
                {"text": "c", "meta_info": None},
            ],
            Usage(9, 3, 3),
        ),
        (Api.SGLANG_GENERATE, {"usage": {"prompt_tokens": 4}}, None),
        (Api.SGLANG_GENERATE, {"meta_info": {"cached_tokens": 4}}, None),
        (Api.SGLANG_GENERATE, {"meta_info": 7}, None),
        (Api.SGLANG_GENERATE, [], None),
    ],
)
def test_usage_of_a_plain_answer(api: Api, document: Any, expected: Usage | None) -> None:
    assert usage_of_document(api, document) == expected


def test_usage_of_responses_stands_in_the_event_that_completes_them() -> None:
    data = {"type": "response.completed", "response": {"usage": {"input_tokens": 4, "output_tokens": 7}}}
    followed = reader(Api.RESPONSES)
    followed.feed(b'event: response.created\ndata: {"response":{"usage":null}}\n\n', False)
    followed.feed(b'event: unknown\ndata: {"type":"response.unknown","x":{"usage":{}}}\n\n', False)
    assert followed.usage is None
    followed.feed(b"event: response.completed\ndata: " + json.dumps(data).encode() + b"\n\n", False)
    assert followed.usage == Usage(4, 7)


@pytest.mark.parametrize("end", ["incomplete", "failed"])
def test_responses_that_end_early_tell_their_usage_too(end: str) -> None:
    event = {"type": f"response.{end}", "response": {"usage": {"input_tokens": 4, "output_tokens": 7}}}
    assert usage_of_stream(Api.RESPONSES, event) == Usage(4, 7)


def message_start(**usage: Any) -> dict[str, Any]:
    return {"type": "message_start", "message": {"model": "m", "usage": usage}}


def message_delta(**usage: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}


@pytest.mark.parametrize(
    ("start", "delta", "expected"),
    [
        ({"input_tokens": 20}, {"output_tokens": 10}, Usage(20, 10)),
        ({"input_tokens": 20, "output_tokens": 1}, {}, Usage(20, 1)),
        ({}, {"output_tokens": 10}, Usage(0, 10)),
        (
            {
                "input_tokens": 25,
                "cache_read_input_tokens": 10,
                "cache_creation_input_tokens": 5,
                "output_tokens": 1,
            },
            {"output_tokens": 15},
            Usage(40, 15, 10),
        ),
        # What was cached becomes known at the end, and then stands apart from the input.
        (
            {"input_tokens": 31, "output_tokens": 0},
            {"input_tokens": 15, "cache_read_input_tokens": 16, "output_tokens": 6},
            Usage(31, 6, 16),
        ),
        # An engine that has no counts at the end writes zeros.
        ({"input_tokens": 31, "output_tokens": 0}, {"input_tokens": 0, "output_tokens": 6}, Usage(31, 6)),
        (
            {"input_tokens": 5, "cache_read_input_tokens": 10},
            {"cache_read_input_tokens": 10, "output_tokens": 6},
            Usage(15, 6, 10),
        ),
        ({"input_tokens": 5}, {"output_tokens": None, "input_tokens": None}, Usage(5, 0)),
    ],
)
def test_usage_of_a_message_is_merged_from_its_start_and_its_end(
    start: dict[str, Any], delta: dict[str, Any], expected: Usage
) -> None:
    text = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
    assert usage_of_stream(Api.MESSAGES, message_start(**start), text, message_delta(**delta)) == expected


def test_usage_of_a_message_in_a_stream_with_broken_json() -> None:
    followed = reader(Api.MESSAGES)
    followed.feed(b'data: {"message":{"usage":{"input_tokens":20}},"x":NaN}\n\n', False)
    followed.feed(b'data: {"usage":{"output_tokens":10},"x":NaN}\n\n', False)
    assert followed.usage == Usage(20, 10)


def sglang(completion: int, finish: Any = None, index: int | None = None, **more: Any) -> dict[str, Any]:
    meta = {"prompt_tokens": 4, "completion_tokens": completion, "cached_tokens": 1, "finish_reason": finish}
    return {
        "text": "x" * completion,
        "meta_info": meta,
        **({} if index is None else {"index": index}),
        **more,
    }


def test_usage_of_sglang_is_that_of_its_last_event() -> None:
    done = {"type": "length", "length": 3}
    assert usage_of_stream(Api.SGLANG_GENERATE, sglang(1), sglang(2), sglang(3, done)) == Usage(4, 3, 1)


def test_outputs_of_sglang_add_up() -> None:
    events = [sglang(1, index=0), sglang(1, index=1), sglang(2, index=1), sglang(5, index=0)]
    assert usage_of_stream(Api.SGLANG_GENERATE, *events) == Usage(8, 7, 2)


def test_numbers_that_are_no_json_do_not_hide_counts_and_tokens_of_sglang() -> None:
    output = sglang(2, logprobs=[[float("-inf"), 7], [float("nan"), 8]])
    assert "NaN" in json.dumps(output)
    assert usage_of_stream(Api.SGLANG_GENERATE, output) == Usage(4, 2, 1)
    assert usage_of_document(Api.SGLANG_GENERATE, [output, output]) == Usage(8, 4, 2)
    followed = reader(Api.SGLANG_GENERATE)
    followed.feed(stream(output), False)
    assert followed.first_token


def test_outputs_of_sglang_without_end_are_not_kept_without_end() -> None:
    followed = reader(Api.SGLANG_GENERATE)
    for index in range(MOST_OUTPUTS + 10):
        followed.feed(stream(sglang(1, index=index)), False)
    assert followed.usage == Usage(4 * MOST_OUTPUTS, MOST_OUTPUTS, MOST_OUTPUTS)


@pytest.mark.parametrize("index", ["1", None, [], {}, 1.5])
def test_an_index_of_any_type(index: Any) -> None:
    assert usage_of_stream(Api.SGLANG_GENERATE, {**sglang(2), "index": index}) == Usage(4, 2, 1)


# -- first token ---------------------------------------------------------------------------------------


def delta(**values: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": values}


@pytest.mark.parametrize(
    ("api", "event", "is_token"),
    [
        (Api.RESPONSES, {"type": "response.created", "response": {}}, False),
        (Api.RESPONSES, {"type": "response.in_progress", "response": {}}, False),
        (Api.RESPONSES, {"type": "response.output_item.added", "item": {}}, False),
        (Api.RESPONSES, {"type": "response.content_part.added", "part": {"text": ""}}, False),
        (Api.RESPONSES, {"type": "response.output_text.delta", "delta": "a"}, True),
        (Api.RESPONSES, {"type": "response.refusal.delta", "delta": "a"}, True),
        (Api.RESPONSES, {"type": "response.reasoning_text.delta", "delta": "a"}, True),
        (Api.RESPONSES, {"type": "response.function_call_arguments.delta", "delta": "{"}, True),
        (Api.RESPONSES, {"type": "response.image_generation_call.partial_image"}, True),
        (Api.RESPONSES, {"type": "response.completed", "response": {}}, True),
        (Api.RESPONSES, {"type": "response.incomplete", "response": {}}, True),
        (Api.RESPONSES, {"type": "response.failed", "response": {"error": {}}}, False),
        (Api.RESPONSES, {"type": "error", "message": "broken", "code": None}, False),
        (Api.RESPONSES, {"error": {"message": "broken"}}, False),
        (Api.RESPONSES, {"type": 7}, False),
        (Api.MESSAGES, message_start(input_tokens=1), False),
        (Api.MESSAGES, {"type": "ping"}, False),
        (Api.MESSAGES, {"type": "content_block_start", "content_block": {"text": ""}}, False),
        (Api.MESSAGES, delta(type="text_delta", text="a"), True),
        (Api.MESSAGES, delta(type="thinking_delta", thinking="a"), True),
        (Api.MESSAGES, delta(type="input_json_delta", partial_json='{"'), True),
        (Api.MESSAGES, delta(type="signature_delta", signature="a"), False),
        (Api.MESSAGES, delta(type="text_delta", text=None), False),
        (Api.MESSAGES, {"type": "content_block_delta", "delta": "a"}, False),
        (Api.MESSAGES, {"type": "content_block_stop"}, False),
        (Api.MESSAGES, message_delta(output_tokens=0), True),
        (Api.MESSAGES, {"type": "message_delta", "delta": {"stop_reason": None}}, False),
        (Api.MESSAGES, {"type": "message_stop"}, False),
        (Api.MESSAGES, {"type": "error", "error": {"type": "overloaded_error"}}, False),
        (Api.VLLM_GENERATE, {"choices": [{"token_ids": [7]}], "usage": None}, True),
        (Api.VLLM_GENERATE, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}, False),
        (Api.VLLM_GENERATE, {"error": {"message": "broken"}}, False),
        (Api.SGLANG_GENERATE, {"text": "a"}, True),
        (Api.SGLANG_GENERATE, {"output_ids": [7], "meta_info": {}}, True),
        (Api.SGLANG_GENERATE, {"text": "", "meta_info": {"completion_tokens": 1}}, True),
        (Api.SGLANG_GENERATE, {"text": "", "meta_info": {"completion_tokens": 0}}, False),
        (Api.SGLANG_GENERATE, {"text": "", "meta_info": {"finish_reason": {"type": "stop"}}}, True),
        (Api.SGLANG_GENERATE, {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}, False),
        (Api.SGLANG_GENERATE, {"error": {"message": "broken"}}, False),
        (Api.SGLANG_GENERATE, {"meta_info": 7}, False),
        (Api.IMAGES, {"type": "image_generation.partial_image", "b64_json": "iV"}, True),
        (Api.IMAGES, {"type": "image_generation.completed", "b64_json": "iV"}, True),
        (Api.IMAGES, {"type": "error", "error": {}}, False),
        (Api.COMPLETIONS, {"error": {"message": "broken"}}, False),
        (Api.CHAT, {"error": {"message": "broken", "code": 500}}, False),
    ],
)
def test_first_token(api: Api, event: Any, is_token: bool) -> None:
    followed = reader(api)
    sent = stream(event)
    followed.feed(sent[:-1], False)
    assert not followed.first_token
    followed.feed(sent[-1:], False)
    assert followed.first_token is is_token


@pytest.mark.parametrize("api", [api for api, shape in SHAPES.items() if shape.read])
@pytest.mark.parametrize("data", ["[DONE]", "", "null", "[]", "7", '"a"', "{", "[" * 5000, '{"type":"\\'])
def test_odd_data_is_no_token(api: Api, data: str) -> None:
    followed = reader(api)
    followed.feed(f"data: {data}\n\n".encode(), True)
    assert not followed.first_token
    assert followed.usage is None


def test_an_error_of_anthropic_in_a_stream_is_no_token_and_is_not_renamed() -> None:
    followed = reader(Api.MESSAGES, model="alias")
    error = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m is gone"}}\n\n'
    assert followed.feed(error, False) == error
    assert not followed.first_token


# -- the model's name ----------------------------------------------------------------------------------

NAMED = '{"id":"1","model":"m","x":{"model":"m"},"text":"\\"model\\":\\"m\\""}'
BACK = '{"id":"1","model":"alias","x":{"model":"m"},"text":"\\"model\\":\\"m\\""}'


@pytest.mark.parametrize(
    ("api", "content_type", "body", "expected"),
    [
        (Api.EMBEDDINGS, JSON, NAMED, BACK),
        (Api.RESPONSES, JSON, NAMED, BACK),
        (Api.CONVERSATIONS, JSON, NAMED, BACK),
        (Api.CHAT_RENDER, JSON, NAMED, BACK),
        (Api.MESSAGES, JSON, NAMED, BACK),
        (Api.VLLM_GENERATE, JSON, NAMED, BACK),
        (Api.COMPLETIONS_RENDER, JSON, NAMED, BACK),
        (
            Api.COMPLETIONS_RENDER,
            JSON,
            f"[{NAMED},\n {NAMED}, {{}}, {NAMED}]",
            f"[{BACK},\n {BACK}, {{}}, {BACK}]",
        ),
        (Api.COMPLETIONS_RENDER, JSON, f"[[{NAMED}],{NAMED}]", f"[[{NAMED}],{NAMED}]"),
        (Api.COMPLETIONS_RENDER, JSON, f"[{NAMED},7,{NAMED}]", f"[{BACK},7,{NAMED}]"),
        (Api.CHAT, JSON, f"[{NAMED}]", f"[{NAMED}]"),
        (Api.RESPONSES, SSE, f'data: {{"response":{NAMED}}}\n\n', f'data: {{"response":{BACK}}}\n\n'),
        (
            Api.RESPONSES,
            SSE,
            f'event: x\r\ndata: {{"model":"m",\r\ndata:"a":{NAMED},"response" : {NAMED}}}\r\n\r\n',
            f'event: x\r\ndata: {{"model":"m",\r\ndata:"a":{NAMED},"response" : {BACK}}}\r\n\r\n',
        ),
        (Api.RESPONSES, SSE, 'data: {"response":"model","model":"m"}\n\n', None),
        (Api.RESPONSES, SSE, 'data: {"response":[{"model":"m"}]}\n\n', None),
        (Api.RESPONSES, SSE, 'data: {"x":{"response":{"model":"m"}}}\n\n', None),
        (
            Api.MESSAGES,
            SSE,
            f'data: {{"type":"message_start","\\u006dessage":{NAMED}}}\n\n',
            f'data: {{"type":"message_start","\\u006dessage":{BACK}}}\n\n',
        ),
        (Api.VLLM_GENERATE, SSE, f"data: {NAMED}\n\n", f"data: {BACK}\n\n"),
    ],
)
def test_the_model_is_put_back_at_its_place(
    api: Api, content_type: str, body: str, expected: str | None
) -> None:
    for size in (1, 3, 1000):
        followed = reader(api, content_type, "alias")
        data = body.encode()
        out = b"".join(followed.feed(data[at : at + size], False) for at in range(0, len(data), size))
        assert (out + followed.finish()).decode() == (body if expected is None else expected)


@pytest.mark.parametrize("api", [Api.SGLANG_GENERATE, Api.IMAGES, Api.COUNT_TOKENS, Api.PASSTHROUGH])
@pytest.mark.parametrize("content_type", [SSE, JSON])
def test_where_no_model_is_named_the_length_holds(api: Api, content_type: str) -> None:
    made = AnswerReader(api, "alias", "m")
    assert not made.begin(200, content_type, "")
    chunk = b'{"model":"m"}'
    assert made.feed(chunk, False) is chunk


@pytest.mark.parametrize("api", list(SHAPES))
def test_compressed_answers_and_errors_are_left_alone(api: Api) -> None:
    body = b'data: {"model":"m","choices":[{}],"usage":{"prompt_tokens":1}}\n\n'
    for status, encoding in ((200, "gzip"), (500, ""), (429, "")):
        made = AnswerReader(api, "alias", "m")
        assert not made.begin(status, SSE, encoding)
        assert made.feed(body, True) == body
        assert (made.usage, made.events) == (None, 0)
        assert made.first_token is (status == 200)
