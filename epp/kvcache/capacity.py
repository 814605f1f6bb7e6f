"""How large an engine's prefix cache really is, learned from what the engine says about hits.

An engine states its cache size in its metrics, but what a prompt may count on is another number: running
requests and their output fill blocks too, other routers send requests, an estimated token is not a counted
one. `CacheEstimate` scales the stated size by two factors, each learned for one endpoint:

- `token_ratio`: counted over estimated prompt tokens, from usage. The index counts in estimated tokens, so
  its capacity is the stated size divided by the ratio. It is kept by endpoint, since the models (adapters)
  that share a cache fill it together, in the mix in which they are asked for.
- `gain`: lowered where prompts were expected to be cached and were not, raised where blocks that the index
  had evicted turned out to be there still.

Why the capacity and not the chain: when usage arrives, the engine has just computed the whole prompt and
holds it, whatever it lacked before, so the chain's entry is right again. What was wrong is the belief that
blocks as old as the missing ones are still there. In an LRU cache everything older than a missing block
is gone as well; a lower capacity evicts just that.
"""

from dataclasses import dataclass, field
from math import isnan, nan

from epp.payload.records import Usage

GAIN_MIN, GAIN_MAX = 0.1, 1.5
# Relative change of the gain per unit of error, and the error that counts as none: for one request's usage,
# and for a window of the counters, which averages over many.
REPORT_STEP, REPORT_BAND = 0.05, 0.1
WINDOW_STEP, WINDOW_BAND = 0.2, 0.05
WINDOW_TOKENS = 4096
# A window says something if the engine was asked for this many times what was sent from here.
OWN_TRAFFIC = (0.5, 2.0)
RATIO_MIN, RATIO_MAX = 0.25, 4.0
RATIO_MEMORY = 0.98
RATIO_PRIOR_TOKENS = 4096.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the index expects of requests on one endpoint, in estimated tokens.

    Attributes:
        prompt: all prompt tokens.
        cached: those believed to be cached.
        regretted: at most so many more could be, because the index held the next block once and evicted it.
        tolerance: what rounding to blocks explains.
    """

    prompt: int = 0
    cached: int = 0
    regretted: int = 0
    tolerance: int = 0

    def __add__(self, other: "Forecast") -> "Forecast":
        return Forecast(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.regretted + other.regretted,
            self.tolerance + other.tolerance,
        )

    def __sub__(self, other: "Forecast") -> "Forecast":
        return Forecast(
            self.prompt - other.prompt,
            self.cached - other.cached,
            self.regretted - other.regretted,
            self.tolerance - other.tolerance,
        )

    def error(self, cached_share: float, band: float) -> float:
        """How far a measured share of cached tokens lies from the expected one, for reasons of capacity.

        Negative: the cache is smaller than believed. Positive: larger; limited to what the index evicted,
        since more than that was cached by others or as output. 0 within `band`, the dead band.
        """
        if self.prompt <= 0:
            return 0.0
        error = cached_share - self.cached / self.prompt
        if abs(error) <= max(band, self.tolerance / self.prompt):
            return 0.0
        return min(error, self.regretted / self.prompt)


@dataclass(slots=True)
class CacheEstimate:
    """One endpoint's cache.

    Attributes:
        stated_tokens: the size the engine (or the configuration) states.
        reports_cached: the endpoint's usage tells cached tokens; its counters are not needed then.
        gain: kept over a restart of the engine, since it tells of load and settings, not of contents.
    """

    stated_tokens: int
    gain: float = 1.0
    reports_cached: bool = False
    _estimated_tokens: float = RATIO_PRIOR_TOKENS
    _counted_tokens: float = RATIO_PRIOR_TOKENS
    _window: Forecast = field(default_factory=Forecast)
    _hits: float = nan
    _queries: float = nan

    @property
    def token_ratio(self) -> float:
        """Counted over estimated prompt tokens."""
        return min(max(self._counted_tokens / self._estimated_tokens, RATIO_MIN), RATIO_MAX)

    def blocks(self, block_tokens: int) -> int:
        """The corrected size in blocks of `block_tokens` estimated tokens."""
        return int(self.stated_tokens * self.gain / self.token_ratio / block_tokens)

    def expect(self, forecast: Forecast) -> None:
        """A request was sent: the engine's counters will show it."""
        self._window += forecast

    def withdraw(self, forecast: Forecast) -> None:
        """A request did not reach the endpoint after all."""
        self._window -= forecast

    def learn_from_usage(self, forecast: Forecast, usage: Usage, complete: bool) -> None:
        """The engine's own account of one request.

        Args:
            complete: the answer came to its natural end. Some versions of vLLM leave `cached_tokens` out
                where it is zero: on an endpoint known to report, absence in a complete answer means zero.
        """
        if usage.prompt_tokens <= 0 or forecast.prompt <= 0:
            return
        self._estimated_tokens = self._estimated_tokens * RATIO_MEMORY + forecast.prompt
        self._counted_tokens = self._counted_tokens * RATIO_MEMORY + usage.prompt_tokens
        cached = usage.cached_tokens
        if cached is None:
            if not (self.reports_cached and complete):
                return
            cached = 0
        self.reports_cached = True
        self._adapt(REPORT_STEP * forecast.error(cached / usage.prompt_tokens, REPORT_BAND))

    def learn_from_counters(self, hits: float, queries: float) -> bool:
        """The engine's prefix-cache counters (tokens since its start; NaN = unknown), read every few seconds.

        Compares shares, not sums: a request sent may be counted in the next window, and in other tokens.
        Says nothing about capacity where far more or less was asked than was sent from here.

        Returns:
            True if the engine was restarted since the last call: its cache is empty.
        """
        if isnan(hits) or isnan(queries):
            return False
        restarted = queries < self._queries or hits < self._hits
        asked = queries - self._queries
        if restarted or isnan(asked):
            self._start_window(hits, queries)
        elif asked >= WINDOW_TOKENS:
            sent = self._window.prompt * self.token_ratio
            own_traffic = sent > 0 and OWN_TRAFFIC[0] <= asked / sent <= OWN_TRAFFIC[1]
            if own_traffic and not self.reports_cached:
                error = self._window.error((hits - self._hits) / asked, WINDOW_BAND)
                self._adapt(WINDOW_STEP * error)
            self._start_window(hits, queries)
        return restarted

    def _start_window(self, hits: float, queries: float) -> None:
        self._hits, self._queries, self._window = hits, queries, Forecast()

    def _adapt(self, relative: float) -> None:
        self.gain = min(max(self.gain * (1 + relative), GAIN_MIN), GAIN_MAX)
