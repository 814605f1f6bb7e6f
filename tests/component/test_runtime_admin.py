"""Admin pages and what stands beside the metrics, over real HTTP."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
import pytest

from epp.config.load import load_config
from epp.lab.stack import free_ports
from epp.payload.records import RawRequest
from epp.runtime import plugin_state
from epp.runtime.admin import admin_app, start_admin
from epp.runtime.app import App
from epp.runtime.explanations import DECISIONS_PATH
from epp.runtime.metrics_server import serve_metrics
from epp.runtime.plugin_state import STATE_PATH, Kept, from_another_thread
from epp.scheduling.records import Placement
from epp.signals import decode, summed
from tests.data.runtime import picker as runtime

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {name: counted, type: inflight-load-producer}
- {name: by-queue, type: queue-scorer}
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins: [{pluginRef: by-queue, weight: 3}, {pluginRef: max-score-picker}]
"""


class Admin:
    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.url = f"http://127.0.0.1:{port}"

    async def get(self, path: str) -> tuple[int, str, bytes]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return answer.status, answer.headers["Content-Type"], await answer.read()


def place(app: App) -> Placement:
    raw = RawRequest("r", "POST", "/v1/chat/completions", (), runtime.chat("x" * 400))
    placement = app.director.submit(app.director.prepare(raw, 0.0), 0.0)
    assert isinstance(placement, Placement)
    return placement


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    app = runtime.picker(2, config=CONFIG, pool_name="pool", pool_namespace="team")
    port = free_ports(1)[0]
    runner = await start_admin(admin_app(lambda: app.recorder.decisions, app.pages()), port)
    yield Admin(app, port)
    await runner.cleanup()


# -- state of plugins -------------------------------------------------------------------------------


async def test_state_of_every_plugin_in_the_fields_form(admin: Admin) -> None:
    place(admin.app)
    status, content_type, body = await admin.get(STATE_PATH)
    assert (status, content_type) == (200, "application/json; charset=utf-8")
    page = json.loads(body)
    assert page.keys() == {"timestamp", "plugins"}
    assert page["timestamp"].endswith("Z")
    assert page["plugins"].keys() == admin.app.assembly.named.keys()
    counted = page["plugins"]["counted"]
    assert (counted["name"], counted["type"]) == ("counted", "inflight-load-producer")
    assert sum(each["requests"] for each in counted["state"]["endpoints"]) == 1
    assert page["plugins"]["by-queue"] == {
        "name": "by-queue",
        "type": "queue-scorer",
        "message": "plugin does not support state collection",
    }


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda: 1 / 0, "failed to dump plugin state: ZeroDivisionError: division by zero"),
        (lambda: {"odd": object()}, "failed to dump plugin state: TypeError"),
    ],
)
async def test_a_plugin_whose_state_cannot_be_had_says_so_alone(admin: Admin, state: Any, said: str) -> None:
    plugin: Any = admin.app.assembly.named["counted"]
    plugin.state = state
    page = json.loads((await admin.get(STATE_PATH))[2])
    assert said in page["plugins"]["counted"]["message"]
    assert "state" not in page["plugins"]["counted"]
    assert len(page["plugins"]) == len(admin.app.assembly.named)


async def test_only_get_is_answered(admin: Admin) -> None:
    async with aiohttp.ClientSession() as session, session.post(admin.url + STATE_PATH) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")


async def test_state_beside_the_metrics(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_state, "_TIMEOUT_S", 60.0)
    app, port = admin.app, free_ports(1)[0]
    made = []

    def state() -> bytes:
        made.append(asyncio.get_running_loop())
        return app.plugin_state()

    ticks = iter((0.0, 0.5, 1.5))
    pages = {STATE_PATH: Kept(from_another_thread(state, asyncio.get_running_loop()), lambda: next(ticks))}
    close = serve_metrics(app.metrics.registry, "127.0.0.1", port, pages=pages)
    url = f"http://127.0.0.1:{port}"
    try:
        read = [await asyncio.to_thread(lambda: urlopen(url + STATE_PATH).read()) for _ in range(3)]
        assert json.loads(read[0])["plugins"]["counted"]["type"] == "inflight-load-producer"
        assert read[0] == read[1]
        assert made == [asyncio.get_running_loop()] * 2, "on the loop's thread, and not for each reader"
        metrics = await asyncio.to_thread(lambda: urlopen(url + "/metrics").read())
        assert b"llm_d_epp_info" in metrics
        with pytest.raises(HTTPError, match="405"):
            await asyncio.to_thread(lambda: urlopen(Request(url + STATE_PATH, method="POST")))
        with pytest.raises(HTTPError, match="500"):  # the clock above has no fourth tick
            await asyncio.to_thread(lambda: urlopen(url + STATE_PATH))
    finally:
        await asyncio.to_thread(close)


# -- signals and configuration ----------------------------------------------------------------------


async def test_signals_are_a_record_that_adds_up(admin: Admin) -> None:
    place(admin.app)
    admin.app.renew_gauges()
    status, content_type, body = await admin.get("/signals")
    assert (status, content_type) == (200, "application/json; charset=utf-8")
    record = decode(body)
    assert (record.pool, record.namespace, record.version) == ("pool", "team", 1)
    assert {endpoint.name for endpoint in record.endpoints} == {"pod-1", "pod-2"}
    assert sum(endpoint.in_flight for endpoint in record.endpoints) == 1
    assert summed([record, record]).pickers == 2


async def test_the_configuration_in_use_loads_to_the_same(admin: Admin) -> None:
    status, content_type, body = await admin.get("/config")
    assert (status, content_type) == (200, "text/plain; charset=utf-8")
    loaded = load_config(body, "served")
    assert {plugin.name: plugin.spec.type for plugin in loaded.plugins} == admin.app.assembly.types
    (profile,) = loaded.profiles
    assert [(use.name, use.weight) for use in profile.plugins][0] == ("by-queue", 3.0)


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"GET / HTTP/1.1\r\nhost: a\r\nno header\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
    ],
)
async def test_what_is_no_http_is_no_fault_of_the_picker(
    admin: Admin, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(admin.url.rpartition(":")[2]))
    writer.write(sent)
    async with asyncio.timeout(60):
        assert b" 400 " in (await reader.read()).split(b"\r\n")[0]
    writer.close()
    told = [each for each in caplog.records if each.name == "epp.runtime.admin"]
    assert [(each.levelname, each.exc_info) for each in told] in ([], [("INFO", None)])
    assert (await admin.get(STATE_PATH))[0] == 200


async def test_a_page_that_fails_is_told_with_its_stack_trace(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admin.app.recorder, "decisions", None)
    assert (await admin.get(DECISIONS_PATH))[0] == 500
    (told,) = [each for each in caplog.records if each.name == "epp.runtime.admin"]
    assert told.levelname == "ERROR"
    assert told.exc_info is not None


async def test_the_admin_pages_listen_where_they_are_told() -> None:
    port = free_ports(1)[0]
    runner = await start_admin(admin_app(list), port)
    assert [address[0] for address in runner.addresses] == ["127.0.0.1"]
    await runner.cleanup()
    runner = await start_admin(admin_app(list), port, "")
    assert {"0.0.0.0"} <= {address[0] for address in runner.addresses}
    await runner.cleanup()
    with pytest.raises(OSError, match=r"."):
        await start_admin(admin_app(list), port, "192.0.2.1")
