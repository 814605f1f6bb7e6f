"""The lease over HTTP: what is written, when it is taken or left alone, and what is said when it fails."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web

from epp.runtime.kube.api import KubeApi
from epp.runtime.kube.lease import Leadership, lease_name, new_identity

DEADLINE_S = 20.0
NAME = "epp-models-pool.llm-d.ai"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/models/leases"
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")

# As the field's picker leaves it: the holder cleared, everything else as a server keeps it.
RELEASED = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {
        "name": NAME,
        "namespace": "models",
        "uid": "5f0b7c1e-6e0c-4f9e-9a52-0a7a5c0f6d11",
        "resourceVersion": "41",
        "creationTimestamp": "2026-01-05T10:00:00Z",
        "labels": {"team": "inference"},
        "managedFields": [{"manager": "epp", "operation": "Update", "fieldsV1": {"f:spec": {}}}],
    },
    "spec": {
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "acquireTime": "2026-01-05T10:20:00.000000Z",
        "renewTime": "2026-01-05T10:20:00.000000Z",
        "leaseTransitions": 6,
    },
}


def held_by(holder: str, seconds: int = 15) -> dict[str, Any]:
    spec = RELEASED["spec"]
    assert isinstance(spec, dict)
    return {**RELEASED, "spec": {**spec, "holderIdentity": holder, "leaseDurationSeconds": seconds}}


class Server:
    """Keeps the lease. `refuses` may answer instead: a status and a body for a method."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.calls: list[tuple[str, str, Any]] = []
        self.refuses: Callable[[str], tuple[int, Any] | None] = lambda method: None
        self.before_put: Callable[[], Awaitable[None]] | None = None
        self.version = 100

    @property
    def spec(self) -> dict[str, Any]:
        return {} if self.lease is None else self.lease["spec"]

    def methods(self) -> list[str]:
        return [method for method, _, _ in self.calls]

    async def answer(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read() or b"null")
        self.calls.append((request.method, request.path, body))
        refused = self.refuses(request.method)
        if refused is not None:
            status, told = refused
            return web.Response(
                status=status, body=told if isinstance(told, bytes) else msgspec.json.encode(told)
            )
        if request.method == "PUT" and self.before_put is not None:
            await self.before_put()
        return self.kept(request.method, body)

    def kept(self, method: str, body: Any) -> web.Response:
        match method, self.lease:
            case "GET", None:
                return failure(404, "NotFound", f'leases.coordination.k8s.io "{NAME}" not found')
            case "PUT", None:
                return failure(404, "NotFound", f'leases.coordination.k8s.io "{NAME}" not found')
            case "POST", dict():
                return failure(409, "AlreadyExists", f'leases.coordination.k8s.io "{NAME}" already exists')
            case "PUT", {"metadata": {"resourceVersion": version}} if (
                body["metadata"]["resourceVersion"] != version
            ):
                return failure(409, "Conflict", "the object has been modified")
            case "GET", _:
                return web.Response(body=msgspec.json.encode(self.lease))
        self.put(body)
        return web.Response(body=msgspec.json.encode(self.lease))

    def put(self, lease: dict[str, Any]) -> None:
        self.version += 1
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.version)}}


def failure(status: int, reason: str, message: str) -> web.Response:
    told = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}
    return web.Response(status=status, body=msgspec.json.encode(told))


FORBIDDEN = (
    403,
    {"reason": "Forbidden", "message": "leases.coordination.k8s.io is forbidden: User cannot", "code": 403},
)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    served = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", served.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield served, site.name
    await runner.cleanup()


