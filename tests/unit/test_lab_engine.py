"""The engine in virtual time: step durations, batching, caching, preemption, one behaviour a test."""

import pytest

from epp.errors import ConfigError
from epp.lab.engine import FITS, Engine, EngineSpec, StepResult, StepTime

UNIT = StepTime(a=1.0, b=1.0, c=0.0, d0=1.0, d1=0.0, d2=0.0)
H100 = FITS["llama-8b-h100"]


def engine(num_blocks: int = 101, **sizes: int) -> Engine:
    sizes = {"block_size": 4, "max_model_len": 200, **sizes}
    return Engine(EngineSpec(UNIT, num_blocks, **sizes))


def step(of: Engine, now: float = 0.0) -> StepResult:
    assert of.start_step(now) is not None
    return of.finish_step()


def drain(of: Engine) -> list[StepResult]:
    results = []
    while of.start_step(0.0) is not None:
        results.append(of.finish_step())
    return results


def chain(*keys: int) -> list[int]:
    return list(keys)


# Durations


def step_ms(of: Engine) -> float:
    ends_at = of.start_step(0.0)
    assert ends_at is not None
    return ends_at * 1e3


@pytest.mark.parametrize(("tokens", "published_ms"), [(256, 8.73), (1024, 22.11), (8192, 199.7)])
def test_prefill_is_near_the_published_points(tokens: int, published_ms: float) -> None:
    of = Engine(EngineSpec(H100, 2000, max_model_len=9000))
    of.submit(1, range(tokens // 16), tokens, 1)
    assert step_ms(of) == pytest.approx(published_ms, rel=0.035)


@pytest.mark.parametrize("name", FITS)
def test_prefill_and_decode_follow_the_fits(name: str) -> None:
    fit = FITS[name]
    of = Engine(EngineSpec(fit, 2000, max_num_batched_tokens=10_000, max_model_len=8000))
    for request in (1, 2, 3):
        of.submit(request, [request] * 62, 1000, 9)
    attended = 3 * 1000 * 500
    assert step_ms(of) == pytest.approx(fit.a + fit.b * 3000 + fit.c * attended)
    of.finish_step()
    assert step_ms(of) == pytest.approx(fit.d0 + fit.d1 * 3 + fit.d2 * 3 * 1001)


def test_a_mixed_step_takes_a_share_of_the_sum() -> None:
    of = Engine(EngineSpec(H100, 2000, max_model_len=8000))
    of.submit(1, [1] * 62, 1000, 9)
    step(of)
    of.submit(2, [2] * 125, 2000, 9)
    prefill = 1.078 + 0.020292 * 2000 + 7.670e-7 * 2000 * 1000
    decode = 6.356 + 0.01098 + 4.112e-5 * 1001
    assert step_ms(of) == pytest.approx(0.93 * (prefill + decode))


def test_cached_tokens_are_attended_but_not_computed() -> None:
    of = Engine(EngineSpec(H100, 2000, max_model_len=8000))
    of.submit(1, range(125), 2000, 1)
    step(of)
    of.submit(2, range(187), 3000, 1)
    assert step_ms(of) == pytest.approx(1.078 + 0.020292 * 1000 + 7.670e-7 * 1000 * (2000 + 500))
    assert of.finish_step().first == {2: 2000}


def test_short_prefill_never_beats_reading_the_weights_and_meets_the_fit() -> None:
    times = [H100.prefill_ms(tokens, tokens * tokens / 2) for tokens in range(1, 600)]
    assert times == sorted(times)
    assert times[0] > H100.d0
    assert times[511] - times[510] == pytest.approx(times[510] - times[509], rel=0.5)


def test_a_mixed_step_is_no_shorter_than_its_decode() -> None:
    fit = StepTime(a=0.0, b=0.0, c=0.0, d0=10.0, d1=0.0, d2=0.0)
    assert fit.step_ms(tokens=1, attended=0.5, batch=1, context=10) == 10.0


# Batching


def test_one_token_a_step_and_the_last_one_finishes() -> None:
    of = engine()
    of.submit(7, chain(1), 5, 3)
    results = drain(of)
    assert [result.tokens for result in results] == [[7], [7], [7]]
    assert [result.finished for result in results] == [[], [], [7]]
    assert [result.first for result in results] == [{7: 0}, {}, {}]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    of = engine(max_num_batched_tokens=10)
    of.submit(1, range(6), 25, 1)
    results = drain(of)
    assert [result.tokens for result in results] == [[], [], [1]]
    assert [round((result.ended_at - result.started_at) * 1e3, 2) for result in results] == [
        round(UNIT.prefill_ms(tokens, 0.0), 2) for tokens in (10, 10, 5)
    ]


def test_running_sequences_come_before_waiting_ones() -> None:
    of = engine(max_num_batched_tokens=10)
    of.submit(1, chain(1), 6, 9)
    step(of)
    of.submit(2, chain(2, 3, 4), 12, 1)
    assert step(of).tokens == [1]
    assert step(of).tokens == [1, 2]


def test_a_step_without_tokens_left_admits_nobody() -> None:
    of = engine(max_num_batched_tokens=6)
    for request in (1, 2):
        of.submit(request, chain(1), 6, 2)
    assert step(of).tokens == [1]
    assert (of.running, of.waiting, of.totals.query_tokens) == (1, 1, 6)
    assert step(of).tokens == [1, 2]


def test_at_most_max_num_seqs_run_and_the_first_come_are_first() -> None:
    of = engine(max_num_seqs=2)
    for request in (5, 3, 4):
        of.submit(request, chain(), 3, 2)
    assert (of.running, of.waiting) == (0, 3)
    assert step(of).tokens == [5, 3]
    assert (of.running, of.waiting) == (2, 1)
    assert step(of).finished == [5, 3]
    assert step(of).tokens == [4]


def test_a_prompt_waits_until_all_of_its_blocks_fit() -> None:
    of = engine(num_blocks=11, max_model_len=40, max_num_batched_tokens=16)
    of.submit(1, range(5), 20, 12)
    step(of)
    of.submit(2, range(100, 107), 28, 1)
    assert step(of).tokens == [1]
    assert (of.running, of.waiting) == (1, 1)
    drain(of)
    assert of.totals.preemptions == 0


def test_nothing_to_do_is_no_step() -> None:
    assert engine().start_step(0.0) is None


def test_a_step_knows_when_it_ends() -> None:
    of = engine()
    of.submit(1, chain(), 3, 1)
    ends_at = of.start_step(10.0)
    assert of.step_ends_at == ends_at
    result = of.finish_step()
    assert (result.started_at, result.ended_at) == (10.0, ends_at)
    assert of.step_ends_at is None


# The cache


def test_a_hit_leaves_at_least_the_last_token_to_compute() -> None:
    of = engine()
    of.submit(1, chain(1, 2, 3), 12, 1)
    of.submit(2, chain(1, 2, 3), 12, 1)
    of.submit(3, chain(1, 2, 3), 13, 1)
    assert step(of).first == {1: 0, 2: 8, 3: 12}


def test_a_hit_ends_at_the_first_unknown_block() -> None:
    of = engine()
    of.submit(1, chain(1, 2, 3, 4), 17, 1)
    drain(of)
    of.submit(2, chain(1, 2, 9, 4), 17, 1)
    assert step(of).first == {2: 8}


def test_output_is_hit_by_the_next_turn() -> None:
    of = engine()
    of.submit(1, chain(1), 6, 11, output_chain=[2, 3, 4])
    drain(of)
    of.submit(2, chain(1, 2, 3, 4, 5), 23, 1)
    # 17 tokens were known, the last of them was never computed: four blocks are full.
    assert step(of).first == {2: 16}


def test_a_block_that_was_not_filled_is_not_hit() -> None:
    of = engine()
    of.submit(1, chain(1), 6, 10, output_chain=[2, 3, 4])
    drain(of)
    of.submit(2, chain(1, 2, 3, 4, 5), 23, 1)
    assert step(of).first == {2: 12}


def test_output_without_keys_occupies_the_cache_and_is_not_hit() -> None:
    of = engine(num_blocks=9, max_model_len=32)
    of.submit(1, chain(1), 5, 20)
    drain(of)
    of.submit(2, chain(7), 4, 1)
    drain(of)
    of.submit(3, chain(1, 2), 9, 1)
    assert step(of).first == {3: 4}


def test_cached_content_alone_is_no_usage() -> None:
    of = engine(num_blocks=11, max_model_len=40)
    of.submit(1, range(5), 21, 1)
    of.start_step(0.0)
    assert of.kv_usage == pytest.approx(0.6)
    of.finish_step()
    assert of.kv_usage == 0.0


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    of = engine(num_blocks=11, max_model_len=40)
    of.submit(1, range(9), 39, 1)
    drain(of)
    of.submit(2, range(100, 103), 15, 1)
    drain(of)
    of.submit(3, range(9), 39, 1)
    # Four blocks were taken: the one that was never filled, then the last three of the prompt.
    assert step(of).first == {3: 24}


def test_the_same_content_computed_twice_survives_the_eviction_of_one_copy() -> None:
    of = engine(num_blocks=6, max_model_len=20)
    of.submit(1, chain(1), 4, 1)
    of.submit(2, chain(1), 4, 1)
    drain(of)
    of.submit(3, chain(5, 6, 7), 13, 1)
    drain(of)
    of.submit(4, chain(1), 5, 1)
    assert step(of).first == {4: 4}


def test_counters_tell_tokens() -> None:
    of = engine()
    of.submit(1, chain(1, 2), 10, 3)
    drain(of)
    of.submit(2, chain(1, 2), 10, 2)
    drain(of)
    totals = of.totals
    assert (totals.query_tokens, totals.hit_tokens) == (20, 8)
    assert (totals.prompt_tokens, totals.cached_tokens) == (20, 8)
    assert (totals.generation_tokens, totals.finished, totals.steps) == (5, 2, 5)


# Preemption and cancelling


def test_the_youngest_is_preempted_and_computed_again() -> None:
    of = engine(num_blocks=6, max_model_len=20)
    of.submit(1, chain(1, 2), 8, 8, output_chain=[11, 12])
    of.submit(2, chain(3, 4), 8, 8, output_chain=[13, 14])
    results = drain(of)
    assert of.totals.preemptions == 1
    tokens = [request for result in results for request in result.tokens]
    assert tokens.count(1) == tokens.count(2) == 8
    assert [request for result in results for request in result.finished] == [1, 2]
    assert of.kv_usage == 0.0
    # Counted once, however often it was admitted.
    assert (of.totals.query_tokens, of.totals.hit_tokens) == (16, 0)
    assert sum(len(result.first) for result in results) == 2


def test_a_preempted_sequence_is_first_in_line_again() -> None:
    of = engine(num_blocks=6, max_model_len=20)
    of.submit(1, chain(1, 2), 8, 8)
    of.submit(2, chain(3, 4), 8, 8)
    while of.totals.preemptions == 0:
        step(of)
    of.submit(3, chain(), 3, 1)
    results = drain(of)
    order = [request for result in results for request in result.tokens]
    assert order.index(2) < order.index(3)


def test_cancelling_frees_at_once_and_forever() -> None:
    of = engine()
    of.submit(1, chain(1, 2), 8, 50)
    of.submit(2, chain(3), 5, 2)
    of.submit(3, chain(4), 5, 2)
    of.cancel(3)
    of.start_step(0.0)
    of.cancel(1)
    assert of.kv_usage == pytest.approx(2 / 100)
    assert of.finish_step().tokens == [2]
    of.cancel(1)
    of.cancel(99)
    assert [result.tokens for result in drain(of)] == [[2]]
    of.submit(1, chain(1, 2), 8, 1)
    assert step(of).first == {1: 4}


# What is refused


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"num_blocks": 51, "max_model_len": 201}, "num_blocks: must be at least 52"),
    ],
)
def test_impossible_engines_are_refused(sizes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        engine(**sizes)


@pytest.mark.parametrize(
    ("keys", "prompt_tokens", "output_tokens", "reason"),
    [
        ([1], 3, 1, "do not fill"),
        ([], 4, 1, "do not fill"),
        ([], 0, 1, "at least one"),
        ([], 3, 0, "at least one"),
        (range(50), 200, 1, "exceed 200"),
    ],
)
def test_impossible_requests_are_refused(
    keys: list[int], prompt_tokens: int, output_tokens: int, reason: str
) -> None:
    of = engine()
    with pytest.raises(ValueError, match=reason):
        of.submit(1, keys, prompt_tokens, output_tokens)
    assert of.waiting == 0


def test_calls_out_of_order_are_refused() -> None:
    of = engine()
    with pytest.raises(ValueError, match="no step runs"):
        of.finish_step()
    of.submit(1, [], 3, 1)
    with pytest.raises(ValueError, match="already here"):
        of.submit(1, [], 3, 1)
    of.start_step(0.0)
    with pytest.raises(ValueError, match="not been finished"):
        of.start_step(0.0)
