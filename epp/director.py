"""One request from prepared to placed, and back as its answer passes: a straight line through the rooms.

The director is synchronous and knows no clock: `now` comes in. It owns the tickets, so whatever happens to
a stream, what was charged for it is given back exactly once. A fleet in virtual time makes the same calls
as live traffic (with `InferenceRequest.chains` in place of bodies).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import methodcaller
from random import Random
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from epp import names
from epp.errors import BadRequest, NoEndpoints, RequestError
from epp.flow.objectives import Objectives
from epp.kvcache.burst import BurstNeed, BurstPlace
from epp.payload.apis import DEFAULT_PARSERS, DIALECTS, ParserSet
from epp.payload.records import Headers, InferenceRequest, RawRequest
from epp.payload.render import RenderNeed, with_tokens
from epp.payload.request import Parsed, parse_request, rewrite_model
from epp.payload.rewrite import Rewrite, RewriteRules
from epp.pool.ledger import InflightLedger
from epp.pool.records import Mask
from epp.pool.store import PoolStore
from epp.scheduling.ports import (
    AGENT_IDENTITY,
    NO_ATTRIBUTES,
    Admitter,
    Answered,
    Attributes,
    Ctx,
    DataProducer,
    Placed,
    ProfileHandler,
    Reporter,
    RequestHook,
    Screener,
)
from epp.scheduling.records import (
    AnswerFact,
    AnswerHeaders,
    Completed,
    Edits,
    Ended,
    FactKey,
    Facts,
    FirstToken,
    Leg,
    Metadata,
    Placement,
    PrefixMatch,
    Progress,
    Ticket,
    TicketId,
)

DEFAULT_FLOW = "default-flow"
TIMED_EVERY = 64

Need = RenderNeed | BurstNeed
"""What a request has to wait for before it can be placed. Has `timeout_s`."""

Found = bytes | BurstPlace
"""What a need is fulfilled by: the answer of a `RenderNeed`, the place that a `BurstNeed` led to."""

NeedResult = Found | Exception
"""What came of a need."""


class Prepared(msgspec.Struct, frozen=True):
    """A request ready to be placed.

    Attributes:
        headers: the client's.
        flow: fairness id, for metrics and queues.
        priority: of the request's objective; below 0 it may be shed.
        attributes: what request hooks found out.
        rewrite: the rule that chose the target model; None where none did.
        needs: what is to be awaited, and told to `Director.satisfied`, before it is submitted.
        body: what to forward in place of the client's body; None = unchanged.
        remove_headers: request headers that no longer describe the body.
        body_bytes: size as received.
        facts: what its needs came to, for the plugins that read them.
    """

    request_id: str
    request: InferenceRequest
    flow: str
    subset: tuple[str, ...] | None
    body: bytes | None
    remove_headers: tuple[str, ...]
    body_bytes: int
    received_at: float
    headers: Headers = ()
    priority: int = 0
    attributes: Attributes = NO_ATTRIBUTES
    rewrite: Rewrite | None = None
    needs: tuple[Need, ...] = ()
    facts: tuple[tuple[FactKey, BurstPlace], ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """A request that cannot be placed; `error` is the client's answer."""

    error: RequestError


