"""Options: what is wrong with values, and the flags made from the struct."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from epp.cli import main
from epp.durations import Duration
from epp.errors import ConfigError
from epp.runtime.flag_values import REFUSED, Size, pool_of_pod, target_ports
from epp.runtime.options import Options, completed, flags, reference
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


# -- the flags of the field -------------------------------------------------------------------------

OF_THE_FIELD = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "runtime" / "flags-of-the-field.yaml").read_text()
)


@pytest.mark.parametrize("row", OF_THE_FIELD, ids=lambda row: row["argument"])
def test_each_flag_of_the_field_is_accepted_or_refused_with_its_reason(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Options] = []
    monkeypatch.setattr("epp.runtime.app.serve", lambda options, tracing, environment: served.append(options))
    monkeypatch.setattr("epp.runtime.logs.set_up", lambda *arguments: None)
    monkeypatch.setenv("POD_NAME", "epp-5d8f6c9b7d-abcde")
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    result = CliRunner().invoke(main, ["serve", row["argument"], *row.get("with", ())])
    flag = row["argument"].partition("=")[0]
    if row["outcome"] == "refused":
        assert (result.exit_code, served) == (2, [])
        assert flag in result.output
        assert row["says"] in result.output
        return
    assert result.exit_code == 0, result.output
    assert len(served) == 1
    (help_text,) = [spec.help for spec in flags() if flag in spec.names]
    assert (row["outcome"] == "without effect") == ("without effect" in help_text)


def test_every_refused_flag_is_in_that_table() -> None:
    refused = {row["argument"].partition("=")[0] for row in OF_THE_FIELD if row["outcome"] == "refused"}
    assert set(REFUSED) <= refused
    assert not set(REFUSED) & {name for flag in flags() for name in flag.names}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4194304", 4 << 20),
        ("10MiB", 10 << 20),
        ("10Mi", 10 << 20),
        ("25MB", 25_000_000),
        ("25M", 25_000_000),
        ("64k", 64_000),
        ("64KB", 64_000),
        ("1.5Ki", 1536),
        (" 7B ", 7),
        ("100b", 100),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert Size.parse(text) == size
    assert str(Size.parse(text)) == str(size)


@pytest.mark.parametrize(
    "text", ["", "B", "1.5", "0.1k1", "-1", "1e6", "10MBB", "10 MB", "1iB", "9999999999999P"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; write whole bytes"):
        Size.parse(text)


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ((), ()),
        (("8000",), (8000,)),
        (("8001,8000", "8001", "1"), (8001, 8000, 1)),
        (("1,2,3,4", "5,6,7,8"), tuple(range(1, 9))),
    ],
)
def test_target_ports_keep_their_order_once_each(values: tuple[str, ...], ports: tuple[int, ...]) -> None:
    assert target_ports(values) == ports


@pytest.mark.parametrize("value", ["0", "65536", "8000, 8001", "a", "", "1,,2", "-1", "\u0661"])
def test_what_is_no_port(value: str) -> None:
    assert "is no port; write numbers from 1 to 65535" in said(Options(endpoint_target_ports=(value,)))


@pytest.mark.parametrize(("ports", "count"), [((), 0), (("1,2,3,4,5,6,7,8", "9"), 9)])
def test_a_selector_needs_one_to_eight_ports(ports: tuple[str, ...], count: int) -> None:
    found = said(Options(endpoint_selector="a=b", endpoint_target_ports=ports))
    assert found == f"--endpoint-target-ports: {count} ports; --endpoint-selector needs 1 to 8"
    assert said(Options(endpoint_target_ports=ports)) == ""


@pytest.mark.parametrize(
    ("selector", "wrong"),
    [
        ("app=vllm", ""),
        ("app.kubernetes.io/name=vllm,tier=, x=1.0_b", ""),
        ("app", "'app'"),
        ("app==vllm", "'app==vllm'"),
        ("app in (a", "'app in (a'"),
        ("app=a,,b=c", "''"),
        ("App/x=1", "'App/x=1'"),
        ("a=" + "x" * 64, "'a=xx"),
    ],
)
def test_selectors_are_pairs_of_key_and_value(selector: str, wrong: str) -> None:
    found = said(Options(endpoint_selector=selector, endpoint_target_ports=("1",)))
    assert found.startswith(f"--endpoint-selector: {wrong}") if wrong else found == ""


def test_a_pool_by_name_or_by_selector() -> None:
    both = Options(pool_name="p", endpoint_selector="a=b", endpoint_target_ports=("1",))
    assert said(both) == "--endpoint-selector: give --pool-name or --endpoint-selector, not both"


@pytest.mark.parametrize(
    ("pod", "pool"),
    [
        ("epp-5d8f6c9b7d-abcde", "epp"),
        ("my-llm-epp-5d8f6c9b7d-abcde", "my-llm-epp"),
        ("epp-abcde", None),
        ("epp", None),
        ("", None),
        ("-a-b", None),
    ],
)
def test_the_pool_of_a_pod(pod: str, pool: str | None) -> None:
    assert pool_of_pod(pod) == pool


def test_the_environment_fills_in_what_flags_leave_out() -> None:
    environment = {"NAMESPACE": "team", "POD_NAME": "epp-a-b"}
    assert completed(Options(), {}).pool_namespace == "default"
    assert completed(Options(), environment) == Options(pool_namespace="team")
    assert completed(Options(pool_namespace="n"), environment).pool_namespace == "n"
    chosen = Options(endpoint_selector="a=b", endpoint_target_ports=("1",))
    assert completed(chosen, environment).pool_name == "epp"
    with pytest.raises(ConfigError, match="POD_NAME"):
        completed(chosen, {})


@pytest.mark.parametrize("field", ["config_file", "pool_name", "cert_path", "metrics_cert_dir", "transport"])
def test_a_lost_value_is_told_where_the_next_flag_stands_in_its_place(field: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    assert f"{flag}: its value is '--seed=3', the next flag; its own is missing" in said(
        Options(**{field: "--seed=3"})
    )


def test_small_sizes_and_sizes_without_effect() -> None:
    assert "too small for the picker's messages" in said(Options(grpc_max_send_msg_size=Size(1000)))
    assert said(Options(grpc_max_send_msg_size=Size(128 << 10))) == ""
    grpcio = Options(transport="grpcio", grpc_max_recv_msg_size=Size(1 << 20))
    assert said(grpcio) == "--grpc-max-recv-msg-size: has no effect with grpcio; use --transport=own"
    small = Options(grpc_max_recv_msg_size=Size(16_383))
    assert said(small) == "--grpc-max-recv-msg-size: 16383 is less than one frame; the least is 16Ki"
    assert said(Options(grpc_max_recv_msg_size=Size(16_384))) == ""
