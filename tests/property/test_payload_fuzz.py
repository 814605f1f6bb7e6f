"""Recorded bodies broken at random, from a fixed seed: nothing escapes but a RequestError."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.errors import RequestError
from epp.payload.answer import AnswerReader
from epp.payload.apis import DIALECTS, PARSERS, ParserSet
from epp.payload.records import Api, RawRequest
from epp.payload.refusal import refusal_body
from epp.payload.request import Parsed, parse_request, rewrite_model
from epp.payload.vertex import CARRIED

RECORDED = Path(__file__).parent.parent / "data" / "payload"
EXCHANGES = [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))]
OTHERS = [json.loads(path.read_text())["request"] for path in sorted((RECORDED / "apis").glob("*.json"))]
ALL = ParserSet(PARSERS)
ANSWERS = EXCHANGES + [
    json.loads(path.read_text())
    for folder in ("answers", "apis")
    for path in sorted((RECORDED / folder).glob("*.json"))
]
LIMIT = 100_000
ENGINE_NAME = "acme/tiny-llama"

ODD = [
    *(
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\\",
        b"\\ud83d",
        b"\\u0000",
        b"\n\n",
        b"\r\n\r\n",
        b"\r",
    ),
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"[[[[", b"[" * 3000, b"null", b"true"),
    *(b"NaN", b"-Infinity", b"1e400", b"-1", b"4294967296", b"9" * 400),
    *(
        b'"model"',
        b'"model":',
        b'"usage":{',
        b'"usage"',
        b"data: ",
        b"[DONE]",
        b'"meta_info":{',
        b'"messages"',
        b'"prompt"',
    ),
    *(b'{"url":"x"}', b'{"type":"image_url","image_url":{"url":"data:,x"}}', b'"choices":[{"delta":{}}]'),
]


def broken(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(data))
        match draw.randint(0, 4):
            case 0:
                data = data[:at] + draw.choice(ODD) + data[at:]
            case 1:
                data = data[:at] + data[at + draw.randint(1, 20) :]
            case 2:
                data = data[:at] + data[draw.randint(0, len(data)) :]
            case 3:
                data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
            case _:
                data = data.replace(draw.choice([b"null", b"0", b"1", b'"a', b"["]), draw.choice(ODD), 2)
    return data


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}, IMAGE]}
FEATURES = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
URL = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlhAQABAAAAACw="}}
WRITTEN: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [URL, {"type": "text", "text": "a"}]}]},
    ),
    ("/v1/embeddings", {"input": [{"content": [URL]}, {"content": "a"}], "cache_salt": "s"}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 5}),
    ("/v1/embeddings", {"input": [[1, 2], [3]]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}, {"type": "function_call", "name": "f"}]}),
    ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": [URL]}], "metadata": {}}),
    ("/v1/images/generations", {"prompt": "a fox", "n": 1, "size": "1x1"}),
    ("/v1/messages", {"system": [{"type": "text", "text": "s"}], "messages": [{"content": [IMAGE, RESULT]}]}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "features": FEATURES, "sampling_params": {}}),
    ("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}, "extra_key": "k"}),
]
REQUESTS = [(request["path"], request["body"] or "") for request in OTHERS]
REQUESTS += [(path, json.dumps({"model": ENGINE_NAME, **members})) for path, members in WRITTEN]


def asked_for(path: str, body: bytes, headers: tuple[tuple[str, str], ...]) -> Parsed | None:
    """A request, read or refused; what is read can be asked for under another name."""
    parsed = routed_or_refused(RawRequest("id", "POST", path, headers, body))
    if parsed is None:
        return None
    parsed.request.model.encode()
    parsed.request.cache_salt.encode()
    assert all(isinstance(prompt, bytes) for prompt in parsed.request.prompts)
    assert all(medium.tokens >= 0 for medium in parsed.request.media)
    rewritten = rewrite_model(parsed, "new")
    if DIALECTS[parsed.request.api].rewrites_model:
        raw = RawRequest("id", "POST", path, (), rewritten.body)
        again = parse_request(raw, max_bytes=2 * LIMIT, parsers=ALL).request
        assert again.model == "new"
        assert (again.prompts, again.media) == (parsed.request.prompts, parsed.request.media)
    else:
        assert rewritten.body is body
    return parsed


@pytest.mark.parametrize("seed", range(4))
def test_requests(seed: int) -> None:
    draw = random.Random(seed)
    routed = 0
    for _ in range(1000):
        request = draw.choice(EXCHANGES)["request"]
        body = broken((request["body"] or "").encode(), draw)
        headers = [("content-type", "application/json")]
        if draw.random() < 0.2:
            body = gzip.compress(body, 1, mtime=0)
            body = broken(body, draw) if draw.random() < 0.8 else body
            headers.append(("content-encoding", draw.choice(["gzip", "deflate", "gzip, br"])))
        routed += asked_for(request["path"], body, tuple(headers)) is not None
    assert 100 < routed < 900


@pytest.mark.parametrize("seed", range(4))
def test_requests_of_other_apis(seed: int) -> None:
    draw = random.Random(seed)
    routed: Counter[Api] = Counter()
    for _ in range(1000):
        path, body = draw.choice(REQUESTS)
        parsed = asked_for(path, broken(body.encode(), draw) if draw.random() < 0.8 else body.encode(), ())
        if parsed is not None:
            routed[parsed.request.api] += 1
    assert 200 < routed.total() < 950
    assert set(routed) == set(Api) - {Api.VLLM_GRPC_GENERATE, Api.VLLM_GRPC_EMBED, *CARRIED}


@pytest.mark.parametrize("method", ["Generate", "Embed"])
def test_any_bytes_to_a_grpc_method(method: str) -> None:
    draw = random.Random(1)
    for _ in range(1000):
        message = draw.randbytes(draw.randrange(30))
        head = b"\0" + (len(message) + draw.choice((0, 0, 0, 1, -1)) & 0xFFFF).to_bytes(4, "big")
        asked_for(f"/vllm.grpc.engine.VllmEngine/{method}", head + message, ())


@pytest.mark.parametrize(
    "path", sorted({path for path, _ in REQUESTS if ALL.dialect_of(path).api != Api.PASSTHROUGH})
)
def test_any_depth_is_read_or_refused(path: str) -> None:
    """Around the depth at which readers of JSON give up, which each may see at another."""
    outcomes = set()
    edge = deepest()
    for depth in (*range(edge // 3, edge, edge // 14), *range(edge - 130, edge + 20), 5 * edge):
        deep = b"[" * depth + b"]" * depth
        part = b'{"type":"tool_result","content":[{"type":"x","x":%b}]}' % deep
        for value in (b'[{"role":"u","content":[%b]}]' % part, deep):
            members = b",".join(
                b'"%b":%b' % (name, value)
                for name in (b"messages", b"input", b"items", b"features", b"system")
            )
            body = b'{"prompt":"a","token_ids":[1],"input_ids":[1],%b}' % members
            outcomes.add(asked_for(path, body, ()) is None)
    assert outcomes == {True, False}


def deepest() -> int:
    """How many arrays within each other can be read from here; Pythons differ in that."""
    readable, too_deep = 1, 1_000_000
    while too_deep - readable > 1:
        depth = (readable + too_deep) // 2
        try:
            msgspec.json.decode(b"[" * depth + b"]" * depth)
        except RecursionError:
            too_deep = depth
        else:
            readable = depth
    return readable


def routed_or_refused(raw: RawRequest) -> Parsed | None:
    try:
        return parse_request(raw, max_bytes=LIMIT, parsers=ALL)
    except RequestError as error:
        refused = error
    for api in (None, *Api):
        assert json.loads(refusal_body(refused, api))["error"]["message"]
    assert refused.status in (400, 413)
    return None


def follow(
    api: Api, chunks: list[bytes], content_type: str, client: str, trailers: bool
) -> tuple[bytes, AnswerReader]:
    reader = AnswerReader(api, client, ENGINE_NAME)
    reader.begin(200, content_type, "")
    out = b"".join(reader.feed(chunk, False) for chunk in chunks)
    out += reader.finish() if trailers else reader.feed(b"", True)
    return out, reader


@pytest.mark.parametrize("seed", range(4))
def test_answers(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(400):
        answer = draw.choice(ANSWERS)["response"]
        api = draw.choice([Api.CHAT, *Api])
        content_type = "text/event-stream" if "chunks" in answer else "application/json"
        data = broken((answer["body"] or "").encode(), draw)
        places = sorted(draw.randint(0, len(data)) for _ in range(draw.randint(0, 12)))
        bounds = [0, *places, len(data)]
        chunks = [data[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        out, reader = follow(api, chunks, content_type, ENGINE_NAME, draw.random() < 0.5)
        assert out == data
        out, renamed = follow(api, chunks, content_type, "alias", draw.random() < 0.5)
        whole, at_once = follow(api, [data], content_type, "alias", False)
        assert out == whole
        assert reader.usage == renamed.usage == at_once.usage
        assert reader.first_token == renamed.first_token == at_once.first_token
        assert reader.events == renamed.events == at_once.events
