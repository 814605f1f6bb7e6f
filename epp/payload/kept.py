"""What is kept of an answer while it passes, counted where all bytes of the process are."""

from typing import Protocol


class Account(Protocol):
    """Where bytes that are kept are counted."""

    def charge(self, n: int) -> object: ...

    def give(self, n: int) -> None: ...


class Kept(bytearray):
    """Bytes of one answer, and how many of them the account knows of."""

    __slots__ = ("account", "charged")

    def __init__(self, account: Account | None) -> None:
        super().__init__()
        self.account = account
        self.charged = 0

    def settle(self) -> None:
        """Bring the account to what is kept."""
        size = len(self)
        if self.account is not None:
            if size > self.charged:
                self.account.charge(size - self.charged)
            else:
                self.account.give(self.charged - size)
        self.charged = size

    def release(self) -> None:
        """Keep nothing any more."""
        self.clear()
        self.settle()
