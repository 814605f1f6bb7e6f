"""Sockets of clients that a loop's transport alone closes."""

import socket
from typing import Any


class LentSocket(socket.socket):
    """Nothing is closed where nobody refers to it any more.

    Where a handshake fails, uvloop closes the descriptor of a socket that it was given, and the socket does
    not know. Collected after that, a plain one closes whatever has the number by then: another connection,
    or the loop's own pipe, which ends the process.
    """

    def __del__(self) -> None:
        self.detach()


def lent_socket(address: tuple[Any, ...]) -> socket.socket:
    """What a `TCPConnector` takes as its `socket_factory`; `address` is one of `getaddrinfo`."""
    family, kind, protocol = address[:3]
    return LentSocket(family, kind, protocol)
