"""What is right and wrong with the model rewrites of a pool, each by itself and all together."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from epp.config.decode import quoted
from epp.payload.rewrite import ModelRewrite, RewriteRule, RewriteTarget
from epp.runtime.kube.objects import InferenceModelRewrite, ModelRewriteRule

NO_RULES: Final = "NoRules"
INVALID: Final = "Invalid"
WEIGHTS_MISSING: Final = "WeightsMissing"
LOOP: Final = "RewriteLoop"
NO_EFFECT: Final = "NoEffect"
REASONS: Final = (NO_RULES, INVALID, WEIGHTS_MISSING, LOOP, NO_EFFECT)
"""Of findings, the gravest first. The first two cost rules."""

_WEIGHTS: Final = range(1, 1_000_001)
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong in a rewrite: one of `REASONS`, and what is wrong where and what would be right."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Review:
    """A rewrite after the look at it.

    Attributes:
        rewrite: the rules that can be used, those without effect included.
        findings: the gravest first.
        shadowed: for each match that a rule before it takes away, which takes which.
        counts: whether any request can meet one of its rules.
    """

    judged: InferenceModelRewrite
    rewrite: ModelRewrite
    findings: tuple[Finding, ...]
    shadowed: tuple[str, ...]
    counts: bool


def review_rewrites(rewrites: Iterable[InferenceModelRewrite]) -> list[Review]:
    """Look at the rewrites of one pool, given the oldest first, which is their order of precedence."""
    drafts = [_draft(rewrite) for rewrite in rewrites]
    _find_shadowed(drafts)
    winners = {model: rule for draft in drafts for rule in draft.rules for model in rule.wins}
    exact = {model: rule for model, rule in winners.items() if model is not None}
    for circle in _circles(exact):
        _tell_loop(circle, exact)
    if None not in winners:
        _tell_without_effect(exact)
    return [draft.review() for draft in drafts]


# -- one by itself --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rule:
    """A rule that can be used. `wins`: the models it is the first for; None stands for all others."""

    draft: "_Draft"
    index: int
    rule: RewriteRule
    wins: list[str | None] = field(default_factory=list)

    def called(self, by: "_Draft") -> str:
        other = "" if by is self.draft else f" of {self.draft.name}"
        return f"rules[{self.index}]{other}"


@dataclass(slots=True)
class _Draft:
    """A review in the making."""

    judged: InferenceModelRewrite
    rules: list[_Rule] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    shadowed: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.judged.metadata.name

    def review(self) -> Review:
        return Review(
            self.judged,
            ModelRewrite(self.name, tuple(rule.rule for rule in self.rules)),
            tuple(sorted(self.findings, key=lambda finding: REASONS.index(finding.reason))),
            tuple(self.shadowed),
            any(rule.wins for rule in self.rules),
        )


def _draft(rewrite: InferenceModelRewrite) -> _Draft:
    draft = _Draft(rewrite)
    rules = rewrite.spec.rules or ()
    if not rules:
        draft.findings.append(Finding(NO_RULES, "spec.rules is empty; give at least one rule with targets"))
    for index, rule in enumerate(rules):
        problems = [*_match_problems(rule), *_target_problems(rule)]
        if problems:
            text = f"rules[{index}] is left out: {'; '.join(problems[:_NAMED])}"
            draft.findings.append(Finding(INVALID, text))
            continue
        _warn_unweighted(draft, index, rule)
        draft.rules.append(_Rule(draft, index, _usable(rule)))
    return draft


def _match_problems(rule: ModelRewriteRule) -> Iterator[str]:
    for index, match in enumerate(rule.matches or ()):
        if match.model is None or not match.model.value:
            yield f"matches[{index}].model.value is missing; a rule for every model has no matches at all"
        elif match.model.type not in {None, "", "Exact"}:
            yield f"matches[{index}].model.type is {quoted(match.model.type)}; known is Exact"


def _target_problems(rule: ModelRewriteRule) -> Iterator[str]:
    if not rule.targets:
        yield "it has no targets; give at least one with a modelRewrite"
    for index, target in enumerate(rule.targets or ()):
        if not target.model_rewrite:
            yield f"targets[{index}].modelRewrite is missing; give the name of a model"
        if target.weight is not None and target.weight not in _WEIGHTS:
            yield f"targets[{index}].weight is {target.weight}; it must be from 1 to 1000000"


def _usable(rule: ModelRewriteRule) -> RewriteRule:
    return RewriteRule(
        tuple(match.model.value for match in rule.matches or () if match.model is not None),
        tuple(RewriteTarget(target.model_rewrite, target.weight) for target in rule.targets or ()),
    )


def _warn_unweighted(draft: _Draft, index: int, rule: ModelRewriteRule) -> None:
    targets = rule.targets or ()
    never = [target.model_rewrite for target in targets if target.weight is None]
    if never and len(never) < len(targets):
        text = (
            f"rules[{index}] never chooses {_some(never)}: without a weight, while other targets have one; "
            "give every target a weight, or none"
        )
        draft.findings.append(Finding(WEIGHTS_MISSING, text))


# -- all together ---------------------------------------------------------------------------------


def _find_shadowed(drafts: Iterable[_Draft]) -> None:
    taken: dict[str | None, _Rule] = {}
    for draft in drafts:
        for rule in draft.rules:
            for model in dict.fromkeys(rule.rule.models or (None,)):
                first = taken.setdefault(model, rule)
                if first is rule:
                    rule.wins.append(model)
                else:
                    draft.shadowed.append(_shadow(model, rule, first))


def _shadow(model: str | None, rule: _Rule, first: _Rule) -> str:
    whom = "every model" if model is None else f"model {quoted(model)}"
    why = "comes first" if first.draft is rule.draft else "is of the older object"
    return f"rules[{rule.index}] has no effect for {whom}: {first.called(rule.draft)} {why}"


def _circles(rules: Mapping[str, _Rule]) -> list[list[str]]:
    """Models that are rewritten to each other round and round, two or more in each circle.

    Kosaraju's strongly connected components, without recursion.
    """
    nexts = {
        model: [target.model_rewrite for target in rule.rule.targets if target.model_rewrite in rules]
        for model, rule in rules.items()
    }
    backs: dict[str, list[str]] = {model: [] for model in nexts}
    for model, after in nexts.items():
        for other in after:
            backs[other].append(model)
    seen: set[str] = set()
    finished = [found for model in nexts for found in _reached(model, nexts, seen)]
    seen = set()
    circles = [sorted(_reached(model, backs, seen)) for model in reversed(finished)]
    return [circle for circle in circles if len(circle) > 1]


def _reached(start: str, nexts: Mapping[str, list[str]], seen: set[str]) -> list[str]:
    """What is reached from `start` and not yet seen, each after all that is reached from it."""
    if start in seen:
        return []
    seen.add(start)
    done = []
    path = [(start, iter(nexts[start]))]
    while path:
        model, after = path[-1]
        step = next((other for other in after if other not in seen), None)
        if step is None:
            done.append(model)
            path.pop()
        else:
            seen.add(step)
            path.append((step, iter(nexts[step])))
    return done


def _tell_loop(circle: list[str], rules: Mapping[str, _Rule]) -> None:
    """Every rewrite that takes part hears of the loop."""
    taking_part = {id(rules[model]): rules[model] for model in circle}.values()
    for draft in {id(rule.draft): rule.draft for rule in taking_part}.values():
        places = [rule.called(draft) for rule in taking_part][:_NAMED]
        text = (
            f"{' and '.join(places)} rewrite the models {_some(circle)} to each other; a request is "
            "rewritten once, so each is served as another; remove a rule unless that is meant"
        )
        draft.findings.append(Finding(LOOP, text))


def _tell_without_effect(rules: Mapping[str, _Rule]) -> None:
    """To itself is only worth a rule where another rule is for every model."""
    for model, rule in rules.items():
        if all(target.model_rewrite == model for target in rule.rule.targets):
            text = f"rules[{rule.index}] rewrites model {quoted(model)} to itself, which has no effect"
            rule.draft.findings.append(Finding(NO_EFFECT, text))


def _some(models: list[str]) -> str:
    more = f" and {len(models) - _NAMED} more" if len(models) > _NAMED else ""
    return ", ".join(quoted(model) for model in models[:_NAMED]) + more