@pytest.fixture
async def reached(server: tuple[Server, str], tmp_path: Path) -> AsyncIterator[tuple[Server, KubeApi]]:
    served, url = server
    kubeconfig = tmp_path / "kubeconfig"
    context = {"name": "here", "context": {"cluster": "here", "namespace": "models"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [context],
        "clusters": [{"name": "here", "cluster": {"server": url}}],
    }
    kubeconfig.write_text(yaml.safe_dump(config))
    api = await KubeApi.connect(str(kubeconfig), {})
    yield served, api
    await api.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives a lease back may be kept waiting, as this machine may be busy."""
    monkeypatch.setattr("epp.runtime.kube.lease._RELEASE_S", DEADLINE_S)


class Replica:
    """A leadership that runs, and what it told."""

    def __init__(self, api: KubeApi, name: str, **settings: Any) -> None:
        self.changes: list[bool] = []
        self.said: list[str] = []
        quick = {"duration_s": 15.0, "renew_s": 10.0, "retry_s": 0.02, **settings}
        self.leadership = Leadership(
            api, "models", NAME, name, self.changes.append, said=self.said.append, **quick
        )
        self.task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[Leadership]:
        self.task = asyncio.create_task(self.leadership.run())
        try:
            yield self.leadership
        finally:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not seen():  # noqa: ASYNC110 - what is waited for happens in the code under test
            await asyncio.sleep(0.005)


# -- what is written --------------------------------------------------------------------------------


async def test_a_lease_is_made_kept_and_given_back(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    replica = Replica(api, "a_1")
    async with replica.runs() as leadership:
        await until(lambda: served.methods().count("PUT") >= 2)
        assert leadership.leads
        assert leadership.holder == "a_1"
        assert replica.changes == [True]
    _, path, made = served.calls[1]
    assert served.methods()[:3] == ["GET", "POST", "PUT"], "renewing takes one call"
    assert path == LEASES
    assert {call[1] for call in served.calls} - {LEASES} == {f"{LEASES}/{NAME}"}
    assert made["metadata"] == {"name": NAME, "namespace": "models"}
    assert (made["apiVersion"], made["kind"]) == ("coordination.k8s.io/v1", "Lease")
    first = made["spec"]
    assert (first["holderIdentity"], first["leaseDurationSeconds"], first["leaseTransitions"]) == (
        "a_1",
        15,
        0,
    )
    assert MICRO_TIME.fullmatch(first["acquireTime"])
    renewed = served.calls[2][2]["spec"]
    assert renewed["acquireTime"] == first["acquireTime"]
    assert MICRO_TIME.fullmatch(renewed["renewTime"])
    assert renewed["renewTime"] > first["renewTime"]
    assert (served.spec["holderIdentity"], served.spec["leaseDurationSeconds"]) == ("", 1)
    assert served.spec["leaseTransitions"] == 0
    assert replica.changes == [True, False]
    assert replica.said == []
    assert not leadership.leads


async def test_a_released_lease_is_taken_as_it_is(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    served.lease = RELEASED
    async with Replica(api, "a_1").runs() as leadership:
        await until(lambda: leadership.leads)
        assert served.lease is not None
        kept, was = served.lease["metadata"], RELEASED["metadata"]
        assert isinstance(was, dict)
        assert {**kept, "resourceVersion": "41"} == was, "nothing of others is lost"
        assert served.spec["leaseTransitions"] == 7
        assert served.spec["acquireTime"] > "2026-01-05T10:20:00.000000Z"


async def test_leading_ends_before_the_lease_is_given_back(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    replica = Replica(api, "a_1")
    seen: list[list[bool]] = []
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)

        async def look() -> None:
            if replica.task is not None and replica.task.cancelling():
                seen.append(list(replica.changes))

        served.before_put = look
    assert served.spec["holderIdentity"] == ""
    assert seen == [[True, False]]


async def test_who_is_come_between_while_giving_it_back_gives_it_back_all_the_same(
    reached: tuple[Server, KubeApi],
) -> None:
    served, api = reached
    replica = Replica(api, "a_1")
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)

        async def comes_between() -> None:
            if replica.task is not None and replica.task.cancelling() and served.lease is not None:
                served.before_put = None
                served.put(served.lease)

        served.before_put = comes_between
    assert served.before_put is None
    assert served.spec["holderIdentity"] == ""
    assert replica.said == []


async def test_a_write_whose_answer_nobody_waited_for_is_taken_back(reached: tuple[Server, KubeApi]) -> None:
    """Ended while it takes the lease: whether it had it is not known, so it looks."""
    served, api = reached
    served.lease = RELEASED
    under_way, go_on = asyncio.Event(), asyncio.Event()

    async def hold_up() -> None:
        served.before_put = None
        under_way.set()
        await go_on.wait()

    served.before_put = hold_up
    replica = Replica(api, "a_1")
    async with replica.runs():
        await until(under_way.is_set)
        served.put(held_by("a_1"))  # it got through
        go_on.set()
    assert served.spec["holderIdentity"] == ""
    assert replica.changes == []


# -- whose it is ------------------------------------------------------------------------------------


async def test_a_holder_is_left_alone_for_as_long_as_its_record_says(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    clock = [0.0]
    served.lease = held_by("go_2", seconds=60)
    replica = Replica(api, "a_1", clock=lambda: clock[0])

    async def looks_again() -> None:
        calls = len(served.calls)
        await until(lambda: len(served.calls) > calls + 1)

    async with replica.runs() as leadership:
        await looks_again()
        clock[0] = 59.0
        await looks_again()
        assert not leadership.leads
        assert leadership.holder == "go_2"
        served.put(
            {**held_by("go_2", 60), "spec": {**served.spec, "renewTime": "2026-01-05T10:30:00.000000Z"}}
        )
        await looks_again()
        clock[0] = 118.0
        await looks_again()
        assert served.methods().count("PUT") == 0, "it was renewed at 59"
        clock[0] = 119.5
        await until(lambda: leadership.leads)
    assert replica.said == []


async def test_one_that_ends_gives_way_to_the_other_at_once(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    first, second = Replica(api, "a_1"), Replica(api, "b_2")
    async with second.runs() as other:
        await until(lambda: other.leads)
        async with first.runs() as leadership:
            await until(lambda: leadership.holder == "b_2")
            assert second.task is not None
            second.task.cancel()
            await until(lambda: leadership.leads)
            assert not other.leads
    assert served.spec["leaseTransitions"] == 1
    assert (first.changes, second.changes) == ([True, False], [True, False])


async def test_a_change_by_somebody_else_does_not_end_a_term(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    replica = Replica(api, "a_1")
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)
        assert served.lease is not None
        served.put({**served.lease, "metadata": {**served.lease["metadata"], "annotations": {"seen": "yes"}}})
        version = served.version
        await until(lambda: served.version >= version + 2)
        assert served.lease["metadata"]["annotations"] == {"seen": "yes"}
        assert replica.changes == [True]


async def test_a_leader_that_was_replaced_stops(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    replica = Replica(api, "a_1")
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)
        served.put(held_by("b_2"))
        await until(lambda: replica.changes == [True, False])
        assert leadership.holder == "b_2"
    assert served.spec["holderIdentity"] == "b_2", "it is not ours to clear"


async def test_a_term_counts_from_before_the_renewal_was_sent(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    clock = [0.0]
    replica = Replica(api, "a_1", clock=lambda: clock[0])
    go_on = asyncio.Event()

    async def is_slow() -> None:
        served.before_put = go_on.wait  # type: ignore[assignment]
        clock[0] += 4.0

    served.lease, served.before_put = RELEASED, is_slow
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)
        clock[0] = 9.9
        assert leadership.leads
        clock[0] = 10.0
        assert not leadership.leads
        served.before_put = None
        go_on.set()


async def test_a_lease_that_got_through_without_an_answer_is_ours(reached: tuple[Server, KubeApi]) -> None:
    """It is not waited for as another's would be."""
    served, api = reached
    served.lease = RELEASED
    replica = Replica(api, "a_1", clock=lambda: 0.0)

    def got_through(method: str) -> tuple[int, Any] | None:
        if method != "PUT":
            return None
        served.refuses = lambda method: None
        served.put(held_by("a_1"))
        return 500, {"message": "timed out", "code": 500}

    served.refuses = got_through
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)