class Recorder(Protocol):
    """Hears what happens, for metrics and for `explain`. Must not keep `ctx` or its arrays."""

    def placed(self, prepared: Prepared, ticket: Ticket, ctx: Ctx) -> None:
        """Before anything is charged: the load in `ctx` is the one the choice saw."""
        ...

    def plugin_failed(self, plugin: object, error: Exception) -> None: ...

    def need_failed(self, need: Need, error: Exception) -> None:
        """The request is placed without what it needed to know."""
        ...

    def served_elsewhere(self, ticket: Ticket, served: str, in_pool: bool) -> None:
        """The proxy reports another endpoint (`address:port`) than the chosen one."""
        ...

    def observed(self, prepared: Prepared, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        """After the ledger and the plugins heard of it."""
        ...


class Needing(Protocol):
    """A plugin that wants to know something of a request that has to be awaited."""

    def need(self, parsed: Parsed) -> Need | None: ...


class Holding(Protocol):
    """A plugin that holds requests, when all that they needed is found out."""

    def hold(self, request: InferenceRequest, subset: tuple[str, ...] | None) -> BurstNeed | None: ...


@dataclass(frozen=True, slots=True)
class Plugins:
    """What the configuration chose. Those of a kind run in their order.

    Attributes:
        admission: decides on the request alone, before its candidates are looked at.
        admitters: decide when the facts are there.
        sampled: stands in on every `TIMED_EVERY`-th request, the same plugins with their time taken.
    """

    handler: ProfileHandler
    parsers: ParserSet = DEFAULT_PARSERS
    objectives: Objectives = Objectives({})
    rewrites: RewriteRules = RewriteRules()
    request_hooks: tuple[RequestHook, ...] = ()
    needing: tuple[Needing, ...] = ()
    holding: tuple[Holding, ...] = ()
    admission: Admitter | None = None
    screeners: tuple[Screener, ...] = ()
    producers: tuple[DataProducer, ...] = ()
    admitters: tuple[Admitter, ...] = ()
    placed: tuple[Placed, ...] = ()
    answered: tuple[Answered, ...] = ()
    reporters: tuple[Reporter, ...] = ()
    sampled: "Plugins | None" = None


class Director:
    """Places requests and follows them to their end. One per process, driven by one thread."""

    def __init__(
        self,
        store: PoolStore,
        ledger: InflightLedger,
        plugins: Plugins,
        recorder: Recorder,
        draw: Random,
        *,
        max_body_bytes: int,
        use_subset: bool = True,
        plugin_clock: Callable[[], float] | None = None,
    ) -> None:
        """`plugins` may be replaced: a request keeps those it was placed with until it ends.

        `plugin_clock` times the plugins of every `TIMED_EVERY`-th request.
        """
        self.plugins = plugins
        self._store = store
        self._ledger = ledger
        self._recorder = recorder
        self._draw = draw
        self._max_body_bytes = max_body_bytes
        self._use_subset = use_subset
        self._plugin_clock = plugin_clock
        self._submitted = 0
        self._tickets: dict[TicketId, tuple[Prepared, Ticket, Plugins]] = {}
        self._ids = count(1)

    @property
    def in_flight(self) -> int:
        """Tickets that have not ended."""
        return len(self._tickets)

    def follows(self, plugins: Plugins) -> bool:
        """Whether a request placed with these has not ended."""
        either = (plugins, plugins.sampled)
        return any(used is one for _, _, used in self._tickets.values() for one in either)

    def _for_next(self) -> Plugins:
        """Those that the next request to be placed runs."""
        plugins = self.plugins
        if self._submitted % TIMED_EVERY or plugins.sampled is None:
            return plugins
        return plugins.sampled

    # -- before the choice ------------------------------------------------------------------------

    def prepare(self, raw: RawRequest, now: float) -> Prepared:
        """Read the body and settle the model name.

        Raises:
            BadRequest, PayloadTooLarge: the request cannot be understood.
        """
        parsers = self.plugins.parsers
        return self.prepare_parsed(
            raw, parse_request(raw, max_bytes=self._max_body_bytes, parsers=parsers), now
        )

    def prepare_parsed(self, raw: RawRequest, parsed: Parsed, now: float) -> Prepared:
        """As `prepare`, for a body that was decoded elsewhere."""
        request = parsed.request
        plugins = self._for_next()
        attributes = self._attributes(raw, plugins) if plugins.request_hooks else NO_ATTRIBUTES
        body: bytes | None = None
        remove_headers: tuple[str, ...] = ()
        rewrite: Rewrite | None = None
        dialect = DIALECTS[request.api]
        if raw.body_shown and (dialect.rewrites_model or dialect.needs_model):
            if plugins.rewrites:
                rewrite = plugins.rewrites.target(request.model, self._draw)
            named = raw.header(*names.MODEL_NAME_REWRITE) if rewrite is None else rewrite.target
            target = named or request.model
            if dialect.needs_model and not target:
                raise BadRequest("model not found in request body", param="model")
            if target != request.model:
                rewritten = rewrite_model(parsed, target)
                body, remove_headers = rewritten.body, rewritten.remove_headers
                request = msgspec.structs.replace(request, target_model=target)
        subset = raw.subset if self._use_subset else None
        needs: tuple[Need, ...] = ()
        if plugins.needing and raw.body_shown:
            needs = self._needs(plugins.needing, methodcaller("need", parsed))
        if plugins.holding and not needs:
            needs = self._needs(plugins.holding, methodcaller("hold", request, subset))
        return Prepared(
            request_id=raw.request_id,
            request=request,
            flow=raw.header(*names.FAIRNESS_ID) or attributes.get(AGENT_IDENTITY) or DEFAULT_FLOW,
            subset=subset,
            body=body,
            remove_headers=remove_headers,
            body_bytes=len(raw.body),
            received_at=now,
            headers=raw.headers,
            priority=plugins.objectives.priority(raw.header(*names.OBJECTIVE)),
            attributes=attributes,
            rewrite=rewrite,
            needs=needs,
        )

    def _attributes(self, raw: RawRequest, plugins: Plugins) -> Attributes:
        found: dict[str, str] = {}
        for hook in plugins.request_hooks:
            try:
                found.update(hook.read(raw))
            except Exception as error:
                self._recorder.plugin_failed(hook, error)
        return found

    def _needs(self, plugins: Sequence[Any], ask: Callable[[Any], Need | None]) -> tuple[Need, ...]:
        needs: list[Need] = []
        for plugin in plugins:
            try:
                need = ask(plugin)
            except Exception as error:
                self._recorder.plugin_failed(plugin, error)
            else:
                if need is not None:
                    needs.append(need)
        return tuple(needs)

    def satisfied(self, prepared: Prepared, results: Sequence[NeedResult]) -> Prepared:
        """The request with what it needed to know; one result for each need, in order.

        It has no needs any more, but where all that was needed is found out and a plugin holds it. A need
        that failed leaves the request as it was. Whatever plugins are in use by now.
        """
        request, facts = prepared.request, prepared.facts
        for need, result in zip(prepared.needs, results, strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                if isinstance(need, BurstNeed):
                    facts += ((need.key, cast(BurstPlace, result)),)
                else:
                    request = with_tokens(request, cast(bytes, result))
            except Exception as error:  # an answer that breaks its reader costs no request either
                self._recorder.need_failed(need, error)
        needs: tuple[Need, ...] = ()
        if self.plugins.holding and not any(isinstance(need, BurstNeed) for need in prepared.needs):
            needs = self._needs(self.plugins.holding, methodcaller("hold", request, prepared.subset))
        return msgspec.structs.replace(prepared, request=request, needs=needs, facts=facts)

    # -- the choice -------------------------------------------------------------------------------

    def submit(self, prepared: Prepared, now: float, *, timed: bool = False) -> Placement | Refusal:
        """Choose endpoints, charge them, and let every hook know before the next request is looked at.

        `timed`: time the plugins of the profile, whether or not it is this request's turn.

        Whatever it raises, it raises before the charge.
        """
        plugins = self._for_next()
        clock = self._plugin_clock if timed or self._submitted % TIMED_EVERY == 0 else None
        self._submitted += 1
        ctx = Ctx(
            prepared.request,
            self._store.view,
            self._ledger.load,
            dict(prepared.facts) if prepared.facts else {},
            now,
            self._draw,
            clock,
            prepared.request_id,
            prepared.headers,
            prepared.flow,
            prepared.priority,
            prepared.attributes,
        )
        try:
            legs = self._choose(plugins, ctx, prepared.subset)
        except RequestError as error:
            return Refusal(error)
        placement = Placement(TicketId(next(self._ids)), legs)
        slot = placement.serving.decision.slots[0]
        kept = _without_content(prepared)
        ticket = Ticket(
            id=placement.ticket,
            request=kept.request,
            placement=placement,
            slot=slot,
            prefill_tokens=_uncached_tokens(prepared.request, ctx.facts, slot),
            placed_at=now,
            facts=ctx.facts,
            flow=prepared.flow,
            priority=prepared.priority,
        )
        self._recorder.placed(prepared, ticket, ctx)
        self._tickets[ticket.id] = kept, ticket, plugins
        self._ledger.charge(slot, ticket.prefill_tokens)
        edits: Edits = ()
        for hook in plugins.placed:
            try:
                edits += hook.placed(ctx, ticket) or ()
            except Exception as error:
                self._recorder.plugin_failed(hook, error)
        return replace(placement, set_headers=edits) if edits else placement

    def _choose(self, plugins: Plugins, ctx: Ctx, subset: Sequence[str] | None) -> tuple[Leg, ...]:
        """Raises RequestError: turned away, or nowhere to go."""
        alive = self._eligible(subset)
        if plugins.admission is not None:
            plugins.admission.admit(ctx, alive)
        if plugins.screeners and np.count_nonzero(alive):
            for screener in plugins.screeners:
                alive &= screener.screen(ctx, alive)
            if not np.count_nonzero(alive):
                raise NoEndpoints("screeners eliminated all endpoint candidates")
        self._produce(plugins, ctx)
        for admitter in plugins.admitters:
            admitter.admit(ctx, alive)
        return plugins.handler.place(ctx, alive)

    def _produce(self, plugins: Plugins, ctx: Ctx) -> None:
        for producer in plugins.producers:
            try:
                producer.produce(ctx)
            except Exception as error:  # a plugin's fault costs its facts, never the request
                self._recorder.plugin_failed(producer, error)

    def _eligible(self, subset: Sequence[str] | None) -> Mask:
        view = self._store.view
        if subset is None:
            return view.candidates.copy()
        allowed = np.zeros(view.capacity, np.bool_)
        for host_port in subset:
            slot = self._store.slot_of(host_port)
            if slot is not None:
                allowed[slot] = True
        return allowed & view.candidates

    # -- after the choice -------------------------------------------------------------------------

    def observe(self, ticket_id: TicketId, fact: AnswerFact, now: float) -> Edits:
        """What happened to a placed request; returns headers to set on its answer.

        A fact for a ticket that has ended is dropped: there is nothing left to account for.
        """
        found = self._tickets.get(ticket_id)
        if found is None:
            return ()
        prepared, ticket, plugins = found
        match fact:
            case AnswerHeaders():
                self._headers(ticket, fact, now)
            case FirstToken():
                ticket.first_token_at = now
                self._ledger.prefill_done(ticket.slot, ticket.prefill_tokens)
                ticket.prefill_tokens = 0
            case Progress():
                self._store.answering(ticket.slot, now)
            case Ended():
                del self._tickets[ticket_id]
                self._ledger.release(ticket.slot, ticket.prefill_tokens)
                ticket.prefill_tokens = 0
        edits: Edits = ()
        for hook in plugins.answered:
            try:
                edits += hook.observe(ticket, fact, now) or ()
            except Exception as error:
                self._recorder.plugin_failed(hook, error)
        self._recorder.observed(prepared, ticket, fact, now)
        return edits

    def report(self, ticket_id: TicketId, completed: Completed) -> Metadata:
        """What plugins want the proxy to know of an answer whose end is about to be sent on."""
        found = self._tickets.get(ticket_id)
        if found is None:
            return ()
        _, ticket, plugins = found
        metadata: Metadata = ()
        for reporter in plugins.reporters:
            try:
                metadata += reporter.report(ticket, completed.usage) or ()
            except Exception as error:
                self._recorder.plugin_failed(reporter, error)
        return metadata

    def _headers(self, ticket: Ticket, fact: AnswerHeaders, now: float) -> None:
        ticket.status = fact.status
        ticket.streaming = fact.streaming
        if fact.served:
            served = self._served(ticket, fact.served)
            if served != ticket.slot:
                self._recorder.served_elsewhere(ticket, fact.served, served is not None)
            if served is not None and served != ticket.slot:
                self._ledger.move(ticket.slot, served, ticket.prefill_tokens)
                ticket.slot = served
        if fact.load is not None:
            self._store.reported(ticket.slot, fact.load, now)
        if fact.status < 500:  # above, it may be the proxy's own answer about an endpoint it cannot reach
            self._store.answering(ticket.slot, now)

    def _served(self, ticket: Ticket, host_port: str) -> int | None:
        """Slot of the endpoint that served: of the chosen ones at that address the first.

        A chosen one may be named to the proxy by another address than its own: its pod's primary port, which
        several ranks have in common.
        """
        leg = ticket.placement.serving
        view = self._store.view
        for slot, named in zip(leg.decision.slots, leg.endpoints, strict=False):
            owner = view.endpoints[slot]
            if named.host_port == host_port and owner is not None and owner.uid == named.uid:
                if view.host_ports[slot] != host_port:
                    return slot
                break  # its own address, which a new member may have inherited
        return self._store.slot_of(host_port)


def _without_content(prepared: Prepared) -> Prepared:
    """What is kept until the answer ends: nothing as large as a body, since no account is charged for it."""
    request = msgspec.structs.replace(prepared.request, prompts=())
    return msgspec.structs.replace(prepared, request=request, body=None, needs=(), facts=())


def _uncached_tokens(request: InferenceRequest, facts: Facts, slot: int) -> int:
    """Prompt tokens the endpoint has to compute: all but those the best-informed producer saw there."""
    cached = 0
    for fact in facts.values():
        if isinstance(fact, PrefixMatch):
            cached = max(cached, fact.cached(slot) * fact.block_tokens)
    return max(request.prompt_tokens - cached, 0)
