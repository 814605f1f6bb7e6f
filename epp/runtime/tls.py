"""Server certificates: given ones from a folder, or a self-signed one."""

import datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from epp.errors import ConfigError, Problem


def server_credentials(cert_path: str) -> grpc.ServerCredentials:
    """Credentials for `--secure-serving`.

    Raises:
        ConfigError: `tls.crt` or `tls.key` is missing in `cert_path` or cannot be used.
    """
    key, chain = _read(Path(cert_path)) if cert_path else self_signed()
    try:
        return grpc.ssl_server_credentials([(key, chain)])
    except (ValueError, RuntimeError) as error:
        raise ConfigError(cert_path, Problem("", f"certificate and key cannot be used: {error}")) from None


def _read(folder: Path) -> tuple[bytes, bytes]:
    problems, read = [], []
    for name, load in (
        ("tls.key", lambda data: serialization.load_pem_private_key(data, None)),
        ("tls.crt", x509.load_pem_x509_certificates),
    ):
        try:
            data = (folder / name).read_bytes()
            load(data)
            read.append(data)
        except OSError as error:
            problems.append(Problem(name, f"cannot be read: {error.strerror}"))
        except (ValueError, TypeError) as error:
            problems.append(Problem(name, f"is not usable PEM: {error}"))
    if problems:
        raise ConfigError(f"--cert-path {folder}", *problems)
    return read[0], read[1]


def self_signed() -> tuple[bytes, bytes]:
    """A P-256 key and a certificate for ten years (0.01 s; an RSA-4096 key takes over two seconds)."""
    key = ec.generate_private_key(ec.SECP256R1())
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
    pem = serialization.Encoding.PEM
    return (
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.public_bytes(pem),
    )