async def test_a_leader_whose_lease_was_taken_away_does_not_lead_on(reached: tuple[Server, KubeApi]) -> None:
    """It is gone, and to make it anew fails, because another was faster: that one leads."""
    served, api = reached
    replica = Replica(api, "a_1", clock=lambda: 0.0)
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)
        exists = (409, {"reason": "AlreadyExists", "message": "already exists", "code": 409})
        served.refuses = lambda method: exists if method == "POST" else None
        served.lease = None
        await until(lambda: replica.changes == [True, False])
        assert not leadership.leads


async def test_a_process_that_was_stopped_does_not_lead_when_it_goes_on(
    reached: tuple[Server, KubeApi],
) -> None:
    served, api = reached
    clock = [0.0]
    replica = Replica(api, "a_1", clock=lambda: clock[0])
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)
        clock[0] += 10.0
        assert not leadership.leads, "before anything else has run"
        await until(lambda: replica.changes == [True, False, True])


async def test_a_lease_that_vanishes_is_made_by_its_holder(reached: tuple[Server, KubeApi]) -> None:
    """Others have seen who held it, and that may not have heard yet."""
    served, api = reached
    served.lease = held_by("b_2")
    clock = [0.0]
    replica = Replica(api, "a_1", clock=lambda: clock[0])
    async with replica.runs() as leadership:
        await until(lambda: leadership.holder == "b_2")
        served.lease = None
        calls = len(served.calls)
        await until(lambda: len(served.calls) > calls + 2)
        assert set(served.methods()) == {"GET"}
        clock[0] += 15.0
        await until(lambda: leadership.leads)
        served.lease = None
        await until(lambda: served.lease is not None)
        assert served.spec["holderIdentity"] == "a_1"
        assert replica.changes[0] is True


