"""Large bodies: which ones, what travels to the child and back, and a child that dies."""

import asyncio
import gzip
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp import errors
from epp.errors import BadRequest, InternalError, NeedFailed, PayloadTooLarge, RequestError
from epp.payload.apis import DEFAULT_PARSERS, ParserSet
from epp.payload.estimate import Estimate, ImageEstimate, StaticImage
from epp.payload.records import Api, RawRequest
from epp.payload.render import with_tokens
from epp.payload.request import parse_request
from epp.runtime import decoder as decoder_module
from epp.runtime.decoder import CHILD_BODY_BYTES, Decoder, is_laborious, is_large

LIMIT = 8 << 20
PATH = "/v1/chat/completions"


def raw(body: bytes, path: str = PATH, **headers: str) -> RawRequest:
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return RawRequest("id", "POST", path, named, body)


def chat(size: int) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}]}).encode()


@pytest.mark.parametrize(
    ("size", "path", "encoding", "expected"),
    [
        (CHILD_BODY_BYTES, PATH, "", False),
        (CHILD_BODY_BYTES + 1, PATH, "", True),
        (CHILD_BODY_BYTES + 1, "/v1/completions?x=1", "", True),
        (CHILD_BODY_BYTES + 1, "/upload", "", False),
        (1, PATH, "gzip", True),
        (1, "/upload", "gzip", False),
        (0, PATH, "gzip", False),
        (CHILD_BODY_BYTES + 1, "/v1/responses", "", True),
        (CHILD_BODY_BYTES + 1, "/inference/v1/generate", "", True),
    ],
)
def test_which_bodies_are_large(size: int, path: str, encoding: str, expected: bool) -> None:
    headers = {"content_encoding": encoding} if encoding else {}
    assert is_large(raw(b"x" * size, path, **headers)) is expected


def body_of(size: int, before: bytes, item: bytes, after: bytes) -> bytes:
    """About so many bytes of items."""
    return before + b",".join([item] * (size // (len(item) + 1))) + after


def messages(size: int, content: str) -> bytes:
    item = json.dumps({"role": "user", "content": content}).encode()
    return body_of(size, b'{"model":"m","messages":[', item, b"]}")


def prompts(size: int, item: bytes) -> bytes:
    return body_of(size, b'{"model":"m","prompt":[', item, b"]}")


PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. "
CODE = Path(decoder_module.__file__).read_text()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat(CHILD_BODY_BYTES - 100), False),
        (messages(1_500_000, PROSE * 400), False),
        (messages(300_000, CODE * 4), False),
        (prompts(300_000, b"12345"), False),
        (messages(30_000, ""), False),
        (messages(500_000, "hi"), True),
        (chat(300_000).replace(b"xxxxxx", b"\\u0436"), False),
        (chat(2_000_000).replace(b"xxxxxx", b"\\u0436"), True),
        (prompts(1_500_000, b"1"), True),
        (prompts(300_000, b'"a"'), True),
        (prompts(300_000, b"[1]"), True),
        (body_of(300_000, b'{"model":"m","messages":[', b"{}", b"]}"), True),
    ],
    ids=[
        "one-text",
        "prose",
        "code",
        "token-ids",
        "small",
        "short-messages",
        "escapes",
        "many-escapes",
        "many-token-ids",
        "texts",
        "token-lists",
        "empty",
    ],
)
def test_bodies_of_many_small_values_are_large_before_their_size_is(body: bytes, expected: bool) -> None:
    assert len(body) <= CHILD_BODY_BYTES
    assert is_large(raw(body)) is expected


@pytest.fixture
async def decoder() -> AsyncIterator[Decoder]:
    made = Decoder(LIMIT)
    yield made
    made.close()


async def test_the_child_reads_as_the_parent_would(decoder: Decoder) -> None:
    plain = raw(chat(100_000))
    zipped = raw(gzip.compress(chat(100_000)), content_encoding="gzip")
    for request in (plain, zipped):
        parsed = await decoder.parse(request)
        assert parsed == parse_request(request, max_bytes=LIMIT)
        assert parsed.body is request.body
    assert (await decoder.parse(plain)).plain is plain.body


async def test_a_plain_body_does_not_travel_back() -> None:
    request = raw(chat(100_000))
    sent_back = decoder_module._parse(request, LIMIT, DEFAULT_PARSERS)
    assert (sent_back.body, sent_back.plain) == (b"", b"")


