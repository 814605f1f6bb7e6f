"""Faults of routing that users of other pickers met; `docs/field-reports.md` names each of them.

All go from the proxy's messages to the picker's replies.
"""

import json
from collections import Counter
from random import Random
from typing import Any

import yaml

from epp import names
from epp.lab import tokens
from epp.lab.engine import FITS, Engine, EngineSpec
from epp.runtime.gauges import Gauges
from tests.data.compat import line

P, Line = line.P, line.Line
CHAT = "/v1/chat/completions"


def prompt(text: str, model: str = "m", **fields: Any) -> bytes:
    return json.dumps({"model": model, "prompt": text, **fields}).encode()


def served(asked: Any, by: str | None = None) -> str:
    """The whole answer to a request; returns the endpoint that was chosen."""
    asked.answer(b"{}", served=by)
    assert asked.finished
    return str(asked.destination)


def hosts(count: int, port: int = 8000) -> list[str]:
    return [f"10.0.0.{number + 1}:{port}" for number in range(count)]


# -- a fleet in virtual time --------------------------------------------------------------------------


def configuration(weights: dict[str, float], **filters: dict[str, Any]) -> str:
    filtering = {name.replace("_", "-"): parameters for name, parameters in filters.items()}
    used = [{"pluginRef": name} for name in (*filtering, "max-score-picker")]
    return yaml.safe_dump(
        {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [
                *({"type": name, "parameters": parameters} for name, parameters in filtering.items()),
                *({"type": name} for name in (*weights, "max-score-picker")),
            ],
            "schedulingProfiles": [
                {
                    "name": "default",
                    "plugins": used + [{"pluginRef": n, "weight": weight} for n, weight in weights.items()],
                }
            ],
        }
    )


class Fleet:
    """Simulated engines behind a picker that reads their pages every 200 ms."""

    def __init__(self, config: str | None, size: int, most_running: int) -> None:
        spec = EngineSpec(FITS["llama-8b-h100"], 4000, max_num_seqs=most_running)
        self.engines = [Engine(spec) for _ in range(size)]
        self.picker = Line(*(P() for _ in range(size)), config=config)
        self.sent: Counter[int] = Counter()
        self.cached = self.asked = 0
        self._running: dict[int, Any] = {}

    def play(self, texts: list[str], a_second: float, output_tokens: int) -> None:
        """All requests from the first arrival to the last token."""
        start = self.picker.now
        arrivals = [(start + number / a_second, text) for number, text in enumerate(texts)]
        read_at = start
        while arrivals or self._running:
            steps = [engine.step_ends_at for engine in self.engines if engine.step_ends_at is not None]
            now = self.picker.now = min([read_at, *steps, *(at for at, _ in arrivals[:1])])
            if read_at <= now:
                self.picker.scrape(*(P(engine.waiting, engine.kv_usage) for engine in self.engines))
                self.picker.store.refresh(now, 0.2)
                read_at += 0.2
            for engine in self.engines:
                if engine.step_ends_at is not None and engine.step_ends_at <= now:
                    self._stepped(engine.finish_step())
            if arrivals and arrivals[0][0] <= now:
                self._ask(arrivals.pop(0)[1], output_tokens)
            for engine in self.engines:
                if engine.step_ends_at is None:
                    engine.start_step(now)

    def _ask(self, text: str, output_tokens: int) -> None:
        asked = self.picker.ask(prompt(text, stream=True))
        number, identity = self.sent.total(), tokens.from_text(text)
        count = tokens.token_count(identity)
        self.engines[asked.pod].submit(number, tokens.block_keys(identity, 16, 0), count, output_tokens)
        self.sent[asked.pod] += 1
        self.asked += count
        self._running[number] = asked

    def _stepped(self, result: Any) -> None:
        for number, cached in result.first.items():
            self.cached += cached
            fields = ((":status", b"200"), ("content-type", line.SSE.encode()))
            self._running[number].say(line.ResponseHeaders(self.picker.now, fields, False))
            event = b'data: {"choices":[{"text":"x"}]}\n\n'
            self._running[number].say(line.ResponseChunk(self.picker.now, event, False))
        for number in result.finished:
            end = line.ResponseChunk(self.picker.now, b"data: [DONE]\n\n", True)
            self._running.pop(number).say(end)


def one_system_prompt(config: str | None) -> tuple[float, float]:
    """200 requests with 4,000 tokens in common and 50 of their own, 20 a second, to 8 endpoints that run 8 at
    a time: requests of the busiest endpoint by those of the mean one, and the share of tokens cached.
    """
    draw = Random(1)
    fleet = Fleet(config, 8, 8)
    own = ["".join(draw.choice("abcdefgh") for _ in range(200)) for _ in range(200)]
    fleet.play(["s" * 16_000 + text for text in own], 20.0, 200)
    assert fleet.picker.idle
    return max(fleet.sent.values()) / 25, fleet.cached / fleet.asked


