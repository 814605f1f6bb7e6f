"""Options: what is wrong with values, and the flags made from the struct."""

import re
from typing import Any

import msgspec
import pytest

from epp.durations import Duration
from epp.runtime.options import Options, flags, reference
from epp.runtime.tls_rules import CIPHER_SUITES, TlsRules


def test_the_defaults_are_right() -> None:
    assert list(Options().problems()) == []


def test_every_wrong_value_is_named_by_its_flag() -> None:
    wrong = Options(
        grpc_port=65536,
        grpc_health_port=-1,
        metrics_port=1 << 20,
        admin_port=-5,
        max_request_body_bytes=0,
        max_held_bytes=-1,
        refresh_prometheus_metrics_interval=Duration(0.0),
        zap_encoder="xml",
        transport="quic",
        max_concurrent_streams=0,
        tls_min_version="1.2",
        tls_cipher_suites=("TLS_FAST",),
    )
    assert [problem.path for problem in wrong.problems()] == [
        "--grpc-port",
        "--grpc-health-port",
        "--metrics-port",
        "--admin-port",
        "--max-request-body-bytes",
        "--max-held-bytes",
        "--transport",
        "--max-concurrent-streams",
        "--tls-min-version",
        "--tls-cipher-suites",
        "--refresh-prometheus-metrics-interval",
        "--zap-encoder",
    ]
    assert "'xml' is no log format; write json or console" in str(list(wrong.problems())[-1])


def said(options: Options) -> str:
    return "\n".join(map(str, options.problems()))


ECDSA, RSA = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384"
# What a security profile of a cluster names for TLS 1.3.
MODERN = "TLS_AES_128_GCM_SHA256,TLS_AES_256_GCM_SHA384,TLS_CHACHA20_POLY1305_SHA256"


@pytest.mark.parametrize(
    ("version", "suites", "rules"),
    [
        ("", (), TlsRules()),
        ("VersionTLS12", (), TlsRules("VersionTLS12", tuple(CIPHER_SUITES))),
        ("VersionTLS13", (), TlsRules("VersionTLS13")),
        ("", (f"{RSA},{ECDSA}",), TlsRules("VersionTLS12", (RSA, ECDSA))),
        ("", (f" {RSA} ,, ", ECDSA), TlsRules("VersionTLS12", (RSA, ECDSA))),
        ("", (f"{MODERN},{RSA}",), TlsRules("VersionTLS12", (RSA,))),
        ("VersionTLS13", (MODERN,), TlsRules("VersionTLS13")),
    ],
)
def test_tls_versions_and_suites_by_the_names_of_go(
    version: str, suites: tuple[str, ...], rules: TlsRules
) -> None:
    options = Options(tls_min_version=version, tls_cipher_suites=suites)
    assert said(options) == ""
    assert options.tls_rules == rules


@pytest.mark.parametrize("version", ["1.2", "VersionTLS10", "VersionTLS11", "versiontls12", "TLS13", " "])
def test_other_tls_versions_are_refused(version: str) -> None:
    assert said(Options(tls_min_version=version)) == (
        f"--tls-min-version: {version!r} is no TLS version of HTTP/2; write VersionTLS12 or VersionTLS13"
    )


@pytest.mark.parametrize(
    "suite",
    [
        "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
        "TLS_RSA_WITH_AES_128_GCM_SHA256",
        "TLS_RSA_WITH_RC4_128_SHA",
        "ECDHE-RSA-AES128-GCM-SHA256",
        RSA.lower(),
    ],
)
def test_suites_that_are_unknown_or_forbidden_are_refused_by_name(suite: str) -> None:
    found = said(Options(tls_cipher_suites=(f"{suite},{RSA}", "TLS_FAST")))
    assert found.startswith(
        f"--tls-cipher-suites: unknown or not safe enough for HTTP/2: {suite}, TLS_FAST; write some of "
    )
    assert all(name in found for name in CIPHER_SUITES)
    assert "\n" not in found


def test_suites_of_tls_1_3_alone_would_leave_none_for_tls_1_2() -> None:
    assert "names none for TLS 1.2; set --tls-min-version=VersionTLS13" in said(
        Options(tls_cipher_suites=(MODERN,))
    )


@pytest.mark.parametrize("field", [{"tls_min_version": "VersionTLS13"}, {"tls_cipher_suites": (RSA,)}])
def test_grpcio_takes_neither_versions_nor_suites(field: dict[str, Any]) -> None:
    (flag,) = (f"--{name.replace('_', '-')}" for name in field)
    assert said(Options(**field)) == ""
    assert said(Options(transport="grpcio", secure_serving=False, **field)) == ""
    found = said(Options(transport="grpcio", **field))
    assert found.startswith(f"{flag}: grpcio ")
    assert found.endswith("use --transport=own")


def test_grpcio_takes_the_defaults_written_out() -> None:
    assert said(Options(transport="grpcio", tls_min_version="VersionTLS12", tls_cipher_suites=("",))) == ""


@pytest.mark.parametrize("streams", [-1, 0, (1 << 30) + 1])
def test_a_number_of_streams_that_cannot_be(streams: int) -> None:
    assert "write a number from 1 to 1073741824" in said(Options(max_concurrent_streams=streams))
    assert said(Options(max_concurrent_streams=1)) == ""


def test_every_field_is_one_flag_with_help_and_default() -> None:
    fields = msgspec.structs.fields(Options)
    made = {flag.field: flag for flag in flags()}
    assert list(made) == [field.name for field in fields]
    for field in fields:
        flag = made[field.name]
        assert flag.default == field.default
        assert flag.help.endswith(".")
        assert flag.names[0].strip("-").replace("-", "_") == field.name
    assert made["v"].names == ("-v", "--v")
    shown = {name: flag.shown_default for name, flag in made.items()}
    assert (shown["config_file"], shown["secure_serving"], shown["tracing"]) == ("", "true", "false")
    assert (shown["refresh_metrics_interval"], shown["drain_timeout"], shown["seed"]) == (
        "200ms",
        "30s",
        "-1",
    )


def test_the_reference_has_a_row_for_every_flag() -> None:
    rows = re.findall(r"^\| `(--?[a-z-]+)`", reference(), re.MULTILINE)
    assert rows == [flag.names[0] for flag in flags()]
