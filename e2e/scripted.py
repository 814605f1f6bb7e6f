"""A picker in this process whose router says what a test wants, behind a real Envoy whose access log tells
what came of it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from epp import names
from epp.errors import RequestError
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import Refused, Routed, Scores
from epp.lab.envoy import BodyModes, EnvoyProcess, PickerAddress, envoy_config
from epp.lab.stack import HEALTH_TIMEOUT_S, HOST, free_ports
from epp.payload.apis import PARSERS, ParserSet
from epp.payload.records import RawRequest
from epp.payload.request import parse_request
from epp.pool.records import Endpoint
from epp.runtime.grpcio import GrpcioTransport
from epp.runtime.health import Health
from epp.runtime.health_calls import health_methods
from epp.runtime.options import GRPCIO
from epp.runtime.own import OwnTransport
from epp.runtime.stream import Deliver, Stream
from epp.runtime.transport import StreamCounts, Transport
from epp.scheduling.records import (
    AnswerFact,
    AnswerHeaders,
    Completed,
    Edits,
    Leg,
    Metadata,
    Placement,
    Role,
    TicketId,
)

SPACE = "billing"
LISTENER = "          stat_prefix: gateway\n"
CLUSTER = "explicit_http_config: {http_protocol_options: {}}"
TIMEOUT = "              message_timeout: 1000s\n"


@dataclass(slots=True)
class Script:
    """What the router says, and what it heard."""

    engine: tuple[str, int]
    refuse: RequestError | None = None
    set_headers: Edits = ()
    answer_headers: Edits = ()
    scores: Scores | None = None
    metadata: Metadata = ()
    asked: list[RawRequest] = field(default_factory=list)
    facts: list[AnswerFact | Completed] = field(default_factory=list)
    tickets: Any = field(default_factory=lambda: count(1))
    parsers: ParserSet = field(default_factory=lambda: ParserSet(PARSERS))

    def route(self, raw: RawRequest, _: Deliver) -> Routed | Refused | None:
        self.asked.append(raw)
        now = time.monotonic()
        if self.refuse is not None:
            return Refused(now, self.refuse)
        try:
            request = parse_request(raw, max_bytes=1 << 20, parsers=self.parsers).request
        except RequestError as error:
            return Refused(now, error)
        host, port = self.engine
        decision: Any = None
        leg = Leg(Role.DECODE, (Endpoint("uid", "engine", "default", host, port),), decision)
        placement = Placement(TicketId(next(self.tickets)), (leg,), self.set_headers)
        return Routed(
            now,
            placement,
            request.api,
            request.model,
            request.target_model,
            stream=request.stream,
            scores=self.scores,
        )

    def observe(self, _: TicketId, fact: AnswerFact) -> Edits:
        self.facts.append(fact)
        return self.answer_headers if isinstance(fact, AnswerHeaders) else ()

    def report(self, _: TicketId, completed: Completed) -> Metadata:
        self.facts.append(completed)
        return self.metadata

    def heard(self, kind: type) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@dataclass(slots=True)
class ScriptedGateway:
    """`port` is Envoy's; `logged` has, once all is ended, a line a request: its dynamic metadata."""

    script: Script
    port: int
    codes: list[str] = field(default_factory=list)
    logged: list[dict[str, Any]] = field(default_factory=list)


@asynccontextmanager
async def scripted_gateway(
    script: Script,
    envoy: Path,
    folder: Path,
    transport: str,
    *,
    mode: BodyModes = BodyModes.FULL_DUPLEX,
    http2: bool = False,
) -> AsyncIterator[ScriptedGateway]:
    """`http2`: the engine speaks it."""
    picker_port, listen, admin = free_ports(3)
    gateway = ScriptedGateway(script, listen)
    budget = BodyBudget(1 << 30)

    def stream(wake: Any) -> Stream:
        exchange = Exchange(budget, Limits(), lambda: "made", reports=True)
        return Stream(exchange, script, time.monotonic, wake)

    served = _transport(transport, stream, StreamCounts(lambda: None, gateway.codes.append), budget)
    await served.start(f"{HOST}:{picker_port}")
    log = folder / "access.log"
    config = envoy_config(
        listen_port=listen,
        admin_port=admin,
        pickers=[PickerAddress(HOST, picker_port)],
        endpoints=[script.engine],
        fail_open=False,
        mode=mode,
        health_timeout_s=HEALTH_TIMEOUT_S,
    )
    for old, new in edits(log, http2).items():
        assert config.count(old) == 1, old
        config = config.replace(old, new)
    try:
        async with EnvoyProcess(envoy, config, admin_port=admin):
            yield gateway
    finally:
        await served.stop()
    gateway.logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert budget.used == 0


def _transport(transport: str, stream: Any, counts: StreamCounts, budget: BodyBudget) -> Transport:
    health = Health()
    health.pool_known(True)
    if transport == GRPCIO:
        return GrpcioTransport(stream, counts, Limits().body_bytes, health=health)
    post = asyncio.get_running_loop().call_soon_threadsafe
    return OwnTransport(stream, counts, budget, also=health_methods(health, post))


def edits(log: Path, http2: bool) -> dict[str, str]:
    """Envoy takes the picker's metadata and logs it, and speaks to the engine as it does."""
    format_ = f'{{lb: "%DYNAMIC_METADATA({names.LB_NAMESPACE})%", own: "%DYNAMIC_METADATA({SPACE})%"}}'
    kind = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
    logger = f'{{"@type": "{kind}", path: "{log}", log_format: {{json_format: {format_}}}}}'
    return {
        LISTENER: LISTENER
        + f"          access_log: [{{name: envoy.access_loggers.file, typed_config: {logger}}}]\n",
        TIMEOUT: TIMEOUT
        + "              metadata_options: {receiving_namespaces: "
        + f"{{untyped: [{names.LB_NAMESPACE}, {SPACE}]}}}}\n",
        CLUSTER: "explicit_http_config: {http2_protocol_options: {}}" if http2 else CLUSTER,
    }
