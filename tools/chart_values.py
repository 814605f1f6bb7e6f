"""Every value of the chart `charts/warmroute`, with its default and what it means.

`tools/chart.py` writes values.yaml, values.schema.json and the tables of the chart's README from these
structs. The names are those of llm-d's charts where they have one, so that a values file carries over;
`chart_refused.py` lists what does not.
"""

from typing import Annotated, Literal

from msgspec import field

from tools.chart_fields import (
    DURATION,
    LABEL_VALUE,
    MAPS,
    NAMED,
    OBJECT_NAME,
    PORT,
    TEXT,
    TEXTS,
    Help,
    Items,
    Mapping,
    ValuesGroup,
    copied,
    of,
    required,
)
from tools.chart_pods import Epp, Proxy, Tokenizer


class ModelServers(ValuesGroup, frozen=True):
    match_labels: Annotated[
        Mapping,
        required(
            "REQUIRED: labels of the engines' pods.",
            {"app": "vllm-qwen3-32b"},
            {"minProperties": 1, "maxProperties": 64, "additionalProperties": LABEL_VALUE},
        ),
    ]
    type: Annotated[
        Literal["vllm", "sglang", "triton-tensorrt-llm", "trtllm-serve", "triton"],
        Help("Which engine they run: how metrics are read, and the path of health checks."),
    ] = "vllm"
    protocol: Annotated[
        Literal["http", "grpc"], Help("What they speak; grpc makes the pool's appProtocol h2c.")
    ] = "http"
    target_ports: Annotated[
        Items,
        Help(
            "Ports they serve on, 1 to 8. Each port of a pod is an endpoint.",
            schema={
                "minItems": 1,
                "maxItems": 8,
                "uniqueItems": True,
                "items": {
                    "type": "object",
                    "required": ["number"],
                    **of(number={"type": "integer", **PORT}),
                },
            },
        ),
    ] = copied([{"number": 8000}])


class InferencePool(ValuesGroup, frozen=True):
    create: Annotated[
        bool, Help("Make the InferencePool. false: the picker chooses among the labelled pods without one.")
    ] = True
    failure_mode: Annotated[
        Literal["FailOpen", "FailClose"],
        Help("What the gateway does without a picker: use any endpoint of the pool, or fail the request."),
    ] = "FailOpen"


class MonitoringProvider(ValuesGroup, frozen=True):
    name: Annotated[
        Literal["", "prometheusoperator"], Help("Which kind of resource; empty: prometheusoperator.")
    ] = ""


class PrometheusAuth(ValuesGroup, frozen=True):
    enabled: Annotated[
        bool,
        Help(
            "Show /metrics only to who may `get` it by RBAC. Needs a ClusterRole for the picker "
            "(TokenReview, SubjectAccessReview); false: all may read it, and the chart makes nothing "
            "outside its namespace."
        ),
    ] = True
    secret_name: Annotated[
        str,
        Help(
            "Secret for the token of who scrapes; empty: `<release>-epp-metrics-reader`.",
            schema={"maxLength": 63},
        ),
    ] = ""


class Prometheus(ValuesGroup, frozen=True):
    enabled: Annotated[
        bool, Help("Make a ServiceMonitor, and with `auth` a service account that may scrape.")
    ] = False
    auth: Annotated[PrometheusAuth, Help("Who may read /metrics.")] = field(default_factory=PrometheusAuth)
    extra_labels: Annotated[
        Mapping,
        Help("Further labels of the ServiceMonitor.", example={"release": "prometheus"}, schema=TEXTS),
    ] = {}
    tls_config: Annotated[
        Mapping,
        Help(
            "`tlsConfig` of the ServiceMonitor, where flags.metrics-cert-dir makes the picker serve "
            "/metrics over TLS.",
            example={"insecureSkipVerify": True},
        ),
    ] = {}


class Monitoring(ValuesGroup, frozen=True):
    interval: Annotated[str, Help("How often Prometheus scrapes.", schema=DURATION)] = "10s"
    provider: Annotated[MonitoringProvider, Help("Who scrapes.")] = field(default_factory=MonitoringProvider)
    prometheus: Annotated[Prometheus, Help("The Prometheus operator.")] = field(default_factory=Prometheus)


class Sampling(ValuesGroup, frozen=True):
    sampler: Annotated[Literal["parentbased_traceidratio"], Help("The sampler.")] = "parentbased_traceidratio"
    sampler_arg: Annotated[str, Help("The share of traces that is kept.")] = "0.1"


