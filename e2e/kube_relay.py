"""What lies between a picker and the API server, and may fail for that picker alone."""

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from e2e.kube import PICKER_RULES, Namespace
from e2e.kube_access import Access
from e2e.kube_client import Thing
from e2e.listeners import shut
from epp.lab.stack import HOST, free_ports


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    silent: bool = False

    def reset(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


@dataclass
class Relay:
    """`async with Relay(port) as relay:` passes on what comes to `relay.port`.

    Attributes:
        connections: accepted so far.
    """

    to_port: int
    port: int = field(default_factory=lambda: free_ports(1)[0])
    connections: int = 0
    _open: set[_Connection] = field(default_factory=set)
    _work: set[asyncio.Task[None]] = field(default_factory=set)
    _resets: int = 0
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.heal()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()
        await asyncio.gather(*self._work, return_exceptions=True)

    async def heal(self) -> None:
        """After `cut`: connections are accepted again."""
        assert self._server is None
        self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def cut(self) -> None:
        """From now on connections are refused, and there are none."""
        server, self._server = self._server, None
        if server is not None:
            await shut(server)
        self.reset()

    def reset(self) -> None:
        """Ends all connections, those too that are only being made; new ones are accepted."""
        self._resets += 1
        for connection in tuple(self._open):
            connection.reset()

    def silence(self) -> None:
        """All connections stay, and nothing passes them any more, as where a NAT has forgotten them."""
        for connection in self._open:
            connection.silent = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        # The loop accepted it before a cut, and tells of it after.
        if self._server is None:
            writer.transport.abort()
            return
        self.connections += 1
        resets = self._resets
        try:
            from_server, to_server = await asyncio.open_connection(HOST, self.to_port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, to_server)
        if self._resets != resets:
            connection.reset()
            return
        self._open.add(connection)
        try:
            await asyncio.gather(
                _pass_on(reader, to_server, connection), _pass_on(from_server, writer, connection)
            )
        finally:
            connection.reset()
            self._open.discard(connection)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
) -> None:
    """Until either side ends, which ends both."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            if not connection.silent:
                writer.write(data)
                await writer.drain()
    if not connection.silent:
        connection.reset()


@dataclass(frozen=True)
class Relayed(Namespace):
    """A namespace whose service accounts, those in `relays`, reach the API server by a relay of their own."""

    relays: Mapping[str, Relay] = field(default_factory=dict)

    async def access(
        self, rules: Sequence[Thing] = PICKER_RULES, cluster_rules: Sequence[Thing] = (), name: str = "picker"
    ) -> Access:
        access = await super().access(rules, cluster_rules, name)
        if name in self.relays:
            access.plane = copy.copy(self.plane)
            access.plane.port = self.relays[name].port
            access.plane.url = f"https://{HOST}:{access.plane.port}"
        return access


@asynccontextmanager
async def relayed(namespace: Namespace, *names: str) -> AsyncIterator[tuple[Relayed, list[Relay]]]:
    """The same namespace, with a relay for each of these service accounts."""
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(Relay(namespace.plane.port)) for _ in names]
        named = dict(zip(names, relays, strict=True))
        yield Relayed(namespace.plane, namespace.client, namespace.name, namespace.folder, named), relays
