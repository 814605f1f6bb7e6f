"""Every engine's pages, and those of configured engines, against Prometheus' own parser."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from epp.pool import metrics_page
from epp.pool.engines import ENGINES, CacheInfo, CustomMetric, EngineSpec, MetricSpec
from epp.pool.metrics_page import NO_LORA, EngineSample, LoraSample, PageReader

CUSTOM = EngineSpec(
    "custom",
    waiting=(MetricSpec.parse("q{status=waiting}"), MetricSpec.parse("old_q")),
    running=(MetricSpec.parse('q{status="running",tier=gold}'),),
    kv_usage=(MetricSpec.parse("cache_use"),),
    lora=MetricSpec.parse("adapters_info{pool=a}"),
    cache_info=CacheInfo(MetricSpec.parse("cache_info"), "size", "count"),
    custom=(
        CustomMetric("depth", MetricSpec.parse(r'q{note="say \"}\" \\"}')),
        CustomMetric("heat", MetricSpec.parse("heat")),
    ),
)


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    value: str
    stamp: str


@dataclass(frozen=True)
class Family:
    name: str
    type: str
    help: str
    series: list[Series]


def specs(engine: EngineSpec) -> list[MetricSpec]:
    return [
        *engine.waiting,
        *engine.running,
        *engine.kv_usage,
        *engine.block_size,
        *engine.num_blocks,
        *engine.prefix_hits,
        *engine.prefix_queries,
        *([engine.lora] if engine.lora else []),
        *([engine.cache_info.metric] if engine.cache_info else []),
        *(custom.metric for custom in engine.custom),
    ]


def labels_of(engine: EngineSpec, name: str) -> dict[str, list[str]]:
    """Labels that matter for a metric, with values that matter."""
    found: dict[str, list[str]] = {"engine": ["0", "1"], "note": [name, "a } 9", 'say "}" \\', "x\ny", "é,="]}
    for spec in specs(engine):
        if spec.name == name:
            for label, value in spec.labels:
                found.setdefault(label, ["other", ""]).append(value)
    if engine.lora and name == engine.lora.name:
        found |= {"max_lora": ["2", "x"], "running_lora_adapters": ["", "a", "a, b"]}
        found |= {"waiting_lora_adapters": ["", "b", ",c,"]}
    if engine.cache_info and name == engine.cache_info.metric.name:
        sizes = ["16", "32", "None", "0", "-1", ""]
        found |= {engine.cache_info.block_size_label: sizes, engine.cache_info.num_blocks_label: sizes}
    return found


values = st.sampled_from(
    ["0", "1", "2.0", "16", "64.0", "0.25", "7e0", "1e3", "12.5", "16", "64.0", "0.25", "3"]
    + ["NaN", "+Inf", "-1", "1e999"]
)
stamps = st.sampled_from(["", "", "", " 1395066363000"])
types = st.sampled_from(["gauge", "gauge", "gauge", "counter", "untyped", ""])


@st.composite
def families(draw: st.DrawFn, engine: EngineSpec) -> list[Family]:
    wanted = sorted({spec.name for spec in specs(engine)})
    decoys = [f"{wanted[0]}_more", f"x{wanted[0]}", "other"]
    made = []
    for name in draw(st.permutations(wanted + decoys)):
        choices = labels_of(engine, name)
        labels = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in choices.items()})
        series = draw(st.lists(st.builds(Series, labels, values, stamps), max_size=3))
        made.append(Family(name, draw(types), draw(st.sampled_from(["", f"{wanted[0]} 9"])), series))
    return made


def rendered(made: Iterable[Family]) -> str:
    lines = []
    for family in made:
        if family.help:
            lines.append(f"# HELP {family.name} {family.help}")
        if family.type:
            lines.append(f"# TYPE {family.name} {family.type}")
        for series in family.series:
            inside = ",".join(f'{label}="{escaped(value)}"' for label, value in series.labels.items())
            lines.append(f"{family.name}{{{inside}}} {series.value}{series.stamp}")
    return "# HELP page Is one.\n" + "\n".join(lines) + "\n"


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Oracle:
    """What an engine's page says, by a general parser."""

    def __init__(self, page: str) -> None:
        self.series: dict[str, list[tuple[dict[str, str], float]]] = {}
        self.counters: set[str] = set()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                # The parser gives a counter's samples this ending, which the page did not have.
                counter = family.type == "counter" and not family.name.endswith("_total")
                name = sample.name.removesuffix("_total") if counter else sample.name
                if counter and f"\n{name}_total{{" in page:
                    name = sample.name
                self.series.setdefault(name, []).append((sample.labels, sample.value))
                if family.type == "counter":
                    self.counters.add(name)

    def matching(self, spec: MetricSpec) -> list[tuple[dict[str, str], float]]:
        return [
            (labels, value)
            for labels, value in self.series.get(spec.name, [])
            if all(labels.get(label) == wanted for label, wanted in spec.labels)
        ]

    def first(self, alternatives: Iterable[MetricSpec], *, now: bool = False) -> list[float] | None:
        for spec in alternatives:
            found = [value for _, value in self.matching(spec)]
            if now and spec.name in self.counters:
                continue
            if found and all(0 <= value < math.inf for value in found):
                return found
        return None

    def sample(self, engine: EngineSpec) -> EngineSample:
        kv_usage = self.first(engine.kv_usage, now=True)
        block_size, cache_tokens = self.cache(engine)
        waiting, running = self.first(engine.waiting, now=True), self.first(engine.running, now=True)
        hits, queries = self.first(engine.prefix_hits), self.first(engine.prefix_queries)
        attributes = {}
        for custom in engine.custom:
            found = [value for _, value in self.matching(custom.metric)]
            if found and all(map(math.isfinite, found)):
                attributes[custom.attribute] = sum(found)
        return EngineSample(
            waiting=None if waiting is None else sum(waiting),
            running=None if running is None else sum(running),
            kv_usage=None if kv_usage is None else min(math.fsum(kv_usage) / len(kv_usage), 1.0),
            block_size=block_size,
            cache_tokens=cache_tokens,
            hit_tokens=None if hits is None else sum(hits),
            query_tokens=None if queries is None else sum(queries),
            lora=self.lora(engine),
            attributes=attributes,
        )

    def cache(self, engine: EngineSpec) -> tuple[int | None, int | None]:
        told = []
        for labels, _ in self.matching(engine.cache_info.metric) if engine.cache_info else []:
            assert engine.cache_info
            size = labels.get(engine.cache_info.block_size_label, "")
            count = labels.get(engine.cache_info.num_blocks_label, "")
            if size.isdigit() and int(size):
                told.append((int(size), int(size) * int(count) if count.isdigit() and int(count) else None))
        if told:
            return max(told, key=lambda each: each[1] or 0)
        sizes, counts = self.first(engine.block_size), self.first(engine.num_blocks)
        if sizes is None or not all(size >= 1 and size == int(size) for size in sizes):
            return None, None
        whole = counts is not None and all(count >= 1 and count == int(count) for count in counts)
        if not whole or counts is None or len(counts) != len(sizes):
            return int(max(sizes)), None
        return int(max(sizes)), int(sum(a * b for a, b in zip(sizes, counts, strict=True)))

    def lora(self, engine: EngineSpec) -> LoraSample | None:
        if engine.lora is None:
            return None
        found = [each for each in self.matching(engine.lora) if 0 <= each[1] < math.inf]
        if not found:
            return NO_LORA
        labels, _ = max(found, key=lambda each: each[1])
        running, waiting = (
            frozenset(filter(None, map(str.strip, labels.get(f"{state}_lora_adapters", "").split(","))))
            for state in ("running", "waiting")
        )
        most = labels.get("max_lora", "")
        return LoraSample(running, waiting, int(most) if most.isdigit() else 0)


