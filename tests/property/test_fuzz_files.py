"""Files people hand to the commands, broken at random from a fixed seed: they are read, or named as wrong."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.lab.demo import DEMO_WORKLOAD
from epp.lab.workload import load_workload, read_mooncake_trace
from epp.runtime.explanations import read
from epp.scheduling.explain import render_table

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**200, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x" * 300, "\u001b[31m", "\ud83d", "0", [], {}, [[]], [1, 0], [None], {"a": 1}),
]
BYTES = [b"\x00", b"\xff", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"[" * 3000, b"1e400", b"9" * 400]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (collection, key) of a tree."""
    match tree:
        case dict():
            keys: list[Any] = list(tree)
        case list():
            keys = list(range(len(tree)))
        case _:
            return []
    return [(tree, key) for key in keys] + [place for key in keys for place in places(tree[key])]


def altered(data: bytes, draw: random.Random) -> bytes:
    """JSON with other values."""
    tree = json.loads(data)
    for _ in range(draw.randint(1, 2)):
        collection, key = draw.choice(places(tree))
        match draw.randrange(4):
            case 0:
                del collection[key]
            case 1 if isinstance(collection, list):
                collection.append(collection[key])
            case _:
                collection[key] = draw.choice(ODD)
        if not places(tree):
            break
    return json.dumps(tree).encode()


def spliced(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(3):
            case 0:
                data = data[:at] + data[at + draw.randint(1, 20) :]
            case 1:
                data = data[:at] + draw.choice(BYTES) + data[at:]
            case _:
                data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return data


# -- decisions for `explain --file` -------------------------------------------------------------------


def endpoint(number: int) -> dict[str, Any]:
    score = {"scorer": "queue-scorer", "score": 0.5, "weight": 2.0, "weighted": 1.0}
    match = {"producer": "approx-prefix-cache-producer", "blocks": 3, "total_blocks": 9, "block_tokens": 64}
    return {
        "name": f"pod-{number}",
        "namespace": "default",
        "host_port": f"10.0.0.{number}:8000",
        "chosen": number == 1,
        "excluded": "not ready" if number == 3 else None,
        "rank": None if number == 3 else number,
        "total": None if number == 3 else 3.0 / number,
        "scores": [] if number == 3 else [score],
        "scraped": True,
        "stale": number == 2,
        "waiting": 2.0,
        "running": 1.0,
        "kv_usage": 0.25,
        "in_flight": 1,
        "prefill_tokens": 512,
        "matches": [match],
    }


DECISION = {
    "request_id": "r-1",
    "model": "m",
    "target_model": "t",
    "prompt_tokens": 600,
    "legs": [
        {
            "role": "decode",
            "profile": "default",
            "chosen": ["10.0.0.1:8000"],
            "scorers": [["queue-scorer", 2.0]],
            "producers": ["approx-prefix-cache-producer"],
            "endpoints": [endpoint(1), endpoint(2), endpoint(3)],
            "timings_us": {"queue-scorer": 3.5},
        }
    ],
}


def explain_file(path: Path) -> None:
    for explanation in read(path):
        table = render_table(explanation)
        assert all(line.isprintable() for line in table.split("\n"))


# -- workloads and traces -----------------------------------------------------------------------------


def workload_file(path: Path) -> None:
    load_workload(path)


def trace_file(path: Path) -> None:
    turns = read_mooncake_trace(path, max_prompt_tokens=100)
    assert turns


TRACE = b"".join(
    json.dumps({"timestamp": 100 * n, "input_length": 900, "output_length": 9, "hash_ids": [0, n]}).encode()
    + b"\n"
    for n in range(4)
)
READERS: dict[str, tuple[Callable[[Path], None], bytes]] = {
    "decision": (explain_file, json.dumps(DECISION).encode()),
    "decisions": (explain_file, json.dumps([DECISION, DECISION]).encode()),
    "workload": (workload_file, DEMO_WORKLOAD.read_bytes()),
    "trace": (trace_file, TRACE),
}


@pytest.mark.parametrize("name", READERS)
def test_any_file_is_read_or_named_as_wrong(name: str, tmp_path: Path) -> None:
    read_file, good = READERS[name]
    draw = random.Random(name)
    path = tmp_path / "file"
    path.write_bytes(good)
    read_file(path)
    was_read = refused = 0
    for _ in range(400):
        data = draw.choice(good.splitlines(keepends=True) if name == "trace" else [good])
        path.write_bytes(altered(data, draw) if draw.random() < 0.6 else spliced(data, draw))
        said = complaint(read_file, path)
        was_read += not said
        refused += bool(said)
        assert not said or str(path) in said
        assert len(said) < 20_000
    assert was_read > 10
    assert refused > 100


def complaint(read_file: Callable[[Path], None], path: Path) -> str:
    """What is said of a file that is wrong; empty if it is read."""
    try:
        read_file(path)
    except ConfigError as error:
        return str(error)
    return ""
