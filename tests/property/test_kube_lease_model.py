"""Leaders over a simulated API server, in virtual time: never two at once, and not for long none.

Requests and answers take their time and get lost, the server goes away, processes are cut off or killed,
their clocks start and run differently. A request that its client has given up still arrives.
"""

import asyncio
import random
import re
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.runtime.kube.api import KubeError
from epp.runtime.kube.lease import Leadership, _Lease

DURATION_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0
START_S = 1_000.0
LATE_S = 1.0
"""More than clocks differ in what a call may take."""
RATES = 0.85, 1.15
"""Of clocks. The fastest runs less than 1.5 times as fast as the slowest."""


# -- time -------------------------------------------------------------------------------------------


class _Jumps(selectors.SelectSelector):
    """Waits for nothing but time, and that passes at once."""

    now = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left to happen"
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumps = _Jumps()
        super().__init__(self.jumps)

    def time(self) -> float:
        return self.jumps.now


@contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        loop.close()


# -- the API server ---------------------------------------------------------------------------------


class Server:
    """Keeps one lease, with versions."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    def serve(self, method: str, body: bytes | None) -> bytes | KubeError:
        match method, self.lease:
            case "GET", None:
                return KubeError(method, "lease", "not found", status=404)
            case "GET", lease:
                return msgspec.json.encode(lease)
            case "POST", None:
                return self._store(body)
            case "PUT", dict() as lease:
                asked = msgspec.json.decode(body or b"")["metadata"].get("resourceVersion")
                if asked is None or asked == lease["metadata"]["resourceVersion"]:
                    return self._store(body)
        return KubeError(method, "lease", "conflict", status=409)

    def _store(self, body: bytes | None) -> bytes:
        self.version += 1
        lease = msgspec.json.decode(body or b"")
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.lease = lease
        return msgspec.json.encode(lease)


@dataclass
class Wire:
    """How a process reaches the server."""

    server: Server
    draw: random.Random
    slowest_s: float
    lost: float = 0.0
    cut: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def get(self, path: str) -> bytes:
        return await self._call("GET", None)

    async def send(self, method: str, path: str, body: object) -> bytes:
        return await self._call(method, msgspec.json.encode(body))

    async def _call(self, method: str, body: bytes | None) -> bytes:
        answered: asyncio.Future[bytes | KubeError] = self.loop.create_future()
        self._later(lambda: self._arrives(method, body, answered))
        answer = await answered
        if isinstance(answer, KubeError):
            raise answer
        return answer

    def _arrives(self, method: str, body: bytes | None, answered: asyncio.Future[bytes | KubeError]) -> None:
        answer = self.server.serve(method, body)
        self._later(lambda: None if answered.done() else answered.set_result(answer))

    def _later(self, then: Callable[[], None]) -> None:
        if not self.cut and self.draw.random() >= self.lost:
            self.loop.call_later(self.draw.random() * self.slowest_s, then)


# -- processes --------------------------------------------------------------------------------------


@dataclass
class Process:
    leadership: Leadership
    wire: Wire
    task: asyncio.Task[None]


@dataclass
class Cluster:
    """Processes and what was seen of them: when each term began and ended.

    Attributes:
        two_at_once: when more than one led.
        late: when one had ceased to lead for long and had not told it.
    """

    kind: type[Leadership]
    draw: random.Random
    slowest_s: float
    lost: float
    server: Server = field(default_factory=Server)
    processes: dict[str, Process] = field(default_factory=dict)
    two_at_once: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    began: list[tuple[float, str]] = field(default_factory=list)
    ended: list[tuple[float, str]] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _over_since: dict[str, float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def start(self, name: str) -> None:
        offset_s, rate = self.draw.uniform(-1e6, 1e6), self.draw.uniform(*RATES)
        off_by_s = self.draw.uniform(0.0, 1e6)
        wire = Wire(self.server, self.draw, self.slowest_s, self.lost)
        leadership = self.kind(
            wire,  # type: ignore[arg-type]
            "models",
            "epp-models-pool.llm-d.ai",
            name,
            lambda leads: self._changed(name, leads),
            said=lambda text: None,
            duration_s=DURATION_S,
            renew_s=RENEW_S,
            retry_s=RETRY_S,
            clock=lambda: offset_s + rate * self.loop.time(),
            wall=lambda: off_by_s + self.loop.time(),
        )
        self.processes[name] = Process(leadership, wire, asyncio.create_task(leadership.run()))

    def _changed(self, name: str, leads: bool) -> None:
        now = self.loop.time() - START_S
        (self.began if leads else self.ended).append((now, name))
        (self._told.add if leads else self._told.discard)(name)
        self.watch()

    def watch(self) -> None:
        leading = self.leaders()
        if len(leading) > 1:
            self.two_at_once.append(f"{self.loop.time() - START_S:.2f} s: {leading}")
        over = self._told & self.processes.keys() - {*leading}
        self._over_since = {name: self._over_since.get(name, self.loop.time()) for name in over}
        if any(self.loop.time() - since > LATE_S for since in self._over_since.values()):
            self.late.append(f"{self.loop.time() - START_S:.2f} s: {self._over_since}")

    def leaders(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.leadership.leads]

    async def stop(self, name: str, *, killed: bool = False) -> None:
        """Killed: it is cut off first, so that nobody hears of its end."""
        process = self.processes.pop(name)
        process.wire.cut = killed
        process.task.cancel()
        await asyncio.gather(process.task, return_exceptions=True)

    async def pass_time(self, seconds: float) -> None:
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            self.watch()
            await asyncio.sleep(min(0.25, max(end - self.loop.time(), 1e-6)))


@dataclass(frozen=True)
class Step:
    after_s: float
    what: str
    which: int


WHATS = ["cut leader", "cut", "join", "join", "kill", "stop", "start", "start", "all cut", "all join"]

STEPS = st.lists(
    st.builds(
        Step,
        st.floats(0.0, 25.0),
        st.sampled_from(WHATS),
        st.integers(0, 2),
    ),
    max_size=12,
)


async def take(cluster: Cluster, step: Step, fresh: Iterator[str]) -> None:
    running = list(cluster.processes)
    name = running[step.which % len(running)] if running else ""
    match step.what:
        case "start" if len(running) < 3:
            cluster.start(next(fresh))
        case "kill" | "stop" if name:
            await cluster.stop(name, killed=step.what == "kill")
        case "cut leader":
            for leader in cluster.leaders():
                cluster.processes[leader].wire.cut = True
        case "cut" | "join" if name:
            cluster.processes[name].wire.cut = step.what == "cut"
        case "all cut" | "all join":
            for process in cluster.processes.values():
                process.wire.cut = step.what == "all cut"


def two_at_once(
    kind: type[Leadership], steps: list[Step], seed: int, slowest_s: float, lost: float, first: int = 2
) -> list[str]:
    """When more than one led, and who; and who told late that it does not."""

    async def play() -> list[str]:
        cluster = Cluster(kind, random.Random(seed), slowest_s, lost)
        fresh = (f"p{number}" for number in range(1_000))
        for _ in range(first):
            cluster.start(next(fresh))
        for step in steps:
            await cluster.pass_time(step.after_s)
            await take(cluster, step, fresh)
        await cluster.pass_time(20.0)
        for name in list(cluster.processes):
            await cluster.stop(name)
        return cluster.two_at_once + cluster.late

    with virtual_loop() as loop:
        return loop.run_until_complete(play())


@settings(max_examples=40)
@given(
    STEPS, st.integers(0, 2**32), st.sampled_from([0.01, 0.3, 2.0, 12.0]), st.sampled_from([0.0, 0.1, 0.4])
)
def test_never_two_lead_at_once(steps: list[Step], seed: int, slowest_s: float, lost: float) -> None:
    assert two_at_once(Leadership, steps, seed, slowest_s, lost) == []


# -- faults -----------------------------------------------------------------------------------------


class NeverStops(Leadership):
    """Leads until it hears that another does."""

    @property
    def leads(self) -> bool:
        return self._leads_until > -float("inf")

    async def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        async with asyncio.timeout(RENEW_S / 2):
            return await (self._api.get(path) if body is None else self._api.send(method, path, body))


class BelievesWallClocks(Leadership):
    """Takes the time in the record for its own."""

    async def _look(self) -> None:
        await super()._look()
        spec = None if self._lease is None else self._lease.spec
        if spec and self.holder not in ("", self.identity):
            late = self._now() > (spec.renew_time or "")
            self._free_at = -float("inf") if late else self._free_at


class WritesWithoutVersion(Leadership):
    """The last to write wins."""

    async def _ask(self, method: str, path: str, body: _Lease | None = None) -> bytes:
        if method == "PUT" and body is not None:
            versionless = re.sub(rb'"resourceVersion":"\d+",?', b"", bytes(body.metadata)).replace(
                b",}", b"}"
            )
            body = msgspec.structs.replace(body, metadata=msgspec.Raw(versionless))
        return await super()._ask(method, path, body)


class CountsFromTheFirstSight(Leadership):
    """Does not see that the holder is renewing."""

    async def _look(self) -> None:
        holder, free_at = self.holder, self._free_at
        await super()._look()
        if holder and holder == self.holder != self.identity:
            self._free_at = free_at


class CountsFromTheAnswer(Leadership):
    """Leads for as long as others wait, and from when it hears that it may."""

    async def _claim(self) -> None:
        await super()._claim()
        self._leads_until = self._clock() + DURATION_S


class WaitsBeyondItsTerm(Leadership):
    """Tells that its term is over when a call that began within it has ended."""

    async def _ask(self, method: str, path: str, body: _Lease | None = None) -> bytes:
        async with asyncio.timeout(RENEW_S / 2):
            return await (self._api.get(path) if body is None else self._api.send(method, path, body))


class SleepsThroughItsEnd(Leadership):
    """Looks whether its term is over when it tries again."""

    async def _turn(self) -> float:
        await super()._turn()
        return RETRY_S


FAULTS = [
    *(NeverStops, BelievesWallClocks, WritesWithoutVersion, CountsFromTheFirstSight, CountsFromTheAnswer),
    *(WaitsBeyondItsTerm, SleepsThroughItsEnd),
]


def hard_times(kind: type[Leadership]) -> Iterator[list[str]]:
    """What was seen wrong in each of some histories with much trouble."""
    draw = random.Random(7)
    whats = ["cut leader", "cut leader", "join", "join", "kill", "start", "start"]
    for seed in range(40):
        steps = [Step(draw.uniform(0.0, 25.0), draw.choice(whats), draw.randrange(3)) for _ in range(12)]
        yield two_at_once(kind, steps, seed, draw.choice([0.3, 2.0, 4.5]), 0.05, first=3)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: type[Leadership]) -> None:
    assert any(hard_times(fault)), f"nobody noticed that {fault.__doc__}"


def test_never_two_lead_in_hard_times() -> None:
    assert not any(hard_times(Leadership))


# -- not for long none ------------------------------------------------------------------------------

CALLS = 4
"""Requests on the way: the last renewal, a look at it, a look at its end, the write."""


@dataclass(frozen=True)
class Gap:
    """From a leader's end to the next one's beginning."""

    of: str
    seconds: float


def gap(kind: type[Leadership], seed: int, slowest_s: float, killed: bool) -> Gap:
    async def play() -> Gap:
        cluster = Cluster(kind, random.Random(seed), slowest_s, 0.0)
        for number in range(3):
            cluster.start(f"p{number}")
        await cluster.pass_time(cluster.draw.uniform(20.0, 40.0))
        (leader,) = cluster.leaders()
        at = cluster.loop.time() - START_S
        await cluster.stop(leader, killed=killed)
        await cluster.pass_time(60.0)
        began = [(when, name) for when, name in cluster.began if when >= at]
        for name in list(cluster.processes):
            await cluster.stop(name)
        assert cluster.two_at_once == []
        return Gap(leader, began[0][0] - at if began else float("inf"))

    with virtual_loop() as loop:
        return loop.run_until_complete(play())


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.2, 0.5]))
def test_a_leader_that_dies_is_replaced_within_duration_and_retry(seed: int, slowest_s: float) -> None:
    within_s = (DURATION_S + RETRY_S) / RATES[0] + CALLS * 2 * slowest_s
    assert gap(Leadership, seed, slowest_s, killed=True).seconds <= within_s


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.2, 0.5]))
def test_a_released_lease_is_taken_within_retry(seed: int, slowest_s: float) -> None:
    within_s = RETRY_S / RATES[0] + CALLS * 2 * slowest_s
    assert gap(Leadership, seed, slowest_s, killed=False).seconds <= within_s


class NeverTakesOver(Leadership):
    """Waits for the holder to say that it is gone."""

    async def _look(self) -> None:
        await super()._look()
        if self.holder not in ("", self.identity):
            self._free_at = float("inf")


class KeepsItOnLeaving(Leadership):
    """Goes without a word."""

    async def _released(self) -> bool:
        return True


class WaitsForReleased(Leadership):
    """Treats a record without a holder like any other that changed."""

    async def _look(self) -> None:
        before = self._lease
        await super()._look()
        if (
            self._lease is not None
            and not self.holder
            and (before is None or before.spec != self._lease.spec)
        ):
            self._free_at = self._clock() + DURATION_S


@pytest.mark.parametrize(
    ("fault", "killed", "within_s"),
    [
        (NeverTakesOver, True, DURATION_S + RETRY_S),
        (KeepsItOnLeaving, False, RETRY_S),
        (WaitsForReleased, False, RETRY_S),
    ],
)
def test_faults_that_leave_nobody_leading_are_caught(
    fault: type[Leadership], killed: bool, within_s: float
) -> None:
    gaps = [gap(fault, seed, 0.01, killed).seconds for seed in range(3)]
    assert max(gaps) > within_s / RATES[0] + CALLS * 2 * 0.01
