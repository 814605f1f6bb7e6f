"""What the chart renders in a matrix of values: objects that clusters take, arguments that pickers take."""

import re
from pathlib import Path

import click
import helm_python
import pytest

from epp import names
from epp.config.load import load_config
from epp.runtime.kube.lease import lease_name
from tests.data.chart import rendering
from tests.data.chart.rendering import CHART, Object, container, objects, of_kind, one, values

STANDALONE: Object = {"mode": "standalone"}
SERVICE: Object = {"mode": "standalone", "router": {"proxy": {"mode": "service"}}}
SELECTOR: Object = {"router": {"inferencePool": {"create": False}}}
LEADER: Object = {"router": {"epp": {"replicas": 3, "flags": {"ha-enable-leader-election": True}}}}
SCRAPED: Object = {"router": {"monitoring": {"prometheus": {"enabled": True, "extraLabels": {"a": "b"}}}}}
OPEN_METRICS: Object = {"router": {"monitoring": {"prometheus": {"auth": {"enabled": False}}}}}
CLOSED_NETWORK: Object = {"router": {"networkPolicy": {"enabled": True}}}
EVERYTHING: Object = {
    "router": {
        "modelServers": {"targetPorts": [{"number": 8000}, {"number": 8001}]},
        "inferenceObjectives": [{"name": "chat", "priority": 10}, {"name": "batch", "priority": -1}],
        "imagePullSecrets": [{"name": "registry"}],
        "extraServicePorts": [{"name": "zmq", "port": 5557}],
        "tracing": {"enabled": True},
        "tokenizer": {"enabled": True, "modelName": "m"},
        "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
        "monitoring": {"prometheus": {"enabled": True}},
        "proxy": {
            "podDisruptionBudget": {"minAvailable": 1},
            "autoscaling": {"enabled": True},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
        },
        "epp": {
            "image": {"registry": "registry.example.com/team/", "tag": "v2"},
            "replicas": 3,
            "extProcPort": 9102,
            "grpcHealthPort": 9103,
            "configChange": "roll",
            "flags": {
                "v": 3,
                "max-held-bytes": 4294967296,
                "drain-timeout": "1m30s",
                "metrics-cert-dir": "/metrics",
            },
            "env": [{"name": "A", "value": "b"}],
            "tls": {"secretName": "certificate"},
            "podDisruptionBudget": {"maxUnavailable": 1},
            "autoscaling": {"enabled": True, "targetMemoryUtilizationPercentage": 70},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "affinity": {"nodeAffinity": {}},
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"a": "b"},
            "priorityClassName": "high",
            "podLabels": {"a": "b"},
            "podAnnotations": {"c": "d"},
            "extraContainerPorts": [{"name": "zmq", "containerPort": 5557}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
    },
    "provider": {
        "name": "istio",
        "istio": {"destinationRule": {"trafficPolicy": {"connectionPool": {"http": {}}}}},
    },
}
HTTP: Object = {
    "router": {"extraServicePorts": [{"name": "zmq", "port": 5557}, {"name": "http", "port": 80}]}
}
ROUTE: Object = {
    "httpRoute": {
        "create": True,
        "baseModel": "m",
        "headerMatches": {"x-route": "a"},
        "hostnames": ["a.example.com"],
    }
}
MATRIX: dict[str, Object] = {
    "gateway": {},
    "gateway-route": ROUTE,
    "gateway-selector": SELECTOR,
    "gateway-leader": LEADER,
    "gateway-scraped": SCRAPED,
    "gateway-legacy": {"router": {"legacyPolicies": True}},
    "gateway-open-metrics": OPEN_METRICS,
    "gateway-everything": values(EVERYTHING, ROUTE),
    "gateway-istio-plain": {
        "provider": {"name": "istio"},
        "router": {"epp": {"flags": {"secure-serving": "false"}}},
    },
    "gateway-grpc": {"router": {"modelServers": {"protocol": "grpc"}}},
    "sidecar": STANDALONE,
    "sidecar-selector": values(STANDALONE, SELECTOR),
    "sidecar-everything": values(EVERYTHING, STANDALONE, HTTP),
    "sidecar-closed": values(STANDALONE, CLOSED_NETWORK, {"router": {"proxy": {"failOpen": False}}}),
    "service": SERVICE,
    "service-selector-leader": values(SERVICE, SELECTOR, LEADER),
    "service-everything": values(EVERYTHING, SERVICE, HTTP),
    "service-closed": values(SERVICE, CLOSED_NETWORK),
    "no-proxy": values(STANDALONE, {"router": {"proxy": {"enabled": False}}}),
    "triton": {"router": {"modelServers": {"type": "triton"}}},
}
TWO_PORTS: Object = {"router": {"modelServers": {"targetPorts": [{"number": 8000}, {"number": 8001}]}}}
BEHIND_ENVOY_GATEWAY: Object = {"provider": {"name": "envoy-gateway"}, "httpRoute": {"create": True}}
ENVOY_GATEWAY: dict[str, Object] = {
    "envoy-gateway": BEHIND_ENVOY_GATEWAY,
    "envoy-gateway-no-route": {"provider": {"name": "envoy-gateway"}},
    "envoy-gateway-plain": values(
        BEHIND_ENVOY_GATEWAY, TWO_PORTS, {"router": {"epp": {"flags": {"secure-serving": False}}}}
    ),
    "envoy-gateway-open": values(
        BEHIND_ENVOY_GATEWAY,
        {"provider": {"envoyGateway": {"failOpen": True}}, "router": {"modelServers": {"protocol": "grpc"}}},
    ),
    "envoy-gateway-selector": values(
        BEHIND_ENVOY_GATEWAY,
        SELECTOR,
        {"provider": {"envoyGateway": {"clientTrafficPolicy": {"create": False}}}},
    ),
    "envoy-gateway-everything": values(
        EVERYTHING,
        ROUTE,
        BEHIND_ENVOY_GATEWAY,
        {
            "provider": {
                "envoyGateway": {
                    "tls": {"caConfigMap": "authority", "hostname": "picker.example.com"},
                    "backendTrafficPolicy": {"timeout": {"http": {"streamIdleTimeout": "1h"}}},
                    "clientTrafficPolicy": {"spec": {"connection": {"bufferLimit": "64Mi"}}},
                }
            }
        },
    ),
}
"""Apart: a cluster takes what they make only with the definitions of Envoy Gateway."""
CASES = MATRIX | ENVOY_GATEWAY
matrix = pytest.mark.parametrize("case", CASES)
LONG_NAME, LONG_NAMESPACE = "a" * 20 + ".b" + "c" * 31, "n" * 63
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")


def rendered(case: str, name: str = "rel", namespace: str = "ns") -> list[Object]:
    return objects(values(CASES[case]), name, namespace)


def keys(found: list[Object]) -> list[tuple[str, str, str]]:
    return [(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in found]


@matrix
@pytest.mark.parametrize(("name", "namespace"), [("rel", "ns"), (LONG_NAME, LONG_NAMESPACE), ("a" * 53, "n")])
def test_objects_have_names_and_namespaces_that_a_cluster_takes(case: str, name: str, namespace: str) -> None:
    found = rendered(case, name, namespace)
    for each in found:
        metadata = each["metadata"]
        assert each["apiVersion"]
        # A pool and its route are named as the release, which may have dots as these kinds may.
        named_as_release = each["kind"] in ("InferencePool", "HTTPRoute")
        assert metadata["name"] == name if named_as_release else NAME.fullmatch(metadata["name"])
        assert len(metadata["name"]) <= 63
        assert metadata.get("namespace") == (None if each["kind"] in CLUSTER_WIDE else namespace)
        assert all(len(value) <= 63 for value in metadata["labels"].values())
    assert len(keys(found)) == len(set(keys(found)))


@matrix
def test_rendering_is_deterministic(case: str) -> None:
    with helm_python.Chart.load(CHART) as chart:
        again = chart.render(values(CASES[case]), name="rel", namespace="ns")
    assert again == rendering.render(values(CASES[case]))


@pytest.mark.parametrize(
    "case",
    ["gateway", "gateway-everything", "envoy-gateway-everything", "sidecar-everything", "service-everything"],
)
def test_helm_lint_has_nothing_to_say(case: str) -> None:
    report = helm_python.lint(CHART, values(CASES[case]), strict=True)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("case", ["gateway-everything", "envoy-gateway-everything", "service-everything"])
def test_two_releases_share_no_name(case: str) -> None:
    """Beside each other, in other namespaces, and where names become equal when joined or cut."""
    pairs = [
        (("a", "ns"), ("b", "ns")),
        (("a", "x"), ("a", "y")),
        (("a-b", "c"), ("a", "b-c")),
        (("p" * 52 + "a", "ns"), ("p" * 52 + "b", "ns")),
        (("a.b", "ns"), ("a-b", "ns")),
        (("r", "n" * 62 + "a"), ("r", "n" * 62 + "b")),
    ]
    for left, right in pairs:
        ours, theirs = (set(keys(rendered(case, *release))) for release in (left, right))
        # Clients name objectives, so these keep their names.
        assert {key for key in ours & theirs if key[0] != "InferenceObjective"} == set(), (left, right)


# -- the picker ------------------------------------------------------------------------------------


@matrix
def test_the_picker_takes_its_arguments(case: str) -> None:
    found = rendered(case)
    picker = container(found)
    assert picker["command"] == ["warmroute", "serve"]
    options = rendering.parsed(picker["args"])
    pools = of_kind(found, "InferencePool")
    assert options.pool_name == (pools[0]["metadata"]["name"] if pools else "")
    assert options.pool_namespace == "ns"
    assert bool(options.endpoint_selector) == bool(options.endpoint_target_ports) == (not pools)
    folder, _, file = options.config_file.rpartition("/")
    assert file in rendering.configuration(found)
    assert {"name": "config", "mountPath": folder, "readOnly": True} in picker["volumeMounts"]
    ports = {port["name"]: port["containerPort"] for port in picker["ports"]}
    assert ports["grpc"] == options.grpc_port
    assert ports["grpc-health"] == options.grpc_health_port
    assert ports["metrics"] == options.metrics_port
    assert list(options.problems()) == []


def test_a_lost_argument_would_be_noticed() -> None:
    """The faults of a template edit: a value dropped, a flag misspelt, a number written as a power of ten."""
    args = container(rendered("gateway"))["args"]
    config = next(arg for arg in args if arg.startswith("--config-file="))
    swallowed = rendering.parsed(
        [*(arg for arg in args if arg != config), "--config-file", "--zap-encoder=json"]
    )
    assert [problem.path for problem in swallowed.problems()] == ["--config-file"]
    for wrong in ("--pool-nmae=x", "--max-held-bytes=4.294967296e+09", "--grpc-port="):
        with pytest.raises(click.UsageError):
            rendering.parsed([*args, wrong])


def test_flags_reach_the_picker_whatever_their_type() -> None:
    given = {
        "v": 4,
        "max-held-bytes": 33554432,
        "legacy-metric-names": True,
        "drain-timeout": "45s",
        "seed": "7",
    }
    options = rendering.parsed(container(objects(values({"router": {"epp": {"flags": given}}})))["args"])
    assert (options.v, options.max_held_bytes, options.legacy_metric_names) == (4, 33554432, True)
    assert (options.drain_timeout, options.seed) == (45.0, 7)


def test_pods_by_selector_on_all_ports() -> None:
    ports = [{"number": 8001}, {"number": 8000}]
    labels = {"b": "2", "a": "1"}
    given = values(SELECTOR, {"router": {"modelServers": {"targetPorts": ports, "matchLabels": labels}}})
    options = rendering.parsed(container(objects(given))["args"])
    assert set(options.endpoint_selector.split(",")) == {"app=vllm-qwen3-32b", "a=1", "b=2"}
    assert options.endpoint_target_ports == ("8001,8000",)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "triton-tensorrt-llm", "trtllm-serve", "triton"])
