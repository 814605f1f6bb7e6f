"""Requests of other APIs than chat and completions that a real vLLM 0.32.0 answered or refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from epp.errors import BadRequest
from epp.payload import anthropic, generate, openai
from epp.payload.body import Body
from epp.payload.records import Api, InferenceRequest, RawRequest
from epp.payload.refusal import refusal_body
from epp.payload.request import Parsed, parse_request, rewrite_model

RECORDED = Path(__file__).parent.parent / "data" / "payload" / "apis"
EXCHANGES = {path.stem: json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))}
APIS = {
    "error-embeddings": Api.EMBEDDINGS,
    "generate-dp-rank": Api.VLLM_GENERATE,
    "generate-from-render": Api.VLLM_GENERATE,
    "generate-minimal": Api.VLLM_GENERATE,
    "generate-stream": Api.VLLM_GENERATE,
    "messages": Api.MESSAGES,
    "messages-count-tokens": Api.COUNT_TOKENS,
    "messages-no-max-tokens": Api.MESSAGES,
    "messages-stream": Api.MESSAGES,
    "messages-unknown-model": Api.MESSAGES,
    "render-chat": Api.CHAT_RENDER,
    "render-chat-lora": Api.CHAT_RENDER,
    "render-completions": Api.COMPLETIONS_RENDER,
    "render-completions-token-ids": Api.COMPLETIONS_RENDER,
    "render-completions-two-prompts": Api.COMPLETIONS_RENDER,
    "render-messages": Api.PASSTHROUGH,
    "render-responses": Api.PASSTHROUGH,
    "responses": Api.RESPONSES,
    "responses-no-input": Api.RESPONSES,
    "responses-stream": Api.RESPONSES,
    "responses-unknown-model": Api.RESPONSES,
}
READ = [name for name, api in APIS.items() if api is not Api.PASSTHROUGH and name != "responses-no-input"]


def raw_request(name: str) -> RawRequest:
    request = EXCHANGES[name]["request"]
    headers = tuple((key.lower(), value) for key, value in request["headers"])
    return RawRequest("id", request["method"], request["path"], headers, request["body"].encode())


def parse(name: str) -> Parsed:
    return parse_request(raw_request(name), max_bytes=1 << 20)


def sent(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(EXCHANGES[name]["request"]["body"])
    return body


def answered(name: str) -> Any:
    return json.loads(EXCHANGES[name]["response"]["body"])


def test_every_recording_has_its_api() -> None:
    assert set(APIS) == set(EXCHANGES)


@pytest.mark.parametrize("name", READ)
def test_what_the_engine_took_is_read(name: str) -> None:
    request = parse(name).request
    body = sent(name)
    assert request.api is APIS[name]
    assert request.model == request.target_model == body["model"]
    assert request.stream is bool(body.get("stream"))
    limits = (body, body.get("sampling_params", {}))
    told = [each[key] for each in limits for key in ("max_output_tokens", "max_tokens") if key in each]
    assert request.max_output_tokens == (None if APIS[name] is Api.COUNT_TOKENS or not told else told[0])
    assert bool(request.prompts) is (APIS[name] is not Api.COUNT_TOKENS)


@pytest.mark.parametrize("name", READ)
def test_another_model_changes_nothing_else(name: str) -> None:
    parsed = parse(name)
    rewritten = rewrite_model(parsed, "näme")
    assert json.loads(rewritten.body) == {**sent(name), "model": "näme"}
    assert parsed.model_span is not None
    start, end = parsed.model_span
    assert rewritten.body == parsed.body[:start] + json.dumps("näme").encode() + parsed.body[end:]


@pytest.mark.parametrize("name", ["render-messages", "render-responses"])
def test_what_no_parser_names_passes(name: str) -> None:
    assert parse(name).request == InferenceRequest(Api.PASSTHROUGH)


def test_a_missing_field_is_refused_as_the_engine_does() -> None:
    with pytest.raises(BadRequest) as refused:
        parse("responses-no-input")
    theirs = EXCHANGES["responses-no-input"]["response"]
    assert refused.value.status == theirs["status"]
    ours = json.loads(refusal_body(refused.value, Api.RESPONSES))
    assert ours["error"].keys() == answered("responses-no-input")["error"].keys()
    assert answered("responses-no-input")["error"]["param"].endswith(f".{refused.value.param}")


def test_anthropic_refusals_have_the_engines_members() -> None:
    """The engine's own word for the kind of error is OpenAI's; ours is the one Anthropic documents."""
    theirs = answered("messages-unknown-model")
    ours = json.loads(refusal_body(BadRequest("x"), Api.MESSAGES))
    assert ours.keys() == theirs.keys()
    assert ours["error"].keys() == theirs["error"].keys()
    assert ours["type"] == theirs["type"]


def test_rendered_tokens_are_the_identity_of_a_generate_request() -> None:
    tokens = answered("render-chat")["token_ids"]
    request = parse("generate-from-render").request
    assert request.prompts == (struct.pack(f"<{len(tokens)}I", *tokens),)
    assert request.prompt_tokens == len(tokens)
    assert request.media == ()


@pytest.mark.parametrize("name", ["generate-minimal", "generate-from-render", "generate-dp-rank"])
def test_tokens_are_counted_as_the_engine_does(name: str) -> None:
    assert parse(name).request.prompt_tokens == answered(name)["usage"]["prompt_tokens"]


def test_token_ids_to_be_rendered_are_the_engines() -> None:
    (rendered,) = answered("render-completions-token-ids")
    ids = rendered["token_ids"]
    assert parse("render-completions-token-ids").request.prompts == (struct.pack(f"<{len(ids)}I", *ids),)


def test_apis_that_the_engine_renders_alike_have_one_identity() -> None:
    """Of the same conversation the engine makes the same tokens in every API: its cache is shared."""
    assert answered("render-messages")["token_ids"] == answered("render-chat")["token_ids"]
    rendered = parse("render-chat").request.prompts
    for name, path in (("render-messages", "/v1/messages"), ("render-responses", "/v1/responses")):
        raw = RawRequest("id", "POST", path, (), EXCHANGES[name]["request"]["body"].encode())
        prompts = parse_request(raw, max_bytes=1 << 20).request.prompts
        if name == "render-messages":
            assert prompts == rendered
        else:
            question = {"model": "m", "messages": [{"role": "user", "content": sent(name)["input"]}]}
            chat = RawRequest("id", "POST", "/v1/chat/completions", (), json.dumps(question).encode())
            assert prompts == parse_request(chat, max_bytes=1 << 20).request.prompts


DESCRIBED = json.loads((RECORDED.parent / "engine" / "vllm-0.32-members.json").read_text())
"""Members of each API's request as the engine's own OpenAPI document names them."""

BODIES: dict[Api, type[Body]] = {
    Api.CHAT: openai._Chat,
    Api.CHAT_RENDER: openai._Chat,
    Api.COMPLETIONS: openai._Completions,
    Api.COMPLETIONS_RENDER: openai._Completions,
    Api.RESPONSES: openai._Responses,
    Api.MESSAGES: anthropic._Turn,
    Api.COUNT_TOKENS: Body,
    Api.VLLM_GENERATE: generate._VllmGenerate,
}
OF_OTHER_ENGINES = {Api.RESPONSES: {"conversation"}}


def unknown_members(api: Api, body: type[Body]) -> set[str]:
    """What we read under a name that the engine does not have."""
    return set(body.__struct_fields__) - set(DESCRIBED[api]["members"]) - OF_OTHER_ENGINES.get(api, set())


@pytest.mark.parametrize("api", BODIES)
def test_members_are_called_as_the_engine_calls_them(api: Api) -> None:
    assert set(DESCRIBED) == set(BODIES)
    assert parse_request(
        RawRequest("id", "POST", DESCRIBED[api]["path"], (), b"", body_shown=False), max_bytes=1
    ).request == InferenceRequest(api)
    assert unknown_members(api, BODIES[api]) == set()
    assert set(generate._Features.__struct_fields__) <= set(DESCRIBED[Api.VLLM_GENERATE]["features"])
    assert "max_tokens" in DESCRIBED[Api.VLLM_GENERATE]["sampling_params"]


class MisspeltSalt(Body):
    cache_sald: bytes = b""


class CamelCase(Body, rename="camel"):
    maxTokens: bytes = b""


class OtherApi(Body):
    input_ids: bytes = b""


@pytest.mark.parametrize("fault", [MisspeltSalt, CamelCase, OtherApi])
def test_other_names_would_be_noticed(fault: type[Body]) -> None:
    assert all(unknown_members(api, fault) for api in BODIES)
