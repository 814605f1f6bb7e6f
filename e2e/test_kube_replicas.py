"""Several pickers of one pool: who is ready, who leads, and what requests notice when one goes."""

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from e2e.kube import Namespace, pool
from e2e.kube_client import Thing
from e2e.kube_lease import hands, leads, lease, lease_name
from e2e.kube_line import LABELS, POOL, PORT, Line, line
from e2e.kube_load import PodLoad, Sent, one
from e2e.kube_picker import ClusterPicker, pool_flags, proxied, running
from e2e.pages import total, until
from epp import names
from epp.lab.stack import Child
from epp.wire.health_pb2 import HealthCheckResponse

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

LEASE_S: Final = 15.0
FLAGS: Final = ("--drain-timeout=5s",)
"""Long enough that Envoy notices, however busy the machine."""
LEADER_ONLY: Final = (*FLAGS, "--ha-enable-leader-election")


async def leader_first(pickers: Sequence[ClusterPicker]) -> list[ClusterPicker]:
    await until(lambda: any(map(leads, pickers)), "one of the replicas leads")
    return sorted(pickers, key=leads, reverse=True)


async def ready(pickers: Sequence[ClusterPicker]) -> set[ClusterPicker]:
    return {picker for picker in pickers if picker.child.returncode is None and await picker.serves()}


async def asked(picker: ClusterPicker) -> float:
    return await total(picker, "request_total")


def beyond(failed: Sequence[Sent], killed_s: float, well_s: float) -> list[Sent]:
    """Requests that a picker's death is no excuse for: `well_s` is when Envoy had noticed it."""
    return [each for each in failed if each.ended_s < killed_s or each.started_s >= well_s]


async def given_back(holders: Sequence[str], times: int) -> None:
    """Until the lease has had one more holder so often, each time by way of nobody."""
    await until(lambda: len(holders) > 2 * times, f"the lease was given back {times} times")
    assert [holder == "" for holder in holders] == [False, *[True, False] * times]


# -- traffic ---------------------------------------------------------------------------------------


async def test_all_replicas_serve(namespace: Namespace, envoy: Path) -> None:
    async with (
        line(namespace, envoy, replicas=2, flags=FLAGS) as made,
        hands(namespace) as holders,
        PodLoad(made.url) as load,
    ):
        leader, other = await leader_first(made.pickers)
        assert await ready(made.pickers) == {leader, other}
        for picker in made.pickers:
            await until(lambda picker=picker: asked(picker), "both are asked")  # type: ignore[misc]

        # The leader leaves: nobody notices, and the other leads without waiting for the lease to end.
        told_s = time.monotonic()
        leader.child.send(signal.SIGTERM)
        await until(lambda: leads(other), "the other replica leads")
        took_s = time.monotonic() - told_s
        print(f"the leader left, and the other led {took_s:.1f} s later")
        await given_back(holders, 1)
        assert await leader.child.wait() == 0
        await load.answered(60)
        assert load.failed() == []

        # It comes back, and then the other is killed: requests that were with it are lost, no others.
        await leader.start_serving()
        await until(lambda: asked(leader), "the new one is asked")
        killed_s = time.monotonic()
        await other.child.stop(signal.SIGKILL)
        well_s = await load.is_well(killed_s)
    print(f"{len(load.failed())} of {len(load.sent)} requests were lost with a killed picker")
    assert beyond(load.failed(), killed_s, well_s) == []


async def test_only_the_leader_is_ready(namespace: Namespace, envoy: Path) -> None:
    """Three replicas, of whose leaders the first leaves and the second is killed."""
    async with line(namespace, envoy, replicas=3, flags=LEADER_ONLY, serving=False) as made:
        first, *others = await leader_first(made.pickers)
        await says_so(first, *others)
        await stray_requests_are_served(envoy, others)
        before = [await asked(picker) for picker in others]
        addresses = [(address, PORT) for address in made.kubelet.addresses.values()]
        async with (
            proxied(envoy, *made.pickers, fail_open_to=addresses) as url,
            PodLoad(url) as load,
            hands(namespace) as holders,
            never_two_ready(made),
        ):
            await until(lambda: asked(first), "the leader is asked")
            await load.answered(60)
            assert [await asked(picker) for picker in others] == before

            told_s = time.monotonic()
            first.child.send(signal.SIGTERM)
            second, third = await leader_first(others)
            await until(second.serves, "the next leader is ready")
            took_s = time.monotonic() - told_s
            print(f"the leader left, and the next was ready {took_s:.1f} s later")
            await given_back(holders, 1)
            assert await first.child.wait() == 0
            await until(lambda: asked_more(second, before), "the next leader is asked")

            killed_s = time.monotonic()
            await second.child.stop(signal.SIGKILL)
            assert not await third.serves()
            well_s = await load.is_well(killed_s)
            await until(third.serves, "the last replica is ready")
            took_s = time.monotonic() - killed_s
            print(f"the leader was killed, and the next was ready {took_s:.1f} s later")
            assert took_s > LEASE_S / 3, "the lease was still held"
            await until(lambda: asked_more(third, before), "the last replica is asked")
            await load.answered(60)
        print(f"{len(load.failed())} of {len(load.sent)} requests were lost with a killed picker")
        assert beyond(load.failed(), killed_s, well_s) == []
        held_by = (await lease(namespace))["holderIdentity"]
        await third.child.stop(signal.SIGTERM, 60)
        record = namespace.plane.kubectl(
            "get", "lease", lease_name(namespace), f"-n{namespace.name}", "-oyaml"
        )
        assert 'holderIdentity: ""' in record
        assert "leaseDurationSeconds: 1\n" in record
        assert "leaseTransitions: 2\n" in record, "it was the third's in its turn"
        assert held_by not in record


