"""How long the lab's Envoy waits for a picker that stands still."""

from typing import Any

import pytest
import yaml

from epp.lab.envoy import PickerAddress, envoy_config


def timeouts(**changes: Any) -> dict[str, str]:
    """Of the health checks, by cluster."""
    text = envoy_config(
        listen_port=1,
        admin_port=2,
        pickers=[PickerAddress("127.0.0.1", 3)],
        endpoints=[("127.0.0.1", 4)],
        **changes,
    )
    clusters = yaml.safe_load(text)["static_resources"]["clusters"]
    return {each["name"]: check["timeout"] for each in clusters for check in each.get("health_checks", ())}


@pytest.mark.parametrize("fail_open", [True, False])
def test_only_the_check_of_pickers_waits_longer(fail_open: bool) -> None:
    checks = timeouts(fail_open=fail_open)
    assert checks["picker"] == "1s"
    assert timeouts(fail_open=fail_open, health_timeout_s=2.5) == checks | {"picker": "2.5s"}
