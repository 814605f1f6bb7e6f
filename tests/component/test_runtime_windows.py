"""Requests held until their window is over, in a real picker over its socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from epp import names
from epp.config.load import load_config
from epp.kvcache import burst
from epp.kvcache.burst import BurstNeed, BurstPlace, BurstPrefixProducer, BurstWindow, Held
from epp.runtime import windows as windows_module
from epp.runtime.app import App
from epp.runtime.options import TRANSPORTS
from epp.runtime.router import Router
from epp.runtime.turns import SLICE_S
from epp.runtime.windows import Windows
from epp.scheduling.records import FactKey
from epp.wire import ext_proc_pb2 as pb
from tests.data.extproc import over_wire as wire
from tests.data.runtime import picker as runtime

BOTH = pytest.mark.parametrize("transport", TRANSPORTS)
KIND = "burst-prefix-cache-producer"
MARGIN_S = burst.MARGIN_S


def config(parameters: str = "", more: str = "") -> str:
    return f"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: {KIND}
  parameters: {{windowDurationMs: 250, {parameters}}}
- type: prefix-cache-scorer
  parameters: {{prefixMatchInfoProducerName: {KIND}}}
- type: max-score-picker
{more}
"""


class Timers:
    """The timers of windows, which run out when they are told to; nobody gives up before."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.set.append((seconds, call))

    def run_out(self) -> None:
        """The oldest."""
        self.set.pop(0)[1]()


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    made = Timers()
    monkeypatch.setattr(windows_module, "_later", made.later)
    monkeypatch.setattr(burst, "MARGIN_S", 60.0)
    return made


class Client:
    """One stream over the socket."""

    def __init__(self, channel: Any, text: str, path: str = "/v1/chat/completions") -> None:
        self.call = wire.process(channel)
        self.text = text
        self.path = path

    async def send(self) -> "Client":
        for message in (runtime.request_headers(self.path), *runtime.request_body(runtime.chat(self.text))):
            await self.call.write(message)
        return self

    async def pod(self) -> str:
        """Where it goes."""
        message = await wire.read(self.call)
        assert message is not None
        answer = pb.ProcessingResponse.FromString(message)
        headers = answer.request_headers.response.header_mutation.set_headers
        (found,) = [
            option.header.raw_value.decode()
            for option in headers
            if option.header.key == names.DESTINATION_ENDPOINT.encode()
        ]
        return found


class Line:
    """A picker that listens."""

    def __init__(self, app: App, channel: Any) -> None:
        self.app = app
        self.channel = channel

    @property
    def windows(self) -> Windows:
        performs: Any = self.app.router._perform
        assert isinstance(performs, Windows)
        return performs

    @property
    def waiting(self) -> int:
        return sum(len(window.held) for window in self.windows.open)

    async def send(self, *texts: str) -> list[Client]:
        """All of them wait in the window."""
        before = self.waiting
        clients = [await Client(self.channel, text).send() for text in texts]
        await wire.until(lambda: self.waiting == before + len(texts), "they wait")
        return clients


@asynccontextmanager
async def picking(
    transport: str = TRANSPORTS[0], parameters: str = "", more: str = ""
) -> AsyncIterator[Line]:
    app = runtime.picker(endpoints=8, config=config(parameters, more), transport=transport, seed=3)
    try:
        async with wire.listening(app.transport(None)) as channel:
            yield Line(app, channel)
    finally:
        app.router.close()
        await app.renders.close()
    assert app.ledger.overdrafts == 0


def failures(app: App, **labels: str) -> float:
    return runtime.sample(app, "request_needs_failed_total", need="BurstNeed", **labels)


@BOTH
async def test_requests_of_one_prefix_go_together(transport: str, timers: Timers) -> None:
    """And the two groups apart; each of their requests alone would go anywhere."""
    async with picking(transport) as line:
        clients = await line.send("one", "two", "one", "two", "one")
        assert [seconds for seconds, _ in timers.set] == [0.25]
        assert line.app.director.in_flight == 0
        timers.run_out()
        pods = [await client.pod() for client in clients]
        assert pods[0] == pods[2] == pods[4] != pods[1] == pods[3]
        assert line.windows.open == {}
        assert line.app.director.in_flight == 5
        assert runtime.sample(line.app, "prefix_indexer_hit_ratio_count") == 0, "no cache was looked at"
        assert failures(line.app) == 0


async def test_the_next_window_is_another(timers: Timers) -> None:
    """In each the first of equals is taken; what went there before is no matter of the batch."""
    async with picking() as line:
        for _ in range(2):
            clients = await line.send("one", "one")
            timers.run_out()
            assert [await client.pod() for client in clients] == ["10.0.0.1:8000"] * 2
        assert timers.set == []


@BOTH
async def test_a_lone_request_waits_no_longer_than_its_window(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "MARGIN_S", 15.0)
    async with picking(transport) as line:
        (client,) = await line.send("alone")
        assert await client.pod()
        assert line.windows.open == {}
        assert failures(line.app) == 0, "nobody gave up on it"


@BOTH
async def test_a_client_that_goes_leaves_the_window(transport: str, timers: Timers) -> None:
    async with picking(transport, "maxBatchSize: 2") as line:
        gone, stays = await line.send("one", "one")
        gone.call.cancel()
        await wire.until(lambda: line.waiting == 1, "one has left")
        (late,) = await line.send("other")
        timers.run_out()
        assert await stays.pod()
        assert await late.pod()
        decisions = {decision.matches[0][1].blocks.any() for decision in line.app.recorder.decisions}
        assert decisions == {False}, "nobody has anything in common with one that is gone"
        await wire.until(lambda: line.app.director.in_flight == 2, "of the third nothing is left")
        assert line.app.router._needs == {}
        assert failures(line.app) == 0


@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize("turns", range(8))
async def test_a_client_that_goes_before_it_is_held_comes_into_no_window(
    turns: int, size: int, timers: Timers
) -> None:
    app = runtime.picker(config=config())
    stream = app.stream(lambda: None)
    for message in (runtime.request_headers(), *runtime.request_body(runtime.chat("x" * size))):
        stream.received(message)
    for _ in range(turns):
        await asyncio.sleep(0)
    stream.closed()
    for _ in range(20):
        await asyncio.sleep(0)
    windows: Any = app.router._perform
    assert [window.held for window in windows.open] == [{}] * len(windows.open)
    assert len(windows.open) == len(timers.set) <= (turns > 1)
    if timers.set:
        timers.run_out()
    await wire.until(lambda: not (app.router._tasks or app.router._gone), "it goes on, and is let go of")
    assert app.router._needs == {}
    assert not any(runtime.left_over(app).values())


async def test_a_full_window_is_not_waited_for(timers: Timers, caplog: pytest.LogCaptureFixture) -> None:
    async with picking(parameters="maxBatchSize: 2") as line:
        waiting = await line.send("one", "one")
        late = [await Client(line.channel, "one").send() for _ in range(2)]
        for client in late:
            assert await client.pod()
        assert failures(line.app, reason="full") == failures(line.app) == 2
        timers.run_out()
        pods = [await client.pod() for client in waiting]
        assert pods[0] == pods[1]
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.error for record in said if hasattr(record, "error")] == [
        "burst prefix batch full: maxBatchSize 2 reached"
    ]


async def test_at_its_deadline_a_request_goes_on_without(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is late: the window is not over, 300 ms after its end."""

    monkeypatch.setattr(burst, "MARGIN_S", MARGIN_S)

    async def at_once(tasks: Any, timeout: float) -> Any:  # noqa: ASYNC109
        assert timeout == pytest.approx(0.55)
        await wire.until(lambda: line.waiting == 1, "it waits")

    async with picking() as line:
        monkeypatch.setattr("epp.runtime.needs.asyncio.wait", at_once)
        client = await Client(line.channel, "one").send()
        assert await client.pod()
        assert failures(line.app, reason="late") == failures(line.app) == 1
        await wire.until(lambda: line.waiting == 0, "it has left")
        assert len(line.windows.open) == 1
        timers.run_out()
        assert line.windows.open == {}


