"""Server certificates: given ones from a folder, or a self-signed one."""

import datetime
from collections.abc import Callable
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import NameOID

from epp.errors import ConfigError, Problem

_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


def server_credentials(cert_path: str) -> grpc.ServerCredentials:
    """Credentials for `--secure-serving`: the key and certificate in `cert_path`, or a new self-signed one.

    Raises:
        ConfigError: `tls.crt` or `tls.key` is missing in `cert_path`, cannot be used, or is not the other's.
    """
    key, chain = _read(Path(cert_path)) if cert_path else self_signed()
    return grpc.ssl_server_credentials([(key, chain)])


def _read(folder: Path) -> tuple[bytes, bytes]:
    """Key and certificate chain. An expired certificate is taken: proxies do not verify it by default."""
    problems: list[Problem] = []
    key_pem, key = _load(folder / "tls.key", _public_key, problems)
    chain_pem, certified = _load(folder / "tls.crt", _certified_key, problems)
    if not problems and key != certified:
        problems.append(Problem("tls.key", "is not the key of the first certificate in tls.crt"))
    if problems:
        raise ConfigError(f"--cert-path {folder}", *problems)
    return key_pem, chain_pem


def _load(
    file: Path, public_key: Callable[[bytes], PublicKeyTypes], problems: list[Problem]
) -> tuple[bytes, PublicKeyTypes | None]:
    """The file's bytes and the public key in them."""
    try:
        pem = file.read_bytes()
        return pem, public_key(pem)
    except OSError as error:
        problems.append(Problem(file.name, f"cannot be read: {error.strerror}"))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        problems.append(Problem(file.name, f"cannot be used: {error}"))
    return b"", None


def _public_key(pem: bytes) -> PublicKeyTypes:
    key = serialization.load_pem_private_key(pem, None).public_key()
    if isinstance(key, rsa.RSAPublicKey | ed25519.Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES):
        return key
    raise ValueError("gRPC serves RSA, Ed25519 and ECDSA P-256, P-384, P-521 keys only")


def _certified_key(pem: bytes) -> PublicKeyTypes:
    return x509.load_pem_x509_certificates(pem)[0].public_key()


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
