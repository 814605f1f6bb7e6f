"""The HTTP/2 server over real sockets, around a call that sends back what it gets."""

import asyncio
import errno
import http.client
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded, TrailersReceived

from epp import names
from epp.http2.codes import Status
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.limits import Http2Limits
from epp.http2.ports import Ending, Peer
from epp.http2.rates import Quota
from epp.runtime import http2 as http2_module
from epp.runtime.http2 import Http2Server
from epp.runtime.tls import Certificates
from epp.runtime.tls_rules import TlsRules
from tests.data.extproc.over_wire import DEADLINE_S, until
from tests.data.runtime import proxy
from tests.data.runtime.proxy import HEADERS, framed

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

LOOKS = 100
NO_ERROR, REFUSED_STREAM = 0, 7
LAST_STREAM = 2**31 - 1
MIB = 1 << 20
SERVICE = names.EXT_PROC_SERVICE


class Echo:
    """Answers each message with itself, and half-closing with OK."""

    def __init__(self, peer: Peer, serving: "Serving") -> None:
        self._peer = peer
        self._ended = serving.ended
        serving.peers.append(peer)

    def received(self, message: bytes) -> None:
        self._peer.send(message)

    def too_large(self) -> None:
        self._peer.finish(Status.RESOURCE_EXHAUSTED, "too large")

    def no_room(self) -> None:
        self._peer.finish(Status.RESOURCE_EXHAUSTED, "no room")

    def half_closed(self) -> None:
        self._peer.finish(Status.OK)

    def ended(self, ending: Ending) -> None:
        self._ended[ending] += 1


class Serving:
    """A server, its port, and what became of its calls."""

    def __init__(self, **options: Any) -> None:
        self.ended: Counter[Ending] = Counter()
        self.peers: list[Peer] = []
        self.faults: list[ConnectionFault | StreamFault] = []
        self.account = Quota(options.pop("account_bytes", 1 << 30))
        limits = Http2Limits(**options.pop("limits", {}))
        self.server = Http2Server(
            {names.EXT_PROC_METHOD: lambda peer: Echo(peer, self)},
            limits,
            self.account,
            told=self.faults.append,
            **options,
        )
        self.port = 0

    async def nothing_left(self) -> None:
        await until(lambda: not self.server.slots.used, "no stream is open")
        assert self.account.used == 0