async def says_so(leader: ClusterPicker, *others: ClusterPicker) -> None:
    """What the health port of each says."""
    # Its log says that it leads a moment earlier.
    await until(leader.serves, "the leader is ready")
    for service in ("", names.READINESS, names.EXT_PROC_SERVICE, names.INFERENCE_EXTENSION):
        assert await leader.status(service) == HealthCheckResponse.SERVING
        for other in others:
            assert await other.status(service) == HealthCheckResponse.NOT_SERVING
    for picker in (leader, *others):
        assert await picker.status(names.LIVENESS) == HealthCheckResponse.SERVING


async def stray_requests_are_served(envoy: Path, others: Sequence[ClusterPicker]) -> None:
    """Requests that come to who does not lead, because nobody looks whether it is ready."""
    blind = {"healthy_panic_threshold: {value: 0}": "healthy_panic_threshold: {value: 100}"}
    async with proxied(envoy, *others, edits=blind) as url:
        for _ in range(4):
            assert (await one(url)).ok
    assert sum([await asked(picker) for picker in others]) == 4


async def asked_more(picker: ClusterPicker, before: Sequence[float]) -> bool:
    return await asked(picker) > max(before)


@asynccontextmanager
async def never_two_ready(made: Line) -> AsyncIterator[None]:
    """Fails where two replicas say at once that they are."""

    async def look() -> None:
        while True:
            seen = await ready(made.pickers)
            if len(seen) > 1:
                # One may have ceased to be while the next was asked.
                assert len(await ready([*seen])) <= 1
            await asyncio.sleep(0.1)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with_error = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(with_error[0], asyncio.CancelledError), with_error


# -- the record ------------------------------------------------------------------------------------

MICRO_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


async def held(namespace: Namespace) -> bool:
    return bool((await lease(namespace)).get("holderIdentity"))


@asynccontextmanager
async def client_go(namespace: Namespace, name: str) -> AsyncIterator[Child]:
    """A scheduler of no pods that wants the same lease, as the field's pickers do: with client-go."""
    plane = namespace.plane
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(plane.kubeconfig())},
        "leaderElection": {
            "leaderElect": True,
            "resourceName": lease_name(namespace),
            "resourceNamespace": namespace.name,
        },
        "profiles": [{"schedulerName": "nobody"}],
    }
    file = namespace.folder / f"{name}.json"
    file.write_text(json.dumps(config))
    command = [str(plane.programs / "kube-scheduler"), f"--config={file}", "--secure-port=0", "-v=4"]
    child = Child(name, command, namespace.folder / f"{name}.log")
    await child.start()
    try:
        yield child
    finally:
        await child.stop(signal.SIGKILL)


async def test_the_lease_is_that_of_client_go(namespace: Namespace) -> None:
    """It passes from a leader of client-go's to a picker and back, given back each time."""
    await namespace.create(pool(POOL, LABELS))
    flags = (*pool_flags(POOL, namespace.name), *LEADER_ONLY)
    picker = ClusterPicker(namespace.folder, await namespace.access(), flags)
    async with hands(namespace) as holders, client_go(namespace, "before") as before:
        await until(lambda: held(namespace), "client-go has the lease")
        theirs = await lease(namespace)
        async with running(picker, serving=False):
            await until(lambda: theirs["holderIdentity"] in picker.child.log_path.read_text(), "it was seen")
            assert not await picker.serves()
            assert await lease(namespace) | {"renewTime": ""} == theirs | {"renewTime": ""}
            told_s = time.monotonic()
            await before.stop(grace_s=60)
            await until(picker.serves, "the picker leads")
            print(f"client-go left, and the picker was ready {time.monotonic() - told_s:.1f} s later")
            await given_back(holders, 1)
            ours = await lease(namespace)
            assert ours.keys() == theirs.keys()
            assert ours["holderIdentity"] != theirs["holderIdentity"]
            assert re.fullmatch(r".+_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", ours["holderIdentity"])
            assert ours["leaseDurationSeconds"] == LEASE_S
            assert ours["leaseTransitions"] > theirs["leaseTransitions"]
            async with client_go(namespace, "after") as after:
                await until(lambda: ours["holderIdentity"] in after.log_path.read_text(), "client-go saw it")
                assert (await lease(namespace))["holderIdentity"] == ours["holderIdentity"]
                for field in ("acquireTime", "renewTime"):
                    assert MICRO_TIME.fullmatch(ours[field])
                renewed = await lease(namespace)
                assert renewed["acquireTime"] == ours["acquireTime"]
                told_s = time.monotonic()
                picker.child.send(signal.SIGTERM)
                await until(lambda: handed_over(namespace, ours), "client-go has it again")
                print(f"the picker left, and client-go led {time.monotonic() - told_s:.1f} s later")
                await given_back(holders, 2)
                assert (await lease(namespace))["leaseTransitions"] == ours["leaseTransitions"] + 1


async def handed_over(namespace: Namespace, ours: Thing) -> bool:
    return (await lease(namespace)).get("holderIdentity") not in ("", None, ours["holderIdentity"])
