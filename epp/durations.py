"""Spans of time as Go programs write them."""

import re
from typing import ClassVar, Final

_SECONDS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "\u00b5s": 1e-6,  # the micro sign
    "\u03bcs": 1e-6,  # the Greek letter
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_NUMBER: Final = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_PART: Final = re.compile(rf"({_NUMBER})({'|'.join(_SECONDS)})")
_WHOLE: Final = re.compile(rf"([-+]?)(0|(?:(?:{_NUMBER})(?:{'|'.join(_SECONDS)}))+)")
# Go counts nanoseconds in 63 bits.
_LONGEST_S: Final = 2**63 / 1e9


class Duration(float):
    """Seconds, not negative; written in the form of Go's `time.ParseDuration` (`200ms`, `1m30s`, `0`)."""

    __slots__ = ()
    expected: ClassVar[str] = "a duration such as 200ms, 5s or 1m30s"

    @classmethod
    def parse(cls, value: object) -> "Duration":
        """A duration from its text; the number 0 is one too.

        Raises:
            ValueError: it is none, negative, or longer than Go can count; says what would be right.
        """
        if value == 0 and not isinstance(value, bool):
            return cls(0.0)
        found = _WHOLE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"{value!r} is not a duration; {_RIGHT}")
        sign, parts = found.groups()
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(parts))
        if sign == "-" and seconds > 0:
            raise ValueError(f"{value!r} is negative; {_RIGHT}")
        if seconds >= _LONGEST_S:
            raise ValueError(f"{value!r} is longer than 292 years; {_RIGHT}")
        return cls(seconds)

    def __str__(self) -> str:
        return f"{self * 1000:g}ms" if 0 < self < 1 else f"{float(self):g}s"


_RIGHT: Final = "write a number with a unit, such as 200ms, 5s or 1m30s"
