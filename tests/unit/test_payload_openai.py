"""Embeddings, responses, conversations, images: what is read of them and what is refused."""

import json
import struct
from typing import Any

import pytest

from epp.errors import BadRequest
from epp.payload.records import Api, InferenceRequest, RawRequest
from epp.payload.request import parse_request

CHAT, EMBEDDINGS, RESPONSES = "/v1/chat/completions", "/v1/embeddings", "/v1/responses"
CONVERSATIONS, IMAGES = "/v1/conversations", "/v1/images/generations"


def read(path: str, members: dict[str, Any] | bytes) -> InferenceRequest:
    body = members if isinstance(members, bytes) else json.dumps(members).encode()
    return parse_request(RawRequest("id", "POST", path, (), body), max_bytes=1 << 20).request


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "members", "start", "param"),
    [
        (EMBEDDINGS, {}, "invalid embeddings request: must have input field", "input"),
        (EMBEDDINGS, {"input": None}, "invalid embeddings request: must have input field", "input"),
        (EMBEDDINGS, {"input": 5}, "invalid embeddings request: must have input field", "input"),
        (EMBEDDINGS, {"input": ["a", 1]}, "invalid embeddings request: must have input field", "input"),
        (EMBEDDINGS, {"input": [{}, "a"]}, "invalid embeddings request: must have input field", "input"),
        (EMBEDDINGS, {"input": [1, -1]}, "invalid embeddings request: input must hold token ids", "input"),
        (EMBEDDINGS, {"messages": "x"}, "invalid embeddings request: must have input field", "messages"),
        (RESPONSES, {}, "invalid responses request: must have input field", "input"),
        (RESPONSES, {"input": None}, "invalid responses request: must have input field", "input"),
        (CONVERSATIONS, {}, "invalid conversations request: must have items field", "items"),
        (CONVERSATIONS, {"items": []}, "invalid conversations request: must have items field", "items"),
        (CONVERSATIONS, {"items": "x"}, "invalid conversations request: must have items field", "items"),
        (IMAGES, {}, "invalid images generations request: must have prompt field", "prompt"),
        (IMAGES, {"prompt": ""}, "invalid images generations request: must have prompt field", "prompt"),
        (IMAGES, {"prompt": ["a"]}, "invalid images generations request: must have prompt field", "prompt"),
    ],
)
def test_a_missing_field_is_named(path: str, members: dict[str, Any], start: str, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(path, {"model": "m", **members})
    assert refused.value.message.startswith(start)
    assert refused.value.param == param


@pytest.mark.parametrize("path", [EMBEDDINGS, RESPONSES, CONVERSATIONS, IMAGES])
@pytest.mark.parametrize("body", [b"", b"[]", b"no healthy upstream", b'{"model":"m"'])
def test_a_broken_body_is_refused(path: str, body: bytes) -> None:
    with pytest.raises(BadRequest, match="^error unmarshaling request bodyMap: "):
        read(path, body)


@pytest.mark.parametrize("path", [EMBEDDINGS, RESPONSES, CONVERSATIONS, IMAGES])
@pytest.mark.parametrize("padding", [0, 10_000])
def test_two_models_are_refused(path: str, padding: int) -> None:
    text = "x" * padding + "a"
    rest = json.dumps({"input": text, "prompt": text, "items": [user(text)]})[1:-1]
    for body in (f'{{"model":"a","model":"b",{rest}}}', f'{{"mod\\u0065l":"a",{rest},"model":"b"}}'):
        with pytest.raises(BadRequest, match="duplicate `model`"):
            read(path, body.encode())
    nested = f'{{{rest},"metadata":{{"model":"b"}},"model":"a"}}'
    assert read(path, nested.encode()).model == "a"


# -- embeddings ----------------------------------------------------------------------------------------


def test_inputs_are_prompts_as_those_of_completions() -> None:
    assert read(EMBEDDINGS, {"input": "q"}).prompts == (b"q",)
    assert read(EMBEDDINGS, {"input": ["a", "bc"]}).prompts == (b"a", b"bc")
    assert read(EMBEDDINGS, {"input": [7, 8]}).prompts == (struct.pack("<2I", 7, 8),)
    lists = read(EMBEDDINGS, {"input": [[7], [8, 9]]})
    assert lists.prompts == (struct.pack("<I", 7), struct.pack("<2I", 8, 9))
    assert lists.prompt_tokens == 3
    assert read(EMBEDDINGS, {"input": []}).prompts == ()
    asked = read(EMBEDDINGS, {"model": "e", "input": "q", "cache_salt": "s", "stream": True})
    assert (asked.api, asked.model, asked.cache_salt) == (Api.EMBEDDINGS, "e", "s")
    assert (asked.max_output_tokens, asked.stream) == (None, False)


def test_inputs_may_be_messages() -> None:
    parts = [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "http://x/a"}}]
    asked = read(EMBEDDINGS, {"input": [{"content": [parts[0]]}, {"content": parts}, {"content": None}]})
    assert len(asked.prompts) == 3
    assert asked.prompts[1].startswith(asked.prompts[0])
    assert [medium.kind for medium in asked.media] == ["image"]
    assert asked.prompt_tokens > asked.media[0].tokens
    one = read(EMBEDDINGS, {"messages": [user("q")]})
    assert one.prompts == read(CHAT, {"messages": [user("q")]}).prompts


