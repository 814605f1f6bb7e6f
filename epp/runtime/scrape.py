"""Asks the engines for their state: metrics pages and lists of models, a group of endpoints at a time."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import aiohttp
import msgspec
from yarl import URL

from epp.config.spec import (
    METRICS_PATH,
    DcgmExtractorSpec,
    ExtractorSpec,
    HttpSourceSpec,
    MetricsExtractorSpec,
    MetricsSourceSpec,
    ModelsExtractorSpec,
    SourceUse,
)
from epp.errors import ConfigError, PageError, Problem
from epp.pool.extract import GPU_UTILIZATION, EnginePages, Extracted, GpuPages, ModelLists, engine_label_keys
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime.client_tls import ClientTls
from epp.runtime.lent_sockets import lent_socket

MIN_INTERVAL_S: Final = 0.05
# Pages read together cost a third of pages read one by one: the loop wakes once for many of them. Larger
# groups save little more and hold up requests for longer.
GROUP_SIZE: Final = 20
# Pages of one source, half a core's work: a larger pool is read less often, so that choosing has the rest.
MOST_A_SECOND: Final = 1500
# How long a connection is kept unused at least, as long as engines (uvicorn) keep theirs. That of an
# endpoint that left is closed within twice this.
KEPT_S: Final = 5.0
# How long after the last request the short interval is kept.
BUSY_FOR_S: Final = 5.0
MAX_PAGE_BYTES: Final = 8 << 20
REPEAT_COMPLAINT_S: Final = 30.0
# Lines of one source in that time: trouble with a whole fleet is one trouble.
MOST_COMPLAINTS: Final = 10

DEFAULT_SOURCES: Final = (SourceUse(MetricsSourceSpec(), (MetricsExtractorSpec(),)),)


class Extractor(Protocol):
    """Reads what a source fetched into the pool."""

    def path_of(self, endpoint: Endpoint) -> str | None:
        """Where the endpoint serves it; None = at the source's path."""
        ...

    def extract(self, slot: int, endpoint: Endpoint, page: bytes, now: float) -> Extracted:
        """Raises PageError when this is not what it reads."""
        ...


@dataclass(slots=True)
class Counts:
    """Since the start.

    Attributes:
        scrapes: requests to endpoints.
        poll_errors: those without a usable answer, by type of source.
        extract_errors: answers that lacked something, by types of source and extractor.
    """

    scrapes: int = 0
    poll_errors: dict[str, int] = field(default_factory=dict)
    extract_errors: dict[tuple[str, str], int] = field(default_factory=dict)