async def test_a_request_without_a_prompt_is_not_held(timers: Timers) -> None:
    async with picking() as line:
        call = wire.process(line.channel)
        await call.write(runtime.request_headers("/v1/models", end=True))
        assert await wire.read(call)
        assert timers.set == []


async def test_a_window_of_an_earlier_configuration_ends_as_it_began(timers: Timers) -> None:
    async with picking() as line:
        early = await line.send("one", "one")
        line.app.use(load_config(config("blockSizeTokens: 128"), "config.yaml"))
        late = await line.send("one", "one")
        assert len(line.windows.open) == 2
        timers.run_out()
        assert len({await client.pod() for client in early}) == 1
        assert line.waiting == 2
        timers.run_out()
        assert len({await client.pod() for client in late}) == 1


async def test_what_waits_is_given_up_at_the_end(timers: Timers) -> None:
    async with picking() as line:
        await line.send("one", "one")
        line.app.router.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not line.app.router._tasks, "given up, not late"
        assert line.waiting == 0
        timers.run_out()


async def test_exact_tokens_come_first(timers: Timers) -> None:
    """Two texts that are one prompt to the tokenizer: its tokens are what is grouped."""

    async def rendered(request: web.Request) -> web.StreamResponse:
        return web.json_response({"token_ids": list(range(100)), "model": "m"})

    app = web.Application()
    app.router.add_post("/{path:.*}", rendered)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    vllm = f"vllm: {{url: 'http://127.0.0.1:{runner.addresses[0][1]}', timeout: 20s}}"
    try:
        async with picking(more=f"- type: token-producer\n  parameters: {{modelName: m, {vllm}}}") as line:
            clients = await line.send("this", "that")
            timers.run_out()
            assert len({await client.pod() for client in clients}) == 1
            assert line.app.ledger.total_prefill_tokens == 100, "computed once"
    finally:
        await runner.cleanup()


