"""One inference engine in virtual time: continuous batching over a paged, prefix-caching KV cache.

The engine knows no text. A prompt is a chain of block keys, where equal keys mean equal content of the
block and of everything before it. Whoever drives the engine owns the clock:

    engine.submit(1, chain, prompt_tokens, output_tokens, now)
    ends_at = engine.start_step(now)     # plans a batch; None when there is nothing to do
    ...                                  # submit and cancel at will until then
    result = engine.finish_step()        # who got a token; then start the next step

Scheduling follows vLLM V1 with its defaults: running sequences first, then waiting ones in order of
arrival; chunked prefill under one token budget a step; a prompt is admitted when all of its blocks
fit; when a running sequence finds no block, the youngest is preempted and later computed again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from epp.errors import ConfigError, Problem
from epp.lab.blocks import BlockPool

SHORTEST_FITTED_PREFILL = 512


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of one engine step, in milliseconds: fits of measured kernel tables.

    prefill = a + b n + c n (p + n/2) for n new tokens after p cached ones;
    decode = d0 + d1 B + d2 S for a batch of B sequences with S tokens of context in all;
    a step that does both takes `mixed` (measured 0.91 to 0.95) of the sum.
    """

    a: float
    b: float
    c: float
    d0: float
    d1: float
    d2: float
    mixed: float = 0.93

    def prefill_ms(self, tokens: int, attended: float) -> float:
        """A step that only prefills `tokens`; `attended` is the sum of n (p + n/2) over its chunks.

        Below 512 tokens the fit is too low, because reading the weights bounds a step from below:
        the time then runs straight from `d0`, which is that bound, to the fit at 512.
        """
        fitted = self.a + self.b * tokens + self.c * attended
        if tokens >= SHORTEST_FITTED_PREFILL:
            return fitted
        share = tokens / SHORTEST_FITTED_PREFILL
        at_shortest = self.a + self.b * SHORTEST_FITTED_PREFILL
        return self.d0 + share * (at_shortest - self.d0) + self.c * attended

    def decode_ms(self, batch: int, context: int) -> float:
        """A step that gives `batch` sequences one token each; `context` is the sum of their lengths."""
        return self.d0 + self.d1 * batch + self.d2 * context

    def step_ms(self, tokens: int, attended: float, batch: int, context: int) -> float:
        """A step with `tokens` of prefill and `batch` decoding sequences, either of them 0."""
        if not tokens:
            return self.decode_ms(batch, context)
        if not batch:
            return self.prefill_ms(tokens, attended)
        decode = self.decode_ms(batch, context)
        return max(decode, self.mixed * (self.a + self.b * tokens + self.c * attended + decode))


