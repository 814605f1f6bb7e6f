"""One transport with a stand-in decision behind it: what `benchmarks/transport.py` measures a transport by.

    python -m benchmarks.transport_server {own,grpcio} [--cert-path FOLDER] [--decide-ms N]

Exchange, codec, seam and turns are the product's. The decision is that of the Go anchor: decode the body,
take one of eight endpoints by a checksum. Prints its port, then serves until it is killed.
"""

import asyncio
import gc
import json
import ssl
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

import click
import grpc
import numpy as np
import uvloop

from epp.director import Edits
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import Refused, Routed
from epp.payload.records import Api, RawRequest
from epp.pool.records import Endpoint
from epp.runtime.grpcio import GrpcioTransport
from epp.runtime.memory import keep_freed_memory
from epp.runtime.own import OwnTransport
from epp.runtime.stream import Deliver, Stream
from epp.runtime.transport import MakeStream, StreamCounts, Transport
from epp.runtime.turns import Turns
from epp.scheduling.records import AnswerFact, Decision, Leg, Placement, Role, TicketId

ENDPOINTS = 8
KEY_CHARACTERS = 64
ADDRESS = "127.0.0.1:0"


class StandIn:
    """Routes without a director; decisions take turns with all else, as the router's do.

    `burn_s`: CPU time that every decision takes besides.
    """

    def __init__(self, burn_s: float) -> None:
        self._burn_s = burn_s
        self._legs = [(_leg(number),) for number in range(ENDPOINTS)]
        self._tickets = 0
        self._turns = Turns(time.monotonic)

    def route(self, raw: RawRequest, deliver: Deliver) -> Routed | Refused | None:
        if not self._turns.free:
            self._turns.wait(lambda: deliver(self._decide(raw)))
            return None
        began = time.monotonic()
        outcome = self._decide(raw)
        self._turns.spent(outcome.at - began)
        return outcome

    def _decide(self, raw: RawRequest) -> Routed:
        if self._burn_s:
            _burn(self._burn_s)
        asked = json.loads(raw.body)
        key = (raw.header("x-session-id") or "") + asked["messages"][-1]["content"][:KEY_CHARACTERS]
        self._tickets += 1
        placement = Placement(TicketId(self._tickets), self._legs[zlib.crc32(key.encode()) % ENDPOINTS])
        model = asked["model"]
        return Routed(time.monotonic(), placement, Api.CHAT, model, model)

    def gone(self, raw: RawRequest) -> None: ...

    def observe(self, ticket: TicketId, fact: AnswerFact) -> Edits:
        return ()


def _leg(number: int) -> Leg:
    endpoint = Endpoint(f"pod-{number}:8000", f"pod-{number}", "default", f"10.0.0.{1 + number}", 8000)
    decision = Decision("default", (number,), np.ones(ENDPOINTS, bool), (), (), np.zeros(ENDPOINTS))
    return Leg(Role.DECODE, (endpoint,), decision)


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _transport(
    name: str, make_stream: MakeStream, limits: Limits, budget: BodyBudget, certs: str
) -> Transport:
    counts = StreamCounts(opened=lambda: None, closed=lambda code: None)
    key, chain = Path(certs, "tls.key"), Path(certs, "tls.crt")
    if name == "grpcio":
        pair = (key.read_bytes(), chain.read_bytes()) if certs else None
        credentials = grpc.ssl_server_credentials([pair]) if pair else None
        return GrpcioTransport(make_stream, counts, limits.body_bytes, credentials)
    tls = None
    if certs:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(chain, key)
        tls.set_alpn_protocols(["h2"])
    return OwnTransport(make_stream, counts, budget, tls=tls)


def transport_of(
    name: str, *, certs: str = "", burn_s: float = 0.0, make: type[Stream] = Stream
) -> Transport:
    """A transport that is not started yet.

    Args:
        name: `own` or `grpcio`.
        certs: folder with `tls.crt` and `tls.key`; empty serves plain HTTP/2.
        burn_s: as in `StandIn`.
        make: what serves a stream.
    """
    limits, routes = Limits(), StandIn(burn_s)
    budget = BodyBudget(limits.held_bytes)

    def stream(wake: Callable[[], None]) -> Stream:
        exchange = Exchange(budget, limits, lambda: str(uuid.uuid4()))
        return make(exchange, routes, time.monotonic, wake)

    return _transport(name, stream, limits, budget, certs)


async def _serve(transport: Transport) -> None:
    print(await transport.start(ADDRESS), flush=True)
    await asyncio.Event().wait()


@click.command()
@click.argument("transport", type=click.Choice(["own", "grpcio"]))
@click.option("--cert-path", default="", help="Folder with tls.crt and tls.key: serve TLS.")
@click.option("--decide-ms", default=0.0, help="CPU milliseconds that every decision burns besides.")
def main(transport: str, cert_path: str, decide_ms: float) -> None:
    """Serve ext-proc over one transport with a stand-in decision."""
    # As `warmroute serve` does.
    keep_freed_memory()
    gc.collect()
    gc.freeze()
    uvloop.run(_serve(transport_of(transport, certs=cert_path, burn_s=decide_ms / 1000)))


if __name__ == "__main__":
    main()
