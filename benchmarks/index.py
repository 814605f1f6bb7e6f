"""Costs of the prefix index, approximate mode: lookup, memory, a long prompt, a short one.

    python benchmarks/index.py [--json FILE]

CPU time (`time.process_time`), best of repeats. `calibration_ms` is a fixed pure-Python loop: divide by it
to compare machines or hours of load.
"""

import gc
import json
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from epp.kvcache.approximate import ApproximateParams, ApproximatePrefixProducer
from epp.kvcache.hashing import chain_keys, root_key
from epp.kvcache.lru import LruRunIndex
from epp.kvcache.runs import lengths
from epp.payload.records import Api, InferenceRequest, Usage
from epp.pool.records import Endpoint, Load, PoolView
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    Cause,
    Decision,
    Ended,
    FirstToken,
    Leg,
    Placement,
    Role,
    Ticket,
    TicketId,
)

ENDPOINTS = 100
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 20, 100
TOKENS_PER_BLOCK = 64


def best_us(action: Callable[[], object], repeats: int = 9, inner: int = 20) -> float:
    """Least CPU time of one call, in microseconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(inner):
            action()
        times.append((time.process_time() - start) / inner)
    return round(min(times) * 1e6, 2)


def calibration_ms() -> float:
    def loop() -> int:
        total = 0
        for number in range(200_000):
            total += number * number % 7
        return total

    return round(best_us(loop, repeats=7, inner=1) / 1000, 2)


def fresh_keys(draw: random.Random, count: int) -> list[int]:
    return [draw.getrandbits(64) for _ in range(count)]


def filled_index(blocks: int, mean_run: int, draw: random.Random) -> tuple[LruRunIndex, list[list[int]], int]:
    """A fleet's index: system prompts everywhere, conversations in three turns on one to ten endpoints."""
    index = LruRunIndex()
    index.grow(ENDPOINTS)
    for slot in range(ENDPOINTS):
        index.set_capacity(slot, 1 << 40)
    systems = [fresh_keys(draw, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    for slot in range(ENDPOINTS):
        for system in systems:
            index.insert(system, slot)
    different = SYSTEM_PROMPTS * SYSTEM_BLOCKS
    while different < blocks:
        own = fresh_keys(draw, max(1, int(draw.gammavariate(1.0, mean_run))))
        chain = draw.choice(systems) + own
        holders = draw.sample(range(ENDPOINTS), 1 if draw.random() < 0.6 else draw.randint(2, 10))
        for turn in (3, 2, 1):
            index.insert(chain[: SYSTEM_BLOCKS + max(1, len(own) // turn)], holders[0])
        for slot in holders[1:]:
            index.insert(chain[: SYSTEM_BLOCKS + max(1, int(len(own) * draw.random()))], slot)
        different += len(own)
    return index, systems, different


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_rows(blocks: int) -> dict[str, float]:
    """Bytes per (block, endpoint) Python allocated, everything included; conversations long and short."""
    rows = {}
    for name, mean_run in (("long", 200), ("short", 8)):
        gc.collect()
        tracemalloc.start()
        index, _, _ = filled_index(blocks, mean_run, random.Random(1))
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        rows[f"memory_bytes_per_pair_{name}"] = round(allocated / sum(index.blocks), 1)
    return rows


def lookup_rows(blocks: int) -> dict[str, float]:
    """Whole chain on one endpoint, a half and a third of it on two more, its first 100 blocks on all."""
    draw = random.Random(2)
    before = resident_bytes()
    index, systems, different = filled_index(blocks, 200, draw)
    rows = {
        "index_blocks": float(different),
        "index_pairs": float(sum(index.blocks)),
        "index_resident_bytes_per_pair": round((resident_bytes() - before) / sum(index.blocks), 1),
    }
    start = time.process_time()
    gc.collect()
    rows["gc_collect_ms"] = round((time.process_time() - start) * 1000, 2)
    for depth in (16, 1600, 6250):
        chain = systems[0][:depth] + fresh_keys(draw, max(0, depth - SYSTEM_BLOCKS))
        for slot, part in enumerate((1, 2, 3)):
            index.insert(chain[: depth // part], slot)
        unknown = fresh_keys(draw, depth)
        rows[f"lookup_{depth}_us"] = best_us(lambda c=chain: lengths(index.match(c), ENDPOINTS))
        rows[f"lookup_{depth}_miss_us"] = best_us(lambda c=unknown: lengths(index.match(c), ENDPOINTS))
    return rows


def long_prompt_rows() -> dict[str, float]:
    """A 400 kB prompt (100k tokens) in blocks of 64 tokens: hashed, looked up, inserted."""
    draw = random.Random(3)
    prompts = iter([draw.randbytes(400_000) for _ in range(60)])
    index = LruRunIndex()
    index.grow(ENDPOINTS)
    for slot in range(ENDPOINTS):
        index.set_capacity(slot, 1 << 40)
    root = root_key(b"secret", "model", "")
    chain: list[int] = []

    def hashed(prompt: bytes) -> list[int]:
        return chain_keys(root, prompt, TOKENS_PER_BLOCK * 4, 1 << 40)

    def all_steps(prompt: bytes) -> None:
        keys = hashed(prompt)
        lengths(index.match(keys), ENDPOINTS)
        index.insert(keys, 5)

    known = next(prompts)
    all_steps(known)
    chain = hashed(known)
    return {
        "hash_400kB_us": best_us(lambda: hashed(known)),
        "hash_lookup_insert_400kB_new_us": best_us(lambda: all_steps(next(prompts)), repeats=50, inner=1),
        "hash_lookup_insert_400kB_known_us": best_us(lambda: all_steps(known)),
        "insert_400kB_known_us": best_us(lambda: index.insert(chain, 5)),
    }


def pool_view(count: int) -> PoolView:
    endpoints = tuple(
        [Endpoint(f"uid-{n}", f"pod-{n}", "default", f"10.0.0.{n}", 8000) for n in range(count)]
    )
    return PoolView(
        capacity=count,
        endpoints=endpoints,
        host_ports=tuple([endpoint.host_port for endpoint in endpoints]),
        identity=np.arange(count, dtype=np.uint64),
        candidates=np.ones(count, np.bool_),
        present=np.ones(count, np.bool_),
        stale=np.zeros(count, np.bool_),
        waiting=np.zeros(count),
        running=np.zeros(count),
        kv_usage=np.zeros(count),
        block_size=np.full(count, 16),
        cache_tokens=np.full(count, 500_000),
        hit_tokens=np.zeros(count),
        query_tokens=np.zeros(count),
        scraped_at=np.zeros(count),
        epoch=1,
        by_host_port={endpoint.host_port: n for n, endpoint in enumerate(endpoints)},
    )


def produce_rows() -> dict[str, float]:
    """A 1 kB prompt, 32 endpoints: `produce` unknown and held by all; `placed` and the end of the answer."""
    view = pool_view(32)
    producer = ApproximatePrefixProducer("approx", ApproximateParams(), view, b"secret")
    load = Load(np.zeros(32, np.int64), np.zeros(32, np.int64))
    request = InferenceRequest(Api.CHAT, model="llama", prompts=(bytes(range(256)) * 4,), prompt_tokens=256)
    ctx = Ctx(request, view, load, {}, 0.0, random.Random(0))
    rows = {"produce_1kB_unknown_us": best_us(lambda: producer.produce(ctx), inner=200)}

    def send(slot: int) -> None:
        endpoint = view.endpoints[slot]
        assert endpoint is not None
        leg = Leg(
            Role.DECODE, (endpoint,), Decision("default", (slot,), view.candidates, (), (), view.waiting)
        )
        placement = Placement(TicketId(slot), (leg,))
        ticket = Ticket(placement.ticket, request, placement, slot, 0, 0.0, status=200)
        producer.placed(ctx, ticket)
        producer.observe(ticket, FirstToken(), 0.0)
        producer.observe(ticket, Ended(Cause.NATURAL, Usage(256, 1, 240), 1, 1), 0.0)

    for slot in range(32):
        send(slot)
    rows["produce_1kB_known_us"] = best_us(lambda: producer.produce(ctx), inner=200)
    rows["placed_and_ended_1kB_us"] = best_us(lambda: send(7), inner=200)
    return rows


def main() -> None:
    blocks = 1_000_000
    rows: dict[str, float] = {"calibration_ms": calibration_ms(), "load_1min": os.getloadavg()[0]}
    rows |= produce_rows()
    rows |= long_prompt_rows()
    rows |= lookup_rows(blocks)
    gc.collect()
    rows |= memory_rows(blocks // 10)
    for name, value in rows.items():
        print(f"{name:40} {value:>14,.2f}")
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
