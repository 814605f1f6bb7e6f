"""A whole picker without transport: the classes of `warmroute serve` with the default configuration."""

import random
import time
from collections.abc import Iterable
from pathlib import Path

from epp.config.load import Assembly, build, default_config
from epp.director import Director, Need, Prepared, Recorder, Refusal
from epp.payload.records import Usage
from epp.pool.ledger import InflightLedger
from epp.pool.metrics_page import EngineSample
from epp.pool.records import Endpoint
from epp.pool.store import FIRST_CAPACITY, PoolStore
from epp.runtime.app import App
from epp.runtime.options import Options
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    AnswerFact,
    AnswerHeaders,
    Cause,
    Ended,
    FirstToken,
    Leg,
    Placement,
    Ticket,
)

BODY_BYTES = 32 << 20
CACHE_TOKENS = 500_000
PAGE = Path(__file__).resolve().parents[2] / "tests" / "data" / "pool" / "vllm-0.32-under-load.txt"


class NoRecorder:
    """Hears everything and keeps nothing: what a choice costs without metrics."""

    def chosen(self, prepared: Prepared, legs: tuple[Leg, ...], ctx: Ctx) -> None: ...

    def placed(self, prepared: Prepared, ticket: Ticket, ctx: Ctx) -> None: ...

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        raise error

    def need_failed(self, need: Need, error: Exception) -> None: ...

    def served_elsewhere(self, ticket: Ticket, served: str, in_pool: bool) -> None: ...

    def observed(self, prepared: Prepared, ticket: Ticket, fact: AnswerFact, now: float) -> None: ...


def endpoints(count: int) -> list[Endpoint]:
    return [
        Endpoint(f"uid-{n}", f"pod-{n}", "default", f"10.0.{n // 250}.{n % 250 + 1}", 8000)
        for n in range(count)
    ]


def scraped(store: PoolStore, now: float, cache_tokens: int = CACHE_TOKENS) -> None:
    """Every endpoint has told of its load, each another one."""
    draw = random.Random(5)
    for slot, _ in store.roster:
        sample = EngineSample(
            waiting=float(draw.randrange(8)),
            running=float(draw.randrange(40)),
            kv_usage=draw.random(),
            block_size=16,
            cache_tokens=cache_tokens,
        )
        store.sampled(slot, sample, now)


def director(count: int, recorder: Recorder | None = None) -> tuple[Director, PoolStore, Assembly]:
    """A director over `count` endpoints that records nothing, unless told where."""
    ledger = InflightLedger(FIRST_CAPACITY)
    store = PoolStore(busy=ledger.busy)
    assembly = build(default_config(), store.view, secret=bytes(32))
    for member in assembly.members:
        store.add_member(member)
    now = time.monotonic()
    store.sync(endpoints(count), now)
    ledger.resize(store.view.capacity)
    scraped(store, now)
    made = Director(
        store,
        ledger,
        assembly.plugins,
        recorder or NoRecorder(),
        random.Random(7),
        max_body_bytes=BODY_BYTES,
        use_subset=True,
    )
    return made, store, assembly


def app(count: int, cache_tokens: int = CACHE_TOKENS) -> App:
    """`warmroute serve` with `count` endpoints, put together and not started."""
    made = App.assemble(Options(seed=7), default_config())
    now = time.monotonic()
    made.store.sync(endpoints(count), now)
    made.ledger.resize(made.store.view.capacity)
    scraped(made.store, now, cache_tokens)
    return made


def placed(outcome: Placement | Refusal) -> Placement:
    if isinstance(outcome, Refusal):
        raise outcome.error
    return outcome


def end(made: Director, placements: Iterable[Placement], now: float) -> None:
    """Answer each placed request as a streaming engine would that does not tell what it had cached."""
    for placement in placements:
        served = placement.serving.endpoints[0].host_port
        made.observe(placement.ticket, AnswerHeaders(200, served, True), now)
        made.observe(placement.ticket, FirstToken(), now)
        made.observe(placement.ticket, Ended(Cause.NATURAL, Usage(230, 96, None), 100, 26_000), now)