@pytest.mark.parametrize("source", [{}, {"scheme": "https", "path": "/m", "insecureSkipVerify": False}])
def test_configuration_files_load(engine: str, protocol: str, source: Object) -> None:
    servers = {"type": engine, "protocol": protocol}
    router = {"modelServers": servers, "epp": {"metricsDataSource": source}}
    for name, text in rendering.configuration(objects(values({"router": router}))).items():
        agnostic = name == "payload-agnostic.yaml"
        loaded = load_config(text, name, allow_experimental=agnostic)
        assert bool(loaded.warnings) == agnostic
        assert ("defaultEngine" in text) == (engine != "vllm")
        assert ('"insecureSkipVerify":false' in text) == bool(source)
        passthrough = engine == "triton" or agnostic
        assert ("passthrough-parser" in text) == passthrough
        if not agnostic:
            assert ("vllmgrpc-parser" in text) == ((engine, protocol) == ("vllm", "grpc"))


def test_the_experimental_plugin_of_the_charts_own_file_is_allowed_where_it_is_in_use() -> None:
    def allowed(*parts: Object) -> bool:
        picker = container(objects(values(*parts)))
        return rendering.parsed(picker["args"]).allow_experimental_plugins

    agnostic = {"router": {"epp": {"pluginsConfigFile": "payload-agnostic.yaml"}}}
    assert [allowed(), allowed(agnostic)] == [False, True]
    own = {"router": {"epp": {"pluginsCustomConfig": {"payload-agnostic.yaml": "a: b\n"}}}}
    flag = {"router": {"epp": {"flags": {"allow-experimental-plugins": False}}}}
    assert [allowed(agnostic, own), allowed(agnostic, flag)] == [False, False]


