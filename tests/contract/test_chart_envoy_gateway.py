"""What the chart makes for Envoy Gateway, which leads to the pods of the pool and to the picker alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epp import names
from epp.lab.envoy import FORGED_HEADERS
from tests.contract.test_chart_render import BEHIND_ENVOY_GATEWAY, CASES, ENVOY_GATEWAY, MATRIX, rendered
from tests.data.chart.rendering import (
    Object,
    container,
    merged,
    objects,
    of_kind,
    one,
    parsed,
    refusal,
    values,
)
from tests.data.kube import kustomize

POLICIES = ("BackendTrafficPolicy", "EnvoyExtensionPolicy", "ClientTrafficPolicy", "BackendTLSPolicy")
OF_PICKER = ("Backend", "BackendTLSPolicy")
OVERLAY = Path(__file__).resolve().parents[2] / "manifests/overlays/gateway"
matrix = pytest.mark.parametrize("case", ENVOY_GATEWAY)


def behind(*parts: Object) -> list[Object]:
    return objects(values(BEHIND_ENVOY_GATEWAY, *parts))


def own(**given: object) -> Object:
    return {"provider": {"envoyGateway": given}}


def ext_proc(found: list[Object]) -> Object:
    (picker,) = one(found, "EnvoyExtensionPolicy")["spec"]["extProc"]
    assert isinstance(picker, dict)
    return picker


# -- all of it fits together -----------------------------------------------------------------------


def faults(found: list[Object]) -> Iterator[str]:
    """Where what was made leads to nothing, or elsewhere than the picker's own arguments."""
    there = {(each["kind"], each["metadata"]["name"]): each for each in found}
    options = parsed(container(found)["args"])
    engines = there["Service", "rel-engines"]["spec"]
    ports = [port["port"] for port in engines["ports"]]
    pool = there.get(("InferencePool", "rel"))
    if pool:
        labels = pool["spec"]["selector"]["matchLabels"]
        targets = [port["number"] for port in pool["spec"]["targetPorts"]]
    else:
        labels = dict(pair.split("=") for pair in options.endpoint_selector.split(","))
        targets = [int(port) for text in options.endpoint_target_ports for port in text.split(",")]
    if engines["selector"] != labels:
        yield "the Service has other pods than the pool"
    if ports != targets:
        yield "the Service has other ports than the pool"
    for route in of_kind(found, "HTTPRoute"):
        (rule,) = route["spec"]["rules"]
        if rule["backendRefs"] != [{"name": "rel-engines", "port": port} for port in ports]:
            yield "the route leads elsewhere"
        if "filters" in rule:
            yield "endpoints of several ports are in one cluster only without filters"
    for kind, name in {"BackendTrafficPolicy": "rel", "EnvoyExtensionPolicy": "rel"}.items():
        (target,) = there[kind, "rel-epp"]["spec"]["targetRefs"]
        if target != {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": name}:
            yield f"the {kind} is for another route"
    yield from _wrong_picker(found, there, options.grpc_port)


def _wrong_picker(found: list[Object], there: dict[tuple[str, str], Object], port: int) -> Iterator[str]:
    (reference,) = ext_proc(found)["backendRefs"]
    target = there.get((reference.get("kind", "Service"), reference["name"]))
    if target is None or reference["port"] != port:
        yield "no picker is asked"
    elif target["kind"] == "Backend":
        (endpoint,) = target["spec"]["endpoints"]
        if endpoint["fqdn"] != {"hostname": "rel-epp.ns.svc.cluster.local", "port": port}:
            yield "no picker is asked"
    elif {
        "name": "grpc-ext-proc",
        "port": port,
        "targetPort": "grpc",
        "appProtocol": "kubernetes.io/h2c",
    } not in (target["spec"]["ports"]):
        yield "the picker's Service has no such port"
    for policy in of_kind(found, "BackendTLSPolicy"):
        if [each["name"] for each in policy["spec"]["targetRefs"]] != [reference["name"]]:
            yield "what is verified is not the picker"


@matrix
def test_all_leads_to_the_pool_and_to_the_picker(case: str) -> None:
    assert list(faults(rendered(case))) == []


def spoil(kind: str, name: str, edit: Callable[[Object], object]) -> Callable[[list[Object]], object]:
    return lambda found: edit(one(found, kind, name)["spec"])


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (spoil("Service", "rel-engines", lambda spec: spec["selector"].update(a="b")), "other pods"),
        (spoil("Service", "rel-engines", lambda spec: spec["ports"].pop()), "other ports"),
        (spoil("HTTPRoute", "rel", lambda spec: spec["rules"][0]["backendRefs"].pop()), "elsewhere"),
        (spoil("HTTPRoute", "rel", lambda spec: spec["rules"][0].update(filters=[])), "filters"),
        (
            spoil("EnvoyExtensionPolicy", "rel-epp", lambda spec: spec["targetRefs"][0].update(name="x")),
            "another route",
        ),
        (
            spoil(
                "EnvoyExtensionPolicy",
                "rel-epp",
                lambda spec: spec["extProc"][0]["backendRefs"][0].update(port=1),
            ),
            "no picker",
        ),
        (
            spoil("Service", "rel-epp", lambda spec: spec["ports"][0].pop("appProtocol")),
            "no such port",
        ),
        (
            spoil("BackendTLSPolicy", "rel-epp", lambda spec: spec["targetRefs"][0].update(name="x")),
            "not the picker",
        ),
    ],
)
def test_what_leads_elsewhere_would_be_noticed(edit: Callable[[list[Object]], object], told: str) -> None:
    found = rendered("envoy-gateway-everything")
    edit(found)
    assert any(told in fault for fault in faults(found))


