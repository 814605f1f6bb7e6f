"""A collection against a model of the API server: whatever happens, it ends up knowing what is there."""

import asyncio
import random
import selectors
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from epp.runtime.kube import watch
from epp.runtime.kube.api import KubeError, lines
from epp.runtime.kube.told import Told
from epp.runtime.kube.watch import Collection

PATH = "/apis/example.com/v1/namespaces/models/things"
# What a page of PAGE_SIZE objects holds in the model.
SCALED_PAGE = 3
SILENCE_S = 150.0

State = dict[str, str]


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    name: str
    resource_version: str


class Thing(msgspec.Struct, frozen=True):
    metadata: Metadata


class VirtualTime(selectors.DefaultSelector):
    """Time passes where all wait for it, and costs none."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen again"
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualTime()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class Connection:
    """One open watch: bytes on their way, and how it ends."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._sent = bytearray()
        self._more = asyncio.Event()
        self._end: KubeError | None = None
        self._ended = self._swallowed = False

    @property
    def open(self) -> bool:
        return not self._ended

    def send(self, event: dict[str, Any]) -> None:
        if not self._swallowed and not self._ended:
            self._sent += msgspec.json.encode(event) + b"\n"
            self._more.set()

    def end(self, error: KubeError | None = None) -> None:
        """An error takes bytes with it that were on their way."""
        if error is not None and self._sent:
            del self._sent[self._draw.randrange(len(self._sent) + 1) :]
        self._end, self._ended = error, True
        self._more.set()

    def swallow(self) -> None:
        self._swallowed = True

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            while self._sent:
                size = self._draw.choice((1, 7, 60, 1000, 65536))
                chunk = bytes(self._sent[:size])
                del self._sent[:size]
                yield chunk
                if self._draw.random() < 0.2:
                    await asyncio.sleep(self._draw.choice((0, 0.001, 0.005)))
            if self._ended:
                if self._end is not None:
                    raise self._end
                return
            self._more.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._more.wait()
            except TimeoutError:
                self.end()
                raise KubeError("WATCH", PATH, "nothing heard") from None


