"""What it costs to read a request of each API."""

import json
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from benchmarks.rows import picker, traffic
from benchmarks.rows.timing import Effort, Result, cpu_us
from epp.payload.apis import PARSERS, ParserSet
from epp.payload.records import RawRequest
from epp.wire.vllm_engine_pb2 import GenerateRequest

BODY_BYTES: Final = 1000
BODIES: Final = 100


def _json(
    head: Mapping[str, Any], fill: Callable[[str], Mapping[str, Any]]
) -> Callable[[random.Random], bytes]:
    """A maker of bodies of 1 kB, filled with text."""
    empty = len(json.dumps({**head, **fill("")}))
    return lambda draw: json.dumps({**head, **fill(traffic.words(draw, BODY_BYTES - empty))}).encode()


def _tokens(head: Mapping[str, Any], key: str) -> Callable[[random.Random], bytes]:
    """The same, filled with token ids of five digits."""
    empty = len(json.dumps({**head, key: []}))
    return lambda draw: json.dumps({**head, key: _ids(draw, (BODY_BYTES - empty) // 7)}).encode()


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10_000, 100_000) for _ in range(count)]


def _frame(draw: random.Random) -> bytes:
    """A gRPC message of 1 kB with token ids as protobuf packs them."""
    message = GenerateRequest(stream=True)
    message.sampling_params.max_tokens = traffic.CHUNKS
    ids = _ids(draw, (BODY_BYTES - 20) // 3)
    message.tokenized.input_ids.append(b"".join(_varint(number) for number in ids))
    plain: bytes = message.SerializeToString()
    return b"\0" + len(plain).to_bytes(4, "big") + plain


def _varint(number: int) -> bytes:
    """Three bytes, which hold up to 21 bits."""
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))


_MODEL: Final = {"model": traffic.MODEL}
_STREAM: Final = {**_MODEL, "stream": True}

APIS: Final[Mapping[str, tuple[str, Callable[[random.Random], bytes]]]] = {
    "chat": (traffic.PATH, _json(_STREAM, lambda text: {"messages": [{"role": "user", "content": text}]})),
    "embeddings": ("/v1/embeddings", _json(_MODEL, lambda text: {"input": text})),
    "responses": (
        "/v1/responses",
        _json(
            _STREAM, lambda text: {"instructions": text[: len(text) // 2], "input": text[len(text) // 2 :]}
        ),
    ),
    "messages": (
        "/v1/messages",
        _json(
            {**_STREAM, "max_tokens": traffic.CHUNKS},
            lambda text: {
                "system": text[: len(text) // 2],
                "messages": [{"role": "user", "content": text[len(text) // 2 :]}],
            },
        ),
    ),
    "generate (vLLM)": (
        "/inference/v1/generate",
        _tokens({**_STREAM, "sampling_params": {"max_tokens": traffic.CHUNKS}}, "token_ids"),
    ),
    "generate (SGLang)": (
        "/generate",
        _tokens({"stream": True, "sampling_params": {"max_new_tokens": traffic.CHUNKS}}, "input_ids"),
    ),
    "Generate (vLLM, gRPC)": ("/vllm.grpc.engine.VllmEngine/Generate", _frame),
}


def preparing(effort: Effort) -> list[Result]:
    """`Director.prepare` of a 1 kB body of each request API, with all parsers in use."""
    director, _, _ = picker.director(1)
    director.plugins = replace(director.plugins, parsers=ParserSet(PARSERS))
    results = []
    for api, (path, make) in APIS.items():
        draw = random.Random(17)
        bodies = [make(draw) for _ in range(min(BODIES, effort.inner))]
        raws = [
            msgspec.structs.replace(traffic.raw_request(body, number), path=path)
            for number, body in enumerate(bodies)
        ]

        def prepare(raws: list[RawRequest] = raws) -> None:
            for raw in raws:
                director.prepare(raw, 0.0)

        samples = cpu_us(prepare, effort, per=len(raws), inner=min(effort.inner, 10))
        detail = {
            "body_bytes": statistics.fmean(len(body) for body in bodies),
            "prompt_tokens": float(director.prepare(raws[0], 0.0).request.prompt_tokens),
        }
        results.append(Result(f"prepare, {api}, 1 kB", "us", None, samples, detail=detail))
    return results