@matrix
def test_no_backend_is_a_pool(case: str) -> None:
    """Of a kind that Envoy Gateway does not know."""
    rules = [rule for route in of_kind(rendered(case), "HTTPRoute") for rule in route["spec"]["rules"]]
    assert all("kind" not in reference for rule in rules for reference in rule["backendRefs"])
    assert bool(rules) == (case != "envoy-gateway-no-route")


@pytest.mark.parametrize("case", MATRIX)
def test_other_gateways_get_none_of_it(case: str) -> None:
    groups = {each["apiVersion"].partition("/")[0] for each in rendered(case)}
    assert "gateway.envoyproxy.io" not in groups
    if case.startswith("gateway"):
        assert "rel-engines" not in [each["metadata"]["name"] for each in rendered(case)]


# -- what each says --------------------------------------------------------------------------------


def test_what_only_a_picker_may_say_is_taken_from_requests_first() -> None:
    headers = one(rendered("envoy-gateway"), "ClientTrafficPolicy")["spec"]["headers"]
    assert headers["earlyRequestHeaders"] == {"remove": list(FORGED_HEADERS)}
    assert headers["requestID"] == "PreserveOrGenerate"


def test_the_pickers_word_chooses_the_endpoint() -> None:
    for case in ENVOY_GATEWAY:
        spec = one(rendered(case), "BackendTrafficPolicy")["spec"]
        override = {"extractFrom": [{"header": names.DESTINATION_ENDPOINT}]}
        assert spec["loadBalancer"] == {"type": "LeastRequest", "endpointOverride": override}


def test_nothing_is_cut_short_nor_kept_from_the_picker() -> None:
    traffic, picker = (
        one(rendered("envoy-gateway"), "BackendTrafficPolicy")["spec"],
        ext_proc(rendered("envoy-gateway")),
    )
    assert traffic["timeout"]["http"] == {
        "requestTimeout": "0s",
        "streamIdleTimeout": "24h",
        "connectionIdleTimeout": "4s",
    }
    assert traffic["retry"]["retryOn"] == {"triggers": ["connect-failure"]}
    limits = {"maxConnections": 40000, "maxPendingRequests": 40000, "maxParallelRequests": 40000}
    assert traffic["circuitBreaker"] == picker["backendSettings"]["circuitBreaker"] == limits
    assert (picker["messageTimeout"], picker["statusOnError"]) == ("1000s", 503)
    assert picker["metadata"]["writableNamespaces"] == [names.LB_NAMESPACE]


def test_it_fails_open_only_where_bodies_are_not_full_duplex() -> None:
    for given in (False, True):
        found = behind(own(failOpen=given))
        modes = {way: mode["body"] for way, mode in ext_proc(found)["processingMode"].items()}
        limit = one(found, "ClientTrafficPolicy")["spec"].get("connection")
        if given:
            assert ext_proc(found)["failOpen"] is True
            assert modes == {"request": "Buffered", "response": "Streamed"}
            assert limit == {"bufferLimit": "32Mi"}
        else:
            assert "failOpen" not in ext_proc(found)
            assert modes == {"request": "FullDuplexStreamed", "response": "FullDuplexStreamed"}
            assert limit is None


@pytest.mark.parametrize(
    ("epp", "tls", "made"),
    [
        ({"flags": {"secure-serving": False}}, {}, None),
        ({}, {}, "Backend"),
        ({"tls": {"secretName": "s"}}, {}, "Backend"),
        ({"tls": {"secretName": "s"}}, {"caConfigMap": "authority"}, "BackendTLSPolicy"),
        ({"tls": {"secretName": "s"}}, {"caConfigMap": "authority", "hostname": "a.b"}, "BackendTLSPolicy"),
    ],
)
def test_encryption_to_the_picker(epp: Object, tls: Object, made: str | None) -> None:
    found = behind({"router": {"epp": epp}}, own(tls=tls))
    assert [each["kind"] for each in found if each["kind"] in OF_PICKER] == ([made] if made else [])
    match made:
        case "Backend":
            spec = one(found, made)["spec"]
            assert spec["tls"] == {"insecureSkipVerify": True}
            assert spec["appProtocols"] == ["gateway.envoyproxy.io/h2c"]
        case "BackendTLSPolicy":
            authority = {"group": "", "kind": "ConfigMap", "name": "authority"}
            assert one(found, made)["spec"]["validation"] == {
                "hostname": tls.get("hostname", "rel-epp"),
                "caCertificateRefs": [authority],
            }


