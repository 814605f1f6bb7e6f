"""What of a client's request reaches an engine: every byte of the body, and no header that steers."""

import asyncio
import gzip
import io
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from multidict import CIMultiDict
from openai import APIStatusError
from openai.types.chat import ChatCompletionUserMessageParam

from e2e.backends import Backend, Seen, backend
from e2e.configured import UNHURRIED
from e2e.pages import FLAGS, complaints, settled
from e2e.questions import openai_client
from epp import names
from epp.extproc.records import BODY_CHUNK_BYTES
from epp.lab.envoy import FORGED_HEADERS, BodyModes
from epp.lab.stack import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1 << 20
# The last two are read by the picker's decoding process.
SIZES = (0, 1, BODY_CHUNK_BYTES, BODY_CHUNK_BYTES + 1, 400_000, 3_000_000, 20_000_000)


@dataclass(frozen=True, slots=True)
class Line:
    gateway: Gateway
    engines: tuple[Backend, Backend]
    session: aiohttp.ClientSession
    mode: BodyModes

    async def send(
        self,
        body: bytes | AsyncIterator[bytes],
        headers: CIMultiDict[str] | dict[str, str] | None = None,
        path: str = "/v1/chat/completions",
        method: str = "POST",
    ) -> Seen:
        """The request as the one engine got it that got it."""
        for engine in self.engines:
            engine.seen.clear()
        sent = CIMultiDict({"content-type": "application/json"})
        sent.update(headers or {})
        data = io.BytesIO(body) if isinstance(body, bytes) and body else body or None
        async with self.session.request(method, self.gateway.url + path, data=data, headers=sent) as answer:
            assert answer.status == 200, await answer.text()
            said = await answer.json()
        (seen,) = [each for engine in self.engines for each in engine.seen]
        assert said == {"path": path, "bytes": len(seen.body)}
        return seen


# Envoy as it is configured here removes headers too. What the picker removes shows where Envoy leaves them.
LEAVES_HEADERS = {
    f"mutations: {json.dumps([{'remove': name} for name in FORGED_HEADERS])}": (
        f"mutations: {json.dumps([{'remove': names.DESTINATION_ENDPOINT}])}"
    ),
    f"request_headers_to_remove: {json.dumps(sorted(names.CONTROL_HEADERS.difference(FORGED_HEADERS)))}": "",
}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[*((mode, {}) for mode in BodyModes), *((mode, LEAVES_HEADERS) for mode in BodyModes)],
    ids=[*BodyModes, *(f"{mode}, picker alone" for mode in BodyModes)],
)
async def line(
    request: pytest.FixtureRequest, envoy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Line]:
    folder = tmp_path_factory.mktemp("requests")
    mode, edits = request.param
    async with backend() as one, backend() as other, aiohttp.ClientSession(auto_decompress=False) as session:
        addresses = [one.address, other.address]
        async with Gateway(
            addresses, folder, envoy, mode=mode, picker_flags=FLAGS, edits=UNHURRIED | edits
        ) as gateway:
            yield Line(gateway, (one, other), session, mode)
            await settled(gateway.pickers[0])
            assert complaints(gateway.pickers[0]) == []


def chat(size: int = 200, stream: bool = False) -> bytes:
    """A chat request of exactly `size` bytes, or the shortest one."""
    made = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "é"}]}
    body = json.dumps(made).encode()
    fill = random.Random(size).randbytes(max(size - len(body), 0) // 2).hex()
    return body[:-4] + fill.encode() + b"-" * (size - len(body) - len(fill)) + body[-4:]


@pytest.mark.parametrize("size", SIZES[2:])
async def test_chat_bodies_arrive_as_they_were(line: Line, size: int) -> None:
    body = chat(size)
    assert len(body) == size
    assert json.loads(body)["messages"]
    seen = await line.send(body)
    assert seen.body == body
    assert framed_once(seen)


@pytest.mark.parametrize("size", SIZES)
async def test_bodies_of_other_paths_arrive_as_they_were(line: Line, size: int) -> None:
    body = random.Random(size).randbytes(size)
    seen = await line.send(body, {"content-type": "application/octet-stream"}, path="/v1/files?purpose=x%20y")
    assert seen.body == body
    assert framed_once(seen)


async def test_bodies_without_a_length_arrive_as_they_were(line: Line) -> None:
    body = chat(300_000)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 7_777):
            yield body[start : start + 7_777]
            await asyncio.sleep(0)

    seen = await line.send(pieces())
    assert seen.body == body
    assert framed_once(seen)


