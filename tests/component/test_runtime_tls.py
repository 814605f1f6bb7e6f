"""TLS of the ext-proc port: certificates made, given and changed; versions and suites; real handshakes."""

import asyncio
import datetime
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from epp.errors import ConfigError
from epp.runtime.tls import Certificates, Pair, self_signed
from epp.runtime.tls_rules import CIPHER_SUITES, TlsRules
from tests.data.grpc.channels import ALONE
from tests.data.runtime.open_files import too_many_open_files
from tests.data.tls.authority import Key, certificate_for, pem_of


def folder(path: Path, key: bytes | None, chain: bytes | None) -> str:
    """Each file is there in one piece, and another than the one before also where the clock has not moved."""
    for name, content in (("tls.key", key), ("tls.crt", chain)):
        if content is not None:
            fresh = path / f"{name}.new"
            fresh.write_bytes(content)
            fresh.rename(path / name)
    return str(path)


Run = Callable[[Coroutine[Any, Any, None]], None]
BOTH_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
TLS_1_2, TLS_1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
DEADLINE_S = 60.0


def put(path: Path, pair: Pair) -> None:
    """Write a pair as Kubernetes does: a new folder, to which a link is swapped."""
    made = path / f"..{x509.load_pem_x509_certificate(pair.chain).serial_number}"
    made.mkdir()
    folder(made, pair.key, pair.chain)
    (path / "..data_tmp").symlink_to(made.name)
    os.replace(path / "..data_tmp", path / "..data")
    for name in ("tls.key", "tls.crt"):
        if not (path / name).is_symlink():
            (path / name).symlink_to(f"..data/{name}")


class Echo(asyncio.Protocol):
    """Sends back what comes. `present`: all that are connected."""

    def __init__(self, present: "set[Echo]") -> None:
        self.present = present

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.present.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.present.discard(self)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


