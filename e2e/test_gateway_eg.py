"""Warmroute behind a real Envoy Gateway: its control plane, the proxies that it makes, our chart."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
import yaml

from e2e.backends import PAGE
from e2e.configured import FULL
from e2e.gateway_eg import (
    EXTENSION,
    GATEWAY,
    LABELS,
    PLAIN,
    POLICIES,
    RELEASE,
    Behind,
    Gateways,
    apply,
    behind,
    gateways,
    sliced_plane,
)
from e2e.gateway_eg_pods import kill
from e2e.gateway_eg_tls import AUTHORITY, SECRET, signed
from e2e.kube import new_namespace
from e2e.kube_load import MODEL, PodLoad, one
from e2e.kube_pods import SERVED_BY, SERVED_PORT, Light
from e2e.kube_release import refusals
from e2e.pages import until
from epp import names
from epp.runtime.explanations import DECISIONS_PATH
from tests.contract.test_chart_render import ENVOY_GATEWAY
from tests.data.chart.rendering import merged, objects, values
from tests.data.chart.rendering import one as chosen

pytestmark = [pytest.mark.gateways, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

GROUPS: Final = ("gateway.envoyproxy.io", "gateway.networking.k8s.io")
HEARD_S: Final = 2.0
"""Requests that begin so long after a change know of it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def eg(tmp_path_factory: pytest.TempPathFactory, envoy: Path) -> AsyncIterator[Gateways]:
    with sliced_plane(tmp_path_factory.mktemp("plane")) as (plane, release):
        async with gateways(plane, release, tmp_path_factory.mktemp("gateways"), envoy) as made:
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    eg: Gateways, envoy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Behind]:
    """For tests that leave it as it was, with a picker in plain text."""
    async with behind(eg, envoy, tmp_path_factory.mktemp("shared"), given=SHED) as made:
        yield made


SHED: Final = merged(PLAIN, {"router": {"inferenceObjectives": [{"name": "batch", "priority": -1}]}})


# -- asking ----------------------------------------------------------------------------------------


