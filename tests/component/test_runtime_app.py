"""The assembled picker: what its background work survives, what it says once, where it listens."""

import asyncio
import logging
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from epp.config.load import default_config, load_config
from epp.errors import ConfigError, WarmrouteError
from epp.lab.stack import free_ports
from epp.runtime import app as app_module
from epp.runtime.app import App, read_config
from epp.runtime.metrics import Metrics
from epp.runtime.metrics_server import serve_metrics
from epp.runtime.options import Duration, Options
from tests.data.runtime import picker as runtime

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {name: files, type: file-discovery, parameters: {path: endpoints.yaml}}
dataLayer: {discovery: {pluginRef: files}}
"""


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("", "[::]:1"),
        ("0.0.0.0", "0.0.0.0:1"),
        ("::1", "[::1]:1"),
        ("::", "[::]:1"),
        ("localhost", "localhost:1"),
    ],
)
def test_addresses_as_grpc_takes_them(host: str, address: str) -> None:
    assert app_module._address(host, 1) == address


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_metrics_are_served_on_a_thread_and_the_port_is_given_back(host: str) -> None:
    (port,) = free_ports(1)
    close = serve_metrics(Metrics("p", ("", "0.1.0")).registry, host, port)
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            assert b'llm_d_epp_info{build_ref="0.1.0",commit=""} 1.0' in page.read()
    finally:
        close()
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_upkeep_survives_a_plugin_and_a_fault_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app: App = runtime.picker(refresh_prometheus_metrics_interval=Duration(0.1))
    calls = {"refresh": 0, "pool": 0}

    def refresh(*_: object) -> None:
        calls["refresh"] += 1
        raise RuntimeError("planted in a plugin")

    def pool(*_: object) -> None:
        calls["pool"] += 1
        raise RuntimeError("planted in the gauges")

    monkeypatch.setattr(app_module, "_PLUGINS_S", 0.0)
    monkeypatch.setattr(type(app.assembly.refreshed[0]), "refresh", refresh)
    monkeypatch.setattr(app.gauges, "pool", pool)
    upkeep = asyncio.create_task(app._upkeep())
    async with asyncio.timeout(60):
        while min(calls.values()) < 3:
            assert not upkeep.done()
            await asyncio.sleep(0.01)
    upkeep.cancel()
    assert runtime.sample(app, "plugin_failures_total") >= 3
    said = [record.getMessage() for record in caplog.records]
    assert len([one for one in said if "a plugin failed" in one]) == 1, "logged once, counted always"
    assert len([one for one in said if "upkeep failed" in one]) >= 3


def test_a_fault_of_its_own_ends_the_picker_with_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(self: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(app_module.Scraper, "run", run)
    grpc_port, health_port = free_ports(2)
    options = Options(
        endpoint=("127.0.0.1:1",),
        grpc_host="127.0.0.1",
        grpc_port=grpc_port,
        grpc_health_port=health_port,
        metrics_port=0,
        admin_port=0,
        secure_serving=False,
    )
    with pytest.raises(WarmrouteError, match="ended by a fault of its own"):
        app_module.serve(options)
    assert "RuntimeError: planted" in caplog.text


def test_a_pool_that_grows_beyond_the_first_columns_can_be_charged() -> None:
    app = runtime.picker(40)
    assert app.store.view.capacity >= 40
    assert len(app.ledger.load.requests) == app.store.view.capacity


def test_a_failing_plugin_is_logged_once_a_kind_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    app = runtime.picker()
    for error in (RuntimeError("first"), RuntimeError("second"), ValueError("other")):
        app.recorder.plugin_failed(app, error)
    assert runtime.sample(app, "plugin_failures_total", plugin_class="App") == 3
    assert ("first" in caplog.text, "second" in caplog.text, "other" in caplog.text) == (True, False, True)


def test_strangers_that_answer_are_named_once_each_and_not_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = runtime.picker()
    for number in range(600):
        for _ in range(2):
            app.recorder.served_elsewhere(None, f"192.0.2.1:{number}", False)
    app.recorder.served_elsewhere(None, "10.0.0.1:8000", True)
    assert runtime.sample(app, "served_elsewhere_total", where="outside") == 1200
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 256


# -- options and configuration together -------------------------------------------------------------


def test_endpoints_come_from_one_place() -> None:
    app = App.assemble(Options(endpoint=("a:1",)), load_config(CONFIG, "c.yaml"))
    with pytest.raises(ConfigError, match="give endpoints as flags or by file-discovery, not both"):
        app._discovery()
    app = App.assemble(Options(), default_config())
    with pytest.raises(ConfigError, match="no endpoints: name the InferencePool with --pool-name"):
        app._discovery()


def test_the_configuration_is_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG)
    assert read_config(Options(config_file=str(file))).discovery == "files"
    assert read_config(Options(config_text=CONFIG)).discovery == "files"
    assert read_config(Options()).discovery is None
    with pytest.raises(ConfigError, match="not both"):
        read_config(Options(config_text=CONFIG, config_file=str(file)))
    with pytest.raises(ConfigError, match="missing.yaml: cannot be read: No such file"):
        read_config(Options(config_file=str(tmp_path / "missing.yaml")))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_config(Options(config_file=str(tmp_path)))


def test_a_discovery_file_that_cannot_be_used_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    app = runtime.picker()
    app.discovery_failed("endpoints.yaml: $.endpoints: wrong")
    assert runtime.sample(app, "config_discovery_errors_total") == 1
    assert "the old endpoints stay" in caplog.text
