"""Plans obey their workload; the infinite cache against a brute force that compares tokens one by one."""

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.lab import tokens
from epp.lab.workload import (
    Chats,
    Fleet,
    InfiniteCache,
    Turn,
    Workload,
    infinite_cache,
    plan,
)

FLEET = Fleet(
    engines=2,
    fit="llama-8b-h100",
    num_blocks=1000,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    max_model_len=8192,
)


def spans(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(0, 20)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    groups = draw(st.integers(1, 4))
    chats = Chats(
        groups=groups,
        chats=draw(st.integers(groups, 8)),
        turns=draw(st.sampled_from([(1, 1), (1, 3), (2, 4)])),
        system_tokens=draw(spans(1, 90)),
        question_tokens=draw(spans(1, 40)),
        answer_tokens=draw(spans(1, 40)),
        arrival_s=draw(st.sampled_from([0.0, 5.0])),
        think_s=(0.5, 2.0),
        skew=draw(st.sampled_from([0.0, 1.0])),
    )
    return Workload("generated", "m", draw(st.integers(0, 1000)), FLEET, chats)


def by_chat(turns: list[Turn]) -> list[list[Turn]]:
    chats: dict[int, list[Turn]] = {}
    for turn in turns:
        chats.setdefault(turn.chat, []).append(turn)
    return list(chats.values())


def within(span: tuple[float, float], value: float) -> bool:
    return span[0] <= value <= span[1]


@given(workloads())
@settings(max_examples=40, deadline=None)
def test_plan_obeys_its_workload(workload: Workload) -> None:
    turns, chats = plan(workload), workload.chats
    assert [turn.id for turn in turns] == list(range(len(turns)))
    systems = set()
    for chat in by_chat(turns):
        assert within(chats.turns, len(chat))
        assert [turn.after for turn in chat] == [None, *(turn.id for turn in chat[:-1])]
        assert within((0, chats.arrival_s), chat[0].delay_s)
        assert all(within(chats.think_s, turn.delay_s) for turn in chat[1:])
        assert all(within(chats.answer_tokens, turn.output_tokens) for turn in chat)
        (opening, system), *_ = chat[0].messages
        assert opening == "system"
        assert within(chats.system_tokens, len(system) / 4)
        systems.add(system)
        for turn in chat:
            role, question = turn.messages[-1]
            assert (role, len(turn.messages)) == ("user", 2 if turn.after is None else 1)
            assert within(chats.question_tokens, len(question.encode()) / 4)
    assert len(by_chat(turns)) == chats.chats
    assert len(systems) <= chats.groups


@given(workloads())
@settings(max_examples=20, deadline=None)
def test_seed_decides_everything(workload: Workload) -> None:
    turns = plan(workload)
    assert plan(workload) == turns
    assert plan(workload, workload.seed) == turns
    assert plan(msgspec.structs.replace(workload, seed=0), workload.seed) == turns
    other = plan(workload, workload.seed + 1)
    texts, others = (
        {text for turn in side for _, text in turn.messages if len(text) >= 64} for side in (turns, other)
    )
    assert not texts & others


def requests(turns: list[Turn]) -> Iterator[tuple[bytes, bytes]]:
    """Identity of each prompt and answer, written apart from the code under test."""
    said: dict[int, list[tuple[str, str]]] = {}
    for turn in turns:
        chat = said.setdefault(turn.chat, [])
        chat += turn.messages
        prompt = tokens.from_chat(chat)
        answer = b"".join(tokens.answer_words(prompt, turn.output_tokens))
        chat.append(("assistant", answer.decode()))
        yield prompt, answer


def brute_force(asked: list[tuple[bytes, bytes]], block_size: int) -> tuple[list[int], int]:
    """Cached tokens of each request, and distinct blocks, by comparing with every earlier sequence."""
    seen: list[bytes] = []
    cached = []
    for prompt, answer in asked:
        best = 0
        for earlier in seen:
            common = next((i for i, (a, b) in enumerate(zip(prompt, earlier, strict=False)) if a != b), None)
            common = min(len(prompt), len(earlier)) if common is None else common
            usable = min(common // 4, len(prompt) // 4 - 1, len(earlier) // 4)
            best = max(best, usable // block_size * block_size)
        cached.append(best)
        seen.append(prompt + answer)
    step = 4 * block_size
    blocks = {sequence[:end] for sequence in seen for end in range(step, len(sequence) + 1, step)}
    return cached, len(blocks)


def agrees(cache: InfiniteCache, asked: list[tuple[bytes, bytes]]) -> bool:
    cached, blocks = brute_force(asked, cache.block_size)
    found = [cache.ask(prompt, answer) for prompt, answer in asked]
    total = sum(len(prompt) // 4 for prompt, _ in asked)
    return (
        found == cached
        and math.isclose(cache.hit_ratio, sum(cached) / total)
        and (cache.held_tokens == blocks * cache.block_size)
    )


@given(workloads(), st.sampled_from([1, 4, 16, 64]))
@settings(max_examples=30, deadline=None)
def test_infinite_cache_is_what_brute_force_finds(workload: Workload, block_size: int) -> None:
    turns = plan(workload)
    asked = list(requests(turns))
    assert agrees(InfiniteCache(block_size), asked)
    whole = infinite_cache(turns, block_size)
    assert whole.cached_tokens == sum(brute_force(asked, block_size)[0])
    assert whole.prompt_tokens == sum(len(prompt) // 4 for prompt, _ in asked)


class ForgetsAnswers(InfiniteCache):
    def ask(self, prompt: bytes, output: bytes = b"") -> int:
        return super().ask(prompt)


class CountsTheLastToken(InfiniteCache):
    def ask(self, prompt: bytes, output: bytes = b"") -> int:
        return super().ask(prompt + output[:4], output[4:])


class IgnoresWhatStandsBefore(InfiniteCache):
    """Takes a block for held whatever came before it."""

    def _chain(self, sequence: bytes) -> list[int]:
        step = 4 * self.block_size
        blocks = (sequence[start : start + step] for start in range(0, len(sequence) - step + 1, step))
        return [key for block in blocks for key in tokens.block_keys(block, self.block_size, parent=0)]


class DropsAnAnswersTail(InfiniteCache):
    def ask(self, prompt: bytes, output: bytes = b"") -> int:
        return super().ask(prompt, output[: len(output) // 2])


@pytest.mark.parametrize(
    "faulty", [ForgetsAnswers, CountsTheLastToken, IgnoresWhatStandsBefore, DropsAnAnswersTail]
)
def test_brute_force_sees_faults(faulty: type[InfiniteCache]) -> None:
    chats = Chats(
        groups=2,
        chats=6,
        turns=(3, 3),
        system_tokens=(40, 60),
        question_tokens=(5, 9),
        answer_tokens=(20, 30),
        arrival_s=3,
        think_s=(1, 2),
    )
    turns = plan(Workload("faults", "m", 5, FLEET, chats))
    asked = [*requests(turns), *requests(turns[:3])]
    whole = asked[0][0][: 4 * 4 * 10]
    asked += [(whole, b""), (whole, b""), (whole + whole, b"")]
    assert agrees(InfiniteCache(4), asked)
    assert not agrees(faulty(4), asked)
