"""The proxy's configuration: that which the lab proves, for addresses of a cluster."""

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp import names
from epp.lab.envoy import PickerAddress, envoy_config, find_envoy
from tests.data.chart import rendering
from tests.data.chart.rendering import Object, objects, values

CASES = [
    (fail_open, secure, mode)
    for fail_open in (True, False)
    for secure in (True, False)
    for mode in ("sidecar", "service")
]
cases = pytest.mark.parametrize(("fail_open", "secure", "mode"), CASES)
PORTS = (8000, 8001)


def given(fail_open: bool, secure: bool, mode: str, **servers: object) -> Object:
    router = {
        "proxy": {"failOpen": fail_open, "mode": mode},
        "epp": {"flags": {"secure-serving": secure}},
        "modelServers": {"targetPorts": [{"number": port} for port in PORTS], **servers},
    }
    return values({"mode": "standalone", "router": router})


def proven(fail_open: bool, secure: bool) -> Any:
    return yaml.safe_load(
        envoy_config(
            listen_host="0.0.0.0",
            listen_port=8081,
            admin_port=19000,
            pickers=[PickerAddress("picker", names.GRPC_PORT, names.GRPC_HEALTH_PORT)],
            endpoints=[("engine", port) for port in PORTS],
            fail_open=fail_open,
            tls=secure,
            health_interval_s=1.0,
        )
    )


def without_addresses(config: Any) -> Any:
    """The configuration but for what differs in a cluster: how clusters are found, and the way for probes."""
    config = copy.deepcopy(config)
    resources = config["static_resources"]
    resources["listeners"] = [each for each in resources["listeners"] if each["name"] != "ready"]
    resources["clusters"] = [each for each in resources["clusters"] if each["name"] != "admin"]
    for cluster in resources["clusters"]:
        if cluster["name"] != "picked":
            for key in ("type", "dns_lookup_family"):
                cluster.pop(key, None)
        for locality in cluster.get("load_assignment", {}).get("endpoints", []):
            for each in locality["lb_endpoints"]:
                each["endpoint"]["address"]["socket_address"].pop("address")
    return config


def differences(rendered: Any, lab: Any) -> bool:
    return bool(without_addresses(rendered) != without_addresses(lab))


@cases
def test_only_addresses_differ_from_what_is_proven(fail_open: bool, secure: bool, mode: str) -> None:
    rendered = rendering.envoy(objects(given(fail_open, secure, mode)))
    assert not differences(rendered, proven(fail_open, secure))


@pytest.mark.parametrize(
    "fault",
    [
        lambda config: config["static_resources"]["listeners"][1]["filter_chains"][0]["filters"][0][
            "typed_config"
        ].pop("early_header_mutation_extensions"),
        lambda config: config["static_resources"]["clusters"][-1].pop("common_lb_config"),
        lambda config: config["static_resources"]["clusters"][-1].pop("health_checks"),
        lambda config: config["static_resources"]["clusters"][1].update(type="STRICT_DNS"),
    ],
    ids=["forged-headers-kept", "panic", "no-health-check", "destination-by-name"],
)
def test_a_difference_would_be_noticed(fault: Any) -> None:
    rendered = copy.deepcopy(rendering.envoy(objects(given(True, True, "sidecar"))))
    fault(rendered)
    assert differences(rendered, proven(True, True))


def addresses(config: Any, name: str) -> list[tuple[str, int]]:
    (cluster,) = [each for each in config["static_resources"]["clusters"] if each["name"] == name]
    found = [
        each["endpoint"]["address"]["socket_address"]
        for each in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    return [(each["address"], each["port_value"]) for each in found]


@pytest.mark.parametrize("mode", ["sidecar", "service"])
def test_names_are_those_of_headless_services(mode: str) -> None:
    found = objects(given(True, True, mode))
    config = rendering.envoy(found)
    engines = "rel-engines.ns.svc.cluster.local"
    assert addresses(config, "engines") == [(engines, port) for port in PORTS]
    picker = {"sidecar": "127.0.0.1", "service": "rel-epp-pods.ns.svc.cluster.local"}[mode]
    assert addresses(config, "picker") == [(picker, 9002)]
    for host in {engines, picker} - {"127.0.0.1"}:
        spec = rendering.one(found, "Service", host.split(".")[0])["spec"]
        assert spec["clusterIP"] == "None"
        # Pickers that wait for the lease count by what proxies see of them; engines must be ready.
        assert spec.get("publishNotReadyAddresses", False) == (host == picker)


def test_without_fail_open_nothing_leads_past_the_picker() -> None:
    found = objects(given(False, True, "service"))
    assert "engines" not in [each["name"] for each in rendering.envoy(found)["static_resources"]["clusters"]]
    assert "rel-engines" not in [each["metadata"]["name"] for each in rendering.of_kind(found, "Service")]


@pytest.mark.parametrize(
    ("servers", "check", "upstream"),
    [
        ({}, {"http_health_check": {"path": "/health"}}, "http_protocol_options"),
        ({"type": "triton"}, {"http_health_check": {"path": "/v2/health/ready"}}, "http_protocol_options"),
        ({"protocol": "grpc"}, {"tcp_health_check": {}}, "http2_protocol_options"),
    ],
    ids=["http", "triton", "grpc"],
)
def test_engines_are_spoken_to_as_they_speak(servers: Object, check: Object, upstream: str) -> None:
    config = rendering.envoy(objects(given(True, True, "service", **servers)))
    clusters = {each["name"]: each for each in config["static_resources"]["clusters"]}
    assert check.items() <= clusters["engines"]["health_checks"][0].items()
    for name in ("engines", "picked"):
        (options,) = clusters[name]["typed_extension_protocol_options"].values()
        assert list(options["explicit_http_config"]) == [upstream]


def test_probes_reach_the_admin_pages_they_need_and_no_other() -> None:
    found = objects(given(True, True, "service"))
    config = rendering.envoy(found)
    assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    listeners = {each["name"]: each for each in config["static_resources"]["listeners"]}
    manager = listeners["ready"]["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    assert [route["match"] for route in host["routes"]] == [{"path": "/ready"}, {"path": "/stats/prometheus"}]
    proxy = rendering.container(found, "envoy", "rel-proxy")
    ports = {port["name"]: port["containerPort"] for port in proxy["ports"]}
    for name, port in (("gateway", "http"), ("ready", "proxy-ready")):
        assert listeners[name]["address"]["socket_address"]["port_value"] == ports[port]


def test_a_real_envoy_takes_it(tmp_path: Path) -> None:
    """Also where it listens on IPv6, and with engines of gRPC."""
    binary = find_envoy()
    for number, case in enumerate([given(*CASES[0]), given(*CASES[1], protocol="grpc"), given(*CASES[-1])]):
        case = values(case, rendering.at("router.proxy.listenAddress", "::" if number else "0.0.0.0"))
        file = tmp_path / f"{number}.yaml"
        file.write_text(rendering.one(objects(case), "ConfigMap", "rel-proxy")["data"]["envoy.yaml"])
        run = subprocess.run(
            [binary, "--mode", "validate", "--log-level", "warning", "-c", file],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        assert "deprecated" not in run.stderr.lower()
