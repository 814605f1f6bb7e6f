"""Endpoints that come and go for as long as the picker runs: what it holds does not grow."""

import gc
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from prometheus_client import Counter, Gauge

from epp.payload.records import RawRequest
from epp.pool.metrics_page import EngineSample, LoraSample
from epp.pool.named import NamedMasks
from epp.pool.records import Endpoint
from epp.runtime import recorder
from epp.runtime.app import App
from epp.runtime.metrics import Metrics
from epp.runtime.scrape import _Poller
from epp.scheduling.no_hit import NoHitLruScorer
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken, Placement
from tests.data.runtime import picker as runtime

EVERY_KIND_OF_STATE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: mm-embeddings-cache-producer
- type: inflight-load-producer
- {name: sticky, type: session-affinity-scorer, parameters: {strategy: session_id}}
- type: no-hit-lru-scorer
- type: prefix-cache-scorer
- type: active-request-scorer
- type: lora-affinity-scorer
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: sticky
  - pluginRef: prefix-cache-scorer
  - pluginRef: no-hit-lru-scorer
  - pluginRef: active-request-scorer
  - pluginRef: lora-affinity-scorer
  - pluginRef: queue-scorer
  - pluginRef: max-score-picker
"""
POOL = 6
ROUNDS = 20
"""In each of which half the pool is replaced, so a phase has twenty times as many endpoints as the pool."""


class Churn:
    """A picker whose endpoints are replaced, under traffic that is the same in every phase."""

    def __init__(self) -> None:
        self.app: App = runtime.picker(0, config=EVERY_KIND_OF_STATE, seed=7)
        self.now = 0.0
        self._numbers = count()
        self._pool = [self._endpoint() for _ in range(POOL)]

    def _endpoint(self) -> Endpoint:
        number = next(self._numbers)
        place = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        return Endpoint(f"uid-{number}", f"pod-{number}", "default", place, 8000, {}, f"pod-{number}")

    def phase(self) -> None:
        """So many more endpoints come and go; all requests end."""
        for turn in range(ROUNDS):
            self._pool = self._pool[POOL // 2 :] + [self._endpoint() for _ in range(POOL // 2)]
            self.app.set_endpoints(self._pool)
            for poller in self.app.scraper._pollers:
                poller._follow_roster()
            self._tell(turn)
            placed = [self._place(turn, number) for number in range(4)]
            # The first two end when half the pool, maybe their own endpoints, has gone.
            self._end(placed[2:])
            self._pool = self._pool[POOL // 2 :] + [self._endpoint() for _ in range(POOL // 2)]
            self.app.set_endpoints(self._pool)
            self.app.renew_gauges()
            self._end(placed[:2])
            self.now += 1.0
            self.app.store.refresh(self.now, 0.2)
            self.app._refresh_plugins(self.now)
            self.app.renew_gauges()

    def _tell(self, turn: int) -> None:
        for slot, endpoint in self.app.store.roster:
            lora = LoraSample(frozenset({f"of-{endpoint.uid}"}), frozenset({f"for-{endpoint.uid}"}), 4)
            sample = EngineSample(1.0, 1.0, 0.1, 64, 6400, 10.0 * turn, 20.0 * turn, lora)
            self.app.store.sampled(slot, sample, self.now)
            self.app.store.listed_models(slot, frozenset({f"model-of-{endpoint.uid}"}))

    def _place(self, turn: int, number: int) -> Placement:
        picture = f"http://pictures.example/{turn % 5}-{number}.png"
        image = {"type": "image_url", "image_url": {"url": picture}}
        text = {"type": "text", "text": f"{turn % 7} {number} " * 200}
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [text, image]}]}).encode()
        headers = (("x-session-id", f"{turn % 20}-{number}"),)
        raw = RawRequest("r", "POST", "/v1/chat/completions", headers, body)
        placement = self.app.director.submit(self.app.director.prepare(raw, self.now), self.now)
        assert isinstance(placement, Placement)
        return placement

    def _end(self, placed: list[Placement]) -> None:
        for placement in placed:
            served = placement.serving.endpoints[0].host_port
            for fact in (AnswerHeaders(200, served, True), FirstToken(), Ended(Cause.NATURAL, None, 1, 1)):
                self.app.director.observe(placement.ticket, fact, self.now)


def held(app: App) -> int:
    """Objects that the picker reaches, and the entries of its containers and arrays."""
    gc.collect()
    seen: set[int] = set()
    found, waiting = 0, deque[Any]([app])
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | logging.Logger | Counter | Gauge):
            # Metrics are counted by their series: a child of prometheus_client is one of them.
            if id(one) not in seen and isinstance(one, Counter | Gauge):
                seen.add(id(one))
                found += 1 + len(getattr(one, "_metrics", ()))
            continue
        seen.add(id(one))
        found += 1
        if isinstance(one, dict | list | tuple | set | frozenset | deque):
            found += len(one)
        elif isinstance(one, np.ndarray):
            found += one.size
        waiting.extend(_reached(one))
    return found


def _reached(one: Any) -> Iterator[Any]:
    if isinstance(one, FunctionType):
        yield from one.__closure__ or ()
        yield from one.__defaults__ or ()
    else:
        yield from gc.get_referents(one)


def growth(monkeypatch: pytest.MonkeyPatch) -> int:
    # Its decisions keep the endpoints that they chose among: full from the first phase on.
    monkeypatch.setattr(recorder, "RING", 4)
    churn = Churn()
    for _ in range(2):
        churn.phase()
    before = held(churn.app)
    churn.phase()
    return held(churn.app) - before


REPLACED = ROUNDS * POOL


def test_endpoints_that_come_and_go_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert growth(monkeypatch) < REPLACED / 2


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(name: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    def add(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
        FAULTS[name] = plant

    return add


@fault("series of an endpoint stay")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Metrics, "forget_endpoints", lambda self, owners: None)


@fault("a name that goes with no slot is kept")
def _(patch: pytest.MonkeyPatch) -> None:
    def kept(self: NamedMasks, slot: int, names: frozenset[str], capacity: int) -> None:
        for name in names:
            self.masks.setdefault(name, np.zeros(capacity, np.bool_))[slot] = True

    patch.setattr(NamedMasks, "set", kept)


@fault("a scraper keeps its targets")
def _(patch: pytest.MonkeyPatch) -> None:
    follow = _Poller._follow_roster

    def keeping(self: _Poller) -> None:
        before = self._targets
        follow(self)
        self._targets = before | self._targets

    patch.setattr(_Poller, "_follow_roster", keeping)


@fault("a request's series are kept when it has ended")
def _(patch: pytest.MonkeyPatch) -> None:
    ended = Metrics.ended

    def keeping(self: Metrics, prepared: Any, ticket: Any, fact: Any, now: float) -> None:
        of = self._placed[ticket.id]
        ended(self, prepared, ticket, fact, now)
        self._placed[ticket.id] = of, fact  # type: ignore[assignment]

    patch.setattr(Metrics, "ended", keeping)


@fault("a plugin keeps what it knows by endpoint")
def _(patch: pytest.MonkeyPatch) -> None:
    def left(self: NoHitLruScorer, slot: int) -> None:
        owner = self._view.endpoints[slot]
        assert owner is not None
        self.__dict__.setdefault("gone", {})[owner.uid] = slot, owner

    patch.setattr(NoHitLruScorer, "left", left)


@pytest.mark.parametrize("name", FAULTS)
def test_what_stays_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    assert growth(monkeypatch) > REPLACED