def test_the_tokenizer_is_used_where_it_runs() -> None:
    tokenizer = {"enabled": True, "modelName": "org/model", "port": 8100}
    found = objects(values({"router": {"tokenizer": tokenizer}}))
    text = rendering.configuration(found)["default-plugins.yaml"]
    load_config(text, "default-plugins.yaml")
    assert "http://127.0.0.1:8100" in text
    assert container(found, "vllm-render")["args"] == ["org/model", "--port=8100"]


@pytest.mark.parametrize("name", ["optimized-baseline", "objectives-and-rewrites", "data-parallel", "burst"])
def test_a_configuration_as_object_means_the_same_as_its_file(name: str) -> None:
    text = (Path(__file__).parents[1] / "data" / "config" / f"{name}.yaml").read_text()
    given = {"pluginsConfig": helm_python.values_from_yaml(text), "pluginsConfigFile": "own.yaml"}
    files = rendering.configuration(objects(values({"router": {"epp": given}})))
    assert set(files) == {"own.yaml", "default-plugins.yaml", "payload-agnostic.yaml"}
    assert load_config(files["own.yaml"], name).plugins == load_config(text, name).plugins


def test_whole_numbers_of_a_configuration_stay_whole() -> None:
    producer = {"type": "approx-prefix-cache-producer", "parameters": {"lruCapacityPerServer": 31250000}}
    config = {"apiVersion": names.API_VERSION, "kind": names.CONFIG_KIND, "plugins": [producer]}
    text = rendering.configuration(objects(values({"router": {"epp": {"pluginsConfig": config}}})))
    assert "31250000" in text["default-plugins.yaml"]
    load_config(text["default-plugins.yaml"], "default-plugins.yaml")


