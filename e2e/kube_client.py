"""The API server as a test asks it: objects are plain JSON, and what it refuses is raised."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

Thing = dict[str, Any]
"""An object of the API."""

MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"

_NOT_NAMESPACED = {"Namespace", "Node", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
_CALL_S = 60.0
_NOT_YET: Final = "storage is (re)initializing"
_AGAIN_S = 0.1


class Refused(Exception):
    """The API server answered with an error: its HTTP status, and the reason and message of its Status."""

    def __init__(self, status: int, body: str) -> None:
        try:
            said = json.loads(body)
        except ValueError:
            said = {}
        self.status = status
        self.reason: str = said.get("reason", "")
        self.message: str = said.get("message", body)
        super().__init__(f"{status} {self.reason}: {self.message}")


AWAY: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""What is raised where the API server is not there, or goes while it answers."""


def path_of(api_version: str, kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Where objects of this kind are; without `name` their collection."""
    root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    lower = kind.lower()
    plural = f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"
    within = "" if kind in _NOT_NAMESPACED or not namespace else f"/namespaces/{namespace}"
    return root + within + f"/{plural}" + "".join(f"/{part}" for part in (name, subresource) if part)


class KubeClient:
    """One user's access. All calls raise Refused, and one of `AWAY` where nobody answers.

    What the API server has no answer to yet, because it is only getting to know objects of the kind, is asked
    again, as every client of Kubernetes does.

    Attributes:
        warned: what the API server warned of, in the order of the calls.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.warned: list[str] = []
        self._session = session
        self._url = url

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Thing:
        headers = {"content-type": content_type} if body is not None else {}
        while True:
            async with self._session.request(
                method,
                self._url + path,
                params=query or {},
                data=None if body is None else json.dumps(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(_CALL_S),
            ) as answer:
                text = await answer.text()
                self.warned += answer.headers.getall("warning", [])
                if answer.status < 400:
                    made: Thing = json.loads(text)
                    return made
            _raise_unless_not_yet(answer.status, text)
            await asyncio.sleep(_AGAIN_S)

    async def get(self, path: str, **query: str) -> Thing:
        return await self.call("GET", path, query=query)

    async def items(self, path: str, **query: str) -> list[Thing]:
        found: list[Thing] = (await self.get(path, **query))["items"]
        return found

    async def create(self, thing: Thing, **query: str) -> Thing:
        """`thing` says its kind; its namespace where it has one."""
        metadata = thing["metadata"]
        path = path_of(thing["apiVersion"], thing["kind"], metadata.get("namespace", ""))
        return await self.call("POST", path, thing, query=query)

    async def patch(self, path: str, patch: object, content_type: str = MERGE, **query: str) -> Thing:
        return await self.call("PATCH", path, patch, content_type=content_type, query=query)

    async def delete(self, path: str, grace_s: int | None = None, uid: str | None = None) -> None:
        """Returns once the API server has acknowledged, which may be before the object is gone."""
        body: Thing = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self.call("DELETE", path, body)

    async def watch(self, path: str, version: str, **query: str) -> AsyncGenerator[tuple[str, Thing], None]:
        """Type and object of each event from `version` on, until the API server ends it."""
        asked = {"watch": "true", "resourceVersion": version, **query}
        while True:
            async with self._session.get(
                self._url + path, params=asked, timeout=aiohttp.ClientTimeout(None, sock_connect=_CALL_S)
            ) as answer:
                if answer.status < 400:
                    async for event in _events(answer.content):
                        yield event
                    return
                text = await answer.text()
            _raise_unless_not_yet(answer.status, text)
            await asyncio.sleep(_AGAIN_S)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, Thing]]:
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            yield event["type"], event["object"]


def _raise_unless_not_yet(status: int, text: str) -> None:
    refused = Refused(status, text)
    if status != 429 or _NOT_YET not in refused.message:
        raise refused


@asynccontextmanager
async def kube_client(url: str, ca: Path, token: str) -> AsyncIterator[KubeClient]:
    context = await asyncio.to_thread(ssl.create_default_context, cafile=str(ca))
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers={"authorization": f"Bearer {token}"}
    ) as session:
        yield KubeClient(session, url)
