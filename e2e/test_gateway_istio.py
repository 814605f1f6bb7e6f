"""The chart behind a gateway that a real Istio configures: what Istio makes of it, and what requests meet."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from e2e.backends import PAGE
from e2e.gateway_istio import GATEWAY, ROUTED, IstioSite, chosen, istio_site
from e2e.gateway_istio_plane import Istio, running_istio
from e2e.kube import POOL_VERSION, new_namespace
from e2e.kube_client import Thing
from e2e.kube_containers import PICKER
from e2e.kube_load import PodLoad, Sent, ask, one
from e2e.kube_pods import Light, pod
from e2e.kube_release import RUN, Release, answered
from e2e.pages import until
from tests.data.chart.rendering import Object, values

pytestmark = [pytest.mark.gateways, pytest.mark.timeout(300)]

ENGINES: Final = ("pod-0", "pod-1", "pod-2")
PROMPTS: Final = tuple(f"{name}: " + f"tell me all about {name} " * 60 for name in ("oaks", "firs", "elms"))
MANY_PROMPTS: Final = tuple(f"{number}: " + f"tell me all about {number} " * 60 for number in range(12))
"""So many that chance does not send them all to one engine."""
FULL: Final = PAGE.replace(b'm"} 0.0', b'm"} 1000.0')


@pytest.fixture(scope="module")
def istio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Istio]:
    with running_istio(tmp_path_factory.mktemp("istio")) as istio:
        yield istio


@pytest_asyncio.fixture
async def site(istio: Istio, envoy: Path, tmp_path: Path) -> AsyncIterator[IstioSite]:
    async with new_namespace(istio.plane, tmp_path) as namespace, istio_site(namespace, envoy, istio) as site:
        yield site


def failing(mode: str) -> Object:
    """Values of a pool with this failure mode."""
    return {"router": {"inferencePool": {"failureMode": mode}}}


# -- what Istio makes of it ------------------------------------------------------------------------


def inside(thing: Any, key: str) -> list[Any]:
    """Every value with this key, however deep."""
    if isinstance(thing, dict):
        here = [thing[key]] if key in thing else []
        return here + [found for each in thing.values() for found in inside(each, key)]
    return [found for each in thing for found in inside(each, key)] if isinstance(thing, list) else []


@pytest.mark.parametrize("mode", ["FailOpen", "FailClose"])
async def test_the_picker_is_asked_as_it_wants_to_be(site: IstioSite, mode: str) -> None:
    await site.engines("pod-0")
    await site.install(failing(mode))
    await site.url()
    given = await (await site.proxy()).configuration()
    (asked,) = inside(given["RoutesConfigDump"], "overrides")
    assert asked["failure_mode_allow"] is (mode == "FailOpen")
    picker = f"outbound|9002||rel-epp.{site.namespace.name}.svc.cluster.local"
    assert asked["grpc_service"]["envoy_grpc"]["cluster_name"] == picker
    bodies = {asked["processing_mode"][f"{side}_body_mode"] for side in ("request", "response")}
    assert bodies == {"FULL_DUPLEX_STREAMED"}
    clusters = {each["name"]: each for each in inside(given["ClustersConfigDump"], "cluster")}
    tls = clusters[picker]["transport_socket"]
    assert tls["name"] == "envoy.transport_sockets.tls"
    assert tls["typed_config"]["common_tls_context"].get("validation_context", {}) == {}
    assert inside(clusters[picker], "http2_protocol_options")
    (pool,) = [each for name, each in clusters.items() if "rel-ip-" in name and site.namespace.name in name]
    (override,) = inside(pool, "override_host_sources")
    assert override[0]["metadata"]["path"][0]["key"] == "x-gateway-destination-endpoint"


async def test_conditions_of_the_pool_are_istios(site: IstioSite) -> None:
    await site.engines("pod-0")
    await site.install()
    url = await site.url()

    async def is_told() -> bool:
        return bool((await site.pool()).get("status", {}).get("parents"))

    await until(is_told, "Istio says what became of the pool")
    (parent,) = (await site.pool())["status"]["parents"]
    assert parent["parentRef"]["name"] == GATEWAY
    told = {each["type"]: (each["status"], each["reason"]) for each in parent["conditions"]}
    assert told == {"Accepted": ("True", "Accepted"), "ResolvedRefs": ("True", "ResolvedRefs")}
    assert await answered(url, 5) == {"pod-0"}
    pool = await site.pool()
    assert pool["status"]["parents"] == [parent]
    user = f"system:serviceaccount:{site.namespace.name}:rel-epp"
    written = [each for each in site.namespace.plane.audit(user) if each.verb in ("update", "patch")]
    assert [each for each in written if each.object_ref.resource == "inferencepools"] == []


# -- requests --------------------------------------------------------------------------------------


async def many(url: str, prompts: tuple[str, ...], stream: bool) -> list[Sent]:
    """Each prompt once, in order, on one connection."""
    async with aiohttp.ClientSession() as session:
        return [await ask(session, url, prompt, stream=stream) for prompt in prompts]


async def chosen_by_clients(url: str, address: str) -> bool:
    """Whether a client can name the engine that serves it."""
    named = {"x-gateway-destination-endpoint": f"{address}:8000"}
    return len(await answered(url, 12, **named)) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_requests_reach_whom_the_picker_chose(site: IstioSite, stream: bool) -> None:
    await site.engines(*ENGINES)
    picker = await site.install()
    url = await site.url()
    addresses = site.kubelet.addresses
    rounds = [await many(url, MANY_PROMPTS, stream) for _ in range(4)]
    sent = [each for part in rounds for each in part]
    assert [each for each in sent if not each.ok] == []
    reached = [f"{addresses[each.pod]}:8000" for each in sent]
    assert await chosen(picker, len(sent)) == reached[::-1]
    assert not await chosen_by_clients(url, addresses["pod-0"])
    # Where a prompt went once, its cache is.
    assert all([each.pod for each in part] == [each.pod for each in rounds[0]] for part in rounds)
    assert len({each.pod for each in rounds[0]}) > 1


async def test_each_port_of_a_pod_is_an_endpoint(site: IstioSite) -> None:
    ports = (8000, 8001)
    await site.engines("pod-0", "pod-1", ports=ports)
    servers = {"targetPorts": [{"number": port} for port in ports]}
    picker = await site.install({"router": {"modelServers": servers}}, SPREAD)
    url = await site.url()
    addresses = site.kubelet.addresses
    sent = [await one(url, f"{number}") for number in range(40)]
    assert [each for each in sent if not each.ok] == []
    reached = [f"{addresses[each.pod]}:{each.port}" for each in sent]
    assert await chosen(picker, len(sent)) == reached[::-1]
    assert len(set(reached)) == 4


SPREAD: Final[Object] = {
    "router": {
        "epp": {
            "pluginsConfig": {
                "apiVersion": "llm-d.ai/v1alpha1",
                "kind": "EndpointPickerConfig",
                "plugins": [{"type": "random-picker"}],
                "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "random-picker"}]}],
            }
        }
    }
}
"""Values of a picker to whom every endpoint is alike."""


async def said(url: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Status of an answer, and the message of its error."""
    headers["content-type"] = "application/json"
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text)["error"]["message"] if "error" in text else text


