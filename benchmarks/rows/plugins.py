"""What each plugin adds to a request, and that one which is not configured adds nothing."""

import gc
import json
import random
import statistics
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks.rows import picker, traffic
from benchmarks.rows.timing import Effort, Result
from epp import names
from epp.config.load import Assembly, build, default_config, load_config
from epp.config.loaded import LoadedConfig
from epp.config.reference import parameters
from epp.config.registry import Registry, built_in_registry
from epp.config.resolve import DEFAULT_SCORERS
from epp.config.spec import Kind, PluginSpec
from epp.director import Director, Need
from epp.kvcache.burst import BurstNeed, BurstPlace
from epp.payload.records import RawRequest, Usage
from epp.pool.ledger import InflightLedger
from epp.pool.metrics_page import EngineSample, LoraSample
from epp.pool.records import Endpoint
from epp.pool.store import FIRST_CAPACITY, PoolStore
from epp.scheduling.filters import TEST_ENDPOINT_SELECTION
from epp.scheduling.records import AnswerHeaders, Cause, Completed, Ended, FirstToken, Placement

POOLS: Final = (32, 512)
BATCH: Final = 100
WARM: Final = 10
ROUNDS_A_REPEAT: Final = 5
REFERENCES: Final = 3
BODY_BYTES: Final = 1000

IN_PROFILES: Final = (Kind.FILTER, Kind.SCORER, Kind.PICKER, Kind.SATURATION_DETECTOR)
KINDS: Final = (
    *IN_PROFILES,
    Kind.PROFILE_HANDLER,
    Kind.PRODUCER,
    Kind.ADMITTER,
    Kind.SCREENER,
    Kind.REQUEST_HOOK,
    Kind.RESPONSE_HOOK,
)

_TIER: Final = "tier"
_FIGURE: Final = "figure"

MINIMAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "label-selector-filter": {"matchLabels": {_TIER: "gold"}},
    "by-label": {"label": _TIER, "validValues": ["gold"]},
    "endpoint-attribute-filter": {
        "attribute": _FIGURE,
        "algorithm": {"type": "threshold", "threshold": {"operator": "GreaterThan", "value": 0.1}},
    },
    "utilization-filter": {"conditions": [{"metric": "running-requests", "maxValue": 30}]},
    "endpoint-attribute-scorer": {
        "attributeKey": _FIGURE,
        "algorithm": {"type": "linear_lower_is_better"},
    },
    "header-label-affinity-scorer": {"headerName": "x-tier", "labelKey": _TIER},
    "request-attribute-reporter": {
        "attributes": [{"key": {"name": "tokens"}, "expression": "usage.total_tokens"}]
    },
    # With the default curve a pool as full as this one lets nothing pass.
    "probabilistic-admitter": {"k": 1e-9},
}
"""Parameters of the types that need some to be built, or to let requests pass."""

SESSION_ID: Final = {"strategy": "session_id"}


@dataclass(frozen=True)
class Base:
    """What a plugin is added to: the default configuration and the requests that are placed with it.

    Attributes:
        shed: the requests' objective has a priority below 0, which is what admission looks at.
        picture: the requests show a picture.
    """

    name: str
    shed: bool = False
    picture: bool = False


PLAIN: Final = Base("default")
SHED: Final = Base("default, requests that may be shed", shed=True)
PICTURE: Final = Base("default, requests with a picture", picture=True)
BASES: Final = (PLAIN, SHED, PICTURE)
_OTHER_BASE: Final = {
    "mm-embeddings-cache-producer": PICTURE,
    "mm-embeddings-cache-scorer": PICTURE,
}


@dataclass(frozen=True)
class Addition:
    """One plugin in the default configuration. `detector`: as the detector of admission, not as a filter."""

    label: str
    spec: PluginSpec
    base: Base
    given: Mapping[str, Any] = field(default_factory=dict)
    detector: bool = False


