"""A collection whose server ends every watch: hundreds of times leave nothing behind."""

import asyncio
import gc
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web

from epp.runtime.kube.api import KubeApi
from epp.runtime.kube.watch import Backoff, Collection

PATH = "/api/v1/namespaces/models/pods"
ONCE, AGAIN = 30, 150
MOST_KEPT_BYTES = 300_000
"""What is read and answered at the moment, however many watches there were."""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    resource_version: str


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata


class Ending:
    """A server with one pod, that changes with every watch; then the watch ends, or the connection breaks, or
    all has to be listed again."""

    def __init__(self) -> None:
        self.watches = 0
        self.url = ""
        self._wanted = 0
        self._reached = asyncio.Event()
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(app, access_log=None)

    async def __aenter__(self) -> "Ending":
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def _pod(self) -> dict[str, Any]:
        return {"metadata": {"uid": "a", "resourceVersion": str(self.watches)}}

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            head = {"resourceVersion": str(self.watches)}
            return web.json_response({"metadata": head, "items": [self._pod()]})
        self.watches += 1
        if self.watches >= self._wanted:
            self._reached.set()
        response = web.StreamResponse()
        await response.prepare(request)
        gone = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
        event = gone if self.watches % 3 == 0 else {"type": "MODIFIED", "object": self._pod()}
        await response.write(json.dumps(event).encode() + b"\n")
        if self.watches % 3 == 1:
            assert request.transport is not None
            request.transport.abort()
        return response

    async def watched(self, times: int) -> tuple[int, int, int]:
        """After so many more watches: bytes held, descriptors, tasks."""
        self._wanted = self.watches + times
        self._reached.clear()
        async with asyncio.timeout(60):
            await self._reached.wait()
        gc.collect()
        return (
            tracemalloc.get_traced_memory()[0],
            len(os.listdir("/proc/self/fd")),
            len(asyncio.all_tasks()),
        )


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux shows them")
@pytest.mark.parametrize("leaks", [False, True], ids=["as-it-is", "planted-leak"])
async def test_watches_that_end_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaks: bool
) -> None:
    kept: list[object] = []
    if leaks:
        take = KubeApi.watch
        monkeypatch.setattr(KubeApi, "watch", lambda *asked: kept.append(bytearray(10_000)) or take(*asked))
    config = tmp_path / "kubeconfig"
    quick = Backoff(first_s=0.001, most_s=0.002, away_s=0.002)
    async with Ending() as server:
        cluster = {"name": "c", "cluster": {"server": server.url}}
        context = {"name": "x", "context": {"cluster": "c"}}
        config.write_text(
            yaml.safe_dump({"current-context": "x", "clusters": [cluster], "contexts": [context]})
        )
        api = await KubeApi.connect(str(config), {})
        collection = Collection(api, PATH, Pod, lambda _: None, said=lambda _: None, backoff=quick)
        following = asyncio.create_task(collection.run())
        tracemalloc.start()
        try:
            await server.watched(ONCE)
            before = await server.watched(ONCE)
            after = await server.watched(AGAIN)
        finally:
            tracemalloc.stop()
            following.cancel()
            await asyncio.wait([following])
            await api.close()
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert (grown[0] < MOST_KEPT_BYTES) != leaks, grown
    # One connection more or less is on its way.
    assert max(grown[1:]) <= 3, grown
