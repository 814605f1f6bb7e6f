"""Answers of a real vLLM 0.32.0 to every API it serves, against a reference that decodes all their JSON."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from epp.payload.answer import AnswerReader
from epp.payload.records import Api, Usage

RECORDED = Path(__file__).parent.parent / "data" / "payload"
EXCHANGES = {
    path.stem: json.loads(path.read_text())
    for folder in (".", "answers", "apis")
    for path in sorted((RECORDED / folder).glob("*.json"))
}
ENGINE, CLIENT = "acme/tiny-llama", 'alias "x"'

APIS = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/embeddings": Api.EMBEDDINGS,
    "/v1/responses": Api.RESPONSES,
    "/v1/chat/completions/render": Api.CHAT_RENDER,
    "/v1/completions/render": Api.COMPLETIONS_RENDER,
    "/v1/messages": Api.MESSAGES,
    "/v1/messages/count_tokens": Api.COUNT_TOKENS,
    "/inference/v1/generate": Api.VLLM_GENERATE,
}
RENDERS = (Api.CHAT_RENDER, Api.COMPLETIONS_RENDER)
UNREAD = (Api.COUNT_TOKENS, Api.PASSTHROUGH)


def api_of(name: str) -> Api:
    return APIS.get(EXCHANGES[name]["request"]["path"], Api.PASSTHROUGH)


def answer_of(name: str) -> bytes:
    return str(EXCHANGES[name]["response"]["body"] or "").encode()


ANSWERED = [name for name, exchange in EXCHANGES.items() if exchange["response"]["status"] == 200]
STREAMED = [name for name in ANSWERED if "chunks" in EXCHANGES[name]["response"]]
REFUSED = [name for name in EXCHANGES if name not in ANSWERED]


def begun(name: str, model: str) -> tuple[AnswerReader, bool]:
    answer = EXCHANGES[name]["response"]
    headers = {key.lower(): value for key, value in answer["headers"]}
    reader = AnswerReader(api_of(name), model, served_name(name))
    encoding = headers.get("content-encoding", "")
    return reader, reader.begin(answer["status"], headers.get("content-type", ""), encoding)


def served_name(name: str) -> str:
    named = [holder["model"] for document in documents(name) for holder in holders(name, document)]
    return str(named[0]) if named else ENGINE


def documents(name: str) -> list[Any]:
    body = answer_of(name).decode()
    if name not in STREAMED:
        return [json.loads(body)] if body else []
    lines = [line[6:] for line in body.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def holders(name: str, document: Any) -> list[dict[str, Any]]:
    """The objects in which a model is named."""
    of_list = document if isinstance(document, list) else [document]
    member = {Api.RESPONSES: "response", Api.MESSAGES: "message"}.get(api_of(name))
    found = [each.get(member, {}) if member and name in STREAMED else each for each in of_list]
    return [each for each in found if isinstance(each, dict) and "model" in each]


def expected_usage(name: str) -> Usage | None:
    found = None
    for document in documents(name):
        if not isinstance(document, dict):
            continue
        told = document.get("usage") or document.get("response", {}).get("usage")
        if told:
            details = told.get("prompt_tokens_details") or told.get("input_tokens_details") or {}
            prompt = told["prompt_tokens"] if "prompt_tokens" in told else told["input_tokens"]
            output = told["completion_tokens"] if "completion_tokens" in told else told["output_tokens"]
            found = Usage(prompt, output, details.get("cached_tokens"))
    return found


def test_there_are_recordings_of_every_api_that_is_served() -> None:
    assert {api_of(name) for name in ANSWERED} == {*APIS.values(), Api.PASSTHROUGH} - {Api.EMBEDDINGS}
    assert {api_of(name) for name in STREAMED} > {Api.RESPONSES, Api.MESSAGES, Api.VLLM_GENERATE}
    assert len(EXCHANGES) >= 90


@pytest.mark.parametrize("name", ANSWERED)
def test_tokens_are_counted_and_no_byte_changes(name: str) -> None:
    reader, may_change = begun(name, served_name(name))
    assert not may_change
    assert reader.feed(answer_of(name), True) == answer_of(name)
    assert reader.usage == (None if api_of(name) in UNREAD else expected_usage(name))
    assert reader.usage is not None or api_of(name) in (*RENDERS, *UNREAD) or name in WITHOUT_USAGE


WITHOUT_USAGE = {
    *("chat-stream", "chat-stream-return-token-ids", "completions-stream", "completions-stream-orca-json"),
    *("completions-stream-token-ids", "completions-stream-x-request-id", "generate-stream"),
}


def test_what_the_engine_reports_of_its_cache() -> None:
    cached = {}
    for name in ANSWERED:
        reader, _ = begun(name, ENGINE)
        reader.feed(answer_of(name), True)
        if reader.usage is not None and reader.usage.cached_tokens:
            cached[name] = reader.usage.cached_tokens
    assert cached == {
        "opt-completions-metrics-cached-2": 64,
        "pd-decode-side-prefix-hit-decode": 96,
        "pd-decode-side-prefix-hit-prefill": 96,
    }


FIRST_TOKEN = {Api.CHAT: 2, Api.COMPLETIONS: 1, Api.VLLM_GENERATE: 1, Api.RESPONSES: 5, Api.MESSAGES: 3}


@pytest.mark.parametrize("name", STREAMED)
def test_the_event_with_the_first_token(name: str) -> None:
    reader, _ = begun(name, ENGINE)
    seen = []
    for chunk in EXCHANGES[name]["response"]["chunks"]:
        reader.feed(chunk["data"].encode(), False)
        seen.append(reader.first_token)
    assert seen.index(True) + 1 == FIRST_TOKEN[api_of(name)]
    assert all(seen[seen.index(True) :])


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_every_event_is_counted_once(name: str, size: int) -> None:
    body = answer_of(name)
    for model in (ENGINE, CLIENT):
        reader, _ = begun(name, model)
        for start in range(0, len(body), size):
            reader.feed(body[start : start + size], False)
        assert reader.finish() == b""
        assert reader.events == len(documents(name))


@pytest.mark.parametrize("name", [name for name in ANSWERED if name not in STREAMED])
def test_a_plain_answer_has_no_events(name: str) -> None:
    reader, _ = begun(name, CLIENT)
    reader.feed(answer_of(name), True)
    assert reader.events == 0
    assert reader.first_token is bool(answer_of(name))


def renamed(name: str) -> bytes:
    """The answer decoded, renamed and written as the engine writes it, which changes nothing else."""

    def written(document: Any) -> str:
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    body = answer_of(name).decode()
    for document in documents(name):
        before = written(document)
        assert before in body
        for holder in holders(name, document):
            assert holder["model"] == served_name(name)
            holder["model"] = "\0"
        body = body.replace(before, written(document).replace('"\\u0000"', json.dumps(CLIENT)), 1)
    return body.encode()


@pytest.mark.parametrize("name", [name for name in ANSWERED if api_of(name) not in UNREAD])
@pytest.mark.parametrize("size", [1, 64, 1 << 20])
def test_the_clients_name_is_put_back_wherever_the_api_names_the_model(name: str, size: int) -> None:
    body = answer_of(name)
    reader, may_change = begun(name, CLIENT)
    assert may_change
    cut = [body[start : start + size] for start in range(0, len(body), size)]
    forwarded = b"".join([reader.feed(piece, False) for piece in cut] + [reader.feed(b"", True)])
    assert forwarded == renamed(name)
    assert reader.usage == expected_usage(name)
    assert forwarded != body or api_of(name) is Api.VLLM_GENERATE


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_cut_off_keeps_what_has_passed(name: str) -> None:
    body = answer_of(name)
    ends = [*accumulate(len(chunk["data"].encode()) for chunk in EXCHANGES[name]["response"]["chunks"])]
    for whole, end in enumerate(ends[:-2], 1):
        reader, _ = begun(name, ENGINE)
        reader.feed(body[: end + len(b"event: x\ndata: {")], True)
        started = b"\ndata:" in body[end - 1 : end + len(b"event: x\ndata: {")]
        assert reader.events == whole + started


@pytest.mark.parametrize("name", [name for name in ANSWERED if api_of(name) in UNREAD])
def test_what_is_not_read_passes(name: str) -> None:
    reader, may_change = begun(name, CLIENT)
    assert not may_change
    body = answer_of(name)
    assert b"".join(reader.feed(body[at : at + 7], False) for at in range(0, len(body), 7)) == body
    assert reader.finish() == b""
    assert reader.usage is None


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_passes_unread(name: str) -> None:
    reader, may_change = begun(name, CLIENT)
    assert not may_change
    assert reader.feed(answer_of(name), True) == answer_of(name)
    assert (reader.usage, reader.first_token, reader.events) == (None, False, 0)
