"""Anthropic messages: system, blocks and tools as a conversation; and counting, which is not read."""

import json
from typing import Any

import pytest

from epp.errors import BadRequest
from epp.payload.records import Api, InferenceRequest, RawRequest
from epp.payload.request import parse_request, rewrite_model

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def read(members: dict[str, Any] | bytes, path: str = MESSAGES) -> InferenceRequest:
    body = members if isinstance(members, bytes) else json.dumps(members).encode()
    return parse_request(RawRequest("id", "POST", path, (), body), max_bytes=1 << 20).request


def turn(*messages: dict[str, Any], **members: Any) -> bytes:
    (prompt,) = read({"model": "m", "max_tokens": 5, "messages": list(messages), **members}).prompts
    return prompt


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


CACHED = {"cache_control": {"type": "ephemeral"}}


def test_members() -> None:
    asked = read({"model": "m", "max_tokens": 5, "stream": True, "messages": [user("a")], "cache_salt": "s"})
    assert (asked.api, asked.model, asked.target_model) == (Api.MESSAGES, "m", "m")
    assert (asked.max_output_tokens, asked.stream, asked.cache_salt) == (5, True, "s")
    assert asked.prompt_tokens == -(-len(asked.prompts[0]) // 4)


@pytest.mark.parametrize(
    ("body", "start", "param"),
    [
        (b"", "error unmarshaling request body: ", None),
        (b"[]", "error unmarshaling request body: ", None),
        (b'{"model":"m"}', "invalid messages request: must have at least one message", "messages"),
        (b'{"messages":[]}', "invalid messages request: must have at least one message", "messages"),
        (b'{"messages":"a"}', "invalid messages request: must have at least one message", "messages"),
        (b'{"messages":[1]}', "invalid messages request: must have at least one message", "messages"),
        (b'{"model":"a","messages":[{}],"model":"b"}', "duplicate `model` in request body", "model"),
    ],
)
def test_refusals(body: bytes, start: str, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        read(body)
    assert refused.value.message.startswith(start)
    assert refused.value.param == param


def test_system_is_text_or_blocks() -> None:
    assert turn(user("a"), system="be brief") == turn(user("a"), system=[text("be brief", **CACHED)])
    assert turn(user("a"), system="") == turn(user("a"), system=[]) == turn(user("a"))
    assert turn(user("a"), system="b") != turn(user("a"))


def test_a_block_for_accounting_is_left_out() -> None:
    billing = text("x-anthropic-billing-header: cc_version=1; cch=4f2a")
    for blocks in ([billing, text("b")], [text("b"), billing], [None, text("b"), billing]):
        plain = [block for block in blocks if block is not billing]
        assert turn(user("a"), system=blocks) == turn(user("a"), system=plain)
    assert turn(user("a"), system=[billing]) == turn(user("a"))
    assert b"cch" in turn(user([billing]))


def test_where_a_cache_shall_end_does_not_matter() -> None:
    use = {"type": "tool_use", "id": "1", "name": "ls", "input": {"path": "/"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "a b"}
    blocks = {"type": "tool_result", "tool_use_id": "1", "content": [text("a b")]}
    image = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    for block in (text("a"), use, result, blocks, image, thinking):
        assert turn(user([block])) == turn(user([{**block, **CACHED}])), block
    nested = {**blocks, "content": [text("a b", **CACHED)]}
    assert turn(user([blocks])) == turn(user([nested]))
    assert turn(user([result])) == turn(user([blocks]))


def test_a_conversation_with_tools_keeps_its_prefix_as_the_mark_moves_on() -> None:
    turns = [
        user([text("list")]),
        {
            "role": "assistant",
            "content": [text("ok"), {"type": "tool_use", "id": "1", "name": "ls", "input": {}}],
        },
        user([{"type": "tool_result", "tool_use_id": "1", "content": [text("a"), text("b")]}]),
        {"role": "assistant", "content": "done"},
        user("more"),
    ]
    prompts = []
    for length in range(1, len(turns) + 1):
        *before, last = turns[:length]
        content = last["content"]
        marked = content if isinstance(content, str) else [*content[:-1], {**content[-1], **CACHED}]
        prompts.append(turn(*before, {**last, "content": marked}, system=[text("s", **CACHED)]))
    assert all(later.startswith(earlier) for earlier, later in zip(prompts, prompts[1:], strict=False))


def test_turns_that_differ_have_different_identities() -> None:
    def result(*blocks: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": "1", "content": list(blocks)}

    document = {"type": "document", "source": {"type": "base64", "data": "QUJD"}}
    turns = [
        turn(user("ab")),
        turn(user([text("a"), text("b")])),
        turn(user([result(text("a")), text("b")])),
        turn(user([result(text("a"), text("b"))])),
        turn(user([result(text("ab"))])),
        turn(user([{"type": "tool_result", "tool_use_id": "2", "content": "ab"}])),
        turn(user([result(result(text("ab")))])),
        turn(user([document])),
        turn(user([{**document, "source": {"type": "base64", "data": "QUJE"}}])),
        turn(user([{"type": "image", "source": {"type": "base64", "data": "QUJD"}}])),
        turn(user([{"type": "image", "source": {"type": "base64", "data": "QUJE"}}])),
        turn(user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])),
        turn(user("ab"), tools=[{"name": "ls"}]),
        turn(user("ab"), system="x"),
    ]
    assert len(set(turns)) == len(turns)


def test_pictures_are_media_wherever_they_stand() -> None:
    def image(source: dict[str, str]) -> dict[str, Any]:
        return {"type": "image", "source": source}

    data = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("see"), image(data)]}
    asked = read({"messages": [user([image({"type": "url", "url": "http://x/a"}), image(data), result])]})
    assert [(medium.kind, medium.tokens) for medium in asked.media] == [("image", 225)] * 3
    assert asked.media[1] == asked.media[2] != asked.media[0]
    assert asked.prompt_tokens > 3 * 225


