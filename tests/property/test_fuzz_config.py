"""Configuration files broken at random, from a fixed seed: they load and build, or say what is wrong."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.check import effective
from epp.config.load import build, load_config
from epp.errors import ConfigError, Problem
from epp.pool.store import PoolStore

FOLDER = Path(__file__).parents[1] / "data" / "config"
TEXTS = [path.read_text() for path in sorted(FOLDER.glob("*.yaml"))]
LOADABLE = (FOLDER / "default-with-file-discovery.yaml").read_text()

SPLICES = [
    *("&a ", "*a", "!!int ", "!!python/object:os.system ", "? ", "<<: ", "- ", "{", "}", "[", "]", ":", "\t"),
    *('"', "'", "|\n", "---\n", "%YAML 9\n", "# ", "\x00", "\ufeff", "\u2028", "\ud83d", "é", "0x", "1e999"),
    *("9" * 400, "[" * 400, "{a: " * 100, "  ", "\n", "null", "~", "yes", "-1", ".inf", ".nan", "name: "),
]
ODD: list[Any] = [
    *(None, True, -1, 0, 2**62, 1.5, "", "x" * 200, [], {}, [[]], {"": 1}, [None], "max-score-picker"),
    *("1h", "-5s", "$x", "queue-scorer", "file-discovery", "a.b[0]"),
]


def spliced(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        match draw.randrange(4):
            case 0:
                text = text[:at] + text[at + draw.randint(1, 20) :]
            case 1:
                text = text[:at] + draw.choice(SPLICES) + text[at:]
            case 2:
                text = (
                    text[:at]
                    + chr(draw.choice((draw.randrange(128), draw.randrange(0xFFFF))))
                    + text[at + 1 :]
                )
            case _:
                lines = text.split("\n")
                draw.shuffle(lines)
                text = "\n".join(lines)
    return text


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


def altered(text: str, draw: random.Random) -> str:
    """Valid YAML with other values."""
    tree = copy.deepcopy(yaml.safe_load(text))
    for _ in range(draw.randint(1, 3)):
        collection, key = draw.choice(places(tree))
        match draw.randrange(4):
            case 0:
                del collection[key]
            case 1:
                collection[key] = copy.deepcopy(draw.choice(ODD))
            case 2 if isinstance(collection, list):
                collection.append(copy.deepcopy(collection[key]))
            case 2:
                collection[draw.choice(("extra", "weight", "name", "type"))] = copy.deepcopy(draw.choice(ODD))
            case _:
                collection[key] = copy.deepcopy(draw.choice(places(tree))[0])
    try:
        return yaml.dump(tree, Dumper=_Plain)
    except RecursionError:
        return text


class _Plain(yaml.SafeDumper):
    """Writes values out in place of aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def problems(text: str) -> tuple[Problem, ...]:
    """What is wrong with a file; of one that loads, that it builds and means the same when written out."""
    try:
        loaded = load_config(text, "file.yaml")
        assembly = build(loaded, PoolStore().view, secret=b"s")
    except ConfigError as error:
        return error.problems
    assert assembly.plugins.handler is not None
    assert load_config(str(effective(loaded)), "file.yaml").profiles
    return ()


def loads(text: str) -> bool:
    found = problems(text)
    assert all(problem.message for problem in found)
    assert sum(len(str(problem)) for problem in found) < 50_000
    return not found


def test_broken_text() -> None:
    """Few survive, so it takes many tries to see both outcomes."""
    draw = random.Random(0)
    loaded = 0
    for _ in range(450):
        loaded += loads(spliced(draw.choice((LOADABLE, *TEXTS)), draw))
    assert 0 < loaded < 450


@pytest.mark.parametrize("seed", range(3))
def test_other_values(seed: int) -> None:
    draw = random.Random(seed)
    loaded = 0
    for _ in range(120):
        loaded += loads(altered(draw.choice((LOADABLE, LOADABLE, *TEXTS)), draw))
    assert 0 < loaded < 120
