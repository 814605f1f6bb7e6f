"""Command-line options of `warmroute serve`: one struct, from which the flags are generated.

Names and defaults are those of the Go picker, so that an image can be swapped under existing charts.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import msgspec

from epp import names
from epp.durations import Duration
from epp.errors import Problem
from epp.runtime.tls_rules import DEFAULT_TLS_VERSION, TlsRules, named_suites, rule_problems

LEAST_GAUGES_INTERVAL_S: Final = 0.1
LOG_FORMATS: Final = ("", "json", "console")
OWN, GRPCIO = TRANSPORTS = ("own", "grpcio")
# HTTP/2 counts them in 32 bits, and a stream's number has 31, of which a proxy uses every other.
_MOST_STREAMS: Final = 1 << 30


def Flag(text: str) -> msgspec.Meta:
    """Help text of one flag."""
    return msgspec.Meta(description=text)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `warmroute serve` runs with."""

    config_file: Annotated[str, Flag("Path of the EndpointPickerConfig file.")] = ""
    config_text: Annotated[str, Flag("The EndpointPickerConfig itself, in place of a file.")] = ""
    endpoint: Annotated[
        tuple[str, ...],
        Flag("An endpoint, host:port or name=host:port; may be repeated. Instead of file-discovery."),
    ] = ()
    pool_name: Annotated[str, Flag("Name of the InferencePool; label of the pool's metrics.")] = ""
    pool_namespace: Annotated[
        str, Flag("Namespace of the InferencePool; empty: that of the environment variable NAMESPACE.")
    ] = ""
    pool_group: Annotated[str, Flag("API group of the InferencePool.")] = "inference.networking.k8s.io"
    grpc_host: Annotated[
        str, Flag("Address the gRPC and metrics ports listen on; empty: all, IPv4 and IPv6.")
    ] = ""
    grpc_port: Annotated[int, Flag("Port of the ext-proc service.")] = names.GRPC_PORT
    grpc_health_port: Annotated[int, Flag("Port of the gRPC health service.")] = names.GRPC_HEALTH_PORT
    transport: Annotated[
        str, Flag("What serves the ext-proc port: own (the picker's HTTP/2) or grpcio (gRPC's library).")
    ] = OWN
    max_concurrent_streams: Annotated[int, Flag("Streams that one connection may have open.")] = 10_000
    metrics_port: Annotated[int, Flag("Port of /metrics; 0 turns it off.")] = names.METRICS_PORT
    admin_port: Annotated[int, Flag("Loopback port that `warmroute explain` asks; 0 turns it off.")] = 9091
    metrics_endpoint_auth: Annotated[
        bool, Flag("Ask Kubernetes who may read /metrics. Has no effect without a cluster.")
    ] = True
    health_checking: Annotated[bool, Flag("Also serve gRPC health on the ext-proc port.")] = False
    secure_serving: Annotated[bool, Flag("Serve ext-proc over TLS.")] = True
    cert_path: Annotated[
        str, Flag("Folder with tls.crt and tls.key; empty: a self-signed certificate is made.")
    ] = ""
    enable_cert_reload: Annotated[
        bool, Flag("Use the certificate in --cert-path anew whenever its files change.")
    ] = False
    tls_min_version: Annotated[
        str, Flag("Oldest TLS version that is served: VersionTLS12 or VersionTLS13.")
    ] = DEFAULT_TLS_VERSION
    tls_cipher_suites: Annotated[
        tuple[str, ...],
        Flag(
            "Cipher suites of TLS 1.2, separated by commas, by the names of Go's crypto/tls; "
            "empty: all that HTTP/2 allows. Those of TLS 1.3 are fixed."
        ),
    ] = ()
    refresh_metrics_interval: Annotated[
        Duration, Flag("How often each engine's metrics are read while there is traffic; at least 50ms.")
    ] = Duration(0.2)
    refresh_prometheus_metrics_interval: Annotated[
        Duration, Flag("How often the gauges of pool and endpoints are renewed; at least 100ms.")
    ] = Duration(5.0)
    metrics_staleness_threshold: Annotated[
        Duration, Flag("Age at which an engine's metrics are no longer trusted.")
    ] = Duration(2.0)
    drain_timeout: Annotated[
        Duration, Flag("How long new requests are still served after SIGTERM, while health says NOT_SERVING.")
    ] = Duration(30.0)
    disable_endpoint_subset_filter: Annotated[bool, Flag("Ignore the gateway's subset hint.")] = False
    max_request_body_bytes: Annotated[int, Flag("Largest request body; more is answered 413.")] = 32 << 20
    max_held_bytes: Annotated[
        int, Flag("Bytes held in the process for requests and answers; more is answered 429.")
    ] = 1 << 30
    tracing: Annotated[bool, Flag("Accepted for compatibility; spans are not emitted yet.")] = False
    zap_encoder: Annotated[
        str, Flag("Log format: json or console; empty: console on a terminal, else json.")
    ] = ""
    v: Annotated[int, Flag("Log verbosity; from 3 on, one line a request.")] = 2
    seed: Annotated[int, Flag("Seed of the draws that break ties; -1: from the system.")] = -1

    def problems(self) -> Iterator[Problem]:
        """What is wrong with single values; `path` is the flag."""
        for flag, port in (
            ("--grpc-port", self.grpc_port),
            ("--grpc-health-port", self.grpc_health_port),
            ("--metrics-port", self.metrics_port),
            ("--admin-port", self.admin_port),
        ):
            if not 0 <= port <= 65535:
                yield Problem(flag, f"{port} is no port; write a number from 0 to 65535")
        for flag, size in (
            ("--max-request-body-bytes", self.max_request_body_bytes),
            ("--max-held-bytes", self.max_held_bytes),
        ):
            if size < 1:
                yield Problem(flag, f"{size} is no size; write a number of bytes from 1 on")
        if self.transport not in TRANSPORTS:
            yield Problem("--transport", f"{self.transport!r} is no transport; write own or grpcio")
        if not 1 <= self.max_concurrent_streams <= _MOST_STREAMS:
            yield Problem(
                "--max-concurrent-streams",
                f"{self.max_concurrent_streams} is no limit; write a number from 1 to {_MOST_STREAMS}",
            )
        yield from self._tls_problems()
        if self.refresh_prometheus_metrics_interval < LEAST_GAUGES_INTERVAL_S:
            shortest = Duration(LEAST_GAUGES_INTERVAL_S)
            given = self.refresh_prometheus_metrics_interval
            yield Problem(
                "--refresh-prometheus-metrics-interval", f"{given} is too short; the least is {shortest}"
            )
        if self.zap_encoder not in LOG_FORMATS:
            yield Problem("--zap-encoder", f"{self.zap_encoder!r} is no log format; write json or console")

    def _tls_problems(self) -> Iterator[Problem]:
        yield from rule_problems(self.tls_min_version, self.tls_cipher_suites)
        if self.transport != GRPCIO or not self.secure_serving:
            return
        # Its Python interface has neither; what its environment sets holds for the whole process.
        if self.tls_min_version not in ("", DEFAULT_TLS_VERSION):
            yield Problem("--tls-min-version", "grpcio always serves TLS 1.2 and 1.3; use --transport=own")
        if named_suites(self.tls_cipher_suites):
            yield Problem("--tls-cipher-suites", "grpcio takes none from us; use --transport=own")

    @property
    def tls_rules(self) -> TlsRules:
        """What the TLS flags say, of options without problems."""
        return TlsRules.of(self.tls_min_version, self.tls_cipher_suites)


