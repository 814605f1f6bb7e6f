"""Values files: those of llm-d carry over or are refused by name, and what is wrong is told clearly."""

import re
from typing import Any

import helm_python
import pytest
import yaml

from epp.durations import Duration
from epp.runtime.options import Options
from tests.data.chart import rendering
from tests.data.chart.rendering import CHART, Object, at, container, objects, one, refusal, values
from tools.chart import leaves
from tools.chart_refused import Refused, refused
from tools.chart_values import Values

LEAVES = list(leaves(Values))


# -- files for the field's charts ------------------------------------------------------------------

CARRIED = {
    "ha": """
router:
  epp:
    replicas: 3
    image: {registry: my-registry.example.com, repository: my-epp-dev, tag: v1.2.3, pullPolicy: IfNotPresent}
    extProcPort: 9002
    flags: {v: 3, ha-enable-leader-election: true}
    env:
    - {name: FEATURE, value: "true"}
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    resources: {requests: {cpu: "8", memory: 16Gi}, limits: {memory: 32Gi}}
    pluginsConfigFile: custom-plugins.yaml
    pluginsCustomConfig:
      custom-plugins.yaml: |
        apiVersion: inference.networking.x-k8s.io/v1alpha1
        kind: EndpointPickerConfig
        plugins:
        - type: queue-scorer
        schedulingProfiles:
        - name: default
          plugins:
          - pluginRef: queue-scorer
    affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: []}}}
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    volumeMounts: [{mountPath: /models, name: model-volume}]
    volumes: [{name: model-volume, emptyDir: {}}]
    deploymentStrategy: {type: Recreate}
""",
    "structured": """
router:
  epp:
    pluginsConfigFile: custom-plugins.yaml
    pluginsConfig:
      apiVersion: llm-d.ai/v1alpha1
      kind: EndpointPickerConfig
      plugins: [{type: queue-scorer}]
      schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]
""",
    "servers": """
router:
  modelServers:
    matchLabels: {app: my-sglang-deployment}
    type: sglang
    protocol: grpc
    targetPorts: [{number: 50051}]
""",
    "pool": """
router:
  inferencePool: {create: true, failureMode: FailClose}
  inferenceObjectives: [{name: high-priority, priority: 100}, {name: background-batch, priority: 10}]
""",
    "monitoring": """
router:
  monitoring:
    interval: 10s
    provider: {name: ""}
    prometheus: {enabled: true, auth: {enabled: true, secretName: reader-secret}}
  tracing:
    enabled: true
    otelExporterEndpoint: http://otel-collector.monitoring.svc.cluster.local:4317
    sampling: {sampler: parentbased_traceidratio, samplerArg: "0.1"}
""",
    "tokenizer": """
router:
  epp: {volumes: [{name: model-cache-volume, persistentVolumeClaim: {claimName: pvc}}]}
  tokenizer:
    enabled: true
    modelName: Qwen/Qwen3-32B
    image: {registry: registry.example.com, repository: vllm/vllm-openai-cpu, tag: v0.19.1}
    env:
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
    - {name: HF_HOME, value: /models}
    volumeMounts: [{mountPath: /models, name: model-cache-volume}]
""",
    "gateway": """
provider:
  name: istio
  istio:
    destinationRule: {host: "", trafficPolicy: {connectionPool: {http: {maxRequestsPerConnection: 256000}}}}
httpRoute:
  create: true
  inferenceGatewayName: my-gateway
  inferenceGatewayNamespace: infra
  requestTimeout: 120s
""",
    "standalone": """
mode: standalone
router:
  inferencePool: {create: false}
  extraServicePorts: [{name: http, port: 8081, protocol: TCP, targetPort: 8081}]
  proxy:
    enabled: true
    proxyType: envoy
    mode: service
    replicas: 3
    failOpen: true
    image: registry.example.com/envoy:v1
    resources: {requests: {cpu: "4", memory: 8Gi}, limits: {memory: 16Gi}}
""",
    "defaults-spelt-out": """
router:
  latencyPredictor: {enabled: false, trainingServer: {port: 8000}, eppEnv: {LATENCY_COALESCE_WINDOW_MS: "1"}}
  proxy: {args: [], priorityRouting: {enabled: false}}
  monitoring: {provider: {name: "", gmp: {autopilot: false}}}
provider: {name: none, gke: {preferredBackends: {enabled: false, preferredReplicas: 1}}}
""",
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_file_of_the_field_carries_over(name: str) -> None:
    assert objects(values(helm_python.values_from_yaml(CARRIED[name])))


def carried(name: str) -> list[Object]:
    return objects(values(helm_python.values_from_yaml(CARRIED[name])))


def test_what_carries_over_has_its_effect() -> None:
    picker = container(carried("ha"))
    assert picker["image"] == "my-registry.example.com/my-epp-dev:v1.2.3"
    options = rendering.parsed(picker["args"])
    assert (options.v, options.ha_enable_leader_election) == (3, True)
    assert options.config_file == "/config/custom-plugins.yaml"
    assert {"name": "FEATURE", "value": "true"} in picker["env"]
    assert one(carried("ha"), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert one(carried("monitoring"), "Secret", "reader-secret")
    assert "--tracing=true" in container(carried("monitoring"))["args"]
    assert (
        one(carried("pool"), "InferencePool", "rel")["spec"]["endpointPickerRef"]["failureMode"]
        == "FailClose"
    )
    render = container(carried("tokenizer"), "vllm-render")
    assert render["image"] == "registry.example.com/vllm/vllm-openai-cpu:v0.19.1"
    assert [each["value"] for each in render["env"] if each["name"] == "HF_HOME"] == ["/models"]
    route = one(carried("gateway"), "HTTPRoute", "rel")["spec"]
    assert route["parentRefs"] == [{"name": "my-gateway", "namespace": "infra"}]
    assert route["rules"][0]["timeouts"] == {"request": "120s"}
    assert one(carried("standalone"), "Deployment", "rel-proxy")["spec"]["replicas"] == 3
    assert [port["name"] for port in one(carried("standalone"), "Service")["spec"]["ports"]].count(
        "http"
    ) == 0


def wanted(row: Refused) -> object:
    """A value that asks for what is refused."""
    if row.only:
        return row.only[0]
    return (
        True
        if False in row.harmless
        else {"a": "b"}
        if {} in row.harmless
        else ["a"]
        if [] in row.harmless
        else "1"
    )


@pytest.mark.parametrize("row", list(refused()), ids=lambda row: row.path)
def test_what_does_not_carry_over_is_refused_by_name(row: Refused) -> None:
    said = refusal(values(at(row.path, wanted(row))))
    assert f"- {row.path}: {row.instead}\n" in said
    assert "don't meet the specifications" not in said


@pytest.mark.parametrize("number", range(3))
def test_values_that_ask_for_nothing_are_taken(number: int) -> None:
    harmless = [(row.path, row.harmless[number]) for row in refused() if len(row.harmless) > number]
    assert harmless
    assert refusal(values(*(at(path, value) for path, value in harmless))) == ""


def test_a_file_for_older_charts_is_told_everything_at_once() -> None:
    old = """
inferenceExtension: {replicas: 3, image: {tag: x}, monitoring: {interval: 5s}}
inferencePool: {targetPorts: [{number: 8000}], modelServers: {matchLabels: {app: a}}}
experimentalHttpRoute: {enabled: true}
inferenceObjectives: [{name: a}]
"""
    said = refusal(helm_python.values_from_yaml(old))
    for line in (
        "inferenceExtension.replicas: write router.epp.replicas",
        "inferenceExtension.monitoring: write router.monitoring",
        "inferencePool.modelServers: write router.modelServers",
        "experimentalHttpRoute.enabled: write httpRoute.create",
        "inferenceObjectives: write router.inferenceObjectives",
    ):
        assert f"- {line}\n" in said


def test_the_image_of_another_picker_is_refused() -> None:
    image = {
        "registry": "registry.example.com/llm-d",
        "repository": "llm-d-router-endpoint-picker",
        "tag": "main",
    }
    assert "router.epp.image.repository: that is another picker" in refusal(
        values(at("router.epp.image", image))
    )


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "place", "right"),
    [
        ({"rooter": {}}, "''", "'router'"),
        (at("router.epp.replica", 2), "'/router/epp'", "'replicas'"),
        (at("router.modelServer", {}), "'/router'", "'modelServers'"),
        (at("router.epp.flags.drain-timeuot", "3s"), "'/router/epp/flags'", "'drain-timeout'"),
        (at("httpRoute.gateway", "g"), "'/httpRoute'", "'inferenceGatewayName'"),
        (at("router.proxy.failopen", True), "'/router/proxy'", "'failOpen'"),
    ],
)
def test_a_misspelt_key_is_refused_with_those_that_are_right(given: Object, place: str, right: str) -> None:
    said = refusal(values(given))
    assert f"at {place}: additional properties" in said
    assert right in said


