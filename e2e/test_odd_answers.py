"""Engines that answer early, late, oddly or not to the end."""

import asyncio
import gzip
import io
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from e2e.backends import bare_backend
from e2e.configured import UNHURRIED
from e2e.pages import FLAGS, complaints, figures, settled, until
from e2e.questions import openai_client
from epp import names
from epp.lab.stack import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
BEHAVES = "x-behaves"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@dataclass(frozen=True, slots=True)
class Connection:
    """An engine's end of one connection, the head of a request read."""

    head: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_body(self) -> None:
        """All of it, by its length or by its chunks."""
        fields = self.head.lower().split(b"\r\n")
        length = [int(line.partition(b":")[2]) for line in fields if line.startswith(b"content-length:")]
        if length:
            await self.reader.readexactly(length[0])
        elif b"transfer-encoding: chunked" in fields:
            while size := int(await self.reader.readline(), 16):
                await self.reader.readexactly(size + 2)
            await self.reader.readline()

    async def send(self, *pieces: bytes) -> None:
        """Each piece by itself, as far as TCP lets us."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.002 if len(pieces) < 50 else 0)


def head(status: str = "200 OK", **headers: str) -> bytes:
    fields = {"connection": "close"} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    return (
        head(status, **({"content_type": "application/json"} | headers), content_length=str(len(body))) + body
    )


def event(index: int, model: str = "m", **more: object) -> bytes:
    delta = {"content": f"w{index} "}
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return b"data: %b\n\n" % json.dumps({"id": "c", "model": model, "choices": [choice], **more}).encode()


EVENTS = head(content_type="text/event-stream", transfer_encoding="chunked")
DONE = b"data: [DONE]\n\n"
ERROR = b'{"error": {"message": "no", "type": "t", "param": null, "code": 413}}'
LARGE = random.Random(8).randbytes(8 << 20)
GZIPPED = gzip.compress(json.dumps({"model": "m", "usage": USAGE, "text": "word " * 5000}).encode())
THOUSAND = [event(index) for index in range(999)] + [event(999, usage=USAGE), DONE]
SPLIT = (
    event(0, "engine-name")
    + event(1, "engine-name", said="engine-name")
    + event(2, "engine-name", usage=USAGE)
)


async def early(connection: Connection) -> None:
    """Answers at the head of the request, reads nothing of its body, and stays until the client has heard."""
    await connection.send(whole(ERROR, "413 Payload Too Large"))
    await HEARD.wait()


HEARD = asyncio.Event()


async def early_and_gone(connection: Connection) -> None:
    await connection.send(whole(ERROR, "401 Unauthorized"))


async def early_and_reading(connection: Connection) -> None:
    await connection.send(whole(ERROR, "401 Unauthorized"))
    await connection.read_body()


async def early_stream(connection: Connection) -> None:
    """Streams before it has the whole request, and ends after it."""
    await connection.send(EVENTS, chunked(event(0)))
    await connection.read_body()
    await connection.send(chunked(event(1)), chunked(DONE), b"0\r\n\r\n")


async def cut_stream(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(EVENTS, *[chunked(event(index)) for index in range(3)])
    await asyncio.sleep(0.05)
    connection.writer.transport.abort()


async def ended_stream(connection: Connection) -> None:
    """Closes in good order, but before the last chunk."""
    await connection.read_body()
    await connection.send(EVENTS, *[chunked(event(index)) for index in range(3)])


async def cut_whole(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(whole(b"{" + b" " * 1000 + b"}")[:-500])


async def silent(connection: Connection) -> None:
    await connection.read_body()


async def garbage(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(b"\x16\x03\x01 this is not HTTP\r\n\r\n")


async def thousand(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(EVENTS, *map(chunked, THOUSAND), b"0\r\n\r\n")


async def one_byte_chunks(connection: Connection) -> None:
    await connection.read_body()
    body = b"".join(THOUSAND[:5]) + DONE
    await connection.send(EVENTS, *[chunked(bytes([byte])) for byte in body], b"0\r\n\r\n")


async def with_trailers(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(
        head(content_type="text/event-stream", transfer_encoding="chunked", trailer="x-took"),
        chunked(event(0, usage=USAGE) + DONE),
        b"0\r\nx-took: 5\r\n\r\n",
    )


async def compressed(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(whole(GZIPPED, content_encoding="gzip"))


async def large(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(whole(LARGE, content_type="application/octet-stream"))


async def until_close(connection: Connection) -> None:
    """Neither length nor chunks: the end of the connection is the end of the answer."""
    await connection.read_body()
    await connection.send(head(content_type="application/json"), b'{"a":', b" 1}")


async def no_content(connection: Connection) -> None:
    await connection.read_body()
    await connection.send(head("204 No Content"))


async def interim(connection: Connection) -> None:
    await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
    await connection.read_body()
    await connection.send(whole(b'{"a": 1}'))


async def split(connection: Connection) -> None:
    """Pieces that end anywhere, in the middle of the model's name too."""
    await connection.read_body()
    body = SPLIT + DONE
    draw = random.Random(len(connection.head))
    cuts = sorted({0, len(body), *(draw.randrange(len(body)) for _ in range(40))})
    pieces = [chunked(body[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
    await connection.send(EVENTS, *pieces, b"0\r\n\r\n")


async def split_whole(connection: Connection) -> None:
    await connection.read_body()
    body = json.dumps({"id": "engine-name", "model": "engine-name", "usage": USAGE}).encode()
    await connection.send(*[whole(body)[start : start + 11] for start in range(0, len(whole(body)), 11)])


async def stays_connected(connection: Connection) -> None:
    """Waits for Envoy to close the connection."""
    await connection.read_body()
    await connection.send(whole(b'{"a": 1}', connection="keep-alive"))
    CLOSED.append(await connection.reader.read())


CLOSED: list[bytes] = []


BEHAVIOURS: dict[str, Callable[[Connection], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        *(early, early_and_gone, early_and_reading, early_stream),
        *(cut_stream, ended_stream, cut_whole, silent, garbage),
        *(thousand, one_byte_chunks, with_trailers, compressed, large, until_close, no_content, interim),
        *(split, split_whole, stays_connected),
    )
}


async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read: bytes) -> None:
    wanted = next(line for line in read.split(b"\r\n") if line.lower().startswith(BEHAVES.encode()))
    await BEHAVIOURS[wanted.partition(b": ")[2].decode()](Connection(read, reader, writer))


@asynccontextmanager
async def gateway(envoy: Path, folder: Path, edits: Mapping[str, str]) -> AsyncIterator[Gateway]:
    async with (
        bare_backend(behave) as address,
        Gateway([address], folder, envoy, fail_open=False, picker_flags=FLAGS, edits=edits) as made,
    ):
        yield made
        await settled(made.pickers[0])
        assert complaints(made.pickers[0]) == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def line(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with gateway(envoy, tmp_path_factory.mktemp("odd"), {}) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def unhurried(envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """For answers that come early. It would be long in telling clients of one that breaks off."""
    async with gateway(envoy, tmp_path_factory.mktemp("unhurried"), UNHURRIED) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Got:
    status: int
    headers: dict[str, str]
    body: bytes


async def send(
    line: Gateway,
    behaviour: Callable[[Connection], Awaitable[None]],
    size: int = 100,
    **headers: str,
) -> Got:
    """Ask with a body of `size`. Raises aiohttp's error where the answer breaks off."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}]}).encode()
    sent = {"content-type": "application/json", BEHAVES: behaviour.__name__}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    timeout = aiohttp.ClientTimeout(total=60.0)
    async with (
        aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as session,
        session.post(line.url + CHAT, data=io.BytesIO(body), headers=sent) as answer,
    ):
        said = await answer.read()
        return Got(answer.status, {name.lower(): value for name, value in answer.headers.items()}, said)


# -- early ------------------------------------------------------------------------------------------

# Within one chunk, several of them, what Envoy buffers, and what the picker's decoding process reads.
SIZES = (100, 400_000, 1_900_000, 3_000_000, 20_000_000)


@pytest.mark.parametrize("size", SIZES)
async def test_answer_before_the_upload_ended(unhurried: Gateway, size: int) -> None:
    HEARD.clear()
    try:
        got = await send(unhurried, early, size)
    finally:
        HEARD.set()
    assert (got.status, got.body) == (413, ERROR)
    got = await send(unhurried, early_and_reading, size)
    assert (got.status, got.body) == (401, ERROR)
    # Who closes with bytes unread resets the connection, and its answer may be lost with it.
    got = await send(unhurried, early_and_gone, size)
    assert (got.status, got.body) == (401, ERROR) or got.status == 503
    await settled(unhurried.pickers[0])


@pytest.mark.parametrize("size", SIZES)
async def test_stream_that_begins_before_the_upload_ended(unhurried: Gateway, size: int) -> None:
    got = await send(unhurried, early_stream, size)
    assert (got.status, got.body) == (200, event(0) + event(1) + DONE)
    await settled(unhurried.pickers[0])


# -- broken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", [cut_stream, ended_stream, cut_whole])
async def test_answer_that_breaks_off_is_no_answer(
    line: Gateway, behaviour: Callable[[Connection], Awaitable[None]]
) -> None:
    """What came is not passed off as all there is."""
    with suppress(aiohttp.ClientError):
        got = await send(line, behaviour)
        # The proxy heard of the end before it had passed anything on.
        assert got.status in (502, 503), got
    async with openai_client(line.url, default_headers={BEHAVES: behaviour.__name__}) as client:
        texts: list[str | None] = []
        with pytest.raises((openai.APIError, httpx2.HTTPError)):
            await read_stream(client, texts)
    assert texts == ["w0 ", "w1 ", "w2 "][: len(texts)]
    await settled(line.pickers[0])


async def read_stream(client: AsyncOpenAI, texts: list[str | None]) -> None:
    asked: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "x"}]
    async with await client.chat.completions.create(model="m", messages=asked, stream=True) as events:
        async for each in events:
            texts += [each.choices[0].delta.content]


@pytest.mark.parametrize("behaviour", [silent, garbage])
async def test_engine_that_does_not_answer(
    line: Gateway, behaviour: Callable[[Connection], Awaitable[None]]
) -> None:
    got = await send(line, behaviour)
    assert got.status in (502, 503)
    await settled(line.pickers[0])


# -- odd --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "body"),
    [
        (thousand, b"".join(THOUSAND)),
        (one_byte_chunks, b"".join(THOUSAND[:5]) + DONE),
        (with_trailers, event(0, usage=USAGE) + DONE),
        (compressed, GZIPPED),
        (large, LARGE),
        (until_close, b'{"a": 1}'),
        (interim, b'{"a": 1}'),
        (split, SPLIT + DONE),
    ],
)
async def test_every_byte_of_an_answer_arrives(
    line: Gateway, behaviour: Callable[[Connection], Awaitable[None]], body: bytes
) -> None:
    got = await send(line, behaviour)
    assert (got.status, got.body) == (200, body)
    length = got.headers.get("content-length")
    assert length is None or int(length) == len(body)
    assert got.headers.get("content-encoding") == ("gzip" if behaviour is compressed else None)
    assert names.CONTROL_HEADERS.isdisjoint(got.headers)


async def test_idle_connections_are_closed_before_an_engine_does(line: Gateway) -> None:
    """vLLM closes them after five seconds: a request that comes in that moment would be lost."""
    CLOSED.clear()
    got = await send(line, stays_connected)
    assert got.body == b'{"a": 1}'
    await until(lambda: CLOSED == [b""], "Envoy has closed its idle connection")


async def test_answer_without_a_body(line: Gateway) -> None:
    got = await send(line, no_content)
    assert (got.status, got.body) == (204, b"")


@pytest.mark.parametrize("behaviour", [split, split_whole])
async def test_model_name_split_over_chunks(
    line: Gateway, behaviour: Callable[[Connection], Awaitable[None]]
) -> None:
    """Where the target's name is the model's it becomes the client's, anywhere else it stays."""
    for padding in range(12):  # the pieces depend on the length of the request's head
        rewrite = {names.MODEL_NAME_REWRITE[0]: "engine-name", "x-padding": "p" * padding}
        got = await send(line, behaviour, **rewrite)
        assert got.status == 200
        assert got.body.count(b'"model": "m"') == (3 if behaviour is split else 1)
        assert got.body.replace(b'"model": "m"', b'"model": "engine-name"') == (
            SPLIT + DONE
            if behaviour is split
            else json.dumps({"id": "engine-name", "model": "engine-name", "usage": USAGE}).encode()
        )


async def test_usage_is_read_however_it_comes(line: Gateway) -> None:
    async def tokens() -> tuple[float, float]:
        seen = await figures(line.pickers[0])
        return sum(seen["request_input_tokens_sum"]), sum(seen["request_output_tokens_sum"])

    await send(line, thousand)  # the series are there
    await settled(line.pickers[0])
    for behaviour in (thousand, with_trailers, split, split_whole):
        before = await tokens()
        await send(line, behaviour)
        await settled(line.pickers[0])
        after = await tokens()
        assert (after[0] - before[0], after[1] - before[1]) == (7, 3), behaviour