async def test_what_the_picker_refuses(site: IstioSite) -> None:
    await site.engines("pod-0")
    objectives = [{"name": "batch", "priority": -1}]
    await site.install({"router": {"inferenceObjectives": objectives}})
    url = await site.url()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    batch = {"x-llm-d-inference-objective": "batch"}
    assert (await said(url, body, **batch))[0] == 200
    status, message = await said(url, body[:-9])
    assert (status, "JSON" in message) == (400, True)
    engine = site.kubelet.engines["pod-0"]
    assert isinstance(engine, Light)
    engine.page = FULL

    async def is_shed() -> bool:
        return (await said(url, body, **batch))[0] == 429

    await until(is_shed, "a batch is shed")
    assert await said(url, body, **batch) == (429, "system saturated, sheddable request dropped")
    assert (await said(url, body))[0] == 200
    seen = len(engine.seen)
    await site.namespace.delete("v1", "Pod", "pod-0", 0)

    async def is_gone() -> bool:
        return (await said(url, body))[0] == 503

    await until(is_gone, "the pool is empty")
    status, message = await said(url, body)
    assert (status, len(engine.seen)) == (503, seen), message
    assert "endpoint" in message


# -- what goes wrong -------------------------------------------------------------------------------


async def test_without_a_picker_a_pool_that_fails_open(site: IstioSite) -> None:
    """Istio spreads over the pods that are ready; when there is a picker again, it is asked."""
    await site.engines(*ENGINES)
    await site.engines("held", held=True)
    picker = await site.install(failing("FailOpen"))
    url = await site.url()
    await picker.children[PICKER].stop(signal.SIGKILL)
    # The first finds that the picker is gone, and fails.
    await until(lambda: answers(url), "requests pass without a picker")
    for stream in (False, True):
        sent = await many(url, PROMPTS * 4, stream)
        assert [each for each in sent if not each.ok] == []
        assert {each.pod for each in sent} == {*ENGINES}
    await picker.children[PICKER].start()
    await until(picker.ready, "the picker is ready again")
    # Its index is empty, and fills anew.
    await until(lambda: stick(url), "prompts stay where their cache is")


