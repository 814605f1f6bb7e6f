"""Certificates of a picker, and the authority that signed them."""

import base64
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from e2e.kube_client import Thing

SECRET = "warmroute-epp-tls"
"""With the picker's certificate, for the chart's `router.epp.tls.secretName`."""
AUTHORITY = "warmroute-epp-ca"
"""With `ca.crt`, for `provider.envoyGateway.tls.caConfigMap`."""


def signed(name: str) -> list[Thing]:
    """An authority of its own in `AUTHORITY`, and in `SECRET` a certificate for this host that it signed."""
    its_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("authority", its_key, "authority", its_key, authority=True)
    certificate = _certificate(name, key, "authority", its_key, authority=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files = {"tls.crt": _pem(certificate), "tls.key": private}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": AUTHORITY},
            "data": {"ca.crt": _pem(authority).decode()},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": SECRET},
            "data": {file: base64.b64encode(text).decode() for file, text in files.items()},
        },
    ]


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    its_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
) -> x509.Certificate:
    def named(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(its_key, hashes.SHA256())
    )
