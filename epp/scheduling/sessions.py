"""Session affinity: requests of one session go to one endpoint.

Two strategies, each as a filter (only that endpoint) and as a scorer (preferably that endpoint):

- `encoded_endpoint_header`: the client carries a token that names its endpoint. No state here.
- `session_id`: the client names its session, and the picker remembers where the session is bound.
"""

from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from epp.payload.records import find_header
from epp.pool.records import Floats, Mask, PoolView
from epp.scheduling.header_names import header_name, settable_header_name
from epp.scheduling.membership import SHOWN_ENDPOINTS, ByMembership, Owners
from epp.scheduling.ports import Ctx
from epp.scheduling.records import (
    SESSION_ID,
    AnswerFact,
    AnswerHeaders,
    Decision,
    Edits,
    FactKey,
    Leg,
    Placement,
    Ticket,
)

SESSION_ID_ATTRIBUTE: Final = "SessionIDDataKey"
DEFAULT_TTL_S: Final = 300.0
DEFAULT_SWEEP_S: Final = 10.0
MAX_SESSIONS: Final = 1 << 18
_BOUND: Final = "session-bound"


class SessionSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where a session's name is read from: a header, or what another plugin found out.

    Attributes:
        header: name of a request header.
        attribute: name of a request attribute (`agent-identity`), or, with `producer`, `SessionIDDataKey`.
        producer: name of the `session-id-producer` whose finding is meant.
    """

    header: str = ""
    attribute: str = ""
    producer: str = ""

    def __post_init__(self) -> None:
        if bool(header_name(self.header)) == bool(self.attribute):
            raise ValueError("exactly one of header or attribute must be set")
        if bool(self.producer) != (self.attribute == SESSION_ID_ATTRIBUTE):
            raise ValueError(f"attribute {SESSION_ID_ATTRIBUTE} and producer belong together")


class SessionIdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Settings of the strategy `session_id`.

    Attributes:
        sources: the first that yields a name counts; empty = the header `x-session-id`.
        eviction_ttl_seconds: how long a session stays bound unused; 0 = 300.
        eviction_sweep_seconds: how often the expired are removed; 0 = 10.
    """

    sources: tuple[SessionSource, ...] = (SessionSource(header="x-session-id"),)
    eviction_ttl_seconds: Annotated[float, Meta(ge=0)] = DEFAULT_TTL_S
    eviction_sweep_seconds: Annotated[float, Meta(ge=0)] = DEFAULT_SWEEP_S


class EncodedEndpointHeaderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Settings of the strategy `encoded_endpoint_header`: the header of request and answer."""

    header: str = "x-session-token"

    def __post_init__(self) -> None:
        settable_header_name(self.header)


class SessionAffinityParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `session-affinity-filter` and `session-affinity-scorer`.

    Attributes:
        profile_name: the profile whose endpoint the session is bound to; empty = the serving one.
        encoded_endpoint_header_config, session_id_config: for the strategy of that name.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    profile_name: str = ""
    encoded_endpoint_header_config: EncodedEndpointHeaderConfig = EncodedEndpointHeaderConfig()
    session_id_config: SessionIdConfig = SessionIdConfig()

    def needs(self) -> tuple[FactKey, ...]:
        """The session names that its sources read from producers."""
        if self.strategy != "session_id":
            return ()
        sources = self.session_id_config.sources
        return tuple(FactKey(SESSION_ID, source.producer) for source in sources if source.producer)


class EncodedEndpointPin:
    """The token is the base64 of `namespace/name` of the endpoint that served the last request.

    Every answer carries the token of the endpoint that served it, so the client has only to send back what
    it got. A token that names no endpoint in question, or that is none, pins to nothing. Where several
    endpoints bear one name, it pins to all of them.
    """

    def __init__(self, params: SessionAffinityParams, view: PoolView) -> None:
        name = settable_header_name(params.encoded_endpoint_header_config.header)
        self._header = name or EncodedEndpointHeaderConfig().header
        self._profile = params.profile_name
        self._view = view
        self._slots = ByMembership(_slots_by_name)

    def pinned(self, ctx: Ctx, alive: Mask) -> Sequence[int]:
        """Those of `alive` that the token names."""
        token = find_header(ctx.headers, self._header)
        if not token:
            return ()
        try:
            name = b64decode(token, validate=True)
        except ValueError:
            return ()
        return [slot for slot in self._slots.of(ctx.view).get(name, ()) if alive[slot]]

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> Edits | None:
        """The token, on the answer's head; none where the profile did not run."""
        if not isinstance(fact, AnswerHeaders):
            return None
        leg = _leg(ticket.placement, self._profile)
        if leg is None:
            return None
        serving = leg is ticket.placement.serving
        endpoint = self._view.endpoints[ticket.slot] if serving else leg.endpoints[0]
        if endpoint is None:
            return None
        return ((self._header, b64encode(_name(endpoint.namespace, endpoint.name))),)


