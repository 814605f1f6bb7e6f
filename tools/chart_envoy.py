"""The lab's Envoy configuration as a template of the chart, so that it runs what end-to-end tests prove."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml

from epp import names
from epp.lab.envoy import FORGED_HEADERS, BodyModes, PickerAddress, envoy_config

_FAIL_OPEN, _TLS, _SERVICE, _GRPC = (
    ".Values.router.proxy.failOpen",
    '(include "warmroute.secure" .)',
    '(eq .Values.router.proxy.mode "service")',
    '(eq .Values.router.modelServers.protocol "grpc")',
)
_CONDITIONS = {
    "fail_open": _FAIL_OPEN,
    "fail_closed": f"not {_FAIL_OPEN}",
    "engines": _FAIL_OPEN,
    "tls": _TLS,
    "plain_health": _TLS,
}
ADMIN_PORT, LISTEN_PORT, READY_PORT = 19000, 8081, 19001
HEALTH_INTERVAL_S = HEALTH_TIMEOUT_S = 1.0

_READY_LISTENER = """\
  # For probes and for who reads metrics; the admin port itself stays on the loopback interface.
  - name: ready
    address: {socket_address: {address: @LISTEN_HOST@, port_value: @READY_PORT@}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": @MANAGER@
          stat_prefix: ready
          route_config:
            name: ready
            virtual_hosts:
            - name: admin
              domains: ["*"]
              routes:
              - match: {path: /ready}
                route: {cluster: admin}
              - match: {path: /stats/prometheus}
                route: {cluster: admin}
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
"""
_ADMIN_CLUSTER = """\
  - name: admin
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: admin
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: @ADMIN_PORT@}}}
"""
_BY_NAME = "type: STRICT_DNS\n    dns_lookup_family: V4_PREFERRED"
_HTTP1, _HTTP2 = "{http_protocol_options: {}}", "{http2_protocol_options: {}}"
_HEALTH_PATH = '{{ include "warmroute.healthPath" . }}'


def _either(condition: str, one: str, other: str, depth: int = 4) -> str:
    """Lines of a template: one thing where the condition holds, else the other."""
    lines = (condition, one, "{{- else }}", other, "{{- end }}")
    return "\n".join(" " * depth + line for line in lines)


_EDITS = (
    ("  listeners:\n", "  listeners:\n" + _READY_LISTENER),
    ("  clusters:\n", "  clusters:\n" + _ADMIN_CLUSTER),
    # Engines and, where they are in other pods, pickers are found by headless Services.
    ("  - name: engines\n    type: STATIC", f"  - name: engines\n    {_BY_NAME}"),
    (
        "  - name: picker\n    type: STATIC",
        "  - name: picker\n" + _either(f"{{{{- if {_SERVICE} }}}}", _BY_NAME, "type: STATIC"),
    ),
    (_HTTP1, f"{{{{ if {_GRPC} }}}}{_HTTP2}{{{{ else }}}}{_HTTP1}{{{{ end }}}}"),
    (
        "http_health_check: {path: /health}",
        _either(
            f"{{{{- if {_GRPC} }}}}",
            "tcp_health_check: {}",
            f"http_health_check: {{path: {_HEALTH_PATH}}}",
            6,
        ).lstrip(" "),
    ),
)
"""What a cluster needs beyond one machine: names for addresses, a way for probes, engines of gRPC."""


def proven() -> Any:
    """The lab's Envoy configuration, parsed: what a fail-open proxy of pickers over TLS is given."""
    return yaml.safe_load(
        envoy_config(
            listen_port=LISTEN_PORT,
            admin_port=ADMIN_PORT,
            pickers=[PickerAddress("127.0.0.1", names.GRPC_PORT, names.GRPC_HEALTH_PORT)],
            endpoints=[("127.0.0.1", 8000)],
            mode=BodyModes.FULL_DUPLEX,
            tls=True,
            health_interval_s=HEALTH_INTERVAL_S,
            health_timeout_s=HEALTH_TIMEOUT_S,
        )
    )


def envoy_template() -> str:
    """The lab's Envoy configuration as a Helm template."""
    source = files("epp.lab").joinpath("envoy.yaml.in").read_text(encoding="utf-8")
    for old, new in _EDITS:
        if source.count(old) != 1:
            raise SystemExit(
                f"tools/chart.py: {old!r} is not in epp/lab/envoy.yaml.in once, but {source.count(old)} times"
            )
        source = source.replace(old, new)
    body = "\n".join(_conditional(source.splitlines()[2:]))
    values = _template_values()
    body = re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], body)
    head = "{{- /* Written by tools/chart.py from epp/lab/envoy.yaml.in. */ -}}\n"
    return head + '{{- define "warmroute.envoy" -}}\n' + body + "\n{{- end -}}\n"


def _conditional(lines: list[str]) -> Iterator[str]:
    """`#if NAME` to `#end` as conditions of Helm; what no proxy of the chart has is left out."""
    keep = True
    for line in lines:
        name = line.removeprefix("#if ")
        if name != line:
            keep = name in _CONDITIONS
            if keep:
                yield f"{{{{- if {_CONDITIONS[name]} }}}}"
        elif line == "#end":
            if keep:
                yield "{{- end }}"
            keep = True
        elif keep:
            yield line


def _template_values() -> dict[str, str]:
    """What stands for each @NAME@: an expression of Helm, or what the lab's configuration has there."""
    config = proven()
    (listener,) = config["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    constants: dict[str, object] = {
        "ADMIN_PORT": ADMIN_PORT,
        "LISTEN_PORT": LISTEN_PORT,
        "READY_PORT": READY_PORT,
        "MANAGER": manager["@type"],
        "BUFFER_BYTES": listener["per_connection_buffer_limit_bytes"],
        "FORGED_HEADERS": [{"remove": name} for name in FORGED_HEADERS],
        "CONTROL_HEADERS": host["request_headers_to_remove"],
        "DESTINATION": names.DESTINATION_ENDPOINT,
        "PROCESSING_MODE": manager["http_filters"][0]["typed_config"]["processing_mode"],
        "HEALTH_INTERVAL": f"{HEALTH_INTERVAL_S}s",
        "HEALTH_TIMEOUT": f"{HEALTH_TIMEOUT_S:g}s",
        "SERVICE": names.EXT_PROC_SERVICE,
    }
    return {name: json.dumps(value) for name, value in constants.items()} | {
        "LISTEN_HOST": "{{ .Values.router.proxy.listenAddress | toJson }}",
        "FAIL_OPEN": f"{{{{ {_FAIL_OPEN} }}}}",
        "ENGINES": '{{ include "warmroute.envoy.engines" . }}',
        "PICKERS": '{{ include "warmroute.envoy.pickers" . }}',
    }