class Tracing(ValuesGroup, frozen=True):
    enabled: Annotated[bool, Help("Make spans of requests. Needs an image with the extra `otel`.")] = False
    otel_exporter_endpoint: Annotated[str, Help("Where they go (OTLP over gRPC).")] = "http://localhost:4317"
    sampling: Annotated[Sampling, Help("Which traces.")] = field(default_factory=Sampling)


class NetworkPolicy(ValuesGroup, frozen=True):
    enabled: Annotated[
        bool, Help("Admit only what the next values say to the pods; what they send stays free.")
    ] = False
    ext_proc_from: Annotated[
        Items,
        Help(
            "Peers that may ask the picker, such as a gateway. The chart's own proxies always may; empty: "
            "with them, nobody else, and without them, all.",
            example=[
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway-infra"}}}
            ],
            schema=MAPS,
        ),
    ] = []
    metrics_from: Annotated[Items, Help("Peers that may read metrics; empty: all.", schema=MAPS)] = []
    http_from: Annotated[
        Items, Help("Peers that may send requests to the proxies; empty: all.", schema=MAPS)
    ] = []


class LatencyPredictor(ValuesGroup, frozen=True):
    enabled: Annotated[bool, Help("Refused: the picker has no predictor yet.")] = False


class Router(ValuesGroup, frozen=True):
    model_servers: Annotated[ModelServers, Help("The engines.")]
    inference_pool: Annotated[InferencePool, Help("The pool, named as the release.")] = field(
        default_factory=InferencePool
    )
    legacy_policies: Annotated[
        bool,
        Help(
            "Let the picker read objectives and rewrites of the older group inference.networking.x-k8s.io, "
            "which it does where llm-d.ai has none."
        ),
    ] = False
    inference_objectives: Annotated[
        Items,
        Help(
            "InferenceObjectives of the pool, which clients name in a header; negative priorities may be "
            "shed.",
            example=[{"name": "batch", "priority": -1}, {"name": "chat", "priority": 10}],
            schema={
                "items": {
                    "type": "object",
                    "required": ["name"],
                    **of(name=OBJECT_NAME, priority={"type": "integer"}),
                }
            },
        ),
    ] = []
    epp: Annotated[Epp, Help("The picker.")] = field(default_factory=Epp)
    proxy: Annotated[Proxy, Help("Envoy, with mode standalone.")] = field(default_factory=Proxy)
    monitoring: Annotated[Monitoring, Help("Metrics.")] = field(default_factory=Monitoring)
    tracing: Annotated[Tracing, Help("OpenTelemetry.")] = field(default_factory=Tracing)
    tokenizer: Annotated[Tokenizer, Help("vLLM's render, beside the picker.")] = field(
        default_factory=Tokenizer
    )
    latency_predictor: Annotated[
        LatencyPredictor, Help("Not there yet.", schema={"additionalProperties": True})
    ] = field(default_factory=LatencyPredictor)
    network_policy: Annotated[NetworkPolicy, Help("Who may reach the pods.")] = field(
        default_factory=NetworkPolicy
    )
    extra_service_ports: Annotated[
        Items,
        Help(
            "Further ports of the picker's Service. With a proxy, one named http says on which port "
            "requests come in (8081 without it), with mode service on the proxy's Service.",
            example=[{"name": "http", "port": 80}],
            schema={"items": {"type": "object", "required": ["name", "port"]}},
        ),
    ] = []
    metrics_port: Annotated[
        int, Help("Port of /metrics, of the container and of the Service.", schema=PORT)
    ] = 9090
    cluster_domain: Annotated[str, Help("Domain of the cluster's DNS.", schema={"minLength": 1})] = (
        "cluster.local"
    )
    image_pull_secrets: Annotated[
        Items, Help("Secrets for pulling images.", example=[{"name": "registry"}], schema=NAMED)
    ] = []


class DestinationRule(ValuesGroup, frozen=True):
    host: Annotated[str, Help("Empty: the picker's Service.")] = ""
    traffic_policy: Annotated[
        Mapping,
        Help(
            "Merged over what the chart writes: TLS to the picker, its certificate not verified; a picker "
            "that cannot be connected to is not asked for ten seconds.",
            example={"connectionPool": {"http": {"maxRequestsPerConnection": 256000}}},
        ),
    ] = {}


class Istio(ValuesGroup, frozen=True):
    destination_rule: Annotated[DestinationRule, Help("How Istio speaks to the picker.")] = field(
        default_factory=DestinationRule
    )