class SessionBindings:
    """Which slot each session is bound to. The one owner of this.

    At most `MAX_SESSIONS` are kept; beyond, the longest unused goes. Names are kept as keyed 128-bit hashes,
    so a session costs the same whatever its client calls it. A binding to an endpoint that left is void at
    once, and goes when it expires.
    """

    def __init__(self, ttl_s: float, sweep_s: float, secret: bytes) -> None:
        self._ttl_s = ttl_s
        self._sweep_s = sweep_s
        self._seed = int.from_bytes(secret[:8], "little")
        self._bound: OrderedDict[bytes, tuple[int, int, float]] = OrderedDict()
        self._generations: dict[int, int] = {}
        self._swept_at = 0.0

    def __len__(self) -> int:
        return len(self._bound)

    def key(self, session: str) -> bytes:
        """What a session is known by here."""
        return xxhash.xxh3_128_digest(session.encode("utf-8", "surrogatepass"), self._seed)

    def slot(self, key: bytes) -> int | None:
        """Where the session is bound; None = nowhere. Expired bindings count until they are swept."""
        found = self._bound.get(key)
        if found is None or found[1] != self._generations.get(found[0], 0):
            return None
        return found[0]

    def bind(self, key: bytes, slot: int, now: float) -> None:
        """Bind the session, or use its binding."""
        self._bound[key] = (slot, self._generations.get(slot, 0), now)
        self._bound.move_to_end(key)
        if len(self._bound) > MAX_SESSIONS:
            self._bound.popitem(last=False)

    def left(self, slot: int) -> None:
        """The slot has another owner from now on."""
        self._generations[slot] = self._generations.get(slot, 0) + 1

    def sweep(self, now: float) -> None:
        """Remove what is unused for longer than the time to live, if a sweep is due."""
        if now - self._swept_at < self._sweep_s:
            return
        self._swept_at = now
        while self._bound and now - next(iter(self._bound.values()))[2] > self._ttl_s:
            self._bound.popitem(last=False)

    def by_slot(self) -> Counter[int]:
        """Sessions by the slot that they are bound to."""
        current = self._generations
        return Counter(slot for slot, since, _ in self._bound.values() if since == current.get(slot, 0))


class SessionIdPin:
    """A session is bound to the endpoint that its first request went to.

    It is bound anew when its endpoint was not in question (gone, or filtered out) and the request therefore
    went elsewhere, and when the proxy used another endpoint than the chosen one. A request that goes
    elsewhere though the bound endpoint was in question leaves the binding as it is and does not count as a
    use of it.
    """

    def __init__(self, name: str, params: SessionAffinityParams, view: PoolView, secret: bytes) -> None:
        config = params.session_id_config
        self.bindings = SessionBindings(
            config.eviction_ttl_seconds or DEFAULT_TTL_S,
            config.eviction_sweep_seconds or DEFAULT_SWEEP_S,
            secret,
        )
        self._sources = [
            msgspec.structs.replace(source, header=header_name(source.header))
            for source in config.sources or SessionIdConfig().sources
        ]
        self._profile = params.profile_name
        self._mark = FactKey(_BOUND, name)
        self._view = view

    def pinned(self, ctx: Ctx, alive: Mask) -> Sequence[int]:
        """The endpoint that the request's session is bound to, if it is one of `alive`."""
        if not len(self.bindings) or (session := self._session(ctx)) is None:
            return ()
        slot = self.bindings.slot(self.bindings.key(session))
        return (slot,) if slot is not None and alive[slot] else ()

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        """Bind the session, or renew its binding."""
        session = self._session(ctx)
        leg = _leg(ticket.placement, self._profile)
        if session is None or leg is None:
            return
        key = self.bindings.key(session)
        slot, bound = leg.decision.slots[0], self.bindings.slot(key)
        if bound is None or bound == slot or not _in_question(leg.decision, bound):
            self.bindings.bind(key, slot, ctx.now)
            if leg is ticket.placement.serving:
                ctx.facts[self._mark] = key

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        """Follow the request to the endpoint that serves it."""
        if isinstance(fact, AnswerHeaders) and ticket.slot != ticket.placement.serving.decision.slots[0]:
            key = ticket.facts.get(self._mark)
            if key is not None:
                self.bindings.bind(key, ticket.slot, now)

    def joined(self, slot: int) -> None:
        """A new endpoint owns the slot; no session is bound to it."""

    def left(self, slot: int) -> None:
        """No session is bound to the slot any more."""
        self.bindings.left(slot)

    def refresh(self, now: float) -> None:
        """Remove expired bindings; call every few seconds."""
        self.bindings.sweep(now)

    def state(self) -> dict[str, object]:
        """How many sessions there are, and the endpoints with most of them; no session's name."""
        owners = self._view.endpoints
        by_slot = self.bindings.by_slot()
        shown = [
            {"endpoint": f"{owner.namespace}/{owner.name}", "sessions": sessions}
            for slot, sessions in by_slot.most_common(SHOWN_ENDPOINTS)
            if (owner := owners[slot])
        ]
        return {
            "sessions": len(self.bindings),
            "maxSessions": MAX_SESSIONS,
            "endpoints": shown,
            "totalEndpoints": len(by_slot),
            "maxEndpoints": SHOWN_ENDPOINTS,
        }

    def _session(self, ctx: Ctx) -> str | None:
        """The session's name from the first source that has one."""
        for source in self._sources:
            if source.producer:
                found = ctx.facts.get(FactKey(SESSION_ID, source.producer))
            elif source.attribute:
                found = ctx.attributes.get(source.attribute)
            else:
                found = find_header(ctx.headers, source.header)
            if found and (found := found.strip()):
                return str(found)
        return None