@asynccontextmanager
async def serving(address: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[Serving]:
    made = Serving(**options)
    made.port = await made.server.start(address)
    try:
        yield made
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await made.server.stop()
        await made.nothing_left()


async def at_rest(look: Callable[[], Any]) -> None:
    """Wait until many looks, with a turn of the loop between each two, find the same."""
    found: list[Any] = []

    def same() -> bool:
        found.append(look())
        return len(found) > LOOKS and len(set(found[-LOOKS:])) == 1

    await until(same, "all that moves has come to rest")


# -- exchanges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 4, 700, 1 << 20])
async def test_messages_come_however_they_are_cut(piece: int) -> None:
    sent = [b"", b"a", b"b" * 600, b"c" * 2_000]
    data = framed(*sent)
    async with serving() as served, proxy.connected(served.port) as client:
        stream_id = client.open()
        for start in range(0, len(data), piece):
            await client.send(stream_id, data[start : start + piece])
        assert await client.messages(stream_id, len(sent)) == sent
        await client.send(stream_id, b"", end=True)
        heard = await client.ended(stream_id)
        assert (heard.headers[":status"], heard.status, heard.reset) == ("200", "0", None)
        assert served.ended == {Ending.FINISHED: 1}


async def test_a_burst_of_streams_on_a_fresh_connection() -> None:
    """As a proxy opens them that just came up: all at once, before it has read anything."""
    async with serving() as served, proxy.connected(served.port, window=MIB) as client:
        streams = [client.open() for _ in range(1_000)]
        for stream_id in streams:
            await client.send(stream_id, framed(b"%d" % stream_id), end=True)
        for stream_id in streams:
            heard = await client.ended(stream_id)
            assert (heard.messages, heard.status) == ([b"%d" % stream_id], "0")
        assert served.ended == {Ending.FINISHED: 1_000}


async def test_the_h2_library() -> None:
    """Sends DATA with padding, and header blocks of its own making."""
    message = b"x" * 40_000
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        client.initiate_connection()
        client.send_headers(1, HEADERS)
        data = framed(message)
        for start in range(0, len(data), 10_000):
            client.send_data(1, data[start : start + 10_000], pad_length=start % 251)
        client.end_stream(1)
        writer.write(client.data_to_send())
        got, trailers, over = b"", {}, False
        async with asyncio.timeout(DEADLINE_S):
            while not over:
                for event in client.receive_data(await reader.read(65_536)):
                    if isinstance(event, DataReceived):
                        got += event.data
                        client.acknowledge_received_data(event.flow_controlled_length, 1)
                    elif isinstance(event, TrailersReceived):
                        trailers = dict(event.headers)
                    over = over or isinstance(event, StreamEnded)
                writer.write(client.data_to_send())
        writer.close()
        assert (got, trailers["grpc-status"]) == (data, "0")
        assert served.faults == []


async def test_what_calls_say_in_one_turn_of_the_loop_is_written_at_once() -> None:
    async with serving() as served, proxy.connected(served.port) as client:
        streams = [await client.begin(b"") for _ in range(10)]
        await client.messages(streams[-1], 1)
        (protocol,) = served.server._open
        written = protocol._transport = proxy.Written(protocol._transport)
        for peer in served.peers:
            peer.send(b"late")
            peer.flush()
        for stream_id in streams:
            assert await client.messages(stream_id, 2) == [b"", b"late"]
        assert len(written.sizes) == 1


async def test_streams_share_the_connections_window() -> None:
    """Each gets its turn; all is sent as the windows open."""
    message = b"y" * 50_000
    async with serving() as served, proxy.connected(served.port) as client:
        streams = [await client.begin(message) for _ in range(20)]
        for stream_id in streams:
            assert await client.messages(stream_id, 1) == [message]
            client.reset(stream_id)


# -- those who leave --------------------------------------------------------------------------------

HALF = framed(b"z" * 100_000)[:70_000]
FRAME = b"\0\x40\0\0\0\0\0\0\x01" + framed(b"z" * 16_379)


@pytest.mark.parametrize("by_reset", [True, False], ids=["rst", "fin"])
@pytest.mark.parametrize("cut", [3, 9, 10_000])
async def test_a_connection_that_is_gone_gives_back_everything_at_once(cut: int, by_reset: bool) -> None:
    """In the middle of a frame, of a message, with streams waiting for a window and others idle."""
    async with serving() as served, proxy.connected(served.port, window=1_000, grants=False) as client:
        waiting = await client.begin(b"w" * 30_000)
        await client.begin()
        await client.begin(b"")
        await until(lambda: len(client.heard[waiting].data) == 1_000, "its window is full")
        partial = client.open()
        await client.send(partial, HALF)
        await until(lambda: served.account.used > 70_000, "what waits is charged")
        client.writer.write(FRAME[:cut])
        await client.writer.drain()
        if by_reset:
            client.break_off()
        else:
            client.writer.write_eof()
        await until(lambda: served.ended[Ending.LOST] == 4, "all streams hear of it")
        assert (served.account.used, served.server.slots.used) == (0, 0)
        assert served.faults == []


async def test_streams_that_are_reset_give_back_everything() -> None:
    async with serving() as served, proxy.connected(served.port, window=1_000, grants=False) as client:
        streams = [await client.begin(b"w" * 30_000) for _ in range(5)]
        streams += [client.open() for _ in range(5)]
        for stream_id in streams[5:]:
            await client.send(stream_id, HALF)
        await until(lambda: served.account.used > 5 * (29_000 + 69_000), "what waits is charged")
        for stream_id in streams:
            client.reset(stream_id)
        await until(lambda: served.ended[Ending.RESET] == 10, "all are over")
        assert (served.account.used, served.server.slots.used) == (0, 0)


# -- those who do not read --------------------------------------------------------------------------


async def test_windows_that_never_open_hold_up_their_own_streams_only() -> None:
    """What waits for a peer is bounded by what it may send: who does not read gets no window back."""
    limits = {"stream_window_bytes": 100_000, "connection_window_bytes": 10 * MIB}
    async with serving(limits=limits) as served, proxy.connected(served.port, grants=False) as client:
        streams = [client.open() for _ in range(10)]
        sending = [
            asyncio.create_task(client.send(stream_id, framed(*[b"m" * 1_000] * 1_000)))
            for stream_id in streams
        ]
        whole = 10 * 100_000
        await until(
            lambda: served.account.used >= whole - proxy.DEFAULT_WINDOW - 20_000, "all windows are full"
        )
        await at_rest(lambda: served.account.used)
        assert served.account.used <= whole
        assert not any(task.done() for task in sending)
        async with proxy.connected(served.port) as other:
            stream_id = await other.begin(b"unhurt")
            assert await other.messages(stream_id, 1) == [b"unhurt"]
            other.reset(stream_id)
        client.break_off()
        await asyncio.gather(*sending, return_exceptions=True)
        await served.nothing_left()


async def test_a_socket_that_is_not_read_is_not_read_from() -> None:
    """Windows are wide open, but TCP is stuck: both sides wait, memory stays, and all goes on later."""
    streams, messages, message = 8, 60, b"s" * 100_000
    async with (
        serving(limits={"stream_window_bytes": 16 * MIB, "connection_window_bytes": 64 * MIB}) as served,
        proxy.connected(served.port, window=64 * MIB) as client,
    ):
        await until(lambda: client.settled, "settings")
        ids = [client.open() for _ in range(streams)]
        await client.writer.drain()
        client.writer.transport.pause_reading()
        sending = [asyncio.create_task(client.send(each, framed(*[message] * messages))) for each in ids]
        (protocol,) = served.server._open
        out = protocol.connection.out
        await until(lambda: out.paused_at is not None, "the server's socket is full")
        await at_rest(
            lambda: (out.paused_at, served.account.used, protocol._transport.get_write_buffer_size())
        )
        waiting = protocol._transport.get_write_buffer_size()
        assert not protocol._transport.is_reading()
        assert waiting < 3 * MIB
        assert served.account.used < 3 * MIB
        async with proxy.connected(served.port) as other:
            stream_id = await other.begin(b"unhurt")
            assert await other.messages(stream_id, 1) == [b"unhurt"]
            other.reset(stream_id)
        client.writer.transport.resume_reading()
        await asyncio.gather(*sending)
        for each in ids:
            await until(lambda each=each: len(client.heard[each].data) == 60 * 100_005, "all came")
            assert client.heard[each].messages == [message] * messages
            client.reset(each)


async def test_a_stream_that_stalls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.http2.patience.SWEEP_S", 0.1)
    monkeypatch.setattr(http2_module, "TICK_S", 0.05)
    async with (
        serving(limits={"stall_s": 0.3}) as served,
        proxy.connected(served.port, window=100, grants=False) as client,
    ):
        unread = await client.begin(b"u" * 1_000)
        half_sent = client.open()
        await client.send(half_sent, HALF)
        idle = await client.begin(b"quick")
        for stream_id in (unread, half_sent):
            heard = await client.ended(stream_id)
            assert heard.status == "4"
            assert (heard.trailers or heard.headers)["grpc-message"] == "no progress for 0.3 s"
        assert served.ended == {Ending.STALLED: 2}
        assert not client.is_over(idle)


async def test_a_deadline_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_module, "TICK_S", 0.05)
    async with serving() as served, proxy.connected(served.port) as client:
        other = await client.begin(b"no hurry")
        stream_id = await client.begin(b"hurry", grpc_timeout="200m")
        heard = await client.ended(stream_id)
        assert (heard.messages, heard.status, heard.reset) == ([b"hurry"], "4", NO_ERROR)
        assert served.ended == {Ending.DEADLINE: 1}
        assert not client.is_over(other)


