"""Exact tokens: what a render service is asked, and how the recorded answers of a real one are read."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from epp.errors import NeedFailed
from epp.payload import render
from epp.payload.identity import PROMPTS_TOLD_APART
from epp.payload.records import Api, RawRequest
from epp.payload.render import ExactTokens, RenderNeed, with_tokens
from epp.payload.request import Parsed, parse_request

RECORDED = Path(__file__).parent.parent / "data" / "payload" / "apis"
EXACT = ExactTokens("http://render:8000", "acme/tiny-llama", 5.0, 30.0)
SERVED = {
    "render-chat": "/v1/chat/completions",
    "render-completions": "/v1/completions",
    "render-completions-token-ids": "/v1/completions",
    "render-completions-two-prompts": "/v1/completions",
    "render-messages": "/v1/messages",
    "render-responses": "/v1/responses",
}


def recorded(name: str) -> dict[str, Any]:
    exchange: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return exchange


def parsed(body: bytes, path: str, **headers: str) -> Parsed:
    pairs = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return parse_request(RawRequest("id", "POST", path, pairs, body), max_bytes=1 << 20)


def asked(name: str) -> Parsed:
    return parsed(recorded(name)["request"]["body"].encode(), SERVED[name])


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@pytest.mark.parametrize("name", SERVED)
def test_a_request_is_rendered_as_the_recorded_one(name: str) -> None:
    request = recorded(name)["request"]
    need = EXACT.need(asked(name))
    assert need == RenderNeed("http://render:8000" + request["path"], request["body"].encode(), 5.0)


@pytest.mark.parametrize("name", SERVED)
def test_recorded_answers_are_the_prompts(name: str) -> None:
    request = asked(name).request
    answer = recorded(name)["response"]["body"].encode()
    told = json.loads(answer)
    each = [one["token_ids"] for one in (told if isinstance(told, list) else [told])]
    exact = with_tokens(request, answer)
    assert exact.prompts == tuple(map(packed, each))
    assert exact.prompt_tokens == sum(map(len, each))
    assert (exact.model, exact.api, exact.max_output_tokens) == (
        request.model,
        request.api,
        request.max_output_tokens,
    )


def test_every_other_byte_of_the_body_stays() -> None:
    body = b'{"tools":[{"b":1,"a":2}],"model" : "lora", "messages":[{"role":"user","content":"\\u00e9"}]}'
    need = EXACT.need(parsed(body, "/v1/chat/completions"))
    assert need is not None
    assert need.body == body.replace(b'"lora"', b'"acme/tiny-llama"')


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/render", "/v1/completions/render", "/v1/embeddings", "/upload"]
)
def test_what_is_not_rendered_for_the_choice(path: str) -> None:
    body = json.dumps({"model": "m", "prompt": "p", "input": "p", "messages": [{"role": "user"}]}).encode()
    assert EXACT.need(parsed(body, path)) is None


def test_more_prompts_than_are_told_apart_are_not_rendered() -> None:
    def need(count: int) -> RenderNeed | None:
        body = json.dumps({"model": "m", "prompt": ["p"] * count}).encode()
        return EXACT.need(parsed(body, "/v1/completions"))

    assert need(PROMPTS_TOLD_APART) is not None
    assert need(PROMPTS_TOLD_APART + 1) is None


PICTURE = {"type": "image_url", "image_url": {"url": "http://pictures/1.png"}}


def picture_chat() -> Parsed:
    content = [{"type": "text", "text": "what is it?"}, PICTURE]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    return parsed(body, "/v1/chat/completions")


def rendered_picture(content_hash: str) -> bytes:
    answer = json.loads(recorded("render-chat")["response"]["body"])
    answer["token_ids"] = [1, 2, *[900] * 4, 3]
    answer["features"] = {
        "mm_hashes": {"image": [content_hash]},
        "mm_placeholders": {"image": [{"offset": 2, "length": 4}]},
        "kwargs_data": {"image": ["A" * 1000]},
    }
    return json.dumps(answer).encode()


def test_media_have_their_own_timeout_and_stand_in_the_prompt_by_their_hash() -> None:
    chat = picture_chat()
    need = EXACT.need(chat)
    assert need is not None
    assert need.timeout_s == 30.0
    one, same, other = (with_tokens(chat.request, rendered_picture(each)) for each in ("h1", "h1", "h2"))
    assert one == same
    assert one.prompt_tokens == 7
    ids = struct.unpack("<7I", one.prompts[0])
    assert (ids[:2], ids[6]) == ((1, 2), 3)
    assert len(set(ids[2:6])) == 1
    assert ids[2] != 900
    assert one.prompts[0][:8] == other.prompts[0][:8]
    assert one.prompts[0] != other.prompts[0]
    (medium,) = one.media
    assert (medium.kind, medium.tokens) == ("image", 4)


CHAT_ANSWER = recorded("render-chat")["response"]["body"].encode()
BAD_FOR_A_CHAT = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"<html>",
    b"\xff\xfe",
    b"{}",
    b'{"token_ids":null}',
    b'{"token_ids":[]}',
    b'{"token_ids":[1,-2]}',
    b'{"token_ids":[4294967296]}',
    b'{"token_ids":["1"]}',
    b'{"token_ids":{"a":1}}',
    b"[" * 5000,
    CHAT_ANSWER[:-40],
    b"[" + CHAT_ANSWER + b"]",
]


@pytest.mark.parametrize("answer", BAD_FOR_A_CHAT)
def test_garbage_is_no_answer(answer: bytes) -> None:
    with pytest.raises(NeedFailed) as failed:
        with_tokens(asked("render-chat").request, answer)
    assert failed.value.reason == "unreadable"


@pytest.mark.parametrize("name", ["render-chat", "render-completions"])
def test_one_answer_for_each_prompt(name: str) -> None:
    """An object where there should be a list, or a list too short."""
    answer = recorded(name)["response"]["body"].encode()
    with pytest.raises(NeedFailed):
        with_tokens(asked("render-completions-two-prompts").request, answer)


@pytest.mark.parametrize(
    ("api", "path"),
    [(Api.CHAT, "/v1/completions/render"), (Api.RESPONSES, "/v1/responses"), (Api.MESSAGES, "")],
)
def test_planted_a_wrong_path_is_seen(monkeypatch: pytest.MonkeyPatch, api: Api, path: str) -> None:
    monkeypatch.setattr(render, "PATHS", {**render.PATHS, api: path})
    for name in SERVED:
        if asked(name).request.api is api:
            with pytest.raises(AssertionError):
                test_a_request_is_rendered_as_the_recorded_one(name)
