"""Command-line options of `warmroute serve`: one struct, from which the flags are generated.

Names and defaults are those of the Go picker, so that an image can be swapped under existing charts.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import msgspec

from epp import names
from epp.durations import Duration
from epp.errors import ConfigError, Problem
from epp.http2.codes import LEAST_MAX_FRAME_BYTES
from epp.runtime.flag_values import (
    MOST_TARGET_PORTS,
    REFUSED,
    STACKTRACE_LEVELS,
    TIME_ENCODINGS,
    Size,
    log_level,
    pool_of_pod,
    selector_fault,
    target_ports,
)
from epp.runtime.tls_rules import DEFAULT_TLS_VERSION, TlsRules, named_suites, rule_problems

LEAST_GAUGES_INTERVAL_S: Final = 0.1
LOG_FORMATS: Final = ("", "json", "console")
OWN, GRPCIO = TRANSPORTS = ("own", "grpcio")
# HTTP/2 counts them in 32 bits, and a stream's number has 31, of which a proxy uses every other.
_MOST_STREAMS: Final = 1 << 30
# A piece of a body with what goes around it, and headers as large as a proxy lets them be.
LEAST_SEND_BYTES: Final = 128 << 10


def Flag(text: str) -> msgspec.Meta:
    """Help text of one flag."""
    return msgspec.Meta(description=text)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `warmroute serve` runs with."""

    config_file: Annotated[str, Flag("Path of the EndpointPickerConfig file.")] = ""
    config_text: Annotated[str, Flag("The EndpointPickerConfig itself, in place of a file.")] = ""
    watch_config_file: Annotated[
        bool, Flag("Follow changes of --config-file. What cannot change while serving is told in the log.")
    ] = True
    allow_experimental_plugins: Annotated[bool, Flag("Allow plugins that are alpha.")] = False
    validate_only: Annotated[
        bool, Flag("Check flags, configuration, endpoints and certificates, then end without serving.")
    ] = False
    endpoint: Annotated[
        tuple[str, ...],
        Flag("An endpoint, host:port or name=host:port; may be repeated. Instead of file-discovery."),
    ] = ()
    pool_name: Annotated[str, Flag("Name of the InferencePool; label of the pool's metrics.")] = ""
    pool_namespace: Annotated[
        str, Flag("Namespace of the InferencePool; empty: that of the environment variable NAMESPACE.")
    ] = ""
    pool_group: Annotated[str, Flag("API group of the InferencePool.")] = names.POOL_GROUP
    endpoint_selector: Annotated[
        str, Flag("Label selector of the engines' pods, in place of --pool-name: there is no InferencePool.")
    ] = ""
    endpoint_target_ports: Annotated[
        tuple[str, ...],
        Flag(
            f"Ports of the pods of --endpoint-selector, 1 to {MOST_TARGET_PORTS}, "
            "separated by commas or repeated."
        ),
    ] = ()
    kubeconfig: Annotated[
        str, Flag("File that tells how to reach Kubernetes; empty: as a pod does, by its service account.")
    ] = ""
    ha_enable_leader_election: Annotated[
        bool,
        Flag("Of several replicas only the leader is ready. Without it all are, and serve side by side."),
    ] = False
    grpc_host: Annotated[
        str, Flag("Address the gRPC and metrics ports listen on; empty: all, IPv4 and IPv6.")
    ] = ""
    grpc_port: Annotated[int, Flag("Port of the ext-proc service.")] = names.GRPC_PORT
    grpc_health_port: Annotated[int, Flag("Port of the gRPC health service.")] = names.GRPC_HEALTH_PORT
    transport: Annotated[
        str, Flag("What serves the ext-proc port: own (the picker's HTTP/2) or grpcio (gRPC's library).")
    ] = OWN
    max_concurrent_streams: Annotated[int, Flag("Streams that one connection may have open.")] = 10_000
    grpc_max_recv_msg_size: Annotated[
        Size, Flag("Largest message from the proxy, such as 10MiB; 0: what the largest body needs.")
    ] = Size(0)
    grpc_max_send_msg_size: Annotated[
        Size,
        Flag("Accepted from 128Ki on, without effect: the picker cuts what it sends into smaller messages."),
    ] = Size(0)
    enable_grpc_stream_metrics: Annotated[
        bool, Flag("Accepted for compatibility; metrics of ext-proc streams are always there.")
    ] = False
    enable_pprof: Annotated[
        bool, Flag("Accepted for compatibility, without effect: there are no Go profiles.")
    ] = True
    metrics_port: Annotated[int, Flag("Port of /metrics; 0 turns it off.")] = names.METRICS_PORT
    metrics_cert_dir: Annotated[
        str, Flag("Folder with tls.crt and tls.key, to serve /metrics over TLS; read at the start.")
    ] = ""
    metrics_client_ca_file: Annotated[
        str, Flag("Authorities (PEM) that must have signed the certificate of who reads /metrics.")
    ] = ""
    admin_port: Annotated[
        int, Flag("Port of the admin pages, which `warmroute explain` asks; 0 turns it off.")
    ] = 9091
    admin_host: Annotated[
        str, Flag("Address the admin port listens on; empty: all. Who reaches it may read all of it.")
    ] = "127.0.0.1"
    metrics_endpoint_auth: Annotated[
        bool, Flag("Ask Kubernetes who may read /metrics. Without Kubernetes all may.")
    ] = True
    legacy_metric_names: Annotated[
        bool, Flag("Show metrics under their deprecated names too, for old dashboards.")
    ] = False
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
        Duration,
        Flag(
            "How often each engine's metrics are read while there is traffic; at least 50ms, and less often "
            "where there are more than 300 endpoints."
        ),
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
    emit_endpoint_scores: Annotated[
        bool, Flag("Tell the proxy every scored endpoint's total score, in dynamic metadata.")
    ] = False
    max_request_body_bytes: Annotated[int, Flag("Largest request body; more is answered 413.")] = 32 << 20
    max_held_bytes: Annotated[
        int, Flag("Bytes held in the process for requests and answers; more is answered 429.")
    ] = 1 << 30
    tracing: Annotated[
        bool, Flag("Make spans of requests; OTEL_* variables say where they go. Needs the extra `otel`.")
    ] = False
    zap_encoder: Annotated[
        str, Flag("Log format: json or console; empty: console on a terminal, else json.")
    ] = ""
    v: Annotated[int, Flag("Log verbosity; from 3 on, one line a request.")] = 2
    zap_log_level: Annotated[
        str, Flag("In place of -v: error, info, debug (1), or a whole number above 0; empty: -v counts.")
    ] = ""
    zap_devel: Annotated[bool, Flag("Console lines, unless --zap-encoder says otherwise.")] = False
    zap_stacktrace_level: Annotated[
        str, Flag("Accepted (info, error, panic), without effect: faults come with their trace.")
    ] = ""
    zap_time_encoding: Annotated[
        str, Flag("Accepted (epoch, iso8601, ...), without effect: JSON lines have ISO 8601 in UTC.")
    ] = ""
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
        yield from self._size_problems()
        yield from self._log_problems()
        yield from self._discovery_problems()
        yield from self._metrics_problems()
        yield from self._swallowed_flags()

    def _size_problems(self) -> Iterator[Problem]:
        if 0 < self.grpc_max_send_msg_size < LEAST_SEND_BYTES:
            yield Problem(
                "--grpc-max-send-msg-size",
                f"{self.grpc_max_send_msg_size} is too small for the picker's messages; the least is 128Ki",
            )
        if 0 < self.grpc_max_recv_msg_size < LEAST_MAX_FRAME_BYTES:
            yield Problem(
                "--grpc-max-recv-msg-size",
                f"{self.grpc_max_recv_msg_size} is less than one frame; the least is 16Ki",
            )
        if self.grpc_max_recv_msg_size and self.transport == GRPCIO:
            yield Problem("--grpc-max-recv-msg-size", "has no effect with grpcio; use --transport=own")

    def _log_problems(self) -> Iterator[Problem]:
        if self.zap_encoder not in LOG_FORMATS:
            yield Problem("--zap-encoder", f"{self.zap_encoder!r} is no log format; write json or console")
        try:
            log_level(self.zap_log_level or "info")
        except ValueError as error:
            yield Problem("--zap-log-level", str(error))
        for flag, value, known in (
            ("--zap-stacktrace-level", self.zap_stacktrace_level, STACKTRACE_LEVELS),
            ("--zap-time-encoding", self.zap_time_encoding, TIME_ENCODINGS),
        ):
            if value and value not in known:
                yield Problem(flag, f"{value!r} is unknown; write one of {', '.join(known)}")

    def _discovery_problems(self) -> Iterator[Problem]:
        if self.pool_name and self.endpoint_selector:
            yield Problem("--endpoint-selector", "give --pool-name or --endpoint-selector, not both")
        try:
            ports = target_ports(self.endpoint_target_ports)
        except ValueError as error:
            yield Problem("--endpoint-target-ports", str(error))
        else:
            if self.endpoint_selector and not 1 <= len(ports) <= MOST_TARGET_PORTS:
                yield Problem(
                    "--endpoint-target-ports",
                    f"{len(ports)} ports; --endpoint-selector needs 1 to {MOST_TARGET_PORTS}",
                )
        if self.endpoint_selector and (fault := selector_fault(self.endpoint_selector)):
            yield Problem("--endpoint-selector", fault)

    def _metrics_problems(self) -> Iterator[Problem]:
        if self.metrics_client_ca_file and not self.metrics_cert_dir:
            yield Problem("--metrics-client-ca-file", "needs --metrics-cert-dir: only TLS shows certificates")
        if self.metrics_cert_dir and not self.metrics_client_ca_file and not self.metrics_endpoint_auth:
            yield Problem(
                "--metrics-cert-dir",
                "TLS alone shuts nobody out; set --metrics-client-ca-file or --metrics-endpoint-auth",
            )

    def _swallowed_flags(self) -> Iterator[Problem]:
        """Of a command line that lost a value, the next flag stands in its place."""
        for flag in flags():
            value = getattr(self, flag.field)
            if isinstance(value, str) and value.startswith("--"):
                yield Problem(flag.names[0], f"its value is {value!r}, the next flag; its own is missing")

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

    @property
    def verbosity(self) -> int:
        """That of `zap_log_level`, else `v`; below 0 = errors only."""
        return log_level(self.zap_log_level) if self.zap_log_level else self.v

    @property
    def log_format(self) -> str:
        """One of `LOG_FORMATS`."""
        return self.zap_encoder or ("console" if self.zap_devel else "")


