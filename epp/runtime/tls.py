"""Server certificates: given ones from a folder, followed as they change, or a self-signed one."""

import asyncio
import datetime
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import NameOID

from epp.errors import ConfigError, Problem, Unread
from epp.runtime.tls_rules import CIPHER_SUITES, TlsRules
from epp.runtime.watch import Followed

POLL_S: Final = 1.0
SETTLE_S: Final = 0.25

_KEY_FILE, _CHAIN_FILE = "tls.key", "tls.crt"
_PEM = serialization.Encoding.PEM
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_VERSIONS = {"VersionTLS12": ssl.TLSVersion.TLSv1_2, "VersionTLS13": ssl.TLSVersion.TLSv1_3}

log = logging.getLogger(__name__)

T = TypeVar("T")
_Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Pair(NamedTuple):
    """A private key and the chain of certificates whose first is its own, both PEM."""

    key: bytes
    chain: bytes


class Certificates:
    """The certificate that new handshakes are served with.

    What was handed out by `server_context` and `grpc_credentials` serves the newest pair that `follow` found;
    connections that are open go on with theirs.
    """

    def __init__(self, cert_path: str, rules: TlsRules | None = None) -> None:
        """Those in the folder `cert_path`, or, where it is empty, a new self-signed one.

        Raises:
            ConfigError: `tls.crt` or `tls.key` is missing, cannot be used, or is not the other's.
        """
        self._folder = Path(cert_path) if cert_path else None
        self._rules = rules or TlsRules()
        # Made before the files are read: what changes in between is read again.
        files = (self._folder / _KEY_FILE, self._folder / _CHAIN_FILE) if self._folder else ()
        self._files = Followed(*files)
        self._pair, self._context = self._load()

    def server_context(self) -> ssl.SSLContext:
        """For `loop.create_server`. A client that does not offer `h2` is let in without a protocol."""
        context = _server_context(self._pair, self._rules)
        # A context keeps one certificate for each kind of key: one of a new kind, loaded into it, would be
        # served beside the old one. So handshakes that begin here go on with the newest context.
        context.sni_callback = self._present
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For grpcio, which serves TLS 1.2 and 1.3 with suites of its own whatever the rules say."""
        given = self._pair

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Asked on a thread of gRPC's for each new connection; None: as before."""
            nonlocal given
            newest = self._pair
            if newest is given:
                return None
            given = newest
            return grpc.ssl_server_certificate_configuration([newest])

        first = grpc.ssl_server_certificate_configuration([given])
        return grpc.dynamic_ssl_server_credentials(first, fetch)  # type: ignore[arg-type]  # None may come

    async def follow(self, *, poll_s: float = POLL_S, settle_s: float = SETTLE_S) -> None:
        """Follow the files until cancelled; return at once for a self-signed certificate.

        A pair is read once its files have kept still for `settle_s`. One that cannot be used is reported,
        once, and the one before stays; one that cannot be read is tried again.
        """
        if self._folder is None:
            return
        while True:
            await self._files.changed(poll_s=poll_s, settle_s=settle_s)
            try:
                self._pair, self._context = await asyncio.to_thread(self._load)
            except ConfigError as error:
                if self._files.failed(error):
                    log.error(
                        "the new certificate cannot be used; the one before stays",
                        extra={"error": str(error)},
                    )
            else:
                ends = x509.load_pem_x509_certificate(self._pair.chain).not_valid_after_utc
                log.info("certificate reloaded", extra={"valid_until": ends.isoformat()})

    def _present(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._context

    def _load(self) -> tuple[Pair, ssl.SSLContext]:
        """A pair that is known to work, and the context that serves it."""
        if self._folder is None:
            pair = self_signed(rsa_key=not self._rules.serves(rsa=False))
            return pair, _server_context(pair, self._rules)
        source = f"--cert-path {self._folder}"
        pair = _read(self._folder, source, self._rules)
        try:
            return pair, _server_context(pair, self._rules)
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).replace("_", " ").lower()
            raise ConfigError(source, Problem(_CHAIN_FILE, f"cannot be used: {reason}")) from None
        except OSError as error:
            raise ConfigError(source, Unread.because("", error)) from None


def _server_context(pair: Pair, rules: TlsRules) -> ssl.SSLContext:
    """Raises ssl.SSLError when OpenSSL takes the key for too weak."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[rules.min_version]
    context.set_ciphers(":".join(CIPHER_SUITES[name] for name in rules.cipher_suites))
    context.set_alpn_protocols(["h2"])
    # RFC 9113 9.2.1 forbids both.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # OpenSSL reads files only. This one lies in memory, for this process alone.
    with open(os.memfd_create("tls"), "wb") as file:
        file.write(pair.key + pair.chain)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _read(folder: Path, source: str, rules: TlsRules) -> Pair:
    """Key and certificate chain. An expired certificate is taken: proxies do not verify it by default."""
    problems: list[Problem] = []
    key = _parsed(folder / _KEY_FILE, _private_key, problems)
    chain = _parsed(folder / _CHAIN_FILE, _chain, problems)
    if key is not None and chain is not None:
        if key.public_key() != chain[0].public_key():
            problems.append(Problem(_KEY_FILE, "is not the key of the first certificate in tls.crt"))
        elif not rules.serves(rsa=isinstance(key, rsa.RSAPrivateKey)):
            kind = "RSA" if isinstance(key, rsa.RSAPrivateKey) else "ECDSA"
            problems.append(Problem(_KEY_FILE, f"has no suite: --tls-cipher-suites names none with {kind}"))
        else:
            return Pair(_pem(key), b"".join(each.public_bytes(_PEM) for each in chain))
    raise ConfigError(source, *problems)


def _parsed(file: Path, parse: Callable[[bytes], T], problems: list[Problem]) -> T | None:
    try:
        return parse(file.read_bytes())
    except OSError as error:
        problems.append(Unread.because(file.name, error))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        problems.append(Problem(file.name, f"cannot be used: {error}"))
    return None


def _private_key(pem: bytes) -> _Key:
    # The library's own check of an RSA key looks whether its factors are primes: 50 ms, a second for 4096
    # bits, in which no other thread gets on.
    key = serialization.load_pem_private_key(pem, None, unsafe_skip_rsa_key_validation=True)
    if isinstance(key, rsa.RSAPrivateKey):
        _check_rsa(key)
        return key
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, _CURVES):
        return key
    raise ValueError("gRPC serves RSA, Ed25519 and ECDSA P-256, P-384, P-521 keys only")


def _check_rsa(key: rsa.RSAPrivateKey) -> None:
    """Raises ValueError where its signatures are not good."""
    try:
        signature = key.sign(b"", padding.PKCS1v15(), hashes.SHA256())
        key.public_key().verify(signature, b"", padding.PKCS1v15(), hashes.SHA256())
    except (InvalidSignature, ValueError):
        raise ValueError("its parts are not those of one RSA key") from None


def _chain(pem: bytes) -> list[x509.Certificate]:
    """At least one, the first with a key that can be read."""
    chain = x509.load_pem_x509_certificates(pem)
    chain[0].public_key()
    return chain


def _pem(key: _Key) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def self_signed(*, rsa_key: bool = False) -> Pair:
    """A key, P-256 or RSA-2048, and a certificate for ten years (0.01 s with P-256, 0.1 s with RSA)."""
    key = rsa.generate_private_key(65537, 2048) if rsa_key else ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Inference Ext")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(_pem(key), certificate.public_bytes(_PEM))
