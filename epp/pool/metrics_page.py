"""Reads the few numbers that matter from an engine's metrics page, without parsing the rest.

A page of vLLM has some 700 lines and 50 kB; a general parser takes 10 ms for it. One regular expression
finds the wanted lines in the bytes; only those are looked into.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from epp.errors import PageError
from epp.pool.engines import CacheInfo, EngineSpec, MetricSpec, unescaped

# The rest of a sample line: labels (whose quoted values may hold any character), then the value.
_SAMPLE: Final = re.compile(rb'[ \t]*(\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\})?[ \t]*([^\s#]+)')
_LABEL: Final = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"')
_HEADER: Final = re.compile(rb"\n# (?:HELP|TYPE) ")
_NO_LINES: Final[Sequence[bytes]] = ()
_NO_NAMES: Final[frozenset[str]] = frozenset()
_LEAST_FLOAT: Final = -sys.float_info.max
_MOST_BLOCK_TOKENS: Final = 10**7
_MOST_BLOCKS: Final = 10**10
# Lines that are remembered, since they come again with every page: how many, and how long each at most.
_REMEMBERED: Final = 256
_REMEMBERED_BYTES: Final = 4096
# The series of one metric on the pages of a whole fleet.
_SERIES_REMEMBERED: Final = 2048


class LoraSample(msgspec.Struct, frozen=True):
    """What a page says of LoRA adapters. `most`: how many fit at once, 0 = unknown."""

    running: frozenset[str] = _NO_NAMES
    waiting: frozenset[str] = _NO_NAMES
    most: int = 0


NO_LORA: Final = LoraSample()
_NO_ATTRIBUTES: Final[Mapping[str, float]] = {}


class EngineSample(msgspec.Struct, frozen=True):
    """What one page says. None: the page does not tell (or tells no finite number).

    Attributes:
        waiting, running: requests, summed over the page's series (data-parallel ranks, models).
        kv_usage: share of the KV cache in use, 0..1, mean over the ranks.
        block_size: tokens per KV block.
        cache_tokens: tokens the KV caches of all ranks hold together.
        hit_tokens, query_tokens: prefix-cache counters, summed, tokens since the engine's start.
        lora: None where the engine has no such series; without adapters where it has written none yet.
        attributes: custom metrics the page tells, by attribute key, summed.
        counters: metrics wanted as a figure of now that the page declares counters; they tell nothing.
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    block_size: int | None = None
    cache_tokens: int | None = None
    hit_tokens: float | None = None
    query_tokens: float | None = None
    lora: LoraSample | None = None
    attributes: Mapping[str, float] = _NO_ATTRIBUTES
    counters: tuple[str, ...] = ()

    @property
    def tells_load(self) -> bool:
        return self.waiting is not None or self.running is not None or self.kv_usage is not None


class _Found:
    """The wanted lines of one page. `counters`: those of `gauges` that it declares counters."""

    def __init__(self, page: bytes, wanted: re.Pattern[bytes], gauges: frozenset[bytes]) -> None:
        self.lines: dict[bytes, list[bytes]] = {}
        self.counters: tuple[bytes, ...] = ()
        for match in wanted.finditer(page):
            name = match[1]
            lines = self.lines.get(name)
            if lines is not None:
                lines.append(match[2])
                continue
            self.lines[name] = [match[2]]
            if name in gauges and _declared_counter(page, match.start(), name):
                self.counters += (name,)


class _Series:
    """The series of one `MetricSpec`, as bytes."""

    __slots__ = ("_labels", "name")

    def __init__(self, spec: MetricSpec) -> None:
        self.name = spec.name.encode()
        self._labels = tuple((label.encode(), value) for label, value in spec.labels)

    def lines(self, found: _Found) -> Sequence[bytes]:
        lines = found.lines.get(self.name, _NO_LINES)
        return [line for line in lines if self._is_wanted(line)] if self._labels and lines else lines

    def _is_wanted(self, line: bytes) -> bool:
        labels = _labels(line)
        return all(_text(labels.get(label)) == value for label, value in self._labels)