def test_a_common_system_prompt_is_spread_where_concurrency_is_limited() -> None:
    weights = {"queue-scorer": 2.0, "kv-cache-utilization-scorer": 2.0, "prefix-cache-scorer": 3.0}
    limited = configuration(weights, concurrency_detector={"maxConcurrency": 8})
    uneven, cached = one_system_prompt(limited)
    assert uneven < 2.0
    _, at_random = one_system_prompt(line.profile())
    assert cached > at_random


# -- load ---------------------------------------------------------------------------------------------


def test_idle_endpoints_are_chosen_between_two_readings() -> None:
    """40 new prompts before the pages are read again: none goes where 83, 78 or 5 wait."""
    picker = Line(*(P(waiting=waiting) for waiting in (83, 78, 5, 0, 0)))
    chosen = Counter(picker.ask(prompt(f"{number:08}" * 1000)).pod for number in range(40))
    assert set(chosen) == {3, 4}
    assert min(chosen.values()) >= 10


def test_what_was_sent_since_the_last_reading_counts_where_it_is_scored() -> None:
    picker = Line(P(), P(), config=configuration({"active-request-scorer": 1.0, "prefix-cache-scorer": 0.1}))
    chosen = Counter(picker.ask(prompt("p" * 4096)).pod for _ in range(40))
    assert chosen == {0: 20, 1: 20}


def test_models_that_take_turns_do_not_share_an_order() -> None:
    """Two models with two endpoints each, one after the other: each endpoint gets half of its model's."""
    picker = Line(*(P(host_port=host) for host in hosts(4)))
    of_model = {"A": hosts(4)[:2], "B": hosts(4)[2:]}
    chosen: Counter[str] = Counter()
    for number in range(400):
        model = "AB"[number % 2]
        chosen[served(picker.ask(prompt(f"{number}", model), subset=of_model[model]))] += 1
    assert set(chosen) == set(hosts(4))
    assert all(70 <= count <= 130 for count in chosen.values())


# -- caches -------------------------------------------------------------------------------------------


def test_a_prefix_counts_and_a_part_of_it_elsewhere_does_not() -> None:
    """One endpoint holds Y, the other X: X followed by Y goes to the one that holds X."""
    x, y = "x" * 4096, "y" * 4096
    picker = Line(P(), P())
    for text, pod in ((y, 0), (x, 1)):
        served(picker.ask(prompt(text), subset=[line.address(pod)]))
    for _ in range(20):
        assert picker.ask(prompt(x + y)).pod == 1


def test_first_requests_of_an_idle_pool_stick_when_load_rises() -> None:
    """Chosen at random, or named by the gateway, or served by the second choice: all leave their prefix."""
    picker = Line(*(P(host_port=host) for host in hosts(5)))
    where = {}
    for number in range(5):
        text = f"{number}" * 4096
        subset = [hosts(5)[4]] if number == 3 else None
        elsewhere = hosts(5)[0] if number == 4 else None
        chosen = served(picker.ask(prompt(text), subset=subset), by=elsewhere)
        where[text] = elsewhere or chosen
    picker.scrape(*(P(waiting=3, kv_usage=0.5) for _ in range(5)))
    for text, endpoint in where.items():
        assert {served(picker.ask(prompt(text))) for _ in range(5)} == {endpoint}


def test_ranks_of_one_pod_have_caches_of_their_own() -> None:
    ranks = [f"10.0.0.1:{port}" for port in range(8000, 8004)]
    picker = Line(*(P(host_port=rank) for rank in ranks))
    served(picker.ask(prompt("p" * 4096), subset=[ranks[2]]))
    assert {served(picker.ask(prompt("p" * 4096))) for _ in range(10)} == {ranks[2]}


def picture(url: str) -> bytes:
    text = {"type": "text", "text": "word " * 240}
    image = {"type": "image_url", "image_url": {"url": url}}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [text, image]}]}).encode()


def test_pictures_under_one_text_spread_and_the_same_picture_sticks() -> None:
    picker = Line(*(P() for _ in range(4)))
    chosen = {}
    for number in range(100):
        url = f"https://pictures.example/{number}.png"
        chosen[url] = picker.ask(picture(url), path=CHAT).pod
        counted = Counter(chosen.values())
        picker.scrape(*(P(waiting=counted[pod]) for pod in range(4)))
    assert max(Counter(chosen.values()).values()) < 2.0 * 25
    picker.scrape(*(P() for _ in range(4)))
    again = {url: picker.ask(picture(url), path=CHAT).pod for url in chosen}
    assert again == chosen


