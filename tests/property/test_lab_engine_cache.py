"""The engine under random traffic, beside an oracle of its block pool that works by brute force."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from epp.lab.blocks import BlockPool
from epp.lab.engine import FITS, Engine, EngineSpec, StepResult

BLOCK_SIZE = 4
SPEC = EngineSpec(
    FITS["llama-8b-h100"],
    num_blocks=13,
    block_size=BLOCK_SIZE,
    max_num_seqs=4,
    max_num_batched_tokens=20,
    max_model_len=48,
)


class OraclePool:
    """Blocks as a plain list; every question is answered by looking at all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.time = 0
        # holders, content, when it was named, when it became idle
        self.blocks = [{"holders": 0, "key": None, "named": 0, "idle": index - size} for index in range(size)]

    def tick(self) -> int:
        self.time += 1
        return self.time

    def idle(self) -> list[int]:
        found = [index for index, block in enumerate(self.blocks) if block["holders"] == 0]
        return sorted(found, key=lambda index: self.blocks[index]["idle"])

    @property
    def unreferenced(self) -> int:
        return len(self.idle())

    def find(self, keys: Sequence[int], limit: int) -> list[int]:
        found = []
        for key in list(keys)[:limit]:
            with_key = [index for index, block in enumerate(self.blocks) if block["key"] == key]
            if not with_key:
                break
            found.append(min(with_key, key=lambda index: self.blocks[index]["named"]))
        return found

    def fits(self, found: Sequence[int], new: int) -> bool:
        return len(set(self.idle()) - set(found)) >= new

    def hold(self, found: Sequence[int]) -> None:
        for index in found:
            self.blocks[index]["holders"] += 1

    def take(self, count: int) -> list[int]:
        taken = self.idle()[:count]
        for index in taken:
            self.blocks[index].update(holders=1, key=None)
        return taken

    def name(self, block: int, key: int) -> None:
        self.blocks[block].update(key=key, named=self.tick())

    def release(self, blocks: Sequence[int]) -> None:
        for index in list(blocks)[::-1]:
            self.blocks[index]["holders"] -= 1
            self.blocks[index]["idle"] = self.tick()


# A script: what to do, in order. Prompts share prefixes often, because chains come from few families.
submissions = st.tuples(
    st.just("submit"),
    st.integers(0, 2),  # family: which text the prompt begins with
    st.integers(1, 40),  # prompt tokens
    st.integers(0, 9),  # shared full blocks, the rest is the request's own
    st.integers(1, 8),  # output tokens
)
cancellations = st.tuples(st.just("cancel"), st.integers(0, 30))
scripts = st.lists(st.one_of(submissions, submissions, st.just(("step",)), cancellations), max_size=40)


def keys_of(request: int, family: int, blocks: int, shared: int) -> list[int]:
    return [
        index * 10 + family if index < shared else 10_000 + request * 100 + index for index in range(blocks)
    ]