def _leg(placement: Placement, profile: str) -> Leg | None:
    """The leg that the profile chose, the serving one for ""; None where the profile did not run."""
    if not profile:
        return placement.serving
    return next((leg for leg in placement.legs if leg.decision.profile == profile), None)


def _in_question(decision: Decision, slot: int) -> bool:
    """The slot passed the filters."""
    return not np.isnan(decision.total[slot])


def _slots_by_name(owners: Owners) -> dict[bytes, list[int]]:
    slots: dict[bytes, list[int]] = {}
    for slot, owner in enumerate(owners):
        if owner is not None:
            slots.setdefault(_name(owner.namespace, owner.name), []).append(slot)
    return slots


def _name(namespace: str, name: str) -> bytes:
    return f"{namespace}/{name}".encode("utf-8", "surrogatepass")


def _only(slots: Sequence[int], alive: Mask) -> Mask:
    """The pinned slots alone; all, where nothing is pinned."""
    if not slots:
        return alive
    kept: Mask = np.zeros(len(alive), np.bool_)
    kept[slots] = True
    return kept


def _preferred(slots: Sequence[int], alive: Mask) -> Floats:
    """1 for pinned slots, 0 for others."""
    scores: Floats = np.zeros(len(alive))
    for slot in slots:
        scores[slot] = 1.0
    return scores


class EncodedEndpointFilter(EncodedEndpointPin):
    """`session-affinity-filter`, strategy `encoded_endpoint_header`."""

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        return _only(self.pinned(ctx, alive), alive)


class EncodedEndpointScorer(EncodedEndpointPin):
    """`session-affinity-scorer`, strategy `encoded_endpoint_header`: 1 for the pinned endpoint, else 0."""

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        return _preferred(self.pinned(ctx, alive), alive)


class SessionIdFilter(SessionIdPin):
    """`session-affinity-filter`, strategy `session_id`."""

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        return _only(self.pinned(ctx, alive), alive)


class SessionIdScorer(SessionIdPin):
    """`session-affinity-scorer`, strategy `session_id`: 1 for the pinned endpoint, else 0."""

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        return _preferred(self.pinned(ctx, alive), alive)


class SessionIdProducerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `session-id-producer`: a header or a cookie; neither = the header `x-session-id`."""

    header_name: str = ""
    cookie_name: str = ""

    def __post_init__(self) -> None:
        if header_name(self.header_name) and self.cookie_name.strip():
            raise ValueError("exactly one of headerName or cookieName is to be set, not both")


class SessionIdProducer:
    """`session-id-producer`: the session's name from a header or a cookie, without spaces around it.

    Of a header sent twice the last value counts, of a cookie the first. A request without it has no fact.
    """

    def __init__(self, name: str, params: SessionIdProducerParams) -> None:
        self.provides: tuple[FactKey, ...] = (FactKey(SESSION_ID, name),)
        self.needs: tuple[FactKey, ...] = ()
        self._cookie = params.cookie_name.strip()
        self._header = header_name(params.header_name) or "x-session-id"

    def produce(self, ctx: Ctx) -> None:
        found = _cookie(ctx, self._cookie) if self._cookie else find_header(ctx.headers, self._header)
        if found and (found := found.strip()):
            ctx.facts[self.provides[0]] = found


def _cookie(ctx: Ctx, wanted: str) -> str:
    for header, value in ctx.headers:
        if header == "cookie":
            for pair in value.split(";"):
                name, equals, content = pair.strip().partition("=")
                if equals and name == wanted:
                    return content
    return ""
