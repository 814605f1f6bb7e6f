"""A picker that finds its pool in Kubernetes, and the proxy in front of it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import grpc

from e2e.kube_access import Access, in_own_mounts
from e2e.pages import FLAGS, complaints, until
from epp import names
from epp.lab.envoy import Address, BodyModes, EnvoyProcess, PickerAddress, envoy_config
from epp.lab.stack import HEALTH_TIMEOUT_S, HOST, Picker, free_ports
from epp.wire import health_pb2
from tests.data.grpc.channels import ALONE

ENVOY_INTERVAL_S: Final = 0.25
START_S: Final = 90.0
"""Within which a picker or an Envoy is up, however busy the machine."""

CONFIG: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
"""
"""The field's default profile, which is that of a file that says nothing else."""

SPREAD: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: random-picker
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: random-picker}
"""
"""Every endpoint alike."""


class Asked(Protocol):
    """A picker, for who asks it."""

    @property
    def address(self) -> PickerAddress: ...


def pool_flags(pool: str, namespace: str) -> tuple[str, ...]:
    """A picker of a pool."""
    return (f"--pool-name={pool}", f"--pool-namespace={namespace}")


def selector_flags(selector: str, ports: Sequence[int], namespace: str) -> tuple[str, ...]:
    """A picker of pods, without a pool object."""
    listed = ",".join(map(str, ports))
    # An empty name takes back the one that every picker of the lab is given.
    named = ("--pool-name=", f"--pool-namespace={namespace}")
    return (*named, f"--endpoint-selector={selector}", f"--endpoint-target-ports={listed}")


class ClusterPicker(Picker):
    """`warmroute serve` that reaches Kubernetes as `access`, by kubeconfig or as in a pod.

    Stopped, it may be started again, on the same ports and with its log continued.
    """

    def __init__(
        self,
        folder: Path,
        access: Access,
        flags: Sequence[str],
        *,
        name: str = "picker",
        config: str = SPREAD,
        tls: bool = False,
        as_in_pod: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        reached = () if as_in_pod else (f"--kubeconfig={access.kubeconfig()}",)
        super().__init__(folder, (), name=name, tls=tls, config=config, flags=(*FLAGS, *reached, *flags))
        variables = dict(environment or {})
        command = list(self.child.command)
        if as_in_pod:
            service_account, more = access.in_cluster()
            variables |= more
            command = in_own_mounts(command, service_account)
        if variables:
            command = ["env", *(f"{key}={value}" for key, value in variables.items()), *command]
        self.child.command = command

    async def status(self, service: str = names.EXT_PROC_SERVICE) -> int:
        """As `health_of`, by its health port."""
        return await health_of(f"{HOST}:{self.health_port}", service)

    async def serves(self, service: str = names.EXT_PROC_SERVICE) -> bool:
        return await self.status(service) == health_pb2.HealthCheckResponse.SERVING

    def configure(self, config: str) -> None:
        """Replace the watched file at once, as a ConfigMap update does."""
        fresh = self.config_file.with_suffix(".new")
        fresh.write_text(config)
        fresh.replace(self.config_file)

    async def start(self, timeout_s: float = START_S) -> None:
        await super().start(timeout_s)

    async def start_serving(self) -> None:
        """Started, and ready to be asked."""
        await self.start()
        await until(self.serves, f"{self.child.name} is ready")

    def log_lines(self) -> list[str]:
        """Without one that is being written."""
        whole, _, _ = self.child.log_path.read_text(errors="replace").rpartition("\n")
        return whole.splitlines()


async def health_of(target: str, service: str) -> int:
    """What a health port says of a service: a `ServingStatus`; SERVICE_UNKNOWN where it knows none."""
    async with grpc.aio.insecure_channel(target, ALONE) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            return health_pb2.HealthCheckResponse.UNKNOWN
        return int(answer.status)


@asynccontextmanager
async def running(
    *pickers: ClusterPicker, serving: bool = True, expected: str | None = None
) -> AsyncIterator[None]:
    """Pickers that run inside, and at the end have no fault of their own in their logs.

    `expected`: stands in lines that are none.
    """
    try:
        starts = (picker.start_serving() if serving else picker.start() for picker in pickers)
        await asyncio.gather(*starts)
        yield
        for picker in pickers:
            faults = complaints(picker)
            assert [line for line in faults if expected is None or expected not in line] == []
    finally:
        for picker in pickers:
            await picker.child.stop(signal.SIGKILL)


@asynccontextmanager
async def proxied(
    envoy: Path,
    *pickers: Asked,
    mode: BodyModes = BodyModes.FULL_DUPLEX,
    tls: bool = False,
    edits: Mapping[str, str] | None = None,
    fail_open_to: Sequence[Address] = (),
) -> AsyncIterator[str]:
    """The URL of an Envoy that asks these pickers. Where none can be asked it answers 5xx, or spreads over
    `fail_open_to`.

    `edits`: what stands once in Envoy's configuration -> what to put in its place.
    """
    port, admin = free_ports(2)
    config = envoy_config(
        listen_port=port,
        admin_port=admin,
        pickers=[picker.address for picker in pickers],
        endpoints=fail_open_to,
        fail_open=bool(fail_open_to),
        mode=mode,
        tls=tls,
        health_interval_s=ENVOY_INTERVAL_S,
        health_timeout_s=HEALTH_TIMEOUT_S,
    )
    for old, new in (edits or {}).items():
        assert config.count(old) == 1, f"Envoy's configuration has {config.count(old)} times: {old}"
        config = config.replace(old, new)
    proxy = EnvoyProcess(envoy, config, admin_port=admin)
    await proxy.start(START_S)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        await proxy.stop()