@pytest.mark.parametrize(
    ("path", "wrong", "says"),
    [
        ("mode", "sidecar", "value must be one of 'gateway', 'standalone'"),
        ("router.epp.replicas", "two", "got string, want integer"),
        ("router.epp.replicas", 1.5, "got number, want integer"),
        ("router.epp.extProcPort", 70000, "maximum: got 70,000, want 65,535"),
        ("router.modelServers.targetPorts", [], "minItems: got 0, want 1"),
        ("router.modelServers.targetPorts", [{"number": 1}, {"number": 1}], "items at 0 and 1 are equal"),
        ("router.modelServers.targetPorts", [{"port": 1}], "missing property 'number'"),
        ("router.modelServers.matchLabels", {"app": 3}, "got number, want string"),
        ("router.inferencePool.failureMode", "FailClosed", "value must be one of 'FailOpen', 'FailClose'"),
        ("router.proxy.failOpen", "yes", "got string, want boolean"),
        ("router.epp.flags.v", "high", "does not match pattern"),
        ("router.inferenceObjectives", [{"priority": 1}], "missing property 'name'"),
        ("router.epp.podDisruptionBudget", {"maxUnavailble": 1}, "additional properties 'maxUnavailble'"),
        ("httpRoute.requestTimeout", "soon", "does not match pattern"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(path: str, wrong: object, says: str) -> None:
    said = refusal(values(at(path, wrong)))
    assert f"at '/{path.replace('.', '/')}" in said
    assert says in said


def test_labels_are_required() -> None:
    assert "at '/router/modelServers': missing property 'matchLabels'" in refusal({})
    assert "matchLabels': minProperties: got 0, want 1" in refusal(at("router.modelServers.matchLabels", {}))


LEADER = at("router.epp.flags.ha-enable-leader-election", True)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            [at("router.epp.pluginsConfigFile", "mine.yaml")],
            "there is no mine.yaml; there are default-plugins.yaml",
        ),
        (
            [
                at("router.epp.pluginsConfig", {"a": 1}),
                at("router.epp.pluginsCustomConfig", {"default-plugins.yaml": ""}),
            ],
            "router.epp.pluginsConfig: default-plugins.yaml is in router.epp.pluginsCustomConfig too",
        ),
        ([at("router.epp.flags.drain-timeout", "2m10s")], "130 is no more than the drain-timeout of 130 s"),
        ([at("router.epp.flags.drain-timeout", "0.1h")], "130 is no more than the drain-timeout of 360 s"),
        (
            [at("router.epp.terminationGracePeriodSeconds", 30)],
            "30 is no more than the drain-timeout of 30 s",
        ),
        ([at("router.tokenizer.enabled", True)], "router.tokenizer.modelName: name the model"),
        (
            [at("router.inferencePool.create", False), at("router.inferenceObjectives", [{"name": "a"}])],
            "router.inferenceObjectives: objectives belong to a pool",
        ),
        ([at("mode", "standalone"), at("httpRoute.create", True)], "httpRoute.create: there is no gateway"),
        (
            [at("router.inferencePool.create", False), at("httpRoute.create", True)],
            "httpRoute.create: the route leads",
        ),
        (
            [LEADER, at("router.epp.autoscaling.enabled", True)],
            "router.epp.autoscaling.enabled: replicas that wait",
        ),
        ([LEADER, at("router.epp.podDisruptionBudget", {"maxUnavailable": 1})], "a budget keeps its node"),
        (
            [at("router.epp.autoscaling", {"enabled": True, "minReplicas": 9})],
            "minReplicas 9 is above maxReplicas 5",
        ),
        (
            [at("router.proxy.autoscaling", {"enabled": True, "targetCPUUtilizationPercentage": 0})],
            "router.proxy.autoscaling: by what?",
        ),
        (
            [at("router.epp.podDisruptionBudget", {"maxUnavailable": 1, "minAvailable": 1})],
            "router.epp.podDisruptionBudget: write one of",
        ),
        (
            [at("router.epp.autoscaling.enabled", True), at("router.epp.resources", None)],
            "router.epp.autoscaling: 80 percent of what? Write router.epp.resources.requests.cpu",
        ),
        (
            [
                at("mode", "standalone"),
                at("router.epp.autoscaling.enabled", True),
                at("router.proxy.resources.requests.cpu", None),
            ],
            "router.epp.autoscaling: 80 percent of what? Write router.proxy.resources.requests.cpu",
        ),
        (
            [at("router.epp.tls.secretName", "s"), at("router.epp.flags.secure-serving", False)],
            "router.epp.tls.secretName: flags.secure-serving is false",
        ),
        (
            [at("router.monitoring.prometheus.tlsConfig", {"insecureSkipVerify": True})],
            "router.monitoring.prometheus.tlsConfig: metrics are not served over TLS",
        ),
        (
            [at("router.legacyPolicies", True), at("router.inferencePool.create", False)],
            "router.legacyPolicies: objectives and rewrites belong to a pool",
        ),
    ],
)
def test_values_that_do_not_go_together(parts: list[Object], says: str) -> None:
    said = refusal(values(*parts))
    assert says in said
    assert said.count("\n- ") == 1