class FlagSpec(NamedTuple):
    """One field of `Options` as a flag.

    Attributes:
        field: its name in `Options`.
        names: how it is written, the usual form first.
        kind: `str`, `bool`, `int`, `Duration`, or a tuple of str for a flag that may be repeated.
        shown_default: the default as it would be written; empty where there is none.
    """

    field: str
    names: tuple[str, ...]
    kind: Any
    help: str
    default: Any
    shown_default: str


def flags() -> Iterator[FlagSpec]:
    """All of them, in the order of `Options`."""
    hints = get_type_hints(Options, include_extras=True)
    for field in msgspec.structs.fields(Options):
        kind, meta = get_args(hints[field.name])
        written = ("-v", "--v") if field.name == "v" else ("--" + field.name.replace("_", "-"),)
        shown = str(field.default).lower() if kind is bool else str(field.default or "")
        if kind is int:
            shown = str(field.default)
        yield FlagSpec(field.name, written, kind, meta.description, field.default, shown)


def reference() -> str:
    """docs/flags.md: the flags for people."""
    lines = [
        "# Flags of `warmroute serve`",
        "",
        "Written as Go programs take them: `--flag=value` or `--flag value`; a boolean also as `--flag`. A",
        "duration has a unit: `200ms`, `5s`, `1m30s`.",
        "",
        "| Flag | Type | Default | Meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {', '.join(f'`{name}`' for name in flag.names)} | {_type_name(flag.kind)} "
        f"| {f'`{flag.shown_default}`' if flag.shown_default else ''} | {flag.help} |"
        for flag in flags()
    ]
    return "\n".join(lines) + "\n"


def _type_name(kind: Any) -> str:
    return {str: "text", bool: "boolean", int: "number", Duration: "duration"}.get(kind, "text, repeatable")
