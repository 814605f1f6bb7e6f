"""Choices out of bytes, so that a fuzzer that changes bytes changes choices."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Reads `data` from its beginning. After its end every choice is the first, and there are no bytes."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """The next `size` bytes, or what is left."""
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1, of one byte, or of two or four where one is too few."""
        size = 1 if count <= 1 << 8 else 2 if count <= 1 << 16 else 4
        return int.from_bytes(self.take(size), "big") % count

    def flag(self) -> bool:
        return self.below(2) == 1

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def block(self) -> bytes:
        """Bytes whose number comes first."""
        return self.take(self.below(256))
