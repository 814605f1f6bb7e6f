"""Needs of requests: found out before the choice, or done without."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from epp import director as director_module
from epp.director import Director, Need, NeedResult, Plugins, Prepared
from epp.errors import NeedFailed
from epp.payload.records import InferenceRequest, RawRequest
from epp.payload.render import ExactTokens, RenderNeed
from epp.payload.request import Parsed
from epp.pool.ledger import InflightLedger
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.profiles import PickerStep, Profile, SingleProfileHandler
from epp.scheduling.records import Cause, Ended, Placement

RENDERED = Path(__file__).parent.parent / "data" / "payload" / "apis" / "render-chat.json"
EXCHANGE = json.loads(RENDERED.read_text())
ANSWER = EXCHANGE["response"]["body"].encode()
TOKENS = len(json.loads(ANSWER)["token_ids"])
EXACT = ExactTokens("http://render:8000", "acme/tiny-llama", 5.0, 30.0)


class Recorder:
    def __init__(self) -> None:
        self.plugins: list[object] = []
        self.needs: list[tuple[Need, Exception]] = []

    def placed(self, *_: Any) -> None: ...

    def plugin_failed(self, plugin: object, error: Exception) -> None:
        self.plugins.append(plugin)

    def need_failed(self, need: Need, error: Exception) -> None:
        self.needs.append((need, error))

    def served_elsewhere(self, *_: Any) -> None: ...

    def observed(self, *_: Any) -> None: ...


class Broken:
    def need(self, parsed: Parsed) -> Need | None:
        raise RuntimeError("planted")


class Bench:
    def __init__(self, *needing: Any) -> None:
        self.ledger = InflightLedger(16, strict=True)
        store = PoolStore(busy=self.ledger.busy)
        store.sync([Endpoint("uid", "pod", "default", "10.0.0.1", 8000)], 0.0)
        step = PickerStep("max-score-picker", "max-score-picker", MaxScorePicker(MaxScorePickerParams()))
        handler = SingleProfileHandler(Profile("default", (), (), step))
        self.recorder = Recorder()
        plugins = Plugins(handler, needing=needing)
        draw = Random(1)
        self.director = Director(store, self.ledger, plugins, self.recorder, draw, max_body_bytes=10_000)

    def prepare(self, *, body_shown: bool = True) -> Prepared:
        body = EXCHANGE["request"]["body"].encode() if body_shown else b""
        raw = RawRequest("id", "POST", "/v1/chat/completions", (), body, body_shown=body_shown)
        return self.director.prepare(raw, 1.0)


def test_without_plugins_that_need_something_there_are_no_needs() -> None:
    assert Bench().prepare().needs == ()


def test_a_need_is_satisfied_by_its_answer() -> None:
    bench = Bench(EXACT)
    prepared = bench.prepare()
    assert [need.url for need in prepared.needs] == ["http://render:8000/v1/chat/completions/render"]
    satisfied = bench.director.satisfied(prepared, [ANSWER])
    assert satisfied.needs == ()
    assert satisfied.request.prompt_tokens == TOKENS != prepared.request.prompt_tokens
    unchanged = msgspec.structs.replace(satisfied, request=prepared.request, needs=prepared.needs)
    assert unchanged == prepared
    outcome = bench.director.submit(satisfied, 2.0)
    assert isinstance(outcome, Placement)
    assert bench.ledger.total_prefill_tokens == TOKENS, "charged exactly"
    bench.director.observe(outcome.ticket, Ended(Cause.NATURAL, None, 0, 0), 3.0)
    assert bench.ledger.total_prefill_tokens == bench.director.in_flight == 0
    assert not bench.recorder.needs


@pytest.mark.parametrize(
    "result", [NeedFailed("late", "planted"), RuntimeError("planted"), b"", b"{}", ANSWER[:-30]]
)
def test_a_need_that_fails_costs_its_facts_alone(result: NeedResult) -> None:
    bench = Bench(EXACT)
    prepared = bench.prepare()
    satisfied = bench.director.satisfied(prepared, [result])
    assert satisfied.request == prepared.request
    assert satisfied.needs == ()
    ((need, error),) = bench.recorder.needs
    assert need is prepared.needs[0]
    assert error is result or isinstance(error, NeedFailed)
    assert isinstance(bench.director.submit(satisfied, 2.0), Placement)


def test_one_of_two_needs_may_fail() -> None:
    bench = Bench(EXACT, EXACT)
    prepared = bench.prepare()
    for results in ([b"", ANSWER], [ANSWER, b""]):
        assert bench.director.satisfied(prepared, results).request.prompt_tokens == TOKENS
    assert len(bench.recorder.needs) == 2


def test_a_reader_that_breaks_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> InferenceRequest:
        raise RecursionError("planted")

    monkeypatch.setattr(director_module, "with_tokens", breaks)
    bench = Bench(EXACT)
    prepared = bench.prepare()
    assert bench.director.satisfied(prepared, [ANSWER]).request == prepared.request
    assert len(bench.recorder.needs) == 1


def test_a_plugin_that_cannot_say_what_it_needs_is_done_without() -> None:
    broken = Broken()
    bench = Bench(broken, EXACT)
    assert len(bench.prepare().needs) == 1
    assert bench.recorder.plugins == [broken]


def test_a_body_that_is_not_shown_is_not_rendered() -> None:
    assert Bench(EXACT).prepare(body_shown=False).needs == ()


def test_needs_are_not_kept_until_the_answer_ends() -> None:
    """They hold the whole body, for which no account is charged any more."""
    bench = Bench(EXACT)
    prepared = bench.prepare()
    outcome = bench.director.submit(prepared, 2.0)
    assert isinstance(outcome, Placement)
    kept, _, _ = bench.director._tickets[outcome.ticket]
    assert kept.needs == ()


def test_each_need_has_its_result() -> None:
    bench = Bench(EXACT)
    with pytest.raises(ValueError, match="argument"):
        bench.director.satisfied(bench.prepare(), [])


# -- planted faults -----------------------------------------------------------------------------------


def ignores_answers(director: Director, prepared: Prepared, results: object) -> Prepared:
    return msgspec.structs.replace(prepared, needs=())


def keeps_needs(director: Director, prepared: Prepared, results: Any) -> Prepared:
    return msgspec.structs.replace(RIGHT(director, prepared, results), needs=prepared.needs)


def counts_alone(director: Director, prepared: Prepared, results: Any) -> Prepared:
    request = msgspec.structs.replace(prepared.request, prompt_tokens=TOKENS + 1)
    return msgspec.structs.replace(prepared, request=request, needs=())


def fails_the_request(director: Director, prepared: Prepared, results: Any) -> Prepared:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return RIGHT(director, prepared, results)


RIGHT = Director.satisfied


@pytest.mark.parametrize("fault", [ignores_answers, keeps_needs, counts_alone, fails_the_request])
def test_planted_faults_are_caught(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Director, Prepared, Any], Prepared]
) -> None:
    monkeypatch.setattr(Director, "satisfied", fault)

    def checks() -> None:
        test_a_need_is_satisfied_by_its_answer()
        test_a_need_that_fails_costs_its_facts_alone(NeedFailed("late", "planted"))

    with pytest.raises((AssertionError, NeedFailed)):
        checks()


def test_a_need_says_how_long_it_may_take() -> None:
    (need,) = Bench(EXACT).prepare().needs
    assert isinstance(need, RenderNeed)
    assert need.timeout_s == 5.0