@pytest.mark.parametrize(
    ("parts", "key", "holder"),
    [
        ([at("router.epp.grpcHealthPort", 9002)], "router.epp.grpcHealthPort", "router.epp.extProcPort"),
        ([at("router.metricsPort", 9003)], "router.metricsPort", "router.epp.grpcHealthPort"),
        (
            [at("router.metricsPort", Options().admin_port)],
            "router.metricsPort",
            "router.epp.flags.admin-port",
        ),
        ([at("router.epp.flags.admin-port", 9090)], "router.metricsPort", "router.epp.flags.admin-port"),
        (
            [at("router.epp.extraContainerPorts", [{"name": "zmq", "containerPort": 9002}])],
            "router.epp.extraContainerPorts",
            "router.epp.extProcPort",
        ),
        (
            [at("router.tokenizer", {"enabled": True, "modelName": "m", "port": 9090})],
            "router.tokenizer.port",
            "router.metricsPort",
        ),
        (
            [at("mode", "standalone"), at("router.epp.extProcPort", 8081)],
            "router.epp.extProcPort",
            "the proxy",
        ),
        ([at("mode", "standalone"), at("router.metricsPort", 19001)], "router.metricsPort", "the proxy"),
    ],
)
def test_two_on_one_port_of_the_pod(parts: list[Object], key: str, holder: str) -> None:
    said = refusal(values(*parts))
    assert re.search(rf"\n- {key}: {holder} has port \d+ of the pod already; write another\n", said)
    assert said.count("\n- ") == 1


