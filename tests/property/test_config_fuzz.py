"""Whatever the bytes, the loader returns a configuration or raises ConfigError."""

from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from epp.config import decode, document, reading
from epp.config.check import effective
from epp.config.load import LoadedConfig, build, load_config
from epp.errors import ConfigError, Problem
from epp.pool.store import PoolStore

DATA = Path(__file__).parents[1] / "data" / "config"
SEEDS = [path.read_bytes() for path in sorted(DATA.glob("*.yaml"))]

PIECES = [
    b"\x00", b"\xff", b"\t", b"\n", b": ", b"- ", b"[", b"{", b"}", b"]", b"&a ", b"*a", b"!!str ",
    b"!x ", b"'", b'"', b"|", b">", b"%", b"@", b"?", b"---\n", b"...\n", b"<<: ", b"~", b"null",
    b"true", b"-1", b"0", b"1e999", b".nan", b"9" * 40, b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b"\xe2\x80\xa8", b"plugins:", b"pluginRef: ", b"\\u0000", b"#",
]  # fmt: skip

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 10**15, 0.5, -0.5, "", "x", "5s", "10Gi", "default", "queue-scorer",
    "prefix-cache-scorer", "approx-prefix-cache-producer", "max-score-picker", "single-profile-handler",
    [], {}, ["x"], [[]], [None], {"x": None}, {"pluginRef": "queue-scorer"}, {"type": "queue-scorer"},
    {"type": "file-discovery"},
]  # fmt: skip

KEYS = [
    "type", "name", "parameters", "pluginRef", "weight", "plugins", "schedulingProfiles", "dataLayer",
    "flowControl", "featureGates", "requestHandler", "parser", "saturationDetector", "kind", "apiVersion",
    "sources", "extractors", "discovery", "injectDefaults", "priorityBands", "estimate", "", "x",
    "prefixMatchInfoProducerName",
]  # fmt: skip


def mutated_bytes(draw: Random, data: bytes) -> bytes:
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(data))
        end = min(len(data), at + draw.choice([0, 0, 1, 5, 40]))
        data = data[:at] + draw.choice(PIECES) * draw.choice([1, 1, 1, 2, 50]) + data[end:]
    return data


def mutated_tree(draw: Random, tree: Any) -> Any:
    """The same document with one or more values replaced, keys added, moved or dropped."""
    for _ in range(draw.randint(1, 3)):
        places = list(_containers(tree))
        place = draw.choice(places)
        if isinstance(place, dict):
            key = draw.choice([*place, draw.choice(KEYS)])
            if draw.random() < 0.2:
                place.pop(key, None)
            else:
                place[key] = deepcopy(draw.choice(VALUES))
        elif place and draw.random() < 0.5:
            place[draw.randrange(len(place))] = deepcopy(draw.choice(VALUES))
        else:
            place.append(deepcopy(draw.choice([*VALUES, *place])))
    return tree


def _containers(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        yield tree
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(item)


def attempt(text: bytes) -> tuple[tuple[Problem, ...], LoadedConfig | None]:
    try:
        return (), load_config(text, "fuzz")
    except ConfigError as error:
        return error.problems, None


def check(text: bytes) -> bool:
    """True if it loads; then it also builds, and shows itself as a configuration that loads."""
    problems, loaded = attempt(text)
    if loaded is None:
        assert problems
        assert all(problem.message and len(str(problem)) < 2000 for problem in problems)
        return False
    build(loaded, PoolStore().view, b"secret")
    load_config(str(effective(loaded)), "effective")
    return True


@pytest.mark.parametrize("seed", range(4))
def test_broken_bytes(seed: int) -> None:
    draw = Random(seed)
    outcomes = [check(mutated_bytes(draw, draw.choice(SEEDS))) for _ in range(200)]
    assert not all(outcomes)


@pytest.mark.parametrize("seed", range(4))
def test_wrong_documents(seed: int) -> None:
    draw = Random(seed)
    outcomes = []
    for _ in range(120):
        tree = mutated_tree(draw, yaml.safe_load(draw.choice(SEEDS)))
        outcomes.append(check(yaml.dump(tree, Dumper=yaml.SafeDumper).encode()))
    assert not all(outcomes)


def test_changes_that_are_no_faults_still_load() -> None:
    """Enough of the mutants of a valid file are valid, so that what follows loading is tried as well."""
    draw = Random(7)
    valid = yaml.safe_load((DATA / "tiered-prefix-cache-cpu.yaml").read_text())
    outcomes = []
    for _ in range(60):
        tree = mutated_tree(draw, yaml.safe_load(yaml.safe_dump(valid)))
        outcomes.append(check(yaml.safe_dump(tree).encode()))
    assert 2 < sum(outcomes) < 60


def test_noise() -> None:
    draw = Random(1)
    for _ in range(150):
        assert not check(draw.randbytes(draw.randint(0, 300)))


# -- faults that must be caught ---------------------------------------------------------------------


def _unguarded_decoding(text: bytes, source: str) -> str:
    return text.decode()


def _first_character(text: str) -> Any:
    return None if text[0] == "~" else text


def _any_iterable(value: Any, wanted: Any, path: str, problems: Any) -> Any:
    return tuple(decode._value(item, wanted, path, problems) for item in value)


def _trusting_reference(reading: Any, name: str, path: str, *kinds: Any) -> Any:
    return reading.entries[name]


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (document, "_decoded", _unguarded_decoding),
        (document, "plain_value", _first_character),
        (decode, "_items", _any_iterable),
        (reading.Reading, "refer", _trusting_reference),
    ],
)
def test_faults_are_caught(owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((UnicodeDecodeError, IndexError, TypeError, KeyError)):
        _search(Random(3))


def _search(draw: Random) -> None:
    for _ in range(200):
        attempt(mutated_bytes(draw, draw.choice(SEEDS)))
        attempt(yaml.safe_dump(mutated_tree(draw, yaml.safe_load(draw.choice(SEEDS)))).encode())
