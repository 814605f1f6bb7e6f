"""How often a server is asked that ends each watch at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from epp.runtime.kube.api import KubeApi
from epp.runtime.kube.objects import Pod
from epp.runtime.kube.watch import Backoff, Collection

FIRST_S = 0.05
FOR_S = 0.5


def event(kind: str, version: int) -> bytes:
    metadata = {"uid": "a", "name": "a", "resourceVersion": str(version)}
    return json.dumps({"type": kind, "object": {"metadata": metadata}}).encode()


EXPIRED = json.dumps({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}).encode()


class Server:
    """Tells one thing in each watch, and ends it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lists = 0
        self.watches = 0

    async def get(self, _path: str, _query: Mapping[str, str]) -> bytes:
        self.lists += 1
        await asyncio.sleep(0)
        return b'{"metadata": {"resourceVersion": "1"}, "items": []}'

    async def watch(self, _path: str, _query: Mapping[str, str]) -> AsyncIterator[list[bytes]]:
        self.watches += 1
        yield []
        yield [EXPIRED if self.kind == "ERROR" else event(self.kind, self.watches + 1)]
        if self.kind == "then ERROR":
            await asyncio.sleep(0.02)
            yield [EXPIRED]


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "BOOKMARK", "ERROR", "then ERROR"])
async def test_a_server_that_ends_all_watches_is_not_flooded(kind: str) -> None:
    server = Server(kind)
    told: list[int] = []
    collection = Collection(
        cast("KubeApi", server),
        "/pods",
        Pod,
        lambda found: told.append(len(found)),
        said=lambda _: None,
        backoff=Backoff(first_s=FIRST_S),
    )
    running = asyncio.create_task(collection.run())
    await asyncio.sleep(FOR_S)
    running.cancel()
    await asyncio.wait([running])
    # Three at once, then one after each pause; of events nothing is lost by that.
    assert 3 < server.watches <= 4 + FOR_S / FIRST_S
    assert server.lists <= server.watches
    if kind in ("ADDED", "MODIFIED"):
        assert told[0] == 0
        assert len(told) == server.watches + 1