def test_ports_that_meet_nobody() -> None:
    """Those of a proxy in pods of its own; those that are turned off."""
    service = values(at("mode", "standalone"), at("router.proxy.mode", "service"))
    given = values(service, at("router.epp.extProcPort", 8081), at("router.epp.flags.admin-port", 0))
    assert refusal(values(given, at("router.metricsPort", Options().admin_port))) == ""


@pytest.mark.parametrize(
    "written", ["soon", "3", "3 s", "-3s", "", "1d", 3, "1m30s", "0", 0, "200ms", "1.5h", ".5s", "2us", "5ns"]
)
def test_durations_of_flags_are_those_that_the_picker_reads(written: object) -> None:
    """A pod that ends at its start tells nobody who installs."""
    try:
        right = bool(Duration.parse(written) >= 0)
    except ValueError:
        right = False
    said = refusal(values(at("router.epp.flags.metrics-staleness-threshold", written)))
    assert right == (said == ""), said
    assert right or "at '/router/epp/flags/metrics-staleness-threshold" in said


def test_a_release_whose_name_no_service_can_have() -> None:
    with pytest.raises(
        helm_python.HelmRenderError, match="release name 4x: names of Services start with a letter"
    ):
        rendering.render(values(), name="4x")


@pytest.mark.parametrize("written", ["true", "True", "t", "1", True])
@pytest.mark.parametrize("negated", [False, True])
def test_booleans_of_flags_are_read_as_the_picker_reads_them(written: object, negated: bool) -> None:
    negative = {"true": "false", "True": "False", "t": "f", "1": "0", True: False}[written]
    found = objects(
        values(at("router.epp.flags.ha-enable-leader-election", negative if negated else written))
    )
    leads = "progressDeadlineSeconds" in one(found, "Deployment")["spec"]
    assert leads == rendering.parsed(container(found)["args"]).ha_enable_leader_election == (not negated)


def test_a_value_taken_away_renders_or_is_asked_for() -> None:
    """`null` in a values file: never an error from the inside of a template."""
    gateway = values(at("httpRoute.create", True), at("provider.name", "istio"))
    standalone = values(
        at("mode", "standalone"),
        at("router.proxy.mode", "service"),
        at("router.networkPolicy.enabled", True),
        at("router.monitoring.prometheus.enabled", True),
        at("router.tokenizer", {"enabled": True, "modelName": "m"}),
        at("router.tracing.enabled", True),
    )
    assert not refusal(gateway) + refusal(standalone)
    for leaf in LEAVES:
        above, _, key = leaf.path.rpartition(".")
        given = standalone if above.startswith("router") else gateway
        if leaf.required or leaf.path.endswith("tokenizer.modelName"):
            continue
        said = refusal(values(given, at(leaf.path, None)))
        place = "".join(f"/{step}" for step in above.split("."))
        missing = f"at '{place.rstrip('/')}': missing property '{key}'", f"at '{place}/{key}': got null"
        assert not said or any(words in said for words in missing), said


def test_every_default_may_be_written_out() -> None:
    written: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    assert rendering.render(values(written)) == rendering.render(values())
