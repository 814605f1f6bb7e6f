"""Requests and answers of a real vLLM 0.32.0, read and renamed, against a reference that decodes all JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from epp.errors import RequestError
from epp.payload.answer import AnswerReader
from epp.payload.records import Api, RawRequest, Usage
from epp.payload.request import parse_request, rewrite_model

RECORDED = Path(__file__).parent.parent / "data" / "payload"
EXCHANGES = {path.stem: json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))}
ANSWERED = [name for name, exchange in EXCHANGES.items() if exchange["response"]["status"] == 200]
STREAMED = [name for name in ANSWERED if "chunks" in EXCHANGES[name]["response"]]
PLAIN = [name for name in ANSWERED if name not in STREAMED]
REFUSED = [name for name in EXCHANGES if name not in ANSWERED]
REFUSED_BY_US = {"error-chat-no-messages", "error-empty-body", "error-malformed-json", "error-no-prompt"}

ENGINE_NAME = "acme/tiny-llama"
NAMES = ("alias", 'a "quoted" \\ näme', "x" * 300)


def raw_request(name: str) -> RawRequest:
    request = EXCHANGES[name]["request"]
    headers = tuple((key.lower(), value) for key, value in request["headers"])
    return RawRequest("id", request["method"], request["path"], headers, (request["body"] or "").encode())


def api_of_exchange(name: str) -> Api:
    return Api.CHAT if "chat" in EXCHANGES[name]["request"]["path"] else Api.COMPLETIONS


def chunks_of(name: str) -> list[bytes]:
    answer = EXCHANGES[name]["response"]
    return (
        [chunk["data"].encode() for chunk in answer["chunks"]]
        if "chunks" in answer
        else [answer["body"].encode()]
    )


def begun(name: str, client: str = ENGINE_NAME) -> tuple[AnswerReader, bool]:
    answer = EXCHANGES[name]["response"]
    headers = {key.lower(): value for key, value in answer["headers"]}
    documents = reference_documents(name)
    reader = AnswerReader(api_of_exchange(name), client, documents[0].get("model", ENGINE_NAME))
    return reader, reader.begin(
        answer["status"], headers["content-type"], headers.get("content-encoding", "")
    )


def reference_documents(name: str) -> list[dict[str, Any]]:
    body = EXCHANGES[name]["response"]["body"]
    if name not in STREAMED:
        return [json.loads(body)]
    return [json.loads(part[6:]) for part in body.split("\n\n") if part.startswith("data: {")]


def reference_usage(name: str) -> Usage | None:
    found = [document["usage"] for document in reference_documents(name) if document.get("usage")]
    if not found:
        return None
    details = found[-1].get("prompt_tokens_details") or {}
    return Usage(found[-1]["prompt_tokens"], found[-1]["completion_tokens"], details.get("cached_tokens"))


def reference_rename(text: str, client: str) -> str:
    """`text` decoded, renamed and written again as the engine writes it; checked to change nothing else."""
    document = json.loads(text)
    assert json.dumps(document, separators=(",", ":"), ensure_ascii=False) == text
    document["model"] = "\0"
    written = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return written.replace('"\\u0000"', json.dumps(client), 1)


def test_there_are_recordings_of_every_kind() -> None:
    assert len(STREAMED) >= 8
    assert len(PLAIN) >= 20
    assert set(REFUSED) > REFUSED_BY_US


@pytest.mark.parametrize("name", ANSWERED)
def test_what_the_engine_accepted_is_read(name: str) -> None:
    sent = json.loads(EXCHANGES[name]["request"]["body"])
    parsed = parse_request(raw_request(name), max_bytes=1 << 20)
    request = parsed.request
    assert request.api is api_of_exchange(name)
    assert request.model == request.target_model == sent.get("model", "")
    assert request.stream is sent.get("stream", False)
    assert request.max_output_tokens == sent.get("max_completion_tokens", sent.get("max_tokens"))
    assert request.cache_salt == sent.get("cache_salt", "")
    assert len(request.prompts) == (2 if name == "completions-two-prompts-n2" else 1)
    assert request.prompt_tokens > 0
    assert parsed.plain is parsed.body


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("target", NAMES)
def test_a_rewrite_changes_the_model_and_nothing_else(name: str, target: str) -> None:
    raw = raw_request(name)
    parsed = parse_request(raw, max_bytes=1 << 20)
    rewritten = rewrite_model(parsed, target)
    before, after = json.loads(raw.body), json.loads(rewritten.body)
    assert after == {**before, "model": target}
    assert rewritten.remove_headers == ()
    if parsed.model_span is not None:
        start, end = parsed.model_span
        assert json.loads(raw.body[start:end]) == before["model"]
        assert rewritten.body.startswith(raw.body[:start])
        assert rewritten.body.endswith(raw.body[end:])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_here_only_what_the_engine_refuses_for_its_shape(name: str) -> None:
    if name in REFUSED_BY_US:
        with pytest.raises(RequestError) as refused:
            parse_request(raw_request(name), max_bytes=1 << 20)
        assert refused.value.status == EXCHANGES[name]["response"]["status"]
    else:
        assert parse_request(raw_request(name), max_bytes=1 << 20).request.prompts


@pytest.mark.parametrize("name", ANSWERED)
def test_answer_with_equal_names_passes_as_it_is(name: str) -> None:
    reader, may_change = begun(name, reference_documents(name)[0]["model"])
    assert not may_change
    assert reader.streaming is (name in STREAMED)
    chunks = chunks_of(name)
    for index, chunk in enumerate(chunks):
        assert reader.feed(chunk, index == len(chunks) - 1) is chunk
    assert reader.finish() == b""
    assert reader.usage == reference_usage(name)


@pytest.mark.parametrize("name", STREAMED)
def test_first_token_of_a_stream(name: str) -> None:
    reader, _ = begun(name)
    seen = []
    for chunk in chunks_of(name):
        reader.feed(chunk, False)
        seen.append(reader.first_token)
    opening = 1 if api_of_exchange(name) is Api.CHAT else 0
    assert seen == [False] * opening + [True] * (len(seen) - opening)


@pytest.mark.parametrize("name", PLAIN)
def test_first_token_of_a_plain_answer_is_its_first_byte(name: str) -> None:
    reader, _ = begun(name)
    assert not reader.first_token
    reader.feed(b"", False)
    assert not reader.first_token
    reader.feed(chunks_of(name)[0][:1], False)
    assert reader.first_token


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("client", NAMES)
def test_client_gets_its_own_name_back(name: str, client: str) -> None:
    body = EXCHANGES[name]["response"]["body"]
    if name in STREAMED:
        events = body.split("\n\n")
        renamed = [
            f"data: {reference_rename(e[6:], client)}" if e.startswith("data: {") else e for e in events
        ]
        expected = "\n\n".join(renamed)
    else:
        expected = reference_rename(body, client)
    for size in (1, 7, 64, 1 << 20):
        reader, may_change = begun(name, client)
        assert may_change
        data = body.encode()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        forwarded = [reader.feed(piece, False) for piece in pieces] + [reader.feed(b"", True)]
        assert b"".join(forwarded) == expected.encode()
        assert reader.usage == reference_usage(name)
        assert reader.first_token


@pytest.mark.parametrize("name", STREAMED)
def test_a_whole_event_is_never_held_back(name: str) -> None:
    reader, _ = begun(name, "alias")
    for chunk in chunks_of(name):
        assert reader.feed(chunk, False).endswith(b"\n\n")
    assert reader.finish() == b""


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_passes_unread(name: str) -> None:
    answer = EXCHANGES[name]["response"]
    reader = AnswerReader(api_of_exchange(name), "alias", ENGINE_NAME)
    assert not reader.begin(answer["status"], "application/json", "")
    body = answer["body"].encode()
    assert reader.feed(body, True) is body or reader.feed(body, True) == body
    assert reader.usage is None
    assert not reader.first_token
