"""Reads the conformance scripts beside it, builds events from them, shows effects in their notation."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.struct_pb2 import Struct

from epp import errors, names
from epp.extproc.limits import Limits
from epp.extproc.records import (
    BodyMode,
    BodyReply,
    Closed,
    Direction,
    Edited,
    Effect,
    Event,
    Finish,
    HeadersReply,
    ImmediateReply,
    Modes,
    Observe,
    Refused,
    Reply,
    Reported,
    RequestChunk,
    RequestHeaders,
    RequestTrailers,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    Route,
    Routed,
    Send,
    StreamedBodyReply,
    TrailersReply,
)
from epp.payload.records import Api
from epp.pool.records import Endpoint, LoadReport
from epp.scheduling.records import (
    AnswerHeaders,
    Completed,
    Decision,
    Ended,
    FirstToken,
    Leg,
    Metadata,
    Placement,
    Progress,
    Role,
    TicketId,
)
from epp.wire import ext_proc_pb2 as pb

HERE = Path(__file__).parent
TICKET = TicketId(7)
REPLIES = ("headers", "streamed", "body", "trailers", "immediate")
REQUEST_HEADERS = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    ":authority": "gateway",
    "content-type": "application/json",
    "x-request-id": "r-1",
}
RESPONSE_HEADERS = {":status": "200", "content-type": "application/json"}
FULL_DUPLEX = ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED")


@dataclass(frozen=True)
class Step:
    """`kind`: in, decide, edit, cancel or illegal. `out`: effects, or for `illegal` a part of the message."""

    kind: str
    event: Event
    out: Any


@dataclass(frozen=True)
class Script:
    name: str
    limits: Limits
    reports: bool
    steps: tuple[Step, ...]


def load() -> list[Script]:
    found = []
    for path in sorted(HERE.glob("*.yaml")):
        for raw in yaml.safe_load(path.read_text()):
            at = 0.0
            steps = []
            for step in raw["steps"]:
                at = step.get("at", at + 0.001)
                (kind,) = step.keys() - {"at", "out"}
                steps.append(Step(kind, build(kind, step[kind] or {}, at), step.get("out", [])))
            name = f"{path.stem}: {raw['name']}"
            limits = Limits(**raw.get("limits", {}))
            found.append(Script(name, limits, raw.get("reports", False), tuple(steps)))
    return found


def build(kind: str, value: dict[str, Any], at: float) -> Event:
    match kind:
        case "edit":
            return Edited(at, _set(value.get("set", {})), _metadata(value.get("metadata", {})))
        case "cancel":
            return Closed(at, value.get("error", False))
        case "decide":
            return _decision(value, at)
    ((message, fields),) = value.items()
    fields = fields or {}
    eos = fields.get("eos", False)
    subset = fields.get("subset")
    subset = None if subset is None else tuple(subset)
    match message:
        case "request_headers":
            headers = _headers(REQUEST_HEADERS, fields)
            return RequestHeaders(at, headers, eos, subset, _modes(fields.get("modes", FULL_DUPLEX)))
        case "request_body":
            return RequestChunk(at, body_of(fields.get("body", "")), eos, subset)
        case "request_trailers":
            return RequestTrailers(at)
        case "response_headers":
            headers = _headers(RESPONSE_HEADERS, fields)
            return ResponseHeaders(at, headers, eos, fields.get("served"), _modes(fields.get("modes")))
        case "response_body":
            return ResponseChunk(at, body_of(fields.get("body", "")), eos)
        case "response_trailers":
            return ResponseTrailers(at)
    raise ValueError(message)


def _set(headers: dict[str, str]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, value.encode()) for name, value in headers.items())


def _metadata(spaces: dict[str, dict[str, float]]) -> Metadata:
    return tuple((space, key, figure) for space, told in spaces.items() for key, figure in told.items())


def placement(*host_ports: str, set_headers: tuple[tuple[str, bytes], ...] = ()) -> Placement:
    endpoints = []
    for host_port in host_ports:
        address, _, port = host_port.rpartition(":")
        endpoints.append(Endpoint(host_port, host_port, "default", address.strip("[]"), int(port)))
    decision = Decision("default", (0,), None, (), (), None)  # type: ignore[arg-type]
    return Placement(TICKET, (Leg(Role.DECODE, tuple(endpoints), decision),), set_headers)


def _decision(value: dict[str, Any], at: float) -> Event:
    if "refused" in value:
        refused = value["refused"]
        return Refused(at, getattr(errors, refused["error"])(refused.get("message", "no")))
    routed = value["routed"] or {}
    body = routed.get("body")
    scores = routed.get("scores")
    endpoints = routed.get("endpoints", ("10.0.0.1:8000",))
    return Routed(
        at,
        placement(*endpoints, set_headers=_set(routed.get("set", {}))),
        Api(routed.get("api", "chat")),
        routed.get("model", "m"),
        routed.get("target_model", routed.get("model", "m")),
        None if body is None else body_of(body),
        tuple(routed.get("remove_headers", ())),
        routed.get("stream", False),
        None if scores is None else tuple(scores.items()),
    )


def _headers(defaults: dict[str, str], fields: dict[str, Any]) -> tuple[tuple[str, bytes], ...]:
    merged = {**defaults, **fields.get("headers", {})}
    return tuple((name, value.encode()) for name, value in merged.items() if value is not None)


def _modes(value: Any) -> Modes | None:
    return None if value is None else Modes(*(BodyMode[name] for name in value))


def body_of(value: Any) -> bytes:
    if isinstance(value, dict):
        return value["fill"].encode() * value["bytes"]
    return value.encode()


# -- showing ------------------------------------------------------------------------------------------


def matches(expected: Any, effects: list[dict[str, Any]]) -> bool:
    """Whether effects, as shown, are the expected ones. Of a route only the expected fields count."""
    if len(expected) != len(effects):
        return False
    for wanted, got in zip(expected, effects, strict=True):
        wanted = _expanded(wanted)
        if "route" in wanted and "route" in got:
            fields = {key: got["route"].get(key) for key in wanted["route"]}
            if "headers" in fields:
                fields["headers"] = {key: fields["headers"].get(key) for key in wanted["route"]["headers"]}
            got = {"route": fields}
        elif "immediate" in wanted or wanted.get("observe") == "ended":
            got = {key: value for key, value in got.items() if key in wanted}
        if wanted != got:
            return False
    return True


def _expanded(wanted: dict[str, Any]) -> dict[str, Any]:
    """Bodies as bytes, absent optional keys filled in."""
    wanted = dict(wanted)
    for key in ("content", "replace"):
        if key in wanted and wanted[key] is not None:
            wanted[key] = body_of(wanted[key])
    if "route" in wanted:
        wanted["route"] = dict(wanted["route"] or {})
        if "body" in wanted["route"]:
            wanted["route"]["body"] = body_of(wanted["route"]["body"])
    if wanted.get("observe") == "answer-headers":
        wanted = {"status": 200, "served": None, "streaming": False, **wanted}
    if "headers" in wanted and "immediate" not in wanted:
        wanted = {"destination": None, "set": {}, "remove": [], **wanted}
        if wanted["headers"] == "response" and wanted.pop("final", True):
            wanted["set"] = {names.WENT_INTO_RESPONSE_HEADERS: "true", **wanted["set"]}
    if "body" in wanted:
        wanted = {"replace": None, "destination": None, "set": {}, "remove": [], **wanted}
    return wanted


def show(effect: Effect) -> dict[str, Any]:
    match effect:
        case Send(reply):
            return show_reply(reply)
        case Route(raw):
            return {
                "route": {
                    "request_id": raw.request_id,
                    "method": raw.method,
                    "path": raw.path,
                    "headers": dict(raw.headers),
                    "body": raw.body,
                    "subset": None if raw.subset is None else list(raw.subset),
                    "shown": raw.body_shown,
                }
            }
        case Observe(ticket, fact):
            assert ticket == TICKET
            return _show_fact(fact)
        case Finish(cause):
            return {"finish": cause.value}
    raise TypeError(effect)


def _show_fact(fact: Any) -> dict[str, Any]:
    match fact:
        case AnswerHeaders():
            return {
                "observe": "answer-headers",
                "status": fact.status,
                "served": fact.served,
                "streaming": fact.streaming,
                **({} if fact.load is None else {"load": _show_load(fact.load)}),
            }
        case Completed():
            usage = fact.usage
            return {
                "observe": "completed",
                "chunks": fact.chunks,
                "bytes": fact.bytes,
                "usage": usage and [usage.prompt_tokens, usage.output_tokens],
            }
        case FirstToken():
            return {"observe": "first-token"}
        case Progress():
            return {"observe": "progress", "chunks": fact.chunks, "bytes": fact.bytes}
        case Ended():
            usage = fact.usage
            return {
                "observe": "ended",
                "cause": fact.cause.value,
                "chunks": fact.chunks,
                "bytes": fact.bytes,
                "usage": usage and [usage.prompt_tokens, usage.output_tokens],
            }
    raise TypeError(fact)


def _show_load(load: LoadReport) -> dict[str, Any]:
    known = {"waiting": load.waiting, "running": load.running, "kv_usage": load.kv_usage}
    return {key: value for key, value in known.items() if value is not None} | dict(load.attributes)


def show_reply(reply: Reply) -> dict[str, Any]:
    match reply:
        case HeadersReply():
            return {"headers": reply.direction.value, **_show_edits(reply)}
        case StreamedBodyReply():
            return {"streamed": reply.direction.value, "content": reply.body, "eos": reply.end_of_stream}
        case BodyReply():
            return {"body": reply.direction.value, "replace": reply.body, **_show_edits(reply)}
        case TrailersReply():
            return {"trailers": reply.direction.value}
        case ImmediateReply():
            headers = {name: value.decode() for name, value in reply.headers}
            return _show_immediate(reply.status, headers, reply.body, reply.grpc_status)
        case Reported():
            metadata: dict[str, dict[str, float]] = {}
            for space, key, figure in reply.metadata:
                metadata.setdefault(space, {})[key] = figure
            return {**show_reply(reply.reply), "metadata": metadata}
    raise TypeError(reply)


def _show_edits(reply: HeadersReply | BodyReply) -> dict[str, Any]:
    return {
        "destination": reply.destination,
        "set": {name: value.decode() for name, value in reply.set_headers},
        "remove": list(reply.remove_headers),
        **({} if reply.scores is None else {"scores": dict(reply.scores)}),
    }


def _show_immediate(
    status: int, headers: dict[str, str], body: bytes, grpc_status: int | None
) -> dict[str, Any]:
    shown = {"immediate": status, "headers": headers, "grpc": grpc_status}
    if grpc_status is not None:
        return {**shown, "message": body.decode()}
    told = json.loads(body)
    return {**shown, "message": told["error"]["message"], "shape": sorted(told)}


# -- the wire -----------------------------------------------------------------------------------------


def to_wire(event: Event) -> bytes:
    """The message a proxy would send for an `in` step."""
    wire = pb.ProcessingRequest()
    match event:
        case RequestHeaders() | ResponseHeaders():
            request = isinstance(event, RequestHeaders)
            part = wire.request_headers if request else wire.response_headers
            for name, value in event.headers:
                part.headers.headers.add(key=name.encode(), raw_value=value)
            part.end_of_stream = event.end_of_stream
            if event.modes is not None:
                wire.protocol_config.request_body_mode = event.modes.request.value
                wire.protocol_config.response_body_mode = event.modes.response.value
        case RequestChunk():
            wire.request_body.body = event.body
            wire.request_body.end_of_stream = event.end_of_stream
        case ResponseChunk():
            wire.response_body.body = event.body
            wire.response_body.end_of_stream = event.end_of_stream
        case RequestTrailers():
            wire.request_trailers.SetInParent()
        case ResponseTrailers():
            wire.response_trailers.SetInParent()
        case _:
            raise TypeError(event)
    metadata = wire.metadata_context.filter_metadata
    if isinstance(event, RequestHeaders | RequestChunk) and event.subset is not None:
        entries = metadata[names.SUBSET_NAMESPACE].fields[names.DESTINATION_ENDPOINT_SUBSET].list_value
        entries.SetInParent()
        for entry in event.subset:
            entries.values.add(string_value=entry)
    if isinstance(event, ResponseHeaders) and event.served is not None:
        fields = metadata[names.LB_NAMESPACE].fields
        fields[names.DESTINATION_ENDPOINT_SERVED].string_value = event.served
    return wire.SerializeToString()


def show_wire(message: bytes) -> dict[str, Any]:
    """A `ProcessingResponse` in the notation of the scripts; checks what every such message must hold."""
    wire = pb.ProcessingResponse.FromString(message)
    kind = wire.WhichOneof("response")
    assert kind is not None
    if kind == "immediate_response":
        answer = wire.immediate_response
        grpc_status = answer.grpc_status.status if answer.HasField("grpc_status") else None
        return _show_immediate(answer.status.code, _wire_set(answer.headers), answer.body, grpc_status)
    direction, part = kind.split("_")
    assert direction in {Direction.REQUEST.value, Direction.RESPONSE.value}
    shown = _show_wire_part(wire, kind, direction, part)
    if direction == Direction.RESPONSE.value and wire.HasField("dynamic_metadata"):
        spaces = wire.dynamic_metadata.fields.items()
        shown["metadata"] = {
            space: {key: figure.number_value for key, figure in told.struct_value.fields.items()}
            for space, told in spaces
        }
    return shown


def _show_wire_part(wire: Any, kind: str, direction: str, part: str) -> dict[str, Any]:
    if part == "trailers":
        return {"trailers": direction}
    common = getattr(wire, kind).response
    if common.body_mutation.WhichOneof("mutation") == "streamed_response":
        piece = common.body_mutation.streamed_response
        return {"streamed": direction, "content": piece.body, "eos": piece.end_of_stream}
    setting = _wire_set(common.header_mutation)
    destination = setting.pop(names.DESTINATION_ENDPOINT, None)
    assert common.clear_route_cache == (destination is not None)
    lb = Struct()
    if wire.HasField("dynamic_metadata") and direction == Direction.REQUEST.value:
        lb = wire.dynamic_metadata.fields[names.LB_NAMESPACE].struct_value
    told = lb.fields[names.DESTINATION_ENDPOINT].string_value if lb.fields else ""
    assert (told or None) == destination
    shown: dict[str, Any] = {part: direction}
    if part == "body":
        replaced = common.body_mutation.HasField("body")
        shown["replace"] = common.body_mutation.body if replaced else None
    removed = list(common.header_mutation.remove_headers)
    shown |= {"destination": destination, "set": setting, "remove": removed}
    if names.DESTINATION_ENDPOINT_SCORES in lb.fields:
        scores = lb.fields[names.DESTINATION_ENDPOINT_SCORES].struct_value.fields
        shown["scores"] = {host_port: score.number_value for host_port, score in scores.items()}
    return shown


def _wire_set(mutation: pb.HeaderMutation) -> dict[str, str]:
    shown = {}
    for option in mutation.set_headers:
        assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        assert not option.header.value
        shown[option.header.key.decode()] = option.header.raw_value.decode()
    return shown