def test_engines_over_grpc_are_spoken_to_in_http2() -> None:
    for protocol, expected in (("http", {None}), ("grpc", {"kubernetes.io/h2c"})):
        found = behind({"router": {"modelServers": {"protocol": protocol}}})
        assert {
            port.get("appProtocol") for port in one(found, "Service", "rel-engines")["spec"]["ports"]
        } == expected


def test_a_gateway_of_another_namespace_has_its_policy_there() -> None:
    given = {"httpRoute": {"inferenceGatewayName": "shared", "inferenceGatewayNamespace": "infra"}}
    seen = set()
    for name, namespace in (("rel", "ns"), ("rel", "other"), ("a", "ns")):
        found = objects(values(BEHIND_ENVOY_GATEWAY, given), name, namespace)
        (policy,) = of_kind(found, "ClientTrafficPolicy")
        assert policy["metadata"]["namespace"] == "infra"
        assert policy["spec"]["targetRefs"][0]["name"] == "shared"
        seen.add(policy["metadata"]["name"])
        others = [each for each in found if each["kind"] in POLICIES and each is not policy]
        assert {each["metadata"]["namespace"] for each in others} == {namespace}
    assert len(seen) == 3
    assert of_kind(behind(given, own(clientTrafficPolicy={"create": False})), "ClientTrafficPolicy") == []


def test_policies_may_say_more() -> None:
    given = own(
        backendTrafficPolicy={"timeout": {"http": {"streamIdleTimeout": "1h"}}, "compression": []},
        clientTrafficPolicy={"spec": {"headers": {"requestID": "Generate"}}},
    )
    plain, found = behind(), behind(given)
    for kind, more in (
        ("BackendTrafficPolicy", given["provider"]["envoyGateway"]["backendTrafficPolicy"]),
        ("ClientTrafficPolicy", given["provider"]["envoyGateway"]["clientTrafficPolicy"]["spec"]),
    ):
        assert one(found, kind)["spec"] == merged(one(plain, kind)["spec"], more)


def test_it_fits_a_picker_of_the_manifests() -> None:
    """A release named warmroute makes policies for the names and ports of the overlay."""
    (service,) = of_kind(kustomize.render(OVERLAY), "Service")
    found = objects(values(ENVOY_GATEWAY["envoy-gateway-plain"]), "warmroute")
    (reference,) = one(found, "EnvoyExtensionPolicy", "warmroute-epp")["spec"]["extProc"][0]["backendRefs"]
    assert reference["name"] == service["metadata"]["name"]
    asked = [port for port in service["spec"]["ports"] if port["port"] == reference["port"]]
    assert [port["appProtocol"] for port in asked] == ["kubernetes.io/h2c"]


# -- what cannot be --------------------------------------------------------------------------------

PLAIN: Object = {"router": {"epp": {"flags": {"secure-serving": False}}}}
CERTIFIED: Object = {"router": {"epp": {"tls": {"secretName": "s"}}}}
VERIFIED = own(tls={"caConfigMap": "authority"})
CLOSED: Object = {"router": {"inferencePool": {"failureMode": "FailClose"}}}


@pytest.mark.parametrize(
    ("given", "path", "instead"),
    [
        ({"mode": "standalone"}, "provider.name", "write mode: gateway"),
        (values(CLOSED, own(failOpen=True)), "provider.envoyGateway.failOpen", "leave out one of them"),
        (values(PLAIN, VERIFIED), "provider.envoyGateway.tls.caConfigMap", "leave out one of them"),
        (VERIFIED, "provider.envoyGateway.tls.caConfigMap", "write router.epp.tls.secretName"),
        (
            values(CERTIFIED, own(tls={"hostname": "a.b"})),
            "provider.envoyGateway.tls.hostname",
            "write provider.envoyGateway.tls.caConfigMap",
        ),
        (
            own(clientTrafficPolicy={"create": False, "spec": {"connection": {}}}),
            "provider.envoyGateway.clientTrafficPolicy.spec",
            "clientTrafficPolicy.create: true",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: Object, path: str, instead: str) -> None:
    said = refusal(values(BEHIND_ENVOY_GATEWAY, given))
    (line,) = [line for line in said.splitlines() if line.startswith(f"- {path}: ")]
    assert instead in line


@pytest.mark.parametrize("given", [CLOSED, own(failOpen=True), values(CERTIFIED, VERIFIED), PLAIN, CERTIFIED])
def test_what_can_be_is_not(given: Object) -> None:
    assert refusal(values(BEHIND_ENVOY_GATEWAY, given)) == ""


def test_a_route_needs_no_pool_there() -> None:
    assert of_kind(rendered("envoy-gateway-selector"), "InferencePool") == []
    assert len(of_kind(rendered("envoy-gateway-selector"), "HTTPRoute")) == 1
    assert "set router.inferencePool.create: true" in refusal(
        values({"httpRoute": {"create": True}}, MATRIX["gateway-selector"])
    )


def test_cases_of_envoy_gateway_are_those_that_name_it() -> None:
    named = {
        case for case, given in CASES.items() if given.get("provider", {}).get("name") == "envoy-gateway"
    }
    assert named == set(ENVOY_GATEWAY)
