"""An API server that goes amid TLS handshakes: each call fails for itself, and nothing else comes to harm."""

import asyncio
import gc
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvloop

from epp.runtime.kube.access import Access, Loaded
from epp.runtime.kube.api import KubeApi, KubeError
from epp.runtime.lent_sockets import lent_socket

CALLS = 1500
LANES = 5


def test_a_lent_socket_that_nobody_refers_to_is_not_closed() -> None:
    address = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))
    sock = lent_socket(address)
    number, node = sock.fileno(), os.fstat(sock.fileno()).st_ino
    del sock
    gc.collect()
    assert os.fstat(number).st_ino == node
    os.close(number)
    closed = lent_socket(address)
    number = closed.fileno()
    closed.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_handshakes_that_are_reset_harm_nothing_else(loop: str) -> None:
    """In a process of its own: a descriptor that is closed twice ends it."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), loop], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{CALLS} refused\n"


class Resetting:
    """Listens and goes, again and again: who was connected meanwhile is reset."""

    def __init__(self) -> None:
        # Nobody else gets the port.
        self._taken = self._bound(0)
        self.port: int = self._taken.getsockname()[1]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Resetting":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._taken.close()

    def _bound(self, port: int) -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        return made

    def _run(self) -> None:
        while not self._end.is_set():
            with self._bound(self.port) as listens:
                listens.listen(64)
                self._end.wait(0.003)


async def ask(port: int) -> int:
    """How many calls were refused."""
    from kubernetes.aio.client.configuration import Configuration

    configuration = Configuration()
    configuration.host, configuration.verify_ssl = f"https://127.0.0.1:{port}", False

    async def load() -> Loaded:
        return Loaded("test", configuration)

    api = KubeApi(Access(await load(), load, {}))
    assert isinstance(api._access.tls(), ssl.SSLContext)
    refused = 0

    async def lane() -> None:
        nonlocal refused
        for _ in range(CALLS // LANES):
            try:
                await api.get("/api")
            except KubeError:
                refused += 1

    await asyncio.gather(*(lane() for _ in range(LANES)))
    await api.close()
    return refused


if __name__ == "__main__":
    with Resetting() as server:
        print((uvloop if sys.argv[1] == "uvloop" else asyncio).run(ask(server.port)), "refused")
