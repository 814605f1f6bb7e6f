"""Puts the rooms together and runs them: `warmroute serve`."""

import asyncio
import gc
import logging
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import uvloop
from prometheus_client import disable_created_metrics

from epp.config.document import MAX_BYTES
from epp.config.load import Assembly, default_config, load_config
from epp.config.loaded import LoadedConfig
from epp.director import TIMED_EVERY, Director
from epp.errors import ConfigError, Problem, Unread, WarmrouteError
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.http2.errors import ConnectionFault, StreamFault
from epp.http2.limits import MIB, Http2Limits
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint
from epp.pool.store import FIRST_CAPACITY, PoolStore
from epp.runtime.admin import CONFIG_PATH, JSON, SIGNALS_PATH, TEXT, Page, admin_app, start_admin
from epp.runtime.decoder import Decoder
from epp.runtime.discovery import FileDiscovery
from epp.runtime.gauges import Gauges
from epp.runtime.grpcio import GrpcioTransport
from epp.runtime.health import Health
from epp.runtime.health_calls import health_methods
from epp.runtime.health_grpcio import GrpcioHealthServer
from epp.runtime.health_server import HealthServer
from epp.runtime.legacy_metrics import LegacyMetrics
from epp.runtime.members import find_members, in_kubernetes
from epp.runtime.memory import keep_freed_memory
from epp.runtime.metrics import Metrics
from epp.runtime.metrics_server import check_metrics_tls, serve_metrics
from epp.runtime.options import GRPCIO, Options
from epp.runtime.own import OwnTransport
from epp.runtime.plugin_state import STATE_PATH, Kept, from_another_thread, plugin_state
from epp.runtime.pulse import Pulse
from epp.runtime.recorder import RuntimeRecorder
from epp.runtime.reload import ConfigFile, Running
from epp.runtime.render import Renders
from epp.runtime.router import Router
from epp.runtime.scrape import Scraper
from epp.runtime.stream import Stream
from epp.runtime.timed_stream import TimedStream
from epp.runtime.tls import Certificates
from epp.runtime.tracing_setup import MakeRouter, TracingSetup, router_maker
from epp.runtime.transport import StreamCounts, Transport
from epp.runtime.windows import Windows
from epp.signals import Signals

if TYPE_CHECKING:
    from epp.runtime.in_cluster import InCluster

log = logging.getLogger(__name__)

MESSAGE_EXTRA_BYTES = 1 * MIB
"""What a proxy's message may hold beside a body."""

_UPKEEP_S = 0.5
_PLUGINS_S = 2.0


def read_config(options: Options) -> LoadedConfig:
    """The configuration the options name, or the default one.

    Raises:
        ConfigError: it cannot be read or used.
    """
    if options.config_file and options.config_text:
        raise ConfigError("--config-text", Problem("", "give --config-file or --config-text, not both"))
    allow = options.allow_experimental_plugins
    if options.config_text:
        return load_config(options.config_text, "--config-text", allow_experimental=allow)
    if not options.config_file:
        return default_config()
    try:
        with Path(options.config_file).open("rb") as file:
            text = file.read(MAX_BYTES + 1)  # one more than is taken, and no more of what has no end
        return load_config(text, options.config_file, allow_experimental=allow)
    except OSError as error:
        raise ConfigError(options.config_file, Unread.because("", error)) from None


