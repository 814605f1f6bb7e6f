"""Releases whose pods are cared for as on a node: by their probes, their preStop hooks and their grace."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from e2e.kube import POOL_VERSION, Namespace, pool
from e2e.kube_containers import PICKER, PROXY, Running
from e2e.kube_load import PodLoad, Sent
from e2e.kube_picker import health_of
from e2e.kube_pods import HOLD, SERVED, Light
from e2e.kube_probes import LIVENESS
from e2e.kube_relay import Relay
from e2e.kube_release import HTTP_PORT, NOTICED_S, Release, Site, site, until_answered
from e2e.pages import total, until
from e2e.test_kube_chart import answer
from epp import names
from epp.wire.health_pb2 import HealthCheckResponse
from tests.contract.test_chart_render import OPEN_METRICS, SELECTOR, SERVICE, STANDALONE
from tests.data.chart.rendering import LABELS, Object, values

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(480),
    pytest.mark.usefixtures("definitions_of_others"),
]

ENGINES: Final = ("pod-0", "pod-1")
MARKS: Final = {SERVED: "true", HOLD: ""}
FAST: Final = 0.1
"""A pace at which what takes a minute takes six seconds."""
RESTARTED_S: Final = 5 + 6 * 10 + 10 + 10
"""Until a picker that hangs is started again, at most; the last ten for a busy machine."""
PACED_S: Final = RESTARTED_S * FAST
LEASE_S: Final = 15.0
RENEWED_S: Final = 2.0
AT_ONCE_S: Final = LEASE_S - RENEWED_S - 0.5
"""Less than a lease lasts whose holder has gone without giving it back."""
BUSY_S: Final = 20.0
"""What a busy machine may add."""
LATE_S: Final = 4.5
"""How long the pod has been told to end, when requests still do not notice."""


def cared_for(*given: Object, drain_s: float = 0.2, **epp: object) -> Object:
    """Values of a release whose pods are cared for."""
    flags = {"drain-timeout": f"{drain_s * 1000:.0f}ms"}
    ours = {"epp": {"podAnnotations": MARKS, "flags": flags, **epp}, "proxy": {"podAnnotations": MARKS}}
    return values({"router": ours}, OPEN_METRICS, *given)


async def is_ready(namespace: Namespace, name: str) -> bool:
    """By the condition that its kubelet gave it."""
    found = await namespace.client.get(namespace.path("v1", "Pod", name))
    return any(each["type"] == "Ready" and each["status"] == "True" for each in found["status"]["conditions"])


# -- liveness and readiness ------------------------------------------------------------------------


async def test_only_a_picker_that_hangs_is_started_again(namespace: Namespace, envoy: Path) -> None:
    """Not one that is without its pool or its API server."""
    release = Release(namespace)
    async with Relay(namespace.plane.port) as relay, site(namespace, envoy, FAST, relay.port) as made:
        await made.engines(*ENGINES, labels=LABELS)
        await release.install(cared_for())
        picker = await made.picker()
        ready = lambda: is_ready(namespace, picker.name)  # noqa: E731
        await until(ready, "the pod is ready")

        began_s = time.monotonic()
        picker.children[PICKER].send(signal.SIGSTOP)
        await until(lambda: not_(ready), "its readiness is lost")
        unready_s = time.monotonic() - began_s
        await until(lambda: restarts(picker), "it is started again")
        print(f"a picker that hung was not ready after {unready_s:.1f} s")
        assert time.monotonic() - began_s < PACED_S + BUSY_S
        assert (restarts(picker), why(picker)) == (1, [LIVENESS])
        await until(ready, "it is ready again")

        await namespace.delete(POOL_VERSION, "InferencePool", "rel")
        await until(lambda: not_(ready), "without its pool it is not ready")
        await asyncio.sleep(PACED_S)
        assert not await ready()
        await namespace.create(pool("rel", LABELS))
        await until(ready, "with its pool it is ready again")

        await relay.cut()
        cut_s = time.monotonic()
        while time.monotonic() < cut_s + PACED_S:
            assert await ready()
            assert await picker.ready()
            await asyncio.sleep(0.2)
        await relay.heal()
        assert restarts(picker) == 1
        await release.uninstall()


def restarts(running: Running, container: str = PICKER) -> int:
    assert running.care is not None
    return running.care.restarts.get(container, 0)


def why(running: Running) -> list[str]:
    assert running.care is not None
    return running.care.because


async def not_(holds: Callable[[], Awaitable[bool]]) -> bool:
    return not await holds()


# -- only the leader is ready ----------------------------------------------------------------------


async def test_only_the_leader_is_ready(namespace: Namespace, envoy: Path) -> None:
    """Of two pickers behind a proxy of the chart. The first leader's pod is deleted, the second is killed."""
    flags = {"router": {"epp": {"flags": {"ha-enable-leader-election": True}}}}
    release = Release(namespace)
    async with site(namespace, envoy, 1.0) as made:
        await made.engines(*ENGINES, labels=LABELS)
        given = cared_for(
            SERVICE, SELECTOR, flags, {"router": {"proxy": {"replicas": 1}}}, drain_s=3, replicas=2
        )
        await release.install(given)
        pickers = await made.pods(PICKER, 2)
        (proxy,) = await made.pods(PROXY)
        first, second = await leader_first(namespace, pickers)
        url = f"http://{proxy.host}:{HTTP_PORT}"
        await until(lambda: is_ready(namespace, proxy.name), "the proxy is ready")
        await until_answered(url)
        async with never_two_ready(namespace, made), PodLoad(url, lanes=4, pause_s=0.05) as load:
            await until(lambda: total(first, "request_total"), "the leader is asked")
            await load.answered(60)
            assert await total(second, "request_total") == 0

            told_s = time.monotonic()
            await namespace.delete("v1", "Pod", first.name)
            await until(lambda: one_of(namespace, pickers_but(made, first)), "another is ready")
            took_s = time.monotonic() - told_s
            print(f"the leader's pod was deleted, and another was ready {took_s:.1f} s later")
            assert took_s < AT_ONCE_S
            # Who was there before, or the one in place of the first: whoever looked at the Lease first.
            await until(lambda: len(pickers_but(made, first)) == 2, "another pod runs")
            leader, waiting = await leader_first(namespace, pickers_but(made, first))
            await until(lambda: total(leader, "request_total"), "the new leader is asked")
            await load.answered(60)
            assert load.failed() == []
            health = f"{waiting.host}:{waiting.flags.grpc_health_port}"
            await until(lambda: is_alive(health), "the other one waits")
            assert not await is_ready(namespace, waiting.name)

            killed_s = time.monotonic()
            leader.children[PICKER].send(signal.SIGKILL)
            well_s = await load.is_well(killed_s)
            await until(lambda: restarts(leader), "it is started again")
            await until(lambda: not_(lambda: is_ready(namespace, leader.name)), "it is not ready")
            await until(lambda: any_ready(namespace, made), "one is ready")
            took_s = time.monotonic() - killed_s
            print(f"the leader was killed, and one was ready {took_s:.1f} s later")
            assert took_s < LEASE_S + RENEWED_S + BUSY_S
            await load.answered(60)
            lost = [each for each in load.failed() if not of_the_dead(each, killed_s, well_s)]
            assert lost == [], lost
        assert why(leader) == ["exit"]
        assert why(waiting) == []
        await release.uninstall()


