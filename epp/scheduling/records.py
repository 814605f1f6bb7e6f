"""Records of one scheduling decision and of what happens to it afterwards."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NewType

from epp.payload.records import InferenceRequest, Usage
from epp.pool.records import Endpoint, Floats, Ints, LoadReport, Mask

TicketId = NewType("TicketId", int)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of the request's prompts each endpoint already holds. The one prefix fact for everyone.

    Attributes:
        blocks: leading blocks held, by slot, summed over the request's prompts.
        total_blocks: full blocks of all prompts; 0 when every prompt is shorter than a block.
        block_tokens: tokens per block.
        total_tokens: prompt tokens, partial blocks included.
    """

    blocks: Ints
    total_blocks: int
    block_tokens: int
    total_tokens: int

    def cached(self, slot: int) -> int:
        """Leading blocks that a request placed at the slot need not compute."""
        return int(self.blocks[slot])


@dataclass(frozen=True, slots=True)
class PlannedMatch(PrefixMatch):
    """A match that says where the prompts are to go, whatever is held there; for who chooses.

    Attributes:
        ahead: of `blocks`, those that requests sent there before are computing.
    """

    ahead: int

    def cached(self, slot: int) -> int:
        """No more than what is computed before."""
        return min(int(self.blocks[slot]), self.ahead)


@dataclass(frozen=True, slots=True)
class FactKey:
    """Name of one produced fact: its kind (`prefix-match`) and the plugin that makes it."""

    kind: str
    producer: str


@dataclass(frozen=True, slots=True)
class InflightLoad:
    """What is in flight to each endpoint, by slot, as one producer counts it.

    Attributes:
        requests: sent and not ended.
        tokens: prompt tokens until the first output token, and output tokens where they are estimated.
    """

    requests: Ints
    tokens: Ints


PREFIX_MATCH = "prefix-match"
"""Kind of fact: a `PrefixMatch`."""

INFLIGHT_LOAD = "in-flight-load"
"""Kind of fact: an `InflightLoad`."""

SESSION_ID = "session-id"
"""Kind of fact: the session's name, a text; absent where the request names none."""

Facts = dict[FactKey, Any]
"""Facts produced for one request; `FactKey.kind` says of which type each is."""

Edits = tuple[tuple[str, bytes], ...]
"""Headers to set."""

Metadata = tuple[tuple[str, str, float], ...]
"""Dynamic metadata for the proxy: namespace, key, and the figure."""


class Role(StrEnum):
    """What a leg of a placement does."""

    DECODE = "decode"
    PREFILL = "prefill"
    ENCODE = "encode"


@dataclass(frozen=True, slots=True)
class ScoreColumn:
    """One scorer's contribution: `scores` in 0..1 by slot (meaningful where `alive`), before weighting."""

    name: str
    weight: float
    scores: Floats


@dataclass(frozen=True, slots=True)
class PluginTiming:
    """How long one plugin took: labels and value of the metric `plugin_duration_seconds`."""

    extension_point: str
    plugin_type: str
    plugin_name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Why these endpoints: everything `explain` shows.

    Attributes:
        profile: name of the scheduling profile that ran.
        slots: chosen endpoints, first choice first.
        candidates: eligible before any filter.
        excluded: what each filter took out, in order.
        total: sum of weight x score, by slot; NaN where not alive.
        timings: of each plugin that ran, on sampled requests only.
    """

    profile: str
    slots: tuple[int, ...]
    candidates: Mask
    excluded: tuple[tuple[str, Mask], ...]
    columns: tuple[ScoreColumn, ...]
    total: Floats
    timings: tuple[PluginTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class Leg:
    """One role of a placement: endpoints in order of preference, with their slots."""

    role: Role
    endpoints: tuple[Endpoint, ...]
    decision: Decision


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. Legs: one normally; decode last when prefill is split off.

    Attributes:
        set_headers: for the engine, beside the destination.
    """

    ticket: TicketId
    legs: tuple[Leg, ...]
    set_headers: Edits = ()

    @property
    def serving(self) -> Leg:
        """The leg whose first endpoint the proxy sends the request to."""
        return self.legs[-1]


# -- what the director hears of an answer ---------------------------------------------------------


class Cause(StrEnum):
    """How an exchange ended."""

    NATURAL = "Natural"
    CLIENT_DISCONNECT = "ClientDisconnect"
    ERROR = "Error"


@dataclass(frozen=True, slots=True)
class AnswerHeaders:
    """The engine answered.

    Attributes:
        status: of HTTP; where gRPC says in its headers that a call has failed, the one that comes nearest.
        served: the `address:port` that the proxy reports to have used, if it does.
        load: what the engine says of itself beside the answer, if it does.
    """

    status: int
    served: str | None
    streaming: bool
    load: LoadReport | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first output token passed (for a plain answer: its first body bytes)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Answer bytes and chunks so far; at most one of these a second."""

    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Completed:
    """All of an answer is here, and its end was not sent on yet. Only told where somebody reports on answers.

    It is not among the facts of an answer: what is asked for is metadata, nothing has happened.
    """

    usage: Usage | None
    chunks: int
    bytes: int


GAP_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between the chunks of an answer, from its first output token on.

    Attributes:
        counts: how many are at most the bound in `GAP_BOUNDS_S` at the same place; the longer ones last.
        seconds: their sum.
    """

    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The exchange is over; always the last fact, exactly once. `gaps`: None before the first token."""

    cause: Cause
    usage: Usage | None
    chunks: int
    bytes: int
    gaps: Gaps | None = field(default=None, compare=False)


AnswerFact = AnswerHeaders | FirstToken | Progress | Ended


@dataclass(slots=True)
class Ticket:
    """One placed request until it ends. Owned by the director; hooks may read it.

    Attributes:
        request: without its prompts, which only the choice needs.
        prefill_tokens: charged to the serving slot until the first token.
        slot: where the request is charged now (moves when the proxy reports another endpoint).
        flow, priority: as in `Ctx`.
    """

    id: TicketId
    request: InferenceRequest
    placement: Placement
    slot: int
    prefill_tokens: int
    placed_at: float
    first_token_at: float | None = None
    status: int = 0
    streaming: bool = False
    facts: Facts = field(default_factory=dict)
    flow: str = ""
    priority: int = 0
