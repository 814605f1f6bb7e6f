"""Every name of the outside world: headers, metadata keys, labels, ports, method paths. One constant each."""

from typing import Final

# Headers that carry the decision to the proxy, and the proxy's report back.
DESTINATION_ENDPOINT: Final = "x-gateway-destination-endpoint"
DESTINATION_ENDPOINT_SERVED: Final = "x-gateway-destination-endpoint-served"
DESTINATION_ENDPOINT_SUBSET: Final = "x-gateway-destination-endpoint-subset"
DESTINATION_ENDPOINT_SCORES: Final = "x-gateway-destination-endpoint-scores"

# Dynamic metadata namespaces.
LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

# Control headers a client or gateway may send. The older alias follows its new name; the new one wins.
FAIRNESS_ID: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
MODEL_NAME_REWRITE: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
SLO_TTFT_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
VIDEO_HINTS: Final = ("x-llm-d-video-fps", "x-llm-d-video-duration-seconds", "x-llm-d-video-resolution")

# Headers that steer an engine's sidecar. Only a picker may set them.
PREFILLER_HOST_PORT: Final = "x-prefiller-host-port"
ENCODER_HOSTS_PORTS: Final = "x-encoder-hosts-ports"
DATA_PARALLEL_HOST_PORT: Final = "x-data-parallel-host-port"
KV_CACHE_SOURCE_HOST_PORT: Final = "x-kv-cache-source-host-port"

REQUEST_ID: Final = "x-request-id"
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
WENT_INTO_RESPONSE_HEADERS: Final = "x-went-into-resp-headers"

# What a client sent under these names never reaches an engine.
CONTROL_HEADERS: Final = frozenset(
    {
        DESTINATION_ENDPOINT,
        DESTINATION_ENDPOINT_SERVED,
        DESTINATION_ENDPOINT_SUBSET,
        DESTINATION_ENDPOINT_SCORES,
        "x-gateway-destination-endpoint-fallback",
        *FAIRNESS_ID,
        *OBJECTIVE,
        *MODEL_NAME_REWRITE,
        *SLO_TTFT_MS,
        *SLO_TPOT_MS,
        *VIDEO_HINTS,
        PREFILLER_HOST_PORT,
        ENCODER_HOSTS_PORTS,
        DATA_PARALLEL_HOST_PORT,
        KV_CACHE_SOURCE_HOST_PORT,
        DROPPED_REASON,
    }
)

# Headers of an answer in which an engine reports its load (Open Request Cost Aggregation).
ENDPOINT_LOAD_METRICS: Final = "endpoint-load-metrics"
ENDPOINT_LOAD_METRICS_BIN: Final = "endpoint-load-metrics-bin"

# Reasons in the DROPPED_REASON header.
REJECTED_SATURATED: Final = "rejected-saturated"
REJECTED_NO_ENDPOINTS: Final = "rejected-no-endpoints"
REJECTED_SHUTTING_DOWN: Final = "rejected-shutting-down"

# Pod labels.
ROLE_LABEL: Final = "llm-d.ai/role"
ENGINE_LABELS: Final = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")

# Pod annotation with the target ports that serve. The older key follows its new name; the new one wins.
ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")

# Conditions of objectives and rewrites.
ACCEPTED: Final = "Accepted"
CONFLICTED: Final = "Conflicted"

# API groups, versions, kinds and resources of the pool and of what is said about its requests.
POOL_GROUP: Final = "inference.networking.k8s.io"
LLM_D_GROUP: Final = "llm-d.ai"
LEGACY_INFERENCE_GROUP: Final = "inference.networking.x-k8s.io"
POOL_VERSION: Final = "v1"
POLICY_VERSION: Final = "v1alpha2"
POOL_KIND: Final = "InferencePool"
OBJECTIVE_KIND: Final = "InferenceObjective"
MODEL_REWRITE_KIND: Final = "InferenceModelRewrite"
POOL_RESOURCE: Final = "inferencepools"
OBJECTIVE_RESOURCE: Final = "inferenceobjectives"
MODEL_REWRITE_RESOURCE: Final = "inferencemodelrewrites"

# What a pool's `appProtocol` may say.
HTTP_PROTOCOL: Final = "http"
H2C_PROTOCOL: Final = "kubernetes.io/h2c"

# gRPC.
EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
EXT_PROC_METHOD: Final = f"/{EXT_PROC_SERVICE}/Process"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
INFERENCE_EXTENSION: Final = "inference-extension"

# Ports.
GRPC_PORT: Final = 9002
GRPC_HEALTH_PORT: Final = 9003
METRICS_PORT: Final = 9090

# Configuration file.
API_VERSION: Final = "llm-d.ai/v1alpha1"
LEGACY_API_VERSION: Final = "inference.networking.x-k8s.io/v1alpha1"
CONFIG_KIND: Final = "EndpointPickerConfig"

# Metrics.
METRIC_PREFIX: Final = "llm_d_epp_"