def completed(options: Options, environment: Mapping[str, str]) -> Options:
    """The options with what the environment says in place of missing flags: NAMESPACE, POD_NAME.

    Raises:
        ConfigError: pods are chosen by a selector and POD_NAME does not tell the pool's name.
    """
    namespace = options.pool_namespace or environment.get("NAMESPACE") or "default"
    options = msgspec.structs.replace(options, pool_namespace=namespace)
    if not options.endpoint_selector:
        return options
    pod_name = environment.get("POD_NAME", "")
    pool_name = pool_of_pod(pod_name)
    if pool_name is None:
        wanted = "--endpoint-selector needs the pod's name, <deployment>-<replica set>-<pod>"
        raise ConfigError("environment", Problem("POD_NAME", f"{pod_name!r}: {wanted}"))
    return msgspec.structs.replace(options, pool_name=pool_name)


class FlagSpec(NamedTuple):
    """One field of `Options` as a flag.

    Attributes:
        field: its name in `Options`.
        names: how it is written, the usual form first.
        kind: `str`, `bool`, `int`, `Duration`, `Size`, or a tuple of str for a flag that may be repeated.
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
        if kind in (int, Size):
            shown = str(field.default)
        yield FlagSpec(field.name, written, kind, meta.description, field.default, shown)


def reference() -> str:
    """docs/flags.md: the flags for people."""
    lines = [
        "# Flags of `warmroute serve`",
        "",
        "Written as Go programs take them: `--flag=value` or `--flag value`, with two dashes or one; a",
        "boolean also as `--flag`. A duration has a unit: `200ms`, `5s`, `1m30s`. A size is whole bytes,",
        "or has a unit: `10MiB`, `25MB`.",
        "",
        "| Flag | Type | Default | Meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {', '.join(f'`{name}`' for name in flag.names)} | {_type_name(flag.kind)} "
        f"| {f'`{flag.shown_default}`' if flag.shown_default else ''} | {flag.help} |"
        for flag in flags()
    ]
    lines += ["", "Flags of the field's picker that are refused:", ""]
    lines += [f"- `{flag}`: {why}." for flag, why in REFUSED.items()]
    lines += [
        "",
        "The environment counts where flags are missing: `NAMESPACE` for `--pool-namespace`, and with",
        "`--endpoint-selector` the pool's name from `POD_NAME`, `<deployment>-<replica set>-<pod>`.",
    ]
    return "\n".join(lines) + "\n"


def _type_name(kind: Any) -> str:
    names = {str: "text", bool: "boolean", int: "number", Duration: "duration", Size: "size"}
    return names.get(kind, "text, repeatable")