def test_inputs_that_are_other_objects_are_told_apart() -> None:
    asked = read(EMBEDDINGS, {"input": [{"text": "a"}, {"text": "b"}, {"image": "a"}, {"text": "a"}]})
    assert len(set(asked.prompts)) == 3
    assert asked.prompts[0] == asked.prompts[3]


# -- responses and conversations -----------------------------------------------------------------------


def turn(items: Any, **members: Any) -> bytes:
    (prompt,) = read(RESPONSES, {"model": "m", "input": items, **members}).prompts
    return prompt


def test_members_of_a_response() -> None:
    asked = read(
        RESPONSES,
        {
            "model": "m",
            "input": "a",
            "max_output_tokens": 9,
            "max_tokens": 7,
            "stream": True,
            "cache_salt": "s",
        },
    )
    assert (asked.api, asked.model, asked.max_output_tokens) == (Api.RESPONSES, "m", 9)
    assert (asked.stream, asked.cache_salt, asked.prompt_tokens) == (
        True,
        "s",
        -(-len(asked.prompts[0]) // 4),
    )


def test_text_is_what_the_user_says() -> None:
    assert turn("a") == turn([user("a")]) == turn([user([{"type": "input_text", "text": "a"}])])
    assert turn("a", instructions="be brief") == turn([{"role": "system", "content": "be brief"}, user("a")])
    assert turn("a", instructions=None, tools=[]) == turn("a")
    assert turn("") == turn([user("")])
    assert turn([]) == b""


def test_a_conversation_that_goes_on_keeps_its_prefix() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "ls", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "a b c"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "b", "annotations": []}],
    }
    items: list[Any] = [user("a"), thought, call, output, said, user("c")]
    whole = turn(items, instructions="i", tools=[{"type": "function", "name": "ls"}])
    for length in range(1, len(items)):
        assert whole.startswith(
            turn(items[:length], instructions="i", tools=[{"type": "function", "name": "ls"}])
        )
        other = [*items[:length], user("z")]
        assert len(other) == len(items) or whole != turn(other)
    assert read(CONVERSATIONS, {"model": "m", "items": items}).prompts == (turn(items),)


def test_turns_that_differ_have_different_identities() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "ls", "arguments": "{}"}
    turns = [
        turn("ab"),
        turn(["a", "b"]),
        turn([user("a"), user("b")]),
        turn([user("a"), call]),
        turn([user("a"), {**call, "name": "rm"}]),
        turn([call]),
        turn("ab", tools=[{"type": "web_search"}]),
        turn("ab", instructions="x"),
        turn("ab", previous_response_id="resp_1"),
        turn("ab", previous_response_id="resp_2"),
        turn("ab", conversation="conv_1"),
        turn([user([{"type": "input_image", "image_url": "http://x/a.png"}])]),
        turn([user([{"type": "input_image", "image_url": "http://x/b.png"}])]),
        turn([user([{"type": "input_file", "file_id": "a"}])]),
        turn(5),
        turn([5]),
    ]
    assert len(set(turns)) == len(turns)


def test_media_of_a_response_count() -> None:
    image = {"type": "input_image", "image_url": "http://x/a.png", "detail": "low"}
    audio = {"type": "input_audio", "input_audio": {"data": "x" * 400, "format": "wav"}}
    asked = read(RESPONSES, {"input": [user([image, audio, image])]})
    assert [(medium.kind, medium.tokens) for medium in asked.media] == [
        ("image", 225),
        ("audio", 100),
        ("image", 225),
    ]
    assert asked.media[0] == asked.media[2]


# -- images --------------------------------------------------------------------------------------------


def test_pictures_to_be_made_have_no_prefix() -> None:
    asked = read(
        IMAGES, {"model": "m", "prompt": "a red fox", "n": 2, "size": "512x512", "num_inference_steps": 20}
    )
    assert (asked.api, asked.model, asked.prompts, asked.prompt_tokens) == (Api.IMAGES, "m", (), 3)


# -- output limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "limit"),
    [(7, 7), (7.0, 7), (0, 0), (1e3, 1000), (7.5, None), (-1, None), ("7", None), (None, None), (1e30, None)],
)
def test_a_whole_number_of_tokens_is_a_limit(value: Any, limit: int | None) -> None:
    assert read(RESPONSES, {"input": "a", "max_output_tokens": value}).max_output_tokens == limit