def additions(registry: Registry) -> list[Addition]:
    """Every supported type that takes part in a choice or its answer, each once; some in two ways.

    Raises:
        LookupError: a type has required parameters and none in `MINIMAL`.
    """
    found: list[Addition] = []
    for spec in registry.specs.values():
        newer = registry.specs.get(spec.replaced_by or "")
        if spec.kind not in KINDS or (newer is not None and newer.params is spec.params):
            continue
        given = MINIMAL.get(spec.type)
        if given is None and any(row.default == "required" for row in parameters(spec.params) if _top(row)):
            raise LookupError(f"{spec.type} has required parameters: give it some in MINIMAL")
        base = SHED if spec.kind is Kind.ADMITTER else _OTHER_BASE.get(spec.type, PLAIN)
        plain = Addition(spec.type, spec, base, given or {})
        found.append(plain)
        if spec.kind is Kind.SATURATION_DETECTOR:
            found[-1] = replace(plain, label=f"{spec.type} as filter")
            found.append(replace(plain, label=f"{spec.type} in admission", base=SHED, detector=True))
        if spec.type.startswith("session-affinity-"):
            found.append(replace(plain, label=f"{spec.type}, session_id", given=SESSION_ID))
    return found


def _top(row: tuple[str, str, str]) -> bool:
    return "." not in row[0] and "[" not in row[0]


# -- configurations ---------------------------------------------------------------------------------


def configuration(base: Base, addition: Addition | None = None) -> LoadedConfig:
    """The default one, or the same written out, with what `base` needs and the plugin of `addition`."""
    if base is PLAIN and addition is None:
        return default_config()
    return load_config(json.dumps(document(base, addition)), addition.label if addition else base.name)


def document(base: Base, addition: Addition | None) -> dict[str, Any]:
    """The file of `configuration`."""
    plugins = [{"type": scorer} for scorer, _ in DEFAULT_SCORERS]
    uses: list[dict[str, Any]] = [
        {"pluginRef": scorer, "weight": weight} for scorer, weight in DEFAULT_SCORERS
    ]
    written: dict[str, Any] = {
        "apiVersion": names.API_VERSION,
        "kind": names.CONFIG_KIND,
        "plugins": plugins,
        "schedulingProfiles": [{"name": "default", "plugins": uses}],
    }
    if base.shed:
        written["objectives"] = [{"name": "batch", "priority": -1}]
    if addition is not None:
        kind = addition.spec.kind
        # Scorers and producers of the default configuration are measured by having them twice.
        name = f"{addition.spec.type}-{'added' if kind in (Kind.SCORER, Kind.PRODUCER) else 'chosen'}"
        plugins.append({"type": addition.spec.type, "name": name, "parameters": addition.given})  # type: ignore[dict-item]
        if addition.detector:
            written["flowControl"] = {"saturationDetector": {"pluginRef": name}}
        elif kind in IN_PROFILES:
            uses.append({"pluginRef": name})
    return written


# -- one picker a configuration ---------------------------------------------------------------------


class Bench:
    """A director with one configuration over a pool of its own, in which every figure is told."""

    def __init__(self, loaded: LoadedConfig, count: int) -> None:
        ledger = InflightLedger(FIRST_CAPACITY)
        store = PoolStore(busy=ledger.busy)
        self.assembly: Assembly = build(loaded, store.view, secret=bytes(32))
        store.add_attributes(self.assembly.attributes)
        for member in self.assembly.members:
            store.add_member(member)
        now = time.monotonic()
        store.sync(_endpoints(count), now)
        ledger.resize(store.view.capacity)
        _scraped(store, now)
        self.director = Director(
            store,
            ledger,
            self.assembly.plugins,
            picker.NoRecorder(),
            random.Random(7),
            max_body_bytes=picker.BODY_BYTES,
        )

    def turn(self, raws: Sequence[RawRequest], warm: int) -> tuple[float, float]:
        """CPU us of placing one request, and of its answer, after the first `warm` ones."""
        self._answer(self._place(raws[:warm]))
        timed = raws[warm:]
        began = time.process_time()
        placements = self._place(timed)
        chosen = time.process_time()
        self._answer(placements)
        ended = time.process_time()
        return (chosen - began) / len(timed) * 1e6, (ended - chosen) / len(timed) * 1e6

    def _place(self, raws: Iterable[RawRequest]) -> list[Placement]:
        director, placements = self.director, []
        for raw in raws:
            now = time.monotonic()
            prepared = director.prepare(raw, now)
            if prepared.needs:
                prepared = director.satisfied(prepared, [_window_of_one(need) for need in prepared.needs])
            placements.append(picker.placed(director.submit(prepared, now)))
        return placements

    def _answer(self, placements: Iterable[Placement]) -> None:
        director, usage = self.director, Usage(230, 96, 176)
        reported = bool(self.assembly.plugins.reporters)
        completed = Completed(usage, 100, 26_000)
        for placement in placements:
            now = time.monotonic()
            served = placement.serving.endpoints[0].host_port
            director.observe(placement.ticket, AnswerHeaders(200, served, True), now)
            director.observe(placement.ticket, FirstToken(), now)
            if reported:
                director.report(placement.ticket, completed)
            director.observe(placement.ticket, Ended(Cause.NATURAL, usage, 100, 26_000), now)


