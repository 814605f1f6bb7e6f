"""`warmroute explain` against a running picker's admin pages and against files."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result

from epp.cli import main
from epp.lab.stack import free_ports
from epp.payload.records import RawRequest
from epp.runtime import explanations
from epp.runtime.admin import admin_app, start_admin
from epp.runtime.app import App
from epp.scheduling.records import Cause, Ended, Placement
from tests.data.runtime import picker as runtime


class Admin:
    """A picker's admin pages on a real port."""

    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def decide(self, request_id: str) -> None:
        director = self.app.director
        raw = RawRequest(request_id, "POST", "/v1/chat/completions", (), runtime.chat("x" * 400))
        placement = director.submit(director.prepare(raw, 1.0), 1.0)
        assert isinstance(placement, Placement)
        director.observe(placement.ticket, Ended(Cause.NATURAL, None, 0, 0), 2.0)

    async def explain(self, *arguments: str) -> Result:
        return await asyncio.to_thread(explain, "--admin", self.url, *arguments)


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    app = runtime.picker(3)
    port = free_ports(1)[0]
    runner = await start_admin(admin_app(lambda: app.recorder.decisions), port)
    yield Admin(app, port)
    await runner.cleanup()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picker answers from this process, which may stand still."""
    monkeypatch.setattr(explanations, "_TIMEOUT_S", 60.0)


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


async def test_the_last_decision_is_explained(admin: Admin) -> None:
    admin.decide("r-1")
    admin.decide("r-2")
    result = await admin.explain()
    assert result.exit_code == 0, result.output
    assert "request r-2" in result.output
    assert "r-1" not in result.output
    for shown in ("pod-1", "pod-2", "pod-3", "queue", "cache", "total"):
        assert shown in result.output


async def test_a_request_is_found_by_its_id(admin: Admin) -> None:
    for number in range(5):
        admin.decide(f"r-{number}")
    result = await admin.explain("--request-id", "r-1")
    assert result.exit_code == 0
    assert "request r-1 " in result.output
    assert result.output.count("request r-") == 1


async def test_several_decisions_newest_first(admin: Admin) -> None:
    for number in range(5):
        admin.decide(f"r-{number}")
    result = await admin.explain("--last", "3", "--json")
    assert [each["request_id"] for each in json.loads(result.output)] == ["r-4", "r-3", "r-2"]


async def test_what_json_prints_is_read_from_a_file(admin: Admin, tmp_path: Path) -> None:
    admin.decide("r-1")
    admin.decide("r-2")
    printed = await admin.explain("--last", "2", "--json")
    file = tmp_path / "decisions.json"
    file.write_text(printed.output)
    assert explain("--file", str(file), "--last", "2", "--json").output == printed.output
    assert "request r-1" in explain("--file", str(file), "--request-id", "r-1").output
    file.write_text(json.dumps(json.loads(printed.output)[0]))
    assert "request r-2" in explain("--file", str(file)).output


@pytest.mark.parametrize("arguments", [(), ("--request-id", "nobody")])
async def test_no_decision_is_said_in_words(admin: Admin, arguments: tuple[str, ...]) -> None:
    if arguments:
        admin.decide("r-1")
    result = await admin.explain(*arguments)
    assert result.exit_code == 1
    assert "no decision is kept for" in result.output
    assert ("request nobody" if arguments else "any request") in result.output


async def test_the_ring_keeps_the_last_ones_only(admin: Admin) -> None:
    for number in range(300):
        admin.decide(f"r-{number}")
    result = await admin.explain("--last", "1000", "--json")
    assert [each["request_id"] for each in json.loads(result.output)] == [
        f"r-{n}" for n in range(299, 43, -1)
    ]


@pytest.mark.parametrize("last", ["0", "-1", "x", "1.5", "\u0663", "9" * 5000, ""])
async def test_a_bad_number_is_refused_in_words(admin: Admin, last: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{admin.url}/decisions", params={"last": last}) as answer,
    ):
        assert answer.status == 400
        assert "write a whole number from 1 on" in await answer.text()


async def test_a_taken_port_leaves_nothing_open() -> None:
    app = admin_app(list)
    port = free_ports(1)[0]
    runner = await start_admin(app, port)
    with pytest.raises(OSError, match="in use"):
        await start_admin(admin_app(list), port)
    await runner.cleanup()


async def test_another_path_of_the_picker_is_told_apart(admin: Admin) -> None:
    result = await asyncio.to_thread(explain, "--admin", admin.url + "/elsewhere")
    assert result.exit_code == 1
    assert f"{admin.url}/elsewhere/decisions?last=1 answered 404" in result.output


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that says the same bytes to everyone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def http(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (http(b"<html>"), "does not answer with decisions"),
        (http(b"[1]"), "does not answer with decisions"),
        (http(b'["\xff"]'), "does not answer with decisions"),
        (http(b'[{"request_id": "\xff"}]'), "does not answer with decisions"),
        (http(b"{}"), "does not answer with decisions"),
        (http(b""), "does not answer with decisions"),
        (http(b"oh\x1b[2J\n\nno", "500 No"), "answered 500"),
        (http(b"[]", length=100), "no picker answers"),
        (b"SSH-2.0-OpenSSH\r\n", "no picker answers"),
        (b"", "no picker answers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "does not answer with decisions"),
    ],
)
def test_another_service_at_the_port_is_told_in_words(answer: bytes, said: str) -> None:
    with answering(answer) as url:
        result = explain("--admin", url)
    assert result.exit_code == 1
    assert said in result.output
    assert result.output.startswith("warmroute: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("admin_url", "said"),
    [
        ("127.0.0.1:9091", "write http://host:port"),
        ("file:///etc/hostname", "write http://host:port"),
        ("http://127.0.0.1:x", "no picker answers"),
        ("http://", "no picker answers"),
        ("http://[", "no picker answers"),
        ("http://a..b", "no picker answers"),
        ("http://a b", "no picker answers"),
    ],
)
def test_a_wrong_address_is_told_in_words(admin_url: str, said: str) -> None:
    result = explain("--admin", admin_url)
    assert result.exit_code == 1
    assert said in result.output


def test_nobody_at_the_port() -> None:
    result = explain("--admin", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert result.exit_code == 1
    assert "no picker answers at http://127.0.0.1:" in result.output
    assert "--file reads one" in result.output


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(http(b"[]")) as url:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
        assert "no decision is kept for any request" in explain("--admin", url).output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is not a recorded decision"),
        (b"\xff\xfe", "is not a recorded decision"),
        (b"[{}]", "is not a recorded decision: Object missing required field `request_id` - at `$[0]`"),
        (b'{"request_id": 1}', "is not a recorded decision: Expected `str`, got `int` - at `$.request_id`"),
        (b'{"request_id": "\xff"}', "is not a recorded decision"),
        pytest.param(
            b'{"a":' + b"[" * 100_000, "is not a recorded decision: JSON nested too deeply", id="deep"
        ),
    ],
)
def test_a_bad_file_is_named(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "decisions.json"
    if content is not None:
        file.write_bytes(content)
    result: Any = explain("--file", str(file))
    assert result.exit_code == 2
    assert f"{file}: {said}" in result.output


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in explain("--file", str(tmp_path)).output