class Scraper:
    """Keeps the store's facts fresh: every `interval_s` under traffic, every `idle_interval_s` without; less
    often where the pool has so many endpoints that this were more than `MOST_A_SECOND`.

    An endpoint that does not answer holds up no other: at most one scrape of it and of each source is in
    flight, each with its own deadline. `on_error` hears of an endpoint's trouble when its kind changes, then
    every 30 s; of all endpoints of a source ten times in 30 s at most, so that each is named in turn.
    `on_sampled` is called once after the pages of load that arrived together.

    The first source whose pages tell load also tells who can be reached; trouble with another one is counted
    and said, and costs no endpoint its place. A refused connection takes an endpoint out at once only where
    the source asks at the endpoint's own port.

    Attributes:
        counts: scrapes and errors since the start.
    """

    def __init__(
        self,
        store: PoolStore,
        sources: Sequence[SourceUse] = DEFAULT_SOURCES,
        *,
        interval_s: float = 0.2,
        idle_interval_s: float = 1.0,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[str], None] = lambda message: None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> None:
        """Declares the attributes that extractors fill.

        Raises:
            ConfigError: the interval is too short, or a certificate cannot be used.
        """
        if not interval_s >= MIN_INTERVAL_S:
            problem = Problem("", f"{interval_s * 1000:g}ms is too short; the least is 50ms")
            raise ConfigError("--refresh-metrics-interval", problem)
        self.counts = Counts()
        self._store = store
        self._interval_s = interval_s
        self._idle_interval_s = max(idle_interval_s, interval_s)
        self._busy_until = -float("inf")
        terms = _Terms(store, timeout_s, clock, on_error, on_sampled)
        self._pollers: list[_Poller] = []
        self._judge: _Poller | None = None
        for use in sources:
            judges = self._judge is None and any(isinstance(e, MetricsExtractorSpec) for e in use.extractors)
            poller = _Poller(self, use, judges, terms)
            self._pollers.append(poller)
            self.counts.poll_errors.setdefault(use.source.type, 0)
            for extractor in use.extractors:
                self.counts.extract_errors.setdefault((use.source.type, extractor.type), 0)
            if judges:
                self._judge = poller

    @property
    def scrapes(self) -> int:
        return self.counts.scrapes

    @property
    def errors(self) -> int:
        """Requests without a usable answer, of all sources."""
        return sum(self.counts.poll_errors.values())

    def busy(self, now: float) -> None:
        """There is traffic: use the short interval for a while, beginning at once."""
        if now >= self._busy_until:
            for poller in self._pollers:
                poller.traffic.set()
        self._busy_until = now + BUSY_FOR_S

    def interval_s(self, now: float) -> float:
        """How often each endpoint's load is read at present."""
        return self.interval_of(None if self._judge is None else self._judge.spec, now)

    def interval_of(self, spec: HttpSourceSpec | None, now: float) -> float:
        """How often a source asks at present."""
        interval_s = self._interval_s
        if spec is not None and spec.interval_s is not None:
            interval_s = max(spec.interval_s, MIN_INTERVAL_S)
        elif spec is not None:
            interval_s = max(interval_s, spec.least_interval_s)
        if now >= self._busy_until:
            interval_s = max(interval_s, self._idle_interval_s)
        return max(interval_s, len(self._store.roster) / MOST_A_SECOND)

    async def run(self) -> None:
        """Scrape until cancelled."""
        async with asyncio.TaskGroup() as pollers:
            for poller in self._pollers:
                pollers.create_task(poller.run())
            await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class _Terms:
    """What all sources of a scraper have in common."""

    store: PoolStore
    timeout_s: float
    clock: Callable[[], float]
    on_error: Callable[[str], None]
    on_sampled: Callable[[], None]


@dataclass(slots=True)
class _Target:
    """One endpoint to read, and what was last said about it."""

    slot: int
    endpoint: Endpoint
    url: URL
    in_flight: bool = False
    complaint: str = ""
    complained_at: float = -float("inf")
    remark: str = ""

    def is_at(self, slot: int, endpoint: Endpoint) -> bool:
        return self.slot == slot and self.endpoint.host_port == endpoint.host_port


