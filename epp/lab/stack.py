"""Lab engines, pickers and an Envoy as child processes on loopback: for demos and end-to-end tests."""

import asyncio
import json
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbelow
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from epp.errors import WarmrouteError
from epp.lab.envoy import Address, BodyModes, EnvoyProcess, PickerAddress, envoy_config
from epp.lab.servers import FleetStats
from epp.lab.workload import Fleet

HOST = "127.0.0.1"
_POLL_S = 0.05
_YIELD = 10
_READY_S = 60.0
"""Until a child is up: a busy machine takes long to load it."""
_ENGINES_END_S = 30.0
HEALTH_TIMEOUT_S = 10.0
"""A picker that shares its machine with everything else is not lost because it stands still for a second."""


class StackError(WarmrouteError):
    """A child process did not come up; the message ends with its last output."""


class Ports:
    """Hands out ports nobody listens on, from its own range and none twice before all have had their turn.

    Not from the range that the system gives to connections: until a child has opened its port, any
    connection on this machine could get one of those.
    """

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self._next = randbelow(len(numbers))

    def take(self, count: int) -> list[int]:
        """So many, all different."""
        found: list[int] = []
        while len(found) < count:
            port = self.numbers[self._next]
            self._next = (self._next + 1) % len(self.numbers)
            with socket.socket() as probe, suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
                found.append(port)
        return found


PORTS = Ports(range(20_000, 32_000))
"""The one of this process: two would give out the same port before a child has opened it."""


def free_ports(count: int) -> list[int]:
    """Ports for children of this process."""
    return PORTS.take(count)


class Child:
    """One child process with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.command = command
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, number: signal.Signals = signal.SIGTERM, grace_s: float = 5.0) -> None:
        """Ends it, by force after `grace_s`."""
        if self._process is None or self._process.returncode is not None:
            return
        self.send(number)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self._process.kill()
            await self.wait()

    def log_end(self, lines: int = 15) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def failed(self, what: str) -> StackError:
        return StackError(f"{self.name} {what}; its last output:\n{self.log_end()}")


class _Whole(ABC):
    """Started whole or not at all, and ended in the reverse order: `async with`.

    Attributes:
        _exit: takes what `_start` has started; empty before.
    """

    _exit: AsyncExitStack

    async def __aenter__(self) -> Self:
        self._exit = AsyncExitStack()
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    @abstractmethod
    async def _start(self) -> None: ...


class LabEngines(_Whole):
    """The engines of a fleet in one child process."""

    def __init__(self, fleet: Fleet, model: str, folder: Path) -> None:
        self._ready = folder / "engines.json"
        # Nobody else gets the port of an engine that is down for a while.
        admin_port, *ports = free_ports(1 + fleet.engines)
        self.child = Child(
            "the lab's engines",
            [
                *(sys.executable, "-m", "epp.lab.servers"),
                *(word for port in ports for word in ("--port", str(port))),
                *("--admin-port", str(admin_port)),
                *("--model", model, "--fit", fleet.fit, "--speedup", str(fleet.speed_up)),
                *("--num-blocks", str(fleet.num_blocks), "--block-size", str(fleet.block_size)),
                *("--max-num-seqs", str(fleet.max_num_seqs)),
                *("--max-num-batched-tokens", str(fleet.max_num_batched_tokens)),
                *("--max-model-len", str(fleet.max_model_len), "--ready-file", str(self._ready)),
            ],
            folder / "engines.log",
        )
        self.ports: list[int] = []
        self.admin_url = ""

    async def _start(self) -> None:
        self._exit.push_async_callback(self.child.stop, grace_s=_ENGINES_END_S)
        await self.child.start()
        deadline = asyncio.get_running_loop().time() + _READY_S
        while not self._ready.exists() or not self._ready.read_text().endswith("\n"):
            if self.child.returncode is not None or asyncio.get_running_loop().time() > deadline:
                raise self.child.failed("did not come up")
            await asyncio.sleep(_POLL_S)
        ready = json.loads(self._ready.read_text())
        self.ports = ready["ports"]
        self.admin_url = f"http://{HOST}:{ready['admin_port']}"

    @property
    def addresses(self) -> list[Address]:
        return [(HOST, port) for port in self.ports]

    async def stats(self) -> FleetStats:
        return msgspec.json.decode(await self._ask("GET", "/lab/stats"), type=FleetStats)

    async def reset(self) -> None:
        """Every engine as new."""
        await self._ask("POST", "/lab/reset")

    async def kill(self, port: int) -> None:
        """As a killed process: connections reset, port closed, cache lost."""
        await self._ask("POST", f"/lab/stop?port={port}")

    async def revive(self, port: int) -> None:
        await self._ask("POST", f"/lab/start?port={port}")

    async def _ask(self, method: str, path: str) -> bytes:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.admin_url + path) as answer,
        ):
            body = await answer.read()
            if answer.status != 200:
                raise StackError(f"{path} answered {answer.status}: {body.decode(errors='replace')}")
            return body


class Picker:
    """`warmroute serve` in a child process, with its endpoints in a watched file."""

    def __init__(
        self,
        folder: Path,
        endpoints: Sequence[Address],
        *,
        name: str = "picker",
        tls: bool = False,
        config: str | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.grpc_port, self.health_port, self.metrics_port, self.admin_port = free_ports(4)
        self.endpoints_file = folder / f"{name}-endpoints.yaml"
        self.config_file = folder / f"{name}-config.yaml"
        self.write_endpoints(endpoints)
        self.config_file.write_text(config or default_config(self.endpoints_file))
        self.child = Child(
            "the picker",
            [
                *(sys.executable, "-m", "epp.cli", "serve", "--config-file", str(self.config_file)),
                *("--grpc-host", HOST, "--grpc-port", str(self.grpc_port)),
                *("--grpc-health-port", str(self.health_port), "--metrics-port", str(self.metrics_port)),
                *("--admin-port", str(self.admin_port), "--pool-name", "lab"),
                *(f"--secure-serving={str(tls).lower()}", "--metrics-endpoint-auth=false"),
                *flags,
            ],
            folder / f"{name}.log",
        )

    def write_endpoints(self, endpoints: Sequence[Address]) -> None:
        """Replace the watched file at once, as a ConfigMap update does."""
        lines = ["endpoints:"] if endpoints else ["endpoints: []"]
        for index, (host, port) in enumerate(endpoints):
            lines.append(f'- {{name: engine-{index}, address: {host}, port: "{port}"}}')
        fresh = self.endpoints_file.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.endpoints_file)

    @property
    def address(self) -> PickerAddress:
        return PickerAddress(HOST, self.grpc_port, self.health_port)

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self.admin_port}"

    async def start(self, timeout_s: float = _READY_S) -> None:
        await self.child.start()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await _listens(self.grpc_port):
            if self.child.returncode is not None or asyncio.get_running_loop().time() > deadline:
                raise self.child.failed("did not come up")
            await asyncio.sleep(_POLL_S)

    async def metrics(self) -> str:
        """The text of its /metrics page."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{HOST}:{self.metrics_port}/metrics") as answer,
        ):
            return await answer.text()


