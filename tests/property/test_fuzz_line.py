"""A whole picker fed with broken requests, answers and messages, from a fixed seed.

Nothing escapes but the end of one stream, and whatever came, everything that was charged is given back.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ProtocolError
from epp.extproc.records import (
    BodyMode,
    Event,
    Modes,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
)
from tests.data.compat import line

P, Line = line.P, line.Line

RECORDED = Path(__file__).parents[1] / "data" / "payload"
EXCHANGES = [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))]
MODES = [mode for mode in BodyMode if mode is not BodyMode.GRPC]
HEADERS = [
    *(
        (name, b"x")
        for name in ("x-llm-d-model-name-rewrite", "x-gateway-inference-fairness-id", "x-request-id")
    ),
    *(("content-encoding", value) for value in (b"gzip", b"br", b"\xff")),
    *((("content-length"), value) for value in (b"1", b"-1", b"many")),
    *((":status", value) for value in (b"200", b"503", b"0", b"abc", b"\xff")),
    *(("content-type", value) for value in (b"text/event-stream", b"\xff;", b"application/json; a=b")),
    *((name, b"/v1/\xc3\x28") for name in (":path", "x-original-path")),
]
SUBSETS = [None, (), ("192.168.1.1:8000",), ("192.168.1.2:8000", "nowhere"), ("[::1", ":", "1:2:3")]


def cut(data: bytes, draw: random.Random) -> list[bytes]:
    bounds = sorted(draw.randint(0, len(data)) for _ in range(draw.randint(0, 4)))
    return [data[start:end] for start, end in zip([0, *bounds], [*bounds, len(data)], strict=True)]


def spoiled(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randint(0, len(data))
        data = (
            data[:at]
            + draw.choice((b"", b"\xff", b'"', b"{", b"\n\n", b"9" * 50))
            + data[at + draw.randint(0, 9) :]
        )
    return data


def fields(draw: random.Random, *usual: tuple[str, bytes]) -> tuple[tuple[str, bytes], ...]:
    return (*usual, *draw.sample(HEADERS, draw.choice((0, 0, 1, 3))))


def conversation(draw: random.Random) -> list[Event]:
    """A request and its answer as a proxy would send them, more or less."""
    recorded = draw.choice(EXCHANGES)
    modes = draw.choice((None, line.FULL_DUPLEX, Modes(draw.choice(MODES), draw.choice(MODES))))
    head = fields(draw, (":method", b"POST"), (":path", recorded["request"]["path"].encode()))
    body = cut(spoiled((recorded["request"]["body"] or "").encode(), draw), draw)
    answer = recorded["response"]
    kind = b"text/event-stream" if "chunks" in answer else b"application/json"
    answer_head = fields(draw, (":status", b"200"), ("content-type", kind))
    chunks = cut(spoiled((answer["body"] or "").encode(), draw), draw)
    trailers = draw.random() < 0.3
    ends = draw.random() < 0.9 and not trailers
    served = draw.choice((None, "192.168.1.2:8000", "10.6.6.6:1", ""))
    events: list[Event] = [RequestHeaders(0.0, head, draw.random() < 0.1, draw.choice(SUBSETS), modes)]
    events += [
        RequestChunk(0.0, piece, ends and n == len(body), draw.choice(SUBSETS))
        for n, piece in enumerate(body, 1)
    ]
    events += [RequestTrailers(0.0)] if trailers else []
    events.append(ResponseHeaders(0.0, answer_head, draw.random() < 0.1, served))
    events += [ResponseChunk(0.0, piece, ends and n == len(chunks)) for n, piece in enumerate(chunks, 1)]
    events += [ResponseTrailers(0.0)] if trailers else []
    if draw.random() < 0.2:
        draw.shuffle(events)
    return events[: draw.choice((len(events), draw.randint(1, len(events))))]


def play(stream: Any, messages: list[bytes], draw: random.Random) -> bool:
    """Whether every message was legal. The stream is closed in any case."""
    legal = True
    for message in messages:
        stream.line.now += draw.choice((0.0, 0.01, 2.0))
        try:
            stream.say_bytes(message)
        except ProtocolError:
            legal = False
            break
    stream.close(error=not legal)
    return legal


@pytest.mark.parametrize("seed", range(3))
def test_broken_conversations(seed: int) -> None:
    draw = random.Random(seed)
    pool = Line(P(3, 0.2), P(0, 0.1), P(10, 0.9))
    legal = picked = refused = 0
    for _ in range(300):
        stream = pool.stream()
        legal += play(stream, [line.script.to_wire(event) for event in conversation(draw)], draw)
        assert stream.finished
        assert pool.idle
        picked += stream.destination is not None
        refused += any("immediate" in reply for reply in stream.replies)
    assert legal > 100
    assert picked > 50
    assert refused > 50


@pytest.mark.parametrize("seed", range(3))
def test_broken_bytes(seed: int) -> None:
    draw = random.Random(seed)
    pool = Line(P(3, 0.2), P(0, 0.1), P(10, 0.9))
    legal = 0
    for _ in range(300):
        messages = [line.script.to_wire(event) for event in conversation(draw)]
        at = draw.randrange(len(messages))
        message = bytearray(messages[at])
        for _ in range(draw.randint(1, 3)):
            if message:
                message[draw.randrange(len(message))] = draw.randrange(256)
        messages[at] = bytes(message)
        stream = pool.stream()
        legal += play(stream, messages, draw)
        assert stream.finished
        assert pool.idle
    assert 50 < legal < 290