class PageReader:
    """Reads the pages of one kind of engine."""

    def __init__(self, engine: EngineSpec) -> None:
        self.engine = engine
        self._waiting = _series(engine.waiting)
        self._running = _series(engine.running)
        self._kv_usage = _series(engine.kv_usage)
        self._lora = None if engine.lora is None else _Lora(engine.lora)
        self._cache_info = None if engine.cache_info is None else _CacheLabels(engine.cache_info)
        self._block_size = _series(engine.block_size)
        self._num_blocks = _series(engine.num_blocks)
        self._hits = _series(engine.prefix_hits)
        self._queries = _series(engine.prefix_queries)
        self._custom = tuple((custom.attribute, _Series(custom.metric)) for custom in engine.custom)
        self._gauges = frozenset(
            spec.name.encode() for spec in (*engine.waiting, *engine.running, *engine.kv_usage)
        )
        self._wanted = _wanted(engine)

    def read(self, page: bytes) -> EngineSample:
        """Read a metrics page in Prometheus text form.

        A page without any of the engine's names (another engine, a server without one) gives an empty sample.

        Raises:
            PageError: this is no metrics page.
        """
        page = b"\n" + page
        found = _Found(page, self._wanted, self._gauges)
        if not found.lines and not _HEADER.search(page):
            raise _no_page(page)
        kv_usage = _now(found, self._kv_usage)
        block_size, cache_tokens = self._cache(found)
        return EngineSample(
            waiting=_sum(_now(found, self._waiting)),
            running=_sum(_now(found, self._running)),
            kv_usage=None if kv_usage is None else min(math.fsum(kv_usage) / len(kv_usage), 1.0),
            block_size=block_size,
            cache_tokens=cache_tokens,
            hit_tokens=_sum(_first(found, self._hits)),
            query_tokens=_sum(_first(found, self._queries)),
            lora=None if self._lora is None else self._lora.read(found),
            attributes=self._attributes(found) if self._custom else _NO_ATTRIBUTES,
            counters=tuple(map(bytes.decode, found.counters)),
        )

    def untold(self, sample: EngineSample) -> tuple[str, ...]:
        """Metrics a scheduler needs and the page lacks: of the load, and custom ones that are not optional.

        What the page declares a counter is not among them; `EngineSample.counters` names it.
        """
        engine = self.engine
        figures = (
            (engine.waiting, sample.waiting),
            (engine.running, sample.running),
            (engine.kv_usage, sample.kv_usage),
        )
        return (
            *(
                str(specs[0])
                for specs, value in figures
                if specs and value is None and specs[0].name not in sample.counters
            ),
            *(
                str(custom.metric)
                for custom in engine.custom
                if not custom.optional and custom.attribute not in sample.attributes
            ),
        )

    def _cache(self, found: _Found) -> tuple[int | None, int | None]:
        """Block size, and tokens of all ranks."""
        if self._cache_info is not None:
            told = self._cache_info.read(found)
            if told[0] is not None:
                return told
        if not self._block_size:
            return None, None
        sizes = _whole(_first(found, self._block_size), _MOST_BLOCK_TOKENS)
        if sizes is None:
            return None, None
        blocks = _whole(_first(found, self._num_blocks), _MOST_BLOCKS)
        # Ranks (or models) tell both figures or neither, in one order.
        same = blocks is not None and len(blocks) == len(sizes)
        tokens = sum(size * count for size, count in zip(sizes, blocks or (), strict=True)) if same else None
        return max(sizes), tokens

    def _attributes(self, found: _Found) -> Mapping[str, float]:
        told = {}
        for attribute, series in self._custom:
            value = _sum(_values(series.lines(found), least=_LEAST_FLOAT))
            if value is not None:
                told[attribute] = value
        return told