# -- what goes wrong --------------------------------------------------------------------------------


async def test_without_a_server_a_term_ends_by_itself(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    clock = [0.0]
    replica = Replica(api, "a_1", clock=lambda: clock[0])
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)
        served.refuses = lambda method: (503, {"message": "storage is initializing", "code": 503})
        await until(lambda: replica.said)
        clock[0] += 9.9
        assert leadership.leads
        clock[0] += 0.2
        await until(lambda: replica.changes == [True, False])
        assert not leadership.leads
        await until(lambda: len(replica.said) == 2)
        served.refuses = lambda method: None
        await until(lambda: leadership.leads)
        assert replica.changes == [True, False, True]
    assert served.spec["leaseTransitions"] == 0, "it was ours all the time"
    kept, lost, again = replica.said
    assert kept.startswith(f"lease models/{NAME}: PUT {LEASES}/{NAME}: 503 storage is initializing")
    assert kept.endswith("; this replica leads on until its term ends")
    assert lost.endswith("; this replica does not lead")
    assert again == f"lease models/{NAME}: works again"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_missing_role_is_said_once(reached: tuple[Server, KubeApi], method: str) -> None:
    served, api = reached
    served.refuses = lambda asked: FORBIDDEN if asked == method else None
    replica = Replica(api, "a_1")
    async with replica.runs() as leadership:
        await until(lambda: served.methods().count(method) >= 4)
        (said,) = replica.said
        assert "403 leases.coordination.k8s.io is forbidden" in said
        assert "a Role for this service account with get, create and update on leases" in said
        assert "does not lead" in said
        assert not leadership.leads
        served.refuses = lambda asked: None
        await until(lambda: leadership.leads)
        assert replica.said[1:] == [f"lease models/{NAME}: works again"]