class Run:
    """Plays a script on an engine, and checks after every event what must always hold."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.wanted: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.tokens: Counter[int] = Counter()
        self.cancelled: set[int] = set()
        self.results: list[StepResult] = []
        self.now = 0.0

    def play(self, script: Sequence[tuple[object, ...]]) -> list[StepResult]:
        for event in script:
            match event:
                case ("submit", int(family), int(prompt), int(shared), int(output)):
                    self.submit(family, prompt, shared, output)
                case ("cancel", int(request)):
                    self.engine.cancel(request)
                    self.cancelled.add(request) if request in self.wanted else None
                case _:
                    self.step()
            self.check()
        for _ in range(2000):
            if not self.step():
                break
            self.check()
        self.check_end()
        return self.results

    def submit(self, family: int, prompt: int, shared: int, output: int) -> None:
        request = len(self.wanted)
        blocks = (prompt + output) // BLOCK_SIZE
        keys = keys_of(request, family, blocks, shared)
        full = prompt // BLOCK_SIZE
        self.engine.submit(request, keys[:full], prompt, output, keys[full:])
        self.wanted[request] = output
        self.prompts[request] = prompt

    def step(self) -> bool:
        ends_at = self.engine.start_step(self.now)
        if ends_at is None:
            return False
        assert ends_at > self.now
        self.check()
        result = self.engine.finish_step()
        self.now = result.ended_at
        self.results.append(result)
        for request, cached in result.first.items():
            assert self.tokens[request] == 0
            assert cached % BLOCK_SIZE == 0
            assert 0 <= cached < self.prompts[request]
        self.tokens.update(result.tokens)
        assert len(set(result.tokens)) == len(result.tokens) <= SPEC.max_num_seqs
        assert not self.cancelled & set(result.tokens)
        assert set(result.first) == {request for request in result.tokens if self.tokens[request] == 1}
        finished = [request for request in result.tokens if self.tokens[request] == self.wanted[request]]
        assert result.finished == finished
        return True

    def check(self) -> None:
        """Blocks are conserved, and every running sequence has the blocks its tokens need."""
        engine = self.engine
        running = engine._running
        assert len(running) <= SPEC.max_num_seqs
        held = Counter(block for sequence in running for block in sequence.blocks)
        assert len(held) + engine._pool.unreferenced == SPEC.usable_blocks
        assert engine.kv_usage == pytest.approx(len(held) / SPEC.usable_blocks)
        for sequence in running:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert len(sequence.blocks) * BLOCK_SIZE >= max(sequence.computed, sequence.planned)

    def check_end(self) -> None:
        assert (self.engine.running, self.engine.waiting) == (0, 0)
        assert self.engine._pool.unreferenced == SPEC.usable_blocks
        for request, output in self.wanted.items():
            if request not in self.cancelled:
                assert self.tokens[request] == output
        totals = self.engine.totals
        assert totals.generation_tokens == sum(self.tokens.values())
        assert totals.hit_tokens <= totals.query_tokens


def agrees_with_oracle(script: Sequence[tuple[object, ...]], make: Callable[[], Engine]) -> bool:
    """Equal hits, tokens, preemptions and times, and nothing that must hold broken."""
    oracle = Engine(SPEC, pool=OraclePool(SPEC.usable_blocks))  # type: ignore[arg-type]
    expected = Run(oracle).play(script)
    tested = make()
    try:
        results = Run(tested).play(script)
    except (AssertionError, KeyError, IndexError):
        return False
    return results == expected and tested.totals == oracle.totals


@given(scripts)
@settings(max_examples=150, deadline=None)
def test_the_engine_agrees_with_the_oracle(script: list[tuple[object, ...]]) -> None:
    assert agrees_with_oracle(script, lambda: Engine(SPEC))


@given(scripts)
@settings(max_examples=20, deadline=None)
def test_equal_calls_give_equal_results(script: list[tuple[object, ...]]) -> None:
    assert Run(Engine(SPEC)).play(script) == Run(Engine(SPEC)).play(script)


# Deliberate faults


class EvictsHeadFirst(BlockPool):
    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks[::-1])


class EvictsNewest(BlockPool):
    def take(self, count: int) -> list[int]:
        for block in reversed([*self._unreferenced]):
            self._unreferenced.move_to_end(block)
        return super().take(count)


class TakesHeldBlocks(BlockPool):
    def hold(self, found: Sequence[int]) -> None:
        for block in found:
            self._references[block] += 1


class ForgetsNothing(BlockPool):
    """The content of an evicted block is still found."""

    def _forget(self, block: int) -> None:
        self._key_of[block] = None


class ForgetsDuplicates(BlockPool):
    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            self._duplicates.pop(key, None)
            self._holder.pop(key, None)


class HitsWholePrompt(BlockPool):
    def find(self, keys: Sequence[int], limit: int) -> list[int]:
        return super().find(keys, limit + 1)


class LeaksOnCancel(Engine):
    def cancel(self, request_id: int) -> None:
        sequence = self._by_id.get(request_id)
        if sequence in self._running:
            sequence.blocks = sequence.blocks[:-1]
        super().cancel(request_id)


class SendsTokensAfterCancel(Engine):
    def cancel(self, request_id: int) -> None:
        sequence = self._by_id.get(request_id)
        if sequence in self._running:
            return
        super().cancel(request_id)


class LosesWhenPreempted(Engine):
    def _preempt(self, victim: object) -> None:
        super()._preempt(victim)  # type: ignore[arg-type]
        victim.known = victim.prompt_tokens  # type: ignore[attr-defined]


POOL_FAULTS = [
    EvictsHeadFirst,
    EvictsNewest,
    TakesHeldBlocks,
    ForgetsNothing,
    ForgetsDuplicates,
    HitsWholePrompt,
]
ENGINE_FAULTS = [LeaksOnCancel, SendsTokensAfterCancel, LosesWhenPreempted]
FAULTS = [
    *(
        pytest.param(lambda of=of: Engine(SPEC, pool=of(SPEC.usable_blocks)), id=of.__name__)
        for of in POOL_FAULTS
    ),
    *(pytest.param(lambda of=of: of(SPEC), id=of.__name__) for of in ENGINE_FAULTS),
]


@pytest.mark.parametrize("make", FAULTS)
def test_faults_are_caught(make: Callable[[], Engine]) -> None:
    try:
        find(
            scripts,
            lambda script: not agrees_with_oracle(script, make),
            random=Random(1),
            settings=settings(max_examples=2000, deadline=None, phases=[Phase.generate], database=None),
        )
    except NoSuchExample:
        pytest.fail("the fault went unseen")
