"""One lab engine behind one port: vLLM's paths, answers and pages over the engine's tokens."""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from time import time
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.web_request import BaseRequest
from xxhash import xxh3_64_intdigest

from epp import names
from epp.errors import ConfigError, Problem
from epp.lab import answers, tokens
from epp.lab.engine import EngineSpec
from epp.lab.metrics_page import CONTENT_TYPE, MetricsPage
from epp.lab.realtime import LagSummary, RealtimeEngine, summarize
from epp.lab.requests import EngineRefusal, Job, read_job
from epp.payload.records import Api

VLLM_VERSION: Final = "0.32.0"

_APIS = {"/v1/chat/completions": Api.CHAT, "/v1/completions": Api.COMPLETIONS}
_PAGES = ("/health", "/metrics", "/v1/models", "/version")
_EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Handler = Callable[[BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Serving:
    """How the engines of a fleet are served.

    Attributes:
        speedup: engine seconds per wall second.
        report_cached_tokens: as vLLM's `--enable-prompt-tokens-details`.
    """

    spec: EngineSpec
    model: str
    speedup: float = 1.0
    host: str = "127.0.0.1"
    report_cached_tokens: bool = True

    def __post_init__(self) -> None:
        if not self.speedup > 0.0:
            raise ConfigError("serving", Problem("speedup", "must be above 0"))


class EngineStats(msgspec.Struct, frozen=True):
    """One engine since it was started or reset."""

    port: int
    up: bool
    requests: int
    finished: int
    running: int
    waiting: int
    query_tokens: int
    hit_tokens: int
    generation_tokens: int
    preemptions: int
    steps: int
    lag: LagSummary


class _Answer:
    """One HTTP answer in the making: collects its choices' tokens, or writes them as they come."""

    def __init__(self, head: answers.Head, job: Job, report_cached: bool) -> None:
        self.head = head
        self.job = job
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cached_tokens = 0
        self.choices: list[_Choice] = []
        self._report_cached = report_cached
        self._open = len(job.prompts)

    def counts(self) -> answers.Counts:
        return answers.Counts(
            prompt_tokens=sum(map(tokens.token_count, self.job.prompts)),
            output_tokens=sum(self.job.max_tokens),
            cached_tokens=self.cached_tokens if self._report_cached else None,
        )

    def body(self) -> bytes:
        texts = [b"".join(choice.words).decode() for choice in self.choices]
        return answers.body(self.head, texts, self.counts())

    def end_choice(self) -> bytes:
        """One choice has its last token. Returns what ends the stream after the last of them."""
        self._open -= 1
        if self._open:
            return b""
        if not self.done.done():
            self.done.set_result(None)
        usage = answers.usage_chunk(self.head, self.counts()) if self.job.include_usage else b""
        return usage + answers.DONE


class _Choice:
    """Sink of one sequence. `transport` is None where the answer is not streamed."""

    __slots__ = ("_answer", "_chunks", "_position", "_transport", "words")

    def __init__(self, answer: _Answer, index: int, transport: asyncio.Transport | None) -> None:
        job = answer.job
        prompt = job.prompts[index]
        self.words = tokens.answer_words(prompt, job.max_tokens[index])
        self._answer = answer
        self._chunks = answers.TokenChunks(
            answer.head, index, tokens.token_count(prompt), job.continuous_usage
        )
        self._position = 0
        self._transport = transport

    def first(self, cached_tokens: int) -> None:
        self._answer.cached_tokens += cached_tokens
        self._write(self._chunks.opening())

    def token(self) -> None:
        self._position = position = self._position + 1
        word = self.words[position - 1]
        if position < len(self.words):
            self._write(self._chunks.token(word, position))
        else:
            last = self._chunks.last(word, position, usage_follows=self._answer.job.include_usage)
            self._write(last + self._answer.end_choice())

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)


class EngineServer:
    """One engine behind one port."""

    def __init__(self, serving: Serving, port: int, control: Handler) -> None:
        self.port = port
        self.up = False
        self._serving = serving
        self._control = control
        self._created = int(time())
        self._answering: set[asyncio.Transport] = set()
        self._install()

    async def start(self) -> None:
        """Opens the port (any free one if it was 0). Raises OSError when it is taken."""
        self._http = web.Server(
            self._handle, request_factory=_request, handler_cancellation=True, access_log=None
        )
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._http, self._serving.host, self.port, backlog=1024)
        self.port = self._listener.sockets[0].getsockname()[1]
        self.up = True

    async def stop(self) -> None:
        """Closes the port, resets its connections; the engine is empty afterwards."""
        if not self.up:
            return
        self.up = False
        self._listener.close()
        _reset(connection.transport for connection in self._http.connections)
        self.driver.stop()
        self._install()
        await self._http.shutdown(timeout=1.0)

    def renew(self) -> None:
        """An engine as new takes the place of the old one; the connections of running answers are reset."""
        _reset(self._answering)
        self.driver.stop()
        self._install()

    def _install(self) -> None:
        self.driver = RealtimeEngine(self._serving.spec, self._serving.speedup)
        self._page = MetricsPage(self.driver, self._serving.model)

    def stats(self) -> EngineStats:
        engine, totals = self.driver.engine, self.driver.engine.totals
        return EngineStats(
            port=self.port,
            up=self.up,
            requests=self.driver.submitted,
            finished=totals.finished,
            running=engine.running,
            waiting=engine.waiting,
            query_tokens=totals.query_tokens,
            hit_tokens=totals.hit_tokens,
            generation_tokens=totals.generation_tokens,
            preemptions=totals.preemptions,
            steps=totals.steps,
            lag=summarize([self.driver.lag]),
        )

    async def _handle(self, request: BaseRequest) -> web.StreamResponse:
        if not self.up:
            # Accepted as the port was closed, after the other connections had been reset.
            _reset([request.transport])
            raise asyncio.CancelledError("the engine is down")
        path = request.path
        api = _APIS.get(path)
        if api is not None:
            return await self._generate(request, api) if request.method == "POST" else not_allowed("POST")
        if path in _PAGES:
            return self._serve_page(path) if request.method in ("GET", "HEAD") else not_allowed("GET")
        return await self._control(request)

    def _serve_page(self, path: str) -> web.Response:
        match path:
            case "/health":
                return web.Response()
            case "/metrics":
                return web.Response(body=self._page.render(), headers={"Content-Type": CONTENT_TYPE})
            case "/v1/models":
                serving = self._serving
                return json_response(answers.models(serving.model, self._created, serving.spec.max_model_len))
            case _:
                return json_response(msgspec.json.encode({"version": VLLM_VERSION}))

    async def _generate(self, request: BaseRequest, api: Api) -> web.StreamResponse:
        serving = self._serving
        try:
            job = read_job(
                api,
                content_type=request.headers.get("Content-Type", ""),
                body=await request.read(),
                model=serving.model,
                max_model_len=serving.spec.max_model_len,
            )
        except EngineRefusal as refusal:
            return json_response(refusal.body, refusal.status)
        prefix = "chatcmpl" if api is Api.CHAT else "cmpl"
        name = request.headers.get(names.REQUEST_ID) or os.urandom(8).hex()
        head = answers.Head(api, f"{prefix}-{name}", int(time()), serving.model)
        answer = _Answer(head, job, serving.report_cached_tokens)
        transport = request.transport
        if transport is None:
            raise asyncio.CancelledError("the client is gone")
        self._answering.add(transport)
        try:
            if job.stream:
                return await self._stream(request, answer, transport)
            await self._run(answer, transport=None)
            return json_response(answer.body())
        finally:
            self._answering.discard(transport)

    async def _stream(
        self, request: BaseRequest, answer: _Answer, transport: asyncio.Transport
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENT_STREAM)
        response.enable_chunked_encoding()
        await response.prepare(request)
        # Chunks go to the transport as they are: they carry their framing, and a coroutine per token
        # would cost more than everything else done for it.
        await self._run(answer, transport)
        await response.write_eof()
        return response

    async def _run(self, answer: _Answer, transport: asyncio.Transport | None) -> None:
        """Has every choice computed. If the client goes away, the engine forgets them."""
        job, driver = answer.job, self.driver
        block_size = self._serving.spec.block_size
        running = []
        for index, (prompt, output_tokens) in enumerate(zip(job.prompts, job.max_tokens, strict=True)):
            choice = _Choice(answer, index, transport)
            answer.choices.append(choice)
            keys = tokens.block_keys(
                prompt + b"".join(choice.words), block_size, parent=xxh3_64_intdigest(job.cache_salt.encode())
            )
            prompt_tokens = tokens.token_count(prompt)
            full = prompt_tokens // block_size
            running.append(driver.submit(keys[:full], prompt_tokens, output_tokens, keys[full:], choice))
        try:
            await answer.done
        finally:
            for request_id in running:
                driver.cancel(request_id)


def json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def not_allowed(allowed: str) -> web.Response:
    response = json_response(b'{"detail":"Method Not Allowed"}', 405)
    response.headers["Allow"] = allowed
    return response


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> BaseRequest:
    """As aiohttp makes it, without its limit of 1 MiB a body."""
    loop = asyncio.get_running_loop()
    return BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=0)


def _reset(transports: Iterable[asyncio.Transport | None]) -> None:
    """Clients see a reset, as when a process is killed."""
    for transport in [*transports]:
        if transport is not None:
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
            )
            transport.abort()