async def test_the_child_knows_parsers_and_estimate() -> None:
    estimate = Estimate(image=ImageEstimate(mode="static", static=StaticImage(7)))
    parsers = ParserSet(("anthropic-parser",), estimate)
    image = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()
    made = Decoder(LIMIT, parsers)
    try:
        parsed = await made.parse(raw(body, "/v1/messages"))
        assert (parsed.request.api, [medium.tokens for medium in parsed.request.media]) == (Api.MESSAGES, [7])
        with pytest.raises(BadRequest, match="no parser registered"):
            await made.parse(raw(body, PATH))
    finally:
        made.close()


def test_a_body_that_no_parser_takes_is_not_large() -> None:
    large = raw(b"x" * (CHILD_BODY_BYTES + 1), "/v1/messages")
    assert is_large(large)
    assert not is_large(large, ParserSet(("openai-parser",)))


@pytest.mark.parametrize(("size", "expected"), [(128 << 10, False), ((128 << 10) + 1, True)])
def test_binary_bodies_are_large_by_their_size(size: int, expected: bool) -> None:
    """What stands in a protobuf message is not seen from outside; its smallest values cost 5 ms here."""
    path = "/vllm.grpc.engine.VllmEngine/Generate"
    assert is_large(raw(bytes(size), path), ParserSet(("vllmgrpc-parser",))) is expected


async def test_errors_travel_back_whole(decoder: Decoder) -> None:
    with pytest.raises(BadRequest) as caught:
        await decoder.parse(raw(b'{"model":"m","messages":[]}'))
    assert caught.value.param == "messages"
    assert "messages" in caught.value.message
    with pytest.raises(PayloadTooLarge, match=str(LIMIT)):
        await decoder.parse(raw(b"x" * (LIMIT + 1)))


HASTY = "from epp.runtime import decoder\ndecoder.CHILD_CPU_S = 0.05\n"
BEGIN = "decoder._begin()\n"


@asynccontextmanager
async def altered(code: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Decoder]:
    """Its child begins with this."""
    context = multiprocessing.get_context("spawn")
    pools = iter([ProcessPoolExecutor(1, mp_context=context, initializer=exec, initargs=(code,))])
    monkeypatch.setattr(decoder_module, "_start", lambda: next(pools))
    made = Decoder(LIMIT)
    try:
        yield made
    finally:
        made.close()


EMPTY_MESSAGES = body_of(512 << 10, b'{"model":"m","messages":[', b"{}", b"]}")


async def check_the_bound(hasty: Decoder) -> None:
    for _ in range(2):
        with pytest.raises(PayloadTooLarge, match="so many values that they are not read within 0.05 s"):
            await hasty.parse(raw(EMPTY_MESSAGES))
        assert (await hasty.parse(raw(chat(1_000_000)))).request.model == "m"


async def test_a_body_that_takes_too_long_is_refused_and_the_next_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the same child: there is no other."""
    async with altered(HASTY + BEGIN, monkeypatch) as hasty:
        await check_the_bound(hasty)


ENDLESS = "decoder._timed = lambda read: read()\n"
REFUSES_ALL = """
def refuse(read, error=decoder.PayloadTooLarge):
    raise error("so many values that they are not read within 0.05 s")
decoder._timed = refuse
"""


@pytest.mark.parametrize("fault", [ENDLESS, REFUSES_ALL], ids=["endless", "refuses_all"])
async def test_a_child_without_a_bound_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with altered(HASTY + fault + BEGIN, monkeypatch) as hasty:
        with pytest.raises((PayloadTooLarge, pytest.fail.Exception)):
            await check_the_bound(hasty)


TOKENS = list(range(1000, 200_000))


async def test_the_child_reads_a_rendered_prompt_as_the_parent_would(decoder: Decoder) -> None:
    asked = parse_request(raw(chat(1000)), max_bytes=LIMIT).request
    answer = json.dumps({"token_ids": TOKENS}).encode()
    assert is_laborious(answer)
    found = await decoder.with_tokens(asked, answer)
    assert found == with_tokens(asked, answer)
    assert found.prompt_tokens == len(TOKENS)


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"token_ids":["a"]}'])
async def test_a_rendered_prompt_that_is_none(answer: bytes, decoder: Decoder) -> None:
    asked = parse_request(raw(chat(10)), max_bytes=LIMIT).request
    with pytest.raises(NeedFailed) as here:
        with_tokens(asked, answer)
    with pytest.raises(NeedFailed) as there:
        await decoder.with_tokens(asked, answer)
    assert (there.value.reason, str(there.value)) == (here.value.reason, str(here.value))
    assert (await decoder.parse(raw(chat(10)))).request.model == "m", "the child lives"


def test_every_request_error_survives_pickling() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    requests = [kind for kind in kinds if issubclass(kind, RequestError) and kind is not RequestError]
    assert len(requests) >= 5
    for kind in requests:
        error = pickle.loads(pickle.dumps(kind("said", "field")))
        assert (type(error), error.message, error.param, str(error)) == (kind, "said", "field", "said")


def ends(pid: int) -> bool:
    """Whether the process ends before long, whoever collects it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # gone, or gone while it was read
            return True
        if state in {"Z", "X"}:
            return True
        time.sleep(0.02)
    return False


