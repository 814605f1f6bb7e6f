"""Requests and answers as they come: bodies, and the ext-proc messages in which Envoy brings them."""

import json
import random
from collections.abc import Iterator, Sequence

from epp import names
from epp.payload.records import RawRequest
from epp.wire.ext_proc_pb2 import FULL_DUPLEX_STREAMED, HeaderMap, HttpBody, HttpHeaders, ProcessingRequest

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CHUNKS = 100
SYSTEM_PROMPTS = 20
ENVOY_PIECE = 1 << 16
PATH = "/v1/chat/completions"


class Chats:
    """Chat bodies of one size: one of twenty system prompts (three quarters of the text), then new text."""

    def __init__(self, body_bytes: int, seed: int) -> None:
        self._draw = random.Random(seed)
        empty = len(self._body("", ""))
        self._text_bytes = body_bytes - empty
        shared = self._text_bytes * 3 // 4
        self._systems = [words(self._draw, shared) for _ in range(SYSTEM_PROMPTS)]

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        system = self._draw.choice(self._systems)
        return self._body(system, words(self._draw, self._text_bytes - len(system)))

    def _body(self, system: str, user: str) -> bytes:
        body = {
            "model": MODEL,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "max_tokens": CHUNKS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()


def words(draw: random.Random, size: int) -> str:
    """Text of `size` characters."""
    return " ".join([f"w{draw.getrandbits(20):05x}" for _ in range(size // 7 + 1)])[:size]


def raw_request(body: bytes, number: int) -> RawRequest:
    headers = (("content-type", "application/json"), ("content-length", str(len(body))))
    return RawRequest(f"r-{number}", "POST", PATH, headers, body)


def sse_chunks(count: int = CHUNKS) -> list[bytes]:
    """A streamed chat of vLLM's form: role, words, finish reason, usage, end; one event a chunk."""
    head = (
        '{"id":"chatcmpl-8ef2e257a6e3eb2d","object":"chat.completion.chunk","created":1795987091,"model":"'
        + MODEL
        + '"'
    )

    def event(delta: str, finish: str = "null") -> bytes:
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish},"token_ids":null}}'
        return f'data: {head},"choices":[{choice}]}}\n\n'.encode()

    usage = (
        '"usage":{"prompt_tokens":230,"total_tokens":326,"completion_tokens":96,'
        '"prompt_tokens_details":{"cached_tokens":176}}'
    )
    return [
        event('{"role":"assistant","content":""}'),
        *[event(f'{{"content":" word{number}"}}') for number in range(count - 4)],
        event('{"content":""}', '"length"'),
        f'data: {head},"choices":[],{usage}}}\n\n'.encode(),
        b"data: [DONE]\n\n",
    ]


def plain_answer() -> bytes:
    """A chat answer of vLLM's form in one piece, 32 tokens."""
    answer = {
        "id": "chatcmpl-8ef2e257a6e3eb2d",
        "object": "chat.completion",
        "created": 1795987091,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " word" * 32, "refusal": None, "tool_calls": []},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 230,
            "total_tokens": 262,
            "completion_tokens": 32,
            "prompt_tokens_details": {"cached_tokens": 176},
        },
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def request_messages(body: bytes, number: int) -> list[bytes]:
    """Headers, body and end of one request, as Envoy sends them in full-duplex mode."""
    headers = (
        (":authority", "gateway.example.com"),
        (":path", PATH),
        (":method", "POST"),
        (":scheme", "http"),
        ("user-agent", "OpenAI/Python 2.8.0"),
        ("accept", "application/json"),
        ("content-type", "application/json"),
        ("authorization", "Bearer sk-0000000000000000"),
        ("content-length", str(len(body))),
        ("x-forwarded-for", "10.0.0.7"),
        ("x-forwarded-proto", "http"),
        ("x-request-id", f"3f1c0e7c-95f0-4a0b-8e0f-{number:012d}"),
    )
    first = ProcessingRequest(request_headers=HttpHeaders(headers=_header_map(headers)))
    first.protocol_config.request_body_mode = FULL_DUPLEX_STREAMED
    first.protocol_config.response_body_mode = FULL_DUPLEX_STREAMED
    first.metadata_context.SetInParent()
    pieces = [body[at : at + ENVOY_PIECE] for at in range(0, len(body), ENVOY_PIECE)]
    return [
        first.SerializeToString(),
        *[_as_sent(ProcessingRequest(request_body=HttpBody(body=piece))) for piece in pieces],
        _as_sent(ProcessingRequest(request_body=HttpBody(end_of_stream=True))),
    ]


def answer_messages(chunks: Sequence[bytes], served: str, content_type: str) -> list[bytes]:
    """Headers and chunks of one answer from `served` (`address:port`). The last chunk ends the stream."""
    headers = (
        (":status", "200"),
        ("date", "Sun, 29 Nov 2026 21:18:11 GMT"),
        ("server", "uvicorn"),
        ("content-type", content_type),
        ("x-envoy-upstream-service-time", "38"),
    )
    first = ProcessingRequest(response_headers=HttpHeaders(headers=_header_map(headers)))
    reported = first.metadata_context.filter_metadata[names.LB_NAMESPACE]
    reported.fields[names.DESTINATION_ENDPOINT_SERVED].string_value = served
    return [
        first.SerializeToString(),
        *[_as_sent(ProcessingRequest(response_body=HttpBody(body=chunk))) for chunk in chunks],
        _as_sent(ProcessingRequest(response_body=HttpBody(end_of_stream=True))),
    ]


def _as_sent(message: ProcessingRequest) -> bytes:
    """Envoy ends every message with its metadata, which mostly is empty."""
    message.metadata_context.SetInParent()
    return message.SerializeToString()


def _header_map(headers: Sequence[tuple[str, str]]) -> HeaderMap:
    found = HeaderMap()
    for name, value in headers:
        header = found.headers.add()
        header.key = name.encode()
        header.raw_value = value.encode()
    return found