def test_a_change_of_the_configuration_reloads_or_rolls() -> None:
    def template(change: str, weight: int) -> Object:
        custom = {"mine.yaml": f"weight: {weight}\n"}
        given = {"configChange": change, "pluginsCustomConfig": custom}
        found = objects(values({"router": {"epp": given}}))
        result = one(found, "Deployment")["spec"]["template"]
        assert isinstance(result, dict)
        return result

    assert template("reload", 1) == template("reload", 2)
    assert template("roll", 1) != template("roll", 2)
    assert all(
        "subPath" not in mount for mount in template("reload", 1)["spec"]["containers"][0]["volumeMounts"]
    )


# -- the pods --------------------------------------------------------------------------------------

VOLUMES = (
    "configMap",
    "emptyDir",
    "projected",
    "secret",
    "downwardAPI",
    "csi",
    "persistentVolumeClaim",
    "ephemeral",
)


def violations(spec: Object) -> list[str]:
    """What the Pod Security Standard `restricted` forbids in a pod."""
    pod = spec.get("securityContext", {})
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [volume["name"] for volume in spec.get("volumes", []) if not set(volume) & set(VOLUMES)]
    for each in [*spec.get("initContainers", []), *spec["containers"]]:
        own = each.get("securityContext", {})
        both = {**pod, **own}
        capabilities = own.get("capabilities", {})
        checks = {
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "privileged": not own.get("privileged"),
            "capabilities": capabilities.get("drop") == ["ALL"]
            and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": both.get("runAsNonRoot") is True and both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "hostPort": not any(port.get("hostPort") for port in each.get("ports", [])),
        }
        found += [f"{each['name']}: {name}" for name, holds in checks.items() if not holds]
    return found