class World:
    """An API server with one collection, its whole history, and what clients ask of it."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.revision = 10
        self.now: State = {}
        self.names: dict[str, str] = {}
        # All that ever was there, in order: (revision, state).
        self.history: list[tuple[int, State]] = [(10, {})]
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.oldest = 10
        self.gone_as_event = draw.random() < 0.5
        self.connections: list[Connection] = []
        self.refusals: deque[int] = deque()
        self.tokens: dict[str, tuple[int, list[Any], int]] = {}
        self.born = 0
        for name in range(draw.randrange(10)):
            self.add(name)

    # What happens on the server.

    def add(self, name: int) -> None:
        self.born += 1
        uid = f"uid-{self.born}"
        self.names[uid] = f"thing-{name % 4}"
        self._commit("ADDED", uid)

    def update(self, which: int) -> None:
        if self.now:
            self._commit("MODIFIED", sorted(self.now)[which % len(self.now)])

    def delete(self, which: int) -> None:
        if self.now:
            self._commit("DELETED", sorted(self.now)[which % len(self.now)])

    def elsewhere(self, _: int) -> None:
        """Another collection changed."""
        self.revision += 3

    def bookmark(self, _: int) -> None:
        head = {"resourceVersion": str(self.revision), "creationTimestamp": None}
        self._send({"type": "BOOKMARK", "object": {"kind": "Thing", "metadata": head}})

    def compact(self, _: int) -> None:
        self.oldest = self.revision

    def expire_tokens(self, _: int) -> None:
        self.tokens.clear()

    def end(self, _: int) -> None:
        self._end(None)

    def cut(self, _: int) -> None:
        self._end(KubeError("WATCH", PATH, "connection reset"))

    def swallow(self, _: int) -> None:
        for connection in self.connections:
            connection.swallow()

    def error_event(self, which: int) -> None:
        self._send({"type": "ERROR", "object": failure((410, 500, 504)[which % 3])})
        self._end(None)

    def refuse(self, which: int) -> None:
        self.refusals += [(0, 401, 403, 404, 429, 500, 503, 504)[which % 8]] * (1 + which % 3)

    def restart(self, which: int) -> None:
        """Connections end, calls fail for a while, and the watch cache begins anew."""
        self._end(None if which % 2 else KubeError("WATCH", PATH, "connection reset"))
        self.refusals += [0] * (which % 4) + [403, 503, 429][: which % 5]
        self.oldest = self.revision

    def _commit(self, kind: str, uid: str) -> None:
        self.revision += 1
        version = str(self.revision)
        event = {"type": kind, "object": self._object(uid, version)}
        self.now = self.now | {uid: version}
        if kind == "DELETED":
            del self.now[uid]
        self.history.append((self.revision, self.now))
        self.events.append((self.revision, event))
        self._send(event)

    def _object(self, uid: str, version: str) -> dict[str, Any]:
        return {"metadata": {"uid": uid, "name": self.names[uid], "resourceVersion": version}, "spec": {}}

    def _send(self, event: dict[str, Any]) -> None:
        for connection in self.connections:
            connection.send(event)

    def _end(self, error: KubeError | None) -> None:
        for connection in self.connections:
            connection.end(error)
        self.connections.clear()

    # What a client sees of it: the methods of KubeApi that a collection uses.

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        assert path == PATH
        assert query["labelSelector"] == "a=b"
        await asyncio.sleep(self.draw.choice((0, 0.001, 0.1)))
        self._admit("GET")
        if token := query.get("continue"):
            if token not in self.tokens or self.draw.random() < 0.1:
                raise KubeError("GET", PATH, "continue token is too old", status=410, reason="Expired")
            revision, items, start = self.tokens[token]
        else:
            items = [self._object(uid, version) for uid, version in self.now.items()]
            revision, start = self.revision, 0
        size = SCALED_PAGE if query.get("limit") else len(items) + 1
        head = {"resourceVersion": str(revision)}
        if start + size < len(items):
            head["continue"] = f"{revision}-{start + size}"
            self.tokens[head["continue"]] = (revision, items, start + size)
        return msgspec.json.encode({"metadata": head, "items": items[start : start + size]})

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[list[bytes]]:
        assert path == PATH
        assert query["labelSelector"] == "a=b"
        assert query["allowWatchBookmarks"] == "true"
        await asyncio.sleep(self.draw.choice((0, 0.001)))
        self._admit("WATCH")
        connection = Connection(self.draw)
        since = int(query["resourceVersion"])
        if since < self.oldest:
            if not self.gone_as_event:
                raise KubeError("WATCH", PATH, "too old resource version", status=410, reason="Expired")
            connection.send({"type": "ERROR", "object": failure(410)})
            connection.end()
        else:
            for revision, event in self.events:
                if revision > since:
                    connection.send(event)
            self.connections.append(connection)
        yield []
        async for batch in lines(connection.chunks()):
            yield batch

    def _admit(self, verb: str) -> None:
        if self.refusals and (status := self.refusals.popleft()) is not None:
            wait_s = 1.0 if status in (429, 503) else None
            raise KubeError(verb, PATH, "refused", status=status, reason="Refused", retry_after_s=wait_s)


def failure(code: int) -> dict[str, Any]:
    reason = "Expired" if code == 410 else "InternalError"
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "no"}


STEPS: dict[str, Callable[[World, int], None]] = {
    name: getattr(World, name)
    for name in (
        "add",
        "update",
        "delete",
        "elsewhere",
        "bookmark",
        "compact",
        "expire_tokens",
        "end",
        "cut",
        "swallow",
        "error_event",
        "refuse",
        "restart",
    )
}
PAUSES_S = (0.0, 0.0, 0.0, 0.0005, 0.004, 0.3, 5.0, 40.0)
COMMON = st.sampled_from(("add", "add", "update", "delete", "bookmark", "elsewhere"))
NAMES = st.one_of(COMMON, st.sampled_from(sorted(STEPS)))
HISTORIES = st.tuples(
    st.lists(st.tuples(NAMES, st.integers(0, 19), st.sampled_from(PAUSES_S)), min_size=1, max_size=50),
    st.integers(0, 1 << 16),
)
History = tuple[list[tuple[str, int, float]], int]
Make = Callable[..., Collection[Thing]]


async def play(history: History, make: Make) -> tuple[World, list[State], Collection[Thing], list[str]]:
    steps, seed = history
    world = World(random.Random(seed))
    told: list[State] = []
    said: list[str] = []

    def changed(objects: Mapping[str, Thing]) -> None:
        told.append(state_of(objects))

    collection = make(
        world,
        PATH,
        Thing,
        changed,
        label_selector="a=b",
        said=said.append,
        chance=world.draw.random,
    )
    running = asyncio.create_task(collection.run())
    for name, which, pause_s in steps:
        STEPS[name](world, which)
        await asyncio.sleep(pause_s)
    world.refusals.clear()
    await asyncio.sleep(2 * SILENCE_S)
    assert not running.done(), "run() ended"
    running.cancel()
    await asyncio.wait([running])
    return world, told, collection, said


def state_of(objects: Mapping[str, Thing]) -> State:
    return {uid: thing.metadata.resource_version for uid, thing in objects.items()}


def check(history: History, make: Make = Collection) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world, told, collection, said = runner.run(play(history, make))
    assert collection.synced
    assert collection.trouble is None
    assert state_of(collection.objects) == world.now
    assert told[-1] == world.now
    assert all(before != after for before, after in zip(told, told[1:], strict=False)), "told twice"
    # What is told is a past of the server, and never goes back: no object comes again or grows younger, none
    # goes that is there.
    states = iter(state for _, state in world.history)
    for state in told:
        assert any(state == past for past in states), f"{state} was not, or not any more"
    # Each kind of trouble is told once until it is over, and its end after it.
    open_troubles: set[str] = set()
    for line in said:
        if line.endswith("followed again"):
            assert open_troubles
            open_troubles.clear()
        else:
            assert line not in open_troubles
            open_troubles.add(line)
    assert not open_troubles


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(HISTORIES)
def test_a_collection_ends_up_knowing_what_is_there(history: History) -> None:
    check(history)


class NeverListsAgain(Collection[Thing]):
    """A version that is of no use any more is kept."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "_version" or value or not hasattr(self, "_version"):
            super().__setattr__(name, value)