class EnvoyGatewayTls(ValuesGroup, frozen=True):
    ca_config_map: Annotated[
        str,
        Help(
            "ConfigMap with the `ca.crt` that router.epp.tls.secretName is verified against. Empty: nothing "
            "is verified, which needs `extensionApis.enableBackend` of Envoy Gateway; its proxies then know "
            "pickers by the name of their Service alone, and may put all requests on one of several."
        ),
    ] = ""
    hostname: Annotated[
        str, Help("Name that the certificate has to have; empty: that of the picker's Service.")
    ] = ""


class ClientTrafficPolicy(ValuesGroup, frozen=True):
    create: Annotated[
        bool,
        Help(
            "Make one for the Gateway, in its namespace: it takes from requests what only a picker may say. "
            "Envoy Gateway heeds one for each Gateway; false: another release has it, or you do."
        ),
    ] = True
    spec: Annotated[
        Mapping,
        Help("Merged over what the chart writes.", example={"connection": {"bufferLimit": "64Mi"}}),
    ] = {}


class EnvoyGateway(ValuesGroup, frozen=True):
    fail_open: Annotated[
        bool,
        Help(
            "Without a picker, use any engine; false: refuse requests (503). The pool's failureMode has no "
            "effect. Envoy Gateway fails open only where bodies are not full-duplex: with true, requests are "
            "held until they are whole, up to 32 MiB."
        ),
    ] = False
    tls: Annotated[EnvoyGatewayTls, Help("To the picker, unless flags.secure-serving is false.")] = field(
        default_factory=EnvoyGatewayTls
    )
    backend_traffic_policy: Annotated[
        Mapping,
        Help(
            "Merged over what the chart writes as `spec`; a route has one.",
            example={"timeout": {"http": {"streamIdleTimeout": "1h"}}},
        ),
    ] = {}
    client_traffic_policy: Annotated[ClientTrafficPolicy, Help("Of the Gateway.")] = field(
        default_factory=ClientTrafficPolicy
    )


class Provider(ValuesGroup, frozen=True):
    name: Annotated[
        Literal["none", "istio", "envoy-gateway"],
        Help(
            "Which gateway: istio needs a DestinationRule; envoy-gateway knows no InferencePool, and gets a "
            "Service of the engines and policies of its own."
        ),
    ] = "none"
    istio: Annotated[Istio, Help("Counts with name istio.")] = field(default_factory=Istio)
    envoy_gateway: Annotated[EnvoyGateway, Help("Counts with name envoy-gateway.")] = field(
        default_factory=EnvoyGateway
    )


class HttpRoute(ValuesGroup, frozen=True):
    create: Annotated[
        bool, Help("Make an HTTPRoute from the gateway to the pool, or to what stands for it there.")
    ] = False
    inference_gateway_name: Annotated[str, Help("Name of the Gateway.", schema={"minLength": 1})] = (
        "inference-gateway"
    )
    inference_gateway_namespace: Annotated[str, Help("Its namespace; empty: that of the release.")] = ""
    request_timeout: Annotated[str, Help("Time-out of a request; 0s: none.", schema=DURATION)] = "300s"
    hostnames: Annotated[list[str], Help("Host names of the route; empty: those of the gateway.")] = []
    base_model: Annotated[
        str, Help("Only requests whose header X-Gateway-Base-Model-Name is this; empty: all.")
    ] = ""
    header_matches: Annotated[
        Mapping,
        Help(
            "Only requests with these headers.",
            example={"x-route": "chat"},
            schema={"additionalProperties": TEXT},
        ),
    ] = {}


class Crds(ValuesGroup, frozen=True):
    create: Annotated[
        bool,
        Help(
            "Install the CRDs InferencePool, InferenceObjective and InferenceModelRewrite before all else, "
            "where they are missing. As with all charts, they are neither upgraded nor removed with the "
            "release."
        ),
    ] = False


class Values(ValuesGroup, frozen=True):
    router: Annotated[Router, Help("Engines, pool, picker and proxy.")]
    mode: Annotated[
        Literal["gateway", "standalone"],
        Help(
            "gateway: a gateway that knows InferencePool asks the picker, or Envoy Gateway (provider.name). "
            "standalone: an Envoy of the chart does, and no gateway is needed."
        ),
    ] = "gateway"
    provider: Annotated[Provider, Help("The gateway, with mode gateway.")] = field(default_factory=Provider)
    http_route: Annotated[HttpRoute, Help("The way from the gateway to the pool, with mode gateway.")] = (
        field(default_factory=HttpRoute)
    )
    crds: Annotated[Crds, Help("Custom resource definitions.")] = field(default_factory=Crds)
