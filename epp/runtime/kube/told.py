"""What goes wrong with the API server: told once for each reason, and once that it is over."""

from collections.abc import Callable, Hashable
from typing import Final

MOST_REASONS: Final = 10
"""Told about one thing until it works again: where they never repeat, more of them help nobody."""


class Told:
    """`said` hears each reason once until what it is about works again."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self._said = said
        self._reasons: dict[Hashable, set[Hashable]] = {}

    def trouble(self, about: Hashable, reason: Hashable, text: str) -> None:
        """`reason` tells equal troubles whose texts differ."""
        reasons = self._reasons.setdefault(about, set())
        if reason not in reasons and len(reasons) < MOST_REASONS:
            reasons.add(reason)
            self._said(text)

    def over(self, about: Hashable, text: str) -> None:
        """It works. Says so if there was trouble."""
        if self._reasons.pop(about, None):
            self._said(text)
