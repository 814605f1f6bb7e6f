"""Processes that a row watches or measures from: engines' pages, and `warmroute serve` itself."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.rows.picker import PAGE
from epp import names
from epp.lab.stack import free_ports

START_TIMEOUT_S = 90.0  # on a machine that does other things besides
ANSWER_TIMEOUT_S = 5.0
SERVING = b"\x08\x01"  # a HealthCheckResponse that says so


@contextmanager
def page_server(count: int) -> Iterator[list[int]]:
    """`count` ports of one other process that answer with a recorded page of vLLM."""
    command = [sys.executable, "-m", "benchmarks.rows.page_server", str(count), str(PAGE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.terminate()


@dataclass(frozen=True)
class Serve:
    """A running picker. `ready_s`: from the start of its process to health's first yes."""

    pid: int
    grpc_port: int
    ready_s: float


@contextmanager
def serve(folder: Path, ports: Sequence[int], *flags: str) -> Iterator[Serve]:
    """`warmroute serve` with endpoints from a file; `folder` takes its files and its log."""
    with serve_with(
        folder, "--config-file", str(file_config(folder, [("127.0.0.1", port) for port in ports])), *flags
    ) as picker:
        yield picker


@contextmanager
def serve_with(folder: Path, *flags: str) -> Iterator[Serve]:
    """`warmroute serve` whose endpoints these flags tell; `folder` takes its log."""
    grpc_port, health_port, metrics_port = free_ports(3)
    command = [
        *(sys.executable, "-c", "from epp.cli import main; main()", "serve"),
        *("--grpc-host", "127.0.0.1", "--grpc-port", str(grpc_port), "--grpc-health-port", str(health_port)),
        *("--metrics-port", str(metrics_port), "--admin-port", "0", "--secure-serving=false"),
        *("--drain-timeout", "0", "--metrics-endpoint-auth=false", *flags),
    ]
    log = folder / "serve.log"
    began = time.monotonic()
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            _await_serving(process, health_port, log)
            yield Serve(process.pid, grpc_port, time.monotonic() - began)
        finally:
            process.terminate()


def file_config(folder: Path, places: Iterable[tuple[str, int]]) -> Path:
    """A configuration in `folder`, with endpoints at these addresses and ports from a file beside it."""
    lines = [f"- {{name: pod-{n}, address: {at}, port: {port}}}" for n, (at, port) in enumerate(places)]
    (folder / "endpoints.yaml").write_text("\n".join(["endpoints:", *lines, ""]))
    config = folder / "config.yaml"
    config.write_text(
        f"""apiVersion: {names.API_VERSION}
kind: {names.CONFIG_KIND}
plugins:
- type: file-discovery
  parameters: {{path: {folder / "endpoints.yaml"}}}
dataLayer:
  discovery: {{pluginRef: file-discovery}}
"""
    )
    return config


def _await_serving(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.002)
            continue
        if _serves(port):
            return
    raise RuntimeError(f"the picker did not come up:\n{log.read_text()}")


def _serves(port: int) -> bool:
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        suppress(grpc.RpcError),
    ):
        check = channel.unary_unary(f"/{names.HEALTH_SERVICE}/Check", None, None)
        return bool(check(b"", timeout=ANSWER_TIMEOUT_S) == SERVING)
    return False
