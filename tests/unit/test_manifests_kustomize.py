"""What the kustomizations of `manifests/` make: it fits together, runs restricted, may do what it does."""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp import names
from epp.config.load import load_config
from epp.runtime.health import Health
from epp.runtime.options import Options, completed
from tests.data.kube import arguments, kustomize
from tools import manifests

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
Objects = list[dict[str, Any]]
GATEWAY = kustomize.render(MANIFESTS / "overlays/gateway")
STANDALONE = kustomize.render(MANIFESTS / "overlays/standalone")
OVERLAYS = {"gateway": GATEWAY, "standalone": STANDALONE}
LEGACY = names.LEGACY_INFERENCE_GROUP

Permission = tuple[str, str, str]
PODS = {("", "pods", "list"), ("", "pods", "watch")}
POOL = {
    *((names.POOL_GROUP, names.POOL_RESOURCE, verb) for verb in ("list", "watch")),
    *(
        (names.LLM_D_GROUP, resource, verb)
        for resource in (names.OBJECTIVE_RESOURCE, names.MODEL_REWRITE_RESOURCE)
        for verb in ("list", "watch")
    ),
    (names.LLM_D_GROUP, f"{names.OBJECTIVE_RESOURCE}/status", "patch"),
    (names.LLM_D_GROUP, f"{names.MODEL_REWRITE_RESOURCE}/status", "patch"),
}
LEASE = {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")}
REVIEWS = {
    ("authentication.k8s.io", "tokenreviews", "create"),
    ("authorization.k8s.io", "subjectaccessreviews", "create"),
}


def with_component(name: str, objects: Objects) -> Objects:
    return kustomize.built(MANIFESTS / "components" / name, deepcopy(objects))


def one(objects: Objects, kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def pod(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(objects: Objects, name: str) -> dict[str, Any]:
    (found,) = [each for each in pod(objects)["containers"] if each["name"] == name]
    return dict(found)


def options(objects: Objects) -> Options:
    """What the picker reads from its arguments, in a pod of the Deployment."""
    given = arguments.options(container(objects, "epp")["args"])
    assert list(given.problems()) == []
    return completed(given, {"NAMESPACE": "here", "POD_NAME": "warmroute-epp-5d8f7c9b6-x2x4q"})


# -- rights ---------------------------------------------------------------------------------------------


def permissions(objects: Objects, role: str = "Role") -> set[Permission]:
    """What the Deployment's service account may do, by the bindings."""
    account = pod(objects)["serviceAccountName"]
    roles = {each["metadata"]["name"]: each for each in objects if each["kind"] == role}
    granted = set()
    for binding in (each for each in objects if each["kind"] == f"{role}Binding"):
        assert binding["roleRef"]["kind"] == role
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["name"]) == ("ServiceAccount", account)
        for rule in roles[binding["roleRef"]["name"]]["rules"]:
            assert rule.keys() == {"apiGroups", "resources", "verbs"}
            granted |= {
                (group, resource, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return granted


def test_rights_are_those_that_are_used() -> None:
    assert permissions(STANDALONE) == PODS
    assert permissions(GATEWAY) == PODS | POOL | LEASE
    for objects in OVERLAYS.values():
        assert not [each for each in objects if each["kind"].startswith("ClusterRole")]


def test_every_role_is_bound() -> None:
    for objects in OVERLAYS.values():
        bound = {each["roleRef"]["name"] for each in objects if each["kind"] == "RoleBinding"}
        assert {each["metadata"]["name"] for each in objects if each["kind"] == "Role"} == bound


def test_rights_of_components() -> None:
    legacy = with_component("legacy-apis", GATEWAY)
    assert permissions(legacy) == permissions(GATEWAY) | {
        (LEGACY, resource, verb) for group, resource, verb in POOL if group == names.LLM_D_GROUP
    }
    reviewed = with_component("metrics-auth", GATEWAY)
    assert permissions(reviewed, "ClusterRole") == REVIEWS
    assert permissions(with_component("lease", STANDALONE)) == PODS | LEASE


def test_a_reader_of_metrics_has_a_role_to_bind() -> None:
    roles = [each for each in with_component("metrics-auth", GATEWAY) if each["kind"] == "ClusterRole"]
    (reader,) = [each for each in roles if each["metadata"]["name"] == "warmroute-metrics-reader"]
    assert reader["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rule: rule["verbs"].append("get"),
        lambda rule: rule["verbs"].remove("watch"),
        lambda rule: rule["resources"].append("secrets"),
        lambda rule: rule.update(apiGroups=["*"]),
    ],
)
def test_the_comparison_of_rights_sees_faults(spoil: Callable[[dict[str, Any]], None]) -> None:
    objects = deepcopy(STANDALONE)
    spoil(one(objects, "Role")["rules"][0])
    assert permissions(objects) != PODS


# -- the picker -----------------------------------------------------------------------------------------


def test_arguments_are_right() -> None:
    gateway, standalone = options(GATEWAY), options(STANDALONE)
    assert gateway.pool_name == one(GATEWAY, "InferencePool")["metadata"]["name"]
    assert gateway.pool_namespace == standalone.pool_namespace == "here"
    assert (gateway.secure_serving, gateway.ha_enable_leader_election) == (True, False)
    assert (standalone.pool_name, standalone.endpoint_selector) == ("warmroute-epp", "app=vllm")
    assert (standalone.endpoint_target_ports, standalone.secure_serving) == (("8000",), False)
    assert not gateway.metrics_endpoint_auth
    assert not standalone.metrics_endpoint_auth


def test_components_change_arguments() -> None:
    assert options(with_component("metrics-auth", GATEWAY)).metrics_endpoint_auth
    ready = with_component("leader-ready", GATEWAY)
    assert options(ready).ha_enable_leader_election
    assert one(ready, "Deployment")["spec"]["replicas"] == 2
    # A rollout that waits for a ready pod never ends: the old one leads until it is gone.
    assert one(ready, "Deployment")["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": "100%",
        "maxUnavailable": "100%",
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_configuration_loads_from_where_it_is_mounted(overlay: str) -> None:
    objects = OVERLAYS[overlay]
    file = Path(options(objects).config_file)
    (mount,) = [
        each for each in container(objects, "epp")["volumeMounts"] if each["mountPath"] == str(file.parent)
    ]
    (volume,) = [each for each in pod(objects)["volumes"] if each["name"] == mount["name"]]
    (config,) = [
        each
        for each in objects
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == volume["configMap"]["name"]
    ]
    load_config(config["data"][file.name], file.name, allow_experimental=False)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_and_ports_are_those_of_the_picker(overlay: str) -> None:
    objects = OVERLAYS[overlay]
    epp, given = container(objects, "epp"), options(objects)
    ports = {each["name"]: each["containerPort"] for each in epp["ports"]}
    assert ports == {
        "grpc": given.grpc_port,
        "grpc-health": given.grpc_health_port,
        "metrics": given.metrics_port,
    }
    health = Health()
    for probe, service in (("livenessProbe", names.LIVENESS), ("readinessProbe", names.READINESS)):
        assert epp[probe]["grpc"] == {"port": given.grpc_health_port, "service": service}
        assert health.status(service) is not None
    service = one(objects, "Service")["spec"]
    known = {each["name"] for every in pod(objects)["containers"] for each in every["ports"]}
    assert {each["targetPort"] for each in service["ports"]} <= known
    assert (
        service["selector"].items()
        <= one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )


def test_the_pod_outlives_its_drain() -> None:
    for objects in OVERLAYS.values():
        assert pod(objects)["terminationGracePeriodSeconds"] > options(objects).drain_timeout


def test_a_picker_ends_with_the_proxy_beside_it() -> None:
    """Unless another replica waits for its Lease."""
    standalone = OVERLAYS["standalone"]
    hooks = [container(standalone, name)["lifecycle"] for name in ("epp", "envoy")]
    assert hooks == [{"preStop": {"sleep": {"seconds": 120}}}] * 2
    assert options(standalone).drain_timeout < pod(standalone)["terminationGracePeriodSeconds"] - 120
    assert not container(with_component("leader-ready", standalone), "epp")["lifecycle"]
    assert "lifecycle" not in container(OVERLAYS["gateway"], "epp")


def test_a_pool_leads_from_the_route_to_the_engines() -> None:
    pool, route = one(GATEWAY, "InferencePool"), one(GATEWAY, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend == {
        "group": names.POOL_GROUP,
        "kind": names.POOL_KIND,
        "name": pool["metadata"]["name"],
    }
    service = one(GATEWAY, "Service")
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["name"] == service["metadata"]["name"]
    assert picker["port"]["number"] in {each["port"] for each in service["spec"]["ports"]}
    (engines,) = kustomize.read(MANIFESTS / "samples/vllm.yaml")
    labels = engines["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (port,) = engines["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [port["containerPort"]]
    selector = dict([options(STANDALONE).endpoint_selector.split("=")])
    assert selector == pool["spec"]["selector"]["matchLabels"]


def test_samples_name_what_is_there() -> None:
    pools = {one(GATEWAY, "InferencePool")["metadata"]["name"]}
    samples = [each for file in (MANIFESTS / "samples").glob("*.yaml") for each in kustomize.read(file)]
    pools |= {each["metadata"]["name"] for each in samples if each["kind"] == names.POOL_KIND}
    for each in samples:
        match each["kind"]:
            case "InferenceObjective" | "InferenceModelRewrite":
                assert each["spec"]["poolRef"]["name"] in pools
            case "HTTPRoute":
                assert {ref["name"] for rule in each["spec"]["rules"] for ref in rule["backendRefs"]} <= pools
            case "DestinationRule":
                assert each["spec"]["host"].startswith(one(GATEWAY, "Service")["metadata"]["name"] + ".")


# -- the proxy ------------------------------------------------------------------------------------------


def test_the_proxys_configuration_is_the_packages() -> None:
    assert not manifests.stale(ROOT)


@pytest.mark.parametrize("change", [("8081", "8082"), ("FULL_DUPLEX_STREAMED", "BUFFERED"), ("\n", "\n#\n")])
def test_the_freshness_check_sees_changes(change: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / manifests.ENVOY
    assert manifests.stale(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text(manifests.standalone_envoy())
    assert not manifests.stale(tmp_path)
    file.write_text(file.read_text().replace(*change, 1))
    assert manifests.stale(tmp_path)


def test_the_proxy_asks_the_picker_beside_it() -> None:
    config = yaml.safe_load(
        one([each for each in STANDALONE if "envoy.yaml" in each.get("data", {})], "ConfigMap")["data"][
            "envoy.yaml"
        ]
    )
    (listener,) = config["static_resources"]["listeners"]
    envoy = container(STANDALONE, "envoy")
    (port,) = envoy["ports"]
    assert listener["address"]["socket_address"]["port_value"] == port["containerPort"]
    (picker,) = [each for each in config["static_resources"]["clusters"] if each["name"] == "picker"]
    (place,) = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
    given = options(STANDALONE)
    assert place["endpoint"]["address"]["socket_address"] == {
        "address": "127.0.0.1",
        "port_value": given.grpc_port,
    }
    assert place["endpoint"]["health_check_config"]["port_value"] == given.grpc_health_port
    assert ("transport_socket_matches" in picker) == given.secure_serving
    mounted = {each["name"] for each in envoy["volumeMounts"]}
    assert mounted <= {each["name"] for each in pod(STANDALONE)["volumes"]}
    assert envoy["args"][1] == f"{envoy['volumeMounts'][0]['mountPath']}/envoy.yaml"


# -- the restricted Pod Security Standard, and images ---------------------------------------------------


def unrestricted(spec: dict[str, Any]) -> Iterator[str]:
    """What the standard `restricted` forbids, and what else the picker can do without."""
    of_pod = spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield key
    for volume in spec.get("volumes", ()):
        if not volume.keys() & {"configMap", "emptyDir", "secret", "projected", "csi", "downwardAPI"}:
            yield f"volume {volume['name']}"
    for each in spec["containers"]:
        own = of_pod | each.get("securityContext", {})
        if own.get("runAsNonRoot") is not True or own.get("runAsUser", 1) == 0:
            yield f"{each['name']}: root"
        if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{each['name']}: seccomp"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{each['name']}: privileges"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{each['name']}: capabilities"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{each['name']}: file system"
        if any("hostPort" in port for port in each.get("ports", ())):
            yield f"{each['name']}: host port"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay: str) -> None:
    assert list(unrestricted(pod(OVERLAYS[overlay]))) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.pop("securityContext"),
        lambda spec: spec["securityContext"].update(runAsUser=0),
        lambda spec: spec["containers"][0]["securityContext"].pop("allowPrivilegeEscalation"),
        lambda spec: spec["containers"][1]["securityContext"]["capabilities"].update(add=["NET_ADMIN"]),
        lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        lambda spec: spec.update(hostNetwork=True),
    ],
)
def test_the_check_of_pods_sees_faults(spoil: Callable[[dict[str, Any]], None]) -> None:
    spec = deepcopy(pod(STANDALONE))
    spoil(spec)
    assert list(unrestricted(spec))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_picker_has_a_token(overlay: str) -> None:
    spec = pod(OVERLAYS[overlay])
    assert spec["automountServiceAccountToken"] is False
    (token,) = [each["name"] for each in spec["volumes"] if "projected" in each]
    mounting = {each["name"]: each["volumeMounts"] for each in spec["containers"]}
    holders = [name for name, mounts in mounting.items() if token in {mount["name"] for mount in mounts}]
    assert holders == ["epp"]


IMAGE = re.compile(r"[a-z0-9-]+/[a-z0-9-]+:[A-Za-z0-9._-]+")


def test_images_have_a_tag_and_no_registry() -> None:
    samples = [each for file in (MANIFESTS / "samples").glob("*.yaml") for each in kustomize.read(file)]
    images = [
        each["image"]
        for thing in (*GATEWAY, *STANDALONE, *samples)
        if thing["kind"] == "Deployment"
        for each in thing["spec"]["template"]["spec"]["containers"]
    ]
    assert len(images) == 4
    assert all(IMAGE.fullmatch(image) and not image.endswith(":latest") for image in images)


def test_nothing_is_left_out() -> None:
    """Every file is part of a kustomization, or a sample, or of a gateway."""
    used = set()
    for file in MANIFESTS.rglob("kustomization.yaml"):
        wanted = yaml.safe_load(file.read_text())
        named = [
            *wanted.get("resources", ()),
            *(each["path"] for each in wanted.get("patches", ()) if "path" in each),
        ]
        named += [name for each in wanted.get("configMapGenerator", ()) for name in each["files"]]
        used |= {file} | {(file.parent / name).resolve() for name in named}
    files = {file for file in MANIFESTS.rglob("*") if file.is_file()}
    assert files - used == {*(MANIFESTS / "samples").glob("*.yaml"), MANIFESTS / "conformance/config.yaml"}