def default_config(endpoints_file: Path) -> str:
    """The field's default profile, endpoints from a watched file."""
    return f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
- type: max-score-picker
- name: endpoints
  type: file-discovery
  parameters: {{path: {endpoints_file}, watchFile: true}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: queue-scorer, weight: 2}}
  - {{pluginRef: kv-cache-utilization-scorer, weight: 2}}
  - {{pluginRef: prefix-cache-scorer, weight: 3}}
  - {{pluginRef: max-score-picker}}
dataLayer:
  discovery: {{pluginRef: endpoints}}
"""


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


@dataclass
class Gateway(_Whole):
    """Pickers and an Envoy in front of engines, started in this order and ended in the other.

    Attributes:
        folder: for configurations and logs; its own.
        edits: what stands once in Envoy's configuration -> what to put in its place.
        url: through the picker. round_robin_url: past it.
    """

    endpoints: Sequence[Address]
    folder: Path
    envoy: Path
    fail_open: bool = True
    mode: BodyModes = BodyModes.FULL_DUPLEX
    tls: bool = False
    picker_count: int = 1
    picker_flags: Sequence[str] = ()
    health_interval_s: float = 0.5
    health_timeout_s: float = HEALTH_TIMEOUT_S
    edits: Mapping[str, str] = field(default_factory=dict)
    pickers: list[Picker] = field(init=False, default_factory=list)
    url: str = field(init=False, default="")
    round_robin_url: str = field(init=False, default="")
    proxy: EnvoyProcess = field(init=False)

    async def _start(self) -> None:
        for index in range(self.picker_count):
            picker = Picker(
                self.folder, self.endpoints, name=f"picker-{index}", tls=self.tls, flags=self.picker_flags
            )
            self._exit.push_async_callback(picker.child.stop, signal.SIGKILL)
            await picker.start()
            self.pickers.append(picker)
        listen, round_robin, admin = free_ports(3)
        self.url, self.round_robin_url = f"http://{HOST}:{listen}", f"http://{HOST}:{round_robin}"
        config = envoy_config(
            listen_port=listen,
            admin_port=admin,
            pickers=[picker.address for picker in self.pickers],
            endpoints=self.endpoints,
            fail_open=self.fail_open,
            mode=self.mode,
            tls=self.tls,
            round_robin_port=round_robin,
            health_interval_s=self.health_interval_s,
            health_timeout_s=self.health_timeout_s,
        )
        for old, new in self.edits.items():
            if config.count(old) != 1:
                raise StackError(f"Envoy's configuration has {config.count(old)} times: {old}")
            config = config.replace(old, new)
        self.proxy = EnvoyProcess(self.envoy, config, admin_port=admin)
        self._exit.push_async_callback(self.proxy.stop)
        await self.proxy.start()


@dataclass
class Stack(_Whole):
    """Lab engines with a gateway in front of them.

    Attributes:
        engines_first: the engines stand in for other machines: gateway and this process yield the processor
            to them.
    """

    fleet: Fleet
    model: str
    folder: Path
    envoy: Path
    picker_flags: Sequence[str] = ()
    engines_first: bool = False
    engines: LabEngines = field(init=False)
    gateway: Gateway = field(init=False)

    @property
    def gateway_url(self) -> str:
        return self.gateway.url

    @property
    def round_robin_url(self) -> str:
        return self.gateway.round_robin_url

    @property
    def pickers(self) -> list[Picker]:
        return self.gateway.pickers

    async def _start(self) -> None:
        self.engines = LabEngines(self.fleet, self.model, self.folder)
        await self._exit.enter_async_context(self.engines)
        if self.engines_first:
            os.nice(_YIELD)
        self.gateway = Gateway(
            self.engines.addresses, self.folder, self.envoy, picker_flags=self.picker_flags
        )
        await self._exit.enter_async_context(self.gateway)
