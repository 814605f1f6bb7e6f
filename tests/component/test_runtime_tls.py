"""TLS of the ext-proc port: a self-signed certificate, one from a folder, and what is wrong with a folder."""

import asyncio
import datetime
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from epp.errors import ConfigError
from epp.runtime.grpcio import GrpcioTransport, StreamCounts
from epp.runtime.tls import self_signed, server_credentials

PEM = serialization.Encoding.PEM
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


def pem_of(key: Key, password: bytes | None = None) -> bytes:
    secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, secret)


def certificate_for(key: Key, days: int = 30) -> bytes:
    """A certificate that ends in `days`."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "picker")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=90))
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    )
    return made.public_bytes(PEM)


def folder(path: Path, key: bytes | None, chain: bytes | None) -> str:
    for name, content in (("tls.key", key), ("tls.crt", chain)):
        if content is not None:
            (path / name).write_bytes(content)
    return str(path)


async def handshake(cert_path: str, alpn: list[str]) -> tuple[str | None, x509.Certificate]:
    """What a client is offered: the protocol agreed on, and the certificate."""
    counts = StreamCounts(lambda: None, lambda code: None)
    transport = GrpcioTransport(
        lambda wake: pytest.fail("no stream"), counts, 1 << 20, server_credentials(cert_path)
    )
    port = await transport.start("127.0.0.1:0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(alpn)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        found = writer.get_extra_info("ssl_object")
        result = found.selected_alpn_protocol(), x509.load_der_x509_certificate(found.getpeercert(True))
        writer.close()
        return result
    finally:
        await transport.stop()


async def test_without_a_folder_a_p256_certificate_is_made_and_h2_agreed_on() -> None:
    protocol, certificate = await handshake("", ["h2"])
    key = certificate.public_key()
    assert protocol == "h2"
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lifetime > datetime.timedelta(days=3649)
    assert certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "Inference Ext"


def test_each_start_makes_another_key() -> None:
    assert self_signed()[0] != self_signed()[0]


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
    protocol, certificate = await handshake(cert_path, ["h2", "http/1.1"])
    assert protocol == "h2"
    assert certificate == x509.load_pem_x509_certificate(leaf)


KEY = ec.generate_private_key(ec.SECP256R1())
ODD = ec.generate_private_key(ec.SECP256K1())
OTHER = ec.generate_private_key(ec.SECP256R1())


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
        server_credentials(folder(tmp_path, key, chain))
    assert len(caught.value.problems) == len(said)
    for part in said:
        assert f"--cert-path {tmp_path}: {part}" in str(caught.value)
