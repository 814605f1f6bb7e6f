"""Cases of whole calls of vLLM's gRPC API, from the proxy's messages to the picker's replies.

`docs/compatibility.md` names each of them.
"""

from typing import Any

import pytest

from epp import names
from epp.http2.codes import Status
from epp.wire import vllm_engine_pb2 as pb
from tests.data.compat import line

P, Line = line.P, line.Line
SERVICE = "/vllm.grpc.engine.VllmEngine"
GRPC = "application/grpc"
SCORERS = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer", "lora-affinity-scorer")
OBJECTIVES = [{"name": "inference-objective-with-priority-4", "priority": 4}]
THREE = (P(3, 0.2), P(0, 0.1), P(10, 0.2))


def framed(message: Any) -> bytes:
    body = message.SerializeToString()
    return b"\x00" + len(body).to_bytes(4) + body


def generate(text: str = "test1", *, stream: bool = False) -> bytes:
    return framed(pb.GenerateRequest(text=text.encode(), stream=stream))


EMBED = framed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[b"\x01\x02\x03"])))


def picker(*pods: Any) -> Any:
    plugins = [{"type": each} for each in (*SCORERS, "vllmgrpc-parser")]
    sections = {"requestHandler": {"parsers": [{"pluginRef": "vllmgrpc-parser"}]}, "objectives": OBJECTIVES}
    return Line(*pods, config=line.config(*plugins, uses=SCORERS, **sections))


def call(pool: Any, *body: bytes, method: str = "Generate", **request: Any) -> Any:
    headers = {"content-type": GRPC, "te": "trailers", **request.pop("headers", {})}
    return pool.ask(*body, path=f"{SERVICE}/{method}", headers=headers, **request)


@pytest.mark.parametrize(
    ("method", "body"), [("Generate", generate()), ("Generate", generate(stream=True)), ("Embed", EMBED)]
)
def test_a_call_goes_by_load_and_its_body_is_unchanged(method: str, body: bytes) -> None:
    pool = picker(*THREE)
    headers = {names.OBJECTIVE[0]: OBJECTIVES[0]["name"], "x-request-id": "given", "hi": "mom"}
    asked = call(pool, body, method=method, headers=headers)
    assert asked.destination == "192.168.1.2:8000"
    assert asked.body("request") == body
    assert asked.head["set"] == {}
    assert pool.sample("request_total", **line.model_labels("", "", priority=4)) == 1


def test_nothing_is_shed_by_default() -> None:
    pods = (P(6, 0.2, adapters="ab"), P(0, 0.85, adapters="a"), P(10, 0.9, adapters="a"))
    pool = picker(*pods)
    assert call(pool, generate()).pod == 0
    assert pool.sample("request_total", **line.model_labels("", "")) == 1


@pytest.mark.parametrize("cut", [1, 5, len(generate()) // 2])
def test_a_frame_in_two_messages_is_one(cut: int) -> None:
    body = generate()
    asked = call(picker(P(4, 0.2, adapters="ab"), P(4, 0.85, adapters="a")), body[:cut], body[cut:])
    assert asked.pod == 0
    assert asked.body("request") == body


@pytest.mark.parametrize(
    ("subset", "pod"),
    [(["192.168.1.1:8000", "192.168.1.2:8000", "192.168.1.3:8000"], 1), (["192.168.1.3:8000"], 2)],
)
def test_the_subset_hint_restricts_the_pick(subset: list[str], pod: int) -> None:
    pods = (P(0, 0.2, adapters="a"), P(0, 0.1, adapters=("a", "x")), P(10, 0.2, adapters="a"))
    assert call(picker(*pods), generate(), subset=subset).pod == pod


def test_a_subset_nobody_matches_is_unavailable() -> None:
    asked = call(picker(*THREE), generate(), subset=["192.168.1.99:8000"])
    status, message, headers = asked.refusal
    assert (status, asked.replies[0]["grpc"]) == (503, Status.UNAVAILABLE)
    assert message == "failed to find endpoint candidates for serving the request"
    assert headers[names.DROPPED_REASON] == "rejected-no-endpoints"


def test_other_methods_pass_unread() -> None:
    body = framed(pb.GenerateComplete(prompt_tokens=1))
    asked = call(picker(*THREE), body, method="GetModelInfo")
    assert asked.pod == 1
    assert asked.body("request") == body


def test_what_is_no_message_is_refused_as_a_status() -> None:
    asked = call(picker(*THREE), b"no healthy upstream")
    status, message, _ = asked.refusal
    assert (status, asked.replies[0]["grpc"]) == (400, Status.INVALID_ARGUMENT)
    assert message.startswith("invalid Generate request")


# -- answers ------------------------------------------------------------------------------------------

CHUNK = framed(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1, 2, 3, 4, 5, 6, 7])))
COMPLETE = framed(pb.GenerateResponse(complete=pb.GenerateComplete(prompt_tokens=7, completion_tokens=10)))
ANSWERS = {
    "in two pieces": ((CHUNK[:6], CHUNK[6:]), False, None),
    "garbage": ((b"no healthy upstream",), False, None),
    "with its counts": ((COMPLETE[:4], COMPLETE[4:]), False, 7),
    "a stream": ((CHUNK, COMPLETE), True, 7),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_passes_as_it_comes_and_ends_with_its_trailers(name: str) -> None:
    pieces, stream, prompt_tokens = ANSWERS[name]
    pool = picker(P(4, 0.2))
    asked = call(pool, generate(stream=stream))
    asked.answer(*pieces, content_type=GRPC, trailers=True)
    assert asked.answer_head["set"] == {"x-went-into-resp-headers": "true"}
    assert asked.pieces("response") == [(piece, False) for piece in pieces]
    assert asked.replies[-1] == {"trailers": "response"}
    labels = line.model_labels("", "")
    counted = [pool.sample(f"request_input_tokens_{what}", **labels) for what in ("sum", "count")]
    assert counted == ([prompt_tokens, 1] if prompt_tokens else [0, 0])
    ttft = pool.sample("request_ttft_seconds_count", **labels, streaming=str(stream).lower())
    assert ttft == 1
    assert asked.finished
    assert pool.idle