async def stick(url: str) -> bool:
    first, second = [await many(url, PROMPTS, False) for _ in range(2)]
    return [each.pod for each in first] == [each.pod for each in second]


async def test_without_a_picker_a_pool_that_fails_closed(site: IstioSite) -> None:
    await site.engines("pod-0")
    picker = await site.install(failing("FailClose"))
    url = await site.url()
    assert await answered(url, 3) == {"pod-0"}
    await picker.children[PICKER].stop(signal.SIGKILL)
    engine = site.kubelet.engines["pod-0"]
    assert isinstance(engine, Light)
    seen = len(engine.seen)
    sent = [*await many(url, PROMPTS, False), *await many(url, PROMPTS, True)]
    assert Counter(each.status for each in sent) == {500: 6}
    assert len(engine.seen) == seen
    await picker.children[PICKER].start()
    await until(picker.ready, "the picker is ready again")
    await until(lambda: answers(url), "requests are answered again")


async def answers(url: str) -> bool:
    return (await one(url)).ok


async def test_pods_that_come_and_go_under_load(site: IstioSite) -> None:
    await site.engines("pod-0", "pod-1")
    await site.install()
    url = await site.url()
    async with PodLoad(url, lanes=4) as load:
        await load.answered(40)
        await site.engines("pod-2")
        await until(lambda: "pod-2" in load.pods(), "the new pod is asked")
        gone_s = await site.namespace.delete("v1", "Pod", "pod-0")
        await until(lambda: "pod-0" not in site.kubelet.engines, "the pod has ended")
        ended_s = asyncio.get_running_loop().time()
        await load.answered(80)
    assert load.failed() == []
    assert load.pods(gone_s)
    assert "pod-0" not in load.pods(ended_s)


async def test_two_pickers_one_of_which_goes(site: IstioSite) -> None:
    await site.engines(*ENGINES)
    await site.install(failing("FailClose"), {"router": {"epp": {"replicas": 2}}})
    both = await site.pickers(2)
    url = await site.url()
    async with PodLoad(url, lanes=4) as load:
        await load.answered(40)
        name = both[0].name
        await site.namespace.delete("v1", "Pod", name)
        await until(lambda: name not in site.kubelet.engines, "the picker has ended")
        await load.answered(80)
    assert load.failed() == []


async def test_a_picker_that_is_replaced_under_load(site: IstioSite) -> None:
    await site.engines(*ENGINES)
    closed = failing("FailClose")
    await site.install(closed)
    url = await site.url()
    (old,) = site.found()
    async with PodLoad(url, lanes=4) as load:
        await load.answered(40)
        fresh = {"router": {"epp": {"podLabels": {"a": "b"}}}}
        await site.release.upgrade(values(RUN, ROUTED, closed, fresh))
        await until(lambda: [each for each in site.found() if each is not old], "another picker is ready")
        await until(lambda: old not in site.found(), "the picker has ended")
        await load.answered(80)
    assert load.failed() == []


