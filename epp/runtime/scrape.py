"""Reads the engines' metrics pages, a group of endpoints at a time."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
from yarl import URL

from epp.errors import ConfigError, PageError, Problem
from epp.pool.metrics_page import EngineSample, read_page
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore

MIN_INTERVAL_S: Final = 0.05
# Pages read together cost a third of pages read one by one: the loop wakes once for many of them. Larger
# groups save little more and hold up requests for longer.
GROUP_SIZE: Final = 20
# How long after the last request the short interval is kept.
BUSY_FOR_S: Final = 5.0
MAX_PAGE_BYTES: Final = 8 << 20
REPEAT_COMPLAINT_S: Final = 30.0


@dataclass(slots=True)
class _Target:
    """One endpoint to read, and what was last said about it."""

    slot: int
    endpoint: Endpoint
    url: URL
    in_flight: bool = False
    complaint: str = ""
    complained_at: float = 0.0

    def is_at(self, slot: int, endpoint: Endpoint) -> bool:
        return self.slot == slot and self.endpoint.host_port == endpoint.host_port


class Scraper:
    """Keeps the store's facts fresh: every `interval_s` under traffic, every `idle_interval_s` without.

    An endpoint that does not answer holds up no other: at most one scrape of it is in flight, each with
    its own deadline. `on_error` hears of an endpoint's trouble when its kind changes, then every 30 s.
    `on_sampled` is called once after the pages that arrived together.

    Attributes:
        scrapes, errors: counts since the start.
    """

    def __init__(
        self,
        store: PoolStore,
        *,
        interval_s: float = 0.2,
        idle_interval_s: float = 1.0,
        path: str = "/metrics",
        scheme: str = "http",
        timeout_s: float = 1.0,
        tls: ssl.SSLContext | bool = True,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[str], None] = lambda message: None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> None:
        """`tls`: True verifies certificates against the system's authorities, False does not verify.

        Raises:
            ConfigError: the interval is too short.
        """
        if not interval_s >= MIN_INTERVAL_S:
            problem = Problem("", f"{interval_s * 1000:g}ms is too short; the least is 50ms")
            raise ConfigError("--refresh-metrics-interval", problem)
        self.scrapes = 0
        self.errors = 0
        self._store = store
        self._interval_s = interval_s
        self._idle_interval_s = max(idle_interval_s, interval_s)
        self._path = path
        self._scheme = scheme
        self._timeout_s = timeout_s
        self._tls = tls
        self._clock = clock
        self._on_error = on_error
        self._on_sampled = on_sampled
        self._busy_until = -float("inf")
        self._traffic = asyncio.Event()
        self._targets: dict[str, _Target] = {}
        self._roster: tuple[tuple[int, Endpoint], ...] = ()
        self._announcing = False

    def busy(self, now: float) -> None:
        """There is traffic: use the short interval for a while, beginning at once."""
        if now >= self._busy_until:
            self._traffic.set()
        self._busy_until = now + BUSY_FOR_S

    def interval_s(self, now: float) -> float:
        """How often each endpoint is read at present."""
        return self._interval_s if now < self._busy_until else self._idle_interval_s

    async def run(self) -> None:
        """Scrape until cancelled."""
        async with self._session() as session, asyncio.TaskGroup() as scrapes:
            while True:
                await self._cycle(session, scrapes)

    async def _cycle(self, session: aiohttp.ClientSession, scrapes: asyncio.TaskGroup) -> None:
        """Start one scrape of every endpoint, in groups spread over the interval."""
        started = self._clock()
        interval_s = self.interval_s(started)
        self._follow_roster()
        targets = list(self._targets.values())
        groups = max(1, len(targets) // GROUP_SIZE)
        for group in range(groups):
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
                await self._traffic.wait()
        began = self._traffic.is_set()
        self._traffic.clear()
        return began

    def _follow_roster(self) -> None:
        roster = self._store.roster
        if roster is self._roster:
            return
        targets = {}
        for slot, endpoint in roster:
            target = self._targets.get(endpoint.uid)
            if target is None or not target.is_at(slot, endpoint):
                target = _Target(slot, endpoint, URL(f"{self._scheme}://{endpoint.host_port}{self._path}"))
            target.endpoint = endpoint
            targets[endpoint.uid] = target
        self._targets = targets
        self._roster = roster

    def _session(self) -> aiohttp.ClientSession:
        """One kept connection per endpoint, since an endpoint has one scrape in flight at most."""
        connector = aiohttp.TCPConnector(
            limit=0, ssl=self._tls, keepalive_timeout=max(15.0, 3 * self._idle_interval_s)
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "text/plain", "Accept-Encoding": "identity"},
            auto_decompress=False,
            read_bufsize=1 << 18,
        )

    # -- one page ---------------------------------------------------------------------------------

    async def _scrape(self, session: aiohttp.ClientSession, target: _Target) -> None:
        self.scrapes += 1
        try:
            sample = read_page(await self._fetch(session, target.url))
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                self._failed(target, "refused", "connection refused", refused=True)
            else:
                self._failed(target, "connect", f"cannot connect: {error.os_error}")
        except TimeoutError:
            self._failed(target, "timeout", f"no answer within {self._timeout_s:g} s")
        except Exception as error:  # whatever one endpoint provokes, the others are still read
            self._failed(target, type(error).__name__, str(error) or type(error).__name__)
        else:
            self._sampled(target, sample)
        finally:
            target.in_flight = False

    async def _fetch(self, session: aiohttp.ClientSession, url: URL) -> bytes:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise PageError(f"HTTP status {response.status}")
            parts, size = [], 0
            async for part in response.content.iter_any():
                size += len(part)
                if size > MAX_PAGE_BYTES:
                    raise PageError(f"page larger than {MAX_PAGE_BYTES} bytes")
                parts.append(part)
            return b"".join(parts)

    def _still_there(self, target: _Target) -> bool:
        """The slot has not changed hands while the page was under way."""
        owner = self._store.view.endpoints[target.slot]
        return owner is not None and owner.uid == target.endpoint.uid and target.is_at(target.slot, owner)

    def _sampled(self, target: _Target, sample: EngineSample) -> None:
        if not self._still_there(target):
            return
        now = self._clock()
        self._store.sampled(target.slot, sample, now)
        if untold := sample.untold_load:
            self._complain(target, "untold", f"the page lacks {', '.join(untold)}", now)
        if not self._announcing:
            self._announcing = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._announcing = False
        self._on_sampled()

    def _failed(self, target: _Target, kind: str, reason: str, *, refused: bool = False) -> None:
        self.errors += 1
        if self._still_there(target):
            now = self._clock()
            self._store.failed(target.slot, refused=refused, now=now)
            self._complain(target, kind, reason, now)

    def _complain(self, target: _Target, kind: str, reason: str, now: float) -> None:
        """Say it when it is another kind of trouble than last, or 30 s later; so flapping fills no log."""
        if kind != target.complaint or now - target.complained_at >= REPEAT_COMPLAINT_S:
            target.complaint, target.complained_at = kind, now
            self._on_error(f"metrics of {target.endpoint.name} at {target.url}: {reason}")
