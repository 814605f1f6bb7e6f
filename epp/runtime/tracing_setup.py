"""How spans are sampled and exported, from the environment variables of OpenTelemetry."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Final, NamedTuple

from epp.errors import ConfigError, Problem
from epp.runtime.router import Router

CONSOLE, OTLP = EXPORTERS = ("console", "otlp")
SAMPLER: Final = "parentbased_traceidratio"
DEFAULT_RATIO: Final = 0.1

log = logging.getLogger(__name__)


MakeRouter = Callable[..., Router]


class TracingSetup(NamedTuple):
    """What the environment says.

    Attributes:
        exporter: one of `EXPORTERS`.
        ratio: share of traces that begin here and are sampled, 0 to 1; others follow their parent.
        named: the service has its name from there.
    """

    exporter: str = CONSOLE
    ratio: float = DEFAULT_RATIO
    named: bool = False


def tracing_setup(environment: Mapping[str, str]) -> TracingSetup:
    """As OTEL_TRACES_EXPORTER, OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG say.

    There is one sampler; where another one is named, or a ratio that is none, a tenth is sampled, and the log
    says so.

    Raises:
        ConfigError: an unknown exporter.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER") or CONSOLE
    if exporter not in EXPORTERS:
        wanted = f"write one of {', '.join(EXPORTERS)}"
        raise ConfigError(
            "environment", Problem("OTEL_TRACES_EXPORTER", f"{exporter!r} is unknown; {wanted}")
        )
    named = bool(environment.get("OTEL_SERVICE_NAME")) or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return TracingSetup(exporter, _ratio(environment), named)


def _ratio(environment: Mapping[str, str]) -> float:
    sampler = environment.get("OTEL_TRACES_SAMPLER") or SAMPLER
    if sampler != SAMPLER:
        log.warning(
            "OTEL_TRACES_SAMPLER names a sampler that is not there; a tenth of the traces is sampled",
            extra={"given": sampler, "right": SAMPLER},
        )
        return DEFAULT_RATIO
    given = environment.get("OTEL_TRACES_SAMPLER_ARG") or str(DEFAULT_RATIO)
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        log.warning(
            "OTEL_TRACES_SAMPLER_ARG is no share; a tenth of the traces is sampled",
            extra={"given": given, "right": "a number from 0 to 1"},
        )
        return DEFAULT_RATIO
    return ratio


@contextmanager
def router_maker(setup: TracingSetup | None) -> Iterator[MakeRouter]:
    """What makes the router: one with spans, where there is a `setup`. At the end they are exported.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if setup is None:
        yield Router
        return
    try:
        from epp.runtime.tracing import TracedRouter, Tracing, exported_by
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        missing = "needs OpenTelemetry, which is not installed: pip install 'warmroute[otel]'"
        raise ConfigError("command line", Problem("--tracing", missing)) from None
    tracing = Tracing(exported_by(setup, version("warmroute")))
    try:
        yield partial(TracedRouter, tracing)
    finally:
        tracing.close()