def _window_of_one(need: Need) -> BurstPlace:
    """Of a window that is over when its first request has come."""
    assert isinstance(need, BurstNeed)
    window, _ = need.producer.enter(need.held)
    need.producer.settle(window)
    return need.held.place


def _endpoints(count: int) -> list[Endpoint]:
    """With labels that every filter keeps."""
    return [
        Endpoint(
            each.uid,
            each.name,
            each.namespace,
            each.address,
            each.port,
            {
                names.ROLE_LABEL: "encode-prefill-decode",
                "llm-d.ai/context-length-range": f"0-{1000 * (1 + number % 8)}",
                _TIER: "gold",
            },
        )
        for number, each in enumerate(picker.endpoints(count))
    ]


def _scraped(store: PoolStore, now: float) -> None:
    """Load below every threshold, adapters, and one figure of its own from each endpoint."""
    draw = random.Random(5)
    for slot, _ in store.roster:
        sample = EngineSample(
            waiting=float(draw.randrange(4)),
            running=float(draw.randrange(20)),
            kv_usage=draw.random() * 0.6,
            block_size=16,
            cache_tokens=picker.CACHE_TOKENS,
            lora=LoraSample(frozenset({traffic.MODEL} if slot % 2 else {"other"}), frozenset(), 4),
            attributes={_FIGURE: 0.2 + draw.random()},
        )
        store.sampled(slot, sample, now)


class Requests:
    """New chats of 1 kB, with every header that some plugin reads."""

    def __init__(self, base: Base, count: int) -> None:
        self._chats = traffic.Chats(BODY_BYTES, seed=11)
        self._picture = base.picture
        self._count = count
        self._number = 0

    def batch(self, size: int) -> list[RawRequest]:
        return [self._next() for _ in range(size)]

    def _next(self) -> RawRequest:
        self._number += 1
        number, body = self._number, next(self._chats)
        if self._picture:
            body = _with_picture(body, number % 20)
        raw = traffic.raw_request(body, number)
        tests = ",".join(_host_port(number + step, self._count) for step in range(3))
        headers = (
            *raw.headers,
            (names.OBJECTIVE[0], "batch"),
            ("x-tier", "gold"),
            ("x-session-id", f"session-{number % 50}"),
            ("x-session-token", b64encode(f"default/pod-{number % self._count}".encode()).decode()),
            ("x-claude-code-session-id", f"agent-{number % 50}"),
            (TEST_ENDPOINT_SELECTION, tests),
        )
        return RawRequest(raw.request_id, raw.method, raw.path, headers, body)


def _host_port(number: int, count: int) -> str:
    """Address and port of one of the pool's endpoints."""
    place = number % count
    return f"10.0.{place // 250}.{place % 250 + 1}:8000"


def _with_picture(body: bytes, number: int) -> bytes:
    chat = json.loads(body)
    said = chat["messages"][-1]["content"]
    url = f"https://pictures.example.com/{number}.png"
    chat["messages"][-1]["content"] = [
        {"type": "text", "text": said},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return json.dumps(chat).encode()


# -- in turns ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """Figures of one picker, one a round: `place` and `answer` in us of CPU a request."""

    place: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)