async def test_tries_become_rare_where_leases_are_refused(
    reached: tuple[Server, KubeApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, api = reached
    served.refuses = lambda method: FORBIDDEN
    paused: list[float] = []
    sleep = asyncio.sleep

    async def pass_quickly(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr("epp.runtime.kube.lease.asyncio.sleep", pass_quickly)
    task = asyncio.create_task(Replica(api, "a_1", retry_s=2.0).leadership.run())
    async with asyncio.timeout(DEADLINE_S):
        while len(paused) < 6:
            await sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert paused[:6] == [4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


async def test_who_leads_tries_as_often_as_ever_where_renewals_are_refused(
    reached: tuple[Server, KubeApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right to it may be back before its term ends."""
    served, api = reached
    replica = Replica(api, "a_1", retry_s=2.0, clock=lambda: 0.0)
    paused: list[float] = []
    sleep = asyncio.sleep

    async def pass_quickly(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr("epp.runtime.kube.lease.asyncio.sleep", pass_quickly)
    task = asyncio.create_task(replica.leadership.run())
    async with asyncio.timeout(DEADLINE_S):
        while not replica.leadership.leads:
            await sleep(0.005)
        served.refuses = lambda method: FORBIDDEN if method == "PUT" else None
        while len(replica.said) < 1 or len(paused) < 12:
            await sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert set(paused) == {2.0}


async def test_a_missing_namespace_is_said(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    missing = (404, {"reason": "NotFound", "message": 'namespaces "models" not found', "code": 404})
    served.refuses = lambda method: missing if method == "POST" else None
    replica = Replica(api, "a_1")
    async with replica.runs():
        await until(lambda: replica.said)
    assert 'namespaces "models" not found; is there a namespace models' in replica.said[0]


@pytest.mark.parametrize(
    "answer", [b"<html>log in</html>", b"{}", b'{"metadata": {}, "spec": {"leaseTransitions": "x"}}']
)
async def test_an_answer_that_is_no_lease_is_no_term(reached: tuple[Server, KubeApi], answer: bytes) -> None:
    served, api = reached
    served.refuses = lambda method: (200, answer)
    replica = Replica(api, "a_1")
    async with replica.runs() as leadership:
        await until(lambda: len(served.calls) >= 3)
        assert not leadership.leads
        assert len(replica.said) == 1


async def test_a_record_without_figures_is_a_holder_all_the_same(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    clock = [0.0]
    served.lease = {**RELEASED, "spec": {"holderIdentity": "b_2", "leaseTransitions": None}}
    async with Replica(api, "a_1", clock=lambda: clock[0]).runs() as leadership:
        await until(lambda: len(served.calls) >= 3)
        assert not leadership.leads
        clock[0] += 15.0
        await until(lambda: leadership.leads)
        assert served.spec["leaseTransitions"] == 1


async def test_who_cannot_give_it_back_says_so_and_ends(reached: tuple[Server, KubeApi]) -> None:
    served, api = reached
    replica = Replica(api, "a_1")
    async with replica.runs() as leadership:
        await until(lambda: leadership.leads)
        gone = (500, {"message": "etcd is gone", "code": 500})
        served.refuses = lambda method: gone if method == "PUT" else None
    assert "not given back, so it stays taken for a while" in replica.said[-1]
    assert "500 etcd is gone" in replica.said[-1], "it does not try for as long as it may"


def test_times_that_do_not_fit_are_refused() -> None:
    api: Any = None
    with pytest.raises(ValueError, match=r"duration 10.0 > renew 10.0 > retry 2.0 > 0 does not hold"):
        Leadership(api, "models", NAME, "a_1", lambda leads: None, duration_s=10.0)


# -- names ------------------------------------------------------------------------------------------


def test_the_name_is_the_fields() -> None:
    assert lease_name("models", "pool") == NAME


def test_a_name_that_were_too_long_is_cut_and_stays_unique() -> None:
    namespace = "n" * 63
    fits = lease_name(namespace, "p" * 176)
    assert len(fits) == 253
    assert fits == f"epp-{namespace}-{'p' * 176}.llm-d.ai"
    pools = ["p" * 177, "p" * 178, "p" * 170 + "-" + "q" * 20, "p" * 170 + "." + "q" * 20]
    cut = [lease_name(namespace, pool) for pool in pools]
    assert len({*cut}) == len(pools)
    for name in cut:
        assert len(name) <= 253
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name)


def test_identities_differ_on_one_host() -> None:
    first, second = new_identity("pod-7"), new_identity("pod-7")
    assert first != second
    assert re.fullmatch(r"pod-7_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", first)