FITS = {
    "llama-8b-h100": StepTime(1.078, 0.020292, 7.670e-7, 6.356, 0.01098, 4.112e-5),
    "llama-8b-a100": StepTime(6.969, 0.055276, 2.904e-6, 11.463, 0.03542, 8.300e-5),
    "llama-8b-h200": StepTime(0.566, 0.020326, 7.808e-7, 4.901, 0.01203, 2.932e-5),
    "llama-70b-h100-tp4": StepTime(3.445, 0.062561, 9.714e-7, 15.192, 0.03235, 2.655e-5),
    "llama-70b-a100-tp4": StepTime(27.704, 0.148781, 3.591e-6, 27.455, 0.10120, 5.893e-5),
    "qwen3-32b-h100-tp2": StepTime(3.318, 0.050661, 1.564e-6, 13.622, 0.02429, 4.226e-5),
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Size and speed of one engine.

    Attributes:
        num_blocks: KV blocks as vLLM reports them; one of them is its null block and never used.
        max_num_batched_tokens: tokens one step may compute.
        max_model_len: prompt and output tokens of one request.

    Raises ConfigError when a number is not positive or one request of full length would not fit.
    """

    step_time: StepTime
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192

    def __post_init__(self) -> None:
        sizes = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        problems = [Problem(name, "must be at least 1") for name in sizes if getattr(self, name) < 1]
        if not problems and self.usable_blocks * self.block_size < self.max_model_len:
            needed = -(-self.max_model_len // self.block_size) + 1
            problems.append(
                Problem("num_blocks", f"must be at least {needed} to hold max_model_len {self.max_model_len}")
            )
        if problems:
            raise ConfigError("engine", *problems)

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold tokens."""
        return self.num_blocks - 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        started_at, ended_at: seconds on the driver's clock.
        tokens: ids that got one output token each, in batch order.
        first: id -> cached prompt tokens, for those of `tokens` whose first token this is.
        finished: ids of `tokens` whose last token this is. They hold no block any more.
    """

    started_at: float
    ended_at: float
    tokens: list[int]
    first: dict[int, int]
    finished: list[int]


@dataclass(slots=True)
class Totals:
    """Counters since the engine started, as vLLM counts them.

    `query_tokens` and `hit_tokens` grow when a request is admitted (not again after a preemption);
    `prompt_tokens` and `cached_tokens` with its first output token.
    """

    query_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    steps: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request. `computed` of its `known` tokens have KV; `planned` will after the step that runs."""

    request_id: int
    keys: tuple[int, ...]
    prompt_tokens: int
    final_tokens: int
    known: int
    computed: int = 0
    planned: int = 0
    named: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = -1
    alive: bool = True


@dataclass(slots=True)
class _Step:
    """A batch being computed."""

    started_at: float
    ends_at: float
    batch: list[_Sequence]


@dataclass(slots=True)
class _Plan:
    """A batch being put together, and what its duration depends on."""

    budget: int
    batch: list[_Sequence] = field(default_factory=list)
    prefill_tokens: int = 0
    attended: float = 0.0
    decoding: int = 0
    context: int = 0
    preempted: bool = False


class Engine:
    """See the module. Deterministic: equal calls give equal results."""

    def __init__(self, spec: EngineSpec, pool: BlockPool | None = None) -> None:
        self.spec = spec
        self.totals = Totals()
        self._pool = pool or BlockPool(spec.usable_blocks)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._by_id: dict[int, _Sequence] = {}
        self._step: _Step | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that running sequences reference. Cached content alone is no usage."""
        return 1.0 - self._pool.unreferenced / self._pool.size

    @property
    def step_ends_at(self) -> float | None:
        """When the step that runs is due to end; None between steps."""
        return self._step.ends_at if self._step is not None else None

    def submit(
        self,
        request_id: int,
        chain: Sequence[int],
        prompt_tokens: int,
        output_tokens: int,
        output_chain: Sequence[int] = (),
    ) -> None:
        """Queues a request for the next step that starts.

        `chain` holds the keys of the prompt's full blocks; `output_chain` those of the full blocks of
        prompt and output together that come after. Output blocks without a key occupy the cache but
        are never hit. Raises ValueError for an id in use, a chain of the wrong length, no token to
        compute or to make, or a request longer than `max_model_len`.
        """
        if request_id in self._by_id:
            raise ValueError(f"request {request_id} is already here")
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if prompt_tokens + output_tokens > self.spec.max_model_len:
            raise ValueError(f"{prompt_tokens} + {output_tokens} tokens exceed {self.spec.max_model_len}")
        if len(chain) != prompt_tokens // self.spec.block_size:
            raise ValueError(f"{prompt_tokens} prompt tokens do not fill {len(chain)} blocks")
        sequence = _Sequence(
            request_id,
            keys=(*chain, *output_chain),
            prompt_tokens=prompt_tokens,
            final_tokens=prompt_tokens + output_tokens,
            known=prompt_tokens,
        )
        self._by_id[request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: int) -> None:
        """Forgets a request and frees its blocks at once. An unknown or finished id is ignored."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        sequence.alive = False
        if sequence in self._running:
            self._running.remove(sequence)
            self._pool.release(sequence.blocks)
        else:
            self._waiting.remove(sequence)

    def start_step(self, now: float) -> float | None:
        """Plans a step that begins at `now`; returns when it ends, None if there is nothing to compute."""
        if self._step is not None:
            raise ValueError("the last step has not been finished")
        plan = _Plan(budget=self.spec.max_num_batched_tokens)
        self._continue_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        if not plan.batch:
            return None
        duration_ms = self.spec.step_time.step_ms(
            plan.prefill_tokens, plan.attended, plan.decoding, plan.context
        )
        self._step = _Step(now, now + duration_ms / 1e3, plan.batch)
        return self._step.ends_at

    def finish_step(self) -> StepResult:
        """Ends the step that runs: sequences computed up to their last known token get another one."""
        if self._step is None:
            raise ValueError("no step runs")
        step, self._step = self._step, None
        totals = self.totals
        result = StepResult(step.started_at, step.ends_at, [], {}, [])
        for sequence in step.batch:
            if not sequence.alive:
                continue
            sequence.computed = sequence.planned
            if sequence.computed < sequence.known:
                continue
            result.tokens.append(sequence.request_id)
            if sequence.known == sequence.prompt_tokens:
                result.first[sequence.request_id] = sequence.cached_tokens
                totals.prompt_tokens += sequence.prompt_tokens
                totals.cached_tokens += sequence.cached_tokens
            sequence.known += 1
            if sequence.known == sequence.final_tokens:
                self._finish(sequence)
                result.finished.append(sequence.request_id)
        if result.finished:
            self._running = [sequence for sequence in self._running if sequence.alive]
        totals.steps += 1
        totals.generation_tokens += len(result.tokens)
        return result

    def _continue_running(self, plan: _Plan) -> None:
        running, block_size = self._running, self.spec.block_size
        index = 0
        while index < len(running) and plan.budget > 0:
            sequence = running[index]
            tokens = min(sequence.known - sequence.computed, plan.budget)
            end = sequence.computed + tokens
            if end > len(sequence.blocks) * block_size and not self._make_room(sequence, end, plan):
                return
            index += 1
            self._put(sequence, tokens, plan)

    def _admit_waiting(self, plan: _Plan) -> None:
        waiting, block_size = self._waiting, self.spec.block_size
        while waiting and plan.budget > 0 and len(self._running) < self.spec.max_num_seqs:
            sequence = waiting[0]
            # The last token is computed whatever is cached: its result is the first output token.
            found = self._pool.find(sequence.keys, (sequence.known - 1) // block_size)
            if not self._pool.fits(found, -(-sequence.known // block_size) - len(found)):
                return
            waiting.popleft()
            self._running.append(sequence)
            self._pool.hold(found)
            sequence.blocks = found
            sequence.named = len(found)
            sequence.computed = len(found) * block_size
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = sequence.computed
                self.totals.query_tokens += sequence.prompt_tokens
                self.totals.hit_tokens += sequence.computed
            tokens = min(sequence.known - sequence.computed, plan.budget)
            needed = -(-(sequence.computed + tokens) // block_size) - len(found)
            sequence.blocks.extend(self._pool.take(needed))
            self._put(sequence, tokens, plan)

    def _put(self, sequence: _Sequence, tokens: int, plan: _Plan) -> None:
        """Adds a sequence to the batch. Blocks it fills are named now, so its own batch can hit them."""
        end = sequence.planned = sequence.computed + tokens
        plan.budget -= tokens
        plan.batch.append(sequence)
        if sequence.computed + 1 == sequence.known:
            plan.decoding += 1
            plan.context += sequence.known
        else:
            plan.prefill_tokens += tokens
            plan.attended += tokens * (sequence.computed + tokens / 2)
        full = end // self.spec.block_size
        if full > sequence.named:
            self._name_blocks(sequence, full)

    def _name_blocks(self, sequence: _Sequence, full: int) -> None:
        for index in range(sequence.named, min(full, len(sequence.keys))):
            self._pool.name(sequence.blocks[index], sequence.keys[index])
        sequence.named = full

    def _make_room(self, sequence: _Sequence, end: int, plan: _Plan) -> bool:
        """Gives a running sequence blocks for `end` tokens, preempting from the youngest on.

        False: the sequence was the youngest left and is preempted itself.
        """
        needed = -(-end // self.spec.block_size) - len(sequence.blocks)
        while self._pool.unreferenced < needed:
            plan.preempted = True
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self._pool.take(needed))
        return True

    def _preempt(self, victim: _Sequence) -> None:
        self._pool.release(victim.blocks)
        victim.blocks = []
        self._waiting.appendleft(victim)
        self.totals.preemptions += 1

    def _finish(self, sequence: _Sequence) -> None:
        sequence.alive = False
        del self._by_id[sequence.request_id]
        self._pool.release(sequence.blocks)
        self.totals.finished += 1
