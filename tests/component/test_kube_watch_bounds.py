"""How often a server is asked that ends each watch at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from epp.runtime.kube import watch
from epp.runtime.kube.api import KubeApi
from epp.runtime.kube.objects import Pod
from epp.runtime.kube.watch import Backoff, Collection

FIRST_S = 0.05
AT_ONCE = 3
MOST = 30
DEADLINE_S = 60.0

_sleep = asyncio.sleep


def event(kind: str, version: int) -> bytes:
    metadata = {"uid": "a", "name": "a", "resourceVersion": str(version)}
    return json.dumps({"type": kind, "object": {"metadata": metadata}}).encode()


EXPIRED = json.dumps({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}).encode()


class Server:
    """Tells one thing in each watch, and ends it; the last of `MOST` tells nothing, and stays."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lists = 0
        self.watches = 0
        self.enough = asyncio.Event()

    async def get(self, _path: str, _query: Mapping[str, str]) -> bytes:
        self.lists += 1
        await _sleep(0)
        return b'{"metadata": {"resourceVersion": "1"}, "items": []}'

    async def watch(self, _path: str, _query: Mapping[str, str]) -> AsyncIterator[list[bytes]]:
        self.watches += 1
        yield []
        if self.watches == MOST:
            self.enough.set()
            await asyncio.Event().wait()
        yield [EXPIRED if self.kind == "ERROR" else event(self.kind, self.watches + 1)]
        if self.kind == "then ERROR":
            await _sleep(0.02)
            yield [EXPIRED]


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "BOOKMARK", "ERROR", "then ERROR"])
async def test_a_server_that_ends_all_watches_is_not_flooded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(kind)
    told: list[int] = []
    paused: dict[int, float] = {}

    async def pass_quickly(seconds: float) -> None:
        paused[server.watches] = seconds
        await _sleep(0)

    monkeypatch.setattr("epp.runtime.kube.watch.asyncio.sleep", pass_quickly)
    # None of them lasts, however long the machine stands still.
    monkeypatch.setattr(watch, "_STEADY_S", 2 * DEADLINE_S)
    collection = Collection(
        cast("KubeApi", server),
        "/pods",
        Pod,
        lambda found: told.append(len(found)),
        said=lambda _: None,
        backoff=Backoff(first_s=FIRST_S),
    )
    running = asyncio.create_task(collection.run())
    async with asyncio.timeout(DEADLINE_S):
        await server.enough.wait()
    running.cancel()
    await asyncio.wait([running])
    # Three at once, then one after each pause; of events nothing is lost by that.
    assert {*range(AT_ONCE, MOST)} <= paused.keys()
    assert all(paused[number] >= FIRST_S for number in range(AT_ONCE, MOST))
    assert server.lists == (MOST if "ERROR" in kind else 1)
    if kind in ("ADDED", "MODIFIED"):
        assert told[0] == 0
        assert len(told) == MOST
