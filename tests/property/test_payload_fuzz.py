"""Recorded bodies broken at random, from a fixed seed: nothing escapes but a RequestError."""

import gzip
import json
import random
from pathlib import Path

import pytest

from epp.errors import RequestError
from epp.payload.answer import AnswerReader
from epp.payload.records import Api, RawRequest
from epp.payload.refusal import refusal_body
from epp.payload.request import Parsed, parse_request, rewrite_model

RECORDED = Path(__file__).parent.parent / "data" / "payload"
EXCHANGES = [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))]
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
    *(b'"model"', b'"model":', b'"usage":{', b'"usage"', b"data: ", b'"messages"', b'"prompt"'),
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


@pytest.mark.parametrize("seed", range(4))
def test_requests(seed: int) -> None:
    draw = random.Random(seed)
    routed = 0
    for _ in range(1000):
        request = draw.choice(EXCHANGES)["request"]
        body = broken((request["body"] or "").encode(), draw)
        headers = [("content-type", "application/json")]
        if draw.random() < 0.2:
            body = broken(gzip.compress(body, 1), draw) if draw.random() < 0.8 else gzip.compress(body, 1)
            headers.append(("content-encoding", draw.choice(["gzip", "deflate", "gzip, br"])))
        parsed = routed_or_refused(RawRequest("id", "POST", request["path"], tuple(headers), body))
        if parsed is None:
            continue
        routed += 1
        parsed.request.model.encode()
        parsed.request.cache_salt.encode()
        assert all(isinstance(prompt, bytes) for prompt in parsed.request.prompts)
        if parsed.request.api is not Api.PASSTHROUGH:
            rewritten = rewrite_model(parsed, "new")
            again = parse_request(
                RawRequest("id", "POST", request["path"], (), rewritten.body), max_bytes=2 * LIMIT
            ).request
            assert again.model == "new"
            assert again.prompts == parsed.request.prompts
    assert 100 < routed < 900


def routed_or_refused(raw: RawRequest) -> Parsed | None:
    try:
        return parse_request(raw, max_bytes=LIMIT)
    except RequestError as error:
        answer = json.loads(refusal_body(error))["error"]
    assert answer["code"] in (400, 413)
    assert answer["message"]
    return None


def follow(chunks: list[bytes], content_type: str, client: str, trailers: bool) -> tuple[bytes, AnswerReader]:
    reader = AnswerReader(Api.CHAT, client, ENGINE_NAME)
    reader.begin(200, content_type, "")
    out = b"".join(reader.feed(chunk, False) for chunk in chunks)
    out += reader.finish() if trailers else reader.feed(b"", True)
    return out, reader


@pytest.mark.parametrize("seed", range(4))
def test_answers(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(400):
        answer = draw.choice(EXCHANGES)["response"]
        content_type = "text/event-stream" if "chunks" in answer else "application/json"
        data = broken((answer["body"] or "").encode(), draw)
        places = sorted(draw.randint(0, len(data)) for _ in range(draw.randint(0, 12)))
        bounds = [0, *places, len(data)]
        chunks = [data[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        out, reader = follow(chunks, content_type, ENGINE_NAME, draw.random() < 0.5)
        assert out == data
        out, renamed = follow(chunks, content_type, "alias", draw.random() < 0.5)
        whole, at_once = follow([data], content_type, "alias", False)
        assert out == whole
        assert reader.usage == renamed.usage == at_once.usage
        assert reader.first_token == renamed.first_token == at_once.first_token
