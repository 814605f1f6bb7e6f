"""Rights that were given, held against what was asked for by the API server's audit log."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from e2e.kube_client import Thing
from tools.control_plane import Asked


class Right(NamedTuple):
    """One verb on one resource (`pods`, `inferencepools/status`) or, where the group is None, on one path."""

    group: str | None
    resource: str
    verb: str


class Judgement(NamedTuple):
    """`unused`: given and never asked for. `refused`: asked for and not given."""

    unused: set[Right]
    refused: set[Right]


def judged(rules: Sequence[Thing], asked: Iterable[Asked]) -> Judgement:
    """Rules of one user's roles, against that user's requests.

    A rule counts as used for each of its verbs, groups and resources alone. Names of resources, and which
    namespace a rule is for, are not looked at: who asks beyond them is refused, and that is seen.
    """
    given = {right for rule in rules for right in _rights(rule)}
    requests = [each for each in asked if not _open_to_all(each)]
    used = {_right(each) for each in requests if each.status < 400 or each.status in (404, 409)}
    refused = {_right(each) for each in requests if each.status == 403}
    return Judgement(given - used, refused | (used - given))


def _open_to_all(asked: Asked) -> bool:
    """What the API server itself lets every user read: what it serves, and how it is."""
    parts = asked.request_uri.partition("?")[0].split("/")
    return not asked.object_ref.resource and parts[1] in {"api", "apis", "openapi", "version", "readyz"}


def _rights(rule: Thing) -> Iterable[Right]:
    for verb in rule["verbs"]:
        for path in rule.get("nonResourceURLs", ()):
            yield Right(None, path, verb)
        for group in rule.get("apiGroups", ()):
            for resource in rule.get("resources", ()):
                yield Right(group, resource, verb)


def _right(asked: Asked) -> Right:
    what = asked.object_ref
    if not what.resource:
        return Right(None, asked.request_uri.partition("?")[0], asked.verb)
    resource = f"{what.resource}/{what.subresource}" if what.subresource else what.resource
    return Right(what.api_group, resource, asked.verb)
