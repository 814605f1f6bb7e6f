"""The commands beside a running picker, and what nobody may read anywhere."""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from e2e.pages import decisions, settled
from e2e.questions import MODEL, Question, ask, openai_client
from epp import names
from epp.lab.stack import Gateway, LabEngines, free_ports
from epp.payload.records import Api
from epp.runtime.admin import DECISIONS_PATH

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET = "kronenwerk"


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    output: str
    errors: str


async def warmroute(*arguments: str) -> Ran:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epp.cli", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, output.decode(), errors.decode())


async def test_explain(gateway: Gateway, engines: LabEngines, tmp_path: Path) -> None:
    async with openai_client(gateway.url) as client:
        for turn in range(3):
            question = Question(f"why-{turn}", f"{SECRET} {turn}", system=f"{SECRET} " * 2000)
            assert (await ask(client, question)).right
    admin = gateway.pickers[0].admin_url

    one = await warmroute("explain", "--admin", admin, "--request-id", "why-2")
    assert (one.status, one.errors) == (0, "")
    assert one.output.startswith(f"request why-2   model {MODEL}")
    for port in engines.ports:
        assert one.output.count(f"127.0.0.1:{port}") >= 1
    for word in ("cached", "queue", "prefix", "total", "flight"):
        assert word in one.output
    (chosen,) = [line for line in one.output.splitlines() if line.startswith(">") and "127.0.0.1:" in line]
    assert (await decisions(gateway.pickers[0]))["why-2"] in chosen
    assert len(max(one.output.splitlines(), key=len)) <= 110

    last = await warmroute("explain", "--admin", admin, "--last", "3")
    order = [last.output.index(f"request why-{turn}") for turn in (2, 1, 0)]
    assert order == sorted(order)

    recorded = await warmroute("explain", "--admin", admin, "--last", "3", "--json")
    assert [each["request_id"] for each in json.loads(recorded.output)] == ["why-2", "why-1", "why-0"]
    file = tmp_path / "decisions.json"
    file.write_text(recorded.output)
    assert await warmroute("explain", "--file", str(file), "--last", "3") == last
    assert not any(SECRET in each.output for each in (one, last, recorded))


async def test_explain_says_what_is_wrong(gateway: Gateway, tmp_path: Path) -> None:
    admin = gateway.pickers[0].admin_url
    (nobody,) = free_ports(1)
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    for arguments, status, words in (
        (("--admin", admin, "--request-id", "never-sent"), 1, "never-sent"),
        (("--admin", f"http://127.0.0.1:{nobody}"), 1, f"http://127.0.0.1:{nobody}"),
        (("--admin", gateway.proxy.admin_url), 1, "404"),
        (("--file", str(tmp_path / "missing.json")), 2, "missing.json"),
        (("--file", str(empty)), 2, "empty.json"),
        (("--admin", admin, "--last", "0"), 2, "--last"),
    ):
        ran = await warmroute("explain", *arguments)
        assert (ran.status, ran.output) == (status, ""), arguments
        assert words in ran.errors
        assert "Traceback" not in ran.errors


async def test_config_check(gateway: Gateway, tmp_path: Path) -> None:
    running = gateway.pickers[0].config_file
    good = await warmroute("config", "check", str(running))
    assert (good.status, good.errors) == (0, "")
    for words in ("prefix-cache-scorer", "max-score-picker", str(gateway.pickers[0].endpoints_file)):
        assert words in good.output

    broken = tmp_path / "broken.yaml"
    broken.write_text(
        running.read_text().replace("max-score-picker", "max-scor-picker").replace("weight: 3", "weight: x")
    )
    bad = await warmroute("config", "check", str(broken))
    assert (bad.status, bad.output) == (2, "")
    assert str(broken) in bad.errors
    assert "$.plugins[3]" in bad.errors
    assert "max-score-picker" in bad.errors  # the nearest name that is right
    assert "$.schedulingProfiles[0].plugins[2].weight" in bad.errors
    assert "Traceback" not in bad.errors

    missing = await warmroute("config", "check", str(tmp_path / "missing.yaml"))
    assert missing.status == 2
    assert "missing.yaml" in missing.errors


async def test_serve_says_what_is_wrong(gateway: Gateway, tmp_path: Path) -> None:
    taken = gateway.pickers[0]
    broken = tmp_path / "broken.yaml"
    broken.write_text("plugins: 7")
    health, metrics, grpc_port = free_ports(3)
    ports = ("--grpc-health-port", str(health), "--metrics-port", str(metrics), "--admin-port", "0")
    endpoint = ("--endpoint", "127.0.0.1:1", "--grpc-host", "127.0.0.1")
    for arguments, status, words in (
        (("--config-file", str(broken)), 2, "$.plugins"),
        (("--grpc-port", str(grpc_port), *ports), 2, "--endpoint"),
        (
            (*endpoint, *ports, "--secure-serving=false", "--grpc-port", str(taken.grpc_port)),
            1,
            str(taken.grpc_port),
        ),
        ((*endpoint, *ports, "--cert-path", str(tmp_path), "--grpc-port", str(grpc_port)), 2, "tls.crt"),
        ((*endpoint, "--drain-timeout=5"), 2, "--drain-timeout"),
        (("--no-such-flag",), 2, "--no-such-flag"),
    ):
        async with asyncio.timeout(60.0):
            ran = await warmroute("serve", *arguments)
        assert ran.status == status, (arguments, ran)
        assert words in ran.errors, (arguments, ran)
        assert "Traceback" not in ran.errors


async def test_nobody_reads_prompts(gateway: Gateway) -> None:
    """At the highest verbosity: neither the log nor any page holds a word of a prompt, an answer or a key."""
    picker = gateway.pickers[0]
    questions = [
        Question(f"secret-{stream}-{api.value}", f"{SECRET} one", stream=stream, api=api)
        for stream in (False, True)
        for api in (Api.CHAT, Api.COMPLETIONS)
    ]
    async with openai_client(gateway.url, default_headers={"authorization": f"Bearer {SECRET}"}) as client:
        for question in questions:
            assert (await ask(client, question)).right
        too_long = Question("secret-long", f"{SECRET} " * 300_000)
        assert (await ask(client, too_long)).status == 400
    headers = {"content-type": "application/json", names.OBJECTIVE[0]: "critical"}
    bad_bodies = (
        f'{{"model": "m", "messages": [{{"role": "user", "content": "{SECRET}',
        f'{{"model": "m", "messages": "{SECRET}"}}',
        f'{{"model": "m", "{SECRET}": 1, "messages": [{{"content": "{SECRET}", "role": 1}}]}}',
        f'{{"model": ["{SECRET}"], "messages": [{{"role": "user", "content": "{SECRET}"}}]}}',
        f"{SECRET}",
    )
    async with aiohttp.ClientSession(headers=headers) as session:
        for body in bad_bodies:
            async with session.post(f"{gateway.url}/v1/chat/completions?key={SECRET}", data=body) as answer:
                assert 400 <= answer.status < 500
        async with session.get(f"{gateway.url}/v1/models?key={SECRET}") as answer:
            assert answer.status == 200
        async with session.get(picker.admin_url + DECISIONS_PATH, params={"last": "256"}) as answer:
            decided = await answer.text()
    await settled(picker)
    log = picker.child.log_path.read_text()
    assert "secret-True-chat" in log
    assert "secret-True-chat" in decided
    for page in (log, decided, await picker.metrics()):
        assert SECRET not in page
        assert not any(question.right().text in page for question in questions)
