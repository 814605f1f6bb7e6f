"""What clients ask for: chats with shared system prompts from a workload file, or a recorded trace.

A plan is a list of turns, and a player needs nothing else:

    for each turn, concurrently:
        wait until the turn `after` it has been answered (None: until the run starts)
        wait `delay_s` of the engines' clock
        history = everything said so far in the chat, answers as they really came
        send [*history, *turn.messages], asking for `output_tokens` tokens

Times are seconds of the engines' clock; a player whose engines run at a speed-up divides them by it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from epp.errors import ConfigError, Problem, Unread
from epp.lab import tokens
from epp.lab.engine import FITS, EngineSpec

Message = tuple[str, str]
"""Role and content."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a plan.

    Attributes:
        id: its position in the plan.
        chat: the conversation it belongs to.
        after: id of the turn before it in the same chat; None for a chat's first.
        delay_s: from the end of the answer to `after` (thinking), or from the start of the run.
        messages: what it adds to the chat before its answer: a system message first, if any, then the user's.
        output_tokens: length of the answer to ask for.
    """

    id: int
    chat: int
    after: int | None
    delay_s: float
    messages: tuple[Message, ...]
    output_tokens: int


# -- workload files -------------------------------------------------------------------------------

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines a workload is made for.

    Attributes:
        fit: name of the step-time fit, a key of `epp.lab.engine.FITS`.
        speed_up: how much faster than the fit says the engines run.
    """

    engines: Count
    fit: str
    num_blocks: Count
    block_size: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count
    speed_up: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def spec(self) -> EngineSpec:
        """One of the engines. Raises ConfigError where the numbers do not fit together."""
        if self.fit not in FITS:
            raise ConfigError("fleet", Problem("fit", f"is none of {', '.join(sorted(FITS))}"))
        return EngineSpec(
            FITS[self.fit],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds."""
        return self.spec().usable_blocks * self.block_size


class Chats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conversations. Pairs are the least and the most of a uniform choice.

    Attributes:
        groups: different system prompts; every chat opens with one of them.
        chats: conversations in all. Each group has at least one; the rest fall to group number i with
            a weight of 1 / i**skew.
        turns: questions of a chat.
        arrival_s: chats begin at random within this time.
        think_s: between an answer and the next question.
    """

    groups: Count
    chats: Count
    turns: tuple[Count, Count]
    system_tokens: tuple[Count, Count]
    question_tokens: tuple[Count, Count]
    answer_tokens: tuple[Count, Count]
    arrival_s: Seconds
    think_s: tuple[Seconds, Seconds]
    skew: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload file: the traffic, and the engines it is sized for."""

    name: str
    model: str
    seed: int
    fleet: Fleet
    chats: Chats


def load_workload(path: Path) -> Workload:
    """Reads a workload file.

    Raises:
        ConfigError: it cannot be read, is no JSON, or a field is unknown, missing or out of range.
    """
    try:
        workload = msgspec.json.decode(path.read_bytes(), type=Workload)
    except OSError as error:
        raise ConfigError(str(path), Unread.because("", error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message, _, where = str(error).partition(" - at `")
        raise ConfigError(str(path), Problem(where.rstrip("`"), message)) from None
    problems = [*_fleet_problems(workload.fleet), *_chat_problems(workload)]
    if problems:
        raise ConfigError(str(path), *problems)
    return workload


def _fleet_problems(fleet: Fleet) -> Iterator[Problem]:
    try:
        fleet.spec()
    except ConfigError as error:
        for problem in error.problems:
            yield Problem(f"$.fleet.{problem.path}", problem.message)


def _chat_problems(workload: Workload) -> Iterator[Problem]:
    chats = workload.chats
    for name in ("turns", "system_tokens", "question_tokens", "answer_tokens", "think_s"):
        least, most = getattr(chats, name)
        if least > most:
            yield Problem(f"$.chats.{name}", f"the least, {least}, is more than the most, {most}")
    if chats.groups > chats.chats:
        yield Problem("$.chats.groups", f"is more than the {chats.chats} chats; every group needs one")
    longest = longest_chat_tokens(chats)
    if longest > workload.fleet.max_model_len:
        yield Problem("$.fleet.max_model_len", f"must be at least {longest}, the longest chat possible")


def longest_chat_tokens(chats: Chats) -> int:
    """Prompt and answer of the last turn of the longest chat possible, template included."""
    opening = tokens.token_count(tokens.from_chat([("system", "")]))
    turn = tokens.token_count(tokens.from_chat([("system", ""), ("user", ""), (tokens.ANSWER, "")])) - opening
    longest_turn = turn + chats.question_tokens[1] + chats.answer_tokens[1]
    return opening + chats.system_tokens[1] + chats.turns[1] * longest_turn


# -- plans ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """A turn before it has a place in the plan. `nominal_s`: when it comes if answers take no time."""

    nominal_s: float
    chat: int
    index: int
    delay_s: float
    messages: tuple[Message, ...]
    output_tokens: int


def plan(workload: Workload, seed: int | None = None) -> list[Turn]:
    """The turns of all chats, in the order they come if answers take no time.

    `seed` takes the place of the file's. Equal seeds give equal plans; different ones share no text.
    """
    seed = workload.seed if seed is None else seed
    chance = random.Random(f"warmroute workload {seed}")
    chats = workload.chats
    systems = [
        _text(f"{seed} system {group}", chance.randint(*chats.system_tokens)) for group in range(chats.groups)
    ]
    drafts: list[_Draft] = []
    for chat, group in enumerate(_groups(chats, chance)):
        drafts += _chat(chats, chat, systems[group], f"{seed} chat {chat}", chance)
    return _ordered(drafts)


def _groups(chats: Chats, chance: random.Random) -> list[int]:
    """Of each chat its group."""
    groups = range(chats.groups)
    weights = [(group + 1) ** -chats.skew for group in groups]
    chosen = [*groups, *chance.choices(groups, weights, k=chats.chats - chats.groups)]
    chance.shuffle(chosen)
    return chosen


def _chat(chats: Chats, chat: int, system: str, label: str, chance: random.Random) -> Iterator[_Draft]:
    at = 0.0
    for index in range(chance.randint(*chats.turns)):
        delay_s = chance.uniform(*chats.think_s) if index else chance.uniform(0, chats.arrival_s)
        at += delay_s
        question = ("user", _text(f"{label} question {index}", chance.randint(*chats.question_tokens)))
        messages = (question,) if index else (("system", system), question)
        yield _Draft(at, chat, index, delay_s, messages, chance.randint(*chats.answer_tokens))


def _ordered(drafts: list[_Draft]) -> list[Turn]:
    drafts.sort(key=lambda draft: (draft.nominal_s, draft.chat, draft.index))
    turns: list[Turn] = []
    latest: dict[int, int] = {}
    for draft in drafts:
        after = latest.get(draft.chat)
        latest[draft.chat] = len(turns)
        turns.append(Turn(len(turns), draft.chat, after, draft.delay_s, draft.messages, draft.output_tokens))
    return turns


def _text(label: str, count: int) -> str:
    """`count` tokens of words that no other label gives."""
    return b"".join(tokens.answer_words(label.encode(), count)).decode()


# -- what a cache could have done ------------------------------------------------------------------


class InfiniteCache:
    """One prefix cache that forgets nothing and sees every request: the most that routing can reach.

    Only full blocks count, each after all before it, and the last prompt token is always computed.

    Attributes:
        prompt_tokens, cached_tokens: over all requests so far.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._keys: set[int] = set()

    def ask(self, prompt: bytes, output: bytes = b"") -> int:
        """Takes a prompt's identity and its answer's; returns the prompt tokens that were cached."""
        keys = self._chain(prompt + output)
        prompt_tokens = tokens.token_count(prompt)
        cached = 0
        for key in keys[: (prompt_tokens - 1) // self.block_size]:
            if key not in self._keys:
                break
            cached += self.block_size
        self._keys.update(keys)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached
        return cached

    def _chain(self, sequence: bytes) -> list[int]:
        return tokens.block_keys(sequence, self.block_size, parent=0)

    @property
    def held_tokens(self) -> int:
        """Distinct content: the working set of the requests so far."""
        return len(self._keys) * self.block_size

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def infinite_cache(turns: Sequence[Turn], block_size: int) -> InfiniteCache:
    """The cache after all turns of a plan, answered as the lab's engines answer."""
    cache = InfiniteCache(block_size)
    history: dict[int, tuple[Message, ...]] = {}
    for turn in turns:
        asked = (*history.get(turn.chat, ()), *turn.messages)
        prompt = tokens.from_chat(asked)
        answer = b"".join(tokens.answer_words(prompt, turn.output_tokens))
        cache.ask(prompt, answer)
        history[turn.chat] = (*asked, (tokens.ANSWER, answer.decode()))
    return cache


def infinite_cache_hit_ratio(turns: Sequence[Turn], block_size: int) -> float:
    """Cached prompt tokens per prompt token of `infinite_cache`."""
    return infinite_cache(turns, block_size).hit_ratio


# -- recorded traces -------------------------------------------------------------------------------

TRACE_BLOCK_TOKENS = 512
_PROBLEMS_SHOWN = 10


class _TraceLine(msgspec.Struct, frozen=True):
    """One request of a Mooncake trace."""

    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    def __post_init__(self) -> None:
        blocks = -(-self.input_length // TRACE_BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"{self.input_length} input tokens are {blocks} blocks of {TRACE_BLOCK_TOKENS}, "
                f"but hash_ids holds {len(self.hash_ids)}"
            )


def read_mooncake_trace(
    path: Path,
    *,
    speed_up: float = 1.0,
    seed: int = 0,
    spread_s: float = 3.0,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[Turn]:
    """A trace in Mooncake's form (JSON lines) as chats of one turn, in order of arrival.

    Equal leading `hash_ids` become equal leading text, 512 tokens an id.

    Args:
        speed_up: arrivals come this many times as fast; more than 0.
        spread_s: requests of one timestamp are spread at random (by `seed`) over so many seconds
            after it, before the speed-up: published traces are rounded down to about three seconds.
        limit: the first so many lines only.
        max_prompt_tokens, max_output_tokens: longer ones are cut. The chat template adds a few tokens.

    Raises:
        ConfigError: the file cannot be read or is empty; each wrong line (the first ten) by number.
    """
    lines = _trace_lines(path, limit)
    chance = random.Random(f"warmroute trace {seed}")
    crowd: dict[float, int] = {}
    for line in lines:
        crowd[line.timestamp] = crowd.get(line.timestamp, 0) + 1
    drafts: list[_Draft] = []
    for chat, line in enumerate(lines):
        late_s = chance.uniform(0, spread_s) if crowd[line.timestamp] > 1 else 0.0
        at = (line.timestamp / 1e3 + late_s) / speed_up
        length = min(line.input_length, max_prompt_tokens or line.input_length)
        prompt = "".join([_text(f"block {name}", TRACE_BLOCK_TOKENS) for name in line.hash_ids])
        output = min(line.output_length, max_output_tokens or line.output_length)
        drafts.append(_Draft(at, chat, 0, at, (("user", prompt[: length * tokens.TOKEN_BYTES]),), output))
    return _ordered(drafts)


def _trace_lines(path: Path, limit: int | None) -> list[_TraceLine]:
    decoder = msgspec.json.Decoder(_TraceLine)
    lines: list[_TraceLine] = []
    problems: list[Problem] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if len(lines) == limit or len(problems) == _PROBLEMS_SHOWN:
                    break
                if not text.strip():
                    continue
                try:
                    lines.append(decoder.decode(text))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    problems.append(Problem(f"line {number}", str(error)))
    except OSError as error:
        raise ConfigError(str(path), Unread.because("", error)) from None
    if not lines and not problems:
        problems.append(Problem("", "holds no request; one JSON object a line is expected"))
    if problems:
        raise ConfigError(str(path), *problems)
    return lines
