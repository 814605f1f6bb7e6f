"""Model rewrite rules: which rule counts, and which target it gives."""

from collections import Counter
from random import Random

import pytest

from epp.payload.rewrite import ModelRewrite, Rewrite, RewriteRule, RewriteRules, RewriteTarget


class Untouched(Random):
    """Not to be drawn from."""

    def random(self) -> float:
        raise AssertionError("there was nothing to choose")


class Drawn(Random):
    """Draws one number for ever."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


def rule(models: str, *targets: str | tuple[str, int]) -> RewriteRule:
    """`models`: separated by spaces, empty for any."""
    pairs = [(each, None) if isinstance(each, str) else each for each in targets]
    return RewriteRule(tuple(models.split()), tuple(RewriteTarget(model, weight) for model, weight in pairs))


def group(name: str, *rules: RewriteRule) -> ModelRewrite:
    return ModelRewrite(name, rules)


def decided(model: str, *rewrites: ModelRewrite) -> tuple[str, str] | None:
    rewrite = RewriteRules(rewrites).target(model, Untouched())
    return None if rewrite is None else (rewrite.target, rewrite.rule_name)


# -- which rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rewrites", "expected"),
    [
        ("a", [], None),
        ("a", [group("r")], None),
        ("a", [group("r", rule("a", "b"))], ("b", "r")),
        # The value matches as a whole and by case.
        ("A", [group("r", rule("a", "b"))], None),
        ("aa", [group("r", rule("a", "b"))], None),
        ("", [group("r", rule("a", "b"))], None),
        # Any of several matches.
        ("c", [group("r", rule("a c", "b"))], ("b", "r")),
        # A rule without matches is for every model, and for none.
        ("x", [group("r", rule("", "b"))], ("b", "r")),
        ("", [group("r", rule("", "b"))], ("b", "r")),
        # Exact beats generic, wherever it stands.
        ("a", [group("old", rule("", "g")), group("new", rule("a", "e"))], ("e", "new")),
        ("z", [group("old", rule("", "g")), group("new", rule("a", "e"))], ("g", "old")),
        ("a", [group("r", rule("", "g"), rule("a", "e"))], ("e", "r")),
        # The oldest of equals, and in one group the first.
        ("a", [group("old", rule("a", "1")), group("new", rule("a", "2"))], ("1", "old")),
        ("z", [group("old", rule("", "1")), group("new", rule("", "2"))], ("1", "old")),
        ("a", [group("r", rule("a", "1"), rule("a b", "2"))], ("1", "r")),
        ("b", [group("r", rule("a", "1"), rule("a b", "2"))], ("2", "r")),
        # One step: a target is not looked up again.
        ("a", [group("r", rule("a", "b"), rule("b", "c"))], ("b", "r")),
        # A target that is the model itself is a decision too.
        ("a", [group("r", rule("a", "a"), rule("", "g"))], ("a", "r")),
    ],
)
def test_precedence(model: str, rewrites: list[ModelRewrite], expected: tuple[str, str] | None) -> None:
    assert decided(model, *rewrites) == expected


def test_no_rules_are_nothing() -> None:
    assert not RewriteRules()
    assert not RewriteRules([group("r")])
    assert RewriteRules([group("r", rule("a", "b"))])
    assert RewriteRules([group("r", rule("", "b"))])


def test_every_model_that_the_rules_tell_is_known_by_name() -> None:
    rules = RewriteRules(
        [group("one", rule("a b", "c", "d")), group("two", rule("", ("e", 1), "f"), rule("a", "g"))]
    )
    assert rules.names == {"a", "b", "c", "d", "e", "f", "g"}


# -- which target -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "number", "expected"),
    [
        ([("x", 1)], None, "x"),
        (["x"], None, "x"),
        # Equal shares without weights.
        (["x", "y"], 0.0, "x"),
        (["x", "y"], 0.4999, "x"),
        (["x", "y"], 0.5, "y"),
        (["x", "y", "z"], 0.9999, "z"),
        # 1 : 3
        ([("x", 1), ("y", 3)], 0.2499, "x"),
        ([("x", 1), ("y", 3)], 0.25, "y"),
        ([("x", 1), ("y", 3)], 1 - 2**-53, "y"),
        ([("x", 1_000_000), ("y", 1_000_000), ("z", 1)], 1 - 2**-53, "z"),
        # Where some have a weight, those without are never chosen.
        (["x", ("y", 5)], None, "y"),
        ([("x", 1), "y", ("z", 1)], 0.4999, "x"),
        ([("x", 1), "y", ("z", 1)], 0.5, "z"),
    ],
)
def test_target(targets: list[str | tuple[str, int]], number: float | None, expected: str) -> None:
    rules = RewriteRules([group("r", rule("a", *targets))])
    draw = Untouched() if number is None else Drawn(number)
    assert rules.target("a", draw) == Rewrite(expected, "r")


@pytest.mark.parametrize(
    ("targets", "shares"),
    [
        ([("x", 1)], {"x": 1.0}),
        ([("x", 50), ("y", 50)], {"x": 0.5, "y": 0.5}),
        ([("x", 10), ("y", 30), ("z", 60)], {"x": 0.1, "y": 0.3, "z": 0.6}),
        (["x", "y", "z"], {"x": 1 / 3, "y": 1 / 3, "z": 1 / 3}),
        (["x", ("y", 1), ("z", 3)], {"y": 0.25, "z": 0.75}),
        # Twice the same target has both shares.
        ([("x", 1), ("y", 1), ("x", 2)], {"x": 0.75, "y": 0.25}),
    ],
)
def test_shares(targets: list[str | tuple[str, int]], shares: dict[str, float]) -> None:
    rules, draw, times = RewriteRules([group("r", rule("", *targets))]), Random(7), 20_000
    counts = Counter(rewrite.target for _ in range(times) if (rewrite := rules.target("a", draw)) is not None)
    assert counts.total() == times
    assert set(counts) == set(shares)
    for target, share in shares.items():
        # Five standard deviations.
        spread = 5 * (share * (1 - share) / times) ** 0.5
        assert abs(counts[target] / times - share) <= spread


def test_the_same_seed_decides_the_same() -> None:
    rules = RewriteRules([group("r", rule("", "x", "y", "z"))])
    runs = [[rules.target("a", draw) for _ in range(50)] for draw in (Random(3), Random(3), Random(4))]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
