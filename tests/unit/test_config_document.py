"""YAML text to values and lines; what is refused says where."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.config.document import MAX_BYTES, MAX_DEPTH, MAX_KEY, MAX_VALUES, read_document
from epp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: [x, 'y', \"z\"]\n", {"a": 1, "b": ["x", "y", "z"]}),
        ("a: ~\nb: null\nc:\n", {"a": None, "b": None, "c": None}),
        ("a: true\nb: off\nc: 'yes'\n", {"a": True, "b": False, "c": "yes"}),
        ("a: 1.5\nb: 1e3\nc: -2\nd: 0x10\ne: 0o17\n", {"a": 1.5, "b": 1000.0, "c": -2, "d": 16, "e": 15}),
        ("a: 0777\nb: 1_000\nc: 12:30:45\n", {"a": "0777", "b": "1_000", "c": "12:30:45"}),
        ("a: 2026-01-01\n", {"a": "2026-01-01"}),
        ("a: .inf\nb: .nan\nc: '1'\nd: \"1\"\n", {"a": ".inf", "b": ".nan", "c": "1", "d": "1"}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
        ("{}", {}),
        ("[]", []),
        ("", None),
        ("# nothing\n", None),
        ("--- \na: 1\n", {"a": 1}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("a: &anchor 1\n", {"a": 1}),
        ("a: &x 1\nb: *x\nc: [*x, &x 2, *x]\n", {"a": 1, "b": 1, "c": [1, 2, 2]}),
        ("a: &x {k: [1, {l: 2}]}\nb: &y [*x]\nc: *y\n",
         {"a": {"k": [1, {"l": 2}]}, "b": [{"k": [1, {"l": 2}]}], "c": [{"k": [1, {"l": 2}]}]}),
        ("- &x []\n- *x\n- &y {}\n- *y\n- &z\n- *z\n", [[], [], {}, {}, None, None]),
    ],
)  # fmt: skip
def test_values(text: str, value: Any) -> None:
    assert read_document(text, "f").value == value
    assert read_document(text.encode(), "f").value == value


def test_lines() -> None:
    document = read_document("a:\n- x: 1\n  y:\n    z: 2\n- 3\n", "f")
    assert document.lines == {
        "$": 1, "$.a": 2, "$.a[0]": 2, "$.a[0].x": 2, "$.a[0].y": 4, "$.a[0].y.z": 4, "$.a[1]": 5,
    }  # fmt: skip
    assert document.line_of("$.a[0].missing.deep") == 2
    assert document.line_of("") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\xff\xfea\x00", "line 1: not UTF-8 at byte 0"),
        ("a: 1\nb: ü\n".encode("latin-1"), "line 2: not UTF-8 at byte 8"),
        ("a: 1\nb: \x00\n", r"line 2: character U\+0000 is not allowed"),
        ("a: \ud800\n", r"line 1: character U\+D800 is not allowed"),
        ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: .*indent with spaces, not tabs"),
        ("a: 1\n  b: 2\n", "line 2, column 4: not valid YAML"),
        ("a: [1, 2\n", "line 2, column 1: not valid YAML"),
        ("a: 'x\n", "line 2, column 1: not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' appears twice"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "line 3, column 3: merge keys are not supported"),
        ("a: *x\nb: &x 1\n", r"line 1, column 4: alias \*x: there is no &x before it"),
        ("a: &x\n  b: *x\n", r"line 2, column 6: alias \*x stands in what it names"),
        ("a: &x\n  b:\n  - *x\n", r"line 3, column 5: alias \*x stands in what it names"),
        ("a: &x k\n*x : 1\n", "line 2, column 1: a key must be a plain text"),
        (f"a: &x {'y' * 60_000}\nb: [{'*x,' * 20}]\n", "line 2, column 56: aliases repeat more"),
        ("- &x [1]\n" + "- &y [*x]\n- &x [*y]\n" * 20, f"line 32, column 7: nested deeper than {MAX_DEPTH}"),
        ("a: !!python/object:x {}\n", "line 1, column 4: tag tag:yaml.org,2002:python/object:x"),
        ("a: !x 1\n", "line 1, column 4: tag !x"),
        ("? [a]\n: 1\n", "line 1, column 3: a key must be a plain text"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: a second YAML document"),
        ("a: 1" + "0" * 30 + "\n", "line 1, column 4: number 10.* does not fit 64 bits"),
        ("a: 1e999\n", "line 1, column 4: number 1e999 is too large"),
        ("[" * (MAX_DEPTH + 1), f"line 1, column {MAX_DEPTH + 1}: nested deeper than {MAX_DEPTH} levels"),
        ("a: " * 3, "line 1, column 5: not valid YAML"),
        ("k" * (MAX_KEY + 1) + ": 1\n", "line 1, column 1: a key longer than"),
        ("[" + "1," * MAX_VALUES + "]", f"line 1, column .*: more than {MAX_VALUES} values"),
        (" " * (MAX_BYTES + 1), f"longer than {MAX_BYTES} bytes"),
        (b" " * (MAX_BYTES + 1), f"longer than {MAX_BYTES} bytes"),
    ],
)  # fmt: skip
def test_refused(text: str | bytes, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^file.yaml: {expected}"):
        read_document(text, "file.yaml")


def test_a_copy_is_of_its_own_and_has_the_lines_of_its_text() -> None:
    document = read_document("a: &x\n  b: 1\n  c: [2]\nd:\n- *x\n", "f")
    first, second = document.value["a"], document.value["d"][0]
    assert first == second
    assert first is not second
    assert first["c"] is not second["c"]
    lines = {path: line for path, line in document.lines.items() if path.startswith("$.d[0]")}
    assert lines == {"$.d[0]": 5, "$.d[0].b": 2, "$.d[0].c": 3, "$.d[0].c[0]": 3}


def test_growing_by_aliases_ends_at_the_bound() -> None:
    names = [f"n{number}" for number in range(25)]
    bomb = f"{names[0]}: &{names[0]} [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip(names, names[1:], strict=False)
    )
    with pytest.raises(ConfigError, match=f"line 1[0-9], column .*: more than {MAX_VALUES} values"):
        read_document(bomb, "f")


def test_deep_nesting_costs_nothing() -> None:
    for opening in ("[", "{a: ", "- "):
        with pytest.raises(ConfigError, match="nest"):
            read_document(opening * 200_000, "f")


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20)
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1, max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(TREES)
def test_what_is_written_is_read(tree: Any) -> None:
    """Against PyYAML's own writer, which quotes whatever it would read as something else."""
    text = yaml.safe_dump(tree, allow_unicode=False)
    assert read_document(text, "f").value == tree