def pages(*engines: EngineSpec) -> st.SearchStrategy[tuple[EngineSpec, str]]:
    return st.sampled_from(engines).flatmap(
        lambda engine: st.tuples(st.just(engine), families(engine).map(rendered))
    )


def agrees(engine: EngineSpec, page: str) -> None:
    told = PageReader(engine).read(page.encode())
    expected = Oracle(page).sample(engine)
    for field in EngineSample.__struct_fields__:
        if field != "counters":
            assert getattr(told, field) == getattr(expected, field), field


@settings(max_examples=60)
@given(pages(*ENGINES, CUSTOM))
def test_the_reader_agrees_with_a_general_parser(case: tuple[EngineSpec, str]) -> None:
    agrees(*case)


def only_the_first_alternative(patch: pytest.MonkeyPatch) -> None:
    first = metrics_page._first
    patch.setattr(metrics_page, "_first", lambda found, series: first(found, series[:1]))


def only_the_first_series(patch: pytest.MonkeyPatch) -> None:
    every = metrics_page._values
    patch.setattr(metrics_page, "_values", lambda lines, least=0.0: every(lines[:1], least))


def labels_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metrics_page._Series, "_is_wanted", lambda self, line: True)


def counters_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metrics_page, "_declared_counter", lambda page, at, name: False)


def any_number_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metrics_page, "_amount", lambda text, least=0.0: float(text))


def names_may_go_on(patch: pytest.MonkeyPatch) -> None:
    def lines_of(names: set[bytes]) -> re.Pattern[bytes]:
        return re.compile(rb"\n(" + b"|".join(map(re.escape, sorted(names))) + rb")([^\n]*)")

    patch.setattr(metrics_page, "_lines_of", lines_of)


def labels_end_at_the_first_brace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metrics_page, "_SAMPLE", re.compile(rb"[ \t]*(\{[^}]*\})?[ \t]*([^\s#]+)"))


def the_first_adapters_stay(patch: pytest.MonkeyPatch) -> None:
    lines = metrics_page._Series.lines
    patch.setattr(metrics_page._Series, "lines", lambda self, found: lines(self, found)[:1])


LORA_ONLY = EngineSpec("lora", lora=MetricSpec("adapters_info"))
QUEUE_ONLY = EngineSpec("queue", waiting=(MetricSpec("q"),))

FAULTS = [
    (only_the_first_alternative, CUSTOM),
    (only_the_first_series, QUEUE_ONLY),
    (labels_do_not_matter, CUSTOM),
    (counters_are_believed, QUEUE_ONLY),
    (any_number_will_do, QUEUE_ONLY),
    (names_may_go_on, QUEUE_ONLY),
    (labels_end_at_the_first_brace, QUEUE_ONLY),
    (the_first_adapters_stay, LORA_ONLY),
]


@pytest.mark.parametrize(("fault", "engine"), FAULTS)
def test_a_faulty_reader_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], engine: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)

    @settings(phases=[Phase.generate], max_examples=400)
    @given(pages(engine))
    def search(case: tuple[EngineSpec, str]) -> None:
        agrees(*case)

    with pytest.raises((AssertionError, ValueError)):
        search()
