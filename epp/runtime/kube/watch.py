"""One collection of the API server, kept as it is there: list, then watch, for ever."""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from epp.runtime.kube.api import TOO_LARGE_VERSION, UNREACHED, KubeApi, KubeError, Status
from epp.runtime.kube.told import Told

PAGE_SIZE: Final = 500
# How long changes that follow each other closely are gathered: at most, and after each.
TOGETHER_S: Final = 0.01
_APART_S: Final = 0.002
# A watch that stood this long was a good one.
_STEADY_S: Final = 1.0
# Everyday trouble that nobody needs to hear of unless it goes on.
_QUIET_FAILURES: Final = 2
_MOST_RETRY_AFTER_S: Final = 60.0
_FAILURES_AFTER_NEWS: Final = 2
# Objects named that cannot be read: where there are many, one cause has them all.
_MOST_NAMED: Final = 10
# Statuses of a watch that say that its version is of no use.
_UNUSABLE_VERSION: Final = frozenset((400, 410, 422))


class Version(Protocol):
    """Metadata of an object, as far as a collection needs it."""

    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


class Versioned(Protocol):
    """An object of the API."""

    @property
    def metadata(self) -> Version: ...


T = TypeVar("T", bound=Versioned)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait after failures in a row, in seconds.

    Attributes:
        first_s: after the first; doubles with each.
        most_s: at most.
        away_s: at most, where nobody answers: that burdens nobody, and what changes right after is heard of
            within a second.
        missing_s: at most, where the server knows no such collection.
    """

    first_s: float = 0.2
    most_s: float = 10.0
    away_s: float = 0.5
    missing_s: float = 25.0

    def pause_s(self, failures: int, error: KubeError, draw: float) -> float:
        """`draw` in [0, 1) takes up to half off, or adds up to half to what the server asked for."""
        if error.retry_after_s:
            return min(error.retry_after_s, _MOST_RETRY_AFTER_S) * (1.0 + draw / 2)
        most_s = self.most_s
        if error.status == 404:
            most_s = self.missing_s
        elif error.reason == UNREACHED:
            most_s = self.away_s
        return min(most_s, self.first_s * 2.0 ** min(failures - 1, 30)) * (1.0 - draw / 2)


_BACKOFF: Final = Backoff()


class _Head(msgspec.Struct, frozen=True, rename="camel"):
    uid: str = ""
    name: str = ""
    resource_version: str = ""


class _Object(msgspec.Struct, frozen=True):
    metadata: _Head = _Head()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _ListHead(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListHead = _ListHead()
    items: list[msgspec.Raw] | None = None


_OBJECTS: Final = msgspec.json.Decoder(_Object)
_EVENTS: Final = msgspec.json.Decoder(_Event)
_STATUSES: Final = msgspec.json.Decoder(Status)
_PAGES: Final = msgspec.json.Decoder(_Page)


class Collection(Generic[T]):
    """Follows a collection and tells of changes; keeps what it knows while the server is away.

    `changed` is called with all objects by uid after the first list, and then after every list and every
    batch of events that changed something. The mapping it gets does not change afterwards. An object that
    cannot be read as `kind` stays as it was last read, or is left out; `said` hears of it.

    Attributes:
        synced: listed at least once.
        trouble: why the collection cannot be followed now; None = it is, or nothing is known yet.
    """

    def __init__(
        self,
        api: KubeApi,
        path: str,
        kind: type[T],
        changed: Callable[[Mapping[str, T]], None],
        *,
        label_selector: str = "",
        field_selector: str = "",
        said: Callable[[str], None],
        backoff: Backoff = _BACKOFF,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`said` hears one line for every new reason of trouble, and one when it is over."""
        self.synced = False
        self.trouble: KubeError | None = None
        self._api = api
        self._path = path
        self._kind: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._changed = changed
        selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        self._selectors = {key: value for key, value in selectors.items() if value}
        self._said = said
        self._backoff = backoff
        self._chance = chance
        self._objects: dict[str, T] = {}
        # Of the newest thing heard; "" = unknown, so that a list is needed.
        self._version = ""
        # In a row: those that count as trouble, and those that happen every day.
        self._failures = 0
        self._everyday = 0
        # Of the watch that is tried now: it was agreed to; it told events or lasted.
        self._stood = False
        self._heard_well = False
        self._told = Told(said)
        self._unreadable: set[str] = set()

    @property
    def objects(self) -> Mapping[str, T]:
        """All that is there, by uid, as last heard."""
        return MappingProxyType(self._objects)

    async def run(self) -> None:
        """Until cancelled; nothing that the server does ends it."""
        clock, hasty = asyncio.get_running_loop().time, 0
        while True:
            self._stood = self._heard_well = False
            begun, pause_s = clock(), 0.0
            try:
                if not self._version:
                    await self._list()
                await self._follow()
                if not self._heard_well:
                    pause_s = self._failed(KubeError("WATCH", self._path, "the server ended it at once"))
            except KubeError as error:
                pause_s = self._failed(error)
            # A server that tells something and ends it each time is in no trouble, but not to be flooded.
            hasty = hasty + 1 if clock() - begun < _STEADY_S else 0
            if hasty > _QUIET_FAILURES:
                pause_s = max(pause_s, self._backoff.first_s)
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _list(self) -> None:
        """All objects, page by page; a list that took too long begins again, the third time in one piece."""
        for limit in (PAGE_SIZE, PAGE_SIZE):
            try:
                return await self._list_by(str(limit))
            except KubeError as error:
                if error.status != 410:
                    raise
        return await self._list_by("")

    async def _list_by(self, limit: str) -> None:
        found: dict[str, T] = {}
        unreadable: set[str] = set()
        version = token = ""
        while True:
            asked = {"limit": limit, "continue": token}
            query = self._selectors | {key: value for key, value in asked.items() if value}
            page = self._page(await self._api.get(self._path, query))
            try:
                for raw in page.items or ():
                    self._take(raw, found, self._objects, unreadable)
            except msgspec.MsgspecError as error:
                raise KubeError("GET", self._path, f"not a list: {error}") from None
            version = version or page.metadata.resource_version
            token = page.metadata.continue_
            if not token:
                break
        self._unreadable = unreadable
        self._version = version
        before = self._objects
        self._objects = found
        first, self.synced = not self.synced, True
        if first or _differ(found, before):
            self._changed(self.objects)

    def _page(self, body: bytes) -> _Page:
        try:
            page = _PAGES.decode(body)
        except msgspec.MsgspecError as error:
            raise KubeError("GET", self._path, f"not a list: {error}") from None
        if not page.metadata.resource_version:
            raise KubeError("GET", self._path, "not a list: metadata.resourceVersion is missing")
        return page

    async def _follow(self) -> None:
        """Watches from the last version on until the server ends it."""
        query = {**self._selectors, "resourceVersion": self._version, "allowWatchBookmarks": "true"}
        steady: asyncio.TimerHandle | None = None
        try:
            async with (
                contextlib.aclosing(self._api.watch(self._path, query)) as batches,
                contextlib.aclosing(gathered(batches)) as gathering,
            ):
                async for lines in gathering:
                    if not self._stood:
                        self._stood = True
                        steady = asyncio.get_running_loop().call_later(_STEADY_S, self._works)
                    if lines:
                        self._hear(lines)
        finally:
            if steady is not None:
                steady.cancel()

    def _hear(self, lines: list[bytes]) -> None:
        """Applies events that came together and tells of them once. Raises KubeError for an ERROR."""
        objects = self._objects.copy()
        failure: KubeError | None = None
        for line in lines:
            try:
                event = _EVENTS.decode(line)
                if event.type == "ERROR":
                    failure = _STATUSES.decode(event.object).error("WATCH", self._path)
                    break
                self._apply(event, objects)
            except msgspec.MsgspecError as error:
                failure = KubeError("WATCH", self._path, f"not an event: {error}", reason="Unreadable")
                break
        if _differ(objects, self._objects):
            self._objects = objects
            self._changed(self.objects)
        if failure is not None:
            # What follows the last version is not to be had: only a list tells what is there.
            self._version = ""
            raise failure
        self._works()

    def _apply(self, event: _Event, objects: dict[str, T]) -> None:
        match event.type:
            case "ADDED" | "MODIFIED":
                self._version = self._take(event.object, objects, objects, self._unreadable)
            case "DELETED":
                head = _OBJECTS.decode(event.object).metadata
                objects.pop(head.uid, None)
                self._unreadable.discard(head.uid)
                self._version = head.resource_version
            case _:
                # A BOOKMARK: nothing new up to its version.
                self._version = _OBJECTS.decode(event.object).metadata.resource_version

    def _take(
        self, raw: msgspec.Raw, into: dict[str, T], known: Mapping[str, T], unreadable: set[str]
    ) -> str:
        """Puts the object into `into`: the record that is known where its version is the same.

        Returns its version. Raises msgspec.MsgspecError when not even those can be read.
        """
        try:
            read = self._kind.decode(raw)
        except msgspec.MsgspecError as error:
            head = _OBJECTS.decode(raw).metadata
            if head.uid in known:
                into[head.uid] = known[head.uid]
            if head.uid not in self._unreadable and len(unreadable) < _MOST_NAMED:
                outcome = "stays as it was" if head.uid in known else "is left out"
                self._said(f"{self._path}: {head.name} cannot be read and {outcome}: {error}")
            unreadable.add(head.uid)
            return head.resource_version
        uid, version = read.metadata.uid, read.metadata.resource_version
        unreadable.discard(uid)
        before = known.get(uid)
        into[uid] = read if before is None or before.metadata.resource_version != version else before
        return version

    def _works(self) -> None:
        """The watch tells events, or has stood for a while."""
        self._heard_well = True
        self._failures = self._everyday = 0
        self.trouble = None
        self._told.over(self._path, f"{self._path}: followed again")

    def _failed(self, error: KubeError) -> float:
        """How long to wait before the next attempt, in seconds."""
        if error.status in _UNUSABLE_VERSION or error.reason == TOO_LARGE_VERSION:
            self._version = ""
        if error.status == 410 or (self._stood and not error.status and not error.reason):
            self._everyday += 1
            if self._everyday == 1:
                return 0.0
            if self._everyday <= _QUIET_FAILURES:
                return self._backoff.pause_s(self._everyday, error, self._chance())
        else:
            self._everyday = 0
        before = self.trouble
        if before is not None and before.status != error.status:
            # A server that says something else is on its way back.
            self._failures = min(self._failures, _FAILURES_AFTER_NEWS)
        self._failures += 1
        self.trouble = error
        reason = (error.verb, error.status, error.reason if error.status else str(error))
        self._told.trouble(self._path, reason, f"{error}; {self._outlook(error)}")
        return self._backoff.pause_s(self._failures, error, self._chance())

    def _outlook(self, error: KubeError) -> str:
        if error.status == 404:
            return (
                "the server knows no such resource (is its CustomResourceDefinition installed?); "
                f"looked for again every {self._backoff.missing_s:g} s"
            )
        known = "what is known stays in use" if self.synced else "nothing is known yet"
        needed = "; a Role has to allow list and watch" if error.status == 403 else ""
        return f"{known}; trying again{needed}"


