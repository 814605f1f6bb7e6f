"""The lab's servers asked what a real vLLM 0.32 was asked: same statuses, shapes, order and framing."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epp.lab.engine import FITS, EngineSpec
from epp.lab.engine_server import Serving
from epp.lab.servers import Fleet, serve_engines

RECORDED = Path(__file__).parents[1] / "data" / "lab"
SPEC = EngineSpec(FITS["llama-8b-h100"], num_blocks=80, block_size=32, max_num_seqs=4, max_model_len=2048)

# What an answer may have of its own; everything else is compared literally.
OWN = {"id", "created", "system_fingerprint", "content", "text", "root"}
OWN |= {"prompt_tokens", "total_tokens", "cached_tokens"}

WHOLE = [
    "chat",
    "chat-content-parts",
    "chat-max-completion-tokens",
    "chat-x-request-id",
    "completions",
    "completions-no-model-field",
    "completions-x-request-id",
    "error-prompt-plus-max-tokens-too-long",
]
STREAMED = [
    "chat-stream",
    "chat-stream-usage",
    "chat-stream-continuous-usage",
    "completions-stream",
    "completions-stream-usage",
    "completions-stream-continuous-usage",
]
REFUSED = [
    "error-chat-no-messages",
    "error-chat-unknown-model",
    "error-content-type",
    "error-empty-body",
    "error-malformed-json",
    "error-method-not-allowed",
    "error-negative-max-tokens",
    "error-no-prompt",
    "error-prompt-too-long",
    "error-stream-options-without-stream",
    "error-unknown-model",
    "error-unknown-model-stream",
    "error-unknown-path",
]


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


def shape(value: Any, name: str = "") -> Any:
    """A value with its keys in order; what is the answer's own is replaced by its type."""
    match value:
        case dict():
            return [(key, shape(inner, key)) for key, inner in value.items()]
        case list():
            return [shape(inner, name) for inner in value]
        case str() | int() if name in OWN:
            if name == "content" and value == "":
                return "(empty)"
            return type(value).__name__
        case _:
            return value


def event_shape(chunk: str) -> Any:
    """One HTTP chunk must be exactly one SSE event."""
    assert chunk.startswith("data: ")
    assert chunk.endswith("\n\n")
    assert chunk.count("\n\n") == 1
    payload = chunk[len("data: ") : -2]
    return payload if payload == "[DONE]" else shape(json.loads(payload))


