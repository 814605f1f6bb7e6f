"""Values of what runs: the picker, the proxy, vLLM's render."""

from typing import Annotated, Literal

from msgspec import field

from tools.chart_fields import (
    BUDGET,
    COUNT,
    MAPS,
    NAMED,
    PORT,
    READ_ONLY,
    RESTRICTED,
    RESTRICTED_POD,
    TEXTS,
    Help,
    Items,
    Mapping,
    ValuesGroup,
    copied,
)


class Image(ValuesGroup, frozen=True):
    registry: Annotated[
        str, Help("Host (and path) of the registry; empty: the one that nodes use by default.")
    ] = ""
    repository: Annotated[str, Help("Name of the image.", schema={"minLength": 1})] = "warmroute/warmroute"
    tag: Annotated[str, Help("Empty: the chart's `appVersion`.")] = ""
    pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], Help("When nodes pull it.")] = (
        "IfNotPresent"
    )


class MetricsDataSource(ValuesGroup, frozen=True):
    scheme: Annotated[Literal["http", "https"], Help("How the page is fetched.")] = "http"
    path: Annotated[str, Help("Its path.", schema={"pattern": "^/"})] = "/metrics"
    insecure_skip_verify: Annotated[bool, Help("With https: do not verify the engine's certificate.")] = True


class Tls(ValuesGroup, frozen=True):
    secret_name: Annotated[
        str,
        Help("Secret with tls.crt and tls.key, followed when it changes; empty: self-signed at each start."),
    ] = ""


class Autoscaling(ValuesGroup, frozen=True):
    enabled: Annotated[bool, Help("Make a HorizontalPodAutoscaler. `replicas` has no effect then.")] = False
    min_replicas: Annotated[int, Help("At least so many.", schema={"minimum": 1})] = 1
    max_replicas: Annotated[int, Help("At most so many.", schema={"minimum": 1})] = 5
    target_cpu: Annotated[
        int, Help("Percent of the CPU request; 0: CPU does not count.", schema={"minimum": 0})
    ] = field(default=80, name="targetCPUUtilizationPercentage")
    target_memory: Annotated[
        int, Help("Percent of the memory request; 0: memory does not count.", schema={"minimum": 0})
    ] = field(default=0, name="targetMemoryUtilizationPercentage")
    behavior: Annotated[Mapping, Help("`spec.behavior` of the autoscaler.")] = {}
    metrics: Annotated[Items, Help("`spec.metrics`, in place of the two targets above.", schema=MAPS)] = []


