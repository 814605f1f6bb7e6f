"""The command line: Go's forms of flags, command lines of existing charts, and errors in words."""

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from epp.cli import main
from epp.errors import ConfigError, Problem, WarmrouteError
from epp.runtime import app, logs
from epp.runtime.options import Options, flags

Invoke = Callable[..., Result]
SUITE = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"


@pytest.fixture(autouse=True)
def _keep_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.delenv("NAMESPACE", raising=False)
    monkeypatch.setattr(logs, "set_up", lambda encoder, verbosity: None)
    yield
    logging.getLogger("epp").setLevel(logging.NOTSET)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options that `serve` was called with."""
    called: list[Options] = []
    monkeypatch.setattr(app, "serve", lambda options, tracing, environment: called.append(options))
    return called


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, terminal_width=100)


def options_of(served: list[Options], *arguments: str) -> Options:
    result = invoke("serve", *arguments)
    assert result.exit_code == 0, result.output
    return served[-1]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--secure-serving=false"], "secure_serving", False),
        (["--secure-serving=F"], "secure_serving", False),
        (["--secure-serving=0"], "secure_serving", False),
        (["--secure-serving=true"], "secure_serving", True),
        (["--secure-serving"], "secure_serving", True),
        (["--tracing"], "tracing", True),
        (["--tracing", "--seed=3"], "tracing", True),
        (["--tracing=TRUE"], "tracing", True),
        ([], "tracing", False),
        (["-v=4"], "v", 4),
        (["-v", "4"], "v", 4),
        (["-v4"], "v", 4),
        (["--v=4"], "v", 4),
        (["--v", "4"], "v", 4),
        (["--v=0x10"], "v", 16),
        (["-zap-encoder", "json"], "zap_encoder", "json"),
        (["-zap-encoder=json"], "zap_encoder", "json"),
        (["-secure-serving=false"], "secure_serving", False),
        (["-health-checking", "-v", "3"], "health_checking", True),
        (["-endpoint=a:1", "--endpoint", "b:2", "-endpoint", "c:3"], "endpoint", ("a:1", "b:2", "c:3")),
        (["-v=4", "--"], "v", 4),
        (["--refresh-metrics-interval=2s"], "refresh_metrics_interval", 2.0),
        (["--refresh-metrics-interval", "50ms"], "refresh_metrics_interval", 0.05),
        (["--drain-timeout=1m30s"], "drain_timeout", 90.0),
        (["--grpc-port=9102"], "grpc_port", 9102),
        (["--endpoint", "a:1", "--endpoint=b=c:2"], "endpoint", ("a:1", "b=c:2")),
        (["--seed=-1"], "seed", -1),
        (["--transport=grpcio"], "transport", "grpcio"),
        ([], "transport", "own"),
        (["--max-concurrent-streams", "100"], "max_concurrent_streams", 100),
        (["--enable-cert-reload"], "enable_cert_reload", True),
        (["--enable-cert-reload=false"], "enable_cert_reload", False),
        (["--tls-min-version=VersionTLS13"], "tls_min_version", "VersionTLS13"),
        (
            ["--tls-cipher-suites=TLS_AES_128_GCM_SHA256,", "--tls-cipher-suites", SUITE],
            "tls_cipher_suites",
            ("TLS_AES_128_GCM_SHA256,", SUITE),
        ),
        (["--pool-namespace", "n"], "pool_namespace", "n"),
        ([], "pool_namespace", "default"),
        (["--config-text", "a: b"], "config_text", "a: b"),
        (["--grpc-max-recv-msg-size=10MiB"], "grpc_max_recv_msg_size", 10 << 20),
        (["--grpc-max-send-msg-size", "25MB"], "grpc_max_send_msg_size", 25_000_000),
        (["--zap-log-level=debug", "-v=5"], "verbosity", 1),
        (["--zap-log-level=5"], "verbosity", 5),
        (["-v=0"], "verbosity", 0),
        (["--zap-devel"], "log_format", "console"),
        (["--zap-devel=true", "--zap-encoder=json"], "log_format", "json"),
        (["--zap-devel=false"], "log_format", ""),
    ],
)
def test_flags_in_the_go_forms(arguments: list[str], field: str, value: Any, served: list[Options]) -> None:
    assert getattr(options_of(served, *arguments), field) == value


def test_the_namespace_comes_from_the_environment_where_no_flag_gives_it(
    served: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMESPACE", "team-a")
    assert options_of(served).pool_namespace == "team-a"
    assert options_of(served, "--pool-namespace=b").pool_namespace == "b"


def test_a_selector_takes_the_pools_name_from_the_pods(
    served: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = "--endpoint-selector=app=vllm", "--endpoint-target-ports=8000,8001"
    monkeypatch.setenv("POD_NAME", "my-epp-5d8f6c9b7d-abcde")
    assert options_of(served, *selector).pool_name == "my-epp"
    assert options_of(served, "--pool-name=p").pool_name == "p"
    for wrong in ("two-parts", "", "-a-b"):
        monkeypatch.setenv("POD_NAME", wrong)
        result = invoke("serve", *selector)
        assert result.exit_code == 2
        assert f"environment: POD_NAME: {wrong!r}: --endpoint-selector needs the pod's name" in result.output


def test_validate_only_does_not_serve(served: list[Options], tmp_path: Path) -> None:
    result = invoke("serve", "--validate-only", "--endpoint=10.0.0.1:8000", "--secure-serving=false")
    assert (result.exit_code, result.output) == (0, "")
    for wrong, said in (
        (["--config-file", str(tmp_path / "none.yaml")], "none.yaml: cannot be read: No such file"),
        (["--config-file", "/dev/zero"], "/dev/zero: longer than 1048576 bytes"),
        (["--cert-path", str(tmp_path)], "tls.crt"),
        (["--config-text", "plugins: x"], "--config-text: $.plugins: expected a list"),
        (["--metrics-cert-dir", str(tmp_path)], "--metrics-cert-dir: "),
    ):
        result = invoke("serve", "--validate-only", "--endpoint=10.0.0.1:8000", *wrong)
        assert result.exit_code == 2
        assert said in result.output
    assert served == []


@pytest.mark.parametrize(
    "arguments", [["--pool-name=p"], ["--endpoint-selector=a=b", "--endpoint-target-ports=1"]]
)
def test_what_kubernetes_tells_is_not_asked_for_when_validating(
    arguments: list[str], served: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_NAME", "a-b-c")
    result = invoke("serve", "--validate-only", *arguments)
    assert result.exit_code == 0, result.output


def test_only_kubernetes_elects_a_leader() -> None:
    result = invoke("serve", "--validate-only", "--endpoint=127.0.0.1:8000", "--ha-enable-leader-election")
    assert result.exit_code == 2
    assert "--ha-enable-leader-election: replicas elect a leader in Kubernetes" in result.output


def test_experimental_plugins_need_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: agent-identity}]\n"
    )
    refused = invoke("config", "check", str(file))
    assert refused.exit_code == 2
    assert "agent-identity is experimental (alpha)" in refused.output
    assert "--allow-experimental-plugins" in refused.output
    for flag in ("--allow-experimental-plugins", "--allow-experimental-plugins=true"):
        allowed = invoke("config", "check", str(file), flag)
        assert allowed.exit_code == 0
        assert "# warning: $.plugins[0].type: agent-identity is experimental and may change" in allowed.output
    for flags_of_serve, code in (([], 2), (["--allow-experimental-plugins"], 0)):
        arguments = ["--validate-only", "--endpoint=10.0.0.1:1", f"--config-file={file}", *flags_of_serve]
        assert invoke("serve", *arguments).exit_code == code


def test_without_flags_the_options_have_their_defaults(served: list[Options]) -> None:
    assert options_of(served) == Options(pool_namespace="default")


@pytest.mark.parametrize(
    "line",
    [
        # The standard chart of the field, for one replica.
        """--pool-name pool --pool-namespace default --pool-group inference.networking.k8s.io
        --zap-encoder json --config-file /config/default-plugins.yaml --grpc-port 9002
        --grpc-health-port 9003 --metrics-port 9090 --tracing=false --v=4""",
        """--pool-name=pool --zap-encoder=json --config-file=/config/p.yaml --tracing=true
        --metrics-endpoint-auth=false --secure-serving=false --health-checking -v 2""",
        # Manifests from before the charts.
        """-pool-name pool -v 4 --zap-encoder json -grpc-port 9002 -grpc-health-port 9003""",
        # A harness that measures pickers.
        """--config-file c.yaml --grpc-port 19002 --grpc-health-port 19003 --metrics-port 19090
        --pool-name bench --pool-namespace bench --zap-encoder json --tracing=false
        --metrics-endpoint-auth=false --secure-serving=false --refresh-metrics-interval=200ms""",
        # Flags of a cluster-wide security profile.
        """--config-file c.yaml --secure-serving=true --cert-path /certs --enable-cert-reload=true
        --tls-min-version=VersionTLS12
        --tls-cipher-suites=TLS_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256""",
    ],
)
def test_command_lines_of_the_field(line: str, served: list[Options]) -> None:
    assert list(options_of(served, *line.split()).problems()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--secure-serving=maybe"], "'maybe' is not a boolean; write true or false"),
        (["--drain-timeout=-5s"], "'-5s' is negative; write a number with a unit"),
        (["--max-concurrent-streams=many"], "'many' is not a whole number"),
        (["--refresh-metrics-interval=5"], "'5' is not a duration; write a number with a unit"),
        (["-v=x"], "'x' is not a whole number"),
        (["--grpc-port=9.5"], "'9.5' is not a whole number"),
        (["--grpc-port"], "requires an argument"),
        (["--grpc-port=9_002"], "'9_002' is not a whole number"),
        (["--grpc-port=\u0669\u0660\u0660\u0662"], "is not a whole number in 64 bits"),
        (["--seed=9223372036854775808"], "is not a whole number in 64 bits"),
        ([f"--seed={'9' * 5000}"], "is not a whole number in 64 bits"),
        (["-grpc-prot=1"], "No such option"),
        (["-config-file", "-secure-serving"], "'--secure-serving', the next flag; its own is"),
        (["-cache-info-metric", "x"], "--cache-info-metric: deprecated in the field and cannot be used"),
        (["--", "-v=4"], "unexpected extra argument (-v=4)"),
        (["--enable-pproff=false"], "--enable-pprof"),
        (["--endpoint-selector=a", "--endpoint-target-ports=1"], "'a' is no label; write key=value"),
        (["--grpc-max-recv-msg-size=lots"], "'lots' is no size; write whole bytes"),
        (["--grpc-max-recv-msg-size=0.1"], "'0.1' is no size"),
        (["--config-file", "--secure-serving=false"], "'--secure-serving=false', the next flag; its own is"),
        (["--cache-info-metric", "x"], "--cache-info-metric: deprecated in the field and cannot be used"),
        (["--cache-info-metric="], "cacheInfoSpec of engineConfigs"),
        (["--grpc-prot=1"], "--grpc-port"),
        (["stray"], "unexpected extra argument (stray)"),
    ],
)
def test_usage_errors_say_what_would_be_right(arguments: list[str], said: str, served: list[Options]) -> None:
    result = invoke("serve", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert served == []


def test_all_wrong_values_are_named_at_once(served: list[Options]) -> None:
    result = invoke("serve", "--grpc-port=70000", "--zap-encoder=xml")
    assert result.exit_code == 2
    assert "--grpc-port: 70000 is no port" in result.output
    assert "--zap-encoder: 'xml' is no log format" in result.output
    assert served == []


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("c.yaml", Problem("$.a", "wrong"), Problem("$.b", "odd")), 2, "c.yaml: $.b: odd"),
        (WarmrouteError("no"), 1, "warmroute: no\n"),
        (
            OSError(errno.EADDRINUSE, "--grpc-port 9002: cannot listen: taken"),
            1,
            "warmroute: --grpc-port 9002",
        ),
        (OSError("in words"), 1, "warmroute: in words\n"),
    ],
)
def test_errors_become_messages(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(options: Options, tracing: object, environment: object) -> None:
        raise error

    monkeypatch.setattr(app, "serve", serve)
    result = invoke("serve")
    assert result.exit_code == code
    assert said in result.output
    assert "Traceback" not in result.output


def test_help_fits_the_terminal_and_shows_every_flag_with_its_default() -> None:
    result = invoke("serve", "--help")
    lines = result.output.splitlines()
    text = " ".join(result.output.split())
    assert max(map(len, lines)) <= 100
    assert "()" not in text
    assert "(empty)" not in text
    for flag in flags():
        assert flag.names[-1] in text
        assert " ".join(flag.help.split()) in text
        if flag.shown_default:
            assert f"[default: {flag.shown_default}]" in text


def test_help_of_the_program_names_its_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert {"serve", "demo", "explain", "config"} <= set(result.output.split())


def test_the_version_is_that_of_the_package() -> None:
    assert invoke("--version").output.startswith("warmroute, version 0.")


@pytest.mark.parametrize("command", [["explain"], ["demo"], ["config", "check"]])
def test_every_command_has_help(command: list[str]) -> None:
    assert invoke(*command, "--help").exit_code == 0
