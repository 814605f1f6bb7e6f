"""An engine of vLLM's gRPC API that answers as a test wants."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from epp.lab.stack import HOST
from epp.wire import vllm_engine_pb2 as pb

SERVICE = "vllm.grpc.engine.VllmEngine"


@dataclass(slots=True)
class Engine:
    """Answers in bytes; `fails`: with this status instead."""

    fails: grpc.StatusCode | None = None
    seen: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    port: int = 0

    async def generate(self, asked: bytes, context: Any) -> AsyncIterator[bytes]:
        self._note(asked, context)
        if self.fails is not None:
            await context.abort(self.fails, "the engine is full")
        request = pb.GenerateRequest.FromString(asked)
        if not request.stream:
            complete = pb.GenerateComplete(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
            yield pb.GenerateResponse(complete=complete).SerializeToString()
            return
        for number in range(1, 4):
            chunk = pb.GenerateStreamChunk(token_ids=[number], prompt_tokens=7, completion_tokens=number)
            yield pb.GenerateResponse(chunk=chunk).SerializeToString()
            await asyncio.sleep(0.01)

    async def embed(self, asked: bytes, context: Any) -> bytes:
        self._note(asked, context)
        return pb.EmbedResponse(prompt_tokens=5).SerializeToString()

    async def other(self, asked: bytes, context: Any) -> bytes:
        self._note(asked, context)
        return asked * 2

    def _note(self, asked: bytes, context: Any) -> None:
        self.seen.append((asked, dict(context.invocation_metadata())))


@asynccontextmanager
async def serving(methods: Mapping[str, Any], *services: str) -> AsyncIterator[int]:
    """The methods' handlers under each of the services, in plain text; the port."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, methods) for service in services]
    )
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(made.generate),
        "Embed": grpc.unary_unary_rpc_method_handler(made.embed),
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(made.other),
    }
    async with serving(methods, SERVICE) as made.port:
        yield made