def child_of(decoder: Decoder) -> Any:
    """Its process, whatever children other tests have left."""
    assert decoder._pool is not None
    (child,) = decoder._pool._processes.values()
    return child


def kill_child(decoder: Decoder) -> None:
    child = child_of(decoder)
    child.kill()
    child.join()


async def test_a_child_that_died_is_replaced(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    request = raw(chat(10))
    await decoder.parse(request)
    kill_child(decoder)
    assert (await decoder.parse(request)).request.model == "m"
    assert "died" in caplog.text


async def test_requests_that_share_a_dying_child_all_get_an_answer(decoder: Decoder) -> None:
    """One of them starts the new child; the others must not end it again."""
    await decoder.parse(raw(chat(10)))
    child = child_of(decoder)
    os.kill(child.pid, signal.SIGSTOP)
    asked = [asyncio.create_task(decoder.parse(raw(chat(n)))) for n in range(8)]
    await asyncio.sleep(0.05)
    child.kill()
    more = [asyncio.create_task(decoder.parse(raw(chat(n)))) for n in range(8)]
    async with asyncio.timeout(60):
        found = await asyncio.gather(*asked, *more)
    assert [parsed.request.model for parsed in found] == ["m"] * 16


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (1,)


async def test_a_body_that_kills_the_child_twice_is_refused(decoder: Decoder) -> None:
    with pytest.raises(InternalError, match="could not read this body"):
        await decoder.parse(Deadly())
    assert (await decoder.parse(raw(chat(10)))).request.model == "m"


async def test_closing_gives_up_what_is_being_read() -> None:
    decoder = Decoder(LIMIT)
    await decoder.parse(raw(chat(10)))
    child = child_of(decoder)
    os.kill(child.pid, signal.SIGSTOP)
    asked = asyncio.create_task(decoder.parse(raw(chat(20))))
    waiting = asyncio.create_task(decoder.parse(raw(chat(30))))
    more = asyncio.create_task(decoder.parse(raw(chat(40))))
    await asyncio.sleep(0.05)
    decoder.close()
    decoder.close()
    for task in (asked, waiting, more):
        task.cancel()
    await asyncio.wait([asked, waiting, more])
    os.kill(child.pid, signal.SIGCONT)
    assert ends(child.pid)


PARENT = """
import asyncio, json, multiprocessing, sys, time
from epp.payload.apis import DEFAULT_PARSERS, ParserSet
from epp.payload.estimate import Estimate, ImageEstimate, StaticImage
from epp.payload.records import Api, RawRequest
from epp.runtime.decoder import Decoder

async def main():
    decoder = Decoder(1 << 20)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    await decoder.parse(RawRequest("id", "POST", "/v1/chat/completions", (), body))
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    if sys.argv[1] == "wait":
        time.sleep(60)
    decoder.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_the_child_ends_with_its_parent(end: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    argument = "leave" if end == "leaves" else "wait"
    parent = subprocess.Popen(
        [sys.executable, str(script), argument], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if end == "is killed":
            parent.kill()
        assert parent.wait(60) == (0 if end == "leaves" else -signal.SIGKILL)
    assert ends(pid)


def test_parsed_records_compare_by_value() -> None:
    """What the tests above rest on."""
    request = raw(chat(10))
    parsed = parse_request(request, max_bytes=LIMIT)
    assert parsed != msgspec.structs.replace(parsed, body=b"")
