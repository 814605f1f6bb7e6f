"""`burst-prefix-cache-producer`: windows, what is grouped in them, and the match it makes, worked by hand."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from epp.config.load import build, load_config
from epp.director import Director, Plugins
from epp.errors import NeedFailed
from epp.kvcache.burst import BurstNeed, BurstPlace, BurstPrefixProducer
from epp.kvcache.burst_plan import Assigned, BurstRules, Chains, assign
from epp.kvcache.hashing import all_keys, chain_keys
from epp.payload.records import Api, InferenceRequest, RawRequest
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint, PoolView
from epp.pool.store import PoolStore
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.ports import Ctx
from epp.scheduling.profiles import PickerStep, Profile, ScorerStep, SingleProfileHandler
from epp.scheduling.records import PREFIX_MATCH, Cause, Ended, FactKey, Placement, PlannedMatch
from epp.scheduling.scorers import PrefixCacheScorer, PrefixCacheScorerParams
from tests.data.scheduling import pool, tickets

Row = pool.Row
KIND = "burst-prefix-cache-producer"
KEY = FactKey(PREFIX_MATCH, KIND)
BLOCK = b"x" * 256


def prompt(letter: str, blocks: float = 2) -> bytes:
    return letter.encode() * int(256 * blocks)


def asking(*prompts: bytes, model: str = "m", salt: str = "") -> InferenceRequest:
    tokens = sum(map(len, prompts)) // 4
    return InferenceRequest(Api.CHAT, model, model, prompts, tokens, cache_salt=salt)


def view_of(*rows: Row, slots: Sequence[int] | None = None) -> PoolView:
    return pool.context(rows or (Row("a"), Row("b"), Row("c")), slots=slots).view


def places(
    producer: BurstPrefixProducer, *requests: InferenceRequest, subset: tuple[str, ...] | None = None
) -> list[BurstPlace]:
    """Of requests that come within one window, in order."""
    needs = [producer.hold(request, subset) for request in requests]
    held = [need.held for need in needs if need is not None]
    assert len(held) == len(requests)
    opened = [producer.enter(one) for one in held]
    assert [fresh for _, fresh in opened] == [True, *[False] * (len(held) - 1)]
    list(producer.settle(opened[0][0]))
    return [one.place for one in held]


def names(found: Sequence[BurstPlace]) -> str:
    return "".join(["-" if place.endpoint is None else place.endpoint.name for place in found])


def make(view: PoolView, **parameters: Any) -> BurstPrefixProducer:
    made = tickets.made(KIND, view, **parameters)
    assert isinstance(made, BurstPrefixProducer)
    return made


# -- parameters ---------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_field() -> None:
    producer = make(view_of())
    need = producer.hold(asking(prompt("a", 3000)), None)
    assert need is not None
    assert need.timeout_s == pytest.approx(0.1 + 0.3)
    assert need.held.place == BurstPlace(2048, 64)
    assert producer._rules == BurstRules(None, 0, by_tokens=False)
    window, _ = producer.enter(need.held)
    assert window.seconds == 0.1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"windowDurationMs": 0}, "windowDurationMs"),
        ({"windowDurationMs": 10_001}, "windowDurationMs"),
        ({"maxPerReplica": 0}, r"maxPerReplica must be -1 \(unlimited\) or >= 1 \(current value: 0\)"),
        ({"maxPerReplica": -2}, "maxPerReplica"),
        ({"blockSizeTokens": 0}, "blockSizeTokens"),
        ({"maxPrefixTokensToMatch": -1}, "maxPrefixTokensToMatch"),
        (
            {"maxPrefixTokensToMatch": 63},
            r"\(63\) must be 0 or >= blockSizeTokens \(64\); a smaller positive value yields zero prefix",
        ),
        ({"minColocateBlocks": -1}, "minColocateBlocks"),
        ({"maxBatchSize": 0}, r"maxBatchSize must be -1 \(unlimited\) or >= 1 \(current value: 0\)"),
        ({"maxBatchSize": -2}, "maxBatchSize"),
        ({"balanceBy": "bogus"}, "balanceBy"),
    ],
)
def test_parameters_that_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(view_of(), **parameters)


def test_nothing_to_balance_by_is_requests() -> None:
    assert not make(view_of(), balanceBy="")._rules.by_tokens
    assert make(view_of(), balanceBy="tokens")._rules.by_tokens


def test_it_is_experimental() -> None:
    text = f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{{type: {KIND}}}]\n"
    loaded = load_config(text, "file")
    assert any(KIND in warning and "experimental" in warning for warning in loaded.warnings)
    assembly = build(loaded, PoolStore().view, b"secret")
    assert assembly.plugins.holding == (assembly.named[KIND],)


def test_nobody_holds_requests_where_it_is_not_configured() -> None:
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
    assert build(load_config(text, "file"), PoolStore().view, b"secret").plugins.holding == ()


# -- what is grouped ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asking(prompt("a")), asking(prompt("b"))),
        (asking(prompt("a")), asking(prompt("a", 3))),
        (asking(prompt("a")), asking(prompt("a") + b"!")),
        (asking(prompt("a")), asking(prompt("a"), model="other")),
        (asking(prompt("a")), asking(prompt("a"), salt="s")),
        (asking(prompt("a")), asking(prompt("a"), prompt("b"))),
        (asking(prompt("a"), prompt("b")), asking(prompt("b"), prompt("a"))),
        (asking(b"short"), asking(b"other")),
    ],
)
def test_different_requests_have_no_place(one: InferenceRequest, other: InferenceRequest) -> None:
    assert names(places(make(view_of()), one, other)) == "--"


@pytest.mark.parametrize(
    "request_of", [asking(prompt("a")), asking(b"short"), asking(prompt("a"), prompt("b", 0.5))]
)
def test_equal_requests_go_together(request_of: InferenceRequest) -> None:
    assert names(places(make(view_of()), *[request_of] * 5)) == "aaaaa"


def test_prompts_are_looked_at_up_to_the_longest_prefix() -> None:
    alike = asking(prompt("a") + b"1"), asking(prompt("a") + b"2" * 999)
    assert names(places(make(view_of(), maxPrefixTokensToMatch=128), *alike)) == "aa"
    assert names(places(make(view_of(), maxPrefixTokensToMatch=192), *alike)) == "--"
    small = make(view_of(), blockSizeTokens=32, maxPrefixTokensToMatch=128)
    assert places(small, *alike)[0][:2] == (4, 32)


def test_a_request_without_a_prompt_is_not_held() -> None:
    producer = make(view_of())
    for request in (asking(), asking(b""), InferenceRequest(Api.CHAT, chains=())):
        assert producer.hold(request, None) is None


def test_chains_of_a_simulation_are_taken_as_they_are() -> None:
    one = InferenceRequest(Api.CHAT, "m", "m", chains=((1, 2, 3),))
    other = InferenceRequest(Api.CHAT, "m", "m", chains=((1, 2, 4),))
    assert names(places(make(view_of()), one, one, other)) == "aa-"


def test_a_partial_block_has_a_key() -> None:
    assert all_keys(7, BLOCK * 2, 256, 9) == chain_keys(7, BLOCK * 2, 256, 9)
    keys = all_keys(7, BLOCK * 2 + b"!", 256, 9)
    assert keys[:2] == chain_keys(7, BLOCK * 2, 256, 9)
    assert len(keys) == len(set(keys)) == 3
    assert all_keys(7, BLOCK * 2 + b"!", 256, 2) == keys[:2]
    assert len({all_keys(7, text, 256, 9)[0] for text in (b"!", b"!!", b"?")}) == 3
    assert all_keys(7, b"", 256, 9) == []


# -- the formula --------------------------------------------------------------------------------------


# As chained keys are: equal ones follow on equal ones.
A, B, C = (1, 2, 3), (1, 2, 4), (7, 8, 9)


def assigned(batch: list[Chains], replicas: int, rules: BurstRules) -> list[Assigned | None]:
    return [place for _, place in sorted(assign(batch, replicas, rules), key=lambda one: one[0])]


def plan(*keys: tuple[int, ...], replicas: int = 4, **rules: Any) -> str:
    found = assigned([(each,) for each in keys], replicas, BurstRules(**rules))
    return "".join(["-" if place is None else str(place.replica) for place in found])


@pytest.mark.parametrize(
    ("most", "expected"),
    [(None, "00000000"), (8, "00000000"), (4, "00001111"), (3, "00011122"), (2, "00112233"), (1, "01230123")],
)
def test_an_endpoint_is_filled_up_before_the_next(most: int | None, expected: str) -> None:
    assert plan(*[A] * 8, max_per_replica=most) == expected


def test_groups_are_spread() -> None:
    assert plan(A, C, A, C, A, C) == "010101"
    assert plan(*[A] * 3, *[C] * 2, *[B] * 2, replicas=2) == "0001111"
    assert plan(A, A, B) == "00-", "one alone has no place"
    assert plan(A, A, replicas=0) == "--"
    assert assigned([(), (), (A,)], 2, BurstRules(None, 1)) == [None] * 3


def test_the_longest_go_first() -> None:
    long = (*C, 10)
    assert plan(A, A, long, long) == "1100"


def test_families_stay_together_within_their_share() -> None:
    """8 requests on 2 endpoints, 4 each: the second of each family has room where the first is."""
    x2, y2 = (1, 2, 4), (7, 8, 6)
    keys = (A, A, x2, x2, C, C, y2, y2)
    assert plan(*keys, replicas=2, min_colocate=2) == "00001111"
    assert plan(*keys, replicas=2, min_colocate=3) == "00110011", "only two blocks are shared"
    four = [(1, 2, number) for number in (3, 4, 5, 6) for _ in range(2)]
    assert plan(*four, replicas=4, min_colocate=2) == "00112233", "8 on 4: the share is used up by each"


def test_single_requests_join_what_they_share() -> None:
    keys = (A, A, (1, 2, 8), C, C, (7, 8, 5), (50, 51, 52))
    assert plan(*keys, replicas=2, min_colocate=2) == "000111-"
    assert plan(*keys, replicas=2) == "00-11--"
    alone = [(1, 2, number) for number in (3, 4, 5, 6)]
    assert plan(*alone, replicas=2, min_colocate=2) == "0011"
    assert plan(*alone, replicas=2, min_colocate=4) == "----"


def test_tokens_are_balanced_instead_of_requests() -> None:
    """The four long ones make as many blocks as one of them: prompts are computed once."""
    long = tuple(range(100, 112))
    keys = (*[long] * 4, A, A, C, C)
    assert plan(*keys, replicas=2) == "00001111"
    assert plan(*keys, replicas=2, by_tokens=True) == "00001111"
    two = (*[long] * 2, *[A] * 4, *[C] * 4)
    assert plan(*two, replicas=2) == "0011110000"
    assert plan(*two, replicas=2, by_tokens=True) == "0011111111"


def test_what_is_computed_before() -> None:
    found = assigned([(A,), (A,), (A,), (B,), (B,)], 2, BurstRules(2, 2))
    assert found == [
        Assigned(0, 0),
        Assigned(0, 3),
        Assigned(1, 0),
        Assigned(1, 2),
        Assigned(1, 3),
    ]


def test_several_prompts_are_shared_up_to_the_first_that_is_not() -> None:
    rules = BurstRules(None, 1)
    first = assigned([(A, C), (A, C), (A, (5,))], 1, rules)[2]
    assert first == Assigned(0, 3)
    second = assigned([(A, C), (A, C), ((1, 2, 4), C)], 1, rules)[2]
    assert second == Assigned(0, 2), "the second prompt is not looked at"


# -- endpoints ----------------------------------------------------------------------------------------


def test_equals_are_told_apart_by_running_requests_then_by_name() -> None:
    twice = [asking(prompt("a"))] * 2
    assert names(places(make(view_of(Row("b"), Row("c"), Row("a"))), *twice)) == "aa"
    busy = view_of(Row("b", running=1), Row("c", running=1), Row("a", running=2))
    assert names(places(make(busy), *twice)) == "bb"


def test_only_candidates_of_the_first_subset() -> None:
    twice = [asking(prompt("a"))] * 2
    gone = view_of(Row("a", candidate=False), Row("b"), Row("c"))
    assert names(places(make(gone), *twice)) == "bb"
    producer = make(view_of())
    only = ("10.0.0.c:8000", "10.0.0.x:8000")
    assert names(places(producer, *twice, subset=only)) == "cc"
    assert names(places(producer, *twice, subset=())) == "--"
    needs = [producer.hold(twice[0], subset) for subset in (only, None)]
    held = [need.held for need in needs if need]
    windows = [producer.enter(one)[0] for one in held]
    list(producer.settle(windows[0]))
    assert names([one.place for one in held]) == "cc"


def match_of(producer: BurstPrefixProducer, ctx: Ctx, place: BurstPlace | None) -> Any:
    ctx.facts = {} if place is None else {FactKey("burst-place", KIND): place}
    producer.produce(ctx)
    return ctx.facts.get(KEY)


def test_the_match_is_full_at_the_place_and_nothing_elsewhere() -> None:
    ctx = pool.context([Row("a"), Row("b"), Row("c")], slots=(2, 0, 1))
    producer = make(ctx.view)
    ctx.request = asking(prompt("a", 2.5))
    first, second, _ = places(producer, ctx.request, ctx.request, asking(b"other"))
    match = match_of(producer, ctx, first)
    assert isinstance(match, PlannedMatch)
    np.testing.assert_array_equal(match.blocks, [0, 0, 3, *[0] * (ctx.view.capacity - 3)])
    assert (match.total_blocks, match.block_tokens, match.total_tokens) == (3, 64, 160)
    assert [match.cached(slot) for slot in (0, 2)] == [0, 0], "the first computes all of it"
    assert [match_of(producer, ctx, second).cached(slot) for slot in (0, 2)] == [0, 3]


def test_without_a_place_the_match_is_nothing() -> None:
    ctx = pool.context([Row("a"), Row("b")])
    producer = make(ctx.view)
    ctx.request = asking(prompt("a"))
    match = match_of(producer, ctx, BurstPlace(2, 64))
    assert not match.blocks.any()
    assert match.total_blocks == 2
    assert match_of(producer, ctx, None) is None, "it did not wait"


@pytest.mark.parametrize(
    "owner",
    [None, Endpoint("new", "a", "default", "10.0.0.a", 8000), Endpoint("a", "a", "default", "x", 8000)],
)
def test_a_slot_that_changed_hands_gets_no_match(owner: Endpoint | None) -> None:
    ctx = pool.context([Row("a"), Row("b")])
    producer = make(ctx.view)
    place = places(producer, *[asking(prompt("a"))] * 2)[0]
    assert match_of(producer, ctx, place).blocks.any()
    ctx.view.endpoints = (owner, *ctx.view.endpoints[1:])
    assert not match_of(producer, ctx, place).blocks.any()
    relabelled = Endpoint("a", "other", "default", "10.0.0.a", 8000, {"x": "y"})
    ctx.view.endpoints = (relabelled, *ctx.view.endpoints[1:])
    assert match_of(producer, ctx, place).blocks.any()


# -- windows ------------------------------------------------------------------------------------------


def need_of(producer: BurstPrefixProducer, letter: str = "a") -> BurstNeed:
    need = producer.hold(asking(prompt(letter)), None)
    assert need is not None
    return need


def test_a_full_window_takes_nobody() -> None:
    producer = make(view_of(), maxBatchSize=2)
    first, second, third = (need_of(producer).held for _ in range(3))
    window, _ = producer.enter(first)
    producer.enter(second)
    with pytest.raises(NeedFailed, match="burst prefix batch full: maxBatchSize 2 reached") as caught:
        producer.enter(third)
    assert caught.value.reason == "full"
    second.leave()
    assert producer.enter(third) == (window, False), "who has gone makes room"
    list(producer.settle(window))
    assert names([first.place, second.place, third.place]) == "a-a"


def test_no_limit() -> None:
    producer = make(view_of(), maxBatchSize=-1)
    assert names(places(producer, *[asking(prompt("a"))] * 1500)) == "a" * 1500


def test_who_has_gone_counts_for_nobody() -> None:
    producer = make(view_of())
    held = [need_of(producer).held for _ in range(2)]
    window, _ = producer.enter(held[0])
    producer.enter(held[1])
    held[0].leave()
    held[0].leave()
    list(producer.settle(window))
    assert names([one.place for one in held]) == "--"
    held[1].leave()


def test_windows_follow_one_another() -> None:
    producer = make(view_of())
    early = [need_of(producer).held for _ in range(2)]
    late = [need_of(producer).held for _ in range(2)]
    first = [producer.enter(one) for one in early][0][0]
    list(producer.settle(first))
    second, fresh = producer.enter(late[0])
    assert fresh
    producer.enter(late[1])
    list(producer.settle(first))
    assert producer.enter(need_of(producer).held) == (second, False), "the first is settled once"
    assert names([one.place for one in (*early, *late)]) == "aa--"
    list(producer.settle(second))
    assert names([one.place for one in (*early, *late)]) == "aaaa"


def test_a_window_is_settled_step_by_step() -> None:
    """It is over at once; who has nothing in common with others is told first, each with its place."""
    producer = make(view_of())
    held = [need.held for letter in "abca" if (need := producer.hold(asking(prompt(letter)), None))]
    window = [producer.enter(one)[0] for one in held][0]
    steps = producer.settle(window)
    assert producer.enter(need_of(producer).held)[1], "the next one opens another"
    assert window.held == {}
    for number, expected in ((1, "----"), (2, "----"), (0, "a---"), (3, "a--a")):
        assert next(steps) is held[number]
        assert names([one.place for one in held]) == expected
    assert next(steps, None) is None


def test_endpoints_that_change_meanwhile() -> None:
    view = view_of(Row("a"))
    producer = make(view)
    held = [need_of(producer).held for _ in range(2)]
    window = [producer.enter(one)[0] for one in held][0]
    steps = producer.settle(window)
    first = next(steps).place.endpoint
    view.endpoints = ()
    assert next(steps).place.endpoint is first is not None, "the endpoints are those of the first step"


# -- through the director -----------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.failed: list[object] = []

    def placed(self, *_: Any) -> None: ...

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        self.failed.append(plugin)

    def need_failed(self, need: object, error: Exception) -> None:
        self.failed.append(need)

    def served_elsewhere(self, *_: Any) -> None: ...

    def observed(self, *_: Any) -> None: ...


class Bench:
    def __init__(self, *more: Any) -> None:
        self.ledger = InflightLedger(16, strict=True)
        store = PoolStore(busy=self.ledger.busy)
        store.sync([Endpoint(f"uid-{n}", f"pod-{n}", "default", f"10.0.0.{n}", 8000) for n in (1, 2)], 0.0)
        self.producer = make(store.view)
        scorer = PrefixCacheScorer(PrefixCacheScorerParams(prefix_match_info_producer_name=KIND))
        picker = PickerStep("max-score-picker", "max-score-picker", MaxScorePicker(MaxScorePickerParams()))
        step = ScorerStep("prefix-cache-scorer", "prefix-cache-scorer", 1.0, scorer)
        handler = SingleProfileHandler(Profile("default", (), (step,), picker))
        plugins = Plugins(handler, holding=(*more, self.producer), producers=(self.producer,))
        self.recorder = Recorder()
        self.director = Director(store, self.ledger, plugins, self.recorder, Random(1), max_body_bytes=10_000)

    def prepare(self, text: str = "a" * 1000) -> Any:
        body = b'{"model":"m","prompt":"%b"}' % text.encode()
        return self.director.prepare(RawRequest("id", "POST", "/v1/completions", (), body), 1.0)


def test_a_batch_through_the_director() -> None:
    """The first is charged with its 250 tokens, the others with what no block of 64 covers: nothing."""
    bench = Bench()
    waiting = [bench.prepare() for _ in range(3)]
    windows = [bench.producer.enter(one.needs[0].held)[0] for one in waiting]
    list(bench.producer.settle(windows[0]))
    chosen = set()
    for one in waiting:
        ready = bench.director.satisfied(one, [one.needs[0].held.place])
        assert ready.needs == ()
        placement = bench.director.submit(ready, 2.0)
        assert isinstance(placement, Placement)
        chosen.add(placement.serving.endpoints[0].name)
        assert bench.ledger.total_prefill_tokens == 250
        kept, ticket, _ = bench.director._tickets[placement.ticket]
        assert (kept.facts, kept.needs) == ((), ())
        assert KEY in ticket.facts
    assert chosen == {"pod-1"}
    for number in list(bench.director._tickets):
        bench.director.observe(number, Ended(Cause.NATURAL, None, 0, 0), 3.0)
    assert bench.ledger.total_prefill_tokens == 0
    assert bench.recorder.failed == []


def test_a_wait_that_fails_costs_the_match_alone() -> None:
    bench = Bench()
    prepared = bench.prepare()
    ready = bench.director.satisfied(prepared, [NeedFailed("late", "planted")])
    assert (ready.facts, ready.needs) == ((), ())
    assert bench.recorder.failed == [prepared.needs[0]]
    assert isinstance(bench.director.submit(ready, 2.0), Placement)


class Broken:
    def hold(self, request: InferenceRequest, subset: tuple[str, ...] | None) -> None:
        raise RuntimeError("planted")


def test_a_plugin_that_cannot_hold_is_done_without() -> None:
    broken = Broken()
    bench = Bench(broken)
    assert len(bench.prepare().needs) == 1
    assert bench.recorder.failed == [broken]