class WatchesFromTheList(Collection[Thing]):
    """Versions of events are not noted."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "_version" or not value or not getattr(self, "_version", ""):
            super().__setattr__(name, value)


class KeepsTheVanished(Collection[Thing]):
    """A list adds to what is known."""

    async def _list_by(self, limit: str) -> None:
        before = dict(self._objects)
        await super()._list_by(limit)
        self._objects = before | self._objects
        if self._objects.keys() != state_of(self.objects).keys() or before.keys() - self._objects.keys():
            self._changed(self.objects)


class ForgetsInTrouble(Collection[Thing]):
    """What is known goes with the server."""

    def _failed(self, error: KubeError) -> float:
        if self._objects:
            self._objects = {}
            self._changed({})
        return super()._failed(error)


class LetsErrorsPass(Collection[Thing]):
    """An ERROR is taken for an event without an object."""

    def _hear(self, lines: list[bytes]) -> None:
        if passed := [line for line in lines if b'"ERROR"' not in line]:
            super()._hear(passed)


class TellsWhileListing(Collection[Thing]):
    """The pages of a list are told one by one."""

    def _take(self, raw: Any, into: dict[str, Thing], known: Any, unreadable: set[str]) -> str:
        version = super()._take(raw, into, known, unreadable)
        if into is not known and state_of(into) != state_of(self._objects):
            self._changed(into)
        return version


class EndsWithAnExpiredToken(Collection[Thing]):
    """A list whose token expired counts as far as it came."""

    def __init__(self, api: Any, *args: Any, **more: Any) -> None:
        super().__init__(api, *args, **more)
        get = api.get

        async def lenient(path: str, query: Mapping[str, str]) -> bytes:
            try:
                return bytes(await get(path, query))
            except KubeError as error:
                if error.status != 410:
                    raise
                return b'{"metadata": {"resourceVersion": "1"}}'

        api.get = lenient


class ComplainsAlways(Collection[Thing]):
    """Every failure is told."""

    def _failed(self, error: KubeError) -> float:
        self._told = Told(self._said)
        return super()._failed(error)


FAULTS = (
    NeverListsAgain,
    WatchesFromTheList,
    KeepsTheVanished,
    ForgetsInTrouble,
    LetsErrorsPass,
    TellsWhileListing,
    EndsWithAnExpiredToken,
    ComplainsAlways,
)


def caught(history: History, make: Make = Collection) -> bool:
    try:
        check(history, make)
    except AssertionError:
        return True
    return False


def find_out(make: Make = Collection, examples: int = 400) -> None:
    """Raises NoSuchExample when no history shows the fault."""
    quick = settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    find(HISTORIES, lambda history: caught(history, make), settings=quick)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: Make) -> None:
    find_out(fault)


def test_a_change_told_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_differ", lambda one, other: True)
    find_out()


def test_lines_that_lose_what_was_begun_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def losing(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
        begun = False
        async for chunk in chunks:
            *complete, rest = chunk.split(b"\n")
            yield [line for line in complete[begun:] if line]
            begun = bool(rest) or (begun and not complete)

    monkeypatch.setitem(globals(), "lines", losing)
    find_out()


def test_the_search_for_faults_can_fail() -> None:
    with pytest.raises(NoSuchExample):
        find_out(examples=20)
