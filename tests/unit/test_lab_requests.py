"""What the lab's engines read in a request body, and how they refuse it."""

import json
from typing import Any

import pytest

from epp.lab import tokens
from epp.lab.requests import EngineRefusal, Job, read_job
from epp.payload.records import Api


def read(api: Api, body: bytes | dict[str, Any], max_model_len: int = 100) -> Job:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_job(api, "application/json; charset=utf-8", data, "acme/m", max_model_len)


def refusal(api: Api, body: bytes | dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(EngineRefusal) as caught:
        read(api, body)
    error = json.loads(caught.value.body)["error"]
    assert error["code"] == caught.value.status
    return error


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("prompt", "identities"),
    [
        ("hello", [tokens.from_text("hello")]),
        (["hello", "you"], [tokens.from_text("hello"), tokens.from_text("you")]),
        ([1, 2], [tokens.from_token_ids([1, 2])]),
        ([[1, 2], [3]], [tokens.from_token_ids([1, 2]), tokens.from_token_ids([3])]),
    ],
)
def test_prompts_of_completions(prompt: Any, identities: list[bytes]) -> None:
    job = read(Api.COMPLETIONS, {"prompt": prompt})
    assert list(job.prompts) == identities
    assert job.max_tokens == (16,) * len(identities)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "image_url", "image_url": {"url": "https://x/y.png"}}], "https://x/y.png"),
        ([{"type": "input_audio", "input_audio": {}}], '{"type":"input_audio","input_audio":{}}'),
    ],
)
def test_contents_of_chats(content: Any, text: str) -> None:
    assert read(Api.CHAT, user(content)).prompts == (tokens.from_chat([("user", text)]),)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 16),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_tokens": 10_000}, 90),
    ],
)
def test_output_tokens(fields: dict[str, int], expected: int) -> None:
    prompt = user("x" * 16)
    assert tokens.token_count(tokens.from_chat([("user", "x" * 16)])) == 11
    assert read(Api.CHAT, {**prompt, **fields}, max_model_len=101).max_tokens == (expected,)


def test_streaming_and_usage() -> None:
    plain = read(Api.CHAT, user("a"))
    assert (plain.stream, plain.include_usage, plain.continuous_usage) == (False, False, False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    job = read(Api.CHAT, {**user("a"), "stream": True, "stream_options": options})
    assert (job.stream, job.include_usage, job.continuous_usage) == (True, True, True)
    options["include_usage"] = False
    job = read(Api.CHAT, {**user("a"), "stream": True, "stream_options": options})
    assert (job.include_usage, job.continuous_usage) == (False, False)


def test_salt_and_model() -> None:
    assert read(Api.CHAT, {**user("a"), "cache_salt": "s", "model": "acme/m"}).cache_salt == "s"
    assert read(Api.CHAT, {**user("a"), "model": None}).cache_salt == ""


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (Api.CHAT, {**user("a"), "n": 2}, "n"),
        (Api.CHAT, {**user("a"), "max_completion_tokens": 0}, "max_completion_tokens"),
        (Api.CHAT, {"messages": [{"role": 7}]}, "body.messages.0.role"),
        (Api.CHAT, {**user("a"), "stream": "yes"}, "body.stream"),
        (Api.CHAT, b"[]", "body"),
        (Api.CHAT, b"\xff\xfe", "body.0"),
        (Api.COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (Api.COMPLETIONS, {"prompt": ""}, "prompt"),
        (Api.COMPLETIONS, {"prompt": []}, "prompt"),
        (Api.COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": ["a", 1]}, "body.prompt"),
        (Api.COMPLETIONS, {"prompt": {"a": 1}}, "body.prompt"),
        (Api.COMPLETIONS, {"prompt": [2**32]}, None),
        (Api.COMPLETIONS, {"prompt": [-1]}, None),
    ],
)
def test_refusals_name_what_is_wrong(api: Api, body: bytes | dict[str, Any], param: str | None) -> None:
    error = refusal(api, body)
    assert error["param"] == param
    assert error["code"] == 400
    assert error["message"]
