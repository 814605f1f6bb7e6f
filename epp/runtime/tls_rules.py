"""Which TLS versions and cipher suites may be served, by the names that Go's crypto/tls gives them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from epp.errors import Problem

# HTTP/2 takes nothing older (RFC 9113 9.2).
TLS_VERSIONS: Final = ("VersionTLS12", "VersionTLS13")
DEFAULT_TLS_VERSION: Final = "VersionTLS12"

# Name in IANA's registry and Go: name in OpenSSL. Of Go's suites for TLS 1.2 these are the ones that HTTP/2
# does not forbid (RFC 9113 appendix A): a key for each connection, and encryption that authenticates.
CIPHER_SUITES: Final = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
# Lists of security profiles name them too. They are always served.
_TLS_1_3_SUITES: Final = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


@dataclass(frozen=True, slots=True)
class TlsRules:
    """What a handshake may agree on.

    Attributes:
        min_version: one of `TLS_VERSIONS`.
        cipher_suites: keys of `CIPHER_SUITES`, those served with TLS 1.2.
    """

    min_version: str = DEFAULT_TLS_VERSION
    cipher_suites: tuple[str, ...] = tuple(CIPHER_SUITES)

    @classmethod
    def of(cls, min_version: str, cipher_suites: Iterable[str]) -> "TlsRules":
        """From values in which `rule_problems` finds none; empty ones stand for the defaults."""
        suites = tuple(name for name in named_suites(cipher_suites) if name in CIPHER_SUITES)
        return cls(min_version or DEFAULT_TLS_VERSION, suites or tuple(CIPHER_SUITES))

    def serves(self, *, rsa: bool) -> bool:
        """Whether some client could agree on TLS 1.2 with a key of this kind, or need not."""
        kind = "_RSA_" if rsa else "_ECDSA_"
        return self.min_version != DEFAULT_TLS_VERSION or any(kind in name for name in self.cipher_suites)


def named_suites(values: Iterable[str]) -> list[str]:
    """The names in comma-separated lists, without blanks around them."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def rule_problems(min_version: str, cipher_suites: Iterable[str]) -> Iterator[Problem]:
    """What is wrong with the values of --tls-min-version and --tls-cipher-suites."""
    if min_version and min_version not in TLS_VERSIONS:
        yield Problem(
            "--tls-min-version",
            f"{min_version!r} is no TLS version of HTTP/2; write {' or '.join(TLS_VERSIONS)}",
        )
    suites = named_suites(cipher_suites)
    allowed = f"{', '.join(CIPHER_SUITES)} (those of TLS 1.3 are always served)"
    if wrong := [name for name in suites if name not in CIPHER_SUITES and name not in _TLS_1_3_SUITES]:
        yield Problem(
            "--tls-cipher-suites",
            f"unknown or not safe enough for HTTP/2: {', '.join(wrong)}; write some of {allowed}",
        )
    if suites and min_version != "VersionTLS13" and set(suites) <= set(_TLS_1_3_SUITES):
        yield Problem(
            "--tls-cipher-suites",
            f"names none for TLS 1.2; set --tls-min-version=VersionTLS13, or add some of {allowed}",
        )
