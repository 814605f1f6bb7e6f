"""Another model than the client asked for: the engine hears of the one, the client of the other."""

import json
import re

import aiohttp
import pytest
from openai import NotFoundError

from e2e.questions import MODEL, Question, ask, openai_client
from epp import names
from epp.lab.stack import Gateway, LabEngines
from epp.payload.records import Api

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Shorter and longer than the engine's name, and what JSON has to escape.
CLIENT_NAMES = ("m", "a-name-that-is-much-longer-than-that-of-the-engine", 'naïve "model" \\ 日本', MODEL)
REWRITE = names.MODEL_NAME_REWRITE[0]

# Differs from answer to answer: the second it was made in, and what was in the engine's cache.
_VARYING = re.compile(rb'"(created|cached_tokens)":\d+')


def unvarying(body: bytes) -> bytes:
    return _VARYING.sub(rb'"\1":0', body)


async def post(url: str, path: str, body: dict[str, object], **headers: str) -> tuple[int, str, bytes]:
    """Status, content type and body."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=json.dumps(body), headers=sent | JSON) as answer,
    ):
        return answer.status, answer.headers.get("content-type", ""), await answer.read()


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CLIENT_NAMES)
async def test_client_sees_its_own_name(
    gateway: Gateway, engines: LabEngines, api: Api, stream: bool, name: str
) -> None:
    question = Question("renamed", f"say {MODEL}", stream=stream, api=api)
    direct = await post(
        f"http://{engines.addresses[0][0]}:{engines.ports[0]}",
        question.path,
        question.body,
        x_request_id=question.id,
    )
    # The engine answers 404 to any name but its own, so it has heard its own.
    body = {**question.body, "model": name}
    headers = {"x-request-id": question.id, REWRITE: MODEL}
    status, content_type, answer = await post(gateway.url, question.path, body, **headers)
    assert (status, content_type) == direct[:2]
    own, engines_own = (b'"model":' + json.dumps(each).encode() for each in (name, MODEL))
    assert direct[2].count(engines_own) == (question.output_tokens if stream else 0) + (
        2 if stream and api is Api.CHAT else 1
    )
    assert unvarying(answer) == unvarying(direct[2].replace(engines_own, own))


@pytest.mark.parametrize("stream", [False, True])
async def test_client_library_reads_the_renamed_answer(each_gateway: Gateway, stream: bool) -> None:
    question = Question("renamed-openai", "a model by another name", output_tokens=40, stream=stream)
    async with openai_client(each_gateway.url, default_headers={REWRITE: MODEL}) as client:
        outcome = await ask(client, question)
        assert outcome.right
        with pytest.raises(NotFoundError):
            await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "x"}],
                extra_headers={REWRITE: "unknown"},
            )


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "unknown"}, 404),
        ({"max_tokens": 0}, 400),
        ({"messages": [{"role": 7}]}, 400),
        ({"n": 3}, 400),
        ({"messages": [{"role": "user", "content": "long " * 110_000}]}, 400),
    ],
)
async def test_refusals_of_an_engine_arrive_as_they_were(
    gateway: Gateway, engines: LabEngines, change: dict[str, object], status: int
) -> None:
    question = Question("refused", "whatever")
    body = {**question.body, **change}
    direct = await post(
        f"http://{engines.addresses[0][0]}:{engines.ports[0]}", question.path, body, x_request_id="refused"
    )
    assert direct[0] == status
    assert await post(gateway.url, question.path, body, x_request_id="refused") == direct
