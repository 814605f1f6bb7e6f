"""One request from body to placement, and what counting it costs."""

import gc
import time

from benchmarks.rows import picker, traffic
from benchmarks.rows.timing import Effort, Result, cpu_us
from epp.director import Director, Prepared
from epp.payload.records import RawRequest
from epp.scheduling.explain import record_decision
from epp.scheduling.ports import Ctx
from epp.scheduling.records import AnswerFact, Placement, Ticket

BATCH = 100
BEFORE = 1000


class _Batches:
    """Places new chats of one size, a batch at a time; ends them between measurements."""

    def __init__(self, director: Director, body_bytes: int, batch: int, before: int) -> None:
        self.director = director
        self._chats = traffic.Chats(body_bytes, seed=11)
        self._batch = batch
        self._placements: list[Placement] = []
        self._raws: list[RawRequest] = []
        self._number = 0
        self.renew()
        for _ in range(before // batch):
            self.place()
            self.renew()

    def place(self) -> None:
        director = self.director
        for raw in self._raws:
            now = time.monotonic()
            self._placements.append(picker.placed(director.submit(director.prepare(raw, now), now)))

    def prepare(self) -> None:
        for raw in self._raws:
            self.director.prepare(raw, 0.0)

    def renew(self) -> None:
        """End what was placed and make the next requests."""
        picker.end(self.director, self._placements, time.monotonic())
        self._placements = []
        self._raws = [traffic.raw_request(next(self._chats), self._number + n) for n in range(self._batch)]
        self._number += self._batch


def choosing(effort: Effort) -> list[Result]:
    """prepare + submit of a 1 kB chat among 32 and 512 endpoints."""
    results = []
    for count, budget in ((32, 150.0), (512, 200.0)):
        director, _, _ = picker.director(count)
        batches = _Batches(director, 1000, min(BATCH, effort.inner), min(BEFORE, effort.inner * 5))
        per = min(BATCH, effort.inner)
        gc.collect()
        parse = cpu_us(batches.prepare, effort, per=per, inner=1, between=batches.renew)
        samples = cpu_us(batches.place, effort, per=per, inner=1, between=batches.renew)
        results.append(
            Result(
                f"prepare + submit, 1 kB chat, {count} endpoints",
                "us",
                budget,
                samples,
                detail={"of_it_prepare_us": min(parse)},
            )
        )
    return results


def long_prompt(effort: Effort) -> list[Result]:
    """A 400 kB chat: parse, hash, look up, place, enter; new ones, and one that is known."""
    director, _, _ = picker.director(32)
    batches = _Batches(director, 400_000, 1, 1)
    new = cpu_us(batches.place, Effort(repeats=effort.repeats * 3), inner=1, between=batches.renew)
    raw = traffic.raw_request(next(traffic.Chats(400_000, seed=12)), 0)
    placements: list[Placement] = []

    def again() -> None:
        placements.append(picker.placed(director.submit(director.prepare(raw, 0.0), 0.0)))

    def forget() -> None:
        picker.end(director, placements, 0.0)
        placements.clear()

    known = cpu_us(again, effort, inner=min(effort.inner, 10), between=forget)
    parse = cpu_us(lambda: director.prepare(raw, 0.0), effort, inner=min(effort.inner, 10))
    return [
        Result(
            "400 kB prompt: parse, hash, look up, place, enter",
            "us",
            2000.0,
            new,
            detail={"known_prompt_us": min(known), "of_it_prepare_us": min(parse)},
        )
    ]


class _Heard(picker.NoRecorder):
    """Keeps what the director tells of one request, to tell it again and again."""

    def __init__(self) -> None:
        self.choices: list[tuple[Prepared, Ticket, Ctx]] = []
        self.facts: list[tuple[Prepared, Ticket, AnswerFact, float]] = []

    def placed(self, prepared: Prepared, ticket: Ticket, ctx: Ctx) -> None:
        self.choices.append((prepared, ticket, ctx))

    def observed(self, prepared: Prepared, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        self.facts.append((prepared, ticket, fact, now))


def counting(effort: Effort) -> list[Result]:
    """Metrics of one request from its stream's opening to its end; and keeping its decision for explain."""
    heard = _Heard()
    director, _, _ = picker.director(32, heard)
    raw = traffic.raw_request(next(traffic.Chats(1000, seed=13)), 1)
    picker.end(director, [picker.placed(director.submit(director.prepare(raw, 0.0), 0.05))], 1.0)
    ((prepared, ticket, ctx),) = heard.choices
    app = picker.app(32)
    metrics, recorder = app.metrics, app.recorder
    streams = metrics.gauge("extproc_streams_inflight")

    def count() -> None:
        streams.inc()
        metrics.decided(0.0001, 0.0001)
        metrics.placed(prepared, ticket)
        for fact in heard.facts:
            recorder.observed(*fact)
        streams.dec()
        metrics.counter("extproc_streams_total", "OK").inc()

    kept = cpu_us(lambda: record_decision("r-1", ticket.placement.legs, ctx), effort)
    return [
        Result("metrics of one request", "us", 40.0, cpu_us(count, effort)),
        Result("keeping one decision for explain, 32 endpoints", "us", None, kept),
    ]