class Epp(ValuesGroup, frozen=True):
    replicas: Annotated[
        int,
        Help(
            "Pickers. All of them serve. With flags.ha-enable-leader-election only one, the leader, is "
            "ready and the others wait to take over.",
            schema=COUNT,
        ),
    ] = 1
    image: Annotated[Image, Help("The picker's image.")] = field(default_factory=Image)
    flags: Annotated[
        Mapping,
        Help(
            "Further flags of `warmroute serve`, without dashes (see docs/flags.md). Those that the chart "
            "sets itself are refused here, with the value to write.",
            example={"v": 3, "drain-timeout": "45s", "ha-enable-leader-election": True},
        ),
    ] = {}
    env: Annotated[
        Items, Help("Further environment variables.", example=[{"name": "A", "value": "b"}], schema=NAMED)
    ] = []
    plugins_config_file: Annotated[
        str,
        Help(
            "File of the configuration in use: default-plugins.yaml and payload-agnostic.yaml come with the "
            "chart, others from the next two values.",
            schema={"pattern": "^[-._A-Za-z0-9]+$"},
        ),
    ] = "default-plugins.yaml"
    plugins_config: Annotated[
        Mapping,
        Help(
            "The whole EndpointPickerConfig as an object, which becomes `pluginsConfigFile`. Mappings of "
            "several values files are merged, lists are replaced.",
            example={
                "apiVersion": "llm-d.ai/v1alpha1",
                "kind": "EndpointPickerConfig",
                "plugins": [{"type": "queue-scorer"}, {"type": "prefix-cache-scorer"}],
            },
        ),
    ] = {}
    plugins_custom_config: Annotated[
        Mapping,
        Help(
            "Further files, each a text or an object, by name.",
            example={"custom-plugins.yaml": "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"},
            schema={
                "propertyNames": {"pattern": "^[-._A-Za-z0-9]+$"},
                "additionalProperties": {"type": ["string", "object"]},
            },
        ),
    ] = {}
    config_change: Annotated[
        Literal["reload", "roll"],
        Help(
            "What a change of the configuration does. reload: pickers follow their file within a minute or "
            "so; what cannot change while serving is told in their log and waits for a restart. roll: pods "
            "are replaced, one after the other."
        ),
    ] = "reload"
    parsers: Annotated[
        list[str],
        Help(
            "Parsers of the configuration files that come with the chart; empty: by modelServers. "
            "vllmgrpc-parser for vLLM over gRPC, passthrough-parser for triton, else those of OpenAI's and "
            "Anthropic's APIs.",
            example=["openai-parser", "anthropic-parser"],
        ),
    ] = []
    metrics_data_source: Annotated[
        MetricsDataSource,
        Help("How engines' metrics are read, in the configuration files that come with the chart."),
    ] = field(default_factory=MetricsDataSource)
    ext_proc_port: Annotated[
        int, Help("Port of ext-proc, of the container and of the Service.", schema=PORT)
    ] = 9002
    grpc_health_port: Annotated[int, Help("Port of gRPC health, which probes ask.", schema=PORT)] = 9003
    tls: Annotated[Tls, Help("Certificate of the ext-proc port.")] = field(default_factory=Tls)
    resources: Annotated[
        Mapping,
        Help(
            "Of the picker. A request takes 0.7 ms (one JSON answer) to 1.4 ms (100 streamed chunks) of CPU "
            "where pickers are busy, 2 to 7 ms at ten or twenty a second, 47 ms with a prompt of 100,000 "
            "tokens and 1,000 chunks; 100 idle engines take 0.03 cores. A picker chooses on one core: for "
            "more, add replicas. Memory is 85 MiB after the start, 110 MiB with 3 million pairs of block "
            "and endpoint in the prefix index, and at most flags.max-held-bytes (1 GiB) more for bodies in "
            "flight. null: none.",
        ),
    ] = copied({"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}})
    termination_grace_period_seconds: Annotated[
        int,
        Help(
            "Time to end. More than flags.drain-timeout (30s) and the longest answer together. With a proxy "
            "beside it, a picker that need not lead serves on with that for all of it but 10 s, and its "
            "drain-timeout is 1s.",
            schema={"minimum": 1},
        ),
    ] = 130
    deployment_strategy: Annotated[
        Mapping,
        Help(
            "`spec.strategy` of the Deployment. Empty: a rolling update that never has fewer pickers than "
            "before; where only the leader is ready, one that may replace it (else no rollout would end).",
            example={"type": "Recreate"},
        ),
    ] = {}
    pod_disruption_budget: Annotated[
        Mapping,
        Help(
            "`spec` of a PodDisruptionBudget without its selector; empty: none. Refused where only the "
            "leader is ready: it would keep the leader's node from being drained.",
            example={"maxUnavailable": 1},
            schema=BUDGET,
        ),
    ] = {}
    autoscaling: Annotated[Autoscaling, Help("Pickers by load, where all serve.")] = field(
        default_factory=Autoscaling
    )
    topology_spread_constraints: Annotated[
        Items,
        Help(
            "Of the pods; one without `labelSelector` gets that of the pickers.",
            example=[
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "ScheduleAnyway",
                }
            ],
            schema=MAPS,
        ),
    ] = []
    affinity: Annotated[Mapping, Help("Of the pods.")] = {}
    tolerations: Annotated[Items, Help("Of the pods.", schema=MAPS)] = []
    node_selector: Annotated[Mapping, Help("Of the pods.", schema=TEXTS)] = {}
    priority_class_name: Annotated[str, Help("Of the pods.")] = ""
    pod_annotations: Annotated[Mapping, Help("Further annotations of the pods.", schema=TEXTS)] = {}
    pod_labels: Annotated[Mapping, Help("Further labels of the pods.", schema=TEXTS)] = {}
    pod_security_context: Annotated[
        Mapping,
        Help("Of the pods. Where the platform chooses users (OpenShift), set the three ids to null."),
    ] = copied(RESTRICTED_POD)
    security_context: Annotated[Mapping, Help("Of the picker's container.")] = copied(READ_ONLY)
    extra_container_ports: Annotated[
        Items,
        Help(
            "Further ports of the container.", example=[{"name": "zmq", "containerPort": 5557}], schema=MAPS
        ),
    ] = []
    volumes: Annotated[Items, Help("Further volumes of the pod.", schema=NAMED)] = []
    volume_mounts: Annotated[Items, Help("Further mounts of the picker's container.", schema=NAMED)] = []


class TokenizerImage(ValuesGroup, frozen=True):
    registry: Annotated[str, Help("Host of the registry; empty: the one that nodes use by default.")] = ""
    repository: Annotated[str, Help("Name of the image.", schema={"minLength": 1})] = "vllm/vllm-openai-cpu"
    tag: Annotated[str, Help("Its tag.", schema={"minLength": 1})] = "v0.19.1"
    pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], Help("When nodes pull it.")] = (
        "IfNotPresent"
    )