@matrix
def test_pods_are_restricted(case: str) -> None:
    for spec in rendering.pod_specs(rendered(case)):
        assert violations(spec) == []
        for each in spec["containers"]:
            assert each["securityContext"].get("readOnlyRootFilesystem") is (
                each["name"] != "vllm-render" or None
            )


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("epp.podSecurityContext", {"runAsNonRoot": False}),
        ("epp.podSecurityContext", {"seccompProfile": None}),
        ("epp.securityContext", {"allowPrivilegeEscalation": None}),
        ("epp.securityContext", {"capabilities": {"add": ["SYS_ADMIN"]}}),
        ("proxy.securityContext", {"privileged": True}),
        ("epp", {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}),
    ],
)
def test_pods_that_are_not_restricted_would_be_noticed(where: str, change: Object) -> None:
    given = values(STANDALONE, rendering.at(f"router.{where}", change))
    assert [problem for spec in rendering.pod_specs(objects(given)) for problem in violations(spec)]


def test_user_ids_may_be_left_to_the_platform() -> None:
    ids = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    (spec,) = rendering.pod_specs(objects(values(rendering.at("router.epp.podSecurityContext", ids))))
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (spec,) = rendering.pod_specs(
        objects(values(rendering.at("router.epp.podSecurityContext.runAsUser", 1000650000)))
    )
    assert spec["securityContext"]["runAsUser"] == 1000650000


@matrix
def test_ports_and_mounts_of_pods_fit_together(case: str) -> None:
    for spec in rendering.pod_specs(rendered(case)):
        ports = [port for each in spec["containers"] for port in each.get("ports", [])]
        for of_port in ("name", "containerPort"):
            used = [port[of_port] for port in ports]
            assert len(used) == len(set(used))
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(volumes) == len(set(volumes))
        mounted = {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}
        assert mounted == set(volumes)
        assert spec["automountServiceAccountToken"] is False
        for each in spec["containers"]:
            has_token = any("serviceaccount" in mount["mountPath"] for mount in each["volumeMounts"])
            assert has_token == (each["name"] == "epp")
            defined = [variable["name"] for variable in each.get("env", [])]
            assert len(defined) == len(set(defined))


@matrix
def test_probes_ask_for_the_right_names(case: str) -> None:
    """Also with a leader: one that waits is alive, and not ready."""
    picker = container(rendered(case))
    health = rendering.parsed(picker["args"]).grpc_health_port
    assert picker["livenessProbe"]["grpc"] == {"port": health, "service": names.LIVENESS}
    assert picker["readinessProbe"]["grpc"] == {"port": health, "service": names.READINESS}


@matrix
def test_pods_have_time_to_end(case: str) -> None:
    for spec in rendering.pod_specs(rendered(case)):
        grace = spec["terminationGracePeriodSeconds"]
        for each in spec["containers"]:
            if each["name"] == "epp":
                assert grace > rendering.parsed(each["args"]).drain_timeout
            if each["name"] == "envoy":
                assert 0 < each["lifecycle"]["preStop"]["sleep"]["seconds"] < grace


def rolls_out(replicas: int, surge: int, unavailable: int, *, only_leader: bool) -> bool:
    """Whether a Deployment's rolling update ends, by the rules of its controller; pods start at once."""
    pods = [("old", number) for number in range(replicas)]
    leader: tuple[str, int] | None = pods[0]
    for number in range(10 * replicas):
        if leader not in pods:
            # Those that waited longest come first.
            leader = pods[0] if pods else None
        available = [pod for pod in pods if not only_leader or pod == leader]
        old, new = ([pod for pod in pods if pod[0] == age] for age in ("old", "new"))
        if not old and len(new) == replicas:
            return True
        if room := min(replicas - len(new), replicas + surge - len(pods)):
            pods += [("new", 100 * number + each) for each in range(room)]
            continue
        spared = replicas - unavailable
        unready_new = len(new) - len([pod for pod in new if pod in available])
        down = len(pods) - spared - unready_new
        unready_old = [pod for pod in old if pod not in available]
        gone = unready_old[: max(0, down)]
        if not gone:
            gone = [pod for pod in old if pod in available][: max(0, min(down, len(available) - spared))]
        if not gone:
            return False
        pods = [pod for pod in pods if pod not in gone]
    return False


