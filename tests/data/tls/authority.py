"""Certificates that a test needs, signed by an authority or by themselves."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

PEM = serialization.Encoding.PEM
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


class Authority:
    """Signs certificates for 127.0.0.1 and for clients, without extensions that newer Pythons insist on.

    Attributes:
        ca: the file with its own certificate.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"authority {folder.name}")
        basic = x509.BasicConstraints(ca=True, path_length=None)
        self.ca = self._signed("ca.crt", self._name, self._key, basic)

    def issue(self, name: str, *hosts: str) -> tuple[str, str]:
        """Files with a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = [x509.IPAddress(ip_address("127.0.0.1"))] if not hosts else []
        alternative = x509.SubjectAlternativeName([*addresses, *map(x509.DNSName, hosts)])
        certificate = self._signed(f"{name}.crt", _named(name), key, alternative)
        path = self._folder / f"{name}.key"
        path.write_bytes(pem_of(key))
        return certificate, str(path)

    def server(self, *hosts: str, clients: bool = False) -> ssl.SSLContext:
        """Of a server with these names, else 127.0.0.1. `clients`: takes only those that we signed for."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue("server", *hosts))
        if clients:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _signed(
        self, file: str, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> str:
        path = self._folder / file
        path.write_bytes(_certificate(subject, key, self._name, self._key, timedelta(days=1), extension))
        return str(path)


def certificate_for(key: Key, days: int = 30) -> bytes:
    """A certificate that the key signs for itself; it ends in `days`."""
    name = _named("picker")
    return _certificate(name, key, name, key, timedelta(days=days))


def pem_of(key: Key, password: bytes | None = None) -> bytes:
    """The key as a file holds it."""
    secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, secret)


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _certificate(
    subject: x509.Name,
    key: Key,
    issuer: x509.Name,
    its_key: Key,
    life: timedelta,
    *extensions: x509.ExtensionType,
) -> bytes:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=90)).not_valid_after(now + life)
    for extension in extensions:
        made = made.add_extension(extension, critical=False)
    signs = None if isinstance(its_key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return made.sign(its_key, signs).public_bytes(PEM)
