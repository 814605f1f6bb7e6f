"""A picker with a test's own configuration, and in front of it an Envoy that never answers by itself."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from e2e.backends import PAGE, Backend, Seen
from e2e.pages import FLAGS, complaints, has_ready, settled, until
from epp import names
from epp.lab.envoy import Address, EnvoyProcess, envoy_config
from epp.lab.stack import HEALTH_TIMEOUT_S, HOST, Picker, free_ports

WAITING = 50.0
_QUEUE = b'num_requests_waiting{engine="0",model_name="m"} %.1f'
FULL = PAGE.replace(_QUEUE % 0.0, _QUEUE % WAITING)
"""The page of an engine at which WAITING requests wait."""
_COUNTED_S = 60.0
_Refused = TypeVar("_Refused", bound=Exception)


@dataclass(frozen=True, slots=True)
class Configured:
    """`url`: of Envoy."""

    url: str
    picker: Picker
    engines: Sequence[Backend]

    async def samples(self, *wanted: str) -> list[Sample]:
        """Samples of these names without prefix. Most of the page is of others and is not read."""
        starts = tuple(f"{names.METRIC_PREFIX}{name}{end}" for name in wanted for end in "{ ")
        page = await self.picker.metrics()
        lines = [line for line in page.splitlines(keepends=True) if line.startswith(starts)]
        families = text_string_to_metric_families("".join(lines))
        return [sample for family in families for sample in family.samples]

    async def sums(self, *histograms: str, **labels: str) -> tuple[float, ...]:
        """The sum of each histogram, over all samples that have these labels."""
        found = dict.fromkeys((f"{name}_sum" for name in histograms), 0.0)
        for sample in await self.samples(*found):
            if labels.items() <= sample.labels.items():
                found[sample.name.removeprefix(names.METRIC_PREFIX)] += sample.value
        return tuple(found.values())

    async def _nothing_is_open(self) -> bool:
        (open_,) = await self.samples("extproc_streams_inflight")
        return open_.value == 0

    async def queues(self) -> list[float]:
        """Waiting requests of each engine as far as the picker knows, in their order."""
        found = {
            sample.labels["model_server_endpoint"]: sample.value
            for sample in await self.samples("per_endpoint_queue_size")
        }
        return [found[name] for name in sorted(found)]

    @asynccontextmanager
    async def counting(
        self, expected: tuple[float, ...], *histograms: str, **labels: str
    ) -> AsyncIterator[None]:
        """What happens inside adds so much to the sums. Waits: an answer is counted after its end, and so may
        be one that a client had before.
        """
        await until(self._nothing_is_open, "nothing is left to be counted")
        before = await self.sums(*histograms, **labels)
        yield
        due = tuple(map(sum, zip(before, expected, strict=True)))
        deadline = asyncio.get_running_loop().time() + _COUNTED_S
        while (now := await self.sums(*histograms, **labels)) != due:
            assert asyncio.get_running_loop().time() < deadline, f"{histograms} {labels}: {now}, not {due}"
            await asyncio.sleep(0.02)

    def seen(self) -> Seen:
        """The one request that reached an engine since the last call."""
        (only,) = [seen for engine in self.engines for seen in engine.seen]
        self.forget()
        return only

    def unasked(self) -> None:
        """No request reached an engine since the last call."""
        assert [seen for engine in self.engines for seen in engine.seen] == []

    def forget(self) -> None:
        """Nothing was seen by any engine."""
        for engine in self.engines:
            engine.seen.clear()


_LISTENER = "          stat_prefix: gateway\n"
UNHURRIED = {_LISTENER: _LISTENER + "          delayed_close_timeout: 60s\n"}
"""Edits for an Envoy that gives clients more than its second to read an answer that came before the end of
their request: then it closes, and what they have not read is lost.
"""
APIS = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: prefix-cache-scorer
- type: max-score-picker
- type: openai-parser
- type: anthropic-parser
- type: vllmhttp-parser
- type: sglanghttp-parser
- name: endpoints
  type: file-discovery
  parameters: {path: %s, watchFile: true}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer}
  - {pluginRef: prefix-cache-scorer}
  - {pluginRef: max-score-picker}
requestHandler:
  parsers:
  - {pluginRef: openai-parser}
  - {pluginRef: anthropic-parser}
  - {pluginRef: vllmhttp-parser}
  - {pluginRef: sglanghttp-parser}
objectives:
- {name: batch, priority: -1}
- {name: chatty, priority: 1}
modelRewrites:
- name: fleet
  rules:
  - matches: [{model: {value: our-model}}]
    targets: [{modelRewrite: acme/tiny-llama}]
dataLayer:
  discovery: {pluginRef: endpoints}
"""
"""Every parser of HTTP but the one that takes any path; clients call the engines' model `our-model`."""
CLIENT_MODEL = "our-model"


@asynccontextmanager
async def behind_envoy(
    picker: Picker, engines: Sequence[Address], envoy: Path, edits: Mapping[str, str] | None = None
) -> AsyncIterator[int]:
    """The picker, and an Envoy that asks it and never answers by itself; its port.

    `edits` are made to its configuration. At the end nothing may be in flight, and the picker's log may tell
    of no fault in it.
    """
    listen, admin = free_ports(2)
    proxy = envoy_config(
        listen_port=listen,
        admin_port=admin,
        pickers=[picker.address],
        endpoints=engines,
        fail_open=False,
        health_timeout_s=HEALTH_TIMEOUT_S,
    )
    for old, new in (edits or {}).items():
        proxy = proxy.replace(old, new)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(picker.child.stop, signal.SIGKILL)
        await picker.start()
        await stack.enter_async_context(EnvoyProcess(envoy, proxy, admin_port=admin))
        yield listen
        await settled(picker)
        assert complaints(picker) == []


@asynccontextmanager
async def configured(
    config: str, engines: Sequence[Backend], folder: Path, envoy: Path, *flags: str
) -> AsyncIterator[Configured]:
    """`config`: has `%s` where the path of the file with the endpoints belongs. See `behind_envoy`."""
    addresses = [engine.address for engine in engines]
    file = config % (folder / "picker-endpoints.yaml")
    picker = Picker(folder, addresses, config=file, flags=(*FLAGS, *flags))
    async with behind_envoy(picker, addresses, envoy) as port:
        yield Configured(f"http://{HOST}:{port}", picker, engines)


async def shed(
    gateway: Configured, ask: Callable[[str], Awaitable[object]], refused: type[_Refused]
) -> _Refused:
    """The pool gets full and `ask(objective)` is refused for a batch, while others pass; then it empties."""
    for engine in gateway.engines:
        engine.page = FULL
    try:
        async with asyncio.timeout(_COUNTED_S):
            while True:
                try:
                    await ask("batch")
                except refused as error:
                    caught = error
                    break
        await ask("chatty")
        await ask("")
    finally:
        for engine in gateway.engines:
            engine.page = PAGE
    async with asyncio.timeout(_COUNTED_S):
        while True:
            with suppress(refused):
                await ask("batch")
                return caught


@asynccontextmanager
async def emptied(gateway: Configured) -> AsyncIterator[None]:
    """The pool has no endpoint inside."""
    gateway.picker.write_endpoints([])
    await until(lambda: has_ready(gateway.picker, 0), "the pool is empty")
    try:
        yield
    finally:
        gateway.picker.write_endpoints([engine.address for engine in gateway.engines])
        await until(lambda: has_ready(gateway.picker, len(gateway.engines)), "the endpoints are back")