class Reply:
    """An answer as read from the socket."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.raw_body = raw.partition(b"\r\n\r\n")
        status_line, *lines = head.decode().split("\r\n")
        self.status = int(status_line.split()[1])
        pairs = (line.partition(": ") for line in lines)
        self.headers = {name.lower(): value for name, _, value in pairs}

    @property
    def chunks(self) -> list[str]:
        found, rest = [], self.raw_body
        while True:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            chunk, end, rest = rest[:length], rest[length : length + 2], rest[length + 2 :]
            assert end == b"\r\n"
            if not length:
                assert rest == b""
                return found
            found.append(chunk.decode())


async def ask(port: int, exchange: dict[str, Any]) -> Reply:
    """Sends the recorded request as it was sent."""
    request = exchange["request"]
    lines = [f"{request['method']} {request['path']} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request["headers"]]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([*lines, "", request["body"] or ""]).encode())
    raw = await reader.read()
    writer.close()
    await writer.wait_closed()
    return Reply(raw)


async def fleet_of_one(report_cached_tokens: bool) -> Fleet:
    serving = Serving(SPEC, "acme/tiny-llama", speedup=20, report_cached_tokens=report_cached_tokens)
    return await serve_engines([0], serving)


@pytest.fixture
async def plain() -> AsyncIterator[int]:
    """Port of an engine that does not report cached tokens, as most recordings were made."""
    fleet = await fleet_of_one(report_cached_tokens=False)
    yield fleet.ports[0]
    await fleet.stop()


@pytest.fixture
async def detailed() -> AsyncIterator[int]:
    fleet = await fleet_of_one(report_cached_tokens=True)
    yield fleet.ports[0]
    await fleet.stop()


@pytest.mark.parametrize("name", WHOLE)
async def test_whole_answers(plain: int, name: str) -> None:
    exchange = recorded(name)
    reply = await ask(plain, exchange)
    assert reply.status == exchange["response"]["status"] == 200
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["content-length"]) == len(reply.raw_body)
    assert shape(json.loads(reply.raw_body)) == shape(json.loads(exchange["response"]["body"]))


@pytest.mark.parametrize("name", STREAMED)
async def test_streamed_answers(plain: int, name: str) -> None:
    exchange = recorded(name)
    reply = await ask(plain, exchange)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in reply.headers
    expected = [event_shape(chunk["data"]) for chunk in exchange["response"]["chunks"]]
    assert [event_shape(chunk) for chunk in reply.chunks] == expected


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_are_the_same_bytes(plain: int, name: str) -> None:
    exchange = recorded(name)
    reply = await ask(plain, exchange)
    assert reply.status == exchange["response"]["status"]
    assert reply.raw_body.decode() == exchange["response"]["body"]
    assert reply.headers["content-type"] == "application/json"
    headers = dict(exchange["response"]["headers"])
    assert reply.headers.get("allow") == headers.get("allow")


@pytest.mark.parametrize("name", ["chat-x-request-id", "completions-x-request-id"])
async def test_request_id_becomes_the_answers_id(plain: int, name: str) -> None:
    exchange = recorded(name)
    reply = await ask(plain, exchange)
    assert json.loads(reply.raw_body)["id"] == json.loads(exchange["response"]["body"])["id"]


@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_made_ids_look_as_recorded(plain: int, name: str) -> None:
    exchange = recorded(name)
    reply = await ask(plain, exchange)
    mine, theirs = (json.loads(body)["id"] for body in (reply.raw_body, exchange["response"]["body"]))
    assert mine.partition("-")[0] == theirs.partition("-")[0]
    assert len(mine) == len(theirs)


@pytest.mark.parametrize("name", ["opt-chat-metrics", "opt-completions-metrics-cached-2"])
async def test_usage_details_of_whole_answers(detailed: int, name: str) -> None:
    exchange = recorded(name)
    reply = await ask(detailed, exchange)
    mine, theirs = (json.loads(body)["usage"] for body in (reply.raw_body, exchange["response"]["body"]))
    assert shape(mine) == shape(theirs)


@pytest.mark.parametrize("name", ["opt-chat-stream-metrics", "opt-completions-stream-metrics"])
async def test_usage_details_of_streams(detailed: int, name: str) -> None:
    """The recorded server adds usage by an option of its own; here the client asks for it."""
    exchange = recorded(name)
    body = json.loads(exchange["request"]["body"])
    body["stream_options"] = {"include_usage": True}
    text = json.dumps(body)
    exchange["request"]["body"] = text
    headers = {**dict(exchange["request"]["headers"]), "Content-Length": str(len(text))}
    exchange["request"]["headers"] = list(headers.items())
    reply = await ask(detailed, exchange)
    mine = json.loads(reply.chunks[-2].removeprefix("data: "))
    theirs = json.loads(exchange["response"]["chunks"][-2]["data"].removeprefix("data: "))
    del theirs["metrics"]
    assert shape(mine) == shape(theirs)


async def test_second_time_is_cached_as_recorded(detailed: int) -> None:
    """Block size 32 and 78 tokens then, 90 now: both times two blocks are full and 64 tokens cached."""
    first = await ask(detailed, recorded("opt-completions-metrics-cached"))
    second = await ask(detailed, recorded("opt-completions-metrics-cached-2"))
    expected = json.loads(recorded("opt-completions-metrics-cached-2")["response"]["body"])["usage"]
    usages = [json.loads(reply.raw_body)["usage"] for reply in (first, second)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 64]
    assert expected["prompt_tokens_details"]["cached_tokens"] == 64


async def test_pages_without_a_prompt(plain: int) -> None:
    models = await ask(plain, recorded("get-models"))
    theirs = json.loads(recorded("get-models")["response"]["body"])
    theirs["data"] = theirs["data"][:1]  # the recorded server had two adapters more
    theirs["data"][0]["permission"][0]["id"] = "modelperm-acme/tiny-llama"
    mine = json.loads(models.raw_body)
    assert shape({**mine, "data": [{**mine["data"][0]}]}) == shape(theirs)
    assert (await ask(plain, recorded("get-version"))).raw_body == b'{"version":"0.32.0"}'
    health = await ask(plain, recorded("get-health"))
    assert (health.status, health.raw_body) == (200, b"")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda text: text.replace('"logprobs":null,', ""), id="key missing"),
        pytest.param(lambda text: text.replace('"index":0', '"index":"0"'), id="another type"),
        pytest.param(
            lambda text: text.replace(
                '"logprobs":null,"finish_reason":null', '"finish_reason":null,"logprobs":null'
            ),
            id="another order",
        ),
        pytest.param(
            lambda text: text.replace('"role":"assistant","content":""', '"content":"a"'), id="no role"
        ),
        pytest.param(lambda text: text + text, id="two events in a chunk"),
    ],
)
def test_the_comparison_sees_faults(spoil: Any) -> None:
    chunk = recorded("chat-stream")["response"]["chunks"][0]["data"]
    spoilt = spoil(chunk)
    assert spoilt != chunk
    assert not same_event(spoilt, chunk)


def same_event(mine: str, theirs: str) -> bool:
    try:
        return event_shape(mine) == event_shape(theirs)
    except AssertionError:
        return False