def _differ(one: Mapping[str, T], other: Mapping[str, T]) -> bool:
    return one.keys() != other.keys() or any(one[uid] is not other[uid] for uid in one)


async def gathered(batches: AsyncIterator[list[bytes]]) -> AsyncGenerator[list[bytes], None]:
    """The same lines, those that follow each other closely in one list: 10 ms at most are waited for more.

    What `batches` raises comes after all lines before it.
    """
    loop = asyncio.get_running_loop()
    upcoming = asyncio.create_task(_next(batches))
    try:
        while True:
            await asyncio.wait((upcoming,))
            together: list[bytes] = []
            until = loop.time() + TOGETHER_S
            while upcoming.done() and not upcoming.exception() and (lines := upcoming.result()) is not None:
                together += lines
                upcoming = asyncio.create_task(_next(batches))
                if (left_s := until - loop.time()) <= 0:
                    break
                await asyncio.wait((upcoming,), timeout=min(left_s, _APART_S))
            yield together
            if upcoming.done() and (upcoming.exception() or upcoming.result() is None):
                upcoming.result()
                return
    finally:
        upcoming.cancel()
        await asyncio.wait((upcoming,))
        if not upcoming.cancelled():
            upcoming.exception()


async def _next(batches: AsyncIterator[list[bytes]]) -> list[bytes] | None:
    """None = there are no more."""
    async for lines in batches:
        return lines
    return None
