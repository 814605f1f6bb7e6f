"""Sockets around `epp.http2`: a server of gRPC methods, on the event loop that starts it."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from epp.http2.connection import Connection
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.limits import Http2Limits
from epp.http2.ports import Account, Methods
from epp.http2.rates import Quota

log = logging.getLogger(__name__)

TICK_S: Final = 0.5
LINGER_S: Final = 2.0
BACKLOG: Final = 1024
WRITE_BUFFER_BYTES: Final = 1 << 20
LONG_READ_BYTES: Final = 128 << 10
READ_AT_ONCE_BYTES: Final = 1 << 20
CONNECTIONS: Final = 4096
STREAMS_IN_PROCESS: Final = 50_000


class Http2Server:
    """One listening port.

    Connections beyond `connections`, and streams beyond `streams` in all of them, are refused.
    """

    def __init__(
        self,
        methods: Methods,
        limits: Http2Limits,
        account: Account,
        *,
        tls: ssl.SSLContext | None = None,
        connections: int = CONNECTIONS,
        streams: int = STREAMS_IN_PROCESS,
        told: Callable[[ConnectionFault | StreamFault], None] = lambda fault: None,
    ) -> None:
        """`account`: where bytes held for peers are charged. `tls`: offers `h2`; None is plain HTTP/2."""
        self.methods = methods
        self.limits = limits
        self.account = account
        self.slots = Quota(streams)
        self.told = told
        self.draining = False
        self._tls = tls
        self._most = connections
        self._open: set[_Protocol] = set()
        self._all_gone = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self, address: str) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        listening = _listen(address)
        handshake_s = self.limits.handshake_s if self._tls is not None else None
        try:
            self._server = await loop.create_server(
                lambda: _Protocol(self),
                sock=listening,
                backlog=BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
            )
        except BaseException:
            listening.close()
            raise
        self._ticking = loop.call_later(TICK_S, self._tick)
        return cast(int, listening.getsockname()[1])

    async def drain(self) -> None:
        """Take no new streams; return when those in flight have ended."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for protocol in list(self._open):
            protocol.drain()
        if self._open:
            await self._all_gone.wait()

    async def stop(self) -> None:
        """Cut what is in flight."""
        self.draining = True
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for protocol in list(self._open):
            protocol.abort()
        if self._open:
            await self._all_gone.wait()

    def joined(self, protocol: "_Protocol") -> bool:
        """Whether there is room for one more connection."""
        if len(self._open) >= self._most:
            return False
        self._open.add(protocol)
        self._all_gone.clear()
        return True

    def left(self, protocol: "_Protocol") -> None:
        self._open.discard(protocol)
        if not self._open:
            self._all_gone.set()

    def _tick(self) -> None:
        now = time.monotonic()
        for protocol in list(self._open):
            protocol.tick(now)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)


class _Protocol(asyncio.Protocol):
    """One connection: everything that came in one read is answered in one write.

    After long reads of `READ_AT_ONCE_BYTES`, and after a full write, the others have their turn.
    """

    __slots__ = ("_closing", "_flush_due", "_loop", "_read_at_once", "_server", "_transport", "connection")

    _transport: asyncio.Transport
    connection: Connection

    def __init__(self, server: Http2Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._flush_due = False
        self._read_at_once = 0

    # -- asyncio -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        self.connection = Connection(
            server.methods,
            server.limits,
            server.account,
            server.slots,
            time.monotonic(),
            server.told,
            self.flush_soon,
        )
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            log.debug("a TLS client does not offer HTTP/2 (ALPN h2)")
            self.abort()
        elif not server.joined(self):
            log.warning("too many connections; a new one is refused")
            self.abort()
        else:
            self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            self._flush()
            if server.draining:
                self.drain()

    def data_received(self, data: bytes) -> None:
        connection = self.connection
        connection.receive(data, time.monotonic())
        reply = connection.take()
        if reply:
            self._transport.write(reply)
        if connection.over or self._server.draining:
            self._flush()
        elif connection.out.waiting:
            self.flush_soon()
        if len(data) > LONG_READ_BYTES:
            self._read_long(len(data))

    def pause_writing(self) -> None:
        """What is not read by the peer is not to be added to: nothing more is read from it either."""
        self.connection.pause()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.connection.resume()
        self._read_on()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self.connection.lose()
        self._server.left(self)

    # -- the server ----------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """A call has sent something at a time of its own. Others may, in the same turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def tick(self, now: float) -> None:
        self.connection.tick(now)
        self._flush()

    def drain(self) -> None:
        self.connection.drain()
        self._flush()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def _read_long(self, size: int) -> None:
        """uvloop reads on while there is something to read: megabytes, before it hears anybody else."""
        self._read_at_once += size
        if self._read_at_once >= READ_AT_ONCE_BYTES and not self._transport.is_closing():
            self._read_at_once = 0
            self._transport.pause_reading()
            self._loop.call_later(0, self._read_on)

    def _read_on(self) -> None:
        if self.connection.out.paused_at is None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _flush(self) -> None:
        """Write what the socket takes at a time, in turns until there is no more; then end what is over."""
        self._flush_due = False
        connection = self.connection
        data = connection.take()
        if data and not self._closing:
            self._transport.write(data)
        if data and connection.out.waiting:
            self._flush_due = True
            self._loop.call_later(0, self._flush)
        elif connection.over or (self._server.draining and connection.drained):
            self._close()

    def _close(self) -> None:
        """Let the peer read what was written last; not for ever."""
        if self._closing:
            return
        self._closing = True
        if self.connection.fault is not None:
            log.debug("connection ended", extra={"reason": str(self.connection.fault)})
        self._transport.close()
        self._loop.call_later(LINGER_S, self._transport.abort)


def _listen(address: str) -> socket.socket:
    """A socket for `host:port`, `[ipv6]:port`; `[::]` stands for IPv4 too.

    Raises OSError with the reason.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    everywhere = host in ("", "::")
    if everywhere and not socket.has_dualstack_ipv6():
        host, everywhere = "0.0.0.0", False
    family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
    if not everywhere:
        with suppress(socket.gaierror):
            family, *_, resolved = socket.getaddrinfo(host, int(port), family, socket.SOCK_STREAM)[0]
            host = str(resolved[0])
    return socket.create_server(
        ("" if everywhere else host, int(port)), family=family, backlog=BACKLOG, dualstack_ipv6=everywhere
    )