class _CacheLabels:
    """Reads the size of the cache from the labels of an info series.

    With data-parallel ranks vLLM writes one line per rank and the sum over all ranks into each of them (two
    ranks of 80 blocks: 160 in both lines), so the largest line counts, not their sum.
    """

    def __init__(self, info: CacheInfo) -> None:
        self._series = _Series(info.metric)
        # Only digits are looked for, so the closing quote of another label's value cannot open this one.
        self._block_size = _digits(info.block_size_label, 7)
        self._num_blocks = _digits(info.num_blocks_label, 10)
        # An engine writes the same long line as long as it lives.
        self._size_of = lru_cache(_REMEMBERED)(self._size)

    def read(self, found: _Found) -> tuple[int | None, int | None]:
        largest: tuple[int | None, int | None] = (None, None)
        for line in self._series.lines(found):
            known = len(line) <= _REMEMBERED_BYTES
            block_size, tokens = self._size_of(line) if known else self._size(line)
            if block_size > 0 and (largest[0] is None or tokens > (largest[1] or 0)):
                largest = block_size, tokens or None
        return largest

    def _size(self, line: bytes) -> tuple[int, int]:
        """Tokens of a block and of the cache, 0 = not told."""
        size, blocks = self._block_size.search(line), self._num_blocks.search(line)
        block_size = int(size[1]) if size else 0
        return block_size, block_size * int(blocks[1]) if blocks else 0


class _Lora:
    """Reads the adapters from the series written last: every set of them has its own, which stays."""

    def __init__(self, spec: MetricSpec) -> None:
        self._series = _Series(spec)
        # The same few sets of labels come again and again.
        self._sample_of = lru_cache(_REMEMBERED)(_lora_sample)

    def read(self, found: _Found) -> LoraSample:
        newest, at = b"", -1.0
        for line in self._series.lines(found):
            match = _SAMPLE.match(line)
            written_at = _amount(match[2]) if match is not None else None
            if match is not None and written_at is not None and written_at > at:
                newest, at = match[1] or b"", written_at
        if at < 0:
            return NO_LORA
        return self._sample_of(newest) if len(newest) <= _REMEMBERED_BYTES else _lora_sample(newest)


def _lora_sample(labels: bytes) -> LoraSample:
    told = dict(_LABEL.findall(labels))
    most = told.get(b"max_lora", b"")
    return LoraSample(
        running=_names(told.get(b"running_lora_adapters")),
        waiting=_names(told.get(b"waiting_lora_adapters")),
        most=int(most) if most.isdigit() and len(most) <= 6 else 0,
    )


def _names(value: bytes | None) -> frozenset[str]:
    if not value:
        return _NO_NAMES
    stripped = (name.strip() for name in unescaped(value.decode("utf-8", "replace")).split(","))
    return frozenset(name for name in stripped if name)


class EngineGuess:
    """Tells by its metrics whose page it is, where nobody said so."""

    def __init__(self, engines: Sequence[EngineSpec]) -> None:
        self._engines = [
            (engine.name, {spec.name.encode() for spec in (*engine.waiting, *engine.running)})
            for engine in engines
        ]
        self._load = _lines_of({name for _, names in self._engines for name in names})

    def engine_of(self, page: bytes) -> str | None:
        """The first engine some load metric of which is on the page."""
        seen = {match[1] for match in self._load.finditer(b"\n" + page)}
        return next((name for name, names in self._engines if names & seen), None)


class SeriesReader:
    """Reads all series of one metric, each with its value of one label."""

    def __init__(self, name: str, label: str) -> None:
        self._name = name
        self._label = label.encode()
        self._wanted = _lines_of({name.encode()})
        # Labels stay from page to page, only values change.
        self._text_of = lru_cache(_SERIES_REMEMBERED)(self._text)

    def read(self, page: bytes) -> list[tuple[str | None, float]]:
        """Label (None = the series has none) and value, whatever number that is; empty without a series.

        Raises:
            PageError: this is no metrics page, or a line of the metric is none.
        """
        page = b"\n" + page
        found = []
        for match in self._wanted.finditer(page):
            sample = _SAMPLE.match(match[2])
            try:
                value = float(sample[2] if sample else b"")
            except ValueError:
                raise PageError(f"{match[0][1:81]!r} is not a line of {self._name}") from None
            labels = (sample[1] if sample else None) or b""
            text_of = self._text_of if len(labels) <= _REMEMBERED_BYTES else self._text
            found.append((text_of(labels), value))
        if not found and not _HEADER.search(page):
            raise _no_page(page)
        return found

    def _text(self, labels: bytes) -> str | None:
        return _text(dict(_LABEL.findall(labels)).get(self._label))


