"""A picker in this process without its ports: assembled as `serve` does it, with a strict ledger."""

import json
from collections.abc import Callable
from typing import Any

from epp.config.load import default_config, load_config
from epp.pool.metrics_page import EngineSample
from epp.pool.records import Endpoint
from epp.runtime.app import App
from epp.runtime.options import Options
from epp.runtime.transport import StreamCounts
from epp.wire import ext_proc_pb2 as pb

PIECE = 62_000
FULL_DUPLEX = 4
SSE = "text/event-stream"


def endpoint(number: int, uid: str = "") -> Endpoint:
    return Endpoint(uid or f"uid-{number}", f"pod-{number}", "default", f"10.0.0.{number}", 8000)


def picker(endpoints: int = 2, config: str | None = None, **options: Any) -> App:
    loaded = default_config() if config is None else load_config(config, "config.yaml")
    app = App.assemble(Options(**options), loaded)
    app.ledger.strict = True
    app.set_endpoints([endpoint(number) for number in range(1, endpoints + 1)])
    for slot, _ in app.store.roster:
        app.store.sampled(slot, EngineSample(waiting=0, running=0, kv_usage=0.1, block_size=16), 0.0)
    return app


def transport(app: App, counts: StreamCounts) -> Any:
    """What the app's options say, with other counts."""
    made: Any = app.transport(None)
    made.counts = counts
    return made


def left_over(app: App) -> dict[str, int]:
    """What must be zero when all is over."""
    return {
        "requests": app.ledger.total_requests,
        "prefill_tokens": app.ledger.total_prefill_tokens,
        "tickets": app.director.in_flight,
        "held_bytes": app.budget.used,
        "overdrafts": app.ledger.overdrafts,
    }


def nothing_left(app: App) -> Callable[[], bool]:
    return lambda: not any(left_over(app).values())


def sample(app: App, name: str, /, **labels: str) -> float:
    """Sum of a metric's series that have these labels."""
    wanted = f"llm_d_epp_{name}"
    found = [
        series.value
        for family in app.metrics.registry.collect()
        for series in family.samples
        if series.name == wanted and labels.items() <= series.labels.items()
    ]
    return sum(found)


# -- messages ---------------------------------------------------------------------------------------


def chat(text: str = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


def request_headers(path: str = "/v1/chat/completions", *, end: bool = False, **headers: str) -> bytes:
    wire = pb.ProcessingRequest()
    wire.protocol_config.request_body_mode = FULL_DUPLEX
    wire.protocol_config.response_body_mode = FULL_DUPLEX
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in {":method": "GET" if end else "POST", ":path": path, **named}.items():
        wire.request_headers.headers.headers.add(key=name.encode(), raw_value=value.encode())
    wire.request_headers.end_of_stream = end
    return wire.SerializeToString()


def request_body(body: bytes, piece: int = PIECE) -> list[bytes]:
    """Messages of a whole body."""
    messages = []
    for start in range(0, len(body), piece):
        wire = pb.ProcessingRequest()
        wire.request_body.body = body[start : start + piece]
        wire.request_body.end_of_stream = start + piece >= len(body)
        messages.append(wire.SerializeToString())
    return messages


def response_headers(status: int = 200, content_type: str = "application/json", served: str = "") -> bytes:
    wire = pb.ProcessingRequest()
    for name, value in ((":status", str(status)), ("content-type", content_type)):
        wire.response_headers.headers.headers.add(key=name.encode(), raw_value=value.encode())
    if served:
        fields = wire.metadata_context.filter_metadata["envoy.lb"].fields
        fields["x-gateway-destination-endpoint-served"].string_value = served
    return wire.SerializeToString()


def response_body(body: bytes, *, end: bool = True) -> bytes:
    wire = pb.ProcessingRequest()
    wire.response_body.body = body
    wire.response_body.end_of_stream = end
    return wire.SerializeToString()


def kind(message: bytes) -> str:
    return str(pb.ProcessingResponse.FromString(message).WhichOneof("response"))


def piece_of(message: bytes) -> bytes:
    """The body bytes of a streamed reply."""
    wire = pb.ProcessingResponse.FromString(message)
    return bytes(getattr(wire, kind(message)).response.body_mutation.streamed_response.body)


def refusal(message: bytes) -> tuple[int, dict[str, Any]]:
    wire = pb.ProcessingResponse.FromString(message)
    assert wire.WhichOneof("response") == "immediate_response"
    error: dict[str, Any] = json.loads(wire.immediate_response.body)["error"]
    return wire.immediate_response.status.code, error
