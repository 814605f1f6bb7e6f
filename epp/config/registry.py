"""Which plugin types there are: built in, known but not supported yet, offered by installed packages."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from epp.config.spec import KnownType, PluginSpec
from epp.config.tables import data, filters, flow, handlers, hooks, parsers, producers, scorers

ENTRY_POINT_GROUP: Final = "warmroute.plugins"

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    *filters.BUILT_INS,
    *scorers.BUILT_INS,
    *handlers.BUILT_INS,
    *producers.BUILT_INS,
    *data.BUILT_INS,
    *parsers.BUILT_INS,
    *flow.BUILT_INS,
    *hooks.BUILT_INS,
)

NOT_YET: Final[tuple[KnownType, ...]] = (
    *filters.LATER,
    *scorers.LATER,
    *handlers.LATER,
    *producers.LATER,
    *data.LATER,
    *flow.LATER,
    *hooks.LATER,
)


class PluginImportError(Exception):
    """A package offers the type but its specification cannot be had."""


def _installed(type_name: str) -> Iterable[tuple[str, Callable[[], object]]]:
    """Entry points of that name: where each points, and how to load it."""
    found = entry_points(group=ENTRY_POINT_GROUP, name=type_name)
    return [(point.value, point.load) for point in found]


def _offered() -> Iterable[str]:
    """Every type that other packages offer."""
    return entry_points(group=ENTRY_POINT_GROUP).names


@dataclass(frozen=True, slots=True)
class Registry:
    """Plugin types by name. `installed` lists what other packages offer under a name, `offered` all names."""

    specs: Mapping[str, PluginSpec]
    not_yet: Mapping[str, KnownType]
    installed: Callable[[str], Iterable[tuple[str, Callable[[], object]]]] = _installed
    offered: Callable[[], Iterable[str]] = _offered

    def find(self, type_name: str) -> PluginSpec | KnownType | None:
        """What `type_name` is; None = unknown. Code of other packages is loaded only when asked for by name.

        Raises:
            PluginImportError: an installed package offers the type, but not a usable `PluginSpec`.
        """
        if (spec := self.specs.get(type_name)) is not None:
            return spec
        offers = list(self.installed(type_name))
        if len(offers) > 1:
            places = " and ".join(place for place, _ in offers)
            raise PluginImportError(f"offered twice, by {places}; uninstall one")
        for place, load in offers:
            return _loaded(type_name, place, load)
        return self.not_yet.get(type_name)

    def every(self) -> Iterator[PluginSpec]:
        """All that can be used; loads code of other packages.

        Raises:
            PluginImportError: as `find`.
        """
        yield from self.specs.values()
        for type_name in sorted(set(self.offered())):
            if type_name not in self.specs and isinstance(spec := self.find(type_name), PluginSpec):
                yield spec

    def types(self) -> list[str]:
        """Every supported type, then every other known one."""
        return [*self.specs, *self.not_yet]


def _loaded(type_name: str, place: str, load: Callable[[], object]) -> PluginSpec:
    try:
        spec = load()
    except Exception as error:
        raise PluginImportError(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(spec, PluginSpec) or spec.type != type_name:
        raise PluginImportError(f"{place} is not the PluginSpec of {type_name}")
    return spec


def built_in_registry() -> Registry:
    """The types above, and those of installed packages."""
    return Registry({spec.type: spec for spec in BUILT_INS}, {known.type: known for known in NOT_YET})
