"""Endpoints and the columns that describe them.

Every endpoint has a small integer *slot*. All per-endpoint numbers are numpy arrays indexed by slot,
written in place by their one owner (`PoolStore` or `InflightLedger`). Arrays have `capacity` entries,
more than there are endpoints; `candidates` says which slots may be chosen now. Capacity grows by
replacing the arrays, so keep the record, not an array, across calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Endpoint(msgspec.Struct, frozen=True):
    """One address that can serve requests.

    Attributes:
        uid: identity for life: pod uid and target port. A recreated pod of the same name has another.
        name, namespace: for people, labels and metrics.
        address: IP address or host name, IPv6 without brackets.
        pod: name of its pod, which may have several endpoints; "" = unknown.
        node_address: IP address of the pod's node; "" = unknown, as it is to files and flags.
    """

    uid: str
    name: str
    namespace: str
    address: str
    port: int
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    pod: str = ""
    node_address: str = ""

    @property
    def host_port(self) -> str:
        """`address:port`, IPv6 in brackets: the form of the destination header."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine says of its load beside an answer; None = not said.

    Attributes:
        waiting, running: requests. kv_usage: share in 0..1.
        attributes: every other figure, by its name in the report's text form (`named_metrics.x`).
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    attributes: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Adapters:
    """LoRA adapters, by name and slot, as the engines tell them.

    Attributes:
        running, waiting: slots where the adapter serves a request, or is to.
        count: different adapters running or waiting. most: how many fit at once; 0 = unknown.
    """

    running: dict[str, Mask]
    waiting: dict[str, Mask]
    count: Ints
    most: Ints


@dataclass(slots=True)
class PoolView:
    """What is known about the pool's endpoints, by slot. Read-only for all but `PoolStore`.

    Attributes:
        endpoints: replaced as a whole when membership changes; None in a free slot. A removed endpoint
            is no candidate any more, but owns its slot until the last request to it has ended.
        host_ports: `Endpoint.host_port` per slot, "" in a free slot; replaced with `endpoints`.
        identity: 64-bit digest of each endpoint's uid: a property of the endpoint, not of its slot.
        candidates: members that may be chosen now (ready, reachable).
        present: scraped at least once. Where False the scraped columns hold 0.
        stale: scraped, but too long ago to be trusted (set by `PoolStore.refresh`).
        waiting_known, running_known, kv_known: the endpoint told `waiting`, `running`, `kv_usage`; not so
            where an engine has no such series, or tells it no more while it tells others. Where False the
            column holds 0, which is no figure.
        waiting, running: requests. kv_usage: share in 0..1.
        block_size: tokens per KV block. cache_tokens: size of the prefix cache in tokens. 0 = unknown.
        hit_tokens, query_tokens: the engine's prefix-cache counters, tokens since its start. NaN = unknown.
        scraped_at: seconds, monotonic.
        epoch: grows when `endpoints` is replaced.
        by_host_port: slot of the endpoint at `address:port`.
        adapters: LoRA adapters; None until an engine tells of any.
        models: slots whose engine lists the model; empty unless a source asks for it.
        attributes: figures by attribute key, one column each, NaN = unknown; the declared keys, no others.
    """

    capacity: int
    endpoints: tuple[Endpoint | None, ...]
    host_ports: tuple[str, ...]
    identity: NDArray[np.uint64]
    candidates: Mask
    present: Mask
    stale: Mask
    waiting_known: Mask
    running_known: Mask
    kv_known: Mask
    waiting: Floats
    running: Floats
    kv_usage: Floats
    block_size: Ints
    cache_tokens: Ints
    hit_tokens: Floats
    query_tokens: Floats
    scraped_at: Floats
    epoch: int = 0
    by_host_port: dict[str, int] = field(default_factory=dict)
    adapters: Adapters | None = None
    models: dict[str, Mask] = field(default_factory=dict)
    attributes: dict[str, Floats] = field(default_factory=dict)


@dataclass(slots=True)
class Load:
    """What this picker has in flight, by slot. Read-only for all but `InflightLedger`.

    Attributes:
        requests: requests sent and not ended.
        prefill_tokens: prompt tokens expected to be computed (not cached), until the first output token.
    """

    requests: Ints
    prefill_tokens: Ints