async def test_the_rule_of_the_chart_is_what_makes_it_work(site: IstioSite) -> None:
    """Without the DestinationRule Istio speaks plain text to the picker, which is none."""
    await site.engines("pod-0")
    await site.install(failing("FailClose"))
    url = await site.url()
    assert await answered(url, 3) == {"pod-0"}
    await site.namespace.delete("networking.istio.io/v1", "DestinationRule", "rel-epp")

    async def fails() -> bool:
        return (await one(url)).status == 500

    await until(fails, "no picker can be asked")
    assert await site.namespace.client.get(site.namespace.path(POOL_VERSION, "InferencePool", "rel"))


async def refuse(_: object) -> web.Response:
    return web.Response(status=503)


async def test_an_engine_that_refuses_is_believed(site: IstioSite) -> None:
    """Nobody else is asked in its place."""
    await site.engines("pod-0", "pod-1")
    await site.install()
    url = await site.url()
    first = await one(url, PROMPTS[0])
    full = site.kubelet.engines[first.pod]
    assert isinstance(full, Light)
    full._answered = refuse  # type: ignore[method-assign, assignment]
    assert (await one(url, PROMPTS[0])).status == 503


async def test_an_engine_that_is_gone_has_another_in_its_place(site: IstioSite) -> None:
    """Its pod counts as ready still: Istio asks any other, whom the picker did not choose."""
    await site.engines("pod-0", "pod-1")
    picker = await site.install()
    url = await site.url()
    addresses = site.kubelet.addresses
    first = await one(url, PROMPTS[0])
    await site.kubelet.engines[first.pod].stop(0.0)
    again = await one(url, PROMPTS[0])
    assert (again.status, {first.pod, again.pod}) == (200, {"pod-0", "pod-1"}), again
    assert await chosen(picker, 1) == [f"{addresses[first.pod]}:8000"]


# -- what Istio does not do ------------------------------------------------------------------------

# A test that fails here with a newer Istio says that docs/gateways.md has a limit too many.


async def rule(site: IstioSite, filters: list[Thing], *pools: tuple[str, int]) -> None:
    """A route of one rule, to pools with weights."""
    group = "inference.networking.k8s.io"
    refs = [
        {"group": group, "kind": "InferencePool", "name": name, "weight": weight} for name, weight in pools
    ]
    rules = [{"filters": filters, "backendRefs": refs}]
    await site.namespace.create(
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": "own"},
            "spec": {"parentRefs": [{"name": GATEWAY}], "rules": rules},
        }
    )


NO_ROUTE: Final[Object] = {"httpRoute": {"create": False}}


async def test_a_route_with_cors_passes_by_the_picker(site: IstioSite) -> None:
    await site.engines(*ENGINES)
    picker = await site.install(NO_ROUTE, failing("FailClose"))
    await rule(site, [{"type": "CORS", "cors": {"allowOrigins": ["https://example.com"]}}], ("rel", 1))
    url = await site.address()
    await until(lambda: answers(url), "requests are answered")
    await answered(url, 6)
    assert await chosen(picker, 1) == []


async def test_pools_that_share_a_rule_share_a_picker(site: IstioSite) -> None:
    """The last one's is asked for all."""
    await site.engines("pod-0", "pod-1")
    picker = await site.install(NO_ROUTE)
    other = Release(site.namespace, "other")
    labels = {"app": "other"}
    servers = {"router": {"modelServers": {"matchLabels": labels}}}
    await other.install(values(RUN, {"provider": {"name": "istio"}}, servers))
    await site.namespace.create(pod("other-0", labels))
    await until(lambda: "other-0" in site.kubelet.engines, "the other engine runs")
    await site.pickers(2)
    await rule(site, [], ("other", 1), ("rel", 1))
    url = await site.url()
    before = len(await chosen(picker, 100))
    pods = Counter([(await one(url, f"{number}")).pod for number in range(20)])
    assert len(await chosen(picker, 100)) == before + 20
    assert 0 < pods["other-0"] < 20