def share(value: int | str, replicas: int) -> int:
    return value if isinstance(value, int) else replicas * int(value.removesuffix("%")) // 100


@pytest.mark.parametrize("leader", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_a_rollout_ends(replicas: int, leader: bool) -> None:
    epp = {"replicas": replicas, "flags": {"ha-enable-leader-election": leader}}
    deployment = one(objects(values({"router": {"epp": epp}})), "Deployment")["spec"]
    assert deployment["replicas"] == replicas
    rolling = deployment["strategy"]["rollingUpdate"]
    surge, unavailable = (share(rolling[key], replicas) for key in ("maxSurge", "maxUnavailable"))
    assert rolls_out(replicas, surge, unavailable, only_leader=leader)
    # A Deployment without a deadline; one whose waiting replicas count as no progress would be called failed.
    assert deployment.get("progressDeadlineSeconds") == (2147483647 if leader else None)
    if not leader:
        assert (surge, unavailable) == (1, 0)


@pytest.mark.parametrize(
    ("replicas", "surge", "unavailable"), [(3, 1, 0), (2, 0, 1), (2, 1, 1), (3, 1, 2), (3, 3, 2)]
)
def test_other_strategies_would_get_stuck_with_a_leader(replicas: int, surge: int, unavailable: int) -> None:
    assert not rolls_out(replicas, surge, unavailable, only_leader=True)
    assert rolls_out(replicas, surge, unavailable, only_leader=False)


def test_replicas_are_left_to_an_autoscaler() -> None:
    scaled = objects(values({"router": {"epp": {"replicas": 4, "autoscaling": {"enabled": True}}}}))
    assert "replicas" not in one(scaled, "Deployment")["spec"]
    assert one(scaled, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "rel-epp"
    assert one(objects(values({})), "Deployment")["spec"]["replicas"] == 1


@pytest.mark.parametrize("path", ["epp", "proxy"])
def test_constraints_spread_the_right_pods(path: str) -> None:
    found = rendered("service-everything")
    deployment = one(found, "Deployment", f"rel-{path}")["spec"]
    (constraint,) = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert constraint["labelSelector"] == deployment["selector"]
    budget = one(found, "PodDisruptionBudget", f"rel-{path}")["spec"]
    assert budget["selector"] == deployment["selector"]
    autoscaler = one(found, "HorizontalPodAutoscaler", f"rel-{path}")["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == f"rel-{path}"
    assert "replicas" not in deployment


@pytest.mark.parametrize(
    ("case", "waits_s", "drain_s"),
    [("gateway", 0, 30), ("sidecar", 120, 1), ("service", 0, 30), ("no-proxy", 0, 30)],
)
def test_a_picker_ends_with_the_proxy_that_asks_it(case: str, waits_s: int, drain_s: int) -> None:
    """Unless others wait for its lease."""
    for leader in (False, True):
        found = objects(values(MATRIX[case], LEADER if leader else {}))
        picker = container(found)
        hook = {"preStop": {"sleep": {"seconds": waits_s}}} if waits_s and not leader else None
        assert picker.get("lifecycle") == hook
        assert rendering.parsed(picker["args"]).drain_timeout == (30 if leader else drain_s)
        if case == "sidecar":
            assert container(found, "envoy")["lifecycle"]["preStop"]["sleep"]["seconds"] == 120


def test_a_drain_timeout_of_ones_own_counts() -> None:
    given = values(STANDALONE, {"router": {"epp": {"flags": {"drain-timeout": "9s"}}}})
    assert rendering.parsed(container(objects(given))["args"]).drain_timeout == 9


@matrix
def test_a_picker_that_hangs_is_given_less_time_than_one_that_ends(case: str) -> None:
    """What it was answering is lost in either case."""
    found = rendered(case)
    spec = one(found, "Deployment")["spec"]["template"]["spec"]
    probe = container(found)["livenessProbe"]
    assert probe["terminationGracePeriodSeconds"] == 10 < spec["terminationGracePeriodSeconds"]


# -- services, rights, routes ----------------------------------------------------------------------


def selects(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()


@matrix
def test_services_lead_to_ports_of_the_pods_they_select(case: str) -> None:
    found = rendered(case)
    templates = [each["spec"]["template"] for each in of_kind(found, "Deployment")]
    for service in of_kind(found, "Service"):
        spec = service["spec"]
        if service["metadata"]["name"] == "rel-engines":
            assert spec["selector"] == rendering.LABELS
            continue
        (template,) = [each for each in templates if selects(spec["selector"], each["metadata"]["labels"])]
        ports = [port for each in template["spec"]["containers"] for port in each["ports"]]
        known = {port["name"] for port in ports} | {port["containerPort"] for port in ports}
        for port in spec["ports"]:
            assert port.get("targetPort", port["port"]) in known
    (ext_proc, *_) = one(found, "Service")["spec"]["ports"]
    assert (ext_proc["name"], ext_proc["appProtocol"]) == ("grpc-ext-proc", "kubernetes.io/h2c")
    for pool in of_kind(found, "InferencePool"):
        picker = pool["spec"]["endpointPickerRef"]
        assert (picker["name"], picker["port"]["number"]) == ("rel-epp", ext_proc["port"])


def rights(found: list[Object]) -> set[tuple[str, str, str]]:
    """Group, resource and verb of all that the picker's account may do, by the bindings."""
    bound = [
        each["roleRef"]["name"]
        for each in [*of_kind(found, "RoleBinding"), *of_kind(found, "ClusterRoleBinding")]
        if each["subjects"] == [{"kind": "ServiceAccount", "name": "rel-epp", "namespace": "ns"}]
    ]
    roles = [each for each in found if each["kind"].endswith("Role") and each["metadata"]["name"] in bound]
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


READ = ("list", "watch")
PODS = {("", "pods", verb) for verb in READ}
POOL = {("inference.networking.k8s.io", "inferencepools", verb) for verb in READ}
POLICIES, LEGACY_POLICIES = (
    {
        (group, resource + part, verb)
        for resource in ("inferenceobjectives", "inferencemodelrewrites")
        for part, verbs in (("", READ), ("/status", ("patch",)))
        for verb in verbs
    }
    for group in ("llm-d.ai", "inference.networking.x-k8s.io")
)
LEASES = {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")}
REVIEWS = {
    ("authentication.k8s.io", "tokenreviews", "create"),
    ("authorization.k8s.io", "subjectaccessreviews", "create"),
}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("gateway", PODS | POOL | POLICIES | LEASES | REVIEWS),
        ("gateway-scraped", PODS | POOL | POLICIES | LEASES | REVIEWS),
        ("gateway-open-metrics", PODS | POOL | POLICIES | LEASES),
        ("gateway-legacy", PODS | POOL | POLICIES | LEGACY_POLICIES | LEASES | REVIEWS),
        ("sidecar-selector", PODS | REVIEWS),
        ("service-selector-leader", PODS | LEASES | REVIEWS),
    ],
)
def test_rights_are_those_that_are_used(case: str, expected: set[tuple[str, str, str]]) -> None:
    assert rights(rendered(case)) == expected


def test_leases_and_pool_are_named() -> None:
    for case, pool in (("gateway", "rel"), ("service-selector-leader", "rel-epp")):
        rules = one(rendered(case), "Role")["rules"]
        named = {name for rule in rules for name in rule.get("resourceNames", [])}
        assert named == {lease_name("ns", pool)} | ({"rel"} if case == "gateway" else set())
        assert all("*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]] for rule in rules)


def test_nothing_outside_the_namespace_without_authentication() -> None:
    assert [each for each in rendered("gateway-open-metrics") if each["kind"] in CLUSTER_WIDE] == []
    assert "--metrics-endpoint-auth=false" in container(rendered("gateway-open-metrics"))["args"]
    assert "--metrics-endpoint-auth=true" in container(rendered("gateway"))["args"]


def test_who_scrapes_may_read_metrics_and_nothing_else() -> None:
    found = rendered("gateway-scraped")
    monitor = one(found, "ServiceMonitor")
    services = [
        each
        for each in of_kind(rendered("service-everything"), "Service")
        if selects(monitor["spec"]["selector"]["matchLabels"], each["metadata"]["labels"])
    ]
    assert [each["metadata"]["name"] for each in services] == ["rel-epp"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in services[0]["spec"]["ports"]]
    secret = one(found, "Secret", endpoint["authorization"]["credentials"]["name"])
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    assert one(found, "ServiceAccount", account)
    (role,) = [each for each in of_kind(found, "ClusterRole") if "metrics-reader" in each["metadata"]["name"]]
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    (binding,) = [
        each
        for each in of_kind(found, "ClusterRoleBinding")
        if each["roleRef"]["name"] == role["metadata"]["name"]
    ]
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    assert one(rendered("gateway-everything"), "ServiceMonitor")["spec"]["endpoints"][0]["scheme"] == "https"


def test_pool_and_objectives() -> None:
    found = rendered("gateway-everything")
    spec = one(found, "InferencePool", "rel")["spec"]
    assert spec["selector"] == {"matchLabels": rendering.LABELS}
    assert [port["number"] for port in spec["targetPorts"]] == [8000, 8001]
    assert (spec["appProtocol"], spec["endpointPickerRef"]["failureMode"]) == ("http", "FailOpen")
    (grpc,) = of_kind(rendered("gateway-grpc"), "InferencePool")
    assert grpc["spec"]["appProtocol"] == "kubernetes.io/h2c"
    priorities = {
        each["metadata"]["name"]: each["spec"]["priority"] for each in of_kind(found, "InferenceObjective")
    }
    assert priorities == {"chat": 10, "batch": -1}
    assert {each["spec"]["poolRef"]["name"] for each in of_kind(found, "InferenceObjective")} == {"rel"}


def test_route_and_destination_rule() -> None:
    found = rendered("gateway-everything")
    (rule,) = one(found, "HTTPRoute", "rel")["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "rel"}
    ]
    assert {header["name"]: header["value"] for header in rule["matches"][0]["headers"]} == {
        "X-Gateway-Base-Model-Name": "m",
        "x-route": "a",
    }
    destination = one(found, "DestinationRule")["spec"]
    assert destination["host"] == "rel-epp.ns.svc.cluster.local"
    ejection = destination["trafficPolicy"].pop("outlierDetection")
    # Only who cannot be connected to goes: what a picker answers, such as that it is full, is no reason.
    assert ejection["splitExternalLocalOriginErrors"] is True
    assert (ejection["consecutiveLocalOriginFailures"], ejection["consecutive5xxErrors"]) == (1, 0)
    policy = {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}, "connectionPool": {"http": {}}}
    assert destination["trafficPolicy"] == policy
    (plain,) = of_kind(rendered("gateway-istio-plain"), "DestinationRule")
    assert plain["spec"]["trafficPolicy"] == {"tls": {"mode": "DISABLE"}, "outlierDetection": ejection}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("gateway", "--set httpRoute.create=true"),
        ("gateway-route", "get gateway inference-gateway"),
        ("gateway-selector", "rel-epp.ns.svc.cluster.local:9002"),
        ("no-proxy", "rel-epp.ns.svc.cluster.local:9002"),
        ("sidecar", "port-forward service/rel-epp 8081:8081"),
        ("service", "port-forward service/rel-proxy 8081:8081"),
        ("sidecar-everything", "port-forward service/rel-epp 8081:80"),
        ("gateway-leader", "do not use --wait"),
        ("envoy-gateway", "get gateway inference-gateway"),
        ("envoy-gateway", "enableBackend"),
        ("envoy-gateway-no-route", "--set httpRoute.create=true"),
        ("envoy-gateway-no-route", "Service rel-engines, and name it rel:"),
    ],
)
def test_notes_tell_the_next_command(case: str, expected: str) -> None:
    assert expected in rendering.notes(values(CASES[case]))


def test_custom_resource_definitions_come_first_where_they_are_wanted() -> None:
    for wanted in (False, True):
        with helm_python.Chart.load(CHART) as chart:
            chart.render(values({"crds": {"create": wanted}}), name="rel", namespace="ns")
            kinds = sorted(crd["name"] for crd in chart.crds)
        expected = ["inferencemodelrewrites", "inferenceobjectives", "inferencepools"] if wanted else []
        assert kinds == [f"crds/{name}.yaml" for name in expected]
