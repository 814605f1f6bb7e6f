"""The prefix index, approximate mode: look-up with lengths per endpoint, and memory."""

import gc
import random
import tracemalloc
from functools import partial

from benchmarks.rows.timing import Effort, Result, cpu_us
from epp.kvcache.lru import LruRunIndex
from epp.kvcache.runs import lengths
from epp.pool.records import Ints

ENDPOINTS = 100
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 20, 100
UNBOUNDED = 1 << 40
WEIGHED_SHARE = 10


def fresh_keys(draw: random.Random, count: int) -> list[int]:
    return [draw.getrandbits(64) for _ in range(count)]


def filled(blocks: int, mean_run: int, draw: random.Random) -> tuple[LruRunIndex, list[list[int]]]:
    """A fleet's index: system prompts everywhere, conversations in three turns on one to ten endpoints."""
    index = LruRunIndex()
    index.grow(ENDPOINTS)
    for slot in range(ENDPOINTS):
        index.set_capacity(slot, UNBOUNDED)
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
    return index, systems


def lookups(effort: Effort) -> list[Result]:
    """The whole chain on one endpoint, a half and a third of it on two more, its first 100 blocks on all."""
    draw = random.Random(2)
    index, systems = filled(effort.blocks, 200, draw)
    pairs = float(sum(index.blocks))
    gc.collect()
    results = []
    for depth, budget in ((16, 8.0), (1600, 20.0), (6250, 25.0)):
        chain = systems[0][:depth] + fresh_keys(draw, max(0, depth - SYSTEM_BLOCKS))
        for slot, part in enumerate((1, 2, 3)):
            index.insert(chain[: depth // part], slot)
        unknown = fresh_keys(draw, depth)
        hit = cpu_us(partial(_look_up, index, chain), effort)
        miss = cpu_us(partial(_look_up, index, unknown), effort)
        results.append(
            Result(
                f"index look-up with lengths, {ENDPOINTS} endpoints, {depth} blocks",
                "us",
                budget,
                hit,
                detail={"unknown_prompt_us": min(miss), "pairs_in_index": pairs},
            )
        )
    return results


def _look_up(index: LruRunIndex, chain: list[int]) -> Ints:
    return lengths(index.match(chain), ENDPOINTS)


def memory(effort: Effort) -> list[Result]:
    """What Python allocated for a tenth of the index, everything included, a (block, endpoint) pair."""
    results = []
    for name, mean_run in (("conversations of 200 blocks", 200), ("of 8 blocks", 8)):
        gc.collect()
        tracemalloc.start()
        index, systems = filled(effort.blocks // WEIGHED_SHARE, mean_run, random.Random(1))
        del systems
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        results.append(
            Result(
                f"index memory a (block, endpoint), approximate, {name}",
                "bytes",
                30.0,
                (allocated / sum(index.blocks),),
            )
        )
    return results