# -- the end ----------------------------------------------------------------------------------------


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer that does not answer the PING of a drain is waited for."""
    monkeypatch.setattr("epp.http2.control.DRAIN_PING_S", DEADLINE_S)


@pytest.mark.usefixtures("patience")
async def test_draining() -> None:
    async with serving() as served, proxy.connected(served.port) as client:
        client.acks_pings = False
        stream_id = await client.begin(b"before")
        await client.messages(stream_id, 1)
        draining = asyncio.create_task(served.server.drain())
        await until(lambda: client.pings != [], "it is told")
        assert client.goaways == [(LAST_STREAM, NO_ERROR)]
        # Opened before it has read that: still served.
        crossing = await client.begin(b"crossing")
        assert await client.messages(crossing, 1) == [b"crossing"]
        client.write(proxy.PingFrame(opaque_data=client.pings[0], flags=["ACK"]))
        await until(lambda: len(client.goaways) == 2, "the door is closed")
        assert client.goaways[1] == (crossing, NO_ERROR)
        late = client.open()
        assert (await client.ended(late)).reset == REFUSED_STREAM
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", served.port)
        for each in (stream_id, crossing):
            assert not draining.done()
            await client.send(each, framed(b"last"), end=True)
            heard = await client.ended(each)
            assert (heard.messages[-1], heard.status) == (b"last", "0")
        async with asyncio.timeout(DEADLINE_S):
            await draining
        assert await client.is_closed()
        assert served.ended == {Ending.FINISHED: 2}


async def test_draining_without_a_stream_ends_connections() -> None:
    async with serving() as served, proxy.connected(served.port) as client:
        await until(lambda: client.settled, "it is up")
        async with asyncio.timeout(DEADLINE_S):
            await served.server.drain()
        assert await client.is_closed()
        assert client.goaways[0] == (LAST_STREAM, NO_ERROR)


@pytest.mark.usefixtures("patience")
async def test_draining_serves_what_was_on_its_way() -> None:
    """No stream is open when it begins, and one comes that crossed the GOAWAY."""
    async with serving() as served, proxy.connected(served.port) as client:
        await until(lambda: client.settled, "it is up")
        client.acks_pings = False
        draining = asyncio.create_task(served.server.drain())
        await until(lambda: client.goaways != [] or client.closed, "it is told")
        crossing = await client.begin(b"crossing")
        assert await client.messages(crossing, 1) == [b"crossing"]
        client.write(proxy.PingFrame(opaque_data=client.pings[0], flags=["ACK"]))
        await client.send(crossing, b"", end=True)
        assert (await client.ended(crossing)).status == "0"
        async with asyncio.timeout(DEADLINE_S):
            await draining


async def test_stopping_cuts_everything() -> None:
    async with serving() as served, proxy.connected(served.port) as client:
        streams = [await client.begin(b"x") for _ in range(3)]
        await client.messages(streams[-1], 1)
        draining = asyncio.create_task(served.server.drain())
        await until(lambda: client.goaways != [], "it is told")
        async with asyncio.timeout(DEADLINE_S):
            await served.server.stop()
        async with asyncio.timeout(DEADLINE_S):
            await draining
        assert await client.is_closed()
        assert served.ended == {Ending.LOST: 3}


async def test_stopping_what_has_not_started() -> None:
    server = Http2Server({}, Http2Limits(), Quota(1))
    await server.drain()
    await server.stop()


# -- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("127.0.0.1:0", ["127.0.0.1"]),
        ("localhost:0", ["127.0.0.1"]),
        ("[::1]:0", ["::1"]),
        ("[::]:0", ["127.0.0.1", "::1"]),
        (":0", ["127.0.0.1", "::1"]),
        ("0.0.0.0:0", ["127.0.0.1"]),
    ],
)
async def test_addresses(address: str, hosts: list[str]) -> None:
    async with serving(address) as served:
        for host in hosts:
            async with proxy.connected(served.port, host) as client:
                stream_id = await client.begin(b"here")
                assert await client.messages(stream_id, 1) == [b"here"]
        if "::1" not in hosts:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("::1", served.port)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::]"])
async def test_a_port_that_is_taken(host: str) -> None:
    async with serving(f"{host}:0") as served:
        other = Serving()
        with pytest.raises(OSError, match="in use") as caught:
            await other.server.start(f"{host}:{served.port}")
        assert caught.value.errno == errno.EADDRINUSE
        await other.server.drain()
        await other.server.stop()


@pytest.mark.parametrize("address", ["192.0.2.1:0", "name.invalid:0", "[2001:db8::1]:0"])
async def test_an_address_that_is_not_of_this_machine(address: str) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - of which errno depends on the machine
        await Serving().server.start(address)
    assert caught.value.strerror


# -- those who are not let in -----------------------------------------------------------------------


async def test_too_many_connections(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(connections=2) as served, proxy.connected(served.port) as first:
        stream_id = await first.begin(b"first")
        async with proxy.connected(served.port) as second:
            await until(lambda: second.settled, "the second is in")
            async with proxy.connected(served.port) as third:
                assert await third.is_closed()
                assert not third.settled
            assert "too many connections" in caplog.text
            assert await first.messages(stream_id, 1) == [b"first"]
        await until(lambda: len(served.server._open) == 1, "the second is gone")
        async with proxy.connected(served.port) as fourth:
            assert await fourth.messages(await fourth.begin(b"fourth"), 1) == [b"fourth"]


async def test_too_many_streams_in_all_connections() -> None:
    async with (
        serving(streams=3) as served,
        proxy.connected(served.port) as one,
        proxy.connected(served.port) as other,
    ):
        held = [await one.begin(b"held") for _ in range(3)]
        await one.messages(held[-1], 1)
        refused = other.open()
        assert (await other.ended(refused)).reset == REFUSED_STREAM
        one.reset(held[0])
        await until(lambda: served.server.slots.used == 2, "there is room again")
        assert await other.messages(await other.begin(b"in"), 1) == [b"in"]


async def test_a_method_that_is_not_served() -> None:
    async with serving() as served, proxy.connected(served.port) as client:
        for path, told in (
            (
                f"/{names.EXT_PROC_SERVICE}/Other",
                f"unknown method Other for service {names.EXT_PROC_SERVICE}",
            ),
            ("/other.Service/Process", "unknown service other.Service"),
        ):
            heard = await client.ended(client.open(_path=path))
            assert (heard.headers[":status"], heard.status) == ("200", "12")
            assert heard.headers["grpc-message"] == told
        assert served.ended == {}


async def test_a_browser_over_http2_gets_a_readable_answer() -> None:
    async with serving() as served, proxy.connected(served.port) as client:
        stream_id = client.open(end=True, _method="GET", _path="/", content_type="text/html")
        heard = await client.ended(stream_id)
        assert heard.headers[":status"] == "405"
        assert heard.headers["content-type"].startswith("text/plain")
        assert b"GET" in heard.data
        assert b"gRPC" in heard.data
        assert await client.messages(await client.begin(b"goes on"), 1) == [b"goes on"]


async def test_http_1_is_told_and_cut() -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            said = await reader.read()
        assert b"this port speaks HTTP/2 only" in said
        writer.close()

        def get() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=DEADLINE_S)
            try:
                connection.request("GET", "/")
                connection.getresponse()
            finally:
                connection.close()

        with pytest.raises((http.client.HTTPException, OSError)):
            await asyncio.to_thread(get)
        assert [fault.code.name for fault in served.faults] == ["PROTOCOL_ERROR"] * 2


async def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_module, "TICK_S", 0.05)
    async with serving(limits={"handshake_s": 0.2}) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        async with asyncio.timeout(DEADLINE_S):
            said = await reader.read()
        assert b"no HTTP/2 handshake within 0.2 s" in said
        writer.close()


# -- TLS --------------------------------------------------------------------------------------------


def client_context(*protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def server_context() -> ssl.SSLContext:
    return Certificates("", TlsRules()).server_context()


async def test_exchanges_over_tls() -> None:
    message = b"t" * 300_000
    async with (
        serving(tls=server_context()) as served,
        proxy.connected(served.port, tls=client_context("h2")) as client,
    ):
        stream_id = await client.begin(message)
        assert await client.messages(stream_id, 1) == [message]
        await client.send(stream_id, b"", end=True)
        assert (await client.ended(stream_id)).status == "0"
        draining = asyncio.create_task(served.server.drain())
        assert await client.is_closed()
        async with asyncio.timeout(DEADLINE_S):
            await draining


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
async def test_a_tls_client_without_http2_is_cut(protocols: tuple[str, ...]) -> None:
    async with serving(tls=server_context()) as served:
        try:
            async with proxy.connected(served.port, tls=client_context(*protocols)) as client:
                assert await client.is_closed()
                assert not client.settled
        except (ssl.SSLError, ConnectionError):
            pass  # it was cut in the handshake
        assert served.server._open == set()


@asynccontextmanager
async def silent(port: int) -> AsyncIterator[socket.socket]:
    """A connection of which nothing is ever heard."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(DEADLINE_S)
        yield connection


async def test_a_handshake_that_never_comes_holds_up_nothing() -> None:
    async with (
        serving(tls=server_context(), limits={"handshake_s": DEADLINE_S}) as served,
        silent(served.port),
        proxy.connected(served.port, tls=client_context("h2")) as client,
    ):
        assert await client.messages(await client.begin(b"on"), 1) == [b"on"]


async def test_a_handshake_that_never_comes_is_not_waited_for() -> None:
    async with (
        serving(tls=server_context(), limits={"handshake_s": 0.3}) as served,
        silent(served.port) as connection,
    ):
        assert await asyncio.to_thread(connection.recv, 1) == b""
