"""Requests of Vertex AI's gRPC API, written by messages as Google declares them."""

import gzip
import json
from typing import Any

import msgspec
import pytest

from epp import names
from epp.errors import BadRequest, PayloadTooLarge
from epp.payload.apis import PARSERS, ParserSet
from epp.payload.records import Api, InferenceRequest, RawRequest
from epp.payload.render import ExactTokens
from epp.payload.request import Parsed, parse_request, rewrite_model
from epp.payload.vertex import CARRIED
from tests.data.vertex.google import METHODS, PACKAGES, REQUESTS, HttpBody, asked, framed, path_of

ALL = ParserSet(PARSERS)
LIMIT = 1 << 20
CHAT = {
    "model": "gemma",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße"}],
    "max_tokens": 40,
    "stream": True,
    "cache_salt": "s",
}
TURN = {"model": "gemma", "input": "hello", "instructions": "Be brief.", "max_output_tokens": 7}
JSON_OF = {"ChatCompletions": CHAT, "StreamRawPredict": TURN, "RawPredict": TURN}
HTTP_PATH = {Api.CHAT: "/v1/chat/completions", Api.RESPONSES: "/v1/responses"}


def parsed(path: str, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Parsed:
    return parse_request(RawRequest("id", "POST", path, headers, body), max_bytes=LIMIT, parsers=ALL)


def call(method: str, document: Any, **fields: Any) -> Parsed:
    return parsed(path_of(method), asked(method, document, **fields))


@pytest.mark.parametrize("package", [*PACKAGES, "some.other.place"])
@pytest.mark.parametrize("method", METHODS)
def test_json_says_the_same_as_over_http(method: str, package: str) -> None:
    document = JSON_OF[method]
    got = parsed(path_of(method, package), asked(method, document)).request
    http = parsed(HTTP_PATH[CARRIED[got.api]], json.dumps(document).encode()).request
    assert msgspec.structs.replace(got, api=http.api) == http
    assert http.prompts
    assert http.model == "gemma"


def test_media_say_the_same_as_over_http() -> None:
    headers = (("x-llm-d-video-duration", "3"),)
    parts = [{"type": kind, kind: {"url": "http://x/y"}} for kind in ("image_url", "video_url")]
    document = {"messages": [{"role": "user", "content": parts}]}
    got = parsed(path_of("ChatCompletions"), asked("ChatCompletions", document), headers).request
    http = parsed("/v1/chat/completions", json.dumps(document).encode(), headers).request
    assert (got.prompts, got.media, got.prompt_tokens) == (http.prompts, http.media, http.prompt_tokens)
    assert len(got.media) == 2


def test_the_engines_are_asked_over_http2() -> None:
    assert ParserSet(["vertexai-parser"]).protocols == {names.H2C_PROTOCOL}


def test_other_methods_are_not_read() -> None:
    for method in ("Predict", "DirectRawPredict", "StreamGenerateContent"):
        assert parsed(path_of(method), b"\xff").request == InferenceRequest(Api.PASSTHROUGH)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body has 0"),
        (b"\0\0\0\0", "the body has 4"),
        (framed(b"abc", flag=1), "compressed flag is 1"),
        (framed(b"abc")[:-1], "announces 3 bytes, 2 came"),
        (b"\0\xff\xff\xff\xff", "announces 4294967295 bytes, 0 came"),
        (framed(b"\xff"), "not a google.cloud.aiplatform "),
        (framed(b""), "must have `http_body`"),
        (framed(b"\x0a\x03abc"), "must have `http_body`"),
        (framed(b"\x12\x00"), "the body is empty"),
        (framed(b"\x12\x04\x12\x02[]"), "error unmarshaling request bodyMap"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_read_is_refused_with_its_reason(method: str, body: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        parsed(path_of(method), body)
    if "bodyMap" not in refused.value.message:
        assert refused.value.message.startswith(f"invalid {method} request: ")


@pytest.mark.parametrize(
    ("method", "document", "says"),
    [
        ("ChatCompletions", {"input": "a"}, "must have valid messages field"),
        ("StreamRawPredict", {"messages": []}, "must have input field"),
        ("RawPredict", {"input": "a", "model": 3}, "`model` must be a string"),
    ],
)
def test_json_is_refused_in_the_words_of_its_api(method: str, document: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        call(method, document)


@pytest.mark.parametrize("method", METHODS)
def test_every_cut_of_a_call_is_refused(method: str) -> None:
    body = asked(method, JSON_OF[method])
    for end in range(len(body)):
        with pytest.raises(BadRequest, match=f"invalid {method} request"):
            parsed(path_of(method), body[:end])


def test_a_call_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(PayloadTooLarge):
        parsed(path_of("RawPredict"), b"\0" * (LIMIT + 1))


def test_a_body_that_is_encoded_as_a_whole_passes_unread() -> None:
    """gRPC compresses messages, not bodies."""
    body = gzip.compress(asked("RawPredict", TURN), mtime=0)
    got = parsed(path_of("RawPredict"), body, (("content-encoding", "gzip"),))
    assert (got.request, got.body) == (InferenceRequest(Api.PASSTHROUGH), body)


# -- another model -------------------------------------------------------------------------------------


def rewritten(method: str, document: Any, target: str, behind: bytes = b"") -> tuple[Any, bytes]:
    """The request that goes on, and what stands behind its message."""
    request = REQUESTS[method](endpoint="projects/ü", later="kept")
    request.http_body.content_type = "application/json; x=ü"
    request.http_body.data = document if isinstance(document, bytes) else json.dumps(document).encode()
    for value in (b"\1\2", b""):
        request.http_body.extensions.add(type_url="t/x", value=value)
    made = rewrite_model(parsed(path_of(method), framed(request) + behind), target)
    assert made.remove_headers == ()
    size = int.from_bytes(made.body[1:5])
    assert made.body[0] == 0
    got = REQUESTS[method].FromString(made.body[5 : 5 + size])
    request.http_body.data = got.http_body.data
    assert got == request
    return got, made.body[5 + size :]


@pytest.mark.parametrize("target", ["m", "a-much-longer-name" * 20, 'ü"'])
@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_replaced_and_all_else_stays(method: str, target: str) -> None:
    """Lengths grow past one byte and past two; endpoint, type, extensions and unknown fields stay."""
    for document in (JSON_OF[method], {**JSON_OF[method], "user": "u" * 20_000}):
        got, rest = rewritten(method, document, target, b"behind")
        assert json.loads(got.http_body.data) == {**document, "model": target}
        assert rest == b"behind"


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_put_in_where_there_is_none(method: str) -> None:
    for named in ({}, {"model": ""}, {"model": None}):
        document = {name: value for name, value in JSON_OF[method].items() if name != "model"} | named
        assert call(method, document).request.model == ""
        got, _ = rewritten(method, document, "new")
        assert json.loads(got.http_body.data) == {**document, "model": "new"}


def test_the_text_of_the_json_stays() -> None:
    text = b'\xef\xbb\xbf {"x" :1e3,  "model"\n:"old", "input":"\\u00e4", "y":[ ]}\n'
    got, _ = rewritten("RawPredict", text, "new")
    assert got.http_body.data == text.replace(b'"old"', b'"new"')


def test_a_message_written_in_parts_is_one() -> None:
    """Protobuf merges what comes twice; the later data counts, as for every reader."""
    first = REQUESTS["RawPredict"](endpoint="e", http_body=HttpBody(content_type="a", data=b"{}"))
    last = REQUESTS["RawPredict"](http_body=HttpBody(data=b'{"input":"x","model":"old"}'))
    body = framed(first.SerializeToString() + last.SerializeToString())
    made = parsed(path_of("RawPredict"), body)
    assert made.request.model == "old"
    got = REQUESTS["RawPredict"].FromString(rewrite_model(made, "new").body[5:])
    assert (got.endpoint, got.http_body.content_type) == ("e", "a")
    assert got.http_body.data == b'{"input":"x","model":"new"}'


# -- exact tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_render_service_is_asked_for_the_json_alone(method: str) -> None:
    exact = ExactTokens("http://render", "base", 5.0, 30.0)
    made = call(method, JSON_OF[method])
    need = exact.need(made)
    api = CARRIED[made.request.api]
    http = exact.need(parsed(HTTP_PATH[api], json.dumps(JSON_OF[method]).encode()))
    assert need == http
    assert need is not None
    assert json.loads(need.body)["model"] == "base"