# -- in steps -----------------------------------------------------------------------------------------


class Steps:
    """A window of many requests, whose producer takes its time over each."""

    def __init__(self, requests: int, cost_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.cost_s = cost_s
        self.window = BurstWindow(0.1)
        self.held = [Held(([1],), None, BurstPlace(1, 64)) for _ in range(requests)]
        self.breaks_at: int | None = None
        monkeypatch.setattr(windows_module.time, "monotonic", lambda: self.now)

    def enter(self, held: Held) -> tuple[BurstWindow, bool]:
        self.window.held[held] = None
        held.window = self.window
        return self.window, len(self.window.held) == 1

    def settle(self, window: BurstWindow) -> Iterator[Held]:
        batch, window.held = list(window.held), {}
        for number, held in enumerate(batch):
            if number == self.breaks_at:
                raise RuntimeError("broken")
            self.now += self.cost_s
            held.place = held.place._replace(ahead=1)
            yield held

    async def woken(self, timers: Timers) -> list[int]:
        """How many go on in each turn of the loop."""
        windows = Windows(never_asked)
        needs: Any = [BurstNeed(self, held, FactKey("place", KIND), 1.0) for held in self.held]  # type: ignore[arg-type]
        tasks = [asyncio.create_task(windows(need)) for need in needs]
        await asyncio.sleep(0)
        timers.run_out()
        turns: list[int] = []
        async with asyncio.timeout(60):
            while not all(task.done() for task in tasks):
                before = sum(task.done() for task in tasks)
                await asyncio.sleep(0)
                turns.append(sum(task.done() for task in tasks) - before)
        assert windows.open == {}
        assert windows._waiting == {}
        return [count for count in turns if count]


async def never_asked(need: Any) -> bytes:
    raise AssertionError


async def check_few_at_a_time(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(40, 0.0, monkeypatch)
    assert await steps.woken(timers) == [16, 16, 8]
    assert {held.place.ahead for held in steps.held} == {1}
    slow = Steps(6, 0.4 * SLICE_S, monkeypatch)
    assert await slow.woken(timers) == [3, 3], "until the slice is used up"


async def test_a_window_goes_on_in_turns(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_few_at_a_time(timers, monkeypatch)


async def test_if_a_fault_ends_it_all_go_on_without_a_place(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(20, 0.0, monkeypatch)
    steps.breaks_at = 18
    assert await steps.woken(timers) == [16, 4]
    assert [held.place.ahead for held in steps.held] == [1] * 18 + [0] * 2
    assert "could not be assigned" in caplog.text


def all_at_once(self: Windows, settled: Iterator[Held], came: list[Held]) -> None:
    for held in settled:
        self._wake(held)


def counts_nothing(self: Windows, settled: Iterator[Held], came: list[Held]) -> None:
    until = windows_module.time.monotonic() + SLICE_S
    for held in settled:
        self._wake(held)
        if windows_module.time.monotonic() >= until:
            asyncio.get_running_loop().call_later(0, lambda: counts_nothing(self, settled, came))
            return


def looks_at_no_clock(self: Windows, settled: Iterator[Held], came: list[Held]) -> None:
    for woken, held in enumerate(settled, 1):
        self._wake(held)
        if woken == windows_module.WOKEN_AT_ONCE:
            asyncio.get_running_loop().call_later(0, lambda: looks_at_no_clock(self, settled, came))
            return


@pytest.mark.parametrize("fault", [all_at_once, counts_nothing, looks_at_no_clock])
async def test_steps_that_are_too_long_are_noticed(
    fault: Any, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Windows, "_go_on", fault)
    with pytest.raises(AssertionError):
        await check_few_at_a_time(timers, monkeypatch)


# -- planted faults -----------------------------------------------------------------------------------


def never_over(self: Windows, producer: BurstPrefixProducer, window: BurstWindow) -> None:
    for held in self.open.pop(window):
        self._wake(held)


async def waits_for_nobody(self: Windows, need: BurstNeed) -> Any:
    window, _ = need.producer.enter(need.held)
    list(need.producer.settle(window))
    return need.held.place


def stays(self: Router, raw: Any) -> None:
    return None


def leaves_what_it_is_in(self: Router, raw: Any) -> None:
    """And comes into the next."""
    for need in self._needs.get(id(raw), ()):
        if isinstance(need, BurstNeed):
            need.held.leave()


async def enters_all_the_same(self: Router, raw: Any, need: BurstNeed) -> Any:
    return await self._perform(need)


def never_forgets(self: Router, raw: Any, deliver: Any, work: Any) -> None:
    outcome = work()
    if outcome is not None:
        deliver(outcome)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("gone", leaves_what_it_is_in), ("_fulfil", enters_all_the_same), ("_tell", never_forgets)],
)
async def test_planted_faults_with_those_who_are_gone_are_caught(
    name: str, fault: Any, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "DEADLINE_S", 0.3)
    monkeypatch.setattr(Router, name, fault)
    with pytest.raises((AssertionError, TimeoutError)):
        await test_a_client_that_goes_before_it_is_held_comes_into_no_window(0, 10, timers)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "check"),
    [
        (Windows, "_over", never_over, test_requests_of_one_prefix_go_together),
        (Windows, "_wait", waits_for_nobody, test_requests_of_one_prefix_go_together),
        (Router, "gone", stays, test_a_client_that_goes_leaves_the_window),
    ],
)
async def test_planted_faults_are_caught(
    owner: Any, name: str, fault: Any, check: Any, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "DEADLINE_S", 0.3)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, TimeoutError)):
        await check(TRANSPORTS[0], timers)
