"""How long plugins take, measured on the few requests for which `Plugins.sampled` stands in.

The others call their plugins as they are, so timing costs them nothing. Filters, scorers and pickers are
timed where profiles run them.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from epp.config.load import Assembly
from epp.director import Plugins
from epp.runtime.metrics import Metrics
from epp.scheduling.records import AnswerFact, AnswerHeaders, Ended, Ticket

_POINTS: Final = (
    # Field of `Plugins`, method of its plugins, extension point as the field calls it.
    ("request_hooks", "read", "RequestHeader"),
    ("screeners", "screen", "Screener"),
    ("producers", "produce", "DataProducer"),
    ("admitters", "admit", "Admission"),
    ("placed", "placed", "PreRequest"),
    ("reporters", "report", "ResponseComplete"),
)
_HANDLER: Final = "ProfileHandler"

Clock = Callable[[], float]
_Call = Callable[..., Any]


class Timed(SimpleNamespace):
    """Stands in for `plugin`: has the one method that is called, and measures it."""

    plugin: object


def timed_plugins(assembly: Assembly, metrics: Metrics, clock: Clock) -> Plugins:
    """The assembly's plugins, with those for sampled requests."""
    plugins, timing = assembly.plugins, _Timing(assembly, metrics, clock)
    stand_ins: dict[str, Any] = {
        field: tuple(timing.stand_in(plugin, method, point) for plugin in getattr(plugins, field))
        for field, method, point in _POINTS
    }
    stand_ins["answered"] = tuple(map(timing.answered, plugins.answered))
    stand_ins["handler"] = timing.stand_in(plugins.handler, "place", _HANDLER)
    return replace(plugins, sampled=replace(plugins, **stand_ins))


class _Timing:
    def __init__(self, assembly: Assembly, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._labels = {id(plugin): (assembly.types[name], name) for name, plugin in assembly.named.items()}

    def stand_in(self, plugin: object, method: str, point: str) -> Timed:
        return Timed(plugin=plugin, **{method: self._measured(getattr(plugin, method), plugin, point)})

    def answered(self, plugin: Any) -> Timed:
        headers, streaming, complete = (
            self._measured(plugin.observe, plugin, point)
            for point in ("ResponseReceived", "ResponseStreaming", "ResponseComplete")
        )

        def observe(ticket: Ticket, fact: AnswerFact, now: float) -> Any:
            match fact:
                case AnswerHeaders():
                    return headers(ticket, fact, now)
                case Ended():
                    return complete(ticket, fact, now)
                case _:
                    return streaming(ticket, fact, now)

        return Timed(plugin=plugin, observe=observe)

    def _measured(self, call: _Call, plugin: object, point: str) -> _Call:
        labels = (point, *self._labels.get(id(plugin), (type(plugin).__name__, type(plugin).__name__)))
        clock, metrics = self._clock, self._metrics

        def measured(*arguments: Any) -> Any:
            began = clock()
            try:
                return call(*arguments)
            finally:
                metrics.histogram("plugin_duration_seconds", *labels).observe(clock() - began)

        return measured


def real(plugin: object) -> object:
    """The plugin itself, where a stand-in is given."""
    return plugin.plugin if isinstance(plugin, Timed) else plugin