# -- lines --------------------------------------------------------------------------------------------


def _wanted(engine: EngineSpec) -> re.Pattern[bytes]:
    specs = [
        *engine.waiting,
        *engine.running,
        *engine.kv_usage,
        *engine.block_size,
        *engine.num_blocks,
        *engine.prefix_hits,
        *engine.prefix_queries,
        *(custom.metric for custom in engine.custom),
    ]
    if engine.lora is not None:
        specs.append(engine.lora)
    if engine.cache_info is not None:
        specs.append(engine.cache_info.metric)
    return _lines_of({spec.name.encode() for spec in specs})


def _lines_of(names: set[bytes]) -> re.Pattern[bytes]:
    """Sample lines of these metrics: name, and what follows it."""
    either = b"|".join(re.escape(name) for name in sorted(names)) or b"(?!)"
    return re.compile(rb"\n(" + either + rb")(?=[{ \t])([^\n]*)")


def _no_page(page: bytes) -> PageError:
    """Of a page with the line break that is put in front of it."""
    return PageError(f"not a metrics page, it starts with {page[1:41]!r}" if page[1:] else "empty page")


def _declared_counter(page: bytes, at: int, name: bytes) -> bool:
    """The line before the metric's first one says that its type is counter."""
    if not page.endswith((b" counter", b" counter\r"), 0, at):
        return False
    words = page[page.rfind(b"\n", 0, at) + 1 : at].split()
    return len(words) == 4 and words[:2] == [b"#", b"TYPE"] and name in (words[2], words[2] + b"_total")


def _digits(label: str, most: int) -> re.Pattern[bytes]:
    return re.compile(rb"[{, \t]" + re.escape(label.encode()) + rb'="(\d{1,%d})"' % most)


def _labels(line: bytes) -> dict[bytes, bytes]:
    found = _SAMPLE.match(line)
    return dict(_LABEL.findall(found[1])) if found is not None and found[1] else {}


def _text(value: bytes | None) -> str | None:
    return None if value is None else unescaped(value.decode("utf-8", "replace"))


def _series(specs: Sequence[MetricSpec]) -> tuple[_Series, ...]:
    return tuple(map(_Series, specs))


# -- values -------------------------------------------------------------------------------------------


def _first(found: _Found, series: tuple[_Series, ...]) -> list[float] | None:
    """The values of the first of the alternatives that the page tells."""
    for each in series:
        values = _values(each.lines(found))
        if values is not None:
            return values
    return None


def _now(found: _Found, series: tuple[_Series, ...]) -> list[float] | None:
    """The same of figures of now, which counters do not tell."""
    if found.counters:
        series = tuple(each for each in series if each.name not in found.counters)
    return _first(found, series)


def _values(lines: Sequence[bytes], least: float = 0.0) -> list[float] | None:
    """The value of every line; None without lines, or when one of them is no finite amount.

    One unreadable rank makes the family unknown: a sum without it would pass for a short queue.
    """
    values = []
    for line in lines:
        match = _SAMPLE.match(line)
        value = None if match is None else _amount(match[2], least)
        if value is None:
            return None
        values.append(value)
    return values or None


def _amount(text: bytes, least: float = 0.0) -> float | None:
    """A finite number of at least `least`."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if least <= value < math.inf else None


def _sum(values: list[float] | None) -> float | None:
    if values is None:
        return None
    total = sum(values)
    return total if -math.inf < total < math.inf else None


def _whole(values: list[float] | None, most: int) -> list[int] | None:
    """Whole numbers from 1 to `most`; None where one is not."""
    if values is None or not all(1 <= value <= most and value.is_integer() for value in values):
        return None
    return [int(value) for value in values]
