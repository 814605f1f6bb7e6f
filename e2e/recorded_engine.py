"""An engine that answers as a real vLLM 0.32.0 was recorded to, and APIs of others as they document it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from aiohttp.web_request import BaseRequest

from e2e.backends import Seen

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "payload"
ENGINE_MODEL = "acme/tiny-llama"
ADAPTERS = ("sql-adapter", "chat-adapter")

# Of one connection, or what the server here writes itself.
_NOT_REPLAYED = frozenset({"connection", "content-length", "transfer-encoding", "date"})


def _compact(answer: Mapping[str, Any]) -> bytes:
    """As engines write JSON."""
    return json.dumps(answer, separators=(",", ":")).encode()


def _event(data: Mapping[str, Any]) -> bytes:
    name = b"event: %s\n" % data["type"].encode() if "type" in data else b""
    return b"%sdata: %s\n\n" % (name, _compact(data))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer. `pieces` of the answer's body come one by one; `sent` is the request's."""

    method: str
    path: str
    sent: bytes
    status: int
    headers: Mapping[str, str]
    pieces: tuple[bytes, ...]

    @classmethod
    def recorded(cls, name: str) -> Self:
        """`name`: of a file below RECORDED, without its ending."""
        found = json.loads((RECORDED / f"{name}.json").read_text())
        request, response = found["request"], found["response"]
        pieces = [chunk["data"] for chunk in response.get("chunks", ())] or [response["body"]]
        kept = {name: value for name, value in response["headers"] if name not in _NOT_REPLAYED}
        return cls(
            method=request["method"],
            path=request["path"],
            sent=(request["body"] or "").encode(),
            status=response["status"],
            headers=kept,
            pieces=tuple(piece.encode() for piece in pieces),
        )

    @classmethod
    def made(cls, path: str, sent: Mapping[str, Any], *answers: Mapping[str, Any]) -> Self:
        """A POST that is answered plainly, or by a stream of several events.

        Events with a `type` bear its name, as Anthropic's do; after others comes OpenAI's end of a stream.
        """
        kind, pieces = "application/json", tuple(map(_compact, answers))
        if len(answers) > 1:
            kind, pieces = "text/event-stream", tuple(map(_event, answers))
            pieces += () if "type" in answers[-1] else (b"data: [DONE]\n\n",)
        return cls("POST", path, json.dumps(sent).encode(), 200, {"content-type": kind}, pieces)

    @property
    def answer(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def said(self) -> Any:
        """A plain answer, decoded."""
        return json.loads(self.answer)

    @property
    def events(self) -> list[Any]:
        """The data of a streamed answer's events, decoded."""
        lines = [line for line in self.answer.splitlines() if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    @property
    def streams(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")


_UNKNOWN_PATH = Exchange.recorded("answers/error-unknown-path")


@dataclass(slots=True)
class RecordedEngine:
    """Answers by method, path, whether a stream is asked for, and whether the model is known.

    `answering` is for `e2e.backends.backend`.
    """

    models: frozenset[str] = frozenset((ENGINE_MODEL, *ADAPTERS))
    exchanges: dict[tuple[str, str, bool, bool], Exchange] = field(default_factory=dict)

    def replay(self, *exchanges: Exchange) -> Self:
        """Answer so from now on."""
        for exchange in exchanges:
            self.exchanges[self._key(exchange.method, exchange.path, exchange.sent)] = exchange
        return self

    def _key(self, method: str, path: str, body: bytes) -> tuple[str, str, bool, bool]:
        asked = json.loads(body or b"{}")
        known = asked.get("model", ENGINE_MODEL) in self.models
        return method, path.partition("?")[0], asked.get("stream") is True, known

    async def answering(self, request: BaseRequest, seen: Seen) -> web.StreamResponse:
        found = self.exchanges.get(self._key(seen.method, seen.path, seen.body), _UNKNOWN_PATH)
        if not found.streams:
            return web.Response(status=found.status, headers=found.headers, body=found.answer)
        answer = web.StreamResponse(status=found.status, headers=found.headers)
        await answer.prepare(request)
        for piece in found.pieces:
            await answer.write(piece)
        await answer.write_eof()
        return answer


# -- APIs that vLLM's model of language does not serve ------------------------------------------------

EMBEDDINGS = Exchange.made(
    "/v1/embeddings",
    {"model": ENGINE_MODEL, "input": ["free", "software"], "encoding_format": "float"},
    {
        "id": "embd-95cf11b6442f68e8",
        "object": "list",
        "created": 1795987092,
        "model": ENGINE_MODEL,
        "data": [
            {"index": 0, "object": "embedding", "embedding": [0.25, -0.5, 0.125]},
            {"index": 1, "object": "embedding", "embedding": [0.5, 0.0, -1.0]},
        ],
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 7,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    },
)
IMAGES = Exchange.made(
    "/v1/images/generations",
    {"model": ENGINE_MODEL, "prompt": "a route in the snow", "n": 1, "size": "512x512"},
    {
        "created": 1795987092,
        "data": [{"b64_json": "iVBORw0KGgo=", "url": None, "revised_prompt": None}],
        "usage": {"input_tokens": 9, "output_tokens": 4160, "total_tokens": 4169},
    },
)
CONVERSATIONS = Exchange.made(
    "/v1/conversations",
    {
        "model": ENGINE_MODEL,
        "items": [{"type": "message", "role": "user", "content": "What is free software?"}],
    },
    {"id": "conv_a17b0c20cba11eb2", "object": "conversation", "created_at": 1795987092, "metadata": {}},
)

MESSAGES_CACHED = Exchange.made(
    "/v1/messages",
    {
        "model": ENGINE_MODEL,
        "max_tokens": 6,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
    },
    {
        "type": "message_start",
        "message": {
            "id": "msg_013Zva2CMHLNnXjNJJKqJ2EF",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": ENGINE_MODEL,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 7,
                "cache_creation_input_tokens": 16,
                "cache_read_input_tokens": 2048,
                "output_tokens": 1,
            },
        },
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "warm"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    },
    {"type": "message_stop"},
)
"""As Anthropic tells usage: the prompt in three parts at the start, the output at the end."""


def _output(text: str, ids: list[int], finish: Mapping[str, Any] | None) -> dict[str, Any]:
    meta = {
        "id": "9f2c",
        "finish_reason": finish,
        "prompt_tokens": 5,
        "weight_version": "default",
        "completion_tokens": len(ids),
        "cached_tokens": 3,
    }
    return {"text": text, "output_ids": ids, "meta_info": meta}


_LENGTH = {"type": "length", "length": 2}
_ASKED = {"input_ids": [1, 54, 690, 520, 334], "sampling_params": {"max_new_tokens": 2}}
SGLANG = Exchange.made("/generate", _ASKED, _output(" a free", [75, 2], _LENGTH))
SGLANG_STREAM = Exchange.made(
    "/generate",
    {**_ASKED, "stream": True},
    _output(" a", [75], None),
    _output(" a free", [75, 2], _LENGTH),
)