class Tokenizer(ValuesGroup, frozen=True):
    enabled: Annotated[
        bool,
        Help(
            "Run vLLM's render beside the picker, for exact tokens of prompts. default-plugins.yaml uses "
            "it; in a configuration of your own, `token-producer` does."
        ),
    ] = False
    flavor: Annotated[
        Literal["python", "rust"],
        Help("python: `vllm launch render`; rust: `vllm-rs render`, with an image that has it."),
    ] = "python"
    model_name: Annotated[str, Help("REQUIRED with `enabled`: the model whose prompts are rendered.")] = ""
    image: Annotated[TokenizerImage, Help("Its image.")] = field(default_factory=TokenizerImage)
    port: Annotated[int, Help("Its port.", schema=PORT)] = 8000
    command: Annotated[list[str], Help("In place of the flavor's command.")] = []
    args: Annotated[list[str], Help("In place of the model's name and --port.")] = []
    extra_args: Annotated[list[str], Help("After those.")] = []
    init_containers: Annotated[Items, Help("Init containers of the pod.", schema=NAMED)] = []
    env: Annotated[
        Items,
        Help(
            "Environment variables, such as the token of the model's registry.",
            example=[
                {
                    "name": "HF_TOKEN",
                    "valueFrom": {"secretKeyRef": {"name": "llm-d-hf-token", "key": "HF_TOKEN"}},
                }
            ],
            schema=NAMED,
        ),
    ] = []
    resources: Annotated[Mapping, Help("Of its container.")] = copied(
        {"requests": {"cpu": "4", "memory": "8Gi"}}
    )
    security_context: Annotated[Mapping, Help("Of its container.")] = copied(RESTRICTED)
    volumes: Annotated[Items, Help("Further volumes of the pod.", schema=NAMED)] = []
    volume_mounts: Annotated[Items, Help("Further mounts of its container.", schema=NAMED)] = []
    readiness_probe: Annotated[Mapping, Help("Of its container.")] = copied(
        {
            "httpGet": {"path": "/health", "port": "render-http"},
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 60,
        }
    )


class Proxy(ValuesGroup, frozen=True):
    enabled: Annotated[bool, Help("Run Envoy in front of the picker, with mode standalone.")] = True
    proxy_type: Annotated[Literal["envoy"], Help("Which proxy.")] = "envoy"
    mode: Annotated[
        Literal["sidecar", "service"],
        Help(
            "sidecar: beside each picker. service: a Deployment of its own, which goes on when pickers are "
            "gone."
        ),
    ] = "sidecar"
    replicas: Annotated[int, Help("Proxies, with mode service.", schema=COUNT)] = 2
    fail_open: Annotated[
        bool,
        Help(
            "Without a healthy picker, spread requests in turn over the engines that DNS names (pods that "
            "are ready) and that answer health checks; false: refuse them. With mode sidecar this holds "
            "while the pod is ready, which takes a ready picker: it covers the seconds until its readiness "
            "is lost. With mode service it holds for good."
        ),
    ] = True
    image: Annotated[str, Help("Envoy, as a whole reference. The configuration is tested with 1.40.")] = (
        "envoyproxy/envoy:distroless-v1.40.0"
    )
    image_pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], Help("When nodes pull it.")] = (
        "IfNotPresent"
    )
    extra_args: Annotated[list[str], Help("Further arguments of Envoy.", example=["--concurrency", "4"])] = []
    env: Annotated[Items, Help("Environment variables.", schema=NAMED)] = []
    listen_address: Annotated[
        str, Help("Where Envoy listens; `::` in clusters that have IPv6 alone.", schema={"minLength": 1})
    ] = "0.0.0.0"
    resources: Annotated[
        Mapping,
        Help(
            "Of Envoy. A request took 1 ms (one JSON answer) to 6 ms (100 streamed chunks) of CPU without a "
            "picker; asking one costs more."
        ),
    ] = copied({"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}})
    security_context: Annotated[Mapping, Help("Of Envoy's container.")] = copied(READ_ONLY)
    termination_grace_period_seconds: Annotated[
        int,
        Help(
            "With mode service: time to end, answers in flight included; Envoy serves on for all of it but "
            "10 s. With mode sidecar that of the picker counts, for both.",
            schema={"minimum": 11},
        ),
    ] = 70
    pod_disruption_budget: Annotated[
        Mapping,
        Help(
            "`spec` of a PodDisruptionBudget of the proxies, with mode service.",
            example={"maxUnavailable": 1},
            schema=BUDGET,
        ),
    ] = {}
    autoscaling: Annotated[Autoscaling, Help("Proxies by load, with mode service.")] = field(
        default_factory=Autoscaling
    )
    topology_spread_constraints: Annotated[
        Items, Help("Of the proxies; one without `labelSelector` gets theirs.", schema=MAPS)
    ] = []
    affinity: Annotated[Mapping, Help("Of the proxies, with mode service.")] = {}
    tolerations: Annotated[Items, Help("Of the proxies, with mode service.", schema=MAPS)] = []
    node_selector: Annotated[Mapping, Help("Of the proxies, with mode service.", schema=TEXTS)] = {}
    pod_annotations: Annotated[Mapping, Help("Of the proxies, with mode service.", schema=TEXTS)] = {}
