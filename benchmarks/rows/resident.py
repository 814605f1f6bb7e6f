"""Memory of a whole picker whose index is full.

    python -m benchmarks.rows.resident PAIRS

weighs one, itself, and prints the figures as JSON.
"""

import gc
import json
import random
import subprocess
import sys

import msgspec

from benchmarks.rows import picker, traffic
from benchmarks.rows.index import SYSTEM_BLOCKS, SYSTEM_PROMPTS, fresh_keys
from benchmarks.rows.machine import resident_mib
from benchmarks.rows.timing import Effort, Result
from epp.kvcache.approximate import ApproximatePrefixProducer
from epp.runtime.app import App

ENDPOINTS = 100
TURNS = 3
MEAN_RUN = 200
UNBOUNDED_TOKENS = 1 << 40


def memory(effort: Effort) -> list[Result]:
    """In a process of its own, so that nothing else is weighed with it."""
    command = [sys.executable, "-m", "benchmarks.rows.resident", str(effort.pairs)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return [
        Result(
            f"resident, {ENDPOINTS} endpoints, 3 M (block, endpoint) pairs",
            "MiB",
            350.0,
            (found["resident_mib"],),
            apart="approximate; the budget is for precise",
            detail={"pairs": found["pairs"], "empty_mib": found["empty_mib"]},
        )
    ]


def main(pairs: int) -> None:
    app = picker.app(ENDPOINTS, cache_tokens=UNBOUNDED_TOKENS)
    (producer,) = [
        each for each in app.assembly.plugins.producers if isinstance(each, ApproximatePrefixProducer)
    ]
    gc.collect()
    empty_mib = resident_mib()
    _fill(app, producer, pairs)
    gc.collect()
    print(
        json.dumps({"pairs": producer.size, "empty_mib": empty_mib, "resident_mib": resident_mib()}),
        flush=True,
    )


def _fill(app: App, producer: ApproximatePrefixProducer, pairs: int) -> None:
    """Conversations of three turns under shared system prompts, placed by the director itself."""
    draw = random.Random(3)
    systems = [fresh_keys(draw, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    body = next(traffic.Chats(1000, seed=41))
    prepared = app.director.prepare(traffic.raw_request(body, 1), 0.0)
    while producer.size < pairs:
        chain = draw.choice(systems) + fresh_keys(draw, max(TURNS, int(draw.gammavariate(1.0, MEAN_RUN))))
        for turn in range(1, TURNS + 1):
            part = tuple(chain[: SYSTEM_BLOCKS + (len(chain) - SYSTEM_BLOCKS) * turn // TURNS])
            request = msgspec.structs.replace(
                prepared.request, prompts=(), chains=(part,), prompt_tokens=len(part) * 64
            )
            one = msgspec.structs.replace(prepared, request=request)
            picker.end(app.director, [picker.placed(app.director.submit(one, 0.0))], 0.0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