async def ask(
    made: Behind, prompt: str, headers: Mapping[str, str] | None = None, *, stream: bool = False
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of the answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": stream}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.post(f"{made.url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        return answer.status, {key.lower(): text for key, text in answer.headers.items()}, await answer.text()


async def picks(made: Behind, request_id: str) -> list[str]:
    """Addresses that the picker chose for a request, the best first."""
    (picker,) = await made.site.pods("epp")
    url = f"http://{picker.host}:{picker.flags.admin_port}{DECISIONS_PATH}"
    async with aiohttp.ClientSession() as session, session.get(url, params={"request_id": request_id}) as got:
        (found,) = await got.json()
    chosen: list[str] = found["legs"][0]["chosen"]
    return chosen


# -- what is rendered ------------------------------------------------------------------------------


async def test_every_object_of_the_chart_is_accepted(eg: Gateways, tmp_path: Path) -> None:
    """By the definitions of Envoy Gateway and their rules, which a fault would not pass."""
    async with new_namespace(eg.plane, tmp_path) as namespace:
        found = {case: objects(values(given), "rel", namespace.name) for case, given in ENVOY_GATEWAY.items()}
        for case, made in found.items():
            theirs = [each for each in made if each["apiVersion"].partition("/")[0] in GROUPS]
            assert {*POLICIES} & {each["kind"] for each in theirs}
            assert (case, await refusals(namespace, theirs)) == (case, [])
        policy = chosen(found["envoy-gateway"], "EnvoyExtensionPolicy")
        policy["spec"]["extProc"][0]["failOpen"] = True
        (refused,) = await refusals(namespace, [policy])
        assert "FullDuplexStreamed" in refused


# -- what is chosen --------------------------------------------------------------------------------


async def test_a_request_reaches_what_the_picker_chose(shared: Behind) -> None:
    """Plain and streamed, each of many; engines alike, so that they are chosen in turn by what they hold."""
    addresses, seen = shared.site.kubelet.addresses, Counter[str]()
    for number in range(24):
        request_id = f"exact-{token_hex(4)}"
        status, headers, body = await ask(
            shared, f"{number} {token_hex(400)}", {names.REQUEST_ID: request_id}, stream=number % 2 == 1
        )
        assert status == 200, body
        (first, *_) = await picks(shared, request_id)
        assert first == f"{addresses[headers[SERVED_BY]]}:8000"
        assert body.endswith("data: [DONE]\n\n") or json.loads(body)["model"] == MODEL
        seen[headers[SERVED_BY]] += 1
    assert len(seen) == 3, seen


async def test_prompts_go_where_their_prefix_is(shared: Behind) -> None:
    async def served(prompt: str, turn: int) -> str:
        status, headers, body = await ask(shared, f"{prompt} turn {turn}", stream=turn % 2 == 1)
        assert status == 200, body
        return headers[SERVED_BY]

    prompts = [token_hex(800) for _ in range(12)]
    homes = {prompt: await served(prompt, 0) for prompt in prompts}
    assert len({*homes.values()}) == 3
    for turn in range(1, 4):
        assert {prompt: await served(prompt, turn) for prompt in prompts} == homes


async def test_a_large_prompt(shared: Behind) -> None:
    """Many times what the proxy holds of a body before it waits."""
    status, headers, body = await ask(shared, token_hex(400_000))
    assert (status, headers.get(SERVED_BY, "")[:4]) == (200, "pod-"), body[:200]


async def test_a_client_cannot_choose(shared: Behind) -> None:
    """Where a picker is asked; for where none can be, see below."""
    address = shared.site.kubelet.addresses["pod-0"]
    prompts = [token_hex(800) for _ in range(6)]
    forged = {names.DESTINATION_ENDPOINT: f"{address}:8000", names.PREFILLER_HOST_PORT: "192.0.2.1:1"}
    served = {(await ask(shared, prompt, forged))[1][SERVED_BY] for prompt in prompts}
    assert len(served) > 1


# -- what is refused -------------------------------------------------------------------------------


async def test_a_refusal_comes_as_it_was_sent(shared: Behind) -> None:
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{shared.url}/v1/chat/completions", data=b'{"model": ')
        said = await answer.json()
    assert (answer.status, said["error"]["type"]) == (400, "invalid_request_error")


async def test_what_may_be_shed_is_shed(shared: Behind) -> None:
    engines = [each for each in shared.site.kubelet.engines.values() if isinstance(each, Light)]
    for engine in engines:
        engine.page = FULL
    found: list[tuple[int, dict[str, str], str]] = []
    batch = {names.OBJECTIVE[0]: "batch"}

    async def is_shed() -> bool:
        found.append(await ask(shared, "hello", batch))
        return found[-1][0] == 429

    try:
        await until(is_shed, "the pool is full")
        assert (await ask(shared, "hello"))[0] == 200
    finally:
        for engine in engines:
            engine.page = PAGE
    _, headers, body = found[-1]
    assert headers[names.DROPPED_REASON] == names.REJECTED_SATURATED
    assert headers["retry-after"] == "1"
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", 429)

    async def is_served() -> bool:
        return (await ask(shared, "hello", batch))[0] == 200

    await until(is_served, "the pool is empty again")


async def test_without_endpoints(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    async with behind(eg, envoy, tmp_path, engines=0) as made:
        status, headers, body = await ask(made, "hello")
        assert status == 503
        assert headers[names.DROPPED_REASON] == names.REJECTED_NO_ENDPOINTS
        assert json.loads(body)["error"]["type"] == "service_unavailable_error"


# -- pools that change -----------------------------------------------------------------------------


async def test_pods_that_go_and_come_under_load(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    async with behind(eg, envoy, tmp_path, engines=4) as made:
        async with PodLoad(made.url) as load:
            await load.answered(60)
            gone_s = await made.namespace.delete("v1", "Pod", "pod-0")
            await made.site.engines("pod-9", labels=LABELS)
            await asyncio.sleep(HEARD_S)
            come_s = time.monotonic()
            await load.answered(120)
        assert load.failed() == []
        assert {*load.pods(gone_s + HEARD_S)} == {"pod-1", "pod-2", "pod-3", "pod-9"}
        assert load.pods(come_s)["pod-9"]


async def test_pods_that_die_under_load(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    """Deleted without grace: what was with them is lost, and no more."""
    async with behind(eg, envoy, tmp_path, engines=4) as made:
        async with PodLoad(made.url) as load:
            await load.answered(60)
            gone_s = await made.namespace.delete("v1", "Pod", "pod-0", 0)
            await asyncio.sleep(HEARD_S)
            await load.answered(120)
        assert load.failed(gone_s + HEARD_S) == []
        assert len(load.failed()) <= load.lanes
        assert "pod-0" not in load.pods(gone_s + HEARD_S)


async def test_while_the_control_plane_hangs(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    """The proxy still has a pod that is gone; the picker does not choose it."""
    async with behind(eg, envoy, tmp_path, engines=4) as made:
        eg.controller.program.send(signal.SIGSTOP)
        try:
            async with PodLoad(made.url) as load:
                await load.answered(60)
                gone_s = await made.namespace.delete("v1", "Pod", "pod-0")
                await asyncio.sleep(HEARD_S)
                await load.answered(120)
            await made.knows(4)
        finally:
            eg.controller.program.send(signal.SIGCONT)
        assert load.failed() == []
        assert {*load.pods(gone_s + HEARD_S)} == {"pod-1", "pod-2", "pod-3"}
        await made.knows(3)


PORTS: Final = (8000, 8001)


async def test_ranks_on_ports_of_their_own(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    given = {"router": {"modelServers": {"targetPorts": [{"number": port} for port in PORTS]}}}
    async with behind(eg, envoy, tmp_path, engines=2, given=merged(PLAIN, given), ports=PORTS) as made:
        seen = Counter[str]()
        for _ in range(24):
            request_id = f"rank-{token_hex(4)}"
            status, headers, body = await ask(made, token_hex(400), {names.REQUEST_ID: request_id})
            assert status == 200, body
            address = made.site.kubelet.addresses[headers[SERVED_BY]]
            assert (await picks(made, request_id))[0] == f"{address}:{headers[SERVED_PORT]}"
            seen[f"{address}:{headers[SERVED_PORT]}"] += 1
        assert len(seen) == 4, seen


# -- a list of endpoints ---------------------------------------------------------------------------

LIST: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 4}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer}
  - {pluginRef: max-score-picker}
"""


async def test_the_next_of_the_list_serves(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    """Where the proxy cannot connect to the first, of which the picker knows nothing."""
    given = merged(PLAIN, {"router": {"epp": {"pluginsConfig": yaml.safe_load(LIST)}}})
    async with behind(eg, envoy, tmp_path, engines=4, given=given) as made:
        addresses = made.site.kubelet.addresses
        eg.network.cut(made.proxy.host, addresses["pod-2"])
        lost = f"{addresses['pod-2']}:8000"
        first, wrong = Counter[bool](), []
        for _ in range(32):
            request_id = f"list-{token_hex(4)}"
            status, headers, body = await ask(made, token_hex(400), {names.REQUEST_ID: request_id})
            assert status == 200, body
            chosen = await picks(made, request_id)
            assert len({*chosen}) == 4
            first[chosen[0] == lost] += 1
            served = f"{addresses[headers[SERVED_BY]]}:8000"
            if served != next(each for each in chosen if each != lost):
                wrong.append((served, chosen))
        assert first[True], "it was the first of some"
        assert wrong == []


# -- pickers that die ------------------------------------------------------------------------------


FAILS_OPEN: Final = {"provider": {"envoyGateway": {"failOpen": True}}}


async def test_without_a_picker_requests_are_refused(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    async with behind(eg, envoy, tmp_path) as made:
        assert (await one(made.url)).ok
        (picker,) = await made.site.pods("epp")
        await kill(picker)
        asked = [await one(made.url, f"{number}") for number in range(6)]
        assert {each.status for each in asked} == {503}
        assert [each for each in asked if each.ended_s - each.started_s > 5] == []
        await made.namespace.delete("v1", "Pod", picker.name, 0)
        await until(lambda: answers(made), "another picker is asked")


async def answers(made: Behind) -> bool:
    return (await one(made.url)).ok


async def test_without_a_picker_any_engine_serves(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    """With `failOpen`, where bodies are not full-duplex."""
    async with behind(eg, envoy, tmp_path, given=merged(PLAIN, FAILS_OPEN)) as made:
        request_id = token_hex(4)
        status, headers, _ = await ask(made, "hello", {names.REQUEST_ID: request_id})
        address = made.site.kubelet.addresses[headers[SERVED_BY]]
        assert (status, await picks(made, request_id)) == (200, [f"{address}:8000"])
        assert (await ask(made, "hello", stream=True))[2].endswith("data: [DONE]\n\n")
        assert (await ask(made, token_hex(100_000)))[0] == 200
        (picker,) = await made.site.pods("epp")
        await kill(picker)
        forged = {names.DESTINATION_ENDPOINT: f"{address}:8000"}
        asked = [await one(made.url, f"{number}", **forged) for number in range(12)]
        assert [each for each in asked if not each.ok] == []
        assert len({each.pod for each in asked}) > 1, "no client chooses"


# -- TLS -------------------------------------------------------------------------------------------


async def test_an_unverified_certificate(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    """The chart as it comes: the picker signs its own."""
    async with behind(eg, envoy, tmp_path, given={}) as made:
        await all_served(made)


CERTIFIED: Final = {
    "router": {"epp": {"tls": {"secretName": SECRET}}},
    "provider": {"envoyGateway": {"tls": {"caConfigMap": AUTHORITY}}},
}


async def test_a_verified_certificate(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    before = signed(EXTENSION)
    async with behind(eg, envoy, tmp_path, given=CERTIFIED, before=before) as made:
        await all_served(made)


async def test_a_certificate_that_another_signed(eg: Gateways, envoy: Path, tmp_path: Path) -> None:
    before = [signed(EXTENSION)[0], signed(EXTENSION)[1]]
    async with behind(eg, envoy, tmp_path, given=CERTIFIED, before=before) as made:
        assert {(await one(made.url)).status for _ in range(4)} == {503}


async def all_served(made: Behind) -> None:
    async with PodLoad(made.url, lanes=2) as load:
        await load.answered(20)
    assert load.failed() == []
    assert len(load.pods()) > 1


# -- what takes long -------------------------------------------------------------------------------


async def test_answers_that_take_long(shared: Behind) -> None:
    """Longer than the 10 s that Envoy Gateway writes as the time-out of the stream to the picker."""
    engines = [each for each in shared.site.kubelet.engines.values() if isinstance(each, Light)]
    for engine in engines:
        engine.answer_s = 12.0
    try:
        both = await asyncio.gather(ask(shared, "a"), ask(shared, "b", stream=True))
    finally:
        for engine in engines:
            engine.answer_s = 0.0
    assert [status for status, _, _ in both] == [200, 200]
    assert '"timeout": "300s"' in await shared.config(), "the route's time-out counts, not that of the policy"


# -- what Envoy Gateway does not know --------------------------------------------------------------


async def test_a_pool_is_no_backend(shared: Behind) -> None:
    """An InferencePool as a route's backend: the route says that it cannot be, and serves nothing."""
    reference = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": RELEASE}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "pool"},
        "spec": {
            "parentRefs": [{"name": GATEWAY}],
            "hostnames": ["pool.example.com"],
            "rules": [{"backendRefs": [reference]}],
        },
    }
    await apply(shared.made.plane, [route], shared.namespace.name)
    found: dict[str, Any] = {}

    async def is_judged() -> bool:
        nonlocal found
        got = await shared.namespace.client.get(
            shared.namespace.path("gateway.networking.k8s.io/v1", "HTTPRoute", "pool")
        )
        listed = [each for one in got.get("status", {}).get("parents", ()) for each in one["conditions"]]
        found = {each["type"]: (each["status"], each["reason"]) for each in listed}
        return "ResolvedRefs" in found

    await until(is_judged, "the route is judged")
    assert found["ResolvedRefs"] == ("False", "InvalidKind")
    assert (await ask(shared, "hello", {"host": "pool.example.com"}))[0] == 500
