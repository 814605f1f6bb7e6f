"""An authority that signs what a test needs."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Signs certificates for 127.0.0.1 and for clients, without extensions that newer Pythons insist on.

    Attributes:
        ca: the file with its own certificate.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority {folder.name}")])
        basic = x509.BasicConstraints(ca=True, path_length=None)
        self.ca = self._signed("ca.crt", self._name, self._key, basic)

    def issue(self, name: str, *hosts: str) -> tuple[str, str]:
        """Files with a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        addresses = [x509.IPAddress(ip_address("127.0.0.1"))] if not hosts else []
        alternative = x509.SubjectAlternativeName([*addresses, *map(x509.DNSName, hosts)])
        certificate = self._signed(f"{name}.crt", subject, key, alternative)
        path = self._folder / f"{name}.key"
        pem = serialization.PrivateFormat.PKCS8
        path.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, serialization.NoEncryption()))
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
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(extension, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        path = self._folder / file
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)