def in_turns(benches: Mapping[str, Bench], requests: Requests, effort: Effort) -> dict[str, Turns]:
    """Every round the same new requests to all, in an order of its own."""
    size = min(BATCH, effort.inner)
    warm = min(WARM, effort.inner)
    rounds = ROUNDS_A_REPEAT * effort.repeats if effort.repeats > 1 else 1
    turns = {label: Turns() for label in benches}
    if rounds > 1:
        gc.collect()
    order, draw = list(benches), random.Random(3)
    for _ in range(rounds):
        raws = requests.batch(warm + size)
        draw.shuffle(order)
        for label in order:
            place, answer = benches[label].turn(raws, warm)
            turns[label].place.append(place)
            turns[label].answer.append(answer)
    return turns


def more(samples: Sequence[float], references: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of samples minus the references' mean, round by round."""
    means = (statistics.fmean(figures) for figures in zip(*references, strict=True))
    found = sorted(own - mean for own, mean in zip(samples, means, strict=True))
    last = len(found) - 1
    return found[last // 4], statistics.median(found), found[last - last // 4]


def costs(effort: Effort) -> list[Result]:
    """Each plugin among 32 and 512 endpoints against the default in the same rounds."""
    results: list[Result] = []
    for count in POOLS:
        before = _alone(count, effort, "before any other is made")
        added = [row for base in BASES for row in _against(base, count, effort)]
        results += [before, _alone(count, effort, "after all others ran"), *added]
    return results


def _alone(count: int, effort: Effort, when: str) -> Result:
    """The default with nothing beside it. Every type is imported: the registry does that."""
    bench = Bench(default_config(), count)
    turns = in_turns({"default": bench}, Requests(PLAIN, count), effort)["default"]
    detail = {
        "types_imported": float(len(built_in_registry().specs)),
        "plugins_built": float(len(bench.assembly.named)),
        "answer_us": statistics.median(turns.answer),
    }
    return Result(f"default, {when}, {count} endpoints", "us", None, tuple(turns.place), detail=detail)


def _against(base: Base, count: int, effort: Effort) -> Iterator[Result]:
    """The rows of one base: itself, itself again, and every addition to it."""
    mine = [each for each in additions(built_in_registry()) if each.base is base]
    several = min(REFERENCES, effort.repeats)
    references = {f"reference {number}": Bench(configuration(base), count) for number in range(several)}
    again = f"{base.name}, once more"
    benches = {**references, again: Bench(configuration(base), count)}
    for each in mine:
        benches[each.label] = _made(each, count)
    turns = in_turns(benches, Requests(base, count), effort)
    held = [turns[label] for label in references]
    by_round = zip(*(one.place for one in held), strict=True)
    own = tuple(statistics.fmean(figures) for figures in by_round)
    yield Result(f"{base.name}, among the others, {count} endpoints", "us", None, own)
    usual = set(benches[again].assembly.types.values())
    for label in (again, *(each.label for each in mine)):
        low, median, high = more(turns[label].place, [one.place for one in held])
        _, answer, _ = more(turns[label].answer, [one.answer for one in held])
        yield Result(
            f"{label}, {count} endpoints",
            "us",
            None,
            tuple(turns[label].place),
            apart=_company(benches[label].assembly, usual, label),
            detail={
                "more_us": median,
                "more_low_us": low,
                "more_high_us": high,
                "more_for_answer_us": answer,
            },
        )


def _made(addition: Addition, count: int) -> Bench:
    """Placing one request shows that it works at all."""
    try:
        bench = Bench(configuration(addition.base, addition), count)
        bench.turn(Requests(addition.base, count).batch(1), 0)
    except Exception as error:
        error.add_note(f"while trying {addition.label}")
        raise
    return bench


def _company(assembly: Assembly, usual: set[str], label: str) -> str:
    """Which types came with the one that was added, and which gave way to it."""
    present = set(assembly.types.values())
    came = sorted(each for each in present - usual if not label.startswith(each))
    gone = sorted(usual - present)
    notes = ["with " + ", ".join(came)] if came else []
    return "; ".join([*notes, *(["in place of " + ", ".join(gone)] if gone else [])])
