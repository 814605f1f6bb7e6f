"""Reads the few numbers that matter from an engine's metrics page, without parsing the rest.

A page of vLLM has some 700 lines and 50 kB; a general parser takes 10 ms for it. One regular expression
with a literal start finds the wanted lines in the bytes; only those are looked into.
"""

import math
import re
from collections.abc import Iterable
from typing import Final

import msgspec

from epp.errors import PageError

_WANTED: Final = re.compile(
    rb"\nvllm:(num_requests_(?:waiting|running)|(?:kv|gpu)_cache_usage_perc|cache_config_info"
    rb"|prefix_cache_(?:hits|queries)_total)(?=[{ \t])([^\n]*)"
)
# The rest of a sample line: labels (whose quoted values may hold any character), then the value.
_VALUE: Final = re.compile(rb'[ \t]*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\})?[ \t]*([^\s#]+)')
_BLOCK_SIZE: Final = re.compile(rb'[{, \t]block_size="(\d{1,7})"')
_NUM_BLOCKS: Final = re.compile(rb'[{, \t]num_gpu_blocks="(\d{1,10})"')
_HEADER: Final = re.compile(rb"\n# (?:HELP|TYPE) ")


class EngineSample(msgspec.Struct, frozen=True):
    """What one page says. None: the page does not tell (or tells no finite number).

    Attributes:
        waiting, running: requests, summed over the page's series (data-parallel ranks, models).
        kv_usage: share of the KV cache in use, 0..1, mean over the ranks.
        block_size: tokens per KV block.
        cache_tokens: tokens the KV caches of all ranks hold together.
        hit_tokens, query_tokens: prefix-cache counters, summed, tokens since the engine's start.
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    block_size: int | None = None
    cache_tokens: int | None = None
    hit_tokens: float | None = None
    query_tokens: float | None = None

    @property
    def untold_load(self) -> tuple[str, ...]:
        """Series a scheduler needs and the page lacks."""
        told = (
            ("vllm:num_requests_waiting", self.waiting),
            ("vllm:num_requests_running", self.running),
            ("vllm:kv_cache_usage_perc", self.kv_usage),
        )
        return tuple(name for name, value in told if value is None)


def read_page(page: bytes) -> EngineSample:
    """Read a metrics page in Prometheus text form with vLLM's names.

    A page without any of them (another engine, a server without one) gives an empty sample.

    Raises:
        PageError: this is no metrics page.
    """
    page = b"\n" + page
    series: dict[bytes, list[bytes]] = {}
    for name, rest in _WANTED.findall(page):
        series.setdefault(name, []).append(rest)
    if not series and not _HEADER.search(page):
        raise PageError(f"not a metrics page, it starts with {page[1:41]!r}" if page[1:] else "empty page")

    kv_usage = _values(series.get(b"kv_cache_usage_perc", ()))
    if kv_usage is None:
        kv_usage = _values(series.get(b"gpu_cache_usage_perc", ()))
    block_size, cache_tokens = _cache_size(series.get(b"cache_config_info", ()))
    return EngineSample(
        waiting=_sum(series.get(b"num_requests_waiting", ())),
        running=_sum(series.get(b"num_requests_running", ())),
        kv_usage=None if kv_usage is None else min(math.fsum(kv_usage) / len(kv_usage), 1.0),
        block_size=block_size,
        cache_tokens=cache_tokens,
        hit_tokens=_sum(series.get(b"prefix_cache_hits_total", ())),
        query_tokens=_sum(series.get(b"prefix_cache_queries_total", ())),
    )


def _values(lines: Iterable[bytes]) -> list[float] | None:
    """The value of every line; None without lines, or when one of them is no finite amount.

    One unreadable rank makes the family unknown: a sum without it would pass for a short queue.
    """
    values = []
    for line in lines:
        match = _VALUE.match(line)
        if match is None:
            return None
        try:
            value = float(match[1])
        except ValueError:
            return None
        if not 0.0 <= value < math.inf:
            return None
        values.append(value)
    return values or None


def _sum(lines: Iterable[bytes]) -> float | None:
    values = _values(lines)
    if values is None:
        return None
    total = sum(values)
    return total if total < math.inf else None


def _cache_size(lines: Iterable[bytes]) -> tuple[int | None, int | None]:
    """Block size, and tokens of all ranks.

    With data-parallel ranks vLLM writes one line per rank and the sum over all ranks into each of them
    (two ranks of 80 blocks: 160 in both lines), so the largest line counts, not their sum.
    """
    largest: tuple[int | None, int | None] = (None, None)
    for line in lines:
        size, blocks = _BLOCK_SIZE.search(line), _NUM_BLOCKS.search(line)
        block_size = int(size[1]) if size else 0
        if block_size <= 0:
            continue
        tokens = block_size * int(blocks[1]) if blocks else 0
        if largest[0] is None or tokens > (largest[1] or 0):
            largest = block_size, tokens or None
    return largest
