"""Which replica of a picker leads: by its log, and by the Lease that passes from one to the next."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from e2e.kube import Namespace
from e2e.kube_client import Refused, Thing
from e2e.kube_line import POOL
from e2e.kube_picker import ClusterPicker

LEASE: Final = ("coordination.k8s.io/v1", "Lease")


def leads(picker: ClusterPicker) -> bool:
    """By its log, whether or not only a leader is ready."""
    told = [
        text for text in picker.log_lines() if "leads the replicas" in text or "not lead any more" in text
    ]
    return bool(told) and "leads the replicas" in told[-1] and picker.child.returncode is None


def lease_name(namespace: Namespace) -> str:
    return f"epp-{namespace.name}-{POOL}.llm-d.ai"


async def lease(namespace: Namespace) -> Thing:
    """Its spec; empty where there is none."""
    try:
        spec: Thing = (await namespace.client.get(namespace.path(*LEASE, lease_name(namespace))))["spec"]
    except Refused as refused:
        if refused.status == 404:
            return {}
        raise
    return spec


@asynccontextmanager
async def hands(namespace: Namespace) -> AsyncIterator[list[str]]:
    """Who holds the lease inside, one after the other; "" = nobody.

    A lease that is given back passes through nobody's hands, one that only runs out does not: how fast the
    machine is does not come into it.
    """
    holders: list[str] = []
    path, selector = namespace.path(*LEASE), f"metadata.name={lease_name(namespace)}"

    def note(thing: Thing) -> None:
        holder = thing["spec"].get("holderIdentity") or ""
        if not holders or holders[-1] != holder:
            holders.append(holder)

    listed = await namespace.client.get(path, fieldSelector=selector)
    for thing in listed["items"]:
        note(thing)

    async def follow() -> None:
        version = listed["metadata"]["resourceVersion"]
        async for _, thing in namespace.client.watch(path, version, fieldSelector=selector):
            note(thing)

    following = asyncio.create_task(follow())
    try:
        yield holders
    finally:
        ended = following.done()
        following.cancel()
        await asyncio.wait([following])
    assert not ended, "nobody has told who held the lease"