@asynccontextmanager
async def listening(certificates: Certificates) -> AsyncIterator[int]:
    """A port that serves with them, and leaves no connection to who comes after the loop."""
    present: set[Echo] = set()
    server = await asyncio.get_running_loop().create_server(
        lambda: Echo(present), "127.0.0.1", 0, ssl=certificates.server_context()
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in present:
            each.transport.abort()  # type: ignore[attr-defined]
        async with asyncio.timeout(DEADLINE_S):
            while present:  # noqa: ASYNC110 - connections end at the loop's pace
                await asyncio.sleep(0.001)


@asynccontextmanager
async def following(certificates: Certificates) -> AsyncIterator[None]:
    task = asyncio.create_task(certificates.follow(poll_s=0.02, settle_s=0.02))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def client(
    least: ssl.TLSVersion = TLS_1_2,
    most: ssl.TLSVersion = TLS_1_3,
    ciphers: str = "",
    alpn: tuple[str, ...] = ("h2",),
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = least
        context.maximum_version = most
    if ciphers:
        context.set_ciphers(ciphers)
    context.set_alpn_protocols(list(alpn))
    return context


@contextmanager
def connected(port: int, context: ssl.SSLContext, name: str | None = None) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as secured,
    ):
        yield secured


class Agreed(NamedTuple):
    """What a handshake came to."""

    alpn: str | None
    version: str | None
    cipher: str
    certificate: x509.Certificate


async def agreed(port: int, context: ssl.SSLContext | None = None, name: str | None = None) -> Agreed:
    """From a client on a thread of its own, after a byte went to and fro."""

    def shake() -> Agreed:
        with connected(port, context or client(), name) as secured:
            secured.sendall(b"x")
            assert secured.recv(1) == b"x"
            cipher, certificate = secured.cipher(), secured.getpeercert(True)
            assert cipher is not None
            assert certificate is not None
            return Agreed(
                secured.selected_alpn_protocol(),
                secured.version(),
                cipher[0],
                x509.load_der_x509_certificate(certificate),
            )

    return await asyncio.to_thread(shake)


async def handshake(cert_path: str, alpn: tuple[str, ...]) -> Agreed:
    async with listening(Certificates(cert_path)) as port:
        return await agreed(port, client(alpn=alpn))


async def test_without_a_folder_a_p256_certificate_is_made_and_h2_agreed_on() -> None:
    protocol, _, _, certificate = await handshake("", ("h2",))
    key = certificate.public_key()
    assert protocol == "h2"
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lifetime > datetime.timedelta(days=3649)
    assert certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "Inference Ext"


def test_each_start_makes_another_key() -> None:
    assert self_signed().key != self_signed().key


@pytest.mark.parametrize("kind", ["ec", "p521", "rsa", "ed25519", "expired", "chain"])
async def test_a_given_certificate_is_served(kind: str, tmp_path: Path) -> None:
    make: dict[str, Callable[[], Key]] = {
        "p521": lambda: ec.generate_private_key(ec.SECP521R1()),
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }
    key = make.get(kind, lambda: ec.generate_private_key(ec.SECP256R1()))()
    leaf = certificate_for(key, days=-1 if kind == "expired" else 30)
    issuer = certificate_for(ec.generate_private_key(ec.SECP256R1())) if kind == "chain" else b""
    cert_path = folder(tmp_path, pem_of(key), leaf + issuer)
    protocol, _, _, certificate = await handshake(cert_path, ("http/1.1", "h2"))
    assert protocol == "h2"
    assert certificate == x509.load_pem_x509_certificate(leaf)


KEY = ec.generate_private_key(ec.SECP256R1())
ODD = ec.generate_private_key(ec.SECP256K1())
CERTIFICATE = certificate_for(KEY)
WEAK = rsa.generate_private_key(65537, 1024)
OTHER = ec.generate_private_key(ec.SECP256R1())


def mixed_up() -> rsa.RSAPrivateKey:
    """The modulus of a key, with secret exponents that do not belong to it."""
    own = WEAK.private_numbers()
    parts = (own.p, own.q, own.d ^ 4, own.dmp1 ^ 4, own.dmq1 ^ 4, own.iqmp, own.public_numbers)
    return rsa.RSAPrivateNumbers(*parts).private_key(unsafe_skip_rsa_key_validation=True)


@pytest.mark.parametrize(
    ("key", "chain", "said"),
    [
        (None, certificate_for(KEY), ["tls.key: cannot be read: No such file"]),
        (pem_of(KEY), None, ["tls.crt: cannot be read: No such file"]),
        (None, None, ["tls.key: cannot be read", "tls.crt: cannot be read"]),
        (b"garbage", certificate_for(KEY), ["tls.key: cannot be used"]),
        (pem_of(KEY), b"garbage", ["tls.crt: cannot be used"]),
        (b"", b"\xff\x00", ["tls.key: cannot be used", "tls.crt: cannot be used"]),
        (certificate_for(KEY), pem_of(KEY), ["tls.key: cannot be used", "tls.crt: cannot be used"]),
        (pem_of(KEY, b"secret"), certificate_for(KEY), ["tls.key: cannot be used: Password"]),
        (pem_of(ODD), certificate_for(ODD), ["tls.key: cannot be used: gRPC serves RSA"]),
        (pem_of(OTHER), certificate_for(KEY), ["tls.key: is not the key of the first certificate"]),
        (pem_of(WEAK), certificate_for(WEAK), ["tls.crt: cannot be used: ee key too small"]),
        (pem_of(mixed_up()), certificate_for(WEAK), ["tls.key: cannot be used"]),
        (
            pem_of(KEY),
            certificate_for(OTHER) + certificate_for(KEY),
            ["tls.key: is not the key of the first certificate"],
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    key: bytes | None, chain: bytes | None, said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        Certificates(folder(tmp_path, key, chain))
    assert len(caught.value.problems) == len(said)
    for part in said:
        assert f"--cert-path {tmp_path}: {part}" in str(caught.value)


@pytest.mark.parametrize("damaged", ["tls.key", "tls.crt"])
@pytest.mark.parametrize("damage", [b"", b"\n", b"-", b"A", b"\x00\xff\x80"], ids=repr)
def test_a_damaged_file_is_an_error_in_words(damaged: str, damage: bytes, tmp_path: Path) -> None:
    """Cut off, or written over, at any place; some damage, such as to a signature, is not looked for."""
    whole = {"tls.key": pem_of(KEY), "tls.crt": CERTIFICATE}
    cert_path = folder(tmp_path, whole["tls.key"], whole["tls.crt"])
    refused = 0
    for place in range(0, len(whole[damaged]), 3):
        after = place + len(damage) if damage else len(whole[damaged])
        content = whole[damaged][:place] + damage + whole[damaged][after:]
        (tmp_path / damaged).write_bytes(content)
        try:
            Certificates(cert_path)
        except ConfigError as error:
            refused += 1
            (problem,) = error.problems
            assert problem.path in ("tls.key", "tls.crt")
    assert refused > 10


OPENED = """
import os
from epp.runtime.tls import Certificates

before = os.listdir("/proc/self/fd")
Certificates("").server_context()
print(os.listdir("/proc/self/fd") == before)
"""


def test_nothing_is_left_open_or_lying_about(tmp_path: Path) -> None:
    """In a process of its own: threads and garbage of other tests open and close files at any time."""
    command = [sys.executable, "-c", OPENED]
    ran = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "True\n"
    assert os.listdir(tmp_path) == []


# -- versions and suites ------------------------------------------------------------------------------


@BOTH_LOOPS
def test_both_versions_are_served_and_h2_agreed_on(run: Run) -> None:
    async def main() -> None:
        async with listening(Certificates("")) as port:
            old = await agreed(port, client(most=TLS_1_2))
            new = await agreed(port, client(least=TLS_1_3), "localhost")
        assert (old.alpn, old.version) == ("h2", "TLSv1.2")
        assert (new.alpn, new.version) == ("h2", "TLSv1.3")
        assert old.certificate == new.certificate

    run(main())


def agreement(server: ssl.SSLContext, context: ssl.SSLContext) -> tuple[str | None, str]:
    """Version and suite of a handshake in memory. Raises ssl.SSLError, as the server sees it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = context.wrap_bio(to_client, to_server)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for side in (theirs, ours):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
                done.add(side)
    cipher = ours.cipher()
    assert cipher is not None
    return ours.version(), cipher[0]


def refusal(server: ssl.SSLContext, context: ssl.SSLContext) -> str | None:
    """What the server found wrong, as OpenSSL calls it."""
    with pytest.raises(ssl.SSLError) as caught:
        agreement(server, context)
    return caught.value.reason


@BOTH_LOOPS
def test_what_is_older_than_the_oldest_version_is_refused(run: Run) -> None:
    ancient = client(ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0")
    old = client(most=TLS_1_2)

    async def main() -> None:
        for rules, context in ((TlsRules(), ancient), (TlsRules("VersionTLS13"), old)):
            certificates = Certificates("", rules)
            assert refusal(certificates.server_context(), context) == "UNSUPPORTED_PROTOCOL"
            async with listening(certificates) as port:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await agreed(port, context)
                assert (await agreed(port)).version == "TLSv1.3"

    run(main())


# Of all that OpenSSL has for TLS 1.2 and this key, in the order of no preference of ours.
OF_OPENSSL = [
    each["name"]
    for each in ssl.create_default_context().get_ciphers()
    if each["protocol"] == "TLSv1.2" and each["auth"] == "auth-ecdsa"
]


@pytest.mark.parametrize("chosen", ["", *(name for name in CIPHER_SUITES if "_ECDSA_" in name)])
def test_the_suites_are_the_named_ones_or_those_that_http2_allows(chosen: str) -> None:
    names = [chosen] if chosen else [name for name in CIPHER_SUITES if "_ECDSA_" in name]
    allowed = {CIPHER_SUITES[name] for name in names}
    assert allowed < set(OF_OPENSSL)
    server = Certificates("", TlsRules.of("", [chosen])).server_context()
    for name in OF_OPENSSL:
        context = client(most=TLS_1_2, ciphers=name)
        if name in allowed:
            assert agreement(server, context) == ("TLSv1.2", name)
        else:
            assert refusal(server, context) == "NO_SHARED_CIPHER"
    assert agreement(server, client())[0] == "TLSv1.3"


ONLY_RSA = TlsRules.of("", ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"])


async def test_a_self_signed_key_is_of_the_kind_that_the_suites_need() -> None:
    async with listening(Certificates("", ONLY_RSA)) as port:
        found = await agreed(port, client(most=TLS_1_2))
    assert found.cipher == "ECDHE-RSA-AES128-GCM-SHA256"
    assert isinstance(found.certificate.public_key(), rsa.RSAPublicKey)


def test_a_key_that_no_suite_goes_with_is_refused_unless_tls_1_3_needs_none(tmp_path: Path) -> None:
    cert_path = folder(tmp_path, *self_signed())
    with pytest.raises(ConfigError, match="tls.key: has no suite: --tls-cipher-suites names none with ECDSA"):
        Certificates(cert_path, ONLY_RSA)
    Certificates(cert_path, TlsRules("VersionTLS13", ONLY_RSA.cipher_suites))


def test_nothing_is_compressed_and_no_handshake_repeated() -> None:
    options = Certificates("").server_context().options
    assert options & ssl.OP_NO_COMPRESSION
    assert options & ssl.OP_NO_RENEGOTIATION


async def test_without_h2_no_protocol_is_agreed_on() -> None:
    assert (await handshake("", ("http/1.1",))).alpn is None


# -- changes ------------------------------------------------------------------------------------------

CHANGES = [(False, False), (False, True), (True, False)]


@BOTH_LOOPS
@pytest.mark.parametrize("rsa_keys", CHANGES, ids=["p256", "p256-to-rsa", "rsa-to-p256"])
def test_a_swapped_link_changes_new_connections_and_leaves_open_ones(
    rsa_keys: tuple[bool, bool], run: Run, tmp_path: Path
) -> None:
    old, new = (self_signed(rsa_key=each) for each in rsa_keys)
    put(tmp_path, old)

    async def main() -> None:
        certificates = Certificates(str(tmp_path))
        async with listening(certificates) as port, following(certificates):
            for most in (TLS_1_2, TLS_1_3):
                assert await serves(port, old, most)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client())
            put(tmp_path, new)
            await until(lambda: serves(port, new))
            for most in (TLS_1_2, TLS_1_3):
                assert await serves(port, new, most)
            writer.write(b"still here")
            assert await reader.readexactly(10) == b"still here"
            writer.transport.abort()

    run(main())


async def serves(port: int, pair: Pair, most: ssl.TLSVersion = TLS_1_3) -> bool:
    """Whether a new connection sees the pair's certificate; h2 is agreed on in any case."""
    found = await agreed(port, client(most=most), "localhost")
    assert found.alpn == "h2"
    return found.certificate == x509.load_pem_x509_certificate(pair.chain)


async def test_the_rules_hold_for_changed_certificates_too(tmp_path: Path) -> None:
    put(tmp_path, self_signed())
    certificates = Certificates(str(tmp_path), TlsRules("VersionTLS13"))
    async with listening(certificates) as port, following(certificates):
        new = self_signed()
        put(tmp_path, new)
        await until(lambda: serves(port, new))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await agreed(port, client(most=TLS_1_2))


async def test_half_a_pair_keeps_the_one_before_until_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = self_signed(), self_signed()
    certificates = Certificates(folder(tmp_path, *old))
    async with listening(certificates) as port, following(certificates):
        folder(tmp_path, new.key, None)
        await until(lambda: reported(caplog, 1))
        assert "tls.key: is not the key of the first certificate" in vars(errors(caplog)[0])["error"]
        assert await serves(port, old)
        await asyncio.sleep(0.2)
        assert await reported(caplog, 1)
        folder(tmp_path, None, new.chain)
        await until(lambda: serves(port, new))
    assert await reported(caplog, 1)


@pytest.mark.parametrize("file", ["tls.key", "tls.crt"])
async def test_a_broken_or_missing_file_keeps_the_pair_before(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = self_signed(), self_signed()
    certificates = Certificates(folder(tmp_path, *old))
    async with listening(certificates) as port, following(certificates):
        whole = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(whole[: len(whole) // 2])
        await until(lambda: reported(caplog, 1))
        assert f"{file}: cannot be used" in vars(errors(caplog)[0])["error"]
        (tmp_path / file).unlink()
        await until(lambda: reported(caplog, 2))
        assert f"{file}: cannot be read" in vars(errors(caplog)[1])["error"]
        assert await serves(port, old)
        folder(tmp_path, *new)
        await until(lambda: serves(port, new))


@pytest.mark.parametrize("what", ["files", "context"])
async def test_a_pair_that_could_not_be_read_for_a_moment_is_read_later(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it changes when that is over."""
    tries: list[object] = []
    over = threading.Event()
    place = tmp_path if what == "files" else "epp.runtime.tls._server_context"
    load = Certificates._load

    def hindered(self: Certificates) -> Any:
        """On a thread. It is hindered as a whole or not at all, else half of a pair would be other news."""
        if over.is_set():
            return load(self)
        with too_many_open_files(place) as in_vain:
            try:
                return load(self)
            finally:
                tries.extend(in_vain)

    old, new = self_signed(), self_signed()
    certificates = Certificates(folder(tmp_path, *old))
    monkeypatch.setattr(Certificates, "_load", hindered)
    async with listening(certificates) as port, following(certificates):
        folder(tmp_path, *new)
        await until(lambda: tried(tries, 6))
        assert await serves(port, old)
        over.set()
        await until(lambda: serves(port, new))
    assert await reported(caplog, 1)
    assert "cannot be read: Too many open files" in vars(errors(caplog)[0])["error"]


async def tried(tries: list[object], times: int) -> bool:
    return len(tries) >= times


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.levelno == logging.ERROR]


async def reported(caplog: pytest.LogCaptureFixture, times: int) -> bool:
    return len(errors(caplog)) == times


async def test_a_pair_written_in_small_pieces_is_read_when_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(folder(tmp_path, *self_signed()))
    new = self_signed()
    async with listening(certificates) as port:
        task = asyncio.create_task(certificates.follow(poll_s=0.01, settle_s=1.0))
        for name, content in (("tls.key", new.key), ("tls.crt", new.chain)):
            with (tmp_path / name).open("wb", buffering=0) as file:
                for line in content.splitlines(keepends=True):
                    file.write(line)
                    await asyncio.sleep(0.01)
        await until(lambda: serves(port, new))
        task.cancel()
    assert errors(caplog) == []


def test_no_rsa_key_is_looked_at_for_primes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 50 ms and more, in which no thread gets on, the loop's neither."""
    asked: list[bool] = []
    right = serialization.load_pem_private_key

    def load(pem: bytes, password: None, *, unsafe_skip_rsa_key_validation: bool = False) -> Any:
        asked.append(unsafe_skip_rsa_key_validation)
        return right(pem, password, unsafe_skip_rsa_key_validation=unsafe_skip_rsa_key_validation)

    monkeypatch.setattr(serialization, "load_pem_private_key", load)
    Certificates(folder(tmp_path, *self_signed(rsa_key=True)))
    assert asked == [True]


async def test_a_self_signed_certificate_is_not_followed() -> None:
    await Certificates("").follow()


# -- grpcio -------------------------------------------------------------------------------------------


@asynccontextmanager
async def grpcio_echo(credentials: grpc.ServerCredentials) -> AsyncIterator[str]:
    async def echo(messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    server = grpc.aio.server()
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", handlers)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def trusting(address: str, pair: Pair) -> grpc.aio.Channel:
    options = (("grpc.ssl_target_name_override", "localhost"), *ALONE)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pair.chain), options)


async def echoed(address: str, pair: Pair) -> bool:
    """Whether a new connection that trusts this certificate alone gets through."""
    async with trusting(address, pair) as channel:
        call = channel.stream_stream("/test.Echo/Echo")(timeout=DEADLINE_S)
        try:
            await call.write(b"x")
            return await call.read() == b"x"
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        finally:
            call.cancel()


async def test_grpcio_serves_the_newest_certificate(tmp_path: Path) -> None:
    old, new = self_signed(), self_signed()
    put(tmp_path, old)
    certificates = Certificates(str(tmp_path))
    async with (
        grpcio_echo(certificates.grpc_credentials()) as address,
        following(certificates),
        trusting(address, old) as held,
    ):
        call = held.stream_stream("/test.Echo/Echo")(timeout=DEADLINE_S)
        await call.write(b"before")
        assert await call.read() == b"before"
        assert not await echoed(address, new)
        put(tmp_path, new)
        await until(lambda: echoed(address, new))
        assert not await echoed(address, old)
        await call.write(b"after")
        assert await call.read() == b"after"
        call.cancel()


async def test_grpcio_takes_the_credentials_of_a_folder(tmp_path: Path) -> None:
    pair = self_signed()
    async with grpcio_echo(Certificates(folder(tmp_path, *pair)).grpc_credentials()) as address:
        assert await echoed(address, pair)
