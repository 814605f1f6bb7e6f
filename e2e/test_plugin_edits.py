"""What plugins add to requests and answers, as a real Envoy carries it out, in every mode."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.web_request import BaseRequest

from e2e.backends import Seen, backend
from e2e.scripted import SPACE, Script, scripted_gateway
from epp import names
from epp.lab.envoy import BodyModes
from epp.lab.stack import HOST
from epp.payload.records import Usage
from epp.pool.records import LoadReport
from epp.runtime.options import TRANSPORTS
from epp.scheduling.records import AnswerHeaders, Completed

pytestmark = pytest.mark.asyncio(loop_scope="session")

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SCORES = (("10.0.0.1:8000", 2.5), ("[fd00::1]:8000", 0.0))
ORCA = "TEXT named_metrics.num_requests_waiting=3.0"
EVENTS = [
    {"choices": [{"index": 0, "delta": {"content": "hi"}}]},
    {"choices": [], "usage": USAGE},
]


async def engine(request: BaseRequest, seen: Seen) -> web.StreamResponse:
    """A plain answer, or a stream where one is asked for."""
    headers = {names.ENDPOINT_LOAD_METRICS: ORCA}
    if not json.loads(seen.body or b"{}").get("stream"):
        return web.json_response({"choices": [], "usage": USAGE}, headers=headers)
    answer = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
    await answer.prepare(request)
    for event in EVENTS:
        await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer


async def post(port: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    forged = {names.PREFILLER_HOST_PORT: "10.9.9.9:1", names.SLO_TTFT_MS[0]: "5"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{HOST}:{port}/v1/chat/completions", json=body, headers=forged) as answer,
    ):
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, headers, await answer.read()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("mode", list(BodyModes), ids=lambda mode: mode.value)
async def test_edits_scores_and_metadata(
    mode: BodyModes, stream: bool, transport: str, envoy: Path, tmp_path: Path
) -> None:
    async with backend(engine) as one:
        script = Script(
            one.address,
            set_headers=((names.PREFILLER_HOST_PORT, b"10.0.0.2:8000"), ("x-session-id", b"s-1")),
            answer_headers=(("x-session-token", b"dG9rZW4="),),
            scores=SCORES,
            metadata=((SPACE, "cost", 7.0), (names.LB_NAMESPACE, "tokens", 5.0)),
        )
        async with scripted_gateway(script, envoy, tmp_path, transport, mode=mode) as gateway:
            status, headers, body = await post(gateway.port, {**CHAT, "stream": stream})
    assert status == 200
    assert headers["x-session-token"] == "dG9rZW4="
    assert headers["x-went-into-resp-headers"] == "true"
    assert json.dumps(USAGE).encode() in body
    (seen,) = one.seen
    assert seen.header(names.PREFILLER_HOST_PORT) == ["10.0.0.2:8000"]
    assert seen.header("x-session-id") == ["s-1"]
    assert seen.header(names.SLO_TTFT_MS[0]) == []
    (told,) = script.heard(AnswerHeaders)
    assert told.load == LoadReport(waiting=3.0)
    (logged,) = gateway.logged
    assert logged["lb"][names.DESTINATION_ENDPOINT_SCORES] == dict(SCORES)
    assert logged["lb"][names.DESTINATION_ENDPOINT] == one.name
    if mode is BodyModes.HEADERS_ONLY:  # the answer's end is not shown to the picker
        assert script.heard(Completed) == []
        assert logged["own"] is None
        return
    (completed,) = script.heard(Completed)
    assert completed.usage == Usage(3, 2)
    assert logged["own"] == {"cost": 7.0}
    assert logged["lb"]["tokens"] == 5.0


async def test_nothing_to_tell_is_not_told(transport: str, envoy: Path, tmp_path: Path) -> None:
    async with backend(engine) as one:
        script = Script(one.address)
        async with scripted_gateway(script, envoy, tmp_path, transport) as gateway:
            status, headers, _ = await post(gateway.port, CHAT)
    assert status == 200
    assert "x-session-token" not in headers
    (seen,) = one.seen
    assert seen.header(names.PREFILLER_HOST_PORT) == []
    assert gateway.logged == [{"lb": {names.DESTINATION_ENDPOINT: one.name}, "own": None}]


async def test_an_engine_that_sheds_load_is_seen_and_not_asked_twice(
    transport: str, envoy: Path, tmp_path: Path
) -> None:
    error = {"error": {"message": "too many", "type": "Service Unavailable", "param": None, "code": 503}}

    async def full(_request: BaseRequest, _seen: Seen) -> web.StreamResponse:
        return web.json_response(error, status=503)

    async with backend(full) as one:
        script = Script(one.address)
        async with scripted_gateway(script, envoy, tmp_path, transport) as gateway:
            status, _, body = await post(gateway.port, CHAT)
    assert (status, json.loads(body)) == (503, error)
    assert [told.status for told in script.heard(AnswerHeaders)] == [503]
    assert len(one.seen) == 1