# -- who comes and goes -------------------------------------------------------------------------------


def roster(picker: Any) -> list[str]:
    """Where the members are, in the order in which they are read."""
    return [endpoint.host_port for _, endpoint in picker.store.roster]


def test_nothing_stays_of_a_rank_that_is_taken_out() -> None:
    both = ["10.0.0.1:8000", "10.0.0.1:8001"]
    picker = Line(*(P(waiting=1, host_port=rank) for rank in both))
    gauges = Gauges(picker.metrics)

    def sync(*ranks: str) -> None:
        picker.store.sync([line.endpoint(rank) for rank in ranks], picker.now)
        picker.store.refresh(picker.now, 0.2)
        gauges.pool(picker.store, picker.ledger, picker.budget.used)

    def queue(rank: str) -> float | None:
        labels = {"name": "pool", "model_server_endpoint": f"pod-{rank}"}
        told: float | None = picker.sample("per_endpoint_queue_size", **labels)
        return told

    sync(*both)
    open_stream = picker.ask(prompt("p" * 4096), subset=[both[1]])
    assert [queue(rank) for rank in both] == [1, 1]
    sync(both[0])
    assert picker.ask(prompt("x"), subset=[both[1]]).refusal[0] == 503
    assert [queue(rank) for rank in both] == [1, None]
    served(open_stream)
    sync(both[0])
    assert picker.store.slot_of(both[1]) is None
    assert picker.idle
    held = [plugin.size for plugin in picker.assembly.members if hasattr(plugin, "size")]
    assert held == [0]
    sync(*both)
    picker.scrape(*(P(waiting=rank == both[1]) for rank in roster(picker)))
    assert picker.ask(prompt("p" * 4096)).destination == both[0], "it is a new endpoint"


def test_an_address_that_another_pod_inherits_starts_clean() -> None:
    """Pod a leaves 10.0.0.5, pod b gets it, a comes back elsewhere: nobody inherits anything."""

    def pod(name: str, address: str) -> Any:
        return line.Endpoint(f"uid-{name}-{address}", name, "default", address, 8000)

    picker = Line(P(host_port="10.0.0.1:8000"))
    rest = [endpoint for _, endpoint in picker.store.roster]
    picker.store.sync([*rest, pod("a", "10.0.0.5")], picker.now)
    held_open = picker.ask(prompt("p" * 4096), subset=["10.0.0.5:8000"])
    picker.store.sync([*rest, pod("b", "10.0.0.5"), pod("a", "10.0.0.9")], picker.now)
    slots = {endpoint.address: slot for slot, endpoint in picker.store.roster}
    for address in ("10.0.0.5", "10.0.0.9"):
        assert picker.ledger.load.requests[slots[address]] == 0
        assert not picker.store.view.present[slots[address]]
    # What is held of the prompt would outweigh the queue.
    picker.scrape(*(P(waiting=host_port != "10.0.0.1:8000") for host_port in roster(picker)))
    assert picker.ask(prompt("p" * 4096)).destination == "10.0.0.1:8000"
    served(held_open)
    picker.store.refresh(picker.now, 0.2)
    assert [picker.ledger.load.requests[slots[address]] for address in ("10.0.0.5", "10.0.0.9")] == [0, 0]


def test_requests_end_while_endpoints_come_and_go() -> None:
    """1,500 requests while the pool changes every 20: all get an endpoint that is there, or 503."""
    draw = Random(3)
    everyone = hosts(6)
    picker = Line(*(P(host_port=host) for host in everyone))
    here, open_streams = set(everyone), []
    for number in range(1500):
        if number % 20 == 0:
            here = set(draw.sample(everyone, draw.randrange(0, 7)))
            picker.store.sync([line.endpoint(host) for host in sorted(here)], picker.now)
            picker.store.refresh(picker.now, 0.2)
        asked = picker.ask(prompt(f"{number % 7}" * 800))
        if asked.destination is None:
            status, _, headers = asked.refusal
            assert (status, headers[names.DROPPED_REASON], here) == (503, "rejected-no-endpoints", set())
            continue
        assert asked.destination in here
        open_streams.append(asked)
        if len(open_streams) > 15:
            ending = open_streams.pop(draw.randrange(15))
            if ending.destination in here:
                served(ending, by=draw.choice(everyone))
            else:
                ending.answer(b"upstream connect error", status=503)
    for asked in open_streams:
        asked.close()
    assert picker.idle
    picker.store.sync([], picker.now)
    picker.store.refresh(picker.now, 0.2)
    assert not picker.store.view.by_host_port
