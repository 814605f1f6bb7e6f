"""Lab engines as real servers: one process, one port an engine, the HTTP API and pages of vLLM 0.32.

    python -m epp.lab.servers --port-base 8000 --count 8

Besides vLLM's paths every port, and the admin port that is never stopped, serves

    GET  /lab/stats              what each engine did, and how far it lags behind its schedule
    POST /lab/reset              every engine as new: caches, counters and lag empty, running answers cut
    POST /lab/stop?port=8003     resets that engine's connections and closes its port (ask another port)
    POST /lab/start?port=8003    brings it back, empty
"""

import asyncio
import gc
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from aiohttp import web
from aiohttp.web_request import BaseRequest

from epp.errors import ConfigError
from epp.lab.engine import FITS, EngineSpec
from epp.lab.engine_server import EngineServer, EngineStats, Serving, json_response, not_allowed
from epp.lab.realtime import LagSummary, summarize


class FleetStats(msgspec.Struct, frozen=True):
    """All engines; `lag` is over the kept steps of all of them together."""

    model: str
    speedup: float
    engines: list[EngineStats]
    lag: LagSummary


class Fleet:
    """Engines on their ports, and the lab's own API over all of them. Made by `serve_engines`."""

    def __init__(self, serving: Serving, ports: Sequence[int]) -> None:
        self.serving = serving
        self.admin_port = 0
        self._servers = [EngineServer(serving, port, self._handle) for port in ports]

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self._servers]

    async def start(self, admin_port: int) -> None:
        """Opens all ports. Raises OSError when one is taken."""
        for server in self._servers:
            await server.start()
        self._admin = web.Server(self._handle, access_log=None)
        loop = asyncio.get_running_loop()
        self._admin_listener = await loop.create_server(self._admin, self.serving.host, admin_port)
        self.admin_port = self._admin_listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes everything; running answers are cut."""
        self._admin_listener.close()
        for server in self._servers:
            await server.stop()
        await self._admin.shutdown(timeout=1.0)

    async def stop_engine(self, port: int) -> None:
        """As a killed process: connections reset, port closed, cache lost. Raises KeyError."""
        await self._at(port).stop()

    async def start_engine(self, port: int) -> None:
        """Brings a stopped engine back, empty. Raises KeyError."""
        server = self._at(port)
        if not server.up:
            await server.start()

    def reset(self) -> None:
        """Every engine as new; running answers are cut."""
        for server in self._servers:
            server.renew()

    def stats(self) -> FleetStats:
        return FleetStats(
            model=self.serving.model,
            speedup=self.serving.speedup,
            engines=[server.stats() for server in self._servers],
            lag=summarize([server.driver.lag for server in self._servers]),
        )

    def _at(self, port: int) -> EngineServer:
        return {server.port: server for server in self._servers}[port]

    async def _handle(self, request: BaseRequest) -> web.StreamResponse:
        try:
            match request.method, request.path:
                case "GET", "/lab/stats":
                    return json_response(msgspec.json.encode(self.stats()))
                case "POST", "/lab/reset":
                    self.reset()
                case "POST", "/lab/stop":
                    await self.stop_engine(_port_of(request))
                case "POST", "/lab/start":
                    await self.start_engine(_port_of(request))
                case _, ("/lab/stats" | "/lab/reset" | "/lab/stop" | "/lab/start") as path:
                    return not_allowed("GET" if path == "/lab/stats" else "POST")
                case _:
                    return json_response(b'{"detail":"Not Found"}', 404)
        except KeyError:
            return json_response(msgspec.json.encode({"detail": f"port must be one of {self.ports}"}), 400)
        return json_response(b"{}")


async def serve_engines(ports: Sequence[int], serving: Serving, admin_port: int = 0) -> Fleet:
    """A running fleet, one engine a port; 0 takes any free port. Raises OSError when a port is taken."""
    fleet = Fleet(serving, ports)
    await fleet.start(admin_port)
    return fleet


def _port_of(request: BaseRequest) -> int:
    value = request.query["port"]
    return int(value) if value.isdecimal() else -1


async def _serve_until_signalled(
    ports: Sequence[int], serving: Serving, admin_port: int, ready_file: Path | None
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    fleet = await serve_engines(ports, serving, admin_port)
    _announce(fleet, ready_file)
    # What start-up made lives for ever; scanning it again and again would only make steps late.
    gc.collect()
    gc.freeze()
    await stopped.wait()
    await fleet.stop()


def _announce(fleet: Fleet, ready_file: Path | None) -> None:
    line = {
        "ready": True,
        "host": fleet.serving.host,
        "ports": fleet.ports,
        "admin_port": fleet.admin_port,
        "pid": os.getpid(),
    }
    text = msgspec.json.encode(line).decode()
    if ready_file is not None:
        ready_file.write_text(text + "\n")
    click.echo(text)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port-base", default=8000, show_default=True, help="First port; 0 takes free ports.")
@click.option(
    "--port", "ports", multiple=True, type=int, help="One of the ports, in place of --port-base and --count."
)
@click.option("--count", default=8, show_default=True, type=click.IntRange(1), help="Engines, one port each.")
@click.option(
    "--admin-port", default=0, show_default=True, help="Port of /lab/ that is never stopped; 0: any."
)
@click.option("--model", default="lab/llama-8b", show_default=True, help="Model name served.")
@click.option("--fit", default="llama-8b-h100", show_default=True, type=click.Choice(list(FITS)))
@click.option("--speedup", default=1.0, show_default=True, help="Engine seconds per wall second.")
@click.option("--num-blocks", default=4096, show_default=True, help="KV blocks per engine.")
@click.option("--block-size", default=16, show_default=True, help="Tokens per KV block.")
@click.option("--max-num-seqs", default=256, show_default=True)
@click.option("--max-num-batched-tokens", default=8192, show_default=True)
@click.option("--max-model-len", default=32_768, show_default=True)
@click.option(
    "--prompt-tokens-details/--no-prompt-tokens-details",
    default=True,
    show_default=True,
    help="Report cached tokens.",
)
@click.option(
    "--ready-file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the ready line there."
)
def main(
    host: str,
    port_base: int,
    ports: tuple[int, ...],
    count: int,
    admin_port: int,
    model: str,
    fit: str,
    speedup: float,
    prompt_tokens_details: bool,
    ready_file: Path | None,
    **sizes: int,
) -> None:
    """Serve simulated engines on loopback. Prints one line of JSON when all ports are open."""
    try:
        spec = EngineSpec(FITS[fit], **sizes)
        serving = Serving(spec, model, speedup, host, prompt_tokens_details)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    chosen = ports or [port_base + index if port_base else 0 for index in range(count)]
    try:
        asyncio.run(_serve_until_signalled(chosen, serving, admin_port, ready_file))
    except OSError as error:
        raise click.ClickException(f"cannot open the ports: {error}") from None


if __name__ == "__main__":
    main()