class _Poller:
    """Asks every endpoint what one source is about. `judges`: it tells who can be reached."""

    def __init__(self, scraper: Scraper, use: SourceUse, judges: bool, terms: _Terms) -> None:
        self.spec = use.source
        self.traffic = asyncio.Event()
        self._scraper = scraper
        self._store = terms.store
        self._judges = judges
        self._timeout_s = terms.timeout_s
        self._clock = terms.clock
        self._on_error = terms.on_error
        self._on_sampled = terms.on_sampled
        self._extractors = [(spec.type, _extractor(spec, terms.store, judges)) for spec in use.extractors]
        self._tls = ClientTls(self.spec)
        self._tls_complaint = ""
        self._targets: dict[str, _Target] = {}
        self._roster: tuple[tuple[int, Endpoint], ...] = ()
        self._missed_node = False
        self._announcing = False
        self._said = 0
        self._said_since = -float("inf")

    async def run(self) -> None:
        """Ask until cancelled."""
        async with self._session() as session, asyncio.TaskGroup() as scrapes:
            while True:
                await self._cycle(session, scrapes)

    async def _cycle(self, session: aiohttp.ClientSession, scrapes: asyncio.TaskGroup) -> None:
        """Start one scrape of every endpoint, in groups spread over the interval."""
        started = self._clock()
        interval_s = self._scraper.interval_of(self.spec, started)
        await self._follow_files()
        self._follow_roster()
        targets = list(self._targets.values())
        groups = max(1, len(targets) // GROUP_SIZE)
        for group in range(groups):
            if self._judges:
                self._store.refresh(self._clock(), interval_s)
            for target in targets[group::groups]:
                if not target.in_flight:
                    target.in_flight = True
                    scrapes.create_task(self._scrape(session, target))
            if await self._traffic_before(started + interval_s * (group + 1) / groups):
                return

    async def _traffic_before(self, until: float) -> bool:
        """Wait; True as soon as traffic begins."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(until - self._clock(), 0.0)):
                await self.traffic.wait()
        began = self.traffic.is_set()
        self.traffic.clear()
        return began

    def _follow_roster(self) -> None:
        roster = self._store.roster
        if roster is self._roster:
            return
        targets = {}
        for slot, endpoint in roster:
            target = self._targets.get(endpoint.uid)
            # Of a thousand endpoints most are as before: their URLs are not made again.
            if target is None or target.slot != slot or target.endpoint is not endpoint:
                url = self._url(endpoint)
                if target is None or not target.is_at(slot, endpoint) or target.url != url:
                    target = _Target(slot, endpoint, url)
                target.endpoint = endpoint
            targets[endpoint.uid] = target
        self._targets = targets
        self._roster = roster
        if self.spec.use_node_address and not self._missed_node:
            self._tell_missing_node()

    def _tell_missing_node(self) -> None:
        """Say once, at the first such endpoint, what happens without the address of a node."""
        for _, endpoint in self._roster:
            if not endpoint.node_address:
                self._missed_node = True
                self._on_error(
                    f"{self.spec.subject} of {endpoint.name}: useNodeAddress: the address of its node is not "
                    "known, only pods of Kubernetes have one; such endpoints are asked at their own address"
                )
                return

    def _url(self, endpoint: Endpoint) -> URL:
        spec = self.spec
        path = spec.path
        if path == METRICS_PATH and isinstance(spec, MetricsSourceSpec):
            own = (extractor.path_of(endpoint) for _, extractor in self._extractors)
            path = next((each for each in own if each is not None), path)
        at = endpoint if spec.port is None else msgspec.structs.replace(endpoint, port=spec.port)
        if spec.use_node_address and endpoint.node_address:
            at = msgspec.structs.replace(at, address=endpoint.node_address)
        return URL(f"{spec.scheme}://{at.host_port}{path}")

    async def _follow_files(self) -> None:
        complaint = await self._tls.follow() or ""
        if complaint and complaint != self._tls_complaint:
            self._on_error(f"{complaint}; the old certificates stay")
        self._tls_complaint = complaint

    def _session(self) -> aiohttp.ClientSession:
        """One kept connection per endpoint, since an endpoint has one scrape in flight at most."""
        idle_s = self._scraper.interval_of(self.spec, float("inf"))
        kept_s = max(KEPT_S, 3 * idle_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=kept_s, socket_factory=lent_socket)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "text/plain, application/json", "Accept-Encoding": "identity"},
            auto_decompress=False,
            read_bufsize=1 << 18,
        )

    # -- one page ---------------------------------------------------------------------------------

    async def _scrape(self, session: aiohttp.ClientSession, target: _Target) -> None:
        self._scraper.counts.scrapes += 1
        try:
            page = await self._fetch(session, target.url)
            if self._still_there(target):
                self._extract(target, page)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                self._failed(target, "refused", "connection refused", refused=True)
            else:
                self._failed(target, "connect", f"cannot connect: {error.os_error}")
        except TimeoutError:
            self._failed(target, "timeout", f"no answer within {self._timeout_s:g} s")
        except Exception as error:  # whatever one endpoint provokes, the others are still read
            self._failed(target, type(error).__name__, str(error) or type(error).__name__)
        finally:
            target.in_flight = False

    async def _fetch(self, session: aiohttp.ClientSession, url: URL) -> bytes:
        # `async with` and iterating the parts cost a fifth more of the whole fetch.
        response = await session.get(url, allow_redirects=False, ssl=self._tls.context)
        try:
            if response.status != 200:
                raise PageError(f"HTTP status {response.status}")
            content, parts, size = response.content, list[bytes](), 0
            while True:
                part = await content.readany()
                size += len(part)
                if size > MAX_PAGE_BYTES:
                    raise PageError(f"page larger than {MAX_PAGE_BYTES} bytes")
                parts.append(part)
                if content.at_eof():
                    return b"".join(parts)
        finally:
            # What was read to its end has given its connection back already.
            response.close()

    def _still_there(self, target: _Target) -> bool:
        """The slot has not changed hands while the page was under way."""
        owner = self._store.view.endpoints[target.slot]
        return owner is not None and owner.uid == target.endpoint.uid and target.is_at(target.slot, owner)

    def _extract(self, target: _Target, page: bytes) -> None:
        now = self._clock()
        remarks = []
        for extractor_type, extractor in self._extractors:
            extracted = extractor.extract(target.slot, target.endpoint, page, now)
            if extracted.failed:
                self._scraper.counts.extract_errors[self.spec.type, extractor_type] += 1
            if extracted.remark:
                remarks.append(extracted.remark)
        if remarks or target.remark:
            self._remark(target, "; ".join(remarks), now)
        if self._judges and not self._announcing:
            self._announcing = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._announcing = False
        self._on_sampled()

    def _failed(self, target: _Target, kind: str, reason: str, *, refused: bool = False) -> None:
        self._scraper.counts.poll_errors[self.spec.type] += 1
        if not self._still_there(target):
            return
        now = self._clock()
        if self._judges:
            self._store.failed(target.slot, refused=refused and self.spec.port is None, now=now)
        # Say it when it is another kind of trouble than last, or 30 s later; so flapping fills no log. Where
        # many are in trouble it is later, so that each is named before one is named again.
        repeat_s = REPEAT_COMPLAINT_S * max(1.0, len(self._targets) / MOST_COMPLAINTS)
        due = kind != target.complaint or now - target.complained_at >= repeat_s
        if due and self._say(target, reason, now):
            target.complaint, target.complained_at = kind, now

    def _remark(self, target: _Target, remark: str, now: float) -> None:
        """Say what is odd about a page once; again when it differs, or has come back after a while."""
        if remark and remark != target.remark:
            if self._say(target, remark, now):
                target.remark, target.complained_at = remark, now
        elif not remark and target.remark and now - target.complained_at >= REPEAT_COMPLAINT_S:
            target.remark = ""

    def _say(self, target: _Target, what: str, now: float) -> bool:
        """Whether it was said: there is a bound for all endpoints together."""
        if now - self._said_since >= REPEAT_COMPLAINT_S:
            self._said, self._said_since = 0, now
        if self._said >= MOST_COMPLAINTS:
            return False
        self._said += 1
        more = "; the same of others is not said for a while" if self._said == MOST_COMPLAINTS else ""
        self._on_error(f"{self.spec.subject} of {target.endpoint.name} at {target.url}: {what}{more}")
        return True


def _extractor(spec: ExtractorSpec, store: PoolStore, judges: bool) -> Extractor:
    match spec:
        case MetricsExtractorSpec(engine_label_key, default_engine, engines):
            store.add_attributes(custom.attribute for engine in engines for custom in engine.custom)
            learn = store.sampled if judges else store.learned
            return EnginePages(engines, default_engine, engine_label_keys(engine_label_key), learn)
        case ModelsExtractorSpec():
            return ModelLists(store)
        case DcgmExtractorSpec():
            store.add_attributes([GPU_UTILIZATION])
            return GpuPages(store)