def of_the_dead(sent: Sent, killed_s: float, well_s: float) -> bool:
    """With the leader when it died, or sent to it before its proxy knew, which it did by `well_s`."""
    return sent.ended_s >= killed_s and sent.started_s < well_s


async def leader_first(namespace: Namespace, pickers: list[Running]) -> list[Running]:
    """And the Lease says the same."""
    await until(lambda: one_of(namespace, pickers), "one is ready")
    found = [await is_ready(namespace, each.name) for each in pickers]
    (lease,) = await namespace.client.items(namespace.path("coordination.k8s.io/v1", "Lease"))
    leader = pickers[found.index(True)]
    assert sum(found) == 1
    assert lease["metadata"]["name"] == f"epp-{namespace.name}-{leader.flags.pool_name or 'rel-epp'}.llm-d.ai"
    return sorted(pickers, key=lambda each: each is not leader)


async def one_of(namespace: Namespace, pickers: list[Running]) -> bool:
    return any([await is_ready(namespace, each.name) for each in pickers])


async def is_alive(health: str) -> bool:
    return await health_of(health, names.LIVENESS) == HealthCheckResponse.SERVING


async def any_ready(namespace: Namespace, made: Site) -> bool:
    return await one_of(namespace, await made.pods(PICKER, 2))


def pickers_but(made: Site, gone: Running) -> list[Running]:
    running = [each for each in made.kubelet.engines.values() if isinstance(each, Running)]
    return [each for each in running if PICKER in each.children and each is not gone]


@asynccontextmanager
async def never_two_ready(namespace: Namespace, made: Site) -> AsyncIterator[None]:
    """By what their ports say, which their probes ask."""

    async def look() -> None:
        while True:
            found = [each for each in made.containers.running.values() if PICKER in each.children]
            said = [each for each in found if await each.ready()]
            if len(said) > 1:
                # One may have ceased to be while the next was asked.
                still = [each.name for each in said if await each.ready()]
                assert len(still) < 2, still
            await asyncio.sleep(0.1)

    looking = asyncio.create_task(look())
    try:
        yield
        assert not looking.done() or looking.exception() is None
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


# -- going -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_open", [True, False], ids=["open", "closed"])
async def test_a_proxy_beside_the_picker_serves_until_it_ends(
    namespace: Namespace, envoy: Path, fail_open: bool
) -> None:
    """Clients that keep their connections do not hear for long that the pod is going."""
    given = cared_for(
        STANDALONE,
        SELECTOR,
        {"router": {"proxy": {"failOpen": fail_open}}},
        drain_s=1,
        terminationGracePeriodSeconds=22,
    )
    release = Release(namespace)
    async with site(namespace, envoy, 1.0) as made:
        await made.engines(*ENGINES, labels=LABELS)
        await release.install(given)
        both = await made.picker()
        await until(lambda: is_ready(namespace, both.name), "the pod is ready")
        url = f"http://{both.host}:{HTTP_PORT}"
        await answer(url, {*ENGINES}, from_now=False)
        await until(lambda: total(both, "request_total"), "the picker is asked")
        for engine in made.kubelet.engines.values():
            if isinstance(engine, Light):
                engine.answer_s = 0.2
        asked = await total(both, "request_total")
        async with PodLoad(url, lanes=4, pause_s=0.05) as load:
            await load.answered(10)
            told_s = time.monotonic()
            await namespace.delete("v1", "Pod", both.name)
            await until(lambda: load.begun(told_s + LATE_S), "requests are answered that began late")
            begun = len(load.begun(told_s + NOTICED_S))
            assert await total(both, "request_total") >= asked + begun > asked, (
                "it is still the picker that chooses"
            )
        assert load.failed() == []
        await release.uninstall()
        await until(lambda: both.name not in made.kubelet.engines, "the pod has ended")
        assert why(both) == []
