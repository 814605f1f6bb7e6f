"""Objectives: which priority a request has."""

from collections.abc import Mapping


class Objectives:
    """Priorities by the name of an objective. Below 0 means that a request may be shed."""

    def __init__(self, priorities: Mapping[str, int]) -> None:
        self._priorities = dict(priorities)

    def priority(self, name: str | None) -> int:
        """Of the objective that a request names; 0 where it names none, or one that is not known."""
        return self._priorities.get(name, 0) if name else 0