async def test_compressed_bodies_arrive_as_they_were(line: Line) -> None:
    body = gzip.compress(chat(400_000))
    seen = await line.send(body, {"content-encoding": "gzip"})
    assert seen.body == body
    assert seen.header("content-encoding") == ["gzip"]
    assert framed_once(seen)


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
async def test_requests_without_a_body_arrive(line: Line, method: str) -> None:
    seen = await line.send(b"", path="/v1/models?a=b", method=method)
    assert (seen.method, seen.path, seen.body) == (method, "/v1/models?a=b", b"")


def framed_once(seen: Seen) -> bool:
    """Its length is told in exactly one way, and rightly."""
    length, encoding = seen.header("content-length"), seen.header("transfer-encoding")
    return (length, encoding) in (([str(len(seen.body))], []), ([], ["chunked"]))


def forged(in_capitals: bool) -> CIMultiDict[str]:
    """Every control header, twice."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name in sorted(names.CONTROL_HEADERS):
        for _ in range(2):
            headers.add(name.upper() if in_capitals else name, "127.0.0.1:1")
    return headers


@pytest.mark.parametrize("in_capitals", [False, True])
@pytest.mark.parametrize(
    ("body", "path", "method"),
    [
        (chat(), "/v1/chat/completions", "POST"),
        (chat(stream=True), "/v1/chat/completions", "POST"),
        (b"anything", "/v1/files", "POST"),
        (b"", "/v1/models", "GET"),
    ],
)
async def test_no_control_header_reaches_an_engine(
    line: Line, in_capitals: bool, body: bytes, path: str, method: str
) -> None:
    seen = await line.send(body, forged(in_capitals), path, method)
    arrived = [(name, value) for name, value in seen.headers if name in names.CONTROL_HEADERS]
    own = next(engine.name for engine in line.engines if engine.seen)
    assert arrived == [(names.DESTINATION_ENDPOINT, own)]
    # One of them asks for another model, where the body is read.
    is_read = path == "/v1/chat/completions" and line.mode is not BodyModes.HEADERS_ONLY
    assert seen.body == (body.replace(b'"m"', b'"127.0.0.1:1"') if is_read else body)


async def test_destination_of_a_client_has_no_effect(line: Line) -> None:
    admin = urlsplit(line.gateway.proxy.admin_url).netloc
    for value in (admin, f"{admin},{line.engines[0].name}", line.engines[0].name, ""):
        headers = {names.DESTINATION_ENDPOINT: value, names.DESTINATION_ENDPOINT_SUBSET: admin}
        for path in ("/v1/chat/completions", "/ready", "/quitquitquit"):
            seen = await line.send(chat(), headers, path)
            assert seen.header(names.DESTINATION_ENDPOINT)[0] in [engine.name for engine in line.engines]


async def test_request_id(line: Line) -> None:
    seen = await line.send(chat(), {"x-request-id": "mine"})
    assert seen.header("x-request-id") == ["mine"]
    made = [(await line.send(chat())).header("x-request-id") for _ in range(3)]
    assert all(len(each) == 1 and len(each[0]) >= 16 for each in made)
    assert len({each[0] for each in made}) == 3


async def test_other_headers_arrive_as_they_were(line: Line) -> None:
    headers = CIMultiDict({"authorization": "Bearer sk-1", "x-mine": "a, b", "x-empty": ""})
    headers.add("x-twice", "1")
    headers.add("x-twice", "2")
    seen = await line.send(chat(), headers)
    assert seen.header("authorization") == ["Bearer sk-1"]
    assert seen.header("x-mine") == ["a, b"]
    assert seen.header("x-empty") == [""]
    assert seen.header("x-twice") in (["1", "2"], ["1,2"], ["1, 2"])


async def test_body_above_the_limit_is_refused(line: Line) -> None:
    body = chat(33 * MIB)
    if line.mode is BodyModes.HEADERS_ONLY:  # nobody holds the body, so nobody counts it
        assert len((await line.send(body)).body) == len(body)
        return
    async with line.session.post(f"{line.gateway.url}/v1/chat/completions", data=io.BytesIO(body)) as answer:
        assert answer.status == 413
        said = await answer.read()
    assert not any(engine.seen and engine.seen[-1].body == body for engine in line.engines)
    if line.mode is not BodyModes.FULL_DUPLEX:  # then it is Envoy that holds it, and refuses
        return
    error = json.loads(said)["error"]
    assert error["code"] == 413
    assert error["type"] == "invalid_request_error"
    assert str(32 * MIB) in error["message"]
    message: ChatCompletionUserMessageParam = {"role": "user", "content": "x" * (33 * MIB)}
    async with openai_client(line.gateway.url) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.chat.completions.create(model="m", messages=[message])
    assert (caught.value.status_code, caught.value.type) == (413, error["type"])