@pytest.mark.parametrize("block", [None, 5, "a", {}, {"type": "tool_result"}, {"type": "image", "source": 5}])
def test_odd_blocks_are_tolerated(block: Any) -> None:
    assert turn(user([block, text("after")])).endswith(b"after")
    assert turn(user("a"), system=[block, text("after")]) != turn(user("a"))


def results_inside_results(depth: int) -> bytes:
    inner = b'{"type":"tool_result","content":['
    return b'{"messages":[{"role":"user","content":[' + inner * depth + b"]}" * depth + b"]}]}"


def test_results_inside_results_do_not_go_deep() -> None:
    for depth in (2, 400):
        assert read(results_inside_results(depth)).prompts
    with pytest.raises(BadRequest, match="error unmarshaling"):
        read(results_inside_results(5000))


def test_counting_reads_the_model_only() -> None:
    body = {"model": "m", "system": "s", "messages": [user("a")]}
    asked = read(body, COUNT)
    assert asked == InferenceRequest(Api.COUNT_TOKENS, "m", "m")
    assert read({}, COUNT) == InferenceRequest(Api.COUNT_TOKENS)
    raw = RawRequest("id", "POST", COUNT, (), json.dumps(body).encode())
    rewritten = rewrite_model(parse_request(raw, max_bytes=1 << 20), "other")
    assert json.loads(rewritten.body) == {**body, "model": "other"}


@pytest.mark.parametrize("body", [b"{}", b" { }\n", b'{"messages":[]}', b"\xef\xbb\xbf{}"])
def test_a_model_is_put_into_a_count_that_names_none(body: bytes) -> None:
    parsed = parse_request(RawRequest("id", "POST", COUNT, (), body), max_bytes=1 << 20)
    assert json.loads(rewrite_model(parsed, "named").body) == {**json.loads(body), "model": "named"}
