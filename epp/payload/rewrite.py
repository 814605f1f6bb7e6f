"""Model rewrite rules: which model the engines are asked for in place of the client's."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import msgspec


class RewriteTarget(msgspec.Struct, frozen=True):
    """A model to ask for. `weight`: its share among the targets; None = not weighted."""

    model_rewrite: str
    weight: int | None = None


class RewriteRule(msgspec.Struct, frozen=True):
    """Requests for one of `models` (none: for any model, or none) ask for one of `targets` instead."""

    models: tuple[str, ...]
    targets: tuple[RewriteTarget, ...]


class ModelRewrite(msgspec.Struct, frozen=True):
    """A named group of rules."""

    name: str
    rules: tuple[RewriteRule, ...]


class Rewrite(msgspec.Struct, frozen=True):
    """A decision: the model to ask for, and the name of the `ModelRewrite` that said so."""

    target: str
    rule_name: str


@dataclass(frozen=True, slots=True)
class _Choice:
    """A rule ready for the draw: `bounds` are the running sums of the weights, empty where all are even."""

    rewrites: tuple[Rewrite, ...]
    bounds: tuple[int, ...]


class RewriteRules:
    """All rules, in the order of precedence.

    A rule for the very model beats one for any model. Among several the earlier counts: of the `ModelRewrite`
    given first (the oldest), and in it the first rule. The target is drawn by weight; where no target has a
    weight, evenly; where some have one, the others are never drawn.
    """

    def __init__(self, rewrites: Iterable[ModelRewrite] = ()) -> None:
        """`rewrites`: oldest first. Every rule has a target."""
        self._exact: dict[str, _Choice] = {}
        self._any: _Choice | None = None
        named: set[str] = set()
        for rewrite in rewrites:
            for rule in rewrite.rules:
                choice = _choice(rewrite.name, rule.targets)
                named.update(rule.models, (target.model_rewrite for target in rule.targets))
                for model in rule.models:
                    self._exact.setdefault(model, choice)
                if not rule.models and self._any is None:
                    self._any = choice
        self.names = frozenset(named)
        """Every model that a rule tells: an operator's names, bounded in number."""

    def __bool__(self) -> bool:
        """Whether there is any rule."""
        return bool(self._exact) or self._any is not None

    def target(self, model: str, draw: Random) -> Rewrite | None:
        """What to ask for in place of `model` (empty: the client named none); None = no rule is about it.

        The decision counts even where its target is `model` itself. `draw` is used only where there is a
        choice.
        """
        choice = self._exact.get(model, self._any)
        if choice is None:
            return None
        rewrites = choice.rewrites
        if len(rewrites) == 1:
            return rewrites[0]
        if not choice.bounds:
            return rewrites[int(draw.random() * len(rewrites))]
        return rewrites[bisect_right(choice.bounds, draw.random() * choice.bounds[-1])]


def _choice(name: str, targets: tuple[RewriteTarget, ...]) -> _Choice:
    weighted = [(target, target.weight) for target in targets if target.weight is not None]
    drawn = [target for target, _ in weighted] or targets
    bounds = tuple(accumulate(weight for _, weight in weighted))
    return _Choice(tuple(Rewrite(target.model_rewrite, name) for target in drawn), bounds)
