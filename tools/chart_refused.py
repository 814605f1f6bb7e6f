"""Values of llm-d's charts, older and newer, that mean nothing here, and what to write instead."""

from collections.abc import Iterator

import msgspec

from epp.runtime.flag_values import REFUSED


class Refused(msgspec.Struct, frozen=True):
    """One value that is refused where it is there.

    Attributes:
        path: its keys, joined by dots.
        instead: what to do; follows `<path>: `.
        only: refused with these values alone; empty: with all but `harmless`.
        harmless: values that ask for nothing, so that files that spell out defaults carry over.
    """

    path: str
    instead: str
    only: tuple[object, ...] = ()
    harmless: tuple[object, ...] = ()


_MOVED = {
    "inferenceExtension": {
        **{
            key: f"router.epp.{key}"
            for key in (
                "replicas",
                "image",
                "extProcPort",
                "env",
                "flags",
                "pluginsConfigFile",
                "pluginsCustomConfig",
                "extraContainerPorts",
                "affinity",
                "tolerations",
                "resources",
                "metricsDataSource",
                "volumes",
                "volumeMounts",
            )
        },
        "failureMode": "router.inferencePool.failureMode",
        "extraServicePorts": "router.extraServicePorts",
        "monitoring": "router.monitoring",
        "tracing": "router.tracing",
        "sidecar": "router.proxy, with mode: standalone",
        "parser": "router.epp.parsers, a list",
        "inferencePool": "router.inferencePool",
        "modelServers": "router.modelServers",
        "endpointsServer": "router.modelServers, and router.inferencePool.create for createInferencePool",
    },
    "inferencePool": {
        "targetPorts": "router.modelServers.targetPorts",
        "modelServerType": "router.modelServers.type",
        "modelServerProtocol": "router.modelServers.protocol",
        "modelServers": "router.modelServers",
        "parser": "router.epp.parsers, a list",
        "enabled": "router.inferencePool.create",
        "apiVersion": "nothing; the pool is inference.networking.k8s.io/v1",
    },
    "experimentalHttpRoute": {
        "enabled": "httpRoute.create",
        **{
            key: f"httpRoute.{key}"
            for key in (
                "inferenceGatewayName",
                "inferenceGatewayNamespace",
                "requestTimeout",
                "baseModel",
                "headerMatches",
            )
        },
    },
}
"""Key of the older charts (top level), and its keys: where they went."""

_GROUPS = {
    "inferenceExtension": "write router.epp, router.monitoring, router.tracing",
    "inferencePool": "write router.modelServers, router.inferencePool",
    "experimentalHttpRoute": "write httpRoute",
    "inferenceObjectives": "write router.inferenceObjectives",
}

_OWN_FLAGS = {
    "pool-name": "the chart sets it; the pool is named as the release",
    "pool-namespace": "the chart sets it to the namespace of the release",
    "pool-group": "the chart sets it",
    "endpoint-selector": "write router.modelServers.matchLabels, with router.inferencePool.create: false",
    "endpoint-target-ports": "write router.modelServers.targetPorts",
    "endpoint": "write router.modelServers.matchLabels",
    "config-file": "write router.epp.pluginsConfigFile",
    "config-text": "write router.epp.pluginsConfig",
    "watch-config-file": "write router.epp.configChange: reload or roll",
    "validate-only": "a picker that does not serve is of no use here",
    "grpc-port": "write router.epp.extProcPort",
    "grpc-health-port": "write router.epp.grpcHealthPort",
    "metrics-port": "write router.metricsPort",
    "metrics-endpoint-auth": "write router.monitoring.prometheus.auth.enabled",
    "tracing": "write router.tracing.enabled",
    "cert-path": "write router.epp.tls.secretName",
    "enable-cert-reload": "write router.epp.tls.secretName; the certificate is followed then",
    "kubeconfig": "leave it out; the picker uses its service account",
}
"""Flags that the chart sets, by the value that they follow from."""

_NO_PRESETS = "the chart makes Envoy's configuration itself; leave it out"

_OTHERS = (
    Refused("router.epp.parser", "write router.epp.parsers, a list"),
    Refused("router.volumes", "write router.epp.volumes"),
    Refused("router.modelServers.targetPortNumber", "write router.modelServers.targetPorts: [{number: ...}]"),
    Refused(
        "router.latencyPredictor.enabled",
        "the picker has no latency predictor yet; leave it out and choose by queue, cache and load",
        harmless=(False,),
    ),
    Refused(
        "router.monitoring.provider.name",
        "PodMonitoring is not made here; leave it empty for the Prometheus operator, or make one for the "
        "port http-metrics of the picker's Service",
        only=("gmp",),
    ),
    Refused(
        "router.monitoring.provider.gmp.autopilot",
        "PodMonitoring is not made here; leave it out",
        harmless=(False,),
    ),
    Refused(
        "provider.name",
        "policies of that gateway are not made here; write none, and make HealthCheckPolicy and "
        "GCPBackendPolicy beside the release",
        only=("gke",),
    ),
    Refused(
        "provider.gke.preferredBackends.enabled",
        "all replicas serve here; leave it out and write router.epp.replicas",
        harmless=(False,),
    ),
    Refused(
        "router.proxy.proxyType",
        "the chart runs Envoy only; write envoy, or mode: gateway behind an agentgateway of your own",
        only=("agentgateway",),
    ),
    Refused(
        "router.proxy.priorityRouting.enabled",
        "all replicas serve here; leave it out and write router.epp.replicas",
        harmless=(False,),
    ),
    Refused("router.proxy.presets", _NO_PRESETS, harmless=({},)),
    Refused("router.proxy.configMap", _NO_PRESETS, harmless=({},)),
    Refused("router.proxy.configMapData", _NO_PRESETS, harmless=({},)),
    Refused(
        "router.proxy.args", f"{_NO_PRESETS}; further arguments go to router.proxy.extraArgs", harmless=([],)
    ),
    *(
        Refused(f"router.proxy.{key}", "the chart knows it; leave it out", harmless=("", [], {}))
        for key in (
            "name",
            "command",
            "ports",
            "livenessProbe",
            "readinessProbe",
            "startupProbe",
            "volumes",
            "volumeMounts",
        )
    ),
)


def refused() -> Iterator[Refused]:
    """All of them, in the order in which they are told."""
    for group, instead in _GROUPS.items():
        yield Refused(group, instead, harmless=({}, []))
        for key, to in _MOVED.get(group, {}).items():
            yield Refused(f"{group}.{key}", f"write {to}")
    yield from _OTHERS
    for flag, why in _OWN_FLAGS.items():
        yield Refused(f"router.epp.flags.{flag}", why)
    for flag, why in REFUSED.items():
        yield Refused(f"router.epp.flags.{flag.removeprefix('--')}", why)
