"""Model rewrites of a file."""

from collections.abc import Iterable

from epp.config.decode import quoted
from epp.config.reading import Reading
from epp.config.schema import ModelRewriteEntry, RewriteRuleEntry
from epp.payload.rewrite import ModelRewrite, RewriteRule, RewriteTarget


def model_rewrites(reading: Reading, entries: Iterable[ModelRewriteEntry]) -> tuple[ModelRewrite, ...]:
    """The rewrites in the order of the file, which is that of precedence. Warns of what cannot count."""
    rewrites: dict[str, ModelRewrite] = {}
    taken: dict[str | None, str] = {}
    for index, entry in enumerate(entries):
        path = f"$.modelRewrites[{index}]"
        if entry.name in rewrites:
            reading.problems.add(f"{path}.name", f"a second model rewrite named {quoted(entry.name)}")
        for number, rule in enumerate(entry.rules):
            _check_targets(reading, rule, f"{path}.rules[{number}].targets")
            _warn_shadowed(reading, rule, f"{path}.rules[{number}]", taken)
        rewrites[entry.name] = ModelRewrite(entry.name, tuple(map(_rule, entry.rules)))
    return tuple(rewrites.values())


def _rule(entry: RewriteRuleEntry) -> RewriteRule:
    return RewriteRule(
        tuple(match.model.value for match in entry.matches),
        tuple(RewriteTarget(target.model_rewrite, target.weight) for target in entry.targets),
    )


def _warn_shadowed(reading: Reading, rule: RewriteRuleEntry, path: str, taken: dict[str | None, str]) -> None:
    """`taken`: path of the first rule for each model, and under None for all others."""
    places: list[tuple[str | None, str]] = [(None, path)]
    if rule.matches:
        places = [(match.model.value, f"{path}.matches[{index}]") for index, match in enumerate(rule.matches)]
    for model, place in places:
        first = taken.setdefault(model, path)
        if first != path:
            whom = "every model" if model is None else f"model {quoted(model)}"
            reading.warnings.append(f"{place} has no effect: {first} is for {whom} and comes first")


def _check_targets(reading: Reading, rule: RewriteRuleEntry, path: str) -> None:
    if not rule.targets:
        reading.problems.add(path, "expected at least one target")
    unweighted = [index for index, target in enumerate(rule.targets) if target.weight is None]
    if len(unweighted) < len(rule.targets):
        for index in unweighted:
            reading.warnings.append(
                f"{path}[{index}] is never chosen: it has no weight, and other targets have one"
            )