@dataclass(slots=True)
class App:
    """Everything with a life of its own. Build it with `assemble`, run it with `run`.

    Attributes:
        running: the configuration in use.
        environment: says where Kubernetes is, in a pod.
        streams: ext-proc streams opened so far.
    """

    options: Options
    running: Running
    store: PoolStore
    ledger: InflightLedger
    director: Director
    metrics: Metrics
    gauges: Gauges
    recorder: RuntimeRecorder
    router: Router
    scraper: Scraper
    health: Health
    budget: BodyBudget
    limits: Limits
    renders: Renders
    environment: Mapping[str, str] = field(default_factory=dict)
    streams: int = 0

    # -- building ---------------------------------------------------------------------------------

    @classmethod
    def assemble(cls, options: Options, loaded: LoadedConfig, make_router: MakeRouter = Router) -> "App":
        """Raises ConfigError when configuration and options do not fit together."""
        ledger = InflightLedger(FIRST_CAPACITY)
        store = PoolStore(staleness_s=options.metrics_staleness_threshold, busy=ledger.busy)
        metrics = Metrics(options.pool_name or "default", ("", version("warmroute")))
        if options.legacy_metric_names:
            LegacyMetrics(metrics)
        running = Running(loaded, store, metrics, time.perf_counter)
        recorder = RuntimeRecorder(metrics, store.view)
        limits = Limits(body_bytes=options.max_request_body_bytes, held_bytes=options.max_held_bytes)
        director = Director(
            store,
            ledger,
            running.plugins,
            recorder,
            random.Random(options.seed if options.seed >= 0 else None),
            max_body_bytes=limits.body_bytes,
            use_subset=not options.disable_endpoint_subset_filter,
            plugin_clock=time.perf_counter,
        )
        scraper = Scraper(
            store,
            running.assembly.sources,
            interval_s=options.refresh_metrics_interval,
            on_error=log.warning,
        )
        renders = Renders()
        decoder = Decoder(limits.body_bytes, running.plugins.parsers)
        return cls(
            options=options,
            running=running,
            store=store,
            ledger=ledger,
            director=director,
            metrics=metrics,
            gauges=Gauges(metrics),
            recorder=recorder,
            router=make_router(
                director,
                recorder,
                decoder,
                time.monotonic,
                scraper.busy,
                scored=store.view if options.emit_endpoint_scores else None,
                perform=Windows(renders),
            ),
            scraper=scraper,
            health=Health(leader_only=options.ha_enable_leader_election),
            budget=BodyBudget(limits.held_bytes),
            limits=limits,
            renders=renders,
        )

    @property
    def assembly(self) -> Assembly:
        """What the configuration in use comes to."""
        return self.running.assembly

    def stream(self, wake: Callable[[], None]) -> Stream:
        """What a transport needs behind each of its streams."""
        exchange = Exchange(
            self.budget, self.limits, lambda: str(uuid.uuid4()), reports=bool(self.director.plugins.reporters)
        )
        self.streams += 1
        durations = self.metrics.histogram("extproc_stream_duration_seconds")
        if self.streams % TIMED_EVERY:
            return Stream(exchange, self.router, time.monotonic, wake, durations)
        tally = self.metrics.histogram("response_processing_duration_seconds")
        return TimedStream(exchange, self.router, time.monotonic, wake, durations, tally, time.perf_counter)

    # -- running ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

        Raises:
            ConfigError: endpoints or certificates cannot be used.
            OSError: a port cannot be bound; names it.
        """
        stop = _signals()
        discovery = self._discovery()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.renders.close)
            stack.callback(self.router.close)
            certificates = self._certificates()
            cluster = await self._cluster(stack)
            transport = await self._listen(stack, certificates, cluster)
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self.scraper.run()), tasks.create_task(self._upkeep())]
                if discovery is not None:
                    background.append(tasks.create_task(discovery.run()))
                if cluster is not None:
                    background.append(tasks.create_task(cluster.run()))
                else:
                    self.health.pool_known(True)
                if self.options.config_file and self.options.watch_config_file:
                    background.append(tasks.create_task(self.config_file().follow()))
                if certificates is not None and self.options.enable_cert_reload:
                    background.append(tasks.create_task(certificates.follow()))
                log.info("serving", extra={"grpc_port": self.options.grpc_port})
                await stop.get()
                await self._drain(transport, stop, cluster)
                for task in background:
                    task.cancel()

    def config_file(self) -> ConfigFile:
        """What follows `--config-file`."""
        options = self.options
        return ConfigFile(options.config_file, lambda: read_config(options), self.use, self.metrics)

    def use(self, loaded: LoadedConfig) -> tuple[str, ...]:
        """Put another configuration to use; returns the paths of what needs a restart.

        Raises:
            ConfigError: it cannot be used; nothing has changed.
        """
        self.running.use(loaded, self.director)
        self.router.decoder.parsers = self.running.plugins.parsers
        return self.running.waiting

    def check(self) -> None:
        """Read endpoints and certificates. Raises ConfigError where they cannot be used."""
        self._discovery()
        self._certificates()

    def _certificates(self) -> Certificates | None:
        options = self.options
        check_metrics_tls(options.metrics_cert_dir, options.metrics_client_ca_file)
        return Certificates(options.cert_path, options.tls_rules) if options.secure_serving else None

    def _discovery(self) -> FileDiscovery | None:
        return find_members(self.options, self.assembly.discovery, self.set_endpoints, self.discovery_failed)

    async def _cluster(self, stack: AsyncExitStack) -> "InCluster | None":
        if not in_kubernetes(self.options, self.assembly.discovery):
            return None
        from epp.runtime.in_cluster import InCluster, Tells  # it takes a quarter of a second to load

        tells = Tells(
            endpoints=self.set_endpoints,
            policies=lambda policies: self.running.follow(policies, self.director),
            running=self.running,
        )
        cluster = await InCluster.connect(self.options, self.environment, self.health, tells)
        stack.push_async_callback(cluster.close)
        return cluster

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Make these the pool's members."""
        change = self.store.sync(endpoints, time.monotonic())
        self.ledger.resize(self.store.view.capacity)
        if change:
            log.info("endpoints changed", extra=change.told())

    def discovery_failed(self, message: str) -> None:
        self.metrics.counter("config_discovery_errors_total").inc()
        log.error("the endpoints file cannot be used; the old endpoints stay", extra={"error": message})

    def transport(self, certificates: Certificates | None) -> Transport:
        """What serves the ext-proc port; None is plain HTTP/2."""
        options = self.options
        health = self.health if options.health_checking else None
        if options.transport == GRPCIO:
            credentials = None if certificates is None else certificates.grpc_credentials()
            return GrpcioTransport(
                self.stream, self.stream_counts(), self.limits.body_bytes, credentials, health
            )
        loop = asyncio.get_running_loop()
        return OwnTransport(
            self.stream,
            self.stream_counts(),
            self.budget,
            Http2Limits(
                streams=options.max_concurrent_streams,
                message_bytes=options.grpc_max_recv_msg_size or self.limits.body_bytes + MESSAGE_EXTRA_BYTES,
            ),
            None if certificates is None else certificates.server_context(),
            {} if health is None else health_methods(health, loop.call_soon_threadsafe),
            self._http2_fault,
        )

    async def _listen(
        self, stack: AsyncExitStack, certificates: Certificates | None, cluster: "InCluster | None" = None
    ) -> Transport:
        """Open all ports, ext-proc last; `stack` closes them."""
        options = self.options
        host = options.grpc_host
        transport = self.transport(certificates)
        make_health_server = GrpcioHealthServer if options.transport == GRPCIO else HealthServer
        with _port("--grpc-health-port", options.grpc_health_port):
            health = make_health_server(self.health)
            health.start(_address(host, options.grpc_health_port))
            stack.callback(health.stop)
        stack.enter_context(Pulse(self.health))
        if options.metrics_port:
            with _port("--metrics-port", options.metrics_port):
                tls = options.metrics_cert_dir, options.metrics_client_ca_file
                state = from_another_thread(self.plugin_state, asyncio.get_running_loop())
                pages = {STATE_PATH: Kept(state, time.monotonic)}
                registry = self.metrics.registry
                authorize = cluster.authorize() if cluster and options.metrics_endpoint_auth else None
                stack.callback(
                    serve_metrics(
                        registry, host, options.metrics_port, *tls, pages=pages, authorize=authorize
                    )
                )
            if options.metrics_endpoint_auth and not cluster and not options.metrics_client_ca_file:
                log.warning("metrics are open to all: Kubernetes is not there to be asked who may read them")
        if options.admin_port:
            with _port("--admin-port", options.admin_port):
                app = admin_app(lambda: self.recorder.decisions, self.pages())
                runner = await start_admin(app, options.admin_port, options.admin_host)
                stack.push_async_callback(runner.cleanup)
        with _port("--grpc-port", options.grpc_port):
            await transport.start(_address(host, options.grpc_port))
            stack.push_async_callback(transport.stop)
        return transport

    def pages(self) -> dict[str, Page]:
        """Admin pages beside the decisions."""
        return {
            STATE_PATH: Page(JSON, self.plugin_state),
            SIGNALS_PATH: Page(JSON, lambda: msgspec.json.encode(self.signals())),
            CONFIG_PATH: Page(TEXT, lambda: str(self.running.effective).encode()),
        }

    def plugin_state(self) -> bytes:
        """What the plugins in use say of themselves, as JSON."""
        return plugin_state(self.assembly, time.time())

    def signals(self) -> Signals:
        """Load and latency of the last half minute, for who sizes the pool."""
        view, load, now = self.store.view, self.ledger.load, time.monotonic()
        return self.recorder.signals.read(
            view,
            load,
            pool=self.metrics.pool_name,
            namespace=self.options.pool_namespace,
            saturation=self.gauges.saturation(self.assembly, view, load, now),
            now=now,
            time_s=time.time(),
        )

    def stream_counts(self) -> StreamCounts:
        streams = self.metrics.gauge("extproc_streams_inflight")

        def closed(code: str) -> None:
            streams.dec()
            self.metrics.counter("extproc_streams_total", code).inc()

        dropped = self.metrics.counter("extproc_dropped_messages_total")
        return StreamCounts(opened=streams.inc, closed=closed, dropped=dropped.inc)

    def _http2_fault(self, fault: ConnectionFault | StreamFault) -> None:
        scope = "connection" if isinstance(fault, ConnectionFault) else "stream"
        self.metrics.counter("extproc_http2_errors_total", scope, fault.code.name).inc()

    async def _upkeep(self) -> None:
        """Age facts, let indexes follow the engines' counters, renew gauges."""
        plugins_at = gauges_at = 0.0
        gauges_every_s = self.options.refresh_prometheus_metrics_interval
        while True:
            now = time.monotonic()
            try:
                self.store.refresh(now, self.scraper.interval_s(now))
                if now >= plugins_at:
                    plugins_at = now + _PLUGINS_S
                    self._refresh_plugins(now)
                if now >= gauges_at:
                    gauges_at = now + gauges_every_s
                    self.renew_gauges()
            except Exception:
                log.exception("upkeep failed; requests are served on, and it is tried again")
            await asyncio.sleep(min(_UPKEEP_S, gauges_every_s))

    def _refresh_plugins(self, now: float) -> None:
        self.running.release(self.director)
        for plugin in self.assembly.refreshed:
            try:
                plugin.refresh(now)
            except Exception as error:
                self.recorder.plugin_failed(plugin, error)

    def renew_gauges(self) -> None:
        self.gauges.pool(self.store, self.ledger, self.budget.used)
        self.gauges.sources(self.scraper.counts)
        self.gauges.plugins(self.assembly, self.store.view, self.ledger.load, time.monotonic())

    async def _drain(
        self, transport: Transport, stop: "asyncio.Queue[signal.Signals]", cluster: "InCluster | None"
    ) -> None:
        """Health says no first; new requests are served while the proxy takes notice; then the last end.

        Another replica may lead from the beginning. A second signal ends at once.
        """
        self.health.draining()
        if cluster is not None:
            cluster.resign()
        log.info("draining", extra={"in_flight": self.director.in_flight})
        again = asyncio.create_task(stop.get())
        await asyncio.wait([again], timeout=self.options.drain_timeout)
        self.health.end_watches()
        ended = asyncio.create_task(transport.drain())
        await asyncio.wait([again, ended], return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        log.info("ended", extra={"in_flight": self.director.in_flight})
        await transport.stop()
        await ended


@contextmanager
def _port(flag: str, port: int) -> Iterator[None]:
    """What goes wrong inside is about this port."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"{flag} {port}: cannot listen: {reason}") from None


def _address(host: str, port: int) -> str:
    """As gRPC takes it; the IPv6 wildcard stands for IPv4 too."""
    return f"[{host or '::'}]:{port}" if not host or ":" in host else f"{host}:{port}"


def _signals() -> "asyncio.Queue[signal.Signals]":
    """SIGTERM and SIGINT as they come."""
    came: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, came.put_nowait, each)
    return came


def validate(options: Options, tracing: TracingSetup | None = None) -> None:
    """Everything that can be checked without serving, and warn of what is odd.

    Raises:
        ConfigError: as `serve`.
    """
    with router_maker(tracing) as make_router:
        App.assemble(options, read_config(options), make_router).check()
    log.info("flags, configuration, endpoints and certificates are right")


def serve(
    options: Options,
    tracing: TracingSetup | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run the picker until it is told to stop.

    `tracing`: make spans of requests. `environment`: says where Kubernetes is, in a pod.

    Raises:
        ConfigError, OSError: as `App.run`.
        WarmrouteError: a fault of the picker itself ended it; it is in the log.
    """
    # Else each counter and histogram has a second series, which the field's pickers do not have.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    loaded = read_config(options)
    try:
        with router_maker(tracing) as make_router:
            app = App.assemble(options, loaded, make_router)
            app.environment = environment
            keep_freed_memory()
            gc.collect()
            # What was built at the start lives to the end; the collector need not look at it again.
            gc.freeze()
            uvloop.run(app.run())
    except ExceptionGroup as faults:
        log.critical("the picker ends by a fault of its own", exc_info=faults)
        raise WarmrouteError("the picker ended by a fault of its own; its log has the details") from None
